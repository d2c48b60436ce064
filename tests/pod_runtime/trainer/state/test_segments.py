"""The format of segments, how ranks share one, and what is left of it after any kill."""

import contextlib
import errno
import json
import mmap
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pod_runtime.segment_header import (
    PART_HEADER_BYTES,
    Stamp,
    make_geometry,
    read_geometry,
    read_newest,
    read_slots,
)
from pod_runtime.trainer.errors import SnapshotError
from pod_runtime.trainer.layout import ALIGN, StateLayout, make_layout, split_bytes
from pod_runtime.trainer.state import host_state as host_states
from pod_runtime.trainer.state import snapshot
from pod_runtime.trainer.state.host_state import meta_bytes, room_for
from pod_runtime.trainer.state.snapshot import (
    Handle,
    SnapshotSegment,
    allocate,
    copy_newest,
    newest_stamp,
    read_snapshot,
)
from tests.pod_runtime.trainer.states import make_status


class Numbers:
    """A state: one array, and one that belongs to the script."""

    def __init__(self, length: int, extra: int = 0) -> None:
        self.array = np.zeros(length, np.float64)
        self.extra = np.zeros(extra, np.float64)
        self.dies = False
        tensors = [("model/numbers", "float64", (length,))]
        self.made = make_layout([*tensors, ("extra/of the script", "float64", (extra,))])

    def fill(self, value: float) -> "Numbers":
        self.array[:] = self.extra[:] = value
        return self

    def layout(self) -> StateLayout:
        return self.made

    def copy_out(self, target: memoryview, start: int = 0, stop: int | None = None) -> None:
        data = bytearray(self.made.total_bytes)
        for spec, array in zip(self.made.specs, (self.array, self.extra), strict=True):
            data[spec.offset : spec.offset + array.nbytes] = array.tobytes()
        stop = self.made.total_bytes if stop is None else stop
        if self.dies:
            target[start : (start + stop) // 2] = data[start : (start + stop) // 2]
            raise KeyboardInterrupt
        target[start:stop] = data[start:stop]


def stamp(step: int, serial: int = 0) -> Stamp:
    return Stamp(stage=3, step=step, serial=serial)


def meta_of(numbers: Numbers, step: int) -> bytes:
    status = json.dumps(make_status(stage=3, step=step).to_json())
    return meta_bytes(status, '{"lr": 0.5}', numbers.layout())


def write(
    segment: SnapshotSegment, numbers: Numbers, step: int, index: int = 0, serial: int = 0
) -> None:
    segment.write_part(
        numbers,  # type: ignore[arg-type]  # only these two methods are used
        numbers.layout(),
        stamp(step, serial),
        index=index,
        meta=meta_of(numbers, step) if index == 0 else b"",
    )


def values_at(segment: SnapshotSegment, at: Stamp, length: int = 1000) -> list[float]:
    """Return which numbers the array of a snapshot holds."""
    host_state = read_snapshot([segment.fd], at)
    assert host_state is not None, f"there is no snapshot {at}"
    return sorted(set(np.frombuffer(host_state.data[: 8 * length], np.float64).tolist()))


def steps_in(segment: SnapshotSegment) -> list[int]:
    return sorted(header.stamp.step for _slot, header in read_slots(segment.fd))


@pytest.fixture
def share():
    """Make segments that several writers have open, each as a process of its own would."""
    made: list[SnapshotSegment] = []

    def make(writers: int = 1, length: int = 1000, extra: int = 0) -> list[SnapshotSegment]:
        total = Numbers(length, extra).layout().total_bytes
        first = SnapshotSegment.make("test", writers=writers, meta_bytes=4096, data_bytes=total)
        made.append(first)
        for _ in range(writers - 1):
            joined = SnapshotSegment.join(first.handle)
            assert joined is not None
            made.append(joined)
        return list(made)

    yield make
    for segment in made:
        segment.close()


def test_the_two_newest_snapshots_are_kept_and_read_back(share):
    (segment,) = share()
    numbers = Numbers(1000)
    for step in (5, 6, 7):
        write(segment, numbers.fill(step), step)
    assert steps_in(segment) == [6, 7]
    newest = read_newest(segment.fd)
    assert newest is not None
    assert (newest.stamp, newest.digest) == (stamp(7), numbers.layout().digest)
    assert newest_stamp([segment.fd], 3) == stamp(7)
    assert newest_stamp([segment.fd], 2) is None
    assert values_at(segment, stamp(6)) == [6]
    host_state = read_snapshot([segment.fd], stamp(6))
    assert host_state is not None
    assert (host_state.status.step, host_state.scalars) == (6, {"lr": 0.5})
    assert read_snapshot([segment.fd], stamp(5)) is None
    assert read_snapshot([segment.fd], Stamp(stage=2, step=6)) is None


def test_what_follows_an_epoch_supersedes_its_last_step(share):
    (segment,) = share()
    numbers = Numbers(1000)
    write(segment, numbers.fill(1), 7, serial=7)
    write(segment, numbers.fill(2), 7, serial=8)
    assert newest_stamp([segment.fd], 3) == stamp(7, 8)
    assert values_at(segment, stamp(7, 8)) == [2]


def test_a_slot_counts_when_every_writer_has_declared_its_part_of_one_state(share):
    first, second, third = share(3)
    numbers = Numbers(1000)
    for segment, index in ((second, 1), (first, 0)):
        write(segment, numbers.fill(1), 1, index)
        assert read_newest(first.fd) is None
    write(third, numbers.fill(1), 1, 2)
    assert steps_in(first) == [1]
    write(first, numbers.fill(2), 2, 0)  # into the other slot
    write(third, numbers.fill(2), 2, 2)
    assert steps_in(first) == [1]
    write(second, numbers.fill(3), 3, 1)  # a writer that is elsewhere completes nothing
    assert steps_in(first) == [1]
    for segment, index in ((third, 2), (second, 1), (first, 0)):
        write(segment, numbers.fill(4), 4, index)
    assert steps_in(first) == [1, 4]
    assert values_at(third, stamp(4)) == [4]


def test_a_survivor_writes_the_parts_of_the_others_unless_there_is_something_newer(share):
    first, second = share(2)
    numbers = Numbers(1000)

    def rescue(segment: SnapshotSegment, step: int) -> None:
        segment.write_whole(
            numbers.fill(step),  # type: ignore[arg-type]
            numbers.layout(),
            stamp(step),
            meta_of(numbers, step),
        )

    rescue(second, 5)
    assert steps_in(first) == [5]
    write(first, numbers.fill(6), 6, 0)  # its peer dies now, in step 7
    rescue(first, 6)
    rescue(second, 6)
    rescue(second, 5)  # a rank that did not get as far as the other
    assert steps_in(first) == [5, 6]
    write(second, numbers.fill(6), 6, 1)  # late: it is there already, and nothing is taken back
    assert steps_in(first) == [5, 6]
    assert values_at(first, stamp(6)) == [6]


@given(st.integers(0, 40_000), st.integers(0, 9_000), st.integers(1, 9))
def test_the_ranges_of_all_writers_are_the_whole_and_the_scripts_own_is_the_firsts(
    length, extra, writers
):
    layout = Numbers(length, extra).layout()
    ranges = [split_bytes(layout, writers, index) for index in range(writers)]
    assert all(start <= stop for start, stop in ranges)
    assert all(start % ALIGN == 0 for start, _stop in ranges)
    at = 0
    for start, stop in [*ranges[1:], ranges[0]]:
        assert start in (at, stop)
        at = max(at, stop)
    assert ranges[0][1] == at == layout.total_bytes
    assert ranges[0][0] <= layout.shared_bytes
    most = max(stop - start for start, stop in ranges)
    fair = layout.total_bytes / writers
    assert most <= max(fair, layout.total_bytes - layout.shared_bytes) + 2 * 4096


@pytest.mark.parametrize("length", [0, 1, 3, 513, 20_001])
def test_more_writers_than_bytes_and_odd_sizes_make_whole_states(share, length):
    segments = share(5, length=length, extra=7)
    numbers = Numbers(length, 7).fill(2.5)
    for index, segment in enumerate(segments):
        write(segment, numbers, 9, index)
    host_state = read_snapshot([segments[3].fd], stamp(9))
    assert host_state is not None
    whole = bytearray(numbers.layout().total_bytes)
    numbers.copy_out(memoryview(whole))
    assert bytes(host_state.data) == bytes(whole)


def test_a_death_amid_a_copy_leaves_the_snapshot_before(share):
    (segment,) = share()
    numbers = Numbers(1000)
    write(segment, numbers, 1)
    write(segment, numbers, 2)
    numbers.dies = True
    with pytest.raises(KeyboardInterrupt):
        write(segment, numbers, 3)
    assert steps_in(segment) == [2]


def test_a_header_that_was_cut_off_counts_as_none(share):
    (segment,) = share()
    write(segment, Numbers(10), 1)
    ((slot, _header),) = read_slots(segment.fd)
    at = segment.geometry.header_offset(slot, 0)
    os.pwrite(segment.fd, bytes(8), at + PART_HEADER_BYTES - 8)
    assert read_newest(segment.fd) is None


def test_a_segment_is_joined_only_where_it_is_the_one_that_was_told_of(share):
    (segment,) = share()
    handle = segment.handle
    for wrong in (
        Handle(pid=handle.pid, fd=handle.fd, inode=handle.inode + 1, size_bytes=handle.size_bytes),
        Handle(pid=handle.pid, fd=1 << 20, inode=handle.inode, size_bytes=handle.size_bytes),
        Handle(pid=1 << 28, fd=handle.fd, inode=handle.inode, size_bytes=handle.size_bytes),
    ):
        assert SnapshotSegment.join(wrong) is None


def test_a_copy_beside_writers_is_never_a_mixture(share):
    first, second = share(2, length=200_000)
    numbers, stop = Numbers(200_000), threading.Event()

    def keep_writing() -> None:
        step = 0
        while not stop.is_set():
            step += 1
            for index, segment in enumerate((first, second)):
                write(segment, numbers.fill(step), step, index)
            # No pause, or one that lets a copy be whole: two threads on one core take turns.
            stop.wait(step % 10 * 0.005)

    thread = threading.Thread(target=keep_writing)
    thread.start()
    seen: set[int] = set()
    try:
        deadline = time.monotonic() + 60
        while len(seen) < 5:
            assert time.monotonic() < deadline, "no copy was ever whole"
            host_state = copy_newest(first.fd, room_for)
            if host_state is not None:
                values = np.frombuffer(host_state.data[: 8 * 200_000], np.float64)
                assert (values == host_state.status.step).all()
                seen.add(host_state.status.step)
                del values
            del host_state
    finally:
        stop.set()
        thread.join()
    assert copy_newest(first.fd, room_for) is not None, "nobody is in the way any more"


WRITER = """
import sys
from pod_runtime.trainer.state.snapshot import Handle, SnapshotSegment
from tests.pod_runtime.trainer.state.test_segments import Numbers, write
pid, fd, inode, size, length, index = map(int, sys.argv[1:])
segment = SnapshotSegment.join(Handle(pid=pid, fd=fd, inode=inode, size_bytes=size))
numbers = Numbers(length)
print("ready", flush=True)
for line in sys.stdin:
    write(segment, numbers.fill(int(line)), int(line), index)
    print(line, end="", flush=True)
"""


def test_kills_at_random_moments_never_leave_a_torn_state(share):
    """Two processes write in step, as the all-reduce makes ranks do, until one is killed."""
    length, draw = 400_000, random.Random(5)
    (segment, _unused) = share(2, length=length)
    handle, step, left = segment.handle, 0, 0
    argv = [str(each) for each in (handle.pid, handle.fd, handle.inode, handle.size_bytes, length)]
    for _ in range(3):
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", WRITER, *argv, str(index)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
            )
            for index in (0, 1)
        ]  # fmt: skip
        assert [writer.stdout.readline() for writer in writers if writer.stdout] == ["ready\n"] * 2
        last = step + draw.randrange(3, 9)
        killer = threading.Timer(0.0, lambda: None)
        while True:
            step += 1
            if step == last:  # amid the copy, or just before or after it
                victim = draw.choice(writers)
                killer = threading.Timer(draw.uniform(0, 0.006), victim.kill)
                killer.start()
            heard = []
            for writer in writers:
                assert writer.stdin is not None
                with contextlib.suppress(BrokenPipeError):
                    writer.stdin.write(f"{step}\n")
            for writer in writers:
                assert writer.stdout is not None
                heard.append(writer.stdout.readline())
            if step >= last and "" in heard:
                break
        killer.join()
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.communicate()
        newest = read_newest(segment.fd)
        assert newest is not None
        assert newest.stamp.step >= step - 1, "the slot before is whole whatever happens"
        left += newest.stamp.step < step
        for _slot, header in read_slots(segment.fd):
            assert values_at(segment, header.stamp, length) == [header.stamp.step]
            host_state = read_snapshot([segment.fd], header.stamp)
            assert host_state is not None
            assert host_state.status.step == header.stamp.step


