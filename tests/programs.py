"""Code that tests run in a Python of its own. Tests that import this are not of the fast lane."""

import subprocess
import sys

from tests.support import ROOT


def run_code(code: str, *args: str, timeout_s: float = 60.0) -> str:
    """Return what the code prints. The test fails when it does not exit with 0."""
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def loaded_by(*modules: str) -> set[str]:
    """Return the names of all packages that a process has once it has imported these modules."""
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    return {name.split(".")[0] for name in run_code(code).split()}
