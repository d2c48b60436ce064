"""A GPU falls off the bus under a real client, whose NVML is the fake one."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from job_server.api.errors import Conflict
from job_server.api.text import slot_lines
from job_server.api.wire import JobSpec, SlotOrder
from tests.e2e.cluster import Cluster
from tests.e2e.test_chaos import finish_and_check
from tests.nvml.pynvml import healthy
from tests.support import wait_until

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="PyTorch is not installed"
)


@pytest.mark.slow  # the short form: a real client alone, in tests/job_client/test_main.py
@pytest.mark.timeout(600)
def test_a_job_goes_on_without_a_lost_gpu_and_takes_it_back(
    counting_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    falls, is_back = tmp_path / "falls", tmp_path / "is_back"
    fault = {"gpu": 1, "when": str(falls), "until": str(is_back)}
    cluster = counting_cluster(
        slots=2,
        samples=480,
        epochs=10_000,
        program="count_train_torch.py",
        nvml={
            "gpus": [healthy(0), healthy(1)],
            "faults": [fault | {"xid": 79}, fault | {"lost": 1}],
        },
    )
    cluster.submit(JobSpec(job_id="torch", pods=2, max_pods=2, spares=1))
    cluster.wait_steps(3)
    falls.touch()
    smaller = cluster.wait_running(1)
    assert [pod.slots for pod in smaller.pods] == [(0,)]
    assert (smaller.target_pods, smaller.failures, smaller.preemptions) == (2, 0, 0)
    (node,) = cluster.api().nodes()
    (line,) = slot_lines(node, node.last_seen_at)
    assert "slot 1 is in quarantine" in line
    assert "fallen off the bus" in line
    events = cluster.api().events("torch")
    assert any("slot 1 of" in event.text and "in quarantine" in event.text for event in events)
    cluster.wait_steps(3)
    back = SlotOrder(slot=1, take_back=True)
    with pytest.raises(Conflict, match="not taken back: it has fallen off the bus"):
        cluster.api().order_slot(node.node.node_id, back)
    is_back.touch()
    wait_until(lambda: not lasts(cluster), what="the GPU is well again")
    cluster.api().order_slot(node.node.node_id, back)
    cluster.wait_running(2)
    told = cluster.wait_for(
        lambda now: all(pod.memory_mb for pod in now.pods), "what the trainers use is told"
    )
    assert all(pod.memory_mb[0] > 50 and pod.cpu_percent[0] > 0 for pod in told.pods)
    finish_and_check(cluster)


def lasts(cluster: Cluster) -> bool:
    (node,) = cluster.api().nodes()
    slot = next(each for each in node.report["slots"] if each["index"] == 1)
    return any(fault["age_s"] == 0 for fault in slot["faults"])
