"""Run the state machine of a training: `step(job, event, now, cluster) -> (job, reason)`. Pure.

An event is entered into the job (`reports/`, `core.changes`), then the rules (`rules/`) advance it
until none applies. The caller of `step` writes the new job before anyone is notified;
what clients and launchers get is derived from it (`views`).
"""

from collections.abc import Iterator

from msgspec.structs import replace

from job_server.api.wire import JobSpec, JobState, Node, PodPhase, PodStagePhase, Resize
from job_server.cluster.placement import Cluster, find_node
from job_server.jobs.clocks import moved_back
from job_server.jobs.events import (
    Allotted,
    Event,
    KillAsked,
    LauncherAttached,
    LauncherReported,
    NodeReported,
    NodesChanged,
    PauseAsked,
    Preceded,
    RequestRefused,
    ResizeAsked,
    ResumeAsked,
    RunTimeStatic,
    ServerRestarted,
    StopAsked,
    Tick,
    refuse_if_ended,
)
from job_server.jobs.pod_reports import missing_at
from job_server.jobs.work import Goal
from job_server.training import legacy
from job_server.training.core.accounting import accrue, name_state, script_runs
from job_server.training.core.allocation import may_hold
from job_server.training.core.changes import (
    DUE_SLACK_S,
    SCRIPT_STORE_S,
    declare_deadline,
    is_due,
    kill_now,
    may_apply_at,
    resize,
    scripted,
)
from job_server.training.core.job import HaltPhase, Job, JobProgress, JobStage, same_but_progress
from job_server.training.core.moves import lose
from job_server.training.core.work import Work, client_silent_at, is_silent, silent_at
from job_server.training.reports import launcher_reports, pod_exits
from job_server.training.rules.converge import (
    LOOP_S,
    converge,
    crash_deadline,
    end_deadline,
    grace_deadline,
    hung_at,
    preparing_deadline,
    start_deadline,
)
from job_server.training.rules.fencing import fenced_at
from job_server.training.rules.halting import SAVE_STALL_S, halt_deadline, resume, save_deadline
from job_server.training.rules.share import (
    allot,
    home_of,
    limit_pods,
    note_met,
    patience_deadline,
    run_time_deadline,
)
from job_server.training.rules.standby import standby_times

ANNOUNCE_WAITING_S = 10.0  # a missing client is no news before


def new_job(spec: JobSpec, now: float, *, legacy_nodes: tuple[Node, ...] = ()) -> Job:
    """Return a job that has just been submitted.

    Args:
        legacy_nodes: nodes of clients of the original, which never register. Until a client of
            ours serves the job, its pods are reported to run there, and changes happen at once.
    """
    job = Job(
        spec=spec,
        submitted_at=now,
        target=spec.min_pods if spec.share else spec.first_pods,
        start_since=now,
        grace_from=now,
        legacy_nodes=legacy_nodes,
        progress=JobProgress(accrued_at=now),
    )
    work = Work(job, now, Cluster())
    legacy.begin_legacy(work)
    if not work.job.served:
        work.set(legacy_nodes=())
    return replace(
        work.job,
        state=name_state(work.job),
        reason="; ".join(work.notes)
        or ("waiting for its turn" if spec.share else "waiting for job clients"),
    )


def step(job: Job, event: Event, now: float, cluster: Cluster) -> tuple[Job, str]:
    """Return the job after `event` at `now`, and why it has changed ("": it has not).

    Args:
        now: seconds since 1970.
        cluster: all registered nodes, with what other jobs hold on them.

    Raises:
        RequestRefused: a user asked for what makes no sense now; the job is unchanged.
    """
    restarted = isinstance(event, ServerRestarted)
    lead_s = job.progress.accrued_at - now
    if restarted and lead_s > 0:  # otherwise every wait would take that much longer
        job = moved_back(job, lead_s)
    work = Work(accrue(job, now, restarted=restarted), now, cluster)
    if restarted and lead_s > 0:
        work.note(f"the clock was set back by {lead_s:.0f} s since", lasting=False)
    entered = work.job
    _enter(work, event)
    if _is_mere_heartbeat(event, entered, work):
        return work.job, ""
    if work.job.state.ended:
        _tidy_ended(work)
    elif work.job.legacy:
        legacy.converge_legacy(work)
    if not work.job.state.ended and not work.job.legacy:
        converge(work)
    work.set(state=name_state(work.job))
    if work.reason:
        work.set(reason=work.reason)
    _announce_waiting(work)
    if not work.notes and same_but_progress(job, work.job):
        return work.job, ""
    if not work.notes and work.job.state is not job.state:
        preparing = work.job.preparing
        stands_by = preparing is not None and preparing.stands_by
        work.note("the standby is ready" if stands_by else f"now {work.job.state.value}")
    return work.job, "; ".join(work.notes)


