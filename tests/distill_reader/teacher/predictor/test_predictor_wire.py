import os
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill_reader.model.normalization import Normalization
from distill_reader.model.output_encodings import INDICES, LOG_REST, VALUES, WHOLE, OutputEncoding
from distill_reader.model.specs import InputEncoding, ModelSpec, TensorSpec
from distill_reader.protocols.wire import DTYPES
from distill_reader.teacher.predictor.backend import Device
from distill_reader.teacher.predictor.wire import (
    BatchRows,
    MessageKind,
    PredictorChannel,
    RunMessage,
    StartMessage,
    decode_addresses,
    decode_run,
    decode_shapes,
    encode_addresses,
    encode_run,
    encode_shapes,
    parse_specs,
    parse_start,
    specs_document,
    start_document,
)

addresses = st.tuples(st.integers(1, 2**31), st.integers(0, 2**40))
encodings = st.builds(
    OutputEncoding,
    output_index=st.integers(0, 9),
    part=st.sampled_from([WHOLE, VALUES, INDICES, LOG_REST]),
    top_k=st.integers(0, 65_535),
    dtype=st.sampled_from(DTYPES),
)
shapes = st.lists(st.integers(0, 2**31), max_size=4).map(tuple)


@pytest.fixture
def channels():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pair = PredictorChannel(ours), PredictorChannel(theirs)
    yield pair
    for channel in pair:
        channel.close()


@st.composite
def runs(draw: st.DrawFn) -> RunMessage:
    inputs, outputs = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    wanted = draw(st.lists(encodings, max_size=4))
    return RunMessage(
        draw(st.integers(0, 2**40)),
        draw(st.integers(0, 9)),
        tuple(draw(st.sampled_from(DTYPES)) for _ in range(inputs)),
        tuple(draw(shapes) for _ in range(inputs)),
        tuple(draw(st.none() | shapes) for _ in range(outputs)),
        tuple(wanted),
        tuple(
            BatchRows(
                draw(st.integers(1, 999)),
                tuple(draw(addresses) for _ in range(inputs)),
                tuple(draw(st.none() | addresses) for _ in wanted),
            )
            for _ in range(draw(st.integers(1, 4)))
        ),
    )


@given(runs())
def test_a_batch_comes_as_it_was_sent(run):
    assert decode_run(encode_run(run)) == run


@given(st.lists(st.tuples(st.none() | addresses, st.none() | addresses), max_size=5))
def test_addresses_come_as_they_were_sent(rows):
    assert decode_addresses(encode_addresses(7, rows), 2) == rows


@given(st.lists(shapes, max_size=4).map(tuple))
def test_shapes_come_as_they_were_sent(all_shapes):
    numbers = encode_shapes(7, 1234, all_shapes)
    assert numbers[:2] == [7, 1234]
    assert decode_shapes(numbers) == all_shapes


def test_what_to_load_and_what_was_loaded_come_as_they_were_sent(channels):
    front, predictor = channels
    start = StartMessage(
        backend="a:b",
        models=(("m", "/folder"), ("n", "/other")),
        device=Device(gpu=1, memory_optim=True),
        paths=("/x",),
        normalizations=(("m", "x", Normalization(mean=(0.1, 0.2, 0.3), layout="HWC-CHW")),),
    )
    front.send_json(MessageKind.START, start_document(start))
    kind, numbers, text = predictor.receive()
    assert (kind, numbers, parse_start(text)) == (MessageKind.START, (), start)
    tensor = TensorSpec(name="image", dtype="uint8", shape=(-1, 3), variable="x")
    pixels = TensorSpec(
        name="y", dtype="float32", shape=(2,), accepts=(InputEncoding(dtype="uint8", shape=(2,)),)
    )
    specs = (
        ModelSpec(
            name="m",
            inputs=(tensor, pixels),
            outputs=(tensor, tensor),
            takes_encodings=True,
            digest="5eed",
        ),
    )
    predictor.send_json(MessageKind.READY, specs_document(specs))
    assert parse_specs(front.receive()[2]) == specs


def test_messages_keep_their_borders_numbers_and_texts(channels):
    front, predictor = channels
    front.send(MessageKind.FORGET, (-1, 2**62), b"text")
    front.send(MessageKind.WRITE)
    assert predictor.receive() == (MessageKind.FORGET, (-1, 2**62), b"text")
    assert predictor.receive_with_fd() == (MessageKind.WRITE, (), b"", None)


def test_a_descriptor_comes_along_and_is_not_inherited(channels):
    front, predictor = channels
    reading, writing = os.pipe()
    front.send_arena(3, writing)
    os.close(writing)
    kind, numbers, _, fd = predictor.receive_with_fd()
    assert (kind, numbers) == (MessageKind.ARENA, (3,))
    assert fd is not None
    assert not os.get_inheritable(fd)
    os.write(fd, b"x")
    assert os.read(reading, 9) == b"x"
    os.close(fd)
    os.close(reading)


@pytest.mark.parametrize("receive", [PredictorChannel.receive, PredictorChannel.receive_with_fd])
def test_an_end_that_is_closed_is_said(channels, receive):
    front, predictor = channels
    front.close()
    with pytest.raises(EOFError):
        receive(predictor)
