"""The benchmark of options measures what it says. Speed does not matter here."""

import argparse
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import distill_options
from benchmarks.distillation import options_child
from benchmarks.distillation.options_backend import CLASSES, NORMALIZATION, classify
from distill_reader.teacher.predictor.backend import Device
from distill_reader.teacher.predictor.encodings import decode_input
from tests.distill_reader.student.local_teacher import LocalService, LocalTeacher

SHAPE = (3, 4, 4)


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    folder = tmp_path / "x".join(map(str, SHAPE))
    folder.mkdir()
    backend = classify(str(folder), "m", Device())
    tensor = backend.spec.inputs[0]
    accepting = replace(tensor, accepts=(NORMALIZATION.accepted(tensor),))

    def compute(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        return backend.run({"image": decode_input(inputs["image"], tensor, NORMALIZATION)})

    service = LocalService(replace(backend.spec, inputs=(accepting,)), compute)
    teacher = LocalTeacher(service)
    yield f"fast://{teacher.endpoint}"
    teacher.close()
    service.close()


@pytest.mark.parametrize("option", ["float32", "uint8"])
def test_two_epochs_of_the_cache_are_measured_and_their_answers_checked(
    endpoint: str, tmp_path: Path, option: str
):
    arguments = argparse.Namespace(
        teachers=endpoint,
        option=option,
        shape=SHAPE,
        batch=8,
        samples=80,
        folder=tmp_path / "cache",
    )
    found = options_child.cache(arguments)
    assert found["wrong"] == 0
    assert found["disk_bytes_per_sample"] >= 4 * CLASSES + 24
    for name in ("first_samples_per_s", "second_samples_per_s", "sqlite_samples_per_s"):
        assert found[name] > 0


def test_an_answer_of_another_image_would_be_seen():
    pixels = np.zeros((2, *SHAPE), np.uint8)
    pixels[:, 0, 0, 0] = 7, 250
    images: Any = NORMALIZATION.apply(pixels, "float32")
    for batch, firsts in options_child.pool(SHAPE, 4, "uint8"):
        assert batch.dtype == np.uint8
        np.testing.assert_array_equal(batch[:, 0, 0, 0], firsts)
    score: Any = classify("3x4x4", "m", Device()).run({"image": images})["score"]
    assert score.argmax(1).tolist() == [7, 250]
    np.testing.assert_allclose(score.sum(1), 1, rtol=1e-5)


def test_a_row_that_there_is_not_is_refused():
    command = [sys.executable, "benchmarks/distill_options.py", "--only", "speed"]
    root = Path(distill_options.__file__).resolve().parents[1]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert run.returncode == 2
    assert "'speed' is none of wire, link, cache, accuracy" in run.stderr
