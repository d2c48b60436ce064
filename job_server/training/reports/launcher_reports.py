"""Apply what launchers report. Pure.

A message may be late, doubled or out of order: each function checks whether the report says
something new about a stage that still counts, and otherwise changes nothing.
"""

import math
from collections.abc import Mapping

from msgspec.structs import replace

from job_server.api.failure_policy import (
    HANG,
    OOM_KILL,
    PEER_LOST,
    FailedProcess,
    matches_name,
)
from job_server.api.text import describe_exit
from job_server.api.wire import (
    MAX_METRICS,
    TRAIN_LOSS,
    Attach,
    DesiredState,
    LossPoint,
    Order,
    PodReport,
    PodStagePhase,
    ReportKind,
    SnapshotRef,
    Way,
)
from job_server.jobs.pod_reports import REASON_CHARS
from job_server.jobs.work import Goal
from job_server.training.core.accounting import (
    end_absence,
    end_hang,
    first_step,
    note_error,
    note_hang,
    split_off,
    stand_still,
    update_record,
)
from job_server.training.core.changes import choose_way
from job_server.training.core.faults import Failure, fault_of, judge, policy_of
from job_server.training.core.job import (
    GONE,
    PHASES_WITH_CUT,
    STARTUP_ORDER,
    Cause,
    CauseKind,
    Hang,
    JobStage,
    StagePod,
)
from job_server.training.core.moves import (
    dismiss_leavers,
    fail_active,
    fail_preparing,
    failure,
    join_otherwise,
    neutral,
    reallocate_ports,
    record_snapshot,
    renumber,
)
from job_server.training.core.work import Work
from job_server.training.reports.pace import note_paces
from job_server.training.reports.pod_exits import kind_of, launcher_exited, leave_slots, slot_events

ELSEWHERE = "pod_runtime.trainer.errors.ElsewhereError"
MAX_ATTEMPTS = 10  # how often a stage may get new ports
CURVE_POINTS = 100  # at most, of a job's loss curve

_IMPLIED = {  # the report that brings a pod to a phase
    PodStagePhase.READY: ReportKind.READY,
    PodStagePhase.STARTED: ReportKind.STARTED,
    PodStagePhase.LOADED: ReportKind.LOADED,
    PodStagePhase.TRAINING: ReportKind.PROGRESS,
    PodStagePhase.PARKED: ReportKind.DRAINED,
    PodStagePhase.ENDED: ReportKind.ENDED,
    PodStagePhase.FAILED: ReportKind.FAILED,
}


def attached(work: Work, attach: Attach) -> None:
    """Apply a launcher's whole state as the reports that it implies."""
    pod = work.job.pod(attach.pod_id)
    if pod is None or pod.released:
        return
    _record_heartbeat(work, pod.pod_id, attach.snapshot)
    if pod.leaving:
        return
    # Trainers without the loop never say more than that they have started.
    plain = not attach.elastic and attach.phase in (PodStagePhase.STARTED, PodStagePhase.LOADED)
    trains = plain or attach.phase is PodStagePhase.TRAINING
    end_absence(work, attach.stage, trains=trains)
    _note_elastic(work, is_elastic=attach.elastic)
    _apply_numbers(work, attach)
    preparing = work.job.preparing
    if preparing is not None and not preparing.overlaps:
        _raise(work, preparing, pod.pod_id, PodStagePhase.READY)
    if attach.stage:
        _apply_phase(work, attach)


def _note_elastic(work: Work, *, is_elastic: bool) -> None:
    """Enter that a trainer has called the elastic loop: what was before that was no training."""
    if is_elastic and not work.job.elastic:
        work.set(elastic=True)
        split_off(work, waiting_s=work.job.progress.account.training_s)


def _apply_numbers(work: Work, attach: Attach) -> None:
    """Keep the job's stage numbers above all that this launcher knows."""
    job = work.job
    known = attach.stage
    if job.commits == 0:  # later, the path holds the job's own stages
        known = max(known, attach.highest_stage)
    if known >= job.next_stage:
        work.set(next_stage=known + 1)
    preparing = job.preparing
    first = job.commits == 0 and preparing is not None and preparing.phase is Order.PREPARE
    if first and preparing is not None and attach.highest_stage >= preparing.stage:
        renumber(work, attach.highest_stage)


