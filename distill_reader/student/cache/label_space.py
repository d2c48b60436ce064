"""The folders below one cache: one for each version of each teacher, and a bound for all of them.

The labels of a data set are wanted once per epoch, in any order: whatever is thrown out is wanted
again before the next one is. So a cache that is full keeps what it has; what goes is the folder
that nobody has used for longest.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_PREFIX = "labels-"
_GONE = "gone-"  # being removed


def enter(root: Path, identity: Mapping[str, Any]) -> tuple[Path, int]:
    """Return the folder of an identity, and the descriptor that says that it is in use.

    Raises:
        OSError: it cannot be made.
    """
    text = json.dumps(identity, sort_keys=True)
    name = _PREFIX + hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    folder = root / name
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # it was removed just now
            fd = open_file(folder / "users")
            fcntl.flock(fd, fcntl.LOCK_SH)  # who removes it holds it for a moment
            if _is_same(fd, folder / "users"):
                os.utime(fd)
                return folder, fd
            os.close(fd)


def open_file(path: Path) -> int:
    """Return a descriptor of a file to read and write; made if need be. Raises: OSError."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)


def used_bytes(root: Path, *, besides: Path) -> int:
    """Return the size of all folders but one."""
    return sum(_size(folder) for folder in _folders(root) if folder != besides)


def evict(root: Path, most_bytes: int, *, besides: Path) -> None:
    """Remove folders that nobody uses, longest unused first, until the others fit."""
    for gone in root.glob(f"{_GONE}*"):  # of somebody who was killed at it
        shutil.rmtree(gone, ignore_errors=True)
    by_age = sorted((_used_at(folder), folder) for folder in _folders(root) if folder != besides)
    for _, folder in by_age:
        if used_bytes(root, besides=besides) <= most_bytes:
            return
        _remove(folder)


def _remove(folder: Path) -> None:
    try:
        fd = open_file(folder / "users")
    except FileNotFoundError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        gone = folder.with_name(_GONE + folder.name)
        folder.rename(gone)  # whoever comes now makes a new one
    except OSError:
        return  # in use, or somebody else removes it
    finally:
        os.close(fd)
    logger.info("cache: %s is removed to make room", folder)
    shutil.rmtree(gone, ignore_errors=True)


def _folders(root: Path) -> list[Path]:
    return [path for path in root.glob(f"{_PREFIX}*") if path.is_dir()]


def _size(folder: Path) -> int:
    total = 0
    for name in ("rows", "keys"):
        with contextlib.suppress(OSError):
            total += (folder / name).stat().st_size
    return total


def _used_at(folder: Path) -> float:
    with contextlib.suppress(OSError):
        return (folder / "users").stat().st_mtime
    return 0.0


def _is_same(fd: int, path: Path) -> bool:
    try:
        found, there = os.fstat(fd), path.stat()
    except FileNotFoundError:
        return False
    return (found.st_dev, found.st_ino) == (there.st_dev, there.st_ino)
