"""Run the state machine of a job of teachers: `step(job, event, now, cluster)`. Pure.

Its pods are teacher servers. They have no stages and no ranks: each is added and removed alone, and
none waits for another. `autoscaler` decides how many there should be, `step` which.
"""

from collections.abc import Iterator

from msgspec.structs import replace

from job_server.api.wire import Demand, DesiredState, JobSpec, JobState, Kill, Resize
from job_server.cluster.placement import (
    Cluster,
    deal_ports,
    explain_shortage,
    find_node,
    place,
    slots_to_leave,
)
from job_server.jobs.clocks import moved_back
from job_server.jobs.events import (
    Demanded,
    Event,
    KillAsked,
    NodeReported,
    PauseAsked,
    RequestRefused,
    ResizeAsked,
    ResumeAsked,
    RunTimeStatic,
    ServerRestarted,
    StopAsked,
    refuse_if_ended,
)
from job_server.jobs.pod_reports import missing_at
from job_server.jobs.work import Goal
from job_server.teachers.autoscaler import TeacherAutoscaler, no_students, observe
from job_server.teachers.exits import node_reported
from job_server.teachers.job import (
    EARLY,
    REGISTER_S,
    SUSPECT_S,
    TeacherJob,
    TeacherPod,
    TeacherProgress,
    TeacherWork,
    finish,
    is_silent,
    is_steady,
    ports_of,
    same_but_progress,
    silent_at,
    slots_of,
)

REGROW_S = 20.0  # after slots went to a training: it may come and go


def new_job(spec: JobSpec, now: float) -> TeacherJob:
    """Return a job that has just been submitted."""
    why = "until students are reported"
    return TeacherJob(
        spec=spec,
        submitted_at=now,
        grace_from=now,
        wanted=spec.first_pods,
        why=why,
        progress=TeacherProgress(
            autoscaler=TeacherAutoscaler(wanted=spec.first_pods, reason=why),
            asked_at=now,
            accrued_at=now,
        ),
    )


def step(
    job: TeacherJob,
    event: Event,
    now: float,
    cluster: Cluster,
    preempted: frozenset[str] = frozenset(),
) -> tuple[TeacherJob, str]:
    """Return the job after `event` at `now`, and why it has changed ("": it has not).

    Args:
        cluster: all registered nodes; what other jobs hold or are about to take counts as taken.
        preempted: pods whose slots training jobs are to have.

    Raises:
        RequestRefused: a user asked for what makes no sense now; the job is unchanged.
    """
    lead_s, restarted = job.progress.accrued_at - now, isinstance(event, ServerRestarted)
    was_set_back = restarted and lead_s > 0
    if was_set_back:  # otherwise every wait would take that much longer
        job = moved_back(job, lead_s)
    work = TeacherWork(accrue(job, now, restarted=restarted), now, cluster)
    if was_set_back:
        work.note(f"the clock was set back by {lead_s:.0f} s since")
    _enter(work, event)
    _drop_unreachable(work)
    if not work.job.state.ended:
        if work.job.goal is Goal.RUN:
            _choose_number(work)
            _preempt(work, preempted)
            _adjust(work)
        else:
            _halt(work)
    if work.job.state.ended:
        for pod in work.job.staying:
            work.release(pod.pod_id)
    work.set(state=_name_state(work.job))
    if same_but_progress(job, work.job):
        return work.job, ""
    if not work.notes and work.job.state is not job.state:
        work.note(f"{job.state.value} -> {work.job.state.value}")
    return work.job, "; ".join(work.notes)


def accrue(job: TeacherJob, now: float, *, restarted: bool = False) -> TeacherJob:
    """Book the time since the last call to what the job did in it.

    Args:
        restarted: the server was away in that time: whether teachers served, clients will say.
    """
    progress = job.progress
    passed = now - progress.accrued_at
    if passed <= 0 or job.state.ended:
        return job
    part = "training_s" if job.running else "waiting_s"
    if job.goal is not Goal.RUN:
        part = "paused_s"
    if restarted and part == "training_s":
        part, progress = "waiting_s", replace(progress, absent_s=passed)
    account = replace(progress.account, **{part: getattr(progress.account, part) + passed})
    return replace(job, progress=replace(progress, account=account, accrued_at=now))


def next_deadline(job: TeacherJob, now: float, cluster: Cluster) -> float | None:
    """Return when a Tick would change something; None: only a message can."""
    if job.state.ended:
        return None
    return min((at for at in _deadlines(job, cluster) if at > now), default=None)


def _deadlines(job: TeacherJob, cluster: Cluster) -> Iterator[float]:
    yield from (job.retry_at, job.grow_at, _quiet_at(job))
    for pod in job.pods:
        yield silent_at(job, pod, cluster)
        if pod.running_since is not None:
            yield pod.running_since + REGISTER_S
    for since in job.progress.missing.values():
        yield missing_at(since, cluster.heartbeat_s)


