"""Backends for tests and benchmarks, named by `--backend` and this module's name, a colon, NAME.

`folder` is the path of an existing folder; what a toy needs to know it reads from there.
"""

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from distill_reader.errors import ModelError
from distill_reader.model.specs import ModelSpec, TensorSpec
from distill_reader.teacher.predictor.backend import Array, Backend, Device
from distill_reader.teacher.predictor.digest import digest_of


def _tensor(name: str, *shape: int, dtype: str = "float32", variable: str = "") -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape, variable=variable)


class Toy:
    """Any number of inputs; outputs as a function says."""

    def __init__(self, spec: ModelSpec, folder: str) -> None:
        self.spec = spec
        self.folder = Path(folder)

    def run(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        raise NotImplementedError


class Sums(Toy):
    """The sum of each row, its mean, and the process that computed it."""

    def run(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        image = inputs["image"]
        rows = image.reshape(len(image), -1).astype(np.float64)
        return {
            "sum": rows.sum(1, keepdims=True).astype(np.float32),
            "mean": rows.mean(1, keepdims=True).astype(np.float32),
            "pid": np.full((len(image), 1), os.getpid(), np.int64),
            "batch": np.full((len(image), 1), len(image), np.int64),
        }


def _image(folder: str) -> TensorSpec:
    """A file `shape` in the folder says which one; 4 without it."""
    file = Path(folder, "shape")
    shape = map(int, file.read_text().split()) if file.exists() else (4,)
    return _tensor("image", *shape, variable="x_0")


_SUMS = (
    _tensor("sum", 1, variable="y_0"),
    _tensor("mean", 1, variable="y_1"),
    _tensor("pid", 1, dtype="int64"),
    _tensor("batch", 1, dtype="int64"),
)


def sums(folder: str, name: str, device: Device) -> Backend:
    """Right answers that can be checked, and who gave them."""
    if not Path(folder).is_dir():
        raise ModelError(f"{folder}: is no folder")
    return Sums(ModelSpec(name=name, inputs=(_image(folder),), outputs=_SUMS), folder)


class _SlowSums(Sums):
    def run(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        time.sleep(0.02 * -(-len(inputs["image"]) // 16))
        return super().run(inputs)


def replaced(folder: str, name: str, device: Device) -> Backend:
    """Another model for the second predictor, as if files were replaced between them."""
    try:
        Path(folder, "loaded").touch(exist_ok=False)
        shape = 4
    except FileExistsError:
        shape = 5
    return Sums(ModelSpec(name=name, inputs=(_tensor("image", shape),), outputs=_SUMS), folder)


def slow_sums(folder: str, name: str, device: Device) -> Backend:
    """Takes 20 ms per 16 samples, waiting, as a teacher on a device of its own does."""
    return _SlowSums(ModelSpec(name=name, inputs=(_image(folder),), outputs=_SUMS), folder)


class _Naps(Sums):
    def run(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        time.sleep(2.0)
        return super().run(inputs)


def naps(folder: str, name: str, device: Device) -> Backend:
    """Takes two seconds for a batch, as a large model may take minutes."""
    return _Naps(ModelSpec(name=name, inputs=(_image(folder),), outputs=_SUMS), folder)


class _Zeros(Toy):
    def run(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        return {"logits": np.zeros((len(inputs["image"]), 10), np.float32)}


def zeros(folder: str, name: str, device: Device) -> Backend:
    """Costs nothing: what is left is the cost of serving."""
    spec = ModelSpec(name=name, inputs=(_image(folder),), outputs=(_tensor("logits", 10),))
    return _Zeros(spec, folder)


class _Classify(Toy):
    """Logits that depend on the pixels, and their softmax; `classes` in the folder: how many."""

    def run(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        rows = inputs["image"].reshape(len(inputs["image"]), -1).astype(np.float32)
        weights = np.random.default_rng(7).normal(size=(rows.shape[1], self._classes))
        logits = (rows @ weights).astype(np.float32)
        shares = np.exp(logits - logits.max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
        batch = np.full((len(rows), 1), len(rows), np.int64)
        return {"logits": logits, "probs": shares, "batch": batch}

    @property
    def _classes(self) -> int:
        return self.spec.outputs[0].shape[0]


def classify(folder: str, name: str, device: Device) -> Backend:
    """A classifier, whose version is that of the files `classes` and `version`."""
    files = [path for path in map(Path(folder).joinpath, ("classes", "version")) if path.exists()]
    classes = int((Path(folder) / "classes").read_text()) if files else 20
    outputs = (
        _tensor("logits", classes),
        _tensor("probs", classes),
        _tensor("batch", 1, dtype="int64"),
    )
    spec = ModelSpec(
        name=name, inputs=(_image(folder),), outputs=outputs, digest=digest_of(folder, files)
    )
    return _Classify(spec, folder)


class _Doubled(Toy):
    def run(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        ids = inputs["ids"]
        return {
            "doubled": np.multiply(ids, inputs["scale"]),
            "count": np.full((len(ids), 1), ids.shape[1], np.int32),
        }


def doubled(folder: str, name: str, device: Device) -> Backend:
    """Two inputs, one with an open axis that the output has as well."""
    spec = ModelSpec(
        name=name,
        inputs=(_tensor("ids", -1, dtype="int64"), _tensor("scale", 1, dtype="int64")),
        outputs=(_tensor("doubled", -1, dtype="int64"), _tensor("count", 1, dtype="int32")),
    )
    return _Doubled(spec, folder)


class _Lengths(Toy):
    def run(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        return {"length": np.full((len(inputs["ids"]), 1), inputs["ids"].shape[1], np.int64)}


def lengths(folder: str, name: str, device: Device) -> Backend:
    """One input, whose samples may have no value."""
    spec = ModelSpec(
        name=name,
        inputs=(_tensor("ids", -1, dtype="int64"),),
        outputs=(_tensor("length", 1, dtype="int64"),),
    )
    return _Lengths(spec, folder)


class _Repeated(Toy):
    def run(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        count = inputs["count"]
        return {"ones": np.ones((len(count), int(count.max())), np.float32), "same": count}


def repeated(folder: str, name: str, device: Device) -> Backend:
    """The values of the input say how long the output is, so that no shape tells it before."""
    spec = ModelSpec(
        name=name,
        inputs=(_tensor("count", 1, dtype="int64"),),
        outputs=(_tensor("ones", -1), _tensor("same", 1, dtype="int64")),
    )
    return _Repeated(spec, folder)


class _Moody(Sums):
    """Fails in the way that the value of a sample asks for."""

    def run(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        first = inputs["image"].reshape(len(inputs["image"]), -1)[:, 0]
        outputs = dict(super().run(inputs))
        if (first == -1).any():
            raise ValueError("no negative images")
        if (first == -2).any():
            raise RuntimeError("the device is lost")
        if (first == -3).any():
            os.kill(os.getpid(), signal.SIGKILL)
        if (first == -4).any():
            outputs["sum"] = outputs["sum"].astype(np.float64)
        if (first == -5).any():
            outputs["sum"] = outputs["sum"][:-1]
        if (first == -6).any():
            del outputs["mean"]
        if (first == -10).any():
            outputs["sum"] = outputs["sum"][:, 0]
        if (first == -11).any():
            outputs["sum"] = np.repeat(outputs["sum"], 2, axis=1)
        if (first == -7).any() and not (self.folder / "died").exists():
            (self.folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if (first == -8).any():
            return {**outputs, "mean": [0.0] * len(first)}  # type: ignore[dict-item]
        return outputs if not (first == -9).any() else None  # type: ignore[return-value]


def moody(folder: str, name: str, device: Device) -> Backend:
    """Goes wrong on demand: see _Moody."""
    return _Moody(ModelSpec(name=name, inputs=(_image(folder),), outputs=_SUMS), folder)


class _InPlace(Sums):
    """Doubles its inputs where they are; runs out of memory the first time."""

    def run(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        image = inputs["image"]
        np.add(image, image, out=image)
        if not (self.folder / "failed").exists():
            (self.folder / "failed").touch()
            raise RuntimeError("out of memory")
        return super().run(inputs)


def in_place(folder: str, name: str, device: Device) -> Backend:
    """Works on its inputs in place, as a normalization of pixels does."""
    return _InPlace(ModelSpec(name=name, inputs=(_image(folder),), outputs=_SUMS), folder)


class _Training(Sums):
    def run(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        outputs = super().run(inputs)
        return {**outputs, "sum": outputs["sum"] - outputs["sum"].mean()}


def training(folder: str, name: str, device: Device) -> Backend:
    """Takes the mean of a batch off its sums, as batch norm does in training."""
    return _Training(ModelSpec(name=name, inputs=(_image(folder),), outputs=_SUMS), folder)


class _Dropping(Sums):
    """Leaves out some pixels at random."""

    def run(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        image = inputs["image"]
        return super().run({"image": image * (np.random.random(image.shape) < 0.5)})


def dropping(folder: str, name: str, device: Device) -> Backend:
    """Answers differ each time, as by dropout in training."""
    return _Dropping(ModelSpec(name=name, inputs=(_image(folder),), outputs=_SUMS), folder)


class _Quantized(Sums):
    def run(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        image = inputs["image"]
        step = np.abs(image).max() / 24
        return super().run({"image": np.round(image / step) * step})


def quantized(folder: str, name: str, device: Device) -> Backend:
    """Rounds by the largest number of a batch, as dynamic quantization does."""
    return _Quantized(ModelSpec(name=name, inputs=(_image(folder),), outputs=_SUMS), folder)


def broken(folder: str, name: str, device: Device) -> Backend:
    """Cannot be loaded."""
    raise ModelError(f"{folder}/model.json: is broken")


def crashing(folder: str, name: str, device: Device) -> Backend:
    """Ends its process while it loads."""
    os._exit(7)


def late(folder: str, name: str, device: Device) -> Backend:
    """Takes minutes to load."""
    time.sleep(300)
    return sums(folder, name, device)
