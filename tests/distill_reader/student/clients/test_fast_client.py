"""The fast path's client against its server, with real sockets and shared memory."""

import contextlib
import os
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest

from distill_reader.errors import (
    BadRequest,
    DistillError,
    ModelNotFound,
    TeacherBusy,
    TeacherGone,
    UsageError,
)
from distill_reader.model.specs import ModelSpec, TensorSpec
from distill_reader.protocols import stream, wire
from distill_reader.student.clients import fast_client
from distill_reader.student.clients.client import Array
from distill_reader.student.clients.endpoints import ProtocolMismatch
from distill_reader.student.clients.fast_client import TRANSPORTS, FastClient, open_fast
from distill_reader.teacher.protocols.fast import FastLimits
from tests.distill_reader.student.local_teacher import (
    SPEC,
    LocalService,
    LocalTeacher,
    check,
    fast_connections,
    feeds,
    sums,
)
from tests.support import wait_until

LIMITS = FastLimits(max_request_bytes=32 << 20, hello_s=5, stall_s=5)


@pytest.fixture(scope="module")
def shared_teacher():
    teacher = LocalTeacher(LocalService(), LIMITS)
    yield teacher
    teacher.close()
    teacher.service.close()


@pytest.fixture
def start():
    teachers: list[LocalTeacher] = []

    def start(service: LocalService | None = None, limits: FastLimits = LIMITS) -> LocalTeacher:
        teachers.append(LocalTeacher(service or LocalService(), limits))
        return teachers[-1]

    yield start
    for teacher in teachers:
        teacher.close()
        teacher.service.close()


@pytest.fixture(params=TRANSPORTS)
def client(request, shared_teacher):
    client = dial(shared_teacher, transport=request.param)
    assert client.protocol == f"fast-{request.param}"
    yield client
    client.close()


def dial(teacher: LocalTeacher, **options) -> FastClient:
    return open_fast(teacher.endpoint, teacher.address, **options)


def descriptors() -> Counter[str]:
    """What is open in this process, but for the listing itself."""
    found = Counter[str]()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # a thread has just closed it
            found[os.readlink(f"/proc/self/fd/{fd}")] += 1
    return found


def test_requests_follow_each_other_on_a_connection(client, shared_teacher):
    for samples in (*range(1, 51), 100_000):
        asked = feeds(samples, samples)
        check(client.predict(asked, ["longest", "total"], timeout_s=30), asked)
    assert shared_teacher.service.protocols[-1] == client.protocol
    wait_until(lambda: shared_teacher.service.answers_out == 0)
    assert shared_teacher.service.arena.used_bytes == 0


def test_an_output_may_be_asked_for_by_its_variable(client):
    assert list(client.predict(feeds(3), ["fc_0"], timeout_s=30)) == ["fc_0"]
    assert client.spec == SPEC


def test_no_samples_have_no_answers(client):
    answer = client.predict(feeds(0), [], timeout_s=30)
    assert answer["total"].shape == (0, 1)


def test_a_request_that_the_shared_memory_has_no_room_for_goes_through_the_socket(
    shared_teacher, monkeypatch
):
    monkeypatch.setattr(fast_client, "_SHARED_BYTES", 4096)
    client = dial(shared_teacher)
    for samples, protocol in ((10, "fast-shm"), (1000, "fast-unix")):
        asked = feeds(samples)
        check(client.predict(asked, [], timeout_s=30), asked)
        assert shared_teacher.service.protocols[-1] == protocol
    client.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("error", "text"),
    [
        (BadRequest("tensor image: is odd"), "tensor image: is odd"),
        (TeacherBusy("full", delay_s=0.75), "full"),
    ],
)
def test_a_refusal_leaves_the_connection_usable(start, transport, error, text):
    teacher = start()
    client = dial(teacher, transport=transport)
    teacher.service.refuse_with = error
    with pytest.raises(type(error), match=f"{teacher.endpoint}: {text}") as caught:
        client.predict(feeds(3), [], timeout_s=30)
    if isinstance(caught.value, TeacherBusy):
        assert caught.value.delay_s == 0.75
    teacher.service.refuse_with = None
    check(client.predict(feeds(3), [], timeout_s=30), feeds(3))
    client.close()


