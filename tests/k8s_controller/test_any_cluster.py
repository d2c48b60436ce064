"""A TrainingJob with real trainers on a real API server, which EDL_TEST_KUBECONFIG names.

    EDL_TEST_KUBECONFIG=~/.kube/config python -m pytest tests/k8s_controller/test_any_cluster.py

It needs an administrator's rights and a cluster without EDL's controller. The pods are processes of
this machine, on nodes that the test makes and takes away again. Not KUBECONFIG, which may name a
cluster that others work on.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.k8s_controller.cluster.kinds import ApiError
from tests.k8s_controller.cluster.remote import TAINT, RemoteCluster, path_of
from tests.k8s_controller.running import LiveJob, start_controller_by
from tests.k8s_controller.test_three_jobs import (
    CONTROLLER,
    CPU,
    ThreeTrainings,
    collected,
    tell,
    training,
)
from tests.k8s_controller.test_training import (
    check_each_sample_counted_once,
    check_nothing_was_redone,
    counting_job,
    scale_drain_and_end,
)
from tests.support import require, wait_until

KUBECONFIG = os.environ.get("EDL_TEST_KUBECONFIG")
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not KUBECONFIG, reason="EDL_TEST_KUBECONFIG names no cluster"),
]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RemoteCluster]:
    with RemoteCluster(Path(KUBECONFIG or ""), tmp_path / "pods") as made:
        for _ in range(2):
            made.add_node(CPU)
        yield made


def placed_on(cluster: RemoteCluster, job: dict[str, Any]) -> dict[str, Any]:
    """Return a job whose pods may be on the nodes of the test alone."""
    job["metadata"]["namespace"] = cluster.namespace
    tolerations = [{"key": TAINT["key"], "operator": "Exists"}]
    job["spec"]["template"]["spec"] |= {
        "nodeSelector": cluster.node_selector, "tolerations": tolerations,
    }  # fmt: skip
    return job


@pytest.mark.timeout(1800)
def test_a_job_is_scaled_and_drained_by_controllers_that_are_killed(
    cluster: RemoteCluster, tmp_path: Path
):
    require("paddle", "trains with it")
    config = cluster.controller_kubeconfig(tmp_path / "controller")
    args = (f"--namespace={cluster.namespace}", "--interval_s=0.5")
    manifest = counting_job(tmp_path, "count_train.py", replicas=2, maxReplicas=5)
    job = LiveJob(cluster, placed_on(cluster, manifest))
    controller = start_controller_by(config, tmp_path, *args)
    try:
        wait_until(lambda: len(job.pods()) == 2, 120, "pods")
        for pods in (3, 2):
            job.change(replicas=pods)
            wait_until(lambda pods=pods: job.status().get("desiredReplicas") == pods, 60)  # type: ignore[misc]
            controller.kill()  # amid that
            controller.wait()
            controller = start_controller_by(config, tmp_path, *args)
        wait_until(lambda: job.pods() == ["digits-0", "digits-1"], 300, "the third has gone")
        training = scale_drain_and_end(job, tmp_path, 2, 5, 3)
        assert controller.poll() is None, (tmp_path / "controller.log").read_text()[-3000:]
    finally:
        controller.kill()
        controller.wait()
    check_nothing_was_redone(training)
    check_each_sample_counted_once(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_three_trainings_share_it_and_one_of_their_pods_is_evicted(
    cluster: RemoteCluster, tmp_path: Path
):
    require("paddle", "trains with it")
    config = cluster.controller_kubeconfig(tmp_path / "controller")

    def start(folder: Path, name: str, least: int, most: int) -> LiveJob:
        if name != "first":
            wait_until(lambda: is_evicted(cluster, "first-0"), 120, "its budget lets it go")
        return LiveJob(cluster, placed_on(cluster, training(folder, name, least, most)))

    jobs = ThreeTrainings(tmp_path, start)
    args = (f"--namespace={cluster.namespace}", *CONTROLLER)
    controller = start_controller_by(config, tmp_path, *args)
    try:
        with collected(cluster.kubeconfig, tmp_path, f"--namespace={cluster.namespace}") as seen:
            tell(seen, jobs.submit, jobs.end, 500)
            jobs.check()
        assert controller.poll() is None, (tmp_path / "controller.log").read_text()[-3000:]
    finally:
        controller.kill()
        controller.wait()


def is_evicted(cluster: RemoteCluster, name: str) -> bool:
    """Evict a pod, if its budget allows it now; True: it has gone."""
    path = f"{path_of(cluster.store.kind('Pod'), cluster.namespace, name)}/eviction"
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
    try:
        cluster.store.call("POST", path, body)
    except ApiError as error:
        if error.code not in (404, 429):
            raise
        return error.code == 404
    return False
