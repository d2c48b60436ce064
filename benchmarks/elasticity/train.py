"""The loop of resize.py's and recovery.py's trainers under EDL: an ordinary one."""

import time
from collections.abc import Callable
from typing import Any

from benchmarks.elasticity.stamp_files import Stamper
from benchmarks.elasticity.task import EPOCH_STEPS, TASKS, Task, make_data, parser
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


def train(make: Callable[[str], tuple[Any, Any]], cross_entropy: Callable[..., Any]) -> None:
    """Train by the command line; `make` returns the network and its optimizer, by the task."""
    options = parser(__doc__)
    options.add_argument("--snapshot_steps", default="auto")
    options.add_argument("--promise", choices=("rounding", "statistics"), default="rounding")
    args = options.parse_args()
    task = TASKS[args.task]
    stood = StopWatch()
    StateManager.after_step = stood.timed(StateManager.after_step)  # type: ignore[method-assign]
    stamper = Stamper(args.stamps)
    model, optimizer = make(args.task)
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
