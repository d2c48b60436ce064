"""One API server for the tests of this folder; each has a namespace of its own in it."""

import itertools
from collections.abc import Iterator

import pytest

from tests.k8s_controller.cluster.api_server import ApiServer

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def api_server() -> Iterator[ApiServer]:
    with ApiServer() as server:
        yield server


@pytest.fixture
def namespace(api_server: ApiServer) -> str:
    """Return a new namespace."""
    name = f"test-{next(_numbers)}"
    api_server.store.create(api_server.store.kind("Namespace"), "", {"metadata": {"name": name}})
    return name
