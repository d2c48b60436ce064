"""Small CNNs for the digits, each made of cells like the one that a search has drawn.

A cell has three nodes. The first two apply an operation each to the cell's input, the third one to
their sum, as in the cells of NASNet and DARTS; its output is added to the input.
"""

import sys
from pathlib import Path

import numpy as np
from paddle import nn
from paddle.io import Dataset

sys.path.append(str(Path(__file__).resolve().parents[1] / "digits"))
from digits import Digits, LeNet

VALIDATION_IMAGES = 287  # of the 1,437 that are not for testing
OPERATIONS = ("conv3", "conv5", "separable3", "max", "average", "none")


class Part(Dataset):
    """A part of the digits. Each item: image (1, 8, 8), for LeNet (1, 32, 32), and its label."""

    def __init__(self, name: str, side: int) -> None:
        whole = Digits("test" if name == "test" else "train", 1)
        order = np.random.RandomState(1).permutation(len(whole))  # the same on every rank
        mine = {
            "test": np.arange(len(whole)),
            "validation": order[:VALIDATION_IMAGES],
            "train": order[VALIDATION_IMAGES:],
        }[name]
        # The pixels of the original images are 4 pixels wide in those for LeNet.
        stride = 32 // side
        self.images = np.ascontiguousarray(whole.images[mine][:, :, ::stride, ::stride])
        self.labels = whole.labels[mine]

    def __getitem__(self, index):
        return self.images[index], self.labels[index]

    def __len__(self):
        return len(self.labels)


def operation(name: str, width: int) -> nn.Layer:
    """Return a layer that keeps the shape (N, width, H, W)."""
    if name == "none":
        return nn.Identity()
    if name in ("max", "average"):
        pool = nn.MaxPool2D if name == "max" else nn.AvgPool2D
        return pool(3, stride=1, padding=1)
    size = int(name[-1])
    convolution = nn.Conv2D(width, width, size, padding=size // 2, bias_attr=False)
    if name == "separable3":
        convolution = nn.Sequential(
            nn.Conv2D(width, width, size, padding=size // 2, groups=width, bias_attr=False),
            nn.Conv2D(width, width, 1, bias_attr=False),
        )
    return nn.Sequential(nn.ReLU(), convolution, nn.BatchNorm2D(width))


class Cell(nn.Layer):
    """(N, width, H, W) -> the same shape."""

    def __init__(self, operations: tuple[str, str, str], width: int) -> None:
        super().__init__()
        self.first, self.second, self.third = (operation(name, width) for name in operations)

    def forward(self, x):
        return x + self.third(self.first(x) + self.second(x))


class Cells(nn.Sequential):
    """Images (N, 1, 8, 8) -> scores (N, 10)."""

    def __init__(
        self, operations: tuple[str, str, str], count: int, width: int, dropout: float
    ) -> None:
        layers = [nn.Conv2D(1, width, 3, padding=1), nn.BatchNorm2D(width)]
        for number in range(count):
            layers.append(Cell(operations, width))
            if number == 0:
                layers.append(nn.MaxPool2D(2))  # (4, 4)
        layers += [nn.AdaptiveAvgPool2D(2), nn.Flatten(), nn.Dropout(dropout)]
        super().__init__(*layers, nn.Linear(4 * width, 10))


def make(args) -> tuple[nn.Layer, int]:
    """Return the model that the arguments describe, and the side of its images in pixels."""
    if args.model == "lenet":
        return LeNet(), 32
    operations = (args.first, args.second, args.third)
    return Cells(operations, args.cells, args.width, args.dropout), 8
