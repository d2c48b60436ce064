"""What a resize should bring and cost, and how that turned out."""

from dataclasses import replace

import pytest

from job_server.api.wire import StageRecord, Way
from job_server.sharing.what_if import hindsight, predict, what_if
from tests.job_server.world import trains, world


def record(
    stage: int, pods: int, step_s: float, *, begin: float, runs: bool = False, **more: object
) -> StageRecord:
    """A stage of a hundred steps."""
    made = StageRecord(
        stage=stage, flag=0, way=Way.REPLACE, pods=pods, trainers=pods, reason="r",
        outcome="committed" if runs else "ended", committed_at=begin, first_step_at=begin,
        ended_at=None if runs else begin + 100 * step_s, first_step=100 * stage,
        last_step=100 * stage + 100, pause_s=0.4,
    )  # fmt: skip
    return replace(made, **more)  # type: ignore[arg-type]


START = record(1, 1, 0.1, begin=0.0, way=Way.START, pause_s=None)
TWO = record(2, 2, 0.06, begin=10.0, runs=True)


def test_what_was_measured_is_predicted_again_and_what_was_not_lies_on_the_curve():
    back = predict((START, TWO), 2, 1, 16.0, is_linear=False)
    assert back is not None
    assert back.step_s == pytest.approx(0.06)
    assert back.new_step_s == pytest.approx(0.1)
    assert (back.pause_s, back.changes, back.sizes) == (0.4, 1, (1, 2))
    more = predict((START, TWO), 2, 4, 16.0, is_linear=False)
    assert more is not None
    assert 0.03 < more.new_step_s < 0.06
    assert predict((START,), 2, 4, 16.0, is_linear=False) is None


def test_a_dry_run_says_gain_pause_and_what_is_left_and_when_it_cannot():
    status = trains(world(pods=2)).status
    assert "nothing can be predicted yet" in what_if(status, 3, 0.0)
    status = replace(status, stages=(START, TWO), total_steps=1300, step=300)
    text = what_if(status, 1, 16.0)
    assert text.startswith("2 to 1 pods: 100 ms a step instead of 60 ms (0.60 times as fast)")
    assert "about 400 ms (mean of 1 change)" in text
    assert "the 1000 steps that are left take 1 min 40 s instead of 1 min 0 s" in text
    assert what_if(status, 2, 16.0) == "it has 2 pods already; nothing would change"


def test_afterwards_the_prediction_stands_beside_what_happened():
    status = replace(trains(world(pods=2)).status, stages=(START,))
    assert hindsight(status, 16.0) == ""  # no change was made
    status = replace(status, stages=(START, TWO))
    text = hindsight(status, 16.0)
    assert text.startswith("1 to 2 pods in stage 2: predicted ")
    assert text.endswith("it took 60 ms, 400 ms of pause")
