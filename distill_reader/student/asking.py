"""Match what the user's fields are called with what a teacher's model takes and returns. Pure."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from distill_reader.errors import BadRequest
from distill_reader.specs import ModelSpec, TensorSpec
from distill_reader.student.client import Array
from distill_reader.student.feed import Request
from distill_reader.student.items import Signature

_Change = Callable[[Array], Array]


class Asking:
    """Which of the sent fields one teacher gets, and what is asked of it."""

    def __init__(
        self, endpoint: str, spec: ModelSpec, sent: Sequence[str], predicts: Sequence[str]
    ) -> None:
        """
        Args:
            endpoint: for messages.
            spec: of the teacher's model. Without inputs: unknown, so every field is sent.
            sent: names of the fields that may be sent, in the order of a request's rows.
            predicts: outputs wanted.

        Raises:
            BadRequest: the model takes an input that has no field, or lacks an output.
        """
        self.endpoint = endpoint
        self.predicts = tuple(predicts)
        self._inputs: list[tuple[int, str, TensorSpec | None]] = []
        self._changes: dict[Signature, tuple[_Change | None, ...]] = {}
        if not spec.inputs:
            self._inputs = [(place, name, None) for place, name in enumerate(sent)]
        for tensor in spec.inputs:
            names = [name for name in sent if name in (tensor.name, tensor.variable)]
            if not names:
                raise BadRequest(
                    f"{endpoint}: model {spec.name} takes {tensor.name!r}, which is no name in "
                    f"`ins` ({', '.join(sent)}): name the field of that input so"
                )
            self._inputs.append((sent.index(names[0]), tensor.name, tensor))
        for name in predicts if spec.outputs else ():
            try:
                spec.output(name)
            except BadRequest as error:
                raise BadRequest(f"{endpoint}: predicts: {error}") from None

    def feeds(self, request: Request) -> dict[str, list[Array]]:
        """Return the arrays of each input.

        Other shapes with as many values per sample are reshaped, as the original does, and types
        are changed where nothing but digits of floats is lost; the client refuses the rest.
        """
        changes = self._changes.get(request.signature)
        if changes is None:
            changes = tuple(
                None if tensor is None else _change(tensor, *request.signature[place])
                for place, _, tensor in self._inputs
            )
            if len(self._changes) > 1000:  # sentences of any length: not for ever
                self._changes.clear()
            self._changes[request.signature] = changes
        feeds = {}
        for (place, name, _), change in zip(self._inputs, changes, strict=True):
            arrays = request.feeds(place)
            feeds[name] = arrays if change is None else [change(array) for array in arrays]
        return feeds

    def outputs(self, answer: Mapping[str, Array], samples: int) -> tuple[Array, ...]:
        """Return the predictions in the order of `predicts`.

        Raises:
            BadRequest: one has not one row per sample.
        """
        outputs = tuple([answer[name] for name in self.predicts])
        for name, output in zip(self.predicts, outputs, strict=True):
            if not output.ndim or len(output) != samples:
                raise BadRequest(
                    f"{self.endpoint}: tensor {name}: expected {samples} rows on axis 0, one per "
                    f"sample, got shape {list(output.shape)}: the model must keep that axis"
                )
        return outputs

    def named(self, error: BadRequest) -> BadRequest:
        """Return the error with the teacher in its text."""
        text = str(error)
        return error if self.endpoint in text else type(error)(f"{self.endpoint}: {text}")


def _change(
    tensor: TensorSpec, dtype: np.dtype[np.generic], shape: tuple[int, ...]
) -> _Change | None:
    """Return what makes samples of this type and shape fit; None: they do, or never will."""
    wanted = np.dtype(tensor.dtype)
    both_floats = dtype.kind == wanted.kind == "f"
    cast = dtype != wanted and (both_floats or np.can_cast(dtype, wanted, "safe"))
    fits = len(shape) == len(tensor.shape) and all(
        want in (-1, got) for want, got in zip(tensor.shape, shape, strict=True)
    )
    is_open = -1 in tensor.shape
    reshape = not fits and not is_open and int(np.prod(shape)) == int(np.prod(tensor.shape))
    if not cast and not reshape:
        return None

    def change(array: Array) -> Array:
        if reshape:
            array = array.reshape(len(array), *tensor.shape)
        return array.astype(wanted) if cast else array

    return change
