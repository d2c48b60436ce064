"""The trainer of resize.py and recovery.py under EDL: an ordinary script with the elastic loop."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this folder is no package

from benchmarks.elasticity.stamp_files import Stamper
from benchmarks.elasticity.task import EPOCH_STEPS, PARAMETERS, TASKS, Task, make_data, parser
from pod_runtime import elastic
from pod_runtime.trainer.loop.loop import current_stage
from pod_runtime.trainer.membership.state_manager import StateManager


class Images:
    def __init__(self, task: Task) -> None:
        self.images, self.labels = make_data(task)
        self.length = task.batch * EPOCH_STEPS

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        index %= len(self.images)
        return self.images[index], self.labels[index]

    def __getitems__(self, indices: list[int]) -> tuple[Any, Any]:
        """Return a whole batch by one index, as the peers' scripts take theirs."""
        found = [index % len(self.images) for index in indices]
        return self.images[found], self.labels[found]


def of_paddle(task: str) -> tuple[Any, Any, Callable[..., Any]]:
    """Return the network, its optimizer, and the loss."""
    import paddle

    from benchmarks.elasticity.networks import make_network

    model = make_network(task)
    optimizer = paddle.optimizer.Momentum(
        PARAMETERS["lr"], momentum=PARAMETERS["momentum"], parameters=model.parameters()
    )
    return model, optimizer, paddle.nn.functional.cross_entropy


def of_torch(_task: str) -> tuple[Any, Any, Callable[..., Any]]:
    import torch

    from benchmarks.elasticity.train_torch import make_network

    torch.set_num_threads(1)  # as the peer does
    model = make_network()
    optimizer = torch.optim.SGD(model.parameters(), **PARAMETERS)
    return model, optimizer, torch.nn.functional.cross_entropy


class StopWatch:
    """How long the training has stood still for snapshots and the beginning of checkpoints."""

    def __init__(self) -> None:
        self.total_s = 0.0

    def timed(self, call: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:
            begun = time.monotonic()
            try:
                call(*args, **kwargs)
            finally:
                self.total_s += time.monotonic() - begun

        return run


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--snapshot_steps", default="auto")
    options.add_argument("--framework", choices=("paddle", "torch"), default="paddle")
    options.add_argument("--promise", choices=("rounding", "statistics"), default="rounding")
    args = options.parse_args()
    task = TASKS[args.task]
    stood = StopWatch()
    StateManager.after_step = stood.timed(StateManager.after_step)  # type: ignore[method-assign]
    stamper = Stamper(args.stamps)
    make = of_torch if args.framework == "torch" else of_paddle
    model, optimizer, cross_entropy = make(args.task)
    every = args.snapshot_steps
    loop = elastic.Loop(
        model,
        optimizer,
        Images(task),
        batch_size=task.batch,
        collate_fn=tuple,
        promise=args.promise,
        shards=task.shards if args.promise == "rounding" else None,
        epochs=-(-args.steps // EPOCH_STEPS),
        checkpoint=args.checkpoint,
        save_steps=args.save_steps,
        snapshot_steps=every if every == "auto" else int(every),
    )
    for epoch in loop.epochs():
        for step in epoch:
            for images, labels in step:
                step.backward(cross_entropy(model(images), labels))
            step.update()
            current = current_stage()
            if current is not None and not step.is_warmup:
                stamper.note(
                    step.number + 1,
                    rank=loop.rank,
                    world=loop.world_size,
                    stage=current.progress.stage,  # it may change within one process
                    stood_s=stood.total_s,
                )


if __name__ == "__main__":
    main()
