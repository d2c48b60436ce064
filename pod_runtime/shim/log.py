"""Read the end of a pod's log, for exit reports. Standard library only."""

import os
from pathlib import Path

LOG_TAIL_BYTES = 16384
LOG_TAIL_LINES = 20
LOG_LINE_CHARS = 500


def last_lines(log: Path) -> tuple[str, ...]:
    """Return the last lines that are not blank, shortened, to show why a script ended."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LOG_TAIL_BYTES))
            text = file.read(LOG_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ()
    lines = [line[:LOG_LINE_CHARS] for line in text.splitlines() if line.strip()]
    return tuple(lines[-LOG_TAIL_LINES:])
