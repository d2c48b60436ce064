"""The benchmarks of elasticity run, end what they start, and lose no step; speed is no matter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks import resize
from tests.support import wait_until

ROOT = Path(resize.__file__).resolve().parents[1]


def run(tmp_path: Path, *command: str) -> dict[str, dict[str, float]]:
    """Run a benchmark; return the values of each row's sample."""
    figures = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, *command, "--out", str(tmp_path), "--json", str(figures)],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=270,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    samples = json.loads(figures.read_text())["samples"]
    assert [sample["failed"] for sample in samples] == [""] * len(samples), done.stdout
    wait_until(lambda: not processes_of(tmp_path), what="its processes have ended")
    return {sample["row"]: sample["values"] for sample in samples}


def processes_of(folder: Path) -> list[list[str]]:
    """Processes whose command line or environment names `folder`."""
    found = []
    for process in psutil.process_iter():
        try:
            texts = [*process.cmdline(), *process.environ().values()]
            if process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found += [process.cmdline()] if any(str(folder) in text for text in texts) else []
        except psutil.Error:
            continue
    return found


@pytest.mark.timeout(300)
def test_random_planned_changes_redo_no_step(tmp_path: Path):
    values = run(tmp_path, "benchmarks/resize.py", "--only", "random", "--changes", "6")["random"]
    assert values["changes"] == 6
    assert values["redone"] == values["redone_by_server"] == 0
    assert values["proved"] == 1
    assert values["pause_s"] > 0


@pytest.mark.timeout(300)
def test_a_kill_and_a_server_that_goes_are_measured(tmp_path: Path):
    rows = ["--only", "kill-cold,server", "--rounds", "1", "--server_away_s", "1"]
    found = run(tmp_path, "benchmarks/recovery.py", *rows)
    assert found["kill-cold"]["again_s"] > 0
    assert found["kill-cold"]["regained_s"] >= found["kill-cold"]["again_s"]
    assert found["server"]["redone"] == 0
    assert found["server"]["generations"] == 1
    assert found["server"]["steps_meanwhile"] > 0


def test_a_peer_without_its_interpreter_is_left_out_and_the_reason_said(tmp_path: Path):
    done = subprocess.run(
        [
            sys.executable, "benchmarks/resize.py", "--only", "torchrun-default,paddle-tuned",
            "--paddle_python", str(tmp_path / "none"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "torchrun-default: left out: no --torch_python" in done.stdout
    assert "paddle-tuned: left out: [Errno 2]" in done.stdout
    assert "0 measurements" in done.stdout
