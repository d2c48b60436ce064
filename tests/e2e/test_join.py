"""Changes by join in which trainers that stay or join are killed."""

from collections.abc import Callable

import pytest

from job_server.api.wire import JobSpec, JobState, Way
from tests.e2e.cluster import Cluster
from tests.e2e.test_chaos import finish_and_check
from tests.support import standing_still, wait_until


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_kills_amid_a_change_by_join_lose_no_sample(
    counting_cluster: Callable[..., Cluster],
) -> None:
    cluster = counting_cluster(slots=2, samples=480, epochs=10_000)
    cluster.submit(JobSpec(job_id="join", pods=1, max_pods=2, overlap="join", spares=1))
    cluster.wait_steps(3)
    (stays,) = cluster.trainers()

    with standing_still([stays]):  # else the change may be over before the kill
        cluster.api().resize("join", 2)
        wait_until(lambda: len(cluster.trainers()) == 2, what="a trainer comes new")
        cluster.kill(next(each for each in cluster.trainers() if each.pid != stays.pid))
    status = cluster.wait_for(
        lambda now: (
            now.stages[-1].outcome.startswith("abandoned") and now.state is JobState.RUNNING
        ),
        "the change is abandoned",
    )
    assert (status.stages[-1].way, status.redone_steps) == (Way.JOIN, 0)
    assert cluster.wait_steps(3).redone_steps == 0
    assert [each.pid for each in cluster.trainers()] == [stays.pid], "those who stay train on"

    with standing_still([stays]):
        cluster.api().resize("join", 2)
        wait_until(lambda: len(cluster.trainers()) == 2, what="a trainer comes new")
        cluster.kill(stays)
    status = cluster.wait_running(2)
    ways = [stage.way for stage in status.stages[-2:]]
    # The job recovers, and the change is begun again; or the change is the recovery, where the
    # new trainer's pod was there before the kill was told.
    assert ways in ([Way.START, Way.JOIN], [Way.JOIN, Way.DRAIN])
    before = cluster.wait_steps(3)

    trainers = {each.pid for each in cluster.trainers()}
    cluster.api().resize("join", 1)
    status = cluster.wait_running(1)
    assert status.stages[-1].way is Way.JOIN
    assert status.redone_steps == before.redone_steps
    cluster.wait_steps(3)
    wait_until(lambda: len(cluster.trainers()) == 1, what="one has left")
    assert cluster.trainers()[0].pid in trainers, "who stays keeps its process"
    finish_and_check(cluster)
