"""Orders that a sampler drew: batches of any size, and the files that keep the lists."""

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pod_runtime.trainer.progress.batches import BatchPlan, Cursor
from pod_runtime.trainer.progress.drawn import from_text, hash_samples
from pod_runtime.trainer.progress.epoch_order import EpochOrder, OrderRecord, make_order
from pod_runtime.trainer.progress.order_files import FOLDER, OrderFiles, read_order

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=20)


def order_of(sizes: list[int] | None, ids: list[int], epoch: int = 2) -> EpochOrder:
    ends = None if sizes is None else np.cumsum(sizes, dtype=np.int64)
    return make_order(epoch, np.array(ids, np.int64), ends)


@given(SIZES, st.integers(1, 6))
def test_batches_are_as_long_as_the_sampler_made_them_and_cut_evenly(sizes, shards):
    ends = np.cumsum(sizes, dtype=np.int64)
    plan = BatchPlan(
        batch_size=8, shards=shards, dataset_length=int(ends[-1]), drop_last=True, ends=ends,
        is_even=True,
    )  # fmt: skip
    assert (plan.epoch_samples, plan.steps_left(0)) == (sum(sizes), len(sizes))
    cursor, found = Cursor(), []
    while plan.steps_left(cursor.offset):
        assert plan.steps_left(cursor.offset) == len(sizes) - cursor.step
        start, stop = plan.batch(cursor.offset)
        found.append(stop - start)
        pieces = [plan.shard(stop - start, shard) for shard in range(shards)]
        lengths = [high - low for low, high in pieces]
        assert (sum(lengths), max(lengths) - min(lengths) <= 1) == (stop - start, True)
        assert sum(map(bool, lengths)) == plan.filled_shards(stop - start)
        cursor = plan.advance(cursor)
    assert found == sizes
    assert plan.batch(cursor.offset) == (sum(sizes), sum(sizes))


def test_a_record_tells_orders_batches_and_epochs_apart():
    records = [
        order_of(None, [3, 1, 2]).record, order_of(None, [1, 3, 2]).record,
        order_of([1, 2], [3, 1, 2]).record, order_of([2, 1], [3, 1, 2]).record,
    ]  # fmt: skip
    assert len({record.digest for record in records}) == 4
    assert {from_text(record.drawn) for record in records} == {hash_samples(2, [1, 2, 3])}
    assert order_of(None, [3, 1, 2], epoch=1).record.drawn != records[0].drawn
    assert (records[0].samples, records[0].batches, records[2].batches) == (3, None, 2)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30))
def test_an_order_knows_how_often_a_sample_came_before(ids):
    again = order_of(None, ids).again
    expected = [ids[:at].count(each) for at, each in enumerate(ids)]
    assert (again is None) == (not any(expected))
    assert again is None or again.tolist() == expected


@pytest.mark.parametrize(
    "wrong", [{"samples": 0}, {"batches": 0}, {"epoch": -1}, {"digest": "1"}, {"drawn": "x"}]
)
def test_a_record_that_cannot_be_is_refused(wrong):
    good = {"epoch": 0, "samples": 1, "batches": None, "drawn": "0" * 16, "digest": "0" * 16}
    with pytest.raises(ValueError, match=r"cannot have|digest|hexadecimal"):
        OrderRecord(**(good | wrong))


@pytest.mark.parametrize("sizes", [None, [2, 1]])
@pytest.mark.parametrize("largest", [2, 300, 70_000, 1 << 33])
def test_a_list_is_read_as_it_was_written_in_few_bytes(tmp_path, sizes, largest):
    order = order_of(sizes, [largest, 0, 7])
    OrderFiles(tmp_path).put(order)
    found = read_order(tmp_path, order.record)
    assert found is not None
    assert found.ids.tolist() == order.ids.tolist()
    assert (found.ends is None) == (sizes is None)
    assert found.ends is None or found.ends.tolist() == [2, 3]
    large = order_of(None, list(range(60_000)))
    OrderFiles(tmp_path).put(large)
    (file,) = (tmp_path / FOLDER).glob(f"*{large.record.digest}*")
    assert file.stat().st_size < 2 * 60_000 + 1000


def test_a_list_that_is_damaged_or_another_one_is_not_there(tmp_path):
    order = order_of([2, 1], [5, 6, 7])
    OrderFiles(tmp_path).put(order)
    (file,) = (tmp_path / FOLDER).iterdir()
    data = file.read_bytes()
    for damaged in (b"", data[:50], data[:-30], data.replace(b"\x05\x06", b"\x06\x05")):
        file.write_bytes(damaged)
        assert read_order(tmp_path, order.record) is None
    file.write_bytes(data)
    assert read_order(tmp_path, order.record) is not None
    assert read_order(tmp_path, order_of([2, 1], [5, 7, 6]).record) is None


def test_lists_that_cannot_be_written_are_written_later(tmp_path, caplog):
    in_the_way = tmp_path / FOLDER
    in_the_way.write_text("no folder")
    files = OrderFiles(tmp_path)
    orders = [order_of(None, [1, 2], epoch) for epoch in range(6)]
    for order in orders:
        files.put(order)
    assert caplog.text.count("cannot be written") == 1
    os.remove(in_the_way)
    files.settle()
    there = [read_order(tmp_path, order.record) is not None for order in orders]
    assert there == [False, False, True, True, True, True], "memory is not filled instead"
