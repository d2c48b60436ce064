"""The state machine of a job: `step(job, event, now, cluster) -> (job, reason)`. Pure.

An event is entered into the job (`reports`, `changes`), then the rules of `advance` take it as
far as what is true allows. Whoever calls `step` writes the new job before anybody is told of it;
what clients and launchers are told is derived from it (`views`).
"""

from dataclasses import replace

from job_server.api.wire import JobSpec, JobState, Node, PodPhase, Resize, Way
from job_server.cluster.clocks import moved_back
from job_server.cluster.placement import Cluster, NodeView
from job_server.training import legacy, pod_exits, reports
from job_server.training.advance import settle
from job_server.training.bookkeeping import accrue, name_state
from job_server.training.changes import kill_now, resize
from job_server.training.deadlines import next_deadline, told_waiting_at
from job_server.training.events import (
    Attached,
    Event,
    KillAsked,
    NodeReported,
    NodesChanged,
    PauseAsked,
    Refused,
    Reported,
    ResizeAsked,
    ResumeAsked,
    RunTimeStatic,
    ServerRestarted,
    StopAsked,
    Tick,
)
from job_server.training.halting import resume
from job_server.training.job import (
    At,
    Goal,
    HaltPhase,
    Job,
    Keep,
    Progress,
    Stage,
    same_but_progress,
)
from job_server.training.transitions import choose_way, lose
from job_server.training.views import (
    PodView,
    job_status,
    node_pods,
    pod_orders,
    ports_held,
    running_pods,
    slots_held,
)
from job_server.training.work import Work

__all__ = [
    "Attached",
    "Cluster",
    "Event",
    "Job",
    "KillAsked",
    "NodeReported",
    "NodeView",
    "NodesChanged",
    "PauseAsked",
    "PodView",
    "Refused",
    "Reported",
    "ResizeAsked",
    "ResumeAsked",
    "RunTimeStatic",
    "ServerRestarted",
    "StopAsked",
    "Tick",
    "choose_way",
    "job_status",
    "new_job",
    "next_deadline",
    "node_pods",
    "pod_orders",
    "ports_held",
    "running_pods",
    "same_but_progress",
    "slots_held",
    "step",
]


def new_job(spec: JobSpec, now: float, *, legacy_nodes: tuple[Node, ...] = ()) -> Job:
    """Return a job that has just been submitted.

    Args:
        legacy_nodes: nodes of clients of the original, which never register. Until a client of
            ours serves the job, its pods are said to run there, and changes happen at once.
    """
    job = Job(
        spec=spec,
        submitted_at=now,
        target=spec.first_pods,
        start_since=now,
        heed_from=now,
        legacy_nodes=legacy_nodes,
        progress=Progress(accrued_at=now),
    )
    work = Work(job, now, Cluster())
    legacy.begin_legacy(work)
    if not work.job.served:
        work.set(legacy_nodes=())
    return replace(
        work.job,
        state=name_state(work.job),
        reason="; ".join(work.notes) or "waiting for job clients",
    )


def step(job: Job, event: Event, now: float, cluster: Cluster) -> tuple[Job, str]:
    """Return the job after `event` at `now`, and why it has changed ("": it has not).

    Args:
        now: seconds since 1970.
        cluster: all registered nodes, with what other jobs hold on them.

    Raises:
        Refused: a user asked for what makes no sense now; the job is unchanged.
    """
    restarted = isinstance(event, ServerRestarted)
    lead_s = job.progress.accrued_at - now
    if restarted and lead_s > 0:  # every wait would take so much longer
        job = moved_back(job, lead_s)
    work = Work(accrue(job, now, restarted=restarted), now, cluster)
    if restarted and lead_s > 0:
        work.note(f"the clock was set back by {lead_s:.0f} s since", lasting=False)
    _enter(work, event)
    if work.job.state.ended:
        _tidy_ended(work)
    elif work.job.legacy:
        legacy.settle_legacy(work)
    if not work.job.state.ended and not work.job.legacy:
        settle(work)
    work.set(state=name_state(work.job))
    if work.reason:
        work.set(reason=work.reason)
    _tell_waiting(work)
    if not work.notes and same_but_progress(job, work.job):
        return work.job, ""
    if not work.notes and work.job.state is not job.state:
        coming = work.job.coming
        stands_by = coming is not None and coming.stands_by
        work.note("the standby is ready" if stands_by else f"now {work.job.state.value}")
    return work.job, "; ".join(work.notes)


def _tell_waiting(work: Work) -> None:
    """Note what the job waits for, where that is new and has lasted."""
    job = work.job
    if job.waiting == job.waiting_told or (job.waiting and work.now < told_waiting_at(job)):
        return
    work.set(waiting_told=job.waiting)
    if job.waiting and not work.notes:
        work.note(job.waiting)


