"""Batches of a PyTorch training, and its random numbers."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, default_collate, get_worker_info

from pod_runtime.trainer.frameworks.plain_values import with_parts

_NO_TENSORS = "OSUMm"  # kinds of arrays: objects, texts, dates


class TorchData:
    """Batches on the training's device; PyTorch's generators are those of the process."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def seed(self, key: int) -> None:
        key &= 0x7FFFFFFFFFFFFFFF
        if self._device.type != "cpu":
            torch.manual_seed(key)
            return
        # `torch.manual_seed` takes a millisecond: for each kind of device that may be used later
        # it formats the stack. A model on the CPU draws from this generator alone.
        torch.default_generator.manual_seed(key)

    def probe(self) -> Any:
        # Where it is: to draw a number costs as much as to seed all generators twice.
        return torch.default_generator.get_state().numpy().tobytes()

    def rng_state(self) -> Any:
        # Not of a process that a loader has forked: CUDA cannot be asked there.
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return torch.get_rng_state(), cuda

    def set_rng_state(self, state: Any) -> None:
        host, cuda = state
        torch.set_rng_state(host)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)

    def worker_info(self) -> Any | None:
        return get_worker_info()

    def collate(self, samples: list[Any]) -> Any:
        return default_collate(samples)

    def to_batch(self, fields: Any) -> Any:
        if isinstance(fields, np.ndarray):
            if fields.dtype.kind in _NO_TENSORS:
                return fields
            # Else it is a view that PyTorch cannot have, such as a field of a structured array.
            is_plain = all(each >= 0 and each % fields.itemsize == 0 for each in fields.strides)
            is_plain = is_plain and fields.flags.writeable and fields.flags.aligned
            fields = torch.from_numpy(fields if is_plain else fields.copy())
        if isinstance(fields, torch.Tensor):
            return fields.to(self._device, non_blocking=True)
        if isinstance(fields, PackedSequence):  # keeps its sizes on the host
            return fields.to(self._device, non_blocking=True)
        return with_parts(fields, self.to_batch)

    def loader(
        self,
        dataset: Any,
        index_batches: Iterator[list[Any]],
        *,
        collate: Callable[[list[Any]], Any] | None,
        options: Mapping[str, Any],
        on_host: bool = False,
    ) -> Iterator[Any]:
        loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=_IndexBatches(index_batches),
            collate_fn=collate,
            **options,
        )
        return iter(loader)


class _IndexBatches:
    """Hands lists of indices to the loader, which iterates over it once."""

    def __init__(self, batches: Iterator[list[Any]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[Any]]:
        return self._batches
