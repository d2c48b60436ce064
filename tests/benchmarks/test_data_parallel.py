"""The comparison with the frameworks' own data parallel runs, in its shortest form."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["paddle", "torch"])
def test_both_ways_of_two_trainers_are_measured(tmp_path: Path, framework: str):
    pytest.importorskip(framework)
    report = tmp_path / "report.json"
    subprocess.run(
        [
            sys.executable, str(ROOT / "benchmarks" / "data_parallel.py"), "--framework", framework,
            "--runs", "1", "--epochs", "3", "--json", str(report),
        ],
        check=True,
    )  # fmt: skip
    found = json.loads(report.read_text())
    assert found["images_per_s"].keys() == {"elastic", "parallel"}
    assert found["ratio"] == pytest.approx(
        found["images_per_s"]["elastic"] / found["images_per_s"]["parallel"]
    )
