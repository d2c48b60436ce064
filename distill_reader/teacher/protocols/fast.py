"""The teacher's side of the fast path, with a thread for each connection.

A teacher has few students, and a connection carries one request at a time, so blocking threads cost
less than an event loop. A frame is checked before memory is allocated for it (see `wire.py`), and
inputs are received straight into memory that the predictors map.
"""

import contextlib
import logging
import os
import secrets
import socket
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace

import numpy as np

from distill_reader.errors import (
    BadRequest,
    FastPathError,
    ModelNotFound,
    TeacherBusy,
    TeacherFailed,
    UsageError,
)
from distill_reader.model.specs import ModelSpec
from distill_reader.model.tensors import Array
from distill_reader.protocols import stream, wire
from distill_reader.protocols.arena import ALIGNMENT, Arena, ArenaError, aligned, attach
from distill_reader.protocols.stream import StreamEnded, StreamStalled
from distill_reader.protocols.wire import FrameHead, StudentHello, WireTensor
from distill_reader.teacher.service.requests import (
    InferAnswer,
    InferenceService,
    InferRequest,
    SharedTensor,
    abandon,
    buffers_of,
    get_model,
)
from distill_reader.tokens import new_nonce, prove, proves, same_token

logger = logging.getLogger(__name__)

_CHECK_S = 0.2  # how often to check that a student still waits for its answer


@dataclass(frozen=True, slots=True, kw_only=True)
class FastLimits:
    """Limits of a connection."""

    max_request_bytes: int = 512 << 20  # of all inputs of one request
    max_shared_bytes: int = 4 << 30  # of a student's shared memory, which is only mapped
    max_connections: int = 1024
    token: str = ""  # students must prove that they have it; "": no token is needed
    hello_s: float = 10.0  # how long a greeting may take
    stall_s: float = 20.0  # how long a frame may pause
    unix: str = ""  # abstract name of the unix socket for students on this host


class FastServer:
    """All connections of the fast path, and the unix socket for students on the same host."""

    def __init__(self, service: InferenceService, limits: FastLimits) -> None:
        """Open the unix socket. Its name is random, so only welcomed students know it."""
        self._service = service
        self.limits = replace(limits, unix=f"edl-teacher-{os.getpid()}-{secrets.token_hex(8)}")
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._closing = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind("\0" + self.limits.unix)
            self._listener.listen(128)
        except OSError:
            self._listener.close()
            raise
        self._acceptor = threading.Thread(target=self._accept, name="fast-unix", daemon=True)
        self._acceptor.start()

    def start(self, sock: socket.socket) -> None:
        """Serve a connection in a thread of its own. The server owns `sock` from here on."""
        thread = threading.Thread(target=self._serve, args=(sock,), name="fast", daemon=True)
        with self._lock:
            has_room = len(self._connections) < self.limits.max_connections
            if has_room and not self._closing.is_set():
                self._connections[sock] = thread
                try:
                    thread.start()
                except RuntimeError:  # the system has no more threads
                    del self._connections[sock]
                else:
                    return
        logger.warning("a connection is refused: %d are open", len(self._connections))
        with sock, contextlib.suppress(OSError):
            sock.settimeout(0)
            sock.send(wire.pack_refusal(TeacherBusy("too many connections", delay_s=1.0)))

    def close(self, timeout_s: float = 5.0) -> None:
        """Accept no more requests; return when the running ones are answered or the time is up."""
        self._closing.set()
        stream.end(self._listener)
        self._acceptor.join()
        self._listener.close()
        with self._lock:
            connections = dict(self._connections)
        for sock in connections:  # threads that wait for a request see the end of the stream
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RD)
        for thread in connections.values():
            thread.join(timeout_s / max(len(connections), 1))
        for sock in connections:
            stream.end(sock)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if self._closing.is_set():
                    return
                logger.warning("cannot accept on the unix socket: %s", error)
                self._closing.wait(0.2)  # out of descriptors: others will be closed
                continue
            self.start(sock)

    def _serve(self, sock: socket.socket) -> None:
        try:
            serve_connection(sock, self._service, self.limits, self._closing)
        finally:
            with self._lock:
                del self._connections[sock]


