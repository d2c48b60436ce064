"""A student of discovery: a thread that keeps the list of the student's teachers up to date.

It tries all given addresses in turn, and keeps the last list while none of them answers. It never
raises into, or ends, the program that it runs in.
"""

import asyncio
import contextlib
import logging
import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from distill_reader.backoff import backoff_s
from distill_reader.balance.addresses import (
    DiscoveryAddress,
    RedisAddress,
    RegistryAddress,
    host_port_of,
    is_endpoint,
)
from distill_reader.balance.registry.redis_registry import RedisRegistry
from distill_reader.balance.server.balancer import Balancer
from distill_reader.balance.table import Measured, Student
from distill_reader.balance.tasks import end_tasks, finish, run
from distill_reader.balance.wire.client_connection import (
    ANSWER_S,
    CONNECT_S,
    ClientConnection,
    DiscoveryUnavailable,
)
from distill_reader.balance.wire.messages import (
    REPORT_S,
    join_body,
    report_body,
)
from distill_reader.errors import BadRequest, DistillError, TransientFailure, UsageError
from distill_reader.listening import are_apart, host_name, is_loopback

logger = logging.getLogger(__name__)

_RETRY_S = (0.1, 1.0)  # from the first failure to the tenth
_REFUSED_RETRY_S = 5.0
_DEFECT_RETRY_S = 5.0
_LOG_EVERY_S = 10.0
_GIVE_UP_S = 3.0  # on a Redis, if there are other addresses
_LEAVE_S = 1.0
_STOP_S = 2.0
_LEAST_OUT_S, _MOST_OUT_S = 30.0, 600.0  # for which a teacher counts as unusable

