"""The Open Inference Protocol over gRPC, by Triton's own client and by plain gRPC."""

from typing import Any

import grpc
import numpy as np
import pytest

from distill_reader.errors import TeacherBusy
from distill_reader.protocols.oip_messages import SERVICE
from distill_reader.teacher.protocols.limits import FrontLimits
from tests.distill_reader.protobuf_messages import OIP_MESSAGES
from tests.support import wait_until

X = np.arange(6, dtype="f4").reshape(2, 3)
N = np.array([[5], [6]])


@pytest.fixture
def call(served) -> Any:
    """Call a method with a message; return the answer's message."""
    with grpc.insecure_channel(f"127.0.0.1:{served.port}") as channel:
        yield caller(channel)


def caller(channel) -> Any:
    def call(method, message=None, **options) -> Any:
        data = b"" if message is None else message.SerializeToString()
        answer = channel.unary_unary(f"/{SERVICE}/{method}")(data, timeout=30, **options)
        return OIP_MESSAGES[f"{method}Response"].FromString(answer)

    return call


def infer_request(model="double", **fields) -> Any:
    message = OIP_MESSAGES["ModelInferRequest"](model_name=model, id="7", **fields)
    message.inputs.add(name="x", datatype="FP32", shape=X.shape)
    message.inputs.add(name="n", datatype="INT64", shape=N.shape)
    message.raw_input_contents.extend([X.tobytes(), N.tobytes()])
    return message


def test_the_server_tells_about_itself(call):
    assert call("ServerLive").live
    assert call("ServerReady").ready
    assert call("ServerMetadata").name == "edl-teacher"
    ready = OIP_MESSAGES["ModelReadyRequest"]
    assert call("ModelReady", ready(name="double")).ready
    assert call("ModelReady", ready(name="half", version="7")).ready
    assert not call("ModelReady", ready(name="half", version="8")).ready
    assert not call("ModelReady", ready(name="nope")).ready
    metadata = call("ModelMetadata", OIP_MESSAGES["ModelMetadataRequest"](name="half"))
    assert (metadata.name, list(metadata.versions)) == ("half", ["7"])
    assert [(t.name, t.datatype, list(t.shape)) for t in metadata.inputs] == [
        ("x", "FP16", [-1, 2])
    ]


def test_raw_contents_are_answered_by_raw_contents(call):
    message = infer_request()
    message.outputs.add(name="m")
    message.outputs.add(name="y")
    answer = call("ModelInfer", message)
    assert (answer.model_name, answer.model_version, answer.id) == ("double", "1", "7")
    assert [output.name for output in answer.outputs] == ["m", "y"]
    m, y = answer.raw_output_contents
    assert np.frombuffer(m, "i8").tolist() == [6, 7]
    assert np.frombuffer(y, "f4").reshape(2, 3).tolist() == (2 * X).tolist()


def test_typed_contents_are_understood(call):
    message = OIP_MESSAGES["ModelInferRequest"](model_name="double")
    x = message.inputs.add(name="x", datatype="FP32", shape=[1, 2])
    x.contents.fp32_contents.extend([1, 2])
    n = message.inputs.add(name="n", datatype="INT64", shape=[1, 1])
    n.contents.int64_contents.append(-5)
    answer = call("ModelInfer", message)
    assert np.frombuffer(answer.raw_output_contents[0], "f4").tolist() == [2, 4]
    assert np.frombuffer(answer.raw_output_contents[1], "i8").tolist() == [-4]


@pytest.mark.parametrize(
    ("message", "code", "text"),
    [
        (infer_request("nope"), grpc.StatusCode.NOT_FOUND, "no model 'nope'"),
        (infer_request(model_version="2"), grpc.StatusCode.NOT_FOUND, "version 1"),
        (
            OIP_MESSAGES["ModelInferRequest"](model_name="double"),
            grpc.StatusCode.INVALID_ARGUMENT,
            "tensor x: is missing",
        ),
        (
            infer_request(outputs=[{"name": "z"}]),
            grpc.StatusCode.INVALID_ARGUMENT,
            "no output 'z'",
        ),
    ],
)
def test_a_wrong_request_is_refused_by_name(call, message, code, text):
    with pytest.raises(grpc.RpcError) as caught:
        call("ModelInfer", message)
    assert caught.value.code() == code
    assert text in caught.value.details()


