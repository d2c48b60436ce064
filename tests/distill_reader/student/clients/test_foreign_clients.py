"""Clients of Open Inference and Paddle Serving against servers that share no code with them."""

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from distill_reader import DistillReader
from distill_reader.errors import (
    BadRequest,
    DistillError,
    ModelNotFound,
    RequestTooLarge,
    TeacherBusy,
    TeacherFailed,
    TeacherGone,
    TeacherTimeout,
    TransientFailure,
    UsageError,
)
from distill_reader.protocols import gateways
from distill_reader.student.clients.connect import connect
from tests.distill_reader.student.foreign_teachers import (
    Answer,
    Http2Gateway,
    HttpTeacher,
    OipGrpcTeacher,
    Reply,
    ServingGrpcTeacher,
    answer_oip,
    answer_serving,
)
from tests.distill_reader.student.local_teacher import check, feeds


@pytest.fixture
def run():
    """Starts a teacher and ends it after the test."""
    teachers: list[Any] = []

    def run(teacher: Any) -> Any:
        teachers.append(teacher)
        return teacher

    yield run
    for teacher in teachers:
        teacher.close()


def test_the_spec_comes_from_the_metadata(run):
    for endpoint in (
        f"grpc://{run(OipGrpcTeacher()).endpoint}",
        f"http://{run(HttpTeacher(answer_oip)).endpoint}",
    ):
        client = connect(endpoint)
        assert [(t.name, t.dtype, t.shape) for t in client.spec.inputs] == [
            ("image", "float32", (2, 3)),
            ("words", "int64", (-1,)),
        ]
        assert (client.spec.name, client.spec.version) == ("sums", "2")
        client.close()


def test_a_teacher_may_answer_with_typed_contents(run):
    client = connect(f"grpc://{run(OipGrpcTeacher(typed=True)).endpoint}/sums")
    check(client.predict(feeds(3), [], timeout_s=30), feeds(3))
    client.close()


@pytest.mark.parametrize(
    ("models", "error", "text"),
    [
        (None, UsageError, "does not list its models: name the model, as .*/NAME"),
        ((), TeacherBusy, r"none of its models is ready: x \(UNAVAILABLE\)"),
        (("a", "b"), ModelNotFound, r"several models, name one, as .*/a: a, b"),
    ],
)
def test_a_model_that_must_be_named_is_asked_for(run, models, error, text):
    teacher = run(OipGrpcTeacher(models=models))
    with pytest.raises(error, match=text):
        connect(f"grpc://{teacher.endpoint}")
    connect(f"grpc://{teacher.endpoint}/sums").close()
    with pytest.raises(ModelNotFound, match="unknown model nope"):
        connect(f"grpc://{teacher.endpoint}", model="nope")


def test_a_teacher_whose_model_is_not_ready_is_not_told_to_list_none(run):
    """As one that loads it, drains, or whose predictor is started again."""
    state = "UNAVAILABLE"

    def answer(method: str, path: str, headers: Any, body: bytes) -> Reply:
        if path == "/v2/repository/index":
            return 200, {}, json.dumps([{"name": "sums", "state": state}]).encode()
        return answer_oip(method, path, headers, body)

    endpoint = f"http://{run(HttpTeacher(answer)).endpoint}"
    with pytest.raises(TeacherBusy, match=r"none of its models is ready: sums \(UNAVAILABLE\)"):
        connect(endpoint)
    state = "READY"
    connect(endpoint).close()


def test_a_model_that_the_http_teacher_lacks_is_named(run):
    teacher = run(HttpTeacher(answer_oip))
    with pytest.raises(ModelNotFound, match="/v2/models/no%2Fpe"):
        connect(f"http://{teacher.endpoint}/no%2Fpe")


