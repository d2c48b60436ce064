"""Evaluate on all ranks: each takes every world-size-th batch, and the sums are added up."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from pod_runtime.trainer.data.source import DataSource
from pod_runtime.trainer.data.worker_errors import CarryingCollate, CarryingDataset, raise_if_failed
from pod_runtime.trainer.errors import UsageError
from pod_runtime.trainer.frameworks.framework import Framework, FrameworkData, FrameworkGroup
from pod_runtime.trainer.frameworks.plain_values import to_float

Fn = Callable[..., Mapping[str, Any]]


def evaluate(
    framework: Framework,
    source: DataSource,
    fn: Fn,
    *,
    rank: int,
    world_size: int,
    meet: Callable[[], None],
) -> dict[str, float]:
    """Return the sums over all batches of what `fn(*batch)` returns.

    Args:
        source: a map-style dataset; workers read ahead where it has some.
        fn: gets one collated batch, returns sums (numbers or one-element tensors) by name.
        meet: every rank calls it once per round, and may park in it.

    Raises:
        UsageError: `fn` does not return the same names for every batch, or ranks differ in data.
    """
    _check_same_data(framework.group, source, world_size)
    length = len(source.dataset)  # type: ignore[arg-type]  # evaluation takes no stream
    size = source.batch_size
    batches = length // size if source.drop_last else -(-length // size)
    mine = [
        range(number * size, min(length, (number + 1) * size))
        for number in range(rank, batches, world_size)
    ]
    sums: dict[str, float] = {}
    read = _read(framework.data, source, mine)
    with framework.state.evaluating():
        for first in range(0, batches, world_size):
            meet()
            number = first + rank
            if number >= batches:
                continue
            batch = framework.data.to_batch(next(read))
            found = fn(*batch) if isinstance(batch, list | tuple) else fn(batch)
            _add(sums, found, is_first=number == rank)
    next(read, None)  # nothing is left: here the framework ends the workers, and not before
    return _sum_over_ranks(framework.group, sums, rank, has_batches=rank < batches)


def _read(data: FrameworkData, source: DataSource, batches: list[range]) -> Iterator[Any]:
    """Yield collated batches, read ahead by workers where the source has some."""
    collate = source.collate or data.collate
    if not source.num_workers or not batches:
        for ids in batches:
            yield collate([source.dataset[index] for index in ids])  # type: ignore[index]
        return
    loader = data.loader(
        CarryingDataset(source.dataset),
        iter([list(ids) for ids in batches]),
        collate=CarryingCollate(collate),
        options={"num_workers": source.num_workers, **source.worker_options},
    )
    for batch in loader:
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
        sums[name] += to_float(value)


def _check_same_data(group: FrameworkGroup, source: DataSource, world_size: int) -> None:
    """Check that all ranks evaluate the same samples, before they wait for each other per batch.

    Raises:
        UsageError: they do not. A rank whose numbers happen to be the mean notices that the others
            are gone.
    """
    mine = np.array([source.length or 0, source.batch_size, source.subset or 0], np.float64)
    everyone = mine.copy()
    group.all_reduce(everyone)
    if (everyone != mine * world_size).any():
        raise UsageError(
            f"evaluate: the trainers have different data (here {source.length} samples in batches "
            f"of {source.batch_size}); random_split draws others in every process, unless the "
            f"framework's seed is set before it"
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
