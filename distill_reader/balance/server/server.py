"""The discovery server: students (ours and the original's), teachers, and HTTP for people."""

import asyncio
import itertools
import json
import logging
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from distill_reader.balance.registry.registry import Registry, RegistryUnavailable
from distill_reader.balance.server.balancer import Balancer
from distill_reader.balance.server.metrics import DiscoveryMetrics, describe
from distill_reader.balance.table import Student
from distill_reader.balance.tasks import end_tasks, finish
from distill_reader.balance.wire.messages import (
    MAX_REQUEST_BYTES,
    MAX_STRANGERS_BYTES,
    AuthProof,
    AuthStart,
    LegacyHeartbeat,
    LegacyRegister,
    Request,
    StudentJoin,
    StudentLeave,
    StudentReport,
    TeacherHeartbeat,
    TeacherWithdrawal,
    parse,
)
from distill_reader.balance.wire.server_connection import (
    MAX_HTTP_BYTES,
    AccessRefused,
    ServerConnection,
    Stalled,
)
from distill_reader.errors import BadRequest
from distill_reader.listening import OUT_OF, cannot_accept, host_name
from distill_reader.tokens import new_nonce, prove, proves, same_token

logger = logging.getLogger(__name__)

_LOG_EVERY_S = 10.0
_BACKLOG = 1024
# Steps of the event loop until a socket that was just accepted has reached `_accept`. A server that
# is closed earlier would leak the socket.
_ACCEPT_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoveryServerConfig:
    """Which connections a server accepts, and how long it waits for them."""

    token: str = ""  # that clients must prove to know; "": none is needed
    is_open_to_legacy: bool = False  # the original's students carry no token
    max_connections: int = 8192
    first_s: float = 10.0  # until the first message, and until the token is proved
    silent_s: float = 8.0  # our students send a report every 2 s
    legacy_silent_s: float = 15.0
    return_s: float = 2.0  # a student whose connection ended keeps its teachers for so long
    first_list_s: float = 3.0  # the original's student expects its first list as an answer


