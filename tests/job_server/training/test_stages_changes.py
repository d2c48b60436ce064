"""Planned changes: in time, one at a time, without losing a step."""

import sys
from dataclasses import replace
from itertools import pairwise

import pytest

from job_server.api import wire
from job_server.api.wire import (
    DesiredState,
    JobState,
    Order,
    PodStagePhase,
    ReportKind,
    ScriptKind,
    ScriptSpec,
    SnapshotRef,
    Way,
)
from job_server.jobs.events import RequestRefused
from job_server.training import views
from job_server.training.core.job import same_but_progress
from tests.job_server.world import RUNNING, World, ids, node, records, tell, trains, world

SUCCEEDED = JobState.SUCCEEDED


def orders(made: World, pod_id: str) -> dict[int, Order]:
    return {plan.stage: plan.order for plan in made.orders(pod_id).plans}


def test_a_drain_redoes_no_step_and_keeps_pods_and_ranks():
    made = trains(world(pods=3))
    before = {pod.pod_id: pod for pod in views.running_pods(made.job)}
    made.resize(2)
    made.run_until(JobState.CUTTING_OVER)
    trains(made)
    made.resize(4)
    made.run_until(JobState.CUTTING_OVER)
    trains(made)
    assert ids(made) == ("pod_0_0", "pod_1_0", "pod_2_1", "pod_3_1")
    for pod in views.running_pods(made.job)[:2]:
        assert (pod.slots, pod.ranks) == (before[pod.pod_id].slots, before[pod.pod_id].ranks)
    first, second, third = records(made)
    assert [r.way for r in records(made)] == [Way.START, Way.DRAIN, Way.DRAIN]
    assert second.first_step == (first.last_step or 0) + 1
    assert third.first_step == (second.last_step or 0) + 1
    assert made.job.lineage.redone_steps == 0
    assert second.pause_s is not None
    assert made.job.resizes == 2


def test_a_stage_goes_through_its_phases_and_each_pod_is_told_its_part():
    made = trains(world())
    told: list[tuple[Order | None, Order | None]] = []
    made.resize(1)
    for _ in range(40):
        seen = orders(made, "pod_0_0")
        pair = (seen.get(1), seen.get(2))
        if not told or told[-1] != pair:
            told.append(pair)
        made.round(0.1)
    assert told == [
        (Order.GO, Order.PREPARE),
        (Order.CUT, Order.PREPARE),
        (Order.END, Order.PREPARE),
        (Order.END, Order.START),
        (None, Order.GO),
    ]


def test_a_pod_that_comes_later_is_told_the_framework_of_the_others():
    """So that it imports that before its first trainer is wanted, and keeps a spare."""
    made = trains(world())
    assert made.orders("pod_0_0").adapter == ""
    tell(made, "pod_1_0", ReportKind.PROGRESS, 1, step=7, adapter="framework.adapter")
    made.stop_server()
    made.start_server()
    made.resize(3)
    made.run_until(JobState.CUTTING_OVER)
    assert made.orders("pod_2_0").adapter == "framework.adapter"


def test_a_leaving_pod_holds_its_snapshot_until_the_next_stage_has_one():
    made = trains(world())
    made.resize(1)
    made.run_until(JobState.CUTTING_OVER)
    made.run_until(RUNNING)
    wants = {p.pod_id: p.want for n in "ab" for p in views.node_pods(made.job).get(n, ())}
    assert wants == {"pod_0_0": DesiredState.RUN, "pod_1_0": DesiredState.HOLD}
    assert made.orders("pod_1_0").leave
    made.rounds(12)  # a snapshot every third step
    assert views.pod_orders(made.job).get("pod_1_0") is None
    assert not made.job.pod("pod_1_0")


def test_trainers_that_never_call_the_loop_are_changed_by_stop():
    made = world(elastic=False)
    made.run_until(RUNNING)
    made.resize(3)
    made.run_until(JobState.CUTTING_OVER)
    assert all(Order.END in orders(made, pod_id).values() for pod_id in ids(made))
    made.run_until(RUNNING)
    assert records(made)[-1].way is Way.STOP
    assert len(ids(made)) == 3


