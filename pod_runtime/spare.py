"""Wait as a warm spare: an interpreter that has imported the framework, to become trainers.

    python -m pod_runtime.spare FD NICE MODULE... ROOM

Started by the launcher, at a low priority perhaps, to which it says `ready` on the socket FD, or
`ready forks` where a fork of it can train. From then on it has the priority NICE. For a trainer the
launcher sends one JSON line: {"argv", "env", "log", "fork", "mark"}. The spare runs that training
script as `trainer_main` does: itself, or in a fork, which says {"pid"}. A spare that forks is never
used up. Once what it has imported was changed on the disk, as by an update, it starts the script in
a new interpreter, as if there were no spare, and ends. ROOM are as many blanks as a trainer needs
to show its own command line in place of this one. Standard library only, except for MODULE...
"""

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import json
import os
import socket
import stat
import sys
import sysconfig
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from pod_runtime import trainer_main
from pod_runtime.processes import die_with_parent, set_priority
from pod_runtime.trainer_main import keep_sigterm_quiet, run

MARK = "EDL_SPARE"  # in the environment of a spare and of what it starts: tells whose they are
Stamps = dict[str, tuple[int, int] | None]  # None: the file is not there
_OURS = ("edl", "job_server", "pod_runtime")
_MEMORY_DEVICES = 1  # major number of /dev/null, /dev/urandom and their like
_ARG_BEGIN, _ARG_END, _ENV_BEGIN, _ENV_END = range(45, 49)  # in /proc/self/stat, behind the name


def main(argv: Sequence[str]) -> None:
    launcher = socket.socket(fileno=int(argv[0]))
    launcher_pid = os.getppid()
    keep_sigterm_quiet()
    gc.disable()  # which would look through all that PyTorch's import makes, a tenth of its time
    preload(argv[2:-1])
    gc.enable()
    gc.collect()
    imported = stamps()
    gc.freeze()  # no collection of a trainer looks through these objects, nor copies them in a fork
    set_priority(int(argv[1]))
    forks = can_fork()
    with contextlib.suppress(OSError):  # the launcher did not wait, and has sent its order
        launcher.sendall(b"ready forks\n" if forks else b"ready\n")
    order = wait_for_order(launcher, launcher_pid, imported)
    launcher.close()
    if order is not None:  # else the launcher does not need it, or is gone
        become_trainer(order, imported)


def stamps() -> Stamps:
    """Return by path when the files of what is imported were changed, and their sizes.

    Of EDL all of them, of each other package the first one.
    """
    files = {
        name: getattr(module, "__dict__", {}).get("__file__")
        for name, module in list(sys.modules.items())
        if "." not in name or name.partition(".")[0] in _OURS
    }
    return {path: _stamp(path) for path in files.values() if path is not None}


def is_outdated(imported: Stamps) -> bool:
    """Whether a file of what is imported was changed since `stamps`."""
    return any(_stamp(path) != stamp for path, stamp in imported.items())


def _stamp(path: str) -> tuple[int, int] | None:
    """Return None for a file that is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def can_fork() -> bool:
    """Whether a fork of this process could train.

    A fork loses all threads but one, and a device that its parent has opened does not work in it.
    """
    pid = os.fork()  # before which OpenBLAS ends its threads, to start them anew when needed
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    files = map(int, os.listdir("/proc/self/fd"))
    return len(os.listdir("/proc/self/task")) == 1 and not any(map(_is_device, files))


def _is_device(fd: int) -> bool:
    try:
        found = os.fstat(fd)
    except OSError:  # that by which they were listed
        return False
    return stat.S_ISCHR(found.st_mode) and os.major(found.st_rdev) != _MEMORY_DEVICES


def wait_for_order(
    launcher: socket.socket, launcher_pid: int, imported: Stamps
) -> dict[str, object] | None:
    """Return, in the process that is to be a trainer, the order for it. None: there is none."""
    with launcher.makefile("r", encoding="utf-8") as lines:
        for line in lines:
            order: dict[str, object] = json.loads(line)
            if not order["fork"]:
                return order
            if _fork(launcher_pid):
                _own_mark(str(order["mark"]))
                _own_random_numbers()
                # A launcher that did not wait for this has ended the spare, and reads no more.
                launcher.sendall(json.dumps({"pid": os.getpid()}).encode() + b"\n")
                return order
            if is_outdated(imported):
                break  # the launcher starts one that imports what is there now
    return None


def _fork(launcher_pid: int) -> bool:
    """Fork a child of the launcher; return whether this is the child.

    Its first parent ends at once. So it becomes a child of the launcher, which is the subreaper.
    """
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        return False
    between = os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == between:
        time.sleep(0.000_5)
    die_with_parent(launcher_pid)
    return True


def _own_mark(mark: str) -> None:
    """Show another mark, of the same length, in the environment that this process began with."""
    begin, end = _addresses(_ENV_BEGIN, _ENV_END)
    name = f"{MARK}=".encode()
    at = (b"\0" + ctypes.string_at(begin, end - begin)).index(b"\0" + name)
    ctypes.memmove(begin + at + len(name), mark.encode(), len(mark))


def _own_command_line(argv: Sequence[str]) -> None:
    """Have the system show which script this process runs."""
    begin, end = _addresses(_ARG_BEGIN, _ARG_END)
    line = b" ".join(map(os.fsencode, (sys.executable, *argv)))
    ctypes.memmove(begin, line[: end - begin - 2] + b"\0", min(len(line), end - begin - 2) + 1)
    ctypes.memset(end - 1, ord(" "), 1)  # where this is no NUL, the first one is taken as the end


def _addresses(*places: int) -> list[int]:
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return [int(fields[place]) for place in places]


def _own_random_numbers() -> None:
    """Draw new seeds: two forks would have the same random numbers."""
    for name in ("numpy.random", "torch"):  # Python does so itself; Paddle has drawn none yet
        if name in sys.modules:
            sys.modules[name].seed()


def preload(modules: Iterable[str]) -> None:
    """Import installed modules, and what ours import later (`import_the_rest`).

    One that cannot be imported is left to the script.
    """
    sites = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    own = str(Path(__file__).resolve().parent)
    for name in modules:
        try:
            spec = importlib.util.find_spec(name)
            if spec is None or spec.origin is None:
                raise ImportError("there is no such module")
            # The user's own modules change from run to run, and may look at the environment.
            if not spec.origin.startswith((*sites, own)):
                raise ImportError(f"{spec.origin} is not in site-packages")
            found = importlib.import_module(name)
            if spec.origin.startswith(own) and hasattr(found, "import_the_rest"):
                found.import_the_rest()
        except ImportError as error:
            sys.stderr.write(f"spare: --preload: {name} is left out: {error}\n")


def become_trainer(order: dict[str, object], imported: Stamps) -> None:
    """Run the script that `order` names, in its environment, with its log."""
    argv, env, log = order["argv"], order["env"], order["log"]
    assert isinstance(argv, list)
    assert isinstance(env, dict)
    fd = os.open(str(log), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    if is_outdated(imported):  # its peers of other pods have the new version
        os.execve(sys.executable, [sys.executable, trainer_main.__file__, *argv], env)
    for name in os.environ.keys() - env.keys():
        del os.environ[name]
    os.environ.update(env)
    _own_command_line(argv)
    run(argv)


if __name__ == "__main__":
    main(sys.argv[1:])
