"""A request between the protocols and the predictors: where its tensors lie, what is left to do."""

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from distill_reader.errors import BadRequest
from distill_reader.model.forms import Form, form_shape, parse_form
from distill_reader.model.specs import ModelSpec
from distill_reader.protocols.arena import ALIGNMENT, Arena, ArenaError, Slice
from distill_reader.teacher.predictor.wire import Place, Shape
from distill_reader.teacher.service.requests import (
    Array,
    Buffer,
    InferAnswer,
    InferRequest,
    SharedTensor,
)

Allocate = Callable[[int], Slice]  # raises TeacherBusy, BadRequest

_LEARNED_SHAPES = 1024  # per model; then it is learned anew
_LONGEST_AXIS = 2**31 - 1
_MOST_FORMS = 64  # of one request: each is a number of the message to the predictor, per piece


class Model:
    """A model that is served, and what was learned about the shapes of its outputs."""

    def __init__(self, *, place: int, spec: ModelSpec) -> None:
        self.place = place  # among the models of each predictor
        self.spec = spec
        self.name = spec.name
        self._is_open = any(length < 0 for output in spec.outputs for length in output.shape)
        self._fixed = tuple(output.shape for output in spec.outputs)
        self._learned: dict[Hashable, tuple[Shape, ...]] = {}
        self.plans: dict[Hashable, _Plan] = {}  # of the requests that were checked

    def output_shapes(self, key: Hashable) -> tuple[Shape, ...] | None:
        """Return the shapes of one sample's outputs; None: only computing it will tell.

        Args:
            key: of inputs that have the same types and shapes.
        """
        return self._learned.get(key) if self._is_open else self._fixed

    def learn(self, key: Hashable, output_shapes: tuple[Shape, ...]) -> None:
        """Expect these outputs for the next inputs of this key."""
        if len(self._learned) >= _LEARNED_SHAPES:
            self._learned.clear()
        self._learned[key] = output_shapes


@dataclass(slots=True, kw_only=True, eq=False)
class Waiting:
    """A request that was accepted. Its state belongs to the service, under the service's lock."""

    model: Model
    protocol: str
    samples: int
    input_dtypes: tuple[str, ...]  # in the spec's order, as they came
    input_shapes: tuple[Shape, ...]  # of one sample, likewise
    inputs: tuple["_Placed", ...]
    wanted: tuple[tuple[str, Form], ...]  # outputs: name in the request, what it means
    forms: tuple[Form, ...]  # those of `wanted` that are no whole outputs
    held: tuple[Buffer, ...]  # memory of the inputs
    future: Future[InferAnswer] = field(default_factory=Future)
    output: Slice | None = None  # memory of the outputs; None: their sizes are not known yet
    columns: dict[Form, "_Placed"] = field(default_factory=dict)  # within `output`
    output_shapes: tuple[Shape, ...] | None = None  # as the model returns them, in its order
    left: int = 0  # samples that are not computed yet
    in_flight: int = 0  # pieces that predictors work on
    deaths: int = 0  # predictors that ended under it
    computed_us: int = 0
    arrived: float = 0.0
    began: float | None = None  # None: all of it still waits
    is_over: bool = False  # nothing more is to be computed
    is_settled: bool = False  # the future has its end
    is_released: bool = False

    @property
    def key(self) -> Hashable:
        """What requests that can be computed together have in common."""
        return self.model.place, self.input_dtypes, self.input_shapes, self.forms

    @property
    def shapes_key(self) -> Hashable:
        """What requests have in common whose outputs have the same shapes."""
        return self.input_dtypes, self.input_shapes

    @property
    def arenas(self) -> list[Arena]:
        """The arenas that a predictor needs."""
        arenas = [placed.arena for placed in self.inputs]
        if self.output is not None:
            arenas.append(self.output.arena)
        return arenas

    def begin(self, now: float) -> bool:
        """Note that a predictor gets the first of it; False: nobody wants it any more."""
        if self.is_over:
            return False
        if self.began is None:
            if not self.future.set_running_or_notify_cancel():
                return False
            self.began = now
        return True

    def input_places(self, start: int) -> tuple[Place, ...]:
        """Return where the samples from `start` on lie."""
        return tuple(placed.at(start) for placed in self.inputs)

    def output_places(self, start: int, columns: Sequence[Form]) -> tuple[Place | None, ...]:
        """Return where the samples from `start` on go to in each column; None: not wanted."""
        found = map(self.columns.get, columns)
        return tuple(placed.at(start) if placed is not None else None for placed in found)

    def place_outputs(self, shapes: tuple[Shape, ...], allocate: Allocate) -> None:
        """Take memory for outputs whose samples have these shapes.

        Raises:
            BadRequest: parts of the request were computed to outputs of other shapes.
            TeacherBusy: there is no room.
        """
        known = self.output_shapes
        forms = dict.fromkeys(form for _, form in self.wanted)
        if known is not None and all(known[form.place] == shapes[form.place] for form in forms):
            return
        if self.output is not None:
            if self.left < self.samples or self.in_flight > 1:
                raise BadRequest(
                    "parts of the request have outputs of different shapes; send fewer samples "
                    "at a time"
                )
            self.output.release()
            self.output = None
        offsets: list[tuple[Form, int, int]] = []  # column, offset, bytes of one sample
        total = 0
        for form in forms:
            shape = form_shape(form, shapes[form.place])
            sample_bytes = _elements(shape) * np.dtype(form.dtype).itemsize
            offsets.append((form, total, sample_bytes))
            total += _aligned(sample_bytes * self.samples)
        self.output = piece = allocate(total)
        self.columns = {
            form: _Placed(piece.arena, piece.offset + offset, sample_bytes)
            for form, offset, sample_bytes in offsets
        }
        self.output_shapes = shapes

    def answer(self, queued_us: int) -> InferAnswer:
        """Return the answer, once everything is computed."""
        assert self.output is not None
        assert self.output_shapes is not None
        arrays: dict[str, Array] = {}
        for name, form in self.wanted:
            arrays[name] = np.ndarray(
                (self.samples, *form_shape(form, self.output_shapes[form.place])),
                form.dtype,
                self.output.view,
                self.columns[form].offset - self.output.offset,
            )
        return InferAnswer(
            outputs=arrays,
            queued_us=queued_us,
            computed_us=self.computed_us,
            buffers=(self.output,),
        )

    def release_inputs(self) -> None:
        for buffer in self.held:
            buffer.release()

    def release_outputs(self) -> None:
        if self.output is not None:
            self.output.release()