@pytest.mark.parametrize(
    ("script", "spec", "said"),
    [
        ("- at: 1s\n  pods: 2\n", {}, "has 2 pods already"),
        ("- at: 1s\n  remove: 2\n", {}, "below the job's min_pods"),
        ("- at: 1s\n  remove: 1\n", {"min_pods": 2}, "0 pods|1 pods are below"),
        ("- at: 1s\n  add: 3\n", {}, "above the job's max_pods"),
        ("- at: 1s\n  kill: pod_7_7\n", {}, "does not run"),
        ("- at: 1s\n  kill: 9\n", {}, "does not run"),
        ("- at: 1s\n  add: 1\n", {"max_resizes": 0}, "max_resizes"),
    ],
)
def test_a_scripted_change_that_makes_no_sense_is_skipped_with_a_reason(script, spec, said):
    made = world(script=ScriptSpec(kind=ScriptKind.TIMELINE, text=script), **spec)
    made.run_until(RUNNING)
    made.rounds(8)
    assert made.job.state is RUNNING
    assert len(records(made)) == 1
    skipped = [reason for reason in made.reasons if "skipped" in reason]
    assert len(skipped) == 1
    assert any(part in skipped[0] for part in said.split("|"))


def queue(made: World) -> tuple[str, ...]:
    return made.status.queued_changes


def timeline(text: str) -> ScriptSpec:
    return ScriptSpec(kind=ScriptKind.TIMELINE, text=text)


@pytest.mark.parametrize(
    ("entries", "sizes"),
    [
        pytest.param("add: 1, add: 1, remove: 3", [2, 3, 1], id="relative ones add up"),
        pytest.param("add: 1, pods: 4, remove: 2", [2, 3, 2], id="from the newest number on"),
        pytest.param("add: 1, add: 1, remove: 1", [2, 3], id="to nothing"),
        pytest.param("add: 1, add: 4, remove: 2", [2, 3, 1], id="but for those out of bounds"),
        pytest.param("add: 1, add: 4", [2, 3], id="all of them out of bounds"),
    ],
)
def test_what_falls_due_during_a_change_becomes_one_change_to_the_newest_wish(entries, sizes):
    at = enumerate(entries.split(", "))
    made = world(script=timeline("".join(f"- {{at: {1 + i / 10}s, {e}}}\n" for i, e in at)))
    made.run_until(JobState.PREPARING)
    made.rounds(4)
    assert len(queue(made)) == 1
    made.rounds(60)
    assert [record.pods for record in records(made)] == sizes
    late = len(entries.split(", ")) - 1
    if len(sizes) > 2 and "4" not in entries:
        assert any(f"{late} changes that fell due meanwhile, as one" in r for r in made.reasons)
    assert queue(made) == ()


@pytest.mark.parametrize(
    ("entries", "away", "fewest", "at_last"),
    [
        pytest.param("remove: 1", "d", 3, 3, id="the one that is away is the one that goes"),
        pytest.param("remove: 2", "d", 2, 2, id="one more goes than is away"),
        pytest.param("remove: 1", "cd", 2, 3, id="fewer go than are away"),
        pytest.param("remove: 1, add: 1", "d", 3, 4, id="away and back, among changes"),
        pytest.param("remove: 1, add: 1", "bcd", 1, 4, id="there are the fewest already"),
        pytest.param("add: 1", "d", 3, 4, id="beyond the most that the job may have"),
        pytest.param("pods: 3, add: 1", "d", 3, 4, id="after an absolute one"),
    ],
)
def test_changes_count_pods_that_are_away_for_a_moment(entries, away, fewest, at_last):
    """Otherwise a job is smaller for good after each outage that meets a `remove`."""
    at = enumerate(entries.split(", "))
    script = timeline("".join(f"- {{at: {20 + i}s, {e}}}\n" for i, e in at))
    made = world(nodes=4, slots=1, pods=4, script=script, overlap="on", total_steps=10**6)
    trains(made)
    for name in away:
        made.quarantine(name, 0, "maintenance")
    made.rounds(80)
    made.heal()
    made.rounds(60)
    assert made.job.target == at_last
    assert len(ids(made)) == at_last
    assert min(each.pods for each in records(made) if each.committed_at is not None) == fewest


