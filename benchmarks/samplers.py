"""What a sampler costs an epoch: drawing its list, checking it, and writing it down.

    python -m benchmarks.samplers --samples 1281167 --framework torch

Processor time of one trainer, the median of several epochs; the first start draws three times.
"""

import argparse
import functools
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pod_runtime.trainer.data.sampling import SampledOrders, Sampling
from pod_runtime.trainer.frameworks.choose import make_framework
from pod_runtime.trainer.frameworks.framework import FrameworkData
from pod_runtime.trainer.progress.order_files import FOLDER, OrderFiles


class Buckets:
    """Batches of samples of like length: shuffled, then sorted by length within blocks."""

    def __init__(self, samples: int, size: int = 256) -> None:
        self.lengths = np.random.RandomState(1).randint(1, 500, samples)
        self.size = size

    def __iter__(self) -> Iterator[list[int]]:
        ids = np.random.permutation(len(self.lengths))
        for block in np.array_split(ids, max(1, len(ids) // (100 * self.size))):
            ordered = block[np.argsort(self.lengths[block], kind="stable")].tolist()
            for start in range(0, len(ordered), self.size):
                yield ordered[start : start + self.size]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=1_281_167, help="as many as ImageNet has")
    parser.add_argument("--epochs", type=int, default=7)
    parser.add_argument("--framework", choices=("torch", "paddle"), default="torch")
    args = parser.parse_args()
    data, weighted = _torch(args.samples) if args.framework == "torch" else _paddle(args.samples)
    uniform = Sampling(sampler=_Shuffled(args.samples), name="shuffled", makes_batches=False)
    for sampling in (
        Sampling(sampler=weighted, name="weighted", makes_batches=False),
        Sampling(sampler=Buckets(args.samples), name="buckets", makes_batches=True),
        uniform,
    ):
        orders = SampledOrders(sampling, data, seed=0, length=args.samples)
        with tempfile.TemporaryDirectory() as folder:
            files = OrderFiles(Path(folder))
            draw = [_cpu_s(functools.partial(orders.of, epoch)) for epoch in range(args.epochs)]
            write = _cpu_s(functools.partial(files.put, orders.of(args.epochs - 1)))
            size = sum(each.stat().st_size for each in (Path(folder) / FOLDER).iterdir())
        print(
            f"{args.framework} {sampling.name}: {args.samples} samples, "
            f"draw {statistics.median(draw):.3f} s, write {write:.3f} s, {size / 1e6:.1f} MB"
        )


class _Shuffled:
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[int]:
        ids = list(range(self.samples))
        random.shuffle(ids)
        return iter(ids)


def _torch(samples: int) -> tuple[FrameworkData, Any]:
    import torch

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    weights = torch.rand(samples)
    sampler = torch.utils.data.WeightedRandomSampler(weights.tolist(), samples)
    return make_framework(model, optimizer, header_size=0).data, sampler


def _paddle(samples: int) -> tuple[FrameworkData, Any]:
    import paddle

    model = paddle.nn.Linear(1, 1)
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    weights = np.random.RandomState(1).rand(samples)
    sampler = paddle.io.WeightedRandomSampler(weights, samples)
    return make_framework(model, optimizer, header_size=0).data, sampler


def _cpu_s(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


if __name__ == "__main__":
    main()
