"""Make Paddle's key-value store, by which the ranks of a group find each other, without delays.

Its messages go out in pieces over sockets that wait for an acknowledgement before they send the
next piece, and the other side takes 40 ms to acknowledge. Forming a group takes a dozen of these,
0.3 s; without the waiting it is 0.03 s.
"""

import contextlib
import os
import socket
from collections.abc import Iterator

from paddle.base import core


@contextlib.contextmanager
def prompt_store(master: str) -> Iterator[None]:
    """Within it, messages of the store at `master` ("addr:port") are sent at once.

    The store is opened if it has not been: on rank 0 that returns when all ranks have come.

    Not for longer than our own group takes: Paddle's gloo groups share their keys, and scripts
    that make further groups rely, unknowingly, on being slow.
    """
    if hasattr(core, "create_or_get_global_tcp_store"):
        core.create_or_get_global_tcp_store()
    with prompt(int(master.rpartition(":")[2])):
        yield


@contextlib.contextmanager
def prompt(port: int) -> Iterator[None]:
    """The same for the store at `port`, all connections to which have been made."""
    _set_no_delay(port, on=True)
    try:
        yield
    finally:
        _set_no_delay(port, on=False)


def _set_no_delay(port: int, *, on: bool) -> None:
    """Set TCP_NODELAY on this process's connections from or to `port`."""
    for name in os.listdir("/proc/self/fd"):
        # One that is gone by now, or is no socket, is none of ours.
        with contextlib.suppress(OSError), _borrowed(int(name)) as connection:
            ports = (connection.getsockname()[1], connection.getpeername()[1])
            if port in ports:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, int(on))


@contextlib.contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """Yield a socket object of the internet socket `fd`, which stays open.

    Raises:
        OSError: it is none.
    """
    connection = socket.socket(fileno=fd)
    try:
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            raise OSError(f"descriptor {fd} is no internet socket")
        yield connection
    finally:
        connection.detach()
