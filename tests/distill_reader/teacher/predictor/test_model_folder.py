import json
import shutil
from pathlib import Path

import pytest

from distill_reader.errors import ModelError
from distill_reader.model.specs import TensorSpec
from distill_reader.protocols.prototxt import (
    SERVER_FILES,
    ModelConfig,
    ServedVariable,
    write_config,
)
from distill_reader.teacher.predictor.model_folder import find_model, make_signature, read_signature
from distill_reader.teacher.predictor.model_program import (
    ModelProgram,
    ProgramVariable,
    read_program,
)


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).touch()


@pytest.mark.parametrize(
    ("names", "program", "params"),
    [
        (["m.json", "m.pdiparams"], "m.json", "m.pdiparams"),
        (["m.pdmodel", "m.pdiparams", "m.pdiparams.info"], "m.pdmodel", "m.pdiparams"),
        (["model.pdmodel", "params.pdiparams"], "model.pdmodel", "params.pdiparams"),
        (["__model__", "__params__"], "__model__", "__params__"),
        (["__model__", "fc_0.w_0", "fc_0.b_0"], "__model__", None),
        (["m.json", "m.pdiparams", "tokenizer.json"], "m.json", "m.pdiparams"),
    ],
)
def test_the_model_in_a_folder_is_found(tmp_path, names, program, params):
    touch(tmp_path, *names)
    files = find_model(tmp_path)
    assert files.program.name == program
    assert (files.params.name if files.params else None) == params
    assert files.config is None


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], "holds no model; expected a .json or .pdmodel file"),
        (["x.pdiparams"], "holds no model"),
        (["a.json", "a.pdiparams", "b.json", "b.pdiparams"], r"several models \(a.json, b.json\)"),
        (["__model__", "m.pdmodel"], r"several models \(__model__, m.pdmodel\)"),
        (["m.json"], "m.json has no parameters beside it"),
        (["m.pdmodel", "a.pdiparams", "b.pdiparams"], r"parameters \(a.pdiparams, b.pdiparams\)"),
        (["key", "encrypt_model"], "encrypted"),
    ],
)
def test_a_folder_without_one_clear_model_is_refused(tmp_path, names, text):
    touch(tmp_path, *names)
    with pytest.raises(ModelError, match=text):
        find_model(tmp_path)


def test_a_folder_that_is_none_is_refused(tmp_path):
    with pytest.raises(ModelError, match="is no folder"):
        find_model(tmp_path / "missing")


def test_files_that_are_named_must_be_there(tmp_path):
    touch(tmp_path, "a.json", "a.pdiparams", "b.json", "b.pdiparams")
    files = find_model(tmp_path, model_filename="b.json", params_filename="a.pdiparams")
    assert files.params is not None
    assert (files.program.name, files.params.name) == ("b.json", "a.pdiparams")
    with pytest.raises(
        ModelError, match=r"c\.json: no such file; it should hold the model's program"
    ):
        find_model(tmp_path, model_filename="c.json")
    with pytest.raises(ModelError, match=r"c\.pdiparams: no such file"):
        find_model(tmp_path, model_filename="b.json", params_filename="c.pdiparams")


def variable(name: str, *shape: int, dtype: str = "float32") -> ProgramVariable:
    return ProgramVariable(name=name, dtype=dtype, shape=shape)


def served(name: str, alias: str, *, is_lod: bool = False) -> ServedVariable:
    return ServedVariable(name=name, alias=alias, is_lod=is_lod, elem_type=1)


PROGRAM = ModelProgram(
    inputs=(variable("x_0", -1, 3, 4), variable("x_1", -1, dtype="int64")),
    outputs=(variable("y_0", -1, -1), variable("y_1", -1, 5)),
)


def test_without_a_config_tensors_go_by_the_models_names():
    signature = make_signature(PROGRAM, None, "m", "here")
    assert signature.batch is None
    assert signature.spec.inputs == (
        TensorSpec(name="x_0", dtype="float32", shape=(3, 4)),
        TensorSpec(name="x_1", dtype="int64", shape=()),
    )
    assert [output.shape for output in signature.spec.outputs] == [(-1,), (5,)]


def test_a_config_gives_aliases_order_and_a_choice_of_outputs():
    config = ModelConfig(
        feeds=(served("x_1", "label"), served("x_0", "image")),
        fetches=(served("y_1", "soft", is_lod=True),),  # exporters mark dense outputs as LoD too
    )
    spec = make_signature(PROGRAM, config, "m", "here").spec
    assert [(tensor.name, tensor.variable) for tensor in spec.inputs] == [
        ("label", "x_1"),
        ("image", "x_0"),
    ]
    assert spec.outputs == (TensorSpec(name="soft", dtype="float32", shape=(5,), variable="y_1"),)


