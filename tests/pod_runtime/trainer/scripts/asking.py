"""Counts samples as counting.py does, and asks the loop this and that in every step.

What a script does behind its questions in a warm-up step (here: the schedule and the parameters are
changed) must not reach the state of the real stage.
"""

import argparse
import os
import time
from pathlib import Path

import numpy as np
import paddle

from pod_runtime import elastic

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--step_s", type=float, default=0.0)
parser.add_argument("--hurry", type=Path, help="once this file exists, steps do not sleep")
parser.add_argument("--reader", action="store_true", help="batches have a field more than samples")
args = parser.parse_args()
STAGE = os.environ.get("EDL_STAGE", "0")
SAMPLES = 203
paddle.set_default_dtype("float64")


class Ids(paddle.io.Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> np.int64:
        return np.int64(index)


class Counter(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        zero = paddle.nn.initializer.Constant(0.0)
        self.seen = self.create_parameter([SAMPLES], default_initializer=zero)

    def forward(self, ids: paddle.Tensor) -> paddle.Tensor:
        return paddle.gather(self.seen, ids)


def twice(_where: elastic.ReadFrom):
    for item in loop.shards(Ids()):
        yield (*item, item[-1])


model = Counter()
optimizer = paddle.optimizer.SGD(1.0, parameters=model.parameters())
loop = elastic.Loop(
    model, optimizer, Ids(), batch_size=32, epochs=3, reader=twice if args.reader else None
)
told = (args.out / f"told.{STAGE}.{loop.rank}").open("a")
for epoch in loop.epochs():
    for step in epoch:
        for batch in step:
            ids, _again = batch if args.reader else (batch, None)
            step.backward(-model(ids).mean() * step.samples)
        step.update()
        assert 0 <= loop.epoch < 3
        print(loop.step_count if step.is_warmup else step.number, file=told, flush=True)
        if step.is_warmup:  # whatever is done now must be undone
            with paddle.no_grad():
                model.seen.set_value(model.seen + 7)
            loop.stop()
        else:
            assert step.index == step.number % -(-SAMPLES // 32)
            assert model.training == (step.number == 0), "in the next trainers, too"
            model.eval()
        loop.log(number=step.number)
        if not (step.is_warmup or (args.hurry and args.hurry.exists())):
            time.sleep(args.step_s)
if loop.rank == 0:
    np.save(args.out / "counts.npy", model.seen.numpy())
