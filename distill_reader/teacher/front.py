"""A teacher's port: accept connections, and pass each to its protocol by its first bytes.

    "EDLT"   the fast path: threads of fast.py
    "PRI "   HTTP/2, so gRPC: relayed to gRPC's core, which wants a socket of its own
    others   HTTP/1.1, on the front's loop

The listener and HTTP share one event loop in a thread of its own. Nothing on it may block.
"""

import asyncio
import contextlib
import functools
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from distill_reader.errors import DistillError
from distill_reader.listening import OUT_OF, bind, cannot_accept, raise_file_limit
from distill_reader.protocols import oip_messages, serving_messages, wire
from distill_reader.teacher.protocols.calls import Calls
from distill_reader.teacher.protocols.fast import FastLimits, FastServer
from distill_reader.teacher.protocols.grpc_relay import GrpcRelay
from distill_reader.teacher.protocols.grpc_server import GrpcServer
from distill_reader.teacher.protocols.http2_frames import PREFACE
from distill_reader.teacher.protocols.http_server import TeacherHttpServer
from distill_reader.teacher.protocols.limits import FrontLimits
from distill_reader.teacher.protocols.oip import HEALTH_METHODS, OipGrpc, is_serving
from distill_reader.teacher.protocols.serving import ServingGrpc
from distill_reader.teacher.service.requests import InferenceService

logger = logging.getLogger(__name__)

_PEEK_BYTES = 4  # enough to tell the protocols apart; the shortest HTTP request is longer
_BRPC_MAGIC = b"PRPC"  # Paddle Serving's C++ client
_BACKLOG = 512
_LOG_EVERY_S = 10.0  # how often refused connections are logged


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontConfig:
    """Where a teacher listens, and what clients need and may use."""

    bind: str = "127.0.0.1"
    port: int = 9292  # 0: any free port
    grpc_port: int | None = None  # a further port for gRPC alone, without the relay
    token: str = ""  # clients must send it; "": they need none
    limits: FrontLimits = field(default_factory=FrontLimits)


