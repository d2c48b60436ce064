"""What the simulator says of a machine whose figures were measured."""

import json
from pathlib import Path

import pytest

from benchmarks.sharing_prediction import Drawn, draw, predict, read_machine

ROW = {
    "sample_s": 0.004, "samples_per_s": {"1": 48, "2": 96, "4": 192},
    "start_s": 5.0, "change_s": 1.0, "end_s": 2.0,
}  # fmt: skip


@pytest.fixture
def curves(tmp_path: Path) -> Path:
    path = tmp_path / "curves.json"
    path.write_text(json.dumps({"waiting": ROW}))
    return path


def test_a_job_alone_takes_its_start_its_work_and_its_end(curves):
    job = Drawn(job_id="job", submitted_s=3.0, steps=400, min_trainers=1, max_trainers=4)
    took = predict("goodput", [job], read_machine(curves), slots=4)["job"]
    assert took == pytest.approx(5.0 + 400 / 4 + 2.0, rel=0.05)


def test_jobs_ask_for_a_part_of_the_slots_while_they_come(curves):
    machine = read_machine(curves)
    jobs = draw(10, 15.0, 0.8, 6, 1, machine.step_s[1])
    assert jobs[0].submitted_s == 0
    assert jobs[-1].submitted_s < 600
    assert sum(job.steps for job in jobs) == pytest.approx(0.8 * 6 * 600, rel=0.01)
    assert jobs == draw(10, 15.0, 0.8, 6, 1, machine.step_s[1])


def test_without_measured_figures_the_command_is_named(tmp_path):
    with pytest.raises(SystemExit, match=r"sharing_curves\.py --json .* measures it"):
        read_machine(tmp_path / "none.json")