def test_a_change_that_a_crash_undoes_is_made_before_what_fell_due_meanwhile():
    """Asked for anew as the newest wish it would undo that, and the job stay smaller."""
    script = timeline("- {at: 9s, add: 1}\n- {at: 9.2s, add: 1}\n")
    made = trains(world(script=script, overlap="on", total_steps=10**6))
    made.run_until(JobState.PREPARING)
    made.round(0.3)
    made.crash("pod_0_0")
    made.deliver(made.launcher("pod_0_0"))
    for _ in range(10):
        if len(queue(made)) == 2:
            break
        made.round(0.1)
    assert queue(made) == ("add 1 pod", "resize to 3")
    made.rounds(60)
    assert len(ids(made)) == 4


def test_what_falls_due_right_after_a_kill_counts_from_what_is_wanted_by_then():
    entries = "- {at: 4s, kill: 0}\n- {at: 4s, pods: 3}\n- {at: 6s, add: 1}\n"
    made = world(script=timeline(entries), total_steps=10**6)
    made.run_until(RUNNING)
    made.rounds(90)
    assert len(ids(made)) == 4
    assert made.job.target == 4


def test_a_resize_by_hand_stands_among_what_fell_due_where_it_was_asked_for():
    made = world(script=timeline("- {at: 1s, add: 1}\n- {at: 1.5s, add: 1}\n"))
    made.run_until(JobState.CUTTING_OVER)
    made.resize(3)
    made.resize(1)
    assert queue(made) == ("add 1 pod", "resize to 1")
    made.rounds(60)
    assert [record.pods for record in records(made)] == [2, 3, 1]


@pytest.mark.parametrize(
    ("entries", "sizes"),
    [
        pytest.param("add: 1, kill: 0, kill: 0, kill: 0", [2, 3, 3], id="once each"),
        pytest.param("add: 1, remove: 1, kill: 0, add: 1", [2, 3, 2, 2, 3], id="in their order"),
        pytest.param("add: 1, kill: 0, add: 1, remove: 2", [2, 3, 3, 2], id="the rest comes after"),
    ],
)
def test_kills_that_fall_due_during_a_change_happen_after_it_and_once(entries, sizes):
    at = enumerate(entries.split(", "))
    made = world(script=timeline("".join(f"- {{at: {1 + i / 10}s, {e}}}\n" for i, e in at)))
    made.run_until(JobState.PREPARING)
    made.rounds(90)
    assert [record.pods for record in records(made)] == sizes
    assert sum("killing rank" in reason for reason in made.reasons) == 1
    assert made.job.budget.failures == 0


def test_trainers_that_start_more_slowly_than_the_script_changes_make_their_steps_all_the_same():
    script = ScriptSpec(kind=ScriptKind.ALTERNATE, interval_s=10.0)
    made = world(script=script, total_steps=40000)
    made.run_until(RUNNING)
    for _ in range(120):
        made.round(3.0)  # a message takes a round, and a start takes several
        assert len(queue(made)) <= 1
    stages_made = [each for each in records(made) if each.ended_at is not None]
    assert len(stages_made) > 3
    for record in stages_made:
        assert record.outcome == "ended", record
        assert record.last_step is not None, f"stage {record.stage} made no step"
    assert any("interval of 10 s is too short for this job" in each for each in made.reasons)


