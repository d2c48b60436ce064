"""Measure distill_reader against the original (paddle-edl 0.3.1) in the same run.

    python benchmarks/distill.py --json FILE [--quick] [--only ROW[,ROW...]] [--original DIR]

Rows: 1x28x28-1, -16, -64, 3x224x224-1, -16, -64 (samples per second, two trivial teachers as
processes, by the size of the student's batch), grpc-1x28x28-64, grpc-3x224x224-16 (the same by the
Open Inference Protocol), busy (teachers that need 20 ms per 16 images), student (a small training
with Paddle), faults. A word such as `grpc` stands for all rows that begin so.

Ours are `python -m distill_reader.serve` and DistillReader with their defaults, and reader and
teachers find out by themselves how to talk (on one host: shared memory). The original's reader is
the package from PyPI, installed in a folder of its own (or found in --original DIR). As Paddle
Serving cannot be installed any more, it talks to teachers that answer by a plain TCP socket, which
is cheaper than its own client was. Both sides run in turn, several times; shown are medians, and
how much of the machine others used meanwhile. Answers are compared with what was asked.
"""

import argparse
import contextlib
import json
import logging
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder is no package

from benchmarks.distillation import faults as faults
from benchmarks.distillation.backends import SLOW_S
from benchmarks.distillation.processes import (
    SHAPES,
    Teacher,
    Times,
    our_teachers,
    raw_teachers,
    read,
    run_child,
)
from benchmarks.harness import machine_used

