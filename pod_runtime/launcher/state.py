"""The state of a pod's launcher, and how each event changes it. Pure: no clock, no process.

A `LauncherState` holds the server's orders and, for each attempt at a stage that trainers were
started for, a `StageRun`. The functions under "events" return a new state; `decisions.decide` says
what has to be done then.
"""

import signal
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from job_server.api.failure_policy import UNKILLABLE
from job_server.api.wire import (
    Order,
    PlanPod,
    PodOrders,
    PodReport,
    RankPace,
    ReportKind,
    SnapshotRef,
    StagePlan,
    TrainerError,
    Way,
)
from pod_runtime.channel_wire import (
    PEER_LOST_EXIT_CODE,
    CannotJoin,
    Done,
    Drained,
    Formed,
    Prepared,
    Raised,
    StageTooLow,
    StateLoaded,
    Stepped,
    TrainerHello,
    TrainerMessage,
)

# gloo aborts its process where a peer is gone.
_PEER_LOST_CODES = (-signal.SIGABRT, -signal.SIGTERM, PEER_LOST_EXIT_CODE)
ELASTIC_GRACE_S = 3.0  # its state is in a snapshot: a longer grace would save nothing

Key = tuple[int, int]  # (stage, attempt)
TRAINS = (Order.GO, Order.CUT, Order.RESUME)  # orders of a committed stage


