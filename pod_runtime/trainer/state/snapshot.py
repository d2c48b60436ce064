"""Keep the state in memory that outlives its trainers: a memfd of two slots, held by the shim.

`pod_runtime.segment_header` has the format. The trainers of a node write a slot together; each
takes its header back, fills its range, and writes its header again. So whoever reads after a kill
finds the other slot, or both, but never half a state.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from pod_runtime.cgroups import available_memory
from pod_runtime.segment_header import (
    PAGE_BYTES,
    PART_HEADER_BYTES,
    SLOTS,
    Geometry,
    SlotHeader,
    Stamp,
    make_geometry,
    pack_part,
    read_geometry,
    read_slots,
)
from pod_runtime.trainer.errors import SnapshotError, StateError
from pod_runtime.trainer.frameworks.framework import FrameworkState
from pod_runtime.trainer.layout import StateLayout, split_bytes
from pod_runtime.trainer.progress.loop_status import LoopStatus
from pod_runtime.trainer.state.host_state import HostState, host_state_from, status_from

META_RESERVE = 64 << 10  # the ledger grows by a row per stage and epoch
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, since Linux 5.14; Python does not name it


@dataclass(frozen=True, slots=True, kw_only=True)
class Handle:
    """Tells a process of the same node where a segment is."""

    pid: int
    fd: int
    inode: int
    size_bytes: int


class SnapshotSegment:
    """One trainer's view of its node's segment: made by the first writer, joined by the others."""

    def __init__(self, fd: int, geometry: Geometry, *, populate: bool) -> None:
        """Map it; `fd` belongs to this object from now on."""
        self.fd = fd
        self.geometry = geometry
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
        self._map = mmap.mmap(fd, geometry.total_bytes, flags=flags)

    @classmethod
    def make(
        cls,
        name: str,
        *,
        writers: int,
        meta_bytes: int,
        data_bytes: int,
        spare: int = 0,
        or_file: bool = False,
    ) -> "SnapshotSegment":
        """Make a segment that has room for states of that size, with some for their growth.

        Args:
            spare, or_file: as of `allocate`.

        Raises:
            SnapshotError: there is no room for it.
        """
        geometry = make_geometry(writers, 2 * meta_bytes + META_RESERVE, data_bytes)
        fd = allocate(name, geometry.total_bytes, spare, or_file=or_file)
        segment = cls(fd, geometry, populate=not or_file)  # which is written once
        segment._write(0, geometry.pack())
        return segment

    @classmethod
    def join(cls, handle: Handle) -> "SnapshotSegment | None":
        """Map a segment that another process of this node has made; None if it cannot be reached.

        Where it cannot, as between containers that do not see each other's processes, its maker
        writes alone.
        """
        try:
            fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        found = os.fstat(fd)
        geometry = read_geometry(fd)
        if (found.st_ino, found.st_size) == (handle.inode, handle.size_bytes) and geometry:
            with contextlib.suppress(OSError, ValueError):
                return cls(fd, geometry, populate=False)
        os.close(fd)
        return None

    @property
    def handle(self) -> Handle:
        found = os.fstat(self.fd)
        return Handle(pid=os.getpid(), fd=self.fd, inode=found.st_ino, size_bytes=found.st_size)

    def set_writers(self, writers: int) -> None:
        """Set how many write it, once that is known; only the first writer does, in the file too.

        Nothing may have been written yet.
        """
        self.geometry = replace(self.geometry, writers=writers)
        self._write(0, self.geometry.pack())

    def follow_writers(self, writers: int) -> None:
        """As `set_writers`, for those that have joined."""
        self.geometry = replace(self.geometry, writers=writers)

    def populate(self, layout: StateLayout, index: int) -> None:
        """Map writer `index`'s range into the page tables before the first snapshot needs it."""
        start, stop = split_bytes(layout, self.geometry.writers, index)
        for slot in range(SLOTS):
            begin = (self.geometry.data_offset(slot) + start) // PAGE_BYTES * PAGE_BYTES
            length = self.geometry.data_offset(slot) + stop - begin
            if length > 0:
                with contextlib.suppress(OSError, ValueError):  # an older kernel
                    self._map.madvise(_POPULATE_WRITE, begin, length)

    def fits(self, meta_bytes: int, data_bytes: int) -> bool:
        return self.geometry.fits(meta_bytes, data_bytes)

    def newest(self) -> Stamp | None:
        """Return what the newest complete slot holds; None: no slot is complete."""
        return max((head.stamp for _, head in read_slots(self.fd, self.geometry)), default=None)

    def write_part(
        self, state: FrameworkState, layout: StateLayout, stamp: Stamp, *, index: int, meta: bytes
    ) -> None:
        """Write the range of writer `index` into the older slot; the others write theirs.

        Args:
            meta: the state's description, from the first writer; the others leave it to that.
        """
        slot = self._older_slot(stamp)
        if slot is None:
            return
        self._take_back(slot, index)
        self._write(self.geometry.meta_offset(slot), meta)
        self._copy(state, layout, slot, *split_bytes(layout, self.geometry.writers, index))
        self._declare(slot, index, _header(layout, stamp, meta))

    def write_whole(
        self, state: FrameworkState, layout: StateLayout, stamp: Stamp, meta: bytes
    ) -> None:
        """Write a whole state for all writers, some of which may be gone.

        Several survivors may do so at once, and not all with the same state: one after the other,
        and only if its state is newer than what is there by then.
        """
        with _locked(self.fd):
            newest = self.newest()
            slot = self._older_slot(stamp)
            if slot is None or (newest is not None and newest > stamp):
                return
            for index in range(self.geometry.writers):
                self._take_back(slot, index)
            self._write(self.geometry.meta_offset(slot), meta)
            self._copy(state, layout, slot, 0, layout.total_bytes)
            for index in range(self.geometry.writers):
                self._declare(slot, index, _header(layout, stamp, meta if index == 0 else b""))

    def flush(self) -> None:
        """Have one that is a file written to the disk: its memory is free for others then."""
        self._map.flush()

    def close(self) -> None:
        """Close the segment; other holders of the descriptor keep it alive."""
        self._map.close()
        os.close(self.fd)

    def _older_slot(self, stamp: Stamp) -> int | None:
        """Return the slot to write `stamp` to; None: it is there already.

        Never the newest complete one. All writers find the same, although some may have begun: a
        slot that was taken back is the older one still.
        """
        slots = read_slots(self.fd, self.geometry)
        if not slots:
            return 0
        slot, newest = max(slots, key=lambda each: each[1].stamp)
        return None if newest.stamp == stamp else (slot + 1) % SLOTS

    def _take_back(self, slot: int, index: int) -> None:
        self._write(self.geometry.header_offset(slot, index), bytes(PART_HEADER_BYTES))

    def _declare(self, slot: int, index: int, header: SlotHeader) -> None:
        self._write(self.geometry.header_offset(slot, index), pack_part(header))

    def _copy(
        self, state: FrameworkState, layout: StateLayout, slot: int, start: int, stop: int
    ) -> None:
        begin = self.geometry.data_offset(slot)
        with memoryview(self._map) as whole, whole[begin : begin + layout.total_bytes] as target:
            state.copy_out(target, start, stop)

    def _write(self, offset: int, data: bytes) -> None:
        self._map[offset : offset + len(data)] = data


