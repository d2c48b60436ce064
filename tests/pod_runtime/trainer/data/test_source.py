"""What a script may pass as data: loaders and samplers are taken over, the rest is refused."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.io import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedBatchSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequenceSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from pod_runtime.trainer.errors import StateError, UsageError
from pod_runtime.trainer.progress.ledger import RunInfo
from pod_runtime.trainer.progress.loop_status import LoopStatus, check_same_run
from pod_runtime.trainer.progress.progress import fresh_status
from tests.pod_runtime.trainer.states import source_of


class Numbers(Dataset):
    def __init__(self, count: int = 100) -> None:
        self.count = count

    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return self.count


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(100))


class Buckets(BatchSampler):
    """Batches of samples of like length: a sampler of one's own, with all of Paddle's fields."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from [[0, 2, 4], [1, 3, 5]]


class Backwards(Sampler):
    def __iter__(self) -> Iterator[int]:
        return iter(range(99, -1, -1))

    def __len__(self) -> int:
        return 100


class Mixing(DataLoader):
    """A loader that changes what comes."""

    def __iter__(self) -> Any:
        return iter([1, 2, 3])


class Named(DataLoader):
    """A loader that changes nothing."""


def test_a_plain_loader_is_taken_over():
    def collate(samples: list[Any]) -> list[Any]:
        return samples

    def init(worker: int) -> None: ...

    loader = DataLoader(
        Numbers(), batch_size=16, shuffle=True, drop_last=True, num_workers=3, timeout=7,
        collate_fn=collate, worker_init_fn=init, prefetch_factor=4,
    )  # fmt: skip
    found = source_of(loader)
    assert (found.length, found.batch_size, found.shuffle, found.drop_last) == (100, 16, True, True)
    assert (found.num_workers, found.collate) == (3, collate)
    options = dict(found.worker_options)
    assert (options["timeout"], options["worker_init_fn"], options["prefetch_factor"]) == (
        7, init, 4,
    )  # fmt: skip
    assert source_of(loader, batch_size=8, shuffle=False).batch_size == 8


def test_what_is_yes_or_no_may_be_said_by_a_number():
    source = source_of(Numbers(), batch_size=7, shuffle=1, drop_last=np.False_)
    assert source.shuffle is True, "a state says so in JSON, where 1 is none"
    assert source.drop_last is False


@pytest.mark.parametrize(
    ("batch_sampler", "shuffle"),
    [
        (BatchSampler(Numbers(), batch_size=16), False),
        (BatchSampler(Numbers(), batch_size=16, shuffle=True), True),
        (BatchSampler(sampler=SequenceSampler(Numbers()), batch_size=16), False),
        (BatchSampler(sampler=RandomSampler(Numbers()), batch_size=16), True),
        (DistributedBatchSampler(Numbers(), batch_size=16), False),
        (DistributedBatchSampler(Numbers(), 16, num_replicas=4, rank=2, shuffle=True), True),
    ],
)
def test_samplers_by_which_each_sample_comes_once_are_known(batch_sampler, shuffle):
    for kind in (DataLoader, Named):
        found = source_of(kind(Numbers(), batch_sampler=batch_sampler))
        assert (found.batch_size, found.shuffle) == (16, shuffle)


WEIGHTS = WeightedRandomSampler([0.1] * 99 + [9.0], 100)


