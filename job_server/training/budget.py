"""How often a job may fail, and how long it waits before it tries again. Pure."""

import hashlib
from dataclasses import dataclass, replace

from job_server.training.faults import find_lasting
from job_server.training.job import Cause, CauseKind, Job

BASE_S = 1.0
CAP_S = 60.0
HEALTHY_S = 60.0  # a stage without step reports that ran so long has made progress


def backoff_s(job_id: str, failures_in_row: int) -> float:
    """Return the wait before the next try: 0 s after a first failure, then exponential.

    The jitter (0.75 to 1.25) comes from the job's id and the count, so that jobs which failed
    together do not come back together, and a replay gives the same times.
    """
    if failures_in_row <= 1:
        return 0.0
    digest = hashlib.sha256(f"{job_id}/{failures_in_row}".encode()).digest()
    jitter = 0.75 + digest[0] / 510
    return min(CAP_S, BASE_S * 2.0 ** min(failures_in_row - 2, 10) * jitter)


@dataclass(frozen=True, slots=True)
class RetryVerdict:
    job: Job
    give_up: str  # why the job has failed; "": it goes on


def count(job: Job, cause: Cause, now: float, *, ran_s: float) -> RetryVerdict:
    """Book why a stage ended, and say whether the job may try again.

    Args:
        ran_s: how long the stage had been committed, 0 if it never was.
    """
    if cause.kind is CauseKind.PREEMPTION:
        # Nobody's fault, and no reason to give up; but a script that always ends by SIGTERM must
        # not be started again and again without a pause.
        progressed = _progressed(job, job.step_at_preemption, ran_s)
        in_row = 1 if progressed else job.preemptions_in_row + 1
        job = replace(
            job,
            preemptions=job.preemptions + 1,
            preemptions_in_row=in_row,
            step_at_preemption=max(job.step_at_preemption, job.progress.best_step),
            retry_at=now + backoff_s(job.spec.job_id, in_row),
        )
        limit = job.spec.max_preemptions
        if limit is not None and job.preemptions > limit:
            give_up = f"preempted more than {limit} times (max_preemptions)"
            return RetryVerdict(job, f"{give_up}; the last time: {cause.text}")
        return RetryVerdict(job, "")
    if cause.kind is not CauseKind.FAILURE:
        return RetryVerdict(replace(job, retry_at=now), "")
    return _count_failure(job, cause, now, ran_s)


def _progressed(job: Job, since_step: int, ran_s: float) -> bool:
    if not job.elastic:  # the original's calls report no steps
        return ran_s > HEALTHY_S
    return job.progress.best_step > since_step


def _count_failure(job: Job, cause: Cause, now: float, ran_s: float) -> RetryVerdict:
    progressed = _progressed(job, job.step_at_failure, ran_s)
    in_row = 1 if progressed else job.failures_in_row + 1
    # An error of the elastic loop names its step. Of any other nobody knows how far the training
    # was: behind new steps it is another one, as on a node where every growth fails.
    before = tuple(fault for fault in job.faults if fault.step is not None or not progressed)
    job = replace(
        job,
        failures=job.failures + 1,
        failures_in_row=in_row,
        faults=cause.faults,
        step_at_failure=max(job.step_at_failure, job.progress.best_step),
        retry_at=now + backoff_s(job.spec.job_id, in_row),
    )
    lasting = find_lasting(cause.faults, before, of_change=cause.of_change)
    if lasting:
        return RetryVerdict(job, lasting)
    return RetryVerdict(job, _used_up(job, cause))


def _used_up(job: Job, cause: Cause) -> str:
    limit, in_row = job.spec.max_failures, job.failures_in_row
    if limit is not None and job.failures > limit:
        why = f"failed more than {limit} times (max_failures)"
    elif in_row > job.spec.max_restarts_without_progress:
        why = f"{in_row - 1} restarts in a row brought no new step (max_restarts_without_progress)"
    else:
        return ""
    return f"{why}; the last time: {cause.text}"