def test_trainers_that_have_not_yet_called_the_loop_are_left_time_to_do_so():
    """A change by stop would end them on their way, and the next ones as well."""
    script = ScriptSpec(kind=ScriptKind.ALTERNATE, interval_s=40.0)
    made = world(elastic=False, script=script, total_steps=40000)
    made.run_until(RUNNING)
    made.rounds(24, 3.0)  # they import, load data, build the model
    assert len(records(made)) == 1
    made.elastic = True
    made.rounds(10, 3.0)
    assert made.job.elastic
    assert len(records(made)) == 1
    made.rounds(16, 3.0)
    assert records(made)[1].way is Way.DRAIN
    assert records(made)[0].last_step is not None


def test_a_job_whose_trainers_never_call_the_loop_is_changed_once_that_is_known():
    made = world(elastic=False, script=timeline("- {at: 20s, add: 1}\n- {at: 200s, add: 1}\n"))
    made.run_until(RUNNING)
    made.rounds(36, 3.0)
    assert len(records(made)) == 1
    made.rounds(50, 3.0)
    assert [record.way for record in records(made)] == [Way.START, Way.STOP, Way.STOP]
    started = [record.committed_at or 0.0 for record in records(made)]
    assert started[1] - started[0] >= made.job.spec.prepare_timeout_s
    assert started[2] - started[0] == pytest.approx(200, abs=20)  # at its own time again


@pytest.mark.parametrize(("pods", "field"), [(5, "max_pods"), (1, "min_pods")])
def test_a_resize_beyond_the_jobs_limits_is_refused(pods, field):
    made = trains(world(min_pods=2))
    with pytest.raises(RequestRefused, match=field):
        made.resize(pods)


def test_a_change_that_is_not_ready_in_time_is_abandoned_and_nothing_is_lost():
    made = trains(world(prepare_timeout_s=5.0))
    made.nodes["b"].client = False  # starts no pod
    made.nodes["b"].seen_at += 1000  # ... but does not look silent
    made.resize(3)
    step = made.job.progress.step
    made.rounds(14)
    assert made.job.state is RUNNING
    assert records(made)[-1].outcome.startswith("abandoned: not ready within 5 s: pod_2_0")
    assert made.job.progress.step > step
    assert made.job.target == 2
    assert made.job.budget.failures == 0


def test_a_new_pod_whose_package_script_fails_costs_only_the_change_which_is_tried_again():
    made = trains(world())
    made.script_fails = 2
    made.resize(3)
    made.rounds(6)
    assert made.job.state is RUNNING
    assert "the package script failed" in records(made)[-1].outcome
    assert "growing to 3 pods is tried again in 30 s" in made.reasons[-1]
    made.rounds(220)
    assert ids(made) == ("pod_0_0", "pod_1_0", "pod_2_0_2")
    again = "growing back to 3"
    assert [each.reason for each in records(made)[1:]] == ["resize to 3", again, again]
    assert made.job.budget.failures == 0


def test_a_change_whose_new_pod_did_not_start_is_given_up_by_a_resize_to_what_there_is():
    made = trains(world())
    made.script_fails = 1
    made.resize(3)
    made.rounds(6)
    made.resize(2)
    made.rounds(100)
    assert ids(made) == ("pod_0_0", "pod_1_0")
    assert len(records(made)) == 2


def test_parked_ranks_go_on_when_a_new_pod_dies_before_the_commit():
    made = trains(world())
    made.resize(3)
    made.run_until(JobState.CUTTING_OVER)
    made.rounds(1)
    step = made.job.progress.step
    made.pod("pod_2_0").end(code=1)
    made.rounds(30, 0.2)
    assert made.job.state is RUNNING
    assert made.job.progress.step > step
    assert ids(made) == ("pod_0_0", "pod_1_0")


def test_a_start_that_fails_after_the_drain_recovers_the_old_pods_from_the_drained_step():
    made = trains(world())
    made.resize(3)
    made.run_to(Order.START)
    drained = made.job.progress.step
    tell(made, "pod_2_0", ReportKind.FAILED, 2, rank=2, code=1, reason="out of memory")
    assert made.job.state is JobState.RECOVERING
    trains(made)
    assert ids(made) == ("pod_0_0", "pod_1_0")
    last = records(made)[-1]
    assert (last.way, last.first_step, last.redone_steps) == (Way.START, drained + 1, 0)
    assert "out of memory" in records(made)[1].outcome
    assert made.job.budget.failures == 1