class ByRank(DistributedBatchSampler):
    """A data parallel sampler with an order of its own."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from [[self.local_rank, self.epoch]]


def random_of(**more: Any) -> BatchSampler:
    return BatchSampler(sampler=RandomSampler(Numbers(), **more), batch_size=4)


@pytest.mark.parametrize(
    ("batch_sampler", "name", "size"),
    [
        (BatchSampler(sampler=WEIGHTS, batch_size=32), "WeightedRandomSampler", 32),
        (BatchSampler(sampler=Backwards(), batch_size=32), "Backwards", 32),
        (BatchSampler(sampler=list(range(50)), batch_size=32), "list", 32),
        (Buckets(Numbers(), batch_size=3, shuffle=True), "Buckets", 3),
        (random_of(replacement=True, num_samples=100), "RandomSampler", 4),
        (random_of(num_samples=50), "RandomSampler", 4),
        (random_of(generator=iter(range(100))), "RandomSampler", 4),
        (BatchSampler(sampler=SequenceSampler(Numbers(50)), batch_size=4), "SequenceSampler", 4),
        (DistributedBatchSampler(Numbers(50), batch_size=4), "DistributedBatchSampler", 4),
        (ByRank(Numbers(), 16, num_replicas=1, rank=0), "ByRank", 16),
        ([[1, 2], [3]], "list", 0),
    ],
)
@pytest.mark.parametrize("where", ["train_set", "evaluate"])
def test_a_sampler_that_decides_which_samples_come_is_kept(batch_sampler, name, size, where):
    found = source_of(DataLoader(Numbers(), batch_sampler=batch_sampler), name=where)
    assert found.sampling is not None
    assert (found.sampling.name, found.batch_size, found.shuffle) == (name, size, False)
    makes_batches = name in ("Buckets", "ByRank", "DistributedBatchSampler") or size == 0
    assert found.sampling.makes_batches == makes_batches
    if where == "train_set":
        with pytest.raises(UsageError, match=f"^shuffle: {name} decides that; leave shuffle out"):
            source_of(DataLoader(Numbers(), batch_sampler=batch_sampler), shuffle=True)
    for more in ({"batch_size": 8}, {"drop_last": False}):
        loader = DataLoader(Numbers(), batch_sampler=batch_sampler)
        if not makes_batches:
            source_of(loader, name=where, **more)
            continue
        with pytest.raises(UsageError, match=f"{name} decides that; leave {next(iter(more))} out"):
            source_of(loader, name=where, **more)


def test_a_data_parallel_sampler_with_an_order_of_its_own_is_refused_as_it_cuts_by_rank():
    sampler = ByRank(Numbers(), 16, num_replicas=4, rank=2)
    text = "train_set: the DataLoader's ByRank cuts the epoch into 4 parts.*with num_replicas=1, l"
    with pytest.raises(UsageError, match=text):
        source_of(DataLoader(Numbers(), batch_sampler=sampler))


@pytest.mark.parametrize("stream", [Stream(), ChainDataset([Stream()])])
def test_a_stream_of_the_framework_is_read_by_the_loop(stream):
    for train_set in (stream, DataLoader(stream, batch_size=4, num_workers=2)):
        found = source_of(train_set, batch_size=4)
        assert (found.is_stream, found.length, found.shuffle) == (True, None, False)
        assert found.batch_size == 4
        with pytest.raises(UsageError, match=r"^shuffle: a stream decides that"):
            source_of(train_set, batch_size=4, shuffle=True)
    assert source_of(DataLoader(stream, batch_size=6)).batch_size == 6


@pytest.mark.parametrize(
    ("train_set", "more", "text"),
    [
        (None, {}, "train_set: pass a dataset or a DataLoader, or reader="),
        (iter([1]), {"batch_size": 2}, "list_iterator is a stream.*reader= with batch_size="),
        (Stream(), {}, "batch_size: missing"),
        (Stream(), {"batch_size": 4, "has_reader": True}, "leave train_set out"),
        (DataLoader(Stream(), batch_size=None), {}, r"makes no batches \(batch_size=None\)"),
        (DataLoader(Stream(), batch_size=4), {"name": "evaluate"}, "^evaluate: the DataLoader's"),
        (DataLoader(Numbers(), batch_size=None), {}, r"makes no batches \(batch_size=None\)"),
        (Mixing(Numbers(), batch_size=4), {}, "what Mixing yields is not what the framework's own"),
        (Numbers(), {}, "batch_size: missing; pass batch_size="),
        (Numbers(), {"batch_size": 0}, "batch_size: expected .* at least 1, got 0"),
        (Numbers(), {"batch_size": 2.0}, r"batch_size: expected .* at least 1, got 2\.0"),
        (Numbers(), {"batch_size": 2, "shuffle": "False"}, "shuffle: expected .* got 'False'"),
        (Numbers(), {"batch_size": 2, "drop_last": "no"}, "drop_last: expected .* got 'no'"),
        (Numbers(), {"batch_size": 2, "num_workers": -1}, "num_workers: expected .* got -1"),
        (Numbers(), {"batch_size": 2, "collate_fn": 5}, "collate_fn: expected a function, got 5"),
        ([DataLoader(Numbers())], {"batch_size": 2}, "train_set: expected one DataLoader, got"),
        ([], {"batch_size": 2}, "0 samples give no batch of 2"),
        ([1, 2], {"batch_size": 3, "drop_last": True}, "2 samples give no batch of 3.*drop_last"),
    ],
)
def test_data_that_cannot_be_right_are_refused(train_set, more, text):
    with pytest.raises(UsageError, match=text):
        source_of(train_set, **more)


@pytest.mark.parametrize(
    "dataset",
    [
        list(range(10)),
        TensorDataset([paddle.arange(10)]),
        Subset(Numbers(), list(range(10))),
        ConcatDataset([Numbers(4), Numbers(6)]),
    ],
)
def test_map_style_datasets_of_any_kind_are_taken(dataset):
    found = source_of(dataset, batch_size=4)
    assert (found.length, found.shuffle) == (10, True)


def status(dataset: Any) -> LoopStatus:
    found = source_of(dataset, batch_size=4)
    run = RunInfo(
        seed=1, epochs=1, dataset_length=found.length, shuffle=True, drop_last=False,
        subset=found.subset,
    )  # fmt: skip
    return fresh_status(run=run, batch_size=4, shards=1, reference_world=1)


def test_a_split_that_another_process_dealt_otherwise_is_noticed():
    def split(seed: int) -> Any:
        paddle.seed(seed)
        train_set, _ = random_split(Numbers(), [80, 20])
        return ConcatDataset([train_set, Numbers(5)])

    def check(before: LoopStatus, seed: int) -> None:
        check_same_run(
            before,
            run=status(split(seed)).run,
            batch_size=4,
            where="rank 0's",
            seeding="seed()",
            accumulation_steps=1,
        )

    before = status(split(1))
    check(before, 1)
    with pytest.raises(StateError, match=r"train_set: rank 0's .* other samples.*call seed\(\)"):
        check(before, 2)
    # A state of the version before says nothing about it.
    data = before.to_json()
    del data["run"]["subset"]
    old = LoopStatus.from_json(data)
    check(old, 2)
