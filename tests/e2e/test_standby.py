"""A standby of two takes over: as a whole after a trainer's death, without a lost pod."""

from collections.abc import Callable

import psutil
import pytest

from job_server.api.wire import JobSpec, JobState, JobStatus, StageRecord
from tests.e2e.cluster import Cluster
from tests.e2e.test_chaos import finish_and_check

pytestmark = pytest.mark.timeout(900)


def standby_is_ready(cluster: Cluster) -> JobStatus:
    def ready(now: JobStatus) -> bool:
        if not now.stages or now.state is not JobState.RUNNING:
            return False
        return (now.stages[-1].reason, now.stages[-1].outcome) == ("standby", "preparing")

    return cluster.wait_for(ready, "somebody stands by", 120)


def taken_over(cluster: Cluster, before: JobStatus) -> StageRecord:
    """Wait until the standby of `before` trains; return its record."""
    number = before.stages[-1].stage

    def record(now: JobStatus) -> StageRecord:
        return next(each for each in now.stages if each.stage == number)

    now = cluster.wait_for(
        lambda now: record(now).first_step is not None or "abandoned" in record(now).outcome,
        "the standby trains",
    )
    assert record(now).first_step is not None, record(now)
    return record(now)


def pod_of_rank(cluster: Cluster, rank: int) -> str:
    return next(pod.pod_id for pod in cluster.status().pods if rank in pod.ranks)


def shim_of(cluster: Cluster, pod_id: str) -> psutil.Process:
    (found,) = (shim for shim in cluster.shims() if f"/{pod_id} " in " ".join(shim.cmdline()))
    return found


@pytest.mark.heavy
@pytest.mark.parametrize("long", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_rank_0s_pod_is_lost_and_the_others_go_on_at_once_and_later_a_trainer_dies(
    counting_cluster: Callable[..., Cluster], long: bool
) -> None:
    cluster = counting_cluster(slots=3, samples=1000, epochs=10_000)
    cluster.submit(JobSpec(job_id="standby", pods=3, max_pods=3, standby=2, spares=1))
    before = standby_is_ready(cluster)
    lost = pod_of_rank(cluster, 0)
    cluster.kill(shim_of(cluster, lost))
    record = taken_over(cluster, before)
    assert (record.pods, record.trainers) == (2, 2)
    assert record.reason == f"standby, without {lost}"
    if long:
        cluster.wait_running(3)  # it grows back
        before = standby_is_ready(cluster)
        in_force = [p for p in cluster.trainers() if p.environ()["EDL_STAGE"] == str(before.stage)]
        cluster.kill(in_force[-1])
        assert taken_over(cluster, before).pods == 3
    cluster.wait_steps(5)
    finish_and_check(cluster)
