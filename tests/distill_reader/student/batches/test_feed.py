"""Batches in, requests out, answers in any order: what comes out is in order and complete."""

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distill_reader.errors import BadRequest, NoTeacher
from distill_reader.student.batches.feed import Feed, Request, RequestLimits
from distill_reader.student.batches.items import BatchFormat, ReaderItem, SampleListFormat
from distill_reader.student.batches.tries import Blame, Tries

KIND = BatchFormat(((0, "x"),), 1, 1)
ROW = 8  # bytes of a sample
WIDE = RequestLimits(join_bytes=1 << 20, most_bytes=1 << 20)


def item(*values: float) -> ReaderItem:
    return KIND.item((np.array(values),))


def feed_of(*items: ReaderItem) -> Feed:
    feed = Feed(1 << 20)
    for each in items:
        feed.add(each)
    return feed


def answer(request: Request) -> tuple[np.ndarray]:
    """The model of these tests: y = 2 x."""
    return (np.concatenate(request.feeds(0)) * 2,)


def take(feed: Feed, limits: RequestLimits = WIDE, teacher: str = "a") -> Request:
    request = feed.take(limits, teacher)
    assert request is not None
    return request


def sizes(request: Request) -> list[int]:
    return [len(array) for array in request.feeds(0)]


def popped(feed: Feed, max_bytes: int = 1 << 30) -> list[list[float]]:
    """What the consumer sees, and that predictions belong to their samples."""
    results = [KIND.result(each) for each in feed.pop(max_bytes)]
    for x, y in results:
        np.testing.assert_array_equal(y, x * 2)
    return [x.tolist() for x, _ in results]


@pytest.mark.parametrize(
    ("batches", "limits", "requests"),
    [
        pytest.param(
            [(1, 2, 3)] * 5,
            RequestLimits(join_bytes=7 * ROW, most_bytes=1000),
            [[3, 3], [3, 3], [3]],
            id="whole batches are joined up to the bytes that a request may have",
        ),
        pytest.param(
            [(1, 2)] * 5,
            RequestLimits(join_bytes=1 << 20, most_bytes=1 << 20, join_samples=4),
            [[2, 2], [2, 2], [2]],
            id="batches are joined up to a number of samples",
        ),
        pytest.param(
            [range(10)],
            RequestLimits(join_bytes=4 * ROW, most_bytes=4 * ROW),
            [[4], [3], [3]],
            id="a large batch is split into even parts",
        ),
        pytest.param(
            [range(10)],
            RequestLimits(join_bytes=4 * ROW, most_bytes=10 * ROW),
            [[10]],
            id="a batch that exceeds what is joined, but not the most, goes whole",
        ),
    ],
)
def test_how_batches_are_cut_into_requests(batches, limits, requests):
    feed = feed_of(*(item(*batch) for batch in batches))
    assert [sizes(take(feed, limits)) for _ in requests] == requests
    assert feed.take(limits, "a") is None


@pytest.mark.parametrize("batch", [1, 3, 64])
def test_no_request_has_more_samples_than_the_user_wants(batch: int):
    feed = feed_of(*(item(*range(batch)) for _ in range(7)))
    limits = RequestLimits(join_bytes=1 << 20, most_bytes=1 << 20, samples=5)
    total = 0
    while (request := feed.take(limits, "a")) is not None:
        assert request.samples <= 5
        total += request.samples
    assert total == 7 * batch


def test_samples_of_different_shapes_or_types_do_not_share_a_request():
    feed = Feed(1 << 20)
    for array in (np.zeros((2, 3)), np.zeros((2, 3)), np.zeros((2, 4)), np.zeros((2, 4), "f4")):
        feed.add(KIND.item((array,)))
    assert [sizes(take(feed)) for _ in range(3)] == [[2, 2], [2], [2]]


def test_samples_of_one_shape_share_a_request_wherever_they_wait():
    kind = SampleListFormat(((0, "x"),), 1, 1)
    feed = Feed(1 << 20)
    given = [[(np.full(1 + (i + j) % 3, 1.0),) for j in range(6)] for i in range(8)]
    for samples in given:
        feed.add(kind.item(samples))
    requests = []
    while (request := feed.take(WIDE, "a")) is not None:
        requests.append(request)
    assert [request.samples for request in requests] == [16, 16, 16]
    for request in reversed(requests):
        feed.answered(request, (np.concatenate(request.feeds(0)).sum(axis=1),), "a")
    found = [[total for _, total in kind.result(each)] for each in feed.pop(1 << 30)]
    assert found == [[len(x) for (x,) in samples] for samples in given]