def test_the_token_goes_along(run, monkeypatch):
    monkeypatch.setenv("EDL_TEACHER_TOKEN", "s3cret")
    teacher = run(OipGrpcTeacher())
    connect(f"grpc://{teacher.endpoint}").close()
    assert teacher.metadata[0]["authorization"] == "Bearer s3cret"
    shown: list[str | None] = []

    def answer(method: str, path: str, headers: Any, body: bytes) -> Reply:
        shown.append(headers.get("Authorization"))
        return answer_oip(method, path, headers, body)

    connect(f"http://{run(HttpTeacher(answer)).endpoint}").close()
    assert set(shown) == {"Bearer s3cret"}


def test_proxies_of_the_environment_are_not_used(run, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "grpc_proxy", "ALL_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    for endpoint in (
        f"grpc://{run(OipGrpcTeacher()).endpoint}",
        f"http://{run(HttpTeacher(answer_oip)).endpoint}",
    ):
        connect(endpoint).close()


@pytest.mark.parametrize(
    ("code", "details", "error"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, "tensor image is odd", BadRequest),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "queue is full", TeacherBusy),
        (grpc.StatusCode.OUT_OF_RANGE, "too many bytes", RequestTooLarge),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max", RequestTooLarge),
        (grpc.StatusCode.NOT_FOUND, "unloaded", ModelNotFound),
        (grpc.StatusCode.UNAVAILABLE, "down", TeacherGone),
        (grpc.StatusCode.UNAVAILABLE, "Exceeds maximum queue size", TeacherBusy),  # Triton
        (grpc.StatusCode.UNAVAILABLE, "Request timeout expired", TeacherBusy),  # in its queue
        (grpc.StatusCode.INTERNAL, "CUDA", TeacherFailed),
        (grpc.StatusCode.UNIMPLEMENTED, "what", TeacherGone),
        (grpc.StatusCode.UNAUTHENTICATED, "token", UsageError),
    ],
)
def test_what_a_grpc_status_means(run, code, details, error):
    teacher = run(OipGrpcTeacher(before=lambda context: context.abort(code, details)))
    client = connect(f"grpc://{teacher.endpoint}")
    with pytest.raises(error, match=f"{teacher.endpoint}: .*{details}") as caught:
        client.predict(feeds(2), [], timeout_s=30)
    assert type(caught.value) is error
    client.close()


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, BadRequest),
        (404, ModelNotFound),
        (422, BadRequest),
        (401, UsageError),
        (429, TeacherBusy),
        (503, TeacherBusy),
        (504, TeacherTimeout),
        (413, RequestTooLarge),
        (500, TeacherFailed),
        (502, TeacherGone),  # below: a gateway's
        *[(status, TeacherGone) for status in (520, 521, 522, 523, 525, 526, 530)],
        (524, TeacherTimeout),
    ],
)
@pytest.mark.parametrize("scheme", ["http", "serving"])
def test_what_an_http_status_means(run, scheme, status, error):
    def answer(method: str, path: str, headers: Any, body: bytes) -> Reply:
        if path.endswith(("/infer", "/inference")):
            return status, {"Retry-After": "0.75"}, b'{"error": "for a reason"}'
        return answer_oip(method, path, headers, body)

    client = connect(f"{scheme}://{run(HttpTeacher(answer)).endpoint}")
    with pytest.raises(error, match=f"HTTP {status}: for a reason") as caught:
        client.predict(feeds(2), [], timeout_s=30)
    assert type(caught.value) is error
    if isinstance(caught.value, TeacherBusy):
        assert caught.value.delay_s == 0.75
    client.close()


