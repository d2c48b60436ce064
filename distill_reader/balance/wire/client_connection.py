"""The end of students and teachers of a connection to a discovery server."""

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

from distill_reader.balance.addresses import host_port_of
from distill_reader.balance.wire.messages import HEAD, MAX_ANSWER_BYTES, body_bytes, decode, encode
from distill_reader.errors import BadRequest, TransientFailure
from distill_reader.listening import are_apart
from distill_reader.tokens import new_nonce, prove, proves

CONNECT_S = 2.0
ANSWER_S = 3.0  # a server that is alive sends something within it


class DiscoveryUnavailable(TransientFailure):
    """No discovery server answers at this address."""


class ClientConnection:
    """One connection.

    Methods raise DiscoveryUnavailable if it fails, BadRequest if an answer is malformed.
    """

    def __init__(
        self, endpoint: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.endpoint = endpoint
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, endpoint: str, token: str) -> "ClientConnection":
        """Connect, and prove to know the token, which is not sent.

        Args:
            token: "": there is none.

        Raises:
            DiscoveryUnavailable, BadRequest.
        """
        connection = await cls._connect(endpoint)
        try:
            if token:
                await connection._prove(token)
        except BaseException:
            await connection.close()
            raise
        return connection

    @classmethod
    async def _connect(cls, endpoint: str) -> "ClientConnection":
        host, port = host_port_of(endpoint)
        try:
            async with asyncio.timeout(CONNECT_S):
                return cls(endpoint, *await asyncio.open_connection(host, port))
        except (OSError, TimeoutError) as error:
            reason = str(error) or f"no connection within {CONNECT_S:g} s"
            raise DiscoveryUnavailable(f"discovery server {endpoint}: {reason}") from error

    async def _prove(self, token: str) -> None:
        """Prove to the server that we know the token, and check its proof.

        Raises:
            DiscoveryUnavailable, BadRequest.
        """
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

    @property
    def is_elsewhere(self) -> bool:
        """Whether the server is on another host: the two ends have different addresses."""
        own, other = (self._writer.get_extra_info(name) for name in ("sockname", "peername"))
        return bool(own and other) and are_apart(own[0], other[0])

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
        """Send a message and return the answer.

        Raises:
            BadRequest: the server refuses the message.
            DiscoveryUnavailable: the server cannot answer now.
        """
        await self.send(body)
        answer = await self.receive()
        self.check(answer)
        return answer

    def check(self, answer: Mapping[str, Any]) -> None:
        """Raise BadRequest or DiscoveryUnavailable if the answer is an error."""
        if answer.get("type") == "error":
            text = f"discovery server {self.endpoint}: {answer.get('error')}"
            raise DiscoveryUnavailable(text) if answer.get("retry") is True else BadRequest(text)

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1.0):
                await self._writer.wait_closed()

    def _away(self, error: Exception) -> DiscoveryUnavailable:
        reason = "no answer" if isinstance(error, TimeoutError) else "the connection ended"
        return DiscoveryUnavailable(f"discovery server {self.endpoint}: {reason}")