@pytest.mark.parametrize("method", ["ModelInfer", "ModelMetadata", "ModelReady"])
def test_bytes_that_are_no_message_are_refused(served, method):
    with (
        grpc.insecure_channel(f"127.0.0.1:{served.port}") as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        channel.unary_unary(f"/{SERVICE}/{method}")(b"\xff\xff", timeout=30)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_an_unknown_method_is_said_to_be_unknown(served):
    with (
        grpc.insecure_channel(f"127.0.0.1:{served.port}") as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        channel.unary_unary(f"/{SERVICE}/ModelTrain")(b"", timeout=30)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_a_compressed_message_is_refused_not_inflated(served):
    with (
        grpc.insecure_channel(f"127.0.0.1:{served.port}") as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        channel.unary_unary(f"/{SERVICE}/ModelInfer")(
            bytes(1 << 20), timeout=30, compression=grpc.Compression.Gzip
        )
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert "gzip" in caught.value.details()


def test_a_call_without_a_message_is_refused(served):
    with (
        grpc.insecure_channel(f"127.0.0.1:{served.port}") as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        channel.stream_unary(f"/{SERVICE}/ServerLive")(iter([]), timeout=30)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_a_full_server_says_when_to_come_again(start_front):
    running = start_front()

    def refuse(_) -> Any:
        raise TeacherBusy("the queue is full", delay_s=0.75)

    running.service.before = refuse
    with (
        grpc.insecure_channel(f"127.0.0.1:{running.port}") as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        caller(channel)("ModelInfer", infer_request())
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert dict(caught.value.trailing_metadata())["grpc-retry-pushback-ms"] == "750"


def test_a_failure_of_the_server_itself_is_logged_and_survived(start_front, caplog):
    running = start_front()

    def fail(_) -> Any:
        raise RuntimeError("a bug")

    running.service.before = fail
    with grpc.insecure_channel(f"127.0.0.1:{running.port}") as channel:
        with pytest.raises(grpc.RpcError) as caught:
            caller(channel)("ModelInfer", infer_request())
        assert caught.value.code() == grpc.StatusCode.INTERNAL
        assert "a bug" in caplog.text
        running.service.before = lambda request: None
        assert caller(channel)("ModelInfer", infer_request()).id == "7"


def test_a_message_that_is_too_long_is_refused(start_front):
    running = start_front(limits=FrontLimits(max_request_bytes=1 << 20))
    message = infer_request()
    message.raw_input_contents.append(bytes(3 << 20))
    with (
        grpc.insecure_channel(f"127.0.0.1:{running.port}") as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        caller(channel)("ModelInfer", message)
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "grpc-retry-pushback-ms" not in dict(caught.value.trailing_metadata())


def test_a_token_is_wanted_where_there_is_one(start_front):
    running = start_front(token="secret")
    with grpc.insecure_channel(f"127.0.0.1:{running.port}") as channel:
        call = caller(channel)
        for metadata in ((), (("authorization", "Bearer wrong"),)):
            with pytest.raises(grpc.RpcError) as caught:
                call("ServerLive", metadata=metadata)
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        assert call("ServerLive", metadata=(("authorization", "Bearer secret"),)).live


def test_the_memory_of_an_answer_is_given_back_when_its_client_left(start_front):
    running = start_front()
    running.service.gate.clear()
    with grpc.insecure_channel(f"127.0.0.1:{running.port}") as channel:
        future = channel.unary_unary(f"/{SERVICE}/ModelInfer").future(
            infer_request().SerializeToString()
        )
        wait_until(lambda: running.service.protocols)
        future.cancel()
    running.service.gate.set()
    wait_until(running.is_idle)


# Triton's client.


@pytest.fixture(scope="module")
def triton(served) -> Any:
    client_module = pytest.importorskip("tritonclient.grpc")
    client = client_module.InferenceServerClient(f"127.0.0.1:{served.port}")
    yield client_module, client
    client.close()


def triton_inputs(module) -> Any:
    inputs = [module.InferInput("x", X.shape, "FP32"), module.InferInput("n", N.shape, "INT64")]
    inputs[0].set_data_from_numpy(X)
    inputs[1].set_data_from_numpy(N)
    return inputs


def test_tritons_client_learns_about_the_server(triton):
    _, client = triton
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("half", "7")
    assert not client.is_model_ready("nope")
    assert client.get_server_metadata().name == "edl-teacher"
    assert [(m.name, m.state) for m in client.get_model_repository_index().models] == [
        ("double", "READY"),
        ("half", "READY"),
    ]
    assert client.get_model_metadata("double").outputs[1].name == "m"


def test_tritons_client_gets_its_predictions(triton):
    module, client = triton
    outputs = [module.InferRequestedOutput(name) for name in ("m", "y")]
    result = client.infer(
        "double",
        triton_inputs(module),
        outputs=outputs,
        request_id="77",
    )
    np.testing.assert_array_equal(result.as_numpy("y"), 2 * X)
    np.testing.assert_array_equal(result.as_numpy("m"), N + 1)
    assert result.get_response().id == "77"


def test_tritons_client_sends_many_requests_at_once(triton):
    module, client = triton
    results = []
    for _ in range(50):
        client.async_infer(
            "double", triton_inputs(module), lambda result, error: results.append((result, error))
        )
    wait_until(lambda: len(results) == 50)
    for result, error in results:
        assert error is None
        np.testing.assert_array_equal(result.as_numpy("y"), 2 * X)


def test_tritons_client_is_told_what_is_wrong(triton):
    from tritonclient.utils import InferenceServerException

    module, client = triton
    with pytest.raises(InferenceServerException, match="no model 'nope'"):
        client.infer("nope", triton_inputs(module))
