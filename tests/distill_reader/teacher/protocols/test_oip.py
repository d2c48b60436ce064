"""The Open Inference Protocol: the same cases over gRPC and HTTP, and Triton's clients of both."""

import functools
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest

from distill_reader.errors import BadRequest, TeacherBusy, TeacherGone
from distill_reader.model.tensors import NUMPY_TO_OIP
from distill_reader.protocols import oip_json, oip_messages
from distill_reader.protocols.oip_messages import OipRequest, OipResponse
from distill_reader.student.clients.connect import connect
from tests.distill_reader.protobuf_messages import OIP_MESSAGES
from tests.distill_reader.teacher.conftest import Running
from tests.distill_reader.teacher.fake_service import DOUBLE
from tests.support import wait_until

X = np.arange(6, dtype="f4").reshape(2, 3)
N = np.array([[5], [6]])
ASKED = OipRequest(model="double", inputs={"x": X, "n": N}, request_id="7")
_TYPED = {"float32": "fp32_contents", "float64": "fp64_contents", "int64": "int64_contents"}


class RefusedError(Exception):
    """The teacher's error; its kind by the name that gRPC has for it."""

    def __init__(self, kind: str, text: str, retry_ms: str | None) -> None:
        super().__init__(f"{kind}: {text}")
        self.retry_ms = retry_ms  # in how long to come again; None: not said


def over_grpc(running: Running, asked: OipRequest, *, is_typed: bool) -> OipResponse:
    message = OIP_MESSAGES["ModelInferRequest"](
        model_name=asked.model, model_version=asked.version, id=asked.request_id
    )
    for name, array in asked.inputs.items():
        datatype = NUMPY_TO_OIP[array.dtype.name]
        tensor = message.inputs.add(name=name, datatype=datatype, shape=array.shape)
        if is_typed:
            getattr(tensor.contents, _TYPED[array.dtype.name]).extend(array.ravel().tolist())
        else:
            message.raw_input_contents.append(array.tobytes())
    for name in asked.outputs:
        message.outputs.add(name=name)
    with grpc.insecure_channel(f"127.0.0.1:{running.port}") as channel:
        infer = channel.unary_unary(f"/{oip_messages.SERVICE}/ModelInfer")
        try:
            return oip_messages.decode_response(infer(message.SerializeToString(), timeout=30))
        except grpc.RpcError as error:
            retry_ms = dict(error.trailing_metadata()).get("grpc-retry-pushback-ms")
            raise RefusedError(error.code().name, error.details(), retry_ms) from error


def over_http(running: Running, asked: OipRequest, *, is_binary: bool) -> OipResponse:
    body: dict[str, Any]
    if is_binary:
        rows = {name: [array] for name, array in asked.inputs.items()}
        length, parts = oip_json.encode_request(rows, asked.outputs, request_id=asked.request_id)
        head = {oip_json.HEAD_LENGTH: str(length)}
        body = {"data": b"".join(map(bytes, parts)), "headers": head}
    else:
        inputs = [
            {
                "name": name,
                "datatype": NUMPY_TO_OIP[array.dtype.name],
                "shape": array.shape,
                "data": array.tolist(),
            }
            for name, array in asked.inputs.items()
        ]
        outputs = [{"name": name} for name in asked.outputs]
        body = {"json": {"id": asked.request_id, "inputs": inputs, "outputs": outputs}}
    version = f"/versions/{asked.version}" if asked.version else ""
    response = running.http("POST", f"/v2/models/{asked.model}{version}/infer", **body)
    if not response.ok:
        kinds = {
            400: "INVALID_ARGUMENT", 404: "NOT_FOUND", 500: "INTERNAL", 503: "RESOURCE_EXHAUSTED",
        }  # fmt: skip
        retry_ms = response.headers.get("retry-after-ms")
        raise RefusedError(kinds[response.status_code], response.json()["error"], retry_ms)
    told = response.headers.get(oip_json.HEAD_LENGTH)
    assert (told is not None) is is_binary
    return oip_json.decode_response(response.content, None if told is None else int(told))


_WAYS = {
    "grpc, raw contents": functools.partial(over_grpc, is_typed=False),
    "grpc, typed contents": functools.partial(over_grpc, is_typed=True),
    "http, JSON": functools.partial(over_http, is_binary=False),
    "http, bytes": functools.partial(over_http, is_binary=True),
}


