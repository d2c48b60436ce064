"""The comparison with data parallel training runs, and says what it has found."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.promises import report

ROOT = Path(__file__).resolve().parents[2]


def test_a_report_has_each_ways_speed_and_its_ratio_to_the_plain_one():
    ways = {"ms": 20.0, "cpu_ms": 10.0, "images_per_s": 4800.0}
    text = report(
        {
            "framework": "torch", "model": "lenet", "trainers": 2, "batch": 96,
            "ways": {"statistics": ways},
            "ratios": {"statistics to plain": {"wall": (1.02, 1.01, 1.03), "cpu": (0.99, 0.9, 1)}},
        }
    )  # fmt: skip
    assert text.splitlines() == [
        "torch, lenet, batch 96, 2 trainers",
        "  statistics                   20.00 ms a step,   4800.0 images/s, processor    10.00 ms",
        "  statistics to plain: wall +2.00 % (+1.00 to +3.00), cpu -1.00 % (-10.00 to +0.00)",
    ]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("framework", ["torch", "paddle"])
def test_two_trainers_take_turns_with_the_frameworks_data_parallel_training(tmp_path, framework):
    pytest.importorskip(framework)
    command = [
        sys.executable, "benchmarks/promises.py", "--framework", framework, "--trainers", "2",
        "--batch", "12", "--rounds", "2", "--steps", "2", "--warm", "1", "--shards", "2",
        "--json", str(tmp_path / "found.json"),
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "TMPDIR": str(tmp_path)}, capture_output=True,
        text=True, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    ours, plain = ("statistics", "rounding, 2 shards"), ("plain", "plain, settings")
    assert set(found["ways"]) == {*ours, *plain}
    assert set(found["ratios"]) == {f"{way} to {other}" for way in ours for other in plain}
