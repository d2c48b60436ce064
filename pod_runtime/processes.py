"""Read processes from /proc, and signal them. Standard library only: the shim loads it.

A process that may have died is named by (pid, start_time): the kernel gives a pid to another
process sooner or later, but never with the same start time.
"""

import contextlib
import ctypes
import errno
import os
import resource
import select
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # the machine is short of something
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_CAP_SYS_NICE = 23
_NICE_ZERO = 20  # how RLIMIT_NICE says that nice 0 is allowed
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Process:
    """One process as /proc showed it a moment ago."""

    pid: int
    ppid: int
    pgid: int
    state: str  # R, S, D, T, Z, ...; Z: dead, not yet waited for
    start_time: int  # clock ticks since boot
    cpu_s: float  # user and system time that it has used
    rss_bytes: int


def set_child_subreaper() -> None:
    """Make this process the new parent of every descendant that loses its own."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent_pid: int, signal_number: int = signal.SIGKILL) -> None:
    """Have the kernel signal this process when the parent's *thread* that made it ends.

    Call it between fork and exec, and again after the exec of a setuid program. It ends this
    process at once if the parent is gone already.
    """
    _prctl(_PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent_pid:
        os._exit(128 + signal_number)


def may_raise_priority() -> bool:
    """Whether this process could be given its present priority again after it was lowered."""
    if resource.getrlimit(resource.RLIMIT_NICE)[0] >= _NICE_ZERO:
        return True
    with open("/proc/self/status") as file:
        capabilities = next(line for line in file if line.startswith("CapEff:"))
    return bool(int(capabilities.split()[1], 16) >> _CAP_SYS_NICE & 1)


def signal_name(number: int) -> str:
    """Return e.g. `SIGKILL`, or `signal 35`: real-time signals have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def set_priority(nice: int, pid: int | None = None) -> None:
    """Set the nice value of all threads of a process (None: this one); new ones inherit it.

    Raises:
        PermissionError: see `may_raise_priority`.
        OSError: there is no such process.
    """
    for thread in os.listdir(f"/proc/{os.getpid() if pid is None else pid}/task"):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.setpriority(os.PRIO_PROCESS, int(thread), nice)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")


def read(pid: int) -> Process | None:
    """Return what /proc says about `pid`; None when there is no such process."""
    try:
        return _read(pid)
    except OSError:
        return None


def _read(pid: int) -> Process:
    with open(f"/proc/{pid}/stat", "rb") as file:
        text = file.read()
    # The name, in parentheses, may itself contain blanks and parentheses.
    fields = text[text.rindex(b")") + 2 :].split()
    return Process(
        pid=pid,
        ppid=int(fields[1]),
        pgid=int(fields[2]),
        state=fields[0].decode(),
        start_time=int(fields[19]),
        cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS_PER_S,
        rss_bytes=int(fields[21]) * _PAGE_BYTES,
    )


def memory_files(pid: int) -> dict[tuple[int, int], int]:
    """Return the bytes in memory of each file without a name (memfd) that `pid` has open.

    They count for no process that has not mapped them. The keys tell the files apart, of all
    processes. {} where there is no such process, or it is another user's.
    """
    found: dict[tuple[int, int], int] = {}
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):  # closed just now
                if os.readlink(f"{folder}/{name}").startswith("/memfd:"):
                    held = os.stat(f"{folder}/{name}")
                    found[held.st_dev, held.st_ino] = held.st_blocks * 512
    return found


