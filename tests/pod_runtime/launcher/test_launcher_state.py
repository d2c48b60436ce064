"""The launcher's decisions, without a process: events in, actions out."""

import signal
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from job_server.api.wire import (
    Order,
    PodOrders,
    PodReport,
    PodStagePhase,
    RaisedError,
    RankPace,
    ReportKind,
    SnapshotRef,
    StagePlan,
    TrainerError,
    Way,
)
from pod_runtime.activity import Doing, Seen
from pod_runtime.channel_wire import (
    PEER_LOST_EXIT_CODE,
    CannotJoin,
    Cut,
    Done,
    Drained,
    Formed,
    Go,
    Invitation,
    Prepared,
    Preview,
    Raised,
    Resume,
    StageTooLow,
    StateLoaded,
    Stepped,
    TrainerHello,
    TrainerMessage,
    kind_of,
)
from pod_runtime.launcher import state
from pod_runtime.launcher.decisions import (
    Exit,
    HaveAtHand,
    Invite,
    Move,
    Renumber,
    SendMessage,
    SendReport,
    SendSignal,
    Spawn,
    decide,
    next_deadline,
)
from pod_runtime.launcher.reports import attach_status, pace_between
from tests.pod_runtime.fake_job_server import make_part, make_plan

NOW = 100.0


def plan(stage: int, order: Order, **fields: Any) -> StagePlan:
    pods = (make_part("a", 0, (0, 1)), make_part("b", 1, (2, 3)))
    return make_plan(stage, order, pods, **fields)


class Simulated:
    """A launcher whose trainers, those of two ranks, are what the test says of them."""

    def __init__(
        self, pod_id: str = "a", grace_s: float = 5.0, ranks: tuple[int, ...] = (0, 1)
    ) -> None:
        self.pod = state.LauncherState(pod_id=pod_id, node_id="node", grace_s=grace_s)
        self.ranks = ranks
        self.now = NOW
        self.revision = 0
        self.port_taken = False  # of stages that trainers are to join

    def settle(self) -> list[Any]:
        """Decide; carry out spawns as if each succeeded; return all actions."""
        done: list[Any] = []
        while True:
            self.pod, actions = decide(self.pod, self.now)
            done += actions
            asked = [action for action in actions if isinstance(action, Spawn | Invite)]
            for action in asked:
                if isinstance(action, Spawn):
                    self.pod = state.spawned(self.pod, action.plan)
                elif self.port_taken:
                    self.pod = state.refused_ports(self.pod, action.plan, "port 1 is taken")
                else:
                    self.pod = state.invited(self.pod, action.key, action.plan)
            if not asked:
                return done

    def told(self, *plans: StagePlan, leave: bool = False, attach: bool = False) -> list[Any]:
        self.revision += 1
        orders = PodOrders(
            server_id="s", revision=self.revision, plans=plans, heartbeat_s=1.0, leave=leave
        )
        event = state.attached if attach else state.ordered
        self.pod = event(self.pod, orders)
        return self.settle()

    def say(self, rank: int, said: TrainerMessage, stage: int = 1, attempt: int = 0) -> list[Any]:
        self.pod = state.received(self.pod, (stage, attempt), rank, said)
        return self.settle()

    def all_say(self, said: TrainerMessage, stage: int = 1) -> list[Any]:
        """Let one trainer after the other say it; return what follows from the last."""
        for rank in self.ranks:
            actions = self.say(rank, said, stage)
        return actions

    def all_hello(self, stage: int = 1, *, joins: bool = False) -> None:
        for rank in self.ranks:
            self.say(rank, TrainerHello(rank=rank, stage=stage, pid=1, joins=joins), stage)

    def wait(self, seconds: float) -> list[Any]:
        self.now += seconds
        return self.settle()

    def die(
        self, rank: int, code: int, stage: int = 1, attempt: int = 0, why: str = ""
    ) -> list[Any]:
        self.pod = state.died(self.pod, (stage, attempt), rank, code, why)
        return self.settle()

    def load(self, step: int = 0, *, joins: bool = False) -> list[Any]:
        """Bring both trainers of stage 1 to where they have their state, and may go."""
        self.told(plan(1, Order.START))
        self.all_hello(joins=joins)
        loaded = self.all_say(StateLoaded(step=step))
        self.told(plan(1, Order.GO))
        return loaded

    def train(self) -> None:
        """Bring both trainers of stage 1 to where they make steps."""
        self.load()
        self.say(0, Stepped(step=1))


def training_pod() -> Simulated:
    pod = Simulated()
    pod.train()
    return pod


def of(actions: list[Any], kind: type[Any]) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


def reports(actions: list[Any]) -> list[PodReport]:
    return [action.report for action in of(actions, SendReport)]


def kinds(actions: list[Any]) -> list[ReportKind]:
    return [report.kind for report in reports(actions)]


def messages(actions: list[Any]) -> list[tuple[int, str]]:
    return [(a.rank, kind_of(a.message)) for a in of(actions, SendMessage)]


def sent(actions: list[Any], kind: type[Any]) -> list[tuple[int, Any]]:
    """Return the messages of a kind, each with the rank that gets it."""
    return [(a.rank, a.message) for a in of(actions, SendMessage) if isinstance(a.message, kind)]


def signals(actions: list[Any]) -> list[tuple[int, signal.Signals]]:
    return [(a.rank, a.signum) for a in of(actions, SendSignal)]


def test_prepare_is_answered_once_and_starts_nothing():
    pod = Simulated()
    assert kinds(pod.told(plan(1, Order.PREPARE))) == [ReportKind.READY]
    assert pod.told(plan(1, Order.PREPARE)) == []


