"""A training whose accuracy after each epoch is known beforehand: quality / 2 ** (epochs left)."""

import argparse
import time

import torch
from torch import nn

from pod_runtime import elastic


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--quality", type=float, required=True)
    parser.add_argument("--step_s", type=float, default=0.1)
    parser.add_argument("--checkpoint")
    args = parser.parse_args()
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = elastic.Loop(
        model,
        optimizer,
        [(torch.tensor([1.0]), torch.tensor([2.0])) for _ in range(160)],
        batch_size=16,
        epochs=args.epochs,
        checkpoint=args.checkpoint,
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
