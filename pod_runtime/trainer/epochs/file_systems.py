"""The file systems of the original's calls: LocalFS, HDFSClient, and objects with their methods.

`storage_for` turns any of them, an fsspec file system or a URL into the storage that checkpoints
are written to.
"""

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pod_runtime.trainer.epochs.client_storage import ClientStorage, Retry, RetryingStorage
from pod_runtime.trainer.errors import CheckpointError, UsageError
from pod_runtime.trainer.state.storage import (
    FsspecStorage,
    LocalStorage,
    Storage,
    check_outlives_pod,
    open_storage,
)

T = TypeVar("T")

_CLIENT_VERBS = ("is_exist", "is_dir", "ls_dir", "mkdirs", "delete", "upload", "download")
_PORTS = {"hdfs": 8020, "webhdfs": 9870}


def storage_for(path: str | os.PathLike[str], fs: Any = None) -> Storage:
    """Return the storage of `path` in `fs`.

    Args:
        path: in the file system; without `fs` a local folder or an fsspec URL.
        fs: None, `LocalFS`, `HDFSClient`, an fsspec file system, the URL of one, or an object with
            the methods of Paddle's `fs` classes (1.8 or 2.x).

    Raises:
        UsageError: `fs` is none of these, or does not fit `path`.
        CheckpointError: what the file system needs is not installed.
    """
    text = os.fspath(path)
    if not text:
        raise UsageError("path: is empty; give a folder or a URL")
    if fs is None:
        check_outlives_pod(text, os.environ)
        return _guarded(open_storage(text))
    if isinstance(fs, str):
        if "://" not in fs:
            raise UsageError(
                f"fs: expected an object or a URL such as hdfs://host:8020, got {fs!r}"
            )
        scheme, _, root = fs.partition("://")
        url = f"{scheme}://{root.rstrip('/')}/{text.lstrip('/')}"
        return _guarded(open_storage(text if "://" in text else url))
    if isinstance(fs, HDFSClient):
        filesystem = fs.filesystem
        inner = FsspecStorage(filesystem, filesystem._strip_protocol(text), f"{fs.name}{text}")
        return RetryingStorage(inner, fs.retry)
    if callable(getattr(fs, "cat_file", None)) and callable(getattr(fs, "ls", None)):
        return _guarded(FsspecStorage(fs, fs._strip_protocol(text), f"{type(fs).__name__}:{text}"))
    missing = [verb for verb in _CLIENT_VERBS if not callable(getattr(fs, verb, None))]
    if missing:
        raise UsageError(
            f"fs: {type(fs).__name__} has no {', '.join(missing)}; give LocalFS(), "
            f"HDFSClient(...), an fsspec file system, or a URL"
        )
    needs_copies = getattr(fs, "need_upload_download", None)
    if needs_copies is not None and not needs_copies():
        if "://" in text:
            raise UsageError(f"fs: {type(fs).__name__} cannot reach {text}; leave fs out")
        check_outlives_pod(text, os.environ)
        return LocalStorage(Path(text))
    return ClientStorage(fs, text)


def _guarded(storage: Storage) -> Storage:
    """Return a storage whose errors are OSErrors."""
    if isinstance(storage, LocalStorage):
        return storage
    return RetryingStorage(storage, Retry(0.0, 0.0))  # fsspec's clients repeat by themselves


class _FsspecClient:
    """The methods of Paddle's `fs` classes, done by fsspec. Errors are OSErrors."""

    filesystem: Any

    def is_exist(self, fs_path: str) -> bool:
        return self._kind(fs_path) is not None

    def is_dir(self, fs_path: str) -> bool:
        return self._kind(fs_path) == "directory"

    def is_file(self, fs_path: str) -> bool:
        return self._kind(fs_path) == "file"

    def ls_dir(self, fs_path: str) -> tuple[list[str], list[str]]:
        """Return the names of the folders and of the files in a folder; none where it is not."""
        try:
            entries = self._do(lambda: self.filesystem.ls(fs_path, detail=True))
        except FileNotFoundError:
            return [], []
        folders: list[str] = []
        files: list[str] = []
        for entry in entries:
            name = entry["name"].rstrip("/").rpartition("/")[2]
            (folders if entry["type"] == "directory" else files).append(name)
        return folders, files

    def list_dirs(self, fs_path: str) -> list[str]:
        return self.ls_dir(fs_path)[0]

    def mkdirs(self, fs_path: str) -> None:
        self._do(lambda: self.filesystem.makedirs(fs_path, exist_ok=True))

    def delete(self, fs_path: str) -> None:
        """Remove a file, or a folder with all that is in it; nothing happens where none is."""
        with contextlib.suppress(FileNotFoundError):
            self._do(lambda: self.filesystem.rm(fs_path, recursive=True))

    def mv(self, fs_src_path: str, fs_dst_path: str, overwrite: bool = False) -> None:
        if overwrite:
            self.delete(fs_dst_path)
        elif self.is_exist(fs_dst_path):
            raise FileExistsError(f"{fs_dst_path} exists; pass overwrite=True")
        self._do(lambda: self.filesystem.mv(fs_src_path, fs_dst_path, recursive=True))

    def rename(self, fs_src_path: str, fs_dst_path: str) -> None:
        self.mv(fs_src_path, fs_dst_path)

    def upload(self, local_path: str, fs_path: str) -> None:
        """Copy a local file, or a folder, to `fs_path`."""
        if os.path.isdir(local_path):
            self._do(lambda: self.filesystem.put(local_path, fs_path, recursive=True))
        else:
            self._do(lambda: self.filesystem.put_file(local_path, fs_path))

    def download(self, fs_path: str, local_path: str) -> None:
        """Copy a file, or a folder, to `local_path`."""
        if self.is_dir(fs_path):
            self._do(lambda: self.filesystem.get(fs_path, local_path, recursive=True))
        else:
            self._do(lambda: self.filesystem.get_file(fs_path, local_path))

    def touch(self, fs_path: str, exist_ok: bool = True) -> None:
        if self.is_exist(fs_path):
            if not exist_ok:
                raise FileExistsError(f"{fs_path} exists")
            return
        self._do(lambda: self.filesystem.pipe_file(fs_path, b""))

    def cat(self, fs_path: str) -> str:
        content: bytes = self._do(lambda: self.filesystem.cat_file(fs_path))
        return content.decode()

    def _kind(self, fs_path: str) -> str | None:
        # fsspec's exists() and isdir() return False where the file system cannot be reached.
        try:
            return str(self._do(lambda: self.filesystem.info(fs_path))["type"])
        except FileNotFoundError:
            return None

    def _do(self, call: Callable[[], T]) -> T:
        return call()


