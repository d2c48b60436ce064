"""Hold one pod: start its script, pass stops on, kill all that is left, keep its snapshots.

    python -m pod_runtime.shim --pod_dir DIR [--detach] -- CMD...

`pod_runtime.shim_wire` is the contract. The shim has one thread and imports the standard library
only: one is started for every pod, and outlives everything else of it. The script runs in the
current folder, with the current environment. `--detach` returns as soon as the shim answers on its
socket.

The shim is a child subreaper: every process of the pod stays below it, even one that called setsid
or lost its parent. When the shim has no child left, no process of the pod is left.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pod_runtime import processes, shim_wire
from pod_runtime.shim.script import PodScript
from pod_runtime.shim.segments import SegmentStore
from pod_runtime.shim_wire import LineSocket, PodExit, peer_credentials

DEFAULT_GRACE_S = 15.0
MAX_GRACE_S = 86400.0
MAX_CONNECTIONS = 100
FULL_S = 0.1  # between two tries to accept where no descriptor is free


class ShimUsageError(ValueError):
    """The command line cannot be right; the text says why."""


class Shim:
    """The event loop around a script and its segments."""

    def __init__(
        self,
        pod_dir: Path,
        script: PodScript,
        listener: socket.socket,
        wake: int,
        folder_lock: int | None,
    ) -> None:
        """`folder_lock`: of the folder in which the pod runs, to be closed with its end."""
        self.pod_dir = pod_dir
        self.script = script
        self.exit: PodExit | None = None  # None: processes of the pod are left
        self.segments = SegmentStore()
        self.released = False
        self.asked_at = time.monotonic()  # by a request, a watcher, a signal, the script's end
        self._watchers: dict[LineSocket, bool] = {}  # True: wants a message at the exit
        self._connections: list[LineSocket] = []
        self._wake = wake
        self._folder_lock = folder_lock
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._selector.register(wake, selectors.EVENT_READ, None)
        self.signalled = False  # the shim itself was asked to end

    def run(self) -> None:
        """Return when there is nothing left to hold."""
        while True:
            self._after_reaping()
            timeout = self.script.tick()
            if self.exit is not None:
                timeout = self._lingers_s()
                if timeout <= 0:
                    break
            for key, _ in self._selector.select(timeout):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj == self._wake:
                    self._woken()
                else:
                    self._serve(key.data)
        for connection in list(self._connections):
            self._drop(connection)

    def _lingers_s(self) -> float:
        """Return for how long the segments may still be needed. No process of the pod is left."""
        if self.released or not len(self.segments):
            return 0.0
        # When a whole machine is stopped, all get a signal at once: give the client time to fetch
        # what is held here.
        linger_s = shim_wire.SIGNALLED_LINGER_S if self.signalled else shim_wire.LINGER_S
        if self._watchers:
            return linger_s
        return self.asked_at + linger_s - time.monotonic()

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            numbers = set(os.read(self._wake, 4096))
            if numbers & {signal.SIGTERM, signal.SIGINT}:
                self.signalled = True
                self.asked_at = time.monotonic()
                self.script.stop(_grace_of_environment(), "the shim was told to end")
            if signal.SIGHUP in numbers and not (self.pod_dir / "sock").exists():
                self._listen_again()

    def _listen_again(self) -> None:
        """Answer in the folder that the client has made anew, since somebody deleted it."""
        try:
            _introduce(self.pod_dir, self.script.command)
            listener = shim_wire.bind(self.pod_dir)
        except OSError as error:
            sys.stderr.write(f"shim: {self.pod_dir} is gone: {error}\n")
            return
        listener.setblocking(False)
        self._selector.unregister(self._listener)
        self._listener.close()
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._listener = listener
        if self.exit is not None:
            self._write_exit(self.exit)

    def _after_reaping(self) -> None:
        if self.exit is not None:
            return
        script = self.script
        script.reap()
        if script.wait_status is not None and not script.gone and script.deadline is None:
            script.stop(_grace_of_environment(), "the script ended and left processes behind")
        if script.gone:
            self.exit = self._as_refused(script.exit())
            if self._folder_lock is not None:
                os.close(self._folder_lock)
            self.asked_at = time.monotonic()
            self._write_exit(self.exit)
            for watcher, wants_exit in list(self._watchers.items()):
                if wants_exit:
                    self._answer(watcher, {"ok": True, "exit": asdict(self.exit)})

    def _as_refused(self, ended: PodExit) -> PodExit:
        if ended.code is not None:  # also where the script makes another code of the refusal's
            with contextlib.suppress(OSError):  # no launcher was refused
                return replace(ended, **json.loads((self.pod_dir / shim_wire.REFUSED).read_text()))
        return ended

    def _write_exit(self, ended: PodExit) -> None:
        try:
            shim_wire.write_json(self.pod_dir / "exit.json", asdict(ended))
        except OSError as error:  # disk full, folder gone: watchers are told over the socket
            with contextlib.suppress(OSError):  # the pod's log is on that disk as well
                sys.stderr.write(f"shim: exit.json not written: {error}\n")

    # --- connections

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # out of descriptors: with one connection less the next try succeeds
            # The launcher watches: it would take the end of its connection for that of the shim.
            idle = self._idle()
            if idle is None:
                time.sleep(FULL_S)
            else:
                self._drop(idle)
            return
        connection.setblocking(False)
        if peer_credentials(connection)[1] not in (os.getuid(), 0):
            connection.close()
            return
        if len(self._connections) >= MAX_CONNECTIONS:
            self._drop(self._idle() or self._connections[0])
        line = LineSocket(connection)
        self._connections.append(line)
        self._selector.register(connection, selectors.EVENT_READ, line)

    def _idle(self) -> LineSocket | None:
        """Return the oldest connection of those that do not watch; None: there is none."""
        return next((c for c in self._connections if c not in self._watchers), None)

    def _drop(self, line: LineSocket) -> None:
        if line in self._connections:
            self._connections.remove(line)
            if self._watchers.pop(line, None) is not None:
                self.asked_at = time.monotonic()
            self._selector.unregister(line.socket)
            line.close()

    def _serve(self, line: LineSocket) -> None:
        try:
            received = line.receive()
            while received is not None:
                message, fds = received
                self._request(line, message, fds)
                received = line.pending()
                if received is None:
                    return  # not the end, only no further line yet
            self._drop(line)
        except BlockingIOError:
            return
        # Whatever a request contains (JSON a thousand brackets deep), the pod goes on.
        except Exception as error:  # noqa: BLE001
            self._answer(line, {"ok": False, "error": str(error)})
            self._drop(line)

    def _answer(self, line: LineSocket, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        try:
            line.send({**message, "fds": len(fds)}, fds)
        except OSError:  # the client is gone, or does not read
            self._drop(line)

    def _request(self, line: LineSocket, message: dict[str, Any], fds: tuple[int, ...]) -> None:
        self.asked_at = time.monotonic()
        try:
            answer, out = self._handle(line, message, fds)
        except ValueError as error:
            answer, out = {"ok": False, "error": str(error)}, ()
        finally:
            for fd in fds:  # those that are kept have been duplicated
                os.close(fd)
        self._answer(line, answer, out)

    def _handle(
        self, line: LineSocket, message: dict[str, Any], fds: tuple[int, ...]
    ) -> tuple[dict[str, Any], tuple[int, ...]]:
        """Carry one request out. Raises ValueError with the text of the refusal."""
        op = message.get("op")
        if op == "status":
            return self._status(), ()
        if op == "stop":
            grace_s = message.get("grace_s", DEFAULT_GRACE_S)
            if type(grace_s) not in (int, float) or not 0 <= grace_s <= MAX_GRACE_S:
                raise ValueError(f"grace_s: expected 0 to {MAX_GRACE_S:g} seconds, got {grace_s!r}")
            self.script.stop(float(grace_s), "stopped on request")
        elif op == "kill":
            self.script.kill("killed on request")
        elif op == "put":
            self.segments.put(message.get("segment"), fds)
        elif op == "get":
            kept = self.segments.get(message.get("stage"))
            listed = [asdict(segment) for segment, _ in kept]
            return {"ok": True, "segments": listed}, tuple(fd for _, fd in kept)
        elif op == "drop":
            self.segments.drop(message.get("below_stage"))
        elif op == "release":
            self.segments.clear()
            self.released = True
        elif op == "watch":
            self._watchers[line] = message.get("exit") is True
            if self._watchers[line] and self.exit is not None:
                return {"ok": True, "exit": asdict(self.exit)}, ()
        else:
            raise ValueError(
                f"op: {op!r} is none of status, stop, kill, put, get, drop, release, watch"
            )
        return {"ok": True}, ()

    def _status(self) -> dict[str, Any]:
        return {
            "ok": True,
            "running": self.exit is None,
            "stopping": self.exit is None and self.script.deadline is not None,
            "exit": None if self.exit is None else asdict(self.exit),
            "segments": [asdict(segment) for segment, _ in self.segments.get(None)],
        }


def _grace_of_environment() -> float:
    try:
        return min(max(0.0, float(os.environ.get("EDL_GRACE_S", DEFAULT_GRACE_S))), MAX_GRACE_S)
    except ValueError:
        return DEFAULT_GRACE_S


def _lock(pod_dir: Path) -> int:
    """Make sure that this is the folder's only shim; the lock ends with the process."""
    fd = shim_wire.lock_folder(pod_dir)
    if fd is None:
        raise ShimUsageError(f"--pod_dir: {pod_dir} has a running shim already")
    return fd


