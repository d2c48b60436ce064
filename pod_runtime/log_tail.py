"""Read the end of a log. Standard library only."""

import os
from pathlib import Path

TAIL_BYTES = 16384
LINES = 20
LINE_CHARS = 500


def read_tail(path: Path, start: int = 0) -> list[str]:
    """Return the last lines of a log, from byte `start` on at most; [] if it cannot be read."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start, size - TAIL_BYTES))
            data = file.read()
    except OSError:
        return []
    return data.decode(errors="replace").splitlines()


def last_lines(log: Path) -> tuple[str, ...]:
    """Return the last lines that are not blank, shortened, to show why a script ended."""
    lines = [line[:LINE_CHARS] for line in read_tail(log) if line.strip()]
    return tuple(lines[-LINES:])
