"""Readers of a task queue that are killed, and the server with them: no record is lost."""

import contextlib
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from edl import write_shards
from tests.job_server.serving import ServerProcess, running_server
from tests.support import ROOT

TOKEN = "open-sesame-open-sesame"


class Readers:
    """Processes that read the same queue, each started again as often as it is killed."""

    def __init__(self, folder: Path, server: ServerProcess, count: int, passes: int) -> None:
        self._notes = folder / "notes"
        self._notes.write_text("")
        script = Path(__file__).with_name("read_tasks.py")
        paths = str(folder / "numbers-*.npy")
        self._command = [
            sys.executable, str(script), paths, server.url, str(self._notes), str(passes),
        ]  # fmt: skip
        self._env = {**os.environ, "PYTHONPATH": str(ROOT), "EDL_TOKEN": TOKEN}
        self.running = [self._start(number) for number in range(count)]

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        env = {**self._env, "PADDLE_POD_ID": f"pod_{number}_0"}  # as the trainer of a pod
        return subprocess.Popen(self._command, env=env)

    def kill(self, number: int) -> None:
        self.running[number].kill()
        self.running[number].wait()
        self.running[number] = self._start(number)

    def wait(self, timeout_s: float) -> None:
        for process in self.running:
            assert process.wait(timeout_s) == 0

    def end(self) -> None:
        for process in self.running:
            process.kill()
            process.wait()

    def counts(self) -> Counter[int]:
        """Return how often each record was read, in all passes."""
        lines = self._notes.read_text().splitlines()
        return Counter(int(record) for line in lines for record in line.split(","))


@pytest.mark.parametrize(
    ("tasks", "kills", "patience"),
    [(60, 5, 1.0), pytest.param(10_000, 40, 5.0, marks=pytest.mark.slow)],
)
def test_no_record_is_lost_and_one_that_cannot_be_read_is_named(tasks, kills, patience, tmp_path):
    per_file, passes, draw = 10, 2, random.Random(7)
    write_shards(([number] for number in range(tasks * per_file)), tmp_path, "numbers", per_file)
    poisoned = tmp_path / "numbers-00003.npy"
    poisoned.write_bytes(b"\x93NUMPY, but not really")
    lost = set(range(3 * per_file, 4 * per_file))
    with running_server(tmp_path, "--no_job", EDL_TOKEN=TOKEN) as server:
        readers = Readers(tmp_path, server, 3, passes)
        try:
            for number in range(kills):
                time.sleep(draw.uniform(0.3, 1.2) * patience)  # any moment will do
                if number % 5 == 2:
                    server.kill()
                    server.start()
                else:
                    readers.kill(draw.randrange(3))
            readers.wait(120 + tasks / 5)
        finally:
            readers.end()
        with server.api(TOKEN) as api:
            status = api.queue("numbers")
    counts = readers.counts()
    assert set(counts) == set(range(tasks * per_file)) - lost
    assert min(counts.values()) >= passes, "none is missing in any pass"
    assert [task.content.split('"')[3] for task in status.dropped] == [str(poisoned)]
    assert "NUMPY" in status.dropped[0].error or "ValueError" in status.dropped[0].error
    for count in (*status.passes, status.now):
        assert (count.done, count.dropped) == (tasks - 1, 1)
        assert count.records_once + count.records_again == len(counts)
    too_often = sum(1 for times in counts.values() if times > passes)
    again = sum(count.records_again for count in (*status.passes, status.now))
    assert too_often <= again, "what was read again is said"


def test_a_reader_that_stops_early_gives_its_task_back_at_once(tmp_path):
    write_shards(([number] for number in range(20)), tmp_path, "numbers", 10)
    with running_server(tmp_path, "--no_job", EDL_TOKEN=TOKEN) as server:
        from edl import cloud_reader

        os.environ["EDL_TOKEN"] = TOKEN
        try:
            reader = cloud_reader(str(tmp_path / "*.npy"), server.url, queue="q", lease_s=600)
            with contextlib.closing(reader()) as first:
                assert int(next(first)[0]) == 0
            other = cloud_reader(str(tmp_path / "*.npy"), server.url, queue="q", lease_s=600)
            assert sorted(int(row[0]) for row in other()) == list(range(20))
        finally:
            del os.environ["EDL_TOKEN"]


def test_the_token_of_trainers_opens_the_task_queues_alone(tmp_path):
    from job_server.api.api_client import Unauthorized
    from job_server.api.command_line import task_token
    from job_server.api.task_wire import TaskQueueSpec

    with running_server(tmp_path, "--no_job", EDL_TOKEN=TOKEN) as server:
        with server.api(task_token(TOKEN)) as api:
            assert api.make_queue(TaskQueueSpec(name="q", tasks=("a",))).now.waiting == 1
            with pytest.raises(Unauthorized):
                api.jobs()
            with pytest.raises(Unauthorized):
                api.delete_queue("q")
        with server.api("wrong") as api, pytest.raises(Unauthorized):
            api.make_queue(TaskQueueSpec(name="q", tasks=("a",)))
