"""States for tests that need no framework, and the state of a loop in this process."""

from dataclasses import replace
from typing import Any

import numpy as np

from pod_runtime.trainer.data.source import make_source
from pod_runtime.trainer.layout import make_layout
from pod_runtime.trainer.loop.loop import current_stage
from pod_runtime.trainer.membership.stage import TrainerStage
from pod_runtime.trainer.progress.batches import Cursor
from pod_runtime.trainer.progress.ledger import RunInfo
from pod_runtime.trainer.progress.loop_status import LoopStatus
from pod_runtime.trainer.progress.progress import fresh_status
from pod_runtime.trainer.state.host_state import HostState

RUN = RunInfo(seed=1, epochs=4, dataset_length=100, shuffle=True, drop_last=False)


def make_status(*, stage: int = 1, step: int = 0) -> LoopStatus:
    """Return the status of a run of batches of 10 at `step` of its first epochs."""
    fresh = fresh_status(run=RUN, batch_size=10, shards=2, reference_world=1)
    cursor = Cursor(epoch=step // 10, step=step % 10, offset=step % 10 * 10, global_step=step)
    return replace(fresh, stage=stage, cursor=cursor, samples_seen=step * 10)


def make_host_state(*, stage: int = 1, step: int = 0, fill: float = 0.0) -> HostState:
    """Return a small state whose first tensor holds `fill`."""
    layout = make_layout(
        [
            ("model/weight", "float32", (3, 4)),
            ("model/half", "bfloat16", (5,)),
            ("optimizer/weight.velocity", "float32", (3, 4)),
            ("extra/ema/weight", "float64", ()),
        ]
    )
    data = bytearray(layout.total_bytes)
    weight = np.frombuffer(data, np.float32, count=12)
    weight[:] = fill
    return HostState(
        status=make_status(stage=stage, step=step),
        scalars={"lr": 0.1, "optimizer": "Momentum"},
        layout=layout,
        data=memoryview(data),
    )


def this_stage() -> TrainerStage:
    """Return the stage that the newest loop of this process is in."""
    stage = current_stage()
    assert stage is not None
    return stage


def finish_writing() -> None:
    """Wait for the checkpoint that this process is writing."""
    this_stage().state_manager.finish_writing()


def source_of(train_set: Any, **more: Any) -> Any:
    """Return what a loop reads that was given this, and of the other arguments only `more`."""
    given: dict[str, Any] = {
        "batch_size": None, "shuffle": None, "drop_last": None, "collate_fn": None,
        "num_workers": None, "has_reader": False,
    }  # fmt: skip
    return make_source(train_set, **(given | more))
