"""A PyTorch job on a real cluster: resized and killed, each sample counts as often as it should."""

import importlib.util
from collections.abc import Callable

import pytest

from job_server.api.wire import JobSpec, Way
from tests.e2e.cluster import Cluster
from tests.e2e.test_chaos import finish_and_check

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="PyTorch is not installed"
)


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
