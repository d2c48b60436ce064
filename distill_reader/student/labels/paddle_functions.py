"""Paddle's part of the losses and of the reader; see TensorFunctions."""

from typing import Any

import numpy as np
import paddle
from paddle import Tensor
from paddle.nn import functional


def from_array(array: np.ndarray[Any, Any]) -> Tensor:
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return paddle.to_tensor(array)


def precise(logits: Tensor) -> Tensor:
    is_half = logits.dtype in (paddle.float16, paddle.bfloat16)
    return logits.astype(paddle.float32) if is_half else logits


def log_softmax(logits: Tensor) -> Tensor:
    # Paddle's own ends at -64 on the CPU.
    shifted = logits - logits.max(axis=-1, keepdim=True).detach()
    return shifted - paddle.logsumexp(shifted, axis=-1, keepdim=True)


def fixed(values: Tensor, like: Tensor) -> Tensor:
    return values.detach().astype(like.dtype)


def places(indices: Tensor) -> Tensor:
    return indices.detach().astype(paddle.int64)


def is_eager(values: Tensor) -> bool:
    return paddle.in_dynamic_mode() and isinstance(values, Tensor)


def is_any_below(values: Tensor, bound: float) -> bool:
    return bool((values < bound).any())


def are_shares(values: Tensor, tolerance: float) -> bool:
    sums = values.sum(axis=-1, dtype="float32")
    return bool(paddle.logical_and((values >= 0).all(), ((sums - 1).abs() <= tolerance).all()))


def take(values: Tensor, indices: Tensor) -> Tensor:
    return paddle.take_along_axis(values, indices, -1)


def where(condition: Tensor, values: Tensor) -> Tensor:
    return paddle.where(condition, values, paddle.zeros_like(values))


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    # Paddle's own ends at 64 on the CPU.
    return functional.nll_loss(log_softmax(logits), labels.astype(paddle.int64))
