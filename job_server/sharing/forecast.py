"""Foresee when the jobs of a shared cluster start and end: its policy, forward in time. Pure.

It knows what the server knows, and nothing of jobs that are yet to be submitted. A job of which it
is not known how long it takes runs for ever here; what waits for its end cannot be foreseen.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf

from job_server.api.wire import JobState, SharedJob, SharedNode, Sharing
from job_server.sharing.allocate import Allocation, JobView, Policy, allocate
from job_server.sharing.policies import POLICIES, Goodput
from job_server.sharing.resources import NodeRoom, Resources
from job_server.sharing.speedup import StepTime, fit

MAX_PASSES = 300
_LOOK_S = 60.0  # after an event, a policy moves pods for a while
_HALTED = (JobState.PAUSING, JobState.PAUSED, JobState.STOPPING)
_SAME_S = 1e-3
_UNLIMITED = 10**12  # of what is not counted on a node


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """When a job starts and ends, in seconds from now."""

    starts_in_s: float | None = None  # 0: it runs, or is about to; None: it cannot be foreseen
    ends_in_s: float | None = None  # None: as above
    once: tuple[str, ...] = ()  # it starts once these jobs have ended, in this order
    by_run_time: bool = False  # it ends then because it may not run for longer


@dataclass(slots=True)
class _Live:
    job: SharedJob
    nodes: frozenset[str]
    step_time: StepTime
    left: float  # seconds of work for one pod
    left_to_run: float  # seconds until its time is up
    waits_for: set[str]
    placed: Mapping[str, int]
    changed_at: float
    counted_at: float
    starts_in_s: float | None = None
    once: tuple[str, ...] = ()

    @property
    def pods(self) -> int:
        return sum(self.placed.values())

    def ends_at(self) -> float:
        if not self.pods:
            return inf
        return self.counted_at + min(self.left / self._speed(), self.left_to_run)

    def advance(self, now: float) -> None:
        if self.pods:
            self.left -= (now - self.counted_at) * self._speed()
            self.left_to_run -= now - self.counted_at
        self.counted_at = now

    def _speed(self) -> float:
        return self.step_time.speedup(self.pods)


def policy_of(sharing: Sharing) -> Policy:
    """Return the server's policy; of one that this version does not know: the usual one."""
    return POLICIES.get(sharing.policy, Goodput())


def foresee(
    sharing: Sharing, *, until: str | None = None, passes: int = MAX_PASSES
) -> dict[str, Outlook]:
    """Return job -> outlook.

    Args:
        passes: later than so many decisions nothing is foreseen.
        until: what is later than this job's end is of no interest; None: all is.
    """
    policy, start = policy_of(sharing), sharing.now
    rooms = rooms_of(sharing)
    ids = {job.job_id for job in sharing.jobs}
    found = dict.fromkeys(ids, Outlook())
    live = {job.job_id: _live(sharing, job) for job in sharing.jobs if _can_run(sharing, job)}
    now, ended, looks = start, list[str](), list[float]()
    for _ in range(passes):
        able = [each for each in live.values() if not each.waits_for]
        if not able or (until is not None and until not in live):
            break
        decided = allocate(policy, [_view(each, now) for each in able], rooms, now)
        changed = [each for each in able if _apply(each, decided[each.job.job_id], now)]
        for each in able:
            if each.pods and each.starts_in_s is None:
                each.starts_in_s, each.once = now - start, tuple(ended)
        looks = [at for at in looks if at > now]
        if changed and policy.margin is not None:
            looks.append(now + _LOOK_S)
        looks += [
            each.job.submitted_at + policy.patience_s
            for each in able
            if not each.pods and each.job.submitted_at + policy.patience_s > now
        ]
        first = min(able, key=lambda each: (each.ends_at(), each.job.job_id))
        at = min(first.ends_at(), *looks) if looks else first.ends_at()
        if at == inf:
            break
        for each in able:
            each.advance(at)
        now = at
        if first.ends_at() <= at + _SAME_S:
            job_id = first.job.job_id
            del live[job_id]
            ended.append(job_id)
            found[job_id] = _outlook(first, now - start)
            for each in live.values():
                each.waits_for.discard(job_id)
    for job_id, each in live.items():
        found[job_id] = _outlook(each, None)
    return found


