"""Decode inputs to the model's types, and encode outputs as students want them. Pure.

The model keeps its floats. Narrow types and the largest values are only for the network.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from distill_reader.errors import BadRequest
from distill_reader.model.normalization import Normalization
from distill_reader.model.output_encodings import INDICES, LOG_REST, WHOLE, OutputEncoding
from distill_reader.model.specs import TensorSpec
from distill_reader.teacher.predictor.backend import Array


def decode_input(array: Array, tensor: TensorSpec, normalization: Normalization | None) -> Array:
    """Convert samples from any encoding that `tensor` accepts to the model's own type."""
    if array.dtype == np.dtype(tensor.dtype):
        return array
    if array.dtype == np.uint8 and normalization is not None:
        return normalization.apply(array, tensor.dtype)
    return array.astype(tensor.dtype)


class Encoder:
    """Encodes the outputs of one batch. What several encodings need is computed once."""

    def __init__(self, outputs: Sequence[Array], names: Sequence[str]) -> None:
        self._outputs = outputs
        self._names = names
        self._tops: dict[tuple[int, int], tuple[Array, Any]] = {}

    def encode(self, encoding: OutputEncoding) -> Array:
        """Return the output in this encoding, as (N, ...).

        Raises:
            BadRequest: values do not fit the type.
        """
        output = self._outputs[encoding.output_index]
        if encoding.part == WHOLE:
            return self._as_float(output, encoding)
        values, indices = self._top(encoding.output_index, encoding.top_k)
        if encoding.part == INDICES:
            if output.shape[-1] - 1 > np.iinfo(encoding.dtype).max:
                raise BadRequest(
                    f"output {self._names[encoding.output_index]}: {output.shape[-1]} values have "
                    f"indices beyond {encoding.dtype}; want int32"
                )
            narrow: Array = indices.astype(encoding.dtype)
            return narrow
        if encoding.part == LOG_REST:
            return self._as_float(_log_rest(output, indices), encoding)
        return self._as_float(values, encoding)

    def _as_float(self, array: Array, encoding: OutputEncoding) -> Array:
        if array.dtype == np.dtype(encoding.dtype):
            return array
        try:
            with np.errstate(over="raise"):
                return array.astype(encoding.dtype)
        except FloatingPointError:
            raise BadRequest(
                f"output {self._names[encoding.output_index]}: has values beyond {encoding.dtype} "
                f"(±{np.finfo(encoding.dtype).max:.6g}); want it as it is"
            ) from None

    def _top(self, place: int, top_k: int) -> tuple[Array, Any]:
        found = self._tops.get((place, top_k))
        if found is None:
            found = self._tops[place, top_k] = _largest(self._outputs[place], top_k)
        return found


def _largest(output: Any, top_k: int) -> tuple[Array, Any]:
    """Return the values and indices of the largest, in order. Equal ones keep their order."""
    classes = output.shape[-1]
    # NaN has no order. It must not hide large values.
    keys = np.where(np.isnan(output), np.inf, -output)
    if top_k < classes:
        some = np.sort(np.argpartition(keys, top_k - 1, axis=-1)[..., :top_k], axis=-1)
    else:
        some = np.broadcast_to(np.arange(classes), output.shape)
    order = np.argsort(np.take_along_axis(keys, some, -1), axis=-1, kind="stable")
    indices = np.take_along_axis(some, order, -1)
    return np.take_along_axis(output, indices, -1), indices


def _log_rest(output: Any, indices: Any) -> Array:
    """Return log(sum(exp)) over all values but those at `indices`, as (N, ..., 1); none: -inf."""
    others = output.astype(np.float64)
    np.put_along_axis(others, indices, -np.inf, -1)
    most = others.max(-1, keepdims=True)
    safe = np.where(np.isfinite(most), most, 0.0)
    with np.errstate(divide="ignore"):
        rest = np.log(np.exp(others - safe).sum(-1, keepdims=True)) + safe
    result: Array = rest.astype(output.dtype)
    return result
