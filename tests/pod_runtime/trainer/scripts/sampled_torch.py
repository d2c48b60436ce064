"""What sampled.py trains, in PyTorch."""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
)

from pod_runtime import elastic

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--kind", required=True)
parser.add_argument("--step_s", type=float, default=0.0)
parser.add_argument("--hurry", type=Path, help="once this file exists, steps do not sleep")
parser.add_argument("--workers", type=int, default=0)
args = parser.parse_args()
SAMPLES = 60
torch.set_default_dtype(torch.float64)


class Ids(Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, parts = (0, 1) if info is None else (info.id, info.num_workers)
        shift = int(torch.randint(SAMPLES, ()))  # the same wherever it is opened in an epoch
        for index in range(first, SAMPLES, parts):
            yield (index + shift) % SAMPLES


class Buckets(Sampler):
    """Batches of as many samples as have 50 tokens together."""

    def __init__(self) -> None:
        self.tokens = torch.randint(1, 20, (SAMPLES,), generator=torch.Generator().manual_seed(3))
        self.generator = torch.Generator()

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for index in torch.randperm(SAMPLES, generator=self.generator).tolist():
            if batch and int(self.tokens[[*batch, index]].sum()) > 50:
                yield batch
                batch = []
            batch.append(index)
        yield batch


class Counter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.nn.Parameter(torch.zeros(SAMPLES))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.seen[ids]


def data() -> Any:
    more: dict[str, Any] = {"num_workers": args.workers}
    if args.kind == "stream":
        return DataLoader(Stream(), batch_size=6, **more)
    if args.kind == "weighted":
        weights = WeightedRandomSampler(torch.arange(1.0, SAMPLES + 1), 70)
        return DataLoader(Ids(), sampler=weights, batch_size=6, **more)
    return DataLoader(Ids(), batch_sampler=Buckets(), **more)


model = Counter()
loop = elastic.Loop(
    model, torch.optim.SGD(model.parameters(), 1.0), data(), epochs=3,
    steps_per_epoch=11 if args.kind == "stream" else None,
)  # fmt: skip
for epoch in loop.epochs():
    for step in epoch:
        for ids in step:
            step.backward(-model(ids).mean() * step.samples)
        step.update()
        if not (step.is_warmup or (args.hurry and args.hurry.exists())):
            time.sleep(args.step_s)
if loop.rank == 0:
    np.save(args.out / "counts.npy", model.seen.detach().numpy())