@pytest.mark.parametrize(
    ("program", "config", "text"),
    [
        (
            PROGRAM,
            ModelConfig(feeds=(served("x", "a"),), fetches=(served("y_0", "b"),)),
            "the config names input 'x', the model has x_0, x_1; write the config again",
        ),
        (
            PROGRAM,
            ModelConfig(feeds=(served("x_0", "a"),), fetches=(served("y_0", "b"),)),
            "the config feeds nothing to input 'x_1'",
        ),
        (
            PROGRAM,
            ModelConfig(
                feeds=(served("x_0", "a"), served("x_1", "b", is_lod=True)),
                fetches=(served("y_0", "c"),),
            ),
            "input 'x_1' is a LoD tensor",
        ),
        (
            ModelProgram(inputs=(variable("x"),), outputs=(variable("y", -1),)),
            None,
            "input 'x' is a scalar",
        ),
        (
            ModelProgram(
                inputs=(variable("x", -1),), outputs=(variable("y", -1, dtype="bfloat16"),)
            ),
            None,
            "output 'y' is bfloat16, which cannot be sent; cast it in the model",
        ),
        (
            ModelProgram(inputs=(variable("x", 8, 3),), outputs=(variable("y", 4, 3),)),
            None,
            "'y' has 4 rows where another tensor has 8; export the model with axis 0 left open",
        ),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_by_the_name_of_the_tensor(program, config, text):
    with pytest.raises(ModelError, match=text):
        make_signature(program, config, "m", "here")


def test_a_model_of_a_fixed_batch_says_so():
    program = ModelProgram(inputs=(variable("x", 4, 3),), outputs=(variable("y", 4, 2),))
    assert make_signature(program, None, "m", "here").batch == 4


@pytest.mark.parametrize("name", ["m.json", "m.pdmodel", "__model__"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[1]",
        b'{"base_code": {"magic": "pir"}, "program": {}}',
        b"\x0a\x03abc",
        b"\x0a\x00",
    ],
)
def test_files_that_are_no_program_are_refused_by_name(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=name):
        read_program(tmp_path / name)


def test_a_program_that_does_not_say_the_type_of_an_input_is_refused(tmp_path):
    def message(number: int, content: bytes) -> bytes:
        return bytes([number << 3 | 2, len(content)]) + content

    arguments = message(1, message(1, b"Out") + message(2, b"x"))
    feed = message(4, message(2, arguments[2:]) + message(3, b"feed"))
    selected_rows = message(3, message(1, b"x") + message(2, b"\x08\x08"))
    (tmp_path / "m.pdmodel").write_bytes(message(1, selected_rows + feed))
    with pytest.raises(ModelError, match=r"m\.pdmodel.*variable x is no dense tensor"):
        read_program(tmp_path / "m.pdmodel")


def test_a_model_without_fetches_is_refused(tmp_path):
    document = {"base_code": {"magic": "pir"}, "program": {"regions": [{"blocks": [{"ops": []}]}]}}
    (tmp_path / "m.json").write_text(json.dumps(document))
    with pytest.raises(ModelError, match="has 0 inputs and 0 outputs; export the model"):
        read_program(tmp_path / "m.json")


@pytest.mark.parametrize("kind", ["paddle3", "paddle2", "fixed", "one_x", "one_x_params"])
def test_what_paddle_exports_is_read(paddle_folder, kind):
    signature = read_signature(find_model(paddle_folder / kind), "m")
    (tensor,) = signature.spec.inputs
    if kind.startswith("one_x"):
        assert (tensor.name, tensor.shape, tensor.dtype) == ("x", (13,), "float32")
        assert [output.shape for output in signature.spec.outputs] == [(1,)]
    else:
        assert (tensor.name, tensor.shape, tensor.dtype) == ("image", (1, 8, 8), "float32")
        assert [output.shape for output in signature.spec.outputs] == [(5,), (5,)]
    assert signature.batch == (4 if kind == "fixed" else None)


def test_types_and_open_axes_of_what_paddle_exports_are_read(paddle_folder):
    spec = read_signature(find_model(paddle_folder / "open"), "m").spec
    assert [(item.name, item.dtype, item.shape) for item in spec.inputs] == [
        ("ids", "int64", (-1,)),
        ("mask", "bool", (-1,)),
    ]
    assert [(item.dtype, item.shape) for item in spec.outputs] == [
        ("float32", (3,)),
        ("int64", (1,)),
    ]


def test_a_serving_config_beside_the_model_is_used(paddle_folder, tmp_path):
    folder = tmp_path / "servable"
    shutil.copytree(paddle_folder / "paddle3", folder)
    config = ModelConfig(
        feeds=(served("image", "pixels"),), fetches=(served("fetch_name_1", "soft"),)
    )
    write_config(config, folder, SERVER_FILES)
    for text_is_there in (True, False):
        if not text_is_there:
            (folder / SERVER_FILES[0]).unlink()
        spec = read_signature(find_model(folder), "m").spec
        assert (spec.inputs[0].name, spec.outputs[0].name) == ("pixels", "soft")
    (folder / SERVER_FILES[0]).write_text("nonsense {")
    with pytest.raises(ModelError, match=r"serving_server_conf\.prototxt: line 1"):
        find_model(folder)
