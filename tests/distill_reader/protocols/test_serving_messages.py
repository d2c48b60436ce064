"""Paddle Serving's messages, as protobuf and as JSON, against the protobuf library.

The requests are those of its HttpClient: built field by field with the library, not with what is
tested here.
"""

import base64
import contextlib
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill_reader.errors import BadRequest
from distill_reader.protocols import serving_json, serving_messages
from distill_reader.protocols.serving_messages import ServingResponse, ServingTensor
from tests.distill_reader.protobuf_messages import SERVING_MESSAGES

Request, Response = SERVING_MESSAGES["Request"], SERVING_MESSAGES["Response"]


def as_dict(tensor: ServingTensor):
    return (tensor.name, tensor.alias_name, tensor.array.dtype.name, tensor.array.tolist())


@pytest.mark.parametrize(
    ("elem_type", "data", "dtype"),
    [
        (0, {"int64_data": [-5, 6]}, "int64"),
        (1, {"float_data": [0.5, 6]}, "float32"),
        (2, {"int_data": [-5, 6]}, "int32"),
        (3, {"float64_data": [0.1, 6]}, "float64"),
        (9, {"bool_data": [True, False]}, "bool"),
        (0, {"tensor_content": np.array([-5, 6], "i8").tobytes()}, "int64"),
        (1, {"tensor_content": np.array([0.5, 6], "f4").tobytes()}, "float32"),
        (4, {"tensor_content": np.array([-5, 6], "i2").tobytes()}, "int16"),
        (5, {"tensor_content": np.array([0.5, 6], "f2").tobytes()}, "float16"),
        (7, {"tensor_content": b"\x05\x06"}, "uint8"),
        (8, {"tensor_content": b"\x05\x06"}, "int8"),
    ],
)
def test_a_request_of_its_client_is_understood(elem_type, data, dtype):
    message = Request(log_id=5, fetch_var_names=["price", "q"], profile_server=True)
    message.tensor.add(elem_type=elem_type, shape=[2, 1], name="x_0", alias_name="x", **data)
    request = serving_messages.decode_request(message.SerializeToString())
    (numbers,) = data.values()
    if isinstance(numbers, bytes):
        numbers = np.frombuffer(numbers, dtype).tolist()
    assert [as_dict(tensor) for tensor in request.tensors] == [
        ("x_0", "x", dtype, [[number] for number in np.array(numbers, dtype).tolist()])
    ]
    assert (request.fetch, request.profile_server, request.log_id) == (("price", "q"), True, 5)
    document = {
        "fetch_var_names": ["price", "q"],
        "log_id": 5,
        "profile_server": True,
        "unknown": {},
        "tensor": [
            {
                "elem_type": elem_type,
                "shape": [2, 1],
                "name": "x_0",
                "alias_name": "x",
                **{
                    name: base64.b64encode(value).decode() if isinstance(value, bytes) else value
                    for name, value in data.items()
                },
            }
        ],
    }
    from_json = serving_json.decode_request(json.dumps(document).encode())
    assert list(map(as_dict, from_json.tensors)) == list(map(as_dict, request.tensors))
    assert (from_json.fetch, from_json.profile_server, from_json.log_id) == (
        ("price", "q"),
        True,
        5,
    )


def test_the_request_that_was_seen_on_the_wire_is_understood():
    text = (
        b'{"fetch_var_names":["price"],"log_id":5,"tensor":[{"float_data":[0.5,1.0],'
        b'"shape":[1,2],"elem_type":1,"name":"x","alias_name":"x"}]}'
    )
    (tensor,) = serving_json.decode_request(text).tensors
    assert as_dict(tensor) == ("x", "x", "float32", [[0.5, 1.0]])


