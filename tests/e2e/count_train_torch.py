"""What count_train.py does, in PyTorch: parameter i counts how often sample i was trained."""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from pod_runtime import elastic


class Counter(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(count, dtype=torch.float64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.seen[ids]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--step_s", type=float, default=0.02)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--checkpoint")
    parser.add_argument("--first", help="checkpoints of a training of two epochs before this one")
    parser.add_argument("--out", required=True)
    parser.add_argument("--end", type=Path, help="once this file exists, no epoch follows")
    args = parser.parse_args()

    if args.first:
        train(args, args.first, epochs=2)
    train(args, args.checkpoint, args.epochs)


def train(args: argparse.Namespace, checkpoint: str | None, epochs: int) -> None:
    model = Counter(args.samples)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    data: DataLoader[int] = DataLoader(
        range(args.samples), batch_size=48, shuffle=True, num_workers=args.workers
    )
    loop = elastic.Loop(model, optimizer, data, epochs=epochs, checkpoint=checkpoint, save_steps=10)
    for epoch in loop.epochs():
        for step in epoch:
            for ids in step:
                step.backward(-model(ids).mean() * step.samples)
            step.update()
            time.sleep(args.step_s)
        if args.end.exists():
            loop.stop()
    if loop.rank == 0:
        np.save(args.out, model.seen.detach().numpy())


if __name__ == "__main__":
    main()
