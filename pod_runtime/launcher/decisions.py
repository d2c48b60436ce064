"""Decide what a pod's launcher does now. Pure: state and time come in, actions go out."""

import signal
from dataclasses import dataclass, replace

from job_server.api.wire import Order, PodReport, StagePlan, Way
from pod_runtime.channel_wire import (
    Cut,
    Disinvitation,
    Go,
    Invitation,
    LauncherMessage,
    Preview,
    Resume,
    Welcome,
)
from pod_runtime.launcher.reports import due_reports, makes_progress, starts_after_cut
from pod_runtime.launcher.state import (
    ELASTIC_GRACE_S,
    TRAINS,
    Key,
    LauncherState,
    Leaving,
    StageRun,
    TrainerState,
    awaits_spare,
    find_run,
    new_ranks,
    renumbered,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spawn:
    """Start trainers; answered by `spawned`, `refused_ports` or `not_spawned`."""

    plan: StagePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Invite:
    """Ask the trainers of the run `key` to join `plan`; answered by `invited`, `refused_ports`."""

    key: Key
    plan: StagePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A trainer goes on in another stage, and gets `message`."""

    key: Key
    rank: int
    new_key: Key
    new_rank: int
    message: Go


@dataclass(frozen=True, slots=True, kw_only=True)
class SendMessage:
    """Send a trainer a message, with the segments that belong to it."""

    key: Key
    rank: int
    message: LauncherMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class Renumber:
    """Trainers have new ranks: their stage goes on without a lost pod."""

    key: Key
    ranks: dict[int, int]  # old -> new


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmSpare:
    """Start a spare; answered by `spare_started`, or by `spares_counted` if that fails."""

    hurry: bool = False  # trainers wait for it, or for the one that imports already


@dataclass(frozen=True, slots=True, kw_only=True)
class SendSignal:
    key: Key
    rank: int
    signum: signal.Signals


@dataclass(frozen=True, slots=True, kw_only=True)
class SendReport:
    report: PodReport


@dataclass(frozen=True, slots=True, kw_only=True)
class HaveAtHand:
    """Fetch the segments of a stage that is being cut; drop those that were at hand before."""

    plan: StagePlan | None  # None: no stage is


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    code: int
    reason: str
    stage: int
    complete: bool = False  # the training is


Action = (
    Spawn | Renumber | WarmSpare | Invite | Move | SendMessage | SendSignal | SendReport
    | HaveAtHand | Exit
)  # fmt: skip


QUIET_S = 3.0  # how long the training must be undisturbed before a spare is started


def decide(pod: LauncherState, now: float) -> tuple[LauncherState, tuple[Action, ...]]:
    """Return what should be done at `now` (monotonic seconds), and the pod as it then is.

    Call it after every event, and again after having carried out a `Spawn` or an `Invite`.
    """
    actions: list[Action] = []
    by_key = {(plan.stage, plan.attempt): plan for plan in pod.plans}
    going = _going(pod)
    runs: list[StageRun] = []
    for run in pod.runs:
        plan = by_key.get(run.key)
        over = going is not None or plan is None or plan.order is Order.END
        run = replace(run, plan=plan or run.plan, ending=run.ending or over)
        run, ranks = renumbered(run, pod.pod_id)
        if ranks:
            actions.append(Renumber(key=run.key, ranks=ranks))
        run, more = _end(run, now, pod.grace_s, going) if run.ending else _guide(run, pod)
        actions += more
        run, more, moved = _join(run, pod)
        actions += more
        runs += [run, *moved]
    pod = _drop_old_runs(replace(pod, runs=tuple(runs)), by_key)
    pod, kills = _kill_on_demand(pod)
    actions += kills
    if going is None:
        pod, more = _start(pod)
        actions += more
        pod, more = _warm(pod, now)
        actions += more
    pod, reports = due_reports(pod, now)
    actions += [SendReport(report=report) for report in reports]
    pod, more = _hold_at_hand(pod)
    actions += more
    pod, more = _preview(pod)  # after the reports, which the other pods wait for
    actions += more
    actions += _exit(pod, going)
    return pod, tuple(actions)


def next_deadline(pod: LauncherState) -> float | None:
    """Return when `decide` must be called even if nothing happens; None: never."""
    times = [
        trainer.terminated_at + _grace(trainer, pod.grace_s)
        for run in pod.runs
        for trainer in run.trainers
        if trainer.alive and trainer.terminated_at is not None and not trainer.killed
    ]
    if any(makes_progress(run) for run in pod.runs):
        times.append(pod.progress_at)
    if pod.quiet_since is not None and _lacks_spare(pod):
        times.append(pod.quiet_since + QUIET_S)
    if pod.alive_at is not None:
        times.append(pod.alive_at)
    return min(times, default=None)


def _going(pod: LauncherState) -> Leaving | None:
    if pod.leaving is not None:
        return pod.leaving
    stages_over = all(plan.order is Order.END for plan in pod.plans)
    if pod.orders is not None and pod.orders.leave and stages_over:
        return Leaving(code=0, reason="no stage needs this pod any more")
    return None


def _guide(run: StageRun, pod: LauncherState) -> tuple[StageRun, list[Action]]:
    """Bring a stage that is not over, and its trainers, in line with its order."""
    order, number = run.plan.order, run.plan.cut
    actions: list[Action] = []
    # Trainers may have parked for a newer cut than the server has told us of, by their peers' flag:
    # that one is not off.
    off = number - 1 if order is Order.CUT else number
    if off > run.resumed_id:
        run = replace(run, resumed_id=off, cut_id=max(run.cut_id, off), durable="")
        run, more = _resume(run, off)
        actions += more
    if order is Order.CUT:
        run = replace(run, cut_id=max(run.cut_id, number))
    trainers = []
    for trainer in run.trainers:
        if trainer.alive and trainer.elastic:
            trainer, more = _guide_trainer(run, trainer)
            actions += more
        trainers.append(trainer)
    return replace(run, trainers=tuple(trainers)), actions


def _resume(run: StageRun, off: int) -> tuple[StageRun, list[Action]]:
    """Let the trainers go on that have parked for the cut `off` or an earlier one."""
    actions: list[Action] = []
    trainers = []
    for trainer in run.trainers:
        if trainer.alive and trainer.elastic:
            actions.append(SendMessage(key=run.key, rank=trainer.rank, message=Resume(id=off)))
        if run.cut_id == off:
            trainer = replace(trainer, parked_at=None)
        trainers.append(trainer)
    return replace(run, trainers=tuple(trainers)), actions


def _guide_trainer(run: StageRun, trainer: TrainerState) -> tuple[TrainerState, list[Action]]:
    """Send an elastic trainer that is alive the messages that are due."""
    plan, order = run.plan, run.plan.order
    messages: list[LauncherMessage] = []
    if not trainer.welcomed:
        messages.append(Welcome(plan=plan))
        trainer = replace(trainer, welcomed=True)
    if order in TRAINS and not trainer.go_sent:
        messages.append(Go(plan=plan if trainer.prepared else None))
        trainer = replace(trainer, go_sent=True)
    if order is Order.CUT and trainer.cut_sent < run.cut_id:
        cut = Cut(id=run.cut_id, durable=plan.durable, patient=plan.patient, halt=plan.halt)
        messages.append(cut)
        trainer = replace(trainer, cut_sent=run.cut_id)
    sends = [SendMessage(key=run.key, rank=trainer.rank, message=each) for each in messages]
    return trainer, [*sends]


def _join(run: StageRun, pod: LauncherState) -> tuple[StageRun, list[Action], list[StageRun]]:
    """Have trainers join a next stage in place, go on as its trainers, or drop it.

    Returns the run, the actions, and the next stage's run, if the trainers go on in it now.
    """
    joining = run.joining
    plan = next((p for p in pod.plans if p.way is Way.JOIN and p.stage > run.plan.stage), None)
    key = (plan.stage, plan.attempt) if plan is not None else None
    stays = run.alive and run.elastic and not run.ending and run.trouble is None
    actions: list[Action] = []
    if joining is not None and (joining.key != key or not stays):
        asked = [t.rank for t in run.trainers if t.alive and t.rank in joining.asked]
        actions += [SendMessage(key=run.key, rank=rank, message=Disinvitation()) for rank in asked]
        run, joining = replace(run, joining=None), None
    if plan is None or key is None or not stays or run.plan.order not in TRAINS:
        return run, actions, []
    if joining is None:
        if plan.order is Order.PREPARE and find_run(pod, key) is None:
            actions.append(Invite(key=run.key, plan=plan))
        return run, actions, []
    run = replace(run, joining=replace(joining, plan=plan))
    if plan.order is Order.PREPARE:
        run, more = _ask_to_join(run, plan, pod.pod_id)
        return run, [*actions, *more], []
    if plan.order in TRAINS and run.formed:
        run, new, more = _go_on(run, plan, pod)
        return run, [*actions, *more], [new]
    return run, actions, []


def _ask_to_join(run: StageRun, plan: StagePlan, pod_id: str) -> tuple[StageRun, list[Action]]:
    joining = run.joining
    assert joining is not None
    ranks = new_ranks(pod_id, run.plan, plan)
    actions: list[Action] = []
    for old in sorted(ranks.keys() - joining.asked):
        message = Invitation(plan=plan, rank=ranks[old])
        actions.append(SendMessage(key=run.key, rank=old, message=message))
    return replace(run, joining=replace(joining, asked=frozenset(ranks))), actions


def _go_on(
    run: StageRun, plan: StagePlan, pod: LauncherState
) -> tuple[StageRun, StageRun, list[Action]]:
    """Make the trainers of `run` the trainers of `plan`, which is committed."""
    ranks = new_ranks(pod.pod_id, run.plan, plan)
    new = StageRun(
        plan=plan,
        trainers=tuple(
            TrainerState(
                rank=ranks[t.rank], elastic=True, joins=t.joins, welcomed=True, go_sent=True
            )
            for t in run.trainers
        ),
        step=run.step,
        epoch=run.epoch,
        total_steps=run.total_steps,
        adapter=run.adapter,
    )
    message = Go(plan=plan)
    actions: list[Action] = [
        Move(key=run.key, rank=old, new_key=new.key, new_rank=rank, message=message)
        for old, rank in ranks.items()
    ]
    new, more = _guide(new, pod)
    return replace(run, trainers=(), joining=None), new, [*actions, *more]


def _end(
    run: StageRun, now: float, grace_s: float, going: Leaving | None
) -> tuple[StageRun, list[Action]]:
    """Send SIGKILL to trainers that hold no state; to others SIGTERM, later SIGKILL."""
    actions: list[Action] = []
    trainers = []
    at_once = going is not None and going.at_once
    for trainer in run.trainers:
        if trainer.alive and not trainer.killed:
            since = trainer.terminated_at
            late = since is not None and now >= since + _grace(trainer, grace_s)
            if at_once or late or trainer.parked_at is not None or run.waits:
                actions.append(SendSignal(key=run.key, rank=trainer.rank, signum=signal.SIGKILL))
                trainer = replace(trainer, killed=True)
            elif since is None:
                actions.append(SendSignal(key=run.key, rank=trainer.rank, signum=signal.SIGTERM))
                trainer = replace(trainer, terminated_at=now)
        trainers.append(trainer)
    return replace(run, trainers=tuple(trainers)), actions


def _grace(trainer: TrainerState, grace_s: float) -> float:
    return min(grace_s, ELASTIC_GRACE_S) if trainer.elastic else grace_s


def _drop_old_runs(pod: LauncherState, plans: dict[Key, StagePlan]) -> LauncherState:
    """Drop runs that no order names any more, except the one that the pod's status is about."""
    last = pod.in_force
    runs = tuple(run for run in pod.runs if run.alive or run.key in plans or run is last)
    return replace(pod, runs=runs)


def _kill_on_demand(pod: LauncherState) -> tuple[LauncherState, list[Action]]:
    """Send SIGKILL, once each, to the trainers that a change script or an operator wants killed."""
    actions: list[Action] = []
    done = set(pod.kills_done)
    for plan in pod.plans:
        run = find_run(pod, (plan.stage, plan.attempt))
        for kill_id, rank in plan.kill_ranks:
            alive = run is not None and any(t.rank == rank and t.alive for t in run.trainers)
            if run is not None and alive and kill_id not in done:
                done.add(kill_id)
                actions.append(SendSignal(key=run.key, rank=rank, signum=signal.SIGKILL))
    return replace(pod, kills_done=frozenset(done)), actions


def _start(pod: LauncherState) -> tuple[LauncherState, list[Action]]:
    """Start a stage's trainers, of a spare if that is as quick."""
    spawns = _spawn(pod)
    if not awaits_spare(pod) or not (spawns or any(map(starts_after_cut, pod.plans))):
        return pod, spawns
    if pod.hurried:
        return pod, []
    return replace(pod, hurried=True), [WarmSpare(hurry=True)]


def _spawn(pod: LauncherState) -> list[Action]:
    """Start a stage's trainers: while older ones train if its way allows it, else after them."""
    for plan in pod.plans:
        if find_run(pod, (plan.stage, plan.attempt)) is not None:
            continue
        stays = plan.way is Way.JOIN and any(other.stage < plan.stage for other in pod.plans)
        if plan.order is Order.PREPARE and plan.way in (Way.REPLACE, Way.JOIN):
            if stays:  # its trainers train already
                continue
            # An earlier attempt at this stage must be gone first: it holds the same ports and GPUs.
            if not any(run.alive and run.plan.stage == plan.stage for run in pod.runs):
                return [Spawn(plan=plan)]
        elif plan.order is Order.START and not any(run.alive for run in pod.runs):
            return [Spawn(plan=plan)]
    return []


def _warm(pod: LauncherState, now: float) -> tuple[LauncherState, list[Action]]:
    """Start a missing spare, one at a time, once the training has been undisturbed for a while.

    Its imports take a core for a second. That must not delay a change, nor the first steps after
    one.
    """
    trains = [run for run in pod.runs if run.alive and makes_progress(run)]
    settled = all(run in trains or (run.waits and run.prepared) for run in pod.runs)
    quiet = settled and len(trains) == 1 and trains[0].first_step is not None
    since = (now if pod.quiet_since is None else pod.quiet_since) if quiet else None
    pod = replace(pod, quiet_since=since)
    if since is None or now < since + QUIET_S or not _lacks_spare(pod):
        return pod, []
    return pod, [WarmSpare()]


def _lacks_spare(pod: LauncherState) -> bool:
    wanted = pod.orders.spares if pod.orders is not None else 0
    if pod.forks:
        wanted = min(wanted, 1)  # it makes any number of trainers
    return not pod.warming and pod.spares < wanted


def _hold_at_hand(pod: LauncherState) -> tuple[LauncherState, list[Action]]:
    """Keep the state at hand from a cut on: then there is no time to ask the shims for it."""
    run = next((r for r in pod.runs if _is_cut(r)), None)
    wanted = None if run is None else (run.key, run.plan.cut)
    if wanted == pod.at_hand:
        return pod, []
    plan = None if run is None else run.plan
    return replace(pod, at_hand=wanted), [HaveAtHand(plan=plan)]


def _is_cut(run: StageRun) -> bool:
    return run.plan.order is Order.CUT and run.alive and not run.ending and run.trouble is None


def _preview(pod: LauncherState) -> tuple[LauncherState, list[Action]]:
    """Have prepared trainers load the parked state, while the server is told that it is there."""
    parked = next((r.parked_as for r in pod.runs if r.parked and not r.ending), None)
    actions: list[Action] = []
    runs = []
    for run in pod.runs:
        if parked is not None and run.waits and run.prepared and not run.ending:
            if run.previewed != parked:
                actions += [
                    SendMessage(key=run.key, rank=t.rank, message=Preview(snapshot=parked))
                    for t in run.trainers
                ]
            run = replace(run, previewed=parked)
        runs.append(run)
    return replace(pod, runs=tuple(runs)), actions


def _exit(pod: LauncherState, going: Leaving | None) -> list[Action]:
    stage = pod.runs[-1].plan.stage if pod.runs else 0
    if going is not None:
        if any(run.alive for run in pod.runs):
            return []
        return [Exit(code=going.code, reason=going.reason, stage=stage)]
    newest = pod.in_force
    if newest is not None and newest.succeeded and not newest.ending:
        reason = "every trainer has exited with 0"
        return [Exit(code=0, reason=reason, stage=stage, complete=True)]
    return []