def test_of_many_shapes_no_one_is_joined_so_far_that_the_first_item_waits_for_it():
    kind = SampleListFormat(((0, "x"),), 1, 1)
    feed = Feed(10 << 20)
    for index in range(4000):
        feed.add(kind.item([(np.zeros(1 + index % 10),)]))
    request = take(feed, RequestLimits(join_bytes=1 << 20, most_bytes=1 << 20, join_samples=1000))
    assert request.samples == 100
    request = take(feed, RequestLimits(join_bytes=1 << 20, most_bytes=1 << 20, join_samples=300))
    assert request.samples == 64


def test_answers_in_any_order_come_out_in_the_generators_order():
    feed = feed_of(*map(item, range(4)))
    requests = [take(feed, RequestLimits(join_bytes=1, most_bytes=100)) for _ in range(4)]
    for index in (2, 1, 3):
        feed.answered(requests[index], answer(requests[index]), "a")
        assert not feed.is_ready
    feed.answered(requests[0], answer(requests[0]), "a")
    assert popped(feed) == [[0], [1], [2], [3]]


def test_a_split_batch_is_put_together_in_order():
    feed = feed_of(item(*range(9)))
    requests = [take(feed, RequestLimits(join_bytes=1, most_bytes=3 * ROW)) for _ in range(3)]
    for request in reversed(requests):
        assert not feed.is_ready
        feed.answered(request, answer(request), "a")
    assert popped(feed) == [[0, 1, 2, 3, 4, 5, 6, 7, 8]]


def test_what_a_lost_teacher_had_goes_first():
    feed = feed_of(*map(item, range(4)))
    lost = take(feed, RequestLimits(join_bytes=2 * ROW, most_bytes=100))
    feed.give_back(lost, "a")
    assert np.concatenate(take(feed, teacher="b").feeds(0)).tolist() == [0, 1, 2, 3]


def test_what_lost_teachers_had_waits_in_order_whichever_is_lost_first():
    feed = feed_of(*map(item, range(6)))
    limits = RequestLimits(join_bytes=2 * ROW, most_bytes=100)
    first, second = take(feed, limits, "a"), take(feed, limits, "b")
    feed.give_back(first, "a")
    feed.give_back(second, "b")
    assert np.concatenate(take(feed).feeds(0)).tolist() == [0, 1, 2, 3, 4, 5]


def test_what_a_lost_teacher_had_is_asked_for_in_small_requests():
    feed = feed_of(*map(item, range(12)))
    limits = RequestLimits(join_bytes=8 * ROW, most_bytes=100)
    feed.give_back(take(feed, limits), "a")
    requests = [take(feed, limits, "b") for _ in range(5)]
    assert [request.samples for request in requests] == [2, 2, 2, 2, 4]


def test_the_first_answer_to_a_late_request_counts():
    feed = feed_of(item(7))
    late = take(feed)
    feed.hedge(late)
    assert not feed.has_hedge("a")  # it has it already
    assert feed.take_hedge("a") is None
    assert feed.take_hedge("b") is late
    assert not feed.has_hedge("c")
    assert feed.answered(late, answer(late), "b")
    assert not feed.answered(late, (np.array([0.0]),), "a")
    assert popped(feed) == [[7]]


def test_an_answer_that_comes_before_anybody_took_the_hedge_withdraws_it():
    feed = feed_of(item(7))
    late = take(feed)
    feed.hedge(late)
    feed.answered(late, answer(late), "a")
    assert not feed.has_hedge("b")


def test_a_request_is_given_to_others_only_when_all_that_have_it_are_lost():
    feed = feed_of(item(7))
    late = take(feed)
    feed.hedge(late)
    feed.take_hedge("b")
    feed.give_back(late, "a")
    assert not feed.has_waiting
    assert not late.is_hedged  # so that it may be hedged again
    feed.give_back(late, "b")
    assert feed.has_waiting


def test_of_a_refused_request_each_item_is_asked_alone_and_the_one_at_fault_raises_in_order():
    feed = feed_of(*map(item, range(3)))
    singles = feed.refused(take(feed), BadRequest("some"), "a")
    assert [single.samples for single in singles] == [1, 1, 1]
    feed.answered(singles[0], answer(singles[0]), "a")
    assert feed.refused(singles[1], BadRequest("tensor x"), "a") == []
    feed.judge(["a"], ["a"], 0.0)
    feed.answered(singles[2], answer(singles[2]), "a")
    assert popped(feed) == [[0]]
    with pytest.raises(BadRequest, match="tensor x"):
        feed.pop(1)