def _apply_phase(work: Work, attach: Attach) -> None:
    stage = work.job.stage_numbered(attach.stage)
    if stage is None or attach.attempt < stage.attempt:
        return
    if attach.phase is PodStagePhase.TRAINING:
        _trains(work, stage, attach.pod_id)
    implied = PodReport(
        kind=_IMPLIED[attach.phase],
        stage=attach.stage,
        attempt=attach.attempt,
        step=attach.step,
        snapshot=attach.snapshot,
        elastic=attach.elastic,
    )
    if attach.phase is PodStagePhase.FAILED and attach.failure is not None:
        implied = attach.failure
    reported(work, attach.pod_id, implied)
    if attach.done:
        reported(work, attach.pod_id, replace(implied, kind=ReportKind.DONE))


def _trains(work: Work, stage: JobStage, pod_id: str) -> None:
    """Enter that the pod trains: a launcher that attaches knows, whatever its step."""
    member = stage.member(pod_id)
    if member is None or stage is not work.job.active or _cut_is_on(work):
        return
    if member.phase in (
        PodStagePhase.CUTTING,
        PodStagePhase.PARKED,
        PodStagePhase.STARTED,
        PodStagePhase.LOADED,
    ):
        work.move(stage, pod_id, PodStagePhase.TRAINING)


def reported(work: Work, pod_id: str, report: PodReport) -> None:
    """Apply one report of a launcher."""
    pod = work.job.pod(pod_id)
    if pod is None:
        return
    if len(report.reason) > REASON_CHARS:  # it is kept in records and events
        report = replace(report, reason=report.reason[:REASON_CHARS])
    if pod.released:
        _apply_ended(work, pod_id, report)
        return
    if report.kind is ReportKind.ALIVE:
        _record_heartbeat(work, pod_id, None)
        return
    _record_heartbeat(work, pod_id, report.snapshot)
    if pod.desired is DesiredState.HOLD:
        _apply_ended(work, pod_id, report)
        return
    _note_elastic(work, is_elastic=report.elastic)
    if report.adapter not in ("", work.job.adapter):
        work.set(adapter=report.adapter)
    if report.kind is ReportKind.EXITED:
        launcher_exited(work, pod, report)
        return
    stage = work.job.stage_numbered(report.stage)
    member = stage.member(pod_id) if stage is not None else None
    if member is not None and member.phase is PodStagePhase.LOST:
        _apply_ended(work, pod_id, report)  # it was given up in a pause that was called off
    if stage is None or member is None or member.phase in GONE:
        return
    _record_joins(work, stage, pod_id, report)
    _dispatch(work, stage, member, report)


def _apply_ended(work: Work, pod_id: str, report: PodReport) -> None:
    """Accept that a lost pod confirms the end of its trainers after all."""
    if report.kind in (ReportKind.ENDED, ReportKind.EXITED):
        for stage in work.job.stages:
            member = stage.member(pod_id)
            exit_or_this = report.kind is ReportKind.EXITED or report.stage >= stage.stage
            if member is not None and member.phase is PodStagePhase.LOST and exit_or_this:
                work.move(stage, pod_id, PodStagePhase.ENDED)


def _dispatch(work: Work, stage: JobStage, member: StagePod, report: PodReport) -> None:
    pod_id = member.pod.pod_id
    match report.kind:
        case ReportKind.READY:
            if report.attempt >= stage.attempt and stage is work.job.preparing:
                _raise(work, stage, pod_id, PodStagePhase.READY)
        case ReportKind.STARTED | ReportKind.LOADED:
            _started(work, stage, pod_id, report)
        case ReportKind.FIRST_STEP | ReportKind.PROGRESS:
            _progressed(work, stage, member, report)
        case ReportKind.DRAINED:
            _drained(work, stage, member, report)
        case ReportKind.ENDED:
            _ended(work, stage, pod_id, report)
        case ReportKind.FAILED:
            _failed(work, stage, member, report)
        case ReportKind.PORT_TAKEN:
            _port_taken(work, stage, pod_id, report)
        case ReportKind.CANNOT_JOIN:
            _cannot_join(work, stage, pod_id, report)
        case ReportKind.STAGE_TOO_LOW:
            _stage_too_low(work, stage, pod_id, report)
        case ReportKind.HUNG:
            _hung(work, stage, member, report)
        case ReportKind.DONE:
            _done(work, stage, member, report)
        case ReportKind.EXITED | ReportKind.ALIVE:  # keyed by pod: handled before
            pass


