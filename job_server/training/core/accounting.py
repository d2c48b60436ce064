"""Keep a job's accounts: wall clock, script clock, stage history, failure budgets. Pure."""

from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from job_server.api.wire import (
    Account,
    FirstError,
    JobSpec,
    JobState,
    Order,
    StageRecord,
    Way,
)
from job_server.jobs.retries import HEALTHY_S, backoff_s
from job_server.jobs.work import Goal
from job_server.training.core.faults import find_lasting
from job_server.training.core.job import (
    MAX_RECORDS,
    Absence,
    Budget,
    Cause,
    CauseKind,
    HaltPhase,
    Hang,
    Job,
    JobStage,
)
from job_server.training.core.work import Work

CLOCK_RUNS = frozenset(
    {JobState.RUNNING, JobState.PREPARING, JobState.CUTTING_OVER, JobState.RECOVERING}
)


def accrue(job: Job, now: float, *, restarted: bool = False) -> Job:
    """Add the time since the last call to what the job did in it.

    If the clock was set back, nothing is added until it has caught up.


    Args:
        restarted: the server was away in that time: the script clock stands, ranks that were
            parked have waited, and whether others trained their launchers will say.
    """
    progress = job.progress
    passed = now - progress.accrued_at
    if passed <= 0 or job.state.ended:
        return job
    bucket = _bucket(job)
    if restarted and not job.legacy:
        progress = replace(progress, absence=_absence(job, passed))
        bucket = "paused_s" if bucket == "paused_s" else "waiting_s"
    account = replace(progress.account, **{bucket: getattr(progress.account, bucket) + passed})
    script_s = progress.script_s
    if script_runs(job) and not restarted:
        script_s += passed
    return replace(
        job, progress=replace(progress, account=account, accrued_at=now, script_s=script_s)
    )


def _absence(job: Job, away_s: float) -> Absence | None:
    """Return what has to be known of an absence of the server. None: nobody trained in it."""
    stage, known = job.active, job.progress.absence
    if stage is None or stage.over is not None:
        return None
    if job.state not in (JobState.RUNNING, JobState.PREPARING):
        return None
    if known is not None and known.stage == stage.stage:  # it has ended twice
        return replace(known, away_s=known.away_s + away_s)
    part = _bucket(job)
    if part not in ("hung_s", "preparing_s"):
        part = "training_s"
    return Absence(stage=stage.stage, since=job.progress.accrued_at, away_s=away_s, part=part)


def end_absence(work: Work, stage: int, *, trains: bool) -> None:
    """A launcher says what became of its stage while the server was away.

    Where none comes, the machines were off as well: that is no time in which the job ran.
    """
    absence = work.job.progress.absence
    if absence is None or absence.stage != stage:
        return
    account = work.job.progress.account
    if trains:
        moved = {
            "waiting_s": account.waiting_s - absence.away_s,
            absence.part: getattr(account, absence.part) + absence.away_s,
        }
        account = replace(account, **moved)
    work.progress(account=account, absence=None)


def live_hangs(job: Job) -> tuple[Hang, ...]:
    """Return the hangs of the stage that trains."""
    return tuple(hang for hang in job.progress.hangs if is_live(job, hang))


def is_live(job: Job, hang: Hang) -> bool:
    """Return whether it is about the stage that trains."""
    stage = job.active
    return stage is not None and stage.over is None and stage.stage == hang.stage


def note_hang(work: Work, hang: Hang, hung_s: float) -> None:
    """Count a trainer as hung: since `hung_s`, which was counted as training until now."""
    job = work.job
    if hang in job.progress.hangs:  # its launcher has attached again
        return
    if not live_hangs(job):
        split_off(work, hung_s=hung_s)
    others = tuple(
        each for each in job.progress.hangs if each.stage == hang.stage and each.rank != hang.rank
    )
    work.progress(hangs=(*others, hang))
    work.note(hang.text)


def split_off(work: Work, **parts: float) -> None:
    """Count so many seconds, which were counted as training until now, as these parts."""
    account = work.job.progress.account
    for name, seconds in parts.items():
        moved = min(max(0.0, seconds), account.training_s)
        account = replace(
            account,
            **{"training_s": account.training_s - moved, name: getattr(account, name) + moved},
        )
    work.progress(account=account)


def end_hang(work: Work, stage: int, rank: int | None) -> bool:
    """The trainer has given a sign of life, or is gone. Return whether it counted as hung."""
    hangs = work.job.progress.hangs
    left = tuple(each for each in hangs if (each.stage, each.rank) != (stage, rank))
    if len(left) < len(hangs):
        work.progress(hangs=left)
    return len(left) < len(hangs)