def test_what_one_teacher_refuses_is_asked_of_another_and_an_error_when_there_is_none():
    feed = feed_of(item(7))
    assert feed.refused(take(feed), BadRequest("a: no"), "a") == []
    feed.judge(["a", "b"], ["a", "b"], 0.0)
    assert not feed.has_waiting_for("a")
    request = take(feed, teacher="b")
    assert feed.refused(request, BadRequest("b: no"), "b") == []
    feed.judge(["a", "b"], ["a", "b"], 1.0)
    with pytest.raises(BadRequest, match=r"item 0, samples 0 to 0 of 1: no .*: a: no; b: no"):
        feed.pop(1)


@pytest.mark.parametrize(
    ("blames", "before", "answers", "now", "is_over"),
    [
        ([Blame(text="a: 500", failed=1)] * 3, 9, 9, 5.0, False),
        ([Blame(text="a: 500", failed=1)] * 4, 9, 9, 5.0, True),
        ([Blame(text="a: two ended", failed=2)] * 2, 9, 9, 5.0, True),
        ([Blame(text="a: 500", failed=1)] * 20, 0, 0, 5.0, False),  # nobody gets anything
        ([Blame(text="a: 500", failed=1)] * 20, 0, 9, 5.0, False),  # or did, until now
        ([Blame(text="a: 500", failed=1)] * 20, 0, 0, 500.0, True),
        ([Blame(text="a: reset", lost=1)] * 7, 0, 9, 5.0, False),
        ([Blame(text="a: reset", lost=1)] * 8, 0, 9, 5.0, True),
        ([Blame(text="a: reset", lost=1)] * 20, 0, 0, 5.0, False),
        ([Blame(text="a: reset", lost=1)] * 20, 0, 0, 500.0, True),
        ([Blame(text="a: late", lost=3)] * 3, 0, 1, 5.0, True),
    ],
)
def test_after_how_many_tries_nobody_is_asked_any_more(blames, before, answers, now, is_over):
    """`before`: answers of others as its last try ended."""
    tries = Tries(0, 0.0)
    for blame in blames:
        tries.blame("a", blame, before)
    assert (tries.verdict("item 6", "a", answers, now) is not None) is is_over


def test_who_has_failed_is_asked_again_only_when_no_other_teacher_is_left():
    tries = Tries(0, 0.0)
    tries.blame("a", Blame(text="a: 500", failed=1), 0)
    assert not tries.may_ask("a", ["a", "b"])
    assert tries.may_ask("b", ["a", "b"])
    assert tries.may_ask("a", ["a"])
    tries.blame("b", Blame(text="b: 500", failed=1), 0)
    assert tries.may_ask("a", ["a", "b"])
    tries.refused("b", BadRequest("b: no"))
    assert not tries.may_ask("b", ["a", "b"])


def test_what_breaks_connections_goes_behind_others_until_one_of_them_is_answered():
    feed = feed_of(*map(item, range(3)))
    one = RequestLimits(join_bytes=ROW, most_bytes=ROW)
    asked: list[float] = []
    while len(asked) < 7:
        request = take(feed, one)
        (value,) = np.concatenate(request.feeds(0)).tolist()
        asked.append(value)
        if value:
            feed.answered(request, answer(request), "a")
        else:
            feed.give_back(request, "a", Blame(text="a: reset", lost=2), 0.0)
    assert asked == [0, 1, 0, 2, 0, 0, 0]


def test_what_breaks_connections_waits_for_none_whose_predictions_have_no_room():
    feed = Feed(1)
    feed.add(item(0))
    feed.add(item(1))
    one = RequestLimits(join_bytes=ROW, most_bytes=ROW)
    for _ in range(3):
        request = take(feed, one)
        assert np.concatenate(request.feeds(0)).tolist() == [0], "what the consumer waits for"
        feed.give_back(request, "a", Blame(text="a: reset", lost=2), 0.0)


def test_a_request_that_is_too_large_waits_again_in_two_parts():
    feed = feed_of(item(1, 2, 3, 4))
    assert feed.too_large(take(feed), "a")
    small = RequestLimits(join_bytes=2 * ROW, most_bytes=2 * ROW)
    requests = [take(feed, small, "b") for _ in range(2)]
    for request in requests:
        feed.answered(request, answer(request), "b")
    assert popped(feed) == [[1, 2, 3, 4]]
    feed.add(item(5))
    assert not feed.too_large(take(feed), "a")


