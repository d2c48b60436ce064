"""Keep the measurements of resize.py and recovery.py, and show them."""

import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measurement of a row."""

    row: str
    turn: int  # which of the rounds
    values: dict[str, float] = field(default_factory=dict)  # seconds, or counts
    failed: str = ""  # why there are no values
    load: float = 0.0  # the machine's load average then: the benchmark's own and others'


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """What a figure should be; `value` is what was measured."""

    what: str
    aim: str
    value: float | None  # None: not measured
    shown: str
    is_met: bool

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        return "reached" if self.is_met else "missed"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "-"


def at_most(what: str, values: Sequence[float], limit: float, unit: str = "ms") -> Aim:
    """Return the aim that the median of `values` is no more than `limit`, both in seconds."""
    value = statistics.median(values) if values else None
    scale = {"ms": 1e3, "s": 1.0, "%": 100.0}[unit]
    return Aim(
        what=what,
        aim=f"at most {limit * scale:g} {unit}",
        value=value,
        shown="-" if value is None else f"{value * scale:.3g} {unit}",
        is_met=value is not None and value <= limit,
    )


def count_at_most(what: str, values: Sequence[float], limit: int) -> Aim:
    """Return the aim that none of these counts is above `limit`."""
    value = max(values, default=None)
    return Aim(
        what=what,
        aim="0" if limit == 0 else f"at most {limit}",
        value=value,
        shown="-" if value is None else f"{value:g}, the most of {len(values)}",
        is_met=value is not None and value <= limit,
    )


class Record:
    """The samples of a run; kept in a file, from which a later run may go on."""

    def __init__(self, path: Path | None, *, resume: bool, about: Mapping[str, object]) -> None:
        """`path`: None keeps them in memory alone."""
        self._path = path
        self._about = dict(about) | {
            "cores": os.cpu_count(),
            "machine": platform.machine(),
            "versions": {"python": platform.python_version(), "paddle": _version("paddlepaddle")},
            "began": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        self.samples: list[Sample] = []
        if resume and path is not None and path.exists():
            told = json.loads(path.read_text())
            self.samples = [Sample(**each) for each in told["samples"]]
            self._about["began"] = told["about"]["began"]

    def has(self, row: str, turn: int) -> bool:
        return any(sample.row == row and sample.turn == turn for sample in self.samples)

    def add(self, sample: Sample) -> None:
        self.samples.append(sample)
        self.save()

    def save(self, aims: Iterable[Aim] = ()) -> None:
        if self._path is None:
            return
        told = {
            "about": self._about,
            "samples": [asdict(sample) for sample in self.samples],
            "aims": [asdict(aim) | {"verdict": aim.verdict} for aim in aims],
        }
        new = self._path.with_name(self._path.name + ".new")
        new.write_text(json.dumps(told, indent=1))
        new.replace(self._path)  # whenever this is killed, one of the two is whole

    def values(self, row: str, name: str) -> list[float]:
        """Return that value of all samples of a row that have it."""
        return [s.values[name] for s in self.samples if s.row == row and name in s.values]

    def failures(self, row: str) -> list[str]:
        return [s.failed for s in self.samples if s.row == row and s.failed]

    def load(self) -> str:
        """Return the load averages under which all this was measured."""
        loads = [sample.load for sample in self.samples]
        if not loads:
            return "-"
        return f"{statistics.median(loads):.1f} ({min(loads):.1f} to {max(loads):.1f})"


def spread(values: Sequence[float], scale: float = 1.0, digits: int = 3) -> str:
    """Return the median and the range of what was measured."""
    if not values:
        return "-"
    low, middle, high = (scale * f(values) for f in (min, statistics.median, max))
    if len(values) == 1:
        return _number(middle, digits)
    return f"{_number(middle, digits)} ({_number(low, digits)}-{_number(high, digits)})"


def _number(value: float, digits: int) -> str:
    """Return `value` with that many digits that count, never as a power of ten."""
    whole = len(str(int(abs(value))))
    return f"{value:.{max(0, digits - whole)}f}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return lines with aligned columns; the first one is words, the others are numbers."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = []
    for row in [head, *rows]:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def aims_table(aims: Sequence[Aim]) -> str:
    rows = [(aim.what, aim.aim, aim.shown, aim.verdict) for aim in aims]
    return table(("aim", "", "measured", ""), rows)


def choose(rows: Sequence[str], only: str | None) -> list[str]:
    """Return the rows that `only` names; a word that is no row stands for all that begin so.

    Raises:
        ValueError: a word names none.
    """
    if only is None:
        return list(rows)
    chosen: set[str] = set()
    for word in (word.strip() for word in only.split(",")):
        named = {word} & set(rows) or {row for row in rows if word and row.startswith(word)}
        if not named:
            raise ValueError(f"--only: {word!r} begins no row; rows: {', '.join(rows)}")
        chosen |= named
    return [row for row in rows if row in chosen]


def duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def load_now() -> float:
    return os.getloadavg()[0]