def decide(sharing: Sharing) -> dict[str, Allocation]:
    """Return what the policy would give each job now."""
    able = [job for job in sharing.jobs if _can_run(sharing, job) and not job.after]
    views = [_view(_live(sharing, job), sharing.now) for job in able]
    return allocate(policy_of(sharing), views, rooms_of(sharing), sharing.now)


def fits_now(sharing: Sharing, job_id: str) -> bool:
    """Say whether the policy would let a job run now."""
    decided = decide(sharing).get(job_id)
    return decided is not None and decided.trainers > 0


def nodes_for(sharing: Sharing, job: SharedJob) -> list[SharedNode]:
    """Return the nodes that can be reached and whose clients can run the job."""
    return [node for node in sharing.nodes if node.alive and _serves(node, job)]


def rooms_of(sharing: Sharing) -> list[NodeRoom]:
    """Return what the nodes that can be reached have for shared jobs."""
    return [_room(node, sharing.jobs) for node in sharing.nodes if node.alive]


def need_of(job: SharedJob) -> Resources:
    """Return what one pod of a job needs."""
    slots = job.slots_per_pod
    return Resources(slots, slots * job.cpu_milli, slots * job.memory_mb)


def _serves(node: SharedNode, job: SharedJob) -> bool:
    if node.job_id is not None:
        return node.job_id == job.job_id
    return job.folder is not None and job.folder in node.folders


def _can_run(sharing: Sharing, job: SharedJob) -> bool:
    return job.state not in _HALTED and bool(nodes_for(sharing, job))


def _room(node: SharedNode, jobs: Iterable[SharedJob]) -> NodeRoom:
    shared = [0, 0]
    for job in jobs:
        each, pods = need_of(job), job.nodes.get(node.node_id, 0)
        shared[0] += pods * each.cpu_milli
        shared[1] += pods * each.memory_mb
    slots = node.slots
    if node.limit is not None:
        slots = min(slots, node.used_others + node.limit)
    return NodeRoom(
        node_id=node.node_id,
        capacity=Resources(slots, node.cpu_milli or _UNLIMITED, node.memory_mb or _UNLIMITED),
        foreign=Resources(
            node.used_others,
            max(0, node.cpu_used_milli - shared[0]) if node.cpu_milli else 0,
            max(0, node.memory_used_mb - shared[1]) if node.memory_mb else 0,
        ),
        limit=node.limit,
        closed=node.closed,
    )


def _live(sharing: Sharing, job: SharedJob) -> _Live:
    return _Live(
        job=job,
        nodes=frozenset(node.node_id for node in nodes_for(sharing, job)),
        step_time=fit(job.step_s),
        left=inf if job.remaining_s is None else job.remaining_s,
        left_to_run=inf if job.run_time_left_s is None else job.run_time_left_s,
        waits_for=set(job.after),
        placed=job.nodes,
        changed_at=job.since if job.nodes else -inf,
        counted_at=sharing.now,
    )


def _view(each: _Live, now: float) -> JobView:
    job = each.job
    return JobView(
        job_id=job.job_id,
        min_trainers=job.min_pods,
        max_trainers=job.max_pods,
        each=need_of(job),
        placed=each.placed,
        nodes=each.nodes,
        home=job.home,
        user=job.user,
        priority=job.priority,
        submitted_at=job.submitted_at,
        changed_at=each.changed_at,
        step_time=each.step_time,
        remaining_s=None if each.left == inf else max(each.left, 0.0),
    )


def _apply(each: _Live, decided: Allocation, now: float) -> bool:
    if dict(decided.placed) == dict(each.placed):
        return False
    each.placed, each.changed_at, each.counted_at = decided.placed, now, now
    return True


def _outlook(each: _Live, ends_in_s: float | None) -> Outlook:
    return Outlook(
        starts_in_s=each.starts_in_s,
        ends_in_s=ends_in_s,
        once=each.once,
        by_run_time=ends_in_s is not None and each.left > _SAME_S,
    )
