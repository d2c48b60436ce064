"""An elastic training that reads through a DistillReader, and checks what it gets. A trainer.

Parameter i counts how often sample i was trained, as in tests/e2e/count_train.py; the image of
sample i is full of i, so that the teacher's sum says whose it is.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from distill_reader import DistillReader
from pod_runtime import elastic
from tests.e2e.count_train import Counter

PIXELS = 4


class Images(paddle.io.Dataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.int64]:
        return np.full(PIXELS, index, np.float32), np.int64(index)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--teachers", required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--epochs", type=int, default=100_000)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--end", type=Path, required=True, help="ends with the epoch it comes in")
    args = parser.parse_args()

    paddle.set_default_dtype("float64")
    images = Images(args.samples)
    model = Counter(args.samples)
    optimizer = paddle.optimizer.SGD(1.0, parameters=model.parameters())
    distill = DistillReader(ins=[None, None, None, "image", None], predicts=["sum"])
    distill.set_fixed_teacher(args.teachers)

    def read(where: elastic.ReadFrom) -> Iterator[Any]:
        items: Iterator[Any] = distill.set_batch_generator(loop.shards(images))()
        return items

    loop = elastic.Loop(
        model,
        optimizer,
        images,
        batch_size=48,
        epochs=args.epochs,
        checkpoint=args.checkpoint,
        reader=read,
    )
    for epoch in loop.epochs():
        for step in epoch:
            for pixels, ids, total in step:
                expected = PIXELS * ids.numpy()
                assert (total.numpy()[:, 0] == expected).all(), "another sample's prediction"
                assert (pixels.numpy().sum(axis=1) == expected).all()
                step.backward(-model(ids).mean() * step.samples)
            step.update()
            time.sleep(0.05)
        if args.end.exists():
            loop.stop()
    if loop.rank == 0:
        np.save(args.out, model.seen.numpy())


if __name__ == "__main__":
    main()
