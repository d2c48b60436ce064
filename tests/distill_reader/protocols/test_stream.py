import socket
import threading

import numpy as np
import pytest

from distill_reader.protocols import stream
from distill_reader.protocols.stream import StreamEnded, StreamStalled
from tests.support import wait_until


@pytest.fixture(params=["tcp", "unix"])
def pair(request):
    if request.param == "unix":
        ends = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            left = socket.create_connection(listener.getsockname())
            right, _ = listener.accept()
            ends = left, right
    for end in ends:
        stream.prepare(end, 10)
    yield ends
    for end in ends:
        end.close()


def receive_in_thread(sock: socket.socket, size: int) -> tuple[threading.Thread, list[bytes]]:
    got: list[bytes] = []
    thread = threading.Thread(target=lambda: got.append(stream.receive_bytes(sock, size, 10)))
    thread.start()
    return thread, got


def test_many_buffers_arrive_as_one_stream(pair):
    arrays = [np.full((i % 7, 3), i, np.float32) for i in range(3000)]  # some are empty
    expected = b"".join(array.tobytes() for array in arrays)
    thread, got = receive_in_thread(pair[1], len(expected))
    stream.send(pair[0], arrays, len(expected), 10)
    thread.join()
    assert got == [expected]


def test_buffers_larger_than_the_kernel_takes_at_once_arrive_whole(pair):
    arrays = [np.random.default_rng(i).bytes(5 << 20) for i in range(3)]
    thread, got = receive_in_thread(pair[1], 15 << 20)
    stream.send(pair[0], [b"head", *arrays], (15 << 20) + 4, 10)
    thread.join()
    rest = stream.receive_bytes(pair[1], 4, 10)
    assert got[0] + rest == b"head" + b"".join(arrays)


def test_a_reader_that_stops_reading_stalls_the_sender(pair):
    stream.set_timeout(pair[0], 0.05)
    with pytest.raises(StreamStalled):
        stream.send(pair[0], [bytes(64 << 20)], 64 << 20, 0.05)


def test_silence_in_the_middle_stalls_the_receiver(pair):
    stream.set_timeout(pair[1], 0.05)
    stream.send(pair[0], [b"abc"], 3, 10)
    with pytest.raises(StreamStalled):
        stream.receive_bytes(pair[1], 4, 0.05)
    with pytest.raises(StreamStalled):
        stream.receive_some(pair[1], memoryview(bytearray(1)))


def test_skipping_takes_no_more_than_was_asked(pair):
    data = bytes(1 << 20)
    thread = threading.Thread(
        target=stream.send, args=(pair[0], [data, b"next"], len(data) + 4, 10)
    )
    thread.start()
    stream.skip(pair[1], len(data), 10)
    assert stream.receive_bytes(pair[1], 4, 10) == b"next"
    thread.join()


def test_the_end_of_the_stream_is_an_error_of_its_own(pair):
    assert not stream.has_ended(pair[1])
    stream.send(pair[0], [b"x"], 1, 10)
    assert not stream.has_ended(pair[1])
    pair[0].close()
    with pytest.raises(StreamEnded):
        stream.receive_bytes(pair[1], 2, 10)
    wait_until(lambda: stream.has_ended(pair[1]))
    with pytest.raises(StreamEnded):
        stream.send(pair[1], [bytes(64 << 20)], 64 << 20, 10)


def test_ending_it_wakes_a_thread_that_waits(pair):
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            stream.receive_bytes(pair[1], 1, 10)
        except StreamEnded as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    stream.end(pair[1])
    thread.join(5)
    assert len(errors) == 1


@pytest.mark.parametrize("dtype", ["bool", "float16", "complex64", "int64"])
def test_the_bytes_of_an_array_are_found_whatever_its_type(dtype):
    array = np.ones((2, 3), dtype)
    view = stream.bytes_of(array)
    assert view.nbytes == array.nbytes
    view[:] = bytes(view.nbytes)
    assert not array.any()
