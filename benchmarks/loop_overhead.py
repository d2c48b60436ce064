"""Measure the elastic loop's cost against a plain Paddle loop with the same shards.

    python benchmarks/loop_overhead.py --pairs 20 --steps 40 --batch 96 --shards 4 --json FILE

Both train the same LeNet-sized network over the same data in one process, in alternating blocks:
the plain loop reads micro-batches from a `paddle.io.DataLoader` and accumulates them. The process
is bound to one core, which is what a CPU slot is: the loader's thread is not free of charge. A
pair's figure is the ratio of the two blocks that follow each other; the interval is a bootstrap
over the pairs. Processor time is given beside wall time, as it suffers less from other load. Apart
from that: the time spent in the loop's own code, and what more shards cost (both loops pay for it).
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOG_minloglevel", "2")

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder is no package

import numpy as np
import paddle
import paddle.nn.functional as F  # noqa: N812
from paddle import nn

from benchmarks.harness import block, interval
from pod_runtime import elastic
from pod_runtime.trainer.loop.loop import current_stage

SAMPLES = 1920
BLOCKS = 10  # of which the least own time counts


class Images(paddle.io.Dataset):  # type: ignore[misc]  # Paddle has no types
    def __init__(self) -> None:
        state = np.random.RandomState(1)
        self.images = state.randn(SAMPLES, 1, 28, 28).astype("float32")
        self.labels = state.randint(0, 10, SAMPLES).astype("int64")

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.images[index], self.labels[index]


def lenet() -> Any:
    return nn.Sequential(
        nn.Conv2D(1, 6, 5, padding=2), nn.BatchNorm2D(6), nn.ReLU(), nn.MaxPool2D(2),
        nn.Conv2D(6, 16, 5), nn.BatchNorm2D(16), nn.ReLU(), nn.MaxPool2D(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(),
        nn.Linear(84, 10),
    )  # fmt: skip


def plain_steps(batch: int, shards: int) -> Iterator[None]:
    """An endless plain loop with accumulation; one item per optimizer step."""
    model = lenet()
    optimizer = paddle.optimizer.Momentum(0.01, parameters=model.parameters())
    loader = paddle.io.DataLoader(Images(), batch_size=batch // shards, shuffle=True)
    while True:
        for number, (images, labels) in enumerate(loader, 1):
            (F.cross_entropy(model(images), labels) / shards).backward()
            if number % shards == 0:
                optimizer.step()
                optimizer.clear_grad()
                yield


Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def elastic_steps(batch: int, shards: int, wrap: Wrap = lambda call: call) -> Any:
    """The same by the elastic loop; `wrap` may time what is not the loop's own code."""
    model = lenet()
    optimizer = paddle.optimizer.Momentum(0.01, parameters=model.parameters())
    optimizer.step = wrap(optimizer.step)
    optimizer.clear_grad = wrap(optimizer.clear_grad)
    loop = elastic.Loop(
        model, optimizer, Images(), batch_size=batch, shards=shards, epochs=1_000_000
    )
    stage = current_stage()
    assert stage is not None
    for name in ("collate", "to_batch"):
        setattr(stage.framework.data, name, wrap(getattr(stage.framework.data, name)))
    loss = wrap(lambda images, labels: F.cross_entropy(model(images), labels))
    for epoch in loop.epochs():
        for step in epoch:
            for images, labels in step:
                step.backward(loss(images, labels))
            step.update()
            yield


def compare(batch: int, shards: int, pairs: int, steps: int) -> dict[str, Any]:
    plain, elastic_ = plain_steps(batch, shards), elastic_steps(batch, shards)
    for warm in (plain, elastic_):
        block(warm, 20)
    rows = []
    for number in range(pairs):
        order = (plain, elastic_) if number % 2 else (elastic_, plain)
        found = {id(each): block(each, steps) for each in order}
        rows.append((found[id(plain)], found[id(elastic_)]))
    result: dict[str, Any] = {"batch": batch, "shards": shards, "pairs": pairs, "steps": steps}
    for index, name in enumerate(("wall", "cpu")):
        ratio, low, high = interval([mine[index] / theirs[index] for theirs, mine in rows])
        result[name] = {
            "plain_ms": 1e3 * statistics.median(theirs[index] for theirs, _ in rows),
            "elastic_ms": 1e3 * statistics.median(mine[index] for _, mine in rows),
            "overhead_percent": 100 * (ratio - 1),
            "low_percent": 100 * (low - 1),
            "high_percent": 100 * (high - 1),
        }
    return result


def own_code(batch: int, shards: int, steps: int) -> dict[str, float]:
    """Return the milliseconds per step that are neither the script's, Paddle's nor the data's.

    Processor time of the main thread, which does all of it; the least of several blocks, as other
    load on the machine only adds to it.
    """
    outside, is_outside = 0.0, False

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal outside, is_outside
            if is_outside:  # within another, as `to_batch` calls itself: it counts once
                return call(*args, **kwargs)
            is_outside, begun = True, time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                outside += time.thread_time() - begun
                is_outside = False

        return run

    backward, fetch = paddle.Tensor.backward, Images.__getitem__
    paddle.Tensor.backward = timed(backward)
    Images.__getitem__ = timed(fetch)  # type: ignore[method-assign]
    found = []
    try:
        run = elastic_steps(batch, shards, timed)
        block(run, 20)
        for _ in range(BLOCKS):
            outside, begun = 0.0, time.thread_time()
            block(run, steps)
            total = time.thread_time() - begun
            found.append(((total - outside) / steps, total / steps))
    finally:
        paddle.Tensor.backward = backward
        Images.__getitem__ = fetch  # type: ignore[method-assign]
    own, total = min(found)
    return {"own_ms": 1e3 * own, "step_ms": 1e3 * total, "share_percent": 100 * own / total}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=40, help="steps in each block of a pair")
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--shards", type=int, nargs="+", default=[4, 1, 2, 8])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    results = []
    for number, shards in enumerate(args.shards):
        pairs = args.pairs if number == 0 else max(6, args.pairs // 3)
        result = compare(args.batch, shards, pairs, args.steps)
        result["own_code"] = own_code(args.batch, shards, args.steps)
        results.append(result)
        for name in ("wall", "cpu"):
            row = result[name]
            print(
                f"{shards} shards, {name:4}: plain {row['plain_ms']:.2f} ms, elastic "
                f"{row['elastic_ms']:.2f} ms, {row['overhead_percent']:+.2f} % "
                f"(95 %: {row['low_percent']:+.2f} to {row['high_percent']:+.2f})",
                flush=True,
            )
        own = result["own_code"]
        print(f"{shards} shards, own : {own['own_ms']:.3f} ms of {own['step_ms']:.2f} ms a step, "
              f"{own['share_percent']:.2f} %", flush=True)  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
