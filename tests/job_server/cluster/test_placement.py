import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from job_server.api.wire import JobSpec, Node, Slot, SlotKind
from job_server.cluster.placement import (
    Cluster,
    NodeView,
    Site,
    deal_ports,
    explain_shortage,
    place,
    serves,
)

NOW = 100.0


def node(name: str = "a", slots: int = 4, **changes: Any) -> Node:
    plain = Node(
        node_id=name,
        addr=f"addr-{name}",
        slots=tuple(Slot(index=i, kind=SlotKind.CPU) for i in range(slots)),
        port_low=20000,
        port_high=20000 + 2 * slots - 1,
        job_id="job",
    )
    return replace(plain, **changes)


def view(shown: Node, **changes: Any) -> NodeView:
    return replace(NodeView(node=shown, seen_at=NOW), **changes)


def cluster(*views: NodeView) -> Cluster:
    return Cluster(nodes=views)


def spec(slots_per_pod: int = 1, **changes: Any) -> JobSpec:
    return replace(JobSpec(job_id="job", max_pods=8), slots_per_pod=slots_per_pod, **changes)


def put(job: JobSpec, nodes: Cluster, count: int, held=None, leaving=None):
    sites = place(job, nodes, NOW, count=count, held=held or {}, leaving=leaving or {})
    return [(site.node_id, site.slots) for site in sites]


def test_nodes_are_filled_in_order_and_a_pod_is_on_one_node():
    nodes = cluster(view(node("a", 3)), view(node("b", 4)))
    assert put(spec(2), nodes, 5) == [("a", (0, 1)), ("b", (0, 1)), ("b", (2, 3))]


QUARANTINED = Node(
    node_id="a",
    addr="addr-a",
    slots=(
        Slot(index=0, kind=SlotKind.GPU, usable=False, reason="ECC"),
        Slot(index=1, kind=SlotKind.GPU),
    ),
    port_low=20000,
    port_high=20003,
    job_id="job",
)


@pytest.mark.parametrize(
    ("shown", "slots"),
    [
        pytest.param(view(node(slots=2)), [(0,), (1,)], id="free"),
        pytest.param(view(node(slots=2), taken=frozenset({0})), [(1,)], id="of another job"),
        pytest.param(view(node(slots=2), strangers={1: "python 77"}), [(0,)], id="a stranger's"),
        pytest.param(view(QUARANTINED), [(1,)], id="in quarantine"),
        pytest.param(view(node(slots=2), seen_at=NOW - 4), [], id="of a silent node"),
        pytest.param(view(node(slots=2, job_id="other")), [], id="of a node for another job"),
    ],
)
def test_new_pods_get_only_slots_that_are_free_and_fit(shown, slots):
    assert [site_slots for _, site_slots in put(spec(), cluster(shown), 4)] == slots


def test_slots_of_leaving_pods_are_taken_only_when_nothing_else_is_free():
    nodes = cluster(view(node("a", 2)), view(node("b", 1)))
    leaving = {"a": frozenset({0})}
    assert put(spec(), nodes, 2, leaving=leaving) == [("a", (1,)), ("b", (0,))]
    assert put(spec(), nodes, 3, leaving=leaving) == [("a", (1,)), ("b", (0,)), ("a", (0,))]


def test_slots_of_pods_that_stay_are_never_given_again():
    held = {"a": frozenset({0, 2})}
    assert put(spec(), cluster(view(node("a", 4))), 9, held=held) == [("a", (1,)), ("a", (3,))]


@pytest.mark.parametrize(
    ("job_id", "folders", "folder", "expected"),
    [
        ("job", (), None, True),
        ("other", (), None, False),
        (None, ("digits",), "digits", True),
        (None, ("digits",), "words", False),
        (None, ("digits",), None, False),
        ("job", (), "digits", True),
    ],
)
def test_a_node_serves_the_job_it_was_started_for_or_those_whose_folder_it_has(
    job_id, folders, folder, expected
):
    shown = node(job_id=job_id, folders=folders)
    assert serves(spec(folder=folder), shown) is expected


def test_a_job_with_args_runs_only_where_the_client_gives_them():
    old, new = (node(gives_args=gives) for gives in (False, True))
    assert [serves(spec(args=args), old) for args in ((), ("--lr",))] == [True, False]
    assert [serves(spec(args=args), new) for args in ((), ("--lr",))] == [True, True]
    assert shortage(view(old), args=("--lr",)) == (
        "the job clients of a are of a version that gives no args; start them again with this one"
    )


def shortage(*views: NodeView, **changes: Any) -> str:
    return explain_shortage(spec(**changes), cluster(*views), NOW, wanted=3, placeable=1)


def test_a_shortage_names_who_is_in_the_way():
    assert "PADDLE_JOB_ID=job" in shortage()
    assert "'digits'" in shortage(folder="digits")
    assert "silent" in shortage(view(node("a"), seen_at=0.0))
    bad = replace(node("b", 1), slots=(Slot(index=0, kind=SlotKind.GPU, usable=False, reason="X"),))
    text = shortage(view(node("a"), taken=frozenset({1}), strangers={2: "python 77"}), view(bad))
    assert text.startswith("only 1 of 3 pods find a place")
    for part in ("1 taken by other jobs", "slot 2 used by python 77", "slot 0 unusable (X)"):
        assert part in text


def site(name: str = "a", slots: tuple[int, ...] = (0,), low: int = 20000, high: int = 20007):
    return Site(node_id=name, addr=f"addr-{name}", slots=slots, port_low=low, port_high=high)


def test_ports_go_round_through_the_range():
    sites = (site(slots=(0, 1)), site(slots=(2,)))
    first = deal_ports(sites, cluster(), avoid={}, last_ports={})
    assert first == ((20000, 20001), (20002,))
    second = deal_ports(sites, cluster(), avoid={}, last_ports={"a": 20002})
    assert second == ((20003, 20004), (20005,))
    third = deal_ports(sites, cluster(), avoid={}, last_ports={"a": 20006})
    assert third == ((20007, 20000), (20001,))


def test_ports_of_the_stage_before_and_of_other_jobs_are_left_out():
    nodes = cluster(view(node("a"), ports_taken=frozenset({20001})))
    avoid = {"addr-a": frozenset({20000})}
    assert deal_ports((site(slots=(0, 1)),), nodes, avoid=avoid, last_ports={}) == ((20002, 20003),)


def test_ports_of_a_wide_range_are_dealt_at_once():
    """The server does so while all other requests wait."""
    sites = tuple(site(name, slots=(0, 1), low=1024, high=65535) for name in "abcdefgh")
    began_s = time.process_time()
    ports = deal_ports(sites, cluster(), avoid={}, last_ports={"a": 40000, "b": 64590})
    assert time.process_time() < began_s + 5
    assert ports[:3] == ((40001, 40002), (64591, 64592), (1024, 1025))


@given(
    shapes=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    last_ports=st.integers(20000, 20079),
    avoid=st.frozensets(st.integers(20000, 20079), max_size=50),
)
def test_no_two_ranks_of_a_stage_share_a_port_whatever_is_in_use(shapes, last_ports, avoid):
    sites = tuple(site(slots=tuple(range(n)), high=20079) for n in shapes)
    ports = deal_ports(sites, cluster(), avoid={"addr-a": avoid}, last_ports={"a": last_ports})
    flat = [port for own in ports for port in own]
    assert [len(own) for own in ports] == shapes
    assert len(set(flat)) == len(flat)
    assert all(20000 <= port <= 20079 for port in flat)
    assert avoid.isdisjoint(flat)
