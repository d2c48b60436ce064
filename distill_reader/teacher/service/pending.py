"""Check requests, and keep the state of each until it is answered."""

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from distill_reader.errors import BadRequest, RequestTooLarge
from distill_reader.model.output_encodings import OutputEncoding, encoded_shape, parse_encoding
from distill_reader.model.specs import ModelSpec
from distill_reader.model.tensors import Array
from distill_reader.protocols.arena import Arena, ArenaError, Slice, aligned
from distill_reader.teacher.predictor.wire import Shape, TensorAddress
from distill_reader.teacher.service.requests import (
    Buffer,
    InferAnswer,
    InferRequest,
    SharedTensor,
    buffers_of,
)

# From bytes, and what the request has already. Raises TeacherBusy, RequestTooLarge.
Allocate = Callable[[int, Sequence[Buffer]], Slice]

_LEARNED_SHAPES = 1024  # per model; after that many it starts over
_LONGEST_AXIS = 2**31 - 1
_MOST_ENCODINGS = 64  # per request: each adds to the message to the predictor, once for every part
# Samples of a request, if they have no bytes, which bound all others.
_MOST_EMPTY = 1 << 16


class ServedModel:
    """A served model, and what has been learned about the shapes of its outputs."""

    def __init__(self, *, index: int, spec: ModelSpec) -> None:
        self.index = index  # among the models of each predictor
        self.spec = spec
        self.name = spec.name
        self._is_open = any(length < 0 for output in spec.outputs for length in output.shape)
        self._fixed = tuple(output.shape for output in spec.outputs)
        self._learned: dict[Hashable, tuple[Shape, ...]] = {}
        self.plans: dict[Hashable, _Plan] = {}  # one per kind of request that passed the checks
        self.fault = ""  # why it cannot be served at all, as was found meanwhile; "": it can

    def output_shapes(self, key: Hashable) -> tuple[Shape, ...] | None:
        """Return the shapes of one sample's outputs; None: they are not known until computed.

        Args:
            key: stands for the types and shapes of the inputs.
        """
        return self._learned.get(key) if self._is_open else self._fixed

    def learn(self, key: Hashable, output_shapes: tuple[Shape, ...]) -> None:
        """Expect these shapes for further inputs with this key."""
        if len(self._learned) >= _LEARNED_SHAPES:
            self._learned.clear()
        self._learned[key] = output_shapes


