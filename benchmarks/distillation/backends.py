"""Backends of the teachers in benchmarks/distill.py: they compute nothing, or only wait.

Loaded by `python -m distill_reader.serve --backend benchmarks.distillation.backends:FUNCTION`. The
folder's name is the shape of a sample, as in `1x28x28`. Column 0 of the answer repeats the first
value of each sample, so that a student can tell whose answer it got.
"""

import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from distill_reader.model.specs import ModelSpec, TensorSpec
from distill_reader.teacher.predictor.backend import Array, Backend, Device

CLASSES = 10
SLOW_S = 0.020 / 16  # per image: the 20 ms per 16 images of the slow teachers
SPARE_S = 0.000_03  # per image: a teacher with more power than its student can use


def first_values(images: Array) -> Array:
    """Return (samples, CLASSES) float32 with the first value of each sample in column 0."""
    answer = np.zeros((len(images), CLASSES), np.float32)
    answer[:, 0] = images.reshape(len(images), -1)[:, 0]
    return answer


class _Teacher:
    def __init__(self, folder: str, name: str, wait_s: float) -> None:
        shape = tuple(map(int, Path(folder).name.split("x")))
        self.spec = ModelSpec(
            name=name,
            inputs=(TensorSpec(name="image", dtype="float32", shape=shape),),
            outputs=(TensorSpec(name="score", dtype="float32", shape=(CLASSES,)),),
        )
        self._wait_s = wait_s  # per sample

    def run(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        images = inputs["image"]
        if self._wait_s:
            time.sleep(self._wait_s * len(images))
        return {"score": first_values(images)}


def trivial(folder: str, name: str, device: Device) -> Backend:
    """Costs nothing: what is left is what serving and reading cost."""
    return _Teacher(folder, name, 0.0)


def slow(folder: str, name: str, device: Device) -> Backend:
    """Takes 20 ms per 16 images, waiting, as a teacher on a device of its own does."""
    return _Teacher(folder, name, SLOW_S)


def spare(folder: str, name: str, device: Device) -> Backend:
    """Waits as well, but is faster than any student of the benchmark."""
    return _Teacher(folder, name, SPARE_S)
