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
from pod_runtime.log_tail import cut_log
from pod_runtime.processes import die_with_parent, may_raise_priority, set_priority
from pod_runtime.spare import MARK

logger = logging.getLogger(__name__)

_COMMAND = (sys.executable, "-m", "pod_runtime.spare")
_GENTLE = 19  # nice: an import can double the time of a training's small steps
_ANSWER_S = 10.0  # for a fork, which takes some ms, on a machine that is overloaded


def _begin(launcher_pid: int, nice: int) -> None:
    die_with_parent(launcher_pid)
    os.setpriority(os.PRIO_PROCESS, 0, nice)


class Forked:
    """A trainer that a spare has forked: a child of this process, as subreaper."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def send_signal(self, signum: signal.Signals) -> None:
        os.kill(self.pid, signum)  # it is ours to reap: no other process can have this pid

    def wait(self) -> int:
        """Reap it; return the exit code, negative for a signal."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenSpare:
    """A trainer that was a spare, or was forked by one."""

    process: subprocess.Popen[bytes] | Forked
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
        self.forks = False  # it makes any number of trainers, and stays; known when it is ready
        usual = os.getpriority(os.PRIO_PROCESS, 0)
        try:
            # Where it could be raised again; else a trainer would have the low one for good.
            nice = _GENTLE if may_raise_priority() else usual
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise SpawnError(-1, f"cannot start a spare: {error}") from error
        try:
            log_path.parent.mkdir(parents=True, exist_ok=True)
            with log_path.open("ab") as log:
                self.process = subprocess.Popen(
                    [*_COMMAND, str(theirs.fileno()), str(usual), *preload],
                    env={**env, MARK: mark},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(theirs.fileno(),),
                    preexec_fn=functools.partial(_begin, os.getpid(), nice),
                )
        except (OSError, subprocess.SubprocessError) as error:
            ours.close()
            raise SpawnError(-1, f"cannot start a spare: {error}") from error
        finally:
            theirs.close()
        self._socket = ours
        ours.setblocking(False)

    def hurry(self) -> None:
        """Give it the usual priority: from now on a stage waits for its imports."""
        with contextlib.suppress(OSError):  # it has died, or is of another user
            set_priority(os.getpriority(os.PRIO_PROCESS, 0), self.process.pid)

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
        if received:
            self.ready, self.forks = True, received == b"ready forks\n"
        return bool(received)

    def become(
        self, argv: Sequence[str], env: Mapping[str, str], log_path: Path
    ) -> TakenSpare | None:
        """Make it a trainer; None: it has died."""
        try:
            self._order(argv, {**env, MARK: self.mark}, log_path)
        except OSError:
            return None
        self._socket.close()
        if not self.ready:
            self.hurry()
        return TakenSpare(process=self.process, mark=self.mark)

    def fork(
        self, mark: str, argv: Sequence[str], env: Mapping[str, str], log_path: Path
    ) -> TakenSpare | None:
        """Have it fork a trainer; None: it has died, or cannot.

        Args:
            mark: has the length of its own.
        """
        try:
            self._order(argv, {**env, MARK: mark}, log_path, fork=mark)
            answer = self._socket.recv(64)
            pid = int(json.loads(answer)["pid"])
        except (OSError, ValueError):
            return None
        self._socket.setblocking(False)
        return TakenSpare(process=Forked(pid), mark=mark)

    def _order(
        self, argv: Sequence[str], env: Mapping[str, str], log_path: Path, *, fork: str = ""
    ) -> None:
        order = {"argv": list(argv), "env": env, "log": str(log_path)}
        self._socket.settimeout(_ANSWER_S)
        more = {"fork": bool(fork), "mark": fork}
        self._socket.sendall(json.dumps({**order, **more}).encode() + b"\n")

    def end(self) -> None:
        """Kill and reap it; one that does not end, as it waits in the kernel, is left."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_ANSWER_S)
        self._socket.close()


class Spares:
    """The spares that wait. For the launcher's main thread only."""

    def __init__(self, preload: Sequence[str], log_dir: Path, argv: Sequence[str] = ()) -> None:
        """Keep none yet. `argv`: the trainers' command, for which spares keep room to show it."""
        self.preload = tuple(preload)  # modules that the next ones import
        self._room = len(" ".join(argv))
        self._log_dir = log_dir
        self._spares: list[Spare] = []
        self._made = 0

    def __iter__(self) -> Iterator[Spare]:
        return iter(list(self._spares))

    def start(self, env: Mapping[str, str]) -> Spare:
        """Start one more. Raises SpawnError."""
        room = " " * self._room
        log = self._log_dir / "spares.log"
        with contextlib.suppress(OSError):  # it is not there yet, or the disk is full
            cut_log(log)
        spare = Spare(self._new_mark(), (*self.preload, room), env, log)
        self._spares.append(spare)
        logger.info("warming a spare trainer (pid %d)", spare.process.pid)
        return spare

    def take(
        self, argv: Sequence[str], env: Mapping[str, str], log_path: Path
    ) -> TakenSpare | None:
        """Make a spare a trainer, a ready one if possible; None: there is no spare."""
        for spare in sorted(self._spares, key=lambda spare: not spare.ready):
            if spare.forks:
                taken = spare.fork(self._new_mark(), argv, env, log_path)
            else:
                self._spares.remove(spare)
                taken = spare.become(argv, env, log_path)
            if taken is not None:
                return taken
            self.drop(spare)
        return None

    def _new_mark(self) -> str:
        self._made += 1
        return f"{self._made:010d}"  # all of one length

    def drop(self, spare: Spare) -> None:
        """Forget one that has died."""
        if spare in self._spares:
            self._spares.remove(spare)
        spare.end()

    def end_all(self) -> None:
        for spare in self:
            self.drop(spare)
