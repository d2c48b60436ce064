"""Start and stop the processes of benchmarks/distill.py: teachers of both sides, and readers."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import HOST, ROOT, free_port, wait_port
from distill_reader.errors import DistillError
from distill_reader.student.clients.connect import connect

SHAPES = ("1x28x28", "3x224x224")
_START_S = 60.0  # for a process to be there, on a busy machine
_ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


class Teacher:
    """A server process in a session of its own."""

    def __init__(self, arguments: Sequence[str], port: int, log: Path, *, cores: set[int]) -> None:
        self.port = port
        self._command = [sys.executable, "-m", *arguments]
        self._log = log
        self._cores = cores
        self.process = self._start()

    @property
    def endpoint(self) -> str:
        return f"{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        """End it as `kill -9` does."""
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        """Start it again on its port, once it was killed."""
        self.process = self._start()

    def stop(self) -> None:
        """End it and what it started."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.kill()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                self._command, cwd=ROOT, env=_ENVIRONMENT, stdout=log, stderr=log
            )
        os.sched_setaffinity(process.pid, self._cores)  # before it starts threads and processes
        return process


@contextlib.contextmanager
def our_teachers(
    backend: str, folder: Path, *, count: int = 2, cores: set[int] | None = None
) -> Iterator[list[Teacher]]:
    """`distill_reader.serve` with a backend of backends.py and a model for each shape.

    Args:
        folder: for logs, and for the folders that models are named after.
        cores: those that they may compute on; None: all.
    """
    for shape in SHAPES:
        (folder / shape).mkdir(exist_ok=True)
    models = [str(folder / shape) for shape in SHAPES]
    teachers: list[Teacher] = []
    try:
        for number in range(count):
            port = free_port()
            arguments = ["distill_reader.serve", "--port", str(port), "--model", *models]
            arguments += ["--backend", f"benchmarks.distillation.backends:{backend}"]
            log = folder / f"{backend}{number}.log"
            teachers.append(Teacher(arguments, port, log, cores=cores or os.sched_getaffinity(0)))
        for teacher in teachers:
            await_teacher(teacher)
        yield teachers
    finally:
        for teacher in teachers:
            teacher.stop()


def await_teacher(teacher: Teacher) -> None:
    """Return when it answers."""
    deadline = time.monotonic() + _START_S
    while True:
        with contextlib.suppress(DistillError):
            connect(f"fast://{teacher.endpoint}/{SHAPES[0]}").close()
            return
        if teacher.process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the teacher at {teacher.endpoint} did not start; see its log")
        time.sleep(0.005)


@contextlib.contextmanager
def raw_teachers(wait_s: float, folder: Path, *, count: int = 2) -> Iterator[list[Teacher]]:
    """The teachers that the original is measured with: see raw.py."""
    teachers: list[Teacher] = []
    try:
        for number in range(count):
            port = free_port()
            arguments = ["benchmarks.distillation.raw", "--port", str(port)]
            arguments += ["--wait_s", str(wait_s)]
            log = folder / f"raw{number}.log"
            teachers.append(Teacher(arguments, port, log, cores=os.sched_getaffinity(0)))
        for teacher in teachers:
            if not wait_port(teacher.port, _START_S, teacher.process):
                raise SystemExit(f"the teacher at {teacher.endpoint} did not start; see its log")
        yield teachers
    finally:
        for teacher in teachers:
            teacher.kill()


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """How long a reader runs."""

    warm_s: float
    seconds: float


def run_child(
    module: str, arguments: Sequence[str], folder: Path, *, limit_s: float, core: int | None = None
) -> Any:
    """Run a module of ours; return the JSON that it wrote, None if it took too long.

    It leads a process group, all of which has ended when this returns: the original's readers
    leave processes behind.
    """
    result, log = folder / "child.json", folder / "child.log"
    result.unlink(missing_ok=True)
    with log.open("ab") as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", module, *arguments, "--json", str(result)],
            cwd=ROOT,
            env=_ENVIRONMENT,
            stdout=errors,
            stderr=errors,
            start_new_session=True,
        )
        if core is not None:
            os.sched_setaffinity(child.pid, {core})
        try:
            code: int | None = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    if code:
        raise SystemExit(f"{module} failed: {log.read_text()[-2000:]}")
    return None if code is None else json.loads(result.read_text())


def read(
    side: str,
    endpoints: str,
    shape: str,
    batch: int,
    times: Times,
    *,
    teachers: Sequence[Teacher],
    folder: Path,
    original: Path | None,
) -> dict[str, float] | None:
    """Run child.py; return what it measured, None if it did not come to an end."""
    arguments = [side, "--teachers", endpoints, "--shape", shape, "--batch", str(batch)]
    arguments += ["--warm_s", str(times.warm_s), "--seconds", str(times.seconds)]
    arguments += ["--pids", *(str(teacher.pid) for teacher in teachers)]
    if side == "original":
        arguments += ["--original", str(original)]
    limit_s = 60 + 10 * (times.warm_s + times.seconds)
    found: dict[str, float] | None = run_child(
        "benchmarks.distillation.child", arguments, folder, limit_s=limit_s
    )
    return found