@pytest.fixture(params=_WAYS)
def infer(request) -> Callable[[Running, OipRequest], OipResponse]:
    """Ask for an inference in each way. Raises: RefusedError."""
    return _WAYS[request.param]


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        pytest.param((), ["y", "m"], id="all"),
        pytest.param(("m", "y"), ["m", "y"], id="in the order of the request"),
        pytest.param(("y",), ["y"], id="one"),
    ],
)
def test_a_request_is_answered_with_the_outputs_that_it_wants(served, infer, wanted, names):
    answer = infer(served, replace(ASKED, outputs=wanted))
    assert (answer.model, answer.version, answer.request_id) == ("double", "1", "7")
    assert list(answer.outputs) == names
    expected = {"y": 2 * X, "m": N + 1}
    for name, array in answer.outputs.items():
        np.testing.assert_array_equal(array, expected[name])


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_an_answer_of_another_model_is_none(start_front, scheme: str):
    """As after a restart while the connection was idle, or by a gateway before several teachers."""
    running = start_front(replace(DOUBLE, digest="one"))
    feeds, endpoint = {"x": [X], "n": [N]}, f"{scheme}://127.0.0.1:{running.port}/double"
    with closing(connect(endpoint)) as client:
        np.testing.assert_array_equal(client.predict(feeds, ["y"], timeout_s=30)["y"], 2 * X)
        running.service.models()["double"] = replace(DOUBLE, digest="two")
        with pytest.raises(TeacherGone, match=r"answers by version two of the model, .* by one"):
            client.predict(feeds, ["y"], timeout_s=30)
    with closing(connect(endpoint, mixes_versions=True)) as client:
        for digest in ("three", "two"):
            running.service.models()["double"] = replace(DOUBLE, digest=digest)
            np.testing.assert_array_equal(client.predict(feeds, ["y"], timeout_s=30)["y"], 2 * X)


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"model": "nope"}, "NOT_FOUND", "no model 'nope'"),
        ({"version": "2"}, "NOT_FOUND", "version 1, not '2'"),
        ({"inputs": {}}, "INVALID_ARGUMENT", "tensor x: is missing"),
        ({"inputs": {"x": X}}, "INVALID_ARGUMENT", "tensor n: is missing"),
        ({"inputs": {"q": X}}, "INVALID_ARGUMENT", "no input 'q'; it has x, n"),
        (
            {"inputs": {"x": np.ones((1, 1))}},
            "INVALID_ARGUMENT",
            "tensor x: expected float32, got float64",
        ),
        ({"outputs": ("z",)}, "INVALID_ARGUMENT", "no output 'z'; it has y, m"),
        ({"outputs": ("y", "y")}, "INVALID_ARGUMENT", "named twice"),
    ],
)
def test_a_wrong_request_is_refused_by_name(served, infer, changes, kind, text):
    with pytest.raises(RefusedError, match=f"{kind}: .*{text}"):
        infer(served, replace(ASKED, **changes))


@pytest.mark.parametrize(
    ("error", "kind", "retry_ms"),
    [
        pytest.param(TeacherBusy("no room", delay_s=2.5), "RESOURCE_EXHAUSTED", "2500", id="busy"),
        pytest.param(BadRequest("tensor x: odd"), "INVALID_ARGUMENT", None, id="the model refuses"),
    ],
)
def test_what_the_service_refuses_is_said_and_when_to_come_again(
    start_front, infer, error, kind, retry_ms
):
    running = start_front()

    def refuse(_) -> Any:
        raise error

    running.service.before = refuse
    with pytest.raises(RefusedError, match=f"{kind}: {error}") as caught:
        infer(running, ASKED)
    assert caught.value.retry_ms == retry_ms


def test_a_failure_of_the_server_itself_is_logged_and_survived(start_front, infer, caplog):
    running = start_front()

    def fail(_) -> Any:
        raise RuntimeError("a bug")

    running.service.before = fail
    with pytest.raises(RefusedError, match=r"INTERNAL: .*see its log"):
        infer(running, ASKED)
    assert "a bug" in caplog.text
    running.service.before = lambda request: None
    assert infer(running, ASKED).request_id == "7"


