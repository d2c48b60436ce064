"""The registry in Redis, shared by several discovery servers, and by students without a server.

    /service/NAME/nodes/ENDPOINT   hash {server, info}, with a lease: the original's, too
    /service/NAME/students/ID      16 digits of its session, then JSON; with a lease
    /service/NAME/table            the version in 16 digits, then JSON
    channel edl:discovery          a message for every change

Key and lease are written in one transaction. A teacher's key without a lease does not count: the
original's registrar leaves one behind if it dies between the two.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import Any

from distill_reader.balance.addresses import RedisAddress, RegistryAddress, is_endpoint, is_name
from distill_reader.balance.registry.registry import STUDENT_LEASE_S, RegistryUnavailable
from distill_reader.balance.table import (
    ServiceState,
    Student,
    Table,
    student_of,
    student_text,
    table_of,
    table_text,
)
from distill_reader.errors import UsageError

logger = logging.getLogger(__name__)

_PREFIX = "/service/"
_CHANNEL = "edl:discovery"
_WRITES = f"{_PREFIX}writes"  # no key: what is written only if it is there, to see if writes pass
# For a command, and to connect: a Redis that hangs must be noticed before leases end that could not
# be renewed.
_TIMEOUT_S = 1.2
_TABLE_LEASE_S = 3600.0  # after the last student of its service has left
_MAX_KEYS = 100_000  # that are read
_SCAN = 1000  # keys per call
_DIGITS = 16
_TURNS = 32  # teachers that are registered at once
_WATCH_PAUSE_S = 0.5
_SAY_S = 10.0  # on the channel: a proxy ends a connection on which nobody says anything for long
_NEEDED = "Redis needs the package redis: pip install 'edl[redis]'"

_PUT_STUDENT = """
local now = redis.call('GET', KEYS[1])
if now and string.sub(now, 1, 16) > ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1] .. ARGV[2], 'PX', ARGV[3])
return 1
"""
_DROP_STUDENT = """
local now = redis.call('GET', KEYS[1])
if not now or string.sub(now, 1, 16) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
"""
_RESTORE_TEACHER = """
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('HSET', KEYS[1], 'server', ARGV[1], 'info', '')
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""
_PUT_TABLE = """
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return 1
"""


