import shutil
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from distill_reader.convert import convert, main, save_servable
from distill_reader.errors import UsageError
from distill_reader.model.normalization import Normalization, read_folder
from distill_reader.protocols.prototxt import CLIENT_FILES, SERVER_FILES, read_config
from distill_reader.teacher.predictor.backend import Device
from distill_reader.teacher.predictor.model_folder import check_room, find_model
from distill_reader.teacher.predictor.paddle_backend import load
from distill_reader.teacher.predictor.process import load_models
from distill_reader.teacher.predictor.wire import StartMessage

INPUTS = {
    "paddle3": "image",
    "paddle2": "image",
    "one_x": "x",
    "one_x_params": "x",
    "fixed": "image",
}


@pytest.mark.parametrize("kind", INPUTS)
def test_any_inference_model_becomes_servable_with_four_config_files(paddle_folder, tmp_path, kind):
    server, client = tmp_path / "server", tmp_path / "client"
    convert(paddle_folder / kind, server, client, feed_alias_names=["pixels"])
    configs = [
        *(read_config(server / name) for name in SERVER_FILES),
        *(read_config(client / name) for name in CLIENT_FILES),
    ]
    assert configs[0].feeds[0].alias == "pixels"
    assert configs[0].feeds[0].name == INPUTS[kind]
    assert all(config == configs[0] for config in configs)
    assert sorted(path.name for path in client.iterdir()) == sorted(CLIENT_FILES)
    assert load(str(server), "m", Device()).spec.inputs[0].name == "pixels"


def test_the_command_converts_and_shows_the_config(paddle_folder, tmp_path, capsys):
    arguments = ["--dirname", str(paddle_folder / "paddle2"), "--show_proto"]
    arguments += ["--serving_server", str(tmp_path / "s"), "--serving_client", str(tmp_path / "c")]
    assert main([*arguments, "--feed_alias_names", "a", "--fetch_alias_names", "y, p"]) == 0
    shown = capsys.readouterr().out
    assert 'alias_name: "p"' in shown
    fetches = read_config(tmp_path / "c" / CLIENT_FILES[0]).fetches
    assert [(item.alias, item.shape, item.elem_type) for item in fetches] == [
        ("y", (5,), 1),
        ("p", (5,), 1),
    ]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--feed_alias_names", "a,b"], r"feed_alias_names: got 2 (a, b), the model has 1 (image)"),
        (["--fetch_alias_names", "a,a"], "fetch_alias_names: 'a' must be unique"),
        (["--model_filename", "other.json"], "other.json: no such file"),
    ],
)
def test_a_wrong_argument_ends_the_command_with_2(paddle_folder, tmp_path, capsys, arguments, text):
    folders = ["--serving_server", str(tmp_path / "s"), "--serving_client", str(tmp_path / "c")]
    assert main(["--dirname", str(paddle_folder / "paddle3"), *folders, *arguments]) == 2
    assert text in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_model_ends_the_command_with_2(tmp_path, capsys):
    assert main(["--dirname", str(tmp_path)]) == 2
    assert "holds no model" in capsys.readouterr().err


def test_a_converted_model_can_be_converted_again_and_gets_new_aliases(paddle_folder, tmp_path):
    convert(paddle_folder / "paddle3", tmp_path, tmp_path, feed_alias_names=["first"])
    convert(tmp_path, tmp_path, tmp_path, feed_alias_names=["second"])
    assert read_config(tmp_path / SERVER_FILES[0]).feeds[0].alias == "second"


def test_a_folder_that_holds_another_model_stays_as_it_is(paddle_folder, tmp_path, capsys):
    kept, other = tmp_path / "kept", tmp_path / "other"
    command = ["--serving_server", str(kept), "--serving_client", str(tmp_path / "client")]
    raw = paddle_folder / "paddle3"
    assert main(["--dirname", str(raw), *command, "--normalize", "image:mean=0.5"]) == 0
    other.mkdir()
    for path in find_model(raw).paths:
        shutil.copyfile(path, other / f"other{path.suffix}")
    before = {path.name: path.read_bytes() for path in kept.iterdir()}
    assert main(["--dirname", str(other), *command]) == 2
    assert "holds several models" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == before


def test_a_folder_in_the_folder_is_no_model(tmp_path):
    for name in ("params", "__params__"):
        (tmp_path / name).mkdir()
    check_room(tmp_path, ["__model__", "fc_0.w_0"])


