"""The fast path's server against students that do not keep to the format. See also student/."""

import array
import contextlib
import fcntl
import os
import random
import re
import socket
import threading
import time
from dataclasses import replace

import numpy as np
import psutil
import pytest

from distill_reader.errors import BadRequest, TeacherGone
from distill_reader.protocols import stream, wire
from distill_reader.protocols.arena import OwnArena
from distill_reader.protocols.wire import HEAD, StudentHello, WireTensor
from distill_reader.student.clients.client import Array
from distill_reader.student.clients.fast_client import open_fast
from distill_reader.teacher.protocols.fast import FastLimits
from tests.distill_reader.student.local_teacher import (
    LocalService,
    LocalTeacher,
    fast_connections,
)
from tests.support import wait_until

LIMITS = FastLimits(max_request_bytes=8 << 20, max_shared_bytes=1 << 20)
STALL_S = 0.5  # of the strict teacher
IMAGE = WireTensor(0, "float32", (2, 2, 3))
WORDS = WireTensor(1, "int64", (2, 4))
PAYLOAD = bytes(IMAGE.size_bytes + WORDS.size_bytes)
GOOD = wire.pack_predict(1, [IMAGE, WORDS], [], in_shared_memory=False) + PAYLOAD


@pytest.fixture(scope="module")
def teacher():
    teacher = LocalTeacher(LocalService(), LIMITS)
    yield teacher
    teacher.close()
    teacher.service.close()


@pytest.fixture(scope="module")
def strict_teacher():
    """One that is soon tired of who stops amid a frame."""
    teacher = LocalTeacher(LocalService(), replace(LIMITS, stall_s=STALL_S))
    yield teacher
    teacher.close()
    teacher.service.close()


@pytest.fixture(scope="module")
def hasty_teacher():
    """One that does not wait for greetings."""
    teacher = LocalTeacher(LocalService(), replace(LIMITS, hello_s=0.5))
    yield teacher
    teacher.close()
    teacher.service.close()


@pytest.fixture(autouse=True)
def _teacher_is_unharmed(request):
    """After every test: nothing is held for those who are gone, and a good student is served."""
    yield
    names = {"strict_teacher", "hasty_teacher"} & set(request.fixturenames)
    teacher = request.getfixturevalue(names.pop() if names else "teacher")
    wait_until(lambda: not fast_connections(), what="no connection")
    # The answers of those that left may still be computed.
    wait_until(lambda: teacher.service.arena.used_bytes == 0, what="no inputs")
    wait_until(lambda: teacher.service.answers_out == 0, what="no answers")
    client = open_fast("good", teacher.address)
    images: list[Array] = [np.ones((2, 2, 3), np.float32)]
    words: list[Array] = [np.ones((2, 4), np.int64)]
    feeds = {"image": images, "words": words}
    assert client.predict(feeds, ["total"], timeout_s=20)["total"].tolist() == [[6.0], [6.0]]
    client.close()


@pytest.fixture(params=["tcp", "unix"])
def greeted(request, teacher):
    with contextlib.closing(greet(teacher, request.param)) as sock:
        yield sock


@pytest.fixture(params=["tcp", "unix"])
def impatiently_greeted(request, strict_teacher):
    with contextlib.closing(greet(strict_teacher, request.param)) as sock:
        yield sock


@pytest.fixture
def over_unix(teacher):
    with contextlib.closing(greet(teacher, "unix")) as sock:
        yield sock


def dial(teacher: LocalTeacher, transport: str) -> socket.socket:
    if transport == "tcp":
        sock = socket.create_connection(teacher.address)
    else:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect("\0" + teacher.server.limits.unix)
    stream.prepare(sock, 10)
    return sock


def greet(teacher: LocalTeacher, transport: str) -> socket.socket:
    sock = dial(teacher, transport)
    sock.sendall(wire.pack_hello(StudentHello()))
    size = wire.parse_greeting(stream.receive_bytes(sock, 12, 10), max_bytes=1 << 20)
    welcome = wire.parse_welcome(stream.receive_bytes(sock, size, 10))
    assert welcome.shared_memory is (transport == "unix")
    return sock


def next_frame(sock: socket.socket) -> tuple[wire.FrameHead, bytes]:
    head = wire.parse_head(stream.receive_bytes(sock, HEAD.size, 10))
    return head, stream.receive_bytes(sock, head.meta_bytes + head.payload_bytes, 10)


def refusal(sock: socket.socket) -> Exception:
    head, meta = next_frame(sock)
    assert head.kind == wire.ERROR
    return wire.parse_error(meta)


def assert_ended(sock: socket.socket) -> None:
    wait_until(lambda: stream.has_ended(sock), what="the teacher ended the connection")


def assert_served(sock: socket.socket) -> None:
    sock.sendall(GOOD)
    assert next_frame(sock)[0].kind == wire.ANSWER


# --- refused, and served on


