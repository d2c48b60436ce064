"""By when what must have happened: `advance` acts on it, the shell sleeps until then. Pure."""

import math
from collections.abc import Iterator

from job_server.api.wire import ScriptKind, Way
from job_server.cluster.change_script import ScriptedChange, parse_script
from job_server.cluster.placement import Cluster
from job_server.training.bookkeeping import script_runs
from job_server.training.job import At, Halt, HaltPhase, Job, Keep, Phase, Stage
from job_server.training.plain import LOOP_S
from job_server.training.work import (
    END_MARGIN_S,
    LOAD_PATIENCE,
    MISSING_HEARTBEATS,
    RECOVERY_PATIENCE_S,
    client_silent_at,
    fenced_at,
    silent_at,
)

DUE_SLACK_S = 0.001  # sums of many short times are not exact
DECLARE_S = 10.0  # for imports: how long trainers may take to call the elastic loop
TELL_WAITING_S = 10.0  # that a client has not registered yet is no news before
STANDBY_AFTER_S = 5.0  # of undisturbed training before its successors are prepared
SAVE_STALL_S = 60.0  # a client that writes a state has so long for its next bytes
SCRIPT_STORE_S = 5.0  # how much script time a crash of the server may lose


def coming_deadline(job: Job, stage: Stage) -> float:
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
    if job.current is not None and job.current.first_step_at is not None:
        yield job.current.first_step_at + STANDBY_AFTER_S
    yield job.standby_at


def end_deadline(job: Job, stage: Stage) -> float | None:
    """Return when pods that have not ended the stage's trainers are killed; None: not told yet."""
    if stage.end_since is None:
        return None
    return stage.end_since + job.spec.grace_s + END_MARGIN_S


def crash_deadline(stage: Stage) -> float | None:
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


def settle_deadline(stage: Stage) -> float:
    """Return until when a first stage may not have shown whether its trainers are elastic."""
    return (stage.committed_at or 0.0) + DECLARE_S


def heed_deadline(job: Job, cluster: Cluster) -> float:
    """Return until when those who have not been heard may just not have had the time."""
    return job.heed_from + cluster.silence_s


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


def heeded_at(job: Job, change: ScriptedChange, now: float) -> float:
    """Return from when on a change that is due may be made.

    A stage makes steps first, or changes that come faster than trainers start would stop stage
    after stage before that. Where no trainer has called the elastic loop yet, it may be on its way
    there: a job counts as one that never does so once a stage has run for `prepare_timeout_s`.

    A change of a regular script that fell due before the stage in force had begun to train waits
    for the script's interval from there, so that all stages train alike.
    """
    stage = job.current
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


def next_deadline(job: Job, now: float, cluster: Cluster) -> float | None:
    """Return when a Tick would change something; None: only a message can."""
    if job.state.ended:
        return None
    return min((at for at in _deadlines(job, now, cluster) if at > now), default=None)


def _deadlines(job: Job, now: float, cluster: Cluster) -> Iterator[float]:
    if job.coming is not None and not job.coming.stands_by:
        yield coming_deadline(job, job.coming)
    if job.coming is None and job.spec.standby:
        yield from standby_times(job)
    for stage in job.stages:
        yield from (at for at in (end_deadline(job, stage), crash_deadline(stage)) if at)
    if job.halt is not None and job.halt.phase is not HaltPhase.DONE:
        yield halt_deadline(job, job.halt)
    if job.halt is not None and job.halt.phase is HaltPhase.SAVE:
        yield from (save_deadline(job, job.halt), job.halt.since + SAVE_STALL_S)
        yield job.halt.again_at or 0.0
    if job.fresh:
        yield start_deadline(job)
        yield told_waiting_at(job)
    if job.current is not None:
        yield settle_deadline(job.current)
        if not job.elastic and not job.warned and job.current.committed_at is not None:
            yield job.current.committed_at + LOOP_S
    yield from (job.retry_at, job.grow_at, heed_deadline(job, cluster))
    for pod in job.pods:
        if pod.keep is not Keep.RELEASED:
            yield silent_at(job, pod, cluster)
        if pod.left:
            yield client_silent_at(job, pod, cluster)
    for since in job.progress.missing.values():
        yield since + MISSING_HEARTBEATS * cluster.heartbeat_s
    yield from _fences(job, cluster)
    if script_runs(job):
        yield from _script_deadlines(job, now)


def _fences(job: Job, cluster: Cluster) -> Iterator[float]:
    for stage in job.stages:
        for member in stage.members:
            pod = job.pod(member.pod.pod_id)
            if pod is not None and (job.cut_off or member.at is At.LOST):
                at = fenced_at(job, pod, cluster)
                if at is not None:
                    yield at


def _script_deadlines(job: Job, now: float) -> Iterator[float]:
    change = scripted(job)
    if change is None:
        return
    started_at = now - job.progress.script_s - max(0.0, now - job.progress.accrued_at)
    if is_due(job, change):
        yield heeded_at(job, change, now)
    else:
        yield max(started_at + change.at_s, now + DUE_SLACK_S)
    yield max(started_at + job.script_stored_s + SCRIPT_STORE_S, now + DUE_SLACK_S)
