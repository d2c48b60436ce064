"""A training leaves the slots that are in quarantine, and goes on with the others."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from job_server.api.wire import JobState, Way
from job_server.jobs.events import NodesChanged
from tests.job_server.world import World, trains, world

WHY = "XID 79: it has fallen off the bus"


def eight() -> World:
    return trains(world(nodes=1, slots=8, pods=8, max_pods=8, overlap="on", total_steps=4000))


def quarantine(made: World, slot: int, *, fatal: bool, why: str = WHY) -> None:
    made.quarantine("a", slot, why, fatal=fatal)


def until(made: World, holds: Callable[[], bool]) -> None:
    for _ in range(300):
        if holds():
            return
        made.round()
    raise AssertionError("\n".join(made.reasons[-20:]))


def places(made: World) -> list[tuple[str, tuple[int, ...]]]:
    assert made.job.active is not None
    return sorted((member.pod.node_id, member.pod.slots) for member in made.job.active.members)


def slots_in_use(made: World) -> list[int]:
    assert made.job.active is not None
    return sorted(slot for member in made.job.active.members for slot in member.pod.slots)


@pytest.mark.parametrize("fatal", [False, True])
def test_a_job_of_eight_gpus_goes_on_with_seven_and_takes_the_eighth_back(fatal: bool):
    made = eight()
    quarantine(made, 5, fatal=fatal)
    until(made, lambda: slots_in_use(made) == [0, 1, 2, 3, 4, 6, 7] and trains_now(made))
    assert made.job.budget.failures == 0
    assert any(f"slot 5 of a is in quarantine: {WHY}" in reason for reason in made.reasons)
    assert made.job.target == 8
    quarantine(made, 5, fatal=False, why="")
    until(made, lambda: slots_in_use(made) == list(range(8)) and trains_now(made))
    assert made.job.resizes == 0


def trains_now(made: World) -> bool:
    return made.job.state is JobState.RUNNING and made.job.preparing is None


def test_who_can_go_on_leaves_without_a_step_lost():
    made = eight()
    quarantine(made, 5, fatal=False)
    until(made, lambda: len(slots_in_use(made)) == 7)
    assert made.job.kills == 0, made.reasons
    assert not any("is over" in reason for reason in made.reasons)
    assert [record.way for record in made.job.records][-1] is Way.REPLACE
    assert sum(record.redone_steps for record in made.job.records) == 0


def test_who_could_go_on_is_ended_where_the_planned_change_did_not_come_about():
    made = trains(world(nodes=1, slots=3, total_steps=4000, pods=2))
    made.script_fails = 1  # of the pod that is to come
    quarantine(made, 0, fatal=False)
    until(made, lambda: slots_in_use(made) == [1, 2] and trains_now(made))
    assert made.job.kills == 1


def test_a_job_none_of_whose_pods_stays_is_not_changed_by_join():
    made = trains(world(nodes=1, slots=2, pods=1, max_pods=2, overlap="join", total_steps=4000))
    made.rounds(4)
    quarantine(made, 0, fatal=False)
    until(made, lambda: slots_in_use(made) == [1] and trains_now(made))
    made.rounds(4)
    last = made.job.records[-1]
    assert (last.way, last.redone_steps) == (Way.REPLACE, 0)


def test_where_another_slot_is_free_the_job_keeps_its_number_of_pods():
    made = trains(world(nodes=1, slots=3, total_steps=4000, pods=2))
    quarantine(made, 0, fatal=False)
    until(made, lambda: slots_in_use(made) == [1, 2] and trains_now(made))


def test_a_job_that_may_not_be_smaller_stays_and_says_so_until_the_slot_is_well():
    made = trains(world(nodes=1, slots=2, total_steps=4000, pods=2, min_pods=2))
    quarantine(made, 1, fatal=False)
    made.rounds(20)
    assert slots_in_use(made) == [0, 1]
    (warning,) = made.status.warnings
    stays = "its pod stays, as there is no other place for it"
    assert warning == f"slot 1 of a is in quarantine: {WHY}; {stays}"
    quarantine(made, 1, fatal=False, why="")
    assert made.status.warnings == ()


def test_a_start_waits_with_the_reason_where_a_lost_gpu_leaves_too_few_slots():
    made = trains(world(nodes=1, slots=2, total_steps=4000, pods=2, min_pods=2))
    quarantine(made, 1, fatal=True)
    made.rounds(40)
    assert made.job.state in (JobState.WAITING, JobState.RECOVERING)
    assert WHY in made.status.reason + made.job.waiting
    quarantine(made, 1, fatal=False, why="")
    until(made, lambda: slots_in_use(made) == [0, 1] and trains_now(made))


def test_a_change_that_counts_on_the_slot_is_begun_again_without_it():
    made = trains(world(nodes=1, slots=4, total_steps=4000, pods=2, max_pods=4))
    made.resize(4)
    until(made, lambda: made.job.preparing is not None)
    quarantine(made, 3, fatal=True)
    until(made, lambda: slots_in_use(made) == [0, 1, 2] and trains_now(made))


def test_a_resize_does_not_count_on_a_trainer_that_is_being_ended():
    made = trains(world(nodes=1, slots=3, total_steps=4000, pods=3, max_pods=3))
    quarantine(made, 0, fatal=True)
    made.resize(2)
    made.pass_time(1.0)
    until(made, lambda: slots_in_use(made) == [1, 2] and trains_now(made))


def test_no_standby_is_prepared_on_a_slot_that_is_to_be_left():
    made = trains(
        world(nodes=1, slots=2, total_steps=4000, pods=2, min_pods=2, overlap="on", standby=1)
    )
    quarantine(made, 1, fatal=False)
    made.rounds(40)
    assert made.job.preparing is None
    quarantine(made, 1, fatal=False, why="")
    until(made, lambda: made.job.preparing is not None and made.job.preparing.stands_by)


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_job_leaves_a_slot_that_its_node_has_registered_without(nodes: int):
    made = trains(world(nodes=nodes, pods=2, overlap="on", total_steps=4000))
    sim, slots = made.nodes["a"], made.nodes["a"].node.slots
    sim.node = replace(sim.node, slots=slots[:1])  # its client was started again, with fewer
    made.send(NodesChanged())
    size = 2 if nodes == 2 else 1
    until(made, lambda: places(made) == [("a", (0,)), ("b", (0,))][:size] and trains_now(made))
    assert sum(record.redone_steps for record in made.job.records) == 0
    gone = "slot 1 of a is not there any more: its client has registered without it"
    assert any(gone in reason for reason in made.reasons)
    assert (made.job.target, made.job.budget.failures) == (2, 0)
    sim.node = replace(sim.node, slots=slots)
    made.send(NodesChanged())
    until(made, lambda: len(places(made)) == 2 and trains_now(made))


def test_no_recovery_begins_on_a_slot_that_is_not_there_any_more():
    made = trains(world(nodes=2, pods=2, overlap="off", total_steps=4000))
    sim = made.nodes["a"]
    _, pod, launcher = made.launchers()[0]
    made.kill_trainer(pod, launcher)
    sim.node = replace(sim.node, slots=sim.node.slots[1:])
    until(made, lambda: places(made) == [("a", (1,)), ("b", (0,))] and trains_now(made))
