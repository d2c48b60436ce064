"""What launchers tell, entered into the job. Pure.

Every message may be late, doubled or out of order: each function asks whether the report says
anything new about a stage that still counts, and otherwise changes nothing.
"""

from dataclasses import replace

from job_server.api.text import ending
from job_server.api.wire import Attach, LocalStage, PodReport, ReportKind, SnapshotRef, Way
from job_server.training.bookkeeping import first_step, stand_still, update_record
from job_server.training.faults import fault_of
from job_server.training.job import (
    CUT_PHASES,
    EARLY,
    OVER,
    At,
    Cause,
    CauseKind,
    Goal,
    Keep,
    Member,
    Phase,
    Stage,
)
from job_server.training.pod_exits import SHOWN_CHARS, launcher_exited
from job_server.training.transitions import (
    choose_way,
    deal_again,
    dismiss_leavers,
    fail_coming,
    fail_current,
    join_otherwise,
    renumber,
)
from job_server.training.work import Work, stage_named, told_to_end

MAX_ATTEMPTS = 10  # how often a stage may be dealt new ports


def attached(work: Work, attach: Attach) -> None:
    """Take a launcher's whole truth as the reports that it implies."""
    pod = work.job.pod(attach.pod_id)
    if pod is None or pod.keep is Keep.RELEASED:
        return
    _hear(work, pod.pod_id, attach.snapshot)
    if pod.keep is not Keep.RUN:
        return
    if attach.elastic and not work.job.elastic:
        work.set(elastic=True)
    _heed_numbers(work, attach)
    coming = work.job.coming
    if coming is not None and coming.way not in (Way.REPLACE, Way.JOIN):
        _raise(work, coming, pod.pod_id, At.READY)
    if attach.stage:
        _heed_phase(work, attach)


def _heed_numbers(work: Work, attach: Attach) -> None:
    """Keep the job's stage numbers above all that this launcher knows of."""
    job = work.job
    known = attach.stage
    if job.commits == 0:  # later, the path holds the job's own stages
        known = max(known, attach.highest_stage)
    if known >= job.next_stage:
        work.set(next_stage=known + 1)
    coming = job.coming
    first = job.commits == 0 and coming is not None and coming.phase is Phase.PREPARE
    if first and coming is not None and attach.highest_stage >= coming.stage:
        renumber(work, attach.highest_stage)


def _heed_phase(work: Work, attach: Attach) -> None:
    stage = stage_named(work.job, attach.stage)
    if stage is None or attach.attempt < stage.attempt:
        return
    if attach.phase is LocalStage.TRAINING:
        _trains(work, stage, attach.pod_id)
    kinds = {
        LocalStage.IDLE: ReportKind.READY,
        LocalStage.STARTING: ReportKind.STARTED,
        LocalStage.LOADED: ReportKind.LOADED,
        LocalStage.TRAINING: ReportKind.PROGRESS,
        LocalStage.PARKED: ReportKind.DRAINED,
        LocalStage.ENDED: ReportKind.ENDED,
        LocalStage.FAILED: ReportKind.FAILED,
    }
    implied = PodReport(
        kind=kinds[attach.phase],
        stage=attach.stage,
        attempt=attach.attempt,
        step=attach.step,
        snapshot=attach.snapshot,
        elastic=attach.elastic,
    )
    if attach.phase is LocalStage.FAILED and attach.failure is not None:
        implied = attach.failure
    reported(work, attach.pod_id, implied)
    if attach.done:
        reported(work, attach.pod_id, replace(implied, kind=ReportKind.DONE))


def _trains(work: Work, stage: Stage, pod_id: str) -> None:
    """A launcher that attaches knows whether its trainers train, whatever their step."""
    member = stage.member(pod_id)
    if member is None or stage is not work.job.current or _cut_is_on(work):
        return
    if member.at in (At.CUTTING, At.PARKED, At.STARTED, At.LOADED):
        work.move(stage, pod_id, At.TRAINING)