def test_the_generators_error_comes_behind_its_last_item():
    feed = feed_of(item(7))
    feed.end(ValueError("broken file"))
    assert not feed.is_ready
    request = take(feed)
    feed.answered(request, answer(request), "a")
    assert popped(feed) == [[7]]
    with pytest.raises(ValueError, match="broken file"):
        feed.pop(1)


def test_at_the_end_nothing_is_raised_even_if_no_teacher_is_left():
    feed = feed_of(item(7))
    request = take(feed)
    feed.answered(request, answer(request), "a")
    feed.end()
    feed.suspend(NoTeacher("gone"))
    assert popped(feed) == [[7]]
    assert feed.is_done
    assert feed.pop(1) == []


def test_no_teacher_is_raised_where_the_next_answer_is_missing_and_forgotten_when_one_is_back():
    feed = feed_of(item(1), item(2))
    first = take(feed, RequestLimits(join_bytes=1, most_bytes=100))
    feed.answered(first, answer(first), "a")
    feed.suspend(NoTeacher("for 3 s"))
    assert popped(feed) == [[1]]
    with pytest.raises(NoTeacher, match="for 3 s"):
        feed.pop(1)
    feed.resume()
    second = take(feed)
    feed.answered(second, answer(second), "a")
    assert popped(feed) == [[2]]


def test_skipping_lets_items_go_without_predictions_until_a_teacher_is_back():
    feed = feed_of(*map(item, range(3)))
    first = take(feed, RequestLimits(join_bytes=1, most_bytes=100))
    on_its_way = take(feed, RequestLimits(join_bytes=1, most_bytes=100))
    feed.answered(first, answer(first), "a")
    feed.skip()
    feed.add(item(3))
    assert popped(feed) == [[0]]
    (let_go,) = feed.pop(1 << 30)
    assert not let_go.answers
    assert KIND.without_predictions(let_go)[1] is None
    feed.answered(on_its_way, answer(on_its_way), "a")  # too late
    (let_go,) = feed.pop(1 << 30)
    assert not let_go.answers
    assert feed.waiting_samples == 1
    feed.resume()
    assert not feed.is_ready
    request = take(feed)
    feed.answered(request, answer(request), "a")
    assert popped(feed) == [[3]], "nobody has come to it while there was no teacher"


def test_samples_are_not_at_fault_for_what_teachers_failed_to_do_while_they_were_away():
    feed = feed_of(item(1), item(2))
    feed.skip()
    for now in range(5):
        request = take(feed)
        feed.give_back(request, "a", Blame(text="a: failed", failed=1), float(now))
        feed.judge(["a"], ["a"], float(now))
    assert not feed.pop(1)[0].answers
    feed.resume()
    feed.judge(["a"], ["a"], 6.0)
    request = take(feed)
    feed.answered(request, answer(request), "a")
    assert popped(feed) == [[2]]


def test_memory_is_bounded_and_freed_when_the_consumer_comes_again():
    feed = Feed(100_000)
    large = [KIND.item((np.zeros((10, 500)),)) for _ in range(5)]  # 40 kB each
    assert feed.has_room(large[0])
    feed.add(large[0])
    assert not feed.has_room(large[1])  # before the first answer only a part is used
    request = take(feed)
    feed.answered(request, (np.zeros(10),), "a")
    assert feed.has_room(large[1])
    feed.add(large[1])
    assert not feed.has_room(large[2])
    assert len(feed.pop(1)) == 1
    assert not feed.has_room(large[2])  # the consumer works on the first one
    assert feed.pop(1) == []
    assert feed.has_room(large[2])


def test_predictions_count_as_memory():
    feed = Feed(100_000)
    feed.add(item(1))
    request = take(feed)
    before = feed.held_bytes
    feed.answered(request, (np.zeros((1, 5000)),), "a")
    assert feed.held_bytes - before == 40_000
    feed.add(item(2))
    assert not feed.has_room(item(3))


