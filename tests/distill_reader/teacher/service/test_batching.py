import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill_reader.teacher.service.batching import (
    MAX_PARTS,
    MAX_TURN,
    BatchQueue,
    RequestPart,
)

NOW = 100.0
LATER = NOW + 1.0  # the timeout


def queue(*requests: tuple[str, int], max_batch: int = 8, key: str = "k") -> BatchQueue[str]:
    pending: BatchQueue[str] = BatchQueue(max_batch=max_batch, timeout_s=1.0)
    for request, samples in requests:
        pending.add(key, request, samples, NOW)
    return pending


def taken(pending: BatchQueue[str], now: float = LATER) -> list[tuple[str, int, int]]:
    found = pending.take(now)
    return [(part.request, part.start, part.count) for part in found[1]] if found else []


def test_nothing_is_due_in_an_empty_queue():
    assert queue().take(NOW) is None
    assert queue().next_due() is None


def test_a_batch_that_is_not_full_waits_for_the_timeout():
    pending = queue(("a", 3), ("b", 2))
    assert pending.take(NOW + 0.9) is None
    assert pending.next_due() == LATER
    assert taken(pending) == [("a", 0, 3), ("b", 0, 2)]
    assert len(pending) == 0


@pytest.mark.parametrize("key", ["k", "another"])
def test_a_very_large_request_lets_others_have_their_turn(key: str):
    pending = queue(("a", 8 * 100))
    pending.add(key, "b", 3, NOW)
    firsts = [taken(pending)[0] for _ in range(MAX_TURN + 2)]
    assert [request for request, *_ in firsts] == ["a"] * MAX_TURN + ["b", "a"]
    assert firsts[-1] == ("a", 8 * MAX_TURN, 8)
    left = 8 * 100 - 8 * (MAX_TURN + 1)
    rest = []
    while batch := taken(pending):
        rest += batch
    assert sum(count for *_, count in rest) == left
    assert [start for _, start, _ in rest] == sorted(start for _, start, _ in rest)


def test_a_full_batch_does_not_wait():
    assert taken(queue(("a", 3), ("b", 5)), NOW) == [("a", 0, 3), ("b", 0, 5)]


@pytest.mark.parametrize(
    ("requests", "batches"),
    [
        pytest.param([("a", 5), ("b", 5)], [[("a", 0, 5)], [("b", 0, 5)]], id="small: not cut"),
        pytest.param([("a", 20)], [[("a", 0, 8)], [("a", 8, 8)], [("a", 16, 4)]], id="large: cut"),
        pytest.param(
            [("a", 10), ("b", 6), ("c", 1)],
            [[("a", 0, 8)], [("a", 8, 2), ("b", 0, 6)], [("c", 0, 1)]],
            id="the rest of a large one is filled up",
        ),
        pytest.param(
            [("a", 5), ("b", 9), ("c", 1)],
            [[("a", 0, 5)], [("b", 0, 8)], [("b", 8, 1), ("c", 0, 1)]],
            id="nobody overtakes",
        ),
    ],
)
def test_how_requests_are_cut_and_joined(requests, batches):
    pending = queue(*requests)
    assert [taken(pending) for _ in batches] == batches
    assert taken(pending) == []


def test_requests_of_different_keys_are_not_joined_and_the_oldest_goes_first():
    pending: BatchQueue[str] = BatchQueue(max_batch=8, timeout_s=1.0)
    pending.add("x", "a", 1, NOW + 0.2)
    pending.add("y", "b", 1, NOW)
    pending.add("x", "c", 1, NOW + 0.3)
    assert pending.next_due() == LATER
    found = pending.take(LATER + 1)
    assert found is not None
    assert found[0] == "y"
    assert taken(pending, LATER + 1) == [("a", 0, 1), ("c", 0, 1)]


def test_a_full_batch_goes_before_an_older_one_that_still_waits():
    pending: BatchQueue[str] = BatchQueue(max_batch=2, timeout_s=1.0)
    pending.add("x", "a", 1, NOW)
    pending.add("y", "b", 2, NOW + 0.5)
    assert taken(pending, NOW + 0.5) == [("b", 0, 2)]
    assert taken(pending, NOW + 0.5) == []


def test_what_is_put_back_goes_first_at_once_and_in_its_order():
    pending = queue(("a", 6), ("b", 6))
    first = pending.take(LATER)
    assert first is not None
    pending.put_back("k", [RequestPart("a", 0, 2), RequestPart("a", 2, 4)], NOW)
    assert taken(pending, NOW) == [("a", 0, 2), ("a", 2, 4)]
    assert taken(pending) == [("b", 0, 6)]


def test_what_is_removed_is_gone_and_the_others_stay():
    pending = queue(("a", 20), ("b", 1))
    assert taken(pending) == [("a", 0, 8)]
    assert pending.remove("a")
    assert not pending.remove("a")
    assert taken(pending) == [("b", 0, 1)]
    assert pending.next_due() is None


def test_clearing_returns_each_request_once():
    pending = queue(("a", 20), ("b", 1))
    pending.put_back("other", [RequestPart("a", 0, 3)], NOW)
    assert sorted(pending.clear()) == ["a", "b"]
    assert len(pending) == 0


def test_a_batch_has_a_bounded_number_of_pieces():
    pending = queue(*((str(number), 1) for number in range(MAX_PARTS + 1)), max_batch=10_000)
    assert len(taken(pending)) == MAX_PARTS
    assert len(taken(pending)) == 1


@given(
    st.lists(st.tuples(st.integers(1, 30), st.sampled_from("xy"), st.booleans()), max_size=40),
    st.integers(1, 10),
)
def test_every_sample_is_computed_once_and_no_batch_is_too_large(requests, max_batch):
    pending: BatchQueue[int] = BatchQueue(max_batch=max_batch, timeout_s=1.0)
    seen: dict[int, list[int]] = {number: [] for number in range(len(requests))}

    def compute() -> bool:
        found = pending.take(LATER)
        if found is None:
            return False
        key, pieces = found
        assert 1 <= sum(part.count for part in pieces) <= max_batch
        for part in pieces:
            assert requests[part.request][1] == key
            seen[part.request] += range(part.start, part.start + part.count)
        return True

    for number, (samples, key, computes) in enumerate(requests):
        pending.add(key, number, samples, NOW)
        if computes:
            compute()
    while compute():
        pass
    assert [seen[number] for number in seen] == [list(range(size)) for size, _, _ in requests]