# --- replace: the next trainers are prepared beside those that train ------------------------------


def preparing(order: Order = Order.PREPARE, **fields: Any) -> StagePlan:
    return plan(2, order, way=Way.REPLACE, **fields)


def prepare_beside() -> Simulated:
    """Return a pod that trains stage 1 and has the trainers of stage 2 prepared."""
    pod = training_pod()
    pod.told(plan(1, Order.GO), preparing())
    pod.all_hello(2)
    pod.all_say(Prepared(), 2)
    return pod


def test_replace_starts_trainers_beside_those_that_train_and_is_ready_when_all_are_prepared():
    pod = training_pod()
    actions = pod.told(plan(1, Order.GO), preparing())
    assert [action.plan.stage for action in of(actions, Spawn)] == [2]
    assert kinds(actions) == []
    pod.say(0, TrainerHello(rank=0, stage=2, pid=1), 2)
    assert kinds(pod.say(0, Prepared(), 2)) == []
    pod.say(1, TrainerHello(rank=1, stage=2, pid=1), 2)
    assert kinds(pod.say(1, Prepared(), 2)) == [ReportKind.READY]
    assert kinds(pod.told(plan(1, Order.GO), preparing(), attach=True)).count(ReportKind.READY) == 1


def test_prepared_trainers_are_given_their_state_with_go_and_the_parked_are_killed_after_it():
    pod = prepare_beside()
    pod.told(plan(1, Order.CUT, cut=1), preparing())
    pod.all_say(Drained(step=7, id=1))
    actions = pod.told(plan(1, Order.CUT, cut=1), preparing(Order.GO))
    assert sent(actions, Go) == [(rank, Go(plan=preparing(Order.GO))) for rank in (0, 1)]
    assert signals(actions) == []
    pod.say(0, StateLoaded(step=7), 2)
    assert ReportKind.FIRST_STEP in kinds(pod.say(0, Stepped(step=8), 2))
    ended = pod.told(plan(1, Order.END, cut=1), preparing(Order.GO))
    assert signals(ended) == [(0, signal.SIGKILL), (1, signal.SIGKILL)]


def test_what_the_others_parked_with_is_shown_once_after_it_was_told_and_again_after_another_cut():
    pod = prepare_beside()

    def park(cut: int, step: int, ref: SnapshotRef | None) -> list[Any]:
        pod.told(plan(1, Order.CUT, cut=cut), preparing())
        assert pod.say(0, Drained(step=step, id=cut, snapshot=ref)) == []
        return pod.say(1, Drained(step=step, id=cut, snapshot=ref))

    first = SnapshotRef(stage=1, step=7)
    drained, *shown = park(1, 7, first)
    assert pod.pod.at_hand == ((1, 0), 1)
    assert isinstance(drained, SendReport)
    assert (drained.report.snapshot, drained.report.snapshot_is_current) == (first, True)
    assert sent(shown, Preview) == [(rank, Preview(snapshot=first)) for rank in (0, 1)]
    assert pod.settle() == []
    resumed = pod.told(plan(1, Order.RESUME, cut=1), preparing())
    assert of(resumed, HaveAtHand) == [HaveAtHand(plan=None)]
    pod.say(0, Stepped(step=8))
    second = SnapshotRef(stage=1, step=9)
    assert [m.snapshot for _, m in sent(park(2, 9, second), Preview)] == [second] * 2


def test_a_state_that_is_in_no_snapshot_is_not_shown():
    pod = prepare_beside()
    pod.told(plan(1, Order.CUT, cut=1), preparing())
    (drained,) = pod.all_say(Drained(step=7, id=1))
    assert isinstance(drained, SendReport)
    assert not drained.report.snapshot_is_current


def test_where_one_trainer_has_written_the_state_is_told_of_that_cut_only():
    pod = prepare_beside()

    def told(cut: int, path: str) -> str:
        pod.told(plan(1, Order.CUT, cut=cut), preparing())
        pod.say(0, Drained(step=7, id=cut, durable=path))
        (drained,) = pod.say(1, Drained(step=7, id=cut))
        assert isinstance(drained, SendReport)
        return drained.report.durable

    assert told(1, "/checkpoint") == "/checkpoint"
    pod.told(plan(1, Order.RESUME, cut=1), preparing())
    assert told(2, "") == ""


def test_an_abandoned_preparation_is_killed_at_once_and_the_stage_in_force_goes_on():
    pod = prepare_beside()
    actions = pod.told(plan(1, Order.GO))
    assert signals(actions) == [(0, signal.SIGKILL), (1, signal.SIGKILL)]
    for rank in (0, 1):
        assert kinds(pod.die(rank, -9, 2)) == []
    assert [run.plan.stage for run in pod.pod.runs] == [1]
    for rank in (0, 1):
        actions = pod.die(rank, 0)
    assert [action.code for action in of(actions, Exit)] == [0]


@pytest.mark.parametrize("code", [0, 1, -9])
def test_a_trainer_that_ends_while_it_is_prepared_fails_its_stage_and_no_other(code):
    pod = prepare_beside()
    actions = pod.die(1, code, 2)
    assert [(r.kind, r.stage, r.rank) for r in reports(actions)] == [(ReportKind.FAILED, 2, 1)]
    assert not of(actions, Exit)


def test_an_attaching_launcher_tells_of_the_stage_that_trains_and_not_of_the_one_it_prepares():
    truth = attach_status(prepare_beside().pod, 1, 0)
    assert (truth.stage, truth.phase) == (1, PodStagePhase.TRAINING)


