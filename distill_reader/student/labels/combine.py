"""Average the predictions of several services. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distill_reader.errors import BadRequest
from distill_reader.student.clients.client import Array
from distill_reader.student.labels.labels import HAS_NAN
from distill_reader.student.options import OutputKind

_SUM_TOLERANCE = 2e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """The weighted mean of each output."""

    names: tuple[str, ...]  # of the services, for messages
    weights: tuple[float, ...]
    predicts: tuple[str, ...]
    of: OutputKind

    def __call__(self, members: Sequence[Sequence[Array]]) -> tuple[Array, ...]:
        """Return the mean outputs of the services, given in the order of `names`.

        Raises:
            BadRequest: outputs differ in shape, are not floats, or are not probabilities although
                the user said so.
        """
        return tuple(
            self._mean(name, [outputs[index] for outputs in members])
            for index, name in enumerate(self.predicts)
        )

    def _mean(self, output: str, arrays: Sequence[Any]) -> Array:
        first = arrays[0]
        for name, array in zip(self.names, arrays, strict=True):
            if array.dtype.kind != "f":
                raise BadRequest(
                    f"teachers combined: {output} of {name} is {array.dtype}: a mean is of floats"
                )
            if array.shape != first.shape:
                raise BadRequest(
                    f"teachers combined: {output} of {name} has shape {list(array.shape[1:])} per "
                    f"sample, that of {self.names[0]} {list(first.shape[1:])}: they must agree"
                )
            if self.of == "probabilities":
                _check_probabilities(name, output, array)
        # In double precision and in a fixed order: the sum does not depend on the first answer.
        total = np.zeros(first.shape, np.float64)
        for weight, array in zip(self.weights, arrays, strict=True):
            total += weight * array
        dtype = np.result_type(*[array.dtype for array in arrays])  # none is narrowed
        mean: Array = (total / sum(self.weights)).astype(dtype)
        return mean


def _check_probabilities(name: str, output: str, array: Any) -> None:
    if not array.size:
        return
    sums = array.sum(axis=-1, dtype=np.float64)
    if np.isnan(sums).any():
        raise BadRequest(f"teachers combined: {output} of {name}: {HAS_NAN}")
    if not (array.min() >= 0 and np.abs(sums - 1).max() <= _SUM_TOLERANCE):
        raise BadRequest(
            f"teachers combined: {output} of {name}: its rows are no probabilities (they sum to "
            f"{float(sums.min()):.6g} to {float(sums.max()):.6g}); for teachers that serve logits "
            "say of='logits'"
        )
