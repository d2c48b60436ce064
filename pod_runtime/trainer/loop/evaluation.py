"""Evaluate on all ranks: each takes every world-size-th batch, and the sums are added up."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pod_runtime.trainer.data.readers import keyed_loader
from pod_runtime.trainer.data.source import DataSource
from pod_runtime.trainer.data.streams import (
    SampleFetcher,
    borrowed_numbers,
    drawn_indices,
    seed_batch,
    seed_of_evaluation,
    seed_shard,
)
from pod_runtime.trainer.data.worker_errors import raise_if_failed
from pod_runtime.trainer.errors import UsageError
from pod_runtime.trainer.frameworks.framework import Framework, FrameworkData, FrameworkGroup
from pod_runtime.trainer.frameworks.plain_values import to_float
from pod_runtime.trainer.progress.batches import BatchPlan
from pod_runtime.trainer.progress.epoch_order import EpochOrder

Fn = Callable[..., Mapping[str, Any]]


def evaluate(
    framework: Framework,
    source: DataSource,
    fn: Fn,
    *,
    order: EpochOrder | None = None,
    seed: int,
    epoch: int,
    rank: int,
    world_size: int,
    meet: Callable[[], None],
) -> dict[str, float]:
    """Return the sums over all batches of what `fn(*batch)` returns.

    Args:
        source: a map-style dataset; workers read ahead where it has some.
        order: that the source's sampler drew; None: each sample once.
        epoch: by which, by the seed, and by batch or sample, random numbers are drawn.
        fn: gets one collated batch, returns sums (numbers or one-element tensors) by name.
        meet: every rank calls it once per round, and may park in it.

    Raises:
        UsageError: `fn` does not return the same names for every batch, or ranks differ in data.
    """
    _check_same_data(framework.group, source, order, world_size)
    length = len(source.dataset)  # type: ignore[arg-type]  # evaluation takes no stream
    plan = BatchPlan(
        batch_size=source.batch_size or 1,
        shards=1,
        dataset_length=length if order is None else len(order.ids),
        ends=None if order is None else order.ends,
    )
    places = list(_places(plan))
    batches = len(places)
    mine = [
        (range(start, stop), []) if order is None else order.samples(start, stop)
        for start, stop in places[rank::world_size]
    ]
    sums: dict[str, float] = {}
    seed, data = seed_of_evaluation(seed), framework.data
    with borrowed_numbers(data), framework.state.evaluating():
        read = _read(data, source, mine, seed, epoch, rank)
        for first in range(0, batches, world_size):
            meet()
            number = first + rank
            if number >= batches:
                continue
            batch = data.to_batch(next(read))
            seed_shard(data, seed, epoch, number, 0)
            found = fn(*batch) if isinstance(batch, list | tuple) else fn(batch)
            _add(sums, found, is_first=number == rank)
        next(read, None)  # nothing is left: here the framework ends the workers, and not before
    return _sum_over_ranks(framework.group, sums, rank, has_batches=rank < batches)


def _places(plan: BatchPlan) -> Iterator[tuple[int, int]]:
    offset = 0
    while plan.steps_left(offset):
        start, offset = plan.batch(offset)
        yield start, offset


def _read(
    data: FrameworkData, source: DataSource, batches: Sequence[tuple[Sequence[int], list[int]]],
    seed: int, epoch: int, rank: int,
) -> Iterator[Any]:  # fmt: skip
    """Yield collated batches, read ahead by workers where the source has some.

    Args:
        batches: ids of samples, and how often each came before; []: none did.
    """
    collate = source.collate or data.collate
    if not source.num_workers or not batches:
        fetcher = SampleFetcher(source.dataset, data, seed, is_quiet=True)
        for ids, again in batches:
            samples = fetcher.fetch(epoch, list(ids), again)
            if source.collate is not None:
                seed_batch(data, seed, epoch, ids[-1], again[-1] if again else 0)
            yield collate(samples)
        return
    indices = iter([drawn_indices(epoch, ids, again) for ids, again in batches])
    for batch in keyed_loader(source, indices, data, seed, (epoch, rank)):
        yield raise_if_failed(batch)


def _add(sums: dict[str, float], found: Mapping[str, Any], *, is_first: bool) -> None:
    if not isinstance(found, Mapping):
        raise UsageError(
            f"evaluate: fn must return a dict of sums, it returned {type(found).__name__}"
        )
    if is_first:
        sums.update(dict.fromkeys(found, 0.0))
    if found.keys() != sums.keys():
        raise UsageError(
            f"evaluate: fn must return the same names for every batch, it returned "
            f"{sorted(found)} after {sorted(sums)}"
        )
    for name, value in found.items():
        try:
            sums[name] += to_float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and math.prod(getattr(value, "shape", ())) == 1:
                raise  # of the device, whose errors come when a value is wanted
            raise UsageError(
                f"evaluate: {name}: fn must return a number or a tensor of one element by each "
                f"name, it returned {type(value).__name__}: {error}"
            ) from error


def _check_same_data(
    group: FrameworkGroup, source: DataSource, order: EpochOrder | None, world_size: int
) -> None:
    """Check that all ranks evaluate the same samples, before they wait for each other per batch.

    Raises:
        UsageError: they do not. A rank whose numbers happen to be the mean notices that the others
            are gone.
    """
    drawn = 0 if order is None else int(order.record.digest[:10], 16)  # sums of it are exact
    of_data = [source.length, source.batch_size, source.subset, source.values]
    mine = np.array([*(each or 0 for each in of_data), drawn], np.float64)
    everyone = mine.copy()
    group.all_reduce(everyone)
    if (everyone != mine * world_size).any():
        raise UsageError(
            f"evaluate: the trainers have different data (here {source.length} samples in batches "
            f"of {source.batch_size}); random_split and its like draw others in every "
            f"process, unless a seed is set before, and so may a sampler that draws by a generator "
            f"of its own"
        )


def _sum_over_ranks(
    group: FrameworkGroup, sums: dict[str, float], rank: int, *, has_batches: bool
) -> dict[str, float]:
    """Add up; ranks without a batch learn the names from rank 0, which always has the first."""
    text = json.dumps(sorted(sums)).encode()
    size = np.array([float(len(text) if rank == 0 else 0)])
    group.all_reduce(size)
    data = np.zeros(int(size[0]), np.uint8)
    if rank == 0:
        data[:] = np.frombuffer(text, np.uint8)
    group.broadcast(data, 0)
    names: list[str] = json.loads(data.tobytes())
    if has_batches and names != sorted(sums):
        raise UsageError(f"evaluate: fn returned {sorted(sums)} here and {names} on rank 0")
    values = np.array([sums.get(name, 0.0) for name in names])
    if names:
        group.all_reduce(values)
    return dict(zip(names, values.tolist(), strict=True))
