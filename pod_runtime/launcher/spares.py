"""A launcher's warm spares: started one at a time and at low priority, to become trainers."""

import contextlib
import functools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pod_runtime.errors import SpawnError
from pod_runtime.processes import die_with_parent, set_priority

logger = logging.getLogger(__name__)

MARK = "EDL_SPARE"  # in the environment of a spare and of what it starts: tells whose they are


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenSpare:
    """A spare that became a trainer."""

    process: subprocess.Popen[bytes]
    mark: str


class Spare:
    """One warm process. Make it in the launcher's main thread: it dies with that thread."""

    def __init__(
        self, mark: str, preload: Sequence[str], env: Mapping[str, str], log_path: Path
    ) -> None:
        """Start it.

        Raises:
            SpawnError: the log cannot be written, or the process not be started.
        """
        self.mark = mark
        self.ready = False
        ours, theirs = socket.socketpair()
        try:
            log_path.parent.mkdir(parents=True, exist_ok=True)
            with log_path.open("ab") as log:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "pod_runtime.spare", str(theirs.fileno()), *preload],
                    env={**env, MARK: mark},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(theirs.fileno(),),
                    preexec_fn=functools.partial(die_with_parent, os.getpid()),
                )
        except (OSError, subprocess.SubprocessError) as error:
            ours.close()
            raise SpawnError(-1, f"cannot start a spare: {error}") from error
        finally:
            theirs.close()
        self._socket = ours
        ours.setblocking(False)

    def fileno(self) -> int:
        """Becomes readable when it is ready, or has died."""
        return self._socket.fileno()

    def receive(self) -> bool:
        """Read its message, if any; return whether it lives."""
        try:
            received = self._socket.recv(64)
        except BlockingIOError:
            return True
        except OSError:
            received = b""
        self.ready = self.ready or bool(received)
        return bool(received)

    def take(
        self, argv: Sequence[str], env: Mapping[str, str], log_path: Path
    ) -> TakenSpare | None:
        """Make it a trainer; None: it has died."""
        order = {"argv": list(argv), "env": {**env, MARK: self.mark}, "log": str(log_path)}
        self._socket.setblocking(True)
        try:
            self._socket.sendall(json.dumps(order).encode() + b"\n")
        except OSError:
            return None
        self._socket.close()
        if not self.ready:
            with contextlib.suppress(OSError):  # it has died, or is of another user
                # From now on a stage waits for its imports.
                set_priority(os.getpriority(os.PRIO_PROCESS, 0), self.process.pid)
        return TakenSpare(process=self.process, mark=self.mark)

    def end(self) -> None:
        """Kill and reap it."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self._socket.close()


class Spares:
    """The spares that wait. For the launcher's main thread only."""

    def __init__(self, preload: Sequence[str], log_dir: Path) -> None:
        self.preload = tuple(preload)  # modules that the next ones import
        self._log_dir = log_dir
        self._spares: list[Spare] = []
        self._made = 0

    def __iter__(self) -> Iterator[Spare]:
        return iter(list(self._spares))

    def start(self, env: Mapping[str, str]) -> Spare:
        """Start one more. Raises SpawnError."""
        self._made += 1
        spare = Spare(str(self._made), self.preload, env, self._log_dir / "spares.log")
        self._spares.append(spare)
        logger.info("warming a spare trainer (pid %d)", spare.process.pid)
        return spare

    def take(
        self, argv: Sequence[str], env: Mapping[str, str], log_path: Path
    ) -> TakenSpare | None:
        """Make a spare a trainer, a ready one if possible; None: there is no spare."""
        for spare in sorted(self._spares, key=lambda spare: not spare.ready):
            self._spares.remove(spare)
            taken = spare.take(argv, env, log_path)
            if taken is not None:
                return taken
            spare.end()
        return None

    def drop(self, spare: Spare) -> None:
        """Forget one that has died."""
        if spare in self._spares:
            self._spares.remove(spare)
        spare.end()

    def end_all(self) -> None:
        for spare in self:
            self.drop(spare)