# --- what is known ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the launcher has seen of a failure, for the failure policy."""

    events: tuple[str, ...] = ()  # as `FailureRule.event`
    last_lines: tuple[str, ...] = ()  # of the trainer's log


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerHang:
    """A trainer that has given no sign of life for too long."""

    text: str
    silent_s: float  # 0: it has given one again
    where: str = ""  # the innermost frames, or why they are not known
    killed: bool = False  # for that

    def __str__(self) -> str:
        return f"{self.text}; {self.where}" if self.where else self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    rank: int
    code: int | None = None  # None: alive; negative: the signal that ended it
    elastic: bool = False  # it has sent hello
    joins: bool = False  # it can form the next stage's group while it trains
    welcomed: bool = False
    prepared: bool = False  # while an older stage trains; waits for the state
    loaded: bool = False
    go_sent: bool = False
    cut_sent: int = 0  # id of the last cut that it was sent; 0: none
    parked_at: int | None = None  # None: not parked
    terminated_at: float | None = None  # None: no SIGTERM sent
    killed: bool = False
    error: TrainerError | None = None  # what it has raised; None: it reported nothing
    hang: TrainerHang | None = None  # the last; None: it has always given signs of life
    hang_news: int = 0  # how often `hang` was set: each time it is reported
    pace: RankPace | None = None  # to be reported; None: nothing new

    @property
    def alive(self) -> bool:
        return self.code is None


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinAttempt:
    """The attempt at a next stage that the trainers of a run should join in place."""

    plan: StagePlan
    asked: frozenset[int] = frozenset()  # ranks of the run, as it is now
    formed: frozenset[int] = frozenset()  # ranks that have formed the next group
    refusal: str | None = None  # why one of them cannot; None: none has refused

    @property
    def key(self) -> Key:
        return self.plan.stage, self.plan.attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRun:
    """This pod's part in one attempt at a stage."""

    plan: StagePlan
    trainers: tuple[TrainerState, ...]
    trouble: PodReport | None = None  # FAILED, PORT_TAKEN or STAGE_TOO_LOW; None: all is well
    ending: bool = False
    cut_id: int = 0  # of the newest cut that the server or a trainer has named
    resumed_id: int = 0  # of the newest cut that the trainers know is off
    step: int = 0
    epoch: int = 0
    first_step: int | None = None  # of this stage; None: not yet
    total_steps: int | None = None  # None: not known
    step_s: float | None = None  # None: too early to say
    promise: str = ""  # of the training, for people; "": not known
    checkpoint_error: str | None = None  # as of Stepped
    metrics: dict[str, float] | None = None  # None: no trainer has sent any
    metric_epochs: dict[str, int] | None = None  # None: the script has logged none
    durable: str = ""  # where a trainer has written the state they parked with; "": nowhere
    parked_as: SnapshotRef | None = None  # the snapshot that its trainers took; None: not yet
    previewed: SnapshotRef | None = None  # what its prepared trainers were shown last
    done_step: int | None = None  # None: training is not complete
    joining: JoinAttempt | None = None  # None: they are not asked to join another stage
    adapter: str = ""  # module of its trainers' framework; "": none has said

    @property
    def key(self) -> Key:
        return self.plan.stage, self.plan.attempt

    @property
    def alive(self) -> bool:
        return any(trainer.alive for trainer in self.trainers)

    @property
    def elastic(self) -> bool:
        return any(trainer.elastic for trainer in self.trainers)

    @property
    def joins(self) -> bool:
        """Every trainer offers to go on as one of a next stage."""
        return bool(self.trainers) and all(trainer.joins for trainer in self.trainers)

    @property
    def formed(self) -> bool:
        """Every trainer can go on as one of the stage that it was asked to join."""
        return self.joining is not None and all(
            trainer.alive and trainer.rank in self.joining.formed for trainer in self.trainers
        )

    @property
    def loaded(self) -> bool:
        return bool(self.trainers) and all(trainer.loaded for trainer in self.trainers)

    @property
    def waits(self) -> bool:
        """Its trainers were started while an older stage trains, and none was told to train yet."""
        overlaps = self.plan.way in (Way.REPLACE, Way.JOIN)
        return overlaps and not any(trainer.go_sent for trainer in self.trainers)

    @property
    def prepared(self) -> bool:
        return bool(self.trainers) and all(trainer.prepared for trainer in self.trainers)

    @property
    def parked(self) -> bool:
        return self.alive and all(t.parked_at is not None or not t.alive for t in self.trainers)

    @property
    def succeeded(self) -> bool:
        exited = bool(self.trainers) and all(trainer.code == 0 for trainer in self.trainers)
        return exited and self.trouble is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """The launcher exits once no trainer is left."""

    code: int
    reason: str
    at_once: bool = False  # SIGKILL, no grace


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherState:
    pod_id: str
    node_id: str
    grace_s: float
    orders: PodOrders | None = None  # None: none have come yet
    runs: tuple[StageRun, ...] = ()  # oldest first; the newest is kept after its end
    leaving: Leaving | None = None
    reported: frozenset[tuple[Any, ...]] = frozenset()  # since the last attach
    kills_done: frozenset[str] = frozenset()
    progress_at: float = 0.0  # when the next PROGRESS is due
    adapter: str = ""  # of the framework that the script imports; "": the orders say it
    spares: int = 0  # warm processes, those that still import included
    warming: bool = False  # one of them imports
    hurried: bool = False  # a trainer waits for that one
    forks: bool | None = None  # a spare stays when it makes a trainer; None: not known
    quiet_since: float | None = None  # since when nothing but training happens; None: more does
    at_hand: tuple[Key, int] | None = None  # run and cut whose segments are at hand; None: none
    alive_at: float | None = None  # when ALIVE is due, if no other report is; None: not attached

    @property
    def plans(self) -> tuple[StagePlan, ...]:
        return self.orders.plans if self.orders is not None else ()

    @property
    def in_force(self) -> StageRun | None:
        """The newest run that is not only prepared; else the newest. None: there is none."""
        newest = self.runs[-1] if self.runs else None
        return next((run for run in reversed(self.runs) if not run.waits), newest)


# --- events -----------------------------------------------------------------------------------


def ordered(pod: LauncherState, orders: PodOrders) -> LauncherState:
    """The server's orders have changed."""
    return replace(pod, orders=orders)


def attached(pod: LauncherState, orders: PodOrders) -> LauncherState:
    """The server has taken the launcher's whole status. Reports it may have missed are repeated."""
    return replace(ordered(pod, orders), reported=frozenset())


def spawned(pod: LauncherState, plan: StagePlan) -> LauncherState:
    ranks = own_pod(pod.pod_id, plan).ranks
    run = StageRun(plan=plan, trainers=tuple(TrainerState(rank=rank) for rank in ranks))
    return replace(pod, runs=(*pod.runs, run))


def invited(pod: LauncherState, key: Key, plan: StagePlan) -> LauncherState:
    """The trainers of the run `key` may join `plan`: its ports are free."""
    run = find_run(pod, key)
    return pod if run is None else _put(pod, replace(run, joining=JoinAttempt(plan=plan)))


def refused_ports(pod: LauncherState, plan: StagePlan, reason: str) -> LauncherState:
    """A port of `plan` is taken, so nothing was started."""
    return _with_trouble(pod, plan, (), kind=ReportKind.PORT_TAKEN, reason=reason)


