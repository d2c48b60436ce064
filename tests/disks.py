"""File systems that can be full. Apart, as what imports `subprocess` is not in the fast lane."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Make a folder with a file system of its own, of so much room (`6m`), which can be full.

    Skips the test where none can be mounted, as root alone may.
    """
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield folder
    finally:
        # Lazily: a test that has failed has files open.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
