"""Show how jobs share the cluster. Pure."""

from collections.abc import Iterable, Sequence

from job_server.api.wire import JobState, SharedJob, SharedNode, Sharing, SlotKind
from job_server.cluster.placement import serves
from job_server.sharing.job_types import AnyJob, job_status, slots_held
from job_server.sharing.job_views import (
    NodeUse,
    bound_to,
    is_closed,
    measured_step_s,
    most_pods,
    remaining_s,
    usable_slots,
)
from job_server.training.core.job import Job
from job_server.training.rules.share import home_of


def is_shared(job: AnyJob) -> bool:
    return isinstance(job, Job) and job.spec.share


def overview(
    policy: str,
    jobs: Sequence[AnyJob],
    nodes: Iterable[NodeUse],
    now: float,
    aside: Iterable[AnyJob] = (),
) -> Sharing:
    """Return how jobs share the cluster.

    Args:
        policy: its name.
        jobs: all, those that are not shared included.
        aside: jobs that cannot be read, but for what they hold.
    """
    shared = [job for job in jobs if isinstance(job, Job) and is_shared(job)]
    waiting = sorted(
        (job for job in shared if not job.state.ended),
        key=lambda job: (-job.spec.priority, job.submitted_at),
    )
    uses = tuple(nodes)
    succeeded = {job.spec.job_id for job in jobs if job.state is JobState.SUCCEEDED}
    # Of thousands that have ended: none.
    holders = [job for job in (*jobs, *aside) if slots_held(job)]
    return Sharing(
        policy=policy,
        now=now,
        nodes=tuple(_node(use, holders) for use in uses),
        jobs=tuple(_job(job, now, succeeded, uses) for job in waiting),
    )


def _node(use: NodeUse, jobs: Iterable[AnyJob]) -> SharedNode:
    node, report = use.node, use.report
    barred = dict.fromkeys(slot.reason for slot in node.slots if not slot.usable)
    strangers = () if report is None else (each.index for each in report.slots if each.stranger)
    own: set[int] = set()
    others: set[int] = set()
    trainers = [0, 0]
    for job in jobs:
        held = slots_held(job).get(node.node_id, frozenset())
        (own if is_shared(job) else others).update(held)
        if isinstance(job, Job):
            trainers[0] += len(held) * job.spec.cpu_milli
            trainers[1] += len(held) * job.spec.memory_mb
    usable = usable_slots(node, own)
    others |= usable.intersection(strangers)
    gpus = {slot.index for slot in node.slots if slot.kind is SlotKind.GPU}
    use_of_gpus = [
        each.utilization_percent
        for each in (() if report is None else report.slots)
        if each.index in gpus
    ]
    return SharedNode(
        node_id=node.node_id,
        alive=use.alive,
        slots=len(usable),
        used_shared=len(own),
        used_others=len(others - own),
        limit=use.limit,
        barred="; ".join(filter(None, barred)),
        quarantine=next(
            (slot.quarantine for slot in node.slots if slot.quarantine and not slot.drained), ""
        ),
        closed=is_closed(node),
        cpu_milli=node.cpu_milli,
        cpu_used_milli=trainers[0] + use.foreign_cpu_milli,
        memory_mb=node.memory_mb,
        memory_used_mb=trainers[1] + use.foreign_memory_mb,
        gpu_percent=sum(use_of_gpus) / len(use_of_gpus) if use_of_gpus else None,
        job_id=node.job_id,
        folders=node.folders,
    )


def _job(job: Job, now: float, succeeded: set[str], uses: Iterable[NodeUse]) -> SharedJob:
    status, spec = job_status(job, now, 0), job.spec
    committed = [record.committed_at for record in job.records if record.committed_at is not None]
    stage = job.active
    running = stage is not None and stage.over is None
    allotment, account = status.allotment, status.account
    nodes: dict[str, int] = {}
    for member in stage.members if stage is not None and running else ():
        nodes[member.pod.node_id] = nodes.get(member.pod.node_id, 0) + 1
    home = home_of(job)
    at_home = [use for use in uses if use.node.node_id == home and use.alive]
    able = [home for use in at_home if serves(spec, use.node)]
    left_s = None
    if spec.max_run_time_s is not None:
        ran_s = account.total_s - account.waiting_s - account.paused_s
        left_s = max(0.0, spec.max_run_time_s - ran_s)
    return SharedJob(
        job_id=spec.job_id,
        user=spec.user,
        priority=spec.priority,
        state=job.state,
        pods=len(stage.members) if stage is not None and running else 0,
        allotted=sum(nodes.values()) if allotment is None else allotment.pods,
        min_pods=spec.min_pods,
        max_pods=most_pods(job),
        slots_per_pod=spec.slots_per_pod,
        reason=status.reason if allotment is None else allotment.reason,
        after=tuple(
            other for other in spec.after if other not in succeeded and other not in job.share.met
        ),
        submitted_at=job.submitted_at,
        started_at=min(committed, default=None),
        waited_s=account.waiting_s,
        remaining_s=remaining_s(job, now),
        step_s=measured_step_s(job, now),
        nodes=nodes if allotment is None else allotment.nodes,
        since=job.submitted_at if allotment is None else allotment.since,
        cpu_milli=spec.cpu_milli,
        memory_mb=spec.memory_mb,
        folder=spec.folder,
        run_time_left_s=left_s,
        home=bound_to(job, able),
    )
