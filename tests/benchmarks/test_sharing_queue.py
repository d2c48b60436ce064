"""Many jobs share a real job server, which is killed in the middle: none is lost."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def check(folder: Path, *args: str) -> dict[str, float]:
    result = subprocess.run(
        [sys.executable, "benchmarks/sharing_queue.py", *args, "--json", str(folder / "found")],
        cwd=ROOT, env={**os.environ, "TMPDIR": str(folder)}, capture_output=True, text=True,
        timeout=1200, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    found: dict[str, float] = json.loads((folder / "found").read_text())
    assert found["succeeded"] == found["jobs"]
    assert found["redone_steps"] == 0
    return found


def test_queued_jobs_run_to_their_ends_though_the_server_is_killed(tmp_path):
    found = check(
        tmp_path, "--jobs", "5", "--nodes", "1", "--kills", "1", "--decisions", "2",
        "--work_s", "1",
    )  # fmt: skip
    assert found["running"] == 2
    assert found["kills"] == 1


@pytest.mark.slow
def test_two_hundred_jobs_wait_and_none_is_lost(tmp_path):
    found = check(tmp_path, "--kills", "10", "--decisions", "5", "--work_s", "2")
    assert (found["running"], found["queued"], found["kills"]) == (20, 200, 10)