Notify = Callable[[Sequence[str]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedStats:
    """How well teachers have fed a student in the last seconds."""

    wait_share: float | None = None  # None: it does not read now
    samples_per_s: float | None = None
    measured: Mapping[str, Measured] = field(default_factory=dict)
    unusable: Sequence[str] = ()  # teachers that it was assigned and that do not answer it


class UnusableTeachers:
    """Remembers for some time which teachers did not answer a student. Pure.

    It cannot learn anything new of a teacher while it does not have it. A teacher that does not
    answer again soon afterwards is remembered for twice as long.
    """

    def __init__(self) -> None:
        self._until_s: dict[str, tuple[float, float]] = {}  # teacher -> end, and how long in all

    def note(self, teachers: Collection[str], now: float) -> tuple[str, ...]:
        """Note the teachers that do not answer now; return all that count as unusable."""
        for teacher in teachers:
            until_s, last_s = self._until_s.get(teacher, (now, _LEAST_OUT_S / 2))
            if now >= until_s:
                out_s = min(2 * last_s, _MOST_OUT_S)
                self._until_s[teacher] = now + out_s, out_s
        self._until_s = {
            teacher: (until_s, out_s)
            for teacher, (until_s, out_s) in self._until_s.items()
            if now < until_s + 2 * out_s
        }
        return tuple(sorted(each for each, (until_s, _) in self._until_s.items() if now < until_s))


class StudentClient:
    """One student of one service. Any thread may use it; start and stop it once."""

    def __init__(
        self,
        addresses: Sequence[RegistryAddress],
        service: str,
        *,
        require: int,
        read_token: Callable[[], str],
        notify: Notify,
        feed_stats: Callable[[], FeedStats],
        held: Sequence[str] = (),
    ) -> None:
        """
        Args:
            addresses: of discovery servers or of Redis, in no order.
            require: the most teachers wanted.
            read_token: called for each connection; returns the token by now, "": none. May raise a
                UsageError.
            notify: called by the client's thread with all teachers, whenever they change.
            feed_stats: called every 2 s.
            held: teachers that it had when it was a student before.
        """
        self._addresses = list(addresses)
        random.shuffle(self._addresses)  # students spread over the servers
        self._service = service
        self._require = require
        self._read_token = read_token
        self._notify = notify
        self._feed_stats = feed_stats
        self._name = student_name()
        self._session = 0
        self._held = tuple(held)
        self._unusable = UnusableTeachers()
        self._told_unusable: tuple[str, ...] = ()  # by the last report
        self._astray: tuple[str, ...] = ()  # of the last list: those of other hosts' loopback
        self._has_heard = bool(held)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        self._report_now = asyncio.Event()
        self._is_stopped = False
        self._lock = threading.Lock()
        self._logged_s = -_LOG_EVERY_S
        self.trouble = f"service {service}: nobody has told its teachers yet"  # "": it has some
        self._thread = threading.Thread(target=self._run, name="edl-discovery", daemon=True)

    @property
    def held(self) -> tuple[str, ...]:
        """The last list."""
        return self._held

    def set_require(self, require: int) -> None:
        """Ask for so many teachers from now on."""
        if require != self._require:
            self._require = require
            self._call(self._report_now.set)

    def start(self) -> None:
        self._thread.start()

    def notify_again(self) -> None:
        """Call `notify` again with the last list, in the client's thread, if there is one."""
        if self._has_heard:
            self._call(lambda: self._notify(self._held))

    def stop(self, *, wait: bool = True) -> None:
        """Leave the service.

        Args:
            wait: until the server knows, for some seconds at most.
        """
        self._is_stopped = True
        self._call(self._stopping.set)
        if wait and self._thread.ident is not None:
            self._thread.join(_STOP_S)

    def _call(self, function: Callable[[], object]) -> None:
        """Call a function in the thread's event loop, if that runs."""
        with self._lock:
            if self._loop is not None:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    self._loop.call_soon_threadsafe(function)

    # --- the thread

    def _run(self) -> None:
        run(self._work_until_stopped())

    async def _work_until_stopped(self) -> None:
        with self._lock:
            if self._is_stopped:
                return
            self._loop = asyncio.get_running_loop()
        if self._has_heard:
            self._notify(self._held)
        visiting = asyncio.create_task(self.work())
        await self._stopping.wait()
        await end_tasks(visiting)

    async def work(self) -> None:
        """Be a student until cancelled. The thread runs this; so can a caller's own event loop."""
        failures = 0
        while True:
            for address in self._addresses:
                began_s = time.monotonic()
                try:
                    await self._visit(address)
                except DistillError as error:
                    self._note(error)
                    delay_s = 0.0 if isinstance(error, TransientFailure) else _REFUSED_RETRY_S
                except Exception:
                    # The outermost loop: a defect here must end neither training nor discovery.
                    logger.exception("looking for teachers failed; trying again")
                    delay_s = _DEFECT_RETRY_S
                failures = 0 if time.monotonic() - began_s > _GIVE_UP_S else failures + 1
                if failures >= len(self._addresses) or delay_s:
                    first_s, most_s = _RETRY_S
                    delay_s = max(delay_s, backoff_s(failures, first_s, most_s))
                await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))

    async def _visit(self, address: RegistryAddress) -> None:
        """Be a student at this address until it fails. Raises: DistillError."""
        self._session += 1
        if isinstance(address, DiscoveryAddress):
            await self._visit_server(address)
        else:
            await self._visit_redis(address)

    def _take(self, teachers: Sequence[str], *, is_elsewhere: bool = False) -> None:
        """Use these teachers from now on.

        Args:
            is_elsewhere: the registry is on another host. A teacher that is registered there by the
                loopback address would be, on this host, any other server.
        """
        astray = [each for each in teachers if is_elsewhere and is_loopback(host_port_of(each)[0])]
        listed = tuple(each for each in teachers if each not in astray)
        if listed != self._held:
            logger.info("service %s: teachers are now %s", self._service, ", ".join(listed) or "-")
        self._held, self._has_heard, self._astray = listed, True, tuple(astray)
        self.trouble = "" if listed else f"service {self._service} has no teacher"
        if astray:
            self._note(
                UsageError(
                    f"{', '.join(astray)}: the registry is on another host, and has a teacher by "
                    "an address that is each host's own: start that with --bind or --advertise, or "
                    "register it by an address that students can reach"
                )
            )
            self._report_now.set()
        self._notify(listed)

    def _note(self, error: DistillError) -> None:
        self.trouble = f"service {self._service}: {error}"
        now = time.monotonic()
        if now - self._logged_s >= _LOG_EVERY_S:
            self._logged_s = now
            have = f"; going on with {', '.join(self._held)}" if self._held else ""
            logger.warning("service %s: %s%s", self._service, error, have)

    # --- by a discovery server

    async def _visit_server(self, address: DiscoveryAddress) -> None:
        connection = await ClientConnection.connect(address.endpoint, self._read_token())
        try:
            await connection.send(join_body(self._service, self._student()))
            reporting = asyncio.create_task(self._report(connection))
            try:
                await self._listen(connection)
            finally:
                await end_tasks(reporting)
        except asyncio.CancelledError:
            with contextlib.suppress(DistillError, TimeoutError):
                await finish(self._leave(connection))
            raise
        finally:
            await connection.close()

    @staticmethod
    async def _leave(connection: ClientConnection) -> None:
        async with asyncio.timeout(_LEAVE_S):
            await connection.send({"type": "leave"})
            while (await connection.receive()).get("type") == "teachers":
                pass

    async def _listen(self, connection: ClientConnection) -> None:
        while True:
            answer = await connection.receive(REPORT_S + ANSWER_S)  # it answers every report
            connection.check(answer)
            if answer.get("type") == "teachers":
                teachers = answer.get("teachers")
                if not isinstance(teachers, list) or not all(map(is_endpoint, teachers)):
                    raise BadRequest(
                        f"discovery server {connection.endpoint}: sent no list of teachers"
                    )
                self._take(teachers, is_elsewhere=connection.is_elsewhere)
            elif answer.get("away") is True and self._is_stranded:
                raise DiscoveryUnavailable(
                    f"discovery server {connection.endpoint}: its registry is away"
                )

    @property
    def _is_stranded(self) -> bool:
        """Whether it has no teacher that answers, and another server may know one."""
        return len(self._addresses) > 1 and set(self._held) <= set(self._told_unusable)

    async def _report(self, connection: ClientConnection) -> None:
        while True:
            await self._pause()
            await connection.send(report_body(self._student()))

    async def _pause(self) -> None:
        """Wait until it is time for a report."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REPORT_S):
                await self._report_now.wait()
        self._report_now.clear()

    # --- by Redis without a server: the student does for itself what a server would do

    async def _visit_redis(self, address: RedisAddress) -> None:
        registry = RedisRegistry([address])
        balancer = Balancer(registry)
        student = self._student()
        take = partial(self._take, is_elsewhere=await _is_elsewhere(address))
        balancer.join(self._service, student, take, lambda: None)
        working = asyncio.create_task(
            balancer.run(_GIVE_UP_S if len(self._addresses) > 1 else None), name="balancer"
        )
        try:
            while not working.done():
                pausing = asyncio.create_task(self._pause())
                await asyncio.wait((working, pausing), return_when=asyncio.FIRST_COMPLETED)
                pausing.cancel()
                if balancer.view.away is not None and not self._held:
                    self.trouble = f"service {self._service}: {balancer.view.away}"
                balancer.update(self._service, self._student())
            await working
        except asyncio.CancelledError:
            with contextlib.suppress(DistillError, TimeoutError):
                await finish(self._drop(registry, student))
            raise
        finally:
            try:
                await end_tasks(working)
            finally:
                await finish(registry.close())
        raise DiscoveryUnavailable(f"{address}: gone")

    async def _drop(self, registry: RedisRegistry, student: Student) -> None:
        async with asyncio.timeout(_LEAVE_S):
            await registry.drop_student(self._service, student)

    def _student(self) -> Student:
        feed_stats = self._feed_stats()
        silent = (*feed_stats.unusable, *self._astray)
        self._told_unusable = self._unusable.note(silent, time.monotonic())
        return Student(
            student=self._name,
            session=self._session,
            require=self._require,
            held=self._held,
            wait_share=feed_stats.wait_share,
            samples_per_s=feed_stats.samples_per_s,
            measured=feed_stats.measured,
            unusable=self._told_unusable,
        )


async def _is_elsewhere(address: RedisAddress) -> bool:
    """Return whether a Redis is on another host, as far as that can be told. Sends nothing."""
    host, port = address.host_port
    with contextlib.suppress(OSError, TimeoutError, UnicodeError, RuntimeError):
        async with asyncio.timeout(CONNECT_S):
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        family, kind, _, _, there = found[0]
        with socket.socket(family, kind) as probe:
            probe.connect(there)
            return are_apart(probe.getsockname()[0], str(there[0]))
    return False


def student_name() -> str:
    """Return a unique name that tells people which process it is."""
    return f"s-{host_name()[:60]}-{os.getpid()}-{secrets.token_hex(4)}"
