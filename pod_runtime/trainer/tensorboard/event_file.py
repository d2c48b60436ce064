"""Read and write TensorBoard's event files, as far as scalars need it. Pure.

A file is a run of records: length (uint64), its masked CRC-32C, a message, its masked CRC-32C; all
little-endian. The message is TensorFlow's protobuf `Event`. Ours carry two fields more, which
readers skip as unknown: where the training stood when the scalar was noted.

No writer library replaces this. Its `purge_step` cuts curves by their own axes, so it would lose
points of a curve over images or epochs, and cannot tell the end of an epoch from the first step of
the next. Writers of tensorboardX and VisualDL also buffer in a thread: a SIGKILL loses points.
"""

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass

FILE_VERSION = "brain.Event:2"

_WALL_TIME, _STEP, _FILE_VERSION, _SUMMARY = 1, 2, 3, 5  # fields of Event
_AT_EPOCH, _AT_STEP = 1000, 1001  # ours
_VALUE = 1  # field of Summary
_TAG, _SIMPLE_VALUE = 1, 2  # fields of Summary.Value
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types of protobuf


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """Where a training stands. An epoch's end comes before the next one's start."""

    epoch: int
    step: int  # global


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalar:
    """One point of one curve."""

    tag: str
    value: float  # kept as float32
    step: int  # position on the axis
    wall_time: float  # seconds since 1970
    at: Position


def encode_header(wall_time: float) -> bytes:
    """Return the record that a file begins with."""
    return _frame(_double(_WALL_TIME, wall_time) + _bytes(_FILE_VERSION, FILE_VERSION.encode()))


def encode_scalar(scalar: Scalar) -> bytes:
    """Return the record of one scalar."""
    value = _bytes(_TAG, scalar.tag.encode()) + _float(_SIMPLE_VALUE, scalar.value)
    return _frame(
        _double(_WALL_TIME, scalar.wall_time)
        + _number(_STEP, scalar.step)
        + _bytes(_SUMMARY, _bytes(_VALUE, value))
        + _number(_AT_EPOCH, scalar.at.epoch)
        + _number(_AT_STEP, scalar.at.step)
    )


def read_scalars(data: bytes) -> Iterator[tuple[int, Scalar | None]]:
    """Yield (offset after it, scalar) of each record; None for a record without one of ours.

    Stops before a record that is cut off or damaged, as a crash may leave it at the end.
    """
    at = 0
    while at + 12 <= len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        (size_crc,) = struct.unpack_from("<I", data, at + 8)
        end = at + 16 + size
        if size_crc != masked_crc(data[at : at + 8]) or end > len(data):
            return
        message = data[at + 12 : end - 4]
        if struct.unpack_from("<I", data, end - 4)[0] != masked_crc(message):
            return
        yield end, _decode(message)
        at = end


def _decode(message: bytes) -> Scalar | None:
    fields = _fields(message)
    try:
        value = _fields(_as_bytes(_fields(_as_bytes(fields[_SUMMARY]))[_VALUE]))
        return Scalar(
            tag=_as_bytes(value[_TAG]).decode(),
            value=struct.unpack("<f", _as_bytes(value[_SIMPLE_VALUE]))[0],
            step=_as_int(fields.get(_STEP, 0)),
            wall_time=struct.unpack("<d", _as_bytes(fields[_WALL_TIME]))[0],
            at=Position(_as_int(fields[_AT_EPOCH]), _as_int(fields[_AT_STEP])),
        )
    except (KeyError, TypeError, struct.error, UnicodeDecodeError):
        return None


def _as_bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise TypeError
    return value


def _as_int(value: int | bytes) -> int:
    if isinstance(value, bytes):
        raise TypeError
    return value


def _fields(message: bytes) -> dict[int, int | bytes]:
    """Return the fields of a protobuf message; of one that comes twice, the last."""
    found: dict[int, int | bytes] = {}
    at = 0
    while at < len(message):
        key, at = _read_varint(message, at)
        kind = key & 7
        if kind == _VARINT:
            found[key >> 3], at = _read_varint(message, at)
            continue
        if kind == _BYTES:
            size, at = _read_varint(message, at)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            break  # groups: no writer uses them
        found[key >> 3] = message[at : at + size]
        at += size
    return found


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(message):
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
    return value, at


def _frame(message: bytes) -> bytes:
    size = struct.pack("<Q", len(message))
    return b"".join(
        (
            size,
            struct.pack("<I", masked_crc(size)),
            message,
            struct.pack("<I", masked_crc(message)),
        )
    )


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3 | _VARINT) + _varint(value)


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | _FIXED64) + struct.pack("<d", value)


def _float(field: int, value: float) -> bytes:
    try:
        packed = struct.pack("<f", value)
    except OverflowError:  # beyond float32: what such a number is there
        packed = struct.pack("<f", math.copysign(math.inf, value))
    return _varint(field << 3 | _FIXED32) + packed


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | _BYTES) + _varint(len(value)) + value


def _crc_table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)  # Castagnoli, reflected
        table.append(value)
    return tuple(table)


_CRC = _crc_table()


def masked_crc(data: bytes) -> int:
    """Return the CRC-32C of `data`, masked as TensorFlow's record files have it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
