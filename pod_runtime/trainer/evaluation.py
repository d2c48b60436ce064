"""Evaluate over all ranks: each takes every world-size-th batch, and sums are added up."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pod_runtime.trainer.adapter import Adapter
from pod_runtime.trainer.errors import UsageError

Fn = Callable[..., Mapping[str, Any]]


def evaluate(
    adapter: Adapter,
    dataset: Any,
    fn: Fn,
    *,
    batch_size: int,
    collate: Callable[[list[Any]], Any] | None,
    rank: int,
    world_size: int,
    meet: Callable[[], None],
) -> dict[str, float]:
    """Return the sums over all batches of what `fn(*batch)` returns.

    Args:
        fn: gets one collated batch, returns sums (numbers or one-element tensors) by name.
        meet: called once per round by every rank; may park there.

    Raises:
        UsageError: `fn` does not return the same names for every batch.
    """
    collate = collate or adapter.collate
    length = len(dataset)
    batches = -(-length // batch_size)
    sums: dict[str, float] = {}
    with adapter.evaluation():
        for first in range(0, batches, world_size):
            meet()
            number = first + rank
            if number >= batches:
                continue
            ids = range(number * batch_size, min(length, (number + 1) * batch_size))
            batch = adapter.to_batch(collate([dataset[index] for index in ids]))
            found = fn(*batch) if isinstance(batch, list | tuple) else fn(batch)
            _add(sums, found, is_first=number == rank)
    return _sum_over_ranks(adapter, sums, rank, has_batches=rank < batches)


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
        sums[name] += float(value.item()) if hasattr(value, "item") else float(value)


def _sum_over_ranks(
    adapter: Adapter, sums: dict[str, float], rank: int, *, has_batches: bool
) -> dict[str, float]:
    """Add up; a rank that had no batch learns the names from rank 0, which always has the first."""
    text = json.dumps(sorted(sums)).encode()
    size = np.array([float(len(text) if rank == 0 else 0)])
    adapter.all_reduce(size)
    data = np.zeros(int(size[0]), np.uint8)
    if rank == 0:
        data[:] = np.frombuffer(text, np.uint8)
    adapter.broadcast(data, 0)
    names: list[str] = json.loads(data.tobytes())
    if has_batches and names != sorted(sums):
        raise UsageError(f"evaluate: fn returned {sorted(sums)} here and {names} on rank 0")
    values = np.array([sums.get(name, 0.0) for name in names])
    if names:
        adapter.all_reduce(values)
    return dict(zip(names, values.tolist(), strict=True))