def serve_connection(
    sock: socket.socket,
    service: InferenceService,
    limits: FastLimits,
    closing: threading.Event | None = None,
) -> None:
    """Answer one student until it leaves, fails or stalls; then close `sock`.

    The student's greeting has not been read yet.

    Args:
        closing: set before the receiving side of `sock` is shut down, so that the connection ends
            after the running answer; None: that never happens.
    """
    connection = None
    try:
        stream.prepare(sock, limits.hello_s)
        spec = _greet(sock, service, limits)
        if spec is not None:
            stream.set_timeout(sock, limits.stall_s)
            connection = _Connection(sock, service, limits, spec, closing or threading.Event())
            connection.run()
    except StreamEnded as error:
        logger.debug("fast path: %s", error)
    except StreamStalled as error:
        logger.info("fast path: a student is disconnected: %s", error)
    except FastPathError as error:
        logger.warning("fast path: a connection is ended: %s", error)
        with contextlib.suppress(StreamEnded, StreamStalled):
            data = wire.pack_error(0, error)
            stream.send(sock, [data], len(data), limits.stall_s)
    except Exception:
        # A defect in one connection must not end the others.
        logger.exception("fast path: a connection failed")
    finally:
        if connection is not None:
            connection.close()
        sock.close()


def _greet(sock: socket.socket, service: InferenceService, limits: FastLimits) -> ModelSpec | None:
    """Exchange greetings; return the model that the student asks for, None if it is refused."""
    try:
        head = stream.receive_bytes(sock, wire.GREETING.size, limits.hello_s)
        body_bytes = wire.parse_greeting(head, max_bytes=wire.MAX_HELLO_BYTES)
        hello = wire.parse_hello(stream.receive_bytes(sock, body_bytes, limits.hello_s))
        proof = _prove_each_other(sock, hello, limits)
        if not service.is_ready:
            raise TeacherBusy("the teacher starts or drains", delay_s=0.5)
        spec = _find_model(service.models(), hello.model)
    except (UsageError, BadRequest, TeacherBusy, FastPathError) as error:
        data = wire.pack_refusal(error)
        stream.send(sock, [data], len(data), limits.hello_s)
        if isinstance(error, FastPathError):
            raise
        return None
    is_unix = sock.family == socket.AF_UNIX
    data = wire.pack_welcome(
        wire.TeacherWelcome(
            spec=spec,
            max_request_bytes=limits.max_request_bytes,
            unix="" if is_unix else limits.unix,
            shared_memory=is_unix,
            proof=proof,
        )
    )
    stream.send(sock, [data], len(data), limits.hello_s)
    return spec


def _prove_each_other(sock: socket.socket, hello: StudentHello, limits: FastLimits) -> str:
    """Check that the student has the token; return the teacher's own proof for the student.

    Raises:
        UsageError: the student does not have the token.
        StreamEnded, StreamStalled, FastPathError.
    """
    if not limits.token:
        return ""
    if hello.nonce:
        own = new_nonce()
        data = wire.pack_challenge(own)
        stream.send(sock, [data], len(data), limits.hello_s)
        head = stream.receive_bytes(sock, wire.GREETING.size, limits.hello_s)
        body_bytes = wire.parse_greeting(head, max_bytes=wire.MAX_HELLO_BYTES)
        shown = wire.parse_proof(stream.receive_bytes(sock, body_bytes, limits.hello_s))
        if proves(shown, limits.token, "fast student", hello.nonce, own):
            return prove(limits.token, "fast teacher", hello.nonce, own)
    elif same_token(hello.token, limits.token):  # students of older releases send the token
        return ""
    raise UsageError(
        "the teacher wants a token, and "
        f"{'another' if hello.token or hello.nonce else 'none'} was given: "
        "set EDL_TEACHER_TOKEN to the teacher's"
    )


def _find_model(models: Mapping[str, ModelSpec], name: str) -> ModelSpec:
    if name:
        return get_model(models, name)
    if len(models) != 1:
        raise ModelNotFound(f"several models are served, name one of them: {', '.join(models)}")
    return next(iter(models.values()))