@pytest.mark.parametrize("dtype", serving_messages.ELEM_TYPES.values())
def test_our_request_is_one_that_the_library_and_we_read(dtype):
    first = np.array([[1, 2, 3], [100, 0, 1]]).astype(dtype)
    more = np.array([[5, 6, 7]]).astype(dtype)
    data = serving_messages.encode_request(
        {"x": [first, more]}, ["p"], names={"x": "x_0"}, log_id=9, profile_server=True
    )
    message = Request.FromString(data)
    (tensor,) = message.tensor
    assert (tensor.name, tensor.alias_name, list(tensor.shape)) == ("x_0", "x", [3, 3])
    assert (list(message.fetch_var_names), message.log_id) == (["p"], 9)
    fields = {"int64": "int64_data", "float32": "float_data", "int32": "int_data",
              "float64": "float64_data"}  # fmt: skip
    expected = np.concatenate([first, more])
    if dtype in fields:
        np.testing.assert_array_equal(getattr(tensor, fields[dtype]), expected.reshape(-1))
    else:
        assert tensor.tensor_content == expected.tobytes()
    (back,) = serving_messages.decode_request(data).tensors
    np.testing.assert_array_equal(back.array, expected)
    assert back.array.dtype.name == dtype


def response_of(dtype: str) -> ServingResponse:
    array = np.array([[1, 0, 1], [100, 2, 3]]).astype(dtype)
    return ServingResponse(
        outputs=(ServingTensor(name="fc_0.tmp_1", alias_name="price", array=array),),
        profile_time=(3, 1_700_000_000_000_000),
        log_id=(1 << 64) - 1,
        err_no=-5100,
        err_msg="tensor x: \N{SNOWMAN}",
    )


@pytest.mark.parametrize("dtype", serving_messages.ELEM_TYPES.values())
def test_our_response_is_one_that_the_library_and_we_read(dtype):
    response = response_of(dtype)
    data = serving_messages.encode_response(response)
    message = Response.FromString(data)
    (output,) = message.outputs
    assert output.engine_name == "general_infer_0"
    (tensor,) = output.tensor
    assert (tensor.name, tensor.alias_name, list(tensor.shape)) == ("fc_0.tmp_1", "price", [2, 3])
    assert serving_messages.ELEM_TYPES[tensor.elem_type] == dtype
    assert list(message.profile_time) == [3, 1_700_000_000_000_000]
    assert (message.log_id, message.err_no, message.err_msg) == (
        (1 << 64) - 1, -5100, "tensor x: \N{SNOWMAN}",
    )  # fmt: skip
    back = serving_messages.decode_response(data)
    np.testing.assert_array_equal(back.arrays()["price"], response.outputs[0].array)
    assert (back.log_id, back.err_no, back.err_msg, back.profile_time) == (
        response.log_id, response.err_no, response.err_msg, response.profile_time,
    )  # fmt: skip


def test_a_json_response_has_the_fields_of_the_message():
    array = np.array([[18.5]], "f4")
    tensor = ServingTensor(name="fc_0.tmp_1", alias_name="price", array=array)
    text = serving_json.encode_response(ServingResponse(outputs=(tensor,), log_id=5))
    assert json.loads(text) == {
        "outputs": [
            {
                "tensor": [
                    {
                        "float_data": [18.5],
                        "elem_type": 1,
                        "shape": [1, 1],
                        "name": "fc_0.tmp_1",
                        "alias_name": "price",
                    }
                ],
                "engine_name": "general_infer_0",
            }
        ],
        "log_id": 5,
    }


def test_a_json_response_has_64_bit_numbers_as_numbers_and_bytes_as_base64():
    big = ServingTensor(name="i", alias_name="i", array=np.array([1 << 60], "i8"))
    half = ServingTensor(name="h", alias_name="h", array=np.array([1.5], "f2"))
    text = serving_json.encode_response(ServingResponse(outputs=(big, half)))
    first, second = json.loads(text)["outputs"][0]["tensor"]
    assert first["int64_data"] == [1 << 60]
    assert base64.b64decode(second["tensor_content"]) == np.float16(1.5).tobytes()


def test_an_error_is_said_in_json():
    text = serving_json.encode_response(ServingResponse(err_no=-5100, err_msg="tensor x: no"))
    assert json.loads(text) == {"err_no": -5100, "err_msg": "tensor x: no"}


