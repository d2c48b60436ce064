import contextlib
import http.client
import json
import logging
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from distill_reader.errors import DistillError, ModelNotFound, TeacherGone, UsageError
from distill_reader.student.clients.client import TeacherClient
from distill_reader.student.clients.connect import connect, forget
from distill_reader.student.clients.endpoints import Target, parse_endpoint
from distill_reader.tokens import read_student_token
from tests.distill_reader.student.foreign_teachers import (
    HttpTeacher,
    OipGrpcTeacher,
    ServingGrpcTeacher,
    answer_oip,
    answer_serving,
)
from tests.distill_reader.student.local_teacher import LocalService, LocalTeacher
from tests.distill_reader.student.teacher_process import TeacherProcess
from tests.support import free_port, wait_until

PROTOCOLS = (
    "fast-tcp", "fast-unix", "fast-shm", "oip-grpc", "oip-http", "serving-http", "serving-grpc",
)  # fmt: skip
TRIALS = ("fast-shm", "oip-grpc", "oip-http", "serving-http", "serving-grpc")  # in this order


# --- endpoints


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("host:1", ("host", 1, "", None)),
        (" 10.0.0.1:9292/lenet ", ("10.0.0.1", 9292, "lenet", None)),
        ("[::1]:9292", ("::1", 9292, "", None)),
        ("fast://h:1", ("h", 1, "", "fast-shm")),
        ("grpc://h:1/m", ("h", 1, "m", "oip-grpc")),
        ("http://h:1/a%20b", ("h", 1, "a b", "oip-http")),
        ("serving://h:1/", ("h", 1, "", "serving-http")),
        ("serving+grpc://h:1", ("h", 1, "", "serving-grpc")),
    ],
)
def test_an_endpoint_is_understood(text, expected):
    target = parse_endpoint(text)
    assert (target.host, target.port, target.model, target.protocol) == expected
    assert target.endpoint == text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "expected HOST:PORT"),
        ("host", "expected HOST:PORT"),
        (":1", "expected HOST:PORT"),
        ("host:0", "expected HOST:PORT"),
        ("host:port", "Port could not be cast"),
        ("host:70000", "Port out of range"),
        ("u:p@host:1", "expected HOST:PORT"),
        ("::1:9292", "in brackets"),
        ("grpc://fe80::1:9292/m", "in brackets"),
        ("host:1?x", "expected HOST:PORT"),
        ("ftp://host:1", "unknown protocol 'ftp'; possible are fast://, grpc://"),
        ("grpc://host:1/path/model", "a path before the model .path. is for http:// and https://"),
        ("host:1/path/model", "a path before the model .path. is for http:// and https://"),
        ("http://host:1/a//model", "a path before the model"),
        ("https://:1", "expected HOST:PORT"),
    ],
)
def test_an_endpoint_that_is_none_is_refused_by_name(text, reason):
    with pytest.raises(UsageError, match=f"endpoint {text.replace('?', '.')}: .*{reason}"):
        parse_endpoint(text)


def test_model_and_protocol_may_be_given_apart():
    target = parse_endpoint("http://h:1", model="m", protocol="fast-tcp")
    assert target == Target(endpoint="http://h:1", host="h", port=1, model="m", protocol="fast-tcp")
    assert parse_endpoint("h:1/m", model="m").model == "m"
    with pytest.raises(UsageError, match="names the model 'm', not 'n'"):
        parse_endpoint("h:1/m", model="n")
    with pytest.raises(UsageError, match="protocol: expected one of fast-shm, "):
        parse_endpoint("h:1", protocol="quic")


def test_the_token_is_read_from_a_file_or_the_environment(tmp_path):
    file = tmp_path / "token"
    file.write_text("from-file\n")
    assert read_student_token({}) == ""
    assert read_student_token({"EDL_TEACHER_TOKEN": "plain"}) == "plain"
    assert (
        read_student_token({"EDL_TEACHER_TOKEN": "plain", "EDL_TEACHER_TOKEN_FILE": str(file)})
        == "from-file"
    )
    with pytest.raises(UsageError, match=r"EDL_TEACHER_TOKEN_FILE .*/missing"):
        read_student_token({"EDL_TEACHER_TOKEN_FILE": str(tmp_path / "missing")})
    file.write_text("one\nother\n")
    with pytest.raises(UsageError, match=r"EDL_TEACHER_TOKEN_FILE .*has several lines"):
        read_student_token({"EDL_TEACHER_TOKEN_FILE": str(file)})