@pytest.mark.parametrize("is_binary", [True, False])
def test_fields_of_an_answer_that_are_null_are_left_out(run, is_binary: bool):
    def nulls(method: str, path: str, headers: Any, body: bytes) -> Reply:
        """Answer as KServe's own servers do."""
        if path == "/v2/models/sums":
            document = json.loads(answer_oip(method, path, headers, body)[2])
            return 200, {}, json.dumps(document | {"versions": None, "properties": None}).encode()
        if not path.endswith("/infer"):
            return answer_oip(method, path, headers, body)
        asked = int(headers["Inference-Header-Content-Length"])
        request, rest = json.loads(body[:asked]), body[asked:]
        if not is_binary:
            request["outputs"] = [{"name": each["name"]} for each in request["outputs"]]
        text = json.dumps(request).encode()
        headers = {**headers, "Inference-Header-Content-Length": str(len(text))}
        _, fields, content = answer_oip(method, path, headers, text + rest)
        length = int(fields["Inference-Header-Content-Length"])
        head = json.loads(content[:length]) | {"model_version": None, "parameters": None}
        head["id"] = None
        for output in head["outputs"]:
            output.setdefault("parameters", None)
        text = json.dumps(head).encode()
        fields = {"Inference-Header-Content-Length": str(len(text))} if is_binary else {}
        return 200, fields, text + content[length:]

    client = connect(f"http://{run(HttpTeacher(nulls)).endpoint}")
    for _ in range(2):
        check(client.predict(feeds(2), ["total"], timeout_s=30), feeds(2))
    client.close()


@pytest.mark.parametrize(
    ("extensions", "status", "is_explained"),
    [
        ([], 500, True),  # MLServer
        ([], 400, True),
        ([], 429, False),
        (["binary_tensor_data"], 500, False),
        (None, 500, False),  # it has no /v2
    ],
)
def test_a_server_that_takes_json_alone_is_named_with_the_remedy(
    run, extensions: list[str] | None, status: int, is_explained: bool
):
    is_there = False

    def answer(method: str, path: str, headers: Any, body: bytes) -> Reply:
        if path == "/v2" and extensions is not None:
            return 200, {}, json.dumps({"name": "other", "extensions": extensions}).encode()
        if path.endswith("/infer") and not is_there:
            return status, {}, b"Traceback (most recent call last):\n" * 1000
        return answer_oip(method, path, headers, body)

    client = connect(f"http://{run(HttpTeacher(answer)).endpoint}")
    explained = "does not list binary_tensor_data: if it takes JSON alone, .* by grpc://"
    with pytest.raises(DistillError, match=f"HTTP {status}: .*Traceback") as caught:
        client.predict(feeds(2), ["total"], timeout_s=30)
    assert bool(re.search(explained, str(caught.value))) == is_explained
    is_there = True
    check(client.predict(feeds(2), ["total"], timeout_s=30), feeds(2))
    is_there = False
    with pytest.raises(DistillError, match=f"HTTP {status}: Traceback"):  # it reads bytes
        client.predict(feeds(2), ["total"], timeout_s=30)
    client.close()


def test_a_page_for_people_in_place_of_metadata_is_an_error_that_names_the_teacher(run):
    teacher = run(HttpTeacher(lambda *_: (200, {}, b"<html>Log in</html>")))
    with pytest.raises(BadRequest, match=rf"^http://{teacher.endpoint}/sums: .* is no JSON"):
        connect(f"http://{teacher.endpoint}/sums")


def test_a_gateway_that_refuses_a_large_request_before_it_has_read_it_is_heard(run):
    teacher = run(HttpTeacher(answer_oip))
    client = connect(f"http://{teacher.endpoint}")
    teacher.most_bytes = 1 << 20
    for _ in range(2):
        with pytest.raises(RequestTooLarge, match="HTTP 413"):
            client.predict(feeds(1 << 19), ["total"], timeout_s=30)  # more than sockets hold
        check(client.predict(feeds(2), ["total"], timeout_s=30), feeds(2))
    client.close()


@pytest.mark.parametrize(
    ("said", "error"),
    [
        *[(status, TeacherGone) for status in (502, 503, 504, 520, 521, 522, 523, 524)],
        ("torn", TeacherGone),
        (500, TeacherFailed),
        (413, RequestTooLarge),
    ],
)
def test_what_a_gateway_says_to_grpc_means(run, said, error):
    teacher = run(Http2Gateway(said))
    with pytest.raises(error, match=f"{teacher.endpoint}/sums: gRPC ") as caught:
        connect(f"grpc://{teacher.endpoint}/sums")
    assert type(caught.value) is error


