"""What towers.py trains, in PyTorch: two independent towers in float64, a plain and a noisy one.

A layer of the first is unfrozen on the way; of the second, dropout and batch norm change. Gradients
are clipped, and an optimizer with two groups follows a schedule.
"""

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from pod_runtime import elastic

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--step_s", type=float, default=0.0)
parser.add_argument("--hurry", type=Path, help="once this file exists, steps do not sleep")
parser.add_argument("--shards", type=int)
parser.add_argument("--wrong_sample", type=int, default=-1)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--asks", action="store_true", help="rank 1 asks for the number of shards")
parser.add_argument("--max_norm", type=float, default=1.0)
parser.add_argument("--promise", default="rounding")
parser.add_argument("--checkpoint")
parser.add_argument("--turn", action="store_true", help="the schedule turns with each epoch, too")
parser.add_argument("--strays", choices=["rate", "layer", "moments"],
                    help="rank 1 sets it by itself")  # fmt: skip
parser.add_argument("--strays_at", type=int, default=1, help="after this step")
parser.add_argument("--adds_up", action="store_true", help="the losses of shards, by itself")
parser.add_argument("--save_steps", type=int, default=1000)
args = parser.parse_args()
SAMPLES = 203  # batches of 32: the last one has 11, so that shards of it are empty
STAGE = os.environ.get("EDL_STAGE", "0")

torch.set_default_dtype(torch.float64)
torch.manual_seed(1)


class Noisy(Dataset):
    """Adds noise from all three global generators: what random augmentation does."""

    def __init__(self) -> None:
        state = np.random.RandomState(7)
        self.inputs = state.randn(SAMPLES, 12)
        self.targets = state.randn(SAMPLES, 1)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray, int]:
        noise = np.random.standard_normal(12) * 0.1 + random.random() * 0.1
        noise += torch.rand(1).item() * 0.1
        return self.inputs[index] + noise, self.targets[index], index


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 1))
        self.noisy = nn.Sequential(
            nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1)
        )
        self.unused = nn.Linear(3, 3)  # gets no gradient: must stay as it is

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.plain(inputs), self.noisy(inputs)


model = Towers()
model.plain[0].requires_grad_(False)
optimizer = torch.optim.Adam(
    [
        {"params": model.plain.parameters(), "lr": 0.01},
        {"params": [*model.noisy.parameters(), *model.unused.parameters()], "weight_decay": 0.0},
    ],
    lr=0.02,
    weight_decay=1e-3,
)
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [4, 9, 14], 0.5)
loop = elastic.Loop(
    model, optimizer, DataLoader(Noisy(), batch_size=args.batch, shuffle=True),
    epochs=args.epochs, seed=3, checkpoint=args.checkpoint, scheduler=scheduler,
    promise=args.promise, shards=args.shards, save_steps=args.save_steps,
)  # fmt: skip
if args.asks and loop.rank == 1:
    assert loop.shards_per_batch == 3
ids = (args.out / f"ids.{STAGE}.{loop.rank}.jsonl").open("a")
losses = (args.out / f"losses.{STAGE}.{loop.rank}.jsonl").open("a")
for epoch in loop.epochs():
    model.train()
    if args.turn:
        scheduler.step()
    for step in epoch:
        for inputs, targets, index in step:
            plain, noisy = model(inputs)
            weight = 1 + 1e-4 * (index == args.wrong_sample).double().unsqueeze(1)
            loss = (weight * ((plain - targets) ** 2 + (noisy - targets) ** 2)).mean()
            step.backward(loss)
            if args.adds_up:
                torch.distributed.all_reduce(loss.detach())
        print(json.dumps([step.number, step.sample_ids]), file=ids, flush=True)
        step.clip(args.max_norm)
        loss = step.update()
        if not step.is_warmup:
            print(json.dumps([step.number, float(loss)]), file=losses, flush=True)
        scheduler.step()
        if args.strays and loop.rank == 1 and step.number == args.strays_at:
            if args.strays == "rate":
                optimizer.param_groups[0]["lr"] *= 0.5
            elif args.strays == "moments":  # as where each rank updates other parameters
                del optimizer.state[model.plain[2].weight]
            else:
                with torch.no_grad():
                    model.plain[0].weight.data.mul_(1.001)
        if step.number == 3:
            model.plain[0].requires_grad_(True)
        elif step.number == 5:
            model.noisy[3].p = 0.2
        elif step.number == 8:  # until the next epoch begins
            model.noisy[1].eval()
        elif step.number == 18:
            if os.fork() == 0:
                sys.exit()  # it leaves no group that is its parent's
            os.wait()
        if not (step.is_warmup or (args.hurry and args.hurry.exists())):
            time.sleep(args.step_s)
    total = loop.evaluate(Noisy(), lambda inputs, _t, _i: {"n": len(inputs)}, batch_size=10)
    assert total == {"n": SAMPLES}, total
if loop.rank == 0:
    np.savez(args.out / "final.npz", **{name: t.numpy() for name, t in model.state_dict().items()})
