"""Where the training's samples come from, as the script said it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pod_runtime.trainer.errors import UsageError

_WORKER_OPTIONS = ("use_shared_memory", "timeout", "worker_init_fn", "prefetch_factor")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """Data, and how a global batch is made of it."""

    dataset: Any | None  # None: a stream, which `reader` reads
    length: int | None  # None: a stream
    batch_size: int  # global
    shuffle: bool
    drop_last: bool
    collate: Callable[[list[Any]], Any] | None  # None: the framework's default
    num_workers: int
    worker_options: Mapping[str, Any]


def make_source(
    train_set: Any,
    *,
    batch_size: int | None,
    shuffle: bool | None,
    drop_last: bool | None,
    collate_fn: Callable[[list[Any]], Any] | None,
    num_workers: int | None,
    has_reader: bool,
) -> DataSource:
    """Understand a dataset or a loader; what the script says itself goes before the loader's.

    Raises:
        UsageError: something is missing, or a loader does what cannot be taken over.
    """
    taken: dict[str, Any] = {}
    dataset = train_set
    if _is_loader(train_set):
        dataset = train_set.dataset
        taken = _take_over(train_set)
    if dataset is None and not has_reader:
        raise UsageError("train_set: pass a dataset or a DataLoader, or reader= for other data")
    if dataset is not None and not (
        hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    ):
        raise UsageError(
            f"train_set: {type(dataset).__name__} has no __getitem__ and __len__; a stream needs "
            f"reader=, which is at-least-once"
        )
    size = batch_size if batch_size is not None else taken.get("batch_size")
    if size is None:
        raise UsageError("batch_size: missing; it is the global batch, over all trainers")
    if size < 1:
        raise UsageError(f"batch_size: must be at least 1, got {size}")
    length = None if dataset is None else len(dataset)
    drop = _first(drop_last, taken.get("drop_last"), False)
    if length is not None and length < (size if drop else 1):
        raise UsageError(
            f"train_set: {length} samples give no batch of {size}"
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
    )


def _is_loader(thing: Any) -> bool:
    return hasattr(thing, "dataset") and hasattr(thing, "batch_sampler")


def _take_over(loader: Any) -> dict[str, Any]:
    sampler = loader.batch_sampler
    if sampler is None or not hasattr(sampler, "batch_size"):
        raise UsageError(
            "train_set: the DataLoader makes no batches of a known size (batch_size=None, an "
            "IterableDataset, or a batch sampler of its own); pass the dataset and batch_size, or "
            "reader="
        )
    return {
        "batch_size": sampler.batch_size,
        "drop_last": bool(getattr(sampler, "drop_last", False)),
        "shuffle": _is_shuffled(sampler),
        "collate": loader.collate_fn,
        "num_workers": loader.num_workers,
        "worker_options": {
            name: getattr(loader, name) for name in _WORKER_OPTIONS if hasattr(loader, name)
        },
    }


def _is_shuffled(sampler: Any) -> bool:
    if hasattr(sampler, "shuffle"):  # DistributedBatchSampler
        return bool(sampler.shuffle)
    order = type(getattr(sampler, "sampler", None)).__name__
    if order in ("SequenceSampler", "SequentialSampler"):
        return False
    if order == "RandomSampler":
        return True
    raise UsageError(
        f"train_set: the DataLoader's {order} decides which samples come; the loop decides that "
        f"itself. Pass the dataset, or reader= for an order of your own"
    )


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)