def test_a_second_attempt_at_a_preparation_waits_until_the_first_is_gone():
    pod = prepare_beside()
    actions = pod.told(plan(1, Order.GO), preparing(attempt=1))
    assert not of(actions, Spawn)
    pod.die(0, -9, 2)
    actions = pod.die(1, -9, 2)
    assert [action.plan.attempt for action in of(actions, Spawn)] == [1]


# --- join: trainers that stay go on as those of the next stage ------------------------------------


def joins(order: Order = Order.PREPARE, **fields: Any) -> StagePlan:
    """Stage 2, in which pod a has moved to ranks 2 and 3."""
    pods = (make_part("b", 0, (0, 1)), make_part("a", 1, (2, 3)))
    return make_plan(2, order, pods, way=Way.JOIN, **fields)


def ready_to_join() -> Simulated:
    pod = training_pod()
    pod.told(plan(1, Order.GO), joins())
    pod.all_say(Formed(stage=2))
    return pod


def test_trainers_that_stay_are_asked_to_join_and_the_pod_is_ready_when_all_have_formed_the_group():
    pod = training_pod()
    actions = pod.told(plan(1, Order.GO), joins())
    assert not of(actions, Spawn)
    assert sent(actions, Invitation) == [
        (0, Invitation(plan=joins(), rank=2)),
        (1, Invitation(plan=joins(), rank=3)),
    ]
    assert kinds(pod.say(1, Formed(stage=2))) == []
    assert kinds(pod.say(0, Formed(stage=3))) == []  # of another attempt that is off by now
    (report,) = reports(pod.say(0, Formed(stage=2)))
    assert (report.kind, report.stage) == (ReportKind.READY, 2)
    assert pod.settle() == []


def test_with_go_they_are_those_of_the_next_stage_and_the_one_before_has_none_left():
    pod = ready_to_join()
    assert messages(pod.told(plan(1, Order.CUT), joins())) == [(0, "cut"), (1, "cut")]
    pod.all_say(Drained(step=9, id=1))
    actions = pod.told(plan(1, Order.CUT), joins(Order.GO))
    moved = of(actions, Move)
    assert [(a.key, a.rank, a.new_key, a.new_rank) for a in moved] == [
        ((1, 0), 0, (2, 0), 2),
        ((1, 0), 1, (2, 0), 3),
    ]
    assert [a.message for a in moved] == [Go(plan=joins(Order.GO))] * 2
    assert signals(actions) == []
    assert kinds(pod.say(3, Stepped(step=9), 2)) == []  # said before it heard of the commit
    assert kinds(pod.say(3, Stepped(step=10), 2)) == [ReportKind.FIRST_STEP]
    actions = pod.told(plan(1, Order.END), joins(Order.GO))
    assert (kinds(actions), signals(actions)) == ([ReportKind.ENDED], [])
    assert pod.told(joins(Order.GO)) == []
    (report,) = reports(pod.die(2, -9, 2))
    assert (report.kind, report.stage, report.rank) == (ReportKind.FAILED, 2, 2)


def test_a_cut_of_the_stage_that_they_have_joined_is_told_with_its_own_number():
    pod = ready_to_join()
    pod.told(plan(1, Order.CUT, cut=4), joins())
    pod.all_say(Drained(step=9, id=4))
    actions = pod.told(plan(1, Order.CUT, cut=4), joins(Order.CUT, cut=1))
    cuts = of(actions, SendMessage)
    assert [(a.key, a.rank, a.message) for a in cuts] == [
        ((2, 0), 2, Cut(id=1)),
        ((2, 0), 3, Cut(id=1)),
    ]


def test_when_the_change_is_off_they_are_told_and_train_on():
    pod = ready_to_join()
    actions = pod.told(plan(1, Order.GO))
    assert (messages(actions), signals(actions)) == ([(0, "drop"), (1, "drop")], [])
    assert kinds(pod.say(0, Stepped(step=5))) == []
    assert pod.told(plan(1, Order.GO)) == []


def test_another_attempt_at_the_same_stage_is_joined_anew():
    pod = ready_to_join()
    actions = pod.told(plan(1, Order.GO), joins(attempt=1))
    assert messages(actions) == [(0, "drop"), (1, "drop"), (0, "join"), (1, "join")]
    assert kinds(pod.say(0, Formed(stage=2))) == []
    pod.say(0, Formed(stage=2, attempt=1))
    (report,) = reports(pod.say(1, Formed(stage=2, attempt=1)))
    assert (report.kind, report.attempt) == (ReportKind.READY, 1)


def test_a_trainer_that_cannot_join_is_told_of_and_its_pod_no_longer_offers_to():
    pod = Simulated()
    loaded = pod.load(joins=True)
    assert [(r.kind, r.joins) for r in reports(loaded)] == [(ReportKind.LOADED, True)]
    pod.say(0, Stepped(step=1))
    pod.told(plan(1, Order.GO), joins())
    pod.say(0, Formed(stage=2))
    (report,) = reports(pod.say(1, CannotJoin(stage=2, reason="no names")))
    assert (report.kind, report.stage) == (ReportKind.CANNOT_JOIN, 2)
    assert report.reason == "rank 1: no names"
    assert [(r.kind, r.joins) for r in reports(pod.wait(1.0))] == [(ReportKind.PROGRESS, False)]


