"""Measure what a shard costs, before the first step of a fresh training.

The loop's body runs over a few shards of two sizes, of the first samples of the data. Nothing of it
counts: gradients are dropped, no optimizer steps, and the state is loaded again afterwards.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any

from pod_runtime.trainer.data.readers import ShardRange
from pod_runtime.trainer.data.source import DataSource
from pod_runtime.trainer.data.step import Step
from pod_runtime.trainer.frameworks.framework import Framework
from pod_runtime.trainer.frameworks.plain_values import to_float
from pod_runtime.trainer.loop.warmup import WarmupStep
from pod_runtime.trainer.progress.batches import Cursor
from pod_runtime.trainer.progress.shard_choice import SMALLEST_SHARD, ShardCost, fit_cost

_PAIRS = 3  # of a small and a large shard that are timed, after one that is not
_ENOUGH_S = 2.0  # no further pair is begun after this time


class MeasuringStep(WarmupStep):
    """A step over shards of two sizes, in turn, that this rank makes alone."""

    def __init__(
        self,
        framework: Framework,
        source: DataSource,
        *,
        sizes: tuple[int, int],
        shards: int,
        seed: int,
        loss: str,
        cursor: Callable[[], Cursor],
    ) -> None:
        """
        Args:
            sizes: the smaller one and that of one of `shards` shards, in samples.
            cursor: where the training stands.
        """
        super().__init__(
            framework,
            source,
            shards=shards,
            seed=seed,
            loss=loss,
            enter=cursor,
            is_over=lambda: True,
        )
        self._sizes = sizes
        self._times: dict[int, list[float]] = {size: [] for size in sizes}
        self._begun_at = self._shard_at = time.perf_counter()

    @property
    def cost(self) -> ShardCost:
        """By the fastest shard of each size, as other load on the machine only adds to it."""
        small, large = (
            (size, min(self._times[size][1:] or self._times[size])) for size in self._sizes
        )
        return fit_cost(small, large)

    def _read(self, shard_range: ShardRange) -> Any:
        began = time.perf_counter()
        batch = super()._read(shard_range)
        # Workers read ahead, beside the training; here one is started for each shard.
        self._shard_at = time.perf_counter() if self._source.num_workers else began
        return batch

    def _check_calls(self) -> None:
        Step._check_calls(self)  # as many shards as there is time for

    def _close_shard(self) -> None:
        if not self._open:
            return
        super()._close_shard()
        to_float(self._framework.step.loss())  # waits for a device
        now = time.perf_counter()
        self._times[self._shard_samples].append(now - self._shard_at)
        small, large = self._sizes
        pairs, is_amid = divmod(self._at, 2)
        if is_amid:
            self._append(small)
        elif pairs <= _PAIRS and now - self._begun_at < _ENOUGH_S:
            self._append(large)

    def _append(self, samples: int) -> None:
        following = ShardRange(epoch=0, step=0, shard=self._at, start=0, stop=samples)
        self._ranges = [*self._ranges, following]


def smallest_shard(models: Iterable[Any]) -> int:
    """Return how many samples a shard of these models has at least, if that can be chosen.

    A layer with batch norm is known by its class's name, or that of a base class.
    """
    for model in models:
        layers = list(getattr(model, "modules", list)())  # PyTorch's; Paddle has `sublayers`
        if hasattr(model, "sublayers"):
            layers = model.sublayers(include_self=True)
        for layer in layers:
            if any("BatchNorm" in base.__name__ for base in type(layer).__mro__):
                return SMALLEST_SHARD
    return 1
