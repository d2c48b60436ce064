"""The state in memory that outlives its trainer: a memfd with two slots, held by the pod's shim.

`pod_runtime.segment_header` has the format. A slot is taken back, filled and declared complete in
this order, so whoever reads after a kill finds the other slot, or both, but never half a state.
"""

import contextlib
import errno
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass

from pod_runtime.segment_header import (
    SLOT_HEADER_BYTES,
    SLOT_HEADER_USED,
    SLOTS,
    SlotHeader,
    pack_file_header,
    pack_slot_header,
    read_slot_bytes,
    read_slots,
    slot_offset,
)
from pod_runtime.trainer.adapter import Adapter
from pod_runtime.trainer.errors import SnapshotError
from pod_runtime.trainer.image import StateImage, image_from, meta_bytes

_META_RESERVE = 64 << 10  # the ledger grows by a row per stage and epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What `SegmentWriter.write` did."""

    digest: str
    new_segment: bool  # the descriptor is another one: announce it


class SegmentWriter:
    """Writes the snapshots of one stage. The segment is made when its size is first known."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.fd = -1
        self.size_bytes = 0
        self.newest_step: int | None = None  # None: no slot is complete
        self._map: mmap.mmap | None = None  # None: no segment yet
        self._slot_bytes = 0
        self._slot = 0  # written last
        self._is_known = False  # `write` has told of the segment

    def reserve(self, data_size: int) -> None:
        """Make the segment before the first snapshot, which it would delay.

        Raises:
            SnapshotError: there is no room for it.
        """
        self._make_room(_META_RESERVE, data_size)

    def write(self, adapter: Adapter, *, step: int, status_json: str, scalars_json: str) -> Written:
        """Put the adapter's state as that of `step` into the older slot.

        Raises:
            SnapshotError: there is no room for the segment.
        """
        layout = adapter.layout()
        meta = meta_bytes(status_json, scalars_json, layout)
        made = self._make_room(len(meta), layout.total_bytes)
        assert self._map is not None
        slot = (self._slot + 1) % SLOTS
        start = slot_offset(slot, self._slot_bytes)
        self._map[start : start + SLOT_HEADER_USED] = bytes(SLOT_HEADER_USED)
        begin = start + SLOT_HEADER_BYTES
        self._map[begin : begin + len(meta)] = meta
        begin += len(meta)
        with memoryview(self._map) as whole, whole[begin : begin + layout.total_bytes] as target:
            adapter.copy_out(target)
        header = SlotHeader(
            stage=self.stage,
            step=step,
            meta_bytes=len(meta),
            data_bytes=layout.total_bytes,
            digest=layout.digest,
        )
        self._map[start : start + SLOT_HEADER_USED] = pack_slot_header(header)
        self._slot, self.newest_step = slot, step
        first, self._is_known = not self._is_known, True
        return Written(digest=layout.digest, new_segment=made or first)

    def close(self) -> None:
        """Let go of the segment; whoever else holds the descriptor keeps it alive."""
        if self._map is not None:
            self._map.close()
            self._map = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _make_room(self, meta_size: int, data_size: int) -> bool:
        needed = SLOT_HEADER_BYTES + meta_size + data_size
        if self._map is not None and needed <= self._slot_bytes:
            return False
        page = mmap.PAGESIZE
        slot_bytes = -(-(needed + meta_size + _META_RESERVE) // page) * page
        size = SLOT_HEADER_BYTES + SLOTS * slot_bytes
        fd = allocate(f"edl-snapshot-{self.stage}", size)
        self.close()
        self.fd, self.size_bytes, self._slot_bytes = fd, size, slot_bytes
        self._map = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        header = pack_file_header(slot_bytes)
        self._map[: len(header)] = header
        self.newest_step = None
        return True


def allocate(name: str, size: int) -> int:
    """Return a new memfd of `size` bytes, all of them really there.

    Raises:
        SnapshotError: there is not so much memory, or a limit forbids it.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        os.close(fd)
        remedy = {
            errno.EFBIG: "raise the limit on file sizes (ulimit -f)",
            errno.ENOSPC: "free memory, or raise the container's memory limit",
            errno.ENOMEM: "free memory, or raise the container's memory limit",
        }.get(error.errno or 0, "see the system's message")
        raise SnapshotError(
            f"no room for a snapshot segment of {size} bytes ({size / 2**20:.1f} MiB): "
            f"{error.strerror}; {remedy}. Training goes on without snapshots: a crash or a change "
            f"of the pods falls back to checkpoints"
        ) from error
    return fd


def newest_step(fds: Iterable[int], stage: int) -> int | None:
    """Return the newest step of `stage` that a segment holds a complete slot of; None: of none."""
    found = [header.step for fd in fds for _, header in read_slots(fd) if header.stage == stage]
    return max(found, default=None)


def read_snapshot(fds: Iterable[int], stage: int, step: int) -> StateImage | None:
    """Return the state of (stage, step) from whichever segment holds it; None if none does.

    The image points into the segment's memory.
    """
    for fd in fds:
        for slot, header in read_slots(fd):
            if (header.stage, header.step) != (stage, step):
                continue
            slot_bytes = read_slot_bytes(fd)
            with contextlib.suppress(OSError, ValueError):
                whole = mmap.mmap(
                    fd, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ
                )
                start = slot_offset(slot, slot_bytes or 0) + SLOT_HEADER_BYTES
                data = start + header.meta_bytes
                view = memoryview(whole)[data : data + header.data_bytes]
                return image_from(whole[start:data], view)
    return None