def _quiet_at(job: TeacherJob) -> float:
    """Return when the teachers are too many if no student asks until then."""
    return max(job.progress.asked_at, job.grace_from) + job.spec.demand_timeout_s


def _name_state(job: TeacherJob) -> JobState:
    if job.state.ended:
        return job.state
    if job.goal is Goal.STOP:
        return JobState.STOPPING
    if job.goal is Goal.PAUSE:
        return JobState.PAUSING if job.pods else JobState.PAUSED
    if job.running or job.wanted == 0:
        return JobState.RUNNING
    if job.staying:
        return JobState.STARTING
    return JobState.WAITING if job.waiting else JobState.RECOVERING


# --- events -------------------------------------------------------------------------------------


def _enter(work: TeacherWork, event: Event) -> None:
    match event:
        case NodeReported():
            node_reported(work, event.node_id, event.pods)
        case Demanded():
            _demanded(work, event.demand)
        case ServerRestarted():
            work.set(grace_from=work.now)
            work.progress(missing={})
            work.note("the server is back")
        case RunTimeStatic():
            raise RequestRefused(
                f"job_id: {work.job.spec.job_id} is a job of teachers, which never ends"
            )
        case StopAsked() if work.job.state is JobState.STOPPED:
            pass
        case ResizeAsked() | KillAsked() | PauseAsked() | ResumeAsked() | StopAsked():
            _asked(work, event)
        case _:
            pass  # time has passed, nodes have changed; a teacher has no launcher that reports


def _asked(
    work: TeacherWork, event: ResizeAsked | KillAsked | PauseAsked | ResumeAsked | StopAsked
) -> None:
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
            _kill(work, event.kill)
        case StopAsked():
            if job.goal is not Goal.STOP:
                work.set(goal=Goal.STOP)
                work.note("stopping on request")
        case PauseAsked():
            if job.goal is Goal.STOP:
                raise RequestRefused(f"job_id: {name} is stopping")
            if job.goal is Goal.RUN:
                work.set(goal=Goal.PAUSE, waiting="")
                work.note("pausing on request")
        case ResumeAsked():
            if job.state is not JobState.PAUSED:
                raise RequestRefused(
                    f"job_id: {name} is {job.state.value}, not PAUSED; only then it can resume"
                )
            work.set(goal=Goal.RUN, reason="", retry_at=work.now, grow_at=work.now)
            work.progress(asked_at=work.now)
            work.note("resumed")


def _resize(work: TeacherWork, asked: Resize) -> None:
    job, spec = work.job, work.job.spec
    if job.goal is Goal.STOP:
        raise RequestRefused(f"pods: the job {spec.job_id} is stopping")
    if asked.assume_dead:
        raise RequestRefused(
            "assume_dead: means nothing for teachers: lost ones are not waited for"
        )
    if asked.pods is None:
        autoscaler = TeacherAutoscaler(wanted=job.wanted, reason="by demand again")
        work.set(fixed=None)
        work.progress(autoscaler=autoscaler, asked_at=work.now)
        work.note("the number of teachers follows the demand again")
        return
    if not spec.min_pods <= asked.pods <= spec.max_pods:
        raise RequestRefused(
            f"pods: {asked.pods} teachers are not within the job's min_pods ({spec.min_pods}) and "
            f"max_pods ({spec.max_pods})"
        )
    work.set(fixed=asked.pods, resizes=job.resizes + 1)
    work.note(f"resize to {asked.pods}: no longer by demand")


def _kill(work: TeacherWork, kill: Kill) -> None:
    if kill.pod_id is None:
        raise RequestRefused(f"rank: {kill.rank} does not run: teachers have no ranks; name a pod")
    pod = work.job.pod(kill.pod_id)
    if pod is None or pod.released:
        have = ", ".join(pod.pod_id for pod in work.job.staying) or "none"
        raise RequestRefused(f"pod_id: {kill.pod_id!r} does not run; running pods: {have}")
    if pod.desired is DesiredState.RUN:
        work.set_pod(replace(pod, desired=DesiredState.KILL))
        work.note(f"killing pod {kill.pod_id} on request")


def _demanded(work: TeacherWork, demand: Demand) -> None:
    if work.job.state.ended:
        return
    work.progress(demand=demand, demand_at=work.now)
    asks = demand.students > 0 and (demand.samples_per_s > 0 or demand.wait_share > 0)
    if not asks:
        return
    work.progress(asked_at=work.now)
    job = work.job
    counts = work.now >= job.progress.counted_at + EARLY * job.spec.demand_interval_s
    if job.goal is not Goal.RUN or job.fixed is not None or not counts:
        return  # several discovery servers may post the same
    reachable = [pod for pod in job.pods if not is_silent(work, pod)]
    autoscaler = observe(
        job.progress.autoscaler,
        demand,
        pods=sum(pod.runs for pod in reachable),
        steady=is_steady(job, reachable, work.now),
        low=job.spec.min_pods,
        high=job.spec.max_pods,
    )
    work.progress(autoscaler=autoscaler, counted_at=work.now)


