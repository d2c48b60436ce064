"""Messages of the Open Inference Protocol, over gRPC and HTTP, against the protobuf library."""

import contextlib
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill_reader.errors import BadRequest
from distill_reader.model.specs import InputEncoding, ModelSpec, TensorSpec
from distill_reader.model.tensors import OIP_TO_NUMPY
from distill_reader.protocols import oip_json, oip_messages
from distill_reader.student.clients.rows import find_outputs
from distill_reader.student.labels.labels import Labels
from distill_reader.student.pool.request_mapping import RequestMapping
from tests.distill_reader.protobuf_messages import OIP_MESSAGES

SPEC = ModelSpec(
    name="lenet",
    version="3",
    inputs=(
        TensorSpec(name="image", dtype="float32", shape=(1, -1, 28)),
        TensorSpec(name="n", dtype="int64", shape=()),
    ),
    outputs=(TensorSpec(name="p", dtype="float16", shape=(10,)),),
)
Request, Response = OIP_MESSAGES["ModelInferRequest"], OIP_MESSAGES["ModelInferResponse"]


def test_a_request_is_one_that_the_library_reads():
    image, more = np.random.rand(2, 3).astype("f4"), np.random.rand(1, 3).astype("f4")
    data = oip_messages.encode_request(
        "m", {"image": [image, more], "n": np.arange(3)}, ["p", "q"], version="2", request_id="7"
    )
    message = Request.FromString(data)
    assert (message.model_name, message.model_version, message.id) == ("m", "2", "7")
    assert [(t.name, t.datatype, list(t.shape)) for t in message.inputs] == [
        ("image", "FP32", [3, 3]),
        ("n", "INT64", [3]),
    ]
    assert [output.name for output in message.outputs] == ["p", "q"]
    assert list(message.raw_input_contents) == [
        image.tobytes() + more.tobytes(),
        np.arange(3).tobytes(),
    ]


def test_a_request_of_the_library_is_understood():
    message = Request(model_name="m", model_version="1", id="a")
    message.inputs.add(name="x", datatype="FP32", shape=[2, 1]).parameters["note"].int64_param = 1
    message.inputs.add(name="y", datatype="UINT8", shape=[3])
    message.outputs.add(name="p").parameters["binary_data"].bool_param = True
    message.raw_input_contents.extend([np.array([1, 2], "f4").tobytes(), b"abc"])
    request = oip_messages.decode_request(message.SerializeToString())
    assert (request.model, request.version, request.request_id) == ("m", "1", "a")
    assert request.outputs == ("p",)
    assert request.inputs["x"].tolist() == [[1], [2]]
    assert request.inputs["y"].tolist() == list(b"abc")


@pytest.mark.parametrize(
    ("datatype", "contents", "numbers"),
    [
        ("BOOL", "bool_contents", [True, False]),
        ("INT8", "int_contents", [-128, 127]),
        ("INT16", "int_contents", [-5, 5]),
        ("INT32", "int_contents", [-(1 << 31), 5]),
        ("INT64", "int64_contents", [-(1 << 63), 5]),
        ("UINT8", "uint_contents", [0, 255]),
        ("UINT16", "uint_contents", [0, 5]),
        ("UINT32", "uint_contents", [0, (1 << 32) - 1]),
        ("UINT64", "uint64_contents", [0, (1 << 64) - 1]),
        ("FP32", "fp32_contents", [0.5, -2.0]),
        ("FP64", "fp64_contents", [0.1, -2.0]),
    ],
)
def test_typed_contents_are_understood(datatype, contents, numbers):
    message = Request(model_name="m")
    tensor = message.inputs.add(name="x", datatype=datatype, shape=[2, 1])
    getattr(tensor.contents, contents).extend(numbers)
    array = oip_messages.decode_request(message.SerializeToString()).inputs["x"]
    assert array.dtype.name == OIP_TO_NUMPY[datatype]
    assert array.tolist() == [[number] for number in numbers]


def refuse(match: str, message) -> None:
    with pytest.raises(BadRequest, match=match):
        oip_messages.decode_request(message.SerializeToString())


