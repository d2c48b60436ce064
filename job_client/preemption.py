"""Learn that this machine is about to be taken away, and decide how long to wait for its jobs."""

import contextlib
import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass

from job_client.errors import SetupError
from job_client.threads import start_thread

logger = logging.getLogger(__name__)

NOTICE_EVERY_S = 5.0  # as the clouds advise; the shortest of their warnings is 30 s
NOTICE_TIMEOUT_S = 10.0  # of one look
ANSWER_S = 3.0  # for a server that may be away
NOT_RUNNABLE = (126, 127)  # bash's codes for a command that it may not run, or does not find

SEEN = "this machine is about to be taken away (--preemption_notice)"
ENDING = "its client was asked to end"


@dataclass(slots=True)
class Departure:
    """A client that is ended waits for jobs that leave its node by planned changes."""

    since: float  # monotonic seconds, as all times here
    moving: bool | None = None  # as Acknowledgement; None: not answered, or by an old server
    answered: bool = False

    def goes_on(self, now: float, grace_s: float) -> bool:
        """Return whether it still waits; jobs that are on the move get the grace, no more."""
        if now >= self.since + grace_s:
            return False
        if not self.answered:
            return now < self.since + ANSWER_S
        return bool(self.moving)


class PreemptionNotice:
    """Runs the user's command again and again until it exits with 0, and says so once."""

    def __init__(
        self, command: str, noticed: Callable[[], None], *, every_s: float = NOTICE_EVERY_S
    ) -> None:
        self._command = command
        self._noticed = noticed
        self._every_s = every_s
        self._closing = threading.Event()
        self._trouble = ""  # what the last look has found wrong; "": nothing
        self._thread = threading.Thread(target=self._watch, name="preemption", daemon=True)

    def start(self) -> None:
        start_thread(self._thread)

    def close(self) -> None:
        self._closing.set()

    def _watch(self) -> None:
        while not self._closing.is_set():
            code = look(self._command)
            if code == 0:
                logger.warning("%s", SEEN)
                self._noticed()
                return
            self._say(code)
            self._closing.wait(self._every_s)

    def _say(self, code: int | None) -> None:
        trouble = ""
        if code is None:
            trouble = f"it takes longer than {NOTICE_TIMEOUT_S:g} s"
        elif code in NOT_RUNNABLE:
            trouble = f"it cannot be run (exit code {code})"
        if trouble and trouble != self._trouble:
            logger.warning("--preemption_notice: %s; no notice is seen while that is so", trouble)
        self._trouble = trouble


def check(command: str) -> None:
    """Raise SetupError where a command for notices cannot be run here."""
    code = look(command)
    if code in NOT_RUNNABLE:
        raise SetupError(
            f"--preemption_notice: {command!r} cannot be run (exit code {code}); give a command "
            "that exits with 0 once this machine is about to be taken away"
        )


def look(command: str) -> int | None:
    """Run the command once; return its exit code, None where it has not ended in time."""
    try:
        process = subprocess.Popen(
            ["bash", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:  # no descriptor, no memory: the next look may have them
        logger.warning("--preemption_notice: %s", error)
        return None
    try:
        return process.wait(NOTICE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None