class LocalFS(_FsspecClient):
    """This machine's files, or a shared file system that is mounted."""

    def __init__(self) -> None:
        import fsspec

        self.filesystem = fsspec.filesystem("file")

    def need_upload_download(self) -> bool:
        return False


class HDFSClient(_FsspecClient):
    """Hadoop's file system, through fsspec: by libhdfs, or over HTTP where there is none.

    Calls that fail for a reason that may pass are repeated, as in the original.
    """

    def __init__(
        self,
        hdfs_name: str,
        hdfs_ugi: str | Mapping[str, str] = "",
        time_out: float = 5 * 60 * 1000,
        sleep_inter: float = 1000,
    ) -> None:
        """Nothing is connected yet.

        Args:
            hdfs_name: hdfs://HOST:PORT (needs pyarrow and Hadoop's libhdfs), or
                webhdfs://HOST:PORT, which needs neither.
            hdfs_ugi: "USER" or "USER,PASSWORD"; the password counts for webhdfs only. Paddle's
                own form, a Hadoop home followed by a dictionary with `fs.default.name` and
                `hadoop.job.ugi`, is taken as well.
            time_out: milliseconds after which a call that keeps failing is given up.
            sleep_inter: milliseconds between two tries.

        Raises:
            UsageError: an argument is malformed.
        """
        if isinstance(hdfs_ugi, Mapping):
            hdfs_name = hdfs_ugi.get("fs.default.name", "")
            hdfs_ugi = hdfs_ugi.get("hadoop.job.ugi", "")
        parts = urlsplit(hdfs_name)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in _PORTS or not parts.hostname or port == -1:
            raise UsageError(
                f"hdfs_name: expected hdfs://HOST:PORT or webhdfs://HOST:PORT, got {hdfs_name!r}"
            )
        for name, value in (("time_out", time_out), ("sleep_inter", sleep_inter)):
            if not 0 <= value < float("inf"):
                raise UsageError(f"{name}: expected milliseconds, 0 or more, got {value!r}")
        self.name = hdfs_name.rstrip("/")
        self.retry = Retry(time_out / 1000, sleep_inter / 1000)
        self._scheme = parts.scheme
        user, _, password = hdfs_ugi.partition(",")
        self._options: dict[str, Any] = {
            "host": parts.hostname,
            "port": port or _PORTS[parts.scheme],
        }
        if user:
            self._options["user"] = user
        if password and parts.scheme == "webhdfs":
            self._options["password"] = password
        self._filesystem: Any = None  # None: nothing has been asked for yet

    @property
    def filesystem(self) -> Any:
        """The fsspec file system.

        Raises:
            CheckpointError: what it needs is not installed.
        """
        if self._filesystem is None:
            self._filesystem = self.retry(self._connect)
        return self._filesystem

    def need_upload_download(self) -> bool:
        return True

    def _connect(self) -> Any:
        try:
            import fsspec

            return fsspec.filesystem(self._scheme, **self._options)
        except (ImportError, OSError) as error:
            if isinstance(error, OSError) and not _is_about_libraries(error):
                raise
            raise CheckpointError(
                f"{self.name}: {error}; hdfs:// needs `pip install pyarrow`, a Java runtime and "
                f"Hadoop's libhdfs (HADOOP_HOME, JAVA_HOME and CLASSPATH set); "
                f"webhdfs://HOST:9870 needs none of these"
            ) from error

    def _do(self, call: Callable[[], T]) -> T:
        return self.retry(call)


def _is_about_libraries(error: OSError) -> bool:
    return any(word in str(error) for word in ("libhdfs", "libjvm", "JAVA_HOME", "HADOOP_HOME"))