def test_what_a_request_gets_wrong_is_refused_by_the_tensors_name():
    one = {"name": "x", "datatype": "FP32", "shape": [2]}
    refuse(
        "tensor x: float32 of shape .2. has 8 bytes, 4 came",
        Request(inputs=[one], raw_input_contents=[bytes(4)]),
    )
    refuse("1 tensors have 2 raw contents", Request(inputs=[one], raw_input_contents=[b"", b""]))
    refuse("tensor x: shape .2. has 2 elements, 0 came", Request(inputs=[one]))
    refuse(
        "tensor x: has raw and typed contents",
        Request(
            inputs=[one | {"contents": {"fp32_contents": [1, 2]}}], raw_input_contents=[bytes(8)]
        ),
    )
    refuse(
        "tensor x: FP32 has its contents in another field",
        Request(inputs=[one | {"contents": {"fp64_contents": [1, 2]}}]),
    )
    refuse("tensor x: FP16 must be sent as raw", Request(inputs=[one | {"datatype": "FP16"}]))
    refuse(
        "tensor x: data does not fit int8",
        Request(
            inputs=[one | {"datatype": "INT8", "contents": {"int_contents": [1, 128]}}],
        ),
    )
    refuse(
        "tensor x: came twice", Request(inputs=[one, one], raw_input_contents=[bytes(8), bytes(8)])
    )
    refuse(
        "tensor x: shape .* impossible",
        Request(inputs=[one | {"shape": [-1]}], raw_input_contents=[bytes(8)]),
    )


def test_a_parameter_that_changes_what_is_meant_is_refused():
    message = Request()
    message.inputs.add(name="x").parameters["shared_memory_region"].string_param = "r"
    refuse("tensor x: parameter shared_memory_region", message)
    message = Request()
    message.outputs.add(name="p").parameters["classification"].int64_param = 3
    refuse("tensor p: parameter classification", message)


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\x05abc", b"\x2a\x02\x0a\x05", b"\x0a\x01\xff"])
def test_a_malformed_message_is_refused(data):
    with pytest.raises(BadRequest, match="malformed"):
        oip_messages.decode_request(data)


@given(st.binary(max_size=300))
def test_whatever_comes_is_read_or_refused(data):
    for decode in (oip_messages.decode_request, oip_messages.decode_response):
        with contextlib.suppress(BadRequest):
            decode(data)


