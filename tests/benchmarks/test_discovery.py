"""The benchmark of discovery, in its short form: real servers, Redis, teachers and students."""

import json
import shutil
from pathlib import Path

import pytest

from benchmarks import discovery

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is missing"),
]


def measure(tmp_path: Path, *arguments: str):
    file = tmp_path / "figures.json"
    assert discovery.main([*arguments, "--json", str(file)]) == 0
    return json.loads(file.read_text())["rows"]


@pytest.mark.timeout(600)
def test_with_churn_all_are_fed_and_few_move(tmp_path):
    rows = measure(
        tmp_path, "--only", "churn", "--seconds", "2", "--teachers", "30", "--students", "60"
    )
    figures = rows["churn"]["ours"]
    assert figures["events"] >= 0
    assert figures["fed_share"] > 0.5  # on any machine, however busy
    assert figures["settled_after_s"] < 60


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_rows_of_ours_are_as_they_shall_be(tmp_path):
    rows = measure(tmp_path, "--seconds", "60", "--rounds", "3")
    figures = {name: row["ours"] for name, row in rows.items()}
    assert figures["links"]["links_kept"] == 7
    assert figures["links"]["moves"] <= 1
    assert figures["malformed"]["served_on_after"] == figures["malformed"]["kinds"]
    assert figures["redis"]["links_lost"] == 0
    assert figures["killed"]["links_lost"] == 0
    assert figures["churn"]["fed_share"] > 0.9
