import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distill_reader.balance.redis_process import RedisProcess
from tests.distill_reader.teacher import paddle_models
from tests.support import free_port


@pytest.fixture(scope="session")
def paddle_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of each kind that Paddle exports: see paddle_models."""
    pytest.importorskip("paddle")
    folder = tmp_path_factory.mktemp("paddle_models")
    paddle_models.write(folder)
    return folder


@pytest.fixture
def redis_server(tmp_path) -> Iterator[RedisProcess]:
    """A Redis of this test's own."""
    server = RedisProcess(tmp_path)
    yield server
    server.close()


@pytest.fixture
def run() -> Iterator[Callable[..., Any]]:
    """`run(Class, ...)` makes something that is closed in the end, the last first."""
    with contextlib.ExitStack() as stack:

        def make(kind, *args, **options):
            made = kind(*args, **options)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def free_endpoint() -> str:
    """Where nobody listens."""
    return f"127.0.0.1:{free_port()}"
