"""Share a cluster between elastic jobs: which job runs with how many trainers, and where. Pure.

Each pass begins with what runs now, and changes as little as it must: it repairs what has become
impossible, starts what waits, gives away what is free, evens out what users have, and, if the
policy wants that, exchanges trainers between jobs of one user. A policy says only what a trainer
more or less is worth to a job.

Beyond the least of all jobs, users have equal shares: the one with the fewest slots gets the next,
and the one with the most gives way first, whatever the priorities. Priorities say who starts, and
order the jobs of one user.
"""

import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from job_server.sharing.resources import Need, NodeRoom, Resources, Room
from job_server.sharing.speedup import USUAL, StepTime

SETTLE_S = 30.0  # after a change of its trainers, for which users' shares leave a job alone


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """A job that has not ended, as a policy sees it."""

    job_id: str
    min_trainers: int  # 1 or more; with fewer it does not run
    max_trainers: int
    each: Resources  # of one trainer
    placed: Mapping[str, int] = field(default_factory=dict)  # node -> trainers; empty: it waits
    nodes: frozenset[str] | None = None  # on which it can run; None: on all
    runs: bool = True  # False: what is placed has not begun, and can be taken back
    stoppable: bool = True  # False: once it runs it keeps its least
    home: str = ""  # the node that has its state, on which its first trainer has to be; "": any
    priority: int = 0  # the highest goes first
    user: str = ""  # whose share of the slots it has
    submitted_at: float = 0.0  # seconds, as all times here
    changed_at: float = float("-inf")  # when trainers last came or went
    change_s: float = 0.0  # how long training stands still for a change
    step_time: StepTime = USUAL
    remaining_s: float | None = None  # of work for one trainer; None: not known yet


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """What a job is to have, and why."""

    placed: Mapping[str, int]  # node -> trainers; empty: it waits
    reason: str

    @property
    def trainers(self) -> int:
        return sum(self.placed.values())


class Policy(Protocol):
    """What trainers are worth. Values are compared with each other and mean nothing else."""

    @property
    def max_load(self) -> float:
        """The part of the cluster that may be used, above 0 and up to 1."""

    @property
    def patience_s(self) -> float:
        """How long after its submission a job waits before no later one of its priority starts."""

    @property
    def margin(self) -> float | None:
        """A trainer moves to where it is worth so many times more; None: it does not."""

    def waiting_key(self, job: JobView) -> float:
        """Return the order in which waiting jobs of one priority start, the lowest first."""

    def gain(self, job: JobView, trainers: int) -> float:
        """Return what one trainer more than `trainers` is worth."""

    def loss(self, job: JobView, trainers: int) -> float:
        """Return what is lost with the last of `trainers`."""

    def may_move(self, job: JobView, trainers: int, now: float) -> bool:
        """Say whether trainers may come and go for the value's sake alone."""


def allocate(
    policy: Policy, jobs: Sequence[JobView], nodes: Iterable[NodeRoom], now: float
) -> dict[str, Allocation]:
    """Return what each job is to have.

    Args:
        jobs: all that have not ended, those that wait included.
        now: the clock of the jobs' times.

    Raises:
        ValueError: a job's numbers are impossible.
    """
    for job in jobs:
        if not 1 <= job.min_trainers <= job.max_trainers:
            raise ValueError(
                f"{job.job_id}: expected 1 <= min <= max trainers, got {job.min_trainers} and "
                f"{job.max_trainers}"
            )
    needs = [
        Need(job.job_id, job.each, job.placed, job.user, job.nodes, job.home, not job.runs)
        for job in jobs
    ]
    work = _Pass(policy, jobs, Room(nodes, needs, policy.max_load), now)
    work.repair()
    work.start_waiting()
    work.grow()
    work.even_out()
    work.exchange()
    return {job.job_id: work.result(job) for job in jobs}


# user -> a heap of (key, job id, job). An entry is popped, changed and pushed again, so that none
# is out of date.
_Heaps = dict[str, list[tuple[tuple[float, ...], str, JobView]]]


