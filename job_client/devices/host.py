"""What this machine has of processor cores and memory, and what others use of that."""

import math
import os
from collections.abc import Collection, Iterable
from typing import NamedTuple

import psutil

from pod_runtime import cgroups, processes
from pod_runtime.processes import Process


class ForeignLoad(NamedTuple):
    """What processes use that are not EDL's; None: not known."""

    cpu_milli: int | None = None  # thousandths of a core, since it was asked last
    memory_mb: int | None = None  # 10**6 bytes


NOT_KNOWN = ForeignLoad()


class Host:
    """Cores and memory of this machine, or of the container that this process is in."""

    def __init__(self) -> None:
        limit = cgroups.memory_limit()
        total = psutil.virtual_memory().total
        self._quota = cgroups.cpu_quota()  # None: no container's
        self._cores = sorted(os.sched_getaffinity(0))
        self._before: tuple[float, float, dict[tuple[int, int], float]] | None = None
        cores = min(len(self._cores), self._quota or math.inf)
        self.cpu_milli = int(1000 * cores)
        self._memory = int(total if limit is None else min(total, limit.total))
        self.memory_mb = self._memory // 10**6

    def foreign(
        self, ours: Collection[Process], now: float, *, shims: Collection[int] = ()
    ) -> ForeignLoad:
        """Return what others use.

        Memory that several of our processes share counts for each of them, so that theirs is
        never taken for that of others.

        Args:
            ours: all processes that do not count, as they are now.
            now: seconds, of a clock that never goes back.
            shims: pids of those of `ours` that hold states for others.
        """
        mine = sum(each.rss_bytes for each in ours) + _held_only(shims, ours)
        memory_mb = max(0, self.used_memory() - mine) // 10**6
        busy_s = self.busy_s()
        if busy_s is None:
            return ForeignLoad(None, memory_mb)
        used_s = {(each.pid, each.start_time): each.cpu_s for each in ours}
        before, self._before = self._before, (now, busy_s, used_s)
        if before is None or now <= before[0]:
            return ForeignLoad(None, memory_mb)
        # One that has begun since then has used all of its time since then.
        ours_s = sum(spent_s - before[2].get(key, 0.0) for key, spent_s in used_s.items())
        cores = (busy_s - before[1] - ours_s) / (now - before[0])
        return ForeignLoad(min(max(0, round(1000 * cores)), self.cpu_milli), memory_mb)

    def busy_s(self) -> float | None:
        """Return for how long the cores that we may use have worked; None: not known."""
        if self._quota is not None:  # a container: what its group uses
            return cgroups.cpu_used_s()
        busy = 0.0
        for index, core in enumerate(psutil.cpu_times(percpu=True)):
            if index in self._cores:
                busy += sum(core) - core.idle - core.iowait - core.guest - core.guest_nice
        return busy

    def used_memory(self) -> int:
        """Return how many bytes are in use."""
        return self._memory - cgroups.available_memory()


def _held_only(shims: Iterable[int], ours: Iterable[Process]) -> int:
    """Return how many bytes shims hold that count for no process, as no trainer maps them."""
    held: dict[tuple[int, int], int] = {}  # two shims may hold one state
    for pid in shims:
        held |= processes.memory_files(pid)
    total = sum(held.values())
    if not total:
        return 0
    return max(0, total - sum(processes.shared_bytes(each.pid) for each in ours))


def trees(roots: Iterable[int], table: dict[int, Process]) -> list[Process]:
    """Return the processes of `table` that are in `roots` or descend from one, once each."""
    found: dict[int, Process] = {}
    for root in roots:
        if root in table:
            found[root] = table[root]
            found |= {each.pid: each for each in processes.descendants(root, table)}
    return list(found.values())
