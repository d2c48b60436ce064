"""A training that can tell afterwards what it did. Run as a trainer, and alone as the reference.

Parameter i of `seen` counts how often sample i was trained: the loss of sample i is -seen[i] times
the size of the global batch, at a learning rate of 1, so one exact pass over the data adds exactly
1 to each. Beside them a small network learns, whose parameters depend on the order of the batches.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np

from pod_runtime import elastic

BATCH = 48
SHARDS = 4  # as many as a job may have trainers
FEATURES = 8


def torch_parts(samples: int) -> tuple[Any, Any, Any, Any]:
    """Return model, optimizer, data and the loss of (ids, samples of the step)."""
    import torch

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)

    class Counter(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.seen = torch.nn.Parameter(torch.zeros(samples))
            self.net = torch.nn.Sequential(
                torch.nn.Linear(FEATURES, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
            )

    model = Counter()
    optimizer = torch.optim.SGD(
        [
            {"params": [model.seen], "lr": 1.0},
            {"params": model.net.parameters(), "lr": 0.02, "momentum": 0.9},
        ]
    )
    data: Any = torch.utils.data.DataLoader(range(samples), batch_size=BATCH, shuffle=True)

    def loss(ids: Any, step_samples: int) -> Any:
        features = torch.sin(ids[:, None] * torch.arange(1.0, FEATURES + 1))
        wrong = model.net(features)[:, 0] - torch.cos(ids.double())
        return (wrong * wrong).mean() - model.seen[ids].mean() * step_samples

    return model, optimizer, data, loss


def paddle_parts(samples: int) -> tuple[Any, Any, Any, Any]:
    """As `torch_parts`, without momentum: Paddle has one for all parameters."""
    import paddle

    paddle.set_default_dtype("float64")
    paddle.seed(1)

    class Ids(paddle.io.Dataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return samples

        def __getitem__(self, index: int) -> np.int64:
            return np.int64(index)

    class Counter(paddle.nn.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            zero = paddle.nn.initializer.Constant(0.0)
            self.seen = self.create_parameter([samples], default_initializer=zero)
            self.net = paddle.nn.Sequential(
                paddle.nn.Linear(FEATURES, 16), paddle.nn.Tanh(), paddle.nn.Linear(16, 1)
            )

    model = Counter()
    optimizer = paddle.optimizer.SGD(
        1.0,
        parameters=[
            {"params": [model.seen]},
            {"params": model.net.parameters(), "learning_rate": 0.02},
        ],
    )
    data = paddle.io.DataLoader(Ids(), batch_size=BATCH, shuffle=True)

    def loss(ids: Any, step_samples: int) -> Any:
        numbers = ids.astype("float64")
        features = paddle.sin(numbers[:, None] * paddle.arange(1, FEATURES + 1, dtype="float64"))
        wrong = model.net(features)[:, 0] - paddle.cos(numbers)
        return (wrong * wrong).mean() - paddle.gather(model.seen, ids).mean() * step_samples

    return model, optimizer, data, loss


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--framework", choices=["torch", "paddle"], required=True)
    parser.add_argument("--samples", type=int, default=480)
    parser.add_argument("--epochs", type=int, default=1_000_000)
    parser.add_argument("--step_s", type=float, default=0.0, help="that a step takes longer")
    parser.add_argument("--checkpoint", help="folder")
    parser.add_argument("--out", type=Path, required=True, help="the parameters, at the end")
    parser.add_argument("--stamps", type=Path, help="when the steps of rank 0 ended")
    parser.add_argument("--end", type=Path, help="once this file exists, no epoch follows")
    args = parser.parse_args()

    parts = torch_parts if args.framework == "torch" else paddle_parts
    model, optimizer, data, loss = parts(args.samples)
    loop = elastic.Loop(
        model,
        optimizer,
        data,
        epochs=args.epochs,
        checkpoint=args.checkpoint,
        save_steps=20,
        shards=SHARDS,
    )
    epochs = 0
    for epoch in loop.epochs():
        for step in epoch:
            for ids in step:
                step.backward(loss(ids, step.samples))
            step.update()
            time.sleep(args.step_s)
            if args.stamps is not None and loop.rank == 0:
                with args.stamps.open("a") as file:
                    file.write(f"{time.monotonic():.3f} {step.number}\n")
        epochs = epoch.number + 1
        if args.end is not None and args.end.exists():
            loop.stop()
    if loop.rank == 0:
        values: dict[str, Any] = {
            name: np.asarray(value.detach()) for name, value in model.named_parameters()
        }
        np.savez(args.out, epochs=epochs, **values)


if __name__ == "__main__":
    main()
