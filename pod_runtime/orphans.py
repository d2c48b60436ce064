"""Clean up what dead trainers leave: processes without a parent, and files in /dev/shm.

A killed trainer leaves its data-loading workers alive, and killed workers of Paddle leave
`/dev/shm/paddle_<pid>_*` behind. The launcher is their subreaper. As launcher and trainers may be
killed at once, a trainer's forks write their pids into the pod's folder.
"""

import logging
import os
import re
import signal
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from pod_runtime.processes import descendants, environment, read, read_all, send_signal, wait_gone

logger = logging.getLogger(__name__)

KILL_WAIT_S = 2.0  # SIGKILL takes as long as the kernel needs to free the memory
_SHM = Path("/dev/shm")
_WORKERS = "workers"  # in the shim's folder: a pid a line
_SHM_NAME = re.compile(r"paddle_(\d+)_")


def note_forks(pod_dir: Path) -> None:
    """Have every process that this one forks from now on write its pid into `pod_dir`."""
    path = pod_dir / _WORKERS

    def note() -> None:
        try:
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:  # a full disk; the launcher also looks for children now and then
            return
        with open(fd, "a") as file:
            file.write(f"{os.getpid()}\n")

    os.register_at_fork(after_in_child=note)


def noted_forks(pod_dir: Path) -> set[int]:
    """Return the pids that `note_forks` wrote, of living and dead processes."""
    try:
        lines = (pod_dir / _WORKERS).read_text().split()
    except OSError:
        return set()
    return {int(line) for line in lines if line.isdigit()}


def kill_orphans(marks: Mapping[str, str], living: Collection[int]) -> set[int]:
    """SIGKILL what a dead trainer left running; return the pids.

    Only descendants of this process that have `marks` in their environment, variables of this
    trainer's processes alone, and that none of the `living` trainers (pids) started.
    """
    killed: set[int] = set()
    while True:
        try:
            table = read_all()
        except OSError as error:  # no descriptor, no memory: the shim ends them with the pod
            logger.warning("what a trainer has left cannot be found: %s", error)
            return killed
        spared = set(living)
        for pid in living:
            spared.update(process.pid for process in descendants(pid, table))
        found = [
            process
            for process in descendants(os.getpid(), table)
            if process.pid not in spared and _belongs(process.pid, marks)
        ]
        begun = [p for p in found if send_signal(p.pid, p.start_time, signal.SIGKILL)]
        for process in begun:
            wait_gone(process.pid, process.start_time, KILL_WAIT_S)
        new = {process.pid for process in begun} - killed
        if not new:  # none, or one that waits for a disk: SIGKILL cannot end it now
            return killed
        killed |= new


def _belongs(pid: int, marks: Mapping[str, str]) -> bool:
    env = environment(pid)
    return all(env.get(name) == value for name, value in marks.items())


def reap_adopted(trainers: Collection[int]) -> set[int]:
    """Reap dead children that this process adopted as subreaper: all but `trainers` (pids)."""
    reaped: set[int] = set()
    while True:
        try:
            dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return reaped
        if dead is None or dead.si_pid in trainers:  # a trainer is reaped by its pidfd
            return reaped
        os.waitpid(dead.si_pid, 0)
        reaped.add(dead.si_pid)


def remove_shared_memory(
    pids: Iterable[int], folder: Path = _SHM, *, wait_s: float = 0.0
) -> list[str]:
    """Remove the files that the processes `pids` made and left; return their names.

    A file stays if its maker is alive (or another process has the pid now), or if it is another
    user's.

    Args:
        wait_s: how long to wait, in all, for makers that were killed and are still dying.
    """
    ours = set(pids)
    deadline = time.monotonic() + wait_s
    removed: list[str] = []
    if not ours:
        return removed
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return removed
    for entry in entries:
        match = _SHM_NAME.match(entry.name)
        if match is None or int(match[1]) not in ours:
            continue
        if not _is_gone(int(match[1]), deadline - time.monotonic()):
            continue
        try:
            if entry.stat(follow_symlinks=False).st_uid == os.getuid():
                os.unlink(entry.path)
                removed.append(entry.name)
        except FileNotFoundError:
            continue  # its reader was quicker
        except OSError as error:
            logger.warning("%s: cannot be removed: %s", entry.path, error)
    return removed


def _is_gone(pid: int, wait_s: float) -> bool:
    process = read(pid)
    if process is None or process.state in "ZX":
        return True
    return wait_s > 0 and wait_gone(pid, process.start_time, wait_s)
