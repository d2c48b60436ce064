"""Batches of a Paddle training, and its random numbers."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import paddle
from paddle.base import core
from paddle.io.dataloader.collate import default_collate_fn

from pod_runtime.trainer.frameworks.plain_values import with_parts

_NO_TENSORS = "OSUMm"  # kinds of arrays: objects, texts, dates


class PaddleData:
    """Batches on the training's device; Paddle's generators are those of the process."""

    def seed(self, key: int) -> None:
        paddle.seed(key & 0x7FFFFFFF)

    def probe(self) -> Any:
        return int(core.default_cpu_generator().random())

    def rng_state(self) -> Any:
        on_gpu = paddle.get_device().startswith("gpu")
        gpus = paddle.get_cuda_rng_state() if on_gpu else []
        return core.default_cpu_generator().get_state(), gpus

    def set_rng_state(self, state: Any) -> None:
        host, gpus = state
        core.default_cpu_generator().set_state(host)
        if gpus:
            paddle.set_cuda_rng_state(gpus)

    def worker_info(self) -> Any | None:
        return paddle.io.get_worker_info()

    def collate(self, samples: list[Any]) -> Any:
        return default_collate_fn(samples)

    def to_batch(self, fields: Any) -> Any:
        if isinstance(fields, np.ndarray):
            return fields if fields.dtype.kind in _NO_TENSORS else paddle.to_tensor(fields)
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
        loader = paddle.io.DataLoader(
            dataset,
            places=paddle.CPUPlace() if on_host else None,
            batch_sampler=_IndexBatches(index_batches),
            collate_fn=collate,
            return_list=True,
            **options,
        )
        return iter(loader)


class _IndexBatches(paddle.io.BatchSampler):  # type: ignore[misc]  # Paddle has no types
    """Hands lists of indices to Paddle's loader. Its length is never asked for usefully."""

    def __init__(self, batches: Iterator[list[Any]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[Any]]:
        return self._batches

    def __len__(self) -> int:
        return 1 << 60