ORIGINAL = "paddle-edl==0.3.1"
# Shape and batch -> how many times the original's samples per second is the aim.
RATIOS = {
    (SHAPES[0], 1): 3.0,
    (SHAPES[0], 16): 2.8,
    (SHAPES[0], 64): 5.8,
    (SHAPES[1], 1): 2.3,
    (SHAPES[1], 16): 5.4,
    (SHAPES[1], 64): 5.6,
}
GRPC_RATIOS = {(SHAPES[0], 64): 2.0, (SHAPES[1], 16): 2.0}
ROWS = (
    *(f"{shape}-{batch}" for shape, batch in RATIOS),
    *(f"grpc-{shape}-{batch}" for shape, batch in GRPC_RATIOS),
    "busy",
    "student",
    "faults",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the table."""

    name: str
    ours: str
    original: str = "-"
    aim: str
    is_met: bool | None  # None: the original was not measured
    details: dict[str, object] = field(default_factory=dict)


class Bench:
    """The rows, measured one after the other."""

    def __init__(
        self, rows: Sequence[str], folder: Path, original: Path | None, quick: bool
    ) -> None:
        self._rows = rows
        self._folder = folder
        self._original = original  # None: cannot be had
        self._quick = quick
        self._repeats = 1 if quick else 4
        self._times = Times(warm_s=0.3, seconds=0.7) if quick else Times(warm_s=0.5, seconds=1.5)

    def run(self) -> Iterator[Row]:
        cases = [case for case in RATIOS if any(name in self._rows for name in _names(case))]
        if cases:
            with self._both(0.0, "trivial") as (ours, theirs):
                for case in cases:
                    yield from self._throughput(case, ours, theirs)
        if "busy" in self._rows:
            with self._both(SLOW_S, "slow") as (ours, theirs):
                yield self._busy(ours, theirs)
        if "student" in self._rows:
            yield self._student()
        if "faults" in self._rows:
            yield from self._faults()

    @contextlib.contextmanager
    def _both(self, wait_s: float, backend: str) -> Iterator[tuple[list[Teacher], list[Teacher]]]:
        with (
            our_teachers(backend, self._folder) as ours,
            raw_teachers(wait_s, self._folder) as theirs,
        ):
            yield ours, theirs

    # --- samples per second

    def _throughput(
        self, case: tuple[str, int], ours: list[Teacher], theirs: list[Teacher]
    ) -> Iterator[Row]:
        """Rows of one shape and batch, all of them with the same runs of the original."""
        shape, batch = case
        fast, grpc = _names(case)
        runs: dict[str, list[dict[str, float]]] = {fast: [], grpc: [], "original": []}
        for _ in range(self._repeats):
            for name, scheme in ((fast, ""), (grpc, "grpc://")):
                if name in self._rows:
                    runs[name].append(self._read("ours", scheme, shape, batch, ours))
            if self._original is not None:
                runs["original"].append(self._read("original", "", shape, batch, theirs))
        for name, aim in ((fast, RATIOS[case]), (grpc, GRPC_RATIOS.get(case, 0.0))):
            if name in self._rows:
                yield _ratio_row(name, runs[name], runs["original"], aim)

    def _read(
        self,
        side: str,
        scheme: str,
        shape: str,
        batch: int,
        teachers: list[Teacher],
        times: Times | None = None,
    ) -> dict[str, float]:
        end = f"/{shape}" if side == "ours" else ""
        endpoints = ",".join(f"{scheme}{teacher.endpoint}{end}" for teacher in teachers)
        found = read(
            side,
            endpoints,
            shape,
            batch,
            times or self._times,
            teachers=teachers,
            folder=self._folder,
            original=self._original,
        )
        if found is None:
            raise SystemExit(f"{side}, {shape}, batch {batch}: the reader hangs")
        if found["wrong"]:
            raise SystemExit(f"{side}, {shape}, batch {batch}: an answer belongs to another image")
        return found

    # --- teachers that need time

    def _busy(self, ours: list[Teacher], theirs: list[Teacher]) -> Row:
        shape, batch = SHAPES[1], 16
        # A reader asks a new teacher for few samples at a time, and learns how many it can take.
        times = replace(self._times, warm_s=1.5)
        runs: dict[str, list[dict[str, float]]] = {"ours": [], "original": []}
        for _ in range(self._repeats):
            runs["ours"].append(self._read("ours", "", shape, batch, ours, times))
            if self._original is not None:
                runs["original"].append(self._read("original", "", shape, batch, theirs, times))
        shares = {
            side: [_busy_share(run, len(ours)) for run in found] for side, found in runs.items()
        }
        mine = statistics.median(shares["ours"])
        others = shares["original"]
        return Row(
            name="busy",
            ours=f"{mine:.1%}",
            original=f"{statistics.median(others):.1%}" if others else "-",
            aim="95 %",
            is_met=mine >= 0.95,
            details={"shares": shares, **_load(runs["ours"] + runs["original"])},
        )

    # --- a training

    def _student(self) -> Row:
        """The student on one core, its teachers on another one: theirs, not its own."""
        cores = sorted(os.sched_getaffinity(0))
        with our_teachers("spare", self._folder, cores={cores[-1]}) as teachers:
            endpoints = ",".join(f"{teacher.endpoint}/{SHAPES[0]}" for teacher in teachers)
            pairs, seconds = ("10", "0.3") if self._quick else ("40", "0.5")
            found = run_child(
                "benchmarks.distillation.student",
                ["--teachers", endpoints, "--pairs", pairs, "--seconds", seconds],
                self._folder,
                limit_s=600,
                core=cores[0],
            )
        if found is None:
            raise SystemExit("student: the training hangs")
        return Row(
            name="student",
            ours=f"{found['speed']:.1%} (by CPU {found['speed_by_cpu']:.1%})",
            original="83 % published",
            aim="97 %",
            is_met=found["speed"] >= 0.97,
            details=found,
        )

    # --- faults

    def _faults(self) -> Iterator[Row]:
        rest_s = 1.0 if self._quick else 3.0
        with our_teachers("slow", self._folder) as teachers:
            found = faults.one_dies(teachers, rest_s)
            yield _fault_row("kill -9 of one of two: gap", found, "gap_s", 0.3)
            found = faults.last_returns(teachers[:1])
            yield _fault_row("the last one dies and returns: goes on", found, "back_s", 1.0)
            found = faults.none_is_left(teachers, 1.0)
            yield _fault_row("no teacher is left: NoTeacher, late by", found, "late_s", 1.0)
            found = faults.generator_fails(teachers)
            original = self._original_generator_fails()
            yield _fault_row("generator raises: seen", found, "raised_s", 1.0, original)
            found = faults.early_break(teachers)
            yield _fault_row("early break: nothing left", found, "ended_s", 1.0)

    def _original_generator_fails(self) -> str:
        if self._original is None:
            return "-"
        with raw_teachers(0.0, self._folder) as teachers:
            endpoints = ",".join(teacher.endpoint for teacher in teachers)
            arguments = ["original", "--teachers", endpoints, "--shape", SHAPES[0], "--batch", "16"]
            arguments += ["--fail", "--original", str(self._original)]
            found = run_child("benchmarks.distillation.child", arguments, self._folder, limit_s=10)
        return "hangs (10 s)" if found is None else "ends"


def _names(case: tuple[str, int]) -> tuple[str, str]:
    """Return the names of the rows of a shape and batch: by the fast path, and by gRPC."""
    shape, batch = case
    return f"{shape}-{batch}", f"grpc-{shape}-{batch}"


def _ratio_row(
    name: str, ours: list[dict[str, float]], theirs: list[dict[str, float]], aim: float
) -> Row:
    mine = statistics.median(run["samples_per_s"] for run in ours)
    details: dict[str, object] = {"ours": ours, "original": theirs, **_load(ours + theirs)}
    if not theirs:
        return Row(name=name, ours=f"{mine:,.0f}/s", aim=f"{aim:g} x", is_met=None, details=details)
    other = statistics.median(run["samples_per_s"] for run in theirs)
    details["ratio"] = mine / other
    details["ratio_by_cpu"] = _cpu_us(theirs) / _cpu_us(ours)
    return Row(
        name=name,
        ours=f"{mine:,.0f}/s  {mine / other:.1f} x",
        original=f"{other:,.0f}/s",
        aim=f"{aim:g} x",
        is_met=mine / other >= aim,
        details=details,
    )


def _cpu_us(runs: list[dict[str, float]]) -> float:
    """Return the processor time per sample, of reader and teachers."""
    return statistics.median(run["cpu_us_per_sample"] for run in runs)


def _load(runs: list[dict[str, float]]) -> dict[str, object]:
    return {"others_used": statistics.median(run["others_used"] for run in runs)}


def _busy_share(run: dict[str, float], teachers: int) -> float:
    return run["samples_per_s"] * SLOW_S / teachers


def _fault_row(
    name: str, found: dict[str, float], key: str, aim_s: float, original: str = "hangs (known)"
) -> Row:
    wrong = "" if not found["wrong"] else f", {found['wrong']:.0f} WRONG"
    return Row(
        name=name,
        ours=f"{found[key]:.3f} s{wrong}",
        original=original,
        aim=f"{aim_s:g} s, none lost or twice",
        is_met=found[key] <= aim_s and not found["wrong"],
        details=dict(found),
    )


def install_original(folder: Path) -> Path | None:
    """Install the original's package, without what it requires; None: it cannot be had."""
    target = folder / "original"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--target", str(target), ORIGINAL, "six"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode == 0:
        return target
    print(f"{ORIGINAL} cannot be installed: {result.stderr.strip()[-500:]}")
    return None


def chosen_rows(only: str | None) -> list[str]:
    """Return the rows that begin with one of the words of `only`. Raises: SystemExit."""
    words = only.split(",") if only else [""]
    chosen = [row for row in ROWS if any(row.startswith(word) for word in words)]
    if not chosen:
        raise SystemExit(f"--only {only}: no row begins so; there are {', '.join(ROWS)}")
    return chosen


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--quick", action="store_true", help="one short run of each")
    parser.add_argument("--only", metavar="ROW[,ROW...]", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--original", type=Path, metavar="DIR", help="where paddle_edl is")
    parser.add_argument("--no_original", action="store_true", help="measure ours alone")
    args = parser.parse_args(argv)
    chosen = chosen_rows(args.only)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no process is left
    logging.getLogger("distill_reader").setLevel(logging.ERROR)  # teachers are lost on purpose
    began = time.monotonic()
    used = machine_used()
    print(f"{os.cpu_count()} cores, {used:.0%} used by others before; {platform.python_version()}")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="edl-distill-") as name:
        folder = Path(name)
        original = args.original
        if original is None and not args.no_original:
            original = install_original(folder)
        print(f"{'':<40} {'ours':>24} {'original':>15}  {'aim':<23} verdict  others used")
        for row in Bench(chosen, folder, original, args.quick).run():
            rows.append(row)
            verdict = {True: "met", False: "MISSED", None: "unknown"}[row.is_met]
            others = row.details.get("others_used")
            load = f"{others:.0%}" if isinstance(others, float) else ""
            print(
                f"{row.name:<40} {row.ours:>24} {row.original:>15}  {row.aim:<23} "
                f"{verdict:<8} {load}",
                flush=True,
            )
    print(f"{time.monotonic() - began:.0f} s; load average {os.getloadavg()[0]:.1f}")
    if args.json:
        figures = {
            "cores": os.cpu_count(),
            "used_before": used,
            "load_average": os.getloadavg(),
            "quick": args.quick,
            "rows": [asdict(row) for row in rows],
        }
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
