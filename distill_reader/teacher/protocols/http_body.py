"""Read HTTP bodies into the service's memory, so that its bound holds for them too."""

import asyncio
import time
import zlib
from collections.abc import Iterator
from typing import Protocol

from aiohttp import web

from distill_reader.protocols.arena import ALIGNMENT
from distill_reader.teacher.protocols.calls import Calls
from distill_reader.teacher.protocols.http_responses import HttpError
from distill_reader.teacher.protocols.limits import FrontLimits
from distill_reader.teacher.service.requests import Buffer

_FIRST_BYTES = 64 << 10  # first allocated for a body of unknown length; doubled as it grows
_INFLATE_BYTES = 256 << 10  # the size of the pieces in which a body is inflated
_WINDOW_BITS = {"gzip": 31, "deflate": 15}


class Allocate(Protocol):
    def __call__(self, size_bytes: int) -> Buffer: ...


class Body:
    """A body in a buffer of the service."""

    def __init__(self, buffer: Buffer, offset: int, size: int) -> None:
        self.buffer = buffer
        self.offset = offset  # in the buffer, where the body begins
        self.view = buffer.view[offset : offset + size]
        self._is_ours = True

    def hand_over(self) -> None:
        """Give up the buffer to a new owner: `release` does nothing from here on."""
        self._is_ours = False

    def release(self) -> None:
        """Give the buffer back. Further calls do nothing."""
        if self._is_ours:
            self._is_ours = False
            self.buffer.release()


async def read_body(
    request: web.BaseRequest, calls: Calls, limits: FrontLimits, *, aligned_at: int = 0
) -> Body:
    """Return the body of a request, decompressed.

    Args:
        aligned_at: offset of the byte in the body that must have an aligned address.

    Raises:
        HttpError: the body is too long, too slow, incomplete or badly compressed.
        BadRequest, TeacherBusy: of `Service.allocate`.
    """
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("identity", "", *_WINDOW_BITS):
        raise HttpError(415, f"Content-Encoding: {encoding} is not supported; gzip and deflate are")
    length = request.content_length
    if length is not None and length > limits.max_request_bytes:
        raise HttpError(413, _too_long(limits))
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # this is not part of the answer
    is_plain = encoding in ("identity", "")
    if length is None:
        body = await _read_unknown(request, calls, limits)
    else:
        offset = -aligned_at % ALIGNMENT if is_plain else 0
        body = await _read_known(request, calls, limits, length, offset)
    if is_plain:
        return body
    try:
        # Always in a thread: a small body may inflate to a large one.
        return await calls.run(
            limits.max_request_bytes, _inflate, body.view, encoding, calls.service.allocate, limits
        )
    finally:
        body.release()


async def _read_known(
    request: web.BaseRequest, calls: Calls, limits: FrontLimits, length: int, offset: int
) -> Body:
    buffer = calls.service.allocate(offset + length)
    try:
        view = buffer.view[offset:]
        at = 0
        began = time.monotonic()
        while at < length:
            chunk = await _read_chunk(request, limits, began, at)
            if not chunk:
                raise HttpError(400, f"the body ends after {at} of {length} bytes")
            view[at : at + len(chunk)] = chunk
            at += len(chunk)
    except BaseException:
        buffer.release()
        raise
    return Body(buffer, offset, length)


async def _read_unknown(request: web.BaseRequest, calls: Calls, limits: FrontLimits) -> Body:
    growing = _Growing(calls.service.allocate, limits)
    try:
        began = time.monotonic()
        while chunk := await _read_chunk(request, limits, began, growing.size):
            growing.add(chunk)
    except BaseException:
        growing.release()
        raise
    return growing.body()


async def _read_chunk(
    request: web.BaseRequest, limits: FrontLimits, began: float, got_bytes: int
) -> bytes:
    """Return the next bytes; b"" at the end of the body."""
    if limits.is_stalled(time.monotonic() - began, got_bytes):
        raise HttpError(408, f"too slow: only {got_bytes} bytes of the body came", close=True)
    try:
        return await asyncio.wait_for(request.content.readany(), limits.stall_s)
    except TimeoutError:
        raise HttpError(408, f"nothing came after {got_bytes} bytes", close=True) from None
    except (web.RequestPayloadError, ConnectionError) as error:
        raise HttpError(400, f"the body is malformed: {error}", close=True) from error


class _Growing:
    """A buffer of the service that is replaced by one of twice the size when it is full."""

    def __init__(self, allocate: Allocate, limits: FrontLimits) -> None:
        self._allocate = allocate
        self._limits = limits
        self._buffer = allocate(_FIRST_BYTES)
        self.size = 0

    def add(self, chunk: bytes) -> None:
        end = self.size + len(chunk)
        if end > self._limits.max_request_bytes:
            raise HttpError(413, _too_long(self._limits), close=True)
        if end > len(self._buffer.view):
            room = min(max(2 * len(self._buffer.view), end), self._limits.max_request_bytes)
            larger = self._allocate(room)
            larger.view[: self.size] = self._buffer.view[: self.size]
            self._buffer.release()
            self._buffer = larger
        self._buffer.view[self.size : end] = chunk
        self.size = end

    def body(self) -> Body:
        return Body(self._buffer, 0, self.size)

    def release(self) -> None:
        self._buffer.release()


def _inflate(data: memoryview, encoding: str, allocate: Allocate, limits: FrontLimits) -> Body:
    growing = _Growing(allocate, limits)
    try:
        for chunk in _inflated(data, encoding):
            growing.add(chunk)
    except zlib.error as error:
        growing.release()
        raise HttpError(400, f"the body is no {encoding}: {error}") from error
    except BaseException:
        growing.release()
        raise
    return growing.body()


def _inflated(data: memoryview, encoding: str) -> Iterator[bytes]:
    """Inflate `data`; yield the content in bounded pieces. Raises: zlib.error."""
    bits = _WINDOW_BITS[encoding]
    if encoding == "deflate" and len(data) and data[0] & 0x0F != 8:
        bits = -15  # some clients send no zlib header
    while len(data):  # a gzip body may have several members
        inflater = zlib.decompressobj(bits)
        rest: bytes | memoryview = data
        while not inflater.eof:
            chunk = inflater.decompress(rest, _INFLATE_BYTES)
            rest = inflater.unconsumed_tail
            if not chunk and not rest and not inflater.eof:
                raise zlib.error("it ends too early")
            yield chunk
        used = len(data) - len(inflater.unused_data)
        data = data[used:]


def _too_long(limits: FrontLimits) -> str:
    return (
        f"a request may have at most {limits.max_request_bytes} bytes; send fewer samples at a "
        "time, or raise --max_request_mb"
    )
