"""Wait until all ranks of a group are there; the wait can be called off.

A framework that forms a group waits in its own code, which cannot be interrupted. So the ranks meet
here first, at the port where rank 0 listens for the framework afterwards, and enter that code
together.
"""

import contextlib
import selectors
import socket
import time
from collections.abc import Callable, Iterator

from pod_runtime.trainer.errors import PeerLost

_LOOK_S = 0.05  # how often a waiting rank checks whether the meeting is called off
_RETRY_S = 0.02
_UNREACHED_S = 60.0  # of a host that answers nothing; a closed port is an answer
_GO = b"go\n"
_LINE_BYTES = 64


class CalledOffError(Exception):
    """The group is not wanted any more."""


def wait_for(master: str, timeout_s: float) -> None:
    """Return when rank 0 listens at `master` ("addr:port").

    The frameworks' own clients try once, and then sleep for half a second (PyTorch) or three.

    Raises:
        PeerLost: it does not, or its host cannot be reached.
    """
    addr, _, port = master.rpartition(":")
    heard_at = time.monotonic()
    deadline = heard_at + timeout_s
    while True:
        try:
            socket.create_connection((addr, int(port)), 1.0).close()
        except OSError as error:
            now = time.monotonic()
            if isinstance(error, ConnectionRefusedError):
                heard_at = now
            if now > heard_at + _UNREACHED_S:
                raise PeerLost(
                    f"rank 0 cannot be reached at {master}: {error}. Do the nodes reach each "
                    f"other? See to firewalls, and to --addr and --port_range of the job clients"
                ) from error
            if now > deadline:
                raise PeerLost(f"rank 0 does not listen at {master}: {error}") from error
            time.sleep(0.01)
        else:
            return


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
    received: dict[socket.socket, bytes] = {}
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        with _ending(listener), selectors.DefaultSelector() as ready:
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
                        received[connection] = b""
                        ready.register(connection, selectors.EVENT_READ)
                        continue
                    connection = key.fileobj  # type: ignore[assignment]  # only these are left
                    rank = _read_rank(connection, received, name, world_size)
                    if rank is not None:
                        here[connection] = rank
                    elif connection not in received:  # it has gone, or is a stranger
                        here.pop(connection, None)
                        ready.unregister(connection)
                        connection.close()
        for connection in here:
            connection.sendall(_GO)
    finally:
        for connection in received:
            with _ending(connection):
                pass


@contextlib.contextmanager
def _ending(sock: socket.socket) -> Iterator[socket.socket]:
    """Close a socket in the end, as well for processes that were forked meanwhile.

    A loader's worker would keep the port from the framework, and the seat of a rank that has left.
    """
    try:
        yield sock
    finally:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()


def _read_rank(
    connection: socket.socket, received: dict[socket.socket, bytes], name: str, world_size: int
) -> int | None:
    """Return the other end's rank; None: not known yet, or none and dropped from `received`."""
    try:
        more = connection.recv(_LINE_BYTES)
    except OSError:
        more = b""
    text = received.pop(connection) + more
    if not more or len(text) > _LINE_BYTES:
        return None
    received[connection] = text
    if not text.endswith(b"\n"):
        return None
    word, _, rank = text.decode("ascii", "replace").strip().rpartition(" ")
    if word == name and rank.isdigit() and 0 < int(rank) < world_size:
        return int(rank)
    del received[connection]
    return None


def _attend(address: tuple[str, int], line: bytes, look: Callable[[], None]) -> bool:
    """Announce this rank to rank 0, and wait; False: rank 0 is not there, or has gone."""
    try:
        with _ending(socket.create_connection(address, 1.0)) as connection:
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