def _record_heartbeat(work: Work, pod_id: str, snapshot: SnapshotRef | None) -> None:
    work.progress(heard={**work.job.progress.heard, pod_id: work.now})
    record_snapshot(work, pod_id, snapshot)


def _record_joins(work: Work, stage: JobStage, pod_id: str, report: PodReport) -> None:
    """Record whether the pod's trainers could join a next stage in place."""
    joins = work.job.progress.joins
    knows = report.kind in (ReportKind.LOADED, ReportKind.FIRST_STEP, ReportKind.PROGRESS)
    knows |= report.kind is ReportKind.READY and stage.overlaps
    if knows and report.attempt >= stage.attempt and joins.get(pod_id) is not report.joins:
        work.progress(joins={**joins, pod_id: report.joins})


def _raise(work: Work, stage: JobStage, pod_id: str, phase: PodStagePhase) -> None:
    """Move a pod forward on the way to training, never back."""
    member = stage.member(pod_id)
    if (
        member is not None
        and member.phase in STARTUP_ORDER
        and STARTUP_ORDER.index(member.phase) < STARTUP_ORDER.index(phase)
    ):
        work.move(stage, pod_id, phase)


def _started(work: Work, stage: JobStage, pod_id: str, report: PodReport) -> None:
    starts = stage.phase is Order.START or stage.committed
    if not starts or report.attempt != stage.attempt:
        return
    loaded = report.kind is ReportKind.LOADED
    _raise(work, stage, pod_id, PodStagePhase.LOADED if loaded else PodStagePhase.STARTED)
    held = work.job.stage_numbered(stage.stage)
    if loaded and report.step and held is not None and held.first_step_at is None:
        work.set_stage(replace(held, base_step=report.step))


def _progressed(work: Work, stage: JobStage, member: StagePod, report: PodReport) -> None:
    if stage is not work.job.active or not stage.committed:
        return
    pod_id = member.pod.pod_id
    trains = member.phase in (PodStagePhase.READY, PodStagePhase.STARTED, PodStagePhase.LOADED)
    if not _cut_is_on(work):
        trains |= member.phase is PodStagePhase.CUTTING
        trains |= member.phase is PodStagePhase.PARKED and report.step > member.step
    if trains and not stage.end_ordered:
        work.move(stage, pod_id, PodStagePhase.TRAINING)
    if work.job.done and report.kind is ReportKind.FIRST_STEP:
        _begin_loop(work, report.step)
    _advance_step(work, pod_id, report)
    _apply_first_step(work, stage, report)
    if report.paces:
        note_paces(work, stage, report.paces)


def _begin_loop(work: Work, first_step: int) -> None:
    """Enter that the script trains on in a later loop, whose steps follow those before."""
    step = work.job.progress.step
    if first_step > step:
        work.set(done=False)
        work.progress(epoch=0)
        work.note(f"the script begins another loop after step {step}")


def _apply_first_step(work: Work, stage: JobStage, report: PodReport) -> None:
    held = work.job.active
    if held is None or held.first_step_at is not None or not held.committed:
        return
    first = report.kind is ReportKind.FIRST_STEP
    beyond = held.base_step is not None and report.step > held.base_step
    if not (first or beyond):
        return
    step = report.step
    if not first and held.base_step is not None:
        step = held.base_step + 1
    work.set(active=first_step(work, held, step))
    if step <= work.job.progress.step:  # it restored an older state than was known of, or none
        work.progress(step=step - 1, epoch=report.epoch)
    retiring = work.job.retiring
    if retiring is not None and retiring.end_since is None:
        work.set(retiring=replace(retiring, end_since=work.now))


def _advance_step(work: Work, pod_id: str, report: PodReport) -> None:
    _note_checkpoints(work, report.checkpoint_error)
    progress = work.job.progress
    newer = report.step > progress.step
    work.progress(
        step=max(progress.step, report.step),
        best_step=max(progress.best_step, report.step),
        epoch=max(progress.epoch, report.epoch) if newer else progress.epoch,
        total_steps=progress.total_steps if report.total_steps is None else report.total_steps,
        metrics=_merged(progress.metrics, report),
        metric_epochs=_epochs(progress.metric_epochs, report.metric_epochs),
        loss_curve=_curve(progress.loss_curve, report) if newer else progress.loss_curve,
        promise=report.promise or progress.promise,
        stepped_at=work.now if newer else progress.stepped_at,
        steps={**progress.steps, pod_id: max(progress.steps.get(pod_id, 0), report.step)},
    )


