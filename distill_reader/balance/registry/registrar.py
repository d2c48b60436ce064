"""Keep a teacher registered while it is up, through all outages of the registry."""

import asyncio
import contextlib
import logging
import random
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from distill_reader.balance.addresses import (
    DiscoveryAddress,
    RedisAddress,
    RegistryAddress,
    host_port_of,
    path_of,
)
from distill_reader.balance.registry.redis_registry import RedisRegistry
from distill_reader.balance.tasks import end_tasks, finish, run
from distill_reader.balance.wire.client_connection import ClientConnection, DiscoveryUnavailable
from distill_reader.balance.wire.messages import TeacherHeartbeat, heartbeat_body, withdrawal_body
from distill_reader.errors import BadRequest, DistillError, UsageError
from distill_reader.listening import bracketed
from distill_reader.protocols import gateways
from distill_reader.tls import client_context, meaning_of

logger = logging.getLogger(__name__)

LEASE_S = 2.5  # a teacher that dies together with its registrar is off the lists after it
_BEATS = 5  # heartbeats within a lease
_ANSWER_S = 1.0  # short enough to try another address before the lease ends
_RETRY_S = 0.5
_REFUSED_RETRY_S = 5.0
_LOG_EVERY_S = 10.0
_PROBE_S = 1.0
_WITHDRAW_S = 1.5
_SAYING = (200, 400, 503)  # HTTP statuses of a teacher that reports whether it is ready
_ANOTHER = 20  # probes in a row without an answer: it may be another teacher, which does not report
_NO_HTTP = 3  # probes in a row without an answer, of a teacher that has never given one
# Addresses that a server listens on and no client connects to, and the families that reach it.
_EVERYWHERE = {"0.0.0.0": socket.AF_INET, "::": socket.AF_UNSPEC}
_RESTART_S = 2.0  # a teacher that is not ready for less may just restart a predictor


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrarConfig:
    addresses: tuple[RegistryAddress, ...]  # ways to one registry: the first that answers is used
    service: str
    server: str  # the teacher's endpoint; 0.0.0.0 or [::]: this host, as the registry sees it
    read_token: Callable[[], str] = lambda: ""  # for discovery servers; for each connection anew
    lease_s: float = LEASE_S
    info: str = ""


class RegistryLink(Protocol):
    """A connection to a registry. Methods raise DistillError."""

    async def heartbeat(self) -> None: ...
    async def withdraw(self) -> None: ...
    async def close(self) -> None: ...


def open_link(address: RegistryAddress, config: RegistrarConfig) -> RegistryLink:
    """Return a link, which connects with its first message. Raises: UsageError."""
    if isinstance(address, DiscoveryAddress):
        return _DiscoveryLink(address, config)
    return _RedisLink(address, config)


class Registrar:
    """Registers one teacher, at one address at a time. Belongs to one event loop."""

    def __init__(
        self,
        config: RegistrarConfig,
        is_alive: Callable[[], Awaitable[bool]],
        open_link: Callable[[RegistryAddress, RegistrarConfig], RegistryLink] = open_link,
    ) -> None:
        """
        Args:
            is_alive: whether the teacher is up.
        """
        self._config = config
        self._is_alive = is_alive
        self._open_link = open_link
        self._links: dict[RegistryAddress, RegistryLink] = {}
        self._at = random.randrange(len(config.addresses))  # teachers spread over the servers
        self._failures = 0  # in a row
        self._is_registered = False
        self._trouble_logged_s = -_LOG_EVERY_S

    @property
    def is_registered(self) -> bool:
        """Whether the last message to the registry has registered the teacher."""
        return self._is_registered

    async def run(self) -> None:
        """Run until cancelled; then withdraw."""
        try:
            while True:
                try:
                    pause_s = await self._step()
                except Exception:  # if this loop ended, the teacher would never come back
                    logger.exception("registering failed; trying again")
                    pause_s = _RETRY_S
                await asyncio.sleep(pause_s)
        finally:
            await finish(self._end())

    async def _step(self) -> float:
        """Do what is due; return seconds until the next call."""
        # However long the lease is: a teacher that is gone is to be noticed as soon as any other.
        period_s = min(self._config.lease_s, LEASE_S) / _BEATS
        is_alive = await self._is_alive()
        address = self._config.addresses[self._at]
        try:
            async with asyncio.timeout(_ANSWER_S):
                if is_alive:
                    await self._link(address).heartbeat()
                elif self._is_registered:
                    await self._link(address).withdraw()
        except Exception as error:  # noqa: BLE001
            # If this loop ended, the teacher would never come back.
            await self._note(error, address)
            self._at = (self._at + 1) % len(self._config.addresses)
            self._failures += 1
            if self._failures < len(self._config.addresses):
                return 0.0  # another address may answer before the lease ends
            retry_s = _REFUSED_RETRY_S if isinstance(error, BadRequest) else _RETRY_S
            return retry_s * random.uniform(0.5, 1.5)
        self._failures = 0
        if is_alive != self._is_registered:
            logger.log(
                logging.INFO if is_alive else logging.WARNING,
                "teacher %s %s service %s at %s",
                self._config.server,
                "is registered with" if is_alive else "does not answer: withdrawn from",
                self._config.service,
                address,
            )
            self._is_registered = is_alive
        return period_s

    async def _note(self, error: Exception, address: RegistryAddress) -> None:
        if isinstance(error, TimeoutError):
            error = DiscoveryUnavailable(f"{address}: no answer")
        if not isinstance(error, DistillError):
            logger.error("registering failed", exc_info=error)
        elif self._is_registered or time.monotonic() - self._trouble_logged_s >= _LOG_EVERY_S:
            self._trouble_logged_s = time.monotonic()
            logger.warning("teacher %s cannot be registered now: %s", self._config.server, error)
        self._is_registered = False
        link = self._links.get(address)
        if link is not None:
            await link.close()
            del self._links[address]

    def _link(self, address: RegistryAddress) -> RegistryLink:
        link = self._links.get(address)
        if link is None:
            link = self._links[address] = self._open_link(address, self._config)
        return link

    async def _end(self) -> None:
        address = self._config.addresses[self._at]
        try:
            with contextlib.suppress(DistillError, TimeoutError):  # its lease ends by itself
                async with asyncio.timeout(_WITHDRAW_S):
                    if self._is_registered:
                        await self._link(address).withdraw()
                        logger.info("teacher %s is withdrawn", self._config.server)
        finally:
            for link in self._links.values():
                await link.close()


