"""A training whose accuracy after each epoch is known beforehand: quality / 2 ** (epochs left)."""

import argparse
import time

import numpy as np
import paddle

from pod_runtime import elastic


class Pairs(paddle.io.Dataset):
    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return np.array([1.0], "float32"), np.array([2.0], "float32")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--quality", type=float, required=True)
    parser.add_argument("--step_s", type=float, default=0.1)
    parser.add_argument("--checkpoint")
    args = parser.parse_args()
    model = paddle.nn.Linear(1, 1)
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    loop = elastic.Loop(
        model, optimizer, Pairs(), batch_size=16, epochs=args.epochs, checkpoint=args.checkpoint
    )
    for epoch in loop.epochs():
        for step in epoch:
            for inputs, targets in step:
                step.backward(((model(inputs) - targets) ** 2).mean())
            step.update()
            time.sleep(args.step_s)
        loop.log(accuracy=args.quality / 2 ** (args.epochs - epoch.number - 1))


if __name__ == "__main__":
    main()
