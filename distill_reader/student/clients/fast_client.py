"""The student's end of the fast path: by TCP, a unix socket, or shared memory."""

import array as arrays
import contextlib
import ipaddress
import logging
import socket
from collections.abc import Mapping, Sequence

import numpy as np

from distill_reader.errors import (
    DistillError,
    FastPathError,
    RequestTooLarge,
    TeacherBusy,
    TeacherFailed,
    TeacherGone,
    TeacherTimeout,
    UsageError,
)
from distill_reader.model.output_encodings import split_name
from distill_reader.model.specs import ModelSpec
from distill_reader.protocols import stream, wire
from distill_reader.protocols.arena import ALIGNMENT, OwnArena
from distill_reader.protocols.stream import StreamEnded, StreamStalled
from distill_reader.protocols.wire import StudentHello, TeacherWelcome, WireTensor
from distill_reader.student.clients.client import Array, Bounds
from distill_reader.student.clients.connection_guard import ConnectionGuard
from distill_reader.student.clients.endpoints import ProtocolMismatch
from distill_reader.student.clients.rows import InputRows, find_outputs, gather
from distill_reader.tokens import new_nonce, prove, proves

logger = logging.getLogger(__name__)

TRANSPORTS = ("tcp", "unix", "shm")  # slowest first; each is negotiated over those before it

_SHARED_BYTES = 64 << 20  # of shared memory per client; pages are only allocated when used
_MAX_ANSWER_BYTES = 8 << 30
_LOCAL_WAIT_S = 2.0  # for the unix socket of a server on this host to answer
_ENDS_OF_CONNECTION = (StreamEnded, StreamStalled, FastPathError)