class Readiness:
    """Decides from a teacher's own reports whether it is registered. Tolerates a short restart."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ready_s = -_RESTART_S  # when it was ready last

    def note(self, is_ready: bool) -> bool:
        """Note a report; return whether the teacher should be registered."""
        now = self._clock()
        if is_ready:
            self._ready_s = now
        return now - self._ready_s < _RESTART_S


class PortProbe:
    """Probes a teacher: its port must accept connections, and it must not report to be unready.

    Teachers that speak the Open Inference Protocol by HTTP report that; others are not asked again.
    """

    def __init__(self, server: str, *, ca_file: str | None = None) -> None:
        """
        Args:
            server: its endpoint; of `https://` and `grpcs://` the certificate is checked.
            ca_file: certificates in PEM to check against; None: those of the system.

        Raises:
            UsageError: the file is wrong.
        """
        self._server = server
        self._address = host_port_of(server)
        self._path = path_of(server)
        self._may_say = not server.startswith(("grpc://", "grpcs://", "serving"))
        is_tls = server.startswith(("https://", "grpcs://"))
        self._ca_file = ca_file
        self._context = client_context(ca_file) if is_tls else None
        self._logged_s = -_LOG_EVERY_S
        self._says: bool | None = None  # None: not asked since it began to listen
        self._silent = 0  # probes in a row without any answer
        self._readiness = Readiness()

    async def __call__(self) -> bool:
        try:
            async with asyncio.timeout(_PROBE_S):
                reader, writer = await asyncio.open_connection(*self._address, ssl=self._context)
        except TimeoutError:
            return self._is_slow()
        except OSError as error:
            self._note(error)
            self._says = None
            return False
        try:
            status = await self._ask(reader, writer) if self._is_asked else 0
        except TimeoutError:
            if self._says:
                return self._is_slow()
            self._silent += 1
            if self._silent < _NO_HTTP:  # it may be loading its model: not before it is known
                return False
            status = 0
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        if self._says and status not in _SAYING:  # it reports, but is overloaded or about to end
            return self._is_slow()
        self._silent = 0
        if status in gateways.UNREACHED | gateways.TIMED_OUT:  # what is behind it may say it yet
            return False
        self._says = status in _SAYING
        return self._readiness.note(status == 200) if self._says else True

    @property
    def _is_asked(self) -> bool:
        return self._may_say and self._says is not False

    def _note(self, error: OSError) -> None:
        """Log what is wrong with a certificate, and trust the file as it is by now."""
        wrong = meaning_of(error, self._address[0], self._server)
        if wrong is None:
            return
        with contextlib.suppress(UsageError):  # it is about to be written
            self._context = client_context(self._ca_file)
        if time.monotonic() - self._logged_s >= _LOG_EVERY_S:
            self._logged_s = time.monotonic()
            logger.warning("not registered: %s", wrong)

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        """Return the HTTP status of the answer; 0: it is not HTTP. Raises: TimeoutError."""
        try:
            async with asyncio.timeout(_PROBE_S):
                host = bracketed(self._address[0])
                head = f"GET {self._path}/v2/health/ready HTTP/1.1\r\nHost: {host}\r\n"
                writer.write(f"{head}Connection: close\r\n\r\n".encode())
                version, status, *_ = [*(await reader.readline()).split(), b"", b""]
        except TimeoutError:
            raise
        except (OSError, ValueError):  # the connection ended, or a line is too long
            return 0
        return int(status) if version.startswith(b"HTTP/1.") and status.isdigit() else 0

    def _is_slow(self) -> bool:
        self._silent += 1
        if self._silent >= _ANOTHER:
            self._says = None
        return self._silent < 2  # a busy host may be slow once


class _DiscoveryLink:
    def __init__(self, address: DiscoveryAddress, config: RegistrarConfig) -> None:
        self._address = address
        self._config = config
        self._connection: ClientConnection | None = None  # None: not connected

    async def heartbeat(self) -> None:
        config = self._config
        heartbeat = TeacherHeartbeat(
            service=config.service, server=config.server, lease_s=config.lease_s, info=config.info
        )
        await (await self._connected()).ask(heartbeat_body(heartbeat))

    async def withdraw(self) -> None:
        config = self._config
        connection = await self._connected()
        await connection.ask(withdrawal_body(config.service, config.server))

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()

    async def _connected(self) -> ClientConnection:
        if self._connection is None:
            self._connection = await ClientConnection.connect(
                self._address.endpoint, self._config.read_token()
            )
        return self._connection


class _RedisLink:
    def __init__(self, address: RedisAddress, config: RegistrarConfig) -> None:
        self._config = config
        self._registry = RedisRegistry([address])

    async def heartbeat(self) -> None:
        config = self._config
        await self._registry.put_teacher(config.service, config.server, config.info, config.lease_s)

    async def withdraw(self) -> None:
        await self._registry.drop_teacher(self._config.service, self._config.server)

    async def close(self) -> None:
        await self._registry.close()


async def register_until(
    config: RegistrarConfig, stopping: asyncio.Event, is_alive: Callable[[], Awaitable[bool]]
) -> None:
    """Keep a teacher registered until `stopping` is set, then withdraw it.

    Args:
        is_alive: whether it is up; called before each heartbeat.
    """
    task = asyncio.create_task(_register(config, is_alive))
    await stopping.wait()
    await end_tasks(task)


async def _register(config: RegistrarConfig, is_alive: Callable[[], Awaitable[bool]]) -> None:
    host, port = host_port_of(config.server)
    if host in _EVERYWHERE:
        own = bracketed(await _own_address(config.addresses, _EVERYWHERE[host]))
        written = f"{bracketed(host)}:{port}"  # scheme and model stand around it
        config = replace(config, server=config.server.replace(written, f"{own}:{port}", 1))
    await Registrar(config, is_alive).run()


class RegistrarThread:
    """Registers a teacher from a thread of its own process."""

    def __init__(self, config: RegistrarConfig, is_ready: Callable[[], bool]) -> None:
        """
        Args:
            is_ready: whether the teacher can answer; called in this thread. A teacher that cannot
                is withdrawn, and registered again when it can.
        """
        self.server = config.server
        self._config = config
        self._is_ready = is_ready
        self._readiness = Readiness()
        self._lock = threading.Lock()
        self._is_stopped = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="registrar", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Withdraw, and wait for that for some seconds at most.

        Has no effect before `start`, or if called again.
        """
        with self._lock:
            self._is_stopped = True
            if self._loop is not None and self._stopping is not None:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    self._loop.call_soon_threadsafe(self._stopping.set)
        if self._thread.ident is not None:
            self._thread.join(2 * _WITHDRAW_S)

    def _run(self) -> None:
        run(self._work())

    async def _work(self) -> None:
        with self._lock:
            if self._is_stopped:
                return
            self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        await register_until(self._config, self._stopping, self._is_alive)

    async def _is_alive(self) -> bool:
        return self._readiness.note(self._is_ready())


