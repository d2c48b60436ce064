"""What a loader's worker raises, and what the script sees of it."""

import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
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
from pod_runtime.trainer_main import place_of
from tests.pod_runtime.trainer.states import source_of


class BrokenError(ValueError):
    """Of the dataset's own kind."""


class TwoArgumentsError(Exception):
    """Is written by pickle, and cannot be read again."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


def failing(error: BaseException) -> Callable[[], Any]:
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


def test_a_place_in_the_users_files_is_told_with_the_error():
    line = failing.__code__.co_firstlineno + 2
    place = f"{Path(__file__).name}:{line}"
    failed = read_or_fail(failing(BrokenError("file 7")))
    assert failed.place.endswith(place)
    with pytest.raises(BrokenError) as raised:
        raise_if_failed([pickle.loads(pickle.dumps(failed))])
    assert place_of(raised.value, os.getcwd()).endswith(place)
    with pytest.raises(SystemExit, match=r"^no data here$"):
        raise_if_failed([read_or_fail(failing(SystemExit("no data here")))])
    with pytest.raises(SystemExit, match=r"^1$"):
        read_or_fail(failing(SystemExit(1)))


class Numbers:
    """Sample 5 cannot be read; or it can, and it is what a worker begins with that fails."""

    def __init__(self, *, is_broken: bool = True) -> None:
        self._is_broken = is_broken

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if self._is_broken and index == 5:
            raise BrokenError("sample 5 is broken")
        return np.full(2, index, np.float32), index


class First:
    """A stream, whose sixth sample cannot be read."""

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        for index in range(8):
            yield Numbers()[index]


def begin(_worker: int) -> None:
    next(iter(()))


class Opened(Numbers):
    """What a worker begins with opens its file, and says which part of a stream it reads."""

    handle, part = 0.0, (5, 5)

    def __getitem__(self, index: int) -> Any:
        return np.full(2, index, np.float32), self.handle

    def __iter__(self) -> Iterator[tuple[Any, float]]:
        first, parts = self.part
        return (self[index] for index in range(first, 8, parts))


@pytest.mark.full
@pytest.mark.parametrize("is_stream", [False, True])
def test_what_a_worker_begins_with_finds_the_scripts_dataset(framework, is_stream):
    data, stream = framework

    def open_it(_worker: int) -> None:
        info = data.worker_info()
        info.dataset.handle, info.dataset.part = 1.0, (info.id, info.num_workers)

    dataset = type("Opened", (Opened, stream), {})() if is_stream else Opened()
    made, ranges = reader(data, dataset, None if is_stream else 8, worker_init_fn=open_it)
    try:
        taken = [made.take(each, 30.0) for each in ranges]
    finally:
        made.close()
    values = [[each.tolist() for each in one.batch] for one in taken]
    assert [first[0] for inputs, _handles in values for first in inputs] == [*range(8)]
    assert {handle for _inputs, handles in values for handle in handles} == {1.0}


@pytest.fixture(params=["paddle", "torch"])
def framework(request) -> tuple[Any, Any]:
    """Return the framework's data, and its kind of stream."""
    library = pytest.importorskip(request.param)
    if request.param == "paddle":
        from pod_runtime.trainer.frameworks.paddle.data import PaddleData

        return PaddleData(), library.io.IterableDataset
    from pod_runtime.trainer.frameworks.torch.data import TorchData

    return TorchData(library.device("cpu")), library.utils.data.IterableDataset


def reader(data: Any, dataset: Any, length: int | None = 8, **more: Any) -> tuple[Any, list[Any]]:
    shuffle = None if length is None else False
    source = source_of(dataset, batch_size=2, shuffle=shuffle, num_workers=1)
    source = replace(source, num_workers=1 if length else 2, worker_options=more)
    run = RunInfo(seed=0, epochs=1, dataset_length=length, shuffle=False, drop_last=False)
    plan = BatchPlan(batch_size=2, shards=1, dataset_length=length, steps_per_epoch=4)
    order = ShardOrder(run, plan, rank_shards(0, 1, 1))
    ranges = list(order.from_cursor(Cursor()))
    items = loader_items(source, order, Cursor(), data)
    return ThreadReader(lambda: items), ranges


@pytest.mark.full
@pytest.mark.parametrize("is_stream", [False, True])
def test_the_loop_gets_the_error_of_a_real_worker_after_the_batches_before_it(framework, is_stream):
    data, stream = framework
    dataset = type("First", (First, stream), {})() if is_stream else Numbers()
    made, ranges = reader(data, dataset, None if is_stream else 8)
    try:
        for shard_range, first in zip(ranges[:2], (0, 2), strict=True):
            taken = made.take(shard_range, 30.0)
            assert taken is not None
            assert taken.batch[1].tolist() == [first, first + 1]
        with pytest.raises(BrokenError, match=r"^sample 5 is broken$") as raised:
            made.take(ranges[2], 30.0)
    finally:
        made.close()
    line = Numbers.__getitem__.__code__.co_firstlineno + 2
    assert place_of(raised.value, os.getcwd()).endswith(f"{Path(__file__).name}:{line}")


@pytest.mark.full
def test_what_the_function_that_a_worker_begins_with_raises_is_told(framework):
    made, ranges = reader(framework[0], Numbers(is_broken=False), worker_init_fn=begin)
    try:
        with pytest.raises(RuntimeError, match="raised StopIteration") as raised:
            made.take(ranges[0], 30.0)
    finally:
        made.close()
    line = begin.__code__.co_firstlineno + 1
    assert place_of(raised.value, os.getcwd()).endswith(f"{Path(__file__).name}:{line}")
