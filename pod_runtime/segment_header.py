"""The headers of a snapshot segment: enough to say what it holds. Standard library only.

A segment is a memory file that describes itself, so that it outlives the trainer that wrote it:

    offset 0                   file header: magic, version, bytes per slot
    SLOT_HEADER_BYTES + i * slot_bytes      slot i of two: slot header, meta JSON, tensors' bytes

A slot's header is taken back before its bytes change and written after they have; its checksum
makes a header that was cut off by a kill count as none. `trainer.snapshot` writes and reads the
rest; the launcher and the shim need only `read_newest`.
"""

import os
import struct
import zlib
from dataclasses import dataclass

MAGIC = b"EDLSEG01"
SLOTS = 2
SLOT_HEADER_BYTES = 4096  # a page, also the size of the file header

_FILE = struct.Struct("<8sIIQ")  # magic, version, slots, bytes per slot (its header included)
_SLOT = struct.Struct("<8sqqQQ64s")  # magic, stage, step, meta bytes, data bytes, layout digest
_CHECKSUM = struct.Struct("<I")
_VERSION = 1
_COMPLETE = b"COMPLETE"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotHeader:
    """What a complete slot holds."""

    stage: int
    step: int  # global steps committed since the job began
    meta_bytes: int  # JSON, directly behind the slot's header
    data_bytes: int  # directly behind the meta
    digest: str  # of the layout: names, shapes and types


def pack_file_header(slot_bytes: int) -> bytes:
    """Return the file's header; `slot_bytes` includes the slot's own header."""
    body = _FILE.pack(MAGIC, _VERSION, SLOTS, slot_bytes)
    return body + _CHECKSUM.pack(zlib.crc32(body))


def pack_slot_header(header: SlotHeader) -> bytes:
    """Return the bytes that declare a slot complete."""
    body = _SLOT.pack(
        _COMPLETE,
        header.stage,
        header.step,
        header.meta_bytes,
        header.data_bytes,
        header.digest.encode("ascii"),
    )
    return body + _CHECKSUM.pack(zlib.crc32(body))


SLOT_HEADER_USED = _SLOT.size + _CHECKSUM.size  # what has to be zeroed to take a slot back


def slot_offset(slot: int, slot_bytes: int) -> int:
    """Return where slot `slot` begins in the file."""
    return SLOT_HEADER_BYTES + slot * slot_bytes


def read_slot_bytes(fd: int) -> int | None:
    """Return the bytes per slot; None when `fd` is no segment of this version."""
    body = _checked(_pread(fd, _FILE.size + _CHECKSUM.size, 0), _FILE.size)
    if body is None:
        return None
    magic, version, slots, slot_bytes = _FILE.unpack(body)
    if magic != MAGIC or version != _VERSION or slots != SLOTS:
        return None
    return int(slot_bytes)


def read_slots(fd: int) -> list[tuple[int, SlotHeader]]:
    """Return (slot number, header) of each complete slot; nothing for a file that is no segment."""
    slot_bytes = read_slot_bytes(fd)
    if slot_bytes is None:
        return []
    found = []
    for slot in range(SLOTS):
        raw = _pread(fd, SLOT_HEADER_USED, slot_offset(slot, slot_bytes))
        body = _checked(raw, _SLOT.size)
        if body is None:
            continue
        mark, stage, step, meta_bytes, data_bytes, digest = _SLOT.unpack(body)
        if mark != _COMPLETE or SLOT_HEADER_BYTES + meta_bytes + data_bytes > slot_bytes:
            continue
        header = SlotHeader(
            stage=stage,
            step=step,
            meta_bytes=meta_bytes,
            data_bytes=data_bytes,
            digest=digest.rstrip(b"\0").decode("ascii", "replace"),
        )
        found.append((slot, header))
    return found


def read_newest(fd: int) -> tuple[int, int, str] | None:
    """Return (stage, step, layout digest) of the newest complete slot of a segment.

    Returns None when no slot is complete, or when `fd` is no segment. Reads by position, so any
    number of processes that share the descriptor may call it.
    """
    slots = read_slots(fd)
    if not slots:
        return None
    newest = max((header for _slot, header in slots), key=lambda each: (each.stage, each.step))
    return newest.stage, newest.step, newest.digest


def _pread(fd: int, size: int, offset: int) -> bytes:
    try:
        return os.pread(fd, size, offset)
    except OSError:
        return b""  # a closed or foreign descriptor holds no snapshot


def _checked(raw: bytes, size: int) -> bytes | None:
    """Return the first `size` bytes of `raw` if the checksum behind them holds."""
    if len(raw) != size + _CHECKSUM.size:
        return None
    (checksum,) = _CHECKSUM.unpack(raw[size:])
    return raw[:size] if checksum == zlib.crc32(raw[:size]) else None
