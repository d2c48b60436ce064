"""What the protocols of HTTP answer with, and how it is sent."""

import asyncio
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from distill_reader.teacher.protocols.calls import Calls
from distill_reader.teacher.protocols.limits import FrontLimits

_COMPRESS_FROM_BYTES = 512  # shorter bodies are not compressed, as in the original
_COMPRESS_LEVEL = 1  # numbers do not get shorter by trying harder


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpResponse:
    """An answer that is not sent yet."""

    status: int = 200
    headers: Mapping[str, str]
    parts: Sequence[Any] = ()  # bytes-like, one after the other
    release: Callable[[], None] | None = None  # called once, when it is sent or given up
    may_compress: bool = False  # if the client takes gzip
    close: bool = False  # end the connection after it


def json_answer(
    document: object,
    *,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
    close: bool = False,
) -> HttpResponse:
    """Return a JSON document as an answer."""
    return HttpResponse(
        status=status,
        headers={"Content-Type": "application/json", **(headers or {})},
        parts=[json.dumps(document, separators=(",", ":")).encode()],
        close=close,
    )


def text_answer(
    text: str, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> HttpResponse:
    """Return a line of text as an answer."""
    return HttpResponse(
        status=status,
        headers={"Content-Type": "text/plain; charset=utf-8", **(headers or {})},
        parts=[f"{text}\n".encode(errors="replace")],  # it may cite what no UTF-8 is
    )


async def send_answer(
    request: web.BaseRequest, answer: HttpResponse, calls: Calls, limits: FrontLimits
) -> web.StreamResponse:
    """Send an answer; return when the client has taken it, so that its memory can be reused.

    A client that takes too long loses its connection.
    """
    try:
        headers = dict(answer.headers)
        body = b"".join(answer.parts)  # the connection may hold it longer than `answer` is valid
        if answer.may_compress and len(body) > _COMPRESS_FROM_BYTES and _takes_gzip(request):
            body = await calls.run(len(body), _gzip, body)
            headers |= {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
        response = web.Response(status=answer.status, headers=headers, body=body)
        if answer.close:
            response.force_close()
        try:
            async with asyncio.timeout(limits.longest_s(len(body))):
                await response.prepare(request)
                await response.write_eof()
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
        except ConnectionError:
            pass  # the client has left: nobody is there to be told
        return response
    finally:
        if answer.release is not None:
            answer.release()


def _takes_gzip(request: web.BaseRequest) -> bool:
    for part in request.headers.get("Accept-Encoding", "").lower().split(","):
        name, _, quality = part.strip().partition(";")
        if name.strip() == "gzip":
            return quality.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False


def _gzip(body: bytes) -> bytes:
    return zlib.compress(body, _COMPRESS_LEVEL, wbits=31)
