"""PyTorch's part of the losses and of the reader; see TensorFunctions."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional


def from_array(array: np.ndarray[Any, Any]) -> Tensor:
    if not (array.flags.writeable and array.dtype.isnative and min(array.strides, default=0) >= 0):
        array = np.array(array, array.dtype.newbyteorder("="))  # what torch cannot share
    return torch.from_numpy(array)


def precise(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def log_softmax(logits: Tensor) -> Tensor:
    return functional.log_softmax(logits, dim=-1)


def fixed(values: Tensor, like: Tensor) -> Tensor:
    return values.detach().to(like.dtype)


def places(indices: Tensor) -> Tensor:
    return indices.detach().long()


def is_eager(values: Tensor) -> bool:
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or not isinstance(values, Tensor):
        return False
    is_captured = values.is_cuda and torch.cuda.is_current_stream_capturing()  # of a CUDA graph
    return not (values.is_meta or is_captured)


def is_any_below(values: Tensor, bound: float) -> bool:
    return _is_true((values < bound).any())


def are_shares(values: Tensor, tolerance: float) -> bool:
    sums = values.sum(-1, dtype=torch.float32)
    return _is_true((values >= 0).all() & ((sums - 1).abs() <= tolerance).all())


def _is_true(value: Tensor) -> bool:
    try:
        return bool(value)
    except RuntimeError:  # within torch.func.vmap
        return False


def take(values: Tensor, indices: Tensor) -> Tensor:
    # Not `take_along_dim`, to which a class beyond the last one is another one, counted modulo.
    return torch.gather(values, -1, indices)


def where(condition: Tensor, values: Tensor) -> Tensor:
    return torch.where(condition, values, torch.zeros_like(values))


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits, labels)
