"""The HTTP side of the front: idle connections are ended, tokens checked, paths dispatched."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from aiohttp import http_exceptions, web

from distill_reader.errors import DistillError
from distill_reader.teacher.protocols.calls import Calls
from distill_reader.teacher.protocols.http_oip import OipHttp, check_method
from distill_reader.teacher.protocols.http_responses import (
    HttpError,
    HttpResponse,
    as_http,
    send_response,
    text_response,
)
from distill_reader.teacher.protocols.http_serving import ServingHttp
from distill_reader.teacher.protocols.limits import FrontLimits, bearer_matches
from distill_reader.teacher.service.metrics import TeacherMetrics

logger = logging.getLogger(__name__)


_SWEEP_S = 1.0
_NO_ENCRYPTION = (
    "this server has no encrypted models; POST to /GeneralModelService/inference, "
    "with use_key() not called"
)

_aiohttp_logger = logging.getLogger(f"{__name__}.aiohttp")


def _is_server_error(record: logging.LogRecord) -> bool:
    """Return False for errors of the client: it speaks no HTTP, or has left."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, http_exceptions.HttpProcessingError | ConnectionError)


_aiohttp_logger.addFilter(_is_server_error)


class TeacherHttpServer:
    """All HTTP connections. Runs on the front's loop."""

    def __init__(
        self,
        calls: Calls,
        *,
        token: str,
        limits: FrontLimits,
        metrics: Callable[[], bytes],
    ) -> None:
        self._calls = calls
        self._token = token
        self._limits = limits
        self._metrics = metrics
        self._oip = OipHttp(calls, limits)
        self._serving = ServingHttp(calls, limits)
        self._connections: dict[object, HttpConnection] = {}  # aiohttp's protocol -> ours
        # http_body.py decompresses the bodies, within bounds.
        self._server = web.Server(
            self._handle,
            access_log=None,
            logger=_aiohttp_logger,
            auto_decompress=False,
            handler_cancellation=True,
        )
        self._sweeper: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep())

    def connection(self, at_end: Callable[[], None]) -> "HttpConnection":
        """Return the protocol for a connection. `at_end` is called once when it has ended."""
        inner = self._server()

        def end() -> None:
            self._connections.pop(inner, None)
            at_end()

        connection = self._connections[inner] = HttpConnection(inner, end)
        return connection

    def forget(self, connection: "HttpConnection") -> None:
        """Forget a protocol that was never connected."""
        self._connections.pop(connection.inner, None)

    async def stop(self, grace_s: float) -> None:
        """End idle connections now, busy ones when they are answered or after `grace_s`."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        deadline = time.monotonic() + grace_s
        while self._connections:
            is_over = time.monotonic() >= deadline
            for connection in list(self._connections.values()):
                if is_over or not connection.is_busy:
                    connection.abort()
            if is_over:
                break
            await asyncio.sleep(0.01)
        await self._server.shutdown(1.0)

    async def _sweep(self) -> None:
        """End connections that have not sent a complete request header for too long."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            before = time.monotonic() - self._limits.idle_s
            for connection in list(self._connections.values()):
                if not connection.is_busy and connection.idle_since < before:
                    connection.abort()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = self._connections.get(request.protocol)
        if connection is not None:
            connection.begin()
        try:
            answer = await self._answer(request)
            return await send_response(request, answer, self._calls, self._limits)
        finally:
            if connection is not None:
                connection.end()

    async def _answer(self, request: web.BaseRequest) -> HttpResponse:
        path = [part for part in request.path.split("/") if part]
        try:
            is_open = path[:1] == ["v2"] and OipHttp.is_health(path[1:])
            shown = request.headers.get("Authorization", "")
            if not is_open and not bearer_matches(shown, self._token):
                raise HttpError(
                    401,
                    "this teacher wants a token: send the header Authorization: Bearer TOKEN",
                    headers={"WWW-Authenticate": "Bearer"},
                )
            if path[:1] == ["v2"]:
                return await self._oip.answer(request, path[1:])
            if (call := ServingHttp.find_call(path)) is not None:
                return await self._serving.answer(request, *call)
            if path == ["metrics"]:
                check_method(request, "GET")
                headers = {"Content-Type": TeacherMetrics.CONTENT_TYPE}
                return HttpResponse(headers=headers, parts=[self._metrics()])
            text = (
                _NO_ENCRYPTION
                if not path and request.method == "POST"
                else (
                    f"there is no {request.path[:200]} here; there is /v2/models/MODEL/infer, "
                    "/GeneralModelService/inference, /metrics"
                )
            )
            raise HttpError(404, text)
        except DistillError as error:
            return self._error(as_http(error), is_oip=path[:1] == ["v2"])
        except Exception:
            # One failed request must not end the server.
            logger.exception("HTTP: %s %s failed", request.method, request.path)
            return self._error(HttpError(500, "the server failed; see its log"), is_oip=True)

    def _error(self, error: HttpError, *, is_oip: bool) -> HttpResponse:
        if is_oip:
            return self._oip.error_answer(error)
        return text_response(str(error), status=error.status, headers=error.headers)


class HttpConnection(asyncio.Protocol):
    """Sits between a transport and aiohttp's protocol; knows whether the connection is idle."""

    def __init__(self, inner: Any, at_end: Callable[[], None]) -> None:
        self.inner = inner
        self._at_end = at_end
        self._transport: Any = None
        self.is_busy = False  # with a request
        self.idle_since = time.monotonic()

    def begin(self) -> None:
        """Mark the connection as busy with a request."""
        self.is_busy = True

    def end(self) -> None:
        """Mark it as idle: the request is answered."""
        self.is_busy = False
        self.idle_since = time.monotonic()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self.inner.connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        try:
            self.inner.connection_lost(error)
        finally:
            self._at_end()

    def data_received(self, data: bytes) -> None:
        self.inner.data_received(data)

    def eof_received(self) -> bool | None:
        result: bool | None = self.inner.eof_received()
        return result

    def pause_writing(self) -> None:
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        self.inner.resume_writing()
