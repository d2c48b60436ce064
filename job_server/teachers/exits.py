"""Apply what clients report of teachers, and decide what a teacher's death means. Pure."""

import math

from msgspec.structs import replace

from job_server.api.failure_policy import DO_NOT_RESTART_EXIT
from job_server.api.text import describe_exit
from job_server.api.wire import DesiredState, JobState, PodPhase, PodState
from job_server.jobs.pod_reports import (
    PATH_CHARS,
    REASON_CHARS,
    compare,
    exit_code,
    is_missing,
    last_words,
    missing_text,
    was_terminated,
)
from job_server.jobs.retries import HEALTHY_S, backoff_s
from job_server.teachers.job import SUSPECT_S, TeacherPod, TeacherWork, finish


def node_reported(work: TeacherWork, node_id: str, states: tuple[PodState, ...]) -> None:
    """Apply what a client reports of this job's pods."""
    compare(work, node_id, states, named=_named, not_named=_not_named)


def _named(work: TeacherWork, pod: TeacherPod, state: PodState) -> None:
    running_since = pod.running_since
    if state.phase is PodPhase.RUNNING and (running_since or math.inf) < work.job.grace_from:
        _has_served(work)
    if state.phase is PodPhase.RUNNING and running_since is None:
        running_since = work.now
        if not pod.released:
            where = f"{pod.site.addr}:{pod.ports[0]}" if pod.ports else pod.site.addr
            work.note(f"pod {pod.pod_id} runs on {pod.site.node_id}, {where}")
    log_path = state.log_path[:PATH_CHARS] or pod.log_path
    changed = replace(pod, phase=state.phase, log_path=log_path, running_since=running_since)
    if changed != pod:
        work.set_pod(changed)
    if state.phase is not PodPhase.EXITED:
        return
    work.drop_pod(pod.pod_id)
    if not pod.released:
        _died(work, changed, state)


def _has_served(work: TeacherWork) -> None:
    """A teacher runs since before the server was away: it has served meanwhile."""
    absent_s, account = work.job.progress.absent_s, work.job.progress.account
    if absent_s:
        waiting_s, training_s = account.waiting_s - absent_s, account.training_s + absent_s
        account = replace(account, waiting_s=waiting_s, training_s=training_s)
        work.progress(account=account, absent_s=0.0)


def _not_named(work: TeacherWork, pod: TeacherPod) -> None:
    if pod.released:
        work.drop_pod(pod.pod_id)
        return
    if is_missing(work, pod):
        work.drop_pod(pod.pod_id)
        _count(work, pod, missing_text(pod), preempted=False)


def _died(work: TeacherWork, pod: TeacherPod, state: PodState) -> None:
    """Count the exit of a teacher that was to run, whatever its code: none ends by itself."""
    code = exit_code(state)
    text = f"pod {pod.pod_id} {'is gone' if code is None else describe_exit(code)}"
    if pod.desired is DesiredState.KILL:
        work.note(f"{text}, as requested")
        work.set(retry_at=work.now)
        return
    if state.reason:
        text += f": {state.reason}"
    if state.last_lines:
        text += f"; last lines: {last_words(state.last_lines)}"
    if code == DO_NOT_RESTART_EXIT:
        work.set(failures=work.job.failures + 1)
        finish(work, JobState.FAILED, f"{text[:REASON_CHARS]}; it asks not to be started again")
        return
    _count(work, pod, text[:REASON_CHARS], preempted=was_terminated(code))


def _count(work: TeacherWork, pod: TeacherPod, text: str, *, preempted: bool) -> None:
    """Count a pod's death. The job fails if a budget is used up."""
    job, spec = work.job, work.job.spec
    work.note(text)
    healthy = _is_healthy(pod, work.now)
    in_row = job.failures_in_row
    if healthy:
        in_row = 1
    elif pod.given_at >= job.failed_at:  # otherwise it is one of several that died together
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
        finish(work, JobState.FAILED, f"{text}; more than {limit} times ({name})")
    elif in_row > spec.max_restarts_without_progress and not preempted:
        if any(_is_healthy(other, work.now) for other in job.staying):
            return  # one bad slot or node must not end the teachers that serve
        tries = f"{in_row - 1} restarts in a row ran less than {HEALTHY_S:g} s"
        finish(work, JobState.FAILED, f"{text}; {tries} (max_restarts_without_progress)")


def _is_healthy(pod: TeacherPod, now: float) -> bool:
    return pod.running_since is not None and now >= pod.running_since + HEALTHY_S
