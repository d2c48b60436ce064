"""What students and teachers have of a connection to a discovery server."""

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

from distill_reader.balance.names import address_of
from distill_reader.balance.wire.messages import HEAD, MAX_ANSWER_BYTES, body_bytes, decode, encode
from distill_reader.errors import BadRequest, Retryable
from distill_reader.tokens import new_nonce, prove, proves

CONNECT_S = 2.0
ANSWER_S = 3.0  # a server that is alive says something within it


class ServerAway(Retryable):
    """Nobody answers there."""


class Line:
    """One connection. Methods raise ServerAway when it has failed, BadRequest for nonsense."""

    def __init__(
        self, endpoint: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.endpoint = endpoint
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, endpoint: str, token: str) -> "Line":
        """Connect; with a token, to a server that has the same: it is not sent.

        Args:
            token: "": there is none.

        Raises:
            ServerAway, BadRequest.
        """
        line = await cls._connect(endpoint)
        try:
            if token:
                await line._prove(token)
        except BaseException:
            await line.close()
            raise
        return line

    @classmethod
    async def _connect(cls, endpoint: str) -> "Line":
        host, port = address_of(endpoint)
        try:
            async with asyncio.timeout(CONNECT_S):
                return cls(endpoint, *await asyncio.open_connection(host, port))
        except (OSError, TimeoutError) as error:
            reason = str(error) or f"no connection within {CONNECT_S:g} s"
            raise ServerAway(f"discovery server {endpoint}: {reason}") from error

    async def _prove(self, token: str) -> None:
        """Have each other prove that they know the token. Raises: ServerAway, BadRequest."""
        own = new_nonce()
        try:
            answer = await self.ask({"type": "meet", "nonce": own})
        except BadRequest as error:
            raise BadRequest(
                f"{error}: it may be of an older release, which wants the token itself: that is "
                "not sent any more, so upgrade the server"
            ) from error
        other = answer.get("nonce")
        if answer.get("type") == "challenge" and isinstance(other, str):
            proof = prove(token, "discovery client", own, other)
            answer = await self.ask({"type": "prove", "proof": proof})
            if proves(answer.get("proof"), token, "discovery server", own, other):
                return
        raise BadRequest(
            f"discovery server {self.endpoint}: does not prove that it knows the token: start it "
            "with EDL_TEACHER_TOKEN as here and without --insecure, or unset that here"
        )

    async def send(self, body: Mapping[str, Any]) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                self._writer.write(encode(body))
                await self._writer.drain()
        except (OSError, TimeoutError) as error:
            raise self._away(error) from error

    async def receive(self, within_s: float = ANSWER_S) -> dict[str, Any]:
        """Return the next message."""
        try:
            async with asyncio.timeout(within_s):
                head = await self._reader.readexactly(HEAD.size)
                data = await self._reader.readexactly(body_bytes(head, MAX_ANSWER_BYTES))
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            raise self._away(error) from error
        return decode(data)

    async def ask(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer. Raises: BadRequest: the server refuses; ServerAway: for now."""
        await self.send(body)
        answer = await self.receive()
        self.check(answer)
        return answer

    def check(self, answer: Mapping[str, Any]) -> None:
        """Raises: BadRequest, ServerAway: it is an error."""
        if answer.get("type") == "error":
            text = f"discovery server {self.endpoint}: {answer.get('error')}"
            raise ServerAway(text) if answer.get("retry") is True else BadRequest(text)

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1.0):
                await self._writer.wait_closed()

    def _away(self, error: Exception) -> ServerAway:
        reason = "it is silent" if isinstance(error, TimeoutError) else "the connection ended"
        return ServerAway(f"discovery server {self.endpoint}: {reason}")