def test_a_teacher_without_room_for_a_request_reads_it_and_says_so(start):
    teacher = start(LocalService(arena_bytes=1 << 20))
    client = dial(teacher, transport="unix")
    slice_ = teacher.service.arena.allocate(900 << 10)
    with pytest.raises(TeacherBusy, match="no room"):
        client.predict(feeds(10_000), [], timeout_s=30)
    slice_.release()
    check(client.predict(feeds(10_000), [], timeout_s=30), feeds(10_000))
    with pytest.raises(BadRequest, match="too large"):
        client.predict(feeds(100_000), [], timeout_s=30)
    client.close()


def test_a_request_beyond_the_teachers_limit_is_not_sent(client):
    with pytest.raises(BadRequest, match=r"takes 33554432: .* raise its --max_request_mb"):
        client.predict(feeds(1_000_000), [], timeout_s=30)


def blocked() -> tuple[LocalService, threading.Event]:
    """A service that answers when the event is set."""
    event = threading.Event()

    def compute(inputs):
        event.wait(30)
        return sums(inputs)

    return LocalService(compute=compute), event


class RequestMapping(threading.Thread):
    """A thread that predicts once; it has been asked when the constructor returns."""

    def __init__(self, client: FastClient, service: LocalService) -> None:
        super().__init__()
        self.client = client
        self.answer: dict[str, Array] = {}
        self.error: DistillError | None = None
        before = len(service.futures)
        self.start()
        wait_until(lambda: len(service.futures) > before)
        self.future = service.futures[before]

    def run(self) -> None:
        try:
            self.answer = self.client.predict(feeds(2), [], timeout_s=60)
        except DistillError as error:
            self.error = error


def test_a_request_whose_student_left_is_taken_back(start):
    service, event = blocked()
    teacher = start(service)
    clients = [dial(teacher, transport="tcp") for _ in range(5)]
    asking = [RequestMapping(client, service) for client in clients]  # four are computed, one waits
    clients[4].close()
    wait_until(asking[4].future.cancelled)
    clients[0].close()  # its answer is computed, and released unsent
    event.set()
    for thread in asking:
        thread.join(10)
    assert [thread.error is None for thread in asking] == [False, True, True, True, False]
    wait_until(lambda: service.answers_out == 0)
    for client in clients:
        client.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_teacher_that_stops_answers_what_it_has_and_ends(start, transport):
    service, event = blocked()
    teacher = start(service)
    client, idle = (dial(teacher, transport=transport) for _ in range(2))
    asking = RequestMapping(client, service)
    closing = threading.Thread(target=teacher.server.close, args=(20,))
    closing.start()
    wait_until(lambda: fast_connections() == 1, what="the idle one has ended")
    with pytest.raises(TeacherGone):
        idle.predict(feeds(2), [], timeout_s=60)
    event.set()
    asking.join(10)
    closing.join(10)
    check(asking.answer, feeds(2))
    client.close()


def test_two_threads_may_not_use_a_client_at_once(start):
    service, event = blocked()
    client = dial(start(service))
    asking = RequestMapping(client, service)
    with pytest.raises(RuntimeError, match="one thread at a time"):
        client.predict(feeds(2), [], timeout_s=60)
    event.set()
    asking.join(10)
    check(asking.answer, feeds(2))
    client.close()


def test_nothing_is_left_open_by_clients_and_teachers(start):
    teacher = start()
    dial(teacher).close()
    wait_until(lambda: not fast_connections())
    before = descriptors()
    for transport in TRANSPORTS * 3:
        client = dial(teacher, transport=transport)
        check(client.predict(feeds(3), [], timeout_s=30), feeds(3))
        client.close()
    wait_until(lambda: descriptors() <= before, what="descriptors as before")


