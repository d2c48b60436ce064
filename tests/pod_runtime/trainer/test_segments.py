"""The format of segments, and what is left of one after any kill."""

import json
import os
import resource
from pathlib import Path

import numpy as np
import pytest

from pod_runtime.segment_header import SLOT_HEADER_USED, read_newest, read_slots, slot_offset
from pod_runtime.trainer.errors import SnapshotError
from pod_runtime.trainer.layout import Layout, make_layout
from pod_runtime.trainer.snapshot import SegmentWriter, allocate, read_snapshot
from tests.pod_runtime.trainer.states import make_status


class Numbers:
    """An adapter's state: one array."""

    def __init__(self, length: int) -> None:
        self.array = np.arange(length, dtype=np.float64)
        self.dies = False

    def layout(self) -> Layout:
        return make_layout([("model/numbers", "float64", self.array.shape)])

    def copy_out(self, target: memoryview) -> None:
        data = self.array.tobytes()
        if self.dies:
            target[: len(data) // 2] = data[: len(data) // 2]
            raise KeyboardInterrupt
        target[: len(data)] = data


@pytest.fixture
def writer():
    writer = SegmentWriter(3)
    yield writer
    writer.close()


def write(writer: SegmentWriter, numbers: Numbers, step: int) -> bool:
    status = make_status(stage=3, step=step)

    return writer.write(
        numbers,  # type: ignore[arg-type]  # only these two methods are used
        step=step,
        status_json=json.dumps(status.to_json()),
        scalars_json='{"lr": 0.5}',
    ).new_segment


def test_the_two_newest_snapshots_are_kept_and_read_back(writer):
    numbers = Numbers(1000)
    for step in (5, 6, 7):
        numbers.array += 1
        assert write(writer, numbers, step) is (step == 5)
    assert sorted(header.step for _slot, header in read_slots(writer.fd)) == [6, 7]
    newest = read_newest(writer.fd)
    assert newest is not None
    assert newest[:2] == (3, 7)
    assert newest[2] == numbers.layout().digest
    image = read_snapshot([writer.fd], 3, 6)
    assert image is not None
    assert np.frombuffer(image.data[:8000], np.float64)[0] == 2
    assert (image.status.step, image.scalars) == (6, {"lr": 0.5})
    assert read_snapshot([writer.fd], 3, 5) is None
    assert read_snapshot([writer.fd], 2, 6) is None


def test_a_death_amid_a_copy_leaves_the_snapshot_before(writer):
    numbers = Numbers(1000)
    write(writer, numbers, 1)
    write(writer, numbers, 2)
    numbers.dies = True
    with pytest.raises(KeyboardInterrupt):
        write(writer, numbers, 3)
    assert [header.step for _slot, header in read_slots(writer.fd)] == [2]


def test_a_header_that_was_cut_off_counts_as_none(writer):
    write(writer, Numbers(10), 1)
    (slot, _header) = read_slots(writer.fd)[0]
    slot_bytes = (writer.size_bytes - 4096) // 2
    at = slot_offset(slot, slot_bytes)
    os.pwrite(writer.fd, bytes(8), at + SLOT_HEADER_USED - 8)
    assert read_newest(writer.fd) is None


def test_a_state_that_outgrows_its_segment_gets_a_new_one(writer):
    assert write(writer, Numbers(10), 1)
    assert not write(writer, Numbers(11), 2)
    assert write(writer, Numbers(100_000), 3)
    newest = read_newest(writer.fd)
    assert newest is not None
    assert newest[:2] == (3, 3)


@pytest.mark.parametrize("content", [b"", b"EDLSEG01", b"x" * 10000])
def test_what_is_no_segment_holds_nothing(tmp_path: Path, content: bytes):
    path = tmp_path / "file"
    path.write_bytes(content)
    fd = os.open(path, os.O_RDONLY)
    try:
        assert read_newest(fd) is None
    finally:
        os.close(fd)
    assert read_newest(fd) is None  # closed


def test_too_little_room_is_refused_with_the_size_and_the_remedy():
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(SnapshotError, match=r"2097152 bytes \(2\.0 MiB\).*ulimit -f"):
            allocate("test", 2 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
