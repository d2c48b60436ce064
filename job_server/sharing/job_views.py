"""See a training as the policies do: what it has, what it needs, and how fast it is. Pure."""

from job_server.sharing.speedup import fit
from job_server.training.job import Job

SEEN_RECORDS = 50  # the newest stages, whose step times count
MIN_STEPS = 5  # of a stage, for its step time to count


def measured_step_s(job: Job, now: float) -> dict[int, float]:
    """Return pods -> seconds per step, as the job's newest stages had them.

    With `policy` linear a step of more pods is more work; then it is the time for the work of a
    step of one pod.
    """
    seconds: dict[int, float] = {}
    steps: dict[int, int] = {}
    for record in job.records[-SEEN_RECORDS:]:
        active = job.active
        runs = active is not None and active.stage == record.stage and record.ended_at is None
        last_step = job.progress.step if runs else record.last_step
        until = record.ended_at
        if runs:
            until = now if job.progress.stepped_at is None else job.progress.stepped_at
        if record.first_step is None or record.first_step_at is None:
            continue
        if last_step is None or until is None or last_step - record.first_step < MIN_STEPS:
            continue
        took_s = until - record.first_step_at
        if took_s > 0:
            made = last_step - record.first_step
            seconds[record.pods] = seconds.get(record.pods, 0.0) + took_s
            steps[record.pods] = steps.get(record.pods, 0) + made
    share = {pods: pods if job.spec.policy == "linear" else 1 for pods in seconds}
    return {pods: seconds[pods] / steps[pods] / share[pods] for pods in sorted(seconds)}


def remaining_s(job: Job, now: float) -> float | None:
    """Return how many seconds of work for one pod are left; None: not known."""
    measured, total = measured_step_s(job, now), job.progress.total_steps
    if total is None or not measured:
        return None
    stage = job.active
    each = len(stage.members) if job.spec.policy == "linear" and stage is not None else 1
    return max(total - job.progress.step, 0) * each * fit(measured).seconds(1)
