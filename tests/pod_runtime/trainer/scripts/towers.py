"""Trains two independent towers in float64: a plain one, and one with batch norm and dropout.

A layer of the first is unfrozen on the way; of the second, dropout and batch norm change. Every
rank writes down which samples it trained in which step. `--wrong_sample` makes the weight of one
sample wrong, in its fifth digit.
"""

import argparse
import json
import os
import random
import time
from pathlib import Path

import numpy as np
import paddle
from paddle import nn

from pod_runtime import elastic
from pod_runtime.trainer.frameworks.paddle import overlap as paddle_overlap

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
parser.add_argument("--strays", choices=["rate", "layer"], help="rank 1 sets it by itself")
parser.add_argument("--all_reduce", default="flat")
parser.add_argument("--adds_up", action="store_true", help="the losses of shards, by itself")
parser.add_argument("--twice", action="store_true", help="backward twice per shard")
args = parser.parse_args()
SAMPLES = 203  # batches of 32: the last one has 11, so that shards of it are empty
paddle_overlap.BUCKET_BYTES = 600  # several buckets, although there is little to send
STAGE = os.environ.get("EDL_STAGE", "0")

paddle.set_default_dtype("float64")
paddle.seed(1)


class Noisy(paddle.io.Dataset):
    """Adds noise from all three global generators: what random augmentation does."""

    def __init__(self) -> None:
        state = np.random.RandomState(7)
        self.inputs = state.randn(SAMPLES, 12)
        self.targets = state.randn(SAMPLES, 1)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray, np.int64]:
        noise = np.random.standard_normal(12) * 0.1 + random.random() * 0.1
        noise += paddle.rand([1]).item() * 0.1
        return self.inputs[index] + noise, self.targets[index], np.int64(index)


class Towers(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 1))
        self.noisy = nn.Sequential(
            nn.Linear(12, 16), nn.BatchNorm1D(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1)
        )
        self.unused = nn.Linear(3, 3)  # gets no gradient: must stay as it is

    def forward(self, inputs: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        return self.plain(inputs), self.noisy(inputs)


def freeze(layer: nn.Layer, frozen: bool) -> None:
    for parameter in layer.parameters():
        parameter.stop_gradient = frozen


model = Towers()
freeze(model.plain[0], True)
scheduler = paddle.optimizer.lr.StepDecay(0.05, step_size=5, gamma=0.9)
optimizer = paddle.optimizer.Momentum(
    scheduler, parameters=model.parameters(), weight_decay=1e-3,
    grad_clip=nn.ClipGradByGlobalNorm(args.max_norm),
)  # fmt: skip
loop = elastic.Loop(
    model, optimizer, Noisy(), batch_size=args.batch, epochs=args.epochs, seed=3,
    shards=args.shards, checkpoint=args.checkpoint, all_reduce=args.all_reduce,
    promise=args.promise,
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
            weight = 1 + 1e-4 * (index == args.wrong_sample).astype("float64").unsqueeze(1)
            loss = (weight * ((plain - targets) ** 2 + (noisy - targets) ** 2)).mean()
            step.backward(loss)
            if args.adds_up:
                paddle.distributed.all_reduce(loss.detach())
            if args.twice:  # the same gradients change once more, by nothing
                step.backward((model.plain(inputs) * 0).mean())
        print(json.dumps([step.number, step.sample_ids]), file=ids, flush=True)
        loss = step.update()
        if not step.is_warmup:
            print(json.dumps([step.number, float(loss)]), file=losses, flush=True)
        scheduler.step()
        if args.strays and loop.rank == step.number == 1:
            if args.strays == "rate":
                scheduler.step()
            else:
                with paddle.no_grad():
                    model.plain[0].weight.scale_(1.001)
        if step.number == 3:
            freeze(model.plain[0], False)
        elif step.number == 5:
            model.noisy[3].p = 0.2
        elif step.number == 8:  # until the next epoch begins
            model.noisy[1].eval()
        if not (step.is_warmup or (args.hurry and args.hurry.exists())):
            time.sleep(args.step_s)
    total = loop.evaluate(Noisy(), lambda inputs, _t, _i: {"n": len(inputs)}, batch_size=10)
    assert total == {"n": SAMPLES}, total
if loop.rank == 0:
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    np.savez(args.out / "final.npz", **state)
