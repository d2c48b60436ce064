"""Changes by join in which trainers that stay or join are killed."""

from collections.abc import Callable

import pytest

from job_server.api.wire import JobSpec, JobState, Way
from tests.e2e.cluster import Cluster
from tests.e2e.test_chaos import finish_and_check
from tests.support import wait_until


@pytest.mark.timeout(900)
def test_kills_amid_a_change_by_join_lose_no_sample(
    counting_cluster: Callable[..., Cluster],
) -> None:
    cluster = counting_cluster(slots=2, samples=480, epochs=10_000)
    cluster.submit(JobSpec(job_id="join", pods=1, max_pods=2, overlap="join"))
    cluster.wait_steps(3)
    (stays,) = cluster.trainers()

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

    cluster.api().resize("join", 2)
    wait_until(lambda: len(cluster.trainers()) == 2, what="a trainer comes new")
    cluster.kill(stays)
    status = cluster.wait_running(2)
    ways = [stage.way for stage in status.stages[-2:]]
    assert ways == [Way.START, Way.JOIN], "the job recovers, and the change is begun again"
    cluster.wait_steps(3)
    finish_and_check(cluster)
