"""The data and the model of this folder's scripts: replace both by your own.

Handwritten digits: 1,797 real grey images of 8x8 pixels that come inside scikit-learn, so that
nothing is downloaded.
"""

import importlib.util
from pathlib import Path

import numpy as np
from torch import nn
from torch.utils.data import Dataset

TEST_IMAGES = 360


def read_digits():
    """Return the pixels (1797, 64), from 0 to 16, and the labels.

    From scikit-learn's file: to import scikit-learn takes as long as to import the framework, and
    each trainer that starts would wait for it.
    """
    folder = Path(importlib.util.find_spec("sklearn").origin).parent
    table = np.loadtxt(folder / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    return table[:, :-1], table[:, -1]


class Digits(Dataset):
    """One of the two parts. Each item: image (1, 32, 32) float32 in [-1, 1], label int64."""

    def __init__(self, part: str) -> None:
        images, labels = read_digits()
        order = np.random.RandomState(0).permutation(len(labels))  # the same split on every rank
        mine = order[:TEST_IMAGES] if part == "test" else order[TEST_IMAGES:]
        images = images[mine].reshape(-1, 1, 8, 8).astype("float32") / 8 - 1
        self.images = images.repeat(4, axis=2).repeat(4, axis=3)
        self.labels = labels[mine].astype("int64")

    def __getitem__(self, index):
        return self.images[index], self.labels[index]

    def __len__(self):
        return len(self.labels)


class LeNet(nn.Sequential):
    """LeNet-5 with batch norm and dropout: the two layers that elastic training must get right."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 6, 5), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),  # (6, 14, 14)
            nn.Conv2d(6, 16, 5), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),  # (16, 5, 5)
            nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Dropout(0.2), nn.Linear(120, 10),
        )  # fmt: skip
