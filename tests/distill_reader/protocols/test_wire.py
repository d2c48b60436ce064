import contextlib
import json
import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill_reader.errors import (
    BadRequest,
    DistillError,
    FastPathError,
    ModelNotFound,
    RequestTooLarge,
    TeacherBusy,
    TeacherFailed,
    UsageError,
)
from distill_reader.model.specs import InputEncoding, ModelSpec, TensorSpec
from distill_reader.protocols import wire
from distill_reader.protocols.wire import StudentHello, TeacherWelcome, WireTensor

SPEC = ModelSpec(
    name="m",
    version="3",
    inputs=(TensorSpec(name="x", dtype="float32", shape=(1, 28, 28), variable="x_0"),),
    outputs=(TensorSpec(name="y", dtype="int64", shape=(-1,)),),
)
DTYPES = ("bool", "uint8", "int8", "int16", "int64", "float16", "float32", "float64", "complex64")

tensors = st.lists(
    st.builds(
        WireTensor,
        position=st.integers(0, 65535),
        dtype=st.sampled_from(DTYPES),
        shape=st.lists(st.integers(0, 1000), min_size=1, max_size=4).map(tuple),
        offset=st.integers(0, 2**63),
    ),
    max_size=5,
)


def split(frame: bytes) -> tuple[wire.FrameHead, bytes]:
    head = wire.parse_head(frame[: wire.HEAD.size])
    meta = frame[wire.HEAD.size :]
    assert head.meta_bytes == len(meta)
    return head, meta


def body_of(greeting: bytes, max_bytes: int = 1 << 20) -> bytes:
    size = wire.parse_greeting(greeting[: wire.GREETING.size], max_bytes=max_bytes)
    body = greeting[wire.GREETING.size :]
    assert len(body) == size
    return body


@given(tensors, st.lists(st.integers(0, 65535), max_size=5), st.integers(0, 2**32 - 1))
def test_a_request_is_read_as_it_was_written(tensors, outputs, request_id):
    frame = wire.pack_predict(request_id, tensors, outputs, in_shared_memory=False)
    head, meta = split(frame)
    assert (head.kind, head.request_id) == (wire.PREDICT, request_id)
    assert head.payload_bytes == sum(tensor.size_bytes for tensor in tensors)
    assert wire.parse_predict(head, meta) == (tensors, outputs)


@given(tensors, st.lists(st.text(max_size=30), min_size=1, max_size=5), st.booleans())
def test_outputs_in_forms_are_wanted_by_name(tensors, names, in_shared_memory):
    head, meta = split(wire.pack_predict(1, tensors, names, in_shared_memory=in_shared_memory))
    assert head.flags & wire.NAMED_OUTPUTS
    assert wire.parse_predict(head, meta) == (tensors, names)


def test_a_name_that_is_too_long_or_cut_is_refused():
    with pytest.raises(BadRequest, match="its name has 5000 bytes"):
        wire.pack_predict(1, [], ["x" * 5000], in_shared_memory=False)
    head, meta = split(wire.pack_predict(1, [], ["score@float16"], in_shared_memory=False))
    for end in range(len(meta)):
        with pytest.raises(FastPathError):
            wire.parse_predict(head, meta[:end])
    with pytest.raises(FastPathError, match="no UTF-8"):
        wire.parse_predict(head, meta.replace(b"score", b"sc\xffre"))


@given(tensors)
def test_a_request_in_shared_memory_has_no_payload(tensors):
    head, meta = split(wire.pack_predict(1, tensors, [], in_shared_memory=True))
    assert head.payload_bytes == 0
    assert wire.parse_predict(head, meta) == (tensors, [])


@given(tensors)
def test_an_answer_is_read_as_it_was_written(tensors):
    head, meta = split(wire.pack_answer(7, tensors))
    assert wire.parse_answer(head, meta) == tensors


@given(st.binary(min_size=wire.HEAD.size, max_size=200))
def test_any_bytes_are_a_frame_or_a_wire_error(data):
    try:
        head = wire.parse_head(data[: wire.HEAD.size])
        wire.parse_predict(head, data[wire.HEAD.size :])
    except FastPathError:
        pass


@given(st.data())
def test_a_damaged_request_is_another_request_or_a_wire_error(data):
    tensors = [WireTensor(0, "float32", (2, 3)), WireTensor(1, "int64", (2, 9))]
    wanted = data.draw(st.sampled_from([[0], ["score@top3:values", "score@float16"]]))
    frame = bytearray(wire.pack_predict(1, tensors, wanted, in_shared_memory=False))
    frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        head = wire.parse_head(frame[: wire.HEAD.size])
        tensors, _ = wire.parse_predict(head, bytes(frame[wire.HEAD.size :]))
    except FastPathError:
        return
    assert head.flags & wire.IN_SHARED_MEMORY or head.payload_bytes == sum(
        tensor.size_bytes for tensor in tensors
    )


@given(st.binary(max_size=300))
def test_any_body_is_a_greeting_or_an_error_of_ours(body):
    for parse in (wire.parse_hello, wire.parse_welcome):
        with contextlib.suppress(DistillError):
            parse(body)


def test_a_payload_that_its_tensors_do_not_add_up_to_is_refused():
    head, meta = split(
        wire.pack_predict(1, [WireTensor(0, "float32", (2, 3))], [], in_shared_memory=False)
    )
    with pytest.raises(FastPathError, match="payload of 25 bytes; its tensors have 24"):
        wire.parse_predict(head._replace(payload_bytes=25), meta)