def test_a_taken_port_of_a_stage_to_join_is_told_before_anybody_is_asked():
    pod = training_pod()
    pod.port_taken = True
    actions = pod.told(plan(1, Order.GO), joins())
    assert (kinds(actions), messages(actions)) == ([ReportKind.PORT_TAKEN], [])
    pod.port_taken = False
    assert messages(pod.told(plan(1, Order.GO), joins(attempt=1))) == [(0, "join"), (1, "join")]


def test_the_death_of_a_trainer_that_was_to_stay_fails_its_own_stage():
    pod = ready_to_join()
    actions = pod.die(0, -9)
    assert [(r.kind, r.stage) for r in reports(actions)] == [(ReportKind.FAILED, 1)]
    assert messages(actions) == [(1, "drop")]
    (report,) = reports(pod.told(plan(1, Order.END), joins(Order.GO)))  # committed all the same
    assert (report.kind, report.stage) == (ReportKind.FAILED, 2)


def test_a_pod_that_comes_new_prepares_trainers_for_a_stage_that_others_join():
    pod = Simulated(ranks=(2, 3))
    actions = pod.told(joins())
    assert [type(action) for action in actions] == [Spawn]
    pod.all_hello(2, joins=True)
    (report,) = reports(pod.all_say(Prepared(), 2))
    assert (report.kind, report.joins) == (ReportKind.READY, True)
    actions = pod.told(joins(Order.GO))
    assert [rank for rank, _ in sent(actions, Go)] == [2, 3]
    actions = pod.told()
    assert signals(actions) == [(2, signal.SIGTERM), (3, signal.SIGTERM)]


def test_loaded_is_told_when_the_last_trainer_has_loaded():
    pod = Simulated()
    started = pod.told(plan(1, Order.START))
    assert kinds(started) == [ReportKind.STARTED]
    assert sum(isinstance(action, Spawn) for action in started) == 1
    (welcome,) = pod.say(0, TrainerHello(rank=0, stage=1, pid=1))
    assert messages([welcome]) == [(0, "welcome")]
    pod.say(1, TrainerHello(rank=1, stage=1, pid=2))
    assert kinds(pod.say(0, StateLoaded(step=7))) == []
    assert kinds(pod.say(1, StateLoaded(step=7))) == [ReportKind.LOADED]


def test_a_first_start_tells_of_the_loop_before_the_first_step():
    pod = Simulated()
    pod.told(plan(1, Order.START, way=Way.START))
    # The server does not know yet whether the script has the loop.
    pod.told(plan(1, Order.GO, way=Way.START))
    (report,) = reports(pod.say(0, TrainerHello(rank=0, stage=1, pid=0)))
    assert (report.kind, report.elastic) == (ReportKind.STARTED, True)  # they may wait long
    assert kinds(pod.say(1, TrainerHello(rank=1, stage=1, pid=1))) == []
    pod.say(0, StateLoaded(step=0))
    (report,) = reports(pod.say(1, StateLoaded(step=0)))
    assert (report.kind, report.elastic) == (ReportKind.LOADED, True)


def test_go_reaches_trainers_that_come_to_the_loop_late():
    pod = Simulated()
    pod.told(plan(1, Order.START))
    pod.say(0, TrainerHello(rank=0, stage=1, pid=1))
    assert messages(pod.told(plan(1, Order.GO))) == [(0, "go")]
    late = pod.say(1, TrainerHello(rank=1, stage=1, pid=2))
    assert messages(late) == [(1, "welcome"), (1, "go")]


def test_a_script_that_enters_a_second_loop_is_welcomed_again():
    pod = training_pod()
    again = pod.say(0, TrainerHello(rank=0, stage=1, pid=1))
    assert messages(again) == [(0, "welcome"), (0, "go")]


def test_first_step_is_told_at_once_and_then_progress_every_heartbeat():
    pod = Simulated()
    pod.load(step=4)
    assert ReportKind.FIRST_STEP in kinds(pod.say(1, Stepped(step=5)))
    said = Stepped(
        step=5, metrics={"loss": 2.0}, metric_epochs={"loss": 1}, promise="rounding, 3 shards"
    )
    assert kinds(pod.say(0, said)) == []
    assert next_deadline(pod.pod) == NOW + 1.0
    (progress,) = reports(pod.wait(1.0))
    assert progress.kind is ReportKind.PROGRESS
    assert (progress.step, progress.metrics) == (5, {"loss": 2.0})
    assert progress.metric_epochs == {"loss": 1}
    assert progress.promise == "rounding, 3 shards"
    assert progress.checkpoint_error is None


def test_what_the_rank_that_writes_checkpoints_says_of_them_is_not_cleared_by_others():
    pod = Simulated()
    pod.load(step=4)
    pod.say(0, Stepped(step=5, checkpoint_error="the disk is full"))
    pod.say(1, Stepped(step=5))
    (progress,) = reports(pod.wait(1.0))
    assert progress.checkpoint_error == "the disk is full"
    pod.say(0, Stepped(step=6, checkpoint_error=""))
    (progress,) = reports(pod.wait(1.0))
    assert progress.checkpoint_error == ""


def test_what_is_logged_between_the_restore_and_the_first_step_is_no_first_step():
    pod = Simulated()
    pod.load(step=30)
    evaluated = pod.say(0, Stepped(step=30, metrics={"accuracy": 0.9}))
    assert ReportKind.FIRST_STEP not in kinds(evaluated)
    (first,) = (r for r in reports(pod.say(0, Stepped(step=31))) if r.kind is ReportKind.FIRST_STEP)
    assert first.step == 31