def test_no_change_starts_once_a_trainer_has_said_done():
    made = trains(world(total_steps=14))
    made.resize(3)
    tell(made, "pod_0_0", ReportKind.DONE, 1, step=made.job.progress.step)
    assert made.job.preparing is None
    assert records(made)[-1].outcome == "abandoned: training is complete"
    made.resize(3)
    assert made.job.preparing is None
    made.run_until(SUCCEEDED)
    assert made.job.records[-1].outcome.startswith(("ended", "abandoned"))


def test_a_pod_that_has_finished_stops_a_change_of_a_job_without_the_loop():
    made = world(elastic=False)
    made.run_until(RUNNING)
    made.resize(3)
    tell(made, "pod_0_0", ReportKind.EXITED, 1, code=0)
    made.nodes["a"].pods["pod_0_0"].end(code=0)
    made.client_acts(made.nodes["a"])
    assert made.job.preparing is None or made.preparing.phase is not Order.PREPARE
    member = made.active.member("pod_0_0")
    assert member
    assert member.phase is PodStagePhase.FINISHED
    tell(made, "pod_1_0", ReportKind.EXITED, 1, code=0)
    made.nodes["a"].pods["pod_1_0"].end(code=0)
    made.rounds(3)
    assert made.job.state is SUCCEEDED


def test_a_growth_without_a_free_slot_waits_for_one():
    made = trains(world(nodes=1))
    made.resize(3)
    assert made.job.state is RUNNING
    assert "only 2 of 3 pods find a place" in made.job.reason
    made.nodes["b"] = type(made.nodes["a"])(node("b"), made.now, registered=False)
    made.rounds(20)
    assert len(ids(made)) == 3


def test_late_news_of_an_earlier_cut_does_not_count_for_a_later_one():
    made = trains(world())
    made.resize(1)
    made.run_until(JobState.CUTTING_OVER)
    tell(made, "pod_0_0", ReportKind.DRAINED, 1, step=made.job.progress.step - 2)
    member = made.active.member("pod_0_0")
    assert member
    assert member.phase is PodStagePhase.CUTTING


def test_a_stage_is_prepared_with_ports_that_the_one_before_does_not_use():
    made = trains(world())
    old = {(pod.addr, port) for pod in views.running_pods(made.job) for port in pod.ports}
    made.resize(3)
    new = {(m.pod.addr, port) for m in made.preparing.members for port in m.pod.ports}
    assert old.isdisjoint(new)
    held = {(a, p) for a, ports in views.ports_held(made.job).items() for p in ports}
    assert held == old | new


# --- replace and join: the trainers are there before the cut --------------------------------------


def beside(way: Way) -> World:
    """Return a world with a change in PREPARE whose way is `way`; no launcher knows it yet."""
    made = trains(world())
    made.resize(3)
    made.job = replace(made.job, preparing=replace(made.preparing, way=way))
    return made


@pytest.mark.parametrize("way", [Way.REPLACE, Way.JOIN])
def test_replace_and_join_commit_when_all_have_drained_and_end_the_old_after_the_first_step(way):
    made = beside(way)
    old, new = ("pod_0_0", "pod_1_0"), ("pod_0_0", "pod_1_0", "pod_2_0")
    made.client_acts(made.nodes["b"])
    tell(made, new, ReportKind.READY, 2)
    assert orders(made, "pod_0_0") == {1: Order.CUT, 2: Order.PREPARE}
    step = made.job.progress.step
    tell(made, old, ReportKind.DRAINED, 1, step=step, snapshot=SnapshotRef(stage=1, step=step))
    assert orders(made, "pod_0_0") == {1: Order.CUT, 2: Order.GO}
    assert made.orders("pod_2_0").plans[0].restore_from == wire.RestoreFrom(
        stage=1, step=step, pods=old
    )
    tell(made, "pod_2_0", ReportKind.FIRST_STEP, 2, step=step + 1)
    assert orders(made, "pod_0_0") == {1: Order.END, 2: Order.GO}
    tell(made, old, ReportKind.ENDED, 1)
    assert orders(made, "pod_0_0") == {2: Order.GO}
    assert records(made)[-1].redone_steps == 0