@pytest.mark.parametrize("shape", [(2**40, 2**40), (2**50, 0), (2**63,)])
def test_a_tensor_that_no_memory_holds_is_refused(shape):
    meta = struct.pack(f"<HBBQ{len(shape)}Q", 0, 10, len(shape), 0, *shape)
    head = wire.FrameHead(wire.ANSWER, 0, 1, 0, 0, 0, len(meta), 0)
    with pytest.raises(FastPathError, match="too large"):
        wire.parse_answer(head, meta)


def test_hello_and_welcome_are_read_as_they_were_written():
    hello = StudentHello(model="m", token="secret")
    assert wire.parse_hello(body_of(wire.pack_hello(hello))) == hello
    welcome = TeacherWelcome(spec=SPEC, max_request_bytes=99, unix="edl-1", shared_memory=True)
    assert wire.parse_welcome(body_of(wire.pack_welcome(welcome))) == welcome


def test_a_hello_ends_a_line_so_that_an_http_server_answers_it():
    assert wire.pack_hello(StudentHello()).endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (BadRequest("tensor x"), BadRequest),
        (ModelNotFound("no m"), ModelNotFound),
        (TeacherBusy("full", delay_s=0.75), TeacherBusy),
        (UsageError("token"), UsageError),
        (DistillError("else"), TeacherFailed),
        (FastPathError("else"), TeacherFailed),
        (TeacherFailed("twice", tries=2), TeacherFailed),
        (RequestTooLarge("1 MiB"), RequestTooLarge),
    ],
)
def test_an_error_arrives_as_what_it_is(error, kind):
    with pytest.raises(DistillError) as refusal:
        wire.parse_welcome(body_of(wire.pack_refusal(error)))
    for arrived in (wire.parse_error(split(wire.pack_error(3, error))[1]), refusal.value):
        assert type(arrived) is kind
        assert str(arrived) == str(error)
        if isinstance(arrived, TeacherBusy):
            assert arrived.delay_s == 0.75


def test_a_long_text_of_an_error_is_cut():
    frame = wire.pack_error(1, BadRequest("é" * 10**6))
    assert len(frame) < wire.MAX_META_BYTES
    assert str(wire.parse_error(split(frame)[1])).startswith("ééé")


def test_another_version_says_which_one_and_what_to_do():
    greeting = wire.GREETING.pack(wire.MAGIC, 2, 0, 0)
    with pytest.raises(UsageError, match=r"version 2 .* this one version 1: install"):
        wire.parse_greeting(greeting, max_bytes=10)


@pytest.mark.parametrize(
    ("greeting", "text"),
    [
        (wire.GREETING.pack(b"HTTP", 1, 0, 0), "expected b'EDLT' first, got b'HTTP'"),
        (wire.GREETING.pack(wire.MAGIC, 1, 0, 11), "greeting of 11 bytes; allowed are 10"),
    ],
)
def test_a_greeting_that_is_none_is_refused(greeting, text):
    with pytest.raises(FastPathError, match=text):
        wire.parse_greeting(greeting, max_bytes=10)


@pytest.mark.parametrize(
    "document",
    [
        [],
        {},
        {"model": {}, "limits": {"max_request_bytes": "1"}},
        {"model": 1, "limits": {"max_request_bytes": 1}},
        {"model": {"inputs": [{"shape": ["a"]}]}, "limits": {"max_request_bytes": 1}},
        *(
            {
                "model": {
                    "inputs": [{"name": "x", "dtype": "uint8", "shape": [], "accepts": accepts}],
                    "outputs": [],
                },
                "limits": {"max_request_bytes": 1},
            }
            for accepts in (3, [3], [{"dtype": 3}], [{"dtype": "uint8", "shape": "x"}])
        ),
        {
            "model": {"inputs": [{"name": "x", "dtype": "nope", "shape": []}], "outputs": []},
            "limits": {"max_request_bytes": 1},
        },
    ],
)
def test_a_welcome_that_is_none_is_a_wire_error(document):
    with pytest.raises(FastPathError):
        wire.parse_welcome(json.dumps(document).encode())


def test_dtypes_that_do_not_travel_are_named():
    assert wire.dtype_name(np.dtype("float16")) == "float16"
    for dtype in ("S3", "datetime64[s]", ">f4", "O"):
        with pytest.raises(BadRequest, match="cannot be sent"):
            wire.dtype_name(np.dtype(dtype))


def test_a_teacher_says_what_else_it_takes_and_an_older_one_says_nothing():
    pixels = InputEncoding(dtype="uint8", shape=(28, 28, 1))
    tensor = replace(SPEC.inputs[0], accepts=(pixels,))
    spec = replace(SPEC, inputs=(tensor,), takes_encodings=True, digest="5eed")
    body = body_of(wire.pack_welcome(TeacherWelcome(spec=spec, max_request_bytes=1)))
    assert wire.parse_welcome(body).spec == spec

    document = json.loads(body)
    document["model"]["inputs"][0]["accepts"].append({"dtype": "int4", "shape": [9]})  # a newer one
    assert wire.parse_welcome(json.dumps(document).encode()).spec == spec
    for newer in ("takes_forms", "digest"):
        del document["model"][newer]
    del document["model"]["inputs"][0]["accepts"]
    assert wire.parse_welcome(json.dumps(document).encode()).spec == SPEC
