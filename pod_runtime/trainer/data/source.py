"""Describe where the training's samples come from: a dataset, a loader, or a stream."""

import contextlib
import os
import weakref
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pod_runtime.trainer.data.sampling import Sampling
from pod_runtime.trainer.errors import UsageError
from pod_runtime.trainer.frameworks.plain_values import is_unwritten

_IN_ORDER = ("SequenceSampler", "SequentialSampler")  # Paddle's and PyTorch's
_HOLD_OTHERS = ("ConcatDataset", "ComposeDataset", "StackDataset")
_ROWS = 256  # of a column of values in memory, that are looked at
_WEIGHTS = np.random.RandomState(0).uniform(0.5, 1.5, 1024)  # of the numbers in a row
_known: dict[int, tuple[weakref.ref[Any], int | None]] = {}  # digests of datasets, by their id
_WORKER_OPTIONS = {  # of each framework's loader, besides num_workers
    "paddle": ("use_shared_memory", "timeout", "worker_init_fn", "prefetch_factor"),
    "torch": (
        "timeout", "worker_init_fn", "prefetch_factor", "pin_memory", "multiprocessing_context",
    ),
}  # fmt: skip

_KEEPS_WORKERS = ("persistent_workers", "_persistent_workers")  # PyTorch's and Paddle's


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """Data, and how global batches are made of it."""

    dataset: Any | None  # None: `reader` reads a stream
    length: int | None  # None: a stream
    # Global: all samples of an update; 0: a batch sampler's, which does not say how many.
    batch_size: int
    shuffle: bool
    drop_last: bool
    collate: Callable[[list[Any]], Any] | None  # None: the framework's default
    num_workers: int
    worker_options: Mapping[str, Any]
    subset: int | None = None  # checksum of the indices of Subset objects; None: there are none
    values: int | None = None  # checksum of the order of values in memory; None: there are none
    keeps_workers: bool = False  # from epoch to epoch, with their copies of the dataset
    sampling: Sampling | None = None  # decides which samples come; None: each once, by `shuffle`

    @property
    def is_stream(self) -> bool:
        """The dataset is one that can only be read from its beginning on."""
        return self.dataset is not None and self.length is None

    @property
    def knows_epochs(self) -> bool:
        """The dataset alone says when an epoch ends."""
        return self.length is not None and self.sampling is None


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
    _check_kinds(
        shuffle=shuffle, drop_last=drop_last, collate_fn=collate_fn, num_workers=num_workers
    )
    if isinstance(train_set, list | tuple) and any(map(_is_loader, train_set[:1])):
        raise UsageError(
            f"{name}: expected one DataLoader, got several: make one of a dataset that yields what "
            f"a step needs of each, or pass reader="
        )
    taken: dict[str, Any] = {}
    dataset = train_set
    may_be_stream = name == "train_set" and not has_reader
    if _is_loader(train_set):
        dataset = train_set.dataset
        _check_kind(name, dataset, f"the DataLoader's {type(dataset).__name__}", may_be_stream)
        taken = _take_over(name, train_set)
    if dataset is None and not has_reader:
        raise UsageError(f"{name}: pass a dataset or a DataLoader, or reader= for other data")
    if dataset is not None:
        _check_kind(name, dataset, type(dataset).__name__, may_be_stream)
    is_stream = _is_iterable_dataset(dataset)
    sampling: Sampling | None = taken.get("sampling")
    if name == "train_set":
        what = "a stream" if is_stream else None if sampling is None else sampling.name
        _check_left_out(what, shuffle=shuffle)
    makes_batches = sampling is not None and sampling.makes_batches
    if sampling is not None and makes_batches and name != "shards":
        _check_left_out(sampling.name, batch_size=batch_size, drop_last=drop_last)
    size: Any = batch_size if batch_size is not None else taken.get("batch_size")
    if size is None and not makes_batches:
        raise UsageError(
            "batch_size: missing; pass batch_size=, the size of the global batch over all "
            "trainers, or a DataLoader that has one"
        )
    if size is not None and (not isinstance(size, int | np.integer) or size < 1):
        raise UsageError(f"batch_size: expected a whole number of at least 1, got {size!r}")
    size = int(size or 0) * accumulation_steps
    length = None if dataset is None or is_stream else len(dataset)
    drop = bool(_first(drop_last, taken.get("drop_last"), False))
    if length is not None and sampling is None and length < (size if drop else 1):
        raise UsageError(
            f"{name}: {length} samples give no batch of {size}"
            + (" with drop_last=True; use a smaller batch_size" if drop else "")
        )
    return DataSource(
        dataset=dataset,
        length=length,
        batch_size=size,
        shuffle=bool(_first(shuffle, taken.get("shuffle"), length is not None)),
        drop_last=drop,
        collate=collate_fn if collate_fn is not None else taken.get("collate"),
        num_workers=_first(num_workers, taken.get("num_workers"), 0),
        worker_options=taken.get("worker_options", {}),
        keeps_workers=taken.get("keeps_workers", False),
        subset=subset_digest(dataset),
        values=None if length is None or is_stream else values_digest(dataset),
        sampling=sampling,
    )


