import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill_reader.errors import UsageError
from distill_reader.student.batches.label_index import LabelIndex, make_keys, mix

steps = st.lists(
    st.tuples(
        st.sampled_from(["add", "add many", "find", "forget"]),
        st.lists(st.integers(0, 30), min_size=1, max_size=8),
    ),
    max_size=8,
)


@given(steps)
def test_it_finds_what_a_dict_would(steps):
    index, place = LabelIndex(), 0
    expected: dict[int, int] = {}
    for what, numbers in steps:
        if what == "add many":  # enough to be sorted in
            numbers = [*numbers, *range(1000, 1000 + 5000)]
        mixes = np.array(numbers, np.uint64)
        if what.startswith("add"):
            index.add(mixes, place)
            expected.update(zip(numbers, range(place, place + len(numbers)), strict=True))
            place += len(numbers)
        elif what == "forget":
            index.forget(mixes)
            for number in numbers:
                expected.pop(number, None)
        asked = np.arange(40, dtype=np.uint64)
        assert index.find(asked).tolist() == [expected.get(number, -1) for number in range(40)]


def test_many_that_come_by_few_are_found_too():
    index = LabelIndex()
    for start in range(0, 20_000, 64):
        index.add(mix(make_keys(np.arange(start, start + 64), None, 64)), start)
    found = index.find(mix(make_keys(np.arange(20_100), None, 20_100)))
    np.testing.assert_array_equal(found[:20_032], np.arange(20_032))
    assert (found[20_032:] == -1).all()


@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 9)), unique=True))
def test_different_samples_have_different_keys(pairs):
    ids, variants = (np.array([pair[at] for pair in pairs], np.int64) for at in (0, 1))
    keys = make_keys(ids, variants, len(pairs))
    assert len(np.unique(keys, axis=0)) == len(pairs)
    assert len(set(mix(keys).tolist())) == len(pairs)


@pytest.mark.full  # imports Paddle
def test_ids_are_integers_or_texts_of_any_kind():
    paddle = pytest.importorskip("paddle")
    expected = make_keys(np.arange(3), None, 3)
    for ids in ([0, 1, 2], np.arange(3, dtype=np.int32), np.arange(3)[:, None], paddle.arange(3)):
        np.testing.assert_array_equal(make_keys(ids, 0, 3), expected)
    texts = make_keys(["a", "b", "ab"], None, 3)
    np.testing.assert_array_equal(make_keys(np.array(["a", "b", "ab"]), None, 3), texts)
    np.testing.assert_array_equal(make_keys([b"a", b"b", b"ab"], None, 3), texts)
    assert len(np.unique(np.concatenate([texts, expected]), axis=0)) == 6


def test_a_files_name_that_is_no_text_is_an_id():
    names = [os.fsdecode(name) for name in (b"a\xff.png", b"a\xfe.png")]
    assert len(np.unique(make_keys(names, None, 2), axis=0)) == 2


def test_without_samples_there_are_no_keys():
    assert make_keys([], None, 0).shape == make_keys([], [], 0).shape == (0, 2)


def test_a_variant_is_one_for_all_or_one_per_sample():
    one = make_keys(np.arange(3), 7, 3)
    np.testing.assert_array_equal(make_keys(np.arange(3), np.full(3, 7), 3), one)
    assert not (make_keys(np.arange(3), 8, 3) == one).all(axis=1).any()
    texts = make_keys(["a", "b"], 7, 2)
    assert not (make_keys(["a", "b"], 8, 2) == texts).all(axis=1).any()
    assert not (make_keys(["1"], "7", 1) == make_keys(["71"], "", 1)).all()


@pytest.mark.parametrize(
    ("ids", "variants", "words"),
    [
        (np.arange(3), None, r"id: expected one per sample, 2, got shape \[3\]"),
        (3, None, r"id: expected one per sample, 2, got shape \[\]"),
        (np.zeros(2), None, "id: expected integers or texts, got float64"),
        ([None, "a"], None, "id: expected integers or texts, got object"),
        (np.arange(2), [1, 2, 3], "variant: expected one per sample"),
        (np.arange(2), 0.5, "variant: expected integers or texts"),
    ],
)
def test_what_is_no_id_is_refused(ids, variants, words: str):
    with pytest.raises(UsageError, match=f"cache: {words}"):
        make_keys(ids, variants, 2)