@pytest.mark.parametrize(
    ("tensors", "outputs", "text"),
    [
        ([IMAGE, IMAGE], [], r"inputs \[0, 0\] are sent; each of 2 may come once"),
        ([IMAGE, WORDS._replace(position=2)], [], r"inputs \[0, 2\]"),
        ([IMAGE, WORDS], [0, 2], r"outputs \[0, 2\] are wanted; there are 2"),
        ([IMAGE._replace(dtype="int32"), WORDS], [], "tensor image: expected float32, got int32"),
        ([IMAGE._replace(shape=(2, 3)), WORDS], [], "tensor image: expected shape"),
    ],
)
def test_a_request_that_does_not_fit_is_refused_by_name(greeted, tensors, outputs, text):
    frame = wire.pack_predict(5, tensors, outputs, in_shared_memory=False)
    greeted.sendall(frame + bytes(sum(tensor.size_bytes for tensor in tensors)))
    with pytest.raises(BadRequest, match=text):
        raise refusal(greeted)
    assert_served(greeted)


def test_a_frame_that_comes_in_single_bytes_is_served(greeted):
    for place in range(len(GOOD)):
        greeted.sendall(GOOD[place : place + 1])
    assert next_frame(greeted)[0].kind == wire.ANSWER


def test_a_student_may_be_silent_between_frames(impatiently_greeted):
    assert_served(impatiently_greeted)
    time.sleep(3 * STALL_S)  # longer than a frame may pause
    assert_served(impatiently_greeted)


# --- dropped


@pytest.mark.parametrize(
    "data",
    [
        b"\x63" * 24,
        HEAD.pack(wire.ANSWER, 0, 0, 0, 0, 0, 0, 0),
        HEAD.pack(wire.PREDICT, 0, 1, 0, 0, 0, 2**32 - 1, 0),
        HEAD.pack(wire.PREDICT, 0, 0, 0, 0, 0, 0, 2**64 - 1),
        HEAD.pack(wire.PREDICT, 0, 9, 9, 0, 0, 4, 0) + b"1234",
        wire.pack_predict(
            1, [IMAGE._replace(shape=(2**40, 2, 3)), WORDS], [], in_shared_memory=False
        ),
        wire.pack_predict(1, [WireTensor(0, "int64", (2**20 + 1,))], [], in_shared_memory=False),
    ],
)
def test_what_is_no_frame_ends_the_connection_with_a_reason(greeted, data):
    greeted.sendall(data)
    with pytest.raises(TeacherGone):
        raise refusal(greeted)
    assert_ended(greeted)


@pytest.mark.parametrize("length", [1, HEAD.size, len(GOOD) - len(PAYLOAD), len(GOOD) - 1])
def test_who_stops_in_the_middle_of_a_frame_is_dropped(impatiently_greeted, length):
    impatiently_greeted.sendall(GOOD[:length])
    assert_ended(impatiently_greeted)


@pytest.mark.parametrize("length", [1, HEAD.size, len(GOOD) - len(PAYLOAD), len(GOOD) - 1])
def test_who_leaves_in_the_middle_of_a_frame_leaves_nothing_behind(greeted, length):
    greeted.sendall(GOOD[:length])
    greeted.close()


def test_who_never_reads_its_answers_is_dropped(strict_teacher):
    tensors = [WireTensor(0, "float32", (60_000, 2, 3)), WireTensor(1, "int64", (60_000, 0))]
    frame = wire.pack_predict(1, tensors, [], in_shared_memory=False)
    data = frame + bytes(tensors[0].size_bytes)
    with (
        contextlib.closing(greet(strict_teacher, "unix")) as sock,
        pytest.raises(stream.StreamEnded),
    ):
        send_again_and_again(sock, data)


def send_again_and_again(sock: socket.socket, data: bytes) -> None:
    for _ in range(100):
        stream.send(sock, [data], len(data), 10)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"E",
        b"EDLT",
        wire.GREETING.pack(wire.MAGIC, 1, 0, 2**32 - 1),
        wire.GREETING.pack(wire.MAGIC, 7, 0, 0),
        wire.GREETING.pack(wire.MAGIC, 1, 0, 100),
        wire.GREETING.pack(wire.MAGIC, 1, 0, 4) + b"\xff\xff\xff\xff",
        wire.GREETING.pack(wire.MAGIC, 1, 0, 2) + b"[]",
    ],
)
@pytest.mark.parametrize("transport", ["tcp", "unix"])
def test_a_greeting_that_is_none_or_does_not_end_is_dropped(hasty_teacher, transport, data):
    with contextlib.closing(dial(hasty_teacher, transport)) as sock:
        sock.sendall(data)
        with contextlib.suppress(stream.StreamEnded):
            stream.skip(sock, 1 << 20, 10)  # the refusal, if any
        assert_ended(sock)


# --- shared memory


