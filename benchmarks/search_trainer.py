"""A trial of benchmarks/search.py: samples cost time, and the accuracy follows a made-up curve.

As in waiting_trainer.py trainers do not fight for the cores of a small machine; all else is real.
The curve rises to the trial's quality, the slower the smaller its rate is, with some noise that
follows from both and the epoch: so a good trial may look bad at first.
"""

import argparse
import math
import random
import time

from pod_runtime import elastic

BATCH, SHARDS, STEPS = 48, 12, 4  # steps of an epoch


def accuracy(quality: float, rate: float, epochs: int) -> float:
    """Return what a trial has reached after so many epochs."""
    noise = random.Random(f"{quality} {rate} {epochs}").gauss(0, 0.02 / math.sqrt(epochs))
    return quality * (1 - math.exp(-rate * epochs)) + noise


def main() -> None:
    import torch
    from torch import nn

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample_s", type=float, required=True)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--quality", type=float, required=True)
    parser.add_argument("--rate", type=float, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images = torch.randn(BATCH * STEPS, 16, generator=torch.Generator().manual_seed(1))
    loop = elastic.Loop(
        model, optimizer, list(images), batch_size=BATCH, epochs=args.epochs,
        checkpoint=args.checkpoint, shards=SHARDS,
    )  # fmt: skip
    for epoch in loop.epochs():
        for step in epoch:
            for batch in step:
                time.sleep(args.sample_s * len(batch))
                step.backward(model(batch).square().mean())
            step.update()
        loop.log(accuracy=accuracy(args.quality, args.rate, epoch.number + 1))


if __name__ == "__main__":
    main()