WRONG = [
    ({"elem_type": 1, "shape": [2], "float_data": [1]}, "shape .2. has 2 elements, 1 came"),
    ({"elem_type": 1, "shape": [2]}, "shape .2. has 2 elements, 0 came"),
    ({"elem_type": 0, "shape": [1], "float_data": [1]}, "elem_type 0 .int64. has its data in int"),
    ({"elem_type": 6, "shape": [1], "float_data": [1]}, "elem_type 6 is not supported"),
    ({"elem_type": 20, "shape": [1], "data": ["text"]}, "not supported"),
    ({"elem_type": 1, "shape": [-1], "float_data": [1]}, "shape .* impossible"),
    ({"elem_type": 1, "shape": [1] * 33, "float_data": [1]}, "32 numbers|at most 32"),
    (
        {"elem_type": 1, "shape": [2], "float_data": [1, 2], "lod": [0, 1, 2]},
        "has LoD .0, 1, 2.; only dense",
    ),
]


@pytest.mark.parametrize(("tensor", "match"), WRONG)
def test_what_a_request_gets_wrong_is_named(tensor, match):
    tensor = {"alias_name": "x", **tensor}
    with pytest.raises(BadRequest, match=match):
        serving_messages.decode_request(Request(tensor=[tensor]).SerializeToString())
    with pytest.raises(BadRequest, match=match):
        serving_json.decode_request(json.dumps({"tensor": [tensor]}).encode())


def test_a_flood_of_small_lists_is_refused_before_it_is_read():
    text = b'{"tensor":[' + b"[]," * (1 << 17) + b"[]]}"
    with pytest.raises(BadRequest, match="more than 131072 lists"):
        serving_json.decode_request(text)


def test_data_in_two_fields_is_refused():
    message = Request()
    message.tensor.add(
        name="x", elem_type=1, shape=[2], float_data=[1], tensor_content=np.float32(1).tobytes()
    )
    with pytest.raises(BadRequest, match="tensor x: has data in float_data and in tensor_content"):
        serving_messages.decode_request(message.SerializeToString())


@pytest.mark.parametrize(
    ("document", "match"),
    [
        ({"tensor": 5}, "tensor: expected list"),
        ({"tensor": [5]}, "tensor: expected dict"),
        ({"log_id": "5"}, "log_id: expected int"),
        ({"log_id": True}, "log_id: expected int"),
        ({"fetch_var_names": [1]}, "fetch_var_names: expected str"),
        ({"tensor": [{"shape": ["1"]}]}, "shape: expected int"),
        ({"tensor": [{"name": "x", "elem_type": 1, "float_data": "1"}]}, "x: float_data must be"),
        (
            {"tensor": [{"name": "x", "elem_type": 1, "shape": [1], "float_data": ["1"]}]},
            "tensor x: data does not fit",
        ),
        (
            {"tensor": [{"name": "x", "elem_type": 1, "shape": [1], "float_data": [[1, 2]]}]},
            "tensor x: shape .1. has 1 elements, 2 came",
        ),
        ({"tensor": [{"name": "x", "tensor_content": "?"}]}, "x: tensor_content is no base64"),
    ],
)
def test_json_of_another_form_is_refused(document, match):
    with pytest.raises(BadRequest, match=match):
        serving_json.decode_request(json.dumps(document).encode())


def test_integers_that_grow_beyond_the_bound_are_refused_before_they_do():
    message = Request()
    message.tensor.add(name="x", elem_type=0, shape=[1000], int64_data=[1] * 1000)
    data = message.SerializeToString()
    assert len(data) < 1100
    serving_messages.decode_request(data, max_bytes=8000)
    with pytest.raises(BadRequest, match="tensor x: has 8000 bytes"):
        serving_messages.decode_request(data, max_bytes=7999)


def test_a_type_without_a_number_is_refused():
    with pytest.raises(BadRequest, match="tensor x: Paddle Serving has no type for uint16"):
        serving_messages.encode_request({"x": np.array([1], "u2")})


@given(st.binary(max_size=300))
def test_whatever_comes_is_read_or_refused(data):
    for decode in (serving_messages.decode_request, serving_messages.decode_response):
        with contextlib.suppress(BadRequest):
            decode(data)


@given(st.data())
def test_a_damaged_request_is_read_or_refused(data):
    arrays = {"x": np.array([[1, 2]], "f4"), "i": np.arange(3), "h": np.array([1], "f2")}
    message = bytearray(serving_messages.encode_request(arrays, ["p"]))
    for _ in range(data.draw(st.integers(1, 4))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(BadRequest):
        serving_messages.decode_request(bytes(message))