def account_at(job: Job, now: float) -> Account:
    return accrue(job, now).progress.account


def script_runs(job: Job) -> bool:
    """Whether the change script's clock runs: from the first RUNNING on, but not while waiting."""
    return job.state in CLOCK_RUNS and job.commits > 0


def _bucket(job: Job) -> str:
    match job.state:
        case JobState.RUNNING:
            stage = job.active
            if live_hangs(job):
                return "hung_s"
            if stage is None or not job.elastic or stage.first_step_at is not None:
                return "training_s"
            # The trainers have loaded, but until their first step the pause goes on.
            if stage.way is not Way.START:
                return "cutting_over_s"
            return "recovering_s" if job.commits > 1 else "waiting_s"
        case JobState.PREPARING:
            return "hung_s" if live_hangs(job) else "preparing_s"
        case JobState.CUTTING_OVER:
            return "cutting_over_s"
        case JobState.RECOVERING:
            return "recovering_s"
        case JobState.PAUSING | JobState.PAUSED | JobState.STOPPING:
            return "paused_s"
        case _:
            return "waiting_s"


def name_state(job: Job) -> JobState:
    """Return the JobState that describes what the job is doing."""
    if job.state.ended:
        return job.state
    if job.goal is not Goal.RUN:
        if job.goal.ends_as is not None:
            return JobState.STOPPING
        done = job.halt is not None and job.halt.phase is HaltPhase.DONE
        return JobState.PAUSED if done else JobState.PAUSING
    if job.legacy:
        return JobState.RUNNING
    if job.cut_off or job.waiting:
        return JobState.WAITING
    starting = JobState.STARTING if job.fresh else JobState.RECOVERING
    if job.preparing is None:
        if job.active is None:
            return JobState.WAITING if job.fresh else JobState.RECOVERING
        return starting if job.active.over is not None else JobState.RUNNING
    if job.preparing.way is Way.START:
        return starting
    if job.preparing.phase is Order.PREPARE:
        over = job.active is not None and job.active.over is not None
        if not over and job.preparing.stands_by:
            return JobState.RUNNING
        return JobState.RECOVERING if over else JobState.PREPARING
    return JobState.CUTTING_OVER


def open_record(work: Work, stage: JobStage) -> None:
    record = StageRecord(
        stage=stage.stage,
        flag=work.job.next_flag,
        way=stage.way,
        pods=len(stage.members),
        trainers=stage.trainers,
        reason=stage.reason,
        wanted_at=work.now,
    )
    work.set(records=(*work.job.records, record)[-MAX_RECORDS:])


def update_record(work: Work, number: int, **changes: Any) -> None:
    work.set(
        records=tuple(
            replace(record, **changes) if record.stage == number else record
            for record in work.job.records
        )
    )


def close_attempt(work: Work, number: int, why: str) -> None:
    """Record that a stage will never be committed."""
    update_record(work, number, outcome=f"abandoned: {why}", ended_at=work.now)


def close_stage(work: Work, stage: JobStage, outcome: str) -> None:
    """Record the end of a stage, with the last step it made."""
    job = work.job
    record = next((r for r in job.records if r.stage == stage.stage), None)
    if record is None or record.ended_at is not None:
        return
    made_steps = record.first_step is not None
    ended_at, absence = work.now, job.progress.absence
    if absence is not None and absence.stage == stage.stage:  # else its steps look slow
        ended_at = max(absence.since, record.first_step_at or record.committed_at or 0.0)
    update_record(
        work,
        stage.stage,
        outcome=outcome,
        ended_at=ended_at,
        last_step=job.progress.step if made_steps else None,
    )


def stand_still(work: Work, cause: Cause | None = None) -> None:
    """Note when training stopped; the first report counts."""
    job = work.job
    if job.lineage.stopped_at is None:
        at = work.now if cause is None or cause.peer_lost else cause.at
        work.set(lineage=replace(job.lineage, stopped_at=at))