def reported(work: Work, pod_id: str, report: PodReport) -> None:
    """Enter one report of a launcher."""
    pod = work.job.pod(pod_id)
    if pod is None:
        return
    if len(report.reason) > SHOWN_CHARS:  # it is kept in records and events
        report = replace(report, reason=report.reason[:SHOWN_CHARS])
    if pod.keep is Keep.RELEASED:
        _heed_ended(work, pod_id, report)
        return
    if report.kind is ReportKind.ALIVE:
        _hear(work, pod_id, None)
        return
    _hear(work, pod_id, report.snapshot)
    if pod.keep is Keep.HOLD:
        _heed_ended(work, pod_id, report)
        return
    if report.elastic and not work.job.elastic:
        work.set(elastic=True)
    if report.kind is ReportKind.EXITED:
        launcher_exited(work, pod, report)
        return
    stage = stage_named(work.job, report.stage)
    member = stage.member(pod_id) if stage is not None else None
    if member is not None and member.at is At.LOST:
        _heed_ended(work, pod_id, report)  # it was given up in a pause that was called off
    if stage is None or member is None or member.at in OVER:
        return
    _hear_joins(work, stage, pod_id, report)
    _dispatch(work, stage, member, report)


def _heed_ended(work: Work, pod_id: str, report: PodReport) -> None:
    """A pod that was given up may still confirm that its trainers are gone."""
    if report.kind in (ReportKind.ENDED, ReportKind.EXITED):
        for stage in work.job.stages:
            member = stage.member(pod_id)
            exit_or_this = report.kind is ReportKind.EXITED or report.stage >= stage.stage
            if member is not None and member.at is At.LOST and exit_or_this:
                work.move(stage, pod_id, At.ENDED)


def _dispatch(work: Work, stage: Stage, member: Member, report: PodReport) -> None:
    pod_id = member.pod.pod_id
    match report.kind:
        case ReportKind.READY:
            if report.attempt >= stage.attempt and stage is work.job.coming:
                _raise(work, stage, pod_id, At.READY)
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
        case ReportKind.DONE:
            _done(work, stage, member, report)
        case ReportKind.EXITED | ReportKind.ALIVE:  # keyed by pod: entered before
            pass


def _age(snapshot: SnapshotRef) -> tuple[int, int, int]:
    return snapshot.stage, snapshot.step, snapshot.serial


def _hear(work: Work, pod_id: str, snapshot: SnapshotRef | None) -> None:
    progress = work.job.progress
    work.progress(heard={**progress.heard, pod_id: work.now})
    current = work.job.current
    if snapshot is None or current is None or snapshot.stage > current.stage:
        return
    known = progress.snapshots.get(pod_id)
    if known is None or _age(snapshot) > _age(known):
        work.progress(snapshots={**progress.snapshots, pod_id: snapshot})
    if snapshot.stage > work.job.snapshot_stage:
        work.set(snapshot_stage=snapshot.stage)
    if current.committed and snapshot.stage == current.stage:
        for pod in work.job.pods:
            if pod.keep is Keep.HOLD and current.member(pod.pod_id) is None:
                work.release(pod.pod_id)


def _hear_joins(work: Work, stage: Stage, pod_id: str, report: PodReport) -> None:
    """Remember whether the pod's trainers could join a next stage in place."""
    joins = work.job.progress.joins
    tells = report.kind in (ReportKind.LOADED, ReportKind.FIRST_STEP, ReportKind.PROGRESS)
    tells |= report.kind is ReportKind.READY and stage.way in (Way.REPLACE, Way.JOIN)
    if tells and report.attempt >= stage.attempt and joins.get(pod_id) is not report.joins:
        work.progress(joins={**joins, pod_id: report.joins})


def _raise(work: Work, stage: Stage, pod_id: str, at: At) -> None:
    """Move a pod forward on the way to training, never back."""
    member = stage.member(pod_id)
    if member is not None and member.at in EARLY and EARLY.index(member.at) < EARLY.index(at):
        work.move(stage, pod_id, at)


def _started(work: Work, stage: Stage, pod_id: str, report: PodReport) -> None:
    starts = stage.phase is Phase.START or stage.committed
    if not starts or report.attempt != stage.attempt:
        return
    loaded = report.kind is ReportKind.LOADED
    _raise(work, stage, pod_id, At.LOADED if loaded else At.STARTED)
    held = stage_named(work.job, stage.stage)
    if loaded and report.step and held is not None and held.first_step_at is None:
        work.set_stage(replace(held, base_step=report.step))


