"""Decide which pods this node must start, stop, kill or release now. Pure.

Level-triggered: every pass compares the pods with the server's newest plan, so a lost message or a
restart of the client needs no special case.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from job_server.api.wire import DesiredState, NodePod, PodPhase, is_same_job

PodKey = tuple[str, str]  # (job_id, pod_id): pod ids are unique within a job only


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPod:
    """One pod as it is on this node."""

    job_id: str
    pod_id: str
    phase: PodPhase
    grace_s: float  # to stop it with, when the server does not name it any more
    killed: bool = False  # SIGKILL has been asked for
    slots: tuple[int, ...] = ()
    submitted_at: float = 0.0  # of the job that it was started for; 0: not known
    untold: bool = False  # the server has not heard yet where the pod's last state was written

    @property
    def key(self) -> PodKey:
        return self.job_id, self.pod_id


@dataclass(frozen=True, slots=True)
class StartPod:
    pod: NodePod


@dataclass(frozen=True, slots=True)
class StopPod:
    key: PodKey
    grace_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class KillPod:
    key: PodKey
    reason: str


@dataclass(frozen=True, slots=True)
class ReleasePod:
    """Let the pod's shim go, with the snapshots that it holds, and forget the pod."""

    key: PodKey
    reason: str


Action = StartPod | StopPod | KillPod | ReleasePod


def plan_changes(current: Iterable[LocalPod], wanted: Iterable[NodePod]) -> list[Action]:
    """Return what to do now: kills and stops first, then releases, then starts.

    A pod that has exited is never started again: the server gives its successor a new id. So does
    it for a pod that ran, and that this client does not know: another may still have it. Nor is a
    stop taken back. The server decides whether two pods that it wants may share a slot; a pod that
    is stopping keeps its slots until it has exited. A pod of an earlier job of the same id is not
    the one that is wanted. `wanted` is the server's newest plan; do not call after a failed poll,
    which is not an empty plan.
    """
    local = {pod.key: pod for pod in current}
    plan = {(pod.job_id, pod.pod_id): pod for pod in wanted}
    ends: list[Action] = []
    busy: set[int] = set()
    for key, pod in local.items():
        spec = plan.get(key)
        if spec is not None and not is_same_job(pod.submitted_at, spec.submitted_at):
            spec = None
        action = _end(pod, spec)
        if action is not None:
            ends.append(action)
        stays = (
            pod.phase is not PodPhase.STOPPING
            and spec is not None
            and spec.want is DesiredState.RUN
        )
        if pod.phase is not PodPhase.EXITED and not stays:
            busy.update(pod.slots)
    starts = [
        StartPod(pod)
        for key, pod in plan.items()
        if pod.want is DesiredState.RUN
        and not pod.started
        and key not in local
        and busy.isdisjoint(pod.slots)
    ]
    order: Mapping[type, int] = {KillPod: 0, StopPod: 1, ReleasePod: 2}
    return [*sorted(ends, key=lambda action: order[type(action)]), *starts]


def _end(pod: LocalPod, wanted: NodePod | None) -> KillPod | StopPod | ReleasePod | None:
    """Return what ends `pod` a bit further, or None when it is as it should be."""
    if pod.phase is PodPhase.EXITED:
        stays = wanted is not None or pod.untold
        return None if stays else ReleasePod(pod.key, "not in the plan any more")
    if wanted is not None and wanted.want is DesiredState.KILL:
        return None if pod.killed else KillPod(pod.key, "the plan wants it killed")
    if pod.phase is PodPhase.STOPPING:
        return None
    if wanted is None:
        return StopPod(pod.key, pod.grace_s, "not in the plan")
    if wanted.want is DesiredState.HOLD:
        return StopPod(pod.key, wanted.grace_s, "the plan wants only its snapshot held")
    return None