@given(st.data())
def test_a_damaged_request_is_read_or_refused(data):
    message = bytearray(oip_messages.encode_request("m", {"x": np.arange(6).reshape(2, 3)}, ["p"]))
    for _ in range(data.draw(st.integers(1, 4))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(BadRequest):
        oip_messages.decode_request(bytes(message))


@pytest.mark.parametrize("dtype", OIP_TO_NUMPY.values())
def test_a_response_is_one_that_the_library_and_we_read(dtype):
    array = np.arange(6).reshape(2, 3).astype(dtype)
    data = oip_messages.encode_response("m", {"p": array}, version="1", request_id="7")
    message = Response.FromString(data)
    assert (message.model_name, message.model_version, message.id) == ("m", "1", "7")
    assert list(message.outputs[0].shape) == [2, 3]
    assert list(message.raw_output_contents) == [array.tobytes()]
    response = oip_messages.decode_response(data)
    assert (response.model, response.version, response.request_id) == ("m", "1", "7")
    assert response.outputs["p"].dtype.name == dtype
    np.testing.assert_array_equal(response.outputs["p"], array)


def test_metadata_say_what_a_model_takes_and_returns():
    data = oip_messages.encode_metadata(SPEC, "paddle")
    message = OIP_MESSAGES["ModelMetadataResponse"].FromString(data)
    assert (message.name, list(message.versions), message.platform) == ("lenet", ["3"], "paddle")
    assert list(message.inputs[0].shape) == [-1, 1, -1, 28]
    assert message.outputs[0].datatype == "FP16"
    assert oip_messages.decode_metadata(data) == SPEC
    with pytest.raises(BadRequest, match="malformed"):
        oip_messages.decode_metadata(b"\xff")


# Over HTTP.


def joined(parts) -> bytes:
    return b"".join(bytes(part) for part in parts)


def test_an_http_request_has_its_tensors_behind_the_head():
    image = np.random.rand(2, 3).astype("f4")
    length, parts = oip_json.encode_request({"x": [image, image]}, ["p"], request_id="7")
    body = joined(parts)
    head = json.loads(body[:length])
    assert head["inputs"] == [
        {
            "name": "x",
            "datatype": "FP32",
            "shape": [4, 3],
            "parameters": {"binary_data_size": 48},
        }
    ]
    assert body[length:] == image.tobytes() * 2
    asked = oip_json.decode_request(body, length)
    assert asked.request.outputs == ("p",)
    assert asked.binary == {"p": True}
    np.testing.assert_array_equal(asked.request.inputs["x"], np.concatenate([image, image]))


@pytest.mark.parametrize("data", [[1, 2, 3, 4], [[1, 2], [3, 4]]])
def test_an_http_request_may_be_plain_json(data):
    tensor = {"name": "x", "datatype": "INT32", "shape": [2, 2], "data": data}
    asked = oip_json.decode_request(json.dumps({"id": "i", "inputs": [tensor]}).encode(), None)
    assert asked.request.inputs["x"].tolist() == [[1, 2], [3, 4]]
    assert asked.request.request_id == "i"
    assert not asked.is_binary


def test_an_http_answer_is_json_unless_bytes_are_asked_for():
    outputs = {"p": np.array([[0.5]], "f4"), "q": np.array([[7]], "i8")}
    plain = oip_json.decode_request(b'{"inputs": []}', None)
    length, parts = oip_json.encode_response("m", outputs, asked=plain, version="1")
    assert length is None
    assert json.loads(joined(parts))["outputs"][0] == {
        "name": "p", "datatype": "FP32", "shape": [1, 1], "data": [0.5],
    }  # fmt: skip
    mixed = oip_json.decode_request(
        b'{"inputs": [], "outputs": [{"name": "p", "parameters": {"binary_data": true}},'
        b'{"name": "q"}]}',
        None,
    )
    length, parts = oip_json.encode_response("m", outputs, asked=mixed)
    body = joined(parts)
    assert length is not None
    assert body[length:] == np.float32(0.5).tobytes()
    back = oip_json.decode_response(body, length)
    assert {name: array.tolist() for name, array in back.outputs.items()} == {
        "p": [[0.5]],
        "q": [[7]],
    }


@pytest.mark.parametrize(
    ("head", "rest", "match"),
    [
        ("[]", b"", "must be a JSON object"),
        ("{", b"", "no JSON"),
        ("[" * 100_000, b"", "no JSON"),
        ('{"inputs": 5}', b"", "inputs: must be a list"),
        ('{"inputs": [{"name": ""}]}', b"", "inputs: a tensor has no name"),
        ('{"inputs": [{"name": "x"}]}', b"", "tensor x: datatype ''"),
        ('{"inputs": [{"name": "x", "datatype": "FP32"}]}', b"", "tensor x: shape must be"),
        (
            '{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1]}]}',
            b"",
            "tensor x: needs data",
        ),
        (
            '{"inputs": [{"name": "x", "datatype": "FP32", "shape": [3], "data": [1]}]}',
            b"",
            "tensor x: shape .3. has 3 elements, 1 came",
        ),
        (
            '{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1],'
            '"parameters": {"binary_data_size": 40}}]}',
            b"1234",
            "tensor x: binary_data_size is 40, 4 bytes are left",
        ),
        (
            '{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1],'
            '"parameters": {"binary_data_size": true}}]}',
            b"1234",
            "tensor x: binary_data_size is True",
        ),
        ('{"inputs": []}', b"1234", "4 bytes are left after"),
        ('{"outputs": [{"name": "p", "parameters": 5}]}', b"", "parameters: must be an object"),
        (
            '{"outputs": [{"name": "p", "parameters": {"classification": 2}}]}',
            b"",
            "tensor p: parameter classification",
        ),
        ('{"id": 5}', b"", "id: expected text"),
    ],
)
def test_what_an_http_request_gets_wrong_is_named(head, rest, match):
    with pytest.raises(BadRequest, match=match):
        oip_json.decode_request(head.encode() + rest, len(head))


@pytest.mark.parametrize("length", [-1, 3])
def test_a_head_length_beyond_the_body_is_refused(length):
    with pytest.raises(BadRequest, match=oip_json.HEAD_LENGTH):
        oip_json.decode_request(b"{}", length)


def test_metadata_over_http_say_the_same():
    document = oip_json.encode_metadata(SPEC, "paddle")
    assert document["inputs"][0] == {"name": "image", "datatype": "FP32", "shape": [-1, 1, -1, 28]}
    assert oip_json.decode_metadata(json.dumps(document).encode()) == SPEC


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_metadata_of_ours_say_what_else_is_taken_and_those_of_others_do_not(protocol: str):
    def passed_on(spec: ModelSpec) -> ModelSpec:
        if protocol == "grpc":
            return oip_messages.decode_metadata(oip_messages.encode_metadata(spec, "p"))
        document = oip_json.encode_metadata(spec, "p")
        return oip_json.decode_metadata(json.dumps(document).encode())

    pixels = InputEncoding(dtype="uint8", shape=(3, 4, 1))
    inputs = (replace(SPEC.inputs[0], accepts=(pixels,)), *SPEC.inputs[1:])
    found = passed_on(replace(SPEC, inputs=inputs, takes_encodings=True, digest="5eed"))
    assert (found.inputs[0].accepts, found.takes_encodings, found.digest) == (
        (pixels,),
        True,
        "5eed",
    )
    plain = passed_on(SPEC)
    assert (plain.inputs[0].accepts, plain.takes_encodings, plain.digest) == ((), False, "")


@given(
    st.dictionaries(
        st.sampled_from(["edl_accepts", "edl_takes_forms", "edl_digest", "x"]),
        st.text(max_size=20) | st.sampled_from(['{"image": 3}', "[]", '{"image": [["uint8"]]}']),
    )
)
def test_any_properties_say_something_or_are_refused(properties):
    with contextlib.suppress(BadRequest):
        assert oip_messages.with_properties(SPEC, properties).outputs == SPEC.outputs


# --- foreign models


def metadata(**tensors: tuple[str, list[int]]) -> bytes:
    """Of a model that takes `x`, by name its other tensors' types and shapes."""
    tensor = oip_messages.MESSAGES["ModelMetadataResponse.TensorMetadata"]
    described = {"x": ("FP32", [-1, 2]), **tensors}
    found = [tensor(name=n, datatype=d, shape=s) for n, (d, s) in described.items()]
    message = oip_messages.MESSAGES["ModelMetadataResponse"]
    return bytes(message(name="m", inputs=found[:1], outputs=found[1:]).SerializeToString())


def metadata_json(**tensors: tuple[str, list[int]]) -> bytes:
    described = {"x": ("FP32", [-1, 2]), **tensors}
    found = [{"name": n, "datatype": d, "shape": s} for n, (d, s) in described.items()]
    return json.dumps({"name": "m", "inputs": found[:1], "outputs": found[1:]}).encode()


OUTPUTS: dict[str, Any] = {
    "score": ("FP32", [-1, 3]),
    "label": ("BYTES", [-1, 1]),
    "half": ("BF16", [-1, 2]),
    "flat": ("FP32", [16]),
}


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(oip_messages.decode_metadata(metadata(**OUTPUTS)), id="grpc"),
        pytest.param(oip_json.decode_metadata(metadata_json(**OUTPUTS)), id="http"),
    ],
)
def test_a_tensor_that_cannot_be_read_matters_to_who_wants_it_alone(spec):
    assert list(find_outputs(spec, [])) == ["score", "half"]
    asking = RequestMapping("t:1", spec, ("x",), Labels(("score", "half"), "", None))
    assert asking.columns == ("score", "half")
    assert spec.output("half").dtype == "float32"
    for name, words in (
        ("label", "t:1: predicts: output label is BYTES, and only BOOL, .* are read"),
        ("flat", r"output flat has shape \[16\], and axis 0 does not .* max_batch_size"),
    ):
        with pytest.raises(BadRequest, match=words):
            RequestMapping("t:1", spec, ("x",), Labels((name,), "", None))