def not_spawned(
    pod: LauncherState, plan: StagePlan, started: Iterable[int], rank: int, reason: str
) -> LauncherState:
    """Trainer `rank` could not be started; the ranks in `started` run."""
    trainers = tuple(TrainerState(rank=each) for each in started)
    return _with_trouble(pod, plan, trainers, kind=ReportKind.FAILED, reason=reason, rank=rank)


def received(
    pod: LauncherState,
    key: Key,
    rank: int,
    message: TrainerMessage,
    evidence: Evidence | None = None,
) -> LauncherState:
    """Trainer `rank` of the attempt `key` has sent a message.

    Args:
        evidence: of what it has raised.
    """
    run = find_run(pod, key)
    if run is None:
        return pod
    match message:
        case TrainerHello():
            # A script that enters a second loop sends hello again, and is welcomed again.
            reset = {"welcomed": False, "prepared": False, "loaded": False, "go_sent": False}
            run = _with_trainer(
                run, rank, elastic=True, joins=message.joins, parked_at=None, cut_sent=0, **reset
            )
            run = replace(run, adapter=message.adapter)
            if message.goes_on:
                run = replace(run, done_step=None, first_step=None)
        case Prepared():
            run = _with_trainer(run, rank, prepared=True)
        case Formed(stage=stage, attempt=attempt):
            if run.joining is not None and run.joining.key == (stage, attempt):
                formed = run.joining.formed | {rank}
                run = replace(run, joining=replace(run.joining, formed=formed))
        case CannotJoin(stage=stage, attempt=attempt, reason=why):
            run = _with_trainer(run, rank, joins=False)
            if run.joining is not None and run.joining.key == (stage, attempt):
                refusal = run.joining.refusal or f"rank {rank}: {why}"
                run = replace(run, joining=replace(run.joining, refusal=refusal))
        case StageTooLow(highest_stage=highest):
            if run.trouble is None:
                kind = ReportKind.STAGE_TOO_LOW
                run = replace(run, trouble=report_on(run, kind, highest_stage=highest))
        case StateLoaded(step=step, epoch=epoch):
            run = _with_trainer(_come_to(run, step, epoch), rank, loaded=True)
        case Stepped():
            run = _stepped(run, rank, message)
        case Drained(step=step, id=cut_id, snapshot=snapshot, durable=durable):
            if cut_id is None or cut_id > run.resumed_id:  # else: that cut is off, and it trains on
                # The ranks agree on the newest cut that any of them knows; the server may have told
                # us of an older one.
                newest = max(run.cut_id, cut_id or 0)
                run = replace(run, step=max(run.step, step), cut_id=newest, parked_as=snapshot)
                run = replace(run, durable=durable or run.durable)  # one of them writes for all
                run = _with_trainer(run, rank, parked_at=step)
        case Raised(error=error):
            run = _with_trainer(run, rank, error=error)
            if not run.ending and pod.leaving is None:
                # At once: its process may take long to end, and its peers' trouble is told first.
                run = _note_failure(run, rank, evidence, code=1, reason=str(error), error=error)
        case Done(step=step):
            run = replace(run, step=max(run.step, step), done_step=step)
    return _put(pod, run)


def died(
    pod: LauncherState,
    key: Key,
    rank: int,
    code: int,
    reason: str,
    evidence: Evidence | None = None,
) -> LauncherState:
    """Trainer `rank` has ended; `reason` is the essence of its last lines.

    An error that it reported itself says more than these lines and its exit code.
    """
    run = find_run(pod, key)
    if run is None:
        return pod
    run = _with_trainer(run, rank, code=code)
    trainer = find_trainer(run, rank)
    error = None if trainer is None else trainer.error
    reason = reason if error is None else str(error)
    hung_s = 0.0
    if trainer is not None and trainer.hang is not None and trainer.hang.killed:
        gave_up = evidence is not None and UNKILLABLE in evidence.events
        text = f"it hung: {trainer.hang}"
        reason, hung_s = f"{text}; {reason}" if gave_up else text, trainer.hang.silent_s
        if evidence is not None and not gave_up:
            evidence = replace(evidence, events=())  # its launcher has killed it
    if code == 0 and run.waits:
        reason = "it ended without having trained: did the script leave before its first step?"
    if (code != 0 or run.waits) and not run.ending and pod.leaving is None:
        peer_lost = code in _PEER_LOST_CODES and run.plan.world_size > 1 and error is None
        run = _note_failure(
            run, rank, evidence, code=code, reason=reason, error=error, peer_lost=peer_lost,
            hung_s=hung_s,
        )  # fmt: skip
    return _put(pod, run)


