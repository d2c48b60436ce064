"""Match what the user's fields are called with what a teacher's model takes and returns. Pure."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from distill_reader.errors import BadRequest
from distill_reader.model.specs import ModelSpec, TensorSpec
from distill_reader.student.batches.feed import Request
from distill_reader.student.batches.items import Signature
from distill_reader.student.clients.client import Array
from distill_reader.student.labels.labels import Labels
from distill_reader.student.options import Padding

_Change = Callable[[Array], Array]


class RequestMapping:
    """Which of the sent fields one teacher gets, and what is asked of it."""

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
            spec: of the teacher's model. Without inputs: unknown, so every field is sent.
            sent: names of the fields that may be sent, in the order of a request's rows.
            labels: the predictions wanted.
            wire_ins: field and dtype of what is sent in another type; field "": all it suits.

        Raises:
            BadRequest: the model takes an input that has no field, lacks an output, or cannot
                take or send it in the type that is asked for; or nobody has said whether an
                output is as long as the fields that are padded.
        """
        self.endpoint = endpoint
        self.spec = spec
        self.labels = labels
        self.columns, self.served = labels.asked(endpoint, spec)
        if padding is not None and padding.outputs is None and spec.outputs:
            self._check_lengths([spec.output(name) for name in labels.predicts])
        self._sent = tuple(sent)
        self._wire_ins = dict(wire_ins)
        self._inputs: list[tuple[int, str, TensorSpec | None]] = []
        self._changes: dict[Signature, tuple[_Change | None, ...]] = {}
        if not spec.inputs:
            self._inputs = [(index, name, None) for index, name in enumerate(sent)]
        for tensor in spec.inputs:
            if tensor.unusable:
                raise BadRequest(
                    f"{endpoint}: model {spec.name}: input {tensor.name} {tensor.unusable}"
                )
            names = [name for name in sent if name in (tensor.name, tensor.variable)]
            if not names:
                raise BadRequest(
                    f"{endpoint}: model {spec.name} takes {tensor.name!r}, which is no name in "
                    f"`ins` ({', '.join(sent)}): name the field of that input so"
                )
            self._inputs.append((sent.index(names[0]), tensor.name, tensor))
        self._wires = {
            index: self._wire_of(sent[index], tensor) for index, _, tensor in self._inputs
        }
        if "uint8" in self._wire_ins.values() and "uint8" not in self._wires.values():
            raise BadRequest(
                f"{endpoint}: takes no input as uint8: start it with `edl serve --normalize "
                f"INPUT:...`, or leave out set_wire_dtype(ins='uint8')"
            )

    def feeds(self, request: Request) -> dict[str, list[Array]]:
        """Return the arrays of each input.

        Other shapes with as many values per sample are reshaped, as the original does, and types
        are changed where nothing but digits of floats is lost; the client refuses the rest.
        """
        changes = self._changes.get(request.signature)
        if changes is None:
            changes = tuple(
                self._change(index, tensor, *request.signature[index])
                for index, _, tensor in self._inputs
            )
            if len(self._changes) > 1000:  # sentences of any length: not for ever
                self._changes.clear()
            self._changes[request.signature] = changes
        feeds = {}
        for (index, name, _), change in zip(self._inputs, changes, strict=True):
            arrays = request.feeds(index)
            feeds[name] = arrays if change is None else [change(array) for array in arrays]
        return feeds

    def outputs(self, answer: Mapping[str, Array], samples: int) -> tuple[Array, ...]:
        """Return the columns of the predictions, as they came.

        Raises:
            BadRequest: one has not one row per sample.
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
        """Return what the user gets for columns as they came. Raises: BadRequest."""
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

    def _wire_of(self, field: str, tensor: TensorSpec | None) -> str:
        """Return the dtype in which a field goes; "": as the model has it.

        Raises:
            BadRequest: the teacher does not take that one.
        """
        named = self._wire_ins.get(field)
        wire = named or self._wire_ins.get("", "")
        if not wire or tensor is None:
            return wire
        if tensor.accepted(wire) is not None:
            return wire
        is_suited = np.dtype(tensor.dtype).kind == "f"
        if named is None and (wire == "uint8" or not is_suited):
            return ""  # of what is not named, what can go so
        remedy = (
            "start it with `edl serve --normalize INPUT:...`"
            if wire == "uint8" and is_suited
            else "only teachers of edl convert, of a release that has it, by fast://, grpc:// or "
            "http://"
        )
        raise BadRequest(
            f"{self.endpoint}: takes {tensor.name!r} as {tensor.dtype}, not as {wire}: {remedy}; "
            "or leave out set_wire_dtype(ins=)"
        )

    def _change(
        self,
        index: int,
        tensor: TensorSpec | None,
        dtype: np.dtype[np.generic],
        shape: tuple[int, ...],
    ) -> "_Change | None":
        """Return what makes samples of this type and shape fit; None: they do, or never will.

        Raises:
            BadRequest: they cannot go in the type that they are to go in.
        """
        name, wire = self._sent[index], self._wires[index]
        if wire == "uint8" and dtype != np.uint8:
            raise BadRequest(
                f"{self.endpoint}: field {name} is {dtype}: to go as uint8 it must be the raw "
                "pixels, which the teacher normalizes; yield those, or leave out "
                "set_wire_dtype(ins='uint8')"
            )
        is_for_floats = tensor is not None and np.dtype(tensor.dtype).kind == "f"
        if dtype == np.uint16 and is_for_floats:
            raise BadRequest(
                f"{self.endpoint}: field {name} is uint16, and the model takes floats: if these "
                "are the bits of bfloat16, as Paddle's numpy() gives them, yield the tensor itself "
                "or cast it before; if they are numbers, yield them as float32"
            )
        if wire != "uint8" == dtype.name and tensor is not None and _normalizes(tensor):
            raise BadRequest(
                f"{self.endpoint}: field {name} is uint8, and the teacher offers to normalize "
                "pixels: say set_wire_dtype(ins='uint8') to have it do so, or yield floats that "
                "are normalized"
            )
        if wire == "float16":
            if dtype.kind == "f":
                half = np.dtype(np.float16)
                accepted = None if tensor is None else tensor.accepted("float16")
                return _change(half, None if accepted is None else accepted.shape, dtype, shape)
            if name in self._wire_ins:
                raise BadRequest(
                    f"{self.endpoint}: field {name} is {dtype}, and only floats go as float16"
                )
        if tensor is None:
            return None
        if wire == "uint8":
            accepted = tensor.accepted("uint8")
            assert accepted is not None
            return _change(np.dtype(np.uint8), accepted.shape, dtype, shape)
        return _change(np.dtype(tensor.dtype), tensor.shape, dtype, shape)


def is_another(one: ModelSpec, other: ModelSpec) -> bool | None:
    """Return whether two teachers serve different models or versions; None: they do not say.

    Names alone prove nothing: where nobody gives one, it is that of a folder.
    """
    if one.digest and other.digest:
        return one.digest != other.digest
    if one.version != other.version:
        return True
    return False if one.name == other.name else None


def version_of(spec: ModelSpec) -> str:
    return f"model {spec.name}, version {spec.digest or spec.version or 'unknown'}"


def _normalizes(tensor: TensorSpec) -> bool:
    return any(encoding.dtype == "uint8" for encoding in tensor.accepts)


def _change(
    wanted: np.dtype[np.generic],
    wanted_shape: tuple[int, ...] | None,
    dtype: np.dtype[np.generic],
    shape: tuple[int, ...],
) -> _Change | None:
    """Return what makes samples of this type and shape those; None: they are, or never will.

    Args:
        wanted_shape: None: any.
    """
    both_floats = dtype.kind == wanted.kind == "f"
    cast = dtype != wanted and (both_floats or np.can_cast(dtype, wanted, "safe"))
    fits = wanted_shape is None or (
        len(shape) == len(wanted_shape)
        and all(want in (-1, got) for want, got in zip(wanted_shape, shape, strict=True))
    )
    reshape = (
        wanted_shape is not None
        and not fits
        and -1 not in wanted_shape
        and int(np.prod(shape)) == int(np.prod(wanted_shape))
    )
    if not cast and not reshape:
        return None

    def change(array: Array) -> Array:
        if reshape and wanted_shape is not None:
            array = array.reshape(len(array), *wanted_shape)
        return _cast(array, wanted) if cast else array

    return change


def _cast(array: Array, wanted: np.dtype[np.generic]) -> Array:
    if wanted != np.float16:
        return array.astype(wanted)
    try:
        with np.errstate(over="raise"):
            return array.astype(wanted)
    except FloatingPointError:
        raise BadRequest(
            "float16 holds values up to 65504, and a field has larger ones: scale them, or send "
            "float32"
        ) from None
