"""Make HTTP responses of answers and errors, and send them."""

import asyncio
import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from distill_reader.errors import (
    BadRequest,
    DistillError,
    ModelNotFound,
    RequestTooLarge,
    TeacherBusy,
)
from distill_reader.teacher.protocols.calls import Calls
from distill_reader.teacher.protocols.limits import FrontLimits

_COMPRESS_FROM_BYTES = 512  # shorter bodies are not compressed, as in Paddle Serving
_COMPRESS_LEVEL = 1  # higher levels gain little on numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpResponse:
    """A response that is not sent yet."""

    status: int = 200
    headers: Mapping[str, str]
    parts: Sequence[Any] = ()  # of the body: bytes-like
    release: Callable[[], None] | None = None  # called once, when it is sent or given up
    may_compress: bool = False  # if the client takes gzip
    close: bool = False  # end the connection afterwards


class HttpError(DistillError):
    """A request that is answered with an error status."""

    def __init__(
        self,
        status: int,
        text: str,
        *,
        headers: dict[str, str] | None = None,
        close: bool = False,
    ) -> None:
        """`close`: end the connection, because the rest of the body is not read."""
        super().__init__(text)
        self.status = status
        self.headers = headers or {}
        self.close = close


def as_http(error: DistillError) -> HttpError:
    """Return the status, text and headers for an error."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, TeacherBusy):
        headers = {
            "Retry-After": str(math.ceil(error.delay_s)),
            "retry-after-ms": str(int(error.delay_s * 1000)),
        }
        return HttpError(503, str(error), headers=headers)
    if isinstance(error, ModelNotFound):
        return HttpError(404, str(error))
    if isinstance(error, RequestTooLarge):
        return HttpError(413, str(error))
    if isinstance(error, BadRequest):
        return HttpError(400, str(error))
    return HttpError(500, str(error))


def json_response(
    document: object,
    *,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
    close: bool = False,
) -> HttpResponse:
    """Return a response with a JSON document."""
    return HttpResponse(
        status=status,
        headers={"Content-Type": "application/json", **(headers or {})},
        parts=[json.dumps(document, separators=(",", ":")).encode()],
        close=close,
    )


def text_response(
    text: str, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> HttpResponse:
    """Return a response with a line of text."""
    return HttpResponse(
        status=status,
        headers={"Content-Type": "text/plain; charset=utf-8", **(headers or {})},
        parts=[f"{text}\n".encode(errors="replace")],  # it may quote what is not UTF-8
    )


async def send_response(
    request: web.BaseRequest, response: HttpResponse, calls: Calls, limits: FrontLimits
) -> web.StreamResponse:
    """Send a response; return when the client has received it, so that its memory can be reused.

    The connection of a client that takes too long is ended.
    """
    try:
        headers = dict(response.headers)
        body = b"".join(response.parts)  # aiohttp may keep it for longer than `response` is valid
        if response.may_compress and len(body) > _COMPRESS_FROM_BYTES and _takes_gzip(request):
            body = await calls.run(len(body), _gzip, body)
            headers |= {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
        sent = web.Response(status=response.status, headers=headers, body=body)
        if response.close:
            sent.force_close()
        try:
            async with asyncio.timeout(limits.longest_s(len(body))):
                await sent.prepare(request)
                await sent.write_eof()
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
        except ConnectionError:
            pass  # the client has left
        return sent
    finally:
        if response.release is not None:
            response.release()


def _takes_gzip(request: web.BaseRequest) -> bool:
    for part in request.headers.get("Accept-Encoding", "").lower().split(","):
        name, _, quality = part.strip().partition(";")
        if name.strip() == "gzip":
            return quality.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False


def _gzip(body: bytes) -> bytes:
    return zlib.compress(body, _COMPRESS_LEVEL, wbits=31)
