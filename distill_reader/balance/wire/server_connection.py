"""The server's end of a connection: messages within bounds of size and time, and GET requests."""

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from distill_reader.balance.wire.messages import (
    HEAD,
    MAX_REQUEST_BYTES,
    BadFrame,
    body_bytes,
    decode,
    encode,
)
from distill_reader.errors import BadRequest, DistillError

_STALL_S = 5.0  # from the first byte of a message to the last
_GOODBYE_S = 1.0
_MAX_UNSENT_BYTES = 8 << 20  # for a peer that does not read
MAX_HTTP_BYTES = 8 << 10  # of a request's head


class AccessRefused(DistillError):  # noqa: N818 - named by what is the case
    """The peer may not send this message; the connection ends."""


class Stalled(DistillError):  # noqa: N818 - named by what is the case
    """The peer sent or read nothing for too long."""


class ServerConnection:
    """Belongs to one event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._first = b""  # bytes that `first` has read
        peer = writer.get_extra_info("peername")
        self.peer = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else str(peer)

    async def first(self, within_s: float) -> bytes:
        """Return the first four bytes; `receive` reads them again. Raises: Stalled, OSError."""
        with _bound(within_s):
            async with asyncio.timeout(within_s):
                self._first = await self._reader.readexactly(4)
        return self._first

    async def receive(
        self, within_s: float, most_bytes: int = MAX_REQUEST_BYTES
    ) -> Mapping[str, Any] | BadRequest:
        """Return the next message, or an error if it is not valid JSON.

        Args:
            within_s: until its first byte.
            most_bytes: of the message; a longer one ends the connection.

        Raises:
            Stalled: the peer sends nothing, or no message; nothing can be read after that.
            OSError, IncompleteReadError: the connection ended.
        """
        with _bound(within_s):
            if not self._first:
                async with asyncio.timeout(within_s):
                    self._first = await self._reader.readexactly(1)
            async with asyncio.timeout(_STALL_S):
                head = self._first + await self._reader.readexactly(HEAD.size - len(self._first))
                self._first = b""
                try:
                    size = body_bytes(head, most_bytes)
                except BadFrame as error:
                    await self._say_goodbye(str(error))
                    raise Stalled(str(error)) from error
                data = await self._reader.readexactly(size)
        try:
            return decode(data)
        except BadRequest as error:
            return error

    def send(self, body: Mapping[str, Any]) -> None:
        """Send a message. A peer that does not read is dropped."""
        transport = self._writer.transport
        if transport.is_closing():
            return
        if transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
            transport.abort()
            return
        self._writer.write(encode(body))

    async def drain(self) -> None:
        """Wait for some seconds at most until everything is sent."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_STALL_S):
                await self._writer.drain()

    async def _say_goodbye(self, error: str) -> None:
        """Send an error, and read what still comes.

        Unread bytes would reset the connection before the peer has read the error.
        """
        self.send({"type": "error", "error": error})
        await self.drain()
        self._writer.write_eof()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GOODBYE_S):
                while await self._reader.read(1 << 16):
                    pass

    async def http_request(self) -> tuple[str, str]:
        """Return path and bearer token ("": none) of a GET request. Raises: Stalled, OSError."""
        with _bound(_STALL_S):
            async with asyncio.timeout(_STALL_S):
                try:
                    data = self._first + await self._reader.readuntil(b"\r\n\r\n")
                except asyncio.LimitOverrunError as error:
                    raise Stalled("a request's head is too long") from error
        lines = data.decode("latin-1").split("\r\n")
        path = [*lines[0].split(" "), ""][1].partition("?")[0]
        token = ""
        for line in lines[1:]:
            name, _, value = line.partition(":")
            kind, _, secret = value.strip().partition(" ")
            if name.strip().lower() == "authorization" and kind.lower() == "bearer":
                token = secret.strip()
        return path, token

    async def send_http(self, status: str, body: bytes, content_type: str) -> None:
        head = (
            f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self._writer.write(head.encode() + body)
        await self.drain()

    def close(self) -> None:
        self._writer.close()


@contextlib.contextmanager
def _bound(within_s: float) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise Stalled(f"nothing came within {within_s:g} s") from error
