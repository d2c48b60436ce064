"""The smallest shard follows from a model's layers, as either framework lists them."""

from collections.abc import Callable
from typing import Any

import pytest

from pod_runtime.trainer.loop.measure import smallest_shard
from pod_runtime.trainer.progress.shard_choice import SMALLEST_SHARD


class Linear:
    pass


class BatchNorm1D:
    pass


class Renamed(BatchNorm1D):
    """A layer of a script, known by its base."""


class TorchLike:
    def __init__(self, *layers: object) -> None:
        self._layers = layers

    def modules(self) -> list[object]:
        return [self, *self._layers]


class PaddleLike:
    def __init__(self, *layers: object) -> None:
        self._layers = layers

    def sublayers(self, include_self: bool = False) -> list[object]:
        return [self, *self._layers] if include_self else list(self._layers)


@pytest.mark.parametrize("model", [TorchLike, PaddleLike])
@pytest.mark.parametrize(
    ("layers", "smallest"),
    [
        ((), 1),
        ((Linear,), 1),
        ((Linear, BatchNorm1D), SMALLEST_SHARD),
        ((Renamed,), SMALLEST_SHARD),
    ],
)
def test_batch_norm_wants_shards_of_some_size(
    model: Callable[..., Any], layers: tuple[type, ...], smallest: int
) -> None:
    assert smallest_shard([TorchLike(), model(*(layer() for layer in layers))]) == smallest