@pytest.mark.parametrize("scheme", ["http", "grpc", "serving", "serving+grpc"])
def test_a_token_that_no_header_can_show_is_refused_by_its_variable(run, monkeypatch, scheme):
    monkeypatch.setenv("EDL_TEACHER_TOKEN", "geheim-ä")
    teacher = HttpTeacher(answer_oip) if scheme == "http" else OipGrpcTeacher()
    with pytest.raises(UsageError, match=r"^EDL_TEACHER_TOKEN: .*printable ASCII.*fast://"):
        connect(f"{scheme}://{run(teacher).endpoint}")


# --- finding out


@pytest.fixture
def run():
    """Starts a teacher and ends it after the test."""
    closes: list[Callable[[], None]] = []

    def run(teacher: Any) -> Any:
        closes.append(teacher.close)
        forget(teacher.endpoint)  # a teacher of another test may have had the same port
        return teacher

    yield run
    for close in closes:
        close()


@pytest.mark.parametrize(
    ("start", "protocol"),
    [
        (lambda: LocalTeacher(LocalService()), "fast-shm"),
        (OipGrpcTeacher, "oip-grpc"),
        (lambda: HttpTeacher(answer_oip), "oip-http"),
        (lambda: HttpTeacher(answer_serving), "serving-http"),
        (ServingGrpcTeacher, "serving-grpc"),
    ],
)
def test_what_a_teacher_speaks_is_found_out_and_remembered(run, caplog, start, protocol):
    teacher = run(start())
    caplog.set_level(logging.DEBUG, "distill_reader.student.clients.connect")
    for tried in (TRIALS[: TRIALS.index(protocol) + 1], (protocol,)):
        caplog.clear()
        client = connect(teacher.endpoint)
        assert client.protocol == protocol
        client.close()
        assert trials(caplog) == tried
    forget(teacher.endpoint)
    caplog.clear()
    connect(teacher.endpoint).close()
    assert trials(caplog) == TRIALS[: TRIALS.index(protocol) + 1]


def trials(caplog) -> tuple[str, ...]:
    """Return the protocols that were tried, as the log says."""
    said = [record.getMessage() for record in caplog.records]
    return tuple(text.rpartition(" ")[2] for text in said if ": trying " in text)


def test_a_teacher_that_speaks_another_protocol_now_is_found_out_again(run):
    first = HttpTeacher(answer_oip)
    connect(first.endpoint).close()
    first.close()
    with pytest.raises(TeacherGone, match="refused"):
        connect(first.endpoint)
    listener = socket.create_server(("127.0.0.1", first.port))
    service = LocalService()
    teacher = run(LocalTeacher(service))
    accepting = threading.Thread(target=serve_accepted, args=(listener, teacher))
    accepting.start()
    client = connect(first.endpoint)
    assert client.protocol == "fast-shm"
    client.close()
    listener.shutdown(socket.SHUT_RDWR)
    accepting.join(10)
    listener.close()


def serve_accepted(listener: socket.socket, teacher: LocalTeacher) -> None:
    with contextlib.suppress(OSError):
        while True:
            teacher.server.start(listener.accept()[0])


def test_a_model_that_is_not_there_ends_the_search(run):
    teacher = run(LocalTeacher(LocalService()))
    with pytest.raises(
        ModelNotFound, match=f"{teacher.endpoint}/nope: no model 'nope' is served here"
    ):
        connect(f"{teacher.endpoint}/nope")