def test_a_cut_is_told_to_all_and_drained_when_the_last_has_parked():
    pod = training_pod()
    coming = plan(2, Order.PREPARE)
    actions = pod.told(plan(1, Order.CUT, durable=True), coming)
    assert [a.message for a in of(actions, SendMessage)] == [Cut(id=1, durable=True)] * 2
    assert HaveAtHand(plan=plan(1, Order.CUT, durable=True)) in actions
    assert kinds(actions) == [ReportKind.READY]
    assert kinds(pod.say(0, Drained(step=9, id=1))) == []
    (drained,) = reports(pod.say(1, Drained(step=9, id=1)))
    assert (drained.kind, drained.step) == (ReportKind.DRAINED, 9)
    assert kinds(pod.wait(10)) == [ReportKind.ALIVE]  # a parked trainer makes no progress


def test_parked_trainers_are_killed_and_the_next_stage_waits_until_they_are_gone():
    pod = training_pod()
    pod.told(plan(1, Order.CUT), plan(2, Order.PREPARE))
    pod.all_say(Drained(step=9))
    actions = pod.told(plan(1, Order.END), plan(2, Order.START))
    assert signals(actions) == [(0, signal.SIGKILL), (1, signal.SIGKILL)]
    assert not any(isinstance(action, Spawn) for action in actions)
    pod.die(0, -9)
    actions = pod.die(1, -9)
    assert kinds(actions) == [ReportKind.ENDED, ReportKind.STARTED]


def test_ranks_that_parked_after_different_steps_are_a_failure():
    pod = training_pod()
    pod.told(plan(1, Order.CUT))
    pod.say(0, Drained(step=9))
    (report,) = reports(pod.say(1, Drained(step=10)))
    assert report.kind is ReportKind.FAILED


def test_each_cut_has_its_own_number_and_an_answer_to_an_earlier_one_does_not_count():
    pod = training_pod()
    pod.told(plan(1, Order.CUT))
    assert set(messages(pod.told(plan(1, Order.RESUME, cut=1)))) == {(0, "resume"), (1, "resume")}
    cut = sent(pod.told(plan(1, Order.CUT, cut=2)), Cut)
    assert cut == [(0, Cut(id=2)), (1, Cut(id=2))]
    for rank in (0, 1):
        assert kinds(pod.say(rank, Drained(step=9, id=1))) == []  # was on its way
    actions = pod.all_say(Drained(step=11, id=2))
    assert kinds(actions) == [ReportKind.DRAINED]


@pytest.mark.parametrize("order", [Order.RESUME, Order.GO])
def test_an_earlier_cut_that_is_off_frees_nobody_that_parked_for_the_next_with_its_peers(order):
    pod = training_pod()
    actions = pod.all_say(Drained(step=9, id=2))
    assert kinds(actions) == [ReportKind.DRAINED]
    off = pod.told(plan(1, order, cut=1))  # old news: cut 2 is on its way to us
    assert [a.message for a in of(off, SendMessage)] == [Resume(id=1)] * 2
    assert ReportKind.FAILED not in kinds(off)
    assert [t.parked_at for t in pod.pod.runs[-1].trainers] == [9, 9]
    off = pod.told(plan(1, order, cut=2))
    assert [a.message for a in of(off, SendMessage)] == [Resume(id=2)] * 2
    assert pod.say(0, Drained(step=9, id=2)) == []  # it was on its way, and goes on


def test_a_cut_that_is_called_off_unheard_frees_those_whom_it_reached_through_their_peers():
    pod = training_pod()
    pod.all_say(Drained(step=9, id=1))
    off = pod.told(plan(1, Order.GO, cut=1))
    assert messages(off) == [(0, "resume"), (1, "resume")]
    assert pod.told(plan(1, Order.GO, cut=1)) == []


def test_the_next_cut_frees_those_who_parked_for_the_one_before():
    pod = training_pod()
    pod.told(plan(1, Order.CUT))
    pod.all_say(Drained(step=9, id=1))
    actions = pod.told(plan(1, Order.CUT, cut=2, durable=True))  # its RESUME was never heard
    assert [a.message for a in actions if isinstance(a, SendMessage) and a.rank == 0] == [
        Resume(id=1),
        Cut(id=2, durable=True),
    ]
    actions = pod.all_say(Drained(step=10, id=2))
    assert [(r.kind, r.step) for r in reports(actions)] == [(ReportKind.DRAINED, 10)]


def test_trainers_without_the_loop_get_sigterm_and_after_the_grace_sigkill():
    pod = Simulated(grace_s=5.0)
    pod.told(plan(1, Order.START))
    pod.told(plan(1, Order.GO))
    assert signals(pod.told(plan(1, Order.END))) == [(0, signal.SIGTERM), (1, signal.SIGTERM)]
    pod.die(0, -15)
    assert signals(pod.wait(4.5)) == []
    assert next_deadline(pod.pod) == NOW + 5.0
    assert signals(pod.wait(0.5)) == [(1, signal.SIGKILL)]
    assert kinds(pod.die(1, -9)) == [ReportKind.ENDED]