def _note_failure(
    run: StageRun,
    rank: int,
    evidence: Evidence | None,
    *,
    peer_lost: bool = False,
    **fields: Any,
) -> StageRun:
    """Report the first failure. And one more: the cause, if the first was a victim of it."""
    known = run.trouble
    if known is not None and not (
        known.kind is ReportKind.FAILED and known.peer_lost and not peer_lost
    ):
        return run
    if evidence is not None:
        fields |= {"events": evidence.events, "last_lines": evidence.last_lines}
    trouble = report_on(run, ReportKind.FAILED, rank=rank, peer_lost=peer_lost, **fields)
    return replace(run, trouble=trouble)


def hung(pod: LauncherState, key: Key, rank: int, hang: TrainerHang) -> LauncherState:
    """Trainer `rank` hangs, or does no more. Nothing is news of one that is killed for it."""
    run = find_run(pod, key)
    trainer = None if run is None else find_trainer(run, rank)
    if run is None or trainer is None or (trainer.hang is not None and trainer.hang.killed):
        return pod
    return _put(pod, _with_trainer(run, rank, hang=hang, hang_news=trainer.hang_news + 1))


def paced(pod: LauncherState, key: Key, pace: RankPace) -> LauncherState:
    """It is known where a trainer's time went."""
    run = find_run(pod, key)
    return pod if run is None else _put(pod, _with_trainer(run, pace.rank, pace=pace))


def paces_told(run: StageRun) -> StageRun:
    """What was known of its trainers' time is in a report."""
    return replace(run, trainers=tuple(replace(t, pace=None) for t in run.trainers))


def killed_as_hung(
    pod: LauncherState, key: Key, rank: int, text: str, silent_s: float
) -> LauncherState:
    """Trainer `rank` is killed, since it hangs for too long: its death is reported with that."""
    run = find_run(pod, key)
    trainer = None if run is None else find_trainer(run, rank)
    where = "" if trainer is None or trainer.hang is None else trainer.hang.where
    hang = TrainerHang(text=text, silent_s=silent_s, where=where, killed=True)
    return hung(pod, key, rank, hang)


def spare_started(pod: LauncherState) -> LauncherState:
    return replace(pod, spares=pod.spares + 1, warming=True)


def spares_counted(
    pod: LauncherState, count: int, *, warming: bool, forks: bool | None = None
) -> LauncherState:
    """A spare is ready, has died, or became a trainer. `forks` None: no more is known than was."""
    forks = pod.forks if forks is None else forks
    hurried = pod.hurried and warming
    return replace(pod, spares=count, warming=warming, hurried=hurried, forks=forks)


def spare_failed(pod: LauncherState) -> LauncherState:
    """A spare could not be started, or has died.

    Whatever killed it would kill the next one: no more are started until a change, and no trainer
    waits for one again.
    """
    return replace(pod, spares=sys.maxsize, warming=False, hurried=False, forks=False)


def leave(pod: LauncherState, leaving: Leaving) -> LauncherState:
    """The launcher has to exit: by a signal, without its shim, or not known to the server."""
    if pod.leaving is not None and (pod.leaving.at_once or not leaving.at_once):
        return pod
    return replace(pod, leaving=leaving)


def _come_to(run: StageRun, step: int, epoch: int) -> StageRun:
    """Enter how far a trainer is. A later loop of the script begins with epoch 0 again."""
    step, epoch = max((run.step, run.epoch), (step, epoch))
    return replace(run, step=step, epoch=epoch)