class FastClient:
    """A TeacherClient on the fast path. Made by `open_fast`."""

    def __init__(self, endpoint: str, sock: socket.socket, welcome: TeacherWelcome) -> None:
        """Own `sock`, on which the greetings have been exchanged."""
        self.endpoint = endpoint
        self.protocol = "fast-unix" if sock.family == socket.AF_UNIX else "fast-tcp"
        self._sock = sock
        self._welcome = welcome
        self._spec = welcome.spec
        self._output_index = {tensor.name: i for i, tensor in enumerate(welcome.spec.outputs)}
        self._arena: OwnArena | None = None  # memory shared with the teacher, once it is
        self._memory: Array | None = None  # the arena's bytes
        self._guard = ConnectionGuard(endpoint, wake=lambda: stream.end(sock), close=self._free)
        self._timeout_s = 0.0  # of the socket
        self._request_id = 0
        self._head = memoryview(bytearray(wire.HEAD.size))

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def bounds(self) -> Bounds:
        return Bounds(most_bytes=self._welcome.max_request_bytes)

    def share_memory(self, size_bytes: int, timeout_s: float) -> None:
        """Put further requests into memory that the teacher maps. Needs the unix socket.

        Raises:
            DistillError: the teacher refuses, or the connection ended.
            OSError: the system cannot provide the memory.
        """
        arena = OwnArena(size_bytes, "edl-student")
        try:
            with self._guard:
                self._set_timeout(timeout_s)
                head = wire.pack_share()
                stream.send(self._sock, [head], len(head), timeout_s)
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, arrays.array("i", [arena.fd]))
                self._sock.sendmsg([b"\0"], [rights], socket.MSG_NOSIGNAL)
                self._receive_frame(wire.SHARED, timeout_s)
        except BaseException:
            arena.close()
            raise
        self._arena = arena
        self._memory = np.frombuffer(arena.region(0, arena.size), np.uint8)
        self.protocol = "fast-shm"

    def predict(
        self, feeds: Mapping[str, Sequence[Array]], fetch: Sequence[str], *, timeout_s: float
    ) -> dict[str, Array]:
        """See TeacherClient. The connection is closed after TeacherTimeout and TeacherGone."""
        rows = gather(self._spec, feeds)
        size = sum(tensor.size_bytes for tensor in rows)
        if size > self._welcome.max_request_bytes:
            raise RequestTooLarge(
                f"{self.endpoint}: the request has {size} bytes, the teacher takes "
                f"{self._welcome.max_request_bytes}: send fewer samples at once, or raise "
                "its --max_request_mb"
            )
        names = list(fetch) or [tensor.name for tensor in self._spec.outputs]
        plain = [self._index_of(name) for name in names]
        places = [index for index in plain if index is not None]
        # Names are only sent if an output is encoded; teachers of older releases do not know them.
        is_plain = len(places) == len(plain)
        wanted: Sequence[int] | Sequence[str]
        wanted = places if is_plain else list(find_outputs(self._spec, names).values())
        with self._guard:
            try:
                self._set_timeout(timeout_s)
                self._send_request(rows, size, wanted, timeout_s)
                outputs = self._receive_answer(timeout_s)
            except StreamStalled as error:
                self.close()
                raise TeacherTimeout(
                    f"{self.endpoint}: no answer within {timeout_s:g} s ({error})"
                ) from error
            except (StreamEnded, FastPathError) as error:
                self.close()
                raise TeacherGone(f"{self.endpoint}: {error}") from error
            except BaseException as error:
                if not isinstance(error, DistillError):  # KeyboardInterrupt in mid-frame
                    self.close()
                raise
        try:
            at = places if is_plain else range(len(names))
            return {name: outputs[place] for name, place in zip(names, at, strict=True)}
        except KeyError as error:
            self.close()
            raise TeacherGone(f"{self.endpoint}: its answer lacks an output") from error

    def close(self) -> None:
        """See TeacherClient."""
        self._guard.close()

    def _free(self) -> None:
        self._sock.close()
        self._memory = None
        if self._arena is not None:
            self._arena.close()

    def _index_of(self, name: str) -> int | None:
        """Return the index of an output; None: it is to be encoded. Raises: BadRequest."""
        index = self._output_index.get(name)
        if index is not None:
            return index
        output, encoding = split_name(self._spec, name)
        return None if encoding else self._output_index[output.name]

    def _set_timeout(self, timeout_s: float) -> None:
        if timeout_s != self._timeout_s:
            stream.set_timeout(self._sock, timeout_s)
            self._timeout_s = timeout_s

    # --- a request

    def _send_request(
        self,
        rows: Sequence[InputRows],
        size: int,
        wanted: Sequence[int] | Sequence[str],
        timeout_s: float,
    ) -> None:
        self._request_id = (self._request_id + 1) & 0xFFFFFFFF
        memory = self._memory
        if memory is not None and rows:
            tensors = _place(rows)
            last = tensors[-1]
            if last.offset + last.size_bytes <= memory.size:
                for tensor, described in zip(rows, tensors, strict=True):
                    _copy(tensor, memory, described.offset)
                frame = wire.pack_predict(self._request_id, tensors, wanted, in_shared_memory=True)
                stream.send(self._sock, [frame], len(frame), timeout_s)
                return
        tensors = [WireTensor(row.input_index, row.dtype, row.shape) for row in rows]
        frame = wire.pack_predict(self._request_id, tensors, wanted, in_shared_memory=False)
        buffers: list[stream.Sendable] = [frame]
        for tensor in rows:
            buffers += tensor.arrays
        stream.send(self._sock, buffers, len(frame) + size, timeout_s)

    def _receive_answer(self, timeout_s: float) -> dict[int, Array]:
        head, meta = self._receive_frame(wire.ANSWER, timeout_s)
        if head.request_id != self._request_id:
            raise FastPathError(f"answer to request {head.request_id}, not {self._request_id}")
        tensors = wire.parse_answer(head, meta)
        if head.payload_bytes > _MAX_ANSWER_BYTES:
            raise FastPathError(f"answer of {head.payload_bytes} bytes")
        outputs: dict[int, Array] = {}
        for tensor in tensors:
            output = np.empty(tensor.shape, tensor.dtype)
            stream.receive(self._sock, stream.bytes_of(output), timeout_s)
            outputs[tensor.position] = output
        return outputs

    def _receive_frame(self, kind: int, timeout_s: float) -> tuple[wire.FrameHead, bytes]:
        """Return the next frame's head and meta; raise the error that it carries."""
        stream.receive(self._sock, self._head, timeout_s)
        head = wire.parse_head(self._head)
        meta = stream.receive_bytes(self._sock, head.meta_bytes, timeout_s)
        if head.kind == wire.ERROR:
            raise _named(self.endpoint, wire.parse_error(meta))
        if head.kind != kind:
            raise FastPathError(f"expected a frame of kind {kind}, got {head.kind}")
        return head, meta


def open_fast(
    endpoint: str,
    address: tuple[str, int],
    *,
    model: str = "",
    token: str = "",
    timeout_s: float = 5.0,
    hello_timeout_s: float | None = None,
    transport: str = "shm",
) -> FastClient:
    """Connect to a teacher by the fastest transport that it offers.

    Args:
        endpoint: as the user wrote it, for messages.
        address: host and port.
        model: "": the only one that is served.
        timeout_s: for each step.
        hello_timeout_s: for the teacher's greeting; None: `timeout_s`.
        transport: the fastest one to try, of TRANSPORTS.

    Raises:
        TeacherGone: no server listens there.
        ProtocolMismatch: the server speaks something else.
        TeacherBusy: the teacher starts, drains or has too many connections.
        UsageError, ModelNotFound: it has another token or version, or no such model.
    """
    try:
        sock = socket.create_connection(address, timeout_s)
    except OSError as error:
        raise TeacherGone(f"{endpoint}: {error}") from error
    wait_s = timeout_s if hello_timeout_s is None else hello_timeout_s
    welcome = _greet(endpoint, sock, model, token, wait_s)
    if transport != "tcp" and welcome.unix and _is_local(sock):
        local = _open_unix(endpoint, welcome, model, token, min(timeout_s, _LOCAL_WAIT_S))
        if local is not None:
            sock.close()
            client = FastClient(endpoint, *local)
            if transport == "shm" and local[1].shared_memory:
                client = _with_shared_memory(client, timeout_s)
            return client
    return FastClient(endpoint, sock, welcome)


