"""What a loader's worker raises, and what the script sees of it."""

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pod_runtime.trainer.data.readers import ShardOrder, ThreadReader, loader_items
from pod_runtime.trainer.data.worker_errors import (
    CarryingCollate,
    Failed,
    WorkerTraceback,
    raise_if_failed,
    read_or_fail,
)
from pod_runtime.trainer.progress.batches import BatchPlan, Cursor, rank_shards
from pod_runtime.trainer.progress.ledger import RunInfo
from tests.pod_runtime.trainer.states import source_of


class BrokenError(ValueError):
    """Of the dataset's own kind."""


class TwoArgumentsError(Exception):
    """Is written by pickle, and cannot be read again."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


def failing(error: Exception) -> Callable[[], Any]:
    def read() -> Any:
        raise error

    return read


def test_a_batch_with_a_sample_that_failed_raises_the_same_error_where_it_is_used():
    samples = [1.0, read_or_fail(failing(BrokenError("file 7"))), 3.0]
    batch = CarryingCollate(np.array)(samples)
    with pytest.raises(BrokenError, match=r"^file 7$") as raised:
        raise_if_failed(pickle.loads(pickle.dumps(batch)))
    assert isinstance(raised.value.__cause__, WorkerTraceback)
    assert "in read" in str(raised.value.__cause__)


def test_whole_batches_are_left_alone():
    batch = CarryingCollate(np.array)([1.0, read_or_fail(lambda: 2.0)])
    assert raise_if_failed(batch) is batch
    assert batch.tolist() == [1.0, 2.0]
    assert raise_if_failed([]) == []


def test_a_collate_function_that_fails_is_told_too():
    batch = CarryingCollate(lambda samples: samples[5])([1.0])
    with pytest.raises(IndexError):
        raise_if_failed(batch)


@pytest.mark.parametrize("error", [TwoArgumentsError("a", "b"), BrokenError(lambda: 0)])
def test_an_error_that_cannot_be_sent_is_told_by_its_text(error):
    failed = read_or_fail(failing(error))
    assert isinstance(failed, Failed)
    assert type(failed.error) is RuntimeError
    assert str(failed.error).startswith(type(error).__name__)


class Numbers:
    """Sample 5 cannot be read."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if index == 5:
            raise BrokenError("sample 5 is broken")
        return np.full(2, index, np.float32), index


def test_the_loop_gets_the_error_of_a_real_worker_after_the_batches_before_it():
    pytest.importorskip("paddle")
    import paddle

    from pod_runtime.trainer.frameworks.paddle.framework import paddle_framework

    model = paddle.nn.Linear(2, 2)
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    data = paddle_framework(model, optimizer, header_size=4).data
    source = source_of(Numbers(), batch_size=2, shuffle=False, num_workers=1)
    run = RunInfo(seed=0, epochs=1, dataset_length=8, shuffle=False, drop_last=False)
    plan = BatchPlan(batch_size=2, shards=1, dataset_length=8)
    order = ShardOrder(run, plan, rank_shards(0, 1, 1))
    ranges = list(order.from_cursor(Cursor()))
    items = loader_items(source, order, Cursor(), data)
    reader = ThreadReader(lambda: items)
    try:
        for shard_range, first in zip(ranges[:2], (0, 2), strict=True):
            taken = reader.take(shard_range, 30.0)
            assert taken is not None
            assert taken.batch[1].tolist() == [first, first + 1]
        with pytest.raises(BrokenError, match=r"^sample 5 is broken$"):
            reader.take(ranges[2], 30.0)
    finally:
        reader.close()
