"""Many who watch: the short form of benchmarks/watchers.py."""

import json

import pytest

from benchmarks import watchers


@pytest.mark.full
def test_a_change_reaches_everyone_who_watches():
    rounds = watchers.measure(watchers=50, rounds=3)
    assert [len(latencies) for latencies in rounds] == [50, 50, 50]
    assert all(latency > 0 for latencies in rounds for latency in latencies)


def test_the_benchmark_prints_a_table_and_writes_its_figures(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(watchers, "measure", lambda *_args: [[0.1, 0.2], [0.3, 0.4]])
    path = tmp_path / "figures.json"
    monkeypatch.setattr("sys.argv", ["watchers", "--watchers", "2", "--json", str(path)])
    assert watchers.main() == 0
    assert "p99" in capsys.readouterr().out
    figures = json.loads(path.read_text())
    assert figures["max_s"] == figures["p99_s"] == 0.4
    assert figures["p50_s"] == 0.25
