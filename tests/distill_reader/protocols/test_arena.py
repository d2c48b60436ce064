import fcntl
import itertools
import mmap
import os
import tempfile
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill_reader.protocols import arena as arena_module
from distill_reader.protocols.arena import (
    ALIGNMENT,
    Arena,
    ArenaError,
    ArenaFull,
    OwnArena,
    Slice,
    attach,
)
from tests.support import wait_until

PAGE = mmap.PAGESIZE


@pytest.fixture
def arena():
    with_allocator = OwnArena(4 * PAGE)
    yield with_allocator
    with_allocator.close()


def memfd(size: int, seals: int = 0) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_what_one_process_writes_the_other_reads(arena):
    piece = arena.allocate(1000)
    other = attach(os.dup(arena.fd))
    piece.view[:5] = b"hello"
    assert bytes(other.region(piece.offset, 5)) == b"hello"
    assert other.size == arena.size
    other.close()


def test_nobody_can_shrink_or_grow_it(arena):
    for size in (PAGE, 64 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)


def test_allocations_do_not_overlap_and_are_aligned(arena):
    pieces = [arena.allocate(size) for size in (1, 100, 0, ALIGNMENT, 4000)]
    for number, piece in enumerate(pieces):
        assert piece.offset % ALIGNMENT == 0
        piece.view[:] = bytes([number]) * piece.size
    for number, piece in enumerate(pieces):
        assert bytes(piece.view) == bytes([number]) * piece.size


def test_a_full_arena_says_so_and_has_room_again_after_a_release(arena):
    first = arena.allocate(2 * PAGE)
    arena.allocate(2 * PAGE)
    with pytest.raises(ArenaFull, match="no room for 1 bytes: 16384 of 16384"):
        arena.allocate(1)
    first.release()
    assert arena.allocate(2 * PAGE).offset == first.offset


def test_a_second_release_does_nothing(arena):
    piece = arena.allocate(100)
    piece.release()
    again = arena.allocate(100)
    piece.release()
    assert arena.allocate(100).offset != again.offset


def test_an_allocation_can_wait_for_a_release(arena):
    whole = arena.allocate(4 * PAGE)
    offsets: list[int] = []
    waiter = threading.Thread(
        target=lambda: offsets.append(arena.allocate(PAGE, wait_s=30).offset), daemon=True
    )
    waiter.start()
    whole.release()
    wait_until(lambda: offsets == [0])
    waiter.join()
    with pytest.raises(ArenaFull):
        arena.allocate(4 * PAGE, wait_s=0.01)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3 * PAGE)), max_size=60))
def test_whatever_is_taken_and_released_the_books_agree(steps):
    arena = OwnArena(8 * PAGE)
    held: list[tuple[Slice, bytes]] = []
    for takes, number in steps:
        if takes:
            try:
                piece = arena.allocate(number)
            except ArenaFull:
                continue
            piece.view[:] = bytes([len(held) % 256]) * piece.size
            held.append((piece, bytes(piece.view)))
        elif held:
            held.pop(number % len(held))[0].release()
        assert all(bytes(piece.view) == content for piece, content in held)
        regions = sorted((piece.offset, piece.offset + piece.size) for piece, _ in held)
        assert all(left[1] <= right[0] for left, right in itertools.pairwise(regions))
    for piece, _ in held:
        piece.release()
    assert arena.used_bytes == 0
    whole = arena.allocate(arena.size)
    assert whole.offset == 0
    whole.release()
    arena.close()


def test_threads_may_take_and_release_at_the_same_time(arena):
    clashes = []

    def work(mark: int) -> None:
        for _ in range(300):
            piece = arena.allocate(500, wait_s=30)
            piece.view[:] = bytes([mark]) * 500
            if bytes(piece.view) != bytes([mark]) * 500:
                clashes.append(mark)
            piece.release()

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clashes == []
    assert arena.used_bytes == 0


def test_a_view_outlives_the_arena():
    arena = OwnArena(PAGE)
    piece = arena.allocate(16)
    array = np.frombuffer(piece.view, dtype=np.int32)
    array[:] = 7
    piece.release()
    arena.close()
    arena.close()
    assert array.tolist() == [7] * 4
    assert arena.is_closed
    assert not is_open(arena.fd)
    with pytest.raises(ArenaError, match="closed"):
        arena.region(0, 1)
    with pytest.raises(ArenaError, match="closed"):
        arena.allocate(1)


def test_a_closed_arena_keeps_its_descriptor_until_the_last_slice_is_released():
    arena = OwnArena(PAGE)
    pieces = [arena.allocate(16), arena.slice(0, 8)]
    arena.close()
    pieces[0].release()
    pieces[0].release()
    assert is_open(arena.fd)
    pieces[1].release()
    assert not is_open(arena.fd)


def test_whoever_asked_is_called_once_at_close():
    arena = OwnArena(PAGE)
    closed: list[Arena] = []
    arena.call_at_close(closed.append)
    arena.close()
    arena.close()
    assert closed == [arena]
    arena.call_at_close(closed.append)
    assert closed == [arena, arena]


def test_many_pages_go_back_to_the_system_with_the_last_slice(monkeypatch):
    monkeypatch.setattr(arena_module, "_KEEP_BYTES", 2 * PAGE)
    arena = OwnArena(64 * PAGE)
    pieces = [arena.allocate(8 * PAGE) for _ in range(4)]
    for piece in pieces:
        piece.view[:] = b"x" * piece.size
    assert os.fstat(arena.fd).st_blocks * 512 == 32 * PAGE
    for piece in pieces:
        piece.release()
    assert os.fstat(arena.fd).st_blocks * 512 == 2 * PAGE
    arena.close()


@pytest.mark.parametrize(("offset", "size"), [(-1, 5), (0, 4 * PAGE + 1), (4 * PAGE, 1), (5, -1)])
def test_a_region_outside_is_refused(arena, offset, size):
    with pytest.raises(ArenaError, match="do not lie within"):
        arena.slice(offset, size)


def test_a_slice_chosen_by_the_caller_calls_back_once(arena):
    released: list[Slice] = []
    piece = arena.slice(10, 20, released.append)
    assert len(piece.view) == 20
    piece.release()
    piece.release()
    assert released == [piece]


def unsealed() -> int:
    return memfd(PAGE)


def empty() -> int:
    return memfd(0, fcntl.F_SEAL_SHRINK)


def too_large() -> int:
    return memfd(65 * PAGE, fcntl.F_SEAL_SHRINK)


def ordinary_file() -> int:
    with tempfile.TemporaryFile() as file:
        file.truncate(PAGE)
        return os.dup(file.fileno())


def pipe() -> int:
    reading, writing = os.pipe()
    os.close(writing)
    return reading


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (unsealed, "F_SEAL_SHRINK"),
        (empty, "has 0 bytes"),
        (too_large, f"has {65 * PAGE} bytes, allowed are 1 to {64 * PAGE}"),
        (ordinary_file, "no memfd|F_SEAL_SHRINK"),  # a file of a tmpfs can be asked for its seals
        (pipe, "no memfd"),
    ],
)
def test_a_descriptor_that_could_hurt_is_refused_and_closed(make, text):
    fd = make()
    with pytest.raises(ArenaError, match=text):
        attach(fd, max_bytes=64 * PAGE)
    assert not is_open(fd)


def test_one_that_may_only_be_read_can_be_attached_for_reading():
    arena = OwnArena(PAGE)
    reading = attach(os.open(f"/proc/self/fd/{arena.fd}", os.O_RDONLY), is_writable=False)
    assert reading.region(0, 4).readonly
    reading.close()
    arena.close()