@pytest.mark.parametrize("content", [b"", b"EDLSEG01", b"x" * 10000])
def test_what_is_no_segment_holds_nothing(tmp_path: Path, content: bytes):
    path = tmp_path / "file"
    path.write_bytes(content)
    fd = os.open(path, os.O_RDONLY)
    try:
        assert read_newest(fd) is None
        assert copy_newest(fd, room_for) is None
    finally:
        os.close(fd)
    assert read_newest(fd) is None  # closed


@given(st.binary(min_size=48, max_size=60), st.integers(0, 47))
def test_a_damaged_file_header_is_refused_or_read_as_it_was(noise, at):
    fd = os.memfd_create("test")
    try:
        geometry = make_geometry(3, 100, 1000)
        packed = bytearray(geometry.pack())
        os.pwrite(fd, packed, 0)
        assert read_geometry(fd) == geometry
        packed[at : at + 4] = noise[:4]
        os.pwrite(fd, packed, 0)
        assert read_geometry(fd) in (None, geometry)
    finally:
        os.close(fd)


def test_a_segment_takes_no_more_writers_than_its_format_has_room_for():
    with pytest.raises(ValueError, match="writers: expected 1 to 1024, got 1025"):
        make_geometry(1025, 0, 0)


def test_too_little_room_is_refused_with_the_size_and_the_remedy():
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(SnapshotError, match=r"2097152 bytes \(2\.0 MiB\).*ulimit -f"):
            allocate("test", 2 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_segment_is_not_made_where_the_kernel_would_kill_for_it(monkeypatch):
    monkeypatch.setattr(snapshot, "available_memory", lambda: 3 << 20)
    os.close(allocate("test", 2 << 20, spare=1 << 20))
    with pytest.raises(SnapshotError, match=r"\(2\.0 MiB\): Cannot allocate memory; free"):
        allocate("test", 2 << 20, spare=(1 << 20) + 1)


def test_a_segment_beside_which_the_next_trainers_have_no_room_is_a_file_without_a_name(
    monkeypatch, tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(snapshot, "available_memory", lambda: 3 << 20)
    numbers = Numbers(1000).fill(7.0)
    for spare, where in ((2 << 20, "/memfd:"), (3 << 20, f"{tmp_path}/")):
        meta, size = meta_of(numbers, 5), numbers.layout().total_bytes
        segment = SnapshotSegment.make(
            "test", writers=1, meta_bytes=len(meta), data_bytes=size, spare=spare, or_file=True
        )
        assert os.readlink(f"/proc/self/fd/{segment.fd}").startswith(where)
        segment.write_whole(numbers, numbers.layout(), stamp(5), meta)  # type: ignore[arg-type]
        segment.flush()
        host_state = read_snapshot([segment.fd], stamp(5))
        assert host_state is not None
        assert np.frombuffer(host_state.data, np.float64, 1000).tolist() == [7.0] * 1000
        segment.close()
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with pytest.raises(SnapshotError, match="no room for a snapshot segment"):
        allocate("test", 4 << 20, or_file=True)


def test_a_copy_for_which_there_is_no_memory_goes_to_a_file_without_a_name(
    monkeypatch, tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(host_states, "available_memory", lambda: 2 << 20)
    monkeypatch.setattr(host_states, "freed_since_peak", lambda: 1 << 20)
    assert isinstance(room_for(1 << 20).obj, bytearray)
    view = room_for((1 << 20) + 1)
    assert isinstance(view.obj, mmap.mmap)
    assert len(view) == (1 << 20) + 1
    view[-1:] = b"x"
    assert bytes(view[-2:]) == b"\0x"
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(os, "posix_fallocate", no_room)
    assert isinstance(room_for(2 << 20).obj, bytearray), "nor is there room on the disk"


def no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")