def _header(layout: StateLayout, stamp: Stamp, meta: bytes) -> SlotHeader:
    return SlotHeader(
        stamp=stamp,
        meta_bytes=len(meta),
        data_bytes=layout.total_bytes,
        digest=layout.digest,
    )


@contextlib.contextmanager
def _locked(fd: int) -> Iterator[None]:
    """Hold the segment's lock; the kernel gives it back when this process dies.

    By a descriptor of its own: one that was handed over shares its lock with all its holders.
    """
    own = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(own, fcntl.LOCK_EX)
        yield
    finally:
        os.close(own)


def allocate(name: str, size: int, spare: int = 0, *, or_file: bool = False) -> int:
    """Return a new memfd of `size` bytes, all of them allocated.

    Args:
        spare: bytes that must be left. The kernel would kill a process for lack of memory, and
            that could be this trainer, where a control group's limit allows no more.
        or_file: where there is not so much memory, return a file without a name in the working
            folder. The kernel can write its pages back.

    Raises:
        SnapshotError: there is not so much memory, or disk, or a limit forbids it.
    """
    is_short = available_memory() < size + spare
    fd = -1
    try:
        if not is_short:
            fd = os.memfd_create(name, os.MFD_CLOEXEC)
        elif or_file:
            with tempfile.TemporaryFile(dir=Path.cwd()) as file:
                fd = os.dup(file.fileno())
        else:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if fd >= 0:
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


