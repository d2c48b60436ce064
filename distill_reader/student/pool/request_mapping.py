"""Map the user's fields to the inputs of a teacher's model, and its outputs back. Pure."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from distill_reader.errors import BadRequest
from distill_reader.model.specs import InputEncoding, ModelSpec, TensorSpec, find_tensor
from distill_reader.student.batches.feed import Request
from distill_reader.student.batches.items import Signature
from distill_reader.student.clients.client import Array
from distill_reader.student.labels.labels import Labels
from distill_reader.student.options import Padding

_MOST_CONVERSIONS = 1000  # that are remembered: sentences may have any length

_Convert = Callable[[Array], Array]


class RequestMapping:
    """Which fields one teacher gets, and which outputs it is asked for."""

    def __init__(
        self,
        endpoint: str,
        spec: ModelSpec,
        sent: Sequence[str],
        labels: Labels,
        wire_ins: Sequence[tuple[str, str]] = (),
        padding: Padding | None = None,
    ) -> None:
        """
        Args:
            endpoint: for messages.
            spec: of the teacher's model. Without inputs it is unknown, and every field is sent.
            sent: names of the fields that may be sent, in the order of a request's rows.
            labels: the predictions wanted.
            wire_ins: fields that are sent as raw pixels, each with "uint8"; field "": all that can.

        Raises:
            BadRequest: the model has an input without a field, lacks an output, or does not take
                pixels; or it is unknown whether an output is as long as the padded fields.
        """
        self.endpoint = endpoint
        self.spec = spec
        self.labels = labels
        self.columns, self.served = labels.asked(endpoint, spec)
        self.sample_bytes = labels.sample_bytes(spec)  # of the predictions; None: unknown
        if padding is not None and padding.outputs is None and spec.outputs:
            self._check_lengths([spec.output(name) for name in labels.predicts])
        self._sent = tuple(sent)
        self._inputs: list[tuple[int, str, TensorSpec | None]] = []  # index in `sent`, name, spec
        self._conversions: dict[Signature, tuple[_Convert | None, ...]] = {}
        if not spec.inputs:
            self._inputs = [(index, name, None) for index, name in enumerate(sent)]
        for tensor in spec.inputs:
            if tensor.unusable:
                raise BadRequest(
                    f"{endpoint}: model {spec.name}: input {tensor.name} {tensor.unusable}"
                )
            names = [name for name in sent if find_tensor(spec.inputs, name) is tensor]
            if not names:
                raise BadRequest(
                    f"{endpoint}: model {spec.name} takes {tensor.name!r}, which is no name in "
                    f"`ins` ({', '.join(sent)}): name the field of that input so"
                )
            field = tensor.name if tensor.name in names else names[0]
            self._inputs.append((sent.index(field), tensor.name, tensor))
        pixels = {name for name, _ in wire_ins}
        self._is_pixels = {
            index: self._goes_as_pixels(sent[index], tensor, pixels)
            for index, _, tensor in self._inputs
        }
        if pixels and not any(self._is_pixels.values()):
            raise BadRequest(
                f"{endpoint}: takes no input as uint8: start it with `edl serve --normalize "
                f"INPUT:...`, or leave out set_wire_dtype(ins='uint8')"
            )

    @property
    def taken(self) -> list[str]:
        """The fields that are sent to it."""
        return [self._sent[index] for index, _, _ in self._inputs]

    def feeds(self, request: Request) -> dict[str, list[Array]]:
        """Return the arrays of each input.

        As in the original, samples of another shape with as many values are reshaped, but not if
        their axes are in another order. Types are converted if floats lose no more than digits. The
        client refuses what still does not fit.

        Raises:
            BadRequest: a field must not be sent like this; names it and the remedy.
        """
        conversions = self._conversions.get(request.signature)
        if conversions is None:
            conversions = tuple(
                self._conversion(index, tensor, *request.signature[index])
                for index, _, tensor in self._inputs
            )
            if len(self._conversions) > _MOST_CONVERSIONS:
                self._conversions.clear()
            self._conversions[request.signature] = conversions
        feeds = {}
        for (index, name, tensor), convert in zip(self._inputs, conversions, strict=True):
            arrays = request.feeds(index)
            try:
                feeds[name] = arrays if convert is None else [convert(array) for array in arrays]
            except FloatingPointError:
                dtype = tensor.dtype if tensor is not None else ""
                raise BadRequest(
                    f"{self.endpoint}: field {self._sent[index]}: has values beyond {dtype} "
                    f"(±{np.finfo(dtype).max:.6g}), which the model takes: scale or clip them"
                ) from None
        return feeds

    def outputs(self, answer: Mapping[str, Array], samples: int) -> tuple[Array, ...]:
        """Return the columns of the predictions as they were sent.

        Raises:
            BadRequest: a column does not have one row per sample.
        """
        outputs = tuple([answer[name] for name in self.columns])
        for name, output in zip(self.columns, outputs, strict=True):
            if not output.ndim or len(output) != samples:
                raise BadRequest(
                    f"{self.endpoint}: tensor {name}: expected {samples} rows on axis 0, one per "
                    f"sample, got shape {list(output.shape)}: the model must keep that axis"
                )
        return outputs

    def restore(self, columns: Sequence[Array]) -> tuple[Array, ...]:
        """Return the user's arrays for columns as they were sent. Raises: BadRequest."""
        return self.labels.restore(columns, self.served)

    def named(self, error: BadRequest) -> BadRequest:
        """Return the error with the teacher in its text."""
        text = str(error)
        return error if self.endpoint in text else type(error)(f"{self.endpoint}: {text}")

    def _check_lengths(self, outputs: Sequence[TensorSpec]) -> None:
        for tensor in outputs:
            if tensor.shape and tensor.shape[0] < 0:
                raise BadRequest(
                    f"{self.endpoint}: output {tensor.name} may be as long as the padded fields: "
                    f"say set_padding(outputs=[{tensor.name!r}]) to have it cut again, or "
                    "outputs=[] to have it as it comes"
                )

    def _goes_as_pixels(self, field: str, tensor: TensorSpec | None, pixels: set[str]) -> bool:
        """Return whether a field is sent as raw pixels.

        Raises:
            BadRequest: the user has named this field, and the teacher does not take pixels for it.
        """
        if tensor is None or tensor.accepted("uint8") is not None:
            return field in pixels or "" in pixels
        if field not in pixels:
            return False
        remedy = (
            "start it with `edl serve --normalize INPUT:...`"
            if np.dtype(tensor.dtype).kind == "f"
            else "only inputs of floats can take them"
        )
        raise BadRequest(
            f"{self.endpoint}: takes {tensor.name!r} as {tensor.dtype}, not as uint8: {remedy}; "
            "or leave out set_wire_dtype(ins=)"
        )

    def _conversion(
        self,
        index: int,
        tensor: TensorSpec | None,
        dtype: np.dtype[np.generic],
        shape: tuple[int, ...],
    ) -> "_Convert | None":
        """Return what makes samples of this type and shape fit; None: they fit, or never will.

        Raises:
            BadRequest: the field must not be sent like this; names it and the remedy.
        """
        name, is_pixels = self._sent[index], self._is_pixels[index]
        is_cast = tensor is not None and np.can_cast(dtype, tensor.dtype, "safe")
        if dtype.kind not in "biufc" and not is_cast:  # as the bfloat16 of ml_dtypes is
            raise BadRequest(
                f"{self.endpoint}: field {name} is {dtype}, and teachers take numbers: yield it as "
                "such, or have None in its place in `ins` if it is not for them"
            )
        if is_pixels and dtype != np.uint8:
            raise BadRequest(
                f"{self.endpoint}: field {name} is {dtype}: to go as uint8 it must be the raw "
                "pixels, which the teacher normalizes; yield those, or leave out "
                "set_wire_dtype(ins='uint8')"
            )
        if tensor is None:
            return None
        if dtype == np.uint16 and np.dtype(tensor.dtype).kind == "f":
            raise BadRequest(
                f"{self.endpoint}: field {name} is uint16, and the model takes floats: if these "
                "are the bits of bfloat16, as Paddle's numpy() gives them, yield the tensor itself "
                "or cast it before; if they are numbers, yield them as float32"
            )
        pixels = next((each for each in tensor.accepts if each.dtype == "uint8"), None)
        if dtype == np.uint8 and pixels is not None and not is_pixels:
            raise BadRequest(
                f"{self.endpoint}: field {name} is uint8, and the teacher offers to normalize "
                "pixels: say set_wire_dtype(ins='uint8') to have it do so, or yield floats that "
                "are normalized"
            )
        wanted = tensor.accepted("uint8") if is_pixels else None
        wanted = wanted or InputEncoding(dtype=tensor.dtype, shape=tensor.shape)
        # Without any axis, an axis of open length was left out: (1,) is a text of one token.
        is_open = not wanted.shape and not self.spec.is_exact
        if _is_transposed(shape, wanted.shape):
            raise BadRequest(
                f"{self.endpoint}: field {name} has samples of shape {list(shape)}, the model "
                f"takes {list(wanted.shape)}: its axes are in another order; transpose them"
            )
        return _conversion(np.dtype(wanted.dtype), shape if is_open else wanted.shape, dtype, shape)


