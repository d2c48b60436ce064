import re
from dataclasses import replace

import pytest

from job_server.api.wire import Account, JobState, Way
from scripts.quickstart_plan import Check
from scripts.quickstart_view import (
    Style,
    account_line,
    check_lines,
    live_line,
    news,
    shorten,
    stage_table,
)
from tests.scripts.statuses import stage, status

PLAIN = Style(colour=False, unicode=False)
FULL = Style(colour=True, unicode=True)


def without_colour(text: str) -> str:
    return re.sub(r"\x1b\[\d+m", "", text)


def test_nothing_new_is_no_line():
    job = status(stage(1, 2))
    assert news(job, replace(job, step=80), PLAIN) == []


def test_a_stage_is_news_when_it_has_trained_its_first_step():
    first = status(stage(1, 2))
    prepared = replace(first, stages=(stage(1, 2), stage(2, 3, first_step_at=None)))
    trains = replace(first, stages=(stage(1, 2), stage(2, 3)))
    assert news(first, prepared, PLAIN) == []
    (line,) = news(prepared, trains, PLAIN)
    assert line.startswith(
        "grow     stage 2   ###  goes on at step 11  paused 1.25 s  0 steps redone"
    )
    assert "timeline at 7s" in line
    assert news(trains, trains, PLAIN) == []


@pytest.mark.parametrize(
    ("later", "word"),
    [
        pytest.param(stage(2, 3), "grow", id="more pods"),
        pytest.param(stage(2, 1), "shrink", id="fewer pods"),
        pytest.param(stage(2, 2, way=Way.START), "recover", id="after a crash"),
    ],
)
def test_a_stage_is_called_by_what_it_is(later, word):
    first = status(stage(1, 2))
    (line,) = news(first, status(stage(1, 2), later), PLAIN)
    assert line.split()[0] == word


def test_the_first_look_tells_of_the_start():
    (line,) = news(None, status(stage(1, 2)), PLAIN)
    assert line.split()[:3] == ["start", "stage", "1"]
    assert "paused" not in line, "nothing trained before it"


def test_an_abandoned_change_is_told_once():
    before = status(stage(1, 2), stage(2, 3, committed_at=None, first_step_at=None))
    given_up = status(
        stage(1, 2),
        stage(2, 3, committed_at=None, first_step_at=None, outcome="abandoned: not ready in 120 s"),
    )
    assert news(before, given_up, PLAIN) == ["given up stage 2: abandoned: not ready in 120 s"]
    assert news(given_up, given_up, PLAIN) == []


def test_the_live_line_shows_trainers_progress_loss_and_speed():
    line = live_line(status(stage(1, 2)), 2345.6, 4.2, 1, PLAIN)
    assert line == (
        "##.  ============------------  step 70/140  loss 0.1250  accuracy 0.975  2,346 images/s "
        "by 2 trainers of 1 thread"
    )


def test_the_live_line_says_where_the_trainers_have_gpus():
    assert live_line(status(stage(1, 2)), 9.0, 0.0, None, PLAIN).endswith("by 2 trainers on 2 GPUs")


def test_the_live_line_names_the_state_while_no_step_is_made():
    line = live_line(status(stage(1, 2), state=JobState.CUTTING_OVER), 2345.6, 4.2, 1, PLAIN)
    assert line.endswith("  cutting over, 4.2 s")
    assert "images/s" not in line


def test_the_live_line_tells_of_trainers_that_start():
    job = status(stage(1, 2, first_step_at=None), metrics={}, step=0)
    assert live_line(job, None, 4.2, 1, PLAIN).endswith("  trainers are starting, 4.2 s")


def test_the_live_line_lives_with_a_job_that_has_said_nothing_yet():
    job = status(state=JobState.WAITING, metrics={}, total_steps=None, step=0)
    assert live_line(job, None, 4.2, 1, PLAIN) == "...  step 0  waiting, 4.2 s"


def test_colour_changes_no_word():
    job = status(stage(1, 2), stage(2, 3))
    assert without_colour(live_line(job, None, 0.0, 1, FULL)).startswith("■■■  ━")
    plain_news = news(None, job, PLAIN)
    coloured = [without_colour(line) for line in news(None, job, FULL)]
    assert [line.replace("■", "#").replace("·", ".") for line in coloured] == plain_news


def test_the_table_has_a_row_per_stage_in_aligned_columns():
    lines = stage_table([stage(1, 2), stage(2, 3, redone_steps=12), stage(3, 1, last_step=1234)])
    assert [line.split()[0] for line in lines] == ["stage", "1", "2", "3"]
    assert len({line.index("why" if n == 0 else "timeline") for n, line in enumerate(lines)}) == 1
    assert "21 to 1,234" in lines[3]
    assert "1.25 s" in lines[2]


def test_a_stage_without_a_step_has_dashes():
    (_, row) = stage_table([stage(1, 2, first_step=None, last_step=None)])
    assert row.split()[2:4] == ["-", "-"]


def test_the_account_tells_the_largest_part_first_and_leaves_out_what_is_nothing():
    account = Account(training_s=40.0, cutting_over_s=9.25, waiting_s=12.0, paused_s=0.01)
    assert account_line(account) == ("61.3 s in all: training 40.0, waiting 12.0, cutting over 9.2")


def test_a_check_that_fails_is_marked():
    lines = check_lines([Check(holds=True, text="a"), Check(holds=False, text="b")], PLAIN)
    assert lines == ["ok a", "NO b"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("short", "short"), ("two\n lines", "two lines"), ("a" * 20, "a" * 7 + "...")],
)
def test_long_texts_are_cut_to_one_short_line(text, expected):
    assert shorten(text, 10) == expected
