"""Measure what a teacher gains a student with few labels: MNIST, 500 labels, ten seeds.

    python benchmarks/mnist_students.py --data_dir DIR --json FILE

A convolutional teacher learns from all labels and is served by a process of its own. For each seed
one small network is trained three times, by mnist_distill/train_with_fleet.py, with the same first
weights and about as many steps:

    alone       on 500 images with their labels (as many of each digit)
    distilled   on the same 500 images and labels, each with what the teacher says of it
    all images  on these, and on all other training images without labels, by the teacher alone

Accuracy is that on the test images. The exit code is 0 if both kinds of distillation are better
than `alone` on average, by more than two standard errors of the differences within seeds. Three
seeds are too few for that: single ones differ by as much as the teacher gains on the same images.
"""

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = ROOT / "mnist_distill" / "train_with_fleet.py"
ALONE, DISTILLED, ALL_IMAGES = "alone", "distilled", "all images"
KINDS = (ALONE, DISTILLED, ALL_IMAGES)
_READY = re.compile(r"teacher ready on (\S+):")
_STOP_TIMEOUT_S = 60


class RunFailed(Exception):  # noqa: N818  it is what happened
    """A program did not end well; the text says where its output is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    seed: int
    kind: str
    accuracy: float  # 0 to 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One kind over the seeds, in percent and points."""

    kind: str
    mean: float
    spread: float  # standard deviation; 0 for one seed
    gain: float  # over `alone`, mean of the differences within seeds
    standard_error: float  # of the gain

    @property
    def is_better(self) -> bool:
        return self.gain > 2 * self.standard_error


def summarize(results: Sequence[Result]) -> list[Summary]:
    """Return a summary of each kind; every seed has one result of each."""
    by_kind = {
        kind: {each.seed: 100 * each.accuracy for each in results if each.kind == kind}
        for kind in KINDS
    }
    summaries = []
    for kind, found in by_kind.items():
        gains = [accuracy - by_kind[ALONE][seed] for seed, accuracy in found.items()]
        summaries.append(
            Summary(
                kind=kind,
                mean=statistics.fmean(found.values()),
                spread=_deviation(list(found.values())),
                gain=statistics.fmean(gains),
                standard_error=_deviation(gains) / math.sqrt(len(gains)),
            )
        )
    return summaries


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def epochs_for(images: int, batch: int, steps: int) -> int:
    """Return the passes over so many images that take about `steps` steps."""
    return max(1, round(steps / math.ceil(images / batch)))


