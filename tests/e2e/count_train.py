"""A training whose parameter i counts how often sample i was trained. Run as a trainer.

The loss of sample i is -w[i] times the size of the global batch, and the learning rate is 1, so
one exact pass over the data adds exactly 1 to every parameter.
"""

import argparse
import os
import time
from pathlib import Path

import numpy as np
import paddle

from pod_runtime import elastic


class Ids(paddle.io.Dataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> np.int64:
        return np.int64(index)


class Counter(paddle.nn.Layer):
    def __init__(self, count: int) -> None:
        super().__init__()
        zero = paddle.nn.initializer.Constant(0.0)
        self.seen = self.create_parameter([count], default_initializer=zero)

    def forward(self, ids: paddle.Tensor) -> paddle.Tensor:
        return paddle.gather(self.seen, ids)


class Journal:
    """Lines `stage step time`: this trainer had committed that step, and lived, at that time."""

    def __init__(self, folder: str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        name = f"{os.environ['EDL_STAGE']}.{os.getpid()}"
        self._file = (Path(folder) / name).open("a", buffering=1)

    def note(self, step: int) -> None:
        stage = os.environ["EDL_STAGE"]  # another one after a change by join
        self._file.write(f"{stage} {step} {time.time():.3f}\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--batch_size", type=int, default=48)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--step_s", type=float, default=0.02)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--checkpoint")
    parser.add_argument("--save_steps", type=int, default=10)
    parser.add_argument("--out", required=True)
    parser.add_argument("--end", type=Path, help="once this file exists, no epoch follows")
    parser.add_argument("--journal", help="folder: each rank notes there what it has committed")
    args = parser.parse_args()

    paddle.set_default_dtype("float64")
    model = Counter(args.samples)
    optimizer = paddle.optimizer.SGD(1.0, parameters=model.parameters())
    data = paddle.io.DataLoader(
        Ids(args.samples), batch_size=args.batch_size, shuffle=True, num_workers=args.workers
    )
    loop = elastic.Loop(
        model,
        optimizer,
        data,
        epochs=args.epochs,
        checkpoint=args.checkpoint,
        save_steps=args.save_steps,
    )
    journal = Journal(args.journal) if args.journal else None
    for epoch in loop.epochs():
        for step in epoch:
            if journal is not None:  # to ask for a step is to have committed the one before
                journal.note(step.number)
            for ids in step:
                step.backward(-model(ids).mean() * step.samples)
            step.update()
            time.sleep(args.step_s)
        if args.end is not None and args.end.exists():
            loop.stop()
    if journal is not None:
        journal.note(loop.step_count)
    if loop.rank == 0:
        np.save(args.out, model.seen.numpy())


if __name__ == "__main__":
    main()
