"""Fronts before a service that behaves, for the tests of each protocol."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import requests

from distill_reader.teacher.front import Front, FrontConfig
from distill_reader.teacher.protocols.limits import FrontLimits
from tests.distill_reader.teacher.fake_service import DOUBLE, HALF, FakeService
from tests.support import wait_until


@dataclass
class Running:
    """A front on loopback and the service behind it."""

    front: Front
    service: FakeService

    @property
    def port(self) -> int:
        return self.front.address[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def http(self, method: str, path: str, **arguments: Any) -> requests.Response:
        """Ask without a proxy, on a connection of its own."""
        with requests.Session() as session:
            session.trust_env = False
            return session.request(method, self.url + path, timeout=30, **arguments)

    def is_idle(self) -> bool:
        """Whether all memory is given back."""
        return self.service.used_bytes == 0


@contextlib.contextmanager
def run_front(
    service: FakeService, *, token: str = "", limits: FrontLimits | None = None, **config: Any
) -> Iterator[Running]:
    front = Front(
        service,
        FrontConfig(port=0, token=token, limits=limits or FrontLimits(), **config),
        lambda: b"edl_up 1\n",
    )
    front.start()
    running = Running(front, service)
    try:
        yield running
        wait_until(running.is_idle, what="all memory given back")
    finally:
        front.close(1.0)
        service.close()


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    """The models `double` (first) and `half`, with the usual limits."""
    with run_front(FakeService(DOUBLE, HALF)) as running:
        yield running


@pytest.fixture
def start_front() -> Iterator[Callable[..., Running]]:
    """Start a front with limits of the test's own."""
    with contextlib.ExitStack() as stack:

        def start(*specs: Any, memory_bytes: int = 256 << 20, **options: Any) -> Running:
            service = FakeService(*specs, memory_bytes=memory_bytes)
            return stack.enter_context(run_front(service, **options))

        yield start
