"""Numbers of layers that move with each shard."""

import pytest

from pod_runtime.trainer.loop.shard_counters import ShardCounters


@pytest.mark.parametrize(
    ("values", "is_counter"),
    [
        ([0, 1, 2], False),  # too few to tell
        ([0, 1, 2, 3], True),
        ([1.0, 0.9, 0.8, 0.7], True),
        ([0, 3, 5, 9], False),  # the longest text so far, say
        ([0, 3, 5, 9, 10, 12, 17], True),
        ([0, 1, 2, 2], False),
        ([0, 1, 0, 1], False),
    ],
)
def test_a_counter_moves_evenly_or_long_in_one_direction(values, is_counter):
    counters = ShardCounters()
    counters.begin({"calls": values[0]})
    for value in values[1:]:
        counters.end_shard({"calls": value})
    assert counters.found() == ["calls"] * is_counter
