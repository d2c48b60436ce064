"""Paddle Serving: the same cases over gRPC, and over HTTP with protobuf and JSON."""

import base64
import functools
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf import json_format

from distill_reader.errors import TeacherBusy
from distill_reader.protocols.serving_messages import SERVICE
from tests.distill_reader.protobuf_messages import SERVING_MESSAGES
from tests.distill_reader.teacher.conftest import Running

Request, Response = SERVING_MESSAGES["Request"], SERVING_MESSAGES["Response"]


class RefusedError(Exception):
    """The teacher's error; its kind by the name that gRPC has for it."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")


def over_grpc(running: Running, asked: Any, *, model: str = "", method: str = "inference") -> Any:
    metadata = (("edl-model", model),) if model else ()
    with grpc.insecure_channel(f"127.0.0.1:{running.port}") as channel:
        send = channel.unary_unary(f"/{SERVICE}/{method}")
        try:
            answer = send(asked.SerializeToString(), timeout=30, metadata=metadata)
        except grpc.RpcError as error:
            raise RefusedError(error.code().name, error.details()) from error
    return Response.FromString(answer)


def over_http(
    running: Running, asked: Any, *, model: str = "", method: str = "inference", is_json: bool
) -> Any:
    body: dict[str, Any] = {"json": plain(asked)}
    if not is_json:
        headers = {"Content-Type": "application/proto"}
        body = {"data": asked.SerializeToString(), "headers": headers}
    path = f"/{model}" * bool(model) + f"/GeneralModelService/{method}"
    response = running.http("POST", path, **body)
    if is_json:
        answer = json_format.ParseDict(response.json(), Response())
    else:
        assert response.headers["Content-Type"] == "application/proto"
        answer = Response.FromString(response.content)
    if not response.ok:
        kinds = {400: "INVALID_ARGUMENT", 404: "NOT_FOUND", 503: "RESOURCE_EXHAUSTED"}
        assert answer.err_no
        raise RefusedError(kinds[response.status_code], answer.err_msg)
    return answer


def plain(value: Any) -> Any:
    """Return a message, or a part of one, as the JSON that Paddle Serving's client sends."""
    if hasattr(value, "ListFields"):
        return {field.name: plain(part) for field, part in value.ListFields()}
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, str | int | float):
        return value
    return [plain(part) for part in value]


_WAYS: dict[str, Callable[..., Any]] = {
    "grpc": over_grpc,
    "http, protobuf": functools.partial(over_http, is_json=False),
    "http, JSON": functools.partial(over_http, is_json=True),
}


@pytest.fixture(params=_WAYS)
def infer(request) -> Callable[..., Any]:
    """Ask for an inference in each way. Raises: RefusedError."""
    return _WAYS[request.param]


def make_request(*, width: int = 3, fetch: tuple[str, ...] = ("y",)) -> Any:
    """Return what the client builds: a message, field by field, with the batch in the shape."""
    message = Request(log_id=5, fetch_var_names=fetch)
    message.tensor.add(
        name="x_0", alias_name="x", elem_type=1, shape=[2, width], float_data=[0.5] * 2 * width
    )
    message.tensor.add(name="n", alias_name="n", elem_type=0, shape=[2, 1], int64_data=[5, 6])
    return message


def request_with_another_input() -> Any:
    message = make_request()
    message.tensor.add(alias_name="q", elem_type=1, shape=[0])
    return message


def request_of_floats() -> Any:
    message = make_request()
    n = message.tensor[1]
    n.ClearField("int64_data")
    n.float_data.extend([5, 6])
    n.elem_type = 1
    return message


HALF = Request()
HALF.tensor.add(
    alias_name="x", elem_type=5, shape=[1, 2], tensor_content=np.array([[1, 2]], "f2").tobytes()
)


@pytest.mark.parametrize("method", ["inference", "debug"])
def test_a_request_is_answered(served, infer, method):
    answer = infer(served, make_request(), method=method)
    assert (answer.log_id, answer.err_no) == (5, 0)
    (output,) = answer.outputs
    assert output.engine_name == "general_infer_0"
    (tensor,) = output.tensor
    assert (tensor.name, tensor.alias_name, tensor.elem_type) == ("fc_0.tmp_1", "y", 1)
    assert (list(tensor.shape), list(tensor.float_data)) == ([2, 3], [1.0] * 6)


@pytest.mark.parametrize(
    ("fetch", "names"),
    [
        pytest.param(("m", "y"), ["m", "y"], id="in the order of the request"),
        pytest.param((), ["y", "m"], id="all if none is named"),
        pytest.param(("fc_0.tmp_1",), ["y"], id="by a variable"),
    ],
)
def test_the_outputs_are_those_that_the_request_wants(served, infer, fetch, names):
    answer = infer(served, make_request(fetch=fetch))
    assert [tensor.alias_name for tensor in answer.outputs[0].tensor] == names


def test_a_request_beyond_grpcs_usual_limit_is_answered(served, infer):
    answer = infer(served, make_request(width=1_000_000, fetch=("m",)))  # the limit is 4 MiB
    (tensor,) = answer.outputs[0].tensor
    assert list(tensor.int64_data) == [6, 7]


def test_a_model_may_be_named_and_tensors_may_come_as_bytes(served, infer):
    (tensor,) = infer(served, HALF, model="half").outputs[0].tensor
    assert np.frombuffer(tensor.tensor_content, "f2").tolist() == [2, 4]


def test_tensors_are_found_by_their_alias_or_their_own_name(served, infer):
    message = make_request()
    message.tensor[0].alias_name = ""
    message.tensor[1].name = ""
    assert infer(served, message).log_id == 5


@pytest.mark.parametrize(
    ("message", "model", "kind", "text"),
    [
        (make_request(), "nope", "NOT_FOUND", "no model 'nope'"),
        (Request(), "", "INVALID_ARGUMENT", "tensor x: is missing"),
        (make_request(fetch=("z",)), "", "INVALID_ARGUMENT", "no output 'z'; it has y, m"),
        (request_with_another_input(), "", "INVALID_ARGUMENT", "no input 'q'; it has x, n"),
        (request_of_floats(), "", "INVALID_ARGUMENT", "tensor n: expected int64, got float32"),
    ],
)
def test_a_wrong_request_is_refused_by_name(served, infer, message, model, kind, text):
    with pytest.raises(RefusedError, match=f"{kind}: .*{text}"):
        infer(served, message, model=model)


def test_a_full_server_is_said_to_be(start_front, infer):
    running = start_front()

    def refuse(_) -> Any:
        raise TeacherBusy("the queue is full", delay_s=0.05)

    running.service.before = refuse
    with pytest.raises(RefusedError, match=r"RESOURCE_EXHAUSTED: .*the queue is full"):
        infer(running, make_request())
