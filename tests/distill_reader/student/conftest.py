"""Readers of teachers in this process, which leave nothing behind."""

import os
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.distill_reader.student.fake_teachers import FakeTeacher, Teachers
from tests.support import wait_until


def reader_threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("edl-")]


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing in the environment tells readers anything; in the end no thread of one is left."""
    for name in list(os.environ):
        if name.startswith("PADDLE_DISTILL"):
            monkeypatch.delenv(name)
    yield
    wait_until(lambda: not reader_threads(), what="the readers' threads have ended")


@pytest.fixture
def reach(clean, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """`reach(teacher, ...)` lets readers connect to these; in the end nobody is connected."""
    used: list[FakeTeacher] = []

    def reach(*teachers: FakeTeacher) -> None:
        used.extend(teachers)
        group = Teachers(*used)
        monkeypatch.setattr(
            "distill_reader.student.reader.connect",
            lambda endpoint, **_: group.connect(endpoint),
        )

    yield reach
    wait_until(lambda: not any(teacher.clients for teacher in used), what="all are disconnected")
