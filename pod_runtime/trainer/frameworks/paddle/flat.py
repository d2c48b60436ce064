"""Copy many Paddle tensors to one flat tensor and back, for gradients and buffers.

On the host bytes are moved by address, which costs a microsecond per tensor; on a device the
framework's own concatenation and assignment keep everything there. No copy records gradients.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle

from pod_runtime.trainer.errors import UsageError
from pod_runtime.trainer.frameworks.paddle.tensors import dtype_name

_HALF = ("float16", "bfloat16")

# A tensor's part of a flat one: offset, size, and whether it has the flat one's type. Asking a
# tensor for its type takes longer than copying a small one, so it is asked once.
Slice = tuple[int, int, bool]


def flat_dtype(name: str) -> str:
    """Return the type in which values of type `name` are summed.

    Half precision is summed in float32: sums over ranks must not depend on their number more than
    rounding does. Whole numbers (counters among the buffers) are summed as float64.

    Raises:
        UsageError: there is none, as for complex numbers.
    """
    if name in _HALF:
        return "float32"
    if name in ("float32", "float64"):
        return name
    if name.startswith(("int", "uint", "bool")):
        return "float64"
    raise UsageError(f"tensors of type {name} cannot be summed over trainers")


def lay_out(tensors: Sequence[Any], dtype: str, front: int = 0) -> tuple[list[Slice], int]:
    """Lay tensors one after the other after `front` elements; return the slices and the total."""
    slices = []
    for tensor in tensors:
        size = int(np.prod(tensor.shape, dtype=np.int64))
        slices.append((front, size, dtype_name(tensor) == dtype))
        front += size
    return slices, front


class HostFlat:
    """A flat host tensor and the numpy array that shares its memory."""

    def __init__(self, size: int, dtype: str) -> None:
        self.dtype = dtype
        self.tensor = paddle.zeros([max(size, 1)], dtype)
        self._base = self.tensor.data_ptr()
        self._item = np.dtype(dtype).itemsize
        memory = (ctypes.c_char * (max(size, 1) * self._item)).from_address(self._base)
        self.array = np.frombuffer(memoryview(memory), dtype)
        self._zero = paddle.zeros([], dtype)

    def gather(self, tensors: Sequence[Any | None], slices: Sequence[Slice]) -> None:
        """Copy each tensor to its slice; None leaves zeros."""
        base, item, move = self._base, self._item, ctypes.memmove
        for tensor, (offset, size, is_native) in zip(tensors, slices, strict=True):
            if tensor is None:
                self.array[offset : offset + size] = 0
                continue
            if not (is_native and tensor.is_contiguous()):
                with paddle.no_grad():
                    tensor = tensor.astype(self.dtype).contiguous()
            if size:
                move(base + offset * item, tensor.data_ptr(), size * item)

    def scatter(self, tensors: Sequence[Any | None], slices: Sequence[Slice]) -> None:
        """Copy each slice back into its tensor; None is left out."""
        base, item, move = self._base, self._item, ctypes.memmove
        for tensor, (offset, size, is_native) in zip(tensors, slices, strict=True):
            if tensor is None or not size:
                continue
            if is_native and tensor.is_contiguous():
                move(tensor.data_ptr(), base + offset * item, size * item)
            else:
                _assign(self.tensor[offset : offset + size], tensor)

    def swap(self, tensors: Sequence[Any], slices: Sequence[Slice], source: "Flat") -> None:
        """Copy each tensor to its slice, and the same slice of `source` into the tensor."""
        assert isinstance(source, HostFlat)
        base, other, item, move = self._base, source._base, self._item, ctypes.memmove
        for tensor, part in zip(tensors, slices, strict=True):
            offset, size, is_native = part
            if is_native and tensor.is_contiguous():
                address, at, size_bytes = tensor.data_ptr(), offset * item, size * item
                if size:
                    move(base + at, address, size_bytes)
                    move(address, other + at, size_bytes)
            else:
                self.gather([tensor], [part])
                source.scatter([tensor], [part])

    def write(self, offset: int, values: Any) -> None:
        """Write consecutive elements (numbers, an array, or another flat's `values`)."""
        self.array[offset : offset + len(values)] = values

    def write_front(self, before: Sequence[float], number: Any, after: Sequence[float]) -> None:
        """Write numbers to the front, amid them the one of a tensor of one element."""
        self.write(0, [*before, number.item(), *after])

    def values(self, offset: int, size: int) -> Any:
        """Return elements that support arithmetic; shares memory."""
        return self.array[offset : offset + size]

    def number(self, offset: int) -> Any:
        """Return a copy of one element, a tensor without dimensions."""
        made = self._zero.clone()
        ctypes.memmove(made.data_ptr(), self._base + offset * self._item, self._item)
        return made

    def numbers(self, offset: int, size: int) -> list[float]:
        found: list[float] = self.array[offset : offset + size].tolist()
        return found


class DeviceFlat:
    """The same on a device. Every change makes a new flat tensor, so none is copied twice."""

    def __init__(self, size: int, dtype: str) -> None:
        self.dtype = dtype
        self.tensor = paddle.zeros([max(size, 1)], dtype)

    @paddle.no_grad()  # type: ignore[untyped-decorator]
    def gather(self, tensors: Sequence[Any | None], slices: Sequence[Slice]) -> None:
        parts = []
        for tensor, (offset, size, _is_native) in zip(tensors, slices, strict=True):
            if tensor is None:
                parts.append((offset, paddle.zeros([size], self.dtype)))
            else:
                parts.append((offset, tensor.flatten().astype(self.dtype)))
        self._replace(parts)

    def scatter(self, tensors: Sequence[Any | None], slices: Sequence[Slice]) -> None:
        for tensor, (offset, size, _is_native) in zip(tensors, slices, strict=True):
            if tensor is not None and size:
                _assign(self.tensor[offset : offset + size], tensor)

    def swap(self, tensors: Sequence[Any], slices: Sequence[Slice], source: "Flat") -> None:
        self.gather(tensors, slices)
        source.scatter(tensors, slices)

    @paddle.no_grad()  # type: ignore[untyped-decorator]
    def write(self, offset: int, values: Any) -> None:
        if not isinstance(values, paddle.Tensor):
            values = paddle.to_tensor(np.asarray(values, self.dtype))
        if values.shape[0]:
            self._replace([(offset, values.astype(self.dtype))])

    @paddle.no_grad()  # type: ignore[untyped-decorator]
    def write_front(self, before: Sequence[float], number: Any, after: Sequence[float]) -> None:
        parts = [paddle.to_tensor(np.asarray(each, self.dtype)) for each in (before, after)]
        number = number.reshape([1]).astype(self.dtype)  # nothing waits for it
        self.write(0, paddle.concat([parts[0], number, parts[1]]))

    def values(self, offset: int, size: int) -> Any:
        return self.tensor[offset : offset + size]

    def number(self, offset: int) -> Any:
        return self.tensor[offset].clone()

    def numbers(self, offset: int, size: int) -> list[float]:
        return [float(value) for value in self.tensor[offset : offset + size].numpy()]

    def _replace(self, parts: Sequence[tuple[int, Any]]) -> None:
        pieces = []
        at = 0
        for offset, part in parts:
            if offset > at:
                pieces.append(self.tensor[at:offset])
            pieces.append(part)
            at = offset + part.shape[0]
        if at < self.tensor.shape[0]:
            pieces.append(self.tensor[at:])
        if pieces:
            self.tensor = paddle.concat(pieces) if len(pieces) > 1 else pieces[0].clone()


Flat = HostFlat | DeviceFlat


def _assign(piece: Any, tensor: Any) -> None:
    """Copy a piece of a flat tensor into `tensor`, which may have another type."""
    name = dtype_name(tensor)
    with paddle.no_grad():
        if name.startswith(("int", "uint", "bool")):
            piece = paddle.round(piece)
        paddle.assign(piece.reshape(tensor.shape).astype(name), tensor)
