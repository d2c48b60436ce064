"""The benchmark measures what it says; its short form takes three minutes.

That the number of teachers follows the students is tried in each run of the tests, in
tests/job_server/teachers/test_teachers_live.py, with reports that come faster than those of a
discovery service.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.teachers_on_demand import AIM, Row, show
from tests.support import ROOT


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_number_of_teachers_follows_real_students_up_and_down(tmp_path: Path):
    figures = tmp_path / "figures.json"
    command = [sys.executable, "benchmarks/teachers_on_demand.py", "--quick", "--json"]
    run = subprocess.run(
        [*command, str(figures)],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    up, down = json.loads(figures.read_text())["rows"]
    assert (up["students"], up["pods"]) == (3, 2), run.stdout
    assert (down["students"], down["pods"]) == (1, 1), run.stdout
    assert up["samples_per_s"] > 0
    assert "by demand" in run.stdout


def test_the_table_says_whether_the_aim_is_met():
    row = Row(students=3, pods=2, samples_per_s=1000.0 * AIM)
    row.numbers = [(0.0, 1), (27.4, 2)]
    row.fixed = {1: [800.0, 810.0], 2: [990.0, 1010.0]}
    assert "95.0%  1 at 0 s, 2 at 27 s" in show([row])
    assert show([row]).endswith("met")
    row.samples_per_s -= 1
    assert show([row]).endswith("missed")
