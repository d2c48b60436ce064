"""A training's speed-up, fitted to the world sizes that were measured."""

import itertools
import random

import pytest

from job_server.sharing.speedup import USUAL, StepTime, fit


@pytest.mark.parametrize(
    "true", [StepTime(0.9, 0.08, 0.002), StepTime(3.0, 0.0, 0.01), StepTime(0.2, 0.1, 0.0)]
)
def test_what_was_measured_well_is_found(true):
    found = fit({n: true.seconds(n) for n in (1, 2, 3, 4, 6, 8)})
    for n in range(1, 9):
        assert found.seconds(n) == pytest.approx(true.seconds(n), rel=0.02)


def test_a_job_that_was_never_measured_is_a_usual_one():
    assert fit({}) == USUAL


@pytest.mark.parametrize("trainers", [1, 4])
def test_one_measured_world_size_gives_the_speed_and_the_usual_curve(trainers):
    found = fit({trainers: 0.25})
    assert found.seconds(trainers) == pytest.approx(0.25, rel=0.02)
    assert found.speedup(8) == pytest.approx(USUAL.speedup(8), rel=0.05)


def test_no_measurement_makes_a_part_negative_or_a_speed_up_of_none():
    rng = random.Random(5)
    for _ in range(300):
        sizes = rng.sample(range(1, 33), rng.randint(1, 4))
        found = fit({n: rng.uniform(1e-4, 10.0) for n in sizes})
        assert min(found.divided, found.fixed, found.per_trainer) >= 0
        assert found.speedup(0) == 0
        assert all(found.speedup(n) > 0 for n in (1, 2, 64))


def test_step_times_that_are_worlds_apart_give_a_speed_up_all_the_same():
    for measured in ({1: 1e-14, 2: 1.0}, {1: 100.0, 4: 1e-9}, {2: 1e-9, 3: 1e-9, 64: 1e3}):
        found = fit(measured)
        assert all(found.speedup(n) > 0 for n in (1, 2, 64))


def test_more_trainers_of_a_usual_job_bring_less_each():
    gains = [USUAL.speedup(n + 1) - USUAL.speedup(n) for n in range(1, 10)]
    assert all(later < earlier for earlier, later in itertools.pairwise(gains))