# --- greetings


def test_a_model_is_chosen_by_name_where_there_are_several(start):
    teacher = start()
    other = ModelSpec(
        name="other",
        inputs=(TensorSpec(name="x", dtype="float32", shape=()),),
        outputs=(TensorSpec(name="y", dtype="float32", shape=()),),
    )
    teacher.service.add(other)
    client = dial(teacher, model="other")
    assert client.spec == other
    client.close()
    with pytest.raises(ModelNotFound, match=r"several models are served, .*: sums, other"):
        dial(teacher)
    with pytest.raises(ModelNotFound, match="no model 'nope' is served here; there is sums, other"):
        dial(teacher, model="nope")


def test_the_token_is_asked_for_on_every_way_in(start):
    teacher = start(limits=FastLimits(token="s3cret"))
    client = dial(teacher, token="s3cret")
    assert client.protocol == "fast-shm"
    client.close()
    with pytest.raises(
        UsageError, match="wants a token, and none was given: set EDL_TEACHER_TOKEN"
    ):
        dial(teacher)
    with pytest.raises(UsageError, match="another was given"):
        dial(teacher, token="secret")


def test_the_token_is_never_sent_and_a_teacher_that_does_not_know_it_is_refused(start, scripted):
    seen = []

    def steal(sock: socket.socket) -> None:
        sock.sendall(wire.pack_challenge("theirs"))
        seen.append(sock.recv(1 << 16))
        sock.sendall(WELCOME)

    for address in (start().address, scripted(steal)):
        with pytest.raises(UsageError, match="does not prove that it knows the token: start it"):
            open_fast("t:1", address, token="s3cret")
    assert re.fullmatch(rb'EDLT.*{"proof": "[0-9a-f]{64}"}', seen[0], re.DOTALL)


def test_a_teacher_of_the_release_before_is_refused_with_the_remedy(scripted):
    old = UsageError("the teacher wants a token, and none was given")
    address = scripted(lambda sock: sock.sendall(wire.pack_refusal(old)))
    with pytest.raises(UsageError, match=r"none was given; .* older release.* upgrade the teacher"):
        open_fast("t:1", address, token="s3cret")


@pytest.mark.parametrize(
    ("hello", "words"),
    [
        (wire.StudentHello(token="s3cret"), ""),
        (wire.StudentHello(token="other"), "another was given"),
        (wire.StudentHello(token="\ud800"), "another was given"),
        (wire.StudentHello(), "none was given"),
    ],
)
def test_a_student_of_the_release_before_sends_it(start, hello, words):
    with socket.create_connection(start(limits=FastLimits(token="s3cret")).address, 20) as sock:
        stream.prepare(sock, 20)
        sock.sendall(wire.pack_hello(hello))
        size = wire.parse_greeting(stream.receive_bytes(sock, 12, 20), max_bytes=1 << 20)
        body = stream.receive_bytes(sock, size, 20)
        if words:
            with pytest.raises(UsageError, match=words):
                wire.parse_welcome(body)
        else:
            assert wire.parse_welcome(body).spec == SPEC


def test_a_teacher_that_is_not_ready_is_busy(start):
    teacher = start()
    teacher.service.is_ready = False
    with pytest.raises(TeacherBusy, match="starts or drains"):
        dial(teacher)


def test_more_connections_than_are_allowed_are_refused(start):
    teacher = start(limits=FastLimits(max_connections=1))
    client = dial(teacher, transport="tcp")
    with pytest.raises(TeacherBusy, match="too many connections"):
        dial(teacher, transport="tcp")
    client.close()


def test_where_the_unix_socket_cannot_be_reached_tcp_stays(shared_teacher, monkeypatch):
    def unreachable(*_args: object) -> None:
        raise ConnectionRefusedError

    monkeypatch.setattr(socket.socket, "connect", unreachable)
    monkeypatch.setattr(socket, "create_connection", lambda *_a: connected(shared_teacher))
    client = dial(shared_teacher)
    assert client.protocol == "fast-tcp"
    client.close()


