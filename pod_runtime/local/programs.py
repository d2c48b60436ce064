"""Run the server and the client of `edl run` as children, and restart them when they die."""

import contextlib
import functools
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from pod_runtime.errors import LaunchError
from pod_runtime.log_tail import LOG_BYTES, cut_log, read_tail
from pod_runtime.processes import die_with_parent

MAX_RESTARTS = 5  # in a row
PAUSE_S = 0.5  # before the second of these; longer before each other one
HEALTHY_S = 60.0  # a program that has lived for so long has not died in a row
_SHOWN_LINES = 10


class LocalProgram:
    """One child process, in a session of its own: it does not get the terminal's Ctrl-C."""

    def __init__(
        self, name: str, argv: Sequence[str], env: Mapping[str, str], cwd: Path, log: Path
    ) -> None:
        """Start it.

        Raises:
            LaunchError: it cannot be started.
        """
        self.name, self.log = name, log
        self._argv, self._env, self._cwd = tuple(argv), dict(env), cwd
        self._starts = 0
        self._restarts = 0  # in a row
        self._process = self._start()

    def look_after(self) -> str:
        """Restart it if it has died, and cut its log where that has become too long.

        Returns what happened in words, "" for nothing.

        Raises:
            LaunchError: it has died too often, or its command line was refused.
        """
        with contextlib.suppress(OSError):  # the disk is full: tried again
            cut_log(self.log, LOG_BYTES)
        code, lived_s = self._process.poll(), time.monotonic() - self._started_at
        if lived_s > HEALTHY_S:
            self._restarts = 0
        if code is None:
            return ""
        # Later it is no command line that is refused: its disk is full, say, as it starts again.
        is_refused = code == 2 and self._starts == 1
        if is_refused or self._restarts >= MAX_RESTARTS:
            raise LaunchError(
                f"the {self.name} has ended with {code}:\n{self.last_lines()}",
                2 if is_refused else 1,
            )
        self._restarts += 1
        time.sleep(PAUSE_S * (self._restarts - 1))  # the cause may pass
        try:
            self._process = self._start()
        except LaunchError as error:  # no process or memory is to be had, say
            return f"the {self.name} has died ({code}); {error}; trying again"
        return f"the {self.name} has died ({code}) and was started again"

    def stop(self, timeout_s: float) -> bool:
        """Send SIGTERM and wait; return whether it has ended."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        return self.has_ended(timeout_s)

    def has_ended(self, timeout_s: float) -> bool:
        """Wait for its end; return whether it has ended."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def last_lines(self) -> str:
        return "\n".join(f"  {line}" for line in read_tail(self.log)[-_SHOWN_LINES:])

    def _start(self) -> subprocess.Popen[bytes]:
        self._starts += 1
        self._started_at = time.monotonic()
        try:
            with self.log.open("ab") as log:
                return subprocess.Popen(
                    self._argv,
                    env=self._env,
                    cwd=self._cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    # SIGTERM: when `edl run` is killed, the client still stops its pods.
                    preexec_fn=functools.partial(die_with_parent, os.getpid(), signal.SIGTERM),
                )
        except (OSError, subprocess.SubprocessError) as error:
            raise LaunchError(f"cannot start the {self.name}: {error}") from error
