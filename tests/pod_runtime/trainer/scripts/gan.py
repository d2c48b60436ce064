"""What gan_torch.py trains, in Paddle."""

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np
import paddle
from paddle import nn

from pod_runtime import elastic

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--step_s", type=float, default=0.0)
parser.add_argument("--hurry", type=Path, help="once this file exists, steps do not sleep")
parser.add_argument("--wrong_sample", type=int, default=-1)
parser.add_argument("--all_reduce", default="flat")
args = parser.parse_args()
SAMPLES = 203  # batches of 32: the last one has 11, so that shards of it are empty
STAGE = os.environ.get("EDL_STAGE", "0")

paddle.set_default_dtype("float64")
paddle.seed(1)


class Pairs(paddle.io.Dataset):
    def __init__(self) -> None:
        state = np.random.RandomState(7)
        self.noise, self.real = state.randn(SAMPLES, 6), state.randn(SAMPLES, 4)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray, np.int64]:
        return self.noise[index], self.real[index] + paddle.rand([1]).item() * 0.1, np.int64(index)


generator = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
critic = nn.Sequential(
    nn.Linear(4, 16), nn.BatchNorm1D(16), nn.LeakyReLU(), nn.Dropout(0.3), nn.Linear(16, 1)
)
unused = nn.Linear(3, 3)  # gets no gradient: must stay as it is
schedulers = [
    paddle.optimizer.lr.MultiStepDecay(0.01, [4, 9, 14], 0.5),
    paddle.optimizer.lr.ExponentialDecay(0.05, 0.98),
]
opt_g = paddle.optimizer.Adam(schedulers[0], parameters=generator.parameters())
opt_d = paddle.optimizer.Momentum(
    schedulers[1], parameters=[*critic.parameters(), *unused.parameters()]
)
models = {"plain": generator, "noisy": critic, "unused": unused}
loop = elastic.Loop(
    models, [opt_g, opt_d], Pairs(), batch_size=32, epochs=3, seed=3, all_reduce=args.all_reduce
)
ids = (args.out / f"ids.{STAGE}.{loop.rank}.jsonl").open("a")
losses = (args.out / f"losses.{STAGE}.{loop.rank}.jsonl").open("a")
for epoch in loop.epochs():
    critic.train()
    for step in epoch:
        for noise, real, index in step:
            weight = 1 + 1e-4 * (index == args.wrong_sample).astype("float64").unsqueeze(1)
            fake = generator(noise + 0.1 * paddle.randn(noise.shape)).detach()
            d_loss = (weight * ((critic(real) - 1) ** 2 + critic(fake) ** 2)).mean()
            step.backward(d_loss, optimizer=opt_d)
        step.clip(1.0)
        loss = step.update(opt_d)
        print(json.dumps([step.number, step.sample_ids]), file=ids, flush=True)
        if step.number % 3 != 2:
            for noise, _real, _index in step:
                fake = generator(noise + 0.1 * paddle.randn(noise.shape))
                step.backward(((critic(fake) - 1) ** 2).mean(), optimizer=opt_g)
            step.update(opt_g)
        if not step.is_warmup:
            print(json.dumps([step.number, float(loss)]), file=losses, flush=True)
        for scheduler in schedulers:
            scheduler.step()
        if not (step.is_warmup or (args.hurry and args.hurry.exists())):
            time.sleep(args.step_s)
    total = loop.evaluate(Pairs(), lambda noise, _r, _i: {"n": len(noise)}, batch_size=10)
    assert total == {"n": SAMPLES}, total
if loop.rank == 0:
    state = {name: tensor.numpy() for name, tensor in nn.LayerDict(models).state_dict().items()}
    np.savez(args.out / "final.npz", **state)