def _check_kinds(*, collate_fn: object, num_workers: object, **switches: object) -> None:
    """Refuse arguments of another kind than they are; None is none."""
    for argument, switch in switches.items():
        if switch not in (None, True, False):
            raise UsageError(f"{argument}: expected True or False, got {switch!r}")
    workers: Any = num_workers or 0
    if not isinstance(workers, int | np.integer) or workers < 0:
        raise UsageError(f"num_workers: expected a whole number, 0 or more, got {num_workers!r}")
    if collate_fn is not None and not callable(collate_fn):
        raise UsageError(f"collate_fn: expected a function, got {collate_fn!r}")


def _check_left_out(decides: str | None, **given: object) -> None:
    """Refuse arguments that would say what `decides` says; None: nothing does."""
    for argument, value in given.items():
        if decides is not None and value is not None:
            raise UsageError(f"{argument}: {decides} decides that; leave {argument} out")


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


def values_digest(dataset: Any) -> int | None:
    """Return a checksum of the order of values that a dataset has in memory; None: there are none.

    A split or a shuffle without a seed has other samples in every process, or others at an index.
    Looked at are some arrays, and numbers and texts of lists, as long as the dataset: its own, or
    those of an object of the script's. The order counts, so that rounding does not; of paths the
    names of the files, whose folder may be a node's own.

    It is that of the first look: what a dataset keeps of samples that were read, as a cache does,
    differs from trainer to trainer.
    """
    key = id(dataset)
    if key in _known and _known[key][0]() is dataset:
        return _known[key][1]
    found = _values_digest(dataset)
    with contextlib.suppress(TypeError):  # to a list there is no such reference
        _known[key] = weakref.ref(dataset, lambda _gone: _known.pop(key, None)), found
    return found


def _values_digest(dataset: Any) -> int | None:
    kind = _frameworks_own(dataset)
    if kind == "Subset":
        return values_digest(dataset.dataset)
    if kind in _HOLD_OTHERS:
        held = dataset.datasets
        parts = [
            values_digest(each) for each in (held.values() if isinstance(held, dict) else held)
        ]
    else:
        columns = [*vars(dataset).values()] if hasattr(dataset, "__dict__") else [dataset]
        columns += getattr(dataset, "tensors", ()) if kind == "TensorDataset" else ()
        parts = [_order_digest(each, len(dataset)) for each in columns]
    if all(part is None for part in parts):
        return None
    return zlib.crc32(repr(parts).encode())


