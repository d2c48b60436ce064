"""Storage over clients whose calls may fail for a while, or that only copy files."""

import logging
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from pod_runtime.trainer.errors import ElasticError
from pod_runtime.trainer.state.storage import Chunk, LocalStorage, Storage

logger = logging.getLogger(__name__)

T = TypeVar("T")

_NOT_TRANSIENT = (
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)


class Retry:
    """Repeats a call that fails for a reason that may pass; the last failure becomes an OSError."""

    def __init__(self, timeout_s: float, pause_s: float) -> None:
        self.timeout_s = timeout_s
        self.pause_s = pause_s

    def __call__(self, call: Callable[[], T]) -> T:
        deadline = time.monotonic() + self.timeout_s
        while True:
            try:
                return call()
            except (*_NOT_TRANSIENT, ElasticError):
                raise
            except Exception as error:
                # Each library behind fsspec has exceptions of its own, unknown here.
                may_pass = isinstance(error, OSError | RuntimeError)
                if not may_pass or time.monotonic() + self.pause_s >= deadline:
                    if isinstance(error, OSError):
                        raise
                    raise OSError(f"{type(error).__name__}: {error}") from error
                logger.warning("%s; tried again in %g s", error, self.pause_s)
                time.sleep(self.pause_s)


class RetryingStorage:
    """A storage whose calls are repeated when they fail for a reason that may pass."""

    def __init__(self, inner: Storage, retry: Retry) -> None:
        self.inner = inner
        self.name = inner.name
        self._retry = retry

    def folders(self, path: str) -> list[str]:
        return self._retry(lambda: self.inner.folders(path))

    def files(self, path: str) -> list[str]:
        return self._retry(lambda: self.inner.files(path))

    def read(self, path: str) -> bytes:
        return self._retry(lambda: self.inner.read(path))

    def write(self, path: str, chunks: Iterable[Chunk]) -> None:
        kept = list(chunks)  # views of the state, not copies; a second try needs them again
        self._retry(lambda: self.inner.write(path, kept))

    def commit(self, path: str, content: bytes) -> None:
        self._retry(lambda: self.inner.commit(path, content))

    def remove(self, path: str) -> None:
        self._retry(lambda: self.inner.remove(path))


class ClientStorage:
    """Storage through an object with the methods of Paddle's `fs` classes, by copies of files."""

    def __init__(self, client: Any, root: str) -> None:
        self._client = client
        self._root = root.rstrip("/") or "/"
        self.name = f"{type(client).__name__}:{root}"

    def folders(self, path: str) -> list[str]:
        return self._list(path)[0]

    def files(self, path: str) -> list[str]:
        return self._list(path)[1]

    def read(self, path: str) -> bytes:
        full = self._full(path)
        if not self._call("is_exist", full):
            raise FileNotFoundError(full)
        with tempfile.TemporaryDirectory(prefix="edl-") as folder:
            local = Path(folder) / "file"
            self._call("download", full, str(local))
            return local.read_bytes()

    def write(self, path: str, chunks: Iterable[Chunk]) -> None:
        full = self._full(path)
        with tempfile.TemporaryDirectory(prefix="edl-") as folder:
            local = Path(folder) / full.rpartition("/")[2]
            LocalStorage(Path(folder)).write(local.name, chunks)
            parent = full.rpartition("/")[0]
            if not self._call("is_exist", parent):
                self._call("mkdirs", parent)
            if self._call("is_exist", full):
                self._call("delete", full)
            self._call("upload", str(local), full)

    def commit(self, path: str, content: bytes) -> None:
        self.write(f"{path}.part", [content])
        verb = "mv" if callable(getattr(self._client, "mv", None)) else "rename"
        full = self._full(path)
        if self._call("is_exist", full):
            self._call("delete", full)
        self._call(verb, f"{full}.part", full)

    def remove(self, path: str) -> None:
        full = self._full(path)
        if self._call("is_exist", full):
            self._call("delete", full)

    def _list(self, path: str) -> tuple[list[str], list[str]]:
        full = self._full(path)
        if not self._call("is_exist", full):
            return [], []
        listed = self._call("ls_dir", full)
        if isinstance(listed, tuple):  # Paddle 2: folders, files
            folders, files = ([_base(name) for name in part] for part in listed)
        else:  # Paddle 1.8: all names, or paths, in one list
            names = [_base(name) for name in listed]
            folders = [name for name in names if self._call("is_dir", f"{full}/{name}")]
            files = [name for name in names if name not in folders]
        return sorted(folders), sorted(files)

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def _call(self, verb: str, *args: str) -> Any:
        try:
            return getattr(self._client, verb)(*args)
        except OSError:
            raise
        except Exception as error:  # each client has exceptions of its own, unknown here
            raise OSError(f"{self.name}: {verb} {args[-1]}: {error!r}") from error


def _base(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2]
