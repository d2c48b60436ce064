import logging
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distill_reader.errors import ModelError, UsageError
from distill_reader.teacher.predictor import process as predictor_process
from distill_reader.teacher.predictor.backend import Device
from distill_reader.teacher.predictor.model_folder import find_model
from distill_reader.teacher.predictor.paddle_backend import load
from distill_reader.teacher.predictor.wire import StartMessage
from distill_reader.teacher.service.requests import InferRequest
from distill_reader.teacher.service.service import PredictorService, ServiceConfig

CPU = Device()


def expected(folder: Path, kind: str) -> dict[str, Any]:
    """Return inputs and what the model made of them when it was exported."""
    with np.load(folder / f"{kind}.npz") as arrays:
        return dict(arrays)


def assert_close(got: Any, wanted: Any) -> None:
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["paddle3", "paddle2", "fixed"])
@pytest.mark.parametrize("samples", [1, 4, 10])
def test_a_model_computes_what_its_layer_computed(paddle_folder, kind, samples):
    # The layer of the fixed kind has its axis 0 fixed to 4: batches are cut and filled up.
    arrays = expected(paddle_folder, kind)
    backend = load(str(paddle_folder / kind), "m", CPU)
    logits, probabilities = (output.name for output in backend.spec.outputs)
    got = backend.run({"image": arrays["image"][:samples]})
    assert_close(got[logits], arrays["logits"][:samples])
    assert_close(got[probabilities], arrays["probabilities"][:samples])


@pytest.mark.parametrize("kind", ["one_x", "one_x_params"])
def test_a_model_of_paddle_1_computes_what_it_did(paddle_folder, kind):
    arrays = expected(paddle_folder, kind)
    backend = load(str(paddle_folder / kind), "m", CPU)
    (output,) = backend.spec.outputs
    got = backend.run({"x": arrays["x"]})[output.name]
    assert_close(got, arrays["price"])


def test_inputs_of_several_types_and_lengths_are_computed(paddle_folder):
    backend = load(str(paddle_folder / "open"), "m", CPU)
    scores, count = (output.name for output in backend.spec.outputs)
    for length in (3, 7):
        mask = np.arange(length)[None, :] < np.array([[1], [3]])
        got = backend.run({"ids": np.full((2, length), 5, np.int64), "mask": mask})
        assert got[scores].shape == (2, 3)
        assert got[count].tolist() == [[1], [3]]
        assert got[count].dtype == np.int64


@pytest.mark.parametrize("kind", ["paddle3", "paddle2", "one_x"])
def test_memory_optimization_may_be_asked_for_with_any_kind(paddle_folder, kind):
    assert load(str(paddle_folder / kind), "m", Device(memory_optim=True)).spec.name == "m"


def test_a_fixed_batch_is_logged_with_its_remedy(paddle_folder, caplog):
    with caplog.at_level(logging.WARNING):
        load(str(paddle_folder / "fixed"), "m", CPU)
    assert "always computes 4 samples at a time" in caplog.text
    assert "InputSpec([None, ...])" in caplog.text


def test_parameters_that_do_not_fit_are_refused(paddle_folder, tmp_path):
    folder = tmp_path / "m"
    shutil.copytree(paddle_folder / "paddle3", folder)
    (folder / "m.pdiparams").write_bytes(b"nonsense")
    with pytest.raises(ModelError, match=r"m\.json: Paddle cannot load it: "):
        load(str(folder), "m", CPU)


@pytest.mark.parametrize("kind", ["paddle3", "paddle2", "one_x", "one_x_params"])
def test_parameters_that_end_in_their_last_tensor_are_refused(paddle_folder, tmp_path, kind):
    # As of a copy that was broken off: Paddle loads them, and computes with what memory holds.
    folder = tmp_path / "m"
    shutil.copytree(paddle_folder / kind, folder)
    cut = max(find_model(folder).paths[1:], key=lambda path: path.stat().st_size)
    os.truncate(cut, cut.stat().st_size - 5)
    text = rf"{cut.name}: is cut off: its last tensor lacks 5 bytes; copy the model .*again"
    with pytest.raises(ModelError, match=text):
        load(str(folder), "m", CPU)


def test_a_gpu_that_is_not_there_is_refused_with_the_remedy(paddle_folder):
    import paddle

    if paddle.device.is_compiled_with_cuda():
        text = "--gpu_ids counts from 0"
    else:
        text = "computes on CPUs only; use --thread N, or install paddlepaddle-gpu"
    with pytest.raises(ModelError, match=text):
        load(str(paddle_folder / "paddle3"), "m", Device(gpu=99))


@pytest.mark.gpu
def test_a_model_computes_on_a_gpu(paddle_folder):
    import paddle

    if not paddle.device.is_compiled_with_cuda() or paddle.device.cuda.device_count() == 0:
        pytest.skip("Paddle sees no GPU")
    arrays = expected(paddle_folder, "paddle3")
    backend = load(str(paddle_folder / "paddle3"), "m", Device(gpu=0))
    got: Any = backend.run({"image": arrays["image"]})[backend.spec.outputs[0].name]
    np.testing.assert_allclose(got, arrays["logits"], rtol=1e-2, atol=1e-2)  # TF32


@pytest.mark.parametrize("name", ["nowhere:load", "json:nothing", "json", ""])
def test_a_backend_that_cannot_be_imported_is_refused(name):
    with pytest.raises(UsageError, match="expected module:function, importable from here"):
        predictor_process.load_models(
            StartMessage(backend=name, models=(("m", "."),), device=CPU, paths=())
        )


def test_several_kinds_of_models_are_served_by_one_predictor(paddle_folder):
    kinds = ("paddle3", "paddle2", "one_x", "fixed")
    service = PredictorService(
        ServiceConfig(
            models=tuple((kind, str(paddle_folder / kind)) for kind in kinds), devices=(CPU,)
        )
    )
    service.start(60)
    try:
        for kind in kinds:
            arrays = expected(paddle_folder, kind)
            name, wanted = ("x", "price") if kind == "one_x" else ("image", "logits")
            request = InferRequest(model=kind, inputs={name: arrays[name]})
            answer = service.submit(request).result(60)
            got = answer.outputs[service.models()[kind].outputs[0].name]
            assert_close(got, arrays[wanted])
            answer.release()
    finally:
        service.close()