class DiscoveryServer:
    """Serves the connections of one listening socket. Belongs to one event loop."""

    def __init__(self, registry: Registry, config: DiscoveryServerConfig) -> None:
        self.balancer = Balancer(registry)
        self.metrics = DiscoveryMetrics(self.balancer, lambda: len(self._tasks))
        self._registry = registry
        self._config = config
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count(1)
        self._leaving: dict[tuple[str, str], asyncio.TimerHandle] = {}
        self._logged_s = -_LOG_EVERY_S
        self._is_closing = False

    async def run(self, listener: socket.socket) -> None:
        """Serve until cancelled."""
        asyncio.get_running_loop().set_exception_handler(self._note_unhandled)
        # For asyncio `backlog` is also how often it accepts in a row. Without file descriptors it
        # fails each time, logs that, and has each failure followed by as many tries.
        server = await asyncio.start_server(
            self._accept, sock=listener, backlog=1, limit=MAX_HTTP_BYTES
        )
        listener.listen(_BACKLOG)
        try:
            await self.balancer.run()
        finally:
            self._is_closing = True
            asyncio.get_running_loop().remove_reader(listener)
            try:
                await finish(_step(_ACCEPT_STEPS))
            finally:
                server.close()
                await end_tasks(*self._tasks)

    # --- a connection

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_closing:
            writer.transport.abort()
            return
        if len(self._tasks) >= self._config.max_connections:
            self._log(f"a connection is refused: {len(self._tasks)} are open")
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        connection = ServerConnection(reader, writer)
        try:
            await self._dispatch(connection)
        except (Stalled, OSError, asyncio.IncompleteReadError) as error:
            logger.debug("%s is dropped: %s", connection.peer, error)
        except asyncio.CancelledError:
            if not self._is_closing:
                raise
        finally:
            self._tasks.discard(task)
            connection.close()

    async def _dispatch(self, connection: ServerConnection) -> None:
        """Serve HTTP or the discovery protocol, by the first bytes."""
        first = await connection.first(self._config.first_s)
        if first == b"GET ":
            await self._answer_http(connection)
            return
        session = _Session(self, connection)
        try:
            await session.run()
        finally:
            session.ended()

    async def _answer_http(self, connection: ServerConnection) -> None:
        path, token = await connection.http_request()
        content_type = "application/json"
        if path == "/health":
            status, body = "200 OK", b'{"status":"ok"}'
        elif not self._is_welcome(token):
            status, body = "401 Unauthorized", b'{"error":"Authorization: Bearer TOKEN is wanted"}'
        elif path == "/metrics":
            status, body, content_type = (
                "200 OK",
                self.metrics.text(),
                DiscoveryMetrics.CONTENT_TYPE,
            )
        elif path == "/services":
            status = "200 OK"
            body = json.dumps(describe(self.balancer.view), indent=1).encode() + b"\n"
        else:
            status, body = "404 Not Found", b'{"error":"there is /health, /services, /metrics"}'
        await connection.send_http(status, body, content_type)

    # --- for sessions

    def _is_welcome(self, token: object) -> bool:
        wanted = self._config.token
        return not wanted or same_token(token, wanted)

    def check(self, body: Mapping[str, Any], request: Request) -> None:
        """Check the token that older releases send in their first message.

        Raises:
            AccessRefused: it is missing or wrong.
        """
        if not self._is_welcome(body.get("token")):
            raise AccessRefused(
                "token: this server wants one; set EDL_TEACHER_TOKEN as on the server"
                + (
                    ", or start it with --insecure_legacy"
                    if isinstance(request, LegacyRegister)
                    else ""
                )
            )

    async def answer_teacher(self, request: TeacherHeartbeat | TeacherWithdrawal) -> None:
        """Raises: RegistryUnavailable."""
        if isinstance(request, TeacherHeartbeat):
            await self._registry.put_teacher(
                request.service, request.server, request.info, request.lease_s
            )
        else:
            await self._registry.drop_teacher(request.service, request.server)

    def student_came(self, session: "_Session", service: str, student: Student) -> None:
        timer = self._leaving.pop((service, student.student), None)
        if timer is not None:
            timer.cancel()
        self.balancer.join(service, student, session.notify, session.moved)

    def student_went(self, service: str, student: Student, *, may_return: bool) -> None:
        if not may_return or self._is_closing:  # if closing, it connects to another server
            if not self._is_closing:
                self.balancer.leave(service, student)
            return
        key = service, student.student
        timer = self._leaving.pop(key, None)
        if timer is not None:
            timer.cancel()

        def leave() -> None:
            self._leaving.pop(key, None)
            self.balancer.leave(service, student)

        self._leaving[key] = asyncio.get_running_loop().call_later(self._config.return_s, leave)

    @property
    def config(self) -> DiscoveryServerConfig:
        return self._config

    def legacy_name(self) -> str:
        """Return a unique name for a student of the original, which sends none."""
        return f"legacy-{host_name()[:40]}-{time.time_ns():x}-{next(self._numbers)}"

    def _note_unhandled(self, loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in OUT_OF:
            self._log(cannot_accept(error))
        else:
            loop.default_exception_handler(dict(context))

    def _log(self, text: str) -> None:
        now = time.monotonic()
        if now - self._logged_s >= _LOG_EVERY_S:
            self._logged_s = now
            logger.warning("%s", text)


async def _step(times: int) -> None:
    """Let the event loop run so many steps."""
    for _ in range(times):
        await asyncio.sleep(0)


class _Session:
    """The state of one connection of the discovery protocol."""

    def __init__(self, server: DiscoveryServer, connection: ServerConnection) -> None:
        self._server = server
        self._connection = connection
        self._service = ""
        self._student: Student | None = None  # None: it has not sent that it is a student
        self._is_legacy = False
        self._teachers: tuple[str, ...] = ()  # the last list
        self._version = 0  # of `_teachers`
        self._listed = asyncio.Event()  # the first list has come
        self._is_known = not server.config.token  # it has shown or proved the token
        self._nonces: tuple[str, str] | None = None  # its and ours; None: it has not sent one
        self._is_over = False

    async def run(self) -> None:
        config = self._server.config
        silent_s, most_bytes = config.first_s, MAX_STRANGERS_BYTES
        until_s = time.monotonic() + config.first_s  # for a stranger to prove that he is none
        while not self._is_over:
            if self._is_known:
                most_bytes = MAX_REQUEST_BYTES
            elif self._student is None:
                silent_s = until_s - time.monotonic()
            body = await self._connection.receive(silent_s, most_bytes)
            kind, outcome = "?", "refused"  # unknown types must not become labels of a counter
            answer: Mapping[str, Any]
            try:
                if isinstance(body, BadRequest):
                    raise body
                request = parse(body)
                kind = str(body["type"])
                self._check(body, request)
                answer, outcome = await self._answer(request), "ok"
            except (BadRequest, AccessRefused, RegistryUnavailable) as error:
                is_away = isinstance(error, RegistryUnavailable)
                # Each teacher asks twice a second meanwhile, and the balancer says it now and then.
                level = logging.DEBUG if is_away else logging.INFO
                logger.log(level, "%s: refused: %s", self._connection.peer, error)
                answer = {"type": "error", "error": str(error)}
                if is_away:
                    answer = {**answer, "retry": True}
                self._is_over |= isinstance(error, AccessRefused)
            self._server.metrics.answered(kind, outcome)
            self._connection.send(answer)
            silent_s = config.legacy_silent_s if self._is_legacy else config.silent_s
        await self._connection.drain()

    def ended(self) -> None:
        """Note that the connection has ended."""
        self._is_over = True
        if self._student is not None:
            self._server.student_went(self._service, self._student, may_return=not self._is_legacy)

    def notify(self, teachers: tuple[str, ...]) -> None:
        """Store a new list. Our students get it at once, the original's when they ask."""
        self._teachers = teachers
        self._version += self._listed.is_set()
        self._listed.set()
        if not self._is_legacy and not self._is_over:
            self._connection.send(
                {"type": "teachers", "teachers": teachers, "version": self._version}
            )

    def moved(self) -> None:
        """Close the connection: the student has connected to another server."""
        self._student = None
        self._connection.close()

    # --- answers

    def _check(self, body: Mapping[str, Any], request: Request) -> None:
        """Check that this connection may send this message.

        The original's students may register, send heartbeats and leave without a token, if the
        server is open to them. Any other message needs the token.

        Raises:
            AccessRefused: it may not.
        """
        if self._is_known or isinstance(request, AuthStart | AuthProof):
            return
        is_legacy = isinstance(request, LegacyRegister) or (
            self._is_legacy and isinstance(request, LegacyHeartbeat | StudentLeave)
        )
        if not (is_legacy and self._server.config.is_open_to_legacy):
            self._server.check(body, request)
            self._is_known = True

    def _meet(self, request: AuthStart) -> Mapping[str, Any]:
        if not self._server.config.token:
            return {"type": "ok"}
        self._nonces = request.nonce, new_nonce()
        return {"type": "challenge", "nonce": self._nonces[1]}

    def _prove(self, request: AuthProof) -> Mapping[str, Any]:
        token, nonces, self._nonces = self._server.config.token, self._nonces, None
        if nonces is None:
            raise BadRequest("prove: expected once, after meet")
        if not proves(request.proof, token, "discovery client", *nonces):
            raise AccessRefused(
                "token: this server has another one; set EDL_TEACHER_TOKEN as there"
            )
        self._is_known = True
        return {"type": "ok", "proof": prove(token, "discovery server", *nonces)}

    async def _answer(self, request: Request) -> Mapping[str, Any]:
        if isinstance(request, AuthStart):
            return self._meet(request)
        if isinstance(request, AuthProof):
            return self._prove(request)
        if isinstance(request, TeacherHeartbeat | TeacherWithdrawal):
            await self._server.answer_teacher(request)
            return {"type": "ok"}
        if isinstance(request, LegacyRegister):
            return await self._answer_register(request)
        if isinstance(request, StudentJoin):
            self._come(request.service, request.student)
            return {"type": "ok"}
        if self._student is None:
            raise BadRequest("this connection is not that of a student: register first")
        if isinstance(request, LegacyHeartbeat):
            if request.version >= self._version:
                return {"type": "heartbeat"}
            return {
                "type": "servers_change",
                "servers": self._teachers,
                "version": self._version,
            }
        if isinstance(request, StudentLeave):
            self._server.student_went(self._service, self._student, may_return=False)
            self._student, self._is_over = None, True
            return {"type": "ok"}
        self._report(self._student, request)
        # A student that lacks a teacher then asks another server.
        is_away = self._server.balancer.view.away is not None
        return {"type": "ok", "away": True} if is_away else {"type": "ok"}

    async def _answer_register(self, request: LegacyRegister) -> Mapping[str, Any]:
        self._is_legacy = True
        name = self._server.legacy_name()
        self._come(request.service, Student(student=name, session=1, require=request.num))
        with suppress(TimeoutError):  # it gets an empty list now, and the next one by heartbeat
            async with asyncio.timeout(self._server.config.first_list_s):
                await self._listed.wait()
        self._listed.set()  # from now on every list is a change
        return {
            "type": "register",
            "seq": request.seq + 1,
            "servers": self._teachers,
            "num": len(self._teachers),
        }

    def _come(self, service: str, student: Student) -> None:
        if self._student is not None:
            raise BadRequest(
                f"this connection is already that of student {self._student.student} of "
                f"service {self._service}: open another one"
            )
        self._service, self._student = service, student
        self._server.student_came(self, service, student)

    def _report(self, student: Student, request: StudentReport) -> None:
        self._student = replace(
            student,
            require=request.require,
            wait_share=request.wait_share,
            samples_per_s=request.samples_per_s,
            measured=request.measured,
            unusable=request.unusable,
        )
        self._server.balancer.update(self._service, self._student)