def share(sock: socket.socket, fds: list[int]) -> None:
    sock.sendall(wire.pack_share())
    sock.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])


def test_memory_that_could_shrink_is_refused(over_unix):
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    share(over_unix, [fd])
    assert "F_SEAL_SHRINK" in str(refusal(over_unix))
    os.close(fd)
    assert_served(over_unix)


def test_memory_beyond_the_limit_and_files_are_refused(over_unix, tmp_path):
    with contextlib.closing(OwnArena(2 << 20)) as arena:
        share(over_unix, [arena.fd])
        assert "2097152 bytes" in str(refusal(over_unix))
    with (tmp_path / "file").open("w+b") as file:
        share(over_unix, [file.fileno()])
        # The latter where tmp_path is in memory.
        assert re.search("no memfd|must be sealed", str(refusal(over_unix)))
    assert_served(over_unix)


@pytest.mark.parametrize("count", [0, 2, 9])
def test_not_one_descriptor_is_dropped_and_none_is_kept(over_unix, count):
    before = len(os.listdir("/proc/self/fd"))
    with contextlib.closing(OwnArena(4096)) as arena:
        share(over_unix, [arena.fd] * count)
        with pytest.raises(TeacherGone, match="expected one descriptor"):
            raise refusal(over_unix)
        assert_ended(over_unix)
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_memory_is_not_shared_over_tcp(teacher):
    with contextlib.closing(greet(teacher, "tcp")) as sock:
        sock.sendall(wire.pack_share() + b"\0")
        assert "unix socket only" in str(refusal(sock))
        assert_ended(sock)


@pytest.mark.parametrize(
    ("offset", "text"),
    [
        (4096, "do not lie within"),
        (2**63, "do not lie within"),
        (4, "offset 4 is not aligned"),
    ],
)
def test_a_tensor_outside_of_the_shared_memory_is_refused(over_unix, offset, text):
    with contextlib.closing(OwnArena(4096)) as arena:
        share(over_unix, [arena.fd])
        assert next_frame(over_unix)[0].kind == wire.SHARED
        tensors = [IMAGE, WORDS._replace(offset=offset)]
        over_unix.sendall(wire.pack_predict(1, tensors, [], in_shared_memory=True))
        with pytest.raises(BadRequest, match=text):
            raise refusal(over_unix)
        assert_served(over_unix)


def test_who_shared_no_memory_cannot_use_it(greeted):
    greeted.sendall(wire.pack_predict(1, [IMAGE, WORDS], [], in_shared_memory=True))
    assert "no memory was shared" in str(refusal(greeted))
    assert_served(greeted)


def test_shared_memory_may_be_replaced_and_goes_with_the_connection(teacher, over_unix):
    before = len(os.listdir("/proc/self/fd"))
    for size in (4096, 8192):
        with contextlib.closing(OwnArena(size)) as arena:
            seals = fcntl.fcntl(arena.fd, fcntl.F_GET_SEALS)
            assert seals & fcntl.F_SEAL_SHRINK
            share(over_unix, [arena.fd])
            assert next_frame(over_unix)[0].kind == wire.SHARED
            frame = wire.pack_predict(
                1, [IMAGE, WORDS._replace(offset=64)], [0], in_shared_memory=True
            )
            over_unix.sendall(frame)
            assert next_frame(over_unix)[0].kind == wire.ANSWER
    over_unix.close()
    wait_until(lambda: len(os.listdir("/proc/self/fd")) < before)


# --- all of it at random


def fuzz(teacher: LocalTeacher, seed: int, rounds: int) -> None:
    random_ = random.Random(seed)
    for _ in range(rounds):
        transport = random_.choice(["tcp", "unix"])
        is_greeted = random_.random() < 0.7
        data = bytearray(b"".join(random_.choice([GOOD, wire.pack_share()]) for _ in range(3)))
        if not is_greeted:
            data = bytearray(wire.pack_hello(StudentHello())) + data
        for _ in range(random_.randrange(4)):
            data[random_.randrange(len(data))] = random_.randrange(256)
        del data[random_.randrange(len(data) + 1) :]
        sock = greet(teacher, transport) if is_greeted else dial(teacher, transport)
        with sock, contextlib.suppress(OSError):
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            sock.settimeout(10)
            while sock.recv(1 << 16):
                pass


@pytest.mark.parametrize(
    "rounds", [pytest.param(60, id="short"), pytest.param(3000, id="long", marks=pytest.mark.slow)]
)
@pytest.mark.timeout(900)
def test_whatever_comes_memory_is_bounded_and_the_teacher_serves_on(teacher, rounds):
    fuzz(teacher, 0, 20)
    before = psutil.Process().memory_info().rss
    threads = [threading.Thread(target=fuzz, args=(teacher, seed, rounds)) for seed in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until(lambda: not fast_connections(), what="no connection")
    assert psutil.Process().memory_info().rss - before < 64 << 20