@pytest.mark.parametrize(
    ("deaths", "failures"),  # (rank, code); (rank, code, peer_lost)
    [
        pytest.param([(1, 1)], [(1, 1, False)], id="an error"),
        pytest.param([(1, -9)], [(1, -9, False)], id="killed"),
        pytest.param([(1, -11)], [(1, -11, False)], id="crashed"),
        pytest.param([(1, -6)], [(1, -6, True)], id="aborted by gloo"),
        pytest.param([(1, -15)], [(1, -15, True)], id="terminated"),
        pytest.param([(1, 75)], [(1, 75, True)], id="left as a victim"),
        pytest.param([(0, 75), (1, 1)], [(0, 75, True), (1, 1, False)], id="victim, then cause"),
        pytest.param([(0, 1), (1, 75)], [(0, 1, False)], id="cause, then victim"),
        pytest.param([(0, 1), (1, 1)], [(0, 1, False)], id="cause, then another"),
        pytest.param([(0, 75), (1, -6)], [(0, 75, True)], id="two victims"),
    ],
)
def test_a_death_is_reported_and_its_cause_is_too_and_the_other_trainers_are_left_alone(
    deaths, failures
):
    pod = training_pod()
    actions = [action for rank, code in deaths for action in pod.die(rank, code, why="boom")]
    assert [
        (each.kind, each.rank, each.code, each.peer_lost, each.reason) for each in reports(actions)
    ] == [(ReportKind.FAILED, *failure, "boom") for failure in failures]
    assert signals(actions) == []


@pytest.mark.parametrize("code", [1, -6])
def test_what_a_trainer_raised_counts_more_than_how_its_process_was_torn_down(code):
    pod = training_pod()
    error = TrainerError(chain=(RaisedError(types=("ValueError",), text="bad"),), where="t.py:7")
    (failed,) = reports(pod.say(1, Raised(error=error)))
    assert (failed.error, failed.peer_lost) == (error, False)
    assert failed.reason == "t.py:7: ValueError: bad"
    assert reports(pod.die(1, code, why="C++ Traceback")) == []


def test_an_error_is_told_at_once_and_replaces_that_of_a_victim_though_its_process_ends_late():
    pod = training_pod()
    assert [each.peer_lost for each in reports(pod.die(0, PEER_LOST_EXIT_CODE))] == [True]
    error = TrainerError(chain=(RaisedError(types=("ValueError",), text="bad"),), where="t.py:7")
    (failed,) = reports(pod.say(1, Raised(error=error)))
    assert (failed.rank, failed.error, failed.peer_lost) == (1, error, False)


def test_in_a_world_of_one_nobody_is_a_victim():
    pod = Simulated()
    alone = make_plan(1, Order.START, (make_part(),))
    pod.told(alone)
    (failed,) = reports(pod.die(0, -6))
    assert not failed.peer_lost


def test_when_all_have_exited_with_0_so_does_the_launcher():
    pod = training_pod()
    assert kinds(pod.say(0, Done(step=20))) == [ReportKind.DONE]
    assert pod.die(1, 0) == []
    assert of(pod.die(0, 0), Exit) == [
        Exit(code=0, reason="every trainer has exited with 0", stage=1, complete=True)
    ]


def test_each_loop_of_a_script_is_told_of_by_its_first_step_and_its_end():
    pod = training_pod()
    pod.say(0, Stepped(step=5, epoch=2))
    assert [(each.kind, each.step) for each in reports(pod.say(0, Done(step=20)))] == [
        (ReportKind.DONE, 20)
    ]
    for rank in (0, 1):
        pod.say(rank, TrainerHello(rank=rank, stage=1, pid=1, goes_on=True))
        pod.say(rank, StateLoaded(step=20))
    assert pod.pod.runs[0].done_step is None
    (first,) = reports(pod.say(1, Stepped(step=21, epoch=0)))
    assert (first.kind, first.step, first.epoch) == (ReportKind.FIRST_STEP, 21, 0)
    assert [(each.kind, each.step) for each in reports(pod.say(0, Done(step=30)))] == [
        (ReportKind.DONE, 30)
    ]


def test_a_later_loop_whose_earlier_ones_would_be_trained_again_leaves_the_job_complete():
    pod = training_pod()
    pod.say(0, Done(step=20))
    pod.say(0, TrainerHello(rank=0, stage=1, pid=1))
    assert reports(pod.say(0, Stepped(step=21))) == []
    assert pod.pod.runs[0].done_step == 20


def test_a_stage_that_is_too_low_is_no_failure_and_no_success():
    pod = Simulated()
    pod.told(plan(1, Order.START))
    (low,) = reports(pod.say(0, StageTooLow(highest_stage=4)))
    assert (low.kind, low.highest_stage) == (ReportKind.STAGE_TOO_LOW, 4)
    assert pod.die(0, 1) == []
    assert pod.die(1, 0) == []


def test_a_taken_port_is_told_and_the_next_attempt_is_started():
    pod = Simulated()
    first = plan(1, Order.START)
    pod.pod = state.ordered(
        pod.pod, PodOrders(server_id="s", revision=1, plans=(first,), heartbeat_s=1.0)
    )
    pod.pod = state.refused_ports(pod.pod, first, "port 20000 is taken")
    (taken,) = reports(pod.settle())
    assert (taken.kind, taken.reason) == (ReportKind.PORT_TAKEN, "port 20000 is taken")
    (started,) = reports(pod.told(plan(1, Order.START, attempt=1)))
    assert (started.kind, started.attempt) == (ReportKind.STARTED, 1)


def test_a_kill_is_carried_out_once():
    pod = training_pod()
    killing = plan(1, Order.GO, kill_ranks=(("k", 1), ("other pod's", 3)))
    assert signals(pod.told(killing)) == [(1, signal.SIGKILL)]
    assert signals(pod.told(killing)) == []


def test_leave_ends_the_trainers_and_then_the_launcher():
    pod = training_pod()
    assert signals(pod.told(leave=True)) == [(0, signal.SIGTERM), (1, signal.SIGTERM)]
    pod.die(0, -15)
    (exit_,) = pod.die(1, -15)
    assert exit_.code == 0


