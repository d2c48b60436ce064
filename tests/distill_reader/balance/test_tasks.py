"""Tasks that end, and goodbyes that are said to the end."""

import asyncio
from collections.abc import Callable

from distill_reader.balance.addresses import redis_address, registry_addresses
from distill_reader.balance.registry import redis_registry, registrar
from distill_reader.balance.registry.registrar import Registrar, RegistrarConfig
from distill_reader.balance.server import demand
from distill_reader.balance.tasks import end_tasks, finish


def test_a_goodbye_is_said_however_often_its_task_is_cancelled():
    async def goodbye(said: list[str]) -> None:
        await asyncio.sleep(0.5)
        said.append("goodbye")

    async def work(said: list[str]) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await finish(goodbye(said))

    async def run() -> list[str]:
        said: list[str] = []
        task = asyncio.create_task(work(said))
        await asyncio.sleep(0)
        await end_tasks(task)  # cancels every 0.2 s
        assert task.cancelled()
        return said

    assert asyncio.run(run()) == ["goodbye"]


class SlowLink:
    """A registry that takes its time."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def heartbeat(self) -> None:
        self.calls.append("beat")

    async def withdraw(self) -> None:
        await asyncio.sleep(0.5)
        self.calls.append("withdraw")

    async def close(self) -> None:
        self.calls.append("close")


def test_a_registrar_ends_when_its_teacher_is_withdrawn_and_not_before():
    link = SlowLink()

    async def alive() -> bool:
        return True

    async def run() -> None:
        config = RegistrarConfig(
            addresses=registry_addresses("h:2", "where"), service="svc", server="h:1"
        )
        task = asyncio.create_task(Registrar(config, alive, lambda *_: link).run())
        while not link.calls:
            await asyncio.sleep(0.01)
        await end_tasks(task)

    asyncio.run(run())
    assert link.calls[-2:] == ["withdraw", "close"]


def test_a_registrar_goes_on_after_a_defect_of_its_probe_or_its_link(monkeypatch):
    monkeypatch.setattr(registrar, "_RETRY_S", 0.01)
    link = SlowLink()
    probes: list[int] = []

    async def probe() -> bool:
        probes.append(1)
        if len(probes) < 3:
            raise UnicodeError("label too long")  # what a resolver makes of a long name
        return True

    async def run() -> None:
        config = RegistrarConfig(
            addresses=registry_addresses("h:2", "where"), service="svc", server="h:1"
        )
        task = asyncio.create_task(Registrar(config, probe, lambda *_: link).run())
        await until(lambda: bool(link.calls))
        await end_tasks(task)

    asyncio.run(run())


def test_a_defect_in_telling_the_demand_ends_neither_that_nor_the_server(monkeypatch, caplog):
    monkeypatch.setattr(demand, "_PERIOD_S", 0.01)
    looks: list[int] = []

    class Odd:
        @property
        def view(self) -> None:
            looks.append(1)
            raise ZeroDivisionError("a defect")

    async def run() -> None:
        poster = demand.DemandPoster(Odd(), "http://127.0.0.1:1", str)  # type: ignore[arg-type]
        task = asyncio.create_task(poster.run())
        await until(lambda: len(looks) > 2)
        assert not task.done()
        await end_tasks(task)

    asyncio.run(run())
    assert "cannot be posted" in caplog.text


def test_who_listens_for_changes_in_redis_goes_on_after_a_defect(monkeypatch):
    monkeypatch.setattr(redis_registry, "_WATCH_PAUSE_S", 0.01)
    calls: list[int] = []

    async def watch_one(self: object, changed: object) -> None:
        calls.append(1)
        raise RuntimeError("another coroutine is already waiting")

    monkeypatch.setattr(redis_registry.RedisRegistry, "_watch_one", watch_one)

    async def run() -> None:
        address = redis_address("redis://127.0.0.1:1", "")
        task = asyncio.create_task(redis_registry.RedisRegistry([address]).watch(lambda: None))
        await until(lambda: len(calls) > 2)
        await end_tasks(task)

    asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)
