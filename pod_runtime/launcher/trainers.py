"""Start trainers as child processes, and find in their logs why they ended."""

import functools
import logging
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from job_server.api.wire import PlanPod
from pod_runtime.errors import SpawnError
from pod_runtime.launcher.spares import Forked, Spares
from pod_runtime.log_tail import last_lines, read_tail
from pod_runtime.processes import die_with_parent
from pod_runtime.spare import MARK
from pod_runtime.trainer_main import DISK_ERRORS

logger = logging.getLogger(__name__)

_ESSENCE_CHARS = 300
_TRAINER_MAIN = str(Path(__file__).parents[1] / "trainer_main.py")
ADAPTERS = {  # by framework: the module of its adapter, which spares import
    name: f"pod_runtime.trainer.frameworks.{name}.framework" for name in ("paddle", "torch")
}
_IMPORT = re.compile(r"^(?:import|from)\b[^#\n]*?\b(paddle|torch)\b", re.MULTILINE)
_CHANGES_ENVIRONMENT = re.compile(
    r"\benviron\s*(?:\[.*?\]\s*)?\|?=(?!=)|\benviron\.(?:setdefault|update|pop|clear)\b"
    r"|\bdel\b.*\benviron\b|\b(?:un)?(?:put|set)env\b"
)
_CCACHE = "ignore:No ccache found"  # a warning of Paddle's import on machines without ccache


class TrainerProcess:
    """A running trainer. Make it in the launcher's main thread: it dies with that thread."""

    def __init__(
        self,
        *,
        stage: int,
        attempt: int,
        rank: int,
        argv: Sequence[str],
        env: Mapping[str, str],
        log_path: Path,
        spares: Spares | None = None,
    ) -> None:
        """Start it, from a warm spare if there is one.

        Args:
            argv: a Python script is run by this interpreter and `trainer_main`.

        Raises:
            SpawnError: the log cannot be written, or the process not be started.
        """
        self.stage, self.attempt, self.rank = stage, attempt, rank
        # Output goes straight to a file, not through a pipe: nothing is lost when the launcher is
        # killed, and a slow reader of the console stops no trainer.
        try:
            self.log_path = log_path = _log_to(log_path, rank)
            with log_path.open("ab") as log:
                self.log_start = log.seek(0, os.SEEK_END)
                taken = None
                if spares is not None and is_script(argv):
                    taken = spares.take(argv[1:], env, log_path)
                self._process: subprocess.Popen[bytes] | Forked = (
                    taken.process
                    if taken is not None
                    else subprocess.Popen(
                        [argv[0], _TRAINER_MAIN, *argv[1:]] if is_script(argv) else list(argv),
                        env=dict(env),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        preexec_fn=functools.partial(die_with_parent, os.getpid()),
                    )
                )
        except (OSError, subprocess.SubprocessError) as error:
            raise SpawnError(rank, f"cannot start {argv[0]}: {error}") from error
        self.pid = self._process.pid
        # Its forks are known by these, however late they are made. The kernel shows the environment
        # that a process was started with, when a spare knew neither stage nor rank.
        if taken is not None:
            self.marks = {MARK: taken.mark}
        else:
            self.marks = {"EDL_STAGE": str(stage), "PADDLE_TRAINER_ID": str(rank)}
        self._pidfd = os.pidfd_open(self.pid)
        self.killed_at: float | None = None  # monotonic, by SIGKILL; None: it was not
        self.children: set[int] = set()  # pids of its children that were seen
        self.loop_pid: int | None = None  # it, or its child that has made a loop; None: none has

    @property
    def key(self) -> tuple[int, int]:
        return self.stage, self.attempt

    def fileno(self) -> int:
        """Becomes readable when the trainer ends."""
        return self._pidfd

    def send_signal(self, signum: signal.Signals) -> None:
        if signum is signal.SIGKILL and self.killed_at is None:
            self.killed_at = time.monotonic()
        self._process.send_signal(signum)

    def ends_by(self, deadline: float) -> bool:
        """Wait until it has ended, or the deadline (monotonic); return whether it has."""
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        return bool(poller.poll(1000 * max(0.0, deadline - time.monotonic())))

    def note_children(self) -> None:
        """Remember its children: what they leave behind can be cleaned up only by pid."""
        try:
            listed = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        except OSError:
            return
        self.children.update(int(pid) for pid in listed.split())

    def reap(self) -> int:
        """Return the exit code (negative for a signal) of a trainer that has ended."""
        code = self._process.wait()
        os.close(self._pidfd)
        return code

    def last_words(self) -> str:
        """Return the essence of its last output."""
        return essence(read_tail(self.log_path, self.log_start))

    def last_lines(self) -> tuple[str, ...]:
        """Return the last lines of its output that are not blank, shortened."""
        return last_lines(self.log_path, self.log_start)


def _log_to(path: Path, rank: int) -> Path:
    """Return where a trainer's output can go: where its log cannot be made, nowhere.

    Raises:
        OSError: not for the disk's sake. One that is full, read-only or gone ends no training.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        logger.warning("rank %d: what it says is lost, as it gets no log: %s", rank, error)
        return Path(os.devnull)
    return path


def is_script(argv: Sequence[str]) -> bool:
    """Whether a command runs a Python script by this interpreter, without interpreter options."""
    return argv[0] == sys.executable and len(argv) > 1 and not argv[1].startswith("-")


def read_script(argv: Sequence[str]) -> str:
    """Return the text of the Python script that a command runs; "": there is none to be read."""
    try:
        return Path(argv[1]).read_text(encoding="utf-8") if is_script(argv) else ""
    except (OSError, ValueError):  # the trainers will say what is wrong with it
        return ""


def adapter_of(script: str) -> str:
    """Return the adapter of the framework that a script imports at its top; "": none is seen.

    Of a script that changes variables of the environment before, which the framework may read when
    it is imported, none is told: a spare would have imported it with others.
    """
    found = _IMPORT.search(script)
    if found is None or _CHANGES_ENVIRONMENT.search(script, 0, found.start()):
        return ""
    return ADAPTERS[found[1]]


def with_defaults(env: Mapping[str, str]) -> dict[str, str]:
    """Return a trainer's environment with the settings that a user may have overridden."""
    warnings = env.get("PYTHONWARNINGS", "")
    # Else a set of texts has another order in each process, and so have the numbers that a script
    # gives to words or classes by it.
    defaults = {"PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1", "GLOG_minloglevel": "2"}
    hidden = {"PYTHONWARNINGS": f"{warnings},{_CCACHE}" if warnings else _CCACHE}
    return {**defaults, **env, **hidden}


def find_taken_port(pod: PlanPod) -> str:
    """Return in words which of this pod's ports is taken; "": all are free.

    Binds with SO_REUSEADDR, as the frameworks do: connections of the last stage that linger in
    TIME_WAIT are no obstacle.
    """
    for port in pod.ports:
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("", port))
                probe.listen(1)
        except OSError as error:
            return f"port {port} cannot be used: {error.strerror or error}"
    return ""


def essence(lines: Sequence[str]) -> str:
    """Return the line that says most about the end: the last traceback's error, else the last."""
    headers = [i for i, line in enumerate(lines) if line.startswith("Traceback (most recent")]
    if headers:
        for line in lines[headers[-1] + 1 :]:
            if line and not line[0].isspace() and re.match(r"[\w.]+(:|$)", line):
                return line[:_ESSENCE_CHARS]
    spoken = [line.strip() for line in lines if line.strip()]
    return spoken[-1][:_ESSENCE_CHARS] if spoken else ""
