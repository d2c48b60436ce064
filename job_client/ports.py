"""Choose the ports that the trainers of this node may use.

They must lie outside the range from which the kernel picks ports of outgoing connections: such a
connection may hold a port at the moment when a trainer needs it.
"""

import errno
import re
import socket
import threading
from collections.abc import Iterable
from pathlib import Path

from job_client.errors import SetupError

BLOCK = 2000
FIRST = 20000
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_ASSUMED_EPHEMERAL = (32768, 60999)  # Linux's default


def ephemeral_range(path: Path = _EPHEMERAL) -> tuple[int, int]:
    """Return the first and the last port that the kernel gives to outgoing connections."""
    try:
        low, high = map(int, path.read_text().split())
    except (OSError, ValueError):
        return _ASSUMED_EPHEMERAL
    return low, high


def blocks(ephemeral: tuple[int, int], size: int = BLOCK) -> list[tuple[int, int]]:
    """Return blocks of ports in the order in which to try them: below the ephemeral ones first.

    Where the kernel takes nearly all ports, blocks inside its range come last.
    """
    low, high = ephemeral
    starts = [*range(FIRST, 65536 - size, size), *range(FIRST - size, 1023, -size)]
    every = [(start, start + size - 1) for start in starts]
    below = [block for block in every if block[1] < low]
    above = [block for block in every if block[0] > high]
    inside = [block for block in every if block not in below and block not in above]
    return below + above + inside


class PortBlocks:
    """The blocks that a client tries, one after the other. Safe to use from any thread.

    Clients of different servers know nothing of each other, and would use the same ports on one
    host. So each holds a socket named after its block, which vanishes with the client.
    """

    def __init__(self, every: Iterable[tuple[int, int]]) -> None:
        self._left = list(every)
        self._lock = threading.Lock()
        self._holder: socket.socket | None = None  # None: no block is held

    def next(self) -> tuple[int, int] | None:
        """Give the block up for the next that no client of this host has; None: there is none."""
        with self._lock:
            self._release()
            while self._left:
                block = self._left.pop(0)
                if self._hold(f"edl-ports-{block[0]}"):
                    return block
            return None

    def close(self) -> None:
        """Give the block up, and take no more."""
        with self._lock:
            self._release()
            self._left.clear()

    def _hold(self, name: str) -> bool:
        holder = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            holder.bind(f"\0{name}")  # abstract: a network namespace has it once, like the ports
        except OSError as error:
            holder.close()
            return error.errno != errno.EADDRINUSE  # else: there are no such sockets
        self._holder = holder
        return True

    def _release(self) -> None:
        if self._holder is not None:
            self._holder.close()
        self._holder = None


def parse_range(text: str) -> tuple[int, int]:
    """Return (low, high) of LOW-HIGH, both inclusive.

    Raises:
        SetupError: it is not two ports, the first not above the second.
    """
    match = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text)
    if not match:
        raise SetupError(f"--port_range: expected LOW-HIGH (such as 20000-21999), got {text!r}")
    low, high = int(match[1]), int(match[2])
    if not 1024 <= low <= high <= 65535:
        raise SetupError(f"--port_range: expected 1024 <= LOW <= HIGH <= 65535, got {text}")
    return low, high
