"""What nodes have and trainers need, and a ledger of what is free. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Resources(NamedTuple):
    """An amount of each kind."""

    slots: int = 0  # GPUs, or CPU slots where a node has no GPU
    cpu_milli: int = 0  # thousandths of a processor core
    memory_mb: int = 0


NOTHING = Resources()
_KINDS = range(len(NOTHING))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRoom:
    """A node that can run trainers."""

    node_id: str
    capacity: Resources
    foreign: Resources = NOTHING  # what others use of it: web traffic, a user's own programs
    lent: Resources = NOTHING  # of that, what jobs have that share, and keep it for now
    limit: int | None = None  # of slots, also where jobs need more; `foreign` holds the rest
    closed: bool = False  # what a job gives up there no other one can have


class Need(NamedTuple):
    """One job, as the ledger sees it."""

    job_id: str
    each: Resources  # of one trainer
    placed: Mapping[str, int]  # node -> trainers there now
    user: str = ""
    nodes: frozenset[str] | None = None  # on which it can run; None: on all
    home: str = ""  # on which its first trainer has to be; "": any
    begins: bool = False  # it has not begun, so one trainer has to stay at home


@dataclass(slots=True)
class _Node:
    node_id: str
    free: list[int]  # may be below 0: others have taken what jobs use
    most: list[int]  # that is free when no job that shares has anything
    limit: int | None
    closed: bool


@dataclass(slots=True)
class _Held:
    each: Resources
    before: Mapping[str, int]
    user: str
    nodes: frozenset[str] | None
    home: str
    begins: bool
    now: dict[str, int] = field(default_factory=dict)
    count: int = 0


class Room:
    """What is free on each node while an allocation is worked out. Any part can be undone."""

    def __init__(
        self, nodes: Iterable[NodeRoom], needs: Iterable[Need], max_load: float = 1.0
    ) -> None:
        """Take the trainers that are placed now; those on nodes that are gone are left out.

        Args:
            max_load: the part of each resource of the whole cluster that may be used.
        """
        self._nodes: list[_Node] = []
        total, used, lent = ([0] * len(_KINDS) for _ in range(3))
        for node in nodes:
            free = [node.capacity[k] - node.foreign[k] for k in _KINDS]
            most = [free[k] + node.lent[k] for k in _KINDS]
            self._nodes.append(_Node(node.node_id, free, most, node.limit, node.closed))
            for k in _KINDS:
                total[k] += node.capacity[k]
                used[k] += node.foreign[k]
                lent[k] += node.lent[k]
        self._index = {node.node_id: i for i, node in enumerate(self._nodes)}
        self._left = [int(total[k] * max_load) - used[k] for k in _KINDS]  # below the limit
        self._most = [self._left[k] + lent[k] for k in _KINDS]  # ... when no job has anything
        self._limit = int(total[0] * max_load) - used[0]
        self._used: dict[str, int] = {}  # user -> slots
        self._held: dict[str, _Held] = {}
        # No node before this one has room for so much, of those that a job can run on.
        self._first: dict[tuple[Resources, frozenset[str] | None], int] = {}
        self._journal: list[tuple[str, str, int]] = []
        for need in needs:
            self._held[need.job_id] = _Held(
                need.each, need.placed, need.user, need.nodes, need.home, need.begins
            )
            self._used.setdefault(need.user, 0)
            for node_id, count in need.placed.items():
                if node_id in self._index and count:
                    self._move(need.job_id, node_id, count)
        self._journal.clear()

    def count(self, job_id: str) -> int:
        """Return how many trainers the job has."""
        return self._held[job_id].count

    def used(self, user: str) -> int:
        """Return how many slots the user's jobs have."""
        return self._used[user]

    def equal_share(self) -> float:
        """Return how many slots each user would have if all had as many."""
        return max(self._limit, 0) / max(len(self._used), 1)

    def missing_home(self, job_id: str) -> str:
        """Return the node on which the job's next trainer has to be; "": any will do."""
        held = self._held[job_id]
        return "" if held.count else held.home

    def needs_home(self, job_id: str, node_id: str) -> bool:
        """Say whether the job cannot begin without its only trainer on that node."""
        held = self._held[job_id]
        return held.begins and held.home == node_id and held.now.get(node_id) == 1

    def is_homeless(self, job_id: str) -> bool:
        """Say whether the job cannot begin where its trainers are."""
        held = self._held[job_id]
        return held.begins and bool(held.home and held.now) and held.home not in held.now

    def count_on(self, job_id: str, node_id: str) -> int:
        """Return how many trainers of the job are on a node."""
        return self._held[job_id].now.get(node_id, 0)

    def placed(self, job_id: str) -> dict[str, int]:
        """Return node -> trainers of the job."""
        return dict(self._held[job_id].now)

    def crowded(self) -> list[str]:
        """Return the nodes on which more is used than they have."""
        return [node.node_id for node in self._nodes if min(node.free) < 0]

    def is_crowding(self, job_id: str, node_id: str) -> bool:
        """Say whether the job runs there and uses something of which there is too little."""
        held = self._held[job_id]
        free = self._nodes[self._index[node_id]].free
        return node_id in held.now and any(free[k] < 0 and held.each[k] > 0 for k in _KINDS)

    def is_above_own_limit(self, node_id: str) -> bool:
        """Say whether jobs have more slots of a node than its limit allows."""
        limit = self._nodes[self._index[node_id]].limit
        return limit is not None and limit < sum(
            held.now.get(node_id, 0) * held.each.slots for held in self._held.values()
        )

    def is_above_limit(self, each: Resources) -> bool:
        """Say whether more than the limit is used of something that `each` has a part in."""
        return any(self._left[k] < 0 and each[k] > 0 for k in _KINDS)

    def take(self, job_id: str) -> bool:
        """Place one more trainer, where the job had one before if that can be; False: no room."""
        held = self._held[job_id]
        each = held.each
        if any(each[k] > max(self._left[k], 0) for k in _KINDS if each[k]):
            return False
        if held.home and not held.count:
            if self._fits(held, held.home):
                self._move(job_id, held.home, 1)
                return True
            return False
        for node_id, before in held.before.items():
            if held.now.get(node_id, 0) < before and self._fits(held, node_id):
                self._move(job_id, node_id, 1)
                return True
        key = (each, held.nodes)
        for i in range(self._first.get(key, 0), len(self._nodes)):
            node = self._nodes[i]
            if node.closed or (held.nodes is not None and node.node_id not in held.nodes):
                continue
            if all(each[k] <= node.free[k] for k in _KINDS if each[k]):
                self._first[key] = i
                self._move(job_id, node.node_id, 1)
                return True
        self._first[key] = len(self._nodes)
        return False

    def could_take(self, job_id: str, count: int) -> bool:
        """Say whether there were room for so many trainers of a job if no other job had any."""
        held = self._held[job_id]
        needed = [k for k in _KINDS if held.each[k]]
        if any(count * held.each[k] > self._most[k] for k in needed):
            return False
        fits = {
            node.node_id: max(0, min((node.most[k] // held.each[k] for k in needed), default=count))
            for node in self._nodes
            if not node.closed and (held.nodes is None or node.node_id in held.nodes)
        }
        return sum(fits.values()) >= count and (not held.home or fits.get(held.home, 0) > 0)

    def give_back(self, job_id: str, node_id: str | None = None) -> None:
        """Take one trainer off.

        Args:
            node_id: from there; None: from the node with the fewest of the job, so that those that
                stay are close together, and of these from the last one; from home last.
        """
        now = self._held[job_id].now
        if node_id is None:
            node_id = min(
                now,
                key=lambda each: (self.needs_home(job_id, each), now[each], -self._index[each]),
            )
        self._move(job_id, node_id, -1)

    def mark(self) -> int:
        """Return a mark for `undo`."""
        return len(self._journal)

    def undo(self, mark: int) -> None:
        """Undo what has happened since the mark."""
        while len(self._journal) > mark:
            job_id, node_id, count = self._journal.pop()
            self._move(job_id, node_id, -count)
            self._journal.pop()

    def _fits(self, held: _Held, node_id: str) -> bool:
        index, each = self._index.get(node_id), held.each
        if index is None:
            return False
        node = self._nodes[index]
        if node.closed and held.now.get(node_id, 0) >= held.before.get(node_id, 0):
            return False
        return all(each[k] <= node.free[k] for k in _KINDS if each[k])

    def _move(self, job_id: str, node_id: str, count: int) -> None:
        held, index = self._held[job_id], self._index[node_id]
        free, left = self._nodes[index].free, self._left
        for k in _KINDS:
            amount = held.each[k] * count
            free[k] -= amount
            left[k] -= amount
        held.count += count
        self._used[held.user] += held.each.slots * count
        held.now[node_id] = held.now.get(node_id, 0) + count
        if not held.now[node_id]:
            del held.now[node_id]
        if count < 0:
            for key, first in self._first.items():
                if first > index:
                    self._first[key] = index
        self._journal.append((job_id, node_id, count))
