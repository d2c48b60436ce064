"""Every kind of model works, alone and in a world of two, or is refused with the remedy."""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import paddle
import pytest

from pod_runtime.trainer.errors import UsageError
from pod_runtime.trainer.frameworks.choose import make_framework

pytestmark = [
    pytest.mark.filterwarnings("ignore:When training, we now always track global mean"),
    pytest.mark.filterwarnings("ignore:The program will return to single-card operation"),
    pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated"),
]

SCRIPTS = ("kinds", "kinds_torch")
TRAINED = (
    "frozen", "tied", "counting", "infinite", "copying", "spread", "sometimes", "normed",
    "scripted", "reparametrized", "number", "turning", "recurrent", "in_bfloat16", "compiled",
    "quantized",
)  # fmt: skip
REFUSED = (
    "sparse layer", "lazy", "wrapped", "wrapped within", "complex", "without values",
    "sparse call", "built late", "given late", "resizing", "limited norm",
    "measuring",
)  # fmt: skip


def kinds(script: str) -> ModuleType:
    if script.endswith("torch"):
        pytest.importorskip("torch")
    return importlib.import_module(f"tests.pod_runtime.trainer.scripts.{script}")


def seed(script: str) -> None:
    if script.endswith("torch"):
        importlib.import_module("torch").manual_seed(3)
    else:
        paddle.seed(3)


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two models hold the same, to the bit; the names of their parameters do not count."""
    return list(one) == list(other) and all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("kind", TRAINED)
def test_a_kind_of_model_goes_on_from_its_checkpoint_as_if_nothing_had_been(
    script: str, kind: str, tmp_path: Path
):
    found = kinds(script)
    if kind not in {*found.TRAINED, "compiled"}:
        pytest.skip("Paddle on the CPU has no optimizer of bfloat16, PyTorch quantizes elsewhere")

    def train(epochs: int, folder: str) -> dict[str, Any]:
        seed(script)
        made = found.compiled() if kind == "compiled" else found.TRAINED[kind]()
        values: dict[str, Any] = found.train(made, epochs=epochs, checkpoint=tmp_path / folder)
        return values

    expected = train(2, "at_once")
    train(1, "in_two")
    assert equal(train(2, "in_two"), expected)


@pytest.mark.filterwarnings("ignore:.*'place' interface")  # of what Paddle itself calls
@pytest.mark.parametrize("is_full", [True, False])
def test_a_static_graph_that_is_made_between_two_shards_leaves_the_gradients_alone(is_full: bool):
    found = kinds("kinds")
    values = []
    for is_compiled in (False, True):
        seed("kinds")
        model = found.Words()
        if is_compiled:
            model = paddle.jit.to_static(model, full_graph=is_full)
        values.append(found.train(model, epochs=1, checkpoint=None, shards=4))  # 2, 2, 1, 1 samples
    assert equal(*values)


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_elastic_is_refused_before_its_first_step_counts(script: str, kind: str):
    found = kinds(script)
    if kind not in found.REFUSED:
        pytest.skip("the other framework has that alone")
    make, text = found.REFUSED[kind]
    with pytest.raises(UsageError, match=text):
        found.train(make(), epochs=1, checkpoint=None)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("script", SCRIPTS)
def test_two_trainers_train_every_kind_as_one_does(launch, script: str):
    kinds(script)
    values = []
    for world_size in (1, 2):
        job = launch(f"{script}.py", 2, f"of_{world_size}")
        stage = job.start(world_size, "--out", str(job.folder))
        stage.go()
        assert stage.codes() == [0] * world_size, stage.logs()
        values.append(dict(np.load(job.folder / "final.npz")))
    alone, together = values
    assert list(alone) == list(together)
    for name, value in alone.items():
        is_half = name.startswith("in_bfloat16.")
        np.testing.assert_allclose(
            together[name], value, rtol=0, atol=2e-2 if is_half else 1e-8, err_msg=name
        )


def test_a_program_of_the_static_graph_is_refused_with_what_there_is_for_it():
    model = paddle.nn.Linear(2, 1)
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    paddle.enable_static()
    try:
        with pytest.raises(UsageError, match=r"dynamic graph.*load_checkpoint and save_checkpoint"):
            make_framework(model, optimizer, header_size=1)
    finally:
        paddle.disable_static()
