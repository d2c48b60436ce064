"""Pauses and redone steps, computed from stamped steps."""

import pytest

from benchmarks.elasticity.stamps import (
    Generation,
    Stamp,
    change,
    generations,
    longest_gap,
    parse,
    stall_share,
    steps_redone,
)


def train(
    *pids: int, steps: range, begin: float, step_s: float = 0.1, late_s: float = 0.01
) -> list[Stamp]:
    """Trainers make these steps together; each rank ends a step a little after the one before."""
    return [
        Stamp(
            who=f"{pid}.1",
            rank=rank,
            world=len(pids),
            step=step,
            at=round(begin + number * step_s + rank * late_s, 6),
            stood_s=round(0.002 * number * (rank + 1), 6),
        )
        for number, step in enumerate(steps)
        for rank, pid in enumerate(pids)
    ]


def test_a_stamp_survives_being_written_and_read():
    stamps = train(11, 12, steps=range(5, 8), begin=100.0)
    assert parse("".join(stamp.line() for stamp in stamps)) == stamps
    assert [stamp.pid for stamp in stamps[:2]] == [11, 12]


def test_a_line_that_was_cut_off_by_a_kill_is_left_out():
    line = train(11, steps=range(1, 2), begin=100.0)[0].line()
    assert len(parse(line + line[:-1])) == 1
    assert parse(line[:-1]) == []


def test_trainers_are_grouped_by_who_trained_together():
    stamps = [
        *train(11, 12, steps=range(1, 11), begin=100.0),
        *train(21, 22, 23, steps=range(11, 14), begin=101.0),
        *train(31, 32, 33, steps=range(14, 20), begin=103.0),  # the same world again
        *train(41, steps=range(20, 22), begin=105.0),
    ]
    order = generations(reversed(stamps))
    assert [(g.world, g.first_step, g.last_step) for g in order] == [
        (2, 1, 10),
        (3, 11, 13),
        (3, 14, 19),
        (1, 20, 21),
    ]
    assert all(g.is_complete for g in order)
    assert [[s.pid for (s, *_) in g.members] for g in order][1] == [21, 22, 23]


def test_a_process_that_stays_across_a_change_is_in_both_generations():
    first = train(11, 12, steps=range(1, 5), begin=100.0)
    second = [
        Stamp(who=f"{11 + rank}.2", rank=rank, world=3, step=5, at=101.0 + 0.01 * rank)
        for rank in range(3)
    ]
    order = generations([*first, *second])
    assert [g.world for g in order] == [2, 3]


def test_a_rank_that_died_in_its_first_step_leaves_its_generation_incomplete():
    stamps = train(11, 12, steps=range(1, 4), begin=100.0)
    order = generations(stamp for stamp in stamps if stamp.rank == 0)
    assert not order[0].is_complete
    assert order[0].done_step == 0
    assert order[0].reached(2) is None


def test_a_trainer_of_the_next_try_does_not_fill_the_gap_of_one_that_died():
    died = [s for s in train(11, 12, steps=range(41, 44), begin=100.0) if s.rank == 0]
    again = train(21, 22, steps=range(41, 50), begin=103.0)
    order = generations([*died, *again])
    assert [len(g.members) for g in order] == [1, 2]


def test_the_pause_is_measured_between_the_slowest_ranks():
    old = generations(train(11, 12, steps=range(1, 11), begin=100.0))[0]
    new = generations(train(21, 22, 23, steps=range(9, 20), begin=102.0))[0]
    found = change(old, new)
    assert found.pause_s == pytest.approx(102.02 - (100.9 + 0.01))
    assert (found.old_world, found.new_world) == (2, 3)
    assert found.redone == 2  # steps 9 and 10
    assert found.step_s == pytest.approx(0.1)


def test_steps_redone_are_counted_over_all_generations():
    stamps = [
        *train(11, 12, steps=range(1, 11), begin=100.0),
        *train(21, 22, steps=range(8, 13), begin=102.0),
        *train(31, 32, steps=range(13, 15), begin=104.0),
        *train(41, steps=range(11, 20), begin=106.0),
    ]
    assert steps_redone(generations(stamps)) == 3 + 0 + 4


def test_where_a_step_was_reached_the_slowest_rank_says_when():
    generation = generations(train(11, 12, steps=range(1, 11), begin=100.0))[0]
    assert generation.reached(3) == pytest.approx(100.21)
    assert generation.reached(11) is None
    assert generation.done_step == 10


def test_the_longest_gap_counts_the_ends_as_well():
    stamps = train(11, steps=range(1, 11), begin=100.0)
    assert longest_gap(stamps, 100.0, 100.95) == pytest.approx(0.1)
    assert longest_gap(stamps, 100.0, 103.0) == pytest.approx(2.1)
    assert longest_gap([], 100.0, 103.0) == pytest.approx(3.0)


def test_the_stall_is_that_of_the_rank_that_stands_most():
    generation = generations(train(11, 12, steps=range(1, 11), begin=100.0))[0]
    assert stall_share(generation) == pytest.approx(0.04)
    assert stall_share(Generation(tuple(member[:1] for member in generation.members))) is None
