"""Read and write protobuf messages that are mostly tensors. A tensor becomes a view of its message.

The protobuf library does it too slowly, and in too much memory. Microseconds of CPU to write and to
read a request of 16 images of 3x224x224 (9.6 MB), on one machine:

    Open Inference, raw contents          here 1,470 and 23, library   4,260 and   2,240
    Paddle Serving, float_data            here   820 and 41, library 482,000 and 233,000

The library makes an object of every part of a message: from 16 MiB of empty tensors, 700 MiB (Open
Inference) or 1,350 MiB (Paddle Serving), which a front that takes 512 MiB at a time cannot afford.
Here such a message is refused before it takes memory. The library's own classes
(`protobuf_schema.py`) serve the small calls.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from distill_reader.errors import DistillError
from distill_reader.model.tensors import Array

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types

MAX_FIELDS = 1 << 16  # of one message: each costs time and memory, however small it is
_VARINT_BLOCK = 1 << 18  # bytes decoded at a time, to bound the temporary memory
_INT64_MASK = (1 << 64) - 1


class ProtobufError(DistillError):
    """Bytes are not a message of the expected kind."""


def read_fields(message: memoryview) -> Iterator[tuple[int, int, Any]]:
    """Yield (number, wire type, value) of each field, in the message's order.

    The value of VARINT is an int (unsigned), of all others a view of the message.

    Raises:
        ProtobufError: the message is malformed, or has more than MAX_FIELDS fields.
    """
    at, end = 0, len(message)
    left = MAX_FIELDS
    while at < end:
        left -= 1
        if left < 0:
            raise ProtobufError(f"a message has more than {MAX_FIELDS} fields")
        key = message[at]
        at += 1
        if key >= 0x80:
            key, at = _read_varint(message, at - 1, end)
        number, wire_type = key >> 3, key & 7
        if not 0 < number < 1 << 29:
            raise ProtobufError(f"field number {number} is impossible")
        if wire_type == BYTES:
            if at < end and message[at] < 0x80:
                size, at = message[at], at + 1
            else:
                size, at = _read_varint(message, at, end)
            start, at = at, at + size
        elif wire_type == VARINT:
            value, at = _read_varint(message, at, end)
            yield number, wire_type, value
            continue
        elif wire_type in (FIXED32, FIXED64):
            start, at = at, at + (4 if wire_type == FIXED32 else 8)
        else:
            raise ProtobufError(f"field {number} has wire type {wire_type}")
        if at > end:
            raise ProtobufError(f"field {number} goes beyond the end of its message")
        yield number, wire_type, message[start:at]


def read_text(value: object) -> str:
    """Return a string field. Raises: ProtobufError."""
    if not isinstance(value, memoryview):
        raise ProtobufError("expected text, got a number")
    try:
        return str(value, "utf-8")
    except UnicodeDecodeError as error:
        raise ProtobufError("text is not UTF-8") from error


def read_bytes(value: object) -> memoryview:
    """Return the view of a field of bytes or of a message. Raises: ProtobufError."""
    if not isinstance(value, memoryview):
        raise ProtobufError("expected bytes, got a number")
    return value


def read_int(value: object) -> int:
    """Return a field of type int32 or int64. Raises: ProtobufError."""
    if not isinstance(value, int):
        raise ProtobufError("expected a number, got bytes")
    return value - (1 << 64) if value >> 63 else value


def read_uint(value: object) -> int:
    """Return a field of type uint64 or bool. Raises: ProtobufError."""
    if not isinstance(value, int):
        raise ProtobufError("expected a number, got bytes")
    return value


def read_ints(wire_type: int, value: Any, into: list[int], *, limit: int) -> None:
    """Add the elements of a repeated int32 or int64, packed or not, to a short list.

    Raises:
        ProtobufError: malformed, or `into` would have more than `limit`.
    """
    if wire_type == VARINT:
        into.append(read_int(value))
    elif wire_type == BYTES:
        at, end = 0, len(value)
        while at < end and len(into) <= limit:
            number, at = _read_varint(value, at, end)
            into.append(read_int(number))
    else:
        raise ProtobufError(f"numbers have wire type {wire_type}")
    if len(into) > limit:
        raise ProtobufError(f"a list has more than {limit} numbers")


class PackedNumbers:
    """The elements of one repeated numeric field, packed or one by one."""

    def __init__(self, dtype: str) -> None:
        """`dtype`: of the elements; floats have a fixed size in messages, others are varints."""
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._is_fixed = self.dtype.kind == "f"
        self._parts: list[memoryview] = []

    def add(self, wire_type: int, value: Any) -> None:
        """Add a field's value as `read_fields` gives it. Raises: ProtobufError."""
        single = {4: FIXED32, 8: FIXED64}[self.dtype.itemsize] if self._is_fixed else VARINT
        if wire_type not in (BYTES, single):
            raise ProtobufError(f"numbers of type {self.dtype.name} have wire type {wire_type}")
        if self._is_fixed and len(value) % self.dtype.itemsize:
            raise ProtobufError(f"{len(value)} bytes are no {self.dtype.name} numbers")
        if wire_type == VARINT:
            value = memoryview(_varint(value))
        self._parts.append(value)

    def count(self) -> int:
        """Return the number of elements, without decoding them."""
        if self._is_fixed:
            return sum(map(len, self._parts)) // self.dtype.itemsize
        return sum(_count_varints(part) for part in self._parts)

    def array(self) -> Array:
        """Return the elements: a view of the message if they need no decoding.

        Raises:
            ProtobufError: a varint is malformed.
        """
        if self._is_fixed:
            if len(self._parts) == 1:
                return np.frombuffer(self._parts[0], self.dtype)
            return np.frombuffer(b"".join(self._parts), self.dtype)
        result = np.empty(self.count(), self.dtype)
        at = 0
        for part in self._parts:
            at += _decode_varints(part, result[at:])
        return result


