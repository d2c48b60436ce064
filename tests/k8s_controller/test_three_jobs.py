"""The story of EDL's first tutorial: three jobs share one cluster, and the collector prints it."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from job_server.api.wire import JobStatus
from tests.k8s_controller.cluster.cluster import Cluster
from tests.k8s_controller.cluster.job_servers import JobServers
from tests.k8s_controller.jobs import scaled_job
from tests.k8s_controller.running import LiveJob, running_controller
from tests.k8s_controller.test_training import (
    check_each_sample_counted_once,
    check_nothing_was_redone,
    counting_job,
)
from tests.support import ROOT, require, wait_until

pytestmark = pytest.mark.full
MOST = 6  # pods for which there is room
NODES, CPU = 2, "3300m"  # three pods each, and the jobs' servers
LINE = re.compile(r"(\d+) +(\d+) +(\S+) +\d+\.\d+%.*")
CONTROLLER = ("--sharing=fulfilment", "--autoscale_interval_s=0.5")  # without measured times


class Collected:
    """What the collector prints."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def lines(self) -> list[tuple[int, int, dict[str, int]]]:
        """Return jobs, pending ones, and trainers by job, as each line has them."""
        found = []
        for line in self._path.read_text().splitlines()[1:]:
            match = LINE.fullmatch(line.rstrip())
            assert match is not None, line
            jobs, pending, running = match.groups()
            counts = [each.split(":") for each in running.split("|")] if running != "-" else []
            found.append((int(jobs), int(pending), {name: int(n) for name, n in counts}))
        return found

    def now(self) -> dict[str, int]:
        lines = self.lines()
        return lines[-1][2] if lines else {}


@contextmanager
def collected(kubeconfig: Path, folder: Path, *args: str) -> Iterator[Collected]:
    """Run the collector meanwhile."""
    path = folder / "collected"
    command = [sys.executable, "-m", "k8s_controller.collector", f"--kubeconfig={kubeconfig}"]
    with path.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--interval_s=0.5", *args], stdout=out, stderr=out, cwd=ROOT
        )
    try:
        yield Collected(path)
    finally:
        process.terminate()
        process.wait(120)


def tell(
    seen: Collected,
    submit: Callable[[str, int, int], None],
    end: Callable[[str], None],
    limit_s: float,
) -> None:
    """Have three jobs come and go.

    Args:
        submit: makes a job of a name, and the least and the most of its pods.
    """
    submit("first", 1, MOST)
    wait_until(lambda: seen.now() == {"first": MOST}, limit_s, "the first has all")
    submit("second", 2, 4)
    wait_until(lambda: shared(seen.now(), first=1, second=2), limit_s, "it gave way")
    submit("third", 2, 4)
    wait_until(lambda: shared(seen.now(), first=1, second=2, third=2), limit_s, "all three")
    end("second")
    wait_until(lambda: shared(seen.now(), first=1, third=2), limit_s, "one has ended")
    end("third")
    wait_until(lambda: seen.now() == {"first": MOST}, limit_s, "the first has all again")
    end("first")
    wait_until(lambda: seen.lines()[-1] == (0, 0, {}), limit_s, "all have ended")
    assert (2, 1) in {(jobs, pending) for jobs, pending, _ in seen.lines()}, "the second waited"
    assert all(sum(running.values()) <= MOST for _, _, running in seen.lines())


def shared(running: Mapping[str, int], **least: int) -> bool:
    """Whether just these jobs train, each with its least, and all room is used."""
    has_least = all(running[name] >= count for name, count in least.items() if name in running)
    return running.keys() == least.keys() and has_least and sum(running.values()) == MOST


@pytest.mark.timeout(300)
def test_three_jobs_share_a_cluster_and_the_collector_prints_it(tmp_path: Path):
    with Cluster(tmp_path / "pods", pretends=True) as cluster, JobServers(cluster.store):
        for number in range(NODES):
            cluster.kubelet.add_node(f"node-{number}", CPU)
        cluster.apply_file(ROOT / "manifests" / "crd.yaml")
        kind = cluster.store.kind("TrainingJob")

        def submit(name: str, least: int, most: int) -> None:
            job = scaled_job(name, minReplicas=least, maxReplicas=most)
            del job["metadata"]["uid"]
            cluster.apply(job)

        def end(name: str) -> None:
            cluster.store.delete(kind, "default", name)

        config = cluster.api.kubeconfig(tmp_path / "config")
        with (
            running_controller(cluster, tmp_path, *CONTROLLER),
            collected(config, tmp_path) as seen,
        ):
            tell(seen, submit, end, 60)


class ThreeTrainings:
    """The jobs of the story, with real trainers, each with a folder of its own."""

    def __init__(self, folder: Path, start: Callable[[Path, str, int, int], LiveJob]) -> None:
        self._folder, self._start = folder, start
        self._jobs: dict[str, LiveJob] = {}
        self._told: dict[str, JobStatus] = {}

    def submit(self, name: str, least: int, most: int) -> None:
        folder = self._folder / name
        folder.mkdir()
        self._jobs[name] = self._start(folder, name, least, most)

    def end(self, name: str) -> None:
        self._told[name] = self._jobs[name].training()
        (self._folder / name / "end").touch()

    def check(self) -> None:
        assert self._told.keys() == {"first", "second", "third"}
        for name, training in self._told.items():
            assert self._jobs[name].status()["phase"] == "Succeeded"
            check_nothing_was_redone(training)
            check_each_sample_counted_once(self._folder / name)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_three_trainings_share_a_cluster_and_lose_no_step(tmp_path: Path):
    require("paddle", "trains with it")
    with Cluster(tmp_path / "pods") as cluster:
        for number in range(NODES):
            cluster.kubelet.add_node(f"node-{number}", CPU)
        cluster.apply_file(ROOT / "manifests" / "crd.yaml")

        def start(folder: Path, name: str, least: int, most: int) -> LiveJob:
            return LiveJob(cluster, training(folder, name, least, most))

        config = cluster.api.kubeconfig(tmp_path / "config")
        jobs = ThreeTrainings(tmp_path, start)
        with (
            running_controller(cluster, tmp_path, *CONTROLLER),
            collected(config, tmp_path) as seen,
        ):
            tell(seen, jobs.submit, jobs.end, 500)
            jobs.check()


def training(folder: Path, name: str, least: int, most: int) -> dict[str, object]:
    job = counting_job(folder, "count_train.py", autoscale=True, maxReplicas=most)
    job["metadata"]["name"] = name
    job["spec"]["minReplicas"] = least
    return job
