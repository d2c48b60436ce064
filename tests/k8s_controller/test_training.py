"""A TrainingJob with real trainers: its pods come and go, and no step is lost."""

import contextlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from job_server.api.wire import JobStatus, Way
from pod_runtime.verify import main as verify
from tests.k8s_controller.cluster.cluster import Cluster
from tests.k8s_controller.jobs import training_job
from tests.k8s_controller.running import LiveJob, running_controller
from tests.support import ROOT, require, wait_until

DEFINITION = ROOT / "manifests" / "crd.yaml"
pytestmark = pytest.mark.full


@pytest.mark.heavy
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("framework", "program", "first", "more", "fewer"),
    [
        pytest.param("paddle", "count_train.py", 1, 3, 2, id="short"),
        pytest.param("torch", "count_train_torch.py", 2, 5, 3, id="long", marks=pytest.mark.slow),
    ],
)
def test_a_job_is_scaled_and_drained_without_losing_a_step(
    tmp_path: Path, framework: str, program: str, first: int, more: int, fewer: int
):
    require(framework, "trains with it")
    with Cluster(tmp_path / "pods") as cluster:
        (tmp_path / "pods").mkdir(exist_ok=True)
        for number in range(2):
            cluster.kubelet.add_node(f"node-{number}")
        cluster.apply_file(DEFINITION)
        with running_controller(cluster, tmp_path):
            job = LiveJob(
                cluster, counting_job(tmp_path, program, replicas=first, maxReplicas=more)
            )
            training = scale_drain_and_end(job, tmp_path, first, more, fewer)
    check_nothing_was_redone(training)
    check_each_sample_counted_once(tmp_path)


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_at_its_least_loses_no_step_by_a_drain_and_goes_on_when_all_its_pods_are_killed(
    tmp_path: Path,
):
    require("torch", "trains with it")
    manifest = counting_job(tmp_path, "count_train_torch.py", replicas=2, maxReplicas=2)
    manifest["spec"]["minReplicas"] = 2
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    container["args"] = [each for each in container["args"] if "--checkpoint" not in each]
    (tmp_path / "pods").mkdir()
    with Cluster(tmp_path / "pods") as cluster:
        cluster.kubelet.add_node("node-0")
        cluster.apply_file(DEFINITION)
        with running_controller(cluster, tmp_path):
            job = LiveJob(cluster, manifest)
            wait_until(lambda: job.trains_with(2), 300, "the first start")
            job.delete_pod("digits-0")
            wait_until(lambda: job.pods() == ["digits-1", "digits-2"], 300, "drained")
            wait_until(lambda: job.trains_with(2), 300)
            training = job.training()
            check_nothing_was_redone(training)
            assert sum(stage.way is Way.START for stage in training.stages) == 1
            for name in job.pods():
                cluster.kubelet.kill_pod("default", name)
            wait_until(lambda: job.training().stage > training.stage, 300)
            wait_until(lambda: job.trains_with(2), 300, "it goes on")


def scale_drain_and_end(job: LiveJob, folder: Path, first: int, more: int, fewer: int) -> JobStatus:
    """Return what its server said just before the end."""
    wait_until(lambda: job.trains_with(first), 300, "the first start")
    job.change(replicas=more)
    wait_until(lambda: job.trains_with(more), 300, "more pods")
    assert job.pods() == [f"digits-{index}" for index in range(more)]
    job.change(replicas=fewer)
    wait_until(lambda: job.pods() == [f"digits-{index}" for index in range(fewer)], 300)
    job.delete_pod("digits-0")  # a drained node
    left = [f"digits-{index}" for index in range(1, fewer + 1)]
    wait_until(lambda: job.pods() == left and job.trains_with(fewer), 300, "drained")
    wait_until(job.server_is_ready, 60, "a Service leads to its server only if it is ready")
    training = job.training()
    (folder / "end").touch()
    wait_until(lambda: job.status().get("phase") == "Succeeded", 300, "the end")
    wait_until(lambda: not job.pods(), 120, "nothing is left")
    return training


def counting_job(folder: Path, program: str, **spec: Any) -> dict[str, Any]:
    job = training_job(minReplicas=1, **spec)
    pod = job["spec"]["template"]["spec"]
    pod["terminationGracePeriodSeconds"] = 90
    pod["containers"][0] |= {
        "command": ["python", "-m", "pod_runtime.launch"],
        "args": [
            str(ROOT / "tests" / "e2e" / program), "--samples=480",
            "--epochs=10000", f"--checkpoint={folder}/checkpoint", f"--out={folder}/seen.npy",
            f"--end={folder}/end",
        ],
        "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
        "resources": {"requests": {"cpu": "1"}},
    }  # fmt: skip
    return job


def check_nothing_was_redone(training: JobStatus) -> None:
    assert (training.redone_steps, training.failures, training.preemptions) == (0, 0, 0)
    assert all(stage.redone_steps == 0 for stage in training.stages)


def check_each_sample_counted_once(folder: Path) -> None:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = verify([str(folder / "checkpoint")])
    assert code == 0, said.getvalue()
    seen = np.load(folder / "seen.npy")
    assert seen[0] >= 1
    assert np.abs(seen - seen[0]).max() < 1e-6
