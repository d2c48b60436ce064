"""Shared memory for the processes of a host: a memfd that cannot shrink, used in slices.

The process that creates an arena allocates from it; others attach by its descriptor. The seals
matter: if a peer could truncate the file, reading past its new end would kill the reader (SIGBUS).
"""

import bisect
import contextlib
import fcntl
import itertools
import mmap
import os
import threading
from collections.abc import Callable

from distill_reader.errors import DistillError

ALIGNMENT = 64  # of every allocated slice: a cache line, and enough for vector instructions
_KEEP_BYTES = 256 << 20  # pages above that are returned to the system after the last slice
_ids = itertools.count(1)


class ArenaError(DistillError):
    """A descriptor is not memory that can be shared safely, or a region is outside of it."""


class ArenaFull(DistillError):  # noqa: N818 - named by what is the case
    """No room for an allocation now."""


class Slice:
    """A region of an arena. It is a Buffer of the service; arena and offset identify it."""

    __slots__ = ("_on_release", "arena", "is_released", "offset", "size", "view")

    def __init__(
        self, arena: "Arena", offset: int, size: int, on_release: Callable[["Slice"], None] | None
    ) -> None:
        self.arena = arena
        self.offset = offset  # bytes from the arena's start
        self.size = size
        self.is_released = False
        self.view = arena.pin(offset, size)
        self._on_release = on_release

    def release(self) -> None:
        """Give it back. Further calls do nothing."""
        if self.arena.unpin(self) and self._on_release is not None:
            self._on_release(self)


class Arena:
    """A shared memory file, mapped. Every method may be called from any thread."""

    def __init__(self, fd: int, size: int, *, is_writable: bool = True) -> None:
        """Map `size` bytes of `fd`. The arena owns `fd` from here on."""
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
        self.id = next(_ids)  # unique within this process
        self.fd = fd
        self.size = size
        self._view: memoryview | None = memoryview(mmap.mmap(fd, size, prot=protection))
        self._lock = threading.Lock()
        self._pins = 0  # slices that are not yet released
        self._at_close: list[Callable[[Arena], None]] = []

    @property
    def is_closed(self) -> bool:
        return self._view is None

    def pin(self, offset: int, size: int) -> memoryview:
        """Return a region for a slice. The descriptor stays open until the slice is unpinned."""
        with self._lock:
            view = self.region(offset, size)
            self._pins += 1
            return view

    def unpin(self, piece: Slice) -> bool:
        """Mark a slice as released; return False if it already was."""
        with self._lock:
            if piece.is_released:
                return False
            piece.is_released = True
            self._pins -= 1
            is_last = self._pins == 0 and self._view is None
        if is_last:
            self._end()
        return True

    def region(self, offset: int, size: int) -> memoryview:
        """Return `size` bytes at `offset`.

        Raises:
            ArenaError: they are not within the arena, or it is closed.
        """
        view = self._view
        if view is None:
            raise ArenaError("the shared memory is closed")
        if offset < 0 or size < 0 or offset + size > self.size:
            raise ArenaError(
                f"bytes {offset} to {offset + size} do not lie within the {self.size} bytes "
                "of the shared memory"
            )
        return view[offset : offset + size]

    def slice(
        self, offset: int, size: int, on_release: Callable[[Slice], None] | None = None
    ) -> Slice:
        """Return a region that the caller chooses, bypassing the allocator.

        Raises:
            ArenaError: it is not within the arena, or the arena is closed.
        """
        return Slice(self, offset, size, on_release)

    def call_at_close(self, function: Callable[["Arena"], None]) -> None:
        """Call `function` once before the descriptor is closed; now, if it already is."""
        with self._lock:
            if self._view is not None or self._pins > 0:
                self._at_close.append(function)
                return
        function(self)

    def close(self) -> None:
        """Allow no more slices; close the descriptor once every slice is released.

        The memory is freed with its last view.
        """
        with self._lock:
            if self._view is None:
                return
            self._view = None
            is_last = self._pins == 0
        if is_last:
            self._end()

    def _end(self) -> None:
        for function in self._at_close:
            function(self)
        os.close(self.fd)


