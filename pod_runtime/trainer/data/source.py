"""Describe where the training's samples come from: a dataset, a loader, or a stream."""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pod_runtime.trainer.errors import UsageError

_IN_ORDER = ("SequenceSampler", "SequentialSampler")  # Paddle's and PyTorch's
_HOLD_OTHERS = ("ConcatDataset", "ComposeDataset", "StackDataset")
_WORKER_OPTIONS = {  # of each framework's loader, besides num_workers
    "paddle": ("use_shared_memory", "timeout", "worker_init_fn", "prefetch_factor"),
    "torch": (
        "timeout", "worker_init_fn", "prefetch_factor", "pin_memory", "multiprocessing_context",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """Data, and how global batches are made of it."""

    dataset: Any | None  # None: a stream, which `reader` reads
    length: int | None  # None: a stream
    batch_size: int  # global: all samples of an update
    shuffle: bool
    drop_last: bool
    collate: Callable[[list[Any]], Any] | None  # None: the framework's default
    num_workers: int
    worker_options: Mapping[str, Any]
    subset: int | None = None  # checksum of the indices of Subset objects; None: there are none


def make_source(
    train_set: Any,
    *,
    batch_size: int | None,
    shuffle: bool | None,
    drop_last: bool | None,
    collate_fn: Callable[[list[Any]], Any] | None,
    num_workers: int | None,
    has_reader: bool,
    accumulation_steps: int = 1,
    name: str = "train_set",
) -> DataSource:
    """Read a dataset or a loader; the script's own arguments have priority over the loader's.

    Args:
        accumulation_steps: batches that make one of the source's.
        name: of the argument, for errors.

    Raises:
        UsageError: something is missing, or a loader does what cannot be taken over.
    """
    taken: dict[str, Any] = {}
    dataset = train_set
    if _is_loader(train_set):
        dataset = train_set.dataset
        _check_map_style(name, dataset, f"the DataLoader's {type(dataset).__name__}")
        taken = _take_over(name, train_set)
    if dataset is None and not has_reader:
        raise UsageError(f"{name}: pass a dataset or a DataLoader, or reader= for other data")
    if dataset is not None:
        _check_map_style(name, dataset, type(dataset).__name__)
    size = batch_size if batch_size is not None else taken.get("batch_size")
    if size is None:
        raise UsageError(
            "batch_size: missing; pass batch_size=, the size of the global batch over all "
            "trainers, or a DataLoader that has one"
        )
    if not isinstance(size, int | np.integer) or size < 1:
        raise UsageError(f"batch_size: expected a whole number of at least 1, got {size!r}")
    size = int(size) * accumulation_steps
    length = None if dataset is None else len(dataset)
    drop = _first(drop_last, taken.get("drop_last"), False)
    if length is not None and length < (size if drop else 1):
        raise UsageError(
            f"{name}: {length} samples give no batch of {size}"
            + (" with drop_last=True; use a smaller batch_size" if drop else "")
        )
    return DataSource(
        dataset=dataset,
        length=length,
        batch_size=size,
        shuffle=_first(shuffle, taken.get("shuffle"), dataset is not None),
        drop_last=drop,
        collate=collate_fn if collate_fn is not None else taken.get("collate"),
        num_workers=_first(num_workers, taken.get("num_workers"), 0),
        worker_options=taken.get("worker_options", {}),
        subset=subset_digest(dataset),
    )


def subset_digest(dataset: Any) -> int | None:
    """Return a checksum of the indices that a framework's subsets in `dataset` hold; None: none do.

    `random_split` draws their samples by the framework's generator: unless that is seeded before,
    they differ between processes.
    """
    kind = _frameworks_own(dataset)
    if kind == "Subset":
        mine: int | None = zlib.crc32(np.asarray(dataset.indices, np.int64).tobytes())
        parts = [mine, subset_digest(dataset.dataset)]
    else:
        held = dataset.datasets if kind in _HOLD_OTHERS else ()
        inner = held.values() if isinstance(held, dict) else held  # a StackDataset by names
        parts = [subset_digest(each) for each in inner]
    if all(part is None for part in parts):
        return None
    return zlib.crc32(repr(parts).encode())


def _frameworks_own(thing: Any) -> str:
    """Return the name of the class if it is the framework's own; "" for any other."""
    kind = type(thing)
    return kind.__name__ if _is_frameworks(kind) else ""


def _is_frameworks(kind: type) -> bool:
    return _framework_of(kind) in _WORKER_OPTIONS


def _framework_of(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _is_loader(thing: Any) -> bool:
    return hasattr(thing, "dataset") and hasattr(thing, "batch_sampler")


def _check_map_style(name: str, dataset: Any, what: str) -> None:
    # An IterableDataset may have both methods; they raise.
    is_stream = any(
        each.__name__ == "IterableDataset" and _is_frameworks(each)
        for each in type(dataset).__mro__
    )
    if is_stream or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise UsageError(
            f"{name}: {what} is a stream, without __getitem__ and __len__: no sample can be found "
            f"by its index. Pass a map-style dataset; or leave train_set out, "
            f"and read the stream by reader= with batch_size= and steps_per_epoch=, each sample at "
            f"least once"
        )


def _take_over(name: str, loader: Any) -> dict[str, Any]:
    """Return the options of a loader that does nothing else."""
    for kind in type(loader).__mro__:
        if _is_frameworks(kind) and kind.__name__ == "DataLoader":
            break
        if kind is object or {"__iter__", "__call__", "__next__"} & vars(kind).keys():
            raise UsageError(
                f"{name}: what {type(loader).__name__} yields is not what the framework's own "
                f"DataLoader would, and the loop reads the dataset itself. Pass that; do what is "
                f"yours in the dataset or in collate_fn"
            )
    sampler = loader.batch_sampler
    if sampler is None:
        raise UsageError(
            f"{name}: the DataLoader makes no batches (batch_size=None); pass the dataset itself "
            f"and batch_size="
        )
    return {
        "batch_size": sampler.batch_size if _frameworks_own(sampler) else None,
        "drop_last": bool(getattr(sampler, "drop_last", False)),
        "shuffle": _is_shuffled(name, sampler, len(loader.dataset)),
        "collate": loader.collate_fn,
        "num_workers": loader.num_workers,
        "worker_options": {
            name: getattr(loader, name)
            for name in _WORKER_OPTIONS[_framework_of(kind)]
            if hasattr(loader, name)
        },
    }


def _is_shuffled(name: str, sampler: Any, length: int) -> bool:
    """Return whether each sample comes once, in random order, or once, in the dataset's order.

    Raises:
        UsageError: neither is known.
    """
    kind = _frameworks_own(sampler)
    order = sampler
    if kind == "BatchSampler" and _frameworks_own(sampler.sampler) == "DistributedSampler":
        sampler, kind = sampler.sampler, "DistributedBatchSampler"
    if kind == "DistributedBatchSampler":  # its part of the samples is what the loop decides
        if len(sampler.dataset) == length:
            return bool(sampler.shuffle)
    elif kind == "BatchSampler":
        order = sampler.sampler
        kind = _frameworks_own(order)
        is_whole = kind in (*_IN_ORDER, "RandomSampler") and length == len(order.data_source)
        if is_whole and kind in _IN_ORDER:
            return False
        is_plain = is_whole and not (
            order.replacement or order.generator is not None or len(order) != length
        )
        if is_plain:
            return True
    raise UsageError(
        f"{name}: the DataLoader's {_called(order)} decides which samples come, and the loop "
        f"decides that itself: each once per epoch, in their order or shuffled. Pass the dataset "
        f"(of some samples: a Subset), or reader= for an order of your own"
    )


def _called(order: Any) -> str:
    text = type(order).__name__
    if _frameworks_own(order) == "RandomSampler":
        text += " (with replacement, num_samples or a generator, or over other data)"
    elif _frameworks_own(order):
        text += " (over other data)" if "Distributed" in text or "Sequen" in text else ""
    return text


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)
