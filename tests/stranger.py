"""Another user of this machine: a process with another uid, which asks a server and reads files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

_NOBODY = 65534
_PROGRAM = f"""
import encodings.idna, os, sys, urllib.error, urllib.request  # all now: they may be ours alone
os.setgroups([]); os.setgid({_NOBODY}); os.setuid({_NOBODY})
what, name = sys.argv[1:]
try:
    if what == "read":
        print("read", len(open(name).read()))
    else:
        request = urllib.request.Request(name, method=what)
        print(urllib.request.build_opener(urllib.request.ProxyHandler({{}})).open(request).status)
except urllib.error.HTTPError as error:
    print(error.code)
except OSError as error:
    print(type(error).__name__)
"""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def asks(method: str, url: str) -> int:
    """Return the HTTP status that another user of this machine gets."""
    return int(_run(method, url))


def reads(path: Path) -> str:
    """Return what another user gets who opens a file: `read N`, or the name of the error."""
    return _run("read", str(path))


def _run(*args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *args], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