def test_a_second_stop_signal_kills_at_once():
    pod = training_pod()
    pod.pod = state.leave(pod.pod, state.Leaving(code=143, reason="SIGTERM"))
    assert {number for _, number in signals(pod.settle())} == {signal.SIGTERM}
    pod.pod = state.leave(pod.pod, state.Leaving(code=143, reason="SIGTERM", at_once=True))
    assert {number for _, number in signals(pod.settle())} == {signal.SIGKILL}


@pytest.mark.parametrize("order", [Order.GO, Order.CUT, Order.RESUME])
def test_a_launcher_that_lost_its_memory_says_so(order):
    (report,) = reports(Simulated().told(plan(3, order)))
    assert report.kind is ReportKind.FAILED
    assert "it was restarted" in report.reason


def test_after_an_attach_everything_that_is_true_is_told_again():
    pod = training_pod()
    pod.told(plan(1, Order.CUT))
    pod.all_say(Drained(step=9))
    again = kinds(pod.told(plan(1, Order.CUT), attach=True))
    assert again == [ReportKind.FIRST_STEP, ReportKind.DRAINED]
    assert messages(pod.told(plan(1, Order.CUT), attach=True)) == []


def test_the_truth_names_the_phase():
    pod = Simulated()

    def phase() -> PodStagePhase:
        return attach_status(pod.pod, 1, 0).phase

    assert phase() is PodStagePhase.READY
    pod.told(plan(1, Order.START))
    assert phase() is PodStagePhase.STARTED
    pod.all_hello()
    pod.all_say(StateLoaded(step=0))
    assert phase() is PodStagePhase.LOADED
    pod.told(plan(1, Order.GO))
    assert phase() is PodStagePhase.TRAINING
    pod.all_say(Drained(step=9))
    assert phase() is PodStagePhase.PARKED
    pod.die(0, 3)
    failed = attach_status(pod.pod, 1, 0)
    assert failed.phase is PodStagePhase.FAILED
    assert failed.failure is not None
    assert failed.failure.code == 3
    pod.die(1, 75)
    pod.told(plan(1, Order.END))
    assert phase() is PodStagePhase.ENDED
    assert attach_status(pod.pod, 1, 0).failure is None


@pytest.mark.parametrize("elastic", [True, False])
def test_trainers_that_have_succeeded_are_not_lost_to_a_server_that_is_back(elastic):
    """It takes ENDED, unless it has ordered that, for a loss, and runs the script once more."""
    pod = Simulated()
    if elastic:
        pod.train()
        pod.say(0, Done(step=20))
    else:
        pod.told(plan(1, Order.START))
        pod.told(plan(1, Order.GO))
    pod.die(0, 0)
    assert of(pod.die(1, 0), Exit)
    assert attach_status(pod.pod, 1, 0).phase is PodStagePhase.TRAINING
    pod.told(plan(1, Order.END))
    assert attach_status(pod.pod, 1, 0).phase is PodStagePhase.ENDED


EVENTS = st.one_of(
    st.tuples(
        st.just("order"),
        st.lists(
            st.tuples(st.integers(1, 3), st.sampled_from(Order), st.integers(0, 1)), max_size=2
        ),
    ),
    st.tuples(st.just("hello"), st.integers(0, 1)),
    st.tuples(st.just("loaded"), st.integers(0, 1)),
    st.tuples(st.just("step"), st.integers(0, 1)),
    st.tuples(st.just("drained"), st.integers(0, 1)),
    st.tuples(st.just("die"), st.tuples(st.integers(0, 1), st.sampled_from((0, 1, -6, -9, 75)))),
    st.tuples(st.just("attach"), st.none()),
    st.tuples(st.just("time"), st.floats(0, 10)),
)


def apply(pod: Simulated, what: str, value: Any) -> list[Any]:
    """Let one event happen; trainers speak and die only while they live."""
    run = next((run for run in pod.pod.runs if run.alive), None)
    if what == "order":
        return pod.told(*(plan(s, o, attempt=a) for s, o, a in value))
    if what == "attach" and pod.pod.orders is not None:
        return pod.told(*pod.pod.orders.plans, attach=True)
    if what == "time":
        return pod.wait(value)
    if run is None or what == "attach":
        return []
    rank = value[0] if what == "die" else value
    if not next(t for t in run.trainers if t.rank == rank).alive:
        return []
    if what == "die":
        return pod.die(rank, value[1], *run.key)
    stage = run.plan.stage
    said: dict[str, TrainerMessage] = {
        "hello": TrainerHello(rank=rank, stage=stage, pid=1),
        "loaded": StateLoaded(step=1),
        "step": Stepped(step=run.step + 1),
        "drained": Drained(step=run.step),
    }
    return pod.say(rank, said[what], *run.key)


@given(st.lists(EVENTS, max_size=40))
def test_whatever_happens_two_stages_never_run_together_and_a_leaving_pod_gets_empty(events):
    pod = Simulated()
    for what, value in events:
        actions = apply(pod, what, value)
        assert sum(run.alive for run in pod.pod.runs) <= 1
        assert len({run.key for run in pod.pod.runs}) == len(pod.pod.runs)
        if any(isinstance(action, Exit) for action in actions):
            return
        again, more = decide(pod.pod, pod.now)
        assert more == ()  # decided once is decided
        assert again == pod.pod
    pod.pod = state.leave(pod.pod, state.Leaving(code=143, reason="SIGTERM"))
    actions = pod.settle()
    actions += pod.wait(60.0)
    for run in pod.pod.runs:
        for trainer in run.trainers:
            if trainer.alive:
                assert trainer.killed
                actions += pod.die(trainer.rank, -9, *run.key)
    assert [type(action) for action in actions[-1:]] == [Exit]