@pytest.mark.parametrize(
    ("refs", "kept", "everywhere"),
    [
        pytest.param((3, None, 3), True, True, id="one of each node is enough"),
        pytest.param((3, 3, None), True, False, id="a node has none"),
        pytest.param((3, 3, 2), True, False, id="a node has an older state of the same step"),
        pytest.param((3, 3, 3), False, False, id="they have parked with a later state"),
    ],
)
def test_trainers_ask_nobody_where_every_node_has_what_they_begin_from(refs, kept, everywhere):
    made = trains(world(pods=3))  # two on node a, one on b
    made.resize(4)
    made.job = replace(made.job, preparing=replace(made.preparing, way=Way.REPLACE))
    made.client_acts(made.nodes["b"])
    tell(made, ("pod_0_0", "pod_1_0", "pod_2_0", "pod_3_0"), ReportKind.READY, 2)
    step = made.job.progress.step
    for pod_id, serial in zip(("pod_0_0", "pod_1_0", "pod_2_0"), refs, strict=True):
        ref = None if serial is None else SnapshotRef(stage=1, step=step, serial=serial)
        before = made.job
        made.pod(pod_id).snapshot = ref
        tell(made, pod_id, ReportKind.DRAINED, 1, step=step, snapshot=ref, snapshot_is_current=kept)
        unwritten = pod_id != "pod_2_0"
        assert same_but_progress(before, made.job) is unwritten, "only what is told of"
    source = made.active.restore_from
    assert source is not None
    assert (source.serial, source.local_on_all_nodes) == (3, everywhere)


@pytest.mark.parametrize("overlap", ["off", "on", "join"])
@pytest.mark.parametrize("has_path", [True, False])
def test_a_change_that_would_throw_away_what_was_trained_is_called_off(overlap, has_path):
    """Without memory for a snapshot and without a checkpoint path only trainers hold the state."""
    made = world(overlap=overlap, slots=4)
    made.memory, made.has_path = False, has_path
    trains(made)
    before = made.job.progress.step
    made.resize(3)
    made.rounds(30)
    assert made.job.state is RUNNING
    done = has_path or overlap == "join"
    assert len(ids(made)) == (3 if done else 2)
    assert ("the script has no checkpoint=" in "".join(made.reasons)) is not done
    assert made.job.lineage.redone_steps == 0
    assert made.job.progress.step > before + 15


@pytest.mark.parametrize("overlap", ["on", "join"])
def test_a_change_on_one_node_is_one_after_which_nobody_asks(overlap):
    made = trains(world(nodes=1, slots=4, overlap=overlap))
    made.resize(3)
    made.run_until(JobState.CUTTING_OVER)
    trains(made)
    assert made.committed_alone == 1
    assert made.job.lineage.redone_steps == 0


@pytest.mark.parametrize("overlap", ["off", "auto"])
def test_a_change_is_called_off_where_the_shim_that_has_the_newest_state_does_not_answer(overlap):
    """An older state that was known of was taken for the one that the trainers had parked with."""
    made = trains(world(pods=1, overlap=overlap))
    made.shims_answer = False
    made.rounds(1)
    step = made.job.progress.step
    made.resize(2)
    made.rounds(20)
    assert made.active.stage == 1
    assert made.job.progress.step > step
    assert any("abandoned: the shim of pod_0_0, which holds the newest" in r for r in made.reasons)
    made.shims_answer = True
    made.resize(2)
    made.run_until(JobState.CUTTING_OVER)
    trains(made)
    assert made.job.lineage.redone_steps == made.job.budget.failures == 0