def test_a_gateway_that_has_forgotten_the_way_to_a_teacher_by_grpc_is_an_outage(run, monkeypatch):
    teacher = run(Http2Gateway(404))
    with pytest.raises(UsageError, match="status: 404"):
        connect(f"grpc://{teacher.endpoint}/sums")
    monkeypatch.setattr(gateways, "answered", {f"grpc://{teacher.endpoint}/sums"})
    with pytest.raises(TeacherGone, match="status: 404"):
        connect(f"grpc://{teacher.endpoint}/sums")


@pytest.mark.parametrize("status", [502, 503, 504, 520])
@pytest.mark.parametrize(
    ("scheme", "path"),
    [
        pytest.param("http", "/v2/health/live", id="oip"),
        pytest.param("http", "/v2/repository/index", id="list of models"),
        pytest.param("http", "/v2/models/sums", id="metadata"),
        pytest.param("http", "/v2/models/sums/config", id="configuration"),
        pytest.param("serving", "", id="serving"),
        pytest.param("", "", id="protocol unknown"),
    ],
)
def test_an_outage_while_it_connects_is_not_taken_for_what_the_teacher_is(
    run, status: int, scheme: str, path: str
):
    is_there = False

    def answer(method: str, asked: str, headers: Any, body: bytes) -> Reply:
        if not is_there and path in ("", asked):
            return status, {}, b"<html>Gateway</html>"
        reply = answer_oip(method, asked, headers, body)
        return answer_serving(method, asked, headers, body) if scheme == "serving" else reply

    endpoint = f"{scheme}://{run(HttpTeacher(answer)).endpoint}".removeprefix("://")
    if (scheme, status) == ("serving", 503):
        connect(endpoint).close()  # a router may say so to each path that it does not hand on
    else:
        with pytest.raises(TransientFailure):
            connect(endpoint)
    is_there = True
    client = connect(endpoint)
    check(client.predict(feeds(2), ["total"], timeout_s=30), feeds(2))
    client.close()


@pytest.mark.full
@pytest.mark.parametrize(
    ("status", "scheme", "answer"),
    [
        (502, "http", answer_oip),
        (502, "serving", answer_serving),
        (502, "", answer_oip),
        (504, "http", answer_oip),
        (504, "serving", answer_serving),
        (504, "", answer_oip),
        (404, "http", answer_oip),  # of one that forgets the way to it
        (404, "", answer_oip),
    ],
)
@pytest.mark.parametrize("teachers", [1, 2])
def test_a_gateway_that_reaches_no_teacher_for_long_ends_no_student(
    run, monkeypatch, status: int, scheme: str, answer: Answer, teachers: int
):
    monkeypatch.setattr("distill_reader.student.batches.tries._OUTAGE_S", 0.5)
    monkeypatch.setattr("distill_reader.student.pool.pool._FAILED_REST_S", (0.025, 0.05))
    monkeypatch.setattr("distill_reader.student.pool.teacher_registry._MOST_PAUSE_S", 0.05)
    back_s = 0.0  # 0: it is there

    def answer_through(method: str, path: str, headers: Any, body: bytes) -> Reply:
        if time.monotonic() < back_s:
            return status, {"Content-Type": "text/html"}, b"<html>Gateway</html>"
        return answer(method, path, headers, body)

    gateway = run(HttpTeacher(answer_through))
    hosts = ("127.0.0.1", "localhost")[:teachers]
    endpoints = [f"{scheme}://{each}:{gateway.port}".removeprefix("://") for each in hosts]
    given = feeds(4)

    def batches() -> Iterator[Any]:
        for number in range(60):
            yield np.full((4, 2, 3), number, np.float32), given["words"][0], number

    reader = DistillReader(["image", "words", None], ["total"]).set_fixed_teacher(endpoints)
    reader.set_teacher_batch_size(4).set_batch_generator(batches)
    seen = 0
    for _, _, number, total in reader():
        assert number == seen
        np.testing.assert_array_equal(total, np.full((4, 1), 6 * number))
        seen += 1
        if seen == 3:
            back_s = time.monotonic() + 1.5
    assert seen == 60


