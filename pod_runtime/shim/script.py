"""Start, signal and reap a pod's script and all its descendants. Standard library only."""

import contextlib
import os
import signal
import time
from pathlib import Path

from pod_runtime import processes
from pod_runtime.cgroups import oom_kills
from pod_runtime.log_tail import last_lines
from pod_runtime.shim_wire import PodExit

KILL_AGAIN_S = 0.1  # the next round kills processes that were forked during this one
UNKILLABLE_S = 30.0  # who has not ended so long after SIGKILL waits in the kernel
# Python and this program ignore or handle these; the script gets the defaults of any program.
_NOT_FOR_THE_SCRIPT = (
    signal.SIGPIPE, signal.SIGXFSZ, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM,
    signal.SIGCHLD,
)  # fmt: skip


class PodScript:
    """The pod's script and everything that descends from it."""

    def __init__(self, command: list[str], log: Path) -> None:
        self.command = command
        self.pid: int | None = None  # None: it could not be started
        self.wait_status: int | None = None  # None: it runs
        self.error = ""  # why the script could not be started
        self.deadline: float | None = None  # for SIGKILL, monotonic; None: it is not being stopped
        self.why = ""  # it is stopped
        self._terminated = False  # SIGTERM has been sent
        self.killed = False  # SIGKILL has been sent
        self.kill_asked = False
        self.gone = False  # no process of the pod is left, or none that could be ended
        self._left: list[processes.Process] = []  # that SIGKILL does not end
        self._kills_since: float | None = None  # monotonic; None: no SIGKILL was sent
        self._log = log
        self._oom_kills = oom_kills()
        self._start(command)

    def _start(self, command: list[str]) -> None:
        parent = os.getpid()
        report, child_report = os.pipe()  # closed by a successful exec; else it carries the error
        pid = os.fork()
        if pid == 0:
            self._become(command, parent, child_report)
        os.close(child_report)
        with os.fdopen(report, "rb") as file:
            self.error = file.read().decode(errors="replace")
        self.pid = pid

    def _become(self, command: list[str], parent: int, report: int) -> None:
        """Become the script. Runs in the child."""
        try:
            os.setpgid(0, 0)  # signals to a process group never reach the shim
            processes.die_with_parent(parent)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
            for number in _NOT_FOR_THE_SCRIPT:
                signal.signal(number, signal.SIG_DFL)
            os.execvp(command[0], command)
        except OSError as error:
            os.write(report, f"cannot start {command[0]}: {error.strerror}".encode())
        finally:
            os._exit(127)

    def stop(self, grace_s: float, why: str) -> None:
        """Send SIGTERM to the pod, SIGKILL after `grace_s`; a later call may shorten that."""
        deadline = time.monotonic() + grace_s
        if self.deadline is not None:
            self.deadline = min(self.deadline, deadline)
        elif not self.gone:
            self.deadline, self.why = deadline, why
            self._terminate()

    def _terminate(self) -> None:
        self._terminated = self._signal(signal.SIGTERM) is not None
        self._signal(signal.SIGCONT)  # a stopped process cannot act on its SIGTERM

    def kill(self, why: str) -> None:
        if not self.gone:
            self.deadline, self.why, self.kill_asked = time.monotonic(), why, True
            self.tick()

    def tick(self) -> float | None:
        """Do what is due; return the seconds until the next call. None: wait for an event."""
        if self.gone or self.deadline is None:
            return None
        left = self.deadline - time.monotonic()
        if left > 0 and not self._terminated:
            self._terminate()
        if left > 0:
            return left if self._terminated else min(left, KILL_AGAIN_S)
        self.killed = self._signal(signal.SIGKILL) or self.killed
        now = time.monotonic()
        self._kills_since = now if self._kills_since is None else self._kills_since
        if now >= self._kills_since + UNKILLABLE_S:
            self._give_up()
        return KILL_AGAIN_S

    def _give_up(self) -> None:
        """Leave what SIGKILL does not end: it runs no more of its program, whenever it ends."""
        with contextlib.suppress(OSError):  # no descriptor, no memory: at the next tick
            self._left = processes.descendants(os.getpid())
            self.gone = True

    def _signal(self, number: int) -> bool | None:
        """Signal the pod's process groups, not single processes: a fork cannot slip through.

        Returns:
            Whether there was any process. None: the machine has no descriptor or memory left to
            tell; try again.
        """
        own_group = os.getpgid(0)
        try:
            found = processes.descendants(os.getpid())
        except OSError:
            return None
        for group in {process.pgid for process in found} - {own_group, 0}:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, number)
        for process in found:
            if process.pgid in (own_group, 0):
                processes.send_signal(process.pid, process.start_time, number)
        return bool(found)

    def reap(self) -> None:
        """Reap every child that has ended, adopted ones included."""
        while not self.gone:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self.gone = True
                return
            if pid == 0:
                return
            if pid == self.pid:
                self.wait_status = status

    def _explain_kill(self) -> str:
        before, now = self._oom_kills, oom_kills()
        if now is None or before is None or self.killed or now.count <= before.count:
            return ""
        return (
            f"; since it began the kernel has killed {now.count - before.count} processes of "
            f"{now.of} for lack of memory"
        )

    def exit(self) -> PodExit:
        """Return how the script ended. Call it only once it is gone."""
        status = self.wait_status
        if status is None:
            status = signal.SIGKILL if self._left else 0
        code = os.waitstatus_to_exitcode(status)
        if self.error:
            reason = self.error
        elif code >= 0:
            reason = f"exited with code {code}"
        else:
            reason = f"ended by {processes.signal_name(-code)}"
        if code in (-signal.SIGKILL, 128 + signal.SIGKILL):
            reason += self._explain_kill()
        if self.why:
            reason = f"{self.why}: {reason}"
        if self.killed and not self.kill_asked:
            reason += "; what was left after the grace was killed"
        if self._left:
            shown = ", ".join(f"{each.pid} (state {each.state})" for each in self._left[:5])
            reason += (
                f"; {len(self._left)} processes have not ended for {UNKILLABLE_S:.0f} s after "
                f"SIGKILL: {shown}; they wait in the kernel, for a file server, a disk or a device"
            )
        return PodExit(
            code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            reason=reason,
            last_lines=last_lines(self._log),
        )
