"""A job server for tests: in this process behind Flask's test client, or as a program."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flask.testing import FlaskClient

from job_server.api.api_client import ApiClient
from job_server.api.errors import ServerAway, Unauthorized
from job_server.api.wire import Node, Slot, SlotKind
from job_server.server.app import create_app
from job_server.server.guard import Guard
from job_server.server.service import JobService
from job_server.server.store import Store
from tests.support import ROOT, free_port, wait_until


@contextmanager
def open_service(
    path: Path | str = ":memory:",
    *,
    max_watchers: int = 50,
    now: Callable[[], float] | None = None,
) -> Iterator[JobService]:
    """A service on a database; closed in the end, as a server that is stopped."""
    service = JobService(Store(str(path)), max_watchers=max_watchers, now=now)
    service.start()
    try:
        yield service
    finally:
        service.close()


def browse(service: JobService, guard: Guard | None = None) -> FlaskClient:
    return create_app(service, guard or Guard()).test_client()


def cpu_node(node_id: str = "node-a", **changes: Any) -> Node:
    """A node of two CPU slots; `changes`: other values of its fields."""
    fields: dict[str, Any] = {
        "node_id": node_id,
        "addr": "127.0.0.1",
        "slots": tuple(Slot(index=index, kind=SlotKind.CPU) for index in range(2)),
        "port_low": 21000,
        "port_high": 21099,
        "job_id": "digits",
    }
    return Node(**{**fields, **changes})


@dataclass
class ServerProcess:
    """A job server, to be killed at will."""

    folder: Path
    args: list[str]
    port: int = field(default_factory=free_port)
    env: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[str] | None = None
    program: tuple[str, ...] = ("job_server",)  # what Python is to run as a module

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def api(self, token: str | None = None) -> ApiClient:
        return ApiClient(self.url, token)

    def start(self) -> None:
        command = [sys.executable, "-m", *self.program, "--server_port", str(self.port)]
        command += ["--db", str(self.folder / "server.db"), *self.args]
        with (self.folder / "server.log").open("a") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, **self.env}, stderr=log, text=True
            )
        wait_until(self.answers, 120, f"the server answers: {self.log()}")

    def answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log()
        with self.api(self.env.get("EDL_TOKEN")) as api:
            try:
                api.health()
            except ServerAway:
                return False
            except Unauthorized:  # its token is the test's business
                return True
        return True

    def log(self) -> str:
        return (self.folder / "server.log").read_text()

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM; return the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()
            self.process.wait()


@contextmanager
def running_server(folder: Path, *args: str, **env: str) -> Iterator[ServerProcess]:
    server = ServerProcess(folder, list(args), env=env)
    try:
        server.start()
        yield server
    finally:
        server.stop()


class InThread(threading.Thread):
    """Runs a call beside the test; `result()` waits for it and raises what it raised.

    It waits less long than a poll of 60 s, which nobody has told of any news.
    """

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self._answer: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._answer = self._call()
        except BaseException as error:  # noqa: BLE001 - raised again in result()
            self._error = error

    def result(self, timeout_s: float = 50.0) -> Any:
        self.join(timeout_s)
        assert not self.is_alive(), f"not within {timeout_s:g} s"
        if self._error is not None:
            raise self._error
        return self._answer
