"""Tasks that end, and goodbyes that are said to the end."""

import asyncio

from distill_reader.balance.places import places_of
from distill_reader.balance.registrar import Registrar, RegistrarConfig
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

    async def beat(self) -> None:
        self.calls.append("beat")

    async def withdraw(self) -> None:
        await asyncio.sleep(0.5)
        self.calls.append("withdraw")

    async def close(self) -> None:
        self.calls.append("close")


def test_a_registrar_ends_when_its_teacher_is_withdrawn_and_not_before(monkeypatch):
    link = SlowLink()
    monkeypatch.setattr(Registrar, "_link", lambda self, place: self._links.setdefault(place, link))

    async def alive() -> bool:
        return True

    async def run() -> None:
        config = RegistrarConfig(places=places_of("h:2", "where"), service="svc", server="h:1")
        task = asyncio.create_task(Registrar(config, alive).run())
        while not link.calls:
            await asyncio.sleep(0.01)
        await end_tasks(task)

    asyncio.run(run())
    assert link.calls[-2:] == ["withdraw", "close"]