def _is_mere_heartbeat(event: Event, before: Job, work: Work) -> bool:
    """Return whether a report says only that all goes on: then no rule could change anything.

    In a job that runs the rules look at no progress. What time alone changes comes with a Tick, at
    the job's next deadline. A thousand pods report too often for all rules to be tried each time.
    """
    return (
        isinstance(event, LauncherReported | NodeReported)
        and before.state is JobState.RUNNING
        and not work.notes
        and replace(before, progress=work.job.progress) == work.job
    )


def announce_waiting_at(job: Job) -> float:
    """Return when an event first says what a start waits for: clients take a moment to register."""
    return job.start_since + ANNOUNCE_WAITING_S if job.fresh else job.start_since


def _announce_waiting(work: Work) -> None:
    """Note what the job waits for if that is new and has lasted."""
    job = work.job
    if job.waiting == job.announced.waiting or (
        job.waiting and work.now < announce_waiting_at(job)
    ):
        return
    work.set(announced=replace(job.announced, waiting=job.waiting))
    if job.waiting and not work.notes:
        work.note(job.waiting)


def _enter(work: Work, event: Event) -> None:
    match event:
        case Tick() | NodesChanged():
            pass
        case NodeReported():
            pod_exits.node_reported(work, event.node_id, event.pods)
        case RunTimeStatic():
            if work.job.estimated_run_time_s is None:  # every one would drive the others out
                work.note(f"estimated run time: {event.seconds:g} s", lasting=False)
            work.set(estimated_run_time_s=event.seconds)
        case ServerRestarted():
            _restarted(work)
        case Allotted() if not work.job.state.ended:
            allot(work, event)
        case Preceded() if not work.job.state.ended:
            note_met(work, event.job_id)
        case Allotted() | Preceded():
            pass
        case LauncherAttached() | LauncherReported() if work.job.state.ended or work.job.legacy:
            pass
        case LauncherAttached():
            launcher_reports.attached(work, event.attach)
        case LauncherReported():
            launcher_reports.reported(work, event.pod_id, event.report)
        case StopAsked() if work.job.state is JobState.STOPPED:
            pass
        case _:
            _asked(work, event)


def _asked(work: Work, event: Event) -> None:
    """Enter a user's request.

    Raises:
        RequestRefused: it makes no sense now.
    """
    job = work.job
    name = job.spec.job_id
    refuse_if_ended(name, job.state)
    match event:
        case ResizeAsked():
            _resize(work, event.resize)
        case KillAsked():
            kill_now(work, event.kill)
        case StopAsked():
            _stop(work, discard=event.discard)
        case PauseAsked() | ResumeAsked() if job.legacy:
            raise RequestRefused(
                f"job_id: no job client of ours runs {name}; start one to pause it"
            )
        case PauseAsked():
            if job.goal.ends_as is not None:
                raise RequestRefused(f"job_id: {name} is stopping")
            if job.goal is not Goal.PAUSE:
                # One that yields is on its way to the same: its halt goes on.
                halt = job.halt if job.goal is Goal.YIELD else None
                work.set(goal=Goal.PAUSE, halt=halt, share=replace(job.share, allotment=None))
                work.note("pausing on request")
        case ResumeAsked():
            if job.halt is None or job.halt.phase is not HaltPhase.DONE:
                state = job.state.value
                raise RequestRefused(
                    f"job_id: {name} is {state}, not PAUSED; only then it can resume"
                )
            resume(work)
        case _:
            raise TypeError(f"not an event: {event!r}")


def _stop(work: Work, *, discard: bool) -> None:
    job = work.job
    if discard and not job.ending.discard:
        work.set(ending=replace(job.ending, discard=True))
        work.note("stopping at once, as requested: what is not written is lost")
    if job.goal.ends_as is not None:
        return
    if job.legacy:
        work.set(legacy_nodes=(), pods=(), served=())
    work.set(goal=Goal.STOP)
    work.note("stopping on request")


def _resize(work: Work, asked: Resize) -> None:
    job, pods = work.job, asked.pods
    if pods is None:
        raise RequestRefused("pods: only the number of teachers follows a demand; give a number")
    if job.legacy:
        legacy.resize_legacy(work, pods, f"resize to {pods}")
        return
    dead = _assume_dead(work) if asked.assume_dead else False
    if dead and (pods == job.target or job.spec.share):
        return
    if job.spec.share:
        limit_pods(work, pods)
        return
    resize(work, pods)


def _assume_dead(work: Work) -> bool:
    """Count unreachable pods as stopped, on the operator's word. Return whether there were any."""
    found = False
    job = work.job
    for stage in job.stages:
        for member in stage.members:
            if member.phase is PodStagePhase.LOST:
                work.move(stage, member.pod.pod_id, PodStagePhase.ENDED)
                found = True
    for pod in work.job.pods:
        if not pod.leaving and is_silent(work, pod):
            text = f"pod {pod.pod_id} is assumed dead by an operator"
            cause, holds = pod_exits.preempted(work, pod, text), may_hold(job, pod.pod_id)
            lose(work, pod.pod_id, cause, confirmed=True, holds=holds)
            found = True
    if found:
        work.set(cut_off=False, waiting="")
        work.note("pods that cannot be reached are assumed dead")
    return _give_up_saved(work) or found


