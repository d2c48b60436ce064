"""Run the program that writes what shims hold as a checkpoint, `pod_runtime.save`, and read it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from job_server.api.wire import Save, SaveState, WireError, decode


def start(
    order: Save, pod_dirs: Iterable[Path], environment: Mapping[str, str]
) -> subprocess.Popen[str]:
    """Start the program; it ends with this process. Its `stdout` is what it prints, and errors.

    Raises:
        OSError: it cannot be started.
    """
    command = [sys.executable, "-m", "pod_runtime.save", "--id", str(order.id)]
    command += ["--parent", str(os.getpid()), *(["--spare"] if order.spare else [])]
    return subprocess.Popen(
        [*command, *map(str, pod_dirs)],
        env=environment,
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",  # a library's warning may be in any encoding
        start_new_session=True,  # a Ctrl-C is for the one who has started it
    )


def read_line(line: str) -> SaveState | None:
    """Return what a line that it prints says; None: it is a warning, or of a traceback."""
    try:
        return decode(SaveState, json.loads(line))
    except (ValueError, WireError):
        return None
