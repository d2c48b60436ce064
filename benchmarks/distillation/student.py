"""Train a small student, with teachers' soft labels and without. Started by distill.py.

    python -m benchmarks.distillation.student --teachers HOST:PORT,... --json FILE

Blocks of steps alternate, so that other load on the machine meets both. The plain training reads
the same generator, and its loss has the same terms with soft labels that are there already: what
differs is the reader. It holds few batches, so that it fills up at once when a plain block begins,
and then waits: what it does is done in its own blocks.
"""

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOG_minloglevel", "2")

import numpy as np
import paddle
import paddle.nn.functional as F  # noqa: N812
from paddle import nn

from benchmarks.distillation.backends import CLASSES
from benchmarks.distillation.child import batches
from distill_reader import DistillReader
from distill_reader.student.labels.losses import soft_cross_entropy

BATCH = 64
SHAPE = (1, 28, 28)
_WINDOW_MIB = 16


class Training:
    """A LeNet-sized student."""

    def __init__(self) -> None:
        self._model = nn.Sequential(
            nn.Conv2D(1, 6, 5, padding=2), nn.BatchNorm2D(6), nn.ReLU(), nn.MaxPool2D(2),
            nn.Conv2D(6, 16, 5), nn.BatchNorm2D(16), nn.ReLU(), nn.MaxPool2D(2),
            nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(),
            nn.Linear(84, CLASSES),
        )  # fmt: skip
        self._optimizer = paddle.optimizer.Momentum(0.001, parameters=self._model.parameters())

    def step(self, images: Any, labels: Any, scores: Any) -> None:
        logits = self._model(paddle.to_tensor(images) / 1e4)  # the first value is a large number
        soft_labels = F.softmax(paddle.to_tensor(scores) / 1e4)
        loss = F.cross_entropy(logits, paddle.to_tensor(labels % CLASSES))
        (0.5 * loss + 0.5 * soft_cross_entropy(logits, soft_labels)).backward()
        self._optimizer.step()
        self._optimizer.clear_grad()


def block(training: Training, items: Iterator[Any], steps: int) -> tuple[float, float]:
    """Train for `steps`; return wall and processor seconds per step."""
    wall, cpu = time.perf_counter(), time.process_time()
    for images, labels, scores in itertools.islice(items, steps):
        training.step(images, labels, scores)
    return (time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps


def compare(teachers: str, pairs: int, seconds: float, limit_s: float) -> dict[str, float]:
    """Return the medians of the blocks, and of the ratios of those that follow each other.

    Args:
        seconds: of a block.
        limit_s: for all of it; a slow machine does fewer pairs.
    """
    began = time.perf_counter()
    generate = batches(SHAPE, BATCH)
    scores = np.zeros((BATCH, CLASSES), np.float32)
    reader = DistillReader(ins=["image", None], predicts=["score"])
    reader.set_fixed_teacher(teachers)
    reader.set_batch_generator(generate)
    reader.set_max_memory(_WINDOW_MIB)
    training = Training()
    plain = ((images, labels, scores) for images, labels in generate())
    distilled = reader()
    called = time.perf_counter()
    training.step(*next(distilled))
    first_s = time.perf_counter() - called
    for items in (distilled, plain):
        step_s, _ = block(training, items, 10)
    steps = max(20, int(seconds / step_s))  # many more than the reader asks for at once
    rows: list[tuple[tuple[float, float], tuple[float, float]]] = []
    for number in range(pairs):
        if rows and time.perf_counter() - began > limit_s:
            break
        sources = (plain, distilled) if number % 2 else (distilled, plain)
        found = {id(items): block(training, items, steps) for items in sources}
        rows.append((found[id(plain)], found[id(distilled)]))
    distilled.close()
    return {
        "pairs": len(rows),
        "steps": steps,
        "first_batch_ms": 1e3 * first_s,
        "plain_ms": 1e3 * statistics.median(before[0] for before, _ in rows),
        "distilled_ms": 1e3 * statistics.median(with_[0] for _, with_ in rows),
        "plain_cpu_ms": 1e3 * statistics.median(before[1] for before, _ in rows),
        "distilled_cpu_ms": 1e3 * statistics.median(with_[1] for _, with_ in rows),
        "speed": statistics.median(before[0] / with_[0] for before, with_ in rows),
        "speed_by_cpu": statistics.median(before[1] / with_[1] for before, with_ in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--teachers", required=True)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each block")
    parser.add_argument("--limit_s", type=float, default=90.0, help="then fewer pairs must do")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    found = compare(args.teachers, args.pairs, args.seconds, args.limit_s)
    args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
