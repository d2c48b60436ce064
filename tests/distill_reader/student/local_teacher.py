"""A teacher that behaves, in this process: the fast path's server before a service of one function.

Where a test needs the real service and its predictors, it starts `distill_reader.serve`.
"""

import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from distill_reader.errors import BadRequest, ModelNotFound, TeacherBusy
from distill_reader.model.specs import ModelSpec, TensorSpec
from distill_reader.model.tensors import Array
from distill_reader.protocols.arena import ArenaFull, OwnArena, Slice
from distill_reader.teacher.protocols.fast import FastLimits, FastServer
from distill_reader.teacher.service.requests import (
    InferAnswer,
    InferRequest,
    ModelStatistics,
    SharedTensor,
)

Compute = Callable[[Mapping[str, Array]], Mapping[str, Array]]

SPEC = ModelSpec(
    name="sums",
    inputs=(
        TensorSpec(name="image", dtype="float32", shape=(2, 3), variable="x0"),
        TensorSpec(name="words", dtype="int64", shape=(-1,)),
    ),
    outputs=(
        TensorSpec(name="total", dtype="float32", shape=(1,), variable="fc_0"),
        TensorSpec(name="longest", dtype="int64", shape=(1,)),
    ),
)


def sums(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
    """What SPEC's model computes: every row's sum, and its largest word."""
    image, words = inputs["image"], inputs["words"]
    return {
        "total": image.sum(axis=(1, 2), dtype=np.float32)[:, None],
        "longest": words.max(axis=1, initial=0)[:, None],
    }


def feeds(samples: int, seed: int = 0) -> dict[str, list[Array]]:
    """Return random inputs of SPEC's model."""
    random = np.random.default_rng(seed)
    return {
        "image": [random.random((samples, 2, 3), np.float32)],
        "words": [random.integers(0, 99, (samples, 4))],
    }


def check(answer: Mapping[str, Array], asked: Mapping[str, Sequence[Array]]) -> None:
    """Compare an answer, of some outputs or all, to what SPEC's model computes."""
    expected = sums({name: np.concatenate(arrays) for name, arrays in asked.items()})
    assert answer
    for name, array in answer.items():
        np.testing.assert_array_equal(array, expected[name])


def fast_connections() -> int:
    """Return how many connections the fast path's servers of this process serve."""
    return sum(thread.name == "fast" for thread in threading.enumerate())


class LocalService:
    """A Service that computes in threads of this process."""

    def __init__(
        self, spec: ModelSpec = SPEC, compute: Compute = sums, *, arena_bytes: int = 64 << 20
    ) -> None:
        self._models = {spec.name: spec}
        self._compute = compute
        self._pool = ThreadPoolExecutor(4)
        self.arena = OwnArena(arena_bytes)
        self.is_ready = True
        self.refuse_with: Exception | None = None  # what submit raises
        self.protocols: list[str] = []  # of the requests that were taken
        self.futures: list[Future[InferAnswer]] = []
        self.answers_out = 0  # answers that nobody has released

    def models(self) -> Mapping[str, ModelSpec]:
        return self._models

    def add(self, spec: ModelSpec) -> None:
        self._models[spec.name] = spec

    max_batch = 64
    batch_timeout_s = 0.002

    def statistics(self, model: str) -> ModelStatistics:
        return ModelStatistics()

    def allocate(self, size_bytes: int) -> Slice:
        if size_bytes > self.arena.size:
            raise BadRequest(f"a request of {size_bytes} bytes is too large")
        try:
            return self.arena.allocate(size_bytes)
        except ArenaFull as error:
            raise TeacherBusy(str(error), delay_s=0.25) from error

    def submit(self, request: InferRequest) -> Future[InferAnswer]:
        tensors = [item for item in request.inputs.values() if isinstance(item, SharedTensor)]
        try:
            if self.refuse_with is not None:
                raise self.refuse_with
            spec = self._models.get(request.model)
            if spec is None:
                raise ModelNotFound(f"no model {request.model}")
            for name, tensor in request.inputs.items():
                spec.input(name).check(str(tensor.dtype), tensor.shape)
        except BaseException:
            for tensor in tensors:
                tensor.buffer.release()
            raise
        self.protocols.append(request.protocol)
        future = self._pool.submit(self._answer, request, spec)
        self.futures.append(future)
        return future

    def close(self) -> None:
        self._pool.shutdown()
        self.arena.close()

    def _answer(self, request: InferRequest, spec: ModelSpec) -> InferAnswer:
        inputs = {name: self._array(tensor) for name, tensor in request.inputs.items()}
        try:
            outputs = self._compute(inputs)
        finally:
            for tensor in request.inputs.values():
                if isinstance(tensor, SharedTensor):
                    tensor.buffer.release()
        names = request.fetch or tuple(tensor.name for tensor in spec.outputs)
        self.answers_out += 1
        return InferAnswer(
            outputs={name: outputs[spec.output(name).name] for name in names},
            queued_us=0,
            computed_us=0,
            buffers=(_Counted(self),),
        )

    @staticmethod
    def _array(tensor: Array | SharedTensor) -> Array:
        if not isinstance(tensor, SharedTensor):
            return tensor
        count = int(np.prod(tensor.shape))
        flat = np.frombuffer(tensor.buffer.view, tensor.dtype, count, tensor.offset)
        return flat.reshape(tensor.shape)


class _Counted:
    """A Buffer that tells the service of its release."""

    def __init__(self, service: LocalService) -> None:
        self._service = service
        self.view = memoryview(b"")

    def release(self) -> None:
        self._service.answers_out -= 1


class LocalTeacher:
    """`service` on a TCP port of loopback, and on the unix socket of the fast path."""

    def __init__(self, service: LocalService, limits: FastLimits | None = None) -> None:
        self.service = service
        self.server = FastServer(service, limits or FastLimits())
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self.endpoint = f"127.0.0.1:{self.address[1]}"
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        self.server.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.server.start(sock)
