from typing import Any

import numpy as np
import pytest

from distill_reader.convert import convert, main, save_servable
from distill_reader.errors import UsageError
from distill_reader.prototxt import CLIENT_FILES, SERVER_FILES, read_config
from distill_reader.teacher.backend import Device
from distill_reader.teacher.paddle_backend import load

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
        (["--fetch_alias_names", "a,a"], "fetch_alias_names: 'a' must stand once"),
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


def test_a_layer_becomes_servable(tmp_path):
    paddle = pytest.importorskip("paddle")
    paddle.seed(5)
    layer = paddle.nn.Sequential(paddle.nn.Linear(6, 3), paddle.nn.Softmax())
    spec = [paddle.static.InputSpec([None, 6], "float32", "features")]
    with pytest.raises(UsageError, match=r"training mode; call layer\.eval\(\)"):
        save_servable(layer, spec, tmp_path)
    layer.eval()
    for _ in range(2):
        save_servable(layer, spec, tmp_path, feed_alias=["rows"], fetch_alias=["soft_labels"])
    assert {*SERVER_FILES, *CLIENT_FILES} < {path.name for path in tmp_path.iterdir()}
    backend = load(str(tmp_path), "m", Device())
    rows = np.random.default_rng(0).normal(size=(9, 6)).astype(np.float32)
    got: Any = backend.run({"rows": rows})["soft_labels"]
    np.testing.assert_allclose(got, layer(paddle.to_tensor(rows)).numpy(), rtol=1e-4, atol=1e-6)