def _greet(
    endpoint: str, sock: socket.socket, model: str, token: str, timeout_s: float
) -> TeacherWelcome:
    """Exchange greetings; close the socket if that fails."""
    nonce = new_nonce() if token else ""
    hello = wire.pack_hello(StudentHello(model=model, nonce=nonce))
    try:
        stream.prepare(sock, timeout_s)
        stream.send(sock, [hello], len(hello), timeout_s)
        head = memoryview(bytearray(wire.GREETING.size))
        got = stream.receive_some(sock, head)
        if bytes(head[: min(got, 4)]) != wire.MAGIC[: min(got, 4)]:
            answered = bytes(head[:got])
            raise ProtocolMismatch(
                f"{endpoint}: does not speak the fast path, answers {answered!r}"
            )
        stream.receive(sock, head[got:], timeout_s)
        body_bytes = wire.parse_greeting(bytes(head), max_bytes=wire.MAX_WELCOME_BYTES)
        body = stream.receive_bytes(sock, body_bytes, timeout_s)
        return (
            _prove_each_other(sock, body, token, nonce, timeout_s)
            if token
            else wire.parse_welcome(body)
        )
    except BaseException as error:
        sock.close()
        if isinstance(error, _ENDS_OF_CONNECTION):
            raise ProtocolMismatch(
                f"{endpoint}: does not speak the fast path ({error})", is_certain=False
            ) from error
        if isinstance(error, DistillError) and not isinstance(error, ProtocolMismatch):
            raise _named(endpoint, error) from None
        raise


def _prove_each_other(
    sock: socket.socket, body: bytes, token: str, nonce: str, timeout_s: float
) -> TeacherWelcome:
    """Prove to know the token, check the teacher's proof, and return its welcome.

    Args:
        body: of the teacher's answer to the greeting with our nonce.
    """
    other = wire.parse_challenge(body)
    if other is None:  # it needs no token, or is of an older release, which needs the token itself
        try:
            wire.parse_welcome(body)
        except UsageError as error:
            raise UsageError(
                f"{error}; it may be of an older release, which wants the token itself: that is "
                "not sent any more, so upgrade the teacher"
            ) from None
    else:
        proof = wire.pack_proof(prove(token, "fast student", nonce, other))
        stream.send(sock, [proof], len(proof), timeout_s)
        head = stream.receive_bytes(sock, wire.GREETING.size, timeout_s)
        body_bytes = wire.parse_greeting(head, max_bytes=wire.MAX_WELCOME_BYTES)
        welcome = wire.parse_welcome(stream.receive_bytes(sock, body_bytes, timeout_s))
        if proves(welcome.proof, token, "fast teacher", nonce, other):
            return welcome
    raise UsageError(
        "the teacher does not prove that it knows the token: start it with EDL_TEACHER_TOKEN as "
        "here and without --insecure, or unset that here"
    )


def _open_unix(
    endpoint: str, welcome: TeacherWelcome, model: str, token: str, timeout_s: float
) -> tuple[socket.socket, TeacherWelcome] | None:
    """Return a connection over the teacher's unix socket; None: it cannot be opened."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect("\0" + welcome.unix)
        local = _greet(endpoint, sock, model, token, timeout_s)
    except (OSError, DistillError) as error:  # another network namespace, or a full backlog
        logger.debug("%s: stays on TCP: %s", endpoint, error)
        sock.close()
        return None
    return sock, local


def _with_shared_memory(client: FastClient, timeout_s: float) -> FastClient:
    try:
        client.share_memory(_SHARED_BYTES, timeout_s)
    except _ENDS_OF_CONNECTION as error:
        client.close()
        raise TeacherGone(f"{client.endpoint}: {error}") from error
    except (OSError, DistillError) as error:
        logger.debug("%s: shares no memory: %s", client.endpoint, error)
    return client


def _is_local(sock: socket.socket) -> bool:
    """Return whether the teacher seems to be on this host: both ends have the same address."""
    with contextlib.suppress(OSError, ValueError):
        here, there = sock.getsockname()[0], sock.getpeername()[0]
        return here == there or ipaddress.ip_address(there).is_loopback
    return False


def _place(rows: Sequence[InputRows]) -> list[WireTensor]:
    """Return the offset of each input in the shared memory."""
    tensors, offset = [], 0
    for row in rows:
        tensors.append(WireTensor(row.input_index, row.dtype, row.shape, offset))
        offset = -(-(offset + row.size_bytes) // ALIGNMENT) * ALIGNMENT
    return tensors


def _copy(row: InputRows, memory: Array, offset: int) -> None:
    target = memory[offset : offset + row.size_bytes].view(row.dtype).reshape(row.shape)
    if len(row.arrays) == 1:
        np.copyto(target, row.arrays[0])
    else:
        np.concatenate(row.arrays, out=target)


def _named(endpoint: str, error: DistillError) -> DistillError:
    """Return the teacher's error with its endpoint in the text."""
    text = f"{endpoint}: {error}"
    if isinstance(error, TeacherBusy):
        return TeacherBusy(text, delay_s=error.delay_s)
    if isinstance(error, TeacherFailed):
        return TeacherFailed(text, tries=error.tries)
    return type(error)(text)
