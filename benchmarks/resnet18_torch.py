"""ResNet18 in PyTorch, as Paddle's `vision.models.resnet18` has it; torchvision is not needed."""

from typing import Any

import torch.nn.functional as F  # noqa: N812
from torch import nn


class Block(nn.Module):  # type: ignore[misc]  # PyTorch has no types here
    """Two convolutions and a way around them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(after)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(after)
        self.around: nn.Module = nn.Identity()
        if stride > 1 or before != after:
            self.around = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, inputs: Any) -> Any:
        found = F.relu(self.first_norm(self.first(inputs)))
        return F.relu(self.second_norm(self.second(found)) + self.around(inputs))


def resnet18(classes: int = 10) -> Any:
    """Return the network for images with three channels, (B, 3, H, W)."""
    widths = (64, 64, 128, 128, 256, 256, 512, 512)
    blocks = [
        Block(before, after, 1 if before == after else 2)
        for before, after in zip((64, *widths[:-1]), widths, strict=True)
    ]
    return nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
        nn.MaxPool2d(3, 2, 1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(512, classes),
    )  # fmt: skip