def _progressed(work: Work, stage: Stage, member: Member, report: PodReport) -> None:
    if stage is not work.job.current or not stage.committed:
        return
    pod_id = member.pod.pod_id
    trains = member.at in (At.READY, At.STARTED, At.LOADED)
    if not _cut_is_on(work):
        trains |= member.at is At.CUTTING
        trains |= member.at is At.PARKED and report.step > member.step
    if trains and not told_to_end(stage):
        work.move(stage, pod_id, At.TRAINING)
    _advance_step(work, pod_id, report)
    _heed_first_step(work, stage, report)


def _heed_first_step(work: Work, stage: Stage, report: PodReport) -> None:
    held = work.job.current
    if held is None or held.first_step_at is not None or not held.committed:
        return
    first = report.kind is ReportKind.FIRST_STEP
    beyond = held.base_step is not None and report.step > held.base_step
    if not (first or beyond):
        return
    step = report.step
    if not first and held.base_step is not None:
        step = held.base_step + 1
    work.set(current=first_step(work, held, step))
    previous = work.job.previous
    if previous is not None and previous.end_since is None:
        work.set(previous=replace(previous, end_since=work.now))


def _advance_step(work: Work, pod_id: str, report: PodReport) -> None:
    progress = work.job.progress
    newer = report.step > progress.step
    work.progress(
        step=max(progress.step, report.step),
        best_step=max(progress.best_step, report.step),
        epoch=max(progress.epoch, report.epoch) if newer else progress.epoch,
        total_steps=progress.total_steps if report.total_steps is None else report.total_steps,
        metrics=progress.metrics if report.metrics is None else dict(report.metrics),
        stepped_at=work.now if newer else progress.stepped_at,
        steps={**progress.steps, pod_id: max(progress.steps.get(pod_id, 0), report.step)},
    )


def _cut_is_on(work: Work) -> bool:
    """Whether the stage in force is told to cut now."""
    job = work.job
    if job.coming is not None:
        return job.coming.phase is Phase.CUT
    halt = job.halt
    return job.goal is not Goal.RUN and halt is not None and halt.phase in CUT_PHASES


def _drained(work: Work, stage: Stage, member: Member, report: PodReport) -> None:
    """A pod has parked. One that says so of an earlier cut has made steps since."""
    job = work.job
    pod_id = member.pod.pod_id
    if stage is not job.current or not stage.committed or told_to_end(stage):
        return
    if report.step < job.progress.steps.get(pod_id, 0):
        return
    _advance_step(work, pod_id, report)
    work.move(stage, pod_id, At.PARKED, report.step, kept=report.kept, durable=report.durable)
    if _cut_is_on(work):
        stand_still(work)


def _ended(work: Work, stage: Stage, pod_id: str, report: PodReport) -> None:
    if told_to_end(stage):
        work.move(stage, pod_id, At.ENDED)
    elif stage is work.job.current:
        # END is never taken back, so this launcher lost its trainers in another way.
        text = f"pod {pod_id} has no trainers of stage {stage.stage} any more"
        fail_current(work, Cause(kind=CauseKind.FAILURE, text=text, at=work.now))
        work.move(stage, pod_id, At.ENDED)


def _failed(work: Work, stage: Stage, member: Member, report: PodReport) -> None:
    if report.attempt < stage.attempt:
        return
    job = work.job
    pod_id = member.pod.pod_id
    planned = _was_killed(stage, report)
    text = _failure_text(pod_id, report, planned=planned)
    fault = fault_of(
        _who(pod_id, report), code=report.code, error=report.error, words=report.reason
    )
    cause = Cause(
        kind=CauseKind.PLANNED if planned else CauseKind.FAILURE,
        text=text[:SHOWN_CHARS],
        at=work.now,
        peer_lost=report.peer_lost,
        faults=() if fault is None or planned or report.peer_lost else (fault,),
        of_change=stage is job.coming and stage.way is not Way.START,
    )
    if stage is job.coming:
        if stage.way is Way.JOIN and report.peer_lost:
            # A new trainer could not meet those that stay; what is wrong there they say themselves.
            _join_otherwise(work, stage, text)
        else:
            fail_coming(work, cause)
        return
    work.move(stage, pod_id, At.FAILED)
    if stage is not job.current:
        return
    if told_to_end(stage) and stage.over is None:
        return  # it was being ended anyway
    fail_current(work, cause)


