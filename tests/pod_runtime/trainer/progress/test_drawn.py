"""Fingerprints of drawn samples: the hash, and its way through the exchange."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pod_runtime.trainer.progress.agreement import (
    HEADER_SIZE,
    SnapshotRequest,
    make_header,
    read_header,
)
from pod_runtime.trainer.progress.drawn import (
    OrderHashes,
    add,
    from_pieces,
    from_text,
    hash_samples,
    subtract,
    to_pieces,
    to_text,
)

MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15


def splitmix64(start: int, number: int) -> int:
    """Return output `number` of the generator that begins at `start`, as it is published."""
    z = (start + (number + 1) * GAMMA) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_the_hash_of_a_sample_is_an_output_of_splitmix64():
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [splitmix64(1234567, number) for number in range(3)] == published
    for epoch in (0, 1, 89, 10**6):
        for sample in (0, 1, 1_281_166, 2**40):
            expected = splitmix64(splitmix64(0, epoch), sample)
            assert hash_samples(epoch, [sample]) == expected


def test_a_sum_says_which_samples_and_how_often_but_not_in_which_order():
    whole = hash_samples(3, range(1000))
    order = np.random.RandomState(1).permutation(1000)
    assert hash_samples(3, order) == whole
    parts = [hash_samples(3, order[at : at + 7]) for at in range(0, 1000, 7)]
    assert sum(parts) & MASK == whole
    others = [
        hash_samples(4, range(1000)),
        hash_samples(3, range(999)),
        hash_samples(3, [*range(999), 998]),
        hash_samples(3, [*range(1000), 5]),
    ]
    assert whole not in others
    assert hash_samples(3, []) == 0
    ids = np.arange(5)
    hash_samples(3, ids)
    assert ids.tolist() == [0, 1, 2, 3, 4], "the ids themselves stay as they are"


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 40)), max_size=8), st.integers(1, 70))
def test_hashes_of_an_order_are_those_of_its_samples_wherever_one_asks(asked, ahead):
    ids = np.random.RandomState(2).permutation(100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pod_runtime.trainer.progress.drawn._AHEAD", ahead)
        hashes = OrderHashes(5, ids)
        for start, count in asked:
            stop = min(100, start + count)
            assert hashes.sum(start, stop) == hash_samples(5, ids[start:stop])


sums = st.integers(0, MASK)


@given(st.lists(st.tuples(st.integers(0, 4096), sums), min_size=1, max_size=64), st.booleans())
def test_sums_are_added_over_ranks_without_loss_even_in_float32(ranks, unknown):
    total = np.zeros(HEADER_SIZE, np.float32)
    for number, (samples, drawn) in enumerate(ranks):
        known = None if unknown and number == len(ranks) // 2 else drawn
        header = make_header(
            cut=False, void=False, samples=samples, request=SnapshotRequest(), drawn=known
        )
        total += np.array(header, np.float32)
    verdict = read_header(total.tolist())
    samples = sum(each for each, _ in ranks)
    assert verdict.samples == samples
    if samples == 0 or (unknown and ranks[len(ranks) // 2][0]):
        assert verdict.drawn is None
    elif not unknown:
        assert verdict.drawn == sum(drawn for _, drawn in ranks) & MASK


def test_the_pieces_are_exact_for_more_ranks_than_a_job_can_have():
    ranks = 65_793
    total = np.zeros(8, np.float32)
    for _ in range(ranks):
        total += np.array(to_pieces(MASK), np.float32)
    assert from_pieces(total.tolist()) == ranks * MASK & MASK


@given(sums, sums)
def test_sums_can_be_taken_apart_and_written_down(first, second):
    both = add(first, second)
    assert subtract(both, second) == first
    text = to_text(both)
    assert text is not None
    assert (len(text), from_text(text)) == (16, both)
    assert (add(first, None), subtract(None, first), to_text(None), from_text(None)) == (None,) * 4


@pytest.mark.parametrize("text", ["", "0x12345678901234", "123456789012345 ", "A" * 16, "f" * 17])
def test_what_is_no_sum_is_refused(text):
    with pytest.raises(ValueError, match="expected 16 hexadecimal digits"):
        from_text(text)