@dataclass(frozen=True, slots=True)
class _Placed:
    """A tensor's bytes in an arena."""

    arena: Arena
    offset: int
    sample_bytes: int

    def at(self, sample: int) -> Place:
        return self.arena.id, self.offset + sample * self.sample_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What the checks of a request found out, but for the number of its samples."""

    names: tuple[str, ...]  # of the inputs in the request, in the spec's order
    input_dtypes: tuple[str, ...]
    input_shapes: tuple[Shape, ...]
    sample_bytes: tuple[int, ...]
    wanted: tuple[tuple[str, Form], ...]
    forms: tuple[Form, ...]


def prepare(request: InferRequest, model: Model, allocate: Allocate) -> Waiting:
    """Check a request and put what is not in shared memory yet there.

    The request's buffers belong to the returned object; they stay the caller's if this raises.

    Raises:
        BadRequest: a name, dtype or shape is wrong; names the tensor.
        TeacherBusy: there is no room for inputs or outputs.
    """
    plan = _plan(request, model)
    tensors = [request.inputs[name] for name in plan.names]
    samples = _samples(tensors, plan, model.spec)
    copied = sum(_aligned(tensor.nbytes) for tensor in tensors if isinstance(tensor, np.ndarray))
    for tensor, sample_bytes in zip(tensors, plan.sample_bytes, strict=True):
        if isinstance(tensor, SharedTensor) and not isinstance(tensor.buffer, Slice):
            copied += _aligned(samples * sample_bytes)
    piece = allocate(copied) if copied else None
    try:
        waiting = Waiting(
            model=model,
            protocol=request.protocol,
            samples=samples,
            left=samples,
            input_dtypes=plan.input_dtypes,
            input_shapes=plan.input_shapes,
            inputs=_place_inputs(tensors, plan, samples, piece),
            wanted=plan.wanted,
            forms=plan.forms,
            held=(*buffers_of(request), *([piece] if piece is not None else [])),
        )
        expected = model.output_shapes(waiting.shapes_key)
        if expected is not None:
            waiting.place_outputs(expected, allocate)
    except BaseException:
        if piece is not None:
            piece.release()
        raise
    return waiting


def buffers_of(request: InferRequest) -> list[Buffer]:
    """Return the buffers that a request owns, each once."""
    buffers = {
        id(tensor.buffer): tensor.buffer
        for tensor in request.inputs.values()
        if isinstance(tensor, SharedTensor)
    }
    return list(buffers.values())


def _plan(request: InferRequest, model: Model) -> "_Plan":
    """Check names, dtypes and shapes; of requests that are alike, but for samples, once."""
    key = (
        request.fetch,
        *((name, tensor.dtype, tensor.shape[1:]) for name, tensor in request.inputs.items()),
    )
    plan = model.plans.get(key)
    if plan is None:
        plan = _make_plan(request, model.spec)
        if len(model.plans) >= _LEARNED_SHAPES:
            model.plans.clear()
        model.plans[key] = plan
    return plan


def _make_plan(request: InferRequest, spec: ModelSpec) -> "_Plan":
    found: dict[str, tuple[str, Array | SharedTensor]] = {}
    for name, tensor in request.inputs.items():
        wanted = spec.input(name)
        if wanted.name in found:
            raise BadRequest(f"tensor {wanted.name}: came twice")
        if any(not 0 <= length <= _LONGEST_AXIS for length in tensor.shape):
            raise BadRequest(f"tensor {wanted.name}: shape {list(tensor.shape)} is impossible")
        wanted.check(str(tensor.dtype), tuple(tensor.shape))
        found[wanted.name] = (name, tensor)
    for wanted in spec.inputs:
        if wanted.name not in found:
            raise BadRequest(f"tensor {wanted.name}: is missing; model {spec.name} needs it")
    names, tensors = zip(*(found[wanted.name] for wanted in spec.inputs), strict=True)
    shapes = tuple(tuple(tensor.shape[1:]) for tensor in tensors)
    dtypes = tuple(np.dtype(tensor.dtype).name for tensor in tensors)
    fetch = request.fetch or [output.name for output in spec.outputs]
    asked = tuple((name, parse_form(spec, name)) for name in fetch)
    whole = {parse_form(spec, output.name) for output in spec.outputs}
    forms = tuple(sorted({form for _, form in asked} - whole))
    if len(forms) > _MOST_FORMS:
        raise BadRequest(
            f"{len(forms)} forms of outputs are wanted; at most {_MOST_FORMS} at a time"
        )
    return _Plan(
        names=names,
        input_dtypes=dtypes,
        input_shapes=shapes,
        sample_bytes=tuple(
            _elements(shape) * np.dtype(dtype).itemsize
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ),
        wanted=asked,
        forms=forms,
    )


def _samples(tensors: Sequence[Array | SharedTensor], plan: "_Plan", spec: ModelSpec) -> int:
    """Return how many samples the request has; what depends on that is checked here."""
    first = tensors[0].shape[0]
    if not 0 < first <= _LONGEST_AXIS:
        raise BadRequest(f"tensor {spec.inputs[0].name}: has {first} samples (axis 0)")
    for place, tensor in enumerate(tensors):
        if tensor.shape[0] != first:
            raise BadRequest(
                f"tensor {spec.inputs[place].name}: has {tensor.shape[0]} samples, "
                f"tensor {spec.inputs[0].name} has {first}; axis 0 counts samples"
            )
        if isinstance(tensor, SharedTensor):
            size, room = first * plan.sample_bytes[place], len(tensor.buffer.view)
            if tensor.offset < 0 or tensor.offset + size > room:
                raise BadRequest(
                    f"tensor {spec.inputs[place].name}: {size} bytes from byte {tensor.offset} "
                    f"on do not lie within the {room} bytes that came"
                )
    return int(first)


def _place_inputs(
    tensors: Sequence[Array | SharedTensor], plan: "_Plan", samples: int, piece: Slice | None
) -> tuple[_Placed, ...]:
    placed: list[_Placed] = []
    at = 0
    for tensor, sample_bytes in zip(tensors, plan.sample_bytes, strict=True):
        if isinstance(tensor, SharedTensor) and isinstance(tensor.buffer, Slice):
            place = tensor.buffer
            if place.is_released:
                raise ArenaError("a request names memory that was given back")
            placed.append(_Placed(place.arena, place.offset + tensor.offset, sample_bytes))
            continue
        assert piece is not None
        size = samples * sample_bytes
        if isinstance(tensor, SharedTensor):
            piece.view[at : at + size] = tensor.buffer.view[tensor.offset : tensor.offset + size]
        else:
            np.ndarray(tensor.shape, tensor.dtype, piece.view, at)[...] = tensor
        placed.append(_Placed(piece.arena, piece.offset + at, sample_bytes))
        at += _aligned(size)
    return tuple(placed)


def _elements(shape: Shape) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
