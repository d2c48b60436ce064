"""Logs that are cut."""

import shutil
from types import SimpleNamespace

import pytest

from pod_runtime.log_tail import cut_log, read_tail


def test_a_log_that_is_too_long_moves_aside_and_its_writer_goes_on(tmp_path):
    path = tmp_path / "log"
    with path.open("ab", buffering=0) as writer:
        writer.write(b"one\ntwo\n")
        assert not cut_log(path, limit=8)
        writer.write(b"three\n")
        noted = path.stat().st_size
        assert cut_log(path, limit=8)
        assert path.read_bytes() == b""
        writer.write(b"four\n")
    assert (tmp_path / "log.1").read_bytes() == b"one\ntwo\nthree\n"
    assert read_tail(path, noted) == ["four"], "though its size was noted before the cut"
    assert cut_log(path, limit=4)
    assert (tmp_path / "log.1").read_bytes() == b"four\n", "one older part stays"


def test_a_log_is_not_moved_where_its_copy_would_fill_the_disk(tmp_path, monkeypatch):
    path, older = tmp_path / "log", tmp_path / "log.1"
    path.write_bytes(b"x" * 100)
    older.write_bytes(b"older")
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: SimpleNamespace(free=90))
    with pytest.raises(OSError, match="No space left on device"):
        cut_log(path, limit=8)
    assert path.stat().st_size == 100
    assert older.read_bytes() == b"older"


def test_a_copy_that_the_disk_has_no_room_for_is_dropped(tmp_path, monkeypatch):
    path = tmp_path / "log"
    path.write_bytes(b"x" * 100)

    def full(_source, target, *_length):
        target.write(b"x" * 50)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(OSError, match="No space left on device"):
        cut_log(path, limit=8)
    assert path.stat().st_size == 100
    assert not (tmp_path / "log.1").exists()