def _lock_own_folder() -> int | None:
    """Make sure that no other pod runs in this one's own folder, whose files it would overwrite.

    Package scripts also make links to code that all pods share.
    """
    folder = os.environ.get("EDL_POD_FOLDER")
    if folder is None or Path(folder).is_symlink():
        return None
    fd = shim_wire.lock_folder(Path(folder))
    if fd is None:
        raise ShimUsageError(shim_wire.in_use(folder))
    return fd


def _parse(argv: list[str]) -> tuple[Path, bool, list[str]]:
    """Return (pod_dir, detach, command). By hand: argparse would double the time of a start."""
    usage = "usage: python -m pod_runtime.shim --pod_dir DIR [--detach] -- CMD..."
    if "--" not in argv:
        raise ShimUsageError(usage)
    flags, command = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    detach = "--detach" in flags
    flags = [flag for flag in flags if flag != "--detach"]
    if len(flags) != 2 or flags[0] != "--pod_dir" or not command:
        raise ShimUsageError(usage)
    pod_dir = Path(flags[1]).absolute()
    if not pod_dir.is_dir():
        raise ShimUsageError(f"--pod_dir: {pod_dir} is not a folder; make it first")
    return pod_dir, detach, command


def _detach() -> int:
    """Go on in a child; the parent exits once the child has written to the returned fd."""
    ready, child_ready = os.pipe()
    if os.fork() == 0:
        os.close(ready)
        return child_ready
    os.close(child_ready)
    with os.fdopen(ready, "rb") as file:
        os._exit(0 if file.read() else 1)