@pytest.mark.parametrize(
    ("datatype", "shape", "words"),
    [
        ("BYTES", [-1, 1], "model m: input x is BYTES, and only"),
        ("BF16", [-1, 2], "input x is BF16, and only"),
        ("FP32", [16], r"input x has shape \[16\], and axis 0 does not count samples"),
        ("FP32", [], r"input x has shape \[\], and axis 0 does not"),
    ],
)
def test_an_input_that_cannot_be_sent_is_refused_by_name(datatype, shape, words):
    spec = oip_messages.decode_metadata(metadata(x=(datatype, shape), score=("FP32", [-1, 3])))
    with pytest.raises(BadRequest, match=words):
        RequestMapping("t:1", spec, ("x",), Labels(("score",), "", None))


def test_bfloat16_is_read_and_text_that_nobody_asked_for_is_passed_over():
    values = np.array([[1.0, -2.5], [0.0, 3e38]], np.float32)
    halves = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    message = Response(model_name="m", raw_output_contents=[b"\1\0\0\0a", halves])
    message.outputs.add(name="label", datatype="BYTES", shape=[1, 1])
    message.outputs.add(name="half", datatype="BF16", shape=[2, 2])
    head = {
        "outputs": [
            {"name": n, "datatype": d, "shape": s, "parameters": {"binary_data_size": size}}
            for n, d, s, size in (("label", "BYTES", [1, 1], 5), ("half", "BF16", [2, 2], 8))
        ]
        + [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a"]}]
    }
    text = json.dumps(head).encode()
    for outputs in (
        oip_messages.decode_response(message.SerializeToString()).outputs,
        oip_json.decode_response(text + b"\1\0\0\0a" + halves, len(text)).outputs,
    ):
        assert list(outputs) == ["half"]
        assert outputs["half"].dtype == np.float32
        found: Any = outputs["half"]
        np.testing.assert_allclose(found, list(values), rtol=2**-7)
    request = Request(raw_input_contents=[halves])
    request.inputs.add(name="x", datatype="BF16", shape=[2, 2])
    refuse("tensor x: datatype 'BF16' is none of", request)  # a teacher of ours takes none
