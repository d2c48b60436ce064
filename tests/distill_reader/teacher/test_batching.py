import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill_reader.teacher.service.batching import MAX_PARTS, BatchQueue, RequestPart

NOW = 100.0
LATER = NOW + 1.0  # the timeout


def queue(*requests: tuple[str, int], max_batch: int = 8, key: str = "k") -> BatchQueue[str]:
    waiting: BatchQueue[str] = BatchQueue(max_batch=max_batch, timeout_s=1.0)
    for item, samples in requests:
        waiting.add(key, item, samples, NOW)
    return waiting


def taken(waiting: BatchQueue[str], now: float = LATER) -> list[tuple[str, int, int]]:
    found = waiting.take(now)
    return [(piece.item, piece.start, piece.count) for piece in found[1]] if found else []


def test_nothing_is_due_in_an_empty_queue():
    assert queue().take(NOW) is None
    assert queue().next_due() is None


def test_a_batch_that_is_not_full_waits_for_the_timeout():
    waiting = queue(("a", 3), ("b", 2))
    assert waiting.take(NOW + 0.9) is None
    assert waiting.next_due() == LATER
    assert taken(waiting) == [("a", 0, 3), ("b", 0, 2)]
    assert len(waiting) == 0


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
    waiting = queue(*requests)
    assert [taken(waiting) for _ in batches] == batches
    assert taken(waiting) == []


def test_requests_of_different_keys_are_not_joined_and_the_oldest_goes_first():
    waiting: BatchQueue[str] = BatchQueue(max_batch=8, timeout_s=1.0)
    waiting.add("x", "a", 1, NOW + 0.2)
    waiting.add("y", "b", 1, NOW)
    waiting.add("x", "c", 1, NOW + 0.3)
    assert waiting.next_due() == LATER
    found = waiting.take(LATER + 1)
    assert found is not None
    assert found[0] == "y"
    assert taken(waiting, LATER + 1) == [("a", 0, 1), ("c", 0, 1)]


def test_a_full_batch_goes_before_an_older_one_that_still_waits():
    waiting: BatchQueue[str] = BatchQueue(max_batch=2, timeout_s=1.0)
    waiting.add("x", "a", 1, NOW)
    waiting.add("y", "b", 2, NOW + 0.5)
    assert taken(waiting, NOW + 0.5) == [("b", 0, 2)]
    assert taken(waiting, NOW + 0.5) == []


def test_what_is_put_back_goes_first_at_once_and_in_its_order():
    waiting = queue(("a", 6), ("b", 6))
    first = waiting.take(LATER)
    assert first is not None
    waiting.put_back("k", [RequestPart("a", 0, 2), RequestPart("a", 2, 4)], NOW)
    assert taken(waiting, NOW) == [("a", 0, 2), ("a", 2, 4)]
    assert taken(waiting) == [("b", 0, 6)]


def test_what_is_removed_is_gone_and_the_others_stay():
    waiting = queue(("a", 20), ("b", 1))
    assert taken(waiting) == [("a", 0, 8)]
    assert waiting.remove("a")
    assert not waiting.remove("a")
    assert taken(waiting) == [("b", 0, 1)]
    assert waiting.next_due() is None


def test_clearing_returns_each_request_once():
    waiting = queue(("a", 20), ("b", 1))
    waiting.put_back("other", [RequestPart("a", 0, 3)], NOW)
    assert sorted(waiting.clear()) == ["a", "b"]
    assert len(waiting) == 0


def test_a_batch_has_a_bounded_number_of_pieces():
    waiting = queue(*((str(number), 1) for number in range(MAX_PARTS + 1)), max_batch=10_000)
    assert len(taken(waiting)) == MAX_PARTS
    assert len(taken(waiting)) == 1


@given(
    st.lists(st.tuples(st.integers(1, 30), st.sampled_from("xy"), st.booleans()), max_size=40),
    st.integers(1, 10),
)
def test_every_sample_is_computed_once_and_no_batch_is_too_large(requests, max_batch):
    waiting: BatchQueue[int] = BatchQueue(max_batch=max_batch, timeout_s=1.0)
    seen: dict[int, list[int]] = {number: [] for number in range(len(requests))}

    def compute() -> bool:
        found = waiting.take(LATER)
        if found is None:
            return False
        key, pieces = found
        assert 1 <= sum(piece.count for piece in pieces) <= max_batch
        for piece in pieces:
            assert requests[piece.item][1] == key
            seen[piece.item] += range(piece.start, piece.start + piece.count)
        return True

    for number, (samples, key, computes) in enumerate(requests):
        waiting.add(key, number, samples, NOW)
        if computes:
            compute()
    while compute():
        pass
    assert [seen[number] for number in seen] == [list(range(size)) for size, _, _ in requests]