def test_a_launcher_without_progress_says_every_heartbeat_that_it_lives():
    pod = Simulated()
    pod.told(plan(1, Order.PREPARE), attach=True)
    for _ in range(3):
        assert next_deadline(pod.pod) == pod.now + 1.0
        assert kinds(pod.wait(1.0)) == [ReportKind.ALIVE]
        assert pod.settle() == []
    pod.train()
    assert kinds(pod.wait(1.0)) == [ReportKind.PROGRESS]
    pod.told(plan(1, Order.CUT))
    pod.all_say(Drained(step=9, id=1))
    assert kinds(pod.wait(1.0)) == [ReportKind.ALIVE]


def test_a_pod_knows_its_trainers_by_new_ranks_once_its_standby_has_lost_another_pod():
    whole = replace(plan(2, Order.PREPARE, way=Way.REPLACE), survivable_failures=(("a",), ("b",)))
    pod = Simulated(pod_id="b", ranks=(2, 3))
    pod.told(whole)
    pod.all_hello(2)
    pod.all_say(Prepared(), 2)
    left = (make_part("b", 0, (0, 1)),)
    actions = pod.told(replace(whole, order=Order.GO, pods=left, missing_pods=("a",)))
    assert [a.ranks for a in of(actions, Renumber)] == [{2: 0, 3: 1}]
    assert [rank for rank, _ in sent(actions, Go)] == [0, 1]
    assert not of(pod.settle(), Renumber), "once"
    dead = reports(pod.die(1, -9, 2))
    assert [(each.kind, each.rank) for each in dead] == [(ReportKind.FAILED, 1)]


def test_every_hang_and_every_sign_of_life_is_reported_also_in_the_same_words_as_before():
    pod = training_pod()
    for silent_s in (61.0, 0.0, 61.0, 0.0):
        hang = state.TrainerHang(text="as before", silent_s=silent_s)
        pod.pod = state.hung(pod.pod, (1, 0), 1, hang)
        told = [each for each in reports(pod.settle()) if each.kind is ReportKind.HUNG]
        assert [(each.rank, each.hung_s) for each in told] == [(1, silent_s)]
        assert ReportKind.HUNG not in kinds(pod.settle()), "once"


def test_a_trainer_that_was_killed_since_it_hung_is_reported_so_whatever_comes_late():
    pod = training_pod()
    pod.pod = state.killed_as_hung(pod.pod, (1, 0), 1, "no sign of life", 600.0)
    pod.pod = state.hung(pod.pod, (1, 0), 1, state.TrainerHang(text="its stacks", silent_s=60.0))
    evidence = state.Evidence(events=("oom_kill",), last_lines=("that is all",))
    pod.pod = state.died(pod.pod, (1, 0), 1, -9, "", evidence)
    (failed,) = reports(pod.settle())
    assert (failed.kind, failed.hung_s) == (ReportKind.FAILED, 600.0)
    assert (failed.events, failed.last_lines) == ((), ("that is all",)), "its launcher did it"
    assert failed.reason == "it hung: no sign of life"


def test_a_trainer_that_hung_and_does_not_end_is_reported_with_both():
    pod = training_pod()
    pod.pod = state.killed_as_hung(pod.pod, (1, 0), 1, "no sign of life", 600.0)
    evidence = state.Evidence(events=("unkillable",))
    pod.pod = state.died(pod.pod, (1, 0), 1, -9, "process 7 has not ended", evidence)
    (failed,) = reports(pod.settle())
    assert (failed.hung_s, failed.events) == (600.0, ("unkillable",))
    assert failed.reason == "it hung: no sign of life; process 7 has not ended"


# --- how fast the trainers are --------------------------------------------------------------------


def seen(steps: int, **seconds: float) -> Seen:
    spent = {each.name.lower(): 0.0 for each in Doing} | seconds
    return Seen(
        doing=Doing.STEPPING, since=0.0, steps=steps, samples=8 * steps,
        seconds=tuple(spent[each.name.lower()] for each in Doing),
    )  # fmt: skip


def test_where_a_trainer_s_time_went_is_told_for_thirty_steps_or_more():
    before = seen(100, stepping=50.0, exchanging=7.0)
    after = seen(140, stepping=56.0, exchanging=8.0, reading=2.0, saving=0.5)
    pace = pace_between(3, before, after)
    assert pace == RankPace(
        rank=3, steps=40, samples=320, window_s=9.5, computing_s=6.0, reading_s=2.0,
        exchanging_s=1.0, saving_s=0.5,
    )  # fmt: skip
    assert pace_between(3, before, seen(129, stepping=90.0, exchanging=7.0)) is None
    assert pace_between(3, before, seen(150, stepping=54.0, exchanging=7.0)) is None  # too quick
    assert pace_between(3, after, before) is None  # of another process


def test_a_pace_is_reported_once_with_the_next_progress():
    pod = training_pod()
    pace = pace_between(1, seen(0), seen(40, stepping=6.0))
    assert pace is not None
    pod.wait(5.0)
    pod.pod = state.paced(pod.pod, (1, 0), pace)
    told = [each.paces for each in reports(pod.wait(5.0)) if each.kind is ReportKind.PROGRESS]
    assert told == [(pace,)]
    told = [each.paces for each in reports(pod.wait(5.0)) if each.kind is ReportKind.PROGRESS]
    assert told == [()]