def _who(pod_id: str, report: PodReport) -> str:
    return f"pod {pod_id}" if report.rank is None else f"rank {report.rank} ({pod_id})"


def _failure_text(pod_id: str, report: PodReport, *, planned: bool) -> str:
    who = _who(pod_id, report)
    how = "failed" if report.code is None else ending(report.code)
    if report.peer_lost:
        how += " when it lost a peer"
    if planned:
        how += " to a kill, as requested" if report.peer_lost else ", as requested"
    return f"{who} {how}" + (f": {report.reason}" if report.reason else "")


def _was_killed(stage: Stage, report: PodReport) -> bool:
    """Whether a requested kill explains the failure, its own or its victims'."""
    if not stage.kill_ranks:
        return False
    killed = {rank for _, rank in stage.kill_ranks}
    return report.peer_lost or report.rank in killed


def _port_taken(work: Work, stage: Stage, pod_id: str, report: PodReport) -> None:
    beside = stage.way in (Way.REPLACE, Way.JOIN)
    phase = Phase.PREPARE if beside else Phase.START
    if stage is not work.job.coming or stage.phase is not phase:
        return
    if report.attempt != stage.attempt:
        return
    why = f"pod {pod_id} found a port taken" + (f": {report.reason}" if report.reason else "")
    if stage.attempt + 1 >= MAX_ATTEMPTS:
        text = f"{why}, {MAX_ATTEMPTS} times in a row"
        fail_coming(work, Cause(kind=CauseKind.FAILURE, text=text, at=work.now))
    else:
        deal_again(work, why)


def _cannot_join(work: Work, stage: Stage, pod_id: str, report: PodReport) -> None:
    """A pod that was to stay cannot form a second group, or could not this time."""
    work.progress(joins={**work.job.progress.joins, pod_id: False})
    joins = stage is work.job.coming and stage.way is Way.JOIN
    if joins and report.attempt == stage.attempt:
        _join_otherwise(work, stage, f"pod {pod_id} cannot join: {report.reason}"[:SHOWN_CHARS])


def _join_otherwise(work: Work, stage: Stage, why: str) -> None:
    """Take another way; once the stage in force is told to cut, only one without preparation."""
    current = work.job.current
    joins = dict(work.job.progress.joins)
    work.progress(joins={})
    way = choose_way(work.job, work.cluster)
    work.progress(joins=joins)
    parks = stage.phase is Phase.CUT or (current is not None and current.over is not None)
    join_otherwise(work, Way.DRAIN if parks else way, why)


def _stage_too_low(work: Work, stage: Stage, pod_id: str, report: PodReport) -> None:
    if told_to_end(stage) or report.attempt < stage.attempt:
        return
    text = f"the checkpoint path holds stage {report.highest_stage}, stage {stage.stage} is lower"
    kind = CauseKind.NEUTRAL
    if report.highest_stage < stage.stage:
        kind, text = CauseKind.FAILURE, f"pod {pod_id} refuses stage {stage.stage}: {report.reason}"
    cause = Cause(kind=kind, text=text, at=work.now)
    work.set(next_stage=max(work.job.next_stage, report.highest_stage + 1))
    if stage is work.job.current:
        fail_current(work, cause)
    elif stage is work.job.coming and kind is CauseKind.NEUTRAL:
        renumber(work, report.highest_stage)
    elif stage is work.job.coming:
        fail_coming(work, cause)


def _done(work: Work, stage: Stage, member: Member, report: PodReport) -> None:
    if stage is not work.job.current or not stage.committed or told_to_end(stage):
        return
    _advance_step(work, member.pod.pod_id, report)
    if member.at in (At.CUTTING, At.PARKED):
        work.move(stage, member.pod.pod_id, At.TRAINING)
    if not work.job.done:
        work.set(done=True)
        update_record(work, stage.stage, last_step=work.job.progress.step)
        work.note(f"training is complete after step {work.job.progress.step}")


def previous_ended(work: Work) -> None:
    """Forget the stage before, once its parked trainers are gone."""
    previous = work.job.previous
    if previous is not None and all(member.at in OVER for member in previous.members):
        work.set(previous=None)
        dismiss_leavers(work)
