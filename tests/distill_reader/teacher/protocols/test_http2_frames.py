"""Which gRPC requests have begun and not ended, read from the frames of a connection."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill_reader.teacher.protocols.http2_frames import PREFACE, FrameReader, OpenStreams

DATA, HEADERS, RST_STREAM, SETTINGS, PING = 0, 1, 3, 4, 6
END = 1


def frame(kind: int, stream: int, size: int = 0, flags: int = 0) -> bytes:
    head = size.to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big")
    return head + b"\xff" * size


def read(*frames: bytes, cut: int = 1 << 20) -> OpenStreams:
    streams = OpenStreams()
    reader = FrameReader(streams, is_client=True)
    data = memoryview(PREFACE + b"".join(frames))
    for at in range(0, len(data), cut):
        reader.feed(data[at : at + cut], now=5.0)
    return streams


@pytest.mark.parametrize("cut", [1, 2, 8, 9, 10, 100, 1 << 20])
def test_what_came_of_a_request_is_known_however_the_bytes_are_cut(cut):
    streams = read(
        frame(SETTINGS, 0, 12),
        frame(HEADERS, 1, 30),
        frame(DATA, 1, 100),
        frame(PING, 0, 8),
        frame(HEADERS, 3, 10),
        frame(DATA, 1, 50),
        frame(DATA, 3, 0),
        cut=cut,
    )
    assert {number: one.size_bytes for number, one in streams.by_number.items()} == {1: 150, 3: 0}
    assert streams.size_bytes == 150
    assert streams.by_number[1].since == 5.0


@pytest.mark.parametrize(
    "last",
    [
        pytest.param(frame(DATA, 1, 5, END), id="its last data"),
        pytest.param(frame(HEADERS, 1, 5, END), id="trailers"),
        pytest.param(frame(RST_STREAM, 1, 4), id="given up"),
    ],
)
def test_a_complete_request_is_forgotten(last):
    assert read(frame(HEADERS, 1, 30), frame(DATA, 1, 100), last).by_number == {}


def test_a_request_that_was_answered_early_is_forgotten():
    streams = read(frame(HEADERS, 1, 30), frame(DATA, 1, 100))
    server = FrameReader(streams, is_client=False)
    server.feed(memoryview(frame(HEADERS, 1, 10)), now=6.0)
    assert 1 in streams.by_number
    server.feed(memoryview(frame(HEADERS, 1, 10, END)), now=6.0)
    assert streams.by_number == {}


def test_data_of_no_request_counts_nothing():
    assert read(frame(DATA, 7, 100)).size_bytes == 0


@given(st.lists(st.binary(max_size=50), max_size=20))
def test_any_bytes_are_taken(pieces):
    streams = OpenStreams()
    reader = FrameReader(streams, is_client=True)
    for piece in pieces:
        reader.feed(memoryview(piece), now=0.0)
    assert streams.size_bytes <= sum(map(len, pieces)) + (1 << 24) * len(streams.by_number) * 20
