"""What gRPC alone has of the Open Inference Protocol. What HTTP has as well: test_oip."""

import grpc
import numpy as np
import pytest

from distill_reader.protocols.oip_messages import SERVICE, encode_request
from distill_reader.teacher.protocols.limits import FrontLimits
from tests.distill_reader.protobuf_messages import OIP_MESSAGES
from tests.distill_reader.teacher.conftest import Running
from tests.support import wait_until

REQUEST = encode_request(
    "double", {"x": [np.ones((2, 3), "f4")], "n": [np.array([[5], [6]])]}, request_id="7"
)


def open_channel(running: Running) -> grpc.Channel:
    return grpc.insecure_channel(f"127.0.0.1:{running.port}")


@pytest.mark.parametrize(
    ("method", "data", "compression", "code", "text"),
    [
        ("ModelInfer", b"\xff\xff", None, grpc.StatusCode.INVALID_ARGUMENT, "malformed"),
        (
            "ModelMetadata",
            b"\xff\xff",
            None,
            grpc.StatusCode.INVALID_ARGUMENT,
            "no ModelMetadataRequest",
        ),
        ("ModelReady", b"\xff\xff", None, grpc.StatusCode.INVALID_ARGUMENT, "no ModelReady"),
        ("ModelTrain", b"", None, grpc.StatusCode.UNIMPLEMENTED, ""),
        (
            "ModelInfer",
            bytes(1 << 20),  # would be refused for what it is, were it inflated
            grpc.Compression.Gzip,
            grpc.StatusCode.UNIMPLEMENTED,
            "gzip",
        ),
    ],
)
def test_a_call_that_is_not_understood_is_refused(served, method, data, compression, code, text):
    with open_channel(served) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(f"/{SERVICE}/{method}")(data, timeout=30, compression=compression)
    assert caught.value.code() == code
    assert text in caught.value.details()


def test_a_call_without_a_message_is_refused(served):
    with open_channel(served) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.stream_unary(f"/{SERVICE}/ServerLive")(iter([]), timeout=30)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_a_message_that_is_too_long_is_refused(start_front):
    running = start_front(limits=FrontLimits(max_request_bytes=1 << 20))
    with open_channel(running) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(f"/{SERVICE}/ModelInfer")(REQUEST + bytes(3 << 20), timeout=30)
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "grpc-retry-pushback-ms" not in dict(caught.value.trailing_metadata())


def test_a_token_is_wanted_where_there_is_one(start_front):
    with open_channel(start_front(token="secret")) as channel:
        ask = channel.unary_unary(f"/{SERVICE}/ServerMetadata")
        for metadata in ((), (("authorization", "Bearer wrong"),)):
            with pytest.raises(grpc.RpcError) as caught:
                ask(b"", timeout=30, metadata=metadata)
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        answer = ask(b"", timeout=30, metadata=(("authorization", "Bearer secret"),))
        assert OIP_MESSAGES["ServerMetadataResponse"].FromString(answer).name


def test_the_memory_of_an_answer_is_given_back_when_its_client_left(start_front):
    running = start_front()
    running.service.gate.clear()
    with open_channel(running) as channel:
        future = channel.unary_unary(f"/{SERVICE}/ModelInfer").future(REQUEST)
        wait_until(lambda: running.service.protocols)
        future.cancel()
    running.service.gate.set()
    wait_until(running.is_idle)
