"""Chaos as a program: its plan follows from the seed, and a run of it holds."""

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos import plan
from benchmarks.chaos.__main__ import parse_args
from benchmarks.chaos.faults import Faults
from benchmarks.chaos.histories import run_history
from job_server.api.wire import JobState, JobStatus
from tests.scripts.statuses import status

ROOT = Path(__file__).resolve().parents[2]


def first(count: int, seed: int, only: tuple[str, ...] = plan.KINDS) -> list[plan.Action]:
    return list(itertools.islice(plan.actions(seed, only), count))


def test_what_is_done_follows_from_the_seed_alone():
    assert first(50, 7) == first(50, 7)
    assert first(50, 7) != first(50, 8)


def test_everything_happens_sooner_or_later_in_every_phase():
    found = first(3000, 1)
    assert {action.kind for action in found} == set(plan.KINDS)
    assert {action.phase for action in found} == {"", *plan.PHASES}
    assert {action.kind for action in first(50, 1, ("resize",))} == {"resize"}


def test_a_replay_does_not_write_over_what_it_replays():
    assert str(parse_args(["--seed", "7"]).log) == "chaos-7.jsonl"
    again = parse_args(["--replay", "kept/chaos-7.jsonl"])
    assert (str(again.log), str(again.keep)) == ("chaos-7-again.jsonl", "chaos-7-again")


def test_a_history_that_does_not_hold_is_a_line_with_its_seed(tmp_path, monkeypatch):
    def fail(_story: object) -> None:
        raise AssertionError("lost")

    assert run_history(tmp_path, 3) == ""
    monkeypatch.setattr("tests.job_server.stories.Story.finish", fail)
    assert run_history(tmp_path, 3).startswith("history 3: AssertionError: lost (fail, ")
    assert list(tmp_path.iterdir()) == []


class TrainingCluster:
    """One job with a checkpoint; each look at it finds what comes next, then the last again."""

    def __init__(self, folder: Path, *looks: JobStatus | None) -> None:
        self.disk, self.specs, self._looks = folder, {"one": looks}, list(looks)
        (self.checkpoint("one") / "stage_00000001" / "step_0000000003").mkdir(parents=True)

    def checkpoint(self, job_id: str) -> Path:
        return self.disk / job_id

    def job(self, job_id: str) -> JobStatus | None:
        return self._looks.pop(0) if len(self._looks) > 1 else self._looks[0]


@pytest.mark.parametrize(
    ("looks", "is_gone"),
    [
        pytest.param([status(step=70), status(step=71)], True, id="trains"),
        pytest.param([status(step=70), status(step=70)], False, id="makes no step"),
        pytest.param([status(state=JobState.PAUSED)], False, id="is paused"),
        pytest.param(
            [status(step=70), status(step=71, state=JobState.RECOVERING)], False, id="recovers"
        ),
        pytest.param([None], False, id="its server is away"),
    ],
)
def test_only_checkpoints_of_a_job_that_trains_are_spoiled(looks, is_gone, tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.chaos.faults._STEP_S", 0.0)
    cluster: Any = TrainingCluster(tmp_path, *looks)
    faults = Faults(cluster, lambda _: None, lambda *_: None)
    said = faults.do(replace(first(1, 1, ("delete checkpoints",))[0], phase=""))
    assert (cluster.checkpoint("one") / "stage_00000001").exists() != is_gone
    assert ("one" in faults.spoiled) == is_gone
    assert ("does not train" in said) != is_gone


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("framework", ["torch", "paddle"])
def test_a_minute_of_chaos_loses_nothing_leaves_nothing_and_is_replayed(tmp_path, framework):
    pytest.importorskip(framework)
    log, again = tmp_path / "log", tmp_path / "again"
    chaos = [sys.executable, "-m", "benchmarks.chaos", "--keep", str(tmp_path / "kept"), "--log"]
    options = ["--minutes", "0.5", "--framework", framework, "--step_s", "0.04"]
    runs = ([str(log), "--seed", "1", *options], [str(again), "--replay", str(log)])
    for arguments in runs:
        done = subprocess.run(
            [*chaos, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "goodput" in done.stdout
    assert actions_of(again) == actions_of(log)
    head, head_again = (path.read_text().splitlines()[0] for path in (log, again))
    assert head == head_again


def actions_of(log: Path) -> list[object]:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [line["action"] for line in lines if "action" in line]
