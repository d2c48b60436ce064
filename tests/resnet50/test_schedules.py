"""Learning rates by epoch, against the numbers of the original's recipes."""

import math

import pytest
from schedules import make_schedule


def schedule(strategy: str, **changes):
    recipe = {
        "lr": 0.1,
        "total_batch": 1024,
        "num_epochs": 90,
        "warmup_epochs": 5.0,
        "decay_epochs": (30, 60, 80),
    }
    return make_schedule(strategy, **(recipe | changes))


@pytest.mark.parametrize(
    ("done", "rate"),
    [
        pytest.param(0.0, 0.1, id="the rate of a batch of 256 to begin with"),
        pytest.param(2.5, 0.25, id="half way up"),
        pytest.param(5.0, 0.4, id="0.1 * 1024 / 256"),
        pytest.param(29.999, 0.4, id="until the first boundary"),
        pytest.param(30.0, 0.04, id="from the boundary on"),
        pytest.param(60.0, 0.004, id="the second"),
        pytest.param(80.0, 0.0004, id="the third"),
        pytest.param(89.99, 0.0004, id="to the end"),
    ],
)
def test_piecewise_decay_follows_the_recipe_for_a_batch_of_1024(done, rate):
    assert schedule("piecewise_decay")(done) == pytest.approx(rate)


def test_a_small_batch_is_not_warmed_up_from_above():
    rate = schedule("piecewise_decay", total_batch=64)
    assert [rate(done) for done in (0.0, 2.5, 5.0)] == pytest.approx([0.025] * 3)


def test_a_warm_up_that_is_not_over_goes_before_the_boundaries():
    rate = schedule("piecewise_decay", warmup_epochs=5.0, decay_epochs=(2,))
    assert rate(2.5) == pytest.approx(0.25)
    assert rate(5.0) == pytest.approx(0.04)


@pytest.mark.parametrize(
    ("strategy", "done", "rate"),
    [
        pytest.param("cosine_decay", 0.0, 0.1, id="cosine begins at lr"),
        pytest.param("cosine_decay", 0.9, 0.1, id="and stays there for an epoch"),
        pytest.param("cosine_decay", 45.0, 0.05, id="half way"),
        pytest.param("cosine_decay", 89.9, 0.05 * (1 + math.cos(math.pi * 89 / 90)), id="the last"),
        pytest.param("cosine_warmup_decay", 0.0, 0.0, id="warm-up begins at 0"),
        pytest.param("cosine_warmup_decay", 2.5, 0.05, id="half way up"),
        pytest.param("cosine_warmup_decay", 5.0, 0.1, id="the top"),
        pytest.param("cosine_warmup_decay", 47.5, 0.05, id="half way down"),
        pytest.param("cosine_warmup_decay", 90.0, 0.0, id="the end"),
        pytest.param("linear_decay", 0.0, 0.1, id="linear begins at lr"),
        pytest.param("linear_decay", 67.5, 0.025, id="a quarter is left"),
        pytest.param("linear_decay", 90.0, 0.0, id="nothing is left"),
        pytest.param("constant", 67.5, 0.1, id="constant"),
    ],
)
def test_the_other_strategies(strategy, done, rate):
    assert schedule(strategy)(done) == pytest.approx(rate)


@pytest.mark.parametrize("strategy", ["cosine_decay", "cosine_warmup_decay", "linear_decay"])
def test_no_rate_falls_below_0_or_rises_again_after_the_end(strategy):
    rate = schedule(strategy)
    assert rate(90.5) == pytest.approx(0.0)


def test_a_training_that_is_all_warm_up_stays_finite():
    rate = schedule("cosine_warmup_decay", num_epochs=5, warmup_epochs=5.0)
    assert rate(4.0) == pytest.approx(0.08)
    assert rate(5.0) == pytest.approx(0.1)


def test_an_unknown_strategy_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'exponential' is none of piecewise_decay, cosine"):
        schedule("exponential")