@pytest.mark.full  # imports Paddle
def test_a_layer_becomes_servable(tmp_path):
    paddle = pytest.importorskip("paddle")
    paddle.seed(5)
    layer = paddle.nn.Sequential(paddle.nn.Linear(6, 3), paddle.nn.Softmax())
    spec = [paddle.static.InputSpec([None, 6], "float32", "features")]
    with pytest.raises(UsageError, match=r"training mode; call layer\.eval\(\)"):
        save_servable(layer, spec, tmp_path)
    layer.eval()
    with pytest.raises(UsageError, match="the layer has no parameters"):
        save_servable(layer[1], spec, tmp_path)
    for _ in range(2):
        save_servable(layer, spec, tmp_path, feed_alias=["rows"], fetch_alias=["soft_labels"])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert {*SERVER_FILES, *CLIENT_FILES} < before.keys()
    wider = paddle.nn.Linear(6, 4)
    wider.eval()
    unfit = [paddle.static.InputSpec([None, 5], "float32", "features")]
    for wrong, aliases, error in ((unfit, ["rows"], ValueError), (spec, ["a", "b"], UsageError)):
        with pytest.raises(error):  # what is there stays
            save_servable(wider, wrong, tmp_path, feed_alias=aliases)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    backend = load(str(tmp_path), "m", Device())
    rows = np.random.default_rng(0).normal(size=(9, 6)).astype(np.float32)
    got: Any = backend.run({"rows": rows})["soft_labels"]
    np.testing.assert_allclose(got, layer(paddle.to_tensor(rows)).numpy(), rtol=1e-4, atol=1e-6)


def test_how_pixels_are_normalized_stays_with_the_model_and_is_part_of_its_version(
    paddle_folder, tmp_path
):
    folder = tmp_path / "server"
    arguments = [
        "--dirname",
        str(paddle_folder / "paddle3"),
        "--serving_client",
        str(tmp_path / "c"),
    ]
    plain = ["--serving_server", str(folder)]
    assert main([*arguments, *plain, "--normalize", "image:mean=0.5:std=0.25"]) == 0
    start = StartMessage(
        backend="distill_reader.teacher.predictor.paddle_backend:load",
        models=(("m", str(folder)),),
        device=Device(),
        paths=(),
    )
    (model,) = load_models(start)
    tensor = model.spec.inputs[0]
    assert {encoding.dtype: encoding.shape for encoding in tensor.accepts} == {
        "float16": tensor.shape,
        "uint8": tensor.shape,
    }
    assert model.normalizations["image"] == Normalization(mean=(0.5,), std=(0.25,))

    (other,) = load_models(replace(start, normalizations=(("m", "image", Normalization()),)))
    assert main([*arguments, *plain]) == 0  # the model's folder says nothing of it
    (without,) = load_models(start)
    assert without.spec.inputs[0].accepted("uint8") is None
    digests = {one.spec.digest for one in (model, other, without)}
    assert len(digests) == 3
    assert all(len(digest) == 32 for digest in digests)


def test_a_model_that_gets_other_names_keeps_how_its_pixels_are_normalized(paddle_folder, tmp_path):
    half = Normalization(mean=(0.5,))
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    convert(
        paddle_folder / "paddle3", first, first,
        feed_alias_names=["pixels"], normalizations={"pixels": half},
    )  # fmt: skip
    convert(first, second, second, feed_alias_names=["picture"])
    assert read_folder(second) == {"picture": half}
    convert(second, third, third)
    assert read_folder(third) == {"image": half}
    convert(third, third, third, feed_alias_names=["pixels"])
    assert read_folder(third) == {"pixels": half}


def test_a_normalization_of_no_input_ends_the_command_with_2(paddle_folder, tmp_path, capsys):
    folders = ["--serving_server", str(tmp_path / "s"), "--serving_client", str(tmp_path / "c")]
    folders += ["--dirname", str(paddle_folder / "paddle3")]
    assert main([*folders, "--normalize", "picture:mean=0.5"]) == 2
    assert "'picture' is not an input of the model; it takes image" in capsys.readouterr().err


def test_another_weight_is_another_version(paddle_folder, tmp_path):
    folder = tmp_path / "m"
    shutil.copytree(paddle_folder / "paddle3", folder)
    before = load(str(folder), "m", Device()).spec.digest
    assert load(str(folder), "other", Device()).spec.digest == before
    (params,) = folder.glob("*.pdiparams")
    data = bytearray(params.read_bytes())
    data[-1] ^= 1
    params.write_bytes(data)
    assert load(str(folder), "m", Device()).spec.digest != before
