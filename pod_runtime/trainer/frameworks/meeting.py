"""Wait until all ranks of a group are there, in a way that can be called off.

What forms a group in the framework waits in its own code, which nobody can interrupt. So the ranks
meet here first, at the port where rank 0 listens for the framework afterwards, and enter that code
together.
"""

import selectors
import socket
import time
from collections.abc import Callable

_LOOK_S = 0.05  # how often a waiting rank looks whether the meeting is off
_RETRY_S = 0.02
_GO = b"go\n"
_LINE_BYTES = 64


class CalledOffError(Exception):
    """The group is not wanted any more."""


def meet(
    master: str,
    *,
    name: str,
    rank: int,
    world_size: int,
    is_off: Callable[[], bool],
    timeout_s: float,
) -> None:
    """Return when all ranks of the group `name` have called it. Any thread.

    Args:
        master: "addr:port" of rank 0; the port is free again when this returns.
        name: without spaces; the same on all ranks, another for another attempt.

    Raises:
        CalledOffError: `is_off()` has become true.
        OSError: the port is taken, or not all came within `timeout_s`.
    """
    addr, _, port = master.rpartition(":")
    deadline = time.monotonic() + timeout_s

    def look() -> None:
        if is_off():
            raise CalledOffError(name)
        if time.monotonic() > deadline:
            raise TimeoutError(f"not all ranks of {name} have come within {timeout_s:g} s")

    if rank == 0:
        _gather(int(port), name, world_size, look)
    else:
        while not _attend((addr, int(port)), f"{name} {rank}\n".encode(), look):
            look()
            time.sleep(_RETRY_S)


def _gather(port: int, name: str, world_size: int, look: Callable[[], None]) -> None:
    """Wait for all others, stop listening, and tell them."""
    here: dict[socket.socket, int] = {}  # connection -> rank
    said: dict[socket.socket, bytes] = {}
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        with listener, selectors.DefaultSelector() as ready:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("", port))
            listener.listen(world_size + 8)
            ready.register(listener, selectors.EVENT_READ)
            while len(set(here.values())) < world_size - 1:
                look()
                for key, _ in ready.select(_LOOK_S):
                    if key.fileobj is listener:
                        connection, _addr = listener.accept()
                        connection.settimeout(1.0)
                        said[connection] = b""
                        ready.register(connection, selectors.EVENT_READ)
                        continue
                    connection = key.fileobj  # type: ignore[assignment]  # only these are left
                    rank = _hear(connection, said, name, world_size)
                    if rank is not None:
                        here[connection] = rank
                    elif connection not in said:  # it has gone, or is a stranger
                        here.pop(connection, None)
                        ready.unregister(connection)
                        connection.close()
        for connection in here:
            connection.sendall(_GO)
    finally:
        for connection in said:
            connection.close()


def _hear(
    connection: socket.socket, said: dict[socket.socket, bytes], name: str, world_size: int
) -> int | None:
    """Return who is at the other end; None: not known yet, or, with `said` forgotten, nobody."""
    try:
        more = connection.recv(_LINE_BYTES)
    except OSError:
        more = b""
    text = said.pop(connection) + more
    if not more or len(text) > _LINE_BYTES:
        return None
    said[connection] = text
    if not text.endswith(b"\n"):
        return None
    word, _, rank = text.decode("ascii", "replace").strip().rpartition(" ")
    if word == name and rank.isdigit() and 0 < int(rank) < world_size:
        return int(rank)
    del said[connection]
    return None


def _attend(address: tuple[str, int], line: bytes, look: Callable[[], None]) -> bool:
    """Say that this rank is here, and wait; False: rank 0 is not there, or has gone."""
    try:
        with socket.create_connection(address, 1.0) as connection:
            connection.settimeout(_LOOK_S)
            connection.sendall(line)
            answer = b""
            while answer != _GO:
                look()
                try:
                    more = connection.recv(len(_GO) - len(answer))
                except TimeoutError:
                    continue
                if not more:
                    return False
                answer += more
    except OSError as error:
        if isinstance(error, TimeoutError):
            look()
        return False
    return True