def _order_digest(column: Any, length: int) -> int | None:
    """Return a checksum of the order of some rows; None: it is no column of as many numbers."""
    is_array = _is_array(column) or _framework_of(type(column)) == "pandas"
    if not (is_array or isinstance(column, list | tuple)) or length < 2:
        return None
    try:
        if len(column) != length:
            return None
        some = column[:: -(-length // _ROWS)]
        if not is_array and any(each is None for each in some):
            return None  # what is read is kept there
        some = _as_array(some) if is_array else some
        if is_array and is_unwritten(some.reshape(len(some), -1)[:, : len(_WEIGHTS)]):
            return None
        values = np.array([_projection(each) for each in some])
    except Exception:  # noqa: BLE001  of a type of the script's, a device, or without a length
        return None
    if not (largest := np.abs(values).max()):
        return None
    order = np.argsort(np.round(values / largest, 9), kind="stable")
    return zlib.crc32(order.astype("<i8").tobytes())


def _is_array(thing: Any) -> bool:
    """Whether it is an array of numpy or a tensor, and none that is read from a file."""
    kind = type(thing)
    return (isinstance(thing, np.ndarray) and not isinstance(thing, np.memmap)) or (
        kind.__name__ in ("Tensor", "Parameter") and _is_frameworks(kind)
    )


def _as_array(values: Any) -> Any:
    """Return an array of numpy, of a tensor or a table."""
    values = values.detach() if hasattr(values, "detach") else values
    for method in ("to_numpy", "numpy"):
        if hasattr(values, method):
            return getattr(values, method)()
    return np.asarray(values)


def _projection(row: Any) -> float:
    """Return one number of what is in a row, which rows that differ do not share."""
    if isinstance(row, str | bytes | os.PathLike):
        return zlib.crc32(os.fsencode(os.path.basename(row))) / 2**32
    if isinstance(row, dict):
        row = list(row.values())
    if isinstance(row, list | tuple):
        pairs = zip(_WEIGHTS.tolist(), row, strict=False)
        total: float = sum(weight * _projection(each) for weight, each in pairs)
        return total
    if not (_is_array(row) or isinstance(row, bool | int | float | np.generic)):
        return 0.0
    found = _as_array(row)
    if found.dtype == object:  # of a table
        return _projection(found.tolist()) if found.ndim else 0.0
    if found.dtype.kind not in "biuf":
        return 0.0
    flat = np.nan_to_num(found.ravel()[: len(_WEIGHTS)].astype(np.float64), posinf=0.0, neginf=0.0)
    return float((flat * _WEIGHTS[: len(flat)]).sum())


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


def _is_iterable_dataset(dataset: Any) -> bool:
    return any(
        each.__name__ == "IterableDataset" and _is_frameworks(each)
        for each in type(dataset).__mro__
    )


def _check_kind(name: str, dataset: Any, what: str, may_be_stream: bool) -> None:
    is_stream = _is_iterable_dataset(dataset)
    if is_stream and may_be_stream:
        return
    # An IterableDataset may have both methods; they raise.
    if not is_stream and hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return
    remedy = "Pass a map-style dataset"
    if name == "train_set":
        remedy += (
            "; or the framework's IterableDataset with steps_per_epoch=, which the loop reads; or "
            "leave train_set out, and read the stream by reader= with batch_size= and "
            "steps_per_epoch=. Each sample then comes at least once"
        )
    raise UsageError(
        f"{name}: {what} is a stream, without __getitem__ and __len__: no sample can be found "
        f"by its index. {remedy}"
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
    taken = {
        "collate": loader.collate_fn,
        "num_workers": loader.num_workers,
        "keeps_workers": any(getattr(loader, each, False) for each in _KEEPS_WORKERS),
        "worker_options": {
            name: getattr(loader, name)
            for name in _WORKER_OPTIONS[_framework_of(kind)]
            if hasattr(loader, name)
        },
    }
    if _is_iterable_dataset(loader.dataset):
        return taken | {"batch_size": loader.batch_size}
    shuffle, sampling = _find_order(name, sampler, len(loader.dataset))
    is_cut = sampling is None or not sampling.makes_batches
    return taken | {
        "batch_size": sampler.batch_size if sampling is None or is_cut else sampling.batch_size,
        "drop_last": is_cut and bool(getattr(sampler, "drop_last", False)),
        "shuffle": shuffle,
        "sampling": sampling,
    }


def _find_order(name: str, sampler: Any, length: int) -> tuple[bool, Sampling | None]:
    """Return whether samples come in random order, each once; or what else decides which come."""
    kind = _frameworks_own(sampler)
    batches_by = sampler
    if kind == "BatchSampler" and _frameworks_own(sampler.sampler) == "DistributedSampler":
        sampler, kind = sampler.sampler, "DistributedBatchSampler"
    if kind == "DistributedBatchSampler" and len(sampler.dataset) == length:
        return bool(sampler.shuffle), None  # its part of the samples is what the loop decides
    if _frameworks_own(batches_by) != "BatchSampler":
        return False, Sampling(
            sampler=batches_by, name=type(batches_by).__name__, makes_batches=True, where=name
        )
    order = batches_by.sampler
    kind = _frameworks_own(order)
    is_whole = kind in (*_IN_ORDER, "RandomSampler") and length == len(order.data_source)
    if is_whole and kind in _IN_ORDER:
        return False, None
    is_plain = is_whole and not (
        order.replacement or order.generator is not None or len(order) != length
    )
    if is_plain:
        return True, None
    return False, Sampling(
        sampler=order, name=type(order).__name__, makes_batches=False, where=name
    )


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)