def first_step(work: Work, stage: JobStage, step: int) -> JobStage:
    """Record the first step of the active stage, its pause, and how many steps are redone."""
    job = work.job
    stage = replace(stage, first_step_at=work.now)
    lineage = job.lineage
    before = lineage.previous_last_step
    redone = max(0, before - (step - 1)) if before else 0
    pause_s = None if lineage.stopped_at is None else max(0.0, work.now - lineage.stopped_at)
    update_record(
        work,
        stage.stage,
        first_step_at=work.now,
        first_step=step,
        pause_s=pause_s,
        redone_steps=redone,
    )
    _extend_before(work, stage.stage, step - 1)
    redone_steps = lineage.redone_steps + redone
    work.set(lineage=replace(lineage, redone_steps=redone_steps, stopped_at=None))
    if redone and step == 1:
        work.note(
            f"training began again at step 0: what is left of the job held no state of it, in "
            f"memory or as a checkpoint; {redone} steps are lost"
        )
    return stage


def _extend_before(work: Work, number: int, restored_step: int) -> None:
    """Correct the last step of the stage before.

    The state that was restored may hold steps that were not reported before a crash.
    """
    trained = [r for r in work.job.records if r.stage < number and r.last_step is not None]
    if trained and (trained[-1].last_step or 0) < restored_step:
        update_record(work, trained[-1].stage, last_step=restored_step)


def note_error(
    work: Work, stage: int, text: str, *, traceback: str = "", is_of_victim: bool = False
) -> None:
    """Keep the first error of a stage that is heard, and a victim's only until a cause is."""
    known = work.job.error
    if known is not None and known.stage == stage and (is_of_victim or not known.is_of_victim):
        return
    found = FirstError(
        stage=stage, at=work.now, text=text, traceback=traceback, is_of_victim=is_of_victim
    )
    work.set(error=found)


# --- budgets -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RetryVerdict:
    budget: Budget
    give_up: str  # why the job has failed; "": it goes on


def count_failure(job: Job, cause: Cause, now: float, *, ran_s: float) -> RetryVerdict:
    """Record why a stage ended, and decide whether the job may try again.

    Args:
        ran_s: how long the stage had been committed, 0 if it never was.
    """
    budget, spec = job.budget, job.spec
    if cause.kind is CauseKind.PREEMPTION:
        # A preemption is no reason to give up. But a script that always ends by SIGTERM must not be
        # started again and again without a pause.
        progressed = _progressed(job, budget.step_at_preemption, ran_s)
        in_row = 1 if progressed else budget.preemptions_in_row + 1
        budget = replace(
            budget,
            preemptions=budget.preemptions + 1,
            preemptions_in_row=in_row,
            step_at_preemption=max(budget.step_at_preemption, job.progress.best_step),
            retry_at=now + backoff_s(spec.job_id, in_row),
        )
        limit = spec.max_preemptions
        if limit is not None and budget.preemptions > limit:
            give_up = f"preempted more than {limit} times (max_preemptions)"
            return RetryVerdict(budget, f"{give_up}; the last time: {cause.text}")
        return RetryVerdict(budget, "")
    ignored = cause.kind is CauseKind.IGNORED
    if cause.kind is not CauseKind.FAILURE and not ignored:
        return RetryVerdict(replace(budget, retry_at=now), "")
    progressed = _progressed(job, budget.step_at_failure, ran_s)
    in_row = 1 if progressed else budget.failures_in_row + 1
    # An error of the elastic loop names its step. The step of any other error is not known: after
    # new steps it counts as another error, as on a node where every growth fails.
    before = tuple(fault for fault in budget.faults if fault.step is not None or not progressed)
    budget = replace(
        budget,
        failures=budget.failures + (not ignored),
        failures_in_row=in_row,
        faults=before if ignored else cause.faults,
        step_at_failure=max(budget.step_at_failure, job.progress.best_step),
        retry_at=now + backoff_s(spec.job_id, in_row),
    )
    lasting = find_lasting(cause.faults, before, of_change=cause.of_change)
    return RetryVerdict(budget, lasting or _used_up(spec, budget, cause))


def _progressed(job: Job, since_step: int, ran_s: float) -> bool:
    if not job.elastic:  # the original's calls report no steps
        return ran_s > HEALTHY_S
    return job.progress.best_step > since_step


def _used_up(spec: JobSpec, budget: Budget, cause: Cause) -> str:
    """Return which budget is used up; "": none is."""
    limit, in_row = spec.max_failures, budget.failures_in_row
    if limit is not None and budget.failures > limit:
        why = f"failed more than {limit} times (max_failures)"
    elif in_row > spec.max_restarts_without_progress:
        why = f"{in_row - 1} restarts in a row brought no new step (max_restarts_without_progress)"
    else:
        return ""
    return f"{why}; the last time: {cause.text}"