async def _own_address(addresses: Sequence[RegistryAddress], family: socket.AddressFamily) -> str:
    """Return the address of this host as a registry sees it. Sends nothing.

    Waits until a registry has a name, and this host a network: in containers, names come later.
    """
    logged_s = -_LOG_EVERY_S
    while True:
        reasons: list[str] = []
        for address in addresses:
            try:
                return await _address_towards(*address.host_port, family)
            # A host that no name server can have, or no thread to ask one.
            except (OSError, UnicodeError, RuntimeError) as error:
                reasons.append(f"{address}: {error}")
        if time.monotonic() - logged_s >= _LOG_EVERY_S:
            logged_s = time.monotonic()
            logger.warning(
                "the teacher is not registered yet: no address of this host is known at %s; "
                "trying again; --advertise HOST names one",
                ", ".join(reasons),
            )
        await asyncio.sleep(_RETRY_S)


async def _address_towards(host: str, port: int, family: socket.AddressFamily) -> str:
    """Raises: OSError: the name is unknown, or no network leads there."""
    failure = OSError("it has no address")
    for found, kind, _, _, there in await asyncio.get_running_loop().getaddrinfo(
        host, port, family=family, type=socket.SOCK_DGRAM
    ):
        try:
            with socket.socket(found, kind) as probe:
                probe.connect(there)
                return str(probe.getsockname()[0])
        except OSError as error:
            failure = error
    raise failure
