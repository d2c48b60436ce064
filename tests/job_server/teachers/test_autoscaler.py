"""How many teachers there are, in a model of students and teachers."""

import itertools
import random

import pytest

from job_server.api.wire import Demand
from job_server.teachers.autoscaler import TeacherAutoscaler, no_students, observe
from tests.job_server.students import School, Trial

HALF_AN_HOUR = 900  # reports


def demand(**changes: float) -> Demand:
    fields = {"students": 4, "wait_share": 0.5, "samples_per_s": 100.0, "teachers": 1, **changes}
    return Demand(service="soft", **fields)  # type: ignore[arg-type]


def tell(
    autoscaler: TeacherAutoscaler, reports: int, *, pods: int, high: int = 8, **changes: float
):
    for _ in range(reports):
        message = demand(**{"teachers": pods, **changes})
        autoscaler = observe(autoscaler, message, pods=pods, steady=True, low=1, high=high)
    return autoscaler


@pytest.mark.parametrize(
    ("students", "teacher_per_s", "noise"),
    list(itertools.product((1, 4, 9, 24), (30, 80, 300), (0.0, 0.05))),
)
def test_it_settles_near_the_throughput_of_the_best_fixed_number(students, teacher_per_s, noise):
    school = School(students=students, student_per_s=100, teacher_per_s=teacher_per_s, noise=noise)
    trial = Trial(school)
    trial.run(HALF_AN_HOUR)
    assert trial.share_of_best(HALF_AN_HOUR // 2) >= 0.95


@pytest.mark.full
def test_it_settles_among_schools_of_every_kind():
    rng = random.Random(7)
    shares, numbers = [], []
    for seed in range(100):
        school = School(
            students=rng.randint(1, 32),
            student_per_s=rng.choice([50, 100, 400]),
            teacher_per_s=rng.choice([30, 80, 200, 500, 1500]),
            cap_per_s=rng.choice([float("inf"), rng.uniform(50, 5000)]),
            crowding=rng.choice([0, 0, 0.02]),
            noise=rng.choice([0, 0.02, 0.05, 0.1]),
            floor=rng.choice([0, 0, 0.02, 0.1]),
            starts_in=rng.choice([0, 2, 8, 20]),
            tells_teachers=rng.choice([True, True, False]),
            seed=seed,
        )
        high = rng.choice([2, 4, 8, 16, 32])
        trial = Trial(school, high=high)
        trial.run(600)
        shares.append(trial.share_of_best(300))
        enough = 0.95 * school.best(1, high)
        needed = min(n for n in range(1, high + 1) if school.throughput(n) >= enough)
        numbers.append(sum(trial.numbers[-300:]) / 300 / needed)
    assert min(shares) >= 0.85
    assert sum(share >= 0.95 for share in shares) >= 0.95 * len(shares)
    assert sum(numbers) / len(numbers) <= 1.15  # and no more teachers than that takes


def test_the_number_follows_students_who_need_more_and_then_less():
    trial = Trial(School(students=2, student_per_s=100, teacher_per_s=100, noise=0.02))
    trial.run(100)
    assert trial.numbers[-1] in (2, 3)
    trial.school.students = 8
    trial.run(100)
    assert trial.share_of_best(50) >= 0.95
    assert trial.numbers[-1] in (8, 9, 10)
    trial.school.students = 2
    trial.run(100)
    assert trial.share_of_best(50) >= 0.95
    assert trial.numbers[-1] in (2, 3)


def test_it_falls_where_throughput_peaks_before_the_most_teachers():
    school = School(students=40, student_per_s=100, teacher_per_s=100, crowding=0.08, noise=0.02)
    trial = Trial(school)
    trial.run(HALF_AN_HOUR)
    assert trial.share_of_best(HALF_AN_HOUR // 2) >= 0.9
    assert trial.numbers[-1] < 10


def test_students_who_never_wait_get_no_more_teachers():
    autoscaler = tell(TeacherAutoscaler(wanted=1), 100, pods=1, wait_share=0.0)
    assert autoscaler.wanted == 1
    assert "1 is the fewest" in autoscaler.reason


def test_what_brings_nothing_is_taken_back_and_tried_ever_more_rarely():
    """The teachers wait for something else, say the network."""
    trial = Trial(School(students=20, student_per_s=100, teacher_per_s=1000, cap_per_s=500))
    trial.run(HALF_AN_HOUR)
    changes = [a != b for a, b in itertools.pairwise(trial.numbers)]
    assert sum(changes[:300]) >= 2
    assert sum(changes[-300:]) <= 6
    assert trial.numbers[-1] == 1


def test_one_student_more_or_less_of_many_does_not_begin_everything_anew():
    trial = Trial(School(students=40, student_per_s=10, teacher_per_s=100, noise=0.02))
    rng = random.Random(3)
    trial.run(200)
    for _ in range(100):
        trial.school.students = 40 + rng.randint(-3, 3)
        trial.run(4)
    assert trial.share_of_best(300) >= 0.93
    assert len(set(trial.numbers[-300:])) <= 4


def test_where_there_is_no_place_for_more_it_asks_for_them_and_says_so():
    autoscaler = tell(TeacherAutoscaler(wanted=1), 60, pods=1)
    assert autoscaler.wanted == 2
    assert autoscaler.reason.endswith("there is no place for more teachers")
    autoscaler = tell(autoscaler, 60, pods=1, wait_share=0.0)  # and no longer when nobody waits
    assert autoscaler.wanted == 1


def test_a_service_that_answers_nothing_gets_no_more_teachers():
    autoscaler = tell(TeacherAutoscaler(wanted=2), 100, pods=2, samples_per_s=0.0, wait_share=1.0)
    assert autoscaler.wanted == 2


def test_the_most_is_never_exceeded():
    autoscaler = tell(TeacherAutoscaler(wanted=3), 200, pods=3, high=3, wait_share=0.9)
    assert autoscaler.wanted == 3
    assert "3 is the most" in autoscaler.reason


def test_a_number_that_costs_throughput_is_taken_back_before_its_window_is_full():
    autoscaler = tell(TeacherAutoscaler(wanted=4), 20, pods=4, wait_share=0.0, samples_per_s=400)
    assert autoscaler.wanted == 3
    reports = 0
    while autoscaler.wanted == 3:
        autoscaler = tell(autoscaler, 1, pods=3, wait_share=0.3, samples_per_s=300)
        reports += 1
    assert (autoscaler.wanted, reports) == (4, 4)
    assert "3 teachers were too few" in autoscaler.reason


def test_reports_while_a_teacher_starts_count_for_nothing():
    autoscaler = TeacherAutoscaler(wanted=1)
    for _ in range(50):
        autoscaler = observe(autoscaler, demand(), pods=1, steady=False, low=1, high=8)
    assert autoscaler.wanted == 1


def test_the_first_student_of_a_service_without_teachers_gets_one():
    autoscaler = observe(
        TeacherAutoscaler(wanted=0), demand(students=1), pods=0, steady=True, low=0, high=4
    )
    assert autoscaler.wanted == 1
    assert "1 student came" in autoscaler.reason


def test_a_service_without_students_falls_to_the_fewest():
    autoscaler = no_students(tell(TeacherAutoscaler(wanted=6), 10, pods=6), 1, "nobody asks")
    assert (autoscaler.wanted, autoscaler.reason) == (1, "nobody asks")
    assert no_students(autoscaler, 1, "nobody asks") is autoscaler


RATES = (5e-324, 1e-300, 1e-6, 1.0, 1e15)


@pytest.mark.parametrize("wait_share", [0.0, 0.5])
@pytest.mark.parametrize(("rate", "next_rate"), list(itertools.product(RATES, RATES)))
def test_no_rate_that_can_be_posted_breaks_the_arithmetic(rate, next_rate, wait_share):
    autoscaler = TeacherAutoscaler(wanted=3)
    for samples_per_s in (rate, next_rate, rate):
        autoscaler = tell(
            autoscaler, 60, pods=3, samples_per_s=samples_per_s, wait_share=wait_share
        )
        assert 1 <= autoscaler.wanted <= 8
