"""One call of `machine.step` at work: the job so far, the time, and what is to be logged. Pure."""

from dataclasses import replace
from typing import Any

from job_server.api.wire import DesiredState
from job_server.cluster.placement import Cluster, find_node
from job_server.training.job import Job, JobStage, PodStagePhase, TrainingPod

END_MARGIN_S = 20.0  # beyond the grace, for a launcher that ends its trainers
LOAD_PATIENCE = 5.0  # times prepare_timeout_s: where nothing trains that a timeout would save
RECOVERY_PATIENCE_S = 5.0  # how much longer than a recovery a prepared change may take
FENCE_MARGIN_S = 2.0  # beyond `stop_after_s`: a client terminates its pods then, kills them 1 s on
MISSING_HEARTBEATS = 3  # reports that may omit a pod before it counts as lost


class Work:
    """What the functions of the state machine hand to each other; lives for one `step`."""

    __slots__ = ("cluster", "job", "notes", "now", "reason")

    def __init__(self, job: Job, now: float, cluster: Cluster) -> None:
        self.job = job
        self.now = now
        self.cluster = cluster
        self.notes: list[str] = []
        self.reason = ""  # the newest note that says how things stand

    def set(self, **changes: Any) -> None:
        self.job = replace(self.job, **changes)

    def progress(self, **changes: Any) -> None:
        self.job = replace(self.job, progress=replace(self.job.progress, **changes))

    def note(self, text: str, *, lasting: bool = True) -> None:
        """Keep a line for the log of the job's life.

        Args:
            lasting: it also says how things stand from now on, in the job's status.
        """
        self.notes.append(text)
        if lasting:
            self.reason = text

    def set_pod(self, pod: TrainingPod) -> None:
        self.set(pods=tuple(pod if p.pod_id == pod.pod_id else p for p in self.job.pods))

    def drop_pod(self, pod_id: str) -> None:
        """Forget a pod: no process of it is left."""
        self.set(pods=tuple(pod for pod in self.job.pods if pod.pod_id != pod_id))
        progress = self.job.progress
        self.progress(
            snapshots=without(progress.snapshots, pod_id),
            heard=without(progress.heard, pod_id),
            missing=without(progress.missing, pod_id),
            joins=without(progress.joins, pod_id),
            steps=without(progress.steps, pod_id),
        )

    def set_stage(self, stage: JobStage) -> None:
        """Put a changed stage back into the place where its number stands."""
        for place in ("retiring", "active", "preparing"):
            held = getattr(self.job, place)
            if held is not None and held.stage == stage.stage:
                self.set(**{place: stage})

    def move(
        self,
        stage: JobStage,
        pod_id: str,
        phase: PodStagePhase,
        step: int | None = None,
        *,
        snapshot_is_current: bool = False,
        durable: str = "",
    ) -> None:
        """Record how far a pod is with a stage."""
        held = stage_named(self.job, stage.stage)
        member = held.member(pod_id) if held is not None else None
        if held is None or member is None:
            return
        step = member.step if step is None else step
        changed = replace(
            member, phase=phase, step=step, snapshot_is_current=snapshot_is_current, durable=durable
        )
        self.set_stage(held.with_member(changed))

    def is_silent(self, pod: TrainingPod) -> bool:
        """Whether neither the pod's node nor its launcher has been heard for four heartbeats."""
        return self.now >= silent_at(self.job, pod, self.cluster)

    def release(self, pod_id: str, *, hold: bool = False) -> None:
        """Let a pod go.

        Args:
            hold: its shim and the snapshot in it stay.
        """
        pod = self.job.pod(pod_id)
        if pod is not None and not pod.released:
            self.set_pod(replace(pod, desired=DesiredState.HOLD if hold else None))


def silent_at(job: Job, pod: TrainingPod, cluster: Cluster) -> float:
    """Return when a pod counts as silent if nothing is heard until then."""
    view = find_node(cluster, pod.site.node_id)
    heard = job.progress.heard.get(pod.pod_id, job.grace_from)
    seen = view.seen_at if view is not None else job.grace_from
    return max(heard, seen, job.grace_from) + cluster.silence_s


def client_silent_at(job: Job, pod: TrainingPod, cluster: Cluster) -> float:
    """Return when nobody looks after the pod if its client is not heard until then."""
    view = find_node(cluster, pod.site.node_id)
    seen = view.seen_at if view is not None else job.grace_from
    return max(seen, job.grace_from) + cluster.silence_s


def fenced_at(job: Job, pod: TrainingPod, cluster: Cluster) -> float | None:
    """Return when the pod's client has stopped it if neither is heard until then.

    None: its client keeps pods running while the server is away, or fell silent so long before
    the pod's launcher did that it must have died: then it stops nothing.
    """
    view = find_node(cluster, pod.site.node_id)
    if view is None or view.node.stop_after_s is None:
        return None
    heard = job.progress.heard.get(pod.pod_id, job.grace_from)
    if heard > max(view.seen_at, job.grace_from) + cluster.silence_s:
        return None
    last = max(heard, view.seen_at, job.grace_from)
    return last + view.node.stop_after_s + FENCE_MARGIN_S


def without(mapping: Any, key: str) -> dict[str, Any]:
    return {k: v for k, v in mapping.items() if k != key}


def stage_named(job: Job, number: int) -> JobStage | None:
    return next((stage for stage in job.stages if stage.stage == number), None)


def told_to_end(stage: JobStage) -> bool:
    """Whether the pods of a stage are told to end its trainers."""
    return stage.end_since is not None
