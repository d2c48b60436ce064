"""Check this container's health: exit 0, or 1 and the reason. Its health check runs this.

A job client is well as long as it lives: it waits for a server that is away, and its pods train on
meanwhile, so that nothing may restart it for that. Standard library only.
"""

import fcntl
import os
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

TIMEOUT_S = 4.0  # the health check gives up after 5 s
_TEACHER_TOKENS = ("EDL_TEACHER_TOKEN", "EDL_TOKEN")  # the first one that is set, as they read it
_ASKED = {  # by role: what it is asked for, and the token's names
    "server": ("/api/v1/health", ("EDL_TOKEN",)),
    "teacher": ("/v2/health/ready", _TEACHER_TOKENS),
    "discovery": ("/health", _TEACHER_TOKENS),
}


def trouble(environ: Mapping[str, str]) -> str:
    """Return what is wrong; "" if nothing is."""
    state = Path(environ.get("EDL_STATE_DIR", "/state"))
    try:
        role, *where = (state / ".role").read_text().strip().split(" ")
    except FileNotFoundError:
        return ""  # some other command, which speaks for itself by its exit
    if role == "client":
        return _has_no_client(state / "pod_log" / "lock")
    path, tokens = _ASKED[role]
    return _does_not_answer(url_of(*where) + path, environ, tokens)


def url_of(host: str, port: str) -> str:
    """Return where a program answers that listens on `host`, which may be all of this one's."""
    host = host.strip("[]")
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _does_not_answer(url: str, environ: Mapping[str, str], names: Sequence[str]) -> str:
    request = urllib.request.Request(url)
    try:
        token = _token(environ, names)
    except OSError as error:
        return f"the token cannot be read: {error}"
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=TIMEOUT_S):
            return ""
    except OSError as error:  # a refusal is an HTTPError, which is one of these
        return f"{url}: {error}"


def _token(environ: Mapping[str, str], names: Sequence[str]) -> str:
    for name in names:
        if path := environ.get(f"{name}_FILE"):
            return Path(path).read_text().strip()
        if token := environ.get(name, "").strip():
            return token
    return ""


def _has_no_client(lock: Path) -> str:
    """The client holds this lock from its start to its end."""
    try:
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return ""
    except OSError as error:
        return f"no job client has started: {error}"
    return "the job client has ended"


if __name__ == "__main__":
    sys.exit(trouble(os.environ) or 0)  # a text goes to stderr, and the exit code is 1