def connected(teacher: LocalTeacher) -> socket.socket:
    sock = socket.socket()
    assert sock.connect_ex(teacher.address) == 0
    return sock


def test_where_memory_cannot_be_shared_the_unix_socket_stays(start):
    teacher = start(limits=FastLimits(max_shared_bytes=4096))
    client = dial(teacher)
    assert client.protocol == "fast-unix"
    check(client.predict(feeds(3), [], timeout_s=30), feeds(3))
    client.close()


def test_nobody_there_is_a_teacher_that_is_gone():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        with pytest.raises(TeacherGone, match=r"t:1: .*refused"):
            open_fast("t:1", sock.getsockname())


@pytest.fixture
def scripted():
    """A server that reads the hello and then does what a function says."""
    listener = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []

    def serve(act: Callable[[socket.socket], None]) -> tuple[str, int]:
        def run() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.recv(4096)
                act(sock)

        threads.append(threading.Thread(target=run))
        threads[-1].start()
        address: tuple[str, int] = listener.getsockname()
        return address

    yield serve
    for thread in threads:
        thread.join(10)
    listener.close()


WELCOME = wire.pack_welcome(wire.TeacherWelcome(spec=SPEC, max_request_bytes=1 << 20))


@pytest.mark.parametrize(
    ("answer", "is_certain"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", True),
        (b"\0\0\6\4\0\0\0\0\0", True),
        (b"", False),
        (b"EDLT", False),
        (WELCOME[:40], False),
    ],
)
def test_who_does_not_speak_the_fast_path_is_told_apart(scripted, answer, is_certain):
    with pytest.raises(ProtocolMismatch) as caught:
        open_fast("t:1", scripted(lambda sock: sock.sendall(answer)))
    assert caught.value.is_certain is is_certain


def test_a_silent_server_is_waited_for_no_longer_than_said(scripted):
    done = threading.Event()
    with pytest.raises(ProtocolMismatch):
        open_fast("t:1", scripted(lambda _sock: done.wait(20)), hello_timeout_s=0.05)
    done.set()


def test_another_version_is_named(scripted):
    answer = wire.GREETING.pack(wire.MAGIC, 9, 0, 0)
    with pytest.raises(UsageError, match=r"t:1: .* version 9"):
        open_fast("t:1", scripted(lambda sock: sock.sendall(answer)))


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\2" * 24,
        b"x" * 100,
        wire.pack_answer(99, []),
        wire.pack_answer(1, []),
        wire.pack_answer(1, [wire.WireTensor(0, "float32", (2, 1))]) + b"1234",
        wire.pack_answer(1, [wire.WireTensor(0, "float64", (1 << 40,))]),
        wire.pack_shared(),
    ],
)
def test_an_answer_that_is_none_ends_the_connection(scripted, answer):
    def act(sock: socket.socket) -> None:
        sock.sendall(WELCOME)
        stream.prepare(sock, 5)
        head = wire.parse_head(stream.receive_bytes(sock, wire.HEAD.size, 5))
        stream.skip(sock, head.meta_bytes + head.payload_bytes, 5)
        sock.sendall(answer)

    client = open_fast("t:1", scripted(act))
    with pytest.raises(TeacherGone, match="t:1: "):
        client.predict(feeds(2), ["total"], timeout_s=20)
    with pytest.raises(TeacherGone, match="closed"):
        client.predict(feeds(2), ["total"], timeout_s=20)


def test_threads_with_a_client_each_share_a_teacher(shared_teacher):
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        client = dial(shared_teacher, transport=TRANSPORTS[seed % 3])
        try:
            end = time.monotonic() + 0.5
            while time.monotonic() < end:
                asked = feeds(seed * 7 + 1, seed)
                check(client.predict(asked, [], timeout_s=30), asked)
        except BaseException as error:
            failures.append(error)
            raise
        finally:
            client.close()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failures
