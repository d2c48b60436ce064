"""The trainer of resize.py and recovery.py under torchrun, with DistributedDataParallel.

Run by an interpreter of its own, which has PyTorch and none of ours: standard library beside it.
"""

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this folder is no package

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.elasticity.stamp_files import Stamper
from benchmarks.elasticity.task import PARAMETERS, TASKS, make_data, parser, share


def make_network() -> Any:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(),
        nn.Linear(84, 10),
    )  # fmt: skip


def main() -> None:
    args = parser(__doc__).parse_args()
    task = TASKS[args.task]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    stamper = Stamper(args.stamps)
    network = make_network()
    optimizer = torch.optim.SGD(network.parameters(), **PARAMETERS)
    done = 0
    if os.path.exists(args.checkpoint):
        saved = torch.load(args.checkpoint, weights_only=True)
        network.load_state_dict(saved["network"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["step"]
    model = DistributedDataParallel(network)
    images, labels = (torch.from_numpy(array) for array in make_data(task))
    while done < args.steps:
        mine = share(task, done, rank, world)
        F.cross_entropy(model(images[mine]), labels[mine]).backward()
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        stamper.note(done, rank=rank, world=world)
        if rank == 0 and done % args.save_steps == 0:
            state = {
                "network": network.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": done,
            }
            torch.save(state, args.checkpoint + ".new")
            os.replace(args.checkpoint + ".new", args.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
