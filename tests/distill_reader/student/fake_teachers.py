"""Teachers in this process that can be killed, stopped and brought back; no sockets."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from distill_reader.errors import BadRequest, DistillError, TeacherGone, TeacherTimeout
from distill_reader.model.specs import ModelSpec, TensorSpec
from distill_reader.student.clients.client import Array, Bounds
from distill_reader.student.clients.rows import gather

SPEC = ModelSpec(
    name="double",
    inputs=(TensorSpec(name="image", dtype="float32", shape=(2, 3), variable="x0"),),
    outputs=(
        TensorSpec(name="double", dtype="float32", shape=(2, 3)),
        TensorSpec(name="total", dtype="float32", shape=(1,)),
    ),
)


def double(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
    """What SPEC's model computes."""
    (image,) = inputs.values()
    total = image.reshape(len(image), -1).sum(axis=1, keepdims=True)
    return {"double": image * 2, "total": total}


class FakeTeacher:
    """Answers like a server; `kill`, `stop`, `go_on` and `refuse_with` are its test's."""

    def __init__(
        self,
        endpoint: str,
        spec: ModelSpec = SPEC,
        compute: Callable[[Mapping[str, Array]], Mapping[str, Array]] = double,
        *,
        delay_s: float = 0.0,
    ) -> None:
        self.endpoint = endpoint
        self.spec = spec
        self.compute = compute
        self.delay_s = delay_s
        self.bounds = Bounds()  # what it announces
        self.refuse_with: Callable[[], DistillError | None] = lambda: None  # of predict
        self.connect_with: Callable[[], DistillError | None] = lambda: None
        self.connects_anyway = False  # though it hangs
        self.is_free_s: float | None = None  # when; None: it computes any number at once
        self.lock = threading.Lock()
        self.running = threading.Event()
        self.running.set()
        self.is_alive = True
        self.clients: set[FakeClient] = set()
        self.connections = 0  # that were ever made
        self.requests: list[list[int]] = []  # of each request, the samples of its arrays
        self.in_flight = self.most_in_flight = 0

    @property
    def samples(self) -> int:
        return sum(map(sum, self.requests))

    def kill(self) -> None:
        with self.lock:
            self.is_alive = False
            clients = list(self.clients)
        for client in clients:
            client.close()

    def come_back(self) -> None:
        self.is_alive = True

    def stop(self) -> None:
        """Hang, as SIGSTOP makes a process."""
        self.running.clear()

    def computes_in_turn(self) -> None:
        """Compute one request after the other, as a device does."""
        self.is_free_s = 0.0

    def go_on(self) -> None:
        self.running.set()

    def connect(self) -> "FakeClient":
        error = self.connect_with()
        if error is not None:
            raise error
        with self.lock:
            if not self.is_alive or not (self.running.is_set() or self.connects_anyway):
                raise TeacherGone(f"{self.endpoint}: nobody listens")
            client = FakeClient(self)
            self.clients.add(client)
            self.connections += 1
            return client


class FakeClient:
    """A TeacherClient."""

    protocol = "fake"

    def __init__(self, teacher: FakeTeacher) -> None:
        self.teacher = teacher
        self.endpoint = teacher.endpoint
        self.spec = teacher.spec
        self.bounds = teacher.bounds
        self.closed = threading.Event()

    def predict(
        self, feeds: Mapping[str, Sequence[Array]], fetch: Sequence[str], *, timeout_s: float
    ) -> dict[str, Array]:
        teacher = self.teacher
        rows = gather(self.spec, feeds)
        deadline_s = time.monotonic() + timeout_s
        with teacher.lock:
            teacher.requests.append([len(array) for array in rows[0].arrays])
            teacher.in_flight += 1
            teacher.most_in_flight = max(teacher.most_in_flight, teacher.in_flight)
            delay_s = teacher.delay_s
            if teacher.is_free_s is not None:
                now = time.monotonic()
                teacher.is_free_s = max(now, teacher.is_free_s) + delay_s
                delay_s = teacher.is_free_s - now
        try:
            if self.closed.wait(min(delay_s, timeout_s)):
                raise TeacherGone(f"{self.endpoint}: closed")
            if delay_s > timeout_s:
                self.close()
                raise TeacherTimeout(f"{self.endpoint}: no answer within {timeout_s:g} s")
            while not teacher.running.wait(0.01):
                if self.closed.is_set():
                    raise TeacherGone(f"{self.endpoint}: closed")
                if time.monotonic() > deadline_s:
                    self.close()
                    raise TeacherTimeout(f"{self.endpoint}: no answer")
            if self.closed.is_set():
                raise TeacherGone(f"{self.endpoint}: closed")
            error = teacher.refuse_with()
            if error is not None:
                raise error
            outputs = teacher.compute({row.name: np.concatenate(row.arrays) for row in rows})
            for name in fetch:
                if name not in outputs:
                    raise BadRequest(f"{self.endpoint}: no output {name}")
            return {name: outputs[name] for name in fetch}
        finally:
            with teacher.lock:
                teacher.in_flight -= 1

    def close(self) -> None:
        self.closed.set()
        with self.teacher.lock:
            self.teacher.clients.discard(self)


class Teachers:
    """Some by endpoint; `connect` is what a reader is given."""

    def __init__(self, *teachers: FakeTeacher) -> None:
        self.by_endpoint = {teacher.endpoint: teacher for teacher in teachers}

    def connect(self, endpoint: str) -> FakeClient:
        return self.by_endpoint[endpoint].connect()

    @property
    def open_connections(self) -> int:
        return sum(len(teacher.clients) for teacher in self.by_endpoint.values())