def _wake_on_signals() -> int:
    """Return a descriptor that receives the number of each signal as a byte."""
    wake, wake_write = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    return wake


def _introduce(pod_dir: Path, command: list[str]) -> None:
    """Write which process is the shim of this folder."""
    me = {
        "pid": os.getpid(),
        "start_time": processes.start_time(os.getpid()),
        "pod_id": os.environ.get("EDL_POD_ID", pod_dir.name),
        "argv": command,
    }
    shim_wire.write_json(pod_dir / "shim.json", me)


def main(argv: list[str]) -> int:
    """Run the shim in this process until it is not needed any more."""
    try:
        pod_dir, detach, command = _parse(argv)
        lock, folder_lock = _lock(pod_dir), _lock_own_folder()
    except ShimUsageError as error:
        sys.stderr.write(f"shim: {error}\n")
        return 2
    ready = _detach() if detach else None
    with contextlib.suppress(PermissionError):  # a session leader already
        os.setsid()
    processes.set_child_subreaper()
    wake = _wake_on_signals()
    _introduce(pod_dir, command)
    listener = shim_wire.bind(pod_dir)
    listener.setblocking(False)
    script = PodScript(command, pod_dir / "log")
    if ready is not None:
        os.write(ready, b"1")
        os.close(ready)
        _forget_console(pod_dir / "log")
    try:
        Shim(pod_dir, script, listener, wake, folder_lock).run()
    finally:
        with contextlib.suppress(OSError):
            (pod_dir / "sock").unlink()
        os.close(lock)
    return 0


def _forget_console(log: Path) -> None:
    """Close the caller's pipes; the shim's own messages go to the pod's log."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    try:
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        out = null
    os.dup2(out, 1)
    os.dup2(out, 2)
    for fd in {null, out} - {0, 1, 2}:
        os.close(fd)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