def test_http_connections_are_kept_and_opened_again_where_the_teacher_closed_them(run):
    teacher = run(HttpTeacher(answer_oip))
    client = connect(f"http://{teacher.endpoint}")
    for _ in range(3):
        check(client.predict(feeds(2), [], timeout_s=30), feeds(2))
    assert teacher.connections == 1
    client.close()

    def hang_up(method: str, path: str, headers: Any, body: bytes) -> Reply:
        status, fields, content = answer_oip(method, path, headers, body)
        return status, {**fields, "X-Hang-Up": "unannounced"}, content

    teacher = run(HttpTeacher(hang_up))
    client = connect(f"http://{teacher.endpoint}")
    for _ in range(3):
        check(client.predict(feeds(2), [], timeout_s=30), feeds(2))
    assert teacher.connections > 3
    client.close()


@pytest.mark.parametrize(("scheme", "answer"), [("http", answer_oip), ("serving", answer_serving)])
def test_an_answer_that_comes_twice_is_not_that_of_the_next_request(run, scheme, answer):
    def twice(method: str, path: str, headers: Any, body: bytes) -> Reply:
        status, fields, content = answer(method, path, headers, body)
        return status, {**fields, "X-Twice": "1"} if "infer" in path else fields, content

    teacher = run(HttpTeacher(twice))
    client = connect(f"{scheme}://{teacher.endpoint}")
    for seed in range(3):
        teacher.said_twice.clear()
        check(client.predict(feeds(2, seed), ["total"], timeout_s=30), feeds(2, seed))
        assert teacher.said_twice.wait(30)
    client.close()


def test_an_answer_to_another_request_is_none(run):
    late: list[Reply] = []

    def answer(method: str, path: str, headers: Any, body: bytes) -> Reply:
        status, fields, content = answer_oip(method, path, headers, body)
        if "infer" in path:
            length = int(fields["Inference-Header-Content-Length"])
            asked = json.loads(body[: int(headers["Inference-Header-Content-Length"])])
            head = json.dumps({**json.loads(content[:length]), "id": asked["id"]}).encode()
            fields = {"Inference-Header-Content-Length": str(len(head))}
            late.append((status, fields, head + content[length:]))
            return late[0]
        return status, fields, content

    client = connect(f"http://{run(HttpTeacher(answer)).endpoint}")
    check(client.predict(feeds(2, 0), ["total"], timeout_s=30), feeds(2, 0))
    with pytest.raises(TeacherGone, match="answer is to request '1', not '2'"):
        client.predict(feeds(2, 1), ["total"], timeout_s=30)
    client.close()