def _enter(work: Work, event: Event) -> None:
    match event:
        case Tick() | NodesChanged():
            pass
        case NodeReported():
            pod_exits.node_reported(work, event.node_id, event.pods)
        case RunTimeStatic():
            if work.job.estimated_run_time_s != event.seconds:
                work.set(estimated_run_time_s=event.seconds)
                work.note(f"estimated run time: {event.seconds:g} s", lasting=False)
        case ServerRestarted():
            _restarted(work)
        case Attached() | Reported() if work.job.state.ended or work.job.legacy:
            pass
        case Attached():
            reports.attached(work, event.attach)
        case Reported():
            reports.reported(work, event.pod_id, event.report)
        case StopAsked() if work.job.state is JobState.STOPPED:
            pass
        case _:
            _asked(work, event)


def _asked(work: Work, event: Event) -> None:
    """Enter what a user asked for.

    Raises:
        Refused: it makes no sense now.
    """
    job = work.job
    name = job.spec.job_id
    if job.state.ended:
        raise Refused(f"job_id: {name} has ended ({job.state.value}); submit it again")
    match event:
        case ResizeAsked():
            _resize(work, event.resize)
        case KillAsked():
            kill_now(work, event.kill)
        case StopAsked():
            _stop(work, discard=event.discard)
        case PauseAsked() | ResumeAsked() if job.legacy:
            raise Refused(f"job_id: no job client of ours runs {name}; start one to pause it")
        case PauseAsked():
            if job.goal in (Goal.STOP, Goal.FAIL):
                raise Refused(f"job_id: {name} is stopping")
            if job.goal is Goal.RUN:
                work.set(goal=Goal.PAUSE, halt=None)
                work.note("pausing on request")
        case ResumeAsked():
            if job.halt is None or job.halt.phase is not HaltPhase.DONE:
                state = job.state.value
                raise Refused(f"job_id: {name} is {state}, not PAUSED; only then it can resume")
            resume(work)
        case _:
            raise TypeError(f"not an event: {event!r}")


def _stop(work: Work, *, discard: bool) -> None:
    job = work.job
    if discard and not job.discard:
        work.set(discard=True)
        work.note("stopping at once, as requested: what is not written is lost")
    if job.goal in (Goal.STOP, Goal.FAIL):
        return
    if job.legacy:
        work.set(legacy_nodes=(), pods=(), served=())
    work.set(goal=Goal.STOP)
    work.note("stopping on request")


def _resize(work: Work, asked: Resize) -> None:
    job, pods = work.job, asked.pods
    if pods is None:
        raise Refused("pods: only the number of teachers follows a demand; give a number")
    if job.legacy:
        legacy.resize_legacy(work, pods, f"resize to {pods}")
        return
    dead = _assume_dead(work) if asked.assume_dead else False
    if dead and pods == job.target:
        return
    resize(work, pods)


def _assume_dead(work: Work) -> bool:
    """Take the operator's word that what cannot be reached has stopped; True: there was any."""
    found = False
    for stage in work.job.stages:
        for member in stage.members:
            if member.at is At.LOST:
                work.move(stage, member.pod.pod_id, At.ENDED)
                found = True
    for pod in work.job.pods:
        if pod.keep is Keep.RUN and work.is_silent(pod):
            text = f"pod {pod.pod_id} is assumed dead by an operator"
            lose(work, pod.pod_id, pod_exits.preempted(work, pod, text), confirmed=True)
            found = True
    if found:
        work.set(cut_off=False, waiting="")
        work.note("pods that cannot be reached are assumed dead")
    return found


def _restarted(work: Work) -> None:
    """Nobody was listening: count every silence and time limit from now."""
    job = work.job
    changes = {
        place: replace(
            stage,
            since=work.now,
            end_since=None if stage.end_since is None else work.now,
        )
        for place in ("previous", "current", "coming")
        if (stage := getattr(job, place)) is not None
    }
    coming = changes.get("coming")
    if isinstance(coming, Stage) and coming.way in (Way.REPLACE, Way.JOIN):
        # Its trainers may have died meanwhile; those that live are reported ready again.
        members = tuple(replace(member, at=At.ABSENT) for member in coming.members)
        changes["coming"] = replace(coming, members=members)
    if job.halt is not None:
        kept_since = None if job.halt.kept_since is None else work.now
        changes["halt"] = replace(job.halt, since=work.now, kept_since=kept_since)
    work.set(heed_from=work.now, **changes)
    work.progress(missing={})
    work.note("the server is back", lasting=False)


def _tidy_ended(work: Work) -> None:
    for pod in work.job.pods:
        if pod.keep is not Keep.RELEASED:
            work.release(pod.pod_id)
    for pod in work.job.pods:
        if pod.phase is PodPhase.EXITED:
            work.drop_pod(pod.pod_id)