class Bench:
    """Runs the trainings; `folder` takes their output."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._args = args
        self._folder = folder
        self._model = folder / "mnist_cnn_model"
        self._env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",  # networks as small as these gain nothing by more
            "PYTHONWARNINGS": "ignore:No ccache found",
        }

    def train_teacher(self) -> tuple[float, int]:
        """Return its accuracy, and on how many images it was trained."""
        said, accuracy = self._train(
            "teacher",
            "--save_serving_model=True",
            f"--serving_model_dir={self._model}",
            f"--num_epochs={self._args.teacher_epochs}",
        )
        images = re.search(r" on (\d+) images of ", said)
        assert images is not None, said
        return accuracy, int(images[1])

    @contextmanager
    def served(self) -> Iterator[str]:
        """Serve the teacher; yield its endpoint."""
        log = self._folder / "serve.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [
                    sys.executable, "-m", "distill_reader.serve",
                    "--model", str(self._model), "--port", "0",
                ],
                stdout=subprocess.PIPE, stderr=output, text=True, env=self._env,
            )  # fmt: skip
            try:
                assert process.stdout is not None
                ready = _READY.match(process.stdout.readline())  # "" where it has ended
                if ready is None:
                    raise RunFailed(f"the teacher has ended; its output is in {log}")
                yield ready[1]
            finally:
                process.terminate()
                process.wait(_STOP_TIMEOUT_S)

    def train_student(self, kind: str, seed: int, images: int, endpoint: str) -> Result:
        """Train one; `images`: all that there are to train on."""
        args = self._args
        trained_on = images if kind == ALL_IMAGES else args.labelled
        options = [
            f"--seed={seed}",
            f"--labelled={args.labelled}",
            f"--batch_size={args.batch}",
            f"--num_epochs={epochs_for(trained_on, args.batch, args.steps)}",
        ]
        if kind != ALONE:
            options += ["--use_distill_service=True", f"--distill_teachers={endpoint}"]
            options += ["--no_teacher_timeout_s=60"]
        if kind == ALL_IMAGES:
            options.append("--unlabelled=all")
        _said, accuracy = self._train(f"{kind.replace(' ', '_')}_{seed}", *options)
        return Result(seed=seed, kind=kind, accuracy=accuracy)

    def _train(self, name: str, *options: str) -> tuple[str, float]:
        """Return what it printed, and its accuracy."""
        report = self._folder / f"{name}.json"
        data = [] if self._args.data_dir is None else [f"--data_dir={self._args.data_dir}"]
        done = subprocess.run(
            [
                sys.executable, str(PROGRAM), *data, "--use_gpu=False", "--test_epochs=1000",
                f"--json={report}", *options,
            ],
            capture_output=True, text=True, check=False, env=self._env,
        )  # fmt: skip
        log = self._folder / f"{name}.log"
        log.write_text(done.stdout + done.stderr)
        if done.returncode != 0:
            raise RunFailed(f"{name}: it ended with {done.returncode}; its output is in {log}")
        accuracy: float = json.loads(report.read_text())["accuracy"]
        return done.stdout, accuracy


def show(teacher: float, results: Sequence[Result], summaries: Sequence[Summary]) -> None:
    seeds = sorted({each.seed for each in results})
    print(f"  teacher: {100 * teacher:.2f} % right")
    print("  student     " + "".join(f"{f'seed {seed}':>9}" for seed in seeds)
          + "     mean  spread  gain, points")  # fmt: skip
    for summary in summaries:
        found = {each.seed: each.accuracy for each in results if each.kind == summary.kind}
        print(
            f"  {summary.kind:12}"
            + "".join(f"{100 * found[seed]:9.2f}" for seed in seeds)
            + f"{summary.mean:9.2f}{summary.spread:8.2f}"
            + (
                ""
                if summary.kind == ALONE
                else f"  {summary.gain:+.2f} (standard error {summary.standard_error:.2f})"
            )
        )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--data_dir", help="MNIST's folder, or `paddle`; not given: smaller digits")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(1, 11)))
    parser.add_argument("--labelled", type=int, default=500, help="images with labels (500)")
    parser.add_argument("--batch", type=int, default=50, help="images of a step (50)")
    parser.add_argument("--steps", type=int, default=1600, help="of each student, about (1600)")
    parser.add_argument("--teacher_epochs", type=int, default=5, help="(5)")
    parser.add_argument("--out", type=Path, help="folder for the outputs (one in the system's)")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    args = parser.parse_args(argv)
    for name in ("labelled", "batch", "steps", "teacher_epochs"):
        if getattr(args, name) < 1:
            parser.error(f"argument --{name}: must be at least 1, got {getattr(args, name)}")
    if len(set(args.seeds)) < len(args.seeds):
        parser.error(f"argument --seeds: {args.seeds} has one twice; give each once")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    folder = args.out or Path(tempfile.mkdtemp(prefix="mnist_students_"))
    folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(args, folder)
    results: list[Result] = []
    try:
        teacher, images = bench.train_teacher()
        with bench.served() as endpoint:
            for seed in args.seeds:
                for kind in KINDS:
                    results.append(bench.train_student(kind, seed, images, endpoint))
                    print(f"  {results[-1]}", file=sys.stderr, flush=True)
    except RunFailed as error:
        print(f"mnist_students.py: {error}", file=sys.stderr)
        return 1
    summaries = summarize(results)
    show(teacher, results, summaries)
    holds = all(each.is_better for each in summaries if each.kind != ALONE)
    if args.json is not None:
        told = {
            "teacher": teacher,
            "results": [asdict(each) for each in results],
            "summaries": [asdict(each) for each in summaries],
            "holds": holds,
        }
        args.json.write_text(json.dumps(told, indent=1))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
