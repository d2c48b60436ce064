"""Parameter i counts how often sample i was trained, of data that a sampler or a stream decides."""

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle.io import BatchSampler, DataLoader, IterableDataset, WeightedRandomSampler

from pod_runtime import elastic

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--kind", required=True)
parser.add_argument("--step_s", type=float, default=0.0)
parser.add_argument("--hurry", type=Path, help="once this file exists, steps do not sleep")
parser.add_argument("--workers", type=int, default=0)
args = parser.parse_args()
SAMPLES = 60
paddle.set_default_dtype("float64")


class Ids(paddle.io.Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> np.int64:
        return np.int64(index)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[np.int64]:
        info = paddle.io.get_worker_info()
        first, parts = (0, 1) if info is None else (info.id, info.num_workers)
        shift = np.random.randint(SAMPLES)  # the same wherever it is opened in an epoch
        for index in range(first, SAMPLES, parts):
            yield np.int64((index + shift) % SAMPLES)


class Buckets(BatchSampler):
    """Batches of 1 to 9 samples of like length."""

    def __init__(self) -> None:
        self.lengths = np.random.RandomState(3).randint(1, 20, SAMPLES)

    def __iter__(self) -> Iterator[list[int]]:
        ids = np.random.permutation(SAMPLES)
        ids = ids[np.argsort(self.lengths[ids], kind="stable")].tolist()
        while ids:
            size = int(np.random.randint(1, 10))
            yield ids[:size]
            del ids[:size]

    def __len__(self) -> int:
        return 12


class Astray(Buckets):
    """From its second epoch on, each process has an order of its own."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        np.random.seed(os.getpid() if self.epoch else 0)
        return super().__iter__()


class Counter(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        zero = paddle.nn.initializer.Constant(0.0)
        self.seen = self.create_parameter([SAMPLES], default_initializer=zero)

    def forward(self, ids: paddle.Tensor) -> paddle.Tensor:
        return paddle.gather(self.seen, ids)


def data() -> Any:
    more: dict[str, Any] = {"num_workers": args.workers}
    if args.kind == "stream":
        return DataLoader(Stream(), batch_size=6, **more)
    by: Any = Astray() if args.kind == "astray" else Buckets()
    if args.kind == "weighted":
        weights = WeightedRandomSampler(np.arange(1.0, SAMPLES + 1), 70)
        by = BatchSampler(sampler=weights, batch_size=6)
    return DataLoader(Ids(), batch_sampler=by, **more)


model = Counter()
loop = elastic.Loop(
    model, paddle.optimizer.SGD(1.0, parameters=model.parameters()), data(), epochs=3,
    steps_per_epoch=11 if args.kind == "stream" else None,
)  # fmt: skip
for epoch in loop.epochs():
    for step in epoch:
        for batch in step:
            ids = batch[0] if isinstance(batch, list) else batch
            step.backward(-model(ids).mean() * step.samples)
        step.update()
        if not (step.is_warmup or (args.hurry and args.hurry.exists())):
            time.sleep(args.step_s)
if loop.rank == 0:
    np.save(args.out / "counts.npy", model.seen.numpy())