def _drop_unreachable(work: TeacherWork) -> None:
    """Forget pods that were to end on nodes that are registered no more."""
    for pod in work.job.pods:
        registered = find_node(work.cluster, pod.site.node_id) is not None
        if pod.released and not registered and is_silent(work, pod):
            work.drop_pod(pod.pod_id)


# --- how many, and which ------------------------------------------------------------------------


def _choose_number(work: TeacherWork) -> None:
    job, spec = work.job, work.job.spec
    if job.fixed is not None:
        wanted, why = job.fixed, f"fixed by a resize to {job.fixed}; `auto` lets the demand decide"
    else:
        if work.now >= _quiet_at(job):
            why = f"no student has asked for {spec.demand_timeout_s:g} s"
            work.progress(autoscaler=no_students(job.progress.autoscaler, spec.min_pods, why))
        autoscaler = work.job.progress.autoscaler
        wanted, why = autoscaler.wanted, autoscaler.reason
    if wanted != job.wanted:
        verb = "growing" if wanted > job.wanted else "shrinking"
        work.note(f"{verb} to {wanted}: {why}")
    work.set(wanted=wanted, why=why)


def _preempt(work: TeacherWork, pod_ids: frozenset[str]) -> None:
    given = [pod for pod in work.job.staying if pod.pod_id in pod_ids]
    for pod in given:
        work.release(pod.pod_id)
    if given:
        names = ", ".join(pod.pod_id for pod in given)
        verb, whose = ("leaves", "its") if len(given) == 1 else ("leave", "their")
        work.set(grow_at=work.now + REGROW_S)
        work.note(f"{names} {verb}: a training needs {whose} slots")


def _adjust(work: TeacherWork) -> None:
    """Have as many pods as are wanted and find a place."""
    for pod in work.job.staying:
        for slot in slots_to_leave(work.cluster, pod.site).values():
            work.release(pod.pod_id)
            work.note(f"pod {pod.pod_id} leaves slot {slot.index}: {slot.reason}")
    job = work.job
    here = [pod for pod in job.staying if not is_silent(work, pod)]
    surplus = len(here) - job.wanted
    if surplus > 0:
        for pod in sorted(here, key=_goes_first)[:surplus]:
            work.release(pod.pod_id)
            work.note(f"pod {pod.pod_id} leaves")
    if surplus >= 0:
        for pod in work.job.staying:
            if is_silent(work, pod):
                work.release(pod.pod_id)
        work.set(waiting="")
    else:
        _grow(work, -surplus, len(here))


def _goes_first(pod: TeacherPod) -> tuple[bool, int]:
    return pod.runs, -pod.number


def _grow(work: TeacherWork, count: int, here: int) -> None:
    job, spec = work.job, work.job.spec
    if work.now < job.retry_at:
        return
    if work.now < job.grow_at and here >= max(spec.min_pods, 1):
        work.set(waiting="the slots of the others went to a training just now")
        return
    suspects = job.suspects if work.now < job.failed_at + SUSPECT_S else {}
    sites = place(
        spec,
        work.cluster,
        work.now,
        count=count,
        held=slots_of(job.pods),
        leaving={node_id: frozenset(slots) for node_id, slots in suspects.items()},
    )
    silent = [pod for pod in job.staying if is_silent(work, pod)]
    all_ports = deal_ports(sites, work.cluster, avoid=ports_of(job.pods), last_ports=job.last_ports)
    for site, ports in zip(sites, all_ports, strict=True):
        number = work.job.given + 1
        pod = TeacherPod(pod_id=f"teacher_{number}", site=site, ports=ports, given_at=work.now)
        last_ports = (
            {**work.job.last_ports, site.node_id: ports[-1]} if ports else work.job.last_ports
        )
        work.set(pods=(*work.job.pods, pod), given=number, last_ports=last_ports)
        if silent:  # it takes the place of one that cannot be reached
            gone = silent.pop()
            work.release(gone.pod_id)
            work.note(f"pod {pod.pod_id} in place of {gone.pod_id}: {gone.site.node_id} is silent")
    waiting = ""
    if len(sites) < count:
        waiting = explain_shortage(
            spec, work.cluster, work.now, wanted=job.wanted, placeable=here + len(sites)
        )
    if waiting and not job.waiting:
        work.note(waiting)
    work.set(waiting=waiting)


# --- pause, stop, end ---------------------------------------------------------------------------


def _halt(work: TeacherWork) -> None:
    for pod in work.job.staying:
        work.release(pod.pod_id)
    if any(not is_silent(work, pod) for pod in work.job.pods):
        return
    for pod in work.job.pods if work.job.goal is Goal.PAUSE else ():
        work.drop_pod(pod.pod_id)  # once back, its client stops what its plan does not name
    if work.job.goal is Goal.STOP:
        finish(work, JobState.STOPPED, "stopped on request")
    elif work.job.state is not JobState.PAUSED and not work.job.reason:
        work.set(reason="paused")
        work.note("paused")
