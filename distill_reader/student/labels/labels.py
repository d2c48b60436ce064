"""Which output encodings to ask teachers for, and how to decode them for the user. Pure.

Answers stay encoded, and so small, until the user gets them; caches store them encoded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from distill_reader.errors import BadRequest
from distill_reader.model.output_encodings import INDICES, LOG_REST, VALUES, WHOLE, encoding_name
from distill_reader.model.specs import ModelSpec, TensorSpec
from distill_reader.student.clients.client import Array
from distill_reader.student.options import TopK

HAS_NAN = "has NaN: the teacher's model computes no number for a sample: look at it and its inputs"
_MASS_TOLERANCE = 2e-2  # rounded probabilities may sum to more than 1 by so much
_NOTHING = 1e4  # so far below the largest logit the probability is 0 at any usual temperature


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedOutput:
    """An output as the teacher serves it: what is needed to decode its columns."""

    dtype: str
    classes: int = 0  # length of its last axis; 0: not needed
    shape: tuple[int, ...] | None = None  # of one sample, if the teacher tells it

    def varies(self, column: Array) -> bool:
        """Return whether samples may differ in shape, for example with the inputs' lengths.

        Args:
            column: an answer; a prototxt leaves out axes of open length, so it may show another.
        """
        return self.shape is None or -1 in self.shape or column.shape[1:] != self.shape

    def to_json(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "classes": self.classes}

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> "ServedOutput":
        return ServedOutput(dtype=str(fields["dtype"]), classes=int(fields["classes"]))


class Labels:
    """The predictions of a reader: what to ask for, and how to decode it."""

    def __init__(self, predicts: Sequence[str], wire_dtype: str, top_k: TopK | None) -> None:
        """
        Args:
            wire_dtype: in which teachers send floats; "": as they serve them.
            top_k: None: teachers send all values.
        """
        self._predicts = tuple(predicts)
        self._wire_dtype = wire_dtype
        self._top_k = top_k
        self._is_top = [
            top_k is not None and (top_k.predicts is None or name in top_k.predicts)
            for name in predicts
        ]

    @property
    def predicts(self) -> tuple[str, ...]:
        return self._predicts

    @property
    def arrays(self) -> tuple[str, ...]:
        """The output's name for each array that the user gets."""
        is_sparse = self._top_k is not None and not self._top_k.dense
        counts = [2 if is_top and is_sparse else 1 for is_top in self._is_top]
        return tuple(
            name for name, count in zip(self._predicts, counts, strict=True) for _ in range(count)
        )

    @property
    def asks_encodings(self) -> bool:
        return bool(self._wire_dtype) or any(self._is_top)

    def identity(self) -> dict[str, Any]:
        """Return the options that determine the columns, for the key of a cache."""
        top = self._top_k
        return {
            "predicts": list(self._predicts),
            "wire_dtype": self._wire_dtype,
            "top_k": None
            if top is None
            else [top.k, self._has_rest, [i for i, is_top in enumerate(self._is_top) if is_top]],
        }

    # --- asking

    def asked(
        self, endpoint: str, spec: ModelSpec
    ) -> tuple[tuple[str, ...], tuple[ServedOutput, ...]]:
        """Return the names of the columns to ask a teacher for, and the outputs they encode.

        Raises:
            BadRequest: the model lacks an output, or cannot encode it so; names the remedy.
        """
        names: list[str] = []
        served: list[ServedOutput] = []
        for name, is_top in zip(self._predicts, self._is_top, strict=True):
            tensor = self._output(endpoint, spec, name)
            wire = self._wire_of(tensor)
            if not wire and not is_top:
                names.append(name)
                served.append(_served(tensor))
                continue
            if tensor is None or not spec.takes_encodings:
                raise BadRequest(
                    f"{endpoint}: cannot be asked for {'the top' if is_top else wire} of {name}: "
                    "only teachers of edl can, of a release that has it, by fast://, grpc:// or "
                    "http://; upgrade it, or leave out set_top_k and set_wire_dtype(predicts=)"
                )
            if is_top:
                classes = self._classes(endpoint, tensor)
                names += self._top_names(name, wire, classes)
                served.append(replace(_served(tensor), classes=classes))
            else:
                names.append(encoding_name(name, WHOLE, dtype=wire))
                served.append(_served(tensor))
        return tuple(names), tuple(served)

    def sample_bytes(self, spec: ModelSpec) -> int | None:
        """Return the bytes of one sample's arrays; None: only an answer shows it."""
        if not spec.outputs or len(self.arrays) > len(self._predicts):  # pairs are small
            return None
        sizes = [spec.output(name).sample_bytes for name in self._predicts]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    def _output(self, endpoint: str, spec: ModelSpec, name: str) -> TensorSpec | None:
        """Return the output; None: the teacher does not list its outputs."""
        if not spec.outputs:
            return None
        try:
            tensor = spec.output(name)
        except BadRequest as error:
            raise BadRequest(f"{endpoint}: predicts: {error}") from None
        if tensor.unusable:
            raise BadRequest(f"{endpoint}: predicts: output {name} {tensor.unusable}")
        return tensor

    def _wire_of(self, tensor: TensorSpec | None) -> str:
        """Return the dtype to ask for; "": the dtype that is served."""
        if not self._wire_dtype:
            return ""
        if tensor is not None and tensor.dtype not in ("float32", "float64"):
            return ""
        return self._wire_dtype

    def _classes(self, endpoint: str, tensor: TensorSpec) -> int:
        top = self._top_k
        assert top is not None
        if np.dtype(tensor.dtype).kind != "f" or not tensor.shape:
            raise BadRequest(
                f"{endpoint}: output {tensor.name} is {tensor.dtype}{list(tensor.shape)}: "
                "set_top_k is for floats with an axis of classes; name those by predicts="
            )
        last = tensor.shape[-1]
        if last < 0 and top.classes is None:
            raise BadRequest(
                f"{endpoint}: output {tensor.name} does not say how many classes it has: "
                "set_top_k(classes=...) does"
            )
        if top.classes is not None and last not in (-1, top.classes):
            raise BadRequest(
                f"{endpoint}: output {tensor.name} has {last} classes, set_top_k says {top.classes}"
            )
        return last if last >= 0 else int(top.classes or 0)

    def _top_names(self, name: str, wire: str, classes: int) -> list[str]:
        top = self._top_k
        assert top is not None
        # An index nearly always fits into two bytes; if it does not, the teacher refuses it.
        index_dtype = "uint16" if classes <= 1 << 16 else ""
        names = [
            encoding_name(name, VALUES, top.k, wire),
            encoding_name(name, INDICES, top.k, index_dtype),
        ]
        return [*names, encoding_name(name, LOG_REST, top.k)] if self._has_rest else names

    @property
    def _has_rest(self) -> bool:
        """Whether to ask for the rest, too. For probabilities it follows from the sum of 1."""
        top = self._top_k
        return top is not None and top.of == "logits" and top.rest == "uniform"

    # --- decoding

    def vary(self, columns: Sequence[Array], served: Sequence[ServedOutput]) -> bool:
        """Return whether the labels of other samples may have another shape than these."""
        if self.asks_encodings:  # teachers of edl tell exact shapes, and columns have others
            return any(each.shape is None or -1 in each.shape for each in served)
        return any(of.varies(column) for of, column in zip(served, columns, strict=True))

    def restore(
        self, columns: Sequence[Array], served: Sequence[ServedOutput]
    ) -> tuple[Array, ...]:
        """Decode columns to the user's arrays.

        Raises:
            BadRequest: they are not what the options say, such as probabilities.
        """
        if not self.asks_encodings:
            return tuple(columns)
        arrays: list[Array] = []
        at = 0
        for name, is_top, of in zip(self._predicts, self._is_top, served, strict=True):
            if is_top:
                width = 3 if self._has_rest else 2
                arrays += self._restore_top(name, columns[at : at + width], of)
                at += width
            else:
                column = columns[at]
                is_narrow = column.dtype == np.float16 and of.dtype in ("float32", "float64")
                arrays.append(column.astype(of.dtype) if is_narrow else column)
                at += 1
        return tuple(arrays)

    def _restore_top(self, name: str, columns: Sequence[Array], of: ServedOutput) -> list[Array]:
        top = self._top_k
        assert top is not None
        values: Any = columns[0].astype(of.dtype)  # a copy, for a cache may hold the column
        indices = columns[1].astype(np.int64)
        others = of.classes - indices.shape[-1]
        if indices.size and not 0 <= indices.min() <= indices.max() < of.classes:
            raise BadRequest(f"{name}: a teacher names a class beyond the {of.classes} there are")
        if top.of == "logits":
            if not top.dense:
                return [values, indices]
            if top.rest == "uniform" and others:
                fill: Any = columns[2].astype(of.dtype) - np.log(others)
            else:
                fill = values.max(-1, keepdims=True) - _NOTHING
            return [_spread(values, indices, fill, of)]
        mass = values.sum(-1, keepdims=True)
        self._check_mass(name, values, mass)
        if top.rest == "renormalize" or not others:
            values /= mass
            mass = np.ones_like(mass)
        elif (mass > 1).any():  # by rounding
            values /= np.maximum(mass, 1)
        if not top.dense:
            return [values, indices]
        fill = np.maximum(1 - mass, 0) / max(others, 1)
        return [_spread(values, indices, fill, of)]

    def _check_mass(self, name: str, values: Any, mass: Any) -> None:
        is_fine = values.size == 0 or (
            values.min() >= 0 and mass.max() <= 1 + _MASS_TOLERANCE and mass.min() > 0
        )
        if np.isnan(mass).any():
            raise BadRequest(f"{name}: {HAS_NAN}")
        if not is_fine:
            raise BadRequest(
                f"{name}: its largest values are no probabilities (they sum to "
                f"{float(mass.min()):.6g} to {float(mass.max()):.6g}); for a teacher that serves "
                "logits say set_top_k(k, of='logits')"
            )


def _served(tensor: TensorSpec | None) -> ServedOutput:
    if tensor is None:
        return ServedOutput(dtype="")
    return ServedOutput(dtype=tensor.dtype, shape=tensor.shape)


def _spread(values: Any, indices: Any, fill: Any, of: ServedOutput) -> Array:
    """Return (..., classes) with `values` at `indices` and `fill` (..., 1) elsewhere."""
    dense = np.empty((*values.shape[:-1], of.classes), of.dtype)
    dense[...] = fill
    np.put_along_axis(dense, indices, values, -1)
    return dense
