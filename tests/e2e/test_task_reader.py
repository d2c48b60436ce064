"""A reader whose task is taken away, or whose files nobody can read, and readers in workers."""

import contextlib
import itertools
import multiprocessing
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from edl import cloud_reader, write_shards
from job_server.api.api_client import ApiClient
from job_server.api.task_wire import LeaseAsked, TaskReport
from pod_runtime.trainer.data.readers import KeptSteps, ReadFrom
from pod_runtime.trainer.errors import UsageError
from tests.job_server.serving import ServerProcess, running_server
from tests.support import ROOT, standing_still, wait_until

FROM_THE_BEGINNING = ReadFrom(
    epoch=0, step=0, offset=0, global_step=0, rank=0, world_size=1, first_shard=0,
    stop_shard=1, micro_batch=4, shard_samples=(4,),
)  # fmt: skip


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerProcess]:
    monkeypatch.setenv("PADDLE_POD_ID", "pod_0_0")  # as a trainer of that pod
    monkeypatch.delenv("EDL_TOKEN", raising=False)
    with running_server(tmp_path, "--no_job") as found:
        yield found


def test_a_task_that_was_taken_away_is_not_said_to_be_done(server, tmp_path, caplog):
    write_shards(([number] for number in range(20)), tmp_path, "numbers", 10)
    reader = cloud_reader(str(tmp_path / "*.npy"), server.url, queue="q", lease_s=0.6, in_use=0)
    records = reader()
    assert int(next(records)[0]) == 0
    asked = LeaseAsked(worker="other", place="pod_0_0.0", pass_number=0)
    with server.api() as api:
        second, first = api.lease_task("q", asked), api.lease_task("q", asked)
        assert (second.number, first.number) == (1, 0)
        back = TaskReport(
            worker="other", pass_number=0, number=1, lease=second.lease, give_back=True
        )
        wait_until(lambda: "another reader reads it" in caplog.text, 120)
        assert api.report_task("q", back)
        assert int(next(records)[0]) == 10, "it goes on with another task"
        assert api.queue("q").now.done == 0
    records.close()


def test_a_job_that_is_submitted_anew_reads_all_again_and_one_that_restarts_does_not(
    server, tmp_path, monkeypatch, caplog
):
    write_shards(([number] for number in range(20)), tmp_path, "numbers", 10)
    monkeypatch.setenv("PADDLE_JOB_ID", "digits")

    def passes(submitted_at: str, numbers: list[int | None]) -> list[int]:
        """As a process that is started for this."""
        monkeypatch.setenv("EDL_SUBMITTED_AT", submitted_at)
        reader = cloud_reader(str(tmp_path / "*.npy"), server.url, in_use=0)
        return [len(list(reader(number))) for number in numbers]

    assert passes("1.5", [None, None]) == [20, 20]
    assert passes("1.5", [None, None, None]) == [0, 0, 20]
    assert "pass 0 of the task queue digits-" in caplog.text
    assert "was over before: it gives no record" in caplog.text
    assert passes("1.5", [3, None]) == [20, 20], "from the epoch that its checkpoint says"
    assert passes("2.5", [3, None]) == [20, 20], "whoever has read the passes before"
    assert passes("3.5", [None]) == [20]


def test_passes_that_are_left_early_hold_up_none_behind_them(server, tmp_path):
    write_shards(([number] for number in range(40)), tmp_path, "numbers", 4)
    reader = cloud_reader(str(tmp_path / "*.npy"), server.url, queue="q", in_use=0)
    read: list[list[int]] = []

    def leave_each_pass_early() -> None:
        for _ in range(5):
            with contextlib.closing(reader()) as records:
                read.append([int(row[0]) for row in itertools.islice(records, 12)])

    thread = threading.Thread(target=leave_each_pass_early, daemon=True)
    thread.start()
    thread.join(60)
    assert [len(each) for each in read] == [12] * 5
    # Twelve records at a time: of the whole files that were read nothing came twice in a pass.
    with server.api() as api:
        status = api.queue("q")
    assert status.passes[0].done == 10


def test_a_forked_worker_does_not_report_what_its_parent_was_given(server, tmp_path):
    write_shards(([number] for number in range(30)), tmp_path, "numbers", 10)
    reader = cloud_reader(str(tmp_path / "*.npy"), server.url, queue="q")
    with contextlib.closing(reader()) as records:
        assert len(list(itertools.islice(records, 11))) == 11  # the first file is in use
        worker = multiprocessing.get_context("fork").Process(target=lambda: next(reader()))
        worker.start()
        worker.join(60)
        assert worker.exitcode == 0
        with server.api() as api:
            assert api.queue("q").now.done == 0


FORKS = """
import itertools, os, sys
from edl import cloud_reader
from job_server.api.api_client import ApiClient
records = cloud_reader(sys.argv[1], sys.argv[2], queue="q")()
assert len(list(itertools.islice(records, 11))) == 11  # the first file is in use
if os.fork() == 0:
    sys.exit()
os.wait()
print(ApiClient(sys.argv[2]).queue("q").now.done, flush=True)
"""


