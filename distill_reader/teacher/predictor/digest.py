"""Compute a digest of a model's files. It identifies the version of the model.

A backend puts it into its spec, for the students' caches of soft labels.
"""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from distill_reader.errors import ModelError

_CHUNK_BYTES = 4 << 20
_DIGEST_BYTES = 16

Stamp = tuple[tuple[str, int, int, int], ...]


def stamp(files: Iterable[Path]) -> Stamp:
    """Return a value that changes when a file is written or replaced. Raises: ModelError."""
    try:
        stats = [(str(file), file.stat()) for file in files]
    except OSError as error:
        raise ModelError(f"{error.filename}: {error.strerror}") from error
    return tuple((name, each.st_ino, each.st_size, each.st_mtime_ns) for name, each in stats)


def digest_of(root: str | Path, files: Iterable[Path], *more: str) -> str:
    """Return a hexadecimal digest of the files, of their names relative to `root`, and of `more`.

    Raises:
        ModelError: a file cannot be read.
    """
    total = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for text in more:
        _add(total, text.encode())
    for file in sorted(files):
        own = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        try:
            with file.open("rb") as stream:
                while chunk := stream.read(_CHUNK_BYTES):
                    own.update(chunk)
        except OSError as error:
            raise ModelError(f"{file}: {error.strerror}") from error
        _add(total, os.path.relpath(file, root).encode(errors="surrogateescape"))
        _add(total, own.digest())
    return total.hexdigest()


def _add(total: "hashlib.blake2b", part: bytes) -> None:
    total.update(len(part).to_bytes(8, "little") + part)
