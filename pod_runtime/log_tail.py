"""Read the end of a log, and keep a log bounded. Standard library only."""

import errno
import os
import shutil
from pathlib import Path

TAIL_BYTES = 16384
LOG_BYTES = 100_000_000  # a longer log is cut; as much is kept beside it
LINES = 20
LINE_CHARS = 500


def read_tail(path: Path, start: int = 0) -> list[str]:
    """Return the last lines of a log, from byte `start` on at most; [] if it cannot be read.

    A log that is shorter has been cut since `start` was noted: it is read from its beginning.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start if start <= size else 0, size - TAIL_BYTES))
            data = file.read()
    except OSError:
        return []
    return data.decode(errors="replace").splitlines()


def last_lines(log: Path, start: int = 0) -> tuple[str, ...]:
    """Return the last lines that are not blank, shortened, to show why a script ended.

    Args:
        start: as of `read_tail`.
    """
    lines = [line[:LINE_CHARS] for line in read_tail(log, start) if line.strip()]
    return tuple(lines[-LINES:])


def cut_log(path: Path, limit: int = LOG_BYTES) -> bool:
    """Move what a log of more than `limit` bytes holds to PATH.1; return whether it was so long.

    Its writers append, and go on at its new beginning. What they write in the moment between the
    copy's end and the cut is lost, as with logrotate's `copytruncate`.

    Raises:
        OSError: the disk is full, say; the log is as it was.
    """
    if path.stat().st_size <= limit:
        return False
    older = path.with_name(path.name + ".1")
    room = shutil.disk_usage(path.parent).free + (older.stat().st_size if older.exists() else 0)
    if room < path.stat().st_size:  # the copy would take what others need, and be cut off
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(older))
    with path.open("rb+") as log, older.open("wb") as copy:
        try:
            shutil.copyfileobj(log, copy, 1 << 20)
            copy.flush()
            shutil.copyfileobj(log, copy)  # what was written meanwhile
            copy.flush()
        except OSError:
            older.unlink(missing_ok=True)
            raise
        log.truncate(0)
    return True
