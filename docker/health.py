"""Whether this container is well: exit code 0, or 1 and the reason. Run by its health check.

A job client is well as long as it lives: it waits for a server that is away, and its pods train on
meanwhile, so that nothing may restart it for that. Standard library only.
"""

import fcntl
import os
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path

TIMEOUT_S = 4.0  # the health check gives up after 5 s


def trouble(environ: Mapping[str, str]) -> str:
    """Return what is wrong; "" if nothing is."""
    state = Path(environ.get("EDL_STATE_DIR", "/state"))
    try:
        role, *port = (state / ".role").read_text().split()
    except FileNotFoundError:
        return ""  # some other command, which speaks for itself by its exit
    if role == "server":
        return _does_not_answer(f"http://127.0.0.1:{port[0]}/api/v1/health", environ)
    if role == "teacher":
        return _does_not_answer(f"http://127.0.0.1:{port[0]}/v2/health/ready", environ)
    if role == "discovery":
        return _does_not_answer(f"http://127.0.0.1:{port[0]}/health", environ)
    if role == "client":
        return _has_no_client(state / "pod_log" / "lock")
    return ""


def _does_not_answer(url: str, environ: Mapping[str, str]) -> str:
    request = urllib.request.Request(url)
    try:
        token = _token(environ)
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


def _token(environ: Mapping[str, str]) -> str:
    name = environ.get("EDL_TOKEN_FILE")
    return Path(name).read_text().strip() if name else environ.get("EDL_TOKEN", "")


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
