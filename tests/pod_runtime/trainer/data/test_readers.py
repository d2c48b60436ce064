"""Where samples come from: keyed streams, loaders, readers of a script's own."""

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from pod_runtime.trainer.data.readers import (
    ShardBatch,
    ShardOrder,
    ShardRange,
    ThreadReader,
    factory_items,
)
from pod_runtime.trainer.data.stream_reading import KeyedStream
from pod_runtime.trainer.data.streams import (
    BatchMaker,
    KeyedCollate,
    KeyedDataset,
    SampleFetcher,
    seed_shard,
)
from pod_runtime.trainer.errors import UsageError
from pod_runtime.trainer.progress.batches import BatchPlan, Cursor, rank_shards
from pod_runtime.trainer.progress.ledger import RunInfo
from tests.pod_runtime.trainer.data.streams import Streams
from tests.support import end_late, is_there, wait_until


class Drawing:
    """Samples that draw from the generator of one's choice, where `when` says so."""

    def __init__(self, streams: Streams, kind: str) -> None:
        self.draws: dict[str, Callable[[], float]] = {
            "random": lambda: random.random(),
            "numpy": lambda: float(np.random.random_sample()),
            "framework": lambda: float(streams.draw()),
        }
        self.kind = kind
        self.read: list[int] = []

    def __getitem__(self, index: int) -> tuple[int, float]:
        self.read.append(index)
        return index, self.draws[self.kind]() if index % 3 == 0 else 0.0

    def __len__(self) -> int:
        return 100


@pytest.mark.parametrize("kind", ["random", "numpy", "framework"])
def test_what_a_sample_draws_depends_on_epoch_and_sample_alone(kind):
    streams = Streams()
    data = Drawing(streams, kind)
    fetcher = SampleFetcher(data, streams, seed=5)
    one = dict(fetcher.fetch(1, [1, 2, 3, 6, 9]))
    seed_shard(streams, 5, 1, 0, 0)
    other = dict(SampleFetcher(data, streams, seed=5).fetch(1, [9, 6, 5]))
    assert (one[6], one[9]) == (other[6], other[9])
    assert one[6] != one[9]
    assert dict(fetcher.fetch(2, [6]))[6] != one[6]
    worker = KeyedDataset(data, streams, seed=5)
    assert worker[(1, 9)] == (9, one[9])
    assert len(worker) == 100


def test_who_reads_ahead_leaves_the_streams_to_the_training_after_the_first_shard():
    streams = Streams()
    fetcher = SampleFetcher(list(range(100)), streams, seed=5, is_ahead=True)
    fetcher.fetch(0, [1, 2])
    seed_shard(streams, 5, 0, 0, 0)  # the training begins with that shard
    drawn = [random.random(), np.random.random_sample(), streams.draw()]
    seed_shard(streams, 5, 0, 0, 0)
    assert fetcher.fetch(0, [3, 4]) == [3, 4]
    assert [random.random(), np.random.random_sample(), streams.draw()] == drawn


def test_a_dataset_that_draws_in_the_first_shard_is_keyed_also_when_it_is_read_ahead(caplog):
    streams = Streams()
    data = Drawing(streams, "numpy")
    ahead = SampleFetcher(data, streams, seed=5, is_ahead=True)
    alone = SampleFetcher(data, streams, seed=5)
    assert ahead.fetch(1, [0, 3]) == alone.fetch(1, [0, 3])
    assert ahead.fetch(1, [6, 7]) == alone.fetch(1, [6, 7])
    assert "not the same in every run" in caplog.text


def test_a_dataset_that_draws_nothing_is_read_once_per_sample():
    streams = Streams()
    data = Drawing(streams, "random")
    fetcher = SampleFetcher(data, streams, seed=5)
    fetcher.fetch(0, [1, 2, 4])
    assert data.read == [1, 2, 4]
    fetcher.fetch(0, [3, 5])  # 3 draws: this shard is read again
    fetcher.fetch(0, [7])
    assert data.read == [1, 2, 4, 3, 5, 3, 5, 7]


class ReadAtOnce(Drawing):
    """Says how it was asked for several samples, as PyTorch's Subset is."""

    def __init__(self, streams: Streams, kind: str) -> None:
        super().__init__(streams, kind)
        self.asked: list[list[int]] = []

    def __getitems__(self, indices: list[int]) -> list[tuple[int, float]]:
        self.asked.append(indices)
        return [self[index] for index in indices]


