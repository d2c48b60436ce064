"""What the control groups of this process allow: a container's share of cores and memory.

The machine's own numbers (`os.cpu_count`, `/proc/meminfo`) know nothing of them. Reads cgroup v2
and v1, from this process' group up to the topmost that can be seen here, as each of them binds.
`python -m pod_runtime.cgroups` prints how many cores there are to use, for shell scripts.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

_PROC = Path("/proc/self")


@dataclass(frozen=True, slots=True, kw_only=True)
class OomKills:
    """How many processes the kernel's OOM killer has killed so far."""

    count: int
    of: str  # whose they were, in words


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """A group's limit, and what is left of it, in bytes."""

    total: int
    available: int  # page cache that can be dropped counts as available


def usable_cores(proc: Path = _PROC) -> int:
    """Return how many cores this process can keep busy, at least 1; a quota of 2.5 is 2."""
    cores = len(os.sched_getaffinity(0))
    quota = cpu_quota(proc)
    return cores if quota is None else max(1, min(cores, int(quota)))


def cpu_quota(proc: Path = _PROC) -> float | None:
    """Return the least quota of all groups, in cores; None: there is none."""
    return min((quota for quota, _ in _quotas(proc)), default=None)


def cpu_used_s(proc: Path = _PROC) -> float | None:
    """Return the processor time of the group with the least quota; None: it has none to show."""
    least = min(_quotas(proc), default=None)
    if least is None:
        return None
    for line in _text(least[1] / "cpu.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == "usage_usec":
            return int(value) / 1e6
    used = _text(least[1] / "cpuacct.usage")  # v1, where both controllers are mounted as one
    return int(used) / 1e9 if used else None


def _quotas(proc: Path) -> Iterator[tuple[float, Path]]:
    for folder in _groups("cpu", proc):
        v2 = _text(folder / "cpu.max").split()
        quota, period = v2 or (
            _text(folder / "cpu.cfs_quota_us"),
            _text(folder / "cpu.cfs_period_us"),
        )
        if quota not in ("", "max", "-1"):
            yield int(quota) / int(period), folder


def memory_limit(proc: Path = _PROC) -> MemoryLimit | None:
    """Return the least limit, and the least that a group has left; None: there is no limit."""
    totals, available = [], []
    for folder in _groups("memory", proc):
        is_v2 = (folder / "memory.max").exists()
        limit = _text(folder / ("memory.max" if is_v2 else "memory.limit_in_bytes"))
        if limit in ("", "max") or int(limit) >= 1 << 60:  # v1 says "none" by a number
            continue
        used = _text(folder / ("memory.current" if is_v2 else "memory.usage_in_bytes"))
        stat = dict(line.split() for line in _text(folder / "memory.stat").splitlines())
        names = ("inactive_file", "active_file")
        cache = sum(int(stat.get(name if is_v2 else f"total_{name}", 0)) for name in names)
        totals.append(int(limit))
        available.append(max(0, int(limit) - int(used or 0) + cache))
    if not totals:
        return None
    return MemoryLimit(total=min(totals), available=min(available))


def available_memory(proc: Path = _PROC) -> int:
    """Return how many bytes more can be used before the kernel swaps, or kills a process for it."""
    limit, left = memory_limit(proc), _kilobytes(proc.parent / "meminfo", "MemAvailable")
    return left if limit is None else min(left, limit.available)


def peak_memory(proc: Path = _PROC) -> int:
    """Return how many bytes this process once had in memory."""
    return _kilobytes(proc / "status", "VmHWM")


def freed_since_peak(proc: Path = _PROC) -> int:
    """Return how many bytes less this process has in memory than it once had."""
    return peak_memory(proc) - _kilobytes(proc / "status", "VmRSS")


def oom_kills(proc: Path = _PROC) -> OomKills | None:
    """Return what the kernel has killed for lack of memory. None: nothing here counts that.

    The kernel counts before it kills, so a parent that sees a death sees its count. What this
    process' group has no file for is counted for the whole machine.
    """
    for folder in _groups("memory", proc):
        for name in ("memory.events", "memory.oom_control"):  # v2, v1
            count = _counter(folder / name)
            if count is not None:
                return OomKills(count=count, of="its control group")
    count = _counter(proc.parent / "vmstat")
    return None if count is None else OomKills(count=count, of="this machine")


class OomWatch:
    """Tells of which deaths the kernel's OOM killer was the cause, by its count.

    Each of its kills explains one death, which comes soon after it: others' processes may be
    counted as well.
    """

    SOON_S: ClassVar[float] = 60.0  # from a kill; to free much memory takes some seconds

    def __init__(self, proc: Path = _PROC) -> None:
        self._proc = proc
        self._known = oom_kills(proc)
        self._seen_at: list[float] = []  # kills that no death was explained by

    def look(self, now: float) -> None:
        """Notice new kills. Call it every few seconds.

        Args:
            now: seconds, of a clock that never goes back.
        """
        before, self._known = self._known, oom_kills(self._proc)
        if before is not None and self._known is not None:
            more = max(0, self._known.count - before.count)
            self._seen_at += [now] * min(more, 1000)
        self._seen_at = [at for at in self._seen_at if now < at + self.SOON_S]

    def explain(self, now: float) -> str | None:
        """Return in words that a death just now was a kill; "": it was not; None: nobody knows."""
        self.look(now)
        if self._known is None:
            return None
        if not self._seen_at:
            return ""
        del self._seen_at[0]
        return f"oom_kill of {self._known.of} has risen to {self._known.count}"


def _kilobytes(path: Path, name: str) -> int:
    """Return the value of a line "NAME:  123 kB" in bytes."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", _text(path), re.MULTILINE)
    return int(found[1]) << 10 if found is not None else 0


def _counter(path: Path) -> int | None:
    found = re.search(r"^oom_kill (\d+)$", _text(path), re.MULTILINE)
    return None if found is None else int(found[1])


def _groups(controller: str, proc: Path) -> Iterator[Path]:
    """Yield the folders of the groups that bind this process, its own first."""
    own = {"": ""}  # this process' group by controller; "" is cgroup v2
    for line in _text(proc / "cgroup").splitlines():
        _, names, path = line.split(":", 2)
        own |= dict.fromkeys(names.split(","), path)
    for line in _text(proc / "mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        root, mounted_at = before.split()[3:5]
        kind, _, options = after.split(" ", 2)  # what is mounted may have an empty name
        if kind == "cgroup2":
            path = own[""]
        elif kind == "cgroup" and controller in options.split(","):
            path = own.get(controller, "")
        else:
            continue
        # A container may see its group as the root, under a path of the host that is not there.
        root, path = root.rstrip("/"), path.rstrip("/")
        is_below = path == root or path.startswith(f"{root}/")
        top = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), mounted_at))
        folder = top / path.removeprefix(root).lstrip("/") if is_below else top
        while True:
            yield folder
            if folder == top:
                break
            folder = folder.parent


def _text(path: Path) -> str:
    """Return a file's text; "" where it is not there or may not be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


if __name__ == "__main__":
    print(usable_cores())
