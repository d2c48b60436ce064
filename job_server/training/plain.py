"""Tell who runs a script that does not use the elastic loop what that means. Pure.

It may be wanted (the original's calls, `DataParallel`, another framework), and it may be an
oversight that costs a night: so it is said once, and shown in the job's status.
"""

from job_server.api.wire import Way
from job_server.training.job import Job
from job_server.training.work import Work

LOOP_S = 60.0  # a script that builds its data first may call the loop as late as that


def warn_plain(work: Work, *, ended: bool = False) -> None:
    """Note, once, that no trainer has called the elastic loop, where that is known to matter.

    That is where a change is about to stop the trainers, where they have run for a while, and
    where several have trained to their end (`ended`).
    """
    job = work.job
    stage = job.active
    if job.warned or job.elastic or job.legacy or stage is None or stage.committed_at is None:
        return
    stops = job.preparing is not None and job.preparing.way is Way.STOP
    if stops or work.now >= stage.committed_at + LOOP_S or (ended and trainers(job) > 1):
        work.set(warned=True)
        work.note(f"warning: {plain_warning(work.job)}", lasting=False)


def plain_warning(job: Job) -> str:
    """Return what the user of a job without the elastic loop should know; "": nothing."""
    if job.elastic or not job.warned:
        return ""
    count = trainers(job)
    alone = (
        f"; each of the {count} trainers trains alone on all the data, unless the script joins "
        f"them itself, say by paddle.distributed.init_parallel_env()"
        if count > 1
        else ""
    )
    return (
        "no trainer has called the elastic loop: a change of the pods starts the script afresh, "
        f"from what it has saved itself{alone}; docs/training-scripts.md shows the loop"
    )


def trainers(job: Job) -> int:
    """Return how many trainers the stage in force has."""
    return sum(len(member.pod.ranks) for member in job.active.members) if job.active else 0
