"""Streams are read by position, whoever reads, and however often they are opened."""

import logging
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from pod_runtime.trainer.data.stream_reading import KeyedStream, StreamFetcher
from pod_runtime.trainer.data.worker_errors import Failed
from pod_runtime.trainer.errors import UsageError
from tests.pod_runtime.trainer.data.streams import Streams


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """As of a loader's worker: nobody may assign its fields."""

    id: int
    num_workers: int
    dataset: Any = None


class Stream:
    """Yields (epoch, position, random numbers of all three kinds), shared among workers."""

    def __init__(self, streams: Streams, length: int = 10) -> None:
        self.streams = streams
        self.length = length
        self.epoch = -1
        self.opened = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        self.opened += 1
        info = self.streams.info
        first, parts = (0, 1) if info is None else (info.id, info.num_workers)
        for position in range(first, self.length, parts):
            numbers = random.random(), float(np.random.random_sample()), self.streams.draw()
            yield self.epoch, position, numbers


def read(positions: list[list[int]], epoch: int = 0, seed: int = 5) -> list[Any]:
    """Return samples as a reader of its own would that is asked for these positions in turn."""
    streams = Streams()
    fetcher = StreamFetcher(Stream(streams), streams, seed)
    return [sample for each in positions for sample in fetcher.fetch(epoch, each)]


def test_a_sample_is_known_by_epoch_and_position_whoever_reads_it_and_from_where_on():
    whole = read([list(range(10))])
    assert [each[:2] for each in whole] == [(0, position) for position in range(10)]
    assert read([[1, 2], [5], [8, 9]]) == [whole[at] for at in (1, 2, 5, 8, 9)]
    assert read([[7, 8]]) == whole[7:9], "also a reader that begins amid the epoch"
    assert read([[3]], epoch=2)[0][0] == 2
    assert read([[3]], epoch=2)[0][2] != whole[3][2]
    assert read([[3]], seed=6)[0][2] != whole[3][2]


def test_a_stream_and_the_training_do_not_share_their_random_numbers():
    streams = Streams()
    fetcher = StreamFetcher(Stream(streams), streams, 5)
    found = []
    for position in range(4):
        for seed in (random.seed, np.random.seed, streams.seed):
            seed(1)
        found += fetcher.fetch(0, [position])
        drawn = random.random(), np.random.random_sample(), streams.draw()
        assert drawn == (
            random.Random(1).random(),
            np.random.RandomState(1).random_sample(),
            drawn[2],
        )
    assert found == read([[0, 1, 2, 3]])


def test_a_stream_that_ends_is_opened_again_and_says_so_once(caplog):
    caplog.set_level(logging.INFO)
    samples = read([list(range(25))])
    assert [position for _epoch, position, _numbers in samples] == [
        *range(10),
        *range(10),
        *range(5),
    ]
    assert samples[10][2] != samples[0][2], "it is shuffled anew"
    assert read([[12], [24]]) == [samples[12], samples[24]]
    assert caplog.text.count("the stream Stream has ended after 10 samples") == 2  # a reader each


def test_a_stream_that_yields_nothing_is_refused():
    streams = Streams()
    with pytest.raises(UsageError, match="train_set: the stream Stream yields nothing"):
        StreamFetcher(Stream(streams, 0), streams, 5).fetch(0, [0])


def test_every_worker_sees_the_whole_stream_though_it_shares_itself_out_among_them():
    expected = read([list(range(10))])
    for number in range(3):
        streams = Streams(WorkerInfo(number, 3))
        stream = Stream(streams)
        keyed = KeyedStream(stream, streams, 5)
        keyed.begin_worker()
        mine = range(number, 10, 3)
        assert [keyed[(0, position)] for position in mine] == [expected[at] for at in mine]
        assert stream.opened == 1
        assert keyed[(1, 0)][0] == 1
        assert stream.opened == 2


def test_an_error_of_a_stream_comes_back_from_a_worker():
    class Broken:
        def __iter__(self) -> Any:
            yield 1
            raise ValueError("a broken file")

    keyed = KeyedStream(Broken(), Streams(), 5)
    assert keyed[(0, 0)] == 1
    found = keyed[(0, 1)]
    assert isinstance(found, Failed)
    assert str(found.error) == "a broken file"
