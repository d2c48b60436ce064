"""Store checkpoints in a local folder or at any fsspec URL. Few verbs, so both behave alike."""

import contextlib
import errno
import fcntl
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from pod_runtime.env import POD_FOLDER
from pod_runtime.trainer.errors import CheckpointError, UsageError

Chunk = bytes | memoryview
# Sync so often: else the last fsync may take minutes and look like a disk that does not answer.
_SYNC_BYTES = 256 << 20

_LOCK_S = 5.0  # longer than any holder needs, unless it was stopped while it held the lock
_LOCK_PAUSE_S = 0.01

# From file systems, as some over a network, that sync files and know no such thing for a folder.
_NO_FOLDER_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF})


def check_outlives_pod(path: str | os.PathLike[str], environ: Mapping[str, str]) -> None:
    """See that a path of checkpoints is not in the folder that this process's pod has for itself.

    Each pod has another: what follows it would begin anew, with the checkpoints beside it.

    Raises:
        UsageError: it is there.
    """
    text, folder = os.fspath(path), environ.get(POD_FOLDER)
    # Where a relative path leads has no links in it, and --pod_path may have some. What the pod's
    # folder itself, or one within, is a link to is shared.
    above, own = os.path.split(folder or "")
    its = Path(os.path.realpath(above), own)
    if folder and "://" not in text and Path(os.path.realpath(text)).is_relative_to(its):
        raise UsageError(
            f"checkpoint: {text} is in {folder}, the folder of this pod alone: pods that come "
            f"later have others, and would begin the training anew. Give an absolute path that "
            f"all pods of the job share"
        )


def absolute(location: str | os.PathLike[str]) -> str:
    """Return a location that means the same in any folder, to which a script may change."""
    text = os.fspath(location)
    return text if "://" in text else os.path.abspath(text)


class Storage(Protocol):
    """Paths are relative to a root and use `/`."""

    name: str  # of the root, for messages

    def folders(self, path: str) -> list[str]:
        """Return the names of the folders in `path`; none where it does not exist."""

    def files(self, path: str) -> list[str]:
        """Return the names of the files in `path`; none where it does not exist."""

    def read(self, path: str) -> bytes:
        """Return a file's content. Raises FileNotFoundError, OSError."""

    def write(self, path: str, chunks: Iterable[Chunk]) -> None:
        """Write a file so that it survives a power cut; its folder is made. Raises OSError."""

    def commit(self, path: str, content: bytes) -> None:
        """Write a file that appears whole or not at all, after all others of its folder."""

    def remove(self, path: str) -> None:
        """Remove a file, or a folder with all that is in it; nothing happens where none is."""


def open_storage(location: str | os.PathLike[str]) -> Storage:
    """Return the storage of a local path or of an fsspec URL such as `s3://bucket/run`.

    Raises:
        CheckpointError: nothing installed understands the URL.
    """
    text = os.fspath(location)
    scheme, separator, rest = text.partition("://")
    if not separator:
        return LocalStorage(Path(text))
    if scheme in ("file", "local"):
        return LocalStorage(Path(rest))
    try:
        import fsspec

        filesystem, root = fsspec.core.url_to_fs(text)
    except (ImportError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint: {text!r} cannot be opened: {error}; "
            f"give a local path, or install the fsspec package for {scheme}"
        ) from error
    # Of a name that ends in "/", a folder below would have "//": another one, in an object store.
    return FsspecStorage(filesystem, root, text.rstrip("/") if rest.strip("/") else text)


class LocalStorage:
    """A folder of this machine, or of a shared file system that is mounted."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.name = str(root)

    def folders(self, path: str) -> list[str]:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return sorted(each.name for each in os.scandir(self.root / path) if each.is_dir())
        return []

    def files(self, path: str) -> list[str]:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return sorted(each.name for each in os.scandir(self.root / path) if each.is_file())
        return []

    def read(self, path: str) -> bytes:
        return (self.root / path).read_bytes()

    def write(self, path: str, chunks: Iterable[Chunk]) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        waiting = 0
        with target.open("wb") as file:
            for chunk in chunks:
                file.write(chunk)
                waiting += len(chunk)
                if waiting > _SYNC_BYTES:
                    waiting = 0
                    file.flush()
                    os.fdatasync(file.fileno())
            file.flush()
            os.fsync(file.fileno())

    def commit(self, path: str, content: bytes) -> None:
        target = self.root / path
        temporary = f"{path}.{os.getpid()}.part"  # two trainings may claim a folder at once
        try:
            self.write(temporary, [content])
            _fsync_folder(target.parent)
            (self.root / temporary).replace(target)
        except OSError:  # a full disk
            self.remove(temporary)
            raise
        while target != self.root:
            target = target.parent
            _fsync_folder(target)

    def remove(self, path: str) -> None:
        target = self.root / path
        if target.is_dir():
            shutil.rmtree(target, ignore_errors=True)
        else:
            target.unlink(missing_ok=True)


class FsspecStorage:
    """An object store or a remote file system. A file appears there when it is closed."""

    def __init__(self, filesystem: Any, root: str, name: str) -> None:
        self.filesystem = filesystem
        self.root = root.rstrip("/")
        self.name = name

    def folders(self, path: str) -> list[str]:
        return self._names(path, "directory")

    def files(self, path: str) -> list[str]:
        return self._names(path, "file")

    def read(self, path: str) -> bytes:
        with _as_os_errors():
            content: bytes = self.filesystem.cat_file(self._full(path))
        return content

    def write(self, path: str, chunks: Iterable[Chunk]) -> None:
        full = self._full(path)
        with _as_os_errors():
            self.filesystem.makedirs(full.rpartition("/")[0], exist_ok=True)
            with self.filesystem.open(full, "wb") as file:
                for chunk in chunks:
                    file.write(chunk)

    def commit(self, path: str, content: bytes) -> None:
        self.write(path, [content])

    def remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError), _as_os_errors():
            self.filesystem.rm(self._full(path), recursive=True)

    def _full(self, path: str) -> str:
        return f"{self.root}/{path}" if path else self.root

    def _names(self, path: str, kind: str) -> list[str]:
        try:
            with _as_os_errors():
                self.filesystem.invalidate_cache()
                entries = self.filesystem.ls(self._full(path), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(
            each["name"].rstrip("/").rpartition("/")[2] for each in entries if each["type"] == kind
        )


@contextlib.contextmanager
def _as_os_errors() -> Iterator[None]:
    """Raise an OSError for what a file system raises: each library has errors of its own.

    Where an object store is away, botocore's and others' are none: callers would take it for
    something else than a path that cannot be read or written.
    """
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


@contextlib.contextmanager
def exclusive(storage: Storage) -> Iterator[None]:
    """Exclude other callers on this machine; between machines it promises nothing.

    For what takes milliseconds: who waits too long goes on without.
    """
    fd = None
    if isinstance(storage, LocalStorage):
        with contextlib.suppress(OSError):  # a folder that cannot be made cannot be written either
            storage.root.mkdir(parents=True, exist_ok=True)
            fd = os.open(storage.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            _lock(fd)
    try:
        yield
    finally:
        if fd is not None:
            with contextlib.suppress(OSError):
                # Not by `close` alone: a worker that was forked just now has it open, too.
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)


def _lock(fd: int) -> None:
    """Lock a folder, for as long as it is open. Raises OSError where that does not exist (NFS)."""
    deadline = time.monotonic() + _LOCK_S
    while time.monotonic() < deadline:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOCK_PAUSE_S)
        else:
            return


def _fsync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(fd)
