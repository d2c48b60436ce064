"""The networks: Paddle's own, and the two that Paddle lacks."""

import argparse

import paddle
from paddle import nn
from paddle.vision import models
from paddle.vision.models.resnet import BasicBlock, BottleneckBlock, ResNet

from edl.option_types import OptionError

# All of them halve an image five times before they pool. That is meant for 224 pixels: 32 pixels
# come out as one. They are left as they are, so that weights fit.


class ResNetVd(ResNet):
    """ResNet-D of He et al. 2018, "Bag of Tricks", arXiv 1812.01187, figure 2.

    Two changes to Paddle's, whose stride already sits in the 3x3 convolution, as in ResNet-B: three
    3x3 convolutions instead of the first 7x7 one, and shortcuts that pool before their 1x1
    convolution, which then skips no pixel.
    """

    def __init__(self, depth: int, num_classes: int) -> None:
        block = BottleneckBlock if depth >= 50 else BasicBlock
        super().__init__(block, depth, num_classes=num_classes)
        self.conv1 = nn.Sequential(
            nn.Conv2D(3, 32, 3, stride=2, padding=1, bias_attr=False),
            nn.BatchNorm2D(32),
            nn.ReLU(),
            nn.Conv2D(32, 32, 3, padding=1, bias_attr=False),
            nn.BatchNorm2D(32),
            nn.ReLU(),
            nn.Conv2D(32, 64, 3, padding=1, bias_attr=False),
        )
        for stage in (self.layer2, self.layer3, self.layer4):
            old, norm = stage[0].downsample
            outputs, inputs = old.weight.shape[:2]
            stage[0].downsample = nn.Sequential(
                # An odd side is rounded up, as by the strided convolution beside it.
                nn.AvgPool2D(2, stride=2, ceil_mode=True),
                nn.Conv2D(inputs, outputs, 1, bias_attr=False),
                norm,
            )


class ToChannelsFirst(nn.Layer):
    """(N, H, W, C) to (N, C, H, W)."""

    def forward(self, features):
        return features.transpose([0, 3, 1, 2])


def make_network(options: argparse.Namespace) -> nn.Layer:
    """Return the network of `options.model`; it makes (N, class_dim) logits of images."""
    classes = options.class_dim
    if options.model.endswith("_vd"):
        network = ResNetVd(int(options.model.removeprefix("ResNet").removesuffix("_vd")), classes)
    elif options.model == "ResNeXt101_32x16d":  # Mahajan et al. 2018, arXiv 1805.00932
        network = ResNet(BottleneckBlock, 101, width=16, groups=32, num_classes=classes)
    else:
        network = getattr(models, options.model.lower())(num_classes=classes)
    if options.data_format == "NHWC":
        use_channels_last(network)
    return network


def use_channels_last(network: nn.Layer) -> None:
    """Make `network` take (N, H, W, 3) images; its parameters stay as they are.

    Paddle's vision models have no argument for it; their layers read the format at each call.
    """
    for layer in network.sublayers():
        for name in ("_data_format", "data_format"):
            if getattr(layer, name, None) == "NCHW":
                setattr(layer, name, "NHWC")
        if isinstance(layer, nn.Conv2D):
            layer._channel_dim = 3  # of its bias
    if isinstance(network, models.VGG):  # its first linear layer counts on the order of features
        network.avgpool = nn.Sequential(network.avgpool, ToChannelsFirst())


def load_pretrained(network: nn.Layer, path: str) -> str:
    """Take over the weights in `path` that fit, and return what was found, in one line.

    A head for another number of classes stays as it was made.

    Raises:
        OptionError: it is no file of weights, or none of them fits.
    """
    try:
        found = paddle.load(path)
    except (OSError, ValueError, RuntimeError, EOFError, ImportError) as error:
        raise OptionError(f"--pretrained_model: {path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise OptionError(
            f"--pretrained_model: {path} holds a {type(found).__name__}; give a file that "
            f"paddle.save(network.state_dict(), FILE) has made"
        )
    wanted = network.state_dict()
    fitting = {
        name: found[name]
        for name, tensor in wanted.items()
        if name in found and list(found[name].shape) == list(tensor.shape)
    }
    if not fitting:
        raise OptionError(
            f"--pretrained_model: none of the {len(found)} weights in {path} fits the network; "
            f"give the same --model"
        )
    network.set_state_dict(wanted | fitting)
    others = sorted(wanted.keys() - fitting.keys())
    left = f"; not in it, or of another shape, and left as made: {', '.join(others)}"
    return f"{len(fitting)} of {len(wanted)} weights from {path}" + (left if others else "")
