"""Reserve slots for trainings before teachers get them. Pure.

A training that is short of pods takes precedence over all teachers above their job's `min_pods`.
Free slots that it can use are reserved for it; if they are too few, the newest teachers are
preempted. A teacher that is already leaving counts as free, so that none is preempted twice for one
slot.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from job_server.cluster.placement import (
    Cluster,
    NodeView,
    Site,
    find_node,
    place,
    serving_nodes,
    usable_slots,
)
from job_server.jobs.work import Goal
from job_server.teachers.job import TeacherJob, TeacherPod, slots_of
from job_server.training.core.allocation import slots_of_leavers, slots_of_stayers
from job_server.training.core.job import Job
from job_server.training.rules.converge import start_deadline
from job_server.training.rules.share import split

Slots = dict[str, frozenset[int]]  # by node


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservations:
    """What training jobs need."""

    reserved: Mapping[str, frozenset[int]] = field(default_factory=dict)  # node -> slots
    preempted: Mapping[str, frozenset[str]] = field(default_factory=dict)  # job -> pods that leave
    promised: Mapping[str, int] = field(default_factory=dict)  # job -> pods, on slots not yet free


NO_RESERVATIONS = Reservations()


def shortage(job: Job, now: float, cluster: Cluster) -> int:
    """Return how many pods the job is short of, and would start if it had a place for them."""
    if job.state.ended or job.legacy or job.done or job.cut_off or job.goal is not Goal.RUN:
        return 0
    allotment = job.share.allotment
    if job.spec.share and (allotment is None or not allotment.pods):
        return 0  # it waits for its turn
    stage = job.preparing
    if stage is not None and not stage.standby:
        return max(0, stage.target - len(stage.members))
    stage = job.active
    if stage is not None and stage.over is None:
        return 0 if stage.finishing else max(0, job.target - len(stage.members))
    nodes = len(serving_nodes(job.spec, cluster, now))
    if job.fresh and nodes < job.spec.expected_nodes and now < start_deadline(job):
        return 0  # it waits for nodes first
    return max(0, job.target - len(job.usable_pods(job.recovery_pods)))


def reserve(
    trainings: Iterable[tuple[Job, Cluster]], teachers: Sequence[TeacherJob], now: float
) -> Reservations:
    """Return what is reserved, and which teachers leave.

    Args:
        trainings: each with the nodes as it sees them.
        teachers: all jobs of teachers.
    """
    leaving = slots_of(tuple(p for job in teachers for p in job.pods if p.released))
    spare = _Spare(teachers)
    reserved: Slots = {}
    promised: dict[str, int] = {}
    for job, cluster in trainings:
        count = shortage(job, now, cluster)
        if not count:
            continue
        freed = _as_if(cluster, free=leaving, taken=reserved)
        sites = _places(job, freed, now, count)
        at_once = _places(job, _as_if(cluster, free={}, taken=reserved), now, count)
        for site in sites:
            _add(reserved, site.node_id, site.slots)
        found = len(sites)
        while found < count and not job.spec.share:  # that gets what other shared jobs give
            view = _as_if(freed, free={}, taken=reserved)
            if not _take_one(job, view, spare, reserved, now):
                break
            found += 1
        if found > len(at_once):
            promised[job.spec.job_id] = found - len(at_once)
    return Reservations(
        reserved=reserved,
        preempted={job_id: frozenset(pods) for job_id, pods in spare.given.items() if pods},
        promised=promised,
    )


def _places(job: Job, cluster: Cluster, now: float, count: int) -> tuple[Site, ...]:
    """Return where up to so many pods that the job is short of would go."""
    held, leaving = slots_of_stayers(job), slots_of_leavers(job)
    if not job.spec.share or job.share.allotment is None:
        return place(job.spec, cluster, now, count=count, held=held, leaving=leaving)
    pods = tuple(pod for pod in job.pods if pod.usable)
    sites: list[Site] = []
    for node_id, missing in split(pods, job.share.allotment.nodes)[1].items():
        view = find_node(cluster, node_id)
        if view is not None:
            alone = replace(cluster, nodes=(view,))
            sites += place(job.spec, alone, now, count=missing, held=held, leaving=leaving)
    return tuple(sites[:count])


def hide_reserved(cluster: Cluster, reserved: Mapping[str, frozenset[int]]) -> Cluster:
    """Return the cluster as teachers see it: what is reserved is taken."""
    return _as_if(cluster, free={}, taken=reserved) if reserved else cluster


class _Spare:
    """The teachers above their jobs' minimum, as far as they have not been claimed yet."""

    def __init__(self, teachers: Sequence[TeacherJob]) -> None:
        self.given: dict[str, set[str]] = {job.spec.job_id: set() for job in teachers}
        self._jobs = teachers

    def on(self, node_id: str) -> list[tuple[TeacherJob, TeacherPod]]:
        """Return those on a node: not yet running ones first, then the newest."""
        found = []
        for job in self._jobs:
            given = self.given[job.spec.job_id]
            left = len(job.staying) - job.spec.min_pods - len(given)
            pods = [
                pod
                for pod in job.staying
                if pod.site.node_id == node_id and pod.pod_id not in given
            ]
            pods.sort(key=lambda pod: (pod.runs, -pod.number))
            found += [(job, pod) for pod in pods[: max(0, left)]]
        return sorted(found, key=lambda each: (each[1].runs, -each[1].given_at))


def _take_one(job: Job, cluster: Cluster, spare: _Spare, reserved: Slots, now: float) -> bool:
    """Have the fewest teachers leave that make room for one pod; False: none would do."""
    best: tuple[str, list[tuple[TeacherJob, TeacherPod]], list[int]] | None = None
    held = slots_of_stayers(job)
    for view in serving_nodes(job.spec, cluster, now):
        node_id = view.node.node_id
        own = held.get(node_id, frozenset())
        free = [slot for slot in usable_slots(view) if slot not in own]
        missing = job.spec.slots_per_pod - len(free)
        leave: list[tuple[TeacherJob, TeacherPod]] = []
        for teacher_job, pod in spare.on(node_id):
            if missing <= 0:
                break
            if _would_be_usable(view, pod):
                leave.append((teacher_job, pod))
                missing -= len(pod.site.slots)
        if missing <= 0 and (best is None or len(leave) < len(best[1])):
            best = (node_id, leave, free)
    if best is None:
        return False
    node_id, leave, free = best
    for teacher_job, pod in leave:
        spare.given[teacher_job.spec.job_id].add(pod.pod_id)
        free += pod.site.slots
    _add(reserved, node_id, free[: job.spec.slots_per_pod])
    return True


def _would_be_usable(view: NodeView, pod: TeacherPod) -> bool:
    usable = {slot.index for slot in view.node.slots if slot.usable} - set(view.strangers)
    return usable.issuperset(pod.site.slots)


def _as_if(
    cluster: Cluster,
    *,
    free: Mapping[str, frozenset[int]],
    taken: Slots | Mapping[str, frozenset[int]],
) -> Cluster:
    nothing: frozenset[int] = frozenset()
    return replace(
        cluster,
        nodes=tuple(
            replace(
                view,
                taken=(view.taken - free.get(view.node.node_id, nothing))
                | taken.get(view.node.node_id, nothing),
            )
            for view in cluster.nodes
        ),
    )


def _add(slots: Slots, node_id: str, more: Iterable[int]) -> None:
    slots[node_id] = slots.get(node_id, frozenset()) | frozenset(more)
