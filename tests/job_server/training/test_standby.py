"""A second set of trainers that waits for a crash: when it is prepared, and what it takes over."""

from dataclasses import replace
from typing import Any

import pytest

from job_server.api import wire
from job_server.cluster.placement import Cluster, NodeView
from job_server.jobs.events import Tick
from job_server.training import machine
from job_server.training.core import changes
from job_server.training.rules.standby import MOST_FAILURES, likely_failures
from tests.job_server.world import RUNNING, World, node, records, trains, world


def stands_by(standby: int = 1, **spec: Any) -> World:
    """Return a world whose job trains and has a second set of trainers ready."""
    made = trains(world(overlap="auto", standby=standby, total_steps=4000, **spec))
    return until_ready(made)


def until_ready(made: World, rounds: int = 200) -> World:
    for _ in range(rounds):
        if made.job.preparing is not None and made.preparing.stands_by:
            return made
        made.round()
    raise AssertionError(f"nobody stands by: {made.reasons[-30:]}")


def test_a_standby_is_prepared_once_training_is_settled_and_the_job_is_called_running():
    made = world(overlap="auto", standby=1)
    made.run_until(RUNNING)
    made.rounds(4)
    assert made.job.preparing is None
    made = stands_by()
    assert made.preparing.pod_ids == made.active.pod_ids
    assert made.job.state is RUNNING
    made.rounds(400)  # it is never cut for, and never too late
    assert made.preparing.stands_by


def test_a_crash_puts_the_standby_in_force_from_the_newest_snapshot():
    made = stands_by()
    standby = made.preparing.stage
    made.crash()
    made.rounds(6)
    assert made.active.stage == standby
    assert made.active.restore_from is not None
    assert made.active.way is wire.Way.REPLACE
    assert made.job.lineage.redone_steps <= 3  # the world takes a snapshot every three steps
    until_ready(made)


def test_a_change_goes_before_the_standby_which_is_prepared_again_for_its_outcome():
    made = stands_by(pods=2, max_pods=3)
    first = made.preparing.stage
    made.resize(1)
    assert made.preparing.stage > first
    assert not made.preparing.standby
    until_ready(made)
    assert len(made.preparing.members) == 1


def test_a_standby_that_fails_is_no_crash_and_is_tried_again_later():
    made = stands_by()
    standby = made.preparing.stage
    made.kill_prepared(made.launchers()[0][2])
    made.rounds(2)
    assert made.job.preparing is None
    assert made.job.state is RUNNING
    assert made.job.lineage.redone_steps == 0
    until_ready(made, 400)
    assert made.preparing.stage > standby
    waited = []
    for _ in range(3):  # ever later, where it always fails
        until_ready(made, 2000)
        failed_at = made.now
        made.kill_prepared(made.launchers()[0][2])
        made.rounds(2)
        waited.append(round((made.job.standby.retry_at - failed_at) / 60))
    assert waited == [2, 4, 8]


def test_the_loss_of_a_pod_takes_its_standby_with_it():
    made = stands_by()
    made.kill_shim("pod_0_0")
    made.rounds(40)
    assert "pod_0_0" not in made.active.pod_ids
    assert made.job.state is RUNNING


def test_a_standby_that_takes_over_leaves_alone_what_was_asked_for_since():
    made = stands_by(pods=4, max_pods=6)  # there are four slots
    made.resize(6)
    assert made.preparing.stands_by
    made.crash()
    made.rounds(6)
    assert len(made.active.members) == 4
    assert made.job.target == 6


# --- one pod less -------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_standby_of_two_takes_over_without_the_pod_that_is_lost_and_grows_back(victim):
    made = stands_by(2, pods=3, max_pods=3)
    standby, before = made.preparing, made.active.pod_ids
    assert standby.survivable_failures[:3] == tuple((pod_id,) for pod_id in before)
    made.kill_shim(before[victim])
    made.rounds(8)
    record = next(each for each in records(made) if each.stage == standby.stage)
    assert record.committed_at is not None
    assert (record.pods, record.reason) == (2, f"standby, without {before[victim]}")
    assert record.redone_steps <= 3
    trains(made)
    made.rounds(30)
    assert len(made.active.members) == 3, "it has grown back"
    assert before[victim] not in made.active.pod_ids
    assert made.job.target == 3


def test_a_node_that_is_lost_takes_all_its_pods_and_the_standby_does_without_them():
    made = stands_by(2, pods=4, max_pods=4)  # two nodes of two
    standby = made.preparing
    assert len(standby.survivable_failures) == 4 + 2
    made.power_off(made.nodes["b"])
    made.rounds(12)
    assert made.active.stage == standby.stage
    assert {member.pod.node_id for member in made.active.members} == {"a"}
    assert [member.pod.ranks for member in made.active.members] == [(0,), (1,)]


