"""A job of teachers with a real server, a real client, and processes that teach."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from job_server.api.wire import JobKind, JobSpec, JobState, JobStatus
from tests.job_server.live_students import REPORT_S, Students
from tests.job_server.serving import ServerProcess, running_server
from tests.support import ROOT, trainer_ports, wait_until

TEACH = "exec {python} {root}/tests/job_server/live_teacher.py {folder}\n"
TRAIN = "exec {python} -m pod_runtime.launch --log_dir log {folder}/sleep.py\n"

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server, and a client of four slots that can teach and train."""
    for name, text in (("teach", TEACH), ("train", TRAIN)):
        folder = tmp_path / "jobs" / name
        folder.mkdir(parents=True)
        script = text.format(python=sys.executable, root=ROOT, folder=tmp_path)
        (folder / "train.sh").write_text(script)
    (tmp_path / "sleep.py").write_text("import time\ntime.sleep(600)\n")
    with running_server(tmp_path, "--no_job") as server:
        first_port, last_port = trainer_ports()
        command = [sys.executable, "-m", "job_client", "--job_server", server.url]
        command += ["--jobs_dir", str(tmp_path / "jobs"), "--cpu_slots", "4"]
        command += ["--port_range", f"{first_port}-{last_port}", "--log_dir", str(tmp_path / "log")]
        command += ["--pod_path", str(tmp_path / "pods")]
        with (tmp_path / "client.log").open("ab") as log:
            client = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        try:
            yield server
        finally:
            client.terminate()
            try:
                client.wait(60)
            finally:
                client.kill()
                client.wait()


def until(
    server: ServerProcess, job_id: str, condition: Callable[[JobStatus], object], what: str
) -> JobStatus:
    seen: list[JobStatus] = []

    def holds() -> object:
        seen.append(api.status(job_id))
        return condition(seen[-1])

    with server.api() as api:
        try:
            wait_until(holds, 90, what)
        except AssertionError:
            events = "\n".join(event.text for event in api.events(job_id))
            raise AssertionError(f"{what}: {seen[-1]}\n{events}") from None
    return seen[-1]


def runs(count: int) -> Callable[[JobStatus], object]:
    return lambda now: now.teachers is not None and now.teachers.running == count


def wait_teaching(folder: Path, count: int) -> None:
    """Wait until so many scripts have begun and can drain: they count as running before that."""
    wait_until(lambda: len(list(folder.glob("*.teaches"))) >= count, what=f"{count} teach")


def submit_teachers(server: ServerProcess, **changes: object) -> None:
    fields = {
        "job_id": "teachers", "kind": JobKind.TEACHER, "service": "soft", "folder": "teach",
        "min_pods": 1, "max_pods": 4, "demand_interval_s": REPORT_S,
    }  # fmt: skip
    with server.api() as api:
        api.submit(JobSpec(**{**fields, **changes}))  # type: ignore[arg-type]


def test_the_number_of_teachers_follows_the_students_up_and_down(server, tmp_path):
    submit_teachers(server)
    until(server, "teachers", runs(1), "the first teacher runs")
    students = Students(server.url, "teachers", "soft")
    try:
        students.set(9)  # enough for three teachers
        grown = until(
            server,
            "teachers",
            lambda now: now.teachers is not None and now.teachers.running >= 3,
            "nine students have three teachers",
        )
        assert grown.state is JobState.RUNNING
        wait_teaching(tmp_path, 3)
        students.set(1)
        until(server, "teachers", runs(1), "one student has one teacher")
        wait_until(lambda: len(list(tmp_path.glob("*.drained"))) >= 2, what="they drained")
    finally:
        students.close()


def test_a_training_gets_the_slots_of_teachers_who_drain_first(server, tmp_path):
    submit_teachers(server, pods=4)
    until(server, "teachers", runs(4), "four teachers run")
    wait_teaching(tmp_path, 4)
    with server.api() as api:
        api.submit(JobSpec(job_id="training", folder="train", min_pods=2, max_pods=3))
        status = until(
            server, "training", lambda now: now.state is JobState.RUNNING, "the training runs"
        )
        assert len(status.pods) == 3
        until(server, "teachers", lambda now: len(now.pods) == 1, "one teacher is left")
        assert len(list(tmp_path.glob("*.drained"))) == 3


def test_teachers_outlive_the_server_and_are_replaced_when_they_die(server, tmp_path):
    submit_teachers(server, pods=2)
    before = until(server, "teachers", runs(2), "two teachers run")
    wait_teaching(tmp_path, 2)
    server.kill()
    server.start()
    after = until(server, "teachers", runs(2), "they are known again")
    assert [pod.pod_id for pod in after.pods] == [pod.pod_id for pod in before.pods]
    victim = next(
        process.pid
        for process in psutil.process_iter()
        if "live_teacher.py" in " ".join(_command_line(process))
        and str(tmp_path) in " ".join(_command_line(process))
        and "-m" not in _command_line(process)  # not the shim, which has the same words
        and "bash" not in process.name()
    )
    os.kill(victim, signal.SIGKILL)
    until(
        server,
        "teachers",
        lambda now: now.failures == 1 and now.teachers is not None and now.teachers.running == 2,
        "another takes its place",
    )


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
