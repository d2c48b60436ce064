"""Figures are kept, summed up and shown as they are."""

import json
from pathlib import Path

import pytest

from benchmarks import recovery, resize
from benchmarks.elasticity.report import (
    Record,
    Sample,
    at_most,
    choose,
    count_at_most,
    spread,
    table,
)
from benchmarks.elasticity.stamps import generations
from benchmarks.elasticity.task import TASKS, share
from benchmarks.resize import steps_by_world
from tests.benchmarks.test_stamps import train


def test_an_aim_is_judged_by_the_median():
    aim = at_most("pause", [0.010, 0.014, 0.500], 0.015)
    assert (aim.shown, aim.verdict) == ("14 ms", "reached")
    assert at_most("pause", [0.010, 0.016, 0.016], 0.015).verdict == "missed"
    assert at_most("pause", [], 0.015).verdict == "not measured"


def test_a_count_is_judged_by_its_worst_case():
    assert count_at_most("redone", [0, 0, 1], 0).verdict == "missed"
    assert count_at_most("redone", [0, 0, 1], 1).verdict == "reached"
    assert count_at_most("redone", [], 0).verdict == "not measured"


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([], "-"),
        ([0.0123], "12.3"),
        ([0.0123, 0.0456, 0.02], "20.0 (12.3-45.6)"),
        ([1.5, 2.5], "2000 (1500-2500)"),
        ([0.0], "0.00"),
    ],
)
def test_a_spread_shows_median_and_range(values, shown):
    assert spread(values, 1e3) == shown


def test_columns_are_aligned():
    lines = table(("", "n"), [("replace", "5"), ("torchrun", "10")]).splitlines()
    assert lines == ["             n", "  replace    5", "  torchrun  10"]


def test_a_run_goes_on_from_what_it_has_measured(tmp_path: Path):
    path = tmp_path / "figures.json"
    record = Record(path, resume=False, about={"benchmark": "resize"})
    record.add(Sample(row="replace join", turn=0, values={"pause_s": 0.5}, load=1.0))
    record.add(Sample(row="drain", turn=0, failed="it was late", load=3.0))

    again = Record(path, resume=True, about={"benchmark": "resize"})
    assert again.has("replace join", 0)
    assert not again.has("replace join", 1)
    assert again.values("replace join", "pause_s") == [0.5]
    assert again.failures("drain") == ["it was late"]
    assert again.load() == "2.0 (1.0 to 3.0)"
    again.save([at_most("pause", [0.5], 1.0)])
    assert json.loads(path.read_text())["aims"][0]["verdict"] == "reached"
    assert Record(path, resume=False, about={}).samples == []


def test_a_word_names_a_row_or_all_that_begin_so():
    rows = ["replace", "replace-resnet50", "torchrun-default", "torchrun-tuned"]
    assert choose(rows, None) == rows
    assert choose(rows, "replace") == ["replace"]
    assert choose(rows, "torchrun,replace-") == rows[1:]
    with pytest.raises(ValueError, match="'drain' begins no row"):
        choose(rows, "drain")
    with pytest.raises(ValueError, match="begins no row"):
        choose(rows, "replace,")


def test_all_peers_of_a_round_come_before_the_next_round():
    args = resize.parse(["--only", "replace,torchrun-default,wall-replace", "--rounds", "2"])
    assert resize.plan(args, args.rows) == [
        ("replace", 0),
        ("torchrun-default", 0),
        ("wall-replace", 0),
        ("replace", 1),
        ("torchrun-default", 1),
        ("wall-replace", 1),
        ("wall-replace", 2),
    ]


@pytest.mark.parametrize("parse", [resize.parse, recovery.parse])
@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--rounds", "0"], "--rounds: must be at least 1"),
        (["--only", "nonsense"], "'nonsense' begins no row"),
        (["--resume"], "--resume: needs --json"),
    ],
)
def test_a_wrong_option_is_refused_with_what_would_be_right(parse, argv, why, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(argv)
    assert stop.value.code == 2
    assert why in capsys.readouterr().err


def test_every_row_of_recovery_has_an_estimate():
    args = recovery.parse([])
    assert all(recovery.about_s(row, args) > 0 for row in recovery.all_rows())


def test_steps_are_counted_once_by_the_world_that_made_them_last():
    order = generations(
        [
            *train(11, 12, steps=range(1, 101), begin=100.0),
            *train(21, 22, 23, steps=range(91, 201), begin=200.0),
            *train(31, 32, steps=range(201, 301), begin=300.0),
        ]
    )
    # The clock begins when the first step has ended; 91 to 100 were made again by three.
    assert steps_by_world(order, 300) == {2: 89 + 100, 3: 110}
    assert steps_by_world(order[1:], 300) == {2: 100, 3: 109}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_peers_share_a_global_batch_without_gap_or_repetition(world):
    task = TASKS["lenet"]
    shares = [share(task, 7, rank, world) for rank in range(world)]
    first = 7 * task.batch
    assert [sample for mine in shares for sample in mine] == [
        (first + place) % task.images for place in range(task.batch)
    ]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