class _Connection:
    """A connection whose student has been welcomed."""

    def __init__(
        self,
        sock: socket.socket,
        service: InferenceService,
        limits: FastLimits,
        spec: ModelSpec,
        closing: threading.Event,
    ) -> None:
        self._sock = sock
        self._service = service
        self._limits = limits
        self._spec = spec
        self._closing = closing
        self._output_index = {tensor.name: index for index, tensor in enumerate(spec.outputs)}
        self._shared: Arena | None = None  # the student's memory; None: it has shared none
        self._protocol = "fast-unix" if sock.family == socket.AF_UNIX else "fast-tcp"

    def run(self) -> None:
        """Answer frames until the stream ends.

        Raises:
            StreamEnded, StreamStalled, FastPathError.
        """
        head_view = memoryview(bytearray(wire.HEAD.size))
        while True:
            self._await_frame(head_view)
            head = wire.parse_head(head_view)
            meta = stream.receive_bytes(self._sock, head.meta_bytes, self._limits.stall_s)
            if head.kind == wire.PREDICT:
                self._predict(head, meta)
            elif head.kind == wire.SHARE:
                self._share()
            else:
                raise FastPathError(f"unexpected frame of kind {head.kind}")

    def close(self) -> None:
        if self._shared is not None:
            self._shared.close()

    def _await_frame(self, head_view: memoryview) -> None:
        while True:
            try:
                got = stream.receive_some(self._sock, head_view)
            except StreamStalled:  # silent between frames, which is fine
                continue
            stream.receive(self._sock, head_view[got:], self._limits.stall_s)
            return

    # --- a request

    def _predict(self, head: FrameHead, meta: bytes) -> None:
        tensors, outputs = wire.parse_predict(head, meta)
        if head.payload_bytes > self._limits.max_request_bytes:
            raise FastPathError(
                f"a request has {head.payload_bytes} bytes; allowed are "
                f"{self._limits.max_request_bytes}"
            )
        is_named = bool(head.flags & wire.NAMED_OUTPUTS)
        try:
            answer = self._ask(head, tensors, outputs)
        except (BadRequest, TeacherBusy, TeacherFailed) as error:
            self._send(wire.pack_error(head.request_id, error))
            return
        try:
            self._send_answer(head.request_id, answer, is_named=is_named)
        finally:
            answer.release()

    def _ask(
        self, head: FrameHead, tensors: Sequence[WireTensor], outputs: Sequence[int] | Sequence[str]
    ) -> InferAnswer:
        if head.flags & wire.IN_SHARED_MEMORY:
            inputs = self._find_inputs(tensors)
            protocol = "fast-shm"
        else:
            inputs = self._receive_inputs(head, tensors)
            protocol = self._protocol
        try:
            fetch = self._output_names(outputs)
        except BadRequest:
            _release(inputs)
            raise
        request = InferRequest(model=self._spec.name, inputs=inputs, fetch=fetch, protocol=protocol)
        return self._wait(self._service.submit(request))

    def _output_names(self, outputs: Sequence[int] | Sequence[str]) -> tuple[str, ...]:
        count = len(self._spec.outputs)
        names = []
        for output in outputs:
            if isinstance(output, str):
                if output in names:
                    raise BadRequest(f"output {output}: is named twice")
                names.append(output)
            elif output < count:
                names.append(self._spec.outputs[output].name)
            else:
                raise BadRequest(f"outputs {outputs} are wanted; there are {count}")
        return tuple(names)

    def _receive_inputs(
        self, head: FrameHead, tensors: Sequence[WireTensor]
    ) -> dict[str, SharedTensor]:
        """Receive the payload into memory that the predictors map. A refused payload is skipped."""
        sizes = [tensor.size_bytes for tensor in tensors]
        try:
            names = self._input_names(tensors)
            buffer = self._service.allocate(sum(map(aligned, sizes)))
        except (BadRequest, TeacherBusy):
            stream.skip(self._sock, head.payload_bytes, self._limits.stall_s)
            raise
        try:
            view, offset = buffer.view, 0
            inputs = {}
            for name, tensor, size in zip(names, tensors, sizes, strict=True):
                stream.receive(self._sock, view[offset : offset + size], self._limits.stall_s)
                inputs[name] = SharedTensor(
                    buffer=buffer, offset=offset, dtype=tensor.dtype, shape=tensor.shape
                )
                offset += aligned(size)
        except BaseException:
            buffer.release()
            raise
        return inputs

    def _find_inputs(self, tensors: Sequence[WireTensor]) -> dict[str, SharedTensor]:
        """Return the inputs in place, in the student's memory."""
        arena = self._shared
        if arena is None:
            raise BadRequest("no memory was shared on this connection")
        inputs: dict[str, SharedTensor] = {}
        try:
            for name, tensor in zip(self._input_names(tensors), tensors, strict=True):
                if tensor.offset % ALIGNMENT:
                    raise BadRequest(f"tensor {name}: offset {tensor.offset} is not aligned")
                try:
                    buffer = arena.slice(tensor.offset, tensor.size_bytes)
                except ArenaError as error:
                    raise BadRequest(f"tensor {name}: {error}") from error
                inputs[name] = SharedTensor(
                    buffer=buffer, offset=0, dtype=tensor.dtype, shape=tensor.shape
                )
        except BadRequest:
            _release(inputs)
            raise
        return inputs

    def _input_names(self, tensors: Sequence[WireTensor]) -> list[str]:
        specs = self._spec.inputs
        indices = [tensor.position for tensor in tensors]
        if len(set(indices)) != len(indices) or any(index >= len(specs) for index in indices):
            raise BadRequest(f"inputs {indices} are sent; each of {len(specs)} may come once")
        return [specs[index].name for index in indices]

    def _wait(self, future: Future[InferAnswer]) -> InferAnswer:
        while True:
            try:
                return future.result(_CHECK_S)
            except CancelledError as error:
                raise TeacherBusy("the teacher stops") from error
            except TimeoutError:
                if self._closing.is_set() or not stream.has_ended(self._sock):
                    continue
                abandon(future)
                raise StreamEnded("the student left before its answer") from None

    def _send_answer(self, request_id: int, answer: InferAnswer, *, is_named: bool) -> None:
        arrays: list[Array] = []
        tensors = []
        try:
            for position, (name, output) in enumerate(answer.outputs.items()):
                array = np.ascontiguousarray(output)
                arrays.append(array)
                tensors.append(
                    WireTensor(
                        position=position if is_named else self._output_index[name],
                        dtype=wire.dtype_name(array.dtype),
                        shape=array.shape,
                    )
                )
            frame = wire.pack_answer(request_id, tensors)
        except BadRequest as error:
            self._send(wire.pack_error(request_id, error))
            return
        size = len(frame) + sum(array.nbytes for array in arrays)
        stream.send(self._sock, [frame, *arrays], size, self._limits.stall_s)

    def _send(self, data: bytes) -> None:
        stream.send(self._sock, [data], len(data), self._limits.stall_s)

    # --- shared memory

    def _share(self) -> None:
        if self._sock.family != socket.AF_UNIX:
            raise FastPathError("memory can be shared over the unix socket only")
        fd = _receive_descriptor(self._sock)
        try:
            arena = attach(fd, max_bytes=self._limits.max_shared_bytes, is_writable=False)
        except ArenaError as error:
            self._send(wire.pack_error(0, error))
            return
        self.close()  # what it shared before
        self._shared = arena
        self._send(wire.pack_shared())


def _receive_descriptor(sock: socket.socket) -> int:
    try:
        data, ancillary, _flags, _ = sock.recvmsg(
            1, socket.CMSG_SPACE(4 * np.intc().itemsize), socket.MSG_CMSG_CLOEXEC
        )
    except BlockingIOError as error:
        raise StreamStalled("no descriptor came in time") from error
    except OSError as error:
        raise StreamEnded(str(error)) from error
    fds = [
        int(fd)
        for level, kind, content in ancillary
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        for fd in np.frombuffer(content[: len(content) // 4 * 4], np.intc)
    ]
    if len(data) != 1 or len(fds) != 1:
        for fd in fds:
            os.close(fd)
        raise FastPathError(f"expected one descriptor, got {len(fds)}")
    return fds[0]


def _release(inputs: Mapping[str, SharedTensor]) -> None:
    for buffer in buffers_of(inputs):
        buffer.release()