def test_a_dataset_that_reads_many_at_once_is_asked_so_unless_it_draws():
    streams = Streams()
    data = ReadAtOnce(streams, "random")
    fetcher = SampleFetcher(data, streams, seed=5)
    assert fetcher.fetch(0, range(1, 3)) == [(1, 0.0), (2, 0.0)]
    drawn = fetcher.fetch(0, [3, 5])
    assert drawn == SampleFetcher(Drawing(streams, "random"), streams, seed=5).fetch(0, [3, 5])
    assert fetcher.fetch(0, [7]) == [(7, 0.0)]
    assert data.asked == [[1, 2], [3, 5]]


def test_a_dataset_that_reads_whole_batches_and_draws_is_refused():
    streams = Streams()

    class Batches(Drawing):
        def __getitems__(self, indices: list[int]) -> dict[str, list[tuple[int, float]]]:
            return {"x": [self[index] for index in indices]}

    fetcher = SampleFetcher(Batches(streams, "random"), streams, seed=5)
    assert fetcher.fetch(0, [1]) == {"x": [(1, 0.0)]}
    with pytest.raises(UsageError, match=r"Batches\.__getitems__ returns a whole batch and draws"):
        fetcher.fetch(0, [3])


def test_a_dataset_that_draws_late_is_keyed_from_the_next_watched_shard_on():
    """The first of an epoch is watched, and every sixteenth."""
    streams = Streams()
    data = Drawing(streams, "random")
    quiet = [[1], [2]] * 10
    for drawing, is_keyed in (((1, [3]), True), ((0, [3]), False)):
        fetcher = SampleFetcher(data, streams, seed=5)
        for ids in quiet:
            fetcher.fetch(0, ids)
        data.read.clear()
        fetcher.fetch(*drawing)
        assert data.read == [3, 3] if is_keyed else [3]
    for _ in range(12):  # shards 21 to 32
        fetcher.fetch(0, [3])
    assert fetcher.fetch(0, [6]) == SampleFetcher(data, streams, seed=5).fetch(0, [6])


@pytest.mark.parametrize("kind", ["random", "numpy", "framework"])
def test_what_a_collate_function_draws_depends_on_epoch_and_batch_alone(kind):
    """As a mixing rate, or masks of words."""
    streams = Streams()
    draw = Drawing(streams, kind).draws[kind]

    def mix(samples: list[Any]) -> Any:
        return samples, draw()

    maker = BatchMaker(mix, streams, seed=5)
    drawn = {}
    for key in [(0, 3), (0, 6), (1, 3), (1, 6)]:
        seed_shard(streams, 5, 0, 0, 0)  # whatever was drawn before
        drawn[key] = maker.make(key[0], [2, key[1]], ["a", "b"])[1]
    assert len(set(drawn.values())) == 4
    seed_shard(streams, 5, 0, 9, 9)
    assert BatchMaker(mix, streams, seed=5).make(1, [2, 3], []) == ([], drawn[(1, 3)])
    keyed = KeyedDataset(list(range(10)), streams, seed=5)
    collate = KeyedCollate(mix, streams, 5, keyed)
    assert collate([keyed[(1, 2)], keyed[(1, 3)]]) == ([2, 3], drawn[(1, 3)])


def test_a_collate_function_that_draws_nothing_is_called_once_and_not_seeded_for():
    streams = Streams()
    calls: list[int] = []
    maker = BatchMaker(calls.append, streams, seed=5)
    for at in range(18):
        maker.make(0, [at], at)
    assert calls == list(range(18))
    seed_shard(streams, 5, 0, 0, 0)
    drawn = streams.draw()
    seed_shard(streams, 5, 0, 0, 0)
    maker.make(0, [18], 18)
    assert streams.draw() == drawn


def test_what_a_collate_function_draws_leaves_a_stream_its_own_numbers():
    streams = Streams()

    def numbers() -> Iterator[float]:
        while True:
            yield random.random()

    class Endless:
        def __iter__(self) -> Iterator[float]:
            return numbers()

    alone, mixed = (KeyedStream(Endless(), streams, seed=5) for _ in range(2))
    collate = KeyedCollate(lambda samples: (samples, random.random()), streams, 5, mixed)
    expected = [alone[(0, at)] for at in range(3)]
    (one, first), (two, second) = (collate([mixed[(0, 0)]]), collate([mixed[(0, 2)]]))
    assert (*one, *two) == (expected[0], expected[2])
    assert first != second


