"""A GAN in PyTorch: a plain generator and a noisy critic, which take turns in each step.

The critic is updated first, and the generator, in two steps of three, by the critic's new values.
The critic is frozen meanwhile, its gradients are clipped, and each optimizer has a schedule.
"""

import argparse
import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from pod_runtime import elastic

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--step_s", type=float, default=0.0)
parser.add_argument("--hurry", type=Path, help="once this file exists, steps do not sleep")
parser.add_argument("--dies_at", type=int, default=-1, help="rank 1, between two updates")
parser.add_argument("--differs_at", type=int, default=-1, help="rank 1 updates another one")
parser.add_argument("--wrong_sample", type=int, default=-1)
args = parser.parse_args()
SAMPLES = 203  # batches of 32: the last one has 11, so that shards of it are empty
STAGE = os.environ.get("EDL_STAGE", "0")

torch.set_default_dtype(torch.float64)
torch.manual_seed(1)


class Pairs(Dataset):
    def __init__(self) -> None:
        state = np.random.RandomState(7)
        self.noise, self.real = state.randn(SAMPLES, 6), state.randn(SAMPLES, 4)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray, int]:
        return self.noise[index], self.real[index] + torch.rand(1).item() * 0.1, index


generator = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
critic = nn.Sequential(
    nn.Linear(4, 16), nn.BatchNorm1d(16), nn.LeakyReLU(), nn.Dropout(0.3), nn.Linear(16, 1)
)
unused = nn.Linear(3, 3)  # gets no gradient: must stay as it is
opt_g = torch.optim.Adam(generator.parameters(), lr=0.01)
opt_d = torch.optim.SGD([*critic.parameters(), *unused.parameters()], lr=0.05, momentum=0.9)
schedulers = [
    torch.optim.lr_scheduler.MultiStepLR(opt_g, [4, 9, 14], 0.5),
    torch.optim.lr_scheduler.ExponentialLR(opt_d, 0.98),
]
loop = elastic.Loop(
    {"plain": generator, "noisy": critic, "unused": unused}, [opt_g, opt_d],
    DataLoader(Pairs(), batch_size=32, shuffle=True), epochs=3, seed=3, scheduler=schedulers,
    snapshot_steps=2,
)  # fmt: skip
ids = (args.out / f"ids.{STAGE}.{loop.rank}.jsonl").open("a")
losses = (args.out / f"losses.{STAGE}.{loop.rank}.jsonl").open("a")
for epoch in loop.epochs():
    critic.train()
    for step in epoch:
        for noise, real, index in step:
            weight = 1 + 1e-4 * (index == args.wrong_sample).double().unsqueeze(1)
            fake = generator(noise + 0.1 * torch.randn_like(noise)).detach()
            d_loss = (weight * ((critic(real) - 1) ** 2 + critic(fake) ** 2)).mean()
            step.backward(d_loss, optimizer=opt_d)
        step.clip(1.0)
        loss = step.update(opt_d)
        print(json.dumps([step.number, step.sample_ids]), file=ids, flush=True)
        if step.number == args.dies_at and loop.rank == 1 and not step.is_warmup:
            os.kill(os.getpid(), signal.SIGKILL)
        if step.number % 3 != 2 and not (step.number == args.differs_at and loop.rank == 1):
            critic.requires_grad_(False)
            for noise, _real, _index in step:
                fake = generator(noise + 0.1 * torch.randn_like(noise))
                step.backward(((critic(fake) - 1) ** 2).mean(), optimizer=opt_g)
            step.update(opt_g)
            critic.requires_grad_(True)
        if not step.is_warmup:
            print(json.dumps([step.number, float(loss)]), file=losses, flush=True)
        for scheduler in schedulers:
            scheduler.step()
        if not (step.is_warmup or (args.hurry and args.hurry.exists())):
            time.sleep(args.step_s)
    total = loop.evaluate(Pairs(), lambda noise, _r, _i: {"n": len(noise)}, batch_size=10)
    assert total == {"n": SAMPLES}, total
if loop.rank == 0:
    models = nn.ModuleDict({"plain": generator, "noisy": critic, "unused": unused})
    np.savez(args.out / "final.npz", **{name: t.numpy() for name, t in models.state_dict().items()})