def is_another(one: ModelSpec, other: ModelSpec, predicts: Sequence[str]) -> bool | None:
    """Return whether two teachers serve different models or versions; None: unknown.

    Equal or different names alone prove nothing: the default name is that of a folder. Nor do equal
    versions: teachers may always call theirs "1". Other shapes of the predictions do, and integers
    in place of floats.
    """
    if one.digest and other.digest:
        return one.digest != other.digest
    if one.version != other.version or _differing_output(one, other, predicts):
        return True
    return False if one.name == other.name else None


def _is_transposed(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Return whether axes differ in order, but for those of length 1; to reshape mixes them up."""
    axes, wanted_axes = ([length for length in each if length != 1] for each in (shape, wanted))
    return axes != wanted_axes and sorted(axes) == sorted(wanted_axes)


def _differing_output(one: ModelSpec, other: ModelSpec, predicts: Sequence[str]) -> str:
    """Return the first prediction whose shapes or kinds of numbers disagree.

    "": as far as they are told, none does.
    """
    if not (one.is_exact and other.is_exact):
        return ""
    for name in predicts:
        first, second = find_tensor(one.outputs, name), find_tensor(other.outputs, name)
        if first is None or second is None or first.unusable or second.unusable:
            continue
        shapes = len(first.shape) == len(second.shape) and all(
            a == b or -1 in (a, b) for a, b in zip(first.shape, second.shape, strict=True)
        )
        if not shapes or np.dtype(first.dtype).kind != np.dtype(second.dtype).kind:
            return name
    return ""


def versions_of(one: ModelSpec, other: ModelSpec, predicts: Sequence[str]) -> tuple[str, str]:
    """Return model and version of both for a message, and what shows the difference.

    See `is_another`.
    """
    texts = [
        f"model {spec.name}, version {spec.digest or spec.version or 'unknown'}"
        for spec in (one, other)
    ]
    name = _differing_output(one, other, predicts)
    if name:
        texts = [
            f"{text} ({name}: {spec.output(name).dtype} of shape {list(spec.output(name).shape)})"
            for text, spec in zip(texts, (one, other), strict=True)
        ]
    return texts[0], texts[1]


def _conversion(
    wanted: np.dtype[np.generic],
    wanted_shape: tuple[int, ...],
    dtype: np.dtype[np.generic],
    shape: tuple[int, ...],
) -> _Convert | None:
    """Return what converts samples to the wanted type and shape; None: nothing does, or need."""
    both_floats = dtype.kind == wanted.kind == "f"
    cast = dtype != wanted and (both_floats or np.can_cast(dtype, wanted, "safe"))
    fits = len(shape) == len(wanted_shape) and all(
        want in (-1, got) for want, got in zip(wanted_shape, shape, strict=True)
    )
    reshape = (
        not fits and -1 not in wanted_shape and int(np.prod(shape)) == int(np.prod(wanted_shape))
    )
    if not cast and not reshape:
        return None

    def convert(array: Array) -> Array:
        if reshape:
            array = array.reshape(len(array), *wanted_shape)
        if not cast:
            return array
        with np.errstate(over="raise"):  # else what is too large would be infinite for the teacher
            return array.astype(wanted)

    return convert