def test_trainers_that_join_are_told_of_no_older_state_than_that_of_those_who_stay():
    made = trains(world(pods=1, overlap="join"))
    made.shims_answer = False
    made.rounds(1)
    made.resize(2)
    made.run_until(JobState.CUTTING_OVER)
    trains(made)
    assert len(made.active.members) == 2
    assert made.active.restore_from is not None
    assert not made.active.restore_from.local_on_all_nodes


def test_replace_resumes_the_old_stage_when_a_new_trainer_dies_before_the_commit():
    made = beside(Way.REPLACE)
    tell(made, made.preparing.pod_ids, ReportKind.READY, 2)
    tell(made, "pod_0_0", ReportKind.DRAINED, 1, step=made.job.progress.step)
    tell(made, "pod_2_0", ReportKind.FAILED, 2, rank=2, code=-9)
    assert orders(made, "pod_0_0") == {1: Order.RESUME}
    step = made.job.progress.step + 1
    tell(made, ("pod_0_0", "pod_1_0"), ReportKind.PROGRESS, 1, step=step)
    assert orders(made, "pod_0_0") == {1: Order.GO}


def test_replace_recovers_when_the_new_stage_crashes_before_its_first_step():
    made = beside(Way.REPLACE)
    old, new = made.active.pod_ids, made.preparing.pod_ids
    tell(made, new, ReportKind.READY, 2)
    step = made.job.progress.step
    tell(made, old, ReportKind.DRAINED, 1, step=step, snapshot=SnapshotRef(stage=1, step=step))
    tell(made, "pod_2_0", ReportKind.FAILED, 2, rank=2, code=1)
    assert orders(made, "pod_0_0") == {1: Order.END, 2: Order.END}
    for pod_id in ("pod_0_0", "pod_1_0", "pod_2_0"):
        tell(made, pod_id, ReportKind.ENDED, 1)
        tell(made, pod_id, ReportKind.ENDED, 2)
    for pod_id in ("pod_0_0", "pod_1_0", "pod_2_0"):
        tell(made, pod_id, ReportKind.READY, 3)
    assert made.preparing.restore_from is not None
    assert (made.preparing.restore_from.stage, made.preparing.restore_from.step) == (
        1,
        step,
    )


def test_progress_alone_need_not_be_written():
    made = trains(world())
    before = made.job
    step = before.progress.step + 1
    said = {"metrics": {"loss": 0.5}, "promise": "statistics"}
    tell(made, "pod_0_0", ReportKind.PROGRESS, 1, step=step, **said)
    assert made.job.progress.step == step
    assert same_but_progress(before, made.job)
    assert (made.status.metrics, made.status.promise) == ({"loss": 0.5}, "statistics")


def test_metrics_stay_until_they_are_reported_again_but_for_the_training_loss():
    made = trains(world())

    def shown(**metrics: float) -> dict[str, float]:
        step = made.job.progress.step + 1
        tell(made, "pod_0_0", ReportKind.PROGRESS, 1, step=step, metrics=metrics)
        return made.status.metrics

    assert shown(train_loss=0.5, accuracy=0.9) == {"train_loss": 0.5, "accuracy": 0.9}
    # The trainers of the next stage know nothing else, until their script evaluates.
    assert shown(train_loss=0.4) == {"train_loss": 0.4, "accuracy": 0.9}
    assert shown(accuracy=0.8) == {"accuracy": 0.8}, "a loss that is no number does not come"
    assert len(shown(**{f"name{number}": 1.0 for number in range(600)})) == 500


def test_the_loss_curve_spans_the_training_in_few_points():
    made = trains(world())
    begun = made.job.progress.step
    for step in range(begun + 1, begun + 2001):
        tell(made, "pod_0_0", ReportKind.PROGRESS, 1, step=step, metrics={"train_loss": 1 / step})
    curve = made.status.loss_curve
    steps = [point.step for point in curve]
    gaps = [after - before for before, after in pairwise(steps)]
    assert 50 <= len(steps) <= 100
    assert (steps[0], begun + 2000 - steps[-1] < 100) == (begun + 1, True)
    assert max(gaps) <= 3 * min(gaps), "the points are spread evenly"
    assert all(point.loss == pytest.approx(1 / point.step, rel=1e-4) for point in curve)