def _note_checkpoints(work: Work, error: str | None) -> None:
    before = work.job.progress.checkpoint_error
    if error is None or error == before:
        return
    work.progress(checkpoint_error=error)
    if not before:
        work.note(f"warning: {error}", lasting=False)
    elif not error:
        work.note("its state is written again", lasting=False)


def _merged(before: Mapping[str, float], report: PodReport) -> Mapping[str, float]:
    """Return the newest value of each metric.

    Trainers that have begun just now know none but the loss of their steps. That one is never an
    old one, nor is one that the script has logged: it is left out of a report where it is not
    finite.
    """
    now = report.metrics
    if now is None:
        return before
    gone = {TRAIN_LOSS, *now, *(report.metric_epochs or ())}
    old = {name: value for name, value in before.items() if name not in gone}
    return dict([*old.items(), *now.items()][-MAX_METRICS:])


def _epochs(before: Mapping[str, int], now: Mapping[str, int] | None) -> Mapping[str, int]:
    return before if now is None else dict([*{**before, **now}.items()][-MAX_METRICS:])


def _curve(before: tuple[LossPoint, ...], report: PodReport) -> tuple[LossPoint, ...]:
    """Add the loss to the curve, which stays short: every second point goes when it is full.

    Steps that are made again replace those of the lost ones.
    """
    loss = (report.metrics or {}).get(TRAIN_LOSS)
    if loss is None:
        return before
    points = tuple(point for point in before if point.step < report.step)
    if len(points) > 1:
        spacing = (points[-1].step - points[0].step) / (len(points) - 1)
        if report.step - points[-1].step < 0.9 * spacing:
            return points
    short = float(f"{loss:.5g}")
    points += (LossPoint(step=report.step, loss=short if math.isfinite(short) else loss),)
    return points if len(points) <= CURVE_POINTS else points[::2]


def _cut_is_on(work: Work) -> bool:
    """Return whether the active stage is ordered to cut now."""
    job = work.job
    if job.preparing is not None:
        return job.preparing.phase is Order.CUT
    halt = job.halt
    return job.goal is not Goal.RUN and halt is not None and halt.phase in PHASES_WITH_CUT


def _drained(work: Work, stage: JobStage, member: StagePod, report: PodReport) -> None:
    """Enter that a pod has parked. A report of an earlier cut is older than its later steps."""
    job = work.job
    pod_id = member.pod.pod_id
    if stage is not job.active or not stage.committed or stage.end_ordered:
        return
    if report.step < job.progress.steps.get(pod_id, 0):
        return
    _advance_step(work, pod_id, report)
    work.move(
        stage,
        pod_id,
        PodStagePhase.PARKED,
        report.step,
        snapshot_is_current=report.snapshot_is_current,
        durable=report.durable,
    )
    if _cut_is_on(work):
        stand_still(work)


def _ended(work: Work, stage: JobStage, pod_id: str, report: PodReport) -> None:
    if stage.end_ordered:
        work.move(stage, pod_id, PodStagePhase.ENDED)
    elif stage is work.job.active:
        # END was not ordered, so this launcher has lost its trainers in another way.
        text = f"pod {pod_id} has no trainers of stage {stage.stage} any more"
        fail_active(work, failure(work, text))
        work.move(stage, pod_id, PodStagePhase.ENDED)