class Front:
    """The listeners of a teacher. Start and close it once."""

    def __init__(
        self, service: InferenceService, config: FrontConfig, metrics: Callable[[], bytes]
    ) -> None:
        """`metrics`: returns the text for Prometheus."""
        self._service = service
        self._config = config
        self._metrics = metrics
        self._connections = 0  # of HTTP and gRPC, and those whose protocol is not known yet
        self._refused_at = 0.0  # when a refused connection was logged last
        self._listener: socket.socket | None = None  # None: not bound yet
        self._started = threading.Event()
        self._start_error: DistillError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._grace_s = 0.0
        self._dispatching: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="front", daemon=True)

    def bind(self) -> None:
        """Bind the port. Clients are refused until `start`, which calls this if nobody has.

        Raises:
            UsageError: an address cannot be listened on.
        """
        config = self._config
        if config.grpc_port is not None:  # gRPC's own error would say less
            bind(config.bind, config.grpc_port, "--grpc_port").close()
        self._listener = bind(config.bind, config.port, "--port")

    def start(self) -> None:
        """Listen; return once connections are served.

        Raises:
            UsageError: an address cannot be listened on.
        """
        raise_file_limit()
        if self._listener is None:
            self.bind()
        config, limits = self._config, self._config.limits
        self._fast = FastServer(
            self._service,
            FastLimits(
                max_request_bytes=limits.max_request_bytes,
                max_connections=limits.max_connections,
                token=config.token,
                stall_s=limits.stall_s,
            ),
        )
        self._thread.start()
        self._started.wait()
        if self._start_error is not None:
            self.close(0.0)
            raise self._start_error

    @property
    def address(self) -> tuple[str, int]:
        """The host and the port of the listener."""
        assert self._listener is not None, "bind first"
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    def close(self, grace_s: float = 5.0) -> None:
        """Accept no more; return when running requests are answered, or after `grace_s`."""
        self._grace_s = grace_s
        if self._loop is not None and self._stop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._stop.set)
        if self._thread.ident is not None:
            self._thread.join()
        if self._listener is not None:
            self._listener.close()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except DistillError as error:
            self._start_error = error
        except Exception as error:
            # `start` must not wait forever for a thread that has failed.
            logger.exception("the front failed")
            self._start_error = DistillError(f"the front failed: {error}")
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        limits, token = self._config.limits, self._config.token
        calls = Calls(self._service)
        self._http = TeacherHttpServer(calls, token=token, limits=limits, metrics=self._metrics)
        unix = f"edl-teacher-grpc-{os.getpid()}-{secrets.token_hex(8)}"
        grpc_server = self._grpc_server(f"unix-abstract:{unix}")
        self._relay = GrpcRelay(unix, limits)
        grpc_server.start()
        self._http.start()
        assert self._listener is not None
        self._listener.listen(_BACKLOG)
        self._start_accepting(self._listener)
        self._started.set()
        try:
            await self._stop.wait()
        finally:
            self._loop.remove_reader(self._listener)
            for task in list(self._dispatching):
                task.cancel()
            await asyncio.gather(
                self._http.stop(self._grace_s),
                self._loop.run_in_executor(None, grpc_server.stop, self._grace_s),
                self._loop.run_in_executor(None, self._fast.close, self._grace_s),
            )
            await self._loop.run_in_executor(None, self._relay.close)
            calls.close()

    def _grpc_server(self, address: str) -> GrpcServer:
        config, service = self._config, self._service
        addresses = [address]
        if config.grpc_port is not None:
            host = f"[{config.bind}]" if ":" in config.bind else config.bind
            addresses.append(f"{host}:{config.grpc_port}")
        serving = ServingGrpc(service, config.limits.max_request_bytes)
        return GrpcServer(
            {
                oip_messages.SERVICE: OipGrpc(service).methods(),
                serving_messages.SERVICE: serving.methods(),
            },
            addresses,
            token=config.token,
            limits=config.limits,
            open_methods=[f"/{oip_messages.SERVICE}/{name}" for name in HEALTH_METHODS],
            slow_methods=[
                f"/{oip_messages.SERVICE}/ModelInfer",
                *(f"/{serving_messages.SERVICE}/{name}" for name in serving.methods()),
            ],
            is_serving=functools.partial(is_serving, service),
        )

    # --- connections

    def _start_accepting(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        if self._stop is not None and not self._stop.is_set():
            loop.add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        """Accept a connection. Not a coroutine: a cancelled one would lose the connection."""
        loop = asyncio.get_running_loop()
        try:
            sock, _ = listener.accept()
        except OSError as error:
            if error.errno in OUT_OF:
                self._log_refused(cannot_accept(error))
                loop.remove_reader(listener)
                loop.call_later(0.2, self._start_accepting, listener)  # others will end
            return  # any other error: the client has left already
        if self._connections >= self._config.limits.max_connections:
            self._log_refused(f"a connection is refused: {self._connections} are open already")
            sock.close()
            return
        self._connections += 1
        task = loop.create_task(self._dispatch(sock))
        self._dispatching.add(task)
        task.add_done_callback(functools.partial(self._dispatched, sock))

    def _dispatched(self, sock: socket.socket, task: "asyncio.Task[None]") -> None:
        self._dispatching.discard(task)
        if task.cancelled():  # maybe before it began
            sock.close()

    async def _dispatch(self, sock: socket.socket) -> None:
        """Pass a new connection to the protocol that it speaks."""
        try:
            first = await self._first_bytes(sock)
            if first == wire.MAGIC:
                self._fast.start(sock)
                self._connection_ended()
                return
            if first == PREFACE[:_PEEK_BYTES]:
                self._relay.start(sock, self._grpc_ended)
                return
            if len(first) == _PEEK_BYTES and first != _BRPC_MAGIC:
                await self._start_http(sock)
                return
            if first == _BRPC_MAGIC:
                self._log_refused(
                    "a client speaks brpc, which is not supported: use Paddle Serving's "
                    "HttpClient, over HTTP or gRPC"
                )
        except (OSError, TimeoutError) as error:
            logger.debug("a connection is ended: %s", error)
        self._connection_ended()
        sock.close()

    async def _first_bytes(self, sock: socket.socket) -> bytes:
        """Return the first bytes without consuming them; fewer than needed if the client ended.

        Raises:
            OSError, TimeoutError: the connection broke, or nothing came.
        """
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _PEEK_BYTES)
        readable = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(sock, readable.set)  # there are enough bytes, or the stream has ended
        try:
            async with asyncio.timeout(self._config.limits.first_byte_s):
                await readable.wait()
        finally:
            loop.remove_reader(sock)
        first = sock.recv(_PEEK_BYTES, socket.MSG_PEEK)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        return first

    async def _start_http(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # From here on the protocol reports the end of the connection.
        connection = self._http.connection(self._connection_ended)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, sock)
        except BaseException:
            self._http.forget(connection)
            raise

    def _grpc_ended(self) -> None:
        """Called by a thread of the relay."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._connection_ended)

    def _connection_ended(self) -> None:
        self._connections -= 1

    def _log_refused(self, text: str) -> None:
        now = time.monotonic()
        if now - self._refused_at > _LOG_EVERY_S or not self._refused_at:
            self._refused_at = now
            logger.warning("%s", text)
