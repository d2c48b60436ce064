"""A training leaves a node that is drained, with no step lost, as long as it can."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from job_server.api.wire import JobState, Way
from job_server.jobs.events import NodesChanged
from job_server.training import views
from tests.job_server.world import World, trains, world

WHY = "its client was asked to end"


def drain(made: World, name: str, why: str = WHY) -> None:
    """What the registry makes of a node that is drained; "": it is used again."""
    sim = made.nodes[name]
    barred = {"usable": not why, "reason": why, "quarantine": why, "drained": bool(why)}
    slots = tuple(replace(slot, **barred) for slot in sim.node.slots)  # type: ignore[arg-type]
    sim.node = replace(sim.node, slots=slots)
    made.send(NodesChanged())


def nodes_in_use(made: World) -> set[str]:
    return {pod.site.node_id for pod in made.job.pods if not pod.released}


def until(made: World, holds: Callable[[], bool]) -> None:
    for _ in range(300):
        if holds():
            return
        made.round()
    raise AssertionError("\n".join(made.reasons[-20:]))


def redone(made: World) -> int:
    return made.job.lineage.redone_steps + sum(each.redone_steps for each in made.job.records)


@pytest.mark.parametrize("overlap", ["off", "on", "join"])
def test_the_pods_of_a_drained_node_go_to_another_by_a_planned_change(overlap: str):
    made = trains(world(nodes=3, slots=1, pods=2, max_pods=2, overlap=overlap, total_steps=4000))
    assert nodes_in_use(made) == {"a", "b"}
    drain(made, "b")
    assert views.leaves(made.job, "b")
    assert not views.leaves(made.job, "a")
    until(made, lambda: nodes_in_use(made) == {"a", "c"})
    assert not views.leaves(made.job, "b")
    assert redone(made) == 0
    assert all(record.way is not Way.START for record in made.job.records[1:])
    assert made.job.resizes == made.job.budget.preemptions == made.job.budget.failures == 0
    assert any(f"node b is drained: {WHY}" in reason for reason in made.reasons)


@pytest.mark.parametrize("overlap", ["off", "on", "join"])
def test_a_job_that_leaves_all_its_nodes_hands_its_state_on(overlap: str):
    """One of the pods that leave stays for a stage: nothing else brings the state to a new node."""
    made = trains(world(nodes=2, slots=2, pods=2, max_pods=2, overlap=overlap, total_steps=4000))
    made.has_path = False
    assert nodes_in_use(made) == {"a"}
    drain(made, "a")
    until(made, lambda: nodes_in_use(made) == {"b"})
    assert redone(made) == 0
    until(made, lambda: len(made.active.members) == 2)
    assert made.job.target == 2


def test_where_no_slot_is_free_elsewhere_the_job_goes_on_smaller_and_grows_back():
    made = trains(world(nodes=2, slots=1, pods=2, max_pods=2, total_steps=4000))
    drain(made, "b")
    until(made, lambda: nodes_in_use(made) == {"a"})
    assert redone(made) == 0
    assert made.job.target == 2
    drain(made, "b", why="")
    until(made, lambda: nodes_in_use(made) == {"a", "b"})


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        pytest.param({"nodes": 1, "slots": 2}, "there is no other place for it", id="one node"),
        pytest.param(
            {"nodes": 2, "slots": 1, "min_pods": 2}, "there is no other place", id="min_pods"
        ),
        pytest.param(
            {"nodes": 2, "slots": 1, "pods": 1, "max_pods": 1}, "max_pods is 1", id="max_pods"
        ),
        pytest.param({"nodes": 3, "slots": 1, "elastic": False}, "afresh", id="no elastic loop"),
    ],
)
def test_a_job_that_cannot_leave_stays_and_says_so_and_its_client_need_not_wait(spec, text):
    made = trains(world(**{"pods": 2, "max_pods": 2, "total_steps": 4000, **spec}))
    drain(made, "a")
    assert not views.leaves(made.job, "a")
    made.rounds(20)
    assert made.job.state is JobState.RUNNING
    (warning,) = (text for text in made.status.warnings if "drained" in text)
    assert text in warning
    drain(made, "a", why="")
    assert not [text for text in made.status.warnings if "drained" in text]


@pytest.mark.parametrize("end", ["pause", "node lost"])
def test_no_pod_is_said_to_stay_on_a_drained_node_once_none_is_there(end):
    made = trains(world(nodes=1, slots=2, pods=2, max_pods=2, total_steps=4000))
    drain(made, "a")
    made.rounds(20)
    assert [text for text in made.status.warnings if "its pod stays" in text]
    if end == "pause":
        made.pause()
    else:
        made.client_leaves(made.nodes["a"])
    until(made, lambda: not made.job.pods)
    assert not made.status.warnings


@pytest.mark.parametrize("leaves", [True, False])
def test_a_node_is_said_to_have_room_again_only_if_it_has(leaves):
    """A job without a pod there any more said so of a full disk."""
    made = trains(world(nodes=1, slots=2, pods=2, max_pods=2, total_steps=4000))
    made.nodes["a"].shortage = "its disk is nearly used up"
    made.send(NodesChanged())
    assert list(made.status.warnings) == ["node a: its disk is nearly used up"]
    if leaves:
        made.pause()
        until(made, lambda: not made.job.pods)
    else:
        made.nodes["a"].shortage = ""
    made.send(NodesChanged())
    assert not list(made.status.warnings)
    assert ("room again" in "".join(made.reasons)) is not leaves


def test_a_crash_on_a_drained_node_recovers_there_where_the_state_is_and_then_leaves():
    made = trains(world(nodes=2, slots=2, pods=2, max_pods=2, total_steps=4000))
    made.has_path = False
    step = made.job.progress.step
    assert step > 0
    made.crash()
    drain(made, "a")
    until(made, lambda: nodes_in_use(made) == {"b"})
    assert made.job.state is JobState.RUNNING
    assert made.job.progress.step >= step


def test_a_drain_whose_new_pod_never_gets_ready_is_tried_again_and_kills_nothing():
    made = trains(world(nodes=3, slots=1, pods=2, max_pods=2, total_steps=4000))
    made.script_fails = 1
    drain(made, "b")
    until(made, lambda: nodes_in_use(made) == {"a", "c"} and made.job.preparing is None)
    assert made.job.kills == 0
    assert redone(made) == 0
