"""See a training as the policies do: what it has, what it needs, and how fast it is. Pure."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from job_server.api.wire import JobSpec, Node, NodeReport, Way
from job_server.jobs.work import Goal
from job_server.sharing.allocate import JobView
from job_server.sharing.resources import Resources
from job_server.sharing.speedup import fit
from job_server.training.core.job import Job
from job_server.training.rules.share import count_by_node, home_of

LATE_PATIENCES = 3  # times prepare_timeout_s: an allotment that is not reached until then is void
SEEN_RECORDS = 50  # the newest stages, whose step times count
MIN_STEPS = 5  # of a stage, for its step time to count


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUse:
    """A registered node, and what is known of its use."""

    node: Node
    alive: bool
    report: NodeReport | None  # None: none since it registered
    limit: int | None  # of slots for shared jobs; None: all
    foreign_cpu_milli: int = 0  # of processes that are no pods', smoothed; 0 where not known
    foreign_memory_mb: int = 0


def job_view(job: Job, nodes: frozenset[str] | None, alive: Collection[str], now: float) -> JobView:
    """Return the job as a policy sees it; its pods are the policy's trainers.

    Args:
        nodes: on which it can run; None: on all.
        alive: nodes that answer.
    """
    spec, allotment = job.spec, job.share.allotment
    bound = bound_to(job, alive if nodes is None else nodes)
    measured = measured_step_s(job, now)
    return JobView(
        job_id=spec.job_id,
        min_trainers=spec.min_pods,
        max_trainers=most_pods(job),
        each=pod_needs(spec),
        placed=_placed(job, bound, nodes, now),
        nodes=nodes,
        # One whose state is at home alone has not begun: pods that are elsewhere wait for nothing.
        runs=job.goal is Goal.RUN and not bound and any(pod.usable for pod in job.pods),
        home=bound,
        stoppable=not spec.keeps_least,
        priority=spec.priority,
        user=spec.user,
        submitted_at=job.submitted_at,
        changed_at=float("-inf") if allotment is None else allotment.since,
        change_s=_change_s(job),
        step_time=fit(measured),
        remaining_s=remaining_s(job, now),
    )


def bound_to(job: Job, nodes: Collection[str]) -> str:
    """Return the node on which the job has to start, as that has its state. "": any.

    Args:
        nodes: that answer and can run the job.
    """
    home, saved = home_of(job), job.ending.saved
    only_there = saved is not None and (saved.spare or saved.alone)
    return home if home in nodes or only_there else ""


def pod_needs(spec: JobSpec) -> Resources:
    """Return what one pod needs."""
    count = spec.slots_per_pod
    return Resources(
        slots=count, cpu_milli=count * spec.cpu_milli, memory_mb=count * spec.memory_mb
    )


def usable_slots(node: Node, kept: Collection[int]) -> set[int]:
    """Return the slots of a node that jobs may have.

    Args:
        kept: those of pods that are there: they stay where the node gets no new ones.
    """
    usable = {slot.index for slot in node.slots if slot.usable}
    return usable or {slot.index for slot in node.slots if not slot.quarantine}.intersection(kept)


def is_closed(node: Node) -> bool:
    """Return whether a node gets no new pods, as when it is short of memory."""
    return not any(slot.usable for slot in node.slots)


def most_pods(job: Job) -> int:
    """Return the most pods that a shared job may have: its spec's, or fewer by a user's resize."""
    most = job.share.most
    return job.spec.max_pods if most is None else min(most, job.spec.max_pods)


def _placed(job: Job, home: str, nodes: frozenset[str] | None, now: float) -> Mapping[str, int]:
    """Return node -> pods: what is allotted, and what is there if that was never reached.

    On nodes that serve the job no more (their folder is gone) these are the pods that run there.
    """
    allotment, stage = job.share.allotment, job.active
    if allotment is None or not allotment.pods:
        return {}
    there = count_by_node(pod.site.node_id for pod in job.pods if pod.usable)
    if home and home not in allotment.nodes and not there:
        return {}
    late = now >= allotment.since + LATE_PATIENCES * job.spec.prepare_timeout_s
    if late and stage is not None and stage.over is None and job.preparing is None:
        return count_by_node(member.pod.node_id for member in stage.members)
    if nodes is None:
        return allotment.nodes
    return {
        node_id: placed
        for node_id, pods in allotment.nodes.items()
        if (placed := pods if node_id in nodes else min(pods, there.get(node_id, 0)))
    }


def _change_s(job: Job) -> float:
    """Return the mean pause of the job's newest changes, in seconds; 0: it had none."""
    pauses = [
        each.pause_s
        for each in job.records[-SEEN_RECORDS:]
        if each.pause_s is not None and each.way is not Way.START  # which may have waited for long
    ]
    return sum(pauses) / len(pauses) if pauses else 0.0


def measured_step_s(job: Job, now: float) -> dict[int, float]:
    """Return pods -> seconds per step, as the job's newest stages had them.

    With `policy` linear a step of more pods is more work; then it is the time for the work of a
    step of one pod.
    """
    seconds: dict[int, float] = {}
    steps: dict[int, int] = {}
    for record in job.records[-SEEN_RECORDS:]:
        active = job.active
        runs = active is not None and active.stage == record.stage and record.ended_at is None
        last_step = job.progress.step if runs else record.last_step
        until = record.ended_at
        if runs:
            until = now if job.progress.stepped_at is None else job.progress.stepped_at
        if record.first_step is None or record.first_step_at is None:
            continue
        if last_step is None or until is None or last_step - record.first_step < MIN_STEPS:
            continue
        took_s = until - record.first_step_at
        if took_s > 0:
            made = last_step - record.first_step
            seconds[record.pods] = seconds.get(record.pods, 0.0) + took_s
            steps[record.pods] = steps.get(record.pods, 0) + made
    share = {pods: pods if job.spec.policy == "linear" else 1 for pods in seconds}
    return {pods: seconds[pods] / steps[pods] / share[pods] for pods in sorted(seconds)}


def remaining_s(job: Job, now: float) -> float | None:
    """Return how many seconds of work for one pod are left; None: not known."""
    measured, total = measured_step_s(job, now), job.progress.total_steps
    if total is None or not measured:
        return None
    stage = job.active
    each = len(stage.members) if job.spec.policy == "linear" and stage is not None else 1
    return max(total - job.progress.step, 0) * each * fit(measured).seconds(1)