def _give_up_saved(work: Work) -> bool:
    """Give up the state in the run folder of a node that is dead, where a start waits for that."""
    job, saved = work.job, work.job.ending.saved
    if saved is None or not (saved.spare or saved.alone) or not home_of(job):
        return False
    view = find_node(work.cluster, saved.node_id)
    seen = job.grace_from if view is None else max(view.seen_at, job.grace_from)
    if work.now < seen + work.cluster.silence_s:
        return False
    work.set(ending=replace(job.ending, saved=None))
    work.note(f"step {saved.step} is given up: it is in {saved.path} of node {saved.node_id} alone")
    return True


def _restarted(work: Work) -> None:
    """Restart every silence and time limit: no heartbeat could arrive while the server was away."""
    job = work.job
    changes = {
        place: replace(
            stage,
            since=work.now,
            end_since=None if stage.end_since is None else work.now,
        )
        for place in ("retiring", "active", "preparing")
        if (stage := getattr(job, place)) is not None
    }
    preparing = changes.get("preparing")
    if isinstance(preparing, JobStage) and preparing.overlaps:
        # Its trainers may have died meanwhile; launchers report living ones ready again.
        members = tuple(replace(member, phase=PodStagePhase.ABSENT) for member in preparing.members)
        changes["preparing"] = replace(preparing, members=members)
    if job.halt is not None:
        kept_since = None if job.halt.kept_since is None else work.now
        changes["halt"] = replace(job.halt, since=work.now, kept_since=kept_since)
    work.set(grace_from=work.now, **changes)
    work.progress(missing={})
    work.note("the server is back", lasting=False)


def _tidy_ended(work: Work) -> None:
    for pod in work.job.pods:
        if not pod.released:
            work.release(pod.pod_id)
    for pod in work.job.pods:
        if pod.phase is PodPhase.EXITED:
            work.drop_pod(pod.pod_id)


# --- when time alone changes something -----------------------------------------------------------


def next_deadline(job: Job, now: float, cluster: Cluster) -> float | None:
    """Return when a Tick would change something; None: only a message can."""
    if job.state.ended:
        return None
    return min((at for at in _deadlines(job, now, cluster) if at > now), default=None)


def _deadlines(job: Job, now: float, cluster: Cluster) -> Iterator[float]:
    if job.preparing is not None and not job.preparing.stands_by:
        yield preparing_deadline(job, job.preparing)
    if job.preparing is None and job.spec.standby:
        yield from standby_times(job)
    for stage in job.stages:
        yield from (at for at in (end_deadline(job, stage), crash_deadline(stage)) if at)
    if job.halt is not None and job.halt.phase is not HaltPhase.DONE:
        yield halt_deadline(job, job.halt)
        if job.halt.kept_since is not None:
            yield job.halt.kept_since + job.spec.keep_failed_s
    if job.halt is not None and job.halt.phase is HaltPhase.SAVE:
        yield from (save_deadline(job, job.halt), job.halt.since + SAVE_STALL_S)
        yield job.halt.again_at or 0.0
    overdue_at = run_time_deadline(job)
    if overdue_at is not None:
        yield overdue_at
    if job.spec.share:
        yield patience_deadline(job)
    if job.fresh:
        yield start_deadline(job)
        yield announce_waiting_at(job)
    if job.active is not None:
        yield declare_deadline(job.active)
        if not job.elastic and not job.announced.plain and job.active.committed_at is not None:
            yield job.active.committed_at + LOOP_S
    yield from (job.budget.retry_at, job.growth.retry_at, grace_deadline(job, cluster))
    for pod in job.pods:
        if not pod.released:
            yield silent_at(job, pod, cluster)
            if now < client_silent_at(job, pod, cluster):
                yield hung_at(job, pod, cluster)
        if pod.launcher_done:
            yield client_silent_at(job, pod, cluster)
    for since in job.progress.missing.values():
        yield missing_at(since, cluster.heartbeat_s)
    yield from _fences(job, cluster)
    if script_runs(job):
        yield from _script_deadlines(job, now)


def _fences(job: Job, cluster: Cluster) -> Iterator[float]:
    known = job.pods_by_id()
    for stage in job.stages:
        for member in stage.members:
            pod = known.get(member.pod.pod_id)
            if pod is not None and (job.cut_off or member.phase is PodStagePhase.LOST):
                at = fenced_at(job, pod, cluster)
                if at is not None:
                    yield at


def _script_deadlines(job: Job, now: float) -> Iterator[float]:
    started_at = now - job.progress.script_s - max(0.0, now - job.progress.accrued_at)
    if job.queue.resize is not None:
        yield started_at + job.queue.resize.not_before_s
    change = scripted(job)
    if change is None:
        return
    if is_due(job, change):
        yield may_apply_at(job, change, now)
    else:
        yield max(started_at + change.at_s, now + DUE_SLACK_S)
    yield max(started_at + job.queue.script_stored_s + SCRIPT_STORE_S, now + DUE_SLACK_S)
