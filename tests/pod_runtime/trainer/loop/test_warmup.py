"""A warm-up step reads its data by a real worker, which must not outlive it."""

import os
from typing import Any

import numpy as np
import pytest

from pod_runtime.processes import descendants
from pod_runtime.trainer.data.step import Step
from pod_runtime.trainer.loop.warmup import WarmupStep
from pod_runtime.trainer.progress.batches import Cursor
from tests.pod_runtime.trainer.states import source_of

paddle = pytest.importorskip("paddle")


class Numbers:
    """Sample `broken` cannot be read."""

    def __init__(self, broken: int | None) -> None:
        self._broken = broken

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if index == self._broken:
            raise FileNotFoundError(f"sample {index} is not there")
        return np.full(2, index, np.float32), index


def step_of(dataset: Numbers) -> Step:
    from pod_runtime.trainer.frameworks.paddle.framework import paddle_framework

    model = paddle.nn.Linear(2, 2)
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    return WarmupStep(
        paddle_framework(model, optimizer, header_size=4),
        source_of(dataset, batch_size=8, shuffle=False, num_workers=2),
        shards=2,
        seed=0,
        loss="mean",
        enter=Cursor,
        is_over=lambda: False,
    )


def children() -> set[int]:
    """Those of earlier tests may end at any moment."""
    return {process.pid for process in descendants(os.getpid())}


def test_the_worker_that_read_for_a_warmup_step_ends_with_it():
    before = children()
    (batch,) = step_of(Numbers(broken=None))
    assert batch[1].tolist() == [0, 1, 2, 3]
    assert children() <= before


def test_a_warmup_step_says_what_it_is_under_its_old_name_too():
    step = step_of(Numbers(broken=None))
    assert step.is_warmup
    assert step.is_rehearsal


def test_a_sample_that_cannot_be_read_ends_a_warmup_step_by_its_own_error():
    before = children()
    with pytest.raises(FileNotFoundError, match=r"^sample 1 is not there$"):
        list(step_of(Numbers(broken=1)))
    assert children() <= before
