"""By when what must have happened: `rules` acts on it, the shell sleeps until then. Pure."""

import math
from collections.abc import Iterator

from job_server.api.wire import ScriptKind, Way
from job_server.cluster.change_script import ScriptedChange, parse_script
from job_server.cluster.placement import Cluster
from job_server.training.job import Halt, Job, JobStage, Phase
from job_server.training.work import (
    END_MARGIN_S,
    LOAD_PATIENCE,
    RECOVERY_PATIENCE_S,
)

DUE_SLACK_S = 0.001  # sums of many short times are not exact
DECLARE_S = 10.0  # for imports: how long trainers may take to call the elastic loop
TELL_WAITING_S = 10.0  # that a client has not registered yet is no news before
STANDBY_AFTER_S = 5.0  # of undisturbed training before its successors are prepared
SAVE_STALL_S = 60.0  # a client that writes a state has so long for its next bytes
SCRIPT_STORE_S = 5.0  # how much script time a crash of the server may lose


def preparing_deadline(job: Job, stage: JobStage) -> float:
    """Return when the stage in preparation has taken too long.

    Where nothing trains that giving up would bring back, there is more patience: a package
    script may download, and a big model takes its time to load.
    """
    if stage.stands_by:
        return math.inf
    patience_s = job.spec.prepare_timeout_s
    if stage.phase is Phase.START or (stage.phase is Phase.PREPARE and stage.way is Way.START):
        patience_s *= LOAD_PATIENCE
    return stage.since + patience_s


def standby_times(job: Job) -> Iterator[float]:
    """Yield before when no standby is prepared: training settles first, changes go first."""
    if job.active is not None and job.active.first_step_at is not None:
        yield job.active.first_step_at + STANDBY_AFTER_S
    yield job.standby_at


def end_deadline(job: Job, stage: JobStage) -> float | None:
    """Return when pods that have not ended the stage's trainers are killed; None: not told yet."""
    if stage.end_since is None:
        return None
    return stage.end_since + job.spec.grace_s + END_MARGIN_S


def crash_deadline(stage: JobStage) -> float | None:
    """Return until when a prepared change may still take the place of a recovery."""
    return None if stage.over is None else stage.over.at + RECOVERY_PATIENCE_S


def start_deadline(job: Job) -> float:
    """Return until when a first start waits for all expected nodes."""
    return job.start_since + job.spec.start_timeout_s


def told_waiting_at(job: Job) -> float:
    """Return from when on an event says what a start waits for: a client takes its time to come."""
    return job.start_since + TELL_WAITING_S if job.fresh else job.start_since


def halt_deadline(job: Job, halt: Halt) -> float:
    return halt.since + job.spec.prepare_timeout_s


def save_deadline(job: Job, halt: Halt) -> float:
    """Return when who writes the state has not been seen to write for too long."""
    return max(halt.since, job.progress.saving_at) + SAVE_STALL_S


def declare_deadline(stage: JobStage) -> float:
    """Return until when a first stage may not have shown whether its trainers are elastic."""
    return (stage.committed_at or 0.0) + DECLARE_S


def grace_deadline(job: Job, cluster: Cluster) -> float:
    """Return until when those who have not been heard may just not have had the time."""
    return job.grace_from + cluster.silence_s


def scripted(job: Job) -> ScriptedChange | None:
    """Return the next change of the script; None: no more."""
    return parse_script(job.spec.script, job.spec).change(job.script_index)


def is_due(job: Job, change: ScriptedChange) -> bool:
    return job.progress.script_s >= change.at_s - DUE_SLACK_S


def due_changes(job: Job) -> Iterator[ScriptedChange]:
    """Yield the changes of the script that are due, oldest first."""
    script = parse_script(job.spec.script, job.spec)
    index = job.script_index
    while (change := script.change(index)) is not None and is_due(job, change):
        yield change
        index += 1


def is_regular(job: Job) -> bool:
    """Whether the script means an interval, and not points in time."""
    return job.spec.script.kind in (ScriptKind.ALTERNATE, ScriptKind.WALK)


def may_apply_at(job: Job, change: ScriptedChange, now: float) -> float:
    """Return from when on a change that is due may be made.

    A stage makes steps first, or changes that come faster than trainers start would stop stage
    after stage before that. Where no trainer has called the elastic loop yet, it may be on its way
    there: a job counts as one that never does so once a stage has run for `prepare_timeout_s`.

    A change of a regular script that fell due before the stage in force had begun to train waits
    for the script's interval from there, so that all stages train alike.
    """
    stage = job.active
    if stage is None:
        return now
    if not job.elastic and not _is_plain(job, now):
        return (stage.committed_at or now) + job.spec.prepare_timeout_s
    if not is_regular(job):
        return now
    began_at = stage.first_step_at if job.elastic else stage.committed_at
    if began_at is None or now - began_at >= job.progress.script_s - change.at_s:
        return now
    return began_at + job.spec.script.interval_s


def _is_plain(job: Job, now: float) -> bool:
    """Whether a stage has run so long that its trainers would have called the elastic loop."""
    return any(
        (now if record.ended_at is None else record.ended_at) - record.committed_at
        >= job.spec.prepare_timeout_s
        for record in job.records
        if record.committed_at is not None
    )