@dataclass(slots=True, weakref_slot=True, kw_only=True, eq=False)
class PendingRequest:
    """An accepted request. The service changes its state, under the service's lock."""

    model: ServedModel
    protocol: str
    samples: int
    input_dtypes: tuple[str, ...]  # in the spec's order, as received
    input_shapes: tuple[Shape, ...]  # of one sample, in the same order
    inputs: tuple["_ArenaTensor", ...]
    wanted: tuple[tuple[str, OutputEncoding], ...]  # outputs: name in the request, what it means
    encodings: tuple[OutputEncoding, ...]  # those of `wanted` that are not whole outputs
    held: tuple[Buffer, ...]  # memory of the inputs
    future: Future[InferAnswer] = field(default_factory=Future)
    output_memory: Slice | None = None  # None: the sizes of the outputs are not known yet
    output_tensors: dict[OutputEncoding, "_ArenaTensor"] = field(default_factory=dict)
    output_shapes: tuple[Shape, ...] | None = None  # as the model returns them, in its order
    left: int = 0  # samples still to be computed
    in_flight: int = 0  # parts that predictors are working on
    deaths: int = 0  # predictors that ended while computing it
    computed_us: int = 0
    arrived: float = 0.0
    began: float | None = None  # None: no predictor has any of it yet
    is_over: bool = False  # nothing more needs computing
    is_settled: bool = False  # the future has its result or its error
    is_released: bool = False

    @property
    def key(self) -> Hashable:
        """Requests with the same key can be computed together."""
        return self.model.index, self.input_dtypes, self.input_shapes, self.encodings

    @property
    def shapes_key(self) -> Hashable:
        """Requests with the same key have outputs of the same shapes."""
        return self.input_dtypes, self.input_shapes

    @property
    def arenas(self) -> list[Arena]:
        """The arenas that a predictor must map."""
        arenas = [tensor.arena for tensor in self.inputs]
        if self.output_memory is not None:
            arenas.append(self.output_memory.arena)
        return arenas

    def begin(self, now: float) -> bool:
        """Mark the request as begun; False: it is over or cancelled, so do not compute it."""
        if self.is_over or self.future.cancelled():
            return False
        if self.began is None:
            self.began = now
        return True

    def input_addresses(self, start: int) -> tuple[TensorAddress, ...]:
        """Return the address of each input from sample `start` on."""
        return tuple(tensor.at(start) for tensor in self.inputs)

    def output_addresses(
        self, start: int, encodings: Sequence[OutputEncoding]
    ) -> tuple[TensorAddress | None, ...]:
        """Return the address of each encoding from sample `start` on; None: it is not wanted."""
        found = map(self.output_tensors.get, encodings)
        return tuple(tensor.at(start) if tensor is not None else None for tensor in found)

    def allocate_outputs(self, shapes: tuple[Shape, ...], allocate: Allocate) -> None:
        """Allocate memory for outputs whose samples have these shapes.

        Raises:
            BadRequest: other parts of the request have outputs of other shapes, or there never
                will be room.
            TeacherBusy: there is no room.
        """
        known = self.output_shapes
        encodings = dict.fromkeys(encoding for _, encoding in self.wanted)
        if known is not None and all(
            known[encoding.output_index] == shapes[encoding.output_index] for encoding in encodings
        ):
            return
        if self.output_memory is not None:
            if self.left < self.samples or self.in_flight > 1:
                raise BadRequest(
                    "parts of the request have outputs of different shapes; send fewer samples "
                    "at a time"
                )
            self.output_memory.release()
            self.output_memory = None
        offsets: list[tuple[OutputEncoding, int, int]] = []  # ..., offset, bytes of one sample
        total = 0
        for encoding in encodings:
            shape = encoded_shape(encoding, shapes[encoding.output_index])
            sample_bytes = _elements(shape) * np.dtype(encoding.dtype).itemsize
            offsets.append((encoding, total, sample_bytes))
            total += aligned(sample_bytes * self.samples)
        self.output_memory = memory = allocate(total, self.held)
        self.output_tensors = {
            encoding: _ArenaTensor(memory.arena, memory.offset + offset, sample_bytes)
            for encoding, offset, sample_bytes in offsets
        }
        self.output_shapes = shapes

    def answer(self, queued_us: int) -> InferAnswer:
        """Return the answer. Call it once everything is computed."""
        assert self.output_memory is not None
        assert self.output_shapes is not None
        arrays: dict[str, Array] = {}
        for name, encoding in self.wanted:
            arrays[name] = np.ndarray(
                (self.samples, *encoded_shape(encoding, self.output_shapes[encoding.output_index])),
                encoding.dtype,
                self.output_memory.view,
                self.output_tensors[encoding].offset - self.output_memory.offset,
            )
        return InferAnswer(
            outputs=arrays,
            queued_us=queued_us,
            computed_us=self.computed_us,
            buffers=(self.output_memory,),
        )

    def release_inputs(self) -> None:
        for buffer in self.held:
            buffer.release()

    def release_outputs(self) -> None:
        if self.output_memory is not None:
            self.output_memory.release()


