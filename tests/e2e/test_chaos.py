"""Kill every process of a training, one kind after the other: nothing is lost, nothing is left."""

import os
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from job_server.api.wire import JobSpec, JobState, Way
from pod_runtime.orphans import noted_forks
from tests.e2e.cluster import Cluster
from tests.e2e.proof import check_counts
from tests.support import wait_until

EPOCHS = 10_000  # more than any test has the time for: it ends the training
SAMPLES = 1000


def finish_and_check(cluster: Cluster) -> None:
    """End the job: it succeeds, and every sample counts as often, by the model and the ledger."""
    (cluster.out / "end").touch()
    cluster.wait_for(lambda now: now.state is JobState.SUCCEEDED, "the job succeeds", 300)
    check_counts(cluster.out)


def check_nothing_is_left(cluster: Cluster, memory_before: set[str]) -> None:
    """No process of the job, no shared memory, no listening port, no temporary file."""
    wait_until(lambda: not cluster.find(".py") and not cluster.shims(), what="pods are gone")
    cluster.stop()
    assert cluster.processes() == []
    wait_until(lambda: leaked_memory(cluster, memory_before) == set(), what="shared memory is gone")
    # Not the server's: it was a free one, and may be another program's by now.
    for port in range(cluster.first_port, cluster.last_port + 1):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
    left = [path for path in cluster.folder.rglob("*") if is_temporary(path)]
    assert left == []


def leaked_memory(cluster: Cluster, before: set[str]) -> set[str]:
    """Return what has come since, made by processes of Paddle's loader of this cluster.

    Other tests and other programs of the machine make files there too, and some are killed.
    """
    forks = loaders(cluster)
    made = ((name, re.match(r"paddle_(\d+)_", name)) for name in os.listdir("/dev/shm"))
    return {name for name, maker in made if maker and int(maker[1]) in forks} - before


def loaders(cluster: Cluster) -> set[int]:
    """Return the pids of all processes that trainers of the cluster have ever forked."""
    pod_dirs = (path.parent for path in (cluster.folder / "client" / "pods").glob("*/pod.json"))
    return set().union(*map(noted_forks, pod_dirs))


def is_temporary(path: Path) -> bool:
    return path.name == "sock" or path.name.startswith(".") or ".tmp" in path.name


@pytest.fixture
def memory_before() -> set[str]:
    return set(os.listdir("/dev/shm"))


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_killing_each_kind_of_process_loses_no_sample(
    counting_cluster: Callable[..., Cluster], memory_before: set[str]
) -> None:
    cluster = counting_cluster(slots=2, samples=SAMPLES, epochs=EPOCHS, workers=1)
    cluster.submit(JobSpec(job_id="chaos", max_pods=2, spares=1))
    cluster.wait_steps(5)

    cluster.kill(cluster.trainers()[0])
    cluster.wait_steps(5)
    cluster.kill(cluster.launchers()[0])
    cluster.wait_steps(5)
    cluster.kill(cluster.shims()[-1])
    cluster.wait_steps(5)

    assert cluster.client is not None
    cluster.kill(cluster.client)
    cluster.wait_steps(5)  # its death stops nothing
    cluster.start_client()

    assert cluster.server is not None
    before, trainers = cluster.status(), {p.pid for p in cluster.trainers()}
    cluster.kill(cluster.server)
    cluster.start_server()
    after = cluster.wait_steps(5)
    assert trainers == {p.pid for p in cluster.trainers()}, "control died, training went on"
    assert (after.stage, after.failures) == (before.stage, before.failures)
    assert after.redone_steps == before.redone_steps

    cluster.kill_everything()
    cluster.start_server()
    cluster.start_client()
    cluster.wait_steps(5)

    finish_and_check(cluster)
    assert loaders(cluster), "there were some who may have left memory behind"
    check_nothing_is_left(cluster, memory_before)


@pytest.mark.heavy
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("overlap", "way", "sizes"),
    [
        pytest.param("auto", Way.REPLACE, (3, 1, 2), id="replace"),
        pytest.param(
            "auto", Way.REPLACE, (2, 3, 1, 3, 2, 1), id="replace, long", marks=pytest.mark.slow
        ),
        # The short form: a trainer comes, and leaves, by join in test_join.py.
        pytest.param("join", Way.JOIN, (3, 1, 2), id="join", marks=pytest.mark.slow),
    ],
)
def test_planned_changes_redo_no_step_and_count_every_sample_once(
    counting_cluster: Callable[..., Cluster],
    memory_before: set[str],
    overlap: str,
    way: Way,
    sizes: tuple[int, ...],
) -> None:
    cluster = counting_cluster(slots=3, samples=SAMPLES, epochs=EPOCHS)
    cluster.submit(JobSpec(job_id="resizes", pods=1, max_pods=3, overlap=overlap, spares=1))
    cluster.wait_steps(3)
    first = cluster.trainers()[0].pid
    for pods in sizes:
        cluster.api().resize("resizes", pods)
        cluster.wait_running(pods)
        cluster.wait_steps(3)
    status = cluster.status()
    assert [record.pods for record in status.stages] == [1, *sizes]
    assert {record.way for record in status.stages[1:]} == {way}
    assert (first in {process.pid for process in cluster.trainers()}) is (way is Way.JOIN)
    assert status.redone_steps == 0
    finish_and_check(cluster)
    check_nothing_is_left(cluster, memory_before)


@pytest.mark.timeout(900)
@pytest.mark.slow  # the short form: the server is killed above
@pytest.mark.parametrize("away_s", [3, 30])
def test_a_server_that_is_away_costs_no_step_and_is_found_when_it_is_back(
    counting_cluster: Callable[..., Cluster], away_s: float
) -> None:
    cluster = counting_cluster(slots=2, samples=SAMPLES, epochs=EPOCHS)
    cluster.submit(JobSpec(job_id="away", max_pods=2, spares=1))
    before = cluster.wait_steps(5)
    trainers = {p.pid for p in cluster.trainers()}
    assert cluster.server is not None
    cluster.kill(cluster.server)
    time.sleep(away_s)  # how long it is away is the test's input
    cluster.start_server()
    # Steps above those that the killed one knew: launchers have attached to the new one.
    status = cluster.wait_for(lambda now: now.step > before.step, "launchers attach")
    assert status.stage == before.stage
    assert (status.redone_steps, status.failures) == (0, 0)
    assert trainers == {p.pid for p in cluster.trainers()}
    cluster.wait_steps(3)
    finish_and_check(cluster)
