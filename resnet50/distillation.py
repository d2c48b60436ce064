"""Both sides of a distillation: a student's reader and loss, and the folder of a teacher.

A teacher takes `image`, (N, 3, H, W) float32 as this example's students see them, and returns
`score`, (N, class_dim) probabilities: the names that the original's teachers have.

python distillation.py --model=ResNeXt101_32x16d --pretrained_model=FILE   weights to a folder
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paddle
import paddle.nn.functional as F
from networks import load_pretrained, make_network
from options import parse
from paddle import nn

from distill_reader.convert import save_servable
from distill_reader.errors import DistillError
from distill_reader.model.normalization import Normalization
from distill_reader.student.labels.losses import soft_cross_entropy
from distill_reader.student.reader import DistillReader
from edl import elastic
from edl.option_types import OptionError

IMAGE, SCORE = "image", "score"


class Teachers:
    """Asks the teachers of the command line about this trainer's images."""

    def __init__(self, options: argparse.Namespace, loader: paddle.io.DataLoader) -> None:
        self._options = options
        self._loader = loader

    def __str__(self) -> str:
        options = self._options
        if options.distill_teachers:
            return str(options.distill_teachers)
        where = options.distill_discovery or "PADDLE_DISTILL_BALANCE_SERVER"
        return f"{options.distill_service_name or 'PADDLE_DISTILL_SERVICE_NAME'} of {where}"

    def read(self, loop: elastic.Loop) -> Iterator[Any]:
        """Return this trainer's batches from the cursor on, each with what the teachers say.

        The loop asks for it in every stage: answers for batches that another trainer computes by
        then are dropped with the reader, and asked for again there. Worker processes decode.
        """
        options = self._options
        # What loop.shards yields: (epoch, step, shard, images, labels). Only images are sent.
        reader = DistillReader(ins=[None, None, None, IMAGE, None], predicts=[SCORE])
        if options.distill_teachers:
            reader.set_fixed_teacher(options.distill_teachers)
        elif options.distill_discovery:
            reader.set_dynamic_teacher(
                options.distill_discovery.split(","),
                options.distill_service_name,
                options.distill_max_teacher,
            )
        if options.distill_wire_dtype != "float32":
            reader.set_wire_dtype(ins=options.distill_wire_dtype)
        reader.set_top_k(options.distill_top_k)
        reader.set_no_teacher_timeout(options.no_teacher_timeout_s)
        reader.set_batch_generator(loop.shards(self._loader))
        return reader()


def taught_loss(scores, labels, soft_labels, *, alpha: float, smoothing: float):
    """Return a shard's mean loss.

    The published run, alpha 1, listens to the teacher alone: the cross entropy of the student's
    softmax with the teacher's, at no temperature.

    Args:
        scores: (N, class_dim) of the student, before softmax.
        soft_labels: (N, class_dim) probabilities of the teacher.
    """
    soft = soft_cross_entropy(scores, soft_labels)
    if alpha == 1:
        return soft
    return alpha * soft + (1 - alpha) * F.cross_entropy(scores, labels, label_smoothing=smoothing)


def as_input(images, options: argparse.Namespace):
    """Return images as the network wants them: a student's are read as its teachers take them."""
    if images.dtype == paddle.uint8:
        mean, std = (
            paddle.to_tensor(values, "float32").reshape([3, 1, 1])
            for values in (options.image_mean, options.image_std)
        )
        images = (images.astype("float32") / 255 - mean) / std
    if options.use_distill_service and options.data_format == "NHWC":
        return images.transpose([0, 2, 3, 1])
    return images


class Served(nn.Layer):
    """A network as a teacher serves it: CHW images in, probabilities out."""

    def __init__(self, network: nn.Layer, *, channels_last: bool) -> None:
        super().__init__()
        self.network = network
        self.channels_last = channels_last

    def forward(self, images):
        if self.channels_last:
            images = images.transpose([0, 2, 3, 1])
        return F.softmax(self.network(images), axis=1)


def save_teacher(network: nn.Layer, options: argparse.Namespace) -> str:
    """Write what `python -m distill_reader.serve --model DIR` serves; return a line about it."""
    folder = Path(options.serving_model_dir)
    served = Served(network, channels_last=options.data_format == "NHWC")
    served.eval()
    spec = paddle.static.InputSpec([None, *options.image_shape], "float32", IMAGE)
    # For students that send pixels as they are (--distill_wire_dtype uint8).
    pixels = Normalization(
        mean=tuple(options.image_mean), std=tuple(options.image_std), layout="CHW"
    )
    save_servable(
        served,
        [spec],
        folder,
        feed_alias=[IMAGE],
        fetch_alias=[SCORE],
        normalizations={IMAGE: pixels},
    )
    return f"servable: {folder}, takes {IMAGE}, returns {SCORE}"


def main() -> int:
    """Make the folder of a teacher out of weights that were trained elsewhere."""
    options = parse()
    try:
        if options.pretrained_model is None:
            raise OptionError("--pretrained_model: missing; name the teacher's weights")
        network = make_network(options)
        print(load_pretrained(network, options.pretrained_model))
        print(save_teacher(network, options))
    except (OptionError, DistillError, OSError) as error:
        print(f"distillation.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
