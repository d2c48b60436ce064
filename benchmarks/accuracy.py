"""Measure whether elastic changes cost accuracy: ResNet50 on handwritten digits, in paired runs.

    python benchmarks/accuracy.py --seeds 1 2 3 --json FILE

For each seed one `edl run` whose pods never change, and one that is resized six times, at the same
steps on any machine; apart from that they are told the same. Both test on 360 images that they
never train on. The mean accuracies may differ by one point, or by twice the standard error of their
difference where that is larger: the exit code says whether that holds, and whether all six changes
came.
"""

import argparse
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from job_server.api.api_client import ApiClient
from job_server.api.errors import JobServerError
from job_server.api.wire import JobStatus

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = ROOT / "resnet50" / "train_with_fleet.py"
JOB_ID = "run"
MAX_PODS = 3
SIZES = (2, 3, 1, 3, 2, 1, 2)  # pods at the start, and after each of the six changes
LEAST_POINTS = 1.0
_URL = re.compile(r"edl: watch it at (\S+)")
_RESULT = re.compile(r"End pass (\d+),.* test_acc1 ([0-9.]+), test_acc5 ([0-9.]+)")
_LOOK_S = 0.5


class RunFailed(Exception):  # noqa: N818  it is what happened
    """A run did not end well; the text says where its log is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    seed: int
    changed: bool
    acc1: float  # 0 to 1
    acc5: float
    changes: int  # that were committed
    redone_steps: int
    wall_s: float
    verified: str  # what `verify` said of the ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Accuracies in percent, differences in points."""

    fixed_mean: float
    changed_mean: float
    difference: float  # changed - fixed
    standard_error: float  # of the difference
    allowed: float

    @property
    def holds(self) -> bool:
        return abs(self.difference) <= self.allowed


def change_steps(total_steps: int, changes: int) -> list[int]:
    """Return the steps at which to change, evenly over the training."""
    return [round(total_steps * turn / (changes + 1)) for turn in range(1, changes + 1)]


def summarize(fixed: Sequence[float], changed: Sequence[float]) -> Summary:
    """Compare accuracies (0 to 1) of runs in pairs.

    The standard error is that of two independent means, although pairs share their seed: three
    differences within pairs are too few to say more.
    """
    difference = 100 * (statistics.fmean(changed) - statistics.fmean(fixed))
    error = 0.0
    if len(fixed) > 1:
        error = 100 * math.sqrt(
            statistics.variance(fixed) / len(fixed) + statistics.variance(changed) / len(changed)
        )
    return Summary(
        fixed_mean=100 * statistics.fmean(fixed),
        changed_mean=100 * statistics.fmean(changed),
        difference=difference,
        standard_error=error,
        allowed=max(LEAST_POINTS, 2 * error),
    )


def command(args: argparse.Namespace, seed: int, folder: Path) -> list[str]:
    """Return the `edl run` of one training; `folder` takes its logs and checkpoints."""
    options = {
        "model": args.model, "num_epochs": args.epochs, "total_batch_size": args.batch,
        "lr": args.lr, "seed": seed, "checkpoint": folder / "checkpoint",
        "model_save_dir": folder / "output", "do_test": False, "save_steps": 100,
    }  # fmt: skip
    if args.images is not None:
        options["total_images"] = args.images
    return [
        sys.executable, "-m", "pod_runtime.run", "--cpu_slots", str(MAX_PODS),
        "--min", "1", "--max", str(MAX_PODS), "--pods", str(SIZES[0]), "--grace_s", "5",
        "--overlap", "off",  # so that a change happens at the step for which it is asked
        "--log_dir", str(folder), str(PROGRAM),
        *(f"--{name}={value}" for name, value in options.items()),
    ]  # fmt: skip


