"""A PyTorch job on a real cluster: resized and killed, each sample counts as often as it should."""

import importlib.util
from collections.abc import Callable

import pytest

from job_server.api.wire import JobSpec, JobState, Way
from tests.e2e.cluster import Cluster
from tests.e2e.test_chaos import finish_and_check

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="PyTorch is not installed"
)


@pytest.mark.slow  # the short form: a later loop, below
@pytest.mark.timeout(600)
def test_changes_and_a_kill_lose_no_sample(counting_cluster: Callable[..., Cluster]) -> None:
    cluster = counting_cluster(
        slots=2, samples=480, epochs=10_000, workers=1, program="count_train_torch.py"
    )
    cluster.submit(JobSpec(job_id="torch", pods=1, max_pods=2, spares=1))
    cluster.wait_steps(5)
    cluster.api().resize("torch", 2)
    status = cluster.wait_running(2)
    assert (status.stages[-1].way, status.redone_steps) == (Way.REPLACE, 0)
    cluster.wait_steps(5)
    cluster.kill(cluster.trainers()[0])
    cluster.wait_steps(5)
    finish_and_check(cluster)


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_a_later_loop_of_a_script_is_paused_changed_and_killed_as_the_first_one(
    counting_cluster: Callable[..., Cluster],
) -> None:
    cluster = counting_cluster(
        slots=2,
        samples=480,
        epochs=10_000,
        workers=1,
        program="count_train_torch.py",
        checkpoint="--checkpoint {out}/checkpoint --first {out}/first",
    )
    cluster.submit(JobSpec(job_id="folds", pods=1, max_pods=2, spares=1))
    first = 20  # steps of the first loop
    cluster.wait_for(lambda now: (now.step or 0) > first + 5, "the second loop trains", 120)
    cluster.api().resize("folds", 2)
    status = cluster.wait_running(2)
    assert (status.stages[-1].way, status.redone_steps) == (Way.REPLACE, 0)
    cluster.wait_steps(5)
    cluster.api().pause("folds")
    paused = cluster.wait_for(lambda now: now.state is JobState.PAUSED, "paused")
    assert f"paused; step {paused.step} is in {cluster.out / 'checkpoint'}" in paused.reason
    cluster.api().resume("folds")
    resumed = cluster.wait_steps(1)
    assert resumed.stages[-1].first_step == paused.step + 1
    cluster.kill(cluster.trainers()[0])
    cluster.wait_for(lambda now: len(now.stages) == 4 and bool(now.stages[-1].first_step), "again")
    cluster.wait_steps(1)
    finish_and_check(cluster)
