"""Measure what options of DistillReader save and cost: bytes, samples per second, a cache.

    python benchmarks/distill_options.py --json FILE [--quick] [--only ROW[,ROW...]]

Rows: wire (float32, float16, uint8 and the top 10 of 1000 classes; 3x224x224, 16 images per batch,
by TCP and by shared memory, in turn in one run; two teachers that compute nothing, as processes),
link (the same by TCP over 1 Gbit/s: in a network namespace, which takes root, `ip` and `tc`), cache
(the second epoch of 1x28x28 and of 3x224x224, and what a label takes on disk; beside it SQLite's
look-ups alone), accuracy (students on handwritten digits). Shown are medians; answers are compared
with what was asked. `--quick`: one short run of each.
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder is no package

from benchmarks.distillation.options_backend import OPTION
from benchmarks.distillation.options_child import OPTIONS
from benchmarks.distillation.processes import (
    SHAPES,
    Teacher,
    await_teacher,
    run_child,
)
from benchmarks.harness import free_port, machine_used

ROWS = ("wire", "link", "cache", "accuracy")
TRANSPORTS = ("tcp", "shared memory")
_LINK_RATE = "1gbit"
_CACHED = (("1x28x28", 64, 100_000), ("3x224x224", 16, 8_000))
_CACHE_OPTIONS = {"1x28x28": ("float32", "top-10"), "3x224x224": ("uint8, top-10 float16",)}

PARTS = "benchmarks.distillation"


@contextlib.contextmanager
def teachers(folder: Path, count: int) -> Iterator[list[Teacher]]:
    """Teachers that normalize pixels, with a model for each shape."""
    for shape in SHAPES:
        (folder / shape).mkdir(exist_ok=True)
    found: list[Teacher] = []
    try:
        for number in range(count):
            port = free_port()
            arguments = ["distill_reader.serve", "--port", str(port)]
            arguments += ["--backend", f"{PARTS}.options_backend:classify"]
            arguments += ["--model", *(str(folder / shape) for shape in SHAPES)]
            arguments += ["--normalize", f"{SHAPES[1]}/{OPTION}"]
            log = folder / f"teacher{number}.log"
            found.append(Teacher(arguments, port, log, cores=os.sched_getaffinity(0)))
        for teacher in found:
            await_teacher(teacher)
        yield found
    finally:
        for teacher in found:
            teacher.stop()


class Bench:
    """Measures row by row, and prints what it finds."""

    def __init__(self, folder: Path, *, quick: bool, transports: Sequence[str]) -> None:
        self._folder = folder
        self._quick = quick
        self._transports = transports

    def wire(self) -> list[dict[str, Any]]:
        runs: dict[tuple[str, str], list[dict[str, float]]] = {}
        with teachers(self._folder, 2) as running:
            for _ in range(1 if self._quick else 3):
                for transport in self._transports:
                    for option in OPTIONS:
                        found = self._child("wire", running, SHAPES[1], 16, option, transport)
                        runs.setdefault((transport, option), []).append(found)
        rows: list[dict[str, Any]] = []
        print(f"{'3x224x224, batch 16, 1000 classes':<40}  sent+got B/sample  samples/s  CPU us")
        for (transport, option), all_runs in runs.items():
            row: dict[str, Any] = {
                "transport": transport,
                "option": option,
                **{key: statistics.median(run[key] for run in all_runs) for key in all_runs[0]},
            }
            plain = next((r for r in rows if r["transport"] == transport), row)
            print(
                f"  {transport + ', ' + option:<38}  {row['sent_bytes_per_sample']:>8,.0f} + "
                f"{row['received_bytes_per_sample']:<6,.0f}  {row['samples_per_s']:>9,.0f}"
                f"  {row['cpu_us_per_sample']:>6,.0f}   "
                f"{row['samples_per_s'] / plain['samples_per_s']:.2f} x, others used "
                f"{row['others_used']:.0%}",
                flush=True,
            )
            rows.append(row)
        return rows

    def link(self) -> Any:
        """Run the rows of `wire` where the loopback device is as slow as such a network."""
        figures = self._folder / "link.json"
        name = f"edl-options-{os.getpid()}"
        command = [sys.executable, __file__, "--only", "wire", "--transports", "tcp"]
        command += ["--json", str(figures), *(["--quick"] if self._quick else [])]
        try:
            _run("ip", "netns", "add", name)
            try:
                _run("ip", "-n", name, "link", "set", "lo", "up")
                limit = ("tbf", "rate", _LINK_RATE, "burst", "256kb", "latency", "50ms")
                _run("tc", "-n", name, "qdisc", "add", "dev", "lo", "root", *limit)
                print(f"over a link of {_LINK_RATE}", flush=True)
                _run("ip", "netns", "exec", name, *command)
            finally:
                _run("ip", "netns", "del", name)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"link: left out: {error}")
            return None
        return json.loads(figures.read_text())["wire"]

    def cache(self) -> list[dict[str, Any]]:
        rows = []
        print(
            f"{'cache':<40}  first epoch/s  second epoch/s  CPU us  disk B/sample  SQLite/s  CPU us"
        )
        with teachers(self._folder, 1) as running:
            for shape, batch, samples in _CACHED:
                for option in _CACHE_OPTIONS[shape]:
                    found = self._child(
                        "cache",
                        running,
                        shape,
                        batch,
                        option,
                        samples=samples // 10 if self._quick else samples,
                    )
                    rows.append({"shape": shape, "batch": batch, "option": option, **found})
                    print(
                        f"  {shape + ', ' + option:<38}  {found['first_samples_per_s']:>13,.0f}"
                        f"  {found['second_samples_per_s']:>14,.0f}"
                        f"  {found['second_cpu_us_per_sample']:>6.1f}"
                        f"  {found['disk_bytes_per_sample']:>6,.0f}"
                        f"  {found['sqlite_samples_per_s']:>8,.0f}"
                        f"  {found['sqlite_cpu_us_per_sample']:>6.1f}",
                        flush=True,
                    )
        return rows

    def accuracy(self) -> dict[str, Any]:
        arguments = ["--seeds", "2" if self._quick else "10"]
        found: Any = run_child(f"{PARTS}.options_accuracy", arguments, self._folder, limit_s=1800)
        if found is None:
            raise SystemExit("accuracy: it took too long")
        print(f"{'digits, teacher ' + format(found['teacher'], '.1%'):<40}  accuracy  difference")
        for name, each in found["variants"].items():
            print(
                f"  {name:<38}  {each['accuracy']:>8.2%}  {100 * each['difference']:+.2f} +- "
                f"{100 * each['standard_error']:.2f} points",
                flush=True,
            )
        result: dict[str, Any] = found
        return result

    def _child(
        self,
        what: str,
        running: Sequence[Teacher],
        shape: str,
        batch: int,
        option: str,
        transport: str = "",
        samples: int = 0,
    ) -> dict[str, float]:
        endpoints = ",".join(f"fast://{teacher.endpoint}/{shape}" for teacher in running)
        arguments = [what, "--teachers", endpoints, "--shape", shape, "--batch", str(batch)]
        arguments += ["--option", option, "--samples", str(samples)]
        arguments += ["--pids", *(str(teacher.pid) for teacher in running)]
        if transport == "tcp":
            arguments += ["--tcp"]
        if self._quick:
            arguments += ["--warm_s", "0.3", "--seconds", "0.5"]
        with tempfile.TemporaryDirectory(dir=self._folder) as cache:
            arguments += ["--folder", cache]
            found: Any = run_child(f"{PARTS}.options_child", arguments, self._folder, limit_s=600)
        if found is None:
            raise SystemExit(f"{what}, {shape}, {option}: the reader hangs")
        if found["wrong"]:
            raise SystemExit(f"{what}, {shape}, {option}: an answer belongs to another image")
        result: dict[str, float] = found
        return result


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--quick", action="store_true", help="one short run of each")
    parser.add_argument("--only", metavar="ROW[,ROW...]", help=f"of {', '.join(ROWS)}")
    parser.add_argument(
        "--transports", nargs="+", choices=TRANSPORTS, default=TRANSPORTS, help="of the row wire"
    )
    args = parser.parse_args(argv)
    chosen = args.only.split(",") if args.only else list(ROWS)
    unknown = [row for row in chosen if row not in ROWS]
    if unknown:
        parser.error(f"--only: {unknown[0]!r} is none of {', '.join(ROWS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no process is left
    logging.getLogger("distill_reader").setLevel(logging.ERROR)
    used = machine_used()
    print(f"{os.cpu_count()} cores, {used:.0%} used by others before; {platform.python_version()}")
    figures: dict[str, Any] = {"cores": os.cpu_count(), "used_before": used, "quick": args.quick}
    with tempfile.TemporaryDirectory(prefix="edl-options-") as name:
        bench = Bench(Path(name), quick=args.quick, transports=args.transports)
        for row in chosen:
            figures[row] = getattr(bench, row)()
    figures["load_average"] = os.getloadavg()
    print(f"load average {os.getloadavg()[0]:.1f}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