def _failed(work: Work, stage: JobStage, member: StagePod, report: PodReport) -> None:
    if report.attempt < stage.attempt or _is_elsewhere(work, stage, member, report):
        return
    job = work.job
    pod_id = member.pod.pod_id
    planned = _was_killed(stage, report)
    end_hang(work, stage.stage, report.rank)
    slots = _slots(member, report.rank)
    failure = _as_failure(report, slot_events(work, member.pod.node_id, slots))
    rule = judge(policy_of(job.spec), failure)
    name = "" if planned or PEER_LOST in rule.event else rule.name
    text = _failure_text(pod_id, report, name, planned=planned)
    fault = None if planned else fault_of(_who(pod_id, report), failure, rule)
    cause = Cause(
        kind=CauseKind.PLANNED if planned else kind_of(rule),
        text=text[:REASON_CHARS],
        at=work.now,
        peer_lost=report.peer_lost,
        no_memory_on=member.pod.node_id if OOM_KILL in report.events else "",
        faults=() if fault is None else (fault,),
        of_change=stage is job.preparing and stage.way is not Way.START,
    )
    if not planned:
        note_error(
            work,
            stage.stage,
            text[:REASON_CHARS],
            traceback="" if report.error is None else report.error.traceback,
            is_of_victim=report.peer_lost,
        )
        leave_slots(work, member.pod.node_id, slots, rule, text)
        if OOM_KILL in report.events:
            _note_no_room(work)
    if stage is job.preparing:
        if stage.way is Way.JOIN and report.peer_lost:
            # A new trainer could not connect to those that stay, which report their own trouble.
            _join_otherwise(work, stage, text)
        else:
            fail_preparing(work, cause)
        return
    work.move(stage, pod_id, PodStagePhase.FAILED)
    if stage is not job.active:
        return
    if stage.end_ordered and stage.over is None:
        return  # it was being ended already
    fail_active(work, cause)


def _is_elsewhere(work: Work, stage: JobStage, member: StagePod, report: PodReport) -> bool:
    """Note that a start has not found the state, as only its node sees it. Return whether it is so.

    That is no failure: the next start waits for the node.
    """
    ending = work.job.ending
    away = stage.restore_from is not None and stage.restore_from.away
    chain = () if report.error is None else report.error.chain  # a script may raise its own from it
    if not away or not any(matches_name((ELSEWHERE,), each.types) for each in chain):
        return False
    if ending.saved is not None:
        work.set(ending=replace(ending, saved=replace(ending.saved, alone=True)))
    cause = neutral(work, str(report.error)[:REASON_CHARS])
    if stage is work.job.preparing:
        fail_preparing(work, cause)
        return True
    # Another rank has said so before, or that it has lost this one.
    work.move(stage, member.pod.pod_id, PodStagePhase.FAILED)
    if stage is work.job.active:
        fail_active(work, cause)
    return True


def _note_no_room(work: Work) -> None:
    """Prepare no trainers beside others any more, if there were two sets when one was killed."""
    job = work.job
    preparing = job.preparing
    ahead = preparing is not None and preparing.way in (Way.REPLACE, Way.JOIN)
    if job.no_room or job.spec.overlap == "on" or not (ahead or job.retiring is not None):
        return
    work.set(no_room=True)
    work.note(
        "warning: there is no memory for a second set of trainers: a change of this job stops the "
        "first one from now on, which takes seconds. With more memory, --overlap on has both"
    )


def _slots(member: StagePod, rank: int | None) -> tuple[int, ...]:
    """Return the slot of a rank; of a launcher, all slots of its pod."""
    pod = member.pod
    if rank is None or rank not in pod.ranks:
        return pod.slots
    return (pod.slots[pod.ranks.index(rank)],)


def _as_failure(report: PodReport, of_slots: tuple[str, ...]) -> Failure:
    events = [*report.events, *of_slots]
    events += [HANG] * bool(report.hung_s) + [PEER_LOST] * report.peer_lost
    return Failure(
        of=FailedProcess.TRAINER,
        code=report.code,
        error=report.error,
        words=report.reason,
        lines=report.last_lines,
        events=tuple(events),
    )


def _hung(work: Work, stage: JobStage, member: StagePod, report: PodReport) -> None:
    if report.rank is None:
        return
    who = f"{_who(member.pod.pod_id, report)} on {member.pod.node_id}"
    if report.hung_s:
        text = f"{who} hangs: {report.reason}"[:REASON_CHARS]
        note_hang(work, Hang(stage=stage.stage, rank=report.rank, text=text), report.hung_s)
    elif end_hang(work, stage.stage, report.rank):
        work.note(f"{who} goes on: {report.reason}"[:REASON_CHARS])


def _who(pod_id: str, report: PodReport) -> str:
    return f"pod {pod_id}" if report.rank is None else f"rank {report.rank} ({pod_id})"