@pytest.mark.parametrize("scheme", ["grpc", "http"])
@pytest.mark.parametrize(
    ("version", "versions", "is_gone"),
    [
        pytest.param("3", ["2", "3"], True, id="replaced"),
        pytest.param("1", ["1", "2"], False, id="one of those that it lists"),
        pytest.param("x", ["1", "2"], False, id="lists others than it has"),
        pytest.param("", ["2", "3"], False, id="tells nothing"),
    ],
)
def test_a_model_that_is_replaced_before_its_first_answer_is_noticed(
    run, scheme: str, version: str, versions: list[str], is_gone: bool
):
    listed = ["1", "2"]

    def answer(method: str, path: str, headers: Any, body: bytes) -> Reply:
        status, fields, content = answer_oip(method, path, headers, body)
        if "infer" in path:
            length = int(fields["Inference-Header-Content-Length"])
            head = json.loads(content[:length]) | {"model_version": version}
            text = json.dumps(head).encode()
            fields = {"Inference-Header-Content-Length": str(len(text))}
            return status, fields, text + content[length:]
        if path.endswith("/sums"):
            content = json.dumps(json.loads(content) | {"versions": listed}).encode()
        return status, fields, content

    teacher = run(OipGrpcTeacher() if scheme == "grpc" else HttpTeacher(answer))
    client = connect(f"{scheme}://{teacher.endpoint}")
    teacher.version, teacher.versions = version, versions
    listed = versions
    if is_gone:
        with pytest.raises(TeacherGone, match=r"by version '3' of the model, .* by '2'"):
            client.predict(feeds(2), ["total"], timeout_s=30)
    else:
        for _ in range(2):
            check(client.predict(feeds(2), ["total"], timeout_s=30), feeds(2))
    client.close()


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_a_model_that_is_replaced_while_the_connection_stands_is_noticed(run, scheme):
    versions = ["3"]

    def answer(method: str, path: str, headers: Any, body: bytes) -> Reply:
        status, fields, content = answer_oip(method, path, headers, body)
        if "infer" in path:
            length = int(fields["Inference-Header-Content-Length"])
            head = json.loads(content[:length]) | {"model_version": versions[0]}
            text = json.dumps(head).encode()
            fields = {"Inference-Header-Content-Length": str(len(text))}
            return status, fields, text + content[length:]
        return status, fields, content

    teacher = run(OipGrpcTeacher() if scheme == "grpc" else HttpTeacher(answer))
    client = connect(f"{scheme}://{teacher.endpoint}")
    for version in ("3", "3", "4"):
        versions[0] = teacher.version = version
        if version == "4":
            with pytest.raises(TeacherGone, match=r"by version '4' of the model, .* by '3'"):
                client.predict(feeds(2), ["total"], timeout_s=30)
        else:
            check(client.predict(feeds(2), ["total"], timeout_s=30), feeds(2))
    client.close()


@pytest.mark.parametrize(
    ("fields", "content"),
    [
        ({}, b"nothing"),
        ({"Inference-Header-Content-Length": "x"}, b"{}"),
        ({"Inference-Header-Content-Length": "99"}, b"{}"),
        ({}, b'{"outputs": []}'),
    ],
)
def test_an_answer_that_is_none_is_a_teacher_that_is_gone(run, fields, content):
    def answer(method: str, path: str, headers: Any, body: bytes) -> Reply:
        if path.endswith("/infer"):
            return 200, fields, content
        return answer_oip(method, path, headers, body)

    client = connect(f"http://{run(HttpTeacher(answer)).endpoint}")
    with pytest.raises(TeacherGone, match="its answer"):
        client.predict(feeds(2), [], timeout_s=30)
    client.close()


def test_an_http_connection_ends_where_the_teachers_host_has_vanished(run):
    """A slow teacher's answer would be waited for 50 times as long as usual."""
    client: Any = connect(f"http://{run(HttpTeacher(answer_oip)).endpoint}")
    sock = client._connection._sock
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 30
    client.close()


def test_an_http_answer_that_drips_is_late_as_a_whole(run):
    def answer(method: str, path: str, headers: Any, body: bytes) -> Reply:
        if path.endswith("/infer"):
            return 200, {"X-Drip": "0.02"}, bytes(100_000)
        return answer_oip(method, path, headers, body)

    client = connect(f"http://{run(HttpTeacher(answer)).endpoint}")
    with pytest.raises(TeacherTimeout, match=r"no answer within 0\.3 s"):
        client.predict(feeds(2), [], timeout_s=0.3)  # whole it would take half an hour
    client.close()