def test_shards_have_streams_of_their_own():
    streams = Streams()
    drawn = set()
    for key in [(1, 0, 0, 0), (1, 1, 0, 0), (1, 0, 1, 0), (1, 0, 0, 1), (2, 0, 0, 0)]:
        seed_shard(streams, *key)
        drawn.add((random.random(), np.random.random_sample(), streams.draw()))
    assert len({each[0] for each in drawn}) == len({each[1] for each in drawn}) == 5
    seed_shard(streams, 1, 0, 0, 1)
    assert (random.random(), np.random.random_sample(), streams.draw()) in drawn


def order(rank: int = 0, world_size: int = 2, *, epochs: int = 2) -> ShardOrder:
    run = RunInfo(seed=1, epochs=epochs, dataset_length=22, shuffle=True, drop_last=False)
    plan = BatchPlan(batch_size=8, shards=4, dataset_length=22)
    return ShardOrder(run, plan, rank_shards(rank, world_size, 4))


def test_ranks_together_read_every_sample_of_every_epoch_once():
    read: dict[int, list[int]] = {0: [], 1: []}
    for rank in range(3):
        mine = order(rank, 3)
        for shard_range in mine.from_cursor(Cursor()):
            read[shard_range.epoch] += mine.ids(shard_range).tolist()
    assert sorted(read[0]) == sorted(read[1]) == list(range(22))


def test_reading_goes_on_at_the_cursor():
    mine = order(epochs=1)
    ranges = list(mine.from_cursor(Cursor(epoch=0, step=1, offset=8, global_step=1)))
    assert ranges == list(mine.from_cursor(Cursor()))[2:]
    assert ranges[0] == ShardRange(epoch=0, step=1, shard=0, start=8, stop=10)


def items_of(mine: ShardOrder) -> Iterator[Any]:
    for shard_range in mine.from_cursor(Cursor()):
        yield ShardBatch(*shard_range.key, mine.ids(shard_range).tolist())


def test_a_reader_that_keeps_one_waiting_says_so_and_delivers_later():
    gate = threading.Event()

    def start() -> Iterator[Any]:
        gate.wait(30)
        yield from items_of(order())

    reader = ThreadReader(start)
    shard_range = next(order().from_cursor(Cursor()))
    assert reader.take(shard_range, 0.01) is None
    gate.set()
    wait_until(
        lambda: (
            reader.take(shard_range, 0.1)
            == ShardBatch(*shard_range.key, order().ids(shard_range).tolist())
        )
    )
    reader.close()


def test_a_reader_is_closed_in_its_own_thread():
    closed = []

    def start() -> Iterator[Any]:
        try:
            yield from items_of(order(epochs=1000))
        finally:
            closed.append(threading.current_thread())
            end_late()

    reader = ThreadReader(start)
    reader.take(next(order().from_cursor(Cursor())), 60.0)
    reader.close()
    assert [thread.name for thread in closed] == ["reader"]
    assert not is_there(closed[0])  # it holds no lock that a loader's worker would inherit


@pytest.mark.parametrize(
    ("items", "text"),
    [
        ([(0, 0, 1, "x")], r"expected \(epoch, step, shard\) \(0, 0, 0\), it yielded \(0, 0, 1\)"),
        ([], r"it ended before \(epoch, step, shard\) \(0, 0, 0\)"),
        ([(0, 0)], r"expected \(epoch, step, shard, fields...\), got \(0, 0\)"),
    ],
)
def test_a_reader_out_of_step_is_refused(items, text):
    reader = ThreadReader(lambda: factory_items(iter(items)))
    with pytest.raises(UsageError, match=text):
        reader.take(next(order().from_cursor(Cursor())), 60.0)
    reader.close()


def test_a_field_that_is_a_list_of_arrays_is_not_counted_by_the_first_of_them():
    """As of images of several sizes: their number is the list's, if each is of one sample."""
    images = [np.zeros((3, size)) for size in (4, 5)]
    reader = ThreadReader(lambda: factory_items(iter([(0, 0, 0, images)])))
    assert reader.take(next(order().from_cursor(Cursor())), 60.0) is not None
    reader.close()


def test_what_a_reader_raises_is_raised_where_its_data_are_wanted():
    def start() -> Iterator[Any]:
        yield from iter(fail, None)

    def fail() -> Any:
        raise ConnectionError("no teacher")

    reader = ThreadReader(start)
    for _again in range(2):  # a script may have caught it
        with pytest.raises(ConnectionError, match="no teacher"):
            reader.take(next(order().from_cursor(Cursor())), 60.0)
    reader.close()
