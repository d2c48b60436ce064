"""Time is an argument: no clock here."""

import pytest

from distill_reader.student.pool.pace import LEAST_DEPTH, MOST_DEPTH, Pace, is_worth_hedging


class Teacher:
    """A queue that computes `rate` samples per second, behind a line of `latency_s`."""

    def __init__(self, *, rate: float, latency_s: float = 0.001) -> None:
        self.rate, self.latency_s = rate, latency_s
        self.pace = Pace()
        self.now = 0.0

    def run(self, seconds: float, samples: int | None = None) -> None:
        """Keep as many requests in flight as the pace says; all of `samples`, or as it says."""
        end = self.now + seconds
        while self.now < end:
            count = samples or self.pace.join_samples
            took_s = max(self.latency_s + count / self.rate, self.pace.depth * count / self.rate)
            self.now += took_s / self.pace.depth
            self.pace.answered(count, took_s, self.now)


def test_requests_grow_until_they_take_a_tenth_of_a_second_or_so():
    fast = Teacher(rate=100_000)
    fast.run(20)
    assert 2500 <= fast.pace.join_samples <= 10_000


def test_requests_of_a_slow_teacher_shrink_until_they_take_less_than_a_second():
    slow = Teacher(rate=100)
    slow.run(20)
    assert slow.pace.join_samples == 32


def test_a_teacher_with_a_fixed_cost_is_not_asked_for_ever_less():
    pace = Pace()
    for answer in range(100):
        pace.answered(pace.join_samples, 2.0, float(answer))
    assert pace.join_samples == 16


def test_small_requests_do_not_raise_what_is_joined():
    teacher = Teacher(rate=1e6)
    teacher.run(1.0, samples=2)
    assert teacher.pace.join_samples == Pace().join_samples


def test_first_answers_that_waited_for_no_others_do_not_raise_what_is_joined():
    pace = Pace()
    joined = pace.join_samples
    for answer, took_s in enumerate((0.04, 0.04, 0.08, 0.08)):  # alone, then behind each other
        pace.answered(joined, took_s, float(answer))
    assert pace.join_samples == joined


def test_more_requests_are_in_flight_where_that_brings_more():
    far = Teacher(rate=50_000, latency_s=0.1)
    far.run(30, samples=1000)
    assert far.pace.depth >= 4


def test_a_teacher_that_is_busy_with_two_keeps_two_nearly_always():
    near = Teacher(rate=1000)
    depths = []
    for _ in range(400):
        near.run(0.1, samples=16)
        depths.append(near.pace.depth)
    assert depths.count(LEAST_DEPTH) > 0.7 * len(depths)
    assert max(depths) <= LEAST_DEPTH + 1


def test_depth_ends_somewhere():
    endless = Teacher(rate=1e9, latency_s=0.5)
    endless.run(120, samples=100)
    assert endless.pace.depth == MOST_DEPTH


def test_a_teacher_that_waits_for_work_is_not_asked_for_more():
    teacher = Teacher(rate=50_000, latency_s=0.1)
    for _ in range(300):
        teacher.run(0.1, samples=1000)
        teacher.pace.starved()
    assert teacher.pace.depth == LEAST_DEPTH


def test_what_is_late_follows_what_is_usual():
    teacher = Teacher(rate=10, latency_s=0)
    assert teacher.pace.expected_s(1) is None
    assert teacher.pace.hedge_after_s(1) == pytest.approx(5)
    teacher.run(60, samples=2)  # each takes 0.4 s, two in flight
    assert teacher.pace.hedge_after_s(2) == pytest.approx(4 * 0.4, rel=0.2)
    assert teacher.pace.hedge_after_s(20) == pytest.approx(4 * 4.0, rel=0.2)
    assert teacher.pace.hedge_after_s(1) == teacher.pace.hedge_after_s(2)
    assert teacher.pace.drop_after_s(2) > teacher.pace.hedge_after_s(2)
    assert teacher.pace.timeout_s(2) > teacher.pace.drop_after_s(2)


def test_a_teacher_whose_pace_is_not_known_is_not_dropped_before_the_timeout():
    pace = Pace()
    pace.answered(1, 100.0, 100.0)
    assert pace.drop_after_s(1) == float("inf")
    assert pace.timeout_s(1) >= 600


def test_who_was_given_up_gets_more_time_the_next_time():
    teacher = Teacher(rate=1000)
    teacher.run(10, samples=16)
    before_s = teacher.pace.drop_after_s(16)
    teacher.pace.overdue(16, 30.0)
    assert teacher.pace.is_known
    assert teacher.pace.drop_after_s(16) >= 30.0 > before_s


@pytest.mark.parametrize(
    ("own_s", "other_s", "took_s", "is_worth"),
    [
        (None, None, 1000.0, False),  # of nobody it is known how long it takes
        (None, 0.1, 4.0, False),
        (None, 0.1, 6.0, True),
        (None, 16.0, 40.0, False),  # as slow as this one may be
        (0.1, None, 10.0, False),
        (0.1, 0.1, 0.2, False),
        (0.1, 0.1, 2.0, True),
        (10.0, 20.0, 30.0, False),
        (0.1, 20.0, 10.0, False),  # it would come later
    ],
)
def test_when_a_late_request_is_worth_another_teacher(own_s, other_s, took_s, is_worth):
    own, other = Pace(), Pace()
    for pace, answer_s in ((own, own_s), (other, other_s)):
        for place in range(30 if answer_s else 0):
            pace.answered(1, answer_s, float(place))
    assert is_worth_hedging(own, other, 1, took_s) is is_worth


def test_nobody_is_late_within_a_moment():
    teacher = Teacher(rate=1e6, latency_s=0.0001)
    teacher.run(1, samples=1)
    assert teacher.pace.hedge_after_s(1) == pytest.approx(0.25)
