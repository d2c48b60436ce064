"""Files for the task queue, and what is refused before anything is read."""

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pod_runtime.trainer.data import cloud_reader as reading
from pod_runtime.trainer.data.cloud_reader import (
    cloud_reader,
    queue_name,
    read_records,
    write_shards,
)
from pod_runtime.trainer.errors import UsageError


def test_shards_hold_all_records_in_order_and_any_range_is_read(tmp_path):
    files = write_shards(((n, n * n) for n in range(12)), tmp_path / "new", "squares", per_file=5)
    assert [path.name for path in files] == [f"squares-0000{n}.npy" for n in range(3)]
    rows = [row for path in files for row in read_records(str(path), 0, None)]
    assert [tuple(map(int, row)) for row in rows] == [(n, n * n) for n in range(12)]
    part = list(read_records(str(files[1]), 1, 3))
    assert np.array(part).tolist() == [[6, 36], [7, 49]]
    assert part[0].flags.owndata, "a record outlives its file"


def test_fewer_shards_than_before_leave_none_of_those(tmp_path):
    write_shards(range(12), tmp_path, "n", per_file=2)
    strange = [tmp_path / name for name in ("n-00003.txt", "n-x.npy", "m-00005.npy")]
    for path in strange:
        path.touch()
    files = write_shards(range(12), tmp_path, "n", per_file=5)
    assert sorted(tmp_path.iterdir()) == sorted([*files, *strange])


def test_any_other_file_has_a_record_in_each_line(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("one\ntwo\r\nthrée\n")
    assert list(read_records(str(path), 0, None)) == ["one", "two", "thrée"]
    assert list(read_records(str(path), 1, 2)) == ["two"]


@pytest.mark.parametrize(
    ("records", "words"),
    [([], "there are none"), ([(1, 2), (3,)], "different shapes"), ([("a", None)], "numbers")],
)
def test_records_that_make_no_array_are_refused(records, words, tmp_path):
    with pytest.raises(UsageError, match=words):
        write_shards(records, tmp_path, "x")


def test_wrong_arguments_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PADDLE_JOBSERVER", raising=False)
    path = tmp_path / "text.txt"
    path.write_text("one\n")
    with pytest.raises(UsageError, match="paths: there is no file"):
        cloud_reader(str(tmp_path / "*.npy"), "127.0.0.1:1")
    with pytest.raises(UsageError, match="records_per_task: expected 1 or more, got 0"):
        cloud_reader(str(path), "127.0.0.1:1", records_per_task=0)
    with pytest.raises(UsageError, match="endpoint: missing"):
        cloud_reader(str(path))
    with pytest.raises(UsageError, match="endpoint: 'x y'"):
        cloud_reader(str(path), "x y")
    with pytest.raises(UsageError, match="lease_s: must be between"):
        cloud_reader(str(path), "127.0.0.1:1", lease_s=0.0)
    with pytest.raises(ConnectionError, match="the job server has been away for 0 s"):
        cloud_reader(str(path), "127.0.0.1:1", server_timeout_s=0.0)


def test_copies_of_the_files_on_each_node_are_one_queue_in_a_job(tmp_path: Path):
    job = {"PADDLE_JOB_ID": "job", "EDL_SUBMITTED_AT": "17.5"}
    path = tmp_path / "text.txt"
    path.write_text("one\n")

    def name(environ: dict[str, str]) -> str:
        return queue_name([str(path)], ["task"], environ)

    before, outside = name(job), name({})
    os.utime(path, (1.0, 1.0))  # as of another copy
    assert name(job) == before
    assert name({}) != outside, "the files alone tell of a new training"
    assert len({before, name(job | {"EDL_SUBMITTED_AT": "18.5"}), outside}) == 3


def test_a_file_whose_records_cannot_be_counted_is_named(tmp_path: Path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"caf\xe9\n")
    with pytest.raises(UsageError, match=r"paths: the records of .*text.txt cannot be counted: Un"):
        cloud_reader(str(path), "127.0.0.1:1", records_per_task=2)


def test_a_trainer_that_is_to_end_waits_for_no_reader_that_waits_for_a_server(
    monkeypatch: pytest.MonkeyPatch,
):
    """The reader has a thread of its own, and is patient."""
    monkeypatch.setattr(reading, "_END_S", 0.01)
    waits, answers = threading.Event(), threading.Event()

    class Task:
        def report(self, *, done: bool, timeout_s: float | None = None) -> None:
            waits.set()
            answers.wait(20)

    given: Any = reading._Given(lambda given: given)
    reader = threading.Thread(target=given.add, args=[Task()])
    reader.start()
    assert waits.wait(20)
    given.report_kept()
    is_on = reader.is_alive()
    answers.set()
    reader.join()
    assert is_on
