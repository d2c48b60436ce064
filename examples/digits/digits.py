"""The data and the models of this folder's scripts: replace both by your own.

Handwritten digits: 1,797 real grey images of 8x8 pixels that come inside scikit-learn, so that
nothing is downloaded.
"""

import importlib.util
from pathlib import Path

import numpy as np
import paddle
from paddle import nn
from paddle.io import Dataset

TEST_IMAGES = 360
SIDE = 32  # pixels: what LeNet-5 was made for, and ResNet50 accepts


def read_digits():
    """Return the pixels (1797, 64), from 0 to 16, and the labels.

    From scikit-learn's file: to import scikit-learn takes as long as to import the framework, and
    each trainer that starts would wait for it.
    """
    folder = Path(importlib.util.find_spec("sklearn").origin).parent
    table = np.loadtxt(folder / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    return table[:, :-1], table[:, -1]


class Digits(Dataset):
    """One of the two parts. Each item: image (channels, 32, 32) float32 in [-1, 1], label int64."""

    def __init__(self, part: str, channels: int, limit: int | None = None) -> None:
        images, labels = read_digits()
        order = np.random.RandomState(0).permutation(len(labels))  # the same split on every rank
        mine = order[:TEST_IMAGES] if part == "test" else order[TEST_IMAGES:][:limit]
        images = images[mine].reshape(-1, 1, 8, 8).astype("float32") / 8 - 1
        images = images.repeat(SIDE // 8, axis=2).repeat(SIDE // 8, axis=3)
        self.images = np.ascontiguousarray(images.repeat(channels, axis=1))
        self.labels = labels[mine].astype("int64")

    def __getitem__(self, index):
        return self.images[index], self.labels[index]

    def __len__(self):
        return len(self.labels)


class LeNet(nn.Layer):
    """LeNet-5 with batch norm and dropout: the two layers that elastic training must get right."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2D(1, 6, 5), nn.BatchNorm2D(6), nn.ReLU(), nn.MaxPool2D(2),  # (6, 14, 14)
            nn.Conv2D(6, 16, 5), nn.BatchNorm2D(16), nn.ReLU(), nn.MaxPool2D(2),  # (16, 5, 5)
        )  # fmt: skip
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Dropout(0.2), nn.Linear(120, 10)
        )

    def forward(self, images):
        return self.classifier(self.features(images))


def make(name: str, train_images: int | None = None):
    """Return (model, training part, test part); `train_images` cuts the training part short."""
    if name == "resnet50":
        model, channels = paddle.vision.models.resnet50(num_classes=10), 3
    else:
        model, channels = LeNet(), 1
    return model, Digits("train", channels, train_images), Digits("test", channels)