def shared_bytes(pid: int) -> int:
    """Return how much of the memory of `pid` is shared, and of no file on a disk; 0: not known."""
    try:
        with open(f"/proc/{pid}/status") as file:
            line = next((line for line in file if line.startswith("RssShmem:")), "")
        return 1024 * int(line.split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def delayed_s(pid: int) -> float:
    """Return for how long the main thread of `pid` has waited for a processor, since it began.

    0 where there is no such process, or the kernel does not count it.
    """
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def read_all() -> dict[int, Process]:
    """Return all processes that this one can see, by pid."""
    found = (read(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {process.pid: process for process in found if process is not None}


def start_time(pid: int) -> int | None:
    """Return when `pid` started, in clock ticks since boot; None when there is no such process."""
    process = read(pid)
    return None if process is None else process.start_time


def is_alive(pid: int, started: int) -> bool:
    """Return whether the process (pid, start time) runs; a zombie does not."""
    try:
        process = _read(pid)
    except OSError as error:
        return error.errno in SHORT  # nobody can tell now, and who lives must not count as dead
    return process.start_time == started and process.state not in "ZX"


def descendants(root: int, table: Mapping[int, Process] | None = None) -> list[Process]:
    """Return the living descendants of `root`, without itself; from `table` or from /proc now."""
    table = read_all() if table is None else table
    children: dict[int, list[Process]] = {}
    for process in table.values():
        children.setdefault(process.ppid, []).append(process)
    found: list[Process] = []
    waiting = [root]
    while waiting:
        for child in children.get(waiting.pop(), ()):
            waiting.append(child.pid)
            if child.state not in "ZX":
                found.append(child)
    return found


def environment(pid: int) -> dict[str, str]:
    """Return the environment that `pid` was started with; {} when it is gone or another user's."""
    try:
        return _environment(pid)
    except OSError:
        return {}


def _environment(pid: int) -> dict[str, str]:
    with open(f"/proc/{pid}/environ", "rb") as file:
        data = file.read()
    pairs = (item.partition(b"=") for item in data.split(b"\0") if b"=" in item)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def find_marked(name: str, value: str) -> dict[int, dict[str, str]]:
    """Return the environments of all living processes that have `name=value` in theirs, by pid.

    Never contains this process.

    Raises:
        OSError: this process has no descriptor or no memory to look with.
    """
    me = os.getpid()
    needle = os.fsencode(f"{name}={value}")
    found: dict[int, dict[str, str]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == me:
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                if needle not in file.read():
                    continue
            env = _environment(int(entry))
        except OSError as error:
            if error.errno in SHORT:
                raise
            continue
        if env.get(name) == value:
            found[int(entry)] = env
    return found


def send_signal(pid: int, started: int, signal_number: int) -> bool:
    """Signal the process (pid, start time), but no other one that has the pid now.

    Returns:
        Whether it was there to be signalled.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if start_time(pid) != started:
            return False
        signal.pidfd_send_signal(pidfd, signal_number)
    except ProcessLookupError:
        return False
    finally:
        os.close(pidfd)
    return True


def wait_gone(pid: int, started: int, timeout_s: float) -> bool:
    """Wait until the process (pid, start time) has ended; return whether it has."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        if error.errno not in SHORT:
            return True
        time.sleep(max(0.0, timeout_s))  # nobody can tell now, and who lives must not count as gone
        return not is_alive(pid, started)
    try:
        if not is_alive(pid, started):
            return True
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        return bool(poller.poll(max(0.0, timeout_s) * 1000))
    finally:
        os.close(pidfd)


def kill_marked(
    name: str, value: str, spare: Callable[[int, Mapping[str, str]], bool], timeout_s: float = 10.0
) -> list[int]:
    """SIGKILL the processes that carry `name=value`, until only those to `spare` are left.

    Args:
        spare: gets a process's pid and environment; true leaves it alive.
        timeout_s: processes that the kernel cannot end by then (waiting for a disk) are left.

    Returns:
        The pids that were killed.

    Raises:
        OSError: this process has no descriptor or no memory to do so; some may be left.
    """
    killed: list[int] = []
    deadline = time.monotonic() + timeout_s
    while True:
        victims = [pid for pid, env in find_marked(name, value).items() if not spare(pid, env)]
        begun = _kill_if_marked(victims, name, value)
        if not begun:
            return killed
        killed += [pid for pid, _ in begun if pid not in killed]
        for pid, started in begun:
            wait_gone(pid, started, deadline - time.monotonic())
        if time.monotonic() > deadline:
            return killed


def _kill_if_marked(pids: Iterable[int], name: str, value: str) -> list[tuple[int, int]]:
    begun = []
    for pid in pids:
        try:
            started = _read(pid).start_time
            # Look again: between finding and killing, another process may have got the pid.
            is_marked = _environment(pid).get(name) == value
        except OSError as error:
            if error.errno in SHORT:
                raise
            continue
        if is_marked and send_signal(pid, started, signal.SIGKILL):
            begun.append((pid, started))
        elif is_marked and is_alive(pid, started):
            raise OSError(errno.EMFILE, f"process {pid} could not be signalled")
    return begun
