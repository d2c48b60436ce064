"""Which ports a node's trainers get."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from job_client.errors import SetupError
from job_client.ports import PortBlocks, blocks, ephemeral_range, parse_range


def test_the_first_block_lies_below_the_kernels_default_range():
    assert blocks((32768, 60999))[:2] == [(20000, 21999), (22000, 23999)]


@pytest.mark.parametrize(
    ("ephemeral", "first"),
    [
        pytest.param((15000, 60999), (12000, 13999), id="a wide range: below it"),
        pytest.param((1024, 60999), (62000, 63999), id="nearly all: above it"),
        pytest.param((1024, 65535), (20000, 21999), id="all: inside, there is no other place"),
    ],
)
def test_where_the_kernel_takes_more_the_block_moves(ephemeral, first):
    assert blocks(ephemeral)[0] == first


@given(st.integers(1024, 65535), st.integers(0, 64511))
def test_blocks_are_valid_and_never_overlap(low, length):
    found = sorted(blocks((low, min(65535, low + length))))
    assert all(1024 <= first <= last <= 65535 for first, last in found)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(found))


def test_two_clients_of_one_host_hold_different_blocks_until_they_end():
    every = [(1, 2), (3, 4), (5, 6)]  # no real client has these
    first, second = PortBlocks(every), PortBlocks(every)
    assert (first.next(), second.next()) == ((1, 2), (3, 4))
    assert first.next() == (5, 6)  # the server refuses the first block
    assert first.next() is None
    second.close()
    assert second.next() is None
    third = PortBlocks(every)
    assert third.next() == (1, 2)
    third.close()


def test_a_range_is_two_ports():
    assert parse_range("20000-20099") == (20000, 20099)


@pytest.mark.parametrize("text", ["", "20000", "20000-", "b-c", "2-1", "80-90", "60000-70000"])
def test_what_is_no_range_is_refused(text):
    with pytest.raises(SetupError, match="--port_range: expected"):
        parse_range(text)


def test_the_kernels_range_is_read(tmp_path):
    path = tmp_path / "range"
    path.write_text("40000\t50000\n")
    assert ephemeral_range(path) == (40000, 50000)
    assert ephemeral_range(tmp_path / "missing") == (32768, 60999)