def write_varint(number: int, value: int) -> bytes:
    """Return a field of an integer or bool. Negative numbers are encoded as in int32 and int64."""
    return b"" if value == 0 else _varint(number << 3) + _varint(value & _INT64_MASK)


def write_bytes(number: int, value: bytes | bytearray | memoryview) -> bytes:
    """Return a field of bytes, text or a message."""
    return b"".join((write_head(number, len(value)), value))


def write_text(number: int, value: str) -> bytes:
    """Return a field of text; nothing if it is empty. "?" replaces what UTF-8 lacks."""
    return write_bytes(number, value.encode(errors="replace")) if value else b""


def write_head(number: int, size: int) -> bytes:
    """Return the header of a field of `size` bytes."""
    return _varint(number << 3 | BYTES) + _varint(size)


def write_ints(number: int, values: Iterable[int]) -> bytes:
    """Return a packed repeated field of a few integers."""
    data = b"".join([_varint(int(value) & _INT64_MASK) for value in values])
    return write_bytes(number, data) if data else b""


def pack_varints(array: Array) -> bytes:
    """Return the content of a packed repeated field of many integers or bools."""
    flat = array.reshape(-1)
    if flat.dtype.kind == "b":
        return flat.astype(np.uint8).tobytes()
    if flat.size == 0:
        return b""
    if int(flat.min()) >= 0 and int(flat.max()) < 0x80:
        return flat.astype(np.uint8).tobytes()
    return b"".join(
        _pack_block(flat[start : start + _VARINT_BLOCK])
        for start in range(0, flat.size, _VARINT_BLOCK)
    )


def _pack_block(flat: Array) -> bytes:
    wide = flat.astype(np.int64 if flat.dtype.kind == "i" else np.uint64).view(np.uint64)
    longest = -(-int(wide.max()).bit_length() // 7)
    shifts = np.arange(longest, dtype=np.uint64) * np.uint64(7)
    groups = wide[:, None] >> shifts  # (n, longest): what is left after each 7 bits
    is_used = groups != 0
    is_used[:, 0] = True
    data = (groups & np.uint64(0x7F)).astype(np.uint8)
    data[:, :-1] |= is_used[:, 1:].astype(np.uint8) << 7
    return bytes(data[is_used].tobytes())


def _count_varints(part: memoryview) -> int:
    data = np.frombuffer(part, np.uint8)
    return sum(
        int(np.count_nonzero(data[start : start + _VARINT_BLOCK] < 0x80))
        for start in range(0, len(data), _VARINT_BLOCK)
    )


def _decode_varints(part: memoryview, out: Array) -> int:
    """Decode all of `part` into the start of `out`; return the number of elements."""
    data = np.frombuffer(part, np.uint8)
    if len(data) and data[-1] >= 0x80:
        raise ProtobufError("a varint goes beyond the end of its field")
    done = start = 0
    while start < len(data):
        block = data[start : start + _VARINT_BLOCK]
        ends = np.flatnonzero(block < 0x80)
        if not len(ends):
            raise ProtobufError("a varint is too long")
        block = block[: ends[-1] + 1]
        starts = np.concatenate([[0], ends[:-1] + 1])
        lengths = ends - starts + 1
        longest = int(lengths.max())
        if longest > 10:
            raise ProtobufError("a varint is too long")
        values = (block[starts] & 0x7F).astype(np.uint64)
        for place in range(1, longest):  # most data has short ones, or all of one length
            longer = np.flatnonzero(lengths > place)
            bits = (block[starts[longer] + place] & 0x7F).astype(np.uint64)
            values[longer] |= bits << np.uint64(7 * place)
        target = out[done : done + len(values)]
        # As protobuf does: a longer number loses its upper bits; any bit set is true.
        is_bool = out.dtype.kind == "b"
        target[:] = values != 0 if is_bool else values.view(np.int64).astype(out.dtype)
        done += len(values)
        start += len(block)
    return done


def _read_varint(message: memoryview, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 70:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & _INT64_MASK, at
        shift += 7
    raise ProtobufError("a varint is too long" if shift >= 70 else "the message is cut short")


def _varint(value: int) -> bytes:
    if value < 0x80:
        return bytes((value,))
    data = bytearray()
    while value >= 0x80:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)