def _failure_text(pod_id: str, report: PodReport, name: str, *, planned: bool) -> str:
    who = _who(pod_id, report)
    how = "failed" if report.code is None else describe_exit(report.code)
    if report.peer_lost:
        how += " when it lost a peer"
    if planned:
        how += " to a kill, as requested" if report.peer_lost else ", as requested"
    elif name.lower() not in report.reason.lower():
        how += f" ({name})"
    return f"{who} {how}" + (f": {report.reason}" if report.reason else "")


def _was_killed(stage: JobStage, report: PodReport) -> bool:
    """Return whether a requested kill explains the failure, of the killed rank or of its peers."""
    if not stage.kill_ranks:
        return False
    killed = {rank for _, rank in stage.kill_ranks}
    return report.peer_lost or report.rank in killed


def _port_taken(work: Work, stage: JobStage, pod_id: str, report: PodReport) -> None:
    phase = Order.PREPARE if stage.overlaps else Order.START
    if stage is not work.job.preparing or stage.phase is not phase:
        return
    if report.attempt != stage.attempt:
        return
    why = f"pod {pod_id} found a port taken" + (f": {report.reason}" if report.reason else "")
    if stage.attempt + 1 >= MAX_ATTEMPTS:
        text = f"{why}, {MAX_ATTEMPTS} times in a row"
        fail_preparing(work, failure(work, text))
    else:
        reallocate_ports(work, why)


def _cannot_join(work: Work, stage: JobStage, pod_id: str, report: PodReport) -> None:
    """Enter that a staying pod cannot form a second group, or could not this time."""
    work.progress(joins={**work.job.progress.joins, pod_id: False})
    joins = stage is work.job.preparing and stage.way is Way.JOIN
    if joins and report.attempt == stage.attempt:
        _join_otherwise(work, stage, f"pod {pod_id} cannot join: {report.reason}"[:REASON_CHARS])


def _join_otherwise(work: Work, stage: JobStage, why: str) -> None:
    """Choose another way. After the order to cut, only DRAIN, which needs no preparation."""
    active = work.job.active
    joins = dict(work.job.progress.joins)
    work.progress(joins={})
    way = choose_way(work.job, work.cluster)
    work.progress(joins=joins)
    parks = stage.phase is Order.CUT or (active is not None and active.over is not None)
    join_otherwise(work, Way.DRAIN if parks else way, why)


def _stage_too_low(work: Work, stage: JobStage, pod_id: str, report: PodReport) -> None:
    if stage.end_ordered or report.attempt < stage.attempt:
        return
    text = f"the checkpoint path holds stage {report.highest_stage}, stage {stage.stage} is lower"
    kind = CauseKind.NEUTRAL
    if report.highest_stage < stage.stage:
        kind, text = CauseKind.FAILURE, f"pod {pod_id} refuses stage {stage.stage}: {report.reason}"
    cause = Cause(kind=kind, text=text, at=work.now)
    work.set(next_stage=max(work.job.next_stage, report.highest_stage + 1))
    if stage is work.job.active:
        if kind is CauseKind.NEUTRAL and work.job.commits == 1 and stage.first_step_at is None:
            work.set(fresh=True, commits=0)  # nothing has been lost: the first start goes on
        fail_active(work, cause)
    elif stage is work.job.preparing and kind is CauseKind.NEUTRAL:
        renumber(work, report.highest_stage)
    elif stage is work.job.preparing:
        fail_preparing(work, cause)


def _done(work: Work, stage: JobStage, member: StagePod, report: PodReport) -> None:
    if stage is not work.job.active or not stage.committed or stage.end_ordered:
        return
    if report.step < work.job.progress.step:
        return  # an earlier loop of the script; the training is in a later one
    _advance_step(work, member.pod.pod_id, report)
    if member.phase in (PodStagePhase.CUTTING, PodStagePhase.PARKED):
        work.move(stage, member.pod.pod_id, PodStagePhase.TRAINING)
    if not work.job.done:
        work.set(done=True)
        update_record(work, stage.stage, last_step=work.job.progress.step)
        work.note(f"training is complete after step {work.job.progress.step}")


def forget_retired(work: Work) -> None:
    """Forget the retiring stage once its parked trainers are gone."""
    retiring = work.job.retiring
    if retiring is not None and retiring.all_in(*GONE):
        work.set(retiring=None)
        dismiss_leavers(work)
