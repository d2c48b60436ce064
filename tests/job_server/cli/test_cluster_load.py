"""What `edl top` makes of jobs and nodes: the columns of EDL's first collector."""

from typing import Any

import pytest

from job_server.api import wire
from job_server.cli.cluster_load import cluster_load, load_json, load_line, load_screen
from tests.job_server.serving import cpu_node
from tests.job_server.sharing.shared import NOW, cluster, shared_job, shared_node
from tests.scripts.statuses import status

GPU = wire.Slot(index=0, kind=wire.SlotKind.GPU)


def a_pod(number: int, phase: str = "running") -> wire.JobPod:
    return wire.JobPod(
        pod_id=f"pod_{number}", pod_rank=number, node_id="a", addr="x", slots=(number,),
        ranks=(number,), phase=phase,
    )  # fmt: skip


def a_job(name: str, *pods: wire.JobPod, state: wire.JobState = wire.JobState.RUNNING):
    return status(job_id=name, pods=pods, state=state)


def a_node(node: wire.Node, *, alive: bool = True, **report: Any) -> wire.NodeStatus:
    told = wire.NodeReport(node_id=node.node_id, **report)
    return wire.NodeStatus(node=node, alive=alive, last_seen_at=NOW, report=wire.encode(told))


def test_the_tutorials_line_counts_trainers_that_run_and_jobs_that_have_none():
    jobs = [
        a_job("example", a_pod(0), a_pod(1), a_pod(2)),
        a_job("example1", a_pod(3), a_pod(4, "preparing"), a_pod(5, "leaving")),
        a_job("example2", state=wire.JobState.WAITING),
        a_job("done", state=wire.JobState.SUCCEEDED),
    ]
    load = cluster_load(jobs, [])
    assert load_line(None).split() == [
        "SUBMITTED-JOBS", "PENDING-JOBS", "RUNNING-TRAINERS", "CPU-UTILS", "GPU-UTILS",
    ]  # fmt: skip
    assert load_line(load).split() == ["3", "1", "example:3|example1:1|example2:0", "-", "-"]
    assert load_line(cluster_load([], [])).split() == ["0", "0", "-", "-", "-"]


def test_the_use_of_cpus_is_of_pods_and_strangers_on_the_nodes_that_say():
    pod = wire.PodState(pod_id="p", job_id="j", phase=wire.PodPhase.RUNNING, cpu_percent=150.0)
    nodes = [
        a_node(cpu_node("a", cpu_milli=4000), pods=(pod,), foreign_cpu_milli=500),
        a_node(cpu_node("b", cpu_milli=4000), foreign_cpu_milli=1000),
        a_node(cpu_node("old"), pods=(pod,)),
        a_node(cpu_node("dead", cpu_milli=4000), alive=False, foreign_cpu_milli=4000),
    ]
    assert cluster_load([], nodes).cpu == pytest.approx(3 / 8)
    assert load_line(cluster_load([], nodes)).split()[3] == "37.50%"


def test_the_use_of_gpus_is_their_mean():
    slots = (GPU, wire.Slot(index=1, kind=wire.SlotKind.GPU))
    use = tuple(wire.SlotUsage(index=n, utilization_percent=p) for n, p in ((0, 90.0), (1, 20.0)))
    nodes = [a_node(cpu_node("a", slots=slots), slots=use), a_node(cpu_node("b"), slots=use)]
    assert cluster_load([], nodes).gpu == pytest.approx(0.55)


def test_as_json_it_is_an_object_with_the_time():
    load = cluster_load([a_job("example", a_pod(0))], [])
    assert load_json(load, NOW) == {
        "submitted": 1, "pending": 0, "running": {"example": 1}, "cpu": None, "gpu": None,
        "nodes": {}, "at": NOW,
    }  # fmt: skip


def test_a_screen_shows_who_has_the_slots_of_each_node_and_the_queue():
    node = shared_node(used_shared=4, used_others=1, limit=5)
    sharing = cluster(
        shared_job("train-a", 4, min_pods=4), shared_job("b", min_pods=4), nodes=(node,)
    )
    lines = load_screen(cluster_load([], []), sharing, "http://here", NOW)
    assert "8 slots on 1 node: 4 of shared jobs, 1 of others, 2 kept free" in lines[0]
    assert f"a  {16 * '█'}{4 * '▒'}{12 * '·'}  5 of 8, shared jobs may have 5" in lines
    assert any(line.startswith("train-a  0         RUNNING  4 (4 to 8)") for line in lines)
    use = wire.NodeLoad(cpu_milli=3100, memory_used_mb=12_000, memory_total_mb=64_000)
    busy = load_screen(cluster_load([], [a_node(cpu_node("a"), load=use)]), sharing, "", NOW)
    assert any(line.endswith("may have 5   3.1 cores, 12.0 of 64 GB") for line in busy)
    alone = cluster(nodes=(shared_node(alive=False),))
    empty = load_screen(cluster_load([], []), alone, "", NOW)
    assert "no node can be reached" in empty[0]
    assert "no job shares the cluster" in empty[-1]