class Run:
    """One `edl run`, and the changes that are asked of it."""

    def __init__(self, args: argparse.Namespace, seed: int, changed: bool) -> None:
        self.seed, self.changed = seed, changed
        self.folder = args.out / f"seed{seed}_{'changed' if changed else 'fixed'}"
        self.folder.mkdir(parents=True)
        self.log = self.folder / "output.log"
        self._command = command(args, seed, self.folder)
        self._url = threading.Event()
        self._api: ApiClient | None = None  # None: the server's address is not known yet
        self._result: tuple[float, float] | None = None  # None: not tested yet

    def run(self) -> Result:
        """Raises RunFailed: it ended otherwise than by success."""
        began = time.monotonic()
        process = subprocess.Popen(
            self._command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONWARNINGS": "ignore:No ccache found"},
        )
        assert process.stdout is not None
        reader = threading.Thread(target=self._read, args=(process.stdout,), daemon=True)
        reader.start()
        try:
            status = self._follow(process)
            code = process.wait()
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)  # `edl run` leaves nothing behind
                process.wait()
        reader.join()
        process.stdout.close()
        if self._api is not None:
            self._api.close()
        if code != 0 or self._result is None or status is None:
            raise RunFailed(f"edl run ended with code {code}; its output is in {self.log}")
        return Result(
            seed=self.seed,
            changed=self.changed,
            acc1=self._result[0],
            acc5=self._result[1],
            changes=status.resizes,
            redone_steps=status.redone_steps,
            wall_s=time.monotonic() - began,
            verified=self._verify(),
        )

    def _read(self, lines: Iterator[str]) -> None:
        with self.log.open("w") as log:
            for line in lines:
                log.write(line)
                log.flush()
                if found := _URL.search(line):
                    token = (self.folder / "latest" / "token").read_text().strip()
                    self._api = ApiClient(found[1].rstrip("/"), token)
                    self._url.set()
                elif found := _RESULT.search(line):
                    self._result = float(found[2]), float(found[3])

    def _follow(self, process: subprocess.Popen[str]) -> JobStatus | None:
        """Resize at the planned steps; return the last status seen."""
        status: JobStatus | None = None
        sizes = list(SIZES[1:]) if self.changed else []
        changes = len(sizes)
        while process.poll() is None:
            time.sleep(_LOOK_S)
            if not self._url.is_set():
                continue
            assert self._api is not None
            try:
                status = self._api.status(JOB_ID)
                # One after the other: a change that waits in line would be made at another step.
                if sizes and status.total_steps and status.resizes == changes - len(sizes):
                    due = change_steps(status.total_steps, changes)[status.resizes]
                    if status.step >= due:
                        self._api.resize(JOB_ID, sizes[0])
                        sizes.pop(0)  # not before: a call that failed is made again
            except JobServerError:
                continue  # it is starting, or has gone with the end of the run
        return status

    def _verify(self) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "pod_runtime.verify", str(self.folder / "checkpoint")],
            capture_output=True,
            text=True,
            check=False,
        )
        return (done.stdout.strip() or done.stderr.strip()).splitlines()[-1]


def show(results: Sequence[Result], summary: Summary) -> None:
    print("  seed  pods      acc1 %  acc5 %  changes  steps redone  seconds  ledger")
    for each in results:
        kind = "changed" if each.changed else "fixed"
        print(
            f"  {each.seed:>4}  {kind:<8}{100 * each.acc1:8.2f}{100 * each.acc5:8.2f}"
            f"{each.changes:>9}{each.redone_steps:>14}{each.wall_s:>9.0f}  {each.verified}"
        )
    print(
        f"  mean acc1: fixed {summary.fixed_mean:.2f} %, changed {summary.changed_mean:.2f} %: "
        f"{summary.difference:+.2f} points (standard error {summary.standard_error:.2f}); allowed "
        f"{summary.allowed:.2f}: {'holds' if summary.holds else 'DOES NOT HOLD'}"
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[1, 2, 3], help="one pair of runs for each (1 2 3)")
    add("--model", default="ResNet50")
    add("--epochs", type=int, default=5)
    add("--images", type=int, help="train on so many of the 1,437")
    add("--batch", type=int, default=48, help="of all trainers (48: shards of 16)")
    add("--lr", type=float, default=0.005)
    add(
        "--out",
        type=Path,
        default=Path("edl_run/accuracy"),
        help="logs; each call has a folder in it",
    )
    add("--json", type=Path)
    args = parser.parse_args(argv)
    args.out = args.out.absolute() / time.strftime("%Y%m%d-%H%M%S")
    return args


def main() -> int:
    args = parse()
    results: list[Result] = []
    try:
        for seed in args.seeds:
            for changed in (False, True):
                results.append(Run(args, seed, changed).run())
                print(
                    f"seed {seed}, {'changed' if changed else 'fixed'}: {results[-1]}", flush=True
                )
    except RunFailed as error:
        print(f"accuracy.py: {error}", file=sys.stderr)
        return 1
    summary = summarize(
        [each.acc1 for each in results if not each.changed],
        [each.acc1 for each in results if each.changed],
    )
    show(results, summary)
    if args.json is not None:
        told = {"results": [asdict(each) for each in results], "summary": asdict(summary)}
        args.json.write_text(json.dumps(told | {"holds": summary.holds}, indent=1))
    all_came = all(each.changes == len(SIZES) - 1 for each in results if each.changed)
    if not all_came:
        print("  a run ended before all of its changes had come: train for longer (--epochs)")
    return 0 if summary.holds and all_came else 1


if __name__ == "__main__":
    sys.exit(main())
