"""Compare what clients report of their pods with what the server knows. Pure."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from job_server.api.wire import PodState
from job_server.jobs.work import StepWork

W = TypeVar("W", bound=StepWork[Any])

SIGTERM, SIGKILL = 15, 9
MISSING_HEARTBEATS = 3  # reports that may omit a pod before it counts as lost
SHOWN_LINES = 3
REASON_CHARS = 600
PATH_CHARS = 4096  # longer paths exist on no system


def compare(
    work: W,
    node_id: str,
    states: Iterable[PodState],
    *,
    named: Callable[[W, Any, PodState], None],
    not_named: Callable[[W, Any], None],
) -> None:
    """Call `named` or `not_named` for each pod of the job that is on the node."""
    reported = {state.pod_id: state for state in states}
    for pod in work.job.pods:
        if pod.site.node_id != node_id:
            continue
        state = reported.get(pod.pod_id)
        if state is None:
            not_named(work, pod)
            continue
        if pod.pod_id in work.job.progress.missing:
            work.progress(missing=without(work.job.progress.missing, pod.pod_id))
        named(work, pod, state)


def is_missing(work: StepWork[Any], pod: Any) -> bool:
    """Note that a client omits a pod. Return whether it has for so long that the pod is lost."""
    if pod.phase is None:
        return False  # its client may not know it yet
    missing = work.job.progress.missing
    since = missing.get(pod.pod_id)
    if since is None:
        work.progress(missing={**missing, pod.pod_id: work.now})
        return False
    return bool(work.now >= missing_at(since, work.cluster.heartbeat_s))


def missing_at(since: float, heartbeat_s: float) -> float:
    """Return when a pod that its client omits since then counts as lost."""
    return since + MISSING_HEARTBEATS * heartbeat_s


def missing_text(pod: Any) -> str:
    return f"the client of {pod.site.node_id} does not know pod {pod.pod_id} any more"


def exit_code(state: PodState) -> int | None:
    """Return a pod's exit code, negative for a signal. None: its shim is gone as well."""
    return state.exit_code if state.signal is None else -state.signal


def was_terminated(code: int | None) -> bool:
    """Return whether a pod ended by SIGTERM, that is, something outside EDL stopped it."""
    return code in (-SIGTERM, 128 + SIGTERM)


def last_words(lines: tuple[str, ...]) -> str:
    """Return the last lines that a pod wrote, as one."""
    return " | ".join(line.strip() for line in lines[-SHOWN_LINES:])


def without(mapping: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in mapping.items() if k != key}
