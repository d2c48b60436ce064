"""Specs of a served model: names, types and shapes of its inputs and outputs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distill_reader.errors import BadRequest, UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class InputEncoding:
    """Another type and shape in which an input may be sent; the teacher converts it."""

    dtype: str
    shape: tuple[int, ...]  # of one sample; -1: any length


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One input or output. Axis 0 of every tensor counts samples and is not part of `shape`."""

    name: str  # for clients: the alias of the prototxt if there is one
    dtype: str  # numpy's name: "float32", "int64", "uint8", ...
    shape: tuple[int, ...]  # of one sample; -1: any length
    variable: str = ""  # the model's own name; "": the same
    accepts: tuple[InputEncoding, ...] = ()  # of an input: other encodings that are accepted
    # Why a tensor of a foreign teacher can be neither sent nor read; `dtype` is "void". "": it can.
    unusable: str = ""

    def __post_init__(self) -> None:
        if not self.variable:
            object.__setattr__(self, "variable", self.name)
        try:
            np.dtype(self.dtype)
        except TypeError as error:
            raise UsageError(f"tensor {self.name}: unknown dtype {self.dtype!r}") from error

    @property
    def sample_bytes(self) -> int | None:
        """Bytes of one sample; None: the shape leaves it open."""
        if any(length < 0 for length in self.shape):
            return None
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize

    def check(self, dtype: str, shape: tuple[int, ...]) -> None:
        """Check a tensor's type and shape; `shape` includes the samples of axis 0.

        Raises:
            BadRequest: it does not fit; names the tensor, what came and what is expected.
        """
        encoding = self.accepted(dtype)
        if encoding is None:
            names = " or ".join(encoding.dtype for encoding in self._encodings)
            raise BadRequest(f"tensor {self.name}: expected {names}, got {dtype}")
        fits = len(shape) == len(encoding.shape) + 1 and all(
            want in (-1, got) for want, got in zip(encoding.shape, shape[1:], strict=True)
        )
        if not fits:
            want = ["N", *("?" if length < 0 else str(length) for length in encoding.shape)]
            raise BadRequest(
                f"tensor {self.name}: expected shape [{', '.join(want)}], got {list(shape)}"
            )

    def accepted(self, dtype: str) -> InputEncoding | None:
        """Return the encoding of an input with this dtype; None: the dtype is not accepted."""
        wanted = np.dtype(dtype)  # dtypes of another byte order are not equal
        return next(
            (encoding for encoding in self._encodings if np.dtype(encoding.dtype) == wanted), None
        )

    @property
    def _encodings(self) -> tuple[InputEncoding, ...]:
        return (InputEncoding(dtype=self.dtype, shape=self.shape), *self.accepts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model as its clients see it."""

    name: str
    version: str = "1"
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    takes_encodings: bool = False  # whether outputs can be encoded (output_encodings.py)
    digest: str = ""  # of the model's files, by which clients compare versions; "": unknown
    is_exact: bool = True  # False: of a client prototxt, which leaves out axes of open length

    def input(self, name: str) -> TensorSpec:
        """Return the input of this name or variable name.

        Raises:
            BadRequest: there is none; lists the inputs.
        """
        return _find(self.inputs, name, self.name, "input")

    def output(self, name: str) -> TensorSpec:
        """Return the output of this name or variable name.

        Raises:
            BadRequest: there is none; lists the outputs.
        """
        return _find(self.outputs, name, self.name, "output")


def find_tensor(specs: Sequence[TensorSpec], name: str) -> TensorSpec | None:
    """Return the tensor that a name means; None: there is none.

    A name comes before the variable of another tensor that is called so.
    """
    for spec in specs:
        if name == spec.name:
            return spec
    return next((spec for spec in specs if name == spec.variable), None)


def _find(specs: tuple[TensorSpec, ...], name: str, model: str, kind: str) -> TensorSpec:
    found = find_tensor(specs, name)
    if found is not None:
        return found
    raise BadRequest(
        f"model {model} has no {kind} {name!r}; it has {', '.join(spec.name for spec in specs)}"
    )
