"""What a standby can do without: the pods of which one, or one node's, may be lost. Pure."""

from dataclasses import replace
from itertools import groupby

from job_server.api.wire import PlanPod
from job_server.training.accounting import update_record
from job_server.training.job import Job, JobStage, StagePod
from job_server.training.work import Work

MOST_LOSSES = 8  # each costs the trainers a group: some sockets, a thread, a moment


def likely_losses(pods: tuple[PlanPod, ...]) -> tuple[tuple[str, ...], ...]:
    """Return which pods may be lost together, the others being left: each one, each node's."""
    single = [(pod.pod_id,) for pod in pods]
    by_node = sorted(pods, key=lambda pod: pod.node_id)
    nodes = [
        tuple(sorted(pod.pod_id for pod in group))
        for _, group in groupby(by_node, key=lambda pod: pod.node_id)
    ]
    found = [*single, *(node for node in nodes if len(node) > 1)]
    return tuple(loss for loss in found if len(loss) < len(pods))[:MOST_LOSSES]


def without_lost(job: Job, stage: JobStage) -> JobStage | None:
    """Return the standby without the pods that are no longer usable; None: it needs them."""
    gone = {pod_id for pod_id in stage.pod_ids if not job.usable(pod_id)}
    if not gone:
        return stage
    lost = tuple(sorted(gone | set(stage.missing_pods)))
    if not stage.stands_by or lost not in stage.survivable_failures:
        return None
    members: list[StagePod] = []
    next_rank = 0
    for member in stage.members:
        if member.pod.pod_id in gone:
            continue
        ranks = tuple(range(next_rank, next_rank + len(member.pod.ranks)))
        next_rank += len(ranks)
        members.append(replace(member, pod=replace(member.pod, pod_rank=len(members), ranks=ranks)))
    if len(members) < job.spec.min_pods:
        return None
    reason = f"standby, without {', '.join(lost)}"
    return replace(stage, members=tuple(members), missing_pods=lost, reason=reason)


def leave_out_lost(work: Work) -> None:
    """Have the standby do without the pods that are lost, if it can."""
    stage = work.job.preparing
    if stage is None or not stage.standby or not stage.survivable_failures:
        return
    left = without_lost(work.job, stage)
    if left is None or left is stage:
        return
    work.set(preparing=left)
    trainers = sum(len(member.pod.ranks) for member in left.members)
    update_record(work, stage.stage, pods=len(left.members), trainers=trainers, reason=left.reason)
    work.note(
        f"stage {stage.stage} stands by without {', '.join(left.missing_pods)}", lasting=False
    )
