"""A teacher as it is in the field: a server process, to be killed, stopped and started again."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from distill_reader.errors import DistillError
from distill_reader.student.clients.connect import connect
from tests.support import ROOT, free_port, wait_until

_BACKENDS = "tests.distill_reader.teacher.toy_backends"


class TeacherProcess:
    """`python -m distill_reader.serve` with a toy for a model; keeps its port.

    Args:
        folder: of the model; is made.
        backend: of toy_backends, for samples of `shape`.
        options: further ones of the command line.
    """

    def __init__(
        self,
        folder: Path,
        *,
        backend: str = "sums",
        shape: tuple[int, ...] = (1, 28, 28),
        options: Sequence[str] = (),
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "shape").write_text(" ".join(map(str, shape)))
        self.port = free_port()
        self.endpoint = f"127.0.0.1:{self.port}"
        self._folder = folder
        self._command = [sys.executable, "-m", "distill_reader.serve", "--model", str(folder)]
        self._command += ["--port", str(self.port), "--thread", "1"]
        self._command += ["--backend", f"{_BACKENDS}:{backend}", *options]
        self._process: subprocess.Popen[bytes] | None = None  # None: not running

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        """Start it; `wait` until it answers."""
        environ = {name: text for name, text in os.environ.items() if "TOKEN" not in name}
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self) -> None:
        wait_until(self._answers, 60, f"{self.endpoint} answers")

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it as a lost host does, predictors included."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._folder / "log").read_text()
        try:
            connect(f"fast://{self.endpoint}", connect_timeout_s=5).close()
        except DistillError:
            return False
        return True