def test_a_loss_that_would_be_rounded_to_infinity_stays_a_number():
    made = trains(world())
    step, loss = made.job.progress.step + 1, sys.float_info.max
    tell(made, "pod_0_0", ReportKind.PROGRESS, 1, step=step, metrics={"train_loss": loss})
    assert [point.loss for point in made.status.loss_curve] == [loss]


def test_an_old_report_and_one_without_a_loss_leave_the_curve():
    made = trains(world())
    step = made.job.progress.step + 1
    tell(made, "pod_0_0", ReportKind.PROGRESS, 1, step=step, metrics={"train_loss": 0.5})
    curve = made.status.loss_curve
    assert [point.step for point in curve] == [step]
    tell(made, "pod_0_0", ReportKind.PROGRESS, 1, step=step - 1, metrics={"train_loss": 0.7})
    tell(made, "pod_0_0", ReportKind.PROGRESS, 1, step=step + 1, metrics={"accuracy": 0.7})
    assert made.status.loss_curve == curve


def test_a_metric_comes_with_the_epochs_that_were_over_when_it_was_logged():
    made = trains(world())

    def shown(epochs: dict[str, int] | None = None, **metrics: float):
        step = made.job.progress.step + 1
        said = {"metrics": metrics, "metric_epochs": epochs}
        tell(made, "pod_0_0", ReportKind.PROGRESS, 1, step=step, **said)
        return made.status.metrics, made.status.metric_epochs

    assert shown({"a": 1}, a=0.5) == ({"a": 0.5}, {"a": 1})
    assert shown(None, train_loss=2.0)[1] == {"a": 1}  # the next stage's trainers know of none
    assert shown({"a": 2, "b": 2}, a=0.6, b=1.0) == ({"a": 0.6, "b": 1.0}, {"a": 2, "b": 2})
    # What became NaN does not keep the value of an earlier epoch.
    assert shown({"a": 3, "b": 3}, b=1.5) == ({"b": 1.5}, {"a": 3, "b": 3})


def test_the_script_clock_is_worth_a_write_every_five_seconds():
    made = trains(world(script=ScriptSpec(kind=ScriptKind.ALTERNATE, interval_s=900.0)))
    writes = 0
    for _ in range(200):
        before = made.job
        made.round(0.1)
        writes += not same_but_progress(before, made.job)
    assert 3 <= writes <= 5


def test_each_cut_of_a_stage_has_a_number_that_stays_when_the_cut_is_off():
    made = trains(world())

    def told() -> tuple[Order, int]:
        plan = made.orders("pod_0_0").plans[0]
        return plan.order, plan.cut

    assert told() == (Order.GO, 0)
    for number in (1, 2):
        made.resize(1)
        made.run_until(JobState.CUTTING_OVER)
        assert told() == (Order.CUT, number)
        made.stop_server()
        made.start_server()
        assert told() == (Order.CUT, number)
        made.pass_time(made.job.spec.prepare_timeout_s)  # the cut takes too long
        assert told() == (Order.RESUME, number)
        trains(made)
        assert told() == (Order.GO, number)


@pytest.mark.parametrize("elastic", [True, False])
def test_an_interval_shorter_than_the_start_of_trainers_counts_from_their_first_step(elastic):
    script = ScriptSpec(kind=ScriptKind.ALTERNATE, interval_s=2.0)
    made = world(elastic=elastic, script=script, total_steps=4000, prepare_timeout_s=20.0)
    made.run_until(RUNNING)
    made.rounds(80, 1.5)  # a round is a message to and fro: a start takes several
    stages_made = [each for each in records(made) if each.committed_at is not None]
    assert len(stages_made) > 4
    for before, after in pairwise(stages_made[1:]):
        began_at = before.first_step_at if elastic else before.committed_at
        assert began_at is not None
        assert after.wanted_at - began_at >= 2.0
