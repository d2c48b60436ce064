"""What clients of all protocols do alike, each with a teacher that speaks its protocol."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import pytest

from distill_reader.errors import BadRequest, DistillError, TeacherGone, TeacherTimeout
from distill_reader.model.specs import ModelSpec, TensorSpec
from distill_reader.model.tensors import Array
from distill_reader.student.clients.client import TeacherClient
from distill_reader.student.clients.connect import connect
from tests.distill_reader.student.foreign_teachers import (
    HttpTeacher,
    OipGrpcTeacher,
    ServingGrpcTeacher,
    answer_oip,
    answer_serving,
    slowly,
)
from tests.distill_reader.student.local_teacher import (
    SPEC,
    LocalService,
    LocalTeacher,
    check,
    feeds,
    sums,
)
from tests.support import wait_until

Before = Callable[[], object]
SERVING_SPEC = ModelSpec(  # as a client prototxt has it: axes of open length are left out
    name="sums",
    inputs=(
        TensorSpec(name="image", dtype="float32", shape=(2, 3), variable="x0"),
        TensorSpec(name="words", dtype="int64", shape=()),
    ),
    outputs=SPEC.outputs,
)


@contextlib.contextmanager
def fast_teacher(before: Before) -> Iterator[LocalTeacher]:
    def compute(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        before()
        return sums(inputs)

    service = LocalService(compute=compute)
    teacher = LocalTeacher(service)
    yield teacher
    wait_until(lambda: service.answers_out == 0, what="all answers are released")
    wait_until(lambda: service.arena.used_bytes == 0, what="all inputs are released")
    teacher.close()
    service.close()


TEACHERS: dict[str, Callable[[Before], AbstractContextManager[Any]]] = {
    "fast-tcp": fast_teacher,
    "fast-unix": fast_teacher,
    "fast-shm": fast_teacher,
    "oip-grpc": lambda before: contextlib.closing(OipGrpcTeacher(before=lambda _: before())),
    "oip-http": lambda before: contextlib.closing(HttpTeacher(slowly(answer_oip, before))),
    "serving-http": lambda before: contextlib.closing(HttpTeacher(slowly(answer_serving, before))),
    "serving-grpc": lambda before: contextlib.closing(ServingGrpcTeacher(before=before)),
}


@pytest.fixture(params=TEACHERS)
def open_client(request) -> Iterator[Callable[..., TeacherClient]]:
    """Connect to a teacher of each protocol, which calls `before` ahead of each answer."""
    with contextlib.ExitStack() as stack:

        def open_client(before: Before = lambda: None) -> TeacherClient:
            teacher = stack.enter_context(TEACHERS[request.param](before))
            config = SERVING_SPEC if request.param.startswith("serving") else None
            client = connect(teacher.endpoint, protocol=request.param, config=config)
            assert client.protocol == request.param
            stack.callback(client.close)
            return client

        yield open_client


@pytest.fixture
def client(open_client) -> TeacherClient:
    made: TeacherClient = open_client()
    return made


@pytest.fixture
def waiting(open_client) -> Iterator[tuple[TeacherClient, threading.Event]]:
    """A client whose teacher answers after the test, and what is set when it has been asked."""
    asked, may_answer = threading.Event(), threading.Event()

    def wait() -> None:
        asked.set()
        may_answer.wait(30)

    yield open_client(wait), asked
    may_answer.set()


def test_answers_are_those_of_the_model_request_after_request(client):
    for samples in (1, 3, 64, 1000):
        asked = feeds(samples, samples)
        answer = client.predict(asked, [], timeout_s=30)
        assert sorted(answer) == ["longest", "total"]
        check(answer, asked)
        assert all(array.flags.writeable for array in answer.values())


def test_rows_of_thousands_of_arrays_form_a_request(client):
    parts = [feeds(1, seed) for seed in range(1500)]
    asked = {name: [part[name][0] for part in parts] for name in ("image", "words")}
    check(client.predict(asked, [], timeout_s=30), asked)


def test_outputs_come_by_the_names_that_were_asked_for(client):
    for wanted in (["longest", "total"], ["total", "longest"], ["total"]):
        assert list(client.predict(feeds(2), wanted, timeout_s=30)) == wanted
    with pytest.raises(BadRequest, match="no output 'nope'"):
        client.predict(feeds(2), ["nope"], timeout_s=30)


def test_a_closed_client_is_gone(client):
    client.close()
    client.close()
    with pytest.raises(TeacherGone, match="closed"):
        client.predict(feeds(2), [], timeout_s=30)


def test_no_answer_in_time_closes_the_connection(waiting):
    client, _asked = waiting
    with pytest.raises(TeacherTimeout, match=r"no answer within 0\.2 s"):
        client.predict(feeds(2), ["total"], timeout_s=0.2)
    with pytest.raises(TeacherGone, match="closed"):
        client.predict(feeds(2), ["total"], timeout_s=30)


def test_closing_from_another_thread_ends_a_predict_that_waits(waiting):
    client, asked = waiting
    errors: list[DistillError] = []

    def ask() -> None:
        try:
            client.predict(feeds(2), ["total"], timeout_s=60)
        except DistillError as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert asked.wait(10)
    client.close()
    thread.join(10)
    assert [type(error) for error in errors] == [TeacherGone]
    with pytest.raises(TeacherGone, match="closed"):
        client.predict(feeds(2), ["total"], timeout_s=60)
