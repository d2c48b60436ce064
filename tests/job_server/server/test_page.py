"""The pictures of the status page."""

from typing import Any

import pytest

from job_server.api.wire import StageRecord, Way
from job_server.server.page import CURVE_HEIGHT, CURVE_WIDTH, timeline


def stage(number: int, trainers: int, first_step_at: float | None, **fields: Any) -> StageRecord:
    return StageRecord(
        stage=number, flag=number - 2, way=Way.REPLACE, pods=trainers, trainers=trainers,
        reason="resize", first_step_at=first_step_at, **fields,
    )  # fmt: skip


def test_a_stage_is_a_bar_from_its_first_step_to_its_last_one():
    stages = [
        stage(1, 1, 100.0, ended_at=150.2),  # it ends when the next one has made a step
        stage(2, 4, 150.0, pause_s=10.0, ended_at=160.0),
        stage(3, 3, None, ended_at=161.0),  # abandoned
        stage(4, 2, 180.0),
    ]
    drawn = timeline(stages, now=200.0)
    assert drawn is not None
    assert [(bar["x"], bar["x"] + bar["width"], bar["height"]) for bar in drawn["bars"]] == [
        (0, 0.4 * CURVE_WIDTH, CURVE_HEIGHT / 4),
        (0.5 * CURVE_WIDTH, 0.6 * CURVE_WIDTH, CURVE_HEIGHT),
        (0.8 * CURVE_WIDTH, CURVE_WIDTH, CURVE_HEIGHT / 2),
    ]
    assert drawn["bars"][1]["text"] == "stage 2: 4 trainers, resize; 10 s of pause before it"
    assert (drawn["text"], drawn["span"]) == ("1 to 4", "2 min")


@pytest.mark.parametrize(
    ("last", "later"),
    [
        pytest.param({"ended_at": 300.0}, "3 min", id="it is over"),
        pytest.param({}, "7 days", id="it goes on"),
    ],
)
def test_the_picture_of_a_job_that_is_over_stays_as_it_is(last, later):
    stages = [stage(1, 1, 100.0, ended_at=200.0), stage(2, 2, 200.0, pause_s=0.0, **last)]
    drawn, then = timeline(stages, now=300.0), timeline(stages, now=300.0 + 7 * 86400)
    assert drawn is not None
    assert then is not None
    assert [bar["width"] for bar in drawn["bars"]] == [CURVE_WIDTH / 2, CURVE_WIDTH / 2]
    assert then["span"] == later


def test_what_passes_while_a_job_recovers_is_in_its_picture():
    drawn = timeline([stage(1, 1, 100.0, ended_at=200.0), stage(2, 2, None)], now=300.0)
    assert drawn is not None
    assert drawn["bars"][0]["width"] == CURVE_WIDTH / 2


def test_without_a_step_there_is_no_timeline():
    assert timeline([], now=5.0) is None
    assert timeline([stage(1, 1, None)], now=5.0) is None
