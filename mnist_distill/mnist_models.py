"""The teacher and its students. All take images (N, 1, 28, 28) and return scores (N, 10)."""

from pathlib import Path

import paddle
import paddle.nn.functional as F
from mnist_data import CLASSES, SIDE
from paddle import nn

from distill_reader.convert import save_servable

# What the teacher's input and output are called by those who ask it, as in the original.
INPUT, OUTPUT = "img", "prediction"


class ConvNet(nn.Layer):
    """The original's convolutional network, with a hidden layer and dropout: the teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2D(1, 20, 5), nn.BatchNorm2D(20), nn.ReLU(), nn.MaxPool2D(2),  # (20, 12, 12)
            nn.Conv2D(20, 50, 5), nn.BatchNorm2D(50), nn.ReLU(), nn.MaxPool2D(2),  # (50, 4, 4)
        )  # fmt: skip
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Linear(800, 200), nn.ReLU(), nn.Dropout(0.5), nn.Linear(200, CLASSES)
        )

    def forward(self, images):
        return self.classifier(self.features(images))


class Perceptron(nn.Layer):
    """Two small hidden layers and no convolution: 27,000 weights where the teacher has 188,000."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(SIDE * SIDE, 32), nn.ReLU(),
            nn.Linear(32, 32), nn.ReLU(),
            nn.Linear(32, CLASSES),
        )  # fmt: skip

    def forward(self, images):
        return self.layers(images)


class Softmax(nn.Layer):
    """A layer of weights and nothing else: 7,850 of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, CLASSES))

    def forward(self, images):
        return self.layers(images)


MODELS = {"cnn": ConvNet, "mlp": Perceptron, "softmax": Softmax}


class Served(nn.Layer):
    """A network as a teacher serves it: probabilities instead of scores."""

    def __init__(self, network: nn.Layer) -> None:
        super().__init__()
        self.network = network

    def forward(self, images):
        return F.softmax(self.network(images), axis=1)


def save_teacher(network: nn.Layer, folder: Path) -> None:
    """Write `network` so that `python -m distill_reader.serve --model FOLDER` serves it."""
    served = Served(network)
    served.eval()
    spec = paddle.static.InputSpec([None, 1, SIDE, SIDE], "float32", INPUT)
    save_servable(served, [spec], folder, feed_alias=[INPUT], fetch_alias=[OUTPUT])
