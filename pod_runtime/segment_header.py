"""Read and pack the headers of snapshot segments. Standard library only.

A segment is a memory file that describes itself, so that it can outlive the trainers that write it.
The trainers of a node write it together, each its own range of the bytes:

    page 0                   file header: magic, version, writers, rooms
    slot i of two            a header per writer · room for the meta JSON · room for the tensors

A writer deletes its header in the older slot, writes its range, and writes the header again. A slot
is complete when the headers of all writers are there and name one state; a checksum finds headers
that were cut off by a kill. `trainer.state.snapshot` writes and reads the rest; the launcher and
the shim need only `read_newest`.
"""

import os
import struct
import zlib
from dataclasses import dataclass, replace

MAGIC = b"EDLSEG01"
SLOTS = 2
PAGE_BYTES = 4096
MAX_WRITERS = 1024

_VERSION = 2  # 1 had one writer
_FILE = struct.Struct("<8sIIIQQQ")  # magic, version, slots, writers, three rooms in bytes
_PART = struct.Struct("<8sqqqQQ64s")  # mark, stage, step, serial, meta, data bytes, layout digest
_CHECKSUM = struct.Struct("<I")
_STRIDE = 256  # bytes from one writer's header to the next
_COMPLETE = b"COMPLETE"

PART_HEADER_BYTES = _PART.size + _CHECKSUM.size  # zeroed to delete a header


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Stamp:
    """Which state of a job: a later one is greater."""

    stage: int
    step: int  # global steps committed since the job began
    serial: int = 0  # states of one stage in order; what follows an epoch shares its last step


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotHeader:
    """What a slot holds, as all of its writers say, or one of them."""

    stamp: Stamp
    meta_bytes: int  # of JSON; 0 from other writers than the first
    data_bytes: int
    digest: str  # of the layout: names, shapes and types


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The layout of a segment; all rooms are whole pages."""

    writers: int
    header_room: int  # of one slot; for all writers that the node may have
    meta_room: int
    data_room: int

    @property
    def slot_bytes(self) -> int:
        return self.header_room + self.meta_room + self.data_room

    @property
    def total_bytes(self) -> int:
        return PAGE_BYTES + SLOTS * self.slot_bytes

    def header_offset(self, slot: int, writer: int) -> int:
        return PAGE_BYTES + slot * self.slot_bytes + writer * _STRIDE

    def meta_offset(self, slot: int) -> int:
        return PAGE_BYTES + slot * self.slot_bytes + self.header_room

    def data_offset(self, slot: int) -> int:
        return self.meta_offset(slot) + self.meta_room

    def fits(self, meta_bytes: int, data_bytes: int) -> bool:
        return meta_bytes <= self.meta_room and data_bytes <= self.data_room

    def pack(self) -> bytes:
        """Return the file header."""
        rooms = self.header_room, self.meta_room, self.data_room
        return _sealed(_FILE.pack(MAGIC, _VERSION, SLOTS, self.writers, *rooms))


def make_geometry(writers: int, meta_bytes: int, data_bytes: int) -> Geometry:
    """Return a layout with room for that much.

    Raises:
        ValueError: more writers than a segment can have.
    """
    if not 1 <= writers <= MAX_WRITERS:
        raise ValueError(f"writers: expected 1 to {MAX_WRITERS}, got {writers}")
    return Geometry(
        writers=writers,
        header_room=_pages(writers * _STRIDE),
        meta_room=_pages(meta_bytes),
        data_room=_pages(data_bytes),
    )


def pack_part(header: SlotHeader) -> bytes:
    """Return the header by which a writer declares its range complete."""
    stamp = header.stamp
    sizes = header.meta_bytes, header.data_bytes
    digest = header.digest.encode("ascii")
    return _sealed(_PART.pack(_COMPLETE, stamp.stage, stamp.step, stamp.serial, *sizes, digest))


def read_geometry(fd: int) -> Geometry | None:
    """Return a segment's layout; None: `fd` is not a segment of this version."""
    body = _unsealed(_pread(fd, _FILE.size + _CHECKSUM.size, 0), _FILE.size)
    if body is None:
        return None
    magic, version, slots, writers, *rooms = _FILE.unpack(body)
    if (magic, version, slots) != (MAGIC, _VERSION, SLOTS) or not 1 <= writers <= MAX_WRITERS:
        return None
    header_room, meta_room, data_room = rooms
    if writers * _STRIDE > header_room:
        return None
    return Geometry(
        writers=writers, header_room=header_room, meta_room=meta_room, data_room=data_room
    )


def read_slots(fd: int, geometry: Geometry | None = None) -> list[tuple[int, SlotHeader]]:
    """Return (slot number, header) of each complete slot; [] if the file is not a segment.

    It reads by position, so processes that share the descriptor may call it at the same time.
    """
    geometry = geometry or read_geometry(fd)
    if geometry is None:
        return []
    found = []
    for slot in range(SLOTS):
        header = _read_slot(fd, geometry, slot)
        if header is not None:
            found.append((slot, header))
    return found


def read_newest(fd: int) -> SlotHeader | None:
    """Return the newest complete slot of a segment; None: it has none, or is not a segment."""
    headers = [header for _slot, header in read_slots(fd)]
    return max(headers, key=lambda header: header.stamp, default=None)


def _read_slot(fd: int, geometry: Geometry, slot: int) -> SlotHeader | None:
    size = (geometry.writers - 1) * _STRIDE + PART_HEADER_BYTES
    raw = _pread(fd, size, geometry.header_offset(slot, 0))
    parts = []
    for writer in range(geometry.writers):
        start = writer * _STRIDE
        part = _unpack_part(raw[start : start + PART_HEADER_BYTES])
        if part is None:
            return None
        parts.append(part)
    first = parts[0]
    if any(replace(part, meta_bytes=0) != replace(first, meta_bytes=0) for part in parts[1:]):
        return None
    return first if geometry.fits(first.meta_bytes, first.data_bytes) else None


def _unpack_part(raw: bytes) -> SlotHeader | None:
    body = _unsealed(raw, _PART.size)
    if body is None:
        return None
    mark, stage, step, serial, meta_bytes, data_bytes, digest = _PART.unpack(body)
    if mark != _COMPLETE:
        return None
    return SlotHeader(
        stamp=Stamp(stage=stage, step=step, serial=serial),
        meta_bytes=meta_bytes,
        data_bytes=data_bytes,
        digest=digest.rstrip(b"\0").decode("ascii", "replace"),
    )


def _pages(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def _pread(fd: int, size: int, offset: int) -> bytes:
    try:
        return os.pread(fd, size, offset)
    except (OSError, OverflowError):
        return b""  # a closed or foreign descriptor holds no snapshot


def _sealed(body: bytes) -> bytes:
    return body + _CHECKSUM.pack(zlib.crc32(body))


def _unsealed(raw: bytes, size: int) -> bytes | None:
    """Return the first `size` bytes of `raw` if the checksum behind them holds."""
    if len(raw) != size + _CHECKSUM.size:
        return None
    (checksum,) = _CHECKSUM.unpack(raw[size:])
    return raw[:size] if checksum == zlib.crc32(raw[:size]) else None
