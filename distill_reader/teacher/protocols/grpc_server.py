"""The gRPC server behind the front: token, limits, error codes, and gRPC's own health protocol.

It uses grpcio's threaded server: that of grpc.aio (1.85) stops for good at the first call whose
path is not UTF-8.
"""

import functools
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from distill_reader.errors import (
    BadRequest,
    DistillError,
    ModelNotFound,
    RequestTooLarge,
    TeacherBusy,
    UsageError,
)
from distill_reader.protocols.protobuf_schema import message_classes
from distill_reader.teacher.protocols.limits import FrontLimits, bearer_matches
from distill_reader.teacher.service.requests import InferAnswer, InferenceService, InferRequest

logger = logging.getLogger(__name__)

_THREADS = 128  # concurrent calls; most of them wait for their answers
_MAX_CALLS = 256  # concurrent or waiting for a thread; more are refused
_MAX_STREAMS = 128  # at a time on one connection
_FRAME_BYTES = 1 << 20  # the largest frame that clients may send: fewer headers to read
_OVERHEAD_BYTES = 1 << 20  # of a message, besides its tensors
_CHECK_S = 1.0  # how often the messages being read are checked
_OPEN_CALLS = 16  # without the token, while their messages are read: each takes a thread
# Of calls that wait for no model, and of watches: probes, and students that connect, are answered
# however many others wait for one.
_QUICK_THREADS = 64
_OPEN_S = 2.0  # how long such a message may take
_WATCHES = 32  # of health at a time: each takes a thread for as long as it lasts
_WATCH_S = 0.2  # how often health is looked at for them

HEALTH_SERVICE = "grpc.health.v1.Health"
_HEALTH = message_classes(
    "grpc.health.v1",
    {
        "HealthCheckRequest": "string service = 1",
        "HealthCheckResponse": "int32 status = 1",  # an enumeration
    },
)
_SERVING, _NOT_SERVING, _SERVICE_UNKNOWN = 1, 2, 3


class Call:
    """One call, without its message."""

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


def _is_server_error(record: logging.LogRecord) -> bool:
    """Return False for a path that is not UTF-8: that is the client's fault, and not logged."""
    return not (record.exc_info and isinstance(record.exc_info[1], UnicodeDecodeError))


logging.getLogger("grpc._cython.cygrpc").addFilter(_is_server_error)