def test_two_pods_of_two_nodes_are_more_than_a_standby_can_do_without():
    made = stands_by(2, pods=4, max_pods=4)
    standby, before = made.preparing, made.active
    for name in ("a", "b"):
        made.kill_shim(next(m.pod.pod_id for m in before.members if m.pod.node_id == name))
    made.rounds(20)
    record = next(each for each in records(made) if each.stage == standby.stage)
    assert record.outcome.startswith("abandoned")
    made.run_until(RUNNING)
    assert len(made.active.members) in (2, 3, 4)


def test_a_standby_of_two_takes_over_whole_from_a_trainer_that_crashes():
    made = stands_by(2, pods=3, max_pods=3)
    standby = made.preparing.stage
    made.crash(made.active.pod_ids[1])
    made.rounds(6)
    assert made.active.stage == standby
    assert len(made.active.members) == 3
    assert made.active.missing_pods == ()


def test_a_pod_that_an_operator_has_killed_is_done_without():
    made = stands_by(2, pods=3, max_pods=3)
    standby, before = made.preparing.stage, made.active.pod_ids
    made.kill(pod_id=before[1])
    made.rounds(8)
    record = next(each for each in records(made) if each.stage == standby)
    assert record.committed_at is not None
    assert (made.job.budget.failures, made.job.budget.preemptions) == (0, 0)


def test_a_standby_does_not_take_over_below_the_least_pods_of_the_job():
    made = stands_by(2, pods=2, max_pods=2, min_pods=2)
    standby, before = made.preparing.stage, made.active.pod_ids
    made.kill_shim(before[1])
    made.rounds(20)
    record = next(each for each in records(made) if each.stage == standby)
    assert record.outcome.startswith("abandoned")


def test_more_pods_than_provided_for_are_said_once_and_the_standby_covers_crashes():
    made = stands_by(2, pods=10, max_pods=10, slots=5)
    assert made.preparing.survivable_failures == ()
    said = [reason for reason in made.reasons if "standby 2 acts as 1" in reason]
    assert len(said) == 1
    made.rounds(4)
    made.crash(made.active.pod_ids[1])
    made.rounds(6)
    until_ready(made)
    assert [reason for reason in made.reasons if "standby 2 acts as 1" in reason] == said


def test_losses_are_each_pod_and_each_node_but_never_all():
    def pod(rank: int, node_id: str) -> wire.PlanPod:
        return wire.PlanPod(
            pod_id=f"p{rank}",
            pod_rank=rank,
            node_id=node_id,
            addr="a",
            slots=(rank,),
            ranks=(rank,),
            ports=(20000 + rank,),
        )

    assert likely_failures((pod(0, "a"),)) == ()
    assert likely_failures((pod(0, "a"), pod(1, "a"))) == (("p0",), ("p1",))
    mixed = (pod(0, "a"), pod(1, "b"), pod(2, "a"))
    assert likely_failures(mixed) == (("p0",), ("p1",), ("p2",), ("p0", "p2"))
    many = tuple(pod(rank, str(rank % 2)) for rank in range(MOST_FAILURES))
    assert len(likely_failures(many)) == MOST_FAILURES


def gpus(used_bytes: int, seen_at: float = 0.0) -> Cluster:
    slot = {"kind": wire.SlotKind.GPU, "memory_bytes": 100}
    bare = node("a", 2)
    slots = tuple(replace(each, **slot) for each in bare.slots)  # type: ignore[arg-type]
    used = {0: used_bytes, 1: used_bytes}
    return Cluster(
        nodes=(NodeView(node=replace(bare, slots=slots), seen_at=seen_at, memory_used=used),)
    )


def test_the_memory_of_a_standby_that_is_dismissed_lets_a_change_go_by_replace_all_the_same():
    made = stands_by(nodes=1, pods=2)
    assert changes.choose_way(made.job, gpus(80)) is wire.Way.JOIN
    assert changes.choose_way(made.job, gpus(80), stood_by=True) is wire.Way.REPLACE
    assert changes.choose_way(made.job, gpus(98), stood_by=True) is wire.Way.JOIN


@pytest.mark.parametrize(
    ("standby", "used", "said"),
    [
        (1, 80, "no standby: a GPU of this job has no room for a second trainer"),
        (2, 20, "standby 2 acts as 1, for crashes of trainers only: on GPUs"),
    ],
)
def test_where_a_standby_cannot_act_the_job_says_so_once(standby, used, said):
    made = trains(world(overlap="auto", standby=standby, nodes=1, total_steps=4000))
    job, later = made.job, made.now + 2.0
    reasons = []
    for _ in range(8):
        later += 1.0
        job, reason = machine.step(job, Tick(), later, gpus(used, later))
        reasons.append(reason)
    assert len([each for each in reasons if said in each]) == 1, reasons