# --- Triton's clients


def test_a_models_configuration_is_as_tritons_own_messages_describe_it(served):
    module = pytest.importorskip("tritonclient.grpc")
    kinds = pytest.importorskip("tritonclient.grpc.model_config_pb2")
    with module.InferenceServerClient(f"127.0.0.1:{served.port}") as client:
        config = client.get_model_config("double").config
        with pytest.raises(Exception, match="no model 'nope'"):
            client.get_model_config("nope")
    assert (config.name, config.max_batch_size) == ("double", 16)
    assert config.dynamic_batching.max_queue_delay_microseconds == 2000
    assert [(t.name, t.data_type, list(t.dims)) for t in (*config.input, *config.output)] == [
        ("x", kinds.TYPE_FP32, [-1]),
        ("n", kinds.TYPE_INT64, [1]),
        ("y", kinds.TYPE_FP32, [-1]),
        ("m", kinds.TYPE_INT64, [1]),
    ]


@pytest.fixture(scope="module", params=["grpc", "http"])
def triton(request, served) -> Any:
    module = pytest.importorskip(f"tritonclient.{request.param}")
    client = module.InferenceServerClient(f"127.0.0.1:{served.port}")
    yield module, client
    client.close()


def triton_inputs(module, **options) -> Any:
    inputs = [module.InferInput("x", X.shape, "FP32"), module.InferInput("n", N.shape, "INT64")]
    inputs[0].set_data_from_numpy(X, **options)
    inputs[1].set_data_from_numpy(N, **options)
    return inputs


def check_predictions(result: Any) -> None:
    np.testing.assert_array_equal(result.as_numpy("y"), 2 * X)
    np.testing.assert_array_equal(result.as_numpy("m"), N + 1)


def test_tritons_client_learns_about_the_server(triton):
    module, client = triton
    as_json = {} if module.__name__.endswith("http") else {"as_json": True}
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("double")
    assert client.is_model_ready("half", "7")
    assert not client.is_model_ready("half", "8")
    assert not client.is_model_ready("nope")
    assert client.get_server_metadata(**as_json)["name"] == "edl-teacher"
    index = client.get_model_repository_index(**as_json)
    models = index["models"] if as_json else index
    assert [(model["name"], model["state"]) for model in models] == [
        ("double", "READY"),
        ("half", "READY"),
    ]
    metadata = client.get_model_metadata("half", "7", **as_json)
    assert (metadata["name"], metadata["versions"]) == ("half", ["7"])
    (x,) = metadata["inputs"]
    assert (x["name"], x["datatype"], list(map(int, x["shape"]))) == ("x", "FP16", [-1, 2])


def test_tritons_client_gets_all_outputs_when_it_names_none(triton):
    module, client = triton
    check_predictions(client.infer("double", triton_inputs(module), model_version="1"))


@pytest.mark.parametrize("triton", ["grpc"], indirect=True)
def test_tritons_grpc_client_gets_its_predictions(triton):
    module, client = triton
    outputs = [module.InferRequestedOutput(name) for name in ("m", "y")]
    result = client.infer("double", triton_inputs(module), outputs=outputs, request_id="77")
    check_predictions(result)
    assert result.get_response().id == "77"


@pytest.mark.parametrize("triton", ["http"], indirect=True)
@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
def test_tritons_http_client_gets_its_predictions(triton, binary_in, binary_out, compression):
    module, client = triton
    result = client.infer(
        "double",
        triton_inputs(module, binary_data=binary_in),
        outputs=[module.InferRequestedOutput(name, binary_data=binary_out) for name in ("m", "y")],
        request_id="77",
        request_compression_algorithm=compression,
        response_compression_algorithm=compression,
    )
    check_predictions(result)
    assert result.get_response()["id"] == "77"


@pytest.mark.parametrize("triton", ["grpc"], indirect=True)
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
        check_predictions(result)


def test_tritons_client_is_told_what_is_wrong(triton):
    from tritonclient.utils import InferenceServerException

    module, client = triton
    with pytest.raises(InferenceServerException, match="no model 'nope'"):
        client.infer("nope", triton_inputs(module))
    with pytest.raises(InferenceServerException, match="tensor n: is missing"):
        client.infer("double", triton_inputs(module)[:1])
