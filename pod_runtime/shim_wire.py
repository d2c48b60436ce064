"""The contract of a pod's shim: files in its folder, requests on its socket.

Standard library only.

A shim's folder (`--pod_dir DIR`, or $EDL_POD_DIR inside the pod) holds

    shim.json   {"pid", "start_time", "pod_id", "argv"}    written first, by the shim
    sock        a unix socket: one JSON request a line, one JSON answer a line
    exit.json   `PodExit`              written once no process of the pod is left
    log         standard output and error of the pod's script
    launcher    locked by the pod's launcher; not empty once its training is complete
    refused     {"code", "reason"} of a second launcher: how the pod ends if its script exits
    server      {"url"} of the job server, by the client that found the pod: it may have moved

Requests, each `{"op": ...}`, and their answers:

    status             {"ok": true, "running": bool, "stopping": bool, "exit": PodExit | null,
                       "segments": [...]}
    stop   grace_s     at once {"ok": true}; SIGTERM to the pod, SIGKILL after the grace
    kill               at once {"ok": true}; SIGKILL to every process of the pod
    put    segment     and one fd: keeps a snapshot segment, in place of the same (pod_id, stage)
    get    stage       {"ok", "segments": [...]} and as many fds, newest first; stage null: all
    drop   below_stage drops the segments of lower stages
    release            {"ok": true}; drops all; the shim exits as soon as no process is left
    watch              {"ok": true}, then nothing: the connection closes when the shim dies
    watch  exit: true  {"ok": true}, and {"ok": true, "exit": PodExit} once the pod has ended

It locks its folder, and the one in which the pod runs ($EDL_POD_FOLDER) until the pod has ended.

A shim whose script has ended stays as long as it holds a segment: until `release`, or until there
was no request and no watcher for `LINGER_S` (after a SIGTERM to the shim itself:
`SIGNALLED_LINGER_S`). A refused request answers {"ok": false, "error": text}. On SIGHUP it listens
again where its socket is gone, with its folder.
"""

import array
import fcntl
import json
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CLAIM, REFUSED, SERVER = "launcher", "refused", "server"  # files, see above
LINGER_S = 600.0
SIGNALLED_LINGER_S = 2.0  # if the shim itself was asked to end
MAX_LINE = 1 << 20
MAX_FDS = 16
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def lock_folder(folder: Path) -> int | None:
    """Return a descriptor that locks a folder as long as it is open; None: another process has it.

    On a file system that knows no locks nobody is kept out.

    Raises:
        OSError: there is no such folder.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError:
        pass  # it knows no locks
    return fd


def in_use(folder: str | Path) -> str:
    """Say that another pod runs in a pod's own folder."""
    return f"--pod_path: another pod runs in {folder}; give this client a folder of its own"


class ShimError(OSError):
    """The shim cannot be reached, or refused a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodExit:
    """How a pod's script ended."""

    code: int | None  # None: ended by a signal
    signal: int | None  # None: exited
    reason: str
    last_lines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSegment:
    """A snapshot segment (a memfd) that a shim holds; its content describes itself."""

    pod_id: str
    stage: int
    size_bytes: int
    digest: str = ""


def peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """Return pid and user id of the process at the other end of a unix socket."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _gid = _CREDENTIALS.unpack(packed)
    return pid, uid


class LineSocket:
    """JSON lines with file descriptors, over a connected unix stream socket.

    Not thread-safe for two readers or two writers; one of each is fine.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._buffer = b""
        self._fds: list[int] = []

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        """Send one message; `fds` stay open here.

        Raises:
            OSError: the other side is gone.
        """
        data = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        if fds:
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
            sent = self.socket.sendmsg([data], ancillary)
            data = data[sent:]
        if data:
            self.socket.sendall(data)

    def receive(self) -> tuple[dict[str, Any], tuple[int, ...]] | None:
        """Return the next message and its descriptors (now owned by the caller); None at the end.

        Raises:
            ShimError: the line is too long or no JSON object.
            TimeoutError: the socket has a timeout and nothing came.
        """
        while b"\n" not in self._buffer:
            chunk, fds, _flags, _addr = socket.recv_fds(self.socket, 1 << 16, MAX_FDS)
            self._fds += fds
            if not chunk:
                return None
            self._buffer += chunk
            if len(self._buffer) > MAX_LINE:
                raise ShimError("a message is longer than 1 MiB")
        return self._next()

    def pending(self) -> tuple[dict[str, Any], tuple[int, ...]] | None:
        """Return a message that has been received already; None: there is none. Does not read."""
        return self._next() if b"\n" in self._buffer else None

    def _next(self) -> tuple[dict[str, Any], tuple[int, ...]]:
        line, self._buffer = self._buffer.split(b"\n", 1)
        try:
            message = json.loads(line)
        except ValueError as error:
            raise ShimError(f"not JSON: {line[:80]!r}") from error
        if not isinstance(message, dict):
            raise ShimError(f"not a JSON object: {line[:80]!r}")
        count = message.get("fds", 0)
        if not isinstance(count, int) or not 0 <= count <= len(self._fds):
            raise ShimError(f"fds: {count!r} announced, {len(self._fds)} received")
        fds, self._fds = tuple(self._fds[:count]), self._fds[count:]
        return message, fds

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []
        self.socket.close()


def bind(folder: Path) -> socket.socket:
    """Return a listening socket at `folder/sock`; the path may be longer than sun_path allows."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    folder_fd = os.open(folder, os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        (folder / "sock").unlink(missing_ok=True)
        listener.bind(f"/proc/self/fd/{folder_fd}/sock")
    finally:
        os.close(folder_fd)
    listener.listen(64)
    return listener


def connect(folder: Path, timeout_s: float = 5.0) -> LineSocket:
    """Connect to the shim of `folder`.

    Raises:
        ShimError: there is none, or it does not answer.
    """
    try:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    except OSError as error:
        raise ShimError(f"{folder}: no shim can be asked: {error}") from error
    connection.settimeout(timeout_s)
    try:
        folder_fd = os.open(folder, os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            connection.connect(f"/proc/self/fd/{folder_fd}/sock")
        finally:
            os.close(folder_fd)
    except OSError as error:
        connection.close()
        raise ShimError(f"{folder}: no shim answers: {error}") from error
    return LineSocket(connection)


def request(
    folder: Path, message: dict[str, Any], fds: tuple[int, ...] = (), timeout_s: float = 5.0
) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Send one request to the shim of `folder` and return its answer and descriptors.

    `fds` stay open here; those returned belong to the caller.

    Raises:
        ShimError: no shim, no answer in time, or a refusal.
    """
    connection = connect(folder, timeout_s)
    try:
        connection.send({**message, "fds": len(fds)}, fds)
        answer = connection.receive()
    except OSError as error:
        raise ShimError(f"{folder}: {message.get('op')}: {error}") from error
    finally:
        connection.close()
    if answer is None:
        raise ShimError(f"{folder}: {message.get('op')}: the shim closed the connection")
    body, received = answer
    if not body.get("ok"):
        for fd in received:
            os.close(fd)
        raise ShimError(f"{folder}: {message.get('op')}: {body.get('error', 'refused')}")
    return body, received


def read_exit(folder: Path) -> PodExit | None:
    """Return how the pod of `folder` ended, or None while it has not."""
    try:
        data = json.loads((folder / "exit.json").read_text())
    except FileNotFoundError:
        return None
    return PodExit(
        code=data["code"],
        signal=data["signal"],
        reason=data["reason"],
        last_lines=tuple(data["last_lines"]),
    )


def read_server(folder: Path) -> str | None:
    """Return where the job server is by now; None: where it was at the pod's start."""
    try:
        return str(json.loads((folder / SERVER).read_text())["url"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def holds_state(folder: Path) -> bool:
    """Whether a checkpoint is below a folder, as where the script had no place for the last state.

    Raises:
        OSError: the disk is in trouble.
    """
    return any(path.is_dir() for path in folder.rglob("stage_*"))


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a small file; readers see all of it or nothing."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(value))
        temporary.replace(path)
    except OSError:  # a full disk; nobody would remove it later
        temporary.unlink(missing_ok=True)
        raise
