"""A sampler's list for an epoch: a function of (seed, epoch), or refused by name."""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pod_runtime.trainer.data.sampling import SampledOrders, Sampling
from pod_runtime.trainer.errors import UsageError
from pod_runtime.trainer_main import place_of
from tests.pod_runtime.trainer.data.streams import Streams

LENGTH = 50


class Sampler:
    """Yields what a function makes, which is asked anew for each list."""

    def __init__(self, make: Any, **attributes: Any) -> None:
        self.make = make
        self.__dict__.update(attributes)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.make(self))


class Buckets:
    """Batches of 1 to 8 samples, in an order of the epoch's."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        numbers = np.random.RandomState(self.epoch)
        left = numbers.permutation(LENGTH).tolist()
        while left:
            size = int(numbers.randint(1, 9))
            yield left[:size]
            del left[:size]


def orders(sampler: Any, *, batches: bool = False, streams: Any = None, **more: Any) -> Any:
    sampling = Sampling(sampler=sampler, name=type(sampler).__name__, makes_batches=batches)
    return SampledOrders(sampling, streams or Streams(), **({"seed": 3, "length": LENGTH} | more))


STREAMS = Streams()
DRAWS = {
    "Python's": lambda _self: random.choices(range(LENGTH), k=30),
    "numpy's": lambda _self: np.random.choice(LENGTH, 30, replace=False).tolist(),
    "the framework's": lambda _self: [STREAMS.draw() % LENGTH for _ in range(30)],
    "its own, of Python": lambda self: [self.own.randrange(LENGTH) for _ in range(30)],
    "its own, of numpy": lambda self: self.own.permutation(LENGTH),
}
OWN: dict[str, list[Any]] = {
    "its own, of Python": [random.Random(1)],
    "its own, of numpy": [np.random.RandomState(1), np.random.default_rng(1)],
}


@pytest.mark.parametrize(("kind", "own"), [(k, o) for k in DRAWS for o in OWN.get(k, [None])])
def test_a_list_follows_from_seed_and_epoch_and_the_generators_are_put_back(kind, own):
    drawn = orders(Sampler(DRAWS[kind], own=own), streams=STREAMS)
    for seed in (random.seed, np.random.seed, STREAMS.seed):
        seed(7)
    expected = random.random(), np.random.random_sample(), STREAMS.draw()
    for seed in (random.seed, np.random.seed, STREAMS.seed):
        seed(7)
    drawn.check_repeats(2)
    first, second = drawn.of(0), drawn.of(1)
    assert (random.random(), np.random.random_sample(), STREAMS.draw()) == expected
    assert first.record.digest != second.record.digest
    # Another process, which begins later, and another seed.
    assert orders(Sampler(DRAWS[kind], own=own), streams=STREAMS).of(1).record == second.record
    other = orders(Sampler(DRAWS[kind], own=own), streams=STREAMS, seed=4).of(1)
    assert other.record.digest != second.record.digest
    if isinstance(own, random.Random):
        assert own.random() == random.Random(1).random()
    assert second.ids.dtype == np.int64
    assert second.ends is None


def test_batches_come_as_the_sampler_made_them_in_the_epoch_that_it_was_told():
    drawn = orders(Buckets(), batches=True)
    drawn.check_repeats(3)
    for epoch in (0, 1, 2):
        order, buckets = drawn.of(epoch), Buckets()
        buckets.set_epoch(epoch)
        assert [each.tolist() for each in np.split(order.ids, order.ends)[:-1]] == list(buckets)
        assert (order.record.samples, order.record.batches) == (LENGTH, len(list(buckets)))
    outer = Sampler(lambda self: [[self.sampler.epoch]], sampler=Buckets())
    assert orders(outer, batches=True).of(4).ids == [4], "a sampler within another is told, too"


def counting(self: Any) -> Any:
    self.count += 1
    return np.roll(np.arange(LENGTH), self.count)


def shuffling(self: Any) -> Any:
    random.shuffle(self.ids)
    return self.ids


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize(
    "sampler",
    [
        Sampler(counting, count=0),
        Sampler(shuffling, ids=list(range(LENGTH))),
        Sampler(lambda _self: random.SystemRandom().sample(range(LENGTH), 20)),
        Sampler(lambda self: itertools.islice(self.rest, 20), rest=iter(range(LENGTH))),
    ],
)
def test_a_sampler_whose_list_depends_on_more_than_seed_and_epoch_is_refused(sampler, epochs):
    with pytest.raises(
        UsageError, match=r"DataLoader's Sampler (drew other samples for epoch 0|gave \d+ samples)"
    ):
        orders(sampler).check_repeats(epochs)


def forgetful(self: Any) -> Any:
    """Depends on which epoch it was asked for before."""
    self.before, before = self.epoch, self.before
    return range(before, LENGTH)


def test_a_list_that_depends_on_the_epoch_before_is_refused_though_twice_in_a_row_is_alike():
    class Forgetful(Sampler):
        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    with pytest.raises(UsageError, match=r"asked again.*set_epoch"):
        orders(Forgetful(forgetful, before=0)).check_repeats(2)


@pytest.mark.parametrize(
    ("items", "batches", "text"),
    [
        ([(1, 2)], False, "gave no indices of samples"),
        ([1.0], False, "gave no indices of samples"),
        (["1"], False, "gave no indices of samples"),
        ([3], True, "gave no indices of samples"),
        ([[1, (2, 3)]], True, r"gave no indices of samples \(\(2, 3\)\)"),
        ([1, 50], False, "gave sample 50 for epoch 0, of a dataset that has 0 to 49"),
        ([1, -1], False, "gave sample -1"),
        ([[1], []], True, "gave an empty batch"),
        ([], False, "gave 0 samples for epoch 0, which make no batch"),
        ([], True, "gave 0 samples"),
        (itertools.repeat(1), False, r"gave more than 1000 ids.*steps_per_epoch="),
        (itertools.repeat([1, 2]), True, "gave more than 1000 ids"),
    ],
)
def test_what_is_no_list_of_samples_is_refused_by_name(monkeypatch, items, batches, text):
    monkeypatch.setattr("pod_runtime.trainer.data.sampling._MOST_SAMPLES", 1000)
    monkeypatch.setattr("pod_runtime.trainer.data.sampling._MOST_TIMES", 1)
    with pytest.raises(UsageError, match=f"^train_set: the DataLoader's Sampler {text}"):
        orders(Sampler(lambda _self: items), batches=batches).of(0)


def test_what_a_samplers_own_code_raises_is_told_as_it_is_from_where_it_comes():
    """Also a TypeError, which is what wrong indices are as well."""

    def broken(items: list[Any], error: Exception) -> Iterator[Any]:
        yield from items
        raise error

    class Lazy:
        def __iter__(self) -> Iterator[int]:
            raise TypeError("len of a number")

    class Told(Buckets):
        def set_epoch(self, epoch: int) -> None:
            raise TypeError("len of a number")

    below = str(Path(__file__).parent)
    for error in (TypeError("len of a number"), KeyError("a bucket"), ValueError("no lengths")):
        for items, batches in (([3, 4], False), ([[3, 4]], True)):
            sampler = Sampler(lambda _s, items=items, error=error: broken(items, error))
            with pytest.raises(type(error)) as raised:
                orders(sampler, batches=batches).of(0)
            assert raised.value is error
            assert place_of(raised.value, below).startswith("test_sampling.py:")
    for broken_one in (Sampler(lambda _s: [Lazy()]), Lazy(), Told()):
        with pytest.raises(TypeError, match=r"^len of a number$"):
            orders(broken_one, batches=True).of(0)


def test_of_a_sampler_without_an_end_an_epoch_is_as_long_as_is_said():
    assert len(orders(Sampler(lambda _s: itertools.repeat(1)), most=12).of(0).ids) == 12
    order = orders(Sampler(lambda _s: itertools.repeat([1, 2])), batches=True, most=12).of(0)
    assert (len(order.ids), order.record.batches) == (24, 12)


def test_indices_may_be_numbers_and_arrays_of_any_kind():
    mixed = [np.int32(3), 4, np.array(5)]
    assert orders(Sampler(lambda _s: mixed)).of(0).ids.tolist() == [3, 4, 5]
    order = orders(Sampler(lambda _s: [np.array([1, 2]), (3,), iter([4])]), batches=True).of(0)
    assert (order.ids.tolist(), order.ends.tolist()) == ([1, 2, 3, 4], [2, 3, 4])


@pytest.mark.parametrize("names", [("num_replicas", "rank"), ("nranks", "local_rank")])
def test_a_sampler_that_cuts_by_rank_is_refused_and_one_that_keeps_the_epoch_whole_is_not(names):
    def cut(parts: int) -> Sampler:
        return Sampler(lambda _self: range(9), **dict(zip(names, (parts, 0), strict=True)))

    for sampler in (cut(2), Sampler(lambda self: self.sampler, sampler=cut(2))):
        with pytest.raises(
            UsageError, match=r"Sampler cuts the epoch into 2 parts.*num_replicas=1"
        ):
            orders(sampler)
    assert len(orders(cut(1)).of(0).ids) == 9