def test_a_fork_that_ends_does_not_report_what_its_parent_was_given(server, tmp_path):
    write_shards(([number] for number in range(30)), tmp_path, "numbers", 10)
    command = [sys.executable, "-c", FORKS, str(tmp_path / "*.npy"), server.url]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
    with server.api() as api:
        assert api.queue("q").now.done == 1, "its own end has"


def test_a_reader_that_is_left_waits_once_for_a_server_that_hangs(server, tmp_path, monkeypatch):
    write_shards(([number] for number in range(30)), tmp_path, "numbers", 1)
    reader = cloud_reader(str(tmp_path / "*.npy"), server.url, queue="q")
    records = reader()
    assert len(list(itertools.islice(records, 20))) == 20
    asked: list[object] = []

    def connect(self: object) -> ApiClient:
        asked.append(self)
        return ApiClient(server.url, timeout_s=1.0)

    monkeypatch.setattr("pod_runtime.trainer.data.cloud_reader._Server.connect", connect)
    with standing_still([psutil.Process(server.process.pid)]):
        records.close()
    assert len(asked) == 1


def test_a_task_is_done_once_no_crash_of_a_trainer_takes_its_steps_back(server, tmp_path):
    write_shards(([number] for number in range(80)), tmp_path, "numbers", 8)
    kept = KeptSteps(40)
    start = replace(FROM_THE_BEGINNING, global_step=40, kept=kept)
    reader = cloud_reader(str(tmp_path / "*.npy"), server.url, queue="q")
    batches: Any = reader.batches(steps_per_epoch=100)(start)
    with server.api() as api:
        for _ in range(15):
            next(batches)
        assert api.queue("q").now.done == 0, "all that was read would be trained with other records"
        kept.steps = 45  # the fifth step has half of the third task
        next(batches)
        assert api.queue("q").now.done == 2
        kept.steps = 48
        kept.then()
        assert api.queue("q").now.done == 4, "of a trainer that is about to be replaced"
        kept.steps = 51
        batches.close()
        assert api.queue("q").now.done == 5, "the others are read again"


def test_files_that_nobody_can_read_are_an_error_and_no_endless_search(server, tmp_path):
    for number in range(3):
        (tmp_path / f"bad-{number}.npy").write_bytes(b"no array")
    reader = cloud_reader(str(tmp_path / "*.npy"), server.url, queue="q", max_tries=1)
    for records in (reader(), reader.batches(steps_per_epoch=2)(FROM_THE_BEGINNING)):
        with pytest.raises(UsageError, match=r"nobody can read any of the 3 tasks.*edl tasks q"):
            next(records)


@pytest.mark.parametrize("others", [[], ["bad-0.npy"]])
def test_files_without_a_record_are_an_error_and_no_endless_search(server, tmp_path, others):
    for name in ("empty-0.txt", "empty-1.txt", *others):
        (tmp_path / name).write_bytes(b"")
    reader = cloud_reader([str(tmp_path / "empty-*"), *(str(tmp_path / each) for each in others)],
                          server.url, queue="q", max_tries=1)  # fmt: skip
    with pytest.raises(UsageError, match=rf"no record is in any of the {2 + len(others)} tasks"):
        next(reader.batches(steps_per_epoch=2)(FROM_THE_BEGINNING))
    (tmp_path / "empty-1.txt").write_text("1\n2\n")
    found = next(reader.batches(steps_per_epoch=2)(FROM_THE_BEGINNING))
    assert [*found[3]] == ["1", "2", "1", "2"], "as long as there are some, empty ones are read on"


@pytest.mark.parametrize(
    ("files", "records", "remedy"),
    [(10_000, None, "larger files$"), (1, 1, "larger files, or take a larger records_per_task")],
)
def test_more_than_one_request_can_hold_is_refused_with_what_to_do(
    server, tmp_path, files, records, remedy
):
    for number in range(files):
        (tmp_path / f"{'a' * 200}-{number}").write_text("x\n" * (10_000 // files))
    with pytest.raises(UsageError, match=f"2097152.*10000 tasks.*{remedy}"):
        cloud_reader(str(tmp_path / "a*"), server.url, queue="q", records_per_task=records)


def _read_in_worker(paths: str, url: str, out: "multiprocessing.Queue[list[int]]") -> None:
    reader = cloud_reader(paths, url, queue="q", records_per_task=1)
    out.put([int(row[0]) for row in reader()])


def test_workers_of_one_trainer_leave_each_other_their_tasks(server, tmp_path):
    write_shards(([number] for number in range(60)), tmp_path, "numbers", 60)
    context = multiprocessing.get_context("spawn")
    out: multiprocessing.Queue[list[int]] = context.Queue()
    args = (str(tmp_path / "*.npy"), server.url, out)
    workers = [context.Process(target=_read_in_worker, args=args) for _ in range(2)]
    for worker in workers:
        worker.start()
    found = sorted(itertools.chain(*(out.get(timeout=120) for _ in workers)))
    for worker in workers:
        worker.join(60)
    assert found == list(range(60))
    with server.api() as api:
        now = api.queue("q").now
    assert (now.done, now.dropped, now.records_again) == (60, 0, 0)
