"""What the protocols and the service exchange: requests, answers, and memory for both."""

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from distill_reader.errors import ModelNotFound
from distill_reader.model.specs import ModelSpec
from distill_reader.model.tensors import Array

M = TypeVar("M")


class Buffer(Protocol):
    """Memory that the predictors map too: what a socket reads into it need not be copied."""

    @property
    def view(self) -> memoryview:
        """Writable bytes, of the size that was asked for."""
        ...

    def release(self) -> None:
        """Give it back, once. If it was submitted with a request, the service does that."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTensor:
    """A tensor whose bytes (little-endian, row-major) begin at `offset` in a Buffer."""

    buffer: Buffer
    offset: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class InferRequest:
    """Inputs by name, or by the model's own variable names. Axis 0 has the same length in all."""

    model: str
    inputs: Mapping[str, Array | SharedTensor]
    fetch: tuple[str, ...] = ()  # the wanted outputs, in this order; empty: all
    protocol: str = "unknown"  # for the metrics
    message: Buffer | None = None  # that the inputs are copied from, held until it is submitted


@dataclass(frozen=True, slots=True, kw_only=True)
class InferAnswer:
    """Outputs by the names that the request used, in its order. They are views of shared memory.

    They are valid until `release`, which the protocol calls once when they are sent.
    """

    outputs: Mapping[str, Array]
    queued_us: int
    computed_us: int
    buffers: tuple[Buffer, ...] = field(default=())

    def release(self) -> None:
        for buffer in self.buffers:
            buffer.release()


@dataclass(slots=True, kw_only=True)
class ModelStatistics:
    """What a model has done since the server began. Durations are sums over requests or batches."""

    samples: int = 0  # computed
    batches: int = 0
    last_ms: int = 0  # when the last batch was computed, since 1970; 0: there was none
    answered: int = 0  # requests with their outputs
    failed: int = 0  # requests with an error
    answered_ns: int = 0  # from their arrival on
    failed_ns: int = 0
    queued_ns: int = 0  # of the answered ones
    computed_ns: int = 0  # likewise: of the batches that they were in
    by_size: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Samples of a batch -> how many such batches, and how long they took together."""


class InferenceService(Protocol):
    """The predictors behind the protocols. Every method may be called from any thread."""

    def models(self) -> Mapping[str, ModelSpec]:
        """Return the models that are loaded, by name."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether every model is loaded and requests are accepted (not while draining)."""
        ...

    @property
    def max_batch(self) -> int:
        """The most samples that are computed at once. Larger requests are split."""
        ...

    @property
    def batch_timeout_s(self) -> float:
        """How long a batch waits to become full."""
        ...

    def statistics(self, model: str) -> ModelStatistics:
        """Return what a model has done; zeros for a model that has done nothing."""
        ...

    def allocate(self, size_bytes: int) -> Buffer:
        """Return shared memory for one request's inputs.

        Raises:
            TeacherBusy: the bound on the memory of all requests is reached.
            BadRequest: no request may have so much.
        """
        ...

    def submit(self, request: InferRequest) -> Future[InferAnswer]:
        """Queue a request. The service owns its buffers from here on, even if this raises.

        The future gets an InferAnswer, or one of these errors: BadRequest (the model refused it),
        TeacherBusy, TeacherFailed (predictors ended while they computed it).
        Cancelling the future drops what of the request is not computed yet.

        Raises:
            ModelNotFound, BadRequest: a name, dtype or shape is wrong; names the tensor.
            TeacherBusy: the queue is full, or the server drains.
        """
        ...


def buffers_of(inputs: Mapping[str, Array | SharedTensor]) -> list[Buffer]:
    """Return each buffer of a request's inputs once."""
    buffers = {
        id(tensor.buffer): tensor.buffer
        for tensor in inputs.values()
        if isinstance(tensor, SharedTensor)
    }
    return list(buffers.values())


def abandon(future: Future[InferAnswer]) -> None:
    """Cancel a request whose client has left, or release its answer when it comes."""
    future.cancel()
    future.add_done_callback(_release)


def _release(future: Future[InferAnswer]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().release()


def get_model(models: Mapping[str, M], name: str) -> M:
    """Return the model of this name. Raises: ModelNotFound: lists the models that there are."""
    if name not in models:
        raise ModelNotFound(f"no model {name!r} is served here; there is {', '.join(models)}")
    return models[name]
