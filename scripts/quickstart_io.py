"""The quickstart's terminal and processes. It must leave no process behind."""

import contextlib
import os
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import TextIO

import psutil

from job_server.api.command_line import keep_token, make_token, read_token
from scripts import quickstart_view as view

ROOT = Path(__file__).resolve().parents[1]
JOB_ID = "quickstart"
MARKER = "EDL_QUICKSTART"  # in the environment of every process that a run starts
STOP_S = 25.0  # what server and client get to end by themselves


class QuickstartError(RuntimeError):
    """Something did not start or hangs; the text says what and where to look."""


class Screen:
    """Prints news, and below them one line that is painted over where that is possible."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._tty = out.isatty() and os.environ.get("TERM") != "dumb"
        unicode = "utf" in (out.encoding or "").lower()
        self.style = view.Style(colour=self._tty and "NO_COLOR" not in os.environ, unicode=unicode)
        self._started = time.monotonic()
        self._shown_at = 0.0

    def say(self, text: str = "") -> None:
        self._out.write(("\r\x1b[K" if self._tty else "") + text + "\n")
        self._out.flush()
        self._shown_at = time.monotonic()

    def news(self, text: str) -> None:
        self.say(f"{self.style.dim(f'{self.elapsed_s():5.1f} s')}  {text}")

    def live(self, text: str) -> None:
        if self._tty:
            # Without wrapping: a line longer than the terminal could not be painted over.
            elapsed = self.style.dim(f"{self.elapsed_s():5.1f} s")
            self._out.write(f"\r\x1b[K\x1b[?7l{elapsed}  {text}\x1b[?7h")
            self._out.flush()
        elif time.monotonic() - self._shown_at > 4:
            self.news(text)

    def elapsed_s(self) -> float:
        return time.monotonic() - self._started


class Processes:
    """Server and client of this run; `stop` leaves none of them nor of their children."""

    def __init__(self, out: Path) -> None:
        self._logs = out / "logs"
        self._logs.mkdir(parents=True)
        self._marker = uuid.uuid4().hex
        self._started: list[tuple[str, subprocess.Popen[bytes]]] = []
        self.token = read_token(None, os.environ) or make_token()
        keep_token(out / "token", self.token)
        folder = str(Path(sys.executable).parent)
        self.env = {
            **os.environ,
            "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHONWARNINGS": "ignore:No ccache found",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),  # alone as in the pods
            "PADDLE_JOB_ID": JOB_ID,
            "EDL_TOKEN_FILE": str(out / "token"),
            MARKER: self._marker,
        }

    def log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def start(self, name: str, argv: list[str]) -> subprocess.Popen[bytes]:
        """Start a program in a session of its own, so that Ctrl-C reaches only this one."""
        with self.log(name).open("ab") as log:
            process = subprocess.Popen(
                argv,
                env=self.env,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started.append((name, process))
        return process

    def check(self) -> None:
        """Raise a QuickstartError if one of them has ended."""
        for name, process in self._started:
            if process.poll() is not None:
                raise QuickstartError(
                    f"{name} ended with exit code {process.returncode}; {self.log(name)} ends so:\n"
                    + tail(self.log(name))
                )

    def stop(self) -> tuple[str, ...]:
        """End all, the last started first. Return what was still there after that; it is killed."""
        for _name, process in reversed(self._started):
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        self._started.clear()
        left = self._left_over()
        _gone, alive = psutil.wait_procs(left, timeout=10)  # a shim may be just about to leave
        names = tuple(_describe(each) for each in alive)
        while alive:
            for survivor in alive:
                with contextlib.suppress(psutil.NoSuchProcess):
                    survivor.kill()
            psutil.wait_procs(alive, timeout=5)
            alive = self._left_over()
        return names

    def _left_over(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARKER) == self._marker:
                    found.append(process)
            except psutil.Error:
                continue  # not ours, or gone
        return found


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {view.shorten(' '.join(process.cmdline()), 80)}"
    except psutil.Error:
        return str(process.pid)


def tail(path: Path, lines: int = 12) -> str:
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        return f"  (not readable: {error})"
    return "\n".join(f"  | {line}" for line in text.splitlines()[-lines:])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
