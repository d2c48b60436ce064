"""Read and write Paddle's tensors, by address where they are on the host."""

import ctypes
import math
from typing import Any

import numpy as np
import paddle
from paddle import nn

from pod_runtime.trainer.frameworks import plain_values
from pod_runtime.trainer.layout import ITEM_BYTES, StateTensor

_PIECE = 1 << 18  # elements that are converted at once, in the processor's cache
_QUANTIZING = ("paddle.nn.quant.", "paddle.quantization.")  # modules of layers
_OF_WRAPPED = ("weight", "bias")  # of the layer that one of them has taken the place of
_NUMPY = {"bfloat16": "uint16"}  # how Paddle hands out what numpy does not know


def of_model(model: Any) -> dict[str, Any]:
    """Return a model's parameters and persistable buffers, by the names that `state_dict` has.

    Of a model that has made `state_dict` its own, as to leave some out or to return copies, all.
    """
    found: dict[str, Any] = nn.Layer.state_dict(model, use_hook=False)
    return found


def running_statistics(model: Any) -> list[Any]:
    """Return what Paddle's layers count as they train, and keep among the parameters.

    Batch norm's statistics, and the scales that quantization-aware training finds.
    """
    found: dict[int, Any] = {}
    for layer in model.sublayers(include_self=True):
        if isinstance(layer, nn.layer.norm._BatchNormBase | nn.BatchNorm):
            found |= {id(each): each for each in (layer._mean, layer._variance)}
        elif any(base.__module__.startswith(_QUANTIZING) for base in type(layer).__mro__):
            own = layer.named_parameters(include_sublayers=False)
            found |= {id(p): p for name, p in own if p.stop_gradient and name not in _OF_WRAPPED}
    return list(found.values())


def is_tensor(value: Any) -> bool:
    """Whether it is a tensor or an array."""
    return isinstance(value, paddle.Tensor | np.ndarray)


def dtype_name(tensor: Any) -> str:
    """Return "float32" and the like of a tensor or an array."""
    return str(tensor.dtype).removeprefix("paddle.")


def copy_bytes(address: int, tensor: Any, first: int, last: int) -> None:
    """Copy a tensor's or an array's bytes from `first` to `last` to `address`."""
    size = last - first
    if isinstance(tensor, np.ndarray):
        tensor = np.ascontiguousarray(tensor)
        ctypes.memmove(address, tensor.ctypes.data + first, size)
        return
    if not tensor.place.is_cpu_place():  # only what is wanted crosses the bus
        item = ITEM_BYTES[dtype_name(tensor)]
        tensor, first = tensor.flatten()[first // item : last // item].cpu(), 0
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    ctypes.memmove(address, tensor.data_ptr() + first, size)


def fill(tensor: Any, source: Any, spec: StateTensor) -> None:
    """Overwrite `tensor` by the bytes that `spec` says of `source`, (bytes,) uint8."""
    if spec.size_bytes == 0:
        return
    if tensor.place.is_cpu_place() and tensor.is_contiguous():
        piece = source[spec.offset : spec.offset + spec.size_bytes]
        ctypes.memmove(tensor.data_ptr(), piece.ctypes.data, spec.size_bytes)
    else:
        tensor.set_value(make_tensor(source, spec))


def fingerprint(tensor: Any) -> float:
    """Return a number that tells whether a tensor is another one, by values, signs and order."""
    flat = tensor.detach().flatten()
    pieces = (flat[at : at + _PIECE].astype("float64") for at in range(0, flat.shape[0], _PIECE))
    return sum((float(each.abs().sum() + each[::2].sum() / 2) for each in pieces), 0.0)


def address(value: Any) -> int | None:
    """Return where a tensor's values are; None: it is no tensor, or has no values."""
    if not issubclass(type(value), paddle.Tensor) or not value.is_dense() or value.is_complex():
        return None
    return value.data_ptr() or None if value._is_initialized() else None


def make_tensor(source: Any, spec: StateTensor) -> Any:
    """Return a copy of these bytes as a tensor."""
    piece = source[spec.offset : spec.offset + spec.size_bytes]
    array = piece.view(_NUMPY.get(spec.dtype, spec.dtype)).reshape(spec.shape)
    made = paddle.to_tensor(array)
    if spec.dtype == "bfloat16" and made.dtype != paddle.bfloat16:
        made = made.view(paddle.bfloat16)
    return made


def to_plain(name: str, value: Any) -> Any:
    """Return `value` as JSON types; numbers keep all their digits.

    Raises:
        StateError: it is none of those.
    """
    return plain_values.to_plain(name, value, _of_tensor)


def from_plain(value: Any) -> Any:
    """Return what `to_plain` was given; of tensors their numbers."""
    return plain_values.from_plain(value)


def _of_tensor(value: Any) -> Any:
    if not is_tensor(value):
        return None
    # One number: schedulers compare what they were given with floats.
    return value.item() if math.prod(value.shape) == 1 else value.tolist()
