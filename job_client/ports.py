"""Choose the ports that the trainers of this node may use.

They must lie outside the range from which the kernel picks ports of outgoing connections: one of
those may sit on a port at the moment when a trainer needs it.
"""

import re
from pathlib import Path

from job_client.errors import UsageError

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


def parse_range(text: str) -> tuple[int, int]:
    """Return (low, high) of LOW-HIGH, both inclusive.

    Raises:
        UsageError: it is not two ports, the first not above the second.
    """
    match = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text)
    if not match:
        raise UsageError(f"--port_range: expected LOW-HIGH (such as 20000-21999), got {text!r}")
    low, high = int(match[1]), int(match[2])
    if not 1024 <= low <= high <= 65535:
        raise UsageError(f"--port_range: expected 1024 <= LOW <= HIGH <= 65535, got {text}")
    return low, high
