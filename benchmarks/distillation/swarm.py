"""Servers as processes, and many teachers and students in one process, for discovery.py.

Teachers are ports that are open, students are connections; both run the code of real ones, all on
one event loop. The original's programs run from an interpreter of their own.
"""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import free_port
from distill_reader.balance.addresses import registry_addresses
from distill_reader.balance.client import FeedStats, StudentClient
from distill_reader.balance.registry.registrar import PortProbe, Registrar, RegistrarConfig

SERVICE = "swarm"
LIMIT_S = 60.0  # for anything to come
_HEAD = struct.Struct("!4si")
_MAGIC = b"\xcb\xef\x00\x00"
_ORIGINAL_POLL_S = 2.0  # of its students


async def until(condition: Callable[[], object], limit_s: float = LIMIT_S) -> float:
    """Wait for it; return how long it took."""
    began_s = time.perf_counter()
    while not condition():
        if time.perf_counter() - began_s > limit_s:
            raise SystemExit("something was waited for in vain")
        await asyncio.sleep(0.005)
    return time.perf_counter() - began_s


class Program:
    """A process, until `end`."""

    def __init__(self, *command: str, folder: Path, environ: Mapping[str, str] | None = None):
        self._log = (folder / "programs.log").open("ab")
        self.process = subprocess.Popen(
            command,
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, **(environ or {})},
            cwd=folder,  # -m looks here first: the repository has a paddle_edl of its own
        )

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def cpu_s(self) -> float:
        """Return the processor time that it has used."""
        text = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(text[11]) + int(text[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._log.close()


class Redis:
    """A Redis in memory alone, that keeps its port."""

    def __init__(self, folder: Path) -> None:
        program = shutil.which("redis-server")
        if program is None:
            raise SystemExit("redis-server is not installed: apt-get install redis-server")
        self.port = free_port()
        self.endpoint = f"127.0.0.1:{self.port}"
        self._folder = folder
        self._command = (program, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "")
        self.program = Program(*self._command, folder=folder)

    def restart(self) -> None:
        self.program = Program(*self._command, folder=self._folder)

    def end(self) -> None:
        self.program.end()


async def await_port(endpoint: str) -> None:
    host, _, port = endpoint.rpartition(":")

    def answers() -> bool:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=5):
            return True
        return False

    await until(answers)


def start_discovery(redis: Redis, folder: Path) -> tuple[Program, str]:
    """Return a server of ours, and its endpoint."""
    endpoint = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "distill_reader.discovery", "--server", endpoint]
    command += ["--db_endpoints", redis.endpoint, "--log_level", "WARNING"]
    return Program(*command, folder=folder), endpoint


def start_registrar(redis: Redis, server: str, folder: Path) -> Program:
    """Return a registrar of ours."""
    command = [sys.executable, "-m", "distill_reader.register", "--db_endpoints", redis.endpoint]
    command += ["--service_name", SERVICE, "--server", server]
    return Program(*command, folder=folder)


def start_original_discovery(python: str, redis: Redis, folder: Path) -> tuple[Program, str]:
    """Return a balance server of the original, and its endpoint."""
    endpoint = f"127.0.0.1:{free_port()}"
    command = [python, "-m", "paddle_edl.distill.redis.balance_server", "--server", endpoint]
    command += ["--db_endpoints", redis.endpoint]
    return Program(*command, folder=folder, environ={"PYTHONPATH": ""}), endpoint


def start_original_registrar(python: str, redis: Redis, server: str, folder: Path) -> Program:
    """Return a registrar of the original."""
    command = [python, "-m", "paddle_edl.distill.redis.server_register"]
    command += ["--db_endpoints", redis.endpoint, "--service_name", SERVICE, "--server", server]
    return Program(*command, folder=folder, environ={"PYTHONPATH": ""})