class OwnArena(Arena):
    """An arena that this process created, with an allocator.

    It allocates at the lowest free address, so that pages in the processor's caches are reused.
    """

    def __init__(self, size: int, name: str = "edl-arena") -> None:
        """Create an arena of `size` bytes: the most that can be allocated at a time.

        The system provides the memory when it is first written to.
        """
        size = aligned(max(size, 1), mmap.PAGESIZE)
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(
                fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            )
            super().__init__(fd, size)
        except BaseException:
            os.close(fd)
            raise
        self._allocating = threading.Condition()
        self._starts = [0]  # of the free intervals, ascending; no two of them touch
        self._ends = [size]
        self._used = 0
        self._top = 0  # end of the highest allocation since pages were last returned

    @property
    def used_bytes(self) -> int:
        """Bytes that are allocated now, including alignment."""
        return self._used

    def allocate(self, size: int, *, wait_s: float = 0.0) -> Slice:
        """Return a slice of `size` bytes, aligned to ALIGNMENT.

        Args:
            size: bytes, >= 0.
            wait_s: how long to wait for other slices to be released.

        Raises:
            ArenaFull: there is no free interval of this size, even after `wait_s`.
            ArenaError: the arena is closed.
        """
        length = aligned(max(size, 1))
        with self._allocating:
            offset = self._take(length)
            if offset is None and wait_s > 0:
                self._allocating.wait_for(
                    lambda: self.is_closed or any(map(length.__le__, self._gaps())), wait_s
                )
                offset = self._take(length)
            if offset is None:
                raise ArenaFull(
                    f"no room for {size} bytes: {self._used} of {self.size} bytes are in use"
                )
        try:
            return Slice(self, offset, size, self._give_back)
        except ArenaError:
            self._put(offset, length)
            raise

    def close(self) -> None:
        super().close()
        with self._allocating:
            self._allocating.notify_all()

    def _gaps(self) -> list[int]:
        return [end - start for start, end in zip(self._starts, self._ends, strict=True)]

    def _take(self, length: int) -> int | None:
        for place, start in enumerate(self._starts):
            end = start + length
            if end <= self._ends[place]:
                if end == self._ends[place]:
                    del self._starts[place], self._ends[place]
                else:
                    self._starts[place] = end
                self._used += length
                self._top = max(self._top, end)
                return start
        return None

    def _give_back(self, piece: Slice) -> None:
        self._put(piece.offset, aligned(max(piece.size, 1)))

    def _put(self, start: int, length: int) -> None:
        with self._allocating:
            end = start + length
            place = bisect.bisect(self._starts, start)
            joins_left = place > 0 and self._ends[place - 1] == start
            joins_right = place < len(self._starts) and self._starts[place] == end
            if joins_left and joins_right:
                self._ends[place - 1] = self._ends.pop(place)
                del self._starts[place]
            elif joins_left:
                self._ends[place - 1] = end
            elif joins_right:
                self._starts[place] = start
            else:
                self._starts.insert(place, start)
                self._ends.insert(place, end)
            self._used -= length
            if self._used == 0 and self._top > _KEEP_BYTES:
                self._return_pages()
            self._allocating.notify_all()

    def _return_pages(self) -> None:
        view = self._view
        if view is not None and isinstance(view.obj, mmap.mmap):
            with contextlib.suppress(OSError):  # returning them is not essential
                view.obj.madvise(mmap.MADV_REMOVE, _KEEP_BYTES, self.size - _KEEP_BYTES)
        self._top = 0


def attach(fd: int, *, max_bytes: int | None = None, is_writable: bool = True) -> Arena:
    """Map an arena that another process created. The arena owns `fd`; on errors `fd` is closed.

    Args:
        max_bytes: refuse a larger one; None: allow any size.
        is_writable: map it to be written to, if its owner allows that.

    Raises:
        ArenaError: it could shrink while mapped, is empty or too large, or has unusual pages.
    """
    try:
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as error:
            raise ArenaError(f"shared memory: the descriptor is no memfd ({error})") from error
        if not seals & fcntl.F_SEAL_SHRINK:
            raise ArenaError("shared memory: must be sealed with F_SEAL_SHRINK")
        # A page of a huge-page file can be missing when it is touched: SIGBUS again.
        if os.fstatvfs(fd).f_bsize != mmap.PAGESIZE:
            raise ArenaError("shared memory: must have pages of the ordinary size")
        size = os.fstat(fd).st_size
        if size <= 0 or (max_bytes is not None and size > max_bytes):
            raise ArenaError(f"shared memory: has {size} bytes, allowed are 1 to {max_bytes}")
        try:
            with contextlib.suppress(PermissionError):  # its owner has sealed it against writing
                return Arena(fd, size, is_writable=is_writable)
            return Arena(fd, size, is_writable=False)
        except OSError as error:
            raise ArenaError(f"shared memory: cannot be mapped ({error})") from error
    except BaseException:
        os.close(fd)
        raise


def aligned(size: int, step: int = ALIGNMENT) -> int:
    """Return `size` rounded up to a multiple of `step`."""
    return -(-size // step) * step