def newest_stamp(fds: Iterable[int], stage: int) -> Stamp | None:
    """Return the newest complete state of `stage` in a segment; None: it has none."""
    stamps = [header.stamp for fd in fds for _, header in read_slots(fd)]
    return max((stamp for stamp in stamps if stamp.stage == stage), default=None)


def read_snapshot(fds: Iterable[int], stamp: Stamp) -> HostState | None:
    """Return the state `stamp` from the segment that holds it; None: none does.

    The state points into the segment's memory.
    """
    for fd in fds:
        geometry = read_geometry(fd)
        for slot, header in read_slots(fd, geometry):
            if header.stamp != stamp or geometry is None:
                continue
            with contextlib.suppress(OSError, ValueError):
                mapped = mmap.mmap(
                    fd,
                    geometry.meta_room + header.data_bytes,
                    flags=mmap.MAP_SHARED | mmap.MAP_POPULATE,
                    prot=mmap.PROT_READ,
                    offset=geometry.meta_offset(slot),
                )
                view = memoryview(mapped)[geometry.meta_room :]
                return host_state_from(mapped[: header.meta_bytes], view)
    return None


def newest_status(fds: Iterable[int]) -> LoopStatus | None:
    """Return the progress of the newest complete state, while its trainers go on writing.

    None: there is no complete state, or it was overwritten while it was read.
    """
    found = [(header, slot, fd) for fd in fds for slot, header in read_slots(fd)]
    if not found:
        return None
    header, slot, fd = max(found, key=lambda each: each[0].stamp)
    geometry = read_geometry(fd)
    if geometry is None:
        return None
    meta = os.pread(fd, header.meta_bytes, geometry.meta_offset(slot))
    # Writers take their headers back before they change a byte.
    return status_from(meta) if (slot, header) in read_slots(fd, geometry) else None


def copy_newest(fd: int, room: Callable[[int], memoryview]) -> HostState | None:
    """Return the newest complete state while trainers go on writing; its bytes go to `room(SIZE)`.

    None: there is none, or writers were so quick that each try met a slot in the making. May be
    called by another thread at the same time.
    """
    for _ in range(10):
        geometry = read_geometry(fd)
        slots = read_slots(fd, geometry)
        if not slots or geometry is None:
            return None
        slot, header = max(slots, key=lambda each: each[1].stamp)
        host_state = _copy_slot(fd, geometry, slot, header, room(header.data_bytes))
        # Writers take their headers back before they change a byte.
        if host_state is not None and (slot, header) in read_slots(fd, geometry):
            return host_state
    return None


def _copy_slot(
    fd: int, geometry: Geometry, slot: int, header: SlotHeader, view: memoryview
) -> HostState | None:
    """Return a copy of a slot; None if it was overwritten meanwhile, as far as that can be seen."""
    meta = os.pread(fd, header.meta_bytes, geometry.meta_offset(slot))
    done = 0
    while done < header.data_bytes:
        done += os.preadv(fd, [view[done:]], geometry.data_offset(slot) + done)
    try:
        return host_state_from(meta, view)
    except StateError:
        return None
