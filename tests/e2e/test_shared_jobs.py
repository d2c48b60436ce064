"""Shared jobs with real trainers: they give way, are stopped for others, and lose no sample."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from job_server.api.wire import JobSpec, JobState, JobStatus
from tests.e2e.cluster import Cluster
from tests.e2e.proof import check_counts
from tests.support import ROOT, wait_until

# A mark: another module takes its cluster from here, and trains with PyTorch.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("paddle") is None, reason="trains with Paddle"
)

PATIENCE_S = 240.0  # trainers start slowly on a machine that runs other tests beside


class SharingCluster(Cluster):
    """One node whose client runs several jobs, each by its folder."""

    def __init__(self, folder: Path, *, slots: int) -> None:
        super().__init__(folder, slots=slots, script="true")
        for job_id in ("one", "two", "high"):
            self.write(job_id)

    def start_client(self) -> None:
        args = ["--job_server", self.url, "--log_dir", str(self.folder / "client")]
        args += ["--pod_path", str(self.folder / "pods"), "--cpu_slots", str(self.slots)]
        args += ["--port_range", f"{self.first_port}-{self.last_port}", "--grace_s", "3"]
        args += ["--jobs_dir", str(self.folder / "jobs")]
        self.client = self._spawn("job_client", args)

    def home(self, job_id: str) -> Path:
        return self.folder / "jobs" / job_id

    def write(self, job_id: str) -> None:
        """Make the folder of a job that counts its samples, until there is a file `end`."""
        home = self.home(job_id)
        home.mkdir(parents=True)
        program = ROOT / "tests" / "e2e" / "count_train.py"
        launch = f"{sys.executable} -m pod_runtime.launch --log_dir {home}/log"
        (home / "train.sh").write_text(
            f"#!/usr/bin/env bash\nexec {launch} {program} "
            f"--samples 480 --epochs 10000 --step_s 0.02 "
            f"--checkpoint {home}/checkpoint --out {home}/seen.npy --end {home}/end\n"
        )

    def add(self, job_id: str, least: int, most: int, priority: int = 0) -> None:
        self.submit(
            JobSpec(
                job_id=job_id,
                folder=job_id,
                share=True,
                min_pods=least,
                max_pods=most,
                priority=priority,
                spares=1,
            )
        )

    def job(self, job_id: str) -> JobStatus:
        return self.api().status(job_id)

    def wait_trains(self, job_id: str, *, most: int) -> JobStatus:
        """Wait until the job has at most so many pods, and has made steps with them."""
        begin: dict[int, int] = {}  # stage -> step

        def trains() -> bool:
            now = self.job(job_id)
            assert not now.state.ended, f"{now.state}: {now.reason}\n{self.logs()}"
            if now.state is not JobState.RUNNING or len(now.pods) > most:
                return False
            return now.step >= begin.setdefault(now.stage, now.step) + 5

        wait_until(trains, PATIENCE_S, f"{job_id} trains with {most} pods")
        return self.job(job_id)

    def wait_state(self, job_id: str, state: JobState) -> JobStatus:
        wait_until(lambda: self.job(job_id).state is state, PATIENCE_S, f"{job_id} is {state}")
        return self.job(job_id)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[SharingCluster]:
    made = SharingCluster(tmp_path / "c", slots=2)
    made.start_server()
    made.start_client()
    yield made
    made.stop()


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_shared_jobs_give_way_and_are_stopped_and_no_sample_is_lost(
    cluster: SharingCluster,
) -> None:
    wait_until(lambda: cluster.find("job_server"), what="the server runs")
    cluster.add("one", 1, 2)
    assert len(cluster.wait_trains("one", most=2).pods) == 2  # all there is
    cluster.add("two", 1, 2)
    cluster.wait_trains("two", most=1)
    assert len(cluster.wait_trains("one", most=1).pods) == 1

    cluster.add("high", 2, 2, priority=1)
    cluster.wait_trains("high", most=2)
    for job_id in ("one", "two"):
        stopped = cluster.wait_state(job_id, JobState.WAITING)
        assert stopped.reason.startswith("stopped for high, whose priority is higher")
        assert stopped.saved is not None
        assert stopped.saved.step == stopped.step

    for job_id in ("high", "one", "two"):  # each lets the next ones go on, from their states
        cluster.wait_trains(job_id, most=2)
        (cluster.home(job_id) / "end").touch()
        ended = cluster.wait_state(job_id, JobState.SUCCEEDED)
        wrong = (ended.redone_steps, ended.failures, ended.preemptions, ended.resizes)
        assert wrong == (0, 0, 0, 0)
        check_counts(cluster.home(job_id))
