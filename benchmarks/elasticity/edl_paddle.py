"""The trainer of resize.py and recovery.py under EDL with Paddle, imported at the top as usual."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this folder is no package

import paddle

from benchmarks.elasticity.networks import make_network
from benchmarks.elasticity.task import PARAMETERS
from benchmarks.elasticity.train import train


def make(task: str) -> tuple[Any, Any]:
    model = make_network(task)
    optimizer = paddle.optimizer.Momentum(
        PARAMETERS["lr"], momentum=PARAMETERS["momentum"], parameters=model.parameters()
    )
    return model, optimizer


if __name__ == "__main__":
    train(make, paddle.nn.functional.cross_entropy)
