"""An object of the script's own belongs to the state, and grows; it differs from rank to rank."""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from pod_runtime import elastic

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--hurry", type=Path, help="once this file exists, steps do not sleep")
parser.add_argument("--snapshot_steps", type=int, default=1)
args = parser.parse_args()


class Numbers(paddle.io.Dataset):
    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        return np.full(2, index, np.float32)


class Collected:
    """Whose values they are does not matter to the training, only that they are one rank's."""

    def __init__(self) -> None:
        self.values = np.zeros(4)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def set_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state["values"]


model = paddle.nn.Linear(2, 1)
optimizer = paddle.optimizer.Momentum(0.001, parameters=model.parameters())
collected = Collected()
loop = elastic.Loop(
    model, optimizer, Numbers(), batch_size=6, epochs=2, snapshot_steps=args.snapshot_steps,
    extra={"collected": collected},
)  # fmt: skip
if loop.step_count == 0:
    collected.values = np.full(4, float(loop.rank))
for epoch in loop.epochs():
    for step in epoch:
        if step.number == 2:
            collected.values = np.full(100_000, float(loop.rank))
        for batch in step:
            step.backward(model(batch).mean())
        step.update()
        if not (args.hurry and args.hurry.exists()):
            time.sleep(0.3)  # so that a test sees the steps go by
if loop.rank == 0:
    ranks = set(collected.values.tolist())
    whose = " and ".join(f"{rank:.0f}" for rank in sorted(ranks))
    (args.out / "grown").write_text(f"{collected.values.size} of rank {whose}")