def test_the_most_samples_of_a_request_are_what_the_models_configuration_says(run):
    def answer(method: str, path: str, headers: Any, body: bytes) -> Reply:
        if path.endswith("/config"):
            return 200, {}, b'{"name": "sums", "max_batch_size": 8}'
        return answer_oip(method, path, headers, body)

    for endpoint, most in (
        (f"http://{run(HttpTeacher(answer)).endpoint}", 8),
        (f"http://{run(HttpTeacher(answer_oip)).endpoint}", None),
        (f"grpc://{run(OipGrpcTeacher(max_batch_size=8)).endpoint}", 8),
        (f"grpc://{run(OipGrpcTeacher(max_batch_size=0)).endpoint}", None),
        (f"grpc://{run(OipGrpcTeacher()).endpoint}", None),
    ):
        client = connect(endpoint)
        assert client.bounds.most_samples == most
        client.close()


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_a_model_that_takes_fewer_samples_than_it_did_is_asked_for_fewer(run, scheme: str):
    most = 8

    def answer(method: str, path: str, headers: Any, body: bytes) -> Reply:
        if path.endswith("/config"):
            return 200, {}, json.dumps({"name": "sums", "max_batch_size": most}).encode()
        if path.endswith("/infer"):
            head = json.loads(body[: int(headers["Inference-Header-Content-Length"])])
            if head["inputs"][0]["shape"][0] > most:
                return 400, {}, b'{"error": "inference request batch-size must be <= 2"}'
        return answer_oip(method, path, headers, body)

    teacher = run(OipGrpcTeacher(max_batch_size=8) if scheme == "grpc" else HttpTeacher(answer))
    asked = [feeds(8, number) for number in range(20)]
    is_asked = threading.Event()

    def batches() -> Iterator[Any]:
        nonlocal most
        for number, one in enumerate(asked):
            if number == 10:  # its configuration is changed, and connections stay
                is_asked.wait(60)
                most = teacher.max_batch_size = 2
            yield one["image"][0], one["words"][0]

    reader = DistillReader(["image", "words"], ["total"]).set_batch_generator(batches)
    reader.set_fixed_teacher(f"{scheme}://{teacher.endpoint}/sums")
    totals = []
    for _, _, total in reader():
        is_asked.set()
        totals.append(total)
    for total, one in zip(totals, asked, strict=True):
        check({"total": total}, one)


# --- Paddle Serving


def test_without_a_prototxt_arrays_go_to_paddle_serving_as_they_are(run):
    for endpoint in (
        f"serving://{run(HttpTeacher(answer_serving)).endpoint}",
        f"serving+grpc://{run(ServingGrpcTeacher()).endpoint}",
    ):
        client = connect(endpoint)
        assert client.spec.inputs == ()
        check(client.predict(feeds(3), ["longest"], timeout_s=30), feeds(3))
        with pytest.raises(TeacherGone, match="InferService inference failed!"):
            client.predict({"image": feeds(3)["image"]}, ["total"], timeout_s=30)
        client.close()


def test_a_failure_that_paddle_serving_tells_within_an_answer_is_one(run):
    def answer(method: str, path: str, headers: Any, body: bytes) -> Reply:
        return 200, {"Content-Type": "application/proto"}, b"\x28\x05\x32\x03odd"

    client = connect(f"serving://{run(HttpTeacher(answer)).endpoint}")
    with pytest.raises(TeacherGone, match="error 5: odd"):
        client.predict(feeds(3), ["total"], timeout_s=30)
    client.close()


def test_a_refusal_as_protobuf_is_shown_by_its_text(run):
    def answer(method: str, path: str, headers: Any, body: bytes) -> Reply:
        return 400, {"Content-Type": "application/proto"}, b"\x28\x05\x32\x03odd"

    client = connect(f"serving://{run(HttpTeacher(answer)).endpoint}")
    with pytest.raises(BadRequest, match=r"HTTP 400: odd$"):
        client.predict(feeds(3), ["total"], timeout_s=30)
    client.close()


def test_an_answer_of_another_type_is_refused(run):
    client = connect(f"serving://{run(HttpTeacher(lambda *_: (200, {}, b'hello'))).endpoint}")
    with pytest.raises(TeacherGone, match="not application/proto"):
        client.predict(feeds(3), ["total"], timeout_s=30)
    client.close()
