"""Discovery servers, teachers and students in threads of this process, with real sockets."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from distill_reader.balance.addresses import redis_address, registry_addresses
from distill_reader.balance.client import FeedStats, StudentClient
from distill_reader.balance.registry.memory import MemoryRegistry
from distill_reader.balance.registry.redis_registry import RedisRegistry
from distill_reader.balance.registry.registrar import PortProbe, Registrar, RegistrarConfig
from distill_reader.balance.server.server import DiscoveryServer, DiscoveryServerConfig
from distill_reader.balance.tasks import end_tasks, finish
from distill_reader.balance.wire.messages import HEAD, MAGIC, decode, encode
from tests.support import free_port

LEASE_S = 4.0  # of teachers: does not end because the machine is busy
# Nor are students dropped for that, nor given an empty first list.
PATIENT = DiscoveryServerConfig(first_s=60, silent_s=60, legacy_silent_s=60, first_list_s=30)
_BACKLOG = 4096  # probes that nobody accepts


class LoopThread:
    """An event loop that runs one coroutine until it is closed."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    async def work(self) -> None:
        raise NotImplementedError

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it has just ended
                asyncio.run_coroutine_threadsafe(self._end(), self._loop)
            self._thread.join(20)
            assert not self._thread.is_alive()

    async def _end(self) -> None:
        if self._task is not None:
            await end_tasks(self._task)

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            self._task = self._loop.create_task(self.work())
            self._loop.run_until_complete(self._task)
        # As asyncio.run does: what was cancelled amid a scan, or just closed, is over only then.
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.run_until_complete(asyncio.sleep(0.01))
        self._loop.close()


class LocalDiscovery(LoopThread):
    """A discovery server: with a registry in memory, or with Redis."""

    def __init__(
        self,
        redis_url: str | None = None,
        *,
        port: int = 0,
        config: DiscoveryServerConfig | None = None,
    ) -> None:
        super().__init__()
        self._redis_url = redis_url
        self._config = config or PATIENT
        self._listener = socket.create_server(("127.0.0.1", port or free_port()))
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self.endpoint = f"127.0.0.1:{self.port}"
        self._made = threading.Event()
        self.server: DiscoveryServer
        self.start()
        self._made.wait()

    async def work(self) -> None:
        url = self._redis_url
        registry = MemoryRegistry() if url is None else RedisRegistry([redis_address(url)])
        self.server = DiscoveryServer(registry, self._config)
        self._made.set()
        try:
            await self.server.run(self._listener)
        finally:
            self._listener.close()
            await finish(registry.close())

    def links(self, service: str = "svc") -> dict[str, tuple[str, ...]]:
        """What is in force, as this server knows it."""
        known = self.server.balancer.view.services.get(service)
        return {} if known is None or known.table is None else dict(known.table.links)

    def teachers(self, service: str = "svc") -> set[str]:
        known = self.server.balancer.view.services.get(service)
        return set() if known is None else set(known.teachers)


class LocalTeacher(LoopThread):
    """A port that is open, and a registrar that looks after it."""

    def __init__(
        self, where: str, service: str = "svc", *, token: str = "", lease_s: float = LEASE_S
    ) -> None:
        super().__init__()
        self.token = token
        self._port = free_port()
        self._listener: socket.socket | None = None  # None: it is dead
        self.come_back()
        self.endpoint = f"127.0.0.1:{self._port}"
        self._config = RegistrarConfig(
            addresses=registry_addresses(where, "where"),
            service=service,
            server=self.endpoint,
            read_token=lambda: self.token,
            lease_s=lease_s,
        )
        self._is_registrar_dead = False
        # Nothing answers there that could report whether it is ready.
        self._probe = PortProbe(f"grpc://{self.endpoint}")
        self.registrar = Registrar(self._config, self._is_alive)
        self.start()

    async def work(self) -> None:
        await self.registrar.run()

    async def _is_alive(self) -> bool:
        if self._is_registrar_dead:
            await asyncio.Event().wait()
        return await self._probe()

    @property
    def is_registered(self) -> bool:
        """Whether its registrar has registered it."""
        return self.registrar.is_registered

    def kill(self) -> None:
        """The teacher dies, the registrar does not."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def stop_beating(self) -> None:
        """The registrar dies as well, without a message."""
        self._is_registrar_dead = True

    def come_back(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self._port), backlog=_BACKLOG)

    def close(self) -> None:
        super().close()
        self.kill()


class LocalStudent:
    """A StudentClient that remembers what it is told."""

    def __init__(
        self,
        where: Sequence[str] | str,
        service: str = "svc",
        *,
        require: int = 100,
        token: str = "",
    ) -> None:
        self.token = token
        self.told: list[tuple[str, ...]] = []
        self.told_s: list[float] = []
        self.feed_stats = FeedStats()
        self.client = StudentClient(
            registry_addresses(where, "where"),
            service,
            require=require,
            read_token=lambda: self.token,
            notify=self._notify,
            feed_stats=lambda: self.feed_stats,
        )
        self.client.start()

    @property
    def teachers(self) -> set[str]:
        return set(self.told[-1]) if self.told else set()

    def close(self) -> None:
        self.client.stop()

    def _notify(self, teachers: Sequence[str]) -> None:
        self.told_s.append(time.monotonic())
        self.told.append(tuple(teachers))


class RawClient:
    """Somebody who writes bytes to a discovery server."""

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.rpartition(":")
        self.sock = socket.create_connection((host, int(port)), timeout=20)

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def ask(self, body) -> dict[str, Any]:
        self.send(encode(body))
        return self.receive()

    def receive(self) -> dict[str, Any]:
        magic, length = HEAD.unpack(self._exactly(HEAD.size))
        assert magic == MAGIC
        return decode(self._exactly(length - HEAD.size))

    def is_ended(self) -> bool:
        """Wait for the end; whether nothing came before it."""
        try:
            return self.sock.recv(1) == b""
        except ConnectionResetError:
            return True

    def close(self) -> None:
        self.sock.close()

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self.sock.recv(size - len(data))
            assert more, f"the server closed the connection after {data!r}"
            data += more
        return data