@contextlib.contextmanager
def stranger(act: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that does `act` with each connection."""
    listener = socket.create_server(("127.0.0.1", 0))
    open_: list[socket.socket] = []

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                open_.append(listener.accept()[0])
                with contextlib.suppress(OSError):
                    act(open_[-1])

    thread = threading.Thread(target=accept)
    thread.start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    thread.join(10)
    listener.close()
    for sock in open_:
        sock.close()


@pytest.mark.parametrize(
    "act",
    [
        pytest.param(lambda sock: None, id="says nothing"),
        pytest.param(lambda sock: sock.close(), id="hangs up"),
        pytest.param(lambda sock: sock.sendall(b"220 smtp ready\r\n"), id="speaks SMTP"),
        pytest.param(lambda sock: sock.sendall(b"HTTP/1.1 404 No\r\n\r\n"), id="knows no path"),
    ],
)
def test_who_is_no_teacher_is_told_apart_in_time_with_what_was_tried(act):
    with stranger(act) as endpoint, pytest.raises(TeacherGone) as caught:
        connect(endpoint, connect_timeout_s=0.2)
    text = str(caught.value)
    assert text.startswith(f"{endpoint}: a server listens there")
    for protocol in TRIALS:
        assert f"{protocol} (" in text


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/v2/repository/index", [{"name": 5, "state": "READY"}]),
        ("/v2/repository/index", "[" * 100_000),
        ("/v2/models/sums", {"inputs": [{"name": "image", "datatype": "FP32", "shape": [-1]}],
                             "properties": {"edl_accepts": '{"image": [["uint8", [1e999]]]}'}}),
        ("/v2/models/sums/config", "[" * 100_000),
    ],
)  # fmt: skip
def test_what_a_teacher_says_of_itself_and_nobody_can_read_is_no_error_of_ours(run, path, said):
    def answer(method: str, asked: str, headers: Any, body: bytes) -> Any:
        if asked == path:
            return 200, {}, (said if isinstance(said, str) else json.dumps(said)).encode()
        return answer_oip(method, asked, headers, body)

    teacher = run(HttpTeacher(answer))
    with pytest.raises(DistillError, match=teacher.endpoint):
        connect(f"http://{teacher.endpoint}")


@pytest.mark.parametrize("scheme", ["fast", "grpc", "http"])
def test_a_protocol_that_was_named_is_not_replaced_by_another(run, scheme):
    teacher = run(ServingGrpcTeacher() if scheme == "grpc" else HttpTeacher(answer_serving))
    with pytest.raises(UsageError, match="give the endpoint without a protocol, or with another"):
        connect(f"{scheme}://{teacher.endpoint}/m", connect_timeout_s=5)


@pytest.mark.parametrize(
    "scheme", ["", "fast://", "grpc://", "http://", "serving://", "serving+grpc://"]
)
def test_where_nobody_listens_the_teacher_is_gone(scheme):
    endpoint = f"{scheme}127.0.0.1:{free_port()}"
    with pytest.raises(TeacherGone, match=endpoint.replace("+", ".")):
        connect(endpoint, connect_timeout_s=5)


def test_a_student_on_the_fast_path_loads_neither_grpc_nor_protobuf():
    code = (
        "import sys, distill_reader.student.clients.connect as c\n"
        "try: c.connect('127.0.0.1:1')\n"
        "except c.TeacherGone: pass\n"
        "print([m for m in ('grpc', 'google.protobuf', 'paddle') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert result.stdout.strip() == "[]"


# --- our own server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The endpoint of a process that serves a model which adds up its input."""
    teacher = TeacherProcess(tmp_path_factory.mktemp("model") / "sums", shape=(2, 3))
    teacher.start()
    teacher.wait()
    yield teacher.endpoint
    teacher.kill()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_our_own_teacher_answers_in_every_protocol(server, protocol):
    client = connect(f"{server}/sums", protocol=protocol)
    assert client.protocol == protocol
    for samples in (1, 5, 700):
        images = [np.random.default_rng(samples).random((samples, 2, 3), np.float32)]
        answer = client.predict({"image": images}, ["mean", "sum"], timeout_s=60)
        assert list(answer) == ["mean", "sum"]
        np.testing.assert_allclose(
            answer["sum"][:, 0].astype("f4"), images[0].sum((1, 2)), rtol=1e-5
        )
    with pytest.raises(DistillError, match="image"):
        client.predict({"image": [np.zeros((2, 7), np.float32)]}, ["sum"], timeout_s=60)
    client.close()


def test_our_own_teacher_is_found_out_to_share_memory(server):
    client = connect(server)
    assert client.protocol == "fast-shm"
    assert client.spec.name == "sums"
    client.close()


def waiting_requests(port: int) -> float:
    """Return how many requests wait in a teacher's queue, as its metrics say."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return float(text.partition("\nedl_teacher_queue_requests ")[2].split()[0])


def test_a_teacher_that_is_killed_ends_a_predict_that_waits(tmp_path):
    teacher = TeacherProcess(tmp_path / "m", backend="slow_sums", shape=(4,))
    teacher.start()
    teacher.wait()
    errors: list[DistillError] = []

    def ask(client: TeacherClient) -> None:
        try:
            client.predict({"image": [np.zeros((16_000, 4), "f4")]}, ["sum"], timeout_s=60)
        except DistillError as error:
            errors.append(error)
        finally:
            client.close()

    protocols = ("fast-shm", "fast-tcp", "oip-grpc", "oip-http")
    clients = [connect(f"{teacher.endpoint}/m", protocol=protocol) for protocol in protocols]
    threads = [threading.Thread(target=ask, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    wait_until(lambda: waiting_requests(teacher.port) >= 3, what="the requests are there")
    teacher.send(signal.SIGKILL)  # its predictor lives on for a moment
    for thread in threads:
        thread.join(20)
    teacher.kill()
    assert [type(error) for error in errors] == [TeacherGone] * 4
