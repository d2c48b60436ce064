"""Train by shares, then the same batches by DistributedDataParallel, and say how far they differ.

Both have two trainers, each with its half of a batch; with batch norm and an adaptive optimizer.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pod_runtime import elastic

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
args = parser.parse_args()
torch.set_default_dtype(torch.float64)
state = np.random.RandomState(7)
DATA = [(state.randn(12), state.randn(1)) for _ in range(96)]


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


model, optimizer = build()
loop = elastic.Loop(model, optimizer, DATA, batch_size=16, epochs=2, seed=3, promise="statistics")
shares = []
for epoch in loop.epochs():
    for step in epoch:
        for inputs, targets in step:
            step.backward(F.mse_loss(model(inputs), targets))
        shares.append(step.sample_ids)
        step.update()

theirs, optimizer = build()
parallel = DistributedDataParallel(theirs)
for share in shares:
    inputs, targets = (torch.tensor(np.stack([DATA[i][n] for i in share])) for n in (0, 1))
    optimizer.zero_grad()
    F.mse_loss(parallel(inputs), targets).backward()
    optimizer.step()
pairs = zip(model.parameters(), theirs.parameters(), strict=True)
worst = max(float((ours - each).abs().max().detach()) for ours, each in pairs)
(args.out / f"worst.{loop.rank}").write_text(f"{len(shares[0])} {worst}")
