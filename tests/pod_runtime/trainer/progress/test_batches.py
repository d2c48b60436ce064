import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pod_runtime.trainer.progress.batches import (
    BatchPlan,
    Cursor,
    next_epoch,
    permutation,
    rank_shards,
    stream_key,
)

plans = st.builds(
    lambda length, batch, shards, drop, even: BatchPlan(
        batch_size=batch, shards=shards, dataset_length=length, drop_last=drop, is_even=even
    ),
    st.integers(1, 300),
    st.integers(1, 64),
    st.integers(1, 12),
    st.booleans(),
    st.booleans(),
)


def walk(plan: BatchPlan):
    """Yield (cursor, [start, stop)) of every batch of an epoch."""
    cursor = Cursor()
    while plan.steps_left(cursor.offset):
        yield cursor, plan.batch(cursor.offset)
        cursor = plan.advance(cursor)


@given(plans)
def test_batches_tile_an_epoch_and_shards_tile_a_batch(plan):
    end = 0
    for number, (cursor, (start, stop)) in enumerate(walk(plan)):
        assert (cursor.step, cursor.offset, start) == (number, end, end)
        pieces = [plan.shard(stop - start, shard) for shard in range(plan.shards)]
        assert [low for low, _ in pieces[1:]] == [high for _, high in pieces[:-1]]
        assert (pieces[0][0], pieces[-1][1]) == (0, stop - start)
        sizes = [high - low for low, high in pieces]
        assert max(sizes) <= plan.micro_batch
        assert not plan.is_even or max(sizes) - min(sizes) <= 1
        assert sum(high > low for low, high in pieces) == plan.filled_shards(stop - start)
        end = stop
    assert end == plan.epoch_samples
    assert plan.steps_left(0) == sum(1 for _ in walk(plan))


@given(plans, st.data())
def test_every_world_size_computes_the_same_shards_each_once(plan, data):
    world_size = data.draw(st.integers(1, plan.shards))
    ranks = [rank_shards(rank, world_size, plan.shards) for rank in range(world_size)]
    assert [shard for shards in ranks for shard in shards] == list(range(plan.shards))
    assert all(len(shards) for shards in ranks)


@given(st.integers(1, 200), st.lists(st.integers(1, 40), min_size=1, max_size=20))
@settings(max_examples=50)
def test_a_batch_size_that_changes_amid_an_epoch_leaves_no_sample_out(length, sizes):
    cursor, seen = Cursor(), 0
    for size in [*sizes, length]:
        plan = BatchPlan(batch_size=size, shards=1, dataset_length=length)
        if plan.steps_left(cursor.offset):
            start, stop = plan.batch(cursor.offset)
            assert start == seen
            seen = stop
            cursor = plan.advance(cursor)
    assert seen == length


def test_drop_last_leaves_out_less_than_a_batch():
    plan = BatchPlan(batch_size=32, shards=4, dataset_length=100, drop_last=True)
    assert plan.epoch_samples == 96
    assert [batch for _, batch in walk(plan)] == [(0, 32), (32, 64), (64, 96)]


def test_a_stream_has_as_many_full_batches_as_was_said():
    plan = BatchPlan(batch_size=8, shards=2, dataset_length=None, steps_per_epoch=3)
    assert [batch for _, batch in walk(plan)] == [(0, 8), (8, 16), (16, 24)]


def test_an_order_never_changes_with_the_library():
    # A checkpoint of today continues in this order for ever.
    assert permutation(1, 0, 8).tolist() == [1, 5, 7, 0, 4, 3, 2, 6]
    assert permutation(1, 1, 8).tolist() != permutation(1, 0, 8).tolist()
    assert permutation(2, 0, 8).tolist() != permutation(1, 0, 8).tolist()
    assert permutation(1, 0, 5, shuffle=False).tolist() == [0, 1, 2, 3, 4]
    assert permutation(1, 0, 8).dtype == np.int64


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 500))
def test_an_order_holds_every_sample_once(seed, epoch, length):
    assert sorted(permutation(seed, epoch, length).tolist()) == list(range(length))


def test_keys_tell_their_parts_apart():
    keys = {stream_key(a, b, c) for a in range(8) for b in range(8) for c in range(8)}
    assert len(keys) == 512
    assert stream_key(1, 23) != stream_key(12, 3)
    assert all(0 <= key < 1 << 63 for key in keys)


def test_the_next_epoch_begins_at_its_first_sample():
    cursor = Cursor(epoch=1, step=3, offset=96, global_step=7)
    assert next_epoch(cursor) == Cursor(epoch=2, step=0, offset=0, global_step=7)


def test_more_trainers_than_shards_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"2 shards are too few for 3 trainers.*shards=3"):
        rank_shards(0, 3, 2)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"batch_size": 0}, "batch_size: must be at least 1, got 0"),
        ({"shards": 0}, "shards: must be at least 1, got 0"),
        ({"dataset_length": None}, "steps_per_epoch"),
    ],
)
def test_a_wrong_plan_is_refused_by_name(wrong, text):
    with pytest.raises(ValueError, match=text):
        BatchPlan(**({"batch_size": 1, "shards": 1, "dataset_length": 1} | wrong))


def test_a_cursor_is_never_negative():
    with pytest.raises(ValueError, match="offset: must be 0 or more, got -1"):
        Cursor(offset=-1)
