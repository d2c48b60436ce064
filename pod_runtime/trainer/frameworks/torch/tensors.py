"""Read and write PyTorch's tensors, by address where they are on the host."""

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from pod_runtime.trainer.frameworks import plain_values
from pod_runtime.trainer.layout import StateTensor

_PIECE = 1 << 18  # elements that are converted at once, in the processor's cache
_COMPILED = "_orig_mod"  # what torch.compile calls the layer that it has wrapped


def plain_name(name: str) -> str:
    """Return the name that something of a model has where none of its layers is compiled."""
    return ".".join(part for part in name.split(".") if part != _COMPILED)


def is_compiled(layer: Any) -> bool:
    """Whether a layer only wraps another one, for torch.compile."""
    return _COMPILED in layer._modules


def of_model(model: Any) -> dict[str, Any]:
    """Return a model's parameters and persistent buffers, by the names that `state_dict` has.

    Of a model that has made `state_dict` its own, as to leave some out or to return copies, all.
    By the names of the plain model where a layer is compiled.
    """
    return {
        plain_name(f"{name}.{key}".removeprefix(".")): tensor
        for name, layer in model.named_modules(remove_duplicate=False)
        for key, tensor in (*layer._parameters.items(), *layer._buffers.items())
        if tensor is not None and key not in layer._non_persistent_buffers_set
    }


def give_own_memory(model: Any) -> None:
    """Give each element a place of its own: several that share one cannot be written to.

    A buffer is made so by `expand`. One that shows another tensor of the model stays as it is.
    """
    tensors = [each for each in of_model(model).values() if each.layout == torch.strided]
    for each in tensors:
        if any(n > 1 and not stride for n, stride in zip(each.shape, each.stride(), strict=True)):
            place = each.untyped_storage().data_ptr()
            others = (other for other in tensors if other is not each)
            if all(other.untyped_storage().data_ptr() != place for other in others):
                each.data = each.data.clone()


def is_tensor(value: Any) -> bool:
    """Whether it is a tensor or an array."""
    return isinstance(value, torch.Tensor | np.ndarray)


def dtype_name(tensor: Any) -> str:
    """Return "float32" and the like of a tensor or an array."""
    return str(tensor.dtype).removeprefix("torch.")


def copy_bytes(address: int, tensor: Any, first: int, last: int) -> None:
    """Copy a tensor's or an array's bytes from `first` to `last` to `address`."""
    if isinstance(tensor, np.ndarray):
        tensor = torch.from_numpy(np.ascontiguousarray(tensor))
    tensor = tensor.detach()
    if tensor.device.type != "cpu":  # only what is wanted crosses the bus
        item = tensor.element_size()
        tensor = tensor.flatten()[first // item : last // item].cpu()
        last, first = last - first, 0
    tensor = tensor.contiguous()
    ctypes.memmove(address, tensor.data_ptr() + first, last - first)


def fill(tensor: Any, source: Any, spec: StateTensor) -> None:
    """Overwrite `tensor` by the bytes that `spec` says of `source`, (bytes,) uint8."""
    if spec.size_bytes == 0:
        return
    tensor = tensor.detach()
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        piece = source[spec.offset : spec.offset + spec.size_bytes]
        ctypes.memmove(tensor.data_ptr(), piece.ctypes.data, spec.size_bytes)
    else:
        tensor.copy_(make_tensor(source, spec))


def fingerprint(tensor: Any) -> float:
    """Return a number that tells whether a tensor is another one, by values, signs and order."""
    flat = tensor.detach().reshape(-1)
    size = _PIECE if flat.device.type == "cpu" else max(1, flat.numel())
    if flat.is_floating_point():  # few operations for a small tensor: most of a model's are
        sums = [
            torch.linalg.vector_norm(each, 1, dtype=torch.float64).add_(
                each[::2].sum(dtype=torch.float64), alpha=0.5
            )
            for each in flat.split(size)
        ]
    else:
        doubles = (each.double() for each in flat.split(size))
        sums = [each.abs().sum() + each[::2].sum() / 2 for each in doubles]
    return float(sums[0] if len(sums) == 1 else torch.stack(sums).sum())


def address(value: Any) -> int | None:
    """Return where a tensor's values are; None: it is no tensor, or has no values."""
    # Other kinds of tensors may have no values, or none of their own: lazy, fake, distributed ones.
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return None
    if value.layout != torch.strided or value.is_meta or value.is_complex() or value.is_quantized:
        return None
    return value.data_ptr() or None


def make_tensor(source: Any, spec: StateTensor) -> Any:
    """Return a copy of a tensor's bytes as a tensor on the host."""
    piece = source[spec.offset : spec.offset + spec.size_bytes].copy()
    dtype = getattr(torch, spec.dtype)
    if not piece.size:
        return torch.empty(spec.shape, dtype=dtype, device="cpu")
    return torch.from_numpy(piece).view(dtype).reshape(spec.shape)


def to_plain(name: str, value: Any) -> Any:
    """Return `value` as JSON types; numbers keep all their digits.

    Raises:
        StateError: it is none of those.
    """
    return plain_values.to_plain(name, value, _of_tensor)


def from_plain(value: Any) -> Any:
    """Return what `to_plain` was given."""
    return plain_values.from_plain(value, _make_tensor)


def _of_tensor(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return plain_values.marked("tensor", value.item(), dtype=dtype_name(value))
    if isinstance(value, torch.dtype):  # an option of some optimizers, as timm's Adafactor
        return plain_values.marked("tensor", None, dtype=str(value).removeprefix("torch."))
    return None


def _make_tensor(plain: Mapping[str, Any]) -> Any:
    if plain["value"] is None:
        return getattr(torch, plain["dtype"])
    return torch.tensor(plain["value"], dtype=getattr(torch, plain["dtype"]))
