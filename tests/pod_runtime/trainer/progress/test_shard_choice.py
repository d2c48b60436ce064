"""How many shards a batch is cut into, as tables of measured costs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pod_runtime.trainer.progress.shard_choice import (
    ShardCost,
    choose_shards,
    fit_cost,
    possible_shards,
    sizes_to_measure,
)

FREE = ShardCost(fixed_s=0.0, per_sample_s=1e-3)  # more shards cost nothing


def test_a_shard_costs_a_fixed_part_and_one_per_sample():
    cost = fit_cost((16, 0.020), (32, 0.036))
    assert (cost.fixed_s, cost.per_sample_s) == pytest.approx((0.004, 0.001))
    assert cost.of(64) == pytest.approx(0.068)


@pytest.mark.parametrize(
    ("small", "large", "fixed_s", "per_sample_s"),
    [
        ((16, 0.05), (32, 0.04), 0.04, 0.0),  # the smaller one took longer
        ((16, 0.01), (32, 0.04), 0.0, 0.04 / 32),  # the larger one more than twice as long
    ],
)
def test_times_that_make_no_sense_give_no_negative_cost(small, large, fixed_s, per_sample_s):
    cost = fit_cost(small, large)
    assert (cost.fixed_s, cost.per_sample_s) == pytest.approx((fixed_s, per_sample_s))


@pytest.mark.parametrize(
    ("batch", "worlds", "cost", "smallest", "shards", "idle"),
    [
        pytest.param(96, range(1, 3), FREE, 1, 2, (), id="two divide into one and two"),
        pytest.param(96, range(3, 4), FREE, 1, 3, (), id="one world size"),
        pytest.param(96, range(1, 4), FREE, 8, 6, (), id="six suit one, two and three"),
        pytest.param(96, range(1, 5), FREE, 6, 12, (), id="twelve suit one to four"),
        pytest.param(
            96, range(1, 4), ShardCost(fixed_s=0.03, per_sample_s=1e-3), 1, 3, (2,),
            id="a shard is dear: two trainers wait rather",
        ),
        pytest.param(96, range(1, 4), FREE, 20, 3, (2,), id="six would be too small"),
        pytest.param(90, range(1, 4), FREE, 31, 3, (2,), id="those of the most trainers must do"),
        pytest.param(2, range(1, 4), FREE, 1, 3, (2,), id="fewer samples than trainers"),
    ],
)  # fmt: skip
def test_the_least_time_over_all_world_sizes_is_chosen(batch, worlds, cost, smallest, shards, idle):
    found = choose_shards(batch, worlds, cost, smallest=smallest)
    assert (found.shards, found.idle_worlds) == (shards, idle)
    assert found.step_s <= found.fewest_step_s


@pytest.mark.parametrize(("fixed_s", "shards"), [(1e-3, 6), (2e-3, 3), (3.2e-3, 3), (9e-3, 3)])
def test_the_most_trainers_are_not_made_to_wait_for_a_small_gain(fixed_s, shards):
    """Three shards take 3 + 2 + 1 rounds; six take 6 + 3 + 2 of half the samples."""
    cost = ShardCost(fixed_s=fixed_s, per_sample_s=1e-3)
    assert choose_shards(96, range(1, 4), cost, smallest=8).shards == shards


def test_the_log_says_both_costs_and_which_worlds_idle():
    found = choose_shards(96, range(1, 4), FREE, smallest=16)
    assert str(found) == (
        "6 shards, 58.7 ms a step over all world sizes (3, the most trainers, take 64 ms)"
    )
    dear = ShardCost(fixed_s=1.0, per_sample_s=0.0)
    assert str(choose_shards(96, range(1, 4), dear)) == (
        "3 shards, 2e+03 ms a step over all world sizes; some trainers wait for others where "
        "there are 2 of them"
    )


@pytest.mark.parametrize(
    ("batch", "worlds", "smallest", "sizes"),
    [
        (96, range(1, 4), 16, (16, 32)),
        (192, range(1, 4), 16, (16, 64)),
        (192, range(1, 4), 1, (16, 64)),
        (64, range(1, 4), 16, (16, 22)),
        (96, range(1, 3), 16, None),  # two shards suit both
        (96, range(4, 5), 16, None),
        (40, range(1, 4), 16, None),  # more than three would be too small
        (3, range(1, 4), 1, None),
    ],
)
def test_nothing_is_measured_where_nothing_is_to_be_decided(batch, worlds, smallest, sizes):
    assert sizes_to_measure(batch, worlds, smallest) == sizes


@given(st.integers(1, 400), st.integers(1, 9), st.integers(1, 20))
def test_no_shard_of_a_full_batch_is_empty_or_too_small(batch, most, smallest):
    first, *others = possible_shards(batch, most, smallest)
    assert first == most
    for shards in others:
        size = -(-batch // shards)
        assert size >= smallest
        assert -(-batch // size) == shards > most
