"""Compute pauses and redone steps from the steps that trainers have stamped. Pure.

Every trainer writes a line for each step that it has made: who it is, its rank, the world size,
the step's number and when it ended, by the clock that all processes of a machine share. From that
alone follow pauses, steps that were made again, and gaps, whatever launcher started the trainers.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """A trainer has made a step."""

    who: str  # unique to a process and the stage that it is in; begins with its process id
    rank: int
    world: int
    step: int  # steps of the training so far, this one included
    at: float  # seconds on the machine's monotonic clock
    stood_s: float = 0.0  # how long this trainer has stood still for snapshots until now

    @property
    def pid(self) -> int:
        return int(self.who.partition(".")[0])

    def line(self) -> str:
        return f"{self.who} {self.rank} {self.world} {self.step} {self.at:.6f} {self.stood_s:.6f}\n"


def parse(text: str) -> list[Stamp]:
    """Return the stamps of complete lines; what follows the last newline is left out."""
    stamps = []
    for line in text[: text.rfind("\n") + 1].splitlines():
        who, rank, world, step, at, stood_s = line.split()
        stamps.append(
            Stamp(
                who=who,
                rank=int(rank),
                world=int(world),
                step=int(step),
                at=float(at),
                stood_s=float(stood_s),
            )
        )
    return stamps


@dataclass(frozen=True, slots=True)
class Generation:
    """Trainers that trained together: one for each rank, as far as they made a step."""

    members: tuple[tuple[Stamp, ...], ...]  # by rank; each in the order of steps, none empty

    @property
    def world(self) -> int:
        return self.members[0][0].world

    @property
    def is_complete(self) -> bool:
        """Every rank has made a step."""
        return len(self.members) == self.world

    @property
    def first_step(self) -> int:
        return self.members[0][0].step

    @property
    def last_step(self) -> int:
        return max(member[-1].step for member in self.members)

    @property
    def done_step(self) -> int:
        """The last step that all ranks have made, 0 while one has made none."""
        return min(member[-1].step for member in self.members) if self.is_complete else 0

    @property
    def began_at(self) -> float:
        """When the slowest rank had made the first step."""
        return max(member[0].at for member in self.members)

    @property
    def ended_at(self) -> float:
        """When the slowest rank had made its last step."""
        return max(member[-1].at for member in self.members)

    @property
    def step_s(self) -> float | None:
        """Return how long a step takes, as the median; None: there are too few."""
        stamps = self.members[0]
        lengths = [after.at - before.at for before, after in pairwise(stamps)]
        return statistics.median(lengths) if lengths else None

    def reached(self, step: int) -> float | None:
        """Return when all ranks had made `step` steps of the training; None: they have not."""
        if not self.is_complete:
            return None
        ends = [next((s.at for s in member if s.step >= step), None) for member in self.members]
        known = [end for end in ends if end is not None]
        return max(known) if len(known) == len(ends) else None


def generations(stamps: Iterable[Stamp]) -> list[Generation]:
    """Return who trained together, in order of time.

    The gradients of a step need all ranks: so nobody makes its first step after another of the
    same generation has made its second, all begin with the same step, and each rank is there once.
    """
    by_who: dict[str, list[Stamp]] = {}
    for stamp in stamps:
        by_who.setdefault(stamp.who, []).append(stamp)
    members = sorted((sorted(mine, key=_order) for mine in by_who.values()), key=_first_at)
    groups: list[list[list[Stamp]]] = []
    for member in members:
        if groups and _belongs(member, groups[-1]):
            groups[-1].append(member)
        else:
            groups.append([member])
    return [
        Generation(tuple(tuple(member) for member in sorted(group, key=_rank))) for group in groups
    ]


def _order(stamp: Stamp) -> tuple[int, float]:
    return stamp.step, stamp.at


def _first_at(member: Sequence[Stamp]) -> float:
    return member[0].at


def _rank(member: Sequence[Stamp]) -> int:
    return member[0].rank


def _belongs(member: Sequence[Stamp], group: Sequence[Sequence[Stamp]]) -> bool:
    first = member[0]
    return all(
        other[0].world == first.world
        and other[0].rank != first.rank
        and other[0].step == first.step
        and (len(other) < 2 or first.at <= other[1].at)
        for other in group
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """From one generation to another."""

    old_world: int
    new_world: int
    pause_s: float  # last old step's end to first new step's end, each of the slowest rank
    redone: int  # steps that the new generation made again
    step_s: float | None  # of the new generation, median; None: it made one step


def change(old: Generation, new: Generation) -> Change:
    return Change(
        old_world=old.world,
        new_world=new.world,
        pause_s=new.began_at - old.ended_at,
        redone=max(0, old.last_step - new.first_step + 1),
        step_s=new.step_s,
    )


def steps_redone(order: Sequence[Generation]) -> int:
    """Return how many steps were made more than once, over all generations."""
    return sum(change(old, new).redone for old, new in pairwise(order))


def longest_gap(stamps: Iterable[Stamp], since: float, until: float) -> float:
    """Return the longest time between `since` and `until` in which no rank ended a step."""
    moments = sorted(stamp.at for stamp in stamps if since <= stamp.at <= until)
    ends = [since, *moments, until]
    return max(after - before for before, after in pairwise(ends))


def stall_share(generation: Generation) -> float | None:
    """Return the share of its time for which the rank that stood most stood; None: one step."""
    shares = [
        (member[-1].stood_s - member[0].stood_s) / (member[-1].at - member[0].at)
        for member in generation.members
        if member[-1].at > member[0].at
    ]
    return max(shares, default=None)