class Port:
    """A teacher, as far as discovery sees one."""

    def __init__(self) -> None:
        self._port = free_port()
        self.endpoint = f"127.0.0.1:{self._port}"
        self._listener: socket.socket | None = None  # None: it is closed

    def open(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self._port))
        self._listener.setblocking(False)
        asyncio.get_running_loop().add_reader(self._listener, self._accept, self._listener)

    def close(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    @staticmethod
    def _accept(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # whoever came has gone
            listener.accept()[0].close()


class Teacher:
    """A port, and the registrar's code on our loop."""

    def __init__(self, addresses: str) -> None:
        self.port = Port()
        self.endpoint = self.port.endpoint
        self._config = RegistrarConfig(
            addresses=registry_addresses(addresses, "places"), service=SERVICE, server=self.endpoint
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.port.open()
        # Nobody answers there who could say whether it is ready.
        registrar = Registrar(self._config, PortProbe(f"grpc://{self.endpoint}"))
        self._task = asyncio.create_task(registrar.run())

    async def die(self) -> None:
        """The port is refused; the registrar goes later."""
        self.port.close()

    async def end(self) -> None:
        self.port.close()
        await _cancel(self._task)


class Student:
    """A student of ours."""

    def __init__(self, addresses: str, require: int) -> None:
        self.notified: list[tuple[str, ...]] = []
        self.began_s = time.perf_counter()
        self._client = StudentClient(
            registry_addresses(addresses, "places"),
            SERVICE,
            require=require,
            read_token=lambda: "",
            notify=lambda teachers: self.notified.append(tuple(teachers)),
            feed_stats=lambda: FeedStats(wait_share=0.1, samples_per_s=1000.0),
        )
        self._task = asyncio.create_task(self._client.work())

    @property
    def teachers(self) -> frozenset[str]:
        return frozenset(self.notified[-1]) if self.notified else frozenset()

    @property
    def moves(self) -> int:
        """How many teachers it got anew behind its first list."""
        return sum(
            len(set(after) - set(before))
            for before, after in zip(self.notified, self.notified[1:], strict=False)
            if before
        )

    async def end(self) -> None:
        await _cancel(self._task)


class OriginalStudent:
    """Says and asks what the original's student does, when it does."""

    def __init__(self, endpoint: str, require: int) -> None:
        self.notified: list[tuple[str, ...]] = []
        self._endpoint = endpoint
        self._require = require
        self._task = asyncio.create_task(self._run())

    @property
    def teachers(self) -> frozenset[str]:
        return frozenset(self.notified[-1]) if self.notified else frozenset()

    async def end(self) -> None:
        await _cancel(self._task)

    async def _run(self) -> None:
        host, _, port = self._endpoint.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            body = {"type": "register", "service_name": SERVICE, "seq": 0, "num": self._require}
            answer = await _ask(reader, writer, body)
            self.notified.append(tuple(answer["servers"]))
            version = 0
            while True:
                await asyncio.sleep(_ORIGINAL_POLL_S)
                answer = await _ask(reader, writer, {"type": "heartbeat", "version": version})
                if answer["type"] == "servers_change":
                    version = answer["version"]
                    self.notified.append(tuple(answer["servers"]))
        finally:
            writer.close()


async def _ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: Mapping[str, Any]
) -> dict[str, Any]:
    data = json.dumps(body).encode()
    writer.write(_HEAD.pack(_MAGIC, _HEAD.size + len(data)) + data)
    _, length = _HEAD.unpack(await reader.readexactly(_HEAD.size))
    answer: dict[str, Any] = json.loads(await reader.readexactly(length - _HEAD.size))
    return answer


async def _cancel(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


def malformed_messages() -> list[bytes]:
    """Return one of each kind."""

    def framed(data: bytes) -> bytes:
        return _HEAD.pack(_MAGIC, _HEAD.size + len(data)) + data

    return [
        b"\x00" * 64,
        b"POST / HTTP/1.1\r\n\r\n",
        _HEAD.pack(_MAGIC, 0),
        _HEAD.pack(_MAGIC, -5),
        _HEAD.pack(_MAGIC, 2**31 - 1),
        framed(b"")[:6],
        framed(b""),
        framed(b"{"),
        framed(b"[]"),
        framed(b"\xff\xfe"),
        framed(b"[" * 20_000),
        framed(b'{"type": "nonsense"}'),
        framed(b'{"type": "heartbeat", "version": 0}'),
        framed(b'{"type": "register"}'),
        framed(b'{"type": "register", "service_name": "*", "seq": 0, "num": 1}'),
        framed(b'{"type": "register", "service_name": "swarm", "seq": 0, "num": "x"}'),
    ]


async def throw(endpoint: str, data: bytes) -> bool:
    """Send bytes, and that they were all; return whether something was answered."""
    host, _, port = endpoint.rpartition(":")
    try:
        reader, writer = await asyncio.open_connection(host, int(port))
    except OSError:
        return False
    try:
        writer.write(data)
        async with asyncio.timeout(8.0):
            return bool(await reader.read(1))
    except (OSError, TimeoutError):
        return False
    finally:
        writer.close()


def fewest_moves(
    students: Sequence[str], teachers: Sequence[str], links: Mapping[str, Sequence[str]]
) -> int:
    """Return how many links must be new to students that were there, of any even assignment.

    For teachers of one speed, and students that want as many as they can get.
    """
    kept = {each: [t for t in links.get(each, ()) if t in set(teachers)] for each in students}
    if not teachers:
        return 0
    if len(teachers) < len(students):  # who is beyond an even load moves, and who has none
        loads: dict[str, int] = dict.fromkeys(teachers, 0)
        for each in kept.values():
            for teacher in each:
                loads[teacher] += 1
        low, more = divmod(len(students), len(teachers))
        counts = sorted(loads.values(), reverse=True)
        stay = sum(min(count, low + (place < more)) for place, count in enumerate(counts))
        new = sum(student not in links for student in students)
        return max(0, len(students) - stay - new)
    low, more = divmod(len(teachers), len(students))
    most_first = sorted(students, key=lambda each: -len(kept[each]))
    return sum(
        max(0, low + (place < more) - len(kept[student]))
        for place, student in enumerate(most_first)
        if student in links
    )


def machine() -> str:
    """Return what the figures are of."""
    load = os.getloadavg()[0]
    found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return f"{os.cpu_count()} x {found[1] if found else 'CPU'}, load {load:.1f}"