@dataclass(frozen=True, slots=True)
class _ArenaTensor:
    """A tensor in an arena: where it begins, and the size of each of its samples."""

    arena: Arena
    offset: int
    sample_bytes: int

    def at(self, sample: int) -> TensorAddress:
        return self.arena.id, self.offset + sample * self.sample_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What the checks of a request found, except the number of its samples."""

    names: tuple[str, ...]  # what the request calls the inputs, in the spec's order
    input_dtypes: tuple[str, ...]
    input_shapes: tuple[Shape, ...]
    sample_bytes: tuple[int, ...]
    wanted: tuple[tuple[str, OutputEncoding], ...]
    encodings: tuple[OutputEncoding, ...]


def prepare(request: InferRequest, model: ServedModel, allocate: Allocate) -> PendingRequest:
    """Check a request, and copy its inputs to shared memory unless they are there already.

    The returned object owns the request's buffers. If this raises, the caller still owns them.

    Raises:
        BadRequest: a name, dtype or shape is wrong; names the tensor.
        TeacherBusy: there is no room for inputs or outputs.
    """
    plan = _plan(request, model)
    tensors = [request.inputs[name] for name in plan.names]
    samples = _samples(tensors, plan, model.spec)
    copied = [
        aligned(samples * sample_bytes)
        for tensor, sample_bytes in zip(tensors, plan.sample_bytes, strict=True)
        if not isinstance(tensor, SharedTensor) or not isinstance(tensor.buffer, Slice)
    ]
    message = [] if request.message is None else [request.message]

    def allocate_for_all(size_bytes: int, held: Sequence[Buffer]) -> Slice:
        return allocate(size_bytes, [*held, *message])

    buffers = buffers_of(request.inputs)
    memory = allocate_for_all(sum(copied), buffers) if copied else None
    try:
        pending = PendingRequest(
            model=model,
            protocol=request.protocol,
            samples=samples,
            left=samples,
            input_dtypes=plan.input_dtypes,
            input_shapes=plan.input_shapes,
            inputs=_store_inputs(tensors, plan, samples, memory),
            wanted=plan.wanted,
            encodings=plan.encodings,
            held=(*buffers, *([memory] if memory is not None else [])),
        )
        expected = model.output_shapes(pending.shapes_key)
        if expected is not None:
            pending.allocate_outputs(expected, allocate_for_all)
    except BaseException:
        if memory is not None:
            memory.release()
        raise
    return pending


def _plan(request: InferRequest, model: ServedModel) -> "_Plan":
    """Check names, dtypes and shapes: once for requests that differ only in their samples."""
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
    asked = tuple((name, parse_encoding(spec, name)) for name in fetch)
    whole = {parse_encoding(spec, output.name) for output in spec.outputs}
    encodings = tuple(sorted({encoding for _, encoding in asked} - whole))
    if len(encodings) > _MOST_ENCODINGS:
        raise BadRequest(
            f"{len(encodings)} encodings of outputs are wanted; at most {_MOST_ENCODINGS} at a time"
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
        encodings=encodings,
    )


def _samples(tensors: Sequence[Array | SharedTensor], plan: "_Plan", spec: ModelSpec) -> int:
    """Return how many samples the request has. Checks everything that depends on it."""
    first = tensors[0].shape[0]
    if not 0 < first <= _LONGEST_AXIS:
        raise BadRequest(f"tensor {spec.inputs[0].name}: has {first} samples (axis 0)")
    for index, tensor in enumerate(tensors):
        if tensor.shape[0] != first:
            raise BadRequest(
                f"tensor {spec.inputs[index].name}: has {tensor.shape[0]} samples, "
                f"tensor {spec.inputs[0].name} has {first}; axis 0 counts samples"
            )
        if isinstance(tensor, SharedTensor):
            size, room = first * plan.sample_bytes[index], len(tensor.buffer.view)
            if tensor.offset < 0 or tensor.offset + size > room:
                raise BadRequest(
                    f"tensor {spec.inputs[index].name}: {size} bytes at offset {tensor.offset} "
                    f"do not fit in the {room} bytes that came"
                )
    if first > _MOST_EMPTY and not any(plan.sample_bytes):
        raise RequestTooLarge(
            f"{first} samples without a value; at most {_MOST_EMPTY} are taken at a time"
        )
    return int(first)


def _store_inputs(
    tensors: Sequence[Array | SharedTensor], plan: "_Plan", samples: int, memory: Slice | None
) -> tuple[_ArenaTensor, ...]:
    stored: list[_ArenaTensor] = []
    at = 0
    for tensor, sample_bytes in zip(tensors, plan.sample_bytes, strict=True):
        if isinstance(tensor, SharedTensor) and isinstance(tensor.buffer, Slice):
            slice_ = tensor.buffer
            if slice_.is_released:
                raise ArenaError("a request names memory that was given back")
            stored.append(_ArenaTensor(slice_.arena, slice_.offset + tensor.offset, sample_bytes))
            continue
        assert memory is not None
        size = samples * sample_bytes
        if isinstance(tensor, SharedTensor):
            memory.view[at : at + size] = tensor.buffer.view[tensor.offset : tensor.offset + size]
        else:
            np.ndarray(tensor.shape, tensor.dtype, memory.view, at)[...] = tensor
        stored.append(_ArenaTensor(memory.arena, memory.offset + at, sample_bytes))
        at += aligned(size)
    return tuple(stored)


def _elements(shape: Shape) -> int:
    count = 1
    for length in shape:
        count *= length
    return count
