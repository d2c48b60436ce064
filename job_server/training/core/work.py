"""Hold a training while one step changes it, and say which of its pods are silent. Pure."""

from msgspec.structs import replace

from job_server.api.wire import PodStagePhase
from job_server.cluster.placement import Cluster, find_node
from job_server.jobs.work import StepWork
from job_server.training.core.job import BadSlot, Job, JobStage, TrainingPod

MAX_BAD_SLOTS = 16


class Work(StepWork[Job]):
    """What the functions of one step hand to each other."""

    def set_stage(self, stage: JobStage) -> None:
        """Put a changed stage back in its place."""
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
        """Record a pod's phase in a stage."""
        held = self.job.stage_numbered(stage.stage)
        member = held.member(pod_id) if held is not None else None
        if held is None or member is None:
            return
        step = member.step if step is None else step
        changed = replace(
            member, phase=phase, step=step, snapshot_is_current=snapshot_is_current, durable=durable
        )
        self.set_stage(held.with_member(changed))

    def quarantine(self, node_id: str, slot: int, name: str, why: str) -> None:
        """Have the server put a slot in quarantine; `name` is that of the fault."""
        view = find_node(self.cluster, node_id)
        slots = () if view is None else view.node.slots
        uuid = next((each.uuid for each in slots if each.index == slot), "")
        bad = BadSlot(node_id=node_id, slot=slot, uuid=uuid, name=name, why=why, at=self.now)
        self.set(bad_slots=(*self.job.bad_slots, bad)[-MAX_BAD_SLOTS:])


def is_silent(work: Work, pod: TrainingPod) -> bool:
    """Return whether the heartbeats of the pod's node and of its launcher are too late."""
    return work.now >= silent_at(work.job, pod, work.cluster)


def silent_at(job: Job, pod: TrainingPod, cluster: Cluster) -> float:
    """Return when the pod counts as silent if nothing is received until then."""
    heard = max(job.progress.heard.get(pod.pod_id, job.grace_from), job.grace_from)
    return max(heard + cluster.silence_s, client_silent_at(job, pod, cluster))


def client_silent_at(job: Job, pod: TrainingPod, cluster: Cluster) -> float:
    """Return when the pod's client counts as gone if nothing is received from it until then."""
    view = find_node(cluster, pod.site.node_id)
    seen = view.seen_at if view is not None else job.grace_from
    return max(seen, job.grace_from) + cluster.silence_s


def silent_pods(work: Work) -> list[TrainingPod]:
    """Return the silent pods that are not released. Cheap where all nodes answer, as nearly always:
    a job may have a thousand pods.
    """
    cluster = work.cluster
    silence_s = cluster.silence_s
    answer = {view.node.node_id for view in cluster.nodes if work.now < view.seen_at + silence_s}
    return [
        pod
        for pod in work.job.pods
        if pod.site.node_id not in answer and not pod.released and is_silent(work, pod)
    ]
