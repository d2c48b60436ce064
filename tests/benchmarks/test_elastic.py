"""The elasticity benchmarks run, stop what they start, and lose no step. Speed does not matter."""

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
        timeout=1100,  # the marks of the tests say less
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
@pytest.mark.slow
def test_random_planned_changes_redo_no_step(tmp_path: Path):
    values = run(tmp_path, "benchmarks/resize.py", "--only", "random", "--changes", "3")["random"]
    assert values["changes"] == 3
    assert values["redone"] == values["redone_by_server"] == 0
    assert values["proved"] == 1
    assert values["pause_s"] > 0


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_a_killed_trainer_is_measured_until_training_is_where_it_was(tmp_path: Path):
    values = run(tmp_path, "benchmarks/recovery.py", "--only", "kill-cold", "--rounds", "1")
    assert values["kill-cold"]["again_s"] > 0
    assert values["kill-cold"]["regained_s"] >= values["kill-cold"]["again_s"]
    assert values["kill-cold"]["trainers"] == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_neither_a_server_that_goes_nor_a_bad_node_costs_a_step(tmp_path: Path):
    rows = ["--only", "server,bad-node,stall,node-cold", "--rounds", "1", "--server_away_s", "5"]
    found = run(tmp_path, "benchmarks/recovery.py", *rows, "--stall_steps", "200")
    for row in ("server", "bad-node"):
        assert found[row]["redone"] == 0
        assert found[row]["generations"] == 1
    assert found["server"]["steps_meanwhile"] > 0
    assert 0 < found["stall"]["share"] < 1
    assert found["node-cold"]["trainers"] == 1


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_pods_are_made_and_changed_by_the_controller_and_without_it(tmp_path: Path):
    values = run(tmp_path, "-m", "benchmarks.kubernetes", "--rounds", "1", "--settle", "5")
    assert values.keys() == {
        "made", "controller join", "controller leave", "plain join", "plain leave",
    }  # fmt: skip
    assert values.pop("made")["made_s"] > 0
    assert [(each["redone"], each["pause_s"] > 0) for each in values.values()] == [(0, True)] * 4


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_hundred_random_planned_changes_redo_no_step(tmp_path: Path):
    values = run(tmp_path, "benchmarks/resize.py", "--only", "random")["random"]
    assert values["changes"] == 200
    assert values["redone"] == values["redone_by_server"] == 0
    assert values["proved"] == 1


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