class _Pass:
    def __init__(self, policy: Policy, jobs: Sequence[JobView], room: Room, now: float) -> None:
        self._policy, self._jobs, self._room, self._now = policy, jobs, room, now
        self._reasons: dict[str, str] = {}

    def result(self, job: JobView) -> Allocation:
        placed = self._room.placed(job.job_id)
        before, after = sum(job.placed.values()), sum(placed.values())
        reason = self._reasons.get(job.job_id, "nodes that it was on are gone")
        if before == after and after:
            moved = placed != dict(job.placed)
            reason = "moves to other nodes" if moved else f"stays with {after}"
        return Allocation(placed=placed, reason=reason)

    # --- what must be

    def repair(self) -> None:
        """Take off what a job may not have, and what no longer fits."""
        room = self._room
        for job in self._jobs:
            while room.count(job.job_id) > job.max_trainers:
                room.give_back(job.job_id)
                self._say(job, f"has more than its max of {job.max_trainers}")
            if room.count(job.job_id) < job.min_trainers or room.is_homeless(job.job_id):
                self._stop(job)  # nodes are gone: it starts again
        for node_id in room.crowded():
            while self._clear(node_id):
                pass
        above = {job.job_id for job in self._jobs if room.is_above_limit(job.each)}
        givers = self._heap(
            self._jobs,
            self._loss_key,
            lambda job, n: n > job.min_trainers and job.job_id in above,
        )
        while givers:
            job = self._pop_giver(givers)
            if room.is_above_limit(job.each):
                room.give_back(job.job_id)
                self._say(job, "the cluster is above its load limit")
                self._push(givers, job, self._loss_key, job.min_trainers)

    def _stop(self, job: JobView) -> None:
        for _ in range(self._room.count(job.job_id)):
            self._room.give_back(job.job_id)

    def _clear(self, node_id: str) -> bool:
        """Take a trainer off a node that has too many; False: none, or all are jobs' least."""
        room = self._room
        here = [job for job in self._jobs if room.is_crowding(job.job_id, node_id)]
        free = [job for job in here if not room.needs_home(job.job_id, node_id)]
        above = [job for job in free if room.count(job.job_id) > job.min_trainers]
        for job in sorted(above, key=lambda job: (-room.used(job.user), self._loss_key(job))):
            room.give_back(job.job_id, node_id)
            self._say(job, f"others use {node_id}")
            return True
        for job in sorted(free, key=lambda job: (job.priority, self._loss_key(job))):
            mark = room.mark()
            room.give_back(job.job_id, node_id)
            if room.take(job.job_id):
                self._say(job, f"others use {node_id}")
                return True
            room.undo(mark)
        limited = room.is_above_own_limit(node_id)
        for job in sorted(here, key=lambda job: (job.priority, self._loss_key(job))):
            if (limited and job.stoppable) or not job.runs:
                self._stop(job)
                if limited:
                    self._say(job, f"shared jobs may have fewer slots of {node_id}")
                return True
        return False

    # --- what waits

    def start_waiting(self) -> None:
        """Start what waits, the highest priority first; jobs that run give way down to their least.

        One that waits when the policy's patience since its submission is over lets no later one of
        its priority start, so the room that becomes free is its own in the end. Not one that the
        nodes could not hold as they are, whoever ends: the others would wait for nothing.
        """
        first: JobView | None = None  # for which the others wait
        hopeless: dict[Hashable, int] = {}  # so many trainers of that found no room
        for job in self._waiting():
            if first is not None and job.priority <= first.priority:
                self._say(job, f"waits behind {first.job_id}, which waits for room for longer")
                continue
            key = (job.each, job.priority, job.user, job.nodes, job.home)
            if job.min_trainers < hopeless.get(key, job.min_trainers + 1) and self._start(job):
                continue
            hopeless[key] = min(job.min_trainers, hopeless.get(key, job.min_trainers))
            there = f", the first on {job.home}, which has its state" if job.home else ""
            if job.job_id not in self._reasons:  # else that says why it was stopped just now
                self._say(job, f"waits: no room for its least, {job.min_trainers}{there}")
            waited_s = self._now - job.submitted_at
            if waited_s >= self._policy.patience_s and self._room.could_take(
                job.job_id, job.min_trainers
            ):
                first = job

    def _waiting(self) -> Iterator[JobView]:
        """Yield what waits: the highest priority first, then the user with the fewest slots."""
        waiting: dict[int, _Heaps] = {}
        for job in self._jobs:
            if not self._room.count(job.job_id):
                heaps = waiting.setdefault(job.priority, {})
                key = (self._policy.waiting_key(job),)
                heaps.setdefault(job.user, []).append((key, job.job_id, job))
        for _, heaps in sorted(waiting.items(), reverse=True):
            for heap in heaps.values():
                heapq.heapify(heap)
            while heaps:
                yield self._pop_taker(heaps)

    def _start(self, job: JobView) -> bool:
        """Give a job its least; False, and nothing has changed: that cannot be had."""
        room, mark = self._room, self._room.mark()
        gave, stopped = set[str](), set[str]()
        givers = self._givers_for(job)
        while room.count(job.job_id) < job.min_trainers:
            if room.take(job.job_id):
                continue
            home = room.missing_home(job.job_id)
            other = next(self._givers_for(job, home) if home else givers, None)
            if other is None:
                room.undo(mark)
                return False
            room.give_back(other.job_id, home or None)
            gave.add(other.job_id)
        for other in self._jobs:
            few = room.count(other.job_id) < other.min_trainers
            if other.job_id in gave and (few or room.is_homeless(other.job_id)):
                stopped.add(other.job_id)  # all of it: with fewer it does not run
                self._stop(other)
        for other in self._jobs:
            if other.job_id in stopped:
                self._say(other, f"stopped for {job.job_id}, whose priority is higher")
            elif other.job_id in gave:
                self._say(other, f"gives way to {job.job_id}")
        self._say(job, f"starts with its least, {job.min_trainers}")
        return True

    def _givers_for(self, job: JobView, home: str = "") -> Iterator[JobView]:
        """Yield the job that is to give up a trainer next, for the start of `job`.

        One of higher priority does so only if its user has more than an equal share, and `job` is
        within its own user's.

        Args:
            home: a trainer on that node; "": any.
        """
        room = self._room
        share = room.equal_share()
        missing = job.min_trainers - room.count(job.job_id)
        is_due = room.used(job.user) + missing * job.each.slots <= share
        jobs: Sequence[JobView] = self._jobs
        if home:
            jobs = [other for other in jobs if room.count_on(other.job_id, home)]
        givers = self._heap(
            jobs,
            self._loss_key,
            lambda other, n: (
                n > other.min_trainers
                and not (home and room.needs_home(other.job_id, home))
                and (is_due or other.priority <= job.priority)
            ),
        )
        while givers:
            other = self._pop_giver(givers)
            if other.priority > job.priority and room.used(other.user) <= share:
                continue
            yield other
            self._push(givers, other, self._loss_key, other.min_trainers)
        lower = [other for other in jobs if other.priority < job.priority and other.stoppable]
        for other in sorted(lower, key=lambda each: (each.priority, -each.submitted_at)):
            while self._room.count(other.job_id):
                yield other

    # --- what is free, and what is better elsewhere

    def grow(self) -> None:
        """Give away what is free, one trainer after the other, where it is worth most."""
        takers = self._growing()
        while takers:
            job = self._pop_taker(takers)
            if self._room.take(job.job_id):
                self._say(job, "there is room")
                if self._room.count(job.job_id) < job.max_trainers:
                    self._push(takers, job, self._gain_key)

    def even_out(self) -> None:
        """Move trainers from the users with the most slots to those with fewer.

        A user who gives keeps at least as many as the other one has then, so none comes back. Jobs
        whose trainers have just come or gone are left alone: each change has its cost.
        """
        room = self._room
        if len({job.user for job in self._jobs}) < 2:
            return
        takers, givers = self._growing(SETTLE_S), self._shrinking(SETTLE_S)
        while takers:
            taker, mark = self._pop_taker(takers), room.mark()
            gave: list[JobView] = []
            while not room.take(taker.job_id):
                giver = self._pop_giver(givers) if givers else None
                wanted = room.used(taker.user) + max(taker.each.slots, 1)
                if giver is None or room.used(giver.user) - giver.each.slots < wanted:
                    room.undo(mark)
                    if gave:
                        givers = self._shrinking(SETTLE_S)
                    elif giver is not None:
                        self._push(givers, giver, self._loss_key, giver.min_trainers)
                    break
                room.give_back(giver.job_id)
                gave.append(giver)
                self._push(givers, giver, self._loss_key, giver.min_trainers)
            else:
                for giver in gave:
                    self._say(giver, f"gives way to {taker.job_id}, whose user has fewer slots")
                self._say(taker, "its user has fewer slots than others")
                if room.count(taker.job_id) < taker.max_trainers:
                    self._push(takers, taker, self._gain_key)

    def _growing(self, settled_s: float = 0.0) -> _Heaps:
        """Return the jobs that may have more; none that has had trainers for a shorter time."""
        settled = [job for job in self._jobs if self._is_settled(job, settled_s)]
        return self._heap(settled, self._gain_key, lambda job, n: 0 < n < job.max_trainers)

    def _shrinking(self, settled_s: float) -> _Heaps:
        settled = [job for job in self._jobs if self._is_settled(job, settled_s)]
        return self._heap(settled, self._loss_key, lambda job, n: n > job.min_trainers)

    def _is_settled(self, job: JobView, settled_s: float) -> bool:
        return not job.placed or self._now - job.changed_at >= settled_s

    def exchange(self) -> None:
        """Move a user's trainers from where they are worth least to where they are worth much more.

        None goes to a job of lower priority.
        """
        if self._policy.margin is None:
            return
        movable = [
            job
            for job in self._jobs
            if (count := self._room.count(job.job_id))
            and self._policy.may_move(job, count, self._now)
        ]
        for user, priority in sorted({(job.user, -job.priority) for job in movable}):
            own = [job for job in movable if job.user == user]
            self._exchange(
                [job for job in own if job.priority == -priority],
                [job for job in own if job.priority <= -priority],
                self._policy.margin,
            )

    def _exchange(self, takers_: list[JobView], givers_: list[JobView], margin: float) -> None:
        room, policy = self._room, self._policy
        takers = self._heap(takers_, self._gain_key, lambda job, n: n < job.max_trainers)
        givers = self._heap(givers_, self._own_loss_key, lambda job, n: n > job.min_trainers)
        gave: set[str] = set()
        took: set[str] = set()
        while takers and givers:
            taker, giver = self._pop_taker(takers), self._pop_giver(givers)
            if taker.job_id in gave:
                self._push(givers, giver, self._own_loss_key)
                continue
            if giver.job_id in took:
                self._push(takers, taker, self._gain_key)
                continue
            loss = policy.loss(giver, room.count(giver.job_id))
            if policy.gain(taker, room.count(taker.job_id)) <= margin * loss:
                return
            mark = room.mark()
            room.give_back(giver.job_id)
            if not room.take(taker.job_id):  # what was freed is not what it needs
                room.undo(mark)
                self._push(givers, giver, self._own_loss_key)
                continue
            gave.add(giver.job_id)
            took.add(taker.job_id)
            self._say(giver, f"a trainer is worth more to {taker.job_id}")
            self._say(taker, f"a trainer is worth more here than to {giver.job_id}")
            if room.count(taker.job_id) < taker.max_trainers:
                self._push(takers, taker, self._gain_key)
            self._push(givers, giver, self._own_loss_key, giver.min_trainers)

    # --- heaps of jobs

    def _heap(
        self,
        jobs: Iterable[JobView],
        key: Callable[[JobView], tuple[float, ...]],
        wanted: Callable[[JobView, int], bool],
    ) -> _Heaps:
        found: _Heaps = {}
        for job in jobs:
            if wanted(job, self._room.count(job.job_id)):
                found.setdefault(job.user, []).append((key(job), job.job_id, job))
        for heap in found.values():
            heapq.heapify(heap)
        return found

    def _pop_taker(self, heaps: _Heaps) -> JobView:
        """Take out the first job of the user with the fewest slots; of equals, the first of all."""
        return self._pop(
            heaps, min(heaps, key=lambda user: (self._room.used(user), heaps[user][0]))
        )

    def _pop_giver(self, heaps: _Heaps) -> JobView:
        """Take out the first job of the user with the most slots; of equals, the first of all."""
        return self._pop(
            heaps, min(heaps, key=lambda user: (-self._room.used(user), heaps[user][0]))
        )

    @staticmethod
    def _pop(heaps: _Heaps, user: str) -> JobView:
        job = heapq.heappop(heaps[user])[2]
        if not heaps[user]:
            del heaps[user]
        return job

    def _push(
        self,
        heaps: _Heaps,
        job: JobView,
        key: Callable[[JobView], tuple[float, ...]],
        above: int = 0,
    ) -> None:
        if self._room.count(job.job_id) > above:
            heapq.heappush(heaps.setdefault(job.user, []), (key(job), job.job_id, job))

    def _gain_key(self, job: JobView) -> tuple[float, ...]:
        """Sort the job that gains most first; of equals, the smaller, then the older one."""
        gain = self._policy.gain(job, self._room.count(job.job_id))
        return (-job.priority, -gain, *job.each, job.submitted_at)

    def _loss_key(self, job: JobView) -> tuple[float, ...]:
        """Sort the job that loses least first; of equals, the larger, then the newer one."""
        loss = self._policy.loss(job, self._room.count(job.job_id))
        return (job.priority, loss, *(-amount for amount in job.each), -job.submitted_at)

    def _own_loss_key(self, job: JobView) -> tuple[float, ...]:
        return self._loss_key(job)[1:]

    def _say(self, job: JobView, reason: str) -> None:
        self._reasons[job.job_id] = reason