class RedisRegistry:
    """A Registry. Several addresses lead to one Redis: one is used until it fails."""

    def __init__(self, addresses: Sequence[RedisAddress]) -> None:
        """Prepare connections. Raises: UsageError: the package redis is missing."""
        try:
            import redis.asyncio  # optional: only needed with Redis
        except ImportError as error:
            raise UsageError(_NEEDED) from error
        self._errors: tuple[type[BaseException], ...] = (redis.RedisError, OSError, TimeoutError)
        self._refused = redis.ResponseError
        self._replica = redis.ReadOnlyError
        self._stranger = redis.AuthenticationError
        self._of_cluster = (
            redis.exceptions.AskError,  # and MovedError
            redis.exceptions.ClusterCrossSlotError,
            redis.exceptions.ClusterDownError,
        )
        self._addresses = tuple(addresses)
        self._clients = [_client(address) for address in addresses]
        self._at = 0
        self._turns = asyncio.Semaphore(_TURNS)
        self._is_cut = False  # `watch` has lost its connection since `services` has looked
        self._raw_tables: dict[str, str] = {}  # texts as they were read; absent: there was none

    async def services(self, own: Collection[str]) -> Mapping[str, ServiceState]:
        """See Registry.

        The tables of `own` are read before the keys. Otherwise a student that is added to both
        between the two reads would be in the table but not among the students, and be dropped. In
        this order the table is at worst too old, and then `put_table` refuses.

        A Redis that can be read and takes no writes is away, for those who write nothing now as
        well: the leases that end there are of teachers who could not renew them. So is, once, one
        that has ended a connection: it may have been started again, with leases that are over.
        """
        names = sorted(own)
        async with self._redis() as client:
            await client.set(_WRITES, "", xx=True)
            texts = await client.mget([_key(name, "table") for name in names]) if names else []
            keys: set[str] = set()  # a scan may return a key twice
            async for key in client.scan_iter(match=f"{_PREFIX}*", count=_SCAN):
                keys.add(key)
                if len(keys) >= _MAX_KEYS:
                    logger.warning("%s has more than %d keys of services", self._name, _MAX_KEYS)
                    break
            found = [parsed for key in sorted(keys) if (parsed := _parse_key(key)) is not None]
            nodes = [each for each in found if each[1] == "nodes"]
            others = [
                each
                for each in found
                if each[1] == "students" or (each[1] == "table" and each[0] not in own)
            ]
            pipe = client.pipeline(transaction=False)
            for service, _, name in nodes:
                pipe.pttl(_key(service, "nodes", name))
            if others:
                pipe.mget([_key(*each) for each in others])
            answers = await pipe.execute() if found else []
        if self._is_cut:
            self._is_cut = False
            raise RegistryUnavailable(f"{self._name}: it has ended a connection")
        values = answers[len(nodes)] if others else []
        return self._services(
            [
                (service, endpoint)
                for (service, _, endpoint), left_ms in zip(nodes, answers, strict=False)
                if left_ms > 0  # else it has no lease, or has gone
            ],
            [
                (*each, value)
                for each, value in [
                    *(((name, "table", ""), text) for name, text in zip(names, texts, strict=True)),
                    *zip(others, values, strict=True),
                ]
                if value
            ],
        )

    async def put_teacher(self, service: str, endpoint: str, info: str, lease_s: float) -> None:
        """See Registry."""
        key = _key(service, "nodes", endpoint)
        async with self._turn(), self._redis() as client:
            pipe = client.pipeline(transaction=True)
            pipe.hset(key, mapping={"server": endpoint, "info": info})
            pipe.pexpire(key, round(lease_s * 1000))
            created, _ = await pipe.execute()
            if created:
                await self._tell(client, service)

    async def drop_teacher(self, service: str, endpoint: str) -> None:
        """See Registry."""
        async with self._turn(), self._redis() as client:
            if await client.delete(_key(service, "nodes", endpoint)):
                await self._tell(client, service)

    async def put_students(
        self, students: Sequence[tuple[str, Student]], *, are_new: bool
    ) -> list[tuple[str, Student]]:
        """See Registry."""
        if not students:
            return []
        lease_ms = round(STUDENT_LEASE_S * 1000)
        async with self._redis() as client:
            pipe = client.pipeline(transaction=False)
            for service, student in students:
                key = _key(service, "students", student.student)
                pipe.eval(
                    _PUT_STUDENT, 1, key, _digits(student.session), student_text(student), lease_ms
                )
            services = sorted({service for service, _ in students})
            for service in services:
                pipe.pexpire(_key(service, "table"), round(_TABLE_LEASE_S * 1000))
            answers = await pipe.execute()
            for service in services if are_new else ():
                await self._tell(client, service)
        return [each for each, is_put in zip(students, answers, strict=False) if not is_put]

    async def drop_student(self, service: str, student: Student) -> None:
        """See Registry."""
        key = _key(service, "students", student.student)
        async with self._redis() as client:
            if await client.eval(_DROP_STUDENT, 1, key, _digits(student.session)):
                await self._tell(client, service)

    async def restore(self, name: str, service: ServiceState, lease_s: float) -> None:
        """See Registry."""
        lease_ms = round(lease_s * 1000)
        async with self._redis() as client:
            pipe = client.pipeline(transaction=False)
            for endpoint in sorted(service.teachers):
                key = _key(name, "nodes", endpoint)
                pipe.eval(_RESTORE_TEACHER, 1, key, endpoint, lease_ms)
            for student in service.students.values():
                key = _key(name, "students", student.student)
                text = _digits(student.session) + student_text(student)
                pipe.set(key, text, px=lease_ms, nx=True)
            await pipe.execute()
            await self._tell(client, name)

    async def put_table(self, service: str, table: Table, before: Table | None) -> bool:
        """See Registry. Compares with what `services` read last, even if that is not a table."""
        text = _digits(table.version) + table_text(table)
        known = self._raw_tables.get(service, "")
        lease_ms = round(_TABLE_LEASE_S * 1000)
        async with self._redis() as client:
            is_put = await client.eval(_PUT_TABLE, 1, _key(service, "table"), known, text, lease_ms)
            if is_put:
                self._raw_tables[service] = text
                await self._tell(client, service)
        return bool(is_put)

    async def watch(self, changed: Callable[[], None]) -> None:
        """See Registry."""
        while True:
            try:
                await self._watch_one(changed)
            except self._refused:
                pass  # by a user of Redis who may use no channel
            except self._errors:
                # Callers of the other methods see the same error, but where they do not ask now.
                self._is_cut = True
                changed()
            except Exception:  # else changes would go unnoticed from here on
                logger.exception("listening for changes in Redis failed; trying again")
            await asyncio.sleep(_WATCH_PAUSE_S)

    async def _watch_one(self, changed: Callable[[], None]) -> None:
        async with self._clients[self._at].pubsub() as channel:
            await channel.subscribe(_CHANNEL)
            at = self._at
            said_s = time.monotonic()
            while at == self._at:
                if await channel.get_message(timeout=1.0) is not None:
                    changed()
                if time.monotonic() - said_s >= _SAY_S:
                    said_s = time.monotonic()
                    await channel.ping()

    async def close(self) -> None:
        """See Registry."""
        for client in self._clients:
            with contextlib.suppress(*self._errors):  # it is over
                await client.aclose()

    # --- helpers

    @property
    def _name(self) -> str:
        return str(self._addresses[self._at])

    async def _tell(self, client: Any, service: str) -> None:
        """Tell others that something is new. They look twice a second by themselves, too."""
        with contextlib.suppress(self._refused):  # by a user of Redis who may use no channel
            await client.publish(_CHANNEL, service)

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Limit how many teachers are registered at once. Raises: RegistryUnavailable."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._turns.acquire()
        except TimeoutError as error:
            raise RegistryUnavailable(f"{self._name}: too many teachers at once") from error
        try:
            yield
        finally:
            self._turns.release()

    @contextlib.asynccontextmanager
    async def _redis(self) -> AsyncIterator[Any]:
        at = self._at
        try:
            yield self._clients[at]
        except self._errors as error:
            if isinstance(error, self._replica):
                # After a failover the address may lead to another Redis, and the one before keeps
                # its connections: only new ones find that out.
                with contextlib.suppress(*self._errors):
                    await self._clients[at].connection_pool.disconnect()
            name = str(self._addresses[at])
            if at == self._at:
                self._at = (at + 1) % len(self._clients)
            raise RegistryUnavailable(f"{name}: {self._meaning(error)}") from error

    def _meaning(self, error: BaseException) -> str:
        """Return the text of an error, with the remedy if there is another than to wait."""
        text = str(error) or type(error).__name__
        if isinstance(error, self._stranger):
            return (
                f"{text}: name the password, as in redis://:PASSWORD@HOST:PORT, or by "
                "--db_passwd_file"
            )
        if isinstance(error, self._of_cluster):
            return f"{text}: Redis Cluster is not supported: name a Redis that is no part of one"
        if "CERTIFICATE_VERIFY_FAILED" in text:
            return f"{text}: SSL_CERT_FILE names a file of certificates to trust"
        return text

    def _services(
        self, nodes: Sequence[tuple[str, str]], values: Sequence[tuple[str, str, str, str]]
    ) -> dict[str, ServiceState]:
        teachers: dict[str, set[str]] = {}
        students: dict[str, dict[str, Student]] = {}
        tables: dict[str, Table | None] = {}
        self._raw_tables.clear()
        for service, endpoint in nodes:
            teachers.setdefault(service, set()).add(endpoint)
        for service, kind, name, value in values:
            number, text = value[:_DIGITS], value[_DIGITS:]
            if kind == "table":
                self._raw_tables[service] = value
                tables[service] = table_of(text)
            elif number.isdecimal():
                student = student_of(name, int(number), text)
                if student is not None:
                    students.setdefault(service, {})[name] = student
        return {
            name: ServiceState(
                teachers=frozenset(teachers.get(name, ())),
                students=students.get(name, {}),
                table=tables.get(name),
            )
            for name in sorted(teachers.keys() | students.keys())
        }


