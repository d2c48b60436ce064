"""What clients tell about teachers, and what the death of one means. Pure."""

from dataclasses import replace

from job_server.api.text import ending
from job_server.api.wire import DesiredState, JobState, PodPhase, PodState
from job_server.teachers.job import SUSPECT_S, TeacherPod
from job_server.teachers.work import TeacherWork
from job_server.training.budget import HEALTHY_S, backoff_s
from job_server.training.pod_exits import PATH_CHARS
from job_server.training.work import MISSING_HEARTBEATS, without

SIGTERM = 15
SHOWN_LINES = 3
SHOWN_CHARS = 600


def node_reported(work: TeacherWork, node_id: str, states: tuple[PodState, ...]) -> None:
    """Compare what a client says about its pods with what we know."""
    named = {state.pod_id: state for state in states}
    for pod in work.job.pods:
        if pod.site.node_id != node_id:
            continue
        state = named.get(pod.pod_id)
        if state is None:
            _not_named(work, pod)
        else:
            _named(work, pod, state)


def _named(work: TeacherWork, pod: TeacherPod, state: PodState) -> None:
    work.progress(missing=without(work.job.progress.missing, pod.pod_id))
    running_since = pod.running_since
    if state.phase is PodPhase.RUNNING and running_since is None:
        running_since = work.now
        if not pod.leaving:
            where = f"{pod.site.addr}:{pod.ports[0]}" if pod.ports else pod.site.addr
            work.notes.append(f"pod {pod.pod_id} runs on {pod.site.node_id}, {where}")
    log_path = state.log_path[:PATH_CHARS] or pod.log_path
    changed = replace(pod, phase=state.phase, log_path=log_path, running_since=running_since)
    if changed != pod:
        work.set_pod(changed)
    if state.phase is not PodPhase.EXITED:
        return
    work.drop(pod.pod_id)
    if not pod.leaving:
        _died(work, changed, state)


def _not_named(work: TeacherWork, pod: TeacherPod) -> None:
    if pod.leaving:
        work.drop(pod.pod_id)
        return
    if pod.phase is None:
        return  # its client may not yet have heard of it
    missing = work.job.progress.missing
    since = missing.get(pod.pod_id)
    if since is None:
        work.progress(missing={**missing, pod.pod_id: work.now})
    elif work.now >= since + MISSING_HEARTBEATS * work.cluster.heartbeat_s:
        work.drop(pod.pod_id)
        text = f"the client of {pod.site.node_id} does not know pod {pod.pod_id} any more"
        _count(work, pod, text, preempted=False)


def _died(work: TeacherWork, pod: TeacherPod, state: PodState) -> None:
    """A pod that was to run has exited; whatever its code is, a teacher does not end by itself."""
    code = state.exit_code if state.signal is None else -state.signal
    text = f"pod {pod.pod_id} {'is gone' if code is None else ending(code)}"
    if pod.desired is DesiredState.KILL:
        work.notes.append(f"{text}, as requested")
        work.set(retry_at=work.now)
        return
    if state.reason:
        text += f": {state.reason}"
    if state.last_lines:
        lines = (line.strip() for line in state.last_lines[-SHOWN_LINES:])
        text += "; last lines: " + " | ".join(lines)
    _count(work, pod, text[:SHOWN_CHARS], preempted=code in (-SIGTERM, 128 + SIGTERM))


def _count(work: TeacherWork, pod: TeacherPod, text: str, *, preempted: bool) -> None:
    """Book the death of a pod, and give up where the budgets say so."""
    job, spec = work.job, work.job.spec
    work.notes.append(text)
    healthy = _is_healthy(pod, work.now)
    in_row = job.failures_in_row
    if healthy:
        in_row = 1
    elif pod.given_at >= job.failed_at:  # else it is one of those that died together
        in_row += 1
    in_row = max(in_row, 1)
    suspects = dict(job.suspects) if work.now < job.failed_at + SUSPECT_S else {}
    if not healthy:
        node_id = pod.site.node_id
        suspects[node_id] = tuple(sorted({*suspects.get(node_id, ()), *pod.site.slots}))
    work.set(
        failures=job.failures + (not preempted),
        preemptions=job.preemptions + preempted,
        failures_in_row=in_row,
        failed_at=work.now,
        retry_at=work.now + backoff_s(spec.job_id, in_row),
        suspects=suspects,
    )
    limit, count, name = spec.max_failures, work.job.failures, "max_failures"
    if preempted:
        limit, count, name = spec.max_preemptions, work.job.preemptions, "max_preemptions"
    if limit is not None and count > limit:
        work.finish(JobState.FAILED, f"{text}; more than {limit} times ({name})")
    elif in_row > spec.max_restarts_without_progress and not preempted:
        if any(_is_healthy(other, work.now) for other in job.staying):
            return  # one bad slot or node is no reason to end those that serve
        tries = f"{in_row - 1} restarts in a row ran less than {HEALTHY_S:g} s"
        work.finish(JobState.FAILED, f"{text}; {tries} (max_restarts_without_progress)")


def _is_healthy(pod: TeacherPod, now: float) -> bool:
    return pod.running_since is not None and now >= pod.running_since + HEALTHY_S
