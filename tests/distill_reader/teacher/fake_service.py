"""A service without processes, which behaves: checks, bounds, computes in a thread, counts memory.

Its model `double` takes x and n and returns y = 2x (named `fc_0.tmp_1` by the model) and m = n + 1.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from distill_reader.errors import BadRequest, ModelNotFound, TeacherBusy
from distill_reader.model.specs import ModelSpec, TensorSpec
from distill_reader.model.tensors import Array
from distill_reader.teacher.service.requests import (
    Buffer,
    InferAnswer,
    InferRequest,
    ModelStatistics,
    SharedTensor,
)

DOUBLE = ModelSpec(
    name="double",
    version="1",
    inputs=(
        TensorSpec(name="x", dtype="float32", shape=(-1,), variable="x_0"),
        TensorSpec(name="n", dtype="int64", shape=(1,)),
    ),
    outputs=(
        TensorSpec(name="y", dtype="float32", shape=(-1,), variable="fc_0.tmp_1"),
        TensorSpec(name="m", dtype="int64", shape=(1,)),
    ),
)
HALF = ModelSpec(
    name="half",
    version="7",
    inputs=(TensorSpec(name="x", dtype="float16", shape=(2,)),),
    outputs=(TensorSpec(name="y", dtype="float16", shape=(2,)),),
)


class FakeBuffer:
    def __init__(self, service: "FakeService", size: int) -> None:
        self._service = service
        self._data = bytearray(size)
        self._is_released = False

    @property
    def view(self) -> memoryview:
        return memoryview(self._data)

    def release(self) -> None:
        assert not self._is_released, "released twice"
        self._is_released = True
        self._service.count(-len(self._data))


class FakeService:
    """Implements Service."""

    def __init__(self, *specs: ModelSpec, memory_bytes: int = 256 << 20) -> None:
        self._specs = {spec.name: spec for spec in (specs or (DOUBLE,))}
        self._memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(4)
        self.used_bytes = 0  # of buffers that are not released
        self.is_ready = True
        self.before: Callable[[InferRequest], None] = lambda request: None  # in submit
        self.gate = threading.Event()  # answers wait for it
        self.gate.set()
        self.protocols: list[str] = []  # of the requests that came
        self.told: dict[str, ModelStatistics] = {}
        self.shared = 0  # inputs that came without a copy

    def close(self) -> None:
        self.gate.set()
        self._threads.shutdown()

    def count(self, size: int) -> None:
        with self._lock:
            self.used_bytes += size

    def models(self) -> dict[str, ModelSpec]:
        return self._specs

    max_batch = 16
    batch_timeout_s = 0.002

    def statistics(self, model: str) -> ModelStatistics:
        return self.told.get(model, ModelStatistics())

    def allocate(self, size_bytes: int) -> Buffer:
        with self._lock:
            if self.used_bytes + size_bytes > self._memory_bytes:
                raise TeacherBusy("no memory", delay_s=0.25)
            self.used_bytes += size_bytes
        return FakeBuffer(self, size_bytes)

    def submit(self, request: InferRequest) -> Future[InferAnswer]:
        buffers = {
            id(tensor.buffer): tensor.buffer
            for tensor in request.inputs.values()
            if isinstance(tensor, SharedTensor)
        }
        try:
            self.before(request)
            spec = self._specs.get(request.model)
            if spec is None:
                raise ModelNotFound(f"no model {request.model!r}")
            inputs = {spec.input(name).name: self._array(t) for name, t in request.inputs.items()}
            for wanted in spec.inputs:
                if wanted.name not in inputs:
                    raise BadRequest(f"tensor {wanted.name}: is missing")
                array = inputs[wanted.name]
                wanted.check(array.dtype.name, array.shape)
            fetch = request.fetch or tuple(output.name for output in spec.outputs)
            wanted_outputs = {name: spec.output(name).name for name in fetch}
        finally:
            for buffer in buffers.values():
                buffer.release()
        self.protocols.append(request.protocol)
        self.shared += bool(buffers)
        return self._threads.submit(self._compute, inputs, wanted_outputs)

    def _array(self, tensor: Array | SharedTensor) -> Array:
        if isinstance(tensor, SharedTensor):
            dtype = np.dtype(tensor.dtype)
            assert tensor.offset % dtype.itemsize == 0, "not aligned"
            return np.ndarray(tensor.shape, dtype, tensor.buffer.view, tensor.offset).copy()
        return tensor.copy()

    def _compute(self, inputs: dict[str, Array], wanted: dict[str, str]) -> InferAnswer:
        self.gate.wait()
        outputs: dict[str, Array] = {"y": inputs["x"] * np.array(2, inputs["x"].dtype)}
        if "n" in inputs:
            outputs["m"] = np.add(inputs["n"], 1)
        answer = {name: outputs[output] for name, output in wanted.items()}
        buffer = self.allocate(max(1, sum(array.nbytes for array in answer.values())))
        return InferAnswer(outputs=answer, queued_us=3, computed_us=50, buffers=(buffer,))
