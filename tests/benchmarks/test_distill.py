"""The benchmark measures what it says. Speed does not matter here."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from benchmarks import distill
from benchmarks.distillation import child, raw
from benchmarks.distillation.processes import raw_teachers
from tests.support import wait_until

ROOT = Path(distill.__file__).resolve().parents[1]


@pytest.mark.timeout(500)
def test_rows_of_real_readers_and_teachers_are_written_and_no_process_is_left(tmp_path: Path):
    figures = tmp_path / "figures.json"
    rows = ["1x28x28-64", "grpc-1x28x28-64"]
    command = [sys.executable, "benchmarks/distill.py", "--quick", "--no_original"]
    command += ["--only", ",".join(rows), "--json", str(figures)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    benchmark = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400
    )
    assert benchmark.returncode == 0, benchmark.stdout + benchmark.stderr
    document = json.loads(figures.read_text())
    assert [row["name"] for row in document["rows"]] == rows
    for row in document["rows"]:
        (run,) = row["details"]["ours"]
        assert run["samples_per_s"] > 0
        assert run["cpu_us_per_sample"] > 0
        assert run["wrong"] == 0
        assert row["is_met"] is None, "nothing is met without the original beside it"
    assert "unknown" in benchmark.stdout
    wait_until(lambda: not _processes_of(tmp_path), what="its processes have ended")


def test_the_originals_reader_finds_a_client_that_asks_a_real_teacher(tmp_path: Path):
    config = tmp_path / "config"
    raw.write_config(config, (1, 28, 28))
    with raw_teachers(0.0, tmp_path, count=1) as (teacher,):
        client = raw.Client()
        client.load_client_config(str(config))
        client.connect([teacher.endpoint])
        assert client.get_feed_names() == ["image"]
        for samples in (1, 3000):  # more than one call of the system takes
            images = np.random.default_rng(1).random((samples, 1, 28, 28), np.float32)
            answer = client.predict([{"image": image} for image in images], ["score"])
            np.testing.assert_array_equal(answer["score"][:, 0], images[:, 0, 0, 0])
            assert answer["score"].shape == (samples, 10)
        client.release()


def test_an_answer_of_another_image_is_counted():
    labels = np.arange(4)
    right = np.zeros((4, 10), np.float32)
    right[:, 0] = labels
    wrong = right + 1
    items = itertools.cycle([(None, labels, right), (None, labels, wrong)])
    found = child.measure(items, warm_s=0.0, seconds=0.01, pids=[])
    assert found["wrong"] >= 1
    items = itertools.cycle([(None, labels, right)])
    assert child.measure(items, warm_s=0.0, seconds=0.01, pids=[])["wrong"] == 0


@pytest.mark.parametrize(
    ("ours", "original", "aim", "is_met"),
    [([200, 100, 300], [100], 2.0, True), ([199], [100], 2.0, False), ([200], [], 2.0, None)],
)
def test_a_row_compares_medians_with_its_aim(ours, original, aim, is_met):
    def run(samples_per_s):
        return {"samples_per_s": samples_per_s, "cpu_us_per_sample": 1.0, "others_used": 0.0}

    row = distill._ratio_row("row", [*map(run, ours)], [*map(run, original)], aim)
    assert row.is_met is is_met


def test_a_fault_with_a_lost_batch_is_not_met_however_quick():
    assert distill._fault_row("row", {"gap_s": 0.1, "wrong": 0.0}, "gap_s", 0.3).is_met
    assert not distill._fault_row("row", {"gap_s": 0.4, "wrong": 0.0}, "gap_s", 0.3).is_met
    row = distill._fault_row("row", {"gap_s": 0.1, "wrong": 1.0}, "gap_s", 0.3)
    assert not row.is_met
    assert "WRONG" in row.ours


def test_rows_are_chosen_by_how_they_begin():
    assert distill.chosen_rows(None) == list(distill.ROWS)
    assert distill.chosen_rows("grpc,busy") == ["grpc-1x28x28-64", "grpc-3x224x224-16", "busy"]
    with pytest.raises(SystemExit, match="no row begins so; there are 1x28x28-1"):
        distill.chosen_rows("rgpc")


def _processes_of(folder: Path) -> list[psutil.Process]:
    """Return the processes that have a path in `folder` on their command lines."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(str(folder) in word for word in process.info["cmdline"] or ()):
            found.append(process)
    return found
