"""The folders of a cache, one per version of a teacher, and their common bound in bytes.

Each label of a data set is needed once per epoch, so no label is less useful than another: a full
cache keeps what it has. Only whole folders are removed, the longest unused first.
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
_GONE = "gone-"  # prefix of a folder that is being removed
_POD_FOLDER = "EDL_POD_FOLDER"  # variable of a pod's environment


def folder_of(root: Path, identity: Mapping[str, Any]) -> Path:
    """Return the folder of an identity, which need not be there."""
    text = json.dumps(identity, sort_keys=True)
    return root / (_PREFIX + hashlib.blake2b(text.encode(), digest_size=12).hexdigest())


def enter(root: Path, identity: Mapping[str, Any]) -> tuple[Path, int]:
    """Return the folder of an identity, and a locked descriptor that marks it as in use.

    Raises:
        OSError: the folder cannot be created.
    """
    folder = folder_of(root, identity)
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # another process has just removed it
            fd = open_file(folder / "users")
            try:
                # A process that removes it holds the lock for a moment.
                fcntl.flock(fd, fcntl.LOCK_SH)
                if _is_same(fd, folder / "users"):
                    os.utime(fd)
                    return folder, fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)


def is_of_one_pod(root: Path, environ: Mapping[str, str]) -> bool:
    """Return whether it is in the folder that a job client's pod, this one, has for itself.

    What that folder, or one within, is a link to is shared.
    """
    above, own = os.path.split(environ.get(_POD_FOLDER, ""))
    return bool(own) and Path(os.path.realpath(root)).is_relative_to(
        Path(os.path.realpath(above), own)
    )


def open_file(path: Path) -> int:
    """Open a file to read and write, and create it if it is missing. Raises: OSError."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)


def used_bytes(root: Path, *, besides: Path) -> int:
    """Return the size of all folders except one."""
    return sum(_size(folder) for folder in _folders(root) if folder != besides)


def evict(root: Path, most_bytes: int, *, besides: Path) -> None:
    """Remove folders that no process uses, longest unused first, until the others fit."""
    for gone in root.glob(f"{_GONE}*"):  # left behind by a process that was killed
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
        folder.rename(gone)  # from now on other processes create a new one
    except OSError:
        return  # in use, or another process removes it
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