def require_packages(addresses: Sequence[RegistryAddress]) -> None:
    """Check, before anything starts, that the packages for these addresses are installed.

    Raises:
        UsageError: the package redis is missing.
    """
    if any(isinstance(address, RedisAddress) for address in addresses):
        RedisRegistry([])


def _client(address: RedisAddress) -> Any:
    from redis.asyncio import Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    return Redis.from_url(
        address.url,
        decode_responses=True,
        encoding_errors="surrogateescape",  # any bytes that others wrote can be read
        socket_timeout=_TIMEOUT_S,
        socket_connect_timeout=_TIMEOUT_S,
        retry=Retry(NoBackoff(), 0),  # callers retry, and know when it is too late
    )


def _key(service: str, kind: str, name: str = "") -> str:
    return f"{_PREFIX}{service}/{kind}/{name}" if name else f"{_PREFIX}{service}/{kind}"


def _parse_key(key: str) -> tuple[str, str, str] | None:
    """Return service, kind and name ("" for a table); None: the key is not one of ours."""
    service, _, rest = key.removeprefix(_PREFIX).partition("/")
    kind, _, name = rest.partition("/")
    is_ours = (
        (kind == "nodes" and is_endpoint(name))
        or (kind == "students" and is_name(name))
        or (kind == "table" and not name)
    )
    return (service, kind, name) if is_ours and is_name(service) else None


def _digits(number: int) -> str:
    return f"{number:0{_DIGITS}d}"
