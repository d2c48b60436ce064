import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill_reader.errors import UsageError
from distill_reader.model.specs import ModelSpec, TensorSpec
from distill_reader.protocols.prototxt import (
    CLIENT_FILES,
    SERVER_FILES,
    ModelConfig,
    ServedVariable,
    config_of,
    parse_binary,
    parse_text,
    read_config,
    to_binary,
    to_text,
    write_config,
)

UCI = """
feed_var {
  name: "x"
  alias_name: "x"
  is_lod_tensor: false
  feed_type: 1
  shape: 13
}
fetch_var {
  name: "fc_0.tmp_1"
  alias_name: "price"
  is_lod_tensor: false
  fetch_type: 1
  shape: 1
}
"""
UCI_CONFIG = ModelConfig(
    feeds=(ServedVariable(name="x", alias="x", elem_type=1, shape=(13,)),),
    fetches=(ServedVariable(name="fc_0.tmp_1", alias="price", elem_type=1, shape=(1,)),),
)


def variables(prefix: str):
    return st.lists(
        st.builds(
            ServedVariable,
            name=st.text(min_size=1, max_size=8).map(lambda text: prefix + text),
            alias=st.text(min_size=1, max_size=8).map(lambda text: prefix + text),
            is_lod=st.booleans(),
            elem_type=st.integers(0, 20),
            shape=st.lists(st.integers(-1, 2**31 - 1), max_size=4).map(tuple),
        ),
        min_size=1,
        max_size=3,
        unique_by=(lambda item: item.name, lambda item: item.alias),
    ).map(tuple)


configs = st.builds(ModelConfig, feeds=variables("f"), fetches=variables("o"))


@given(configs)
def test_a_config_survives_both_forms(config):
    assert parse_text(to_text(config)) == config
    assert parse_binary(to_binary(config)) == config


def test_the_text_and_the_bytes_are_those_of_paddle_serving():
    feed = b"\x0a\x01x\x12\x01x\x18\x00\x20\x01\x28\x0d"  # name, alias, is_lod, type, shape
    fetch = b"\x0a\x0afc_0.tmp_1\x12\x05price\x18\x00\x20\x01\x28\x01"
    assert to_text(UCI_CONFIG) == UCI.lstrip()
    assert to_binary(UCI_CONFIG) == b"".join(
        bytes([tag, len(variable)]) + variable for tag, variable in ((0x0A, feed), (0x12, fetch))
    )


def test_escapes_of_texts_are_understood():
    text = UCI.replace('"x"', r"'\303\244\x41\n\'\"'")
    assert parse_text(text).feeds[0].name == "äA\n'\""


def test_the_config_of_a_published_model_is_read():
    assert parse_text(UCI) == UCI_CONFIG
    spec = UCI_CONFIG.spec("uci")
    assert spec.inputs == (TensorSpec(name="x", dtype="float32", shape=(13,)),)
    assert spec.output("price").variable == "fc_0.tmp_1"


@pytest.mark.parametrize(
    "text",
    [
        UCI.replace("feed_var {", "feed_var: <", 1).replace("}", ">", 1),
        UCI.replace("shape: 13", "shape: [13]  # one row"),
        UCI.replace('"x"', "'x'").replace("\n", " ").replace("feed_type: 1", "feed_type: 1 ;"),
        UCI.replace('"fc_0.tmp_1"', '"fc_0" ".tmp_1"'),
        UCI.replace('  alias_name: "x"\n', ""),
        UCI.replace("shape: 13", 'unknown: "field" shape: 13'),
    ],
    ids=["angle brackets", "list and comment", "one line", "joined", "no alias", "unknown field"],
)
def test_the_text_format_may_be_written_in_other_ways(text):
    assert parse_text(text) == UCI_CONFIG


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "has no feed_var"),
        (UCI.partition("fetch_var")[0], "has no fetch_var"),
        (UCI + UCI, "two feed_var have the name 'x'"),
        (UCI.replace("feed_var", "model_var", 1), "has no feed_var"),
        (UCI.replace("{", "", 1), "line 3:3 : "),
        (UCI.rstrip().rstrip("}"), "line 14:10 : "),
        (UCI.replace("shape: 13", "shape: a"), "line 7:10 : "),
        (UCI.replace("feed_type: 1", "feed_type: }"), "line 6:14 : "),
        (UCI.replace('name: "x"', "name: x"), "line 3:9 : "),
        (UCI.replace('name: "x"', 'name: "x'), "line 3:9 : "),
        (UCI.replace('name: "x"', 'name: ""', 1), "a variable has no name"),
    ],
)
def test_text_that_is_no_config_is_refused(text, error):
    with pytest.raises(UsageError, match=re.escape(error)):
        parse_text(text)


@given(st.binary(max_size=60))
def test_bytes_that_are_no_config_are_refused(content):
    try:
        config = parse_binary(content)
    except UsageError:
        return
    assert config.feeds


@given(st.integers(0, 200))
def test_a_config_that_is_cut_off_is_refused(size):
    content = to_binary(UCI_CONFIG)
    if size < len(content):
        with pytest.raises(UsageError):
            parse_binary(content[:size])


def test_packed_shapes_are_read():
    variable = b"\x0a\x01x\x2a\x03\x03\xe0\x01"  # shape = 5, packed: 3, 224
    content = b"\x0a" + bytes([len(variable)]) + variable + b"\x12\x03\x0a\x01y"
    assert parse_binary(content).feeds[0].shape == (3, 224)


@pytest.mark.parametrize("names", [SERVER_FILES, CLIENT_FILES])
def test_files_are_written_in_both_forms(tmp_path, names):
    write_config(UCI_CONFIG, tmp_path, names)
    assert [read_config(tmp_path / name) for name in names] == [UCI_CONFIG, UCI_CONFIG]


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"missing\.prototxt: .*No such file"):
        read_config(tmp_path / "missing.prototxt")
    (tmp_path / "bad.prototxt").write_bytes(b"\xff")
    with pytest.raises(UsageError, match=r"bad\.prototxt"):
        read_config(tmp_path / "bad.prototxt")


@pytest.mark.parametrize(("elem_type", "kind"), [(6, "bfloat16"), (20, "string"), (99, "unknown")])
def test_types_that_numpy_lacks_are_refused_by_name(elem_type, kind):
    variable = ServedVariable(name="words", alias="words", elem_type=elem_type)
    with pytest.raises(UsageError, match=rf"words: elem_type {elem_type} \({kind}"):
        ModelConfig(feeds=(variable,), fetches=(variable,)).spec("m")


def test_open_lengths_are_left_out_of_a_config():
    spec = ModelSpec(
        name="m",
        inputs=(TensorSpec(name="ids", dtype="int64", shape=(-1, 8), variable="x_0"),),
        outputs=(TensorSpec(name="y", dtype="float16", shape=()),),
    )
    config = config_of(spec)
    assert config.feeds == (ServedVariable(name="x_0", alias="ids", elem_type=0, shape=(8,)),)
    assert config.fetches[0].elem_type == 5


def test_a_type_that_paddle_serving_has_not_is_refused():
    tensor = TensorSpec(name="t", dtype="uint16", shape=())
    with pytest.raises(UsageError, match="t: Paddle Serving has no type for uint16"):
        config_of(ModelSpec(name="m", inputs=(tensor,), outputs=(tensor,)))
