"""A request as the protocols hand it to the service, and its answer."""

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from distill_reader.model.specs import ModelSpec

Array = np.ndarray[tuple[int, ...], np.dtype[np.generic]]


class Buffer(Protocol):
    """Memory that the predictors see as well: what a socket reads into it need not be copied."""

    @property
    def view(self) -> memoryview:
        """Writable bytes, as long as asked for."""
        ...

    def release(self) -> None:
        """Give it back; once. Submitted with a request, the service does it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTensor:
    """A tensor whose bytes (little-endian, row-major) lie in a Buffer from `offset` on."""

    buffer: Buffer
    offset: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class InferRequest:
    """Inputs by name (or the model's own variable names); all with the same length of axis 0."""

    model: str
    inputs: Mapping[str, Array | SharedTensor]
    fetch: tuple[str, ...] = ()  # outputs wanted, in this order; empty: all
    protocol: str = "unknown"  # for the metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class InferAnswer:
    """Outputs by the names that the request used, in its order; views of shared memory.

    They are valid until `release`, which the protocol calls once when they are sent.
    """

    outputs: Mapping[str, Array]
    queued_us: int
    computed_us: int
    buffers: tuple[Buffer, ...] = field(default=())

    def release(self) -> None:
        for buffer in self.buffers:
            buffer.release()


class InferenceService(Protocol):
    """The predictors behind the protocols. Every method may be called from any thread."""

    def models(self) -> Mapping[str, ModelSpec]:
        """Return the models that are loaded, by name."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether every model is loaded and requests are taken (not while draining)."""
        ...

    def allocate(self, size_bytes: int) -> Buffer:
        """Return shared memory for one request's inputs.

        Raises:
            TeacherBusy: the bound on memory of waiting requests is reached.
            BadRequest: more than one request may ever have.
        """
        ...

    def submit(self, request: InferRequest) -> Future[InferAnswer]:
        """Queue a request. Its buffers belong to the service from here on, also if this raises.

        The future ends with an InferAnswer, or BadRequest (the model refused), TeacherBusy,
        TeacherFailed (predictors ended while they computed it).
        Cancelling it drops the request if it still waits.

        Raises:
            ModelNotFound, BadRequest: a name, dtype or shape is wrong; names the tensor.
            TeacherBusy: the queue is full, or the server drains.
        """
        ...
