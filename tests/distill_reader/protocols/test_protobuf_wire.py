"""Protocol buffers by hand, against the protobuf library."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill_reader.model.tensors import raw_bytes
from distill_reader.protocols import protobuf_wire as pb
from distill_reader.protocols.protobuf_schema import message_classes

NUMBERS = message_classes(
    "edl_test",
    {
        "Numbers": (
            "repeated int64 int64 = 1; repeated int32 int32 = 2; repeated uint64 uint64 = 3;"
            "repeated uint32 uint32 = 4; repeated bool bool = 5; repeated float float32 = 6;"
            "repeated double float64 = 7; string text = 8; Numbers inner = 9;"
            "map<string, int64> sizes = 10; int64 number = 11"
        )
    },
)["Numbers"]
FIELDS = {
    1: "int64", 2: "int32", 3: "uint64", 4: "uint32", 5: "bool", 6: "float32", 7: "float64",
}  # fmt: skip


def random_array(dtype: str, count: int, seed: int = 0):
    random = np.random.default_rng(seed)
    if dtype == "bool":
        return random.integers(0, 2, count).astype(bool)
    if dtype.startswith("float"):
        return random.normal(size=count).astype(dtype)
    info = np.iinfo(dtype)
    numbers = random.integers(info.min, info.max, count, dtype=dtype, endpoint=True)
    return np.right_shift(numbers, random.integers(0, info.bits, count).astype(dtype))


@pytest.mark.parametrize(("number", "dtype"), FIELDS.items())
@pytest.mark.parametrize("count", [0, 1, 1000, 100_000])
def test_packed_numbers_are_read_as_the_library_wrote_them(number, dtype, count):
    array = random_array(dtype, count)
    data = NUMBERS(**{dtype: array.tolist()}).SerializeToString()
    numbers = pb.PackedNumbers(dtype)
    for found, wire_type, value in pb.read_fields(memoryview(data)):
        assert found == number
        numbers.add(wire_type, value)
    assert numbers.count() == count
    np.testing.assert_array_equal(numbers.array(), array)


@pytest.mark.parametrize(("number", "dtype"), FIELDS.items())
@pytest.mark.parametrize("count", [1, 1000, 300_000])
def test_packed_numbers_are_written_as_the_library_writes_them(number, dtype, count):
    array = random_array(dtype, count)
    packed = raw_bytes(array) if dtype.startswith("float") else pb.pack_varints(array)
    assert pb.write_bytes(number, packed) == NUMBERS(**{dtype: array.tolist()}).SerializeToString()


def test_numbers_that_come_one_by_one_or_in_parts_are_joined():
    part = NUMBERS(int64=[5, -6], float32=[1.5]).SerializeToString()
    single = pb.write_varint(1, 7) + b"\x35" + np.float32(2.5).tobytes()
    ints, floats = pb.PackedNumbers("int64"), pb.PackedNumbers("float32")
    for number, wire_type, value in pb.read_fields(memoryview(part + single + part)):
        (ints if number == 1 else floats).add(wire_type, value)
    assert ints.array().tolist() == [5, -6, 7, 5, -6]
    assert floats.array().tolist() == [1.5, 2.5, 1.5]


def test_an_overlong_number_loses_its_upper_bits_as_in_the_library():
    data = b"\x12\x0a" + b"\x81\x80\x80\x80\x90" + b"\x80\x80\x80\x80\x01"
    numbers = pb.PackedNumbers("int32")
    for _, wire_type, value in pb.read_fields(memoryview(data)):
        numbers.add(wire_type, value)
    assert numbers.array().tolist() == list(NUMBERS.FromString(data).int32)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\x0a", id="no length"),
        pytest.param(b"\x0a\x05abc", id="cut short"),
        pytest.param(b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f", id="a huge length"),
        pytest.param(b"\x08" + b"\xff" * 11, id="a number without an end"),
        pytest.param(b"\x00\x01", id="field number 0"),
        pytest.param(b"\x0b\x0c", id="a group"),
        pytest.param(b"\x0d\x00", id="half a float"),
        pytest.param(b"\x80", id="half a key"),
        pytest.param(b"\x08\x01" * (pb.MAX_FIELDS + 1), id="too many fields"),
    ],
)
def test_a_malformed_message_is_refused(data):
    with pytest.raises(pb.ProtobufError):
        list(pb.read_fields(memoryview(data)))


@pytest.mark.parametrize(
    ("dtype", "wire_type", "value"),
    [
        ("int64", pb.BYTES, memoryview(b"\x80")),
        ("int64", pb.BYTES, memoryview(b"\xff" * 10 + b"\x01")),
        ("int64", pb.BYTES, memoryview(b"\xff" * (1 << 19) + b"\x01")),
        ("int64", pb.FIXED32, memoryview(b"1234")),
        ("float32", pb.BYTES, memoryview(b"123")),
        ("float32", pb.FIXED64, memoryview(b"12345678")),
        ("float64", pb.VARINT, 1),
    ],
)
def test_malformed_numbers_are_refused(dtype, wire_type, value):
    numbers = pb.PackedNumbers(dtype)

    def read() -> None:
        numbers.add(wire_type, value)
        numbers.array()

    with pytest.raises(pb.ProtobufError):
        read()


@pytest.mark.parametrize(
    ("read", "value"),
    [
        (pb.read_text, 5),
        (pb.read_text, memoryview(b"\xff")),
        (pb.read_bytes, 5),
        (pb.read_int, memoryview(b"")),
        (pb.read_uint, memoryview(b"")),
    ],
)
def test_a_field_of_another_kind_is_refused(read, value):
    with pytest.raises(pb.ProtobufError):
        read(value)


@given(st.binary(max_size=200))
def test_whatever_comes_is_read_or_refused(data):
    """What the library takes for a message, its fields are found here as well."""
    try:
        fields = list(pb.read_fields(memoryview(data)))
    except pb.ProtobufError:
        return
    assert sum(len(value) for _, wire_type, value in fields if wire_type != pb.VARINT) <= len(data)


@given(st.integers(-(1 << 63), (1 << 63) - 1))
def test_a_number_is_written_and_read_back(value):
    data = pb.write_varint(11, value)
    assert (NUMBERS.FromString(data).number if data else 0) == value
    assert [pb.read_int(found) for _, _, found in pb.read_fields(memoryview(data))] == (
        [value] if value else []
    )


def test_schemas_have_maps_and_nested_messages():
    message = NUMBERS(sizes={"x": 3}, inner=NUMBERS(text="deep"))
    back = NUMBERS.FromString(message.SerializeToString())
    assert (dict(back.sizes), back.inner.text) == ({"x": 3}, "deep")
