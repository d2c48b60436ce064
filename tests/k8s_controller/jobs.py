"""TrainingJobs and job servers' answers, for tests of decisions."""

from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from job_server.api.wire import (
    Account,
    Allotment,
    JobPod,
    JobSpec,
    JobState,
    JobStatus,
    Saved,
)
from k8s_controller.decisions.observed import ListedPod, TrainingNode
from k8s_controller.decisions.spec import TrainingJobSpec, parse
from tests.k8s_controller.cluster.api_server import ApiServer
from tests.support import ROOT


def define_training_jobs(api_server: ApiServer) -> None:
    """Have a server know TrainingJobs, once."""
    store = api_server.store
    definition = yaml.safe_load((ROOT / "manifests" / "crd.yaml").read_text())
    if not any(kind.kind == "TrainingJob" for kind in store.kinds.values()):
        store.create(store.kind("CustomResourceDefinition"), "", definition)


def training_job(name: str = "digits", **spec: Any) -> dict[str, Any]:
    container = {"name": "trainer", "image": "edl", "command": ["python", "train.py"]}
    template = {"spec": {"containers": [container]}}
    return {
        "apiVersion": "paddlepaddle.org/v1",
        "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": "default", "uid": "u-1", "generation": 1},
        "spec": {"template": template, **spec},
    }


def scaled_job(name: str = "digits", cpu: str = "1", **spec: Any) -> dict[str, Any]:
    """Return one with `autoscale`."""
    job = training_job(name, autoscale=True, **spec)
    job["spec"]["template"]["spec"]["containers"][0]["resources"] = {"requests": {"cpu": cpu}}
    return job


def parsed(**spec: Any) -> TrainingJobSpec:
    return parse(training_job(**spec))


def pod(index: int, **fields: Any) -> ListedPod:
    values: dict[str, Any] = {
        "name": f"digits-{index}",
        "uid": f"uid{index:05d}",
        "index": index,
        "phase": "Running",
        "created_at": 990.0,
    }
    return ListedPod(**(values | fields))


def server_pod(**fields: Any) -> ListedPod:
    values: dict[str, Any] = {
        "name": "digits-server",
        "uid": "uid-server",
        "phase": "Running",
        "ready": True,
    }
    return ListedPod(**(values | fields))


def nodes_of(pods: Iterable[ListedPod], **fields: Any) -> dict[str, TrainingNode]:
    values: dict[str, Any] = {"alive": True, "limit": None} | fields
    return {each.node_id: TrainingNode(**values) for each in pods}


def job_status(
    spec: JobSpec,
    state: JobState = JobState.RUNNING,
    nodes: Iterable[str] = (),
    *,
    allotted: Mapping[str, int] | None = None,
    saved: Saved | None = None,
    reason: str = "",
    step: int = 0,
) -> JobStatus:
    pods = tuple(
        JobPod(
            pod_id=f"pod_{rank}_0", pod_rank=rank, node_id=node, addr="10.0.0.1", slots=(0,),
            ranks=(rank,), phase="running",
        )
        for rank, node in enumerate(nodes)
    )  # fmt: skip
    given = {each.node_id: 1 for each in pods} if allotted is None else dict(allotted)
    return JobStatus(
        job_id=spec.job_id, state=state, reason=reason, revision=1, spec=spec, stage=1, flag=0,
        pods=pods, target_pods=len(given), queued_changes=(), step=step, epoch=0,
        total_steps=None, metrics={}, failures=0, preemptions=0, resizes=0, redone_steps=0,
        script_elapsed_s=0.0, estimated_run_time_s=None, submitted_at=1.0, account=Account(),
        stages=(), teachers=None, saved=saved,
        allotment=Allotment(pods=len(given), reason="", since=0.0, nodes=given),
    )  # fmt: skip
