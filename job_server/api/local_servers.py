"""The list of this user's job servers on this machine, by which commands find them.

Each server keeps a small file in a folder that only its user can enter, and a lock on that file
while it lives: a file without one is that of a server that has died, whoever has its pid now.
"""

import contextlib
import fcntl
import logging
import os
import pwd
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from job_server.api.api_client import ApiClient, server_url
from job_server.api.codec import Message, WireError, from_json, to_json
from job_server.api.command_line import read_token, token_in
from job_server.api.errors import ConfigError, NotFound

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 5.0
_LOG_INS = Path("/run/user")  # where systemd makes XDG_RUNTIME_DIR, by the user's number


class LocalServer(Message, frozen=True, kw_only=True):
    """A job server of this user; the content of its file."""

    url: str
    token_file: str | None = None  # None: it wants no token, or was told one without a file
    folder: str = ""  # of its database
    host: str = ""  # the folder of the list may be shared with other machines
    started_at: float = 0.0  # seconds since 1970

    def token(self) -> str | None:
        """Return its token; None: it is not known. Raises ConfigError: the file is not there."""
        if self.token_file is None:
            return None
        return token_in(Path(self.token_file), f"the token of {self.url}")


@contextlib.contextmanager
def listed(
    url: str, *, token_file: Path | None, folder: Path, environ: Mapping[str, str]
) -> Iterator[None]:
    """Keep the server of this process in the list meanwhile.

    Where it cannot be written the log says so, and the server does without.
    """
    server = LocalServer(
        url=url,
        token_file=None if token_file is None else str(token_file.absolute()),
        folder=str(folder.absolute()),
        host=socket.gethostname(),
        started_at=time.time(),
    )
    closing = threading.Event()
    entry = _Entry(server, environ)
    entry.keep()

    def keep() -> None:
        # A log-out removes XDG_RUNTIME_DIR, and a tidy user the cache; the server lives on.
        while not closing.wait(_LOOK_EVERY_S):
            entry.keep()

    thread = threading.Thread(target=keep, name="list of servers", daemon=True)
    thread.start()
    try:
        yield
    finally:
        closing.set()
        thread.join()
        entry.remove()


def local_servers(environ: Mapping[str, str]) -> list[LocalServer]:
    """Return this user's servers on this machine, the oldest first; forget those that have died."""
    found = []
    for folder in _folders(environ):
        if not _is_private(folder):
            continue
        for path in folder.glob("*.json"):
            with contextlib.suppress(OSError):  # it has just gone
                server = _read(path)
                if server is not None:
                    found.append(server)
    return sorted(found, key=lambda server: server.started_at)


def find_server(url: str, environ: Mapping[str, str]) -> LocalServer | None:
    """Return the server at this URL if it is in the list."""
    servers = local_servers(environ)
    return next((each for each in servers if _address(each.url) == _address(url)), None)


def find_servers(named: str | None, environ: Mapping[str, str]) -> list[LocalServer]:
    """Return the server that is named, by --server or PADDLE_JOBSERVER, else all of this user.

    Raises:
        ConfigError: what is named is no server.
        NotFound: there is none.
    """
    named = named or environ.get("PADDLE_JOBSERVER")
    if named:
        try:
            url = server_url(named)
        except ValueError as error:
            raise ConfigError(f"--server: {error}") from None
        return [find_server(url, environ) or LocalServer(url=url)]
    servers = local_servers(environ)
    if not servers:
        raise NotFound(
            "no job server of yours runs on this machine; `edl run` and "
            "scripts/start_job_server.sh start one, --server URL or PADDLE_JOBSERVER names another"
        )
    return servers


def connect(server: LocalServer, token_file: str | None, environ: Mapping[str, str]) -> ApiClient:
    """Return a client with the token of `token_for`; raises as that."""
    return ApiClient(server.url, token_for(server, token_file, environ))


def token_for(
    server: LocalServer, token_file: str | None, environ: Mapping[str, str]
) -> str | None:
    """Return the token of --token_file, else the server's own, else as read_token.

    Raises:
        ConfigError: as `read_token`.
    """
    token = None if token_file else server.token()
    if token is None:
        token = read_token(token_file, environ, private=True)
    return token


def _read(path: Path) -> LocalServer | None:
    """Return the living server of a file; remove the file of a dead one of this machine."""
    with path.open("rb") as file:
        try:
            server = from_json(LocalServer, file.read())
        except WireError:
            server = None  # of another version
        if server is not None and server.host != socket.gethostname():
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return server
        path.unlink(missing_ok=True)
        return None


class _Entry:
    """The file of one server."""

    def __init__(self, server: LocalServer, environ: Mapping[str, str]) -> None:
        self._content, self._environ = to_json(server), environ
        self._name = f"{os.getpid()}-{secrets.token_hex(4)}.json"
        self._path: Path | None = None  # None: there is none
        self._fd = -1  # holds the lock; -1: there is none
        self._logged = False

    def keep(self) -> None:
        """Make the file, or make it again where it has been removed."""
        if self._is_there():
            return
        self.remove()
        trouble: object = "neither XDG_RUNTIME_DIR nor a home is known"
        for folder in _folders(self._environ):
            try:
                self._write(folder)
            except OSError as error:
                trouble = error
            else:
                return
        if not self._logged:
            logger.warning("`edl status` finds this server only by --server: %s", trouble)
        self._logged = True

    def remove(self) -> None:
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
            os.close(self._fd)
        self._path = None

    def _is_there(self) -> bool:
        try:
            return self._path is not None and self._path.exists()
        except OSError:
            return False

    def _write(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_private(folder):
            raise PermissionError(f"{folder} is open to others; chmod 700 it")
        made = folder / f".{self._name}"
        fd = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(fd, self._content)
            made.rename(folder / self._name)
        except OSError:
            os.close(fd)
            made.unlink(missing_ok=True)
            raise
        self._path, self._fd = folder / self._name, fd


def _folders(environ: Mapping[str, str]) -> Iterator[Path]:
    """Yield where the list may be; a server writes to the first that it can.

    A job of cron, or a shell of `su -`, is not told of the folder that a log-in has made; a service
    of the system not even of its user's home.
    """
    runtime = environ.get("XDG_RUNTIME_DIR") or str(_LOG_INS / str(os.geteuid()))
    home = environ.get("HOME") or _known_home()
    cache = environ.get("XDG_CACHE_HOME") or (home and f"{home}/.cache")
    if runtime and Path(runtime).is_dir():  # made by the log-in, never by a program
        yield Path(runtime) / "edl" / "servers"
    if cache:
        yield Path(cache) / "edl" / "servers"


def _known_home() -> str | None:
    """Return the home that this user has by the system's list; None: he is not in it."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:  # in a container, say
        return None


def _is_private(folder: Path) -> bool:
    """Whether nobody else can put a file there, whose server would then get our commands."""
    try:
        info = folder.stat()
    except OSError:
        return False
    return info.st_uid == os.geteuid() and not info.st_mode & 0o077


def _address(url: str) -> tuple[str | None, int | None]:
    try:
        parts = urlsplit(url)
        host = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname
        return host, parts.port
    except ValueError:
        return url, None