class GrpcServer:
    """Serves methods on addresses. Start and stop it once."""

    def __init__(
        self,
        services: Mapping[str, Mapping[str, Method]],
        addresses: Sequence[str],
        *,
        token: str,
        limits: FrontLimits,
        open_methods: Collection[str] = (),
        slow_methods: Collection[str] = (),
        is_serving: Callable[[str], bool | None],
    ) -> None:
        """Bind the addresses.

        Args:
            services: service -> method -> function.
            open_methods: "/service/method" of those that need no token.
            slow_methods: likewise: of those that wait for a model.
            is_serving: for the health protocol: whether a service is ready; None: it is unknown.

        Raises:
            UsageError: an address cannot be bound.
        """
        self._token = token
        self._limits = limits
        self._is_serving = is_serving
        self._open_calls = threading.BoundedSemaphore(_OPEN_CALLS)
        self._watches = threading.BoundedSemaphore(_WATCHES)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="grpc")
        self._quick_threads = ThreadPoolExecutor(_QUICK_THREADS, thread_name_prefix="grpc-quick")
        self._server = grpc.server(
            self._threads, options=_options(limits), maximum_concurrent_rpcs=_MAX_CALLS
        )
        for service, methods in services.items():
            handlers = {
                name: self._handler(
                    method,
                    is_open=f"/{service}/{name}" in open_methods,
                    is_slow=f"/{service}/{name}" in slow_methods,
                )
                for name, method in methods.items()
            }
            self._server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(service, handlers),)
            )
        health = {
            "Check": self._handler(self._check_health, is_open=True),
            "Watch": grpc.stream_stream_rpc_method_handler(
                _in_threads(self._quick_threads, self._watch_health)
            ),
        }
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(HEALTH_SERVICE, health),)
        )
        try:
            for address in addresses:
                self._server.add_insecure_port(address)
        except RuntimeError as error:
            self._end_threads()
            raise UsageError(f"gRPC cannot listen on {address}: {error}") from error
        # Calls whose message is being read, and until when it must have come.
        self._reading: dict[int, tuple[float, Any]] = {}
        self._ending = threading.Event()  # no more calls are accepted
        self._stopping = threading.Event()
        self._watch = threading.Thread(target=self._watch_readers, name="grpc-watch", daemon=True)

    def start(self) -> None:
        self._server.start()
        self._watch.start()

    def stop(self, grace_s: float) -> None:
        """Accept no more calls; return when the running ones have ended, or after `grace_s`."""
        self._ending.set()  # watches of health would take all the grace
        self._server.stop(grace_s).wait()
        self._stopping.set()
        self._end_threads()

    def _end_threads(self) -> None:
        for threads in (self._threads, self._quick_threads):
            threads.shutdown(wait=False, cancel_futures=True)

    def _handler(self, method: Method, *, is_open: bool, is_slow: bool = False) -> Any:
        def call(messages: Any, context: Any) -> bytes:
            metadata = {key: value for key, value in context.invocation_metadata()}
            message = self._authorized_read(messages, context, metadata, is_open=is_open)
            try:
                return method(message, Call(context, metadata))
            except DistillError as error:
                _abort(context, error)
            except Exception:
                # One failed request must not end the server.
                logger.exception("gRPC: a request failed")
                context.abort(grpc.StatusCode.INTERNAL, "the server failed; see its log")
                raise

        # For clients this is a method with one request. It is a stream only here, so that a client
        # without the token is refused before its message is read.
        threads = self._threads if is_slow else self._quick_threads
        return grpc.stream_unary_rpc_method_handler(_in_threads(threads, call))

    def _authorized_read(
        self, messages: Any, context: Any, metadata: Mapping[str, Any], *, is_open: bool
    ) -> bytes:
        """Return the message of a call that has the token, or needs none; else end the call."""
        if bearer_matches(str(metadata.get("authorization", "")), self._token):
            longest_s = self._limits.longest_s(self._limits.max_request_bytes)
            return self._read(messages, context, longest_s)
        if not is_open:
            context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                "this teacher wants a token: send the metadata authorization: Bearer TOKEN",
            )
        if not self._open_calls.acquire(blocking=False):  # waiting would hold a thread, too
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls without the token")
        try:
            return self._read(messages, context, _OPEN_S)
        finally:
            self._open_calls.release()

    def _read(self, messages: Any, context: Any, longest_s: float) -> bytes:
        key = id(context)
        self._reading[key] = (time.monotonic() + longest_s, context)
        try:
            for message in messages:
                return bytes(message)
        finally:
            del self._reading[key]
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call has no message")
        raise AssertionError("abort returned")

    def _watch_readers(self) -> None:
        """Cancel calls whose message takes too long. Relayed connections are ended sooner."""
        while not self._stopping.wait(_CHECK_S):
            now = time.monotonic()
            for until, context in list(self._reading.values()):
                if until < now:
                    context.cancel()

    # --- grpc.health.v1

    def _check_health(self, message: bytes, _: Call) -> bytes:
        is_serving = self._is_serving(_health_service(message))
        if is_serving is None:
            raise ModelNotFound("no such service or model is served here")
        return _health_answer(_SERVING if is_serving else _NOT_SERVING)

    def _watch_health(self, messages: Any, context: Any) -> Iterator[bytes]:
        """Yield the health of a service now and whenever it changes, until the client leaves."""
        metadata = {key: value for key, value in context.invocation_metadata()}
        message = self._authorized_read(messages, context, metadata, is_open=True)
        try:
            service = _health_service(message)
        except BadRequest as error:
            _abort(context, error)
        left = threading.Event()
        if not context.add_callback(left.set):
            return
        if not self._watches.acquire(blocking=False):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"more than {_WATCHES} watches")
        try:
            told = 0
            while not left.is_set():
                is_serving = self._is_serving(service)
                status = _SERVING if is_serving else _NOT_SERVING
                if is_serving is None:
                    status = _SERVICE_UNKNOWN
                if self._ending.is_set():
                    status = _NOT_SERVING
                if status != told:
                    told = status
                    yield _health_answer(status)
                if self._ending.is_set():
                    context.abort(grpc.StatusCode.UNAVAILABLE, "the teacher ends")
                left.wait(_WATCH_S)
        finally:
            self._watches.release()


def _in_threads(threads: ThreadPoolExecutor, behavior: Callable[..., Any]) -> Any:
    """Return a method that gRPC calls in these threads, where it knows how, as grpcio 1.85 does."""
    called: Any = functools.partial(behavior)
    called.experimental_thread_pool = threads
    return called


def _health_service(message: bytes) -> str:
    try:
        return str(_HEALTH["HealthCheckRequest"].FromString(message).service)
    except DecodeError as error:
        raise BadRequest(f"the message is no HealthCheckRequest: {error}") from error


def _health_answer(status: int) -> bytes:
    return bytes(_HEALTH["HealthCheckResponse"](status=status).SerializeToString())


def _options(limits: FrontLimits) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", limits.max_request_bytes + _OVERHEAD_BYTES),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_concurrent_streams", _MAX_STREAMS),
        # Compressed messages may inflate a thousandfold, and gRPC's core has no bound for all of
        # them together. HTTP accepts compressed bodies, within a bound.
        ("grpc.compression_enabled_algorithms_bitset", 1),  # identity
        ("grpc.http2.max_frame_size", _FRAME_BYTES),
        ("grpc.server_handshake_timeout_ms", int(limits.first_byte_s * 1000)),
        # Clients that ping more often are disconnected; ours and Triton's ping less.
        ("grpc.http2.min_ping_interval_without_data_ms", 5000),
        ("grpc.keepalive_permit_without_calls", 1),
        # A client whose host has vanished must not hold a watch of health for ever.
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.so_reuseport", 0),  # a port in use is an error, not half of the requests
    ]


def _abort(context: Any, error: DistillError) -> NoReturn:
    if isinstance(error, TeacherBusy):
        # gRPC's own key for how long a retry must wait.
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
    future.cancel()  # has no effect once it is answered: then the answer is sent and released