def test_nothing_is_asked_for_without_room_for_its_predictions_but_what_is_needed_next():
    feed = feed_of(*(item(index) for index in range(9)))  # before their size is known
    feed._max_bytes = 100_000
    single = RequestLimits(join_bytes=1, most_bytes=1000)
    predictions = (np.zeros((1, 5000)),)  # 40 kB
    first = take(feed, single)
    feed.answered(first, predictions, "a")
    requests = [take(feed, single), take(feed, single)]  # 120 kB
    assert not feed.has_waiting_for("a")
    assert feed.take(single, "a") is None
    assert len(feed.pop(1)) == 1  # the consumer works on it
    assert feed.pop(1) == []
    assert feed.has_waiting_for("a")
    requests.append(take(feed, single))
    assert feed.take(single, "a") is None
    for request in requests:
        feed.give_back(request, "a")
    joined = take(feed)
    assert joined.samples == 2  # 80 kB
    feed.give_back(joined, "a")
    feed._max_bytes = 1
    assert take(feed).samples == 1  # what the consumer needs next
    assert feed.take(WIDE, "a") is None


def test_an_item_larger_than_the_bound_passes_alone():
    feed = Feed(1000)
    assert feed.has_room(item(*range(1000)))


def test_the_consumer_takes_no_more_at_once_than_it_wants():
    feed = feed_of(*map(item, range(4)))
    request = take(feed)
    feed.answered(request, answer(request), "a")
    assert popped(feed, max_bytes=1) == [[0]]
    assert popped(feed) == [[1], [2], [3]]


def test_samples_of_a_list_that_differ_in_shape_are_put_together_again():
    kind = SampleListFormat(((0, "x"),), 1, 1)
    feed = Feed(1 << 20)
    given = [(np.full(length, float(index)),) for index, length in enumerate((2, 2, 3, 1, 1))]
    feed.add(kind.item(given))
    requests = [take(feed) for _ in range(3)]
    assert [request.samples for request in requests] == [2, 1, 2]
    for request in reversed(requests):
        feed.answered(request, (np.concatenate(request.feeds(0)).sum(axis=1),), "a")
    (found,) = feed.pop(1)
    sums = [prediction for _, prediction in kind.result(found)]
    assert sums == [0, 2, 6, 3, 4]


@settings(max_examples=200, deadline=None)
@given(
    batches=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    join=st.integers(1, 12),
    most=st.integers(1, 12),
    samples=st.none() | st.integers(1, 6),
    seed=st.integers(0, 10**6),
)
def test_whatever_happens_to_requests_each_sample_comes_out_once_and_in_order(
    batches: list[int], join: int, most: int, samples: int | None, seed: int
):
    chance = random.Random(seed)
    feed = Feed(1 << 20)
    limits = RequestLimits(join_bytes=join * ROW, most_bytes=most * ROW, samples=samples)
    values = iter(range(1000))
    expected = [[float(next(values)) for _ in range(size)] for size in batches]
    to_add = list(expected)
    flights: list[tuple[Request, str]] = []
    found: list[list[float]] = []
    blamed = 0
    for _ in range(10_000):
        if feed.is_done:
            break
        moves: list[Any] = ["take", "pop"] + ["answer", "lose", "hedge", "refuse", "part"] * bool(
            flights
        )
        moves += ["add"] if to_add else ([] if feed.is_ended else ["end"])
        move = chance.choice(moves)
        if move == "add":
            feed.add(item(*to_add.pop(0)))
        elif move == "end":
            feed.end()
        elif move == "pop":
            found += popped(feed, max_bytes=chance.choice([1, 1 << 20]))
        elif move == "take":
            teacher = chance.choice("abc")
            request = feed.take_hedge(teacher) or feed.take(limits, teacher)
            if request is not None:
                flights.append((request, teacher))
        else:
            request, teacher = flights.pop(chance.randrange(len(flights)))
            if move == "answer":
                feed.answered(request, answer(request), teacher)
            elif move == "lose":
                blamed += 1  # fewer than would be too many
                blame = Blame(text=teacher, lost=1) if blamed < 8 else None
                feed.give_back(request, teacher, blame, 0.0)
                feed.judge("abc", "abc", 0.0)
            elif move == "part":
                if not feed.too_large(request, teacher):
                    flights.append((request, teacher))
            elif move == "refuse" and len(request.pieces) > 1:
                singles = feed.refused(request, BadRequest("one of them"), teacher)
                flights += [(single, teacher) for single in singles]
            else:
                flights.append((request, teacher))
                if not request.is_hedged and not request.is_answered:
                    feed.hedge(request)
    assert feed.is_done
    assert found + popped(feed) == expected
    feed.pop(1)
    assert feed.held_bytes == 0
