"""The gRPC server behind the front: who may call, how much, and what errors look like there.

It is the threaded one of grpcio: that of grpc.aio (1.85) ends for ever at the first call whose
path is not UTF-8.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, NoReturn

import grpc

from distill_reader.errors import (
    BadRequest,
    DistillError,
    ModelNotFound,
    RequestTooLarge,
    TeacherBusy,
    UsageError,
)
from distill_reader.teacher.protocols.limits import FrontLimits, bearer_matches
from distill_reader.teacher.service.requests import InferAnswer, InferenceService, InferRequest

logger = logging.getLogger(__name__)

_THREADS = 128  # calls at work; most of them wait for their answers
_MAX_CALLS = 256  # at work or waiting for a thread; more are refused
_MAX_STREAMS = 128  # at a time, of one connection
_FRAME_BYTES = 1 << 20  # what clients may send at once: fewer heads to look at
_OVERHEAD_BYTES = 1 << 20  # of a message besides its tensors
_LOOK_S = 1.0  # between two looks at messages that are coming


class Call:
    """One call: what its method needs besides the message."""

    def __init__(self, context: Any, metadata: Mapping[str, str]) -> None:
        self._context = context
        self.metadata = metadata

    def infer(self, service: InferenceService, request: InferRequest) -> InferAnswer:
        """Return the answer, which the caller releases.

        Raises:
            BadRequest, ModelNotFound, TeacherBusy.
        """
        future = service.submit(request)
        if not self._context.add_callback(lambda: _cancel(future)):
            _cancel(future)  # the client has left
        try:
            return future.result()
        except CancelledError as error:
            raise TeacherBusy("the teacher stops", delay_s=1.0) from error


Method = Callable[[bytes, Call], bytes]


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Whether the server is at fault: a path that is no text is not logged."""
    return not (record.exc_info and isinstance(record.exc_info[1], UnicodeDecodeError))


logging.getLogger("grpc._cython.cygrpc").addFilter(_is_worth_a_line)


class GrpcServer:
    """Methods by service, on addresses of gRPC's core. Started once, stopped once."""

    def __init__(
        self,
        services: Mapping[str, Mapping[str, Method]],
        addresses: Sequence[str],
        *,
        token: str,
        limits: FrontLimits,
    ) -> None:
        """Take the addresses.

        Raises:
            UsageError: one of them cannot be listened on.
        """
        self._token = token
        self._limits = limits
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="grpc")
        self._server = grpc.server(
            self._threads, options=_options(limits), maximum_concurrent_rpcs=_MAX_CALLS
        )
        for service, methods in services.items():
            handlers = {name: self._handler(method) for name, method in methods.items()}
            self._server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(service, handlers),)
            )
        try:
            for address in addresses:
                self._server.add_insecure_port(address)
        except RuntimeError as error:
            self._threads.shutdown(wait=False)
            raise UsageError(f"gRPC cannot listen on {address}: {error}") from error
        self._reading: dict[int, tuple[float, Any]] = {}  # calls whose message is coming
        self._stopping = threading.Event()
        self._watch = threading.Thread(target=self._watch_readers, name="grpc-watch", daemon=True)

    def start(self) -> None:
        self._server.start()
        self._watch.start()

    def stop(self, grace_s: float) -> None:
        """Take no more calls; return when those at work have ended, or after `grace_s`."""
        self._server.stop(grace_s).wait()
        self._stopping.set()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _handler(self, method: Method) -> Any:
        def call(messages: Any, context: Any) -> bytes:
            metadata = {key: value for key, value in context.invocation_metadata()}
            if not bearer_matches(str(metadata.get("authorization", "")), self._token):
                context.abort(
                    grpc.StatusCode.UNAUTHENTICATED,
                    "this teacher wants a token: metadata authorization: Bearer TOKEN",
                )
            message = self._read(messages, context)
            try:
                return method(message, Call(context, metadata))
            except DistillError as error:
                _abort(context, error)
            except Exception:
                # The outermost place where one request can fail and the server go on.
                logger.exception("gRPC: a request failed")
                context.abort(grpc.StatusCode.INTERNAL, "the server failed; its log says how")
                raise

        # To clients this is a method of one request: streamed are only the bytes on this side, so
        # that who may not call is refused before the message is taken in.
        return grpc.stream_unary_rpc_method_handler(call)

    def _read(self, messages: Any, context: Any) -> bytes:
        place = id(context)
        self._reading[place] = (time.monotonic(), context)
        try:
            for message in messages:
                return bytes(message)
        finally:
            del self._reading[place]
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call has no message")
        raise AssertionError("abort returned")

    def _watch_readers(self) -> None:
        """End calls whose message does not come; the relay is quicker where it stands before."""
        longest_s = self._limits.longest_s(self._limits.max_request_bytes)
        while not self._stopping.wait(_LOOK_S):
            before = time.monotonic() - longest_s
            for since, context in list(self._reading.values()):
                if since < before:
                    context.cancel()


def _options(limits: FrontLimits) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", limits.max_request_bytes + _OVERHEAD_BYTES),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_concurrent_streams", _MAX_STREAMS),
        # Nobody can tell the core how much all compressed messages together may inflate to:
        # a thousandth of that comes over the network. HTTP takes them, and has a bound.
        ("grpc.compression_enabled_algorithms_bitset", 1),  # identity
        ("grpc.http2.max_frame_size", _FRAME_BYTES),
        ("grpc.server_handshake_timeout_ms", int(limits.first_byte_s * 1000)),
        # Clients that ping more often than this are sent away; ours and Triton's ping less.
        ("grpc.http2.min_ping_interval_without_data_ms", 5000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.so_reuseport", 0),  # a port in use is an error, not half of the requests
    ]


def _abort(context: Any, error: DistillError) -> NoReturn:
    if isinstance(error, TeacherBusy):
        # gRPC's own name for how long a retry has to wait.
        wait = (("grpc-retry-pushback-ms", str(int(error.delay_s * 1000))),)
        context.set_trailing_metadata(wait)
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
    if isinstance(error, ModelNotFound):
        context.abort(grpc.StatusCode.NOT_FOUND, str(error))
    if isinstance(error, RequestTooLarge):
        context.abort(grpc.StatusCode.OUT_OF_RANGE, str(error))
    if isinstance(error, BadRequest):
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    logger.error("gRPC: a request failed: %s", error)
    context.abort(grpc.StatusCode.INTERNAL, str(error))
    raise AssertionError("abort returned")


def _cancel(future: "Future[InferAnswer]") -> None:
    future.cancel()  # if it still waits; else it is answered, and the answer released
