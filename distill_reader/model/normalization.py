"""Normalize raw uint8 pixels of students to the floats that a model takes.

The normalization belongs to the model, which was trained with it. So it is set when the model is
converted (a file in its folder) or served (`--normalize`), and never by the sender of the pixels.

    float = (pixel * scale - mean) / std
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from distill_reader.errors import BadRequest, ModelError, UsageError
from distill_reader.model.specs import InputEncoding, TensorSpec, find_tensor

Array = np.ndarray[tuple[int, ...], np.dtype[np.generic]]

NORMALIZATION_FILE = "normalization.json"  # in a model's folder
DEFAULT_SCALE = 1 / 255
_BEYOND = 1.01  # of what a pixel can be, for a scale such as 1/256
# The layout of pixels, and that of the model if it differs. "": no axis is one of channels.
LAYOUTS = ("", "CHW", "HWC", "HWC-CHW")
_KEYS = ("scale", "mean", "std", "layout")


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalization:
    """The normalization of one input."""

    scale: float = DEFAULT_SCALE
    mean: tuple[float, ...] = (0.0,)  # one for all, or one per channel
    std: tuple[float, ...] = (1.0,)  # likewise
    layout: str = ""  # of LAYOUTS

    def __post_init__(self) -> None:
        for name, values in (("scale", (self.scale,)), ("mean", self.mean), ("std", self.std)):
            if not values or not all(np.isfinite(value) for value in values):
                raise UsageError(f"normalization: {name}: expected numbers, got {list(values)}")
        if not all(value > 0 for value in (self.scale, *self.std)):
            raise UsageError(
                f"normalization: scale and std must be > 0, got {self.scale} and {list(self.std)}"
            )
        if self.layout not in LAYOUTS:
            raise UsageError(
                f"normalization: layout: expected one of {', '.join(LAYOUTS[1:])} or nothing, "
                f"got {self.layout!r}"
            )
        if len(self.mean) > 1 < len(self.std) and len(self.mean) != len(self.std):
            raise UsageError(
                f"normalization: mean has {len(self.mean)} values, std {len(self.std)}: "
                "one for all or one per channel"
            )
        if self.channels > 1 and not self.layout:
            raise UsageError(
                f"normalization: {self.channels} channels want a layout: CHW, HWC, or HWC-CHW for "
                "pixels that come as HWC to a model that takes CHW"
            )
        if max(self.mean) > _BEYOND * 255 * self.scale:
            raise UsageError(
                f"normalization: mean {max(self.mean):g} is above {255 * self.scale:g}, which a "
                f"white pixel becomes by scale {self.scale:g}: say scale=1 for mean and std of "
                "pixels from 0 to 255"
            )

    @property
    def channels(self) -> int:
        """The number of channels with values of their own; 1: all have the same."""
        return max(len(self.mean), len(self.std))

    def accepted(self, tensor: TensorSpec) -> InputEncoding:
        """Return how pixels are encoded for an input.

        Raises:
            UsageError: the input is not of floats, or its shape does not fit the layout.
        """
        if np.dtype(tensor.dtype).kind != "f":
            raise UsageError(
                f"normalization: input {tensor.name} is {tensor.dtype}; only inputs of floats can "
                "take pixels"
            )
        shape = tensor.shape
        if self.layout:
            if len(shape) != 3:
                raise UsageError(
                    f"normalization: input {tensor.name} has shape {list(shape)}, layout "
                    f"{self.layout} wants three axes"
                )
            channels = shape[2] if self.layout == "HWC" else shape[0]
            if self.channels > 1 and channels not in (-1, self.channels):
                raise UsageError(
                    f"normalization: input {tensor.name} has {channels} channels in layout "
                    f"{self.layout}, mean and std have {self.channels}"
                )
            if self.layout == "HWC-CHW":
                shape = (shape[1], shape[2], shape[0])
        return InputEncoding(dtype="uint8", shape=shape)

    def apply(self, pixels: Array, dtype: str) -> Array:
        """Return the floats for (N, ...) uint8 pixels, contiguous, in the model's layout.

        Raises:
            BadRequest: the number of channels is not that of mean and std.
        """
        if self.layout == "HWC-CHW":
            pixels = np.moveaxis(pixels, -1, 1)
        axis = pixels.ndim - 1 if self.layout == "HWC" else 1
        if self.channels > 1 and pixels.shape[axis] != self.channels:
            raise BadRequest(
                f"pixels of shape {list(pixels.shape)}: expected {self.channels} channels on axis "
                f"{axis}"
            )
        shape = [1] * pixels.ndim
        shape[axis] = self.channels
        mean, std = (np.array(values, np.float64) for values in (self.mean, self.std))
        precise = np.result_type(dtype, np.float32)
        factor = np.broadcast_to(self.scale / std, self.channels).reshape(shape).astype(precise)
        offset = np.broadcast_to(-mean / std, self.channels).reshape(shape).astype(precise)
        floats = np.empty(pixels.shape, precise)
        np.multiply(pixels, factor, out=floats)
        floats += offset
        return floats.astype(dtype, copy=False)


def parse_option(text: str) -> tuple[str, str, Normalization]:
    """Parse `[MODEL/]INPUT:KEY=VALUE:...` into model ("": the only one), input and normalization.

    Raises:
        UsageError: the text is malformed; says how.
    """
    target, *parts = text.split(":")
    model, _, name = target.rpartition("/")
    fields: dict[str, Any] = {}
    for part in parts:
        key, separator, value = part.partition("=")
        if not separator or key not in _KEYS or key in fields:
            raise UsageError(
                f"--normalize {text}: {part!r} is none of {', '.join(f'{k}=...' for k in _KEYS)}, "
                "each once"
            )
        fields[key] = value if key == "layout" else _numbers(text, value)
    if not name:
        raise UsageError(
            f"--normalize {text}: names no input; write INPUT:mean=0.485,0.456,0.406:"
            "std=0.229,0.224,0.225:layout=CHW"
        )
    if "scale" in fields:
        if len(fields["scale"]) != 1:
            raise UsageError(f"--normalize {text}: scale is one number, such as 1/255")
        (fields["scale"],) = fields["scale"]
    return model, name, Normalization(**fields)


def read_folder(folder: str | Path) -> dict[str, Normalization]:
    """Return the normalizations in a model's folder, by input.

    Raises:
        ModelError: the file is malformed; names it.
    """
    path = Path(folder) / NORMALIZATION_FILE
    if not path.is_file():
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(document, dict):
            raise UsageError(f"expected an object of inputs, got {document!r:.80}")
        return {name: from_json(fields) for name, fields in document.items()}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: {error}") from error


def write_folder(folder: str | Path, normalizations: Mapping[str, Normalization]) -> None:
    """Write normalizations into a model's folder; if there are none, remove the file."""
    path = Path(folder) / NORMALIZATION_FILE
    if not normalizations:
        path.unlink(missing_ok=True)
        return
    document = {name: asdict(each) for name, each in normalizations.items()}
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def from_json(fields: Any) -> Normalization:
    """Parse what `asdict` returns. Raises: UsageError."""
    if not isinstance(fields, dict) or not set(fields) <= set(_KEYS):
        raise UsageError(f"normalization: expected {', '.join(_KEYS)}, got {fields!r:.80}")
    known: dict[str, Any] = dict(fields)
    for key in ("mean", "std"):
        values = known.get(key, [1.0])
        if not isinstance(values, list) or not all(map(_is_number, values)):
            raise UsageError(f"normalization: {key}: expected a list of numbers, got {values!r}")
        if key in known:
            known[key] = tuple(map(float, values))
    if not _is_number(known.get("scale", 1.0)) or not isinstance(known.get("layout", ""), str):
        raise UsageError(f"normalization: scale is a number and layout a text, got {fields!r:.80}")
    return Normalization(**known)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numbers(text: str, value: str) -> tuple[float, ...]:
    try:
        return tuple(float(Fraction(part.strip())) for part in value.split(","))
    except (ValueError, ZeroDivisionError, OverflowError):
        raise UsageError(
            f"--normalize {text}: expected numbers such as 0.5, 1/255 or 0.4,0.5,0.6, got {value!r}"
        ) from None


def check_inputs(
    normalizations: Mapping[str, Normalization], inputs: Sequence[TensorSpec]
) -> dict[str, Normalization]:
    """Return the normalizations by the names of the spec.

    Raises:
        UsageError: a normalization names no input, or does not fit it; names it.
    """
    found: dict[str, Normalization] = {}
    for name, normalization in normalizations.items():
        tensor = find_tensor(inputs, name)
        if tensor is None:
            raise UsageError(
                f"normalization: {name!r} is not an input of the model; it takes "
                f"{', '.join(tensor.name for tensor in inputs)}"
            )
        if tensor.name in found:
            raise UsageError(
                f"normalization: {name!r} is the input {tensor.name!r}, which has one; give one "
                f"for each input"
            )
        normalization.accepted(tensor)
        found[tensor.name] = normalization
    return found
