"""An object of the script counts the epochs behind their steps; the last checkpoint waits."""

import argparse
import os
import time
from pathlib import Path

import numpy as np
import paddle

from pod_runtime import elastic

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--checkpoint", type=Path, required=True)
args = parser.parse_args()
EPOCHS = 3


class Average:
    """Of the weights at the ends of epochs, say."""

    def __init__(self) -> None:
        self.epochs = paddle.zeros([1])

    def state_dict(self) -> dict[str, paddle.Tensor]:
        return {"epochs": self.epochs}

    def set_state_dict(self, state: dict[str, paddle.Tensor]) -> None:
        self.epochs.set_value(state["epochs"])


data = [np.full(3, i, "float32") / 20 for i in range(20)]
model, average = paddle.nn.Linear(3, 1), Average()
optimizer = paddle.optimizer.SGD(0.05, parameters=model.parameters())
loop = elastic.Loop(
    model,
    optimizer,
    data,
    batch_size=6,
    epochs=EPOCHS,
    checkpoint=args.checkpoint,
    extra={"average": average},
)
for epoch in loop.epochs():
    for step in epoch:
        for batch in step:
            step.backward((model(batch) ** 2).mean())
        step.update()
        time.sleep(0.05)
        if step.number == EPOCHS * 4 - 2 and os.environ["EDL_STAGE"] == "1":
            args.checkpoint.rename(args.out / "away")  # a disk that is gone
            args.checkpoint.touch()
    average.epochs.set_value(average.epochs + 1)
    with (args.out / f"told.{os.environ['EDL_STAGE']}.{loop.rank}").open("a") as told:
        print(epoch.number, loop.epoch, epoch.steps, len(epoch), file=told)
