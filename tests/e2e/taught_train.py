"""Train a student of scikit-learn's digits by its teachers' answers alone, without labels.

It trains slowly, so that things can happen to it, until the file --hurry is there; but however that
goes, it computes the same.
"""

import argparse
import importlib.util
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F  # noqa: N812  as everywhere

from distill_reader import DistillReader, soft_cross_entropy
from pod_runtime import elastic

PIXELS, CLASSES = 64, 10
_SKLEARN = importlib.util.find_spec("sklearn")  # whose import takes as long as that of Paddle
assert _SKLEARN is not None
assert _SKLEARN.origin is not None
DIGITS = Path(_SKLEARN.origin).parent / "datasets" / "data" / "digits.csv.gz"


class Digits(paddle.io.Dataset):
    def __init__(self, train: bool) -> None:
        part = slice(0, 1440) if train else slice(1440, None)
        table = np.loadtxt(DIGITS, delimiter=",")[part]
        self.images = (table[:, :PIXELS] / 16).astype(np.float32)
        self.labels = table[:, PIXELS].astype(np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[np.ndarray[Any, Any], np.int64]:
        return self.images[index], self.labels[index]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--discovery", help="service `digits` of it; else --teachers")
    parser.add_argument("--teachers")
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hurry", type=Path, required=True)
    args = parser.parse_args()

    paddle.seed(7)
    model = paddle.nn.Sequential(
        paddle.nn.Linear(PIXELS, 32), paddle.nn.Tanh(), paddle.nn.Linear(32, CLASSES)
    )
    optimizer = paddle.optimizer.Momentum(0.05, parameters=model.parameters())
    digits, test = Digits(train=True), Digits(train=False)

    def read(where: elastic.ReadFrom) -> Iterator[Any]:
        reader = DistillReader(ins=[None, None, None, "pixels", None], predicts=["probs"])
        if args.discovery:
            reader.set_dynamic_teacher(args.discovery, "digits", require_max_teacher=4)
        else:
            reader.set_fixed_teacher(args.teachers)
        items: Iterator[Any] = reader.set_batch_generator(loop.shards(digits))()
        return items

    def judge(images: Any, labels: Any) -> dict[str, Any]:
        scores = model(images)
        return {
            "loss": F.cross_entropy(scores, labels, reduction="sum"),
            "hits": (scores.argmax(axis=1) == labels).sum(),
        }

    loop = elastic.Loop(
        model, optimizer, digits, batch_size=48, epochs=args.epochs, checkpoint=args.checkpoint,
        seed=3, reader=read,
    )  # fmt: skip
    slow_from, slower_from = args.epochs * 30 // 2, args.epochs * 30 * 5 // 6
    for epoch in loop.epochs():
        for step in epoch:
            for images, _labels, probs in step:
                step.backward(soft_cross_entropy(model(images), probs))
            step.update()
            if not args.hurry.exists():
                # So slow in the end that it does not come there before it is told to.
                slow = 0.5 if step.number >= slow_from else 0.05
                time.sleep(5.0 if step.number >= slower_from else slow)
    sums = loop.evaluate(test, judge, batch_size=100)
    if loop.rank == 0:
        told = {name: total / len(test) for name, total in sums.items()}
        args.out.write_text(json.dumps(told))


if __name__ == "__main__":
    main()
