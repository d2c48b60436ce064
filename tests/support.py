"""Helpers of several tests: the repository's root, waiting, ports."""

import contextlib
import ctypes
import errno
import fcntl
import importlib.util
import itertools
import os
import re
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest.mock import Mock, patch

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[1]  # of the repository

# Below what the kernel gives to outgoing connections and to port 0, and below what job clients
# choose by themselves: the first half is of the trainers, the second of whoever listens else.
_FIRST_TRAINER_PORT, _FIRST_PORT = 12000, 17000
_BLOCK = 200  # ports for the trainers of one client
_WORKERS = 8  # of pytest-xdist, which get ports of their own
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _WORKERS
_counter = itertools.count(os.getpid())  # two test runs at once begin at different places


@contextlib.contextmanager
def no_descriptor_free() -> Iterator[None]:
    """Let this process open nothing."""
    low, high = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, high))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (low, high))


@contextlib.contextmanager
def descriptors_free(count: int) -> Iterator[None]:
    """Let this process open only so many files more."""
    low, high = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 8, high))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(2))
        for _ in range(count):
            os.close(taken.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (low, high))
        for fd in taken:
            os.close(fd)


def end_late() -> None:
    """Let the calling thread end 0.1 s later for the kernel than for Python.

    So long the thread-local objects of a C++ library take, as it were.
    """
    libc, key = ctypes.CDLL(None), ctypes.c_uint()
    assert libc.pthread_key_create(ctypes.byref(key), libc.usleep) == 0
    assert libc.pthread_setspecific(key, ctypes.c_void_p(100_000)) == 0


def is_there(thread: threading.Thread) -> bool:
    """Whether the kernel has the thread still."""
    return Path(f"/proc/self/task/{thread.native_id}").exists()


@contextlib.contextmanager
def no_file_locks() -> Iterator[None]:
    """As on a file system that has none: some mounts of NFS and Lustre."""
    refused = OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    with patch.multiple(fcntl, flock=Mock(side_effect=refused), lockf=Mock(side_effect=refused)):
        yield


@contextlib.contextmanager
def nothing_writable() -> Iterator[None]:
    """Let no file of this process grow, as on a full disk."""
    low, high = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, high))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (low, high))


def require(module: str, reason: str) -> None:
    """Skip the tests of a module where another one lacks, which only the programs import."""
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"no {module}: {reason}", allow_module_level=True)


def wait_until(condition: Callable[[], object], timeout_s: float = 120.0, what: str = "") -> None:
    """Return once `condition()` is true; fail the test when it is not within `timeout_s`.

    It asks less often as time goes by: a question may keep a server, and other tests, busy.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = 0.005
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what or condition}"
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, 0.05)


@contextlib.contextmanager
def standing_still(processes: Sequence[psutil.Process]) -> Iterator[None]:
    """What they are asked meanwhile waits, however slow the test is; it may kill them."""
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


@contextlib.contextmanager
def freezer() -> Iterator[Path]:
    """A control group whose processes wait in the kernel: SIGKILL does not end them.

    As where a file server, a disk or a device never answers. Skips where there is none.
    """
    folder = Path(f"/sys/fs/cgroup/freezer/edl-test-{os.getpid()}-{next(_counter)}")
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no freezer of cgroup v1 here: {error}")
    (folder / "freezer.state").write_text("FROZEN")

    def is_removed() -> bool:
        (folder / "freezer.state").write_text("THAWED")
        with contextlib.suppress(OSError):  # its processes are about to end
            folder.rmdir()
        return not folder.exists()

    try:
        yield folder
    finally:
        wait_until(is_removed, what="the control group's end")


def freeze(folder: Path, process: psutil.Process) -> None:
    """Put a process into that group, and wait until it is frozen."""
    (folder / "cgroup.procs").write_text(str(process.pid))
    wait_until(lambda: process.status() == psutil.STATUS_DISK_SLEEP, what="it is frozen")


def free_port() -> int:
    """Return a TCP port that nobody listens on, and that no other test is given soon."""
    for number in itertools.islice(_counter, 500):
        port = _FIRST_PORT + _worker * 300 + number % 300
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port")


def trainer_ports() -> tuple[int, int]:
    """Return the first and the last port for the trainers of one client's pods."""
    first = _FIRST_TRAINER_PORT + _worker * 600 + next(_counter) % 3 * _BLOCK
    return first, first + _BLOCK - 1


def code_blocks(document: str, kind: str) -> list[str]:
    """Return what a document shows between ```kind and ```; its path is below ROOT."""
    text = (ROOT / document).read_text()
    return re.findall(rf"^```{kind}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
