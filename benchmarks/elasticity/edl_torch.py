"""The trainer of resize.py and recovery.py under EDL with PyTorch, imported at the top as usual."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this folder is no package

import torch

from benchmarks.elasticity.task import PARAMETERS
from benchmarks.elasticity.train import train
from benchmarks.elasticity.train_torch import make_network


def make(_task: str) -> tuple[Any, Any]:
    torch.set_num_threads(1)  # as the peer does
    model = make_network()
    return model, torch.optim.SGD(model.parameters(), **PARAMETERS)


if __name__ == "__main__":
    train(make, torch.nn.functional.cross_entropy)
