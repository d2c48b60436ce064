"""Registries whose names nobody knows yet, or whose name server does not answer."""

import asyncio
import contextlib
import gc
import json
import signal
import socket
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distill_reader.balance import tasks
from distill_reader.balance.addresses import registry_addresses
from distill_reader.balance.client import FeedStats
from distill_reader.balance.registry.registrar import PortProbe, RegistrarConfig, RegistrarThread
from distill_reader.balance.tasks import in_thread
from tests.distill_reader.balance.discovery_process import DiscoveryProcess
from tests.distill_reader.balance.local_discovery import LocalDiscovery, LocalStudent, LocalTeacher
from tests.support import wait_until

NAME = "registry.test"
SLOW_NAMES = Path(__file__).with_name("slow_names.py")
END_S = 20.0  # far less than a look-up of slow_names.py takes


def slow_names(mode: str, file: Path, module: str) -> tuple[str, ...]:
    return sys.executable, str(SLOW_NAMES), NAME, mode, str(file), module


def registry_of(server: DiscoveryProcess) -> str:
    """Return "ok", or why the server cannot use its registry."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{server.endpoint}/services", timeout=30) as answer:
        return str(json.loads(answer.read())["registry"])


@pytest.mark.parametrize("mode", ["silent", "unknown"])
def test_discovery_finds_a_redis_whose_name_comes_later(redis_server, run, tmp_path, mode):
    file = tmp_path / "there"
    server = run(
        DiscoveryProcess,
        *("--db_endpoints", f"{NAME}:{redis_server.port}"),
        program=slow_names(mode, file, "distill_reader.discovery"),
    )
    student = run(LocalStudent, server.endpoint)
    teacher = run(LocalTeacher, redis_server.url)
    wait_until(lambda: teacher.is_registered)
    assert not student.teachers
    file.touch()
    wait_until(lambda: student.teachers == {teacher.endpoint}, 40)
    server.send(signal.SIGTERM)
    assert server.process.wait(END_S) == 0


@pytest.mark.parametrize("registry", ["name server silent", "name unknown", "redis hangs", "gone"])
def test_discovery_ends_at_sigterm_while_no_registry_answers(redis_server, run, tmp_path, registry):
    mode = "silent" if registry == "name server silent" else "unknown"
    host = NAME if "name" in registry else "127.0.0.1"
    server = run(
        DiscoveryProcess,
        *("--db_endpoints", f"{host}:{redis_server.port}"),
        program=slow_names(mode, tmp_path / "never", "distill_reader.discovery"),
    )
    if registry == "redis hangs":
        redis_server.freeze()
    elif registry == "gone":
        redis_server.kill()
    student = run(LocalStudent, server.endpoint)
    wait_until(lambda: registry_of(server) != "ok")
    server.send(signal.SIGTERM)
    assert server.process.wait(END_S) == 0
    student.close()


def test_discovery_ends_at_sigterm_while_the_job_server_does_not_answer(run):
    silent = socket.create_server(("127.0.0.1", 0))
    with silent:
        port = silent.getsockname()[1]
        server = run(DiscoveryProcess, "--job_server", f"http://127.0.0.1:{port}")
        student = run(LocalStudent, server.endpoint)
        student.feed_stats = FeedStats(wait_share=0.5, samples_per_s=1.0)
        silent.settimeout(30)
        with silent.accept()[0]:  # and is not answered
            server.send(signal.SIGTERM)
            assert server.process.wait(END_S) == 0
        student.close()


class TestATeacherThatIsToFindItsOwnAddress:
    def test_waits_for_the_name_of_its_registry(self, run, monkeypatch, caplog):
        server = run(LocalDiscovery)
        look_up = socket.getaddrinfo
        known: list[str] = []

        def later(host: Any, *args: Any, **options: Any) -> Any:
            if host != NAME:
                return look_up(host, *args, **options)
            if not known:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return look_up("127.0.0.1", *args, **options)

        monkeypatch.setattr(socket, "getaddrinfo", later)
        config = RegistrarConfig(
            addresses=registry_addresses(f"{NAME}:{server.port}", "where"),
            service="svc",
            server="0.0.0.0:9292",
        )
        registrar = RegistrarThread(config, lambda: True)
        registrar.start()
        try:
            wait_until(lambda: "no address of this host is known" in caplog.text)
            assert "--advertise" in caplog.text
            known.append(NAME)
            wait_until(lambda: server.teachers() == {"127.0.0.1:9292"})
        finally:
            registrar.stop()
        wait_until(lambda: not server.teachers())

    def test_keeps_scheme_and_model_of_a_teacher_that_listens_everywhere(self, run):
        server = run(LocalDiscovery)
        config = RegistrarConfig(
            addresses=registry_addresses(server.endpoint, "where"),
            service="svc",
            server="grpc://0.0.0.0:9292/resnet50",
        )
        registrar = RegistrarThread(config, lambda: True)
        registrar.start()
        try:
            wait_until(lambda: server.teachers() == {"grpc://127.0.0.1:9292/resnet50"})
        finally:
            registrar.stop()

    @pytest.mark.parametrize("host", ["discovery..svc", f"{'x' * 64}.svc"])
    def test_says_that_it_has_no_registry_where_no_host_can_be_called_so(self, host, run, caplog):
        server = run(LocalDiscovery)
        config = RegistrarConfig(
            addresses=registry_addresses(f"{host}:7001,{server.endpoint}", "where"),
            service="svc",
            server="0.0.0.0:9292",
        )
        registrar = RegistrarThread(replace(config, addresses=config.addresses[:1]), lambda: True)
        registrar.start()
        try:
            wait_until(lambda: f"{host}:7001" in caplog.text)
        finally:
            registrar.stop()
        assert "--advertise" in caplog.text
        registrar = RegistrarThread(config, lambda: True)  # another registry can be reached
        registrar.start()
        try:
            wait_until(lambda: server.teachers() == {"127.0.0.1:9292"})
        finally:
            registrar.stop()

    def test_is_found_by_the_family_that_it_listens_on(self, run, monkeypatch):
        server = run(LocalDiscovery)
        look_up = socket.getaddrinfo

        def both(host: Any, *args: Any, **options: Any) -> Any:
            if host != NAME:
                return look_up(host, *args, **options)
            port, family, kind, *_ = args
            names = ("127.0.0.1",) if family == socket.AF_INET else ("::1", "127.0.0.1")
            return [each for name in names for each in look_up(name, port, 0, kind)]

        monkeypatch.setattr(socket, "getaddrinfo", both)
        config = RegistrarConfig(
            addresses=registry_addresses(f"{NAME}:{server.port}", "where"),
            service="svc",
            server="0.0.0.0:9292",
        )
        registrar = RegistrarThread(config, lambda: True)
        registrar.start()
        try:
            wait_until(lambda: server.teachers() == {"127.0.0.1:9292"})
        finally:
            registrar.stop()

    def test_asks_the_next_registry_meanwhile(self, run):
        server = run(LocalDiscovery)
        config = RegistrarConfig(
            addresses=registry_addresses(f"{NAME}:1,{server.endpoint}", "where"),
            service="svc",
            server="[::]:9292",
        )
        registrar = RegistrarThread(config, lambda: True)
        registrar.start()
        try:
            wait_until(lambda: server.teachers() == {"127.0.0.1:9292"})
        finally:
            registrar.stop()


class TestANameWithSeveralAddresses:
    """The first is silent, as of a host that is down, or IPv6 that a router drops."""

    @pytest.fixture
    def name_of(self, monkeypatch) -> Iterator[Callable[[int], str]]:
        """Returns a name by which a port is silent first, and then that of 127.0.0.1."""
        look_up, held = socket.getaddrinfo, contextlib.ExitStack()

        def both(host: Any, *args: Any, **options: Any) -> Any:
            hosts = ("127.0.0.2", "127.0.0.1") if host == NAME else (host,)
            return [each for one in hosts for each in look_up(one, *args, **options)]

        def name_of(port: int) -> str:
            silent = held.enter_context(socket.create_server(("127.0.0.2", port), backlog=0))
            for _ in range(3):  # beyond its backlog, to further ones it answers nothing
                knock = held.enter_context(socket.socket())
                knock.setblocking(False)
                knock.connect_ex(silent.getsockname())
            return f"{NAME}:{port}"

        monkeypatch.setattr(socket, "getaddrinfo", both)
        with held:
            yield name_of

    def test_leads_to_a_discovery_server(self, run, name_of):
        server = run(LocalDiscovery)
        config = RegistrarConfig(
            addresses=registry_addresses(name_of(server.port), "where"),
            service="svc",
            server="10.0.0.1:9292",
        )
        registrar = RegistrarThread(config, lambda: True)
        registrar.start()
        try:
            student = run(LocalStudent, f"{NAME}:{server.port}")
            wait_until(lambda: student.teachers == {"10.0.0.1:9292"})
        finally:
            registrar.stop()

    def test_leads_to_a_redis(self, redis_server, run, name_of):
        teacher = run(LocalTeacher, redis_server.url)
        student = run(LocalStudent, f"redis://{name_of(redis_server.port)}")
        wait_until(lambda: student.teachers == {teacher.endpoint})

    def test_leads_to_a_teacher(self, name_of, monkeypatch):
        monkeypatch.setattr("distill_reader.balance.registry.registrar._PROBE_S", 5.0)
        with socket.create_server(("127.0.0.1", 0)) as teacher:
            probe = PortProbe(f"grpc://{name_of(teacher.getsockname()[1])}")
            assert tasks.run(probe())

    def test_leaves_no_socket_open_whenever_it_is_given_up(self, name_of):
        async def give_up(port: int, rounds: int) -> None:
            task = asyncio.create_task(asyncio.open_connection(NAME, port))
            for _ in range(rounds):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                _, writer = await task
                writer.close()
            gc.collect()  # says so of a socket that is lost

        async def work(port: int) -> None:
            for rounds in range(200):  # in the first ones its addresses are not known yet
                await give_up(port, rounds)

        with socket.create_server(("", 0), backlog=1000) as server:
            tasks.run(work(server.getsockname()[1]))


class TestLookUps:
    @pytest.fixture
    def look_up(self, monkeypatch) -> Callable[..., list[str]]:
        """Replaces the name server; returns what it was asked."""

        def replace(answer: Callable[[int], str]) -> list[str]:
            asked: list[str] = []
            real = socket.getaddrinfo

            def getaddrinfo(host: Any, *args: Any, **options: Any) -> Any:
                asked.append(host)
                return real(answer(len(asked)), *args, **options)

            monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
            return asked

        return replace

    def test_an_answer_is_for_all_who_wait_for_it(self, look_up):
        asked = look_up(lambda _: "127.0.0.1")

        async def work() -> list[Any]:
            loop = asyncio.get_running_loop()
            return await asyncio.gather(*(loop.getaddrinfo(NAME, 1) for _ in range(3)))

        first, *others = tasks.run(work())
        assert first
        assert others == [first, first]
        assert asked == [NAME]

    def test_a_name_is_asked_for_again_while_an_earlier_look_up_hangs(self, look_up, monkeypatch):
        monkeypatch.setattr(tasks, "_LOOK_UP_AGAIN_S", 0.05)
        hang = threading.Event()

        def answer(number: int) -> str:
            if number == 1:
                hang.wait(60)
            return "127.0.0.1"

        asked = look_up(answer)

        async def ask() -> Any:
            loop = asyncio.get_running_loop()
            while True:
                try:
                    async with asyncio.timeout(0.1):
                        return await loop.getaddrinfo(NAME, 1)
                except TimeoutError:
                    continue

        try:
            assert tasks.run(ask())
            assert len(asked) == 2
        finally:
            hang.set()

    def test_an_unknown_name_is_an_error_for_all_and_is_asked_for_again(self, look_up):
        def answer(number: int) -> str:
            if number == 1:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return "127.0.0.1"

        look_up(answer)

        async def work() -> tuple[list[Any], Any]:
            loop = asyncio.get_running_loop()
            both = [loop.getaddrinfo(NAME, 1) for _ in range(2)]
            return await asyncio.gather(*both, return_exceptions=True), await loop.getaddrinfo(
                NAME, 1
            )

        failed, found = tasks.run(work())
        assert [type(error) for error in failed] == [socket.gaierror] * 2
        assert found

    def test_nobody_waits_for_a_thread_that_hangs(self):
        hang = threading.Event()

        async def work() -> str:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    await in_thread(hang.wait)
            return "over"

        try:
            assert tasks.run(work()) == "over"
        finally:
            hang.set()

    def test_an_error_in_a_thread_is_raised_where_its_result_is_awaited(self):
        async def work() -> None:
            await in_thread(lambda: int("x"))

        with pytest.raises(ValueError, match="invalid literal"):
            tasks.run(work())
