"""Paddle Serving over gRPC."""

from typing import Any

import grpc
import numpy as np
import pytest

from distill_reader.protocols.serving_messages import SERVICE
from tests.distill_reader.protobuf_messages import SERVING_MESSAGES

Request, Response = SERVING_MESSAGES["Request"], SERVING_MESSAGES["Response"]


@pytest.fixture
def call(served) -> Any:
    """Call a method with a message; return the answer's message."""
    with grpc.insecure_channel(f"127.0.0.1:{served.port}") as channel:

        def call(message, method="inference", **options):
            send = channel.unary_unary(
                f"/{SERVICE}/{method}",
                request_serializer=Request.SerializeToString,
                response_deserializer=Response.FromString,
            )
            return send(message, timeout=30, **options)

        yield call


def request(*, width=3, fetch=("y",)) -> Any:
    message = Request(log_id=5, fetch_var_names=fetch)
    message.tensor.add(
        name="x_0", alias_name="x", elem_type=1, shape=[2, width], float_data=[0.5] * 2 * width
    )
    message.tensor.add(name="n", alias_name="n", elem_type=0, shape=[2, 1], int64_data=[5, 6])
    return message


@pytest.mark.parametrize("method", ["inference", "debug"])
def test_a_request_is_answered(call, method):
    answer = call(request(), method)
    assert answer.log_id == 5
    (tensor,) = answer.outputs[0].tensor
    assert (tensor.name, tensor.alias_name) == ("fc_0.tmp_1", "y")
    assert list(tensor.float_data) == [1.0] * 6


def test_a_request_beyond_grpcs_usual_limit_is_answered(call):
    answer = call(request(width=1_000_000, fetch=["m"]))  # 8 MB; the usual limit is 4 MiB
    assert len(answer.outputs[0].tensor) == 1


def test_a_model_is_named_by_metadata_where_several_are_served(call):
    message = Request()
    message.tensor.add(
        alias_name="x",
        elem_type=5,
        shape=[1, 2],
        tensor_content=np.array([[1, 2]], "f2").tobytes(),
    )
    answer = call(message, metadata=(("edl-model", "half"),))
    content = answer.outputs[0].tensor[0].tensor_content
    assert np.frombuffer(content, "f2").tolist() == [2, 4]


@pytest.mark.parametrize(
    ("message", "metadata", "code", "text"),
    [
        (request(fetch=["z"]), (), grpc.StatusCode.INVALID_ARGUMENT, "no output 'z'"),
        (Request(), (), grpc.StatusCode.INVALID_ARGUMENT, "tensor x: is missing"),
        (request(), (("edl-model", "nope"),), grpc.StatusCode.NOT_FOUND, "no model 'nope'"),
    ],
)
def test_a_wrong_request_is_refused_by_name(call, message, metadata, code, text):
    with pytest.raises(grpc.RpcError) as caught:
        call(message, metadata=metadata)
    assert caught.value.code() == code
    assert text in caught.value.details()
