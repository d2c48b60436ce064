"""Measure the accuracy that narrow labels cost a student, with a teacher behind a real server.

    python -m benchmarks.distillation.options_accuracy --seeds 10 --json FILE

A teacher learns from 1,437 images of scikit-learn's digits (8x8) and is served by a process of its
own, with a softmax at temperature 4. Small students learn from its soft labels of 300 images alone,
as these come by each option; students of one seed have the same first weights and batches. Accuracy
is that on 360 images that nobody has learned from.
"""

import argparse
import contextlib
import json
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOG_minloglevel", "2")

import numpy as np
import paddle
from paddle import nn
from sklearn.datasets import load_digits

from benchmarks.distillation.processes import Teacher
from benchmarks.harness import free_port
from distill_reader import DistillReader, soft_cross_entropy
from distill_reader.convert import save_servable
from distill_reader.errors import DistillError
from distill_reader.model.normalization import Normalization
from distill_reader.student.clients.connect import connect

TRAIN = 1437
_SCALE = 15  # a digit's 0 to 16 as a pixel's 0 to 240
NORMALIZATION = Normalization(scale=1 / _SCALE, mean=(5.0,), std=(6.0,))
TEMPERATURE = 4.0
_STUDENT_IMAGES = 300
_BATCH, _EPOCHS, _TEACHER_EPOCHS = 32, 60, 40

VARIANTS: dict[str, Callable[[DistillReader], DistillReader]] = {
    "float32": lambda reader: reader,
    "float16": lambda reader: reader.set_wire_dtype(predicts="float16"),
    "uint8": lambda reader: reader.set_wire_dtype(ins="uint8"),
    "top-5": lambda reader: reader.set_top_k(5),
    "top-3": lambda reader: reader.set_top_k(3),
    "top-3, renormalized": lambda reader: reader.set_top_k(3, rest="renormalize"),
    "top-1": lambda reader: reader.set_top_k(1),
    "top-1, renormalized": lambda reader: reader.set_top_k(1, rest="renormalize"),
}


def pixels_and_labels() -> tuple[Any, Any]:
    """Return (1797, 64) uint8 and the digits."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    return (digits.data[order] * _SCALE).astype(np.uint8), digits.target[order]


def network(hidden: int) -> Any:
    return nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def train(
    model: Any, loss: Callable[[Any, Any], Any], images: Any, wanted: Any, epochs: int, seed: int
) -> None:
    """Train on all images, in an order that the seed decides."""
    optimizer = paddle.optimizer.Adam(2e-3, parameters=model.parameters())
    random = np.random.default_rng(seed)
    for _ in range(epochs):
        order = random.permutation(len(images))
        for start in range(0, len(order), _BATCH):
            some = order[start : start + _BATCH]
            loss(model(paddle.to_tensor(images[some])), paddle.to_tensor(wanted[some])).backward()
            optimizer.step()
            optimizer.clear_grad()


class _Softened(nn.Layer):  # type: ignore[misc]  # Paddle has no types
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Any) -> Any:
        return nn.functional.softmax(self.model(image) / TEMPERATURE)


def soft_loss(logits: Any, soft_labels: Any) -> Any:
    return TEMPERATURE**2 * soft_cross_entropy(logits / TEMPERATURE, soft_labels)


def accuracy(model: Any, images: Any, labels: Any) -> float:
    with paddle.no_grad():
        found = model(paddle.to_tensor(images)).numpy().argmax(1)
    return float((found == labels).mean())


@contextlib.contextmanager
def served(model: Any, folder: Path) -> Iterator[str]:
    """Serve the model's softmax at TEMPERATURE; yield the endpoint."""
    layer = _Softened(model)
    layer.eval()
    spec = [paddle.static.InputSpec([None, 64], "float32", "image")]
    save_servable(
        layer,
        spec,
        folder / "digits",
        feed_alias=["image"],
        fetch_alias=["score"],
        normalizations={"image": NORMALIZATION},
    )
    port = free_port()
    arguments = ["distill_reader.serve", "--model", str(folder / "digits"), "--port", str(port)]
    teacher = Teacher(arguments, port, folder / "log", cores=os.sched_getaffinity(0))
    try:
        while True:
            with contextlib.suppress(DistillError):
                connect(f"fast://{teacher.endpoint}").close()
                break
            if teacher.process.poll() is not None:
                raise SystemExit((folder / "log").read_text())
        yield teacher.endpoint
    finally:
        teacher.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    pixels, labels = pixels_and_labels()
    images = NORMALIZATION.apply(pixels, "float32")
    teacher = network(256)
    hard = nn.CrossEntropyLoss()
    train(teacher, hard, images[:TRAIN], labels[:TRAIN], epochs=_TEACHER_EPOCHS, seed=0)
    soft: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory(prefix="edl-options-") as folder,
        served(teacher, Path(folder)) as endpoint,
    ):
        for name, option in VARIANTS.items():
            given = pixels if name == "uint8" else images
            reader = DistillReader(["image"], ["score"]).set_fixed_teacher(endpoint)
            ((_, soft[name]),) = option(reader).set_batch_generator([(given[:TRAIN],)])()
    results: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for seed in range(args.seeds):
        for name in VARIANTS:
            paddle.seed(seed)
            student = network(16)
            train(
                student, soft_cross_entropy, images[:TRAIN], soft[name], epochs=_EPOCHS, seed=seed
            )
            results[name].append(accuracy(student, images[TRAIN:], labels[TRAIN:]))
    base = results["float32"]
    variants = {}
    for name, values in results.items():
        gains = [one - other for one, other in zip(values, base, strict=True)]
        variants[name] = {
            "accuracy": statistics.mean(values),
            "difference": statistics.mean(gains),
            "standard_error": statistics.stdev(gains) / math.sqrt(len(gains)),
            "largest_label_error": float(np.abs(soft[name] - soft["float32"]).max()),
        }
    best = accuracy(teacher, images[TRAIN:], labels[TRAIN:])
    args.json.write_text(json.dumps({"teacher": best, "variants": variants}))


if __name__ == "__main__":
    main()
