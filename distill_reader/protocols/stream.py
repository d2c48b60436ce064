"""Send and receive whole buffers on stream sockets, with few system calls.

The sockets block, with time-outs in the kernel (SO_RCVTIMEO, SO_SNDTIMEO): receiving a large buffer
returns to Python only once, when it is full, and takes the interpreter's lock only once.
"""

import contextlib
import os
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from distill_reader.errors import DistillError

# Bytes, a memoryview of bytes or a numpy array, contiguous. Before Python 3.12 no type says that.
Sendable = Any

_IOV_MAX = os.sysconf("SC_IOV_MAX")
_UNIX_BUFFER_BYTES = 4 << 20  # as much as the kernel's limits allow
# Plain integers: combining the enumeration's members costs as much as a system call.
_NOSIGNAL = int(socket.MSG_NOSIGNAL)
_WAITALL = int(socket.MSG_WAITALL)
_MORE = int(socket.MSG_MORE)
_SCRATCH_BYTES = 256 << 10
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 20), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))
MIN_RATE = 1 << 20  # bytes per second; a slower peer is considered stalled


class StreamEnded(DistillError):  # noqa: N818 - named by what is the case
    """The other end closed the connection, or it broke."""


class StreamStalled(DistillError):  # noqa: N818 - named by what is the case
    """The other end sent or took nothing for too long."""


def prepare(sock: socket.socket, timeout_s: float) -> None:
    """Make a connected socket ready for the functions of this module."""
    sock.settimeout(None)
    if sock.family == socket.AF_UNIX:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _UNIX_BUFFER_BYTES)
    else:  # buffers of TCP grow by themselves, further than they can be set
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(sock)
    set_timeout(sock, timeout_s)


def keep_alive(sock: socket.socket) -> None:
    """Have a connection of TCP end 40 s after the other end's host has vanished."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def set_timeout(sock: socket.socket, timeout_s: float) -> None:
    """Limit how long a call on `sock` may take to move all its bytes."""
    seconds = max(timeout_s, 0.001)  # 0 would mean forever
    value = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def send(
    sock: socket.socket, buffers: Sequence[Sendable], size_bytes: int, timeout_s: float
) -> None:
    """Send all of `buffers` in order.

    Args:
        size_bytes: of all buffers; the caller knows it, and adding up thousands takes time.
        timeout_s: as given to `set_timeout`; large buffers may take longer while they progress.

    Raises:
        StreamEnded, StreamStalled.
    """
    if len(buffers) <= _IOV_MAX:
        _send_some(sock, buffers, size_bytes, timeout_s, 0)
        return
    for start in range(0, len(buffers), _IOV_MAX):
        some = buffers[start : start + _IOV_MAX]
        flags = _MORE if start + _IOV_MAX < len(buffers) else 0
        _send_some(sock, some, sum(map(_size, some)), timeout_s, flags)


def _send_some(
    sock: socket.socket, buffers: Sequence[Sendable], size_bytes: int, timeout_s: float, flags: int
) -> None:
    flags |= _NOSIGNAL
    sent = _call_sendmsg(sock, buffers, flags)
    missing = size_bytes - sent
    if missing == 0:
        return
    deadline = time.monotonic() + timeout_s + missing / MIN_RATE
    views = [bytes_of(buffer) for buffer in buffers if _size(buffer)]
    while missing:
        while sent >= len(views[0]):
            sent -= len(views.pop(0))
        views[0] = views[0][sent:]
        if time.monotonic() > deadline:
            raise StreamStalled(f"{missing} bytes were not taken in time")
        sent = _call_sendmsg(sock, views, flags)
        missing -= sent


def receive(sock: socket.socket, view: memoryview, timeout_s: float) -> None:
    """Fill `view` (bytes).

    Args:
        timeout_s: as given to `set_timeout`; large buffers may take longer while they progress.

    Raises:
        StreamEnded, StreamStalled.
    """
    if not view:
        return
    got = receive_some(sock, view, _WAITALL)
    if got == len(view):
        return
    deadline = time.monotonic() + timeout_s + len(view) / MIN_RATE
    while got < len(view):
        if time.monotonic() > deadline:
            raise StreamStalled(f"{len(view) - got} bytes did not come in time")
        got += receive_some(sock, view[got:], _WAITALL)


def receive_bytes(sock: socket.socket, size: int, timeout_s: float) -> bytes:
    """Return the next `size` bytes. Raises: StreamEnded, StreamStalled."""
    data = bytearray(size)
    receive(sock, memoryview(data), timeout_s)
    return bytes(data)


def skip(sock: socket.socket, size: int, timeout_s: float) -> None:
    """Receive `size` bytes and discard them. Raises: StreamEnded, StreamStalled."""
    deadline = time.monotonic() + timeout_s + size / MIN_RATE
    scratch = memoryview(bytearray(min(size, _SCRATCH_BYTES)))
    while size:
        if time.monotonic() > deadline:
            raise StreamStalled(f"{size} bytes did not come in time")
        size -= receive_some(sock, scratch[:size])


def receive_some(sock: socket.socket, view: memoryview, flags: int = 0) -> int:
    """Receive at least one byte into `view`; return how many.

    Raises:
        StreamEnded, StreamStalled.
    """
    try:
        got = sock.recv_into(view, 0, flags)
    except BlockingIOError as error:
        raise StreamStalled("nothing came in time") from error
    except OSError as error:
        raise StreamEnded(str(error)) from error
    if got == 0:
        raise StreamEnded("closed by the other end")
    return got


def has_ended(sock: socket.socket) -> bool:
    """Return whether the other end has closed the connection. Neither waits nor reads."""
    try:
        return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def end(sock: socket.socket) -> None:
    """End the connection for both sides and for waiting threads, but do not close the socket."""
    with contextlib.suppress(OSError):  # it has already ended
        sock.shutdown(socket.SHUT_RDWR)


def _call_sendmsg(sock: socket.socket, buffers: Sequence[Sendable], flags: int) -> int:
    try:
        return sock.sendmsg(buffers, (), flags)
    except BlockingIOError as error:
        raise StreamStalled("nothing was taken in time") from error
    except OSError as error:
        raise StreamEnded(str(error)) from error


def _size(buffer: Sendable) -> int:
    return len(buffer) if isinstance(buffer, bytes | bytearray) else buffer.nbytes


def bytes_of(buffer: Sendable) -> memoryview:
    """Return the bytes of a buffer, writable if it is."""
    if isinstance(buffer, np.ndarray):
        buffer = buffer.reshape(-1).view(np.uint8)
    return memoryview(buffer)
