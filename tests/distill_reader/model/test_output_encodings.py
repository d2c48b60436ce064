import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill_reader.errors import BadRequest
from distill_reader.model.output_encodings import (
    INDICES,
    LOG_REST,
    VALUES,
    WHOLE,
    OutputEncoding,
    encoded_shape,
    encoding_name,
    parse_encoding,
    split_name,
)
from distill_reader.model.specs import ModelSpec, TensorSpec

SPEC = ModelSpec(
    name="m",
    inputs=(),
    outputs=(
        TensorSpec(name="score", dtype="float32", shape=(1000,), variable="fc_0"),
        TensorSpec(name="label", dtype="int64", shape=(1,)),
        TensorSpec(name="odd@top5:values", dtype="float32", shape=(3,)),
        TensorSpec(name="flag", dtype="float32", shape=()),
    ),
)


@pytest.mark.parametrize(
    ("name", "encoding"),
    [
        ("score", OutputEncoding(0, WHOLE, 0, "float32")),
        ("fc_0", OutputEncoding(0, WHOLE, 0, "float32")),
        ("label", OutputEncoding(1, WHOLE, 0, "int64")),
        ("score@float16", OutputEncoding(0, WHOLE, 0, "float16")),
        ("fc_0@top10:values", OutputEncoding(0, VALUES, 10, "float32")),
        ("score@top10:values:float16", OutputEncoding(0, VALUES, 10, "float16")),
        ("score@top10:indices", OutputEncoding(0, INDICES, 10, "int32")),
        ("score@top10:indices:uint16", OutputEncoding(0, INDICES, 10, "uint16")),
        ("score@top10:logrest", OutputEncoding(0, LOG_REST, 10, "float32")),
        ("odd@top5:values", OutputEncoding(2, WHOLE, 0, "float32")),  # its name, and no form
        ("odd@top5:values@float16", OutputEncoding(2, WHOLE, 0, "float16")),
    ],
)
def test_what_a_name_asks_for(name: str, encoding: OutputEncoding):
    assert parse_encoding(SPEC, name) == encoding


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("scores", "has no output 'scores'; it has score, label"),
        ("nothing@float16", "has no output 'nothing'"),
        ("score@bfloat16", "no encoding 'bfloat16'; there are score@float16 and score@topK:values"),
        ("score@top0:values", "no encoding 'top0:values'"),
        ("score@top10", "no encoding 'top10'"),
        ("score@top99999:values", "K is 99999; at most 65535"),
        ("score@top3:indices:uint8", "indices come as int32 or uint16 or int64, not as uint8"),
        ("score@top3:values:int8", "values come as float32 or float16, not as int8"),
        ("label@float16", "label is int64; only floats can be encoded"),
        ("flag@top1:values", "flag has one value per sample"),
        ("score@", None),
    ],
)
def test_a_form_that_there_is_not_is_refused_by_name(name: str, words: str | None):
    if words is None:
        assert parse_encoding(SPEC, name) == OutputEncoding(0, WHOLE, 0, "float32")
        return
    with pytest.raises(BadRequest, match=words):
        parse_encoding(SPEC, name)


@given(
    part=st.sampled_from([VALUES, INDICES, LOG_REST]),
    top_k=st.integers(1, 65_535),
    dtype=st.sampled_from(["", "float16"]),
)
def test_a_form_is_what_its_name_was_made_of(part: str, top_k: int, dtype: str):
    if part == INDICES:
        dtype = "uint16" if dtype else ""
    encoding = parse_encoding(SPEC, encoding_name("score", part, top_k, dtype))
    assert (encoding.output_index, encoding.part, encoding.top_k) == (0, part, top_k)
    assert not dtype or encoding.dtype == dtype


@given(st.text(max_size=40))
def test_any_text_is_a_form_or_is_refused(text: str):
    for name in (text, f"score@{text}", f"score@top3:{text}"):
        try:
            encoding = parse_encoding(SPEC, name)
        except BadRequest:
            continue
        assert 0 <= encoding.output_index < len(SPEC.outputs)
        assert split_name(SPEC, name)[0] is SPEC.outputs[encoding.output_index]


def test_the_shape_of_a_form_follows_that_of_the_output():
    shape = (7, 1000)
    assert encoded_shape(OutputEncoding(0, WHOLE, 0, "float16"), shape) == (7, 1000)
    assert encoded_shape(OutputEncoding(0, VALUES, 10, "float16"), shape) == (7, 10)
    assert encoded_shape(OutputEncoding(0, INDICES, 2000, "int32"), shape) == (7, 1000)
    assert encoded_shape(OutputEncoding(0, LOG_REST, 10, "float32"), shape) == (7, 1)
