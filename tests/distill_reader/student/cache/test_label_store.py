"""Labels on disk: killed writers, damaged files, several processes, bounds."""

import contextlib
import errno
import fcntl
import json
import os
import random
import re
import signal
import subprocess
import sys
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from distill_reader.errors import UsageError
from distill_reader.student.batches.label_index import make_keys
from distill_reader.student.cache import label_space
from distill_reader.student.cache.label_store import Inputs, LabelStore, RowLayout
from distill_reader.student.clients.client import Array
from distill_reader.student.labels.labels import ServedOutput
from tests.distill_reader.student.cache_writer import CLASSES, IDENTITY, add, check
from tests.support import ROOT, wait_until

ROW_BYTES = 4 * CLASSES + 8 + 24


def open_store(root: Path, max_bytes: int = 1 << 30, **identity: str) -> LabelStore:
    return LabelStore(root, {**IDENTITY, **identity}, max_bytes=max_bytes)


def start_writer(root: Path, *numbers: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.distill_reader.student.cache_writer", str(root)]
    process = subprocess.Popen(
        [*command, *map(str, numbers)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def holds(keys: Path, count: int) -> bool:
    return keys.stat().st_size > 24 * count


@pytest.mark.parametrize("samples", [1, 2])
def test_columns_of_other_types_are_arrays_of_their_own(samples: int):
    layout = RowLayout(columns=(("float32", (7,)), ("int64", (1,))), served=())
    columns: list[Array] = [np.arange(7 * samples, dtype=np.float32), np.arange(samples)]
    rows = layout.join([each.reshape(samples, -1) for each in columns])
    for found, column in zip(layout.split(rows), columns, strict=True):
        assert found.reshape(-1).tolist() == column.tolist()
        assert found.flags.aligned
        assert all(stride % found.itemsize == 0 for stride in found.strides)


def test_what_is_kept_is_found_by_this_store_and_the_next(tmp_path: Path):
    store = open_store(tmp_path)
    assert check(store, [1, 2, 3]) == 0
    assert add(store, [1, 2, 3]) == 3
    assert add(store, [3, 3, 4, 4]) == 1
    assert check(store, [0, 4, 2, 9, 1, 3, 4]) == 5
    store.close()
    store.close()
    again = open_store(tmp_path)
    assert len(again) == 4
    assert check(again, [4, 3, 2, 1]) == 4
    assert check(open_store(tmp_path, version="2"), [1]) == 0


def test_a_store_sees_what_another_one_keeps(tmp_path: Path):
    one, other = open_store(tmp_path), open_store(tmp_path)
    for start in range(0, 1000, 50):
        add(one, np.arange(start, start + 30))
        assert check(other, np.arange(start, start + 50)) == 30
        add(other, np.arange(start + 20, start + 50))
        assert check(one, np.arange(start, start + 50)) == 50
    assert len(one) == len(other) == 1000


def test_a_closed_store_neither_finds_nor_keeps(tmp_path: Path):
    store = open_store(tmp_path)
    add(store, [1])
    store.close()
    assert check(store, [1]) == 0
    assert add(store, [2]) == 0


def test_a_writer_that_is_killed_at_any_moment_leaves_a_cache_that_can_be_read(tmp_path: Path):
    count = 200_000
    chance = random.Random(1)
    for _ in range(4):
        before = len(open_store(tmp_path))
        process = start_writer(tmp_path, 0, count)
        enough = before + chance.randint(1, 5000)
        (folder,) = tmp_path.glob("labels-*")
        wait_until(partial(holds, folder / "keys", enough), 60)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        store = open_store(tmp_path)
        known = len(store)
        assert known > before
        assert check(store, np.arange(known + 100)) == known  # each right, and none twice
        store.close()


def test_several_processes_fill_one_cache_together(tmp_path: Path):
    processes = [start_writer(tmp_path, first, 6000) for first in (0, 3000)]
    for process in processes:
        out, _ = process.communicate(timeout=120)
        assert (process.returncode, out) == (0, "done\n")
    store = open_store(tmp_path)
    assert check(store, np.arange(9100)) == 9000
    assert len(store) == 9000  # the middle was kept once


@pytest.mark.parametrize("rest", [1, 24 - 1, 24 + 5])
def test_the_rest_of_a_write_is_written_over(tmp_path: Path, rest: int):
    store = open_store(tmp_path)
    add(store, np.arange(10))
    with (store.folder / "rows").open("ab") as file:
        file.write(b"\xff" * 1000)
    with (store.folder / "keys").open("ab") as file:
        file.write(b"\xff" * rest)
    store.close()
    store = open_store(tmp_path)
    assert check(store, np.arange(30)) == 10
    add(store, np.arange(10, 20))
    store.close()
    assert check(open_store(tmp_path), np.arange(30)) == 20


@pytest.mark.parametrize("name", ["keys", "rows"])
@pytest.mark.parametrize("damage", ["zeros", "noise", "shorter"])
def test_what_a_machine_without_power_leaves_is_not_believed(
    tmp_path: Path, name: str, damage: str
):
    store = open_store(tmp_path)
    add(store, np.arange(100))
    path = store.folder / name
    store.close()
    data = path.read_bytes()
    third = len(data) // 3
    bad = {
        "zeros": data[:third] + bytes(third) + data[2 * third :],
        "noise": data[:third] + random.Random(0).randbytes(third) + data[2 * third :],
        "shorter": data[:third],
    }[damage]
    path.write_bytes(bad)
    store = open_store(tmp_path)
    found = check(store, np.arange(100))
    assert 25 <= found < 100
    add(store, np.arange(100))  # asked again, and kept
    assert check(store, np.arange(100)) == 100
    store.close()
    assert check(open_store(tmp_path), np.arange(100)) == 100


def test_bytes_at_random_in_any_file_are_refused_by_name_or_not_believed(tmp_path: Path):
    chance = random.Random(2)
    store = open_store(tmp_path)
    add(store, np.arange(40))
    store.close()
    whole = {name: (store.folder / name).read_bytes() for name in ("keys", "rows", "header.json")}
    for _ in range(60):
        for name, data in whole.items():
            changed = bytearray(data)
            for _ in range(chance.randint(0, 3)):
                changed[chance.randrange(len(changed))] = chance.randrange(256)
            (store.folder / name).write_bytes(changed)
        try:
            damaged = open_store(tmp_path)
        except UsageError as error:
            assert "header.json" in str(error)  # noqa: PT017  either will do
            continue
        is_there, *_ = damaged.find(make_keys(np.arange(40), None, 40))
        assert is_there.sum() <= 40
        damaged.close()


def test_a_header_of_another_release_is_refused_with_the_remedy(tmp_path: Path):
    store = open_store(tmp_path)
    add(store, [1])
    header = store.folder / "header.json"
    document = {**json.loads(header.read_text())[0], "format": 99}
    header.write_text(
        json.dumps([document, zlib.crc32(json.dumps(document, sort_keys=True).encode())])
    )
    with pytest.raises(UsageError, match=r"header\.json: .*another release.*remove that folder"):
        open_store(tmp_path)


def test_labels_of_varying_shape_or_type_are_not_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    store = open_store(tmp_path)
    served = (ServedOutput(dtype="float32"),)
    inputs = Inputs(layout=(), check=lambda row: row)
    for number, (length, dtype) in enumerate(((3, "f4"), (4, "f4"), (3, "f8"), (3, "f4"))):
        columns = [np.full((2, length), 1e30, dtype)]
        store.add(make_keys([number, number + 10], None, 2), columns, served, inputs)
    assert len(store) == 4  # the last ones fit again
    assert caplog.text.count("labels of varying shape or type are not kept") == 1


def test_a_full_cache_keeps_what_it_has(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    max_bytes = 100 * ROW_BYTES
    store = open_store(tmp_path, max_bytes)
    for start in range(0, 200, 10):
        add(store, np.arange(start, start + 10))
    assert check(store, np.arange(200)) == 100
    assert sum(path.stat().st_size for path in store.folder.iterdir()) < max_bytes + 2000
    assert caplog.text.count("no more labels are kept") == 1


def test_the_bound_holds_for_versions_that_are_written_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("distill_reader.student.cache.label_store._MEASURED_S", 0.0)
    stores = [open_store(tmp_path, 100 * ROW_BYTES, version=str(each)) for each in range(3)]
    for start in range(0, 200, 10):
        for store in stores:
            add(store, np.arange(start, start + 10))
    assert sum(check(store, np.arange(200)) for store in stores) == 100


def test_versions_that_nobody_uses_make_room_longest_unused_first(tmp_path: Path):
    max_bytes = 100 * ROW_BYTES
    folders = {}
    for age, version in enumerate(("old", "in use", "young")):
        store = open_store(tmp_path, max_bytes, version=version)
        add(store, np.arange(25))
        os.utime(store.folder / "users", (age, age))
        folders[version] = store.folder
        if version == "in use":
            in_use = store
        else:
            store.close()
    new = open_store(tmp_path, max_bytes, version="new")
    add(new, np.arange(50))
    assert check(new, np.arange(50)) == 50
    assert [folders[name].exists() for name in ("old", "in use", "young")] == [False, True, True]
    add(new, np.arange(50, 75))
    assert check(new, np.arange(100)) == 75
    assert not folders["young"].exists()
    assert check(in_use, np.arange(25)) == 25
    add(new, np.arange(75, 100))  # in use is in use
    assert check(new, np.arange(100)) == 75


def test_what_a_remover_left_that_was_killed_is_removed(tmp_path: Path):
    gone = tmp_path / "gone-labels-x"
    gone.mkdir()
    (gone / "rows").write_bytes(b"x" * 100)
    label_space.evict(tmp_path, 0, besides=tmp_path / "none")
    assert not gone.exists()


def test_a_process_that_holds_the_lock_and_stands_still_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("distill_reader.student.cache.label_store._LOCK_WAIT_S", 0.05)
    store = open_store(tmp_path)
    add(store, [1])
    with (store.folder / "lock").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert add(store, [2]) == 0
        assert check(store, [1, 2]) == 1
    assert add(store, [2]) == 0  # nor is each answer kept waiting for it
    assert caplog.text.count("another process holds it; for 2 s no labels are kept") == 1
    monkeypatch.setattr(store, "_locks_after_s", 0.0)
    assert add(store, [2]) == 1


def test_a_folder_that_cannot_be_used_is_refused_by_name(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cache: .*name a folder on a local disk"):
        open_store(tmp_path / "file")


TROUBLED = ["mkdir", "users", "utime", "lock", "keys", "rows", "inputs", "header.json"]


def troubled(monkeypatch: pytest.MonkeyPatch, what: str, error: OSError) -> None:
    """Have a call that opens a store fail: one of TROUBLED."""
    opened = label_space.open_file

    def fail(*_args: object, **_options: object) -> None:
        raise error

    def open_file(path: Path) -> int:
        if path.name == what:
            raise error
        return opened(path)

    monkeypatch.setattr(label_space, "open_file", open_file)
    if what == "mkdir":
        monkeypatch.setattr(Path, "mkdir", fail)
    elif what == "utime":
        monkeypatch.setattr("os.utime", fail)
    elif what == "header.json":
        monkeypatch.setattr(Path, "read_text", fail)


def open_below(folder: Path) -> list[str]:
    """Return what this process has open there; other tests' files are closed at any time."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # it was that of the list itself
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [name for name in found if name.startswith(f"{folder}/")]


@pytest.mark.parametrize("what", TROUBLED)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE])
def test_a_disk_that_is_full_when_it_is_opened_leaves_a_student_without_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what, code
):
    troubled(monkeypatch, what, OSError(code, os.strerror(code), f"{tmp_path}/labels"))
    store = open_store(tmp_path)
    assert store.is_closed
    assert add(store, [1, 2]) == check(store, [1, 2]) == 0
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"cache {tmp_path}/labels: {os.strerror(code)}; the training goes on" in caplog.text
    assert not open_below(tmp_path)


@pytest.mark.parametrize("what", TROUBLED)
@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOTDIR])
def test_a_folder_that_may_not_be_used_is_refused_and_no_file_is_left_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what, code
):
    troubled(monkeypatch, what, OSError(code, os.strerror(code)))
    with pytest.raises(UsageError, match=os.strerror(code)):
        open_store(tmp_path)
    assert not open_below(tmp_path)


@pytest.mark.parametrize("what", ["users", "utime", "lock", "keys", "rows", "inputs"])
def test_a_disk_that_the_kernel_has_made_read_only_leaves_a_student_without_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what
):
    """Trainers that start again there would all end, one after the other."""
    before = open_store(tmp_path)
    add(before, [1])
    before.close()
    troubled(monkeypatch, what, OSError(errno.EROFS, os.strerror(errno.EROFS)))
    store = open_store(tmp_path)
    assert check(store, [1]) == add(store, [2]) == 0
    assert "Read-only file system; the training goes on without it" in caplog.text
    assert not open_below(tmp_path)


def test_a_disk_that_cannot_be_read_any_more_leaves_a_student_without_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    store = open_store(tmp_path)
    add(store, [1])

    def broken(*_args: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("os.pread", broken)
    assert check(store, [1]) == check(store, [1]) == add(store, [2]) == 0
    assert caplog.text.count(f"cache {store.folder}: Input/output error; the training") == 1


@pytest.mark.parametrize("error", [OSError(errno.ENODEV, "No such device"), ValueError("length")])
def test_files_that_cannot_be_mapped_leave_a_student_without_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error
):
    store = open_store(tmp_path)
    add(store, [1])

    def fail(*_args: object, **_options: object) -> None:
        raise error

    monkeypatch.setattr("mmap.mmap", fail)
    assert check(store, [1]) == check(store, [1]) == add(store, [2]) == 0
    assert re.search("cannot be mapped .*labels want a local disk; the training goes", caplog.text)


def test_a_full_disk_stops_the_keeping_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    store = open_store(tmp_path)
    add(store, [1])

    def full(fd: int, data: object, offset: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    assert add(store, [2]) == add(store, [3]) == 0
    assert check(store, [1, 2, 3]) == 1
    assert caplog.text.count("no more is kept: [Errno 28] No space left") == 1
