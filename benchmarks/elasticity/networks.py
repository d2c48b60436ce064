"""The networks of the tasks, with Paddle."""

from typing import Any

from paddle import nn


def make_network(name: str) -> Any:
    if name == "resnet50":
        from paddle.vision.models import resnet50

        return resnet50(num_classes=10)
    return nn.Sequential(
        nn.Conv2D(1, 6, 5, padding=2), nn.BatchNorm2D(6), nn.ReLU(), nn.MaxPool2D(2),
        nn.Conv2D(6, 16, 5), nn.BatchNorm2D(16), nn.ReLU(), nn.MaxPool2D(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(),
        nn.Linear(84, 10),
    )  # fmt: skip