def _stepped(run: StageRun, rank: int, message: Stepped) -> StageRun:
    # Metrics that a script logs before the stage's first step come with the step it restored.
    made_one = run.first_step is None and message.step > run.step
    run = replace(
        _come_to(run, message.step, message.epoch),
        first_step=message.step if made_one else run.first_step,
        total_steps=run.total_steps if message.total_steps is None else message.total_steps,
        step_s=run.step_s if message.step_s is None else message.step_s,
        promise=message.promise or run.promise,
        checkpoint_error=(
            run.checkpoint_error if message.checkpoint_error is None else message.checkpoint_error
        ),
    )
    # The metrics of one trainer, not a mixture: those of the pod's lowest rank.
    if message.metrics is not None and rank == min(t.rank for t in run.trainers):
        run = replace(run, metrics=message.metrics, metric_epochs=message.metric_epochs)
    parked = next((t.parked_at for t in run.trainers if t.rank == rank), None)
    if (
        parked is not None and message.step > parked
    ):  # it trains on: its `drained` was for a cut that is off
        run = _with_trainer(run, rank, parked_at=None)
    return run


# --- small helpers ----------------------------------------------------------------------------


def own_pod(pod_id: str, plan: StagePlan) -> PlanPod:
    """Return this pod's part of `plan`.

    Raises:
        ValueError: the plan does not name the pod; the server never sends such a plan.
    """
    for pod in plan.pods:
        if pod.pod_id == pod_id:
            return pod
    raise ValueError(f"pods: stage {plan.stage} does not name pod {pod_id}")


def new_ranks(pod_id: str, old: StagePlan, new: StagePlan) -> dict[int, int]:
    """Return old rank -> new rank for the trainers of a pod that is in both stages."""
    return dict(zip(own_pod(pod_id, old).ranks, own_pod(pod_id, new).ranks, strict=True))


def renumbered(run: StageRun, pod_id: str) -> tuple[StageRun, dict[int, int]]:
    """Return the run with the ranks that its plan has now, and old rank -> new rank."""
    if not run.plan.missing_pods:
        return run, {}
    ranks = own_pod(pod_id, run.plan).ranks
    changed = {
        trainer.rank: rank
        for trainer, rank in zip(run.trainers, ranks, strict=False)
        if trainer.rank != rank
    }
    trainers = tuple(replace(t, rank=changed.get(t.rank, t.rank)) for t in run.trainers)
    return replace(run, trainers=trainers), changed


def awaits_spare(pod: LauncherState) -> bool:
    """Whether the pod's next trainers should wait for a spare that imports, or is to be started.

    They would import as long themselves. A spare that forks is there for the trainers after them.
    """
    if pod.orders is None or pod.forks is False:
        return False
    is_known = (pod.orders.adapter or pod.adapter) != ""
    return pod.warming or (pod.spares == 0 and pod.orders.spares > 0 and is_known)


def find_joining(pod: LauncherState, key: Key) -> StageRun | None:
    """Return the run whose trainers are asked to join the attempt `key`; None: there is none."""
    return next((r for r in pod.runs if r.joining is not None and r.joining.key == key), None)


def find_run(pod: LauncherState, key: Key) -> StageRun | None:
    return next((run for run in pod.runs if run.key == key), None)


def find_trainer(run: StageRun, rank: int) -> TrainerState | None:
    return next((trainer for trainer in run.trainers if trainer.rank == rank), None)


def _put(pod: LauncherState, run: StageRun) -> LauncherState:
    return replace(pod, runs=tuple(run if each.key == run.key else each for each in pod.runs))


def _with_trainer(run: StageRun, rank: int, **fields: Any) -> StageRun:
    trainers = tuple(replace(t, **fields) if t.rank == rank else t for t in run.trainers)
    return replace(run, trainers=trainers)


def _with_trouble(
    pod: LauncherState,
    plan: StagePlan,
    trainers: tuple[TrainerState, ...],
    kind: ReportKind,
    **fields: Any,
) -> LauncherState:
    run = StageRun(plan=plan, trainers=trainers)
    return replace(pod, runs=(*pod.runs, replace(run, trouble=report_on(run, kind, **fields))))


def report_on(run: StageRun, kind: ReportKind, **fields: Any) -> PodReport:
    """Return a report of `kind` with what is known of the run; `fields` adds to it."""
    return PodReport(
        kind=kind,
        stage=run.plan.stage,
        attempt=run.plan.attempt,
        step=run.step,
        epoch=run.epoch,
        elastic=run.elastic,
        joins=run.joins,
        adapter=run.adapter,
        total_steps=run.total_steps,
        step_s=run.step_s,
        metrics=run.metrics,
        metric_epochs=run.metric_epochs,
        promise=run.promise,
        checkpoint_error=run.checkpoint_error,
        **fields,
    )
