"""The training task of the elasticity benchmarks, the same with Paddle and with PyTorch.

This module is of sizes alone; networks are where their framework is.
"""

import argparse
from dataclasses import dataclass
from typing import Any

EPOCH_STEPS = 500  # of ours: a shuffled pass over the data; peers take it in order


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A network and its global batch."""

    batch: int
    pixels: int
    channels: int
    shards: int  # of ours
    images: int  # that exist; they are used again and again

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.channels, self.pixels, self.pixels


# The small network's batch is cut in 6, so that 1, 2 and 3 trainers each have the same work.
# ResNet50's shards hold 4 images: batch norm over 2 would be none.
TASKS = {
    "lenet": Task(batch=96, pixels=28, channels=1, shards=6, images=1920),
    "resnet50": Task(batch=12, pixels=32, channels=3, shards=3, images=240),
}
PARAMETERS = {"lr": 0.01, "momentum": 0.9}


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return the options that the trainers of all launchers have."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--task", choices=sorted(TASKS), default="lenet")
    made.add_argument("--steps", type=int, required=True)
    made.add_argument("--save_steps", type=int, default=20, help="steps between checkpoints")
    made.add_argument("--checkpoint", required=True)
    made.add_argument("--stamps", required=True, help="folder for what the trainers write down")
    return made


def make_data(task: Task) -> tuple[Any, Any]:
    """Return images (float32) and labels (int64), as arrays."""
    import numpy as np

    state = np.random.RandomState(1)
    images = state.randn(task.images, *task.shape).astype("float32")
    return images, state.randint(0, 10, task.images).astype("int64")


def share(task: Task, step: int, rank: int, world: int) -> list[int]:
    """Return this rank's samples of the global batch of `step` (from 0): peers' data parallelism.

    As even as it can be; the ranks before the remainder have one more.
    """
    size, more = divmod(task.batch, world)
    begin = rank * size + min(rank, more)
    end = begin + size + (rank < more)
    first = step * task.batch
    return [(first + place) % task.images for place in range(begin, end)]
