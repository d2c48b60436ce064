"""Decide what each shared job is allotted, from what is true now. Pure.

The server passes through all shared jobs and nodes, and tells each job what is news to it. What
other jobs hold, and shared ones that cannot be changed now, is foreign load to the allocator.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from job_server.api.wire import JobSpec, JobState, Node
from job_server.cluster.placement import gather, serves, why_unserved
from job_server.jobs.events import Allotted
from job_server.jobs.work import Goal
from job_server.sharing.allocate import Allocation, JobView, Policy, allocate
from job_server.sharing.job_types import AnyJob, slots_held
from job_server.sharing.job_views import NodeUse, is_closed, job_view, pod_needs, usable_slots
from job_server.sharing.resources import NodeRoom, Resources
from job_server.training.core.job import Job
from job_server.training.rules.share import finishes, is_refused

STUCK_PATIENCES = 3  # times prepare_timeout_s: slots that are not given back until then are in use
UNLIMITED = 10**15  # what a node has of something that is not known


def takes_part(job: AnyJob) -> bool:
    """Whether the server may allot pods to the job: it is shared, and neither ends nor pauses."""
    return (
        isinstance(job, Job)
        and job.spec.share
        and not job.state.ended
        and job.goal in (Goal.RUN, Goal.YIELD)
    )


def waits_its_turn(job: AnyJob) -> bool:
    """Whether nothing but an allotment lets the job do anything."""
    return takes_part(job) and isinstance(job, Job) and not job.pods and not _allotted(job)


def share_key(job: AnyJob) -> object:
    """Return what another decision follows from; None: of this job nothing."""
    if not isinstance(job, Job) or not job.spec.share:
        return job.state.ended  # others may wait for it
    stage = job.active
    return (
        job.state.ended,
        job.goal,
        job.elastic,
        job.cut_off,
        job.done,
        stage is not None and stage.committed and stage.over is None,
        job.share.most,
        job.share.refused_at,
        not job.pods,
    )


def decide(
    policy: Policy,
    jobs: Sequence[AnyJob],
    nodes: Sequence[NodeUse],
    now: float,
    aside: Iterable[AnyJob] = (),
) -> list[tuple[str, Allotted]]:
    """Return what is news to shared jobs, by job id; those that have less come first.

    Args:
        aside: jobs that cannot be read: they keep what they hold.
    """
    shared = [job for job in jobs if isinstance(job, Job) and takes_part(job)]
    states = {job.spec.job_id: job.state for job in jobs}
    met = {job.spec.job_id: _met(job, states) for job in shared}
    free = [job for job in shared if not is_fixed(job, now)]
    found: dict[str, Allocation] = {}
    views: list[JobView] = []
    served = _Served([use.node for use in nodes if use.alive])
    for job in free:
        job_id = job.spec.job_id
        why = _waits_for(job, states, met[job_id]) or served.why_not(job.spec)
        if why and not _allotted(job):
            found[job_id] = Allocation(placed={}, reason=why)
        else:
            views.append(job_view(job, served.nodes_of(job.spec), served.ids, now))
    rooms = rooms_of([*jobs, *aside], free, nodes, now)
    found |= allocate(policy, views, rooms, now)
    news = []
    for job in free:
        allocation = found[job.spec.job_id]
        event = Allotted(allocation.placed, allocation.reason, met[job.spec.job_id])
        if _is_news(job, event):
            news.append((job, event))
    news.sort(key=lambda each: not _gives(*each))
    return [(job.spec.job_id, event) for job, event in news]


def is_fixed(job: Job, now: float) -> bool:
    """Whether a job keeps what it has for now.

    Nobody can reach it; it is about to end; it could not be stopped just now; or its trainers are
    not known to be elastic, so a change would start them afresh. A pause that was called off has
    left a job without an allotment: it needs one, or it would not start again after a crash.
    """
    stage = job.active
    runs = stage is not None and stage.committed and stage.over is None
    stays = job.share.allotment is not None and is_refused(job, now)
    return job.cut_off or finishes(job) or stays or (runs and not job.elastic)


def rooms_of(
    jobs: Iterable[AnyJob], free: Sequence[Job], nodes: Iterable[NodeUse], now: float
) -> list[NodeRoom]:
    """Return the nodes as the allocator sees them.

    One whose client is silent has room for the pods that are heard all the same, and no more; one
    that gets no new pods, as it is short of memory or disk, for those that are there.

    Args:
        free: the jobs that it decides on; what others hold is foreign.
    """
    held, lent = defaultdict[str, _Held](_Held), defaultdict[str, _Held](_Held)  # by node
    decided = frozenset(job.spec.job_id for job in free)
    for job in jobs:
        is_free = job.spec.job_id in decided
        for node_id, slots in slots_held(job).items():
            if is_free:
                slots = _stuck(job, node_id, slots, now)
            held[node_id].add(job, slots)
            if isinstance(job, Job) and job.spec.share and not is_free:
                lent[node_id].add(job, slots)
    kept = gather(
        (pod.site.node_id, pod.site.slots) for job in free for pod in job.pods if pod.usable
    )  # node -> slots of pods that no job has given up
    rooms = []
    for use in nodes:
        node_id = use.node.node_id
        if use.alive:
            rooms.append(_room(use, held[node_id], lent[node_id], kept.get(node_id, frozenset())))
        elif node_id in kept:
            capacity = Resources(len(kept[node_id]), UNLIMITED, UNLIMITED)
            rooms.append(NodeRoom(node_id=node_id, capacity=capacity, closed=True))
    return rooms


@dataclass(slots=True)
class _Held:
    """What jobs have of a node."""

    slots: set[int] = field(default_factory=set)
    cpu_milli: int = 0
    memory_mb: int = 0

    def add(self, job: AnyJob, slots: frozenset[int]) -> None:
        self.slots |= slots
        if isinstance(job, Job):
            self.cpu_milli += len(slots) * job.spec.cpu_milli
            self.memory_mb += len(slots) * job.spec.memory_mb


def _room(use: NodeUse, held: _Held, lent: _Held, kept: frozenset[int] = frozenset()) -> NodeRoom:
    """Return a node as the allocator sees it.

    Args:
        lent: what shared jobs have of `held`.
        kept: slots of pods that are there, and may stay.
    """
    node, report = use.node, use.report
    usable = usable_slots(node, kept)
    strangers = {each.index for each in report.slots if each.stranger} if report else set()
    others = len(usable & (held.slots | strangers))
    if use.limit is not None:
        others = max(others, len(usable) - use.limit)
    return NodeRoom(
        node_id=node.node_id,
        capacity=Resources(
            slots=len(usable),
            cpu_milli=node.cpu_milli or UNLIMITED,
            memory_mb=node.memory_mb or UNLIMITED,
        ),
        foreign=Resources(
            slots=others,
            cpu_milli=use.foreign_cpu_milli + held.cpu_milli,
            memory_mb=use.foreign_memory_mb + held.memory_mb,
        ),
        lent=Resources(len(usable & lent.slots), lent.cpu_milli, lent.memory_mb),
        limit=use.limit,
        closed=is_closed(node),
    )


def _stuck(job: AnyJob, node_id: str, slots: frozenset[int], now: float) -> frozenset[int]:
    """Return the slots that the job should have given back long ago."""
    allotment = job.share.allotment if isinstance(job, Job) else None
    if not isinstance(job, Job) or allotment is None:
        return frozenset()
    if now < allotment.since + STUCK_PATIENCES * job.spec.prepare_timeout_s:
        return frozenset()
    own = allotment.nodes.get(node_id, 0) * job.spec.slots_per_pod
    return frozenset(sorted(slots)[own:])


def why_never(spec: JobSpec, nodes: Iterable[NodeUse]) -> str:
    """Return why the nodes could not run the job's least if they had nothing else to do.

    "": they could, or none serves it yet.
    """
    fits, parts = 0, []
    for use in nodes:
        if not use.alive or not serves(spec, use.node):
            continue
        room = _room(use, _Held(), _Held())
        each = pod_needs(spec)
        have = room.capacity.slots
        if use.limit is not None:
            have = min(have, use.limit)
        pods = have // each.slots
        for kind in ("cpu_milli", "memory_mb"):
            if getattr(each, kind):
                pods = min(pods, getattr(room.capacity, kind) // getattr(each, kind))
        fits += pods
        parts.append(_shown(use, have))
    if not parts or fits >= spec.min_pods:
        return ""
    return (
        f"min_pods: {spec.min_pods} pods of {_needs(spec)} each are more than the cluster has: "
        f"{fits} fit; {'; '.join(parts)}"
    )


def _needs(spec: JobSpec) -> str:
    each = pod_needs(spec)
    parts = ["1 slot" if each.slots == 1 else f"{each.slots} slots"]
    if each.cpu_milli:
        parts.append(f"{each.cpu_milli / 1000:g} cores")
    if each.memory_mb:
        parts.append(f"{each.memory_mb} MB")
    return ", ".join(parts)


def _shown(use: NodeUse, slots: int) -> str:
    node = use.node
    text = f"{node.node_id} has {'1 slot' if slots == 1 else f'{slots} slots'}"
    if use.limit is not None:
        text += " for shared jobs"
    if node.cpu_milli:
        text += f", {node.cpu_milli / 1000:g} cores"
    if node.memory_mb:
        text += f", {node.memory_mb} MB"
    return text


def why_not_after(spec: JobSpec, jobs: Mapping[str, AnyJob]) -> str:
    """Return why a job that is submitted now could never follow its `after`; "": it may."""
    for other in spec.after:
        if other not in jobs:
            return f"after: there is no job {other!r}; submit it first"
        state = jobs[other].state
        if state.ended and state is not JobState.SUCCEEDED:
            return (
                f"after: job {other!r} has {state.value}, so it never succeeds; submit it "
                "again under another name, and name that"
            )
        if spec.job_id in _ahead_of(other, jobs):
            return (
                f"after: job {other!r} itself waits for the success of {spec.job_id!r}, so neither "
                f"would ever start; leave it out, or stop {other!r} first"
            )
    return ""


def _ahead_of(job_id: str, jobs: Mapping[str, AnyJob]) -> set[str]:
    """Return all jobs for whose success the job waits, and those for which they wait."""
    found = set[str]()
    left = [job_id]
    while left:
        job = jobs.get(left.pop())
        if isinstance(job, Job) and not job.state.ended:
            more = set(job.spec.after) - set(job.share.met) - found
            found |= more
            left += more
    return found


def _met(job: Job, states: Mapping[str, JobState]) -> tuple[str, ...]:
    """Return the jobs of `after` that have succeeded; one that is forgotten since has as well."""
    return tuple(
        other
        for other in job.spec.after
        if other in job.share.met or states.get(other) is JobState.SUCCEEDED
    )


def _waits_for(job: Job, states: Mapping[str, JobState], met: tuple[str, ...]) -> str:
    parts = []
    for other in job.spec.after:
        state = states.get(other)
        if other in met:
            continue
        if state is None or state.ended:
            what, remedy = "of which there is none any more", "submit it again"
            if state is not None:
                what, remedy = f"which is {state.value}", "delete it and submit it again"
            parts.append(f"{other}, {what}: {remedy}, or stop this job")
        else:
            parts.append(other)
    return f"waits for the success of {'; of '.join(parts)}" if parts else ""


def _allotted(job: Job) -> bool:
    allotment = job.share.allotment
    return allotment is not None and allotment.pods > 0


def _is_news(job: Job, event: Allotted) -> bool:
    allotment = job.share.allotment
    if event.met != job.share.met or allotment is None:
        return True
    if allotment.nodes != dict(event.nodes):
        return True
    return not event.nodes and event.reason != job.progress.queue_reason


def _gives(job: Job, event: Allotted) -> bool:
    allotment = job.share.allotment
    before = {} if allotment is None else allotment.nodes
    return any(pods > event.nodes.get(node_id, 0) for node_id, pods in before.items())


class _Served:
    """Which nodes can run which jobs."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self.ids = frozenset(node.node_id for node in nodes)
        self._own = {node.job_id for node in nodes if node.job_id is not None}
        self._by_folder: dict[tuple[str | None, bool], frozenset[str]] = {}

    def _found(self, spec: JobSpec) -> frozenset[str]:
        if spec.job_id in self._own:
            return frozenset(node.node_id for node in self._nodes if serves(spec, node))
        key = spec.folder, bool(spec.args)
        if key not in self._by_folder:
            self._by_folder[key] = frozenset(
                node.node_id for node in self._nodes if serves(spec, node)
            )
        return self._by_folder[key]

    def nodes_of(self, spec: JobSpec) -> frozenset[str] | None:
        """Return the nodes that can run the job; None: all."""
        found = self._found(spec)
        return None if len(found) == len(self._nodes) else found

    def why_not(self, spec: JobSpec) -> str:
        if self._found(spec):
            return ""
        return why_unserved(spec, self._nodes)
