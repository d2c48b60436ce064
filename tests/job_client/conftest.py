"""A job server that is a class, and job clients that are real."""

import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from job_client.agent import Agent, EndMode
from job_client.client_dir import ClientDir
from job_client.config import ClientConfig
from job_client.devices.gpus import CpuSlots
from job_server.api.errors import NotFound, ServerAway
from job_server.api.wire import (
    Acknowledgement,
    DesiredState,
    JobStatus,
    Node,
    NodePlan,
    NodePod,
    NodeReport,
    PodPhase,
    PodState,
)
from pod_runtime import env, processes
from tests.support import wait_until


class FakeServer:
    """Behaves as a job server does to clients; the test sets the plan and reads the reports."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._server_id = "server-1"
        self._revision = 0
        self._pods: tuple[NodePod, ...] = ()
        self._away = False
        self.nodes: list[Node] = []  # every registration, the newest last
        self.reports: list[NodeReport] = []
        self.token = ""  # that it wants, where it is behind real HTTP; "": none
        self.refuse: Exception | None = None  # raised to whoever registers
        self.refuse_reports: Exception | None = None  # raised to whoever reports
        self.refusals_left: int | None = None  # None: for ever
        self.statuses: tuple[JobStatus, ...] = ()
        self.moving: bool | None = None  # answered to a client that drains

    # what a client calls

    def register_node(self, node: Node) -> NodePlan:
        with self._changed:
            self._check()
            self._refuse(self.refuse)
            self.nodes.append(node)
            return self._plan()

    def node_plan(
        self, node_id: str, revision: int, timeout_s: float, client: str = ""
    ) -> NodePlan:
        with self._changed:
            self._check()
            server_id = self._server_id
            self._changed.wait_for(
                lambda: self._away or self._revision != revision or self._server_id != server_id,
                timeout_s,
            )
            self._check(node_id)
            return self._plan()

    def node_report(self, report: NodeReport) -> Acknowledgement:
        with self._changed:
            self._check(report.node_id)
            self._refuse(self.refuse_reports)
            self.reports.append(report)
            moving = self.moving if report.draining else None
            return Acknowledgement(server_id=self._server_id, moving=moving)

    def jobs(self) -> tuple[JobStatus, ...]:
        with self._changed:
            self._check()
            return self.statuses

    def _refuse(self, error: Exception | None) -> None:
        if error is not None and self.refusals_left != 0:
            if self.refusals_left is not None:
                self.refusals_left -= 1
            raise error

    def _check(self, node_id: str | None = None) -> None:
        if self._away:
            raise ServerAway("no answer from http://127.0.0.1:8180", delay_s=0.05)
        if node_id is not None and all(node.node_id != node_id for node in self.nodes):
            raise NotFound(f"node: {node_id!r} is not registered")

    def _plan(self) -> NodePlan:
        return NodePlan(
            server_id=self._server_id,
            revision=self._revision,
            pods=self._pods,
            heartbeat_s=0.2,
        )

    # what a test does

    def want(self, *pods: NodePod) -> None:
        with self._changed:
            self._pods, self._revision = pods, self._revision + 1
            self._changed.notify_all()

    def go_away(self) -> None:
        with self._changed:
            self._away = True
            self._changed.notify_all()

    def come_back(self, *, forgetful: bool = False) -> None:
        """Restart: another id; with `forgetful`, without its nodes."""
        with self._changed:
            self._away = False
            self._server_id += "+"
            if forgetful:
                self.nodes.clear()
            self._changed.notify_all()

    def state(self, pod_id: str) -> PodState | None:
        """What was last reported of a pod; None: it is not in the newest report."""
        return next(iter(self._states(pod_id, -1)), None)

    def _states(self, pod_id: str, since: int) -> list[PodState]:
        return [p for r in self.reports[since:] for p in r.pods if p.pod_id == pod_id]

    def want_until(self, phase: PodPhase, *pods: NodePod) -> PodState:
        """Want these pods, and wait until the last one is said to be in `phase`."""
        self.want(*pods)
        return self.wait_phase(pods[-1].pod_id, phase)

    def wait_phase(self, pod_id: str, phase: PodPhase) -> PodState:
        return self.wait_state(pod_id, lambda state: state.phase is phase, phase.value)

    def wait_state(
        self,
        pod_id: str,
        condition: Callable[[PodState], bool],
        what: str,
        since: int | None = None,
    ) -> PodState:
        """Return the first state that fulfils `condition`; the next report may tell another.

        Args:
            since: so many reports are not looked at; None: all but the newest one.
        """
        begin = max(0, len(self.reports) - 1) if since is None else since

        def found() -> list[PodState]:
            return [state for state in self._states(pod_id, begin) if condition(state)]

        wait_until(found, what=f"{pod_id} is {what}")
        return found()[0]


class Client:
    """A job client in threads of this process, which may be ended in order only."""

    def __init__(self, config: ClientConfig, server: FakeServer) -> None:
        self.client_dir = ClientDir(config.log_dir)
        self.agent = Agent(config, self.client_dir, CpuSlots(4), lambda: server)
        self.result: int | BaseException | None = None  # None: it runs
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self.agent.run()
        # Whatever it was, the test is told by `result`.
        except Exception as error:  # noqa: BLE001
            self.result = error
        finally:
            self.client_dir.close()

    def end(self, how: EndMode = EndMode.STOP) -> None:
        self.agent.end(how)
        self.join()

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive(), "the client does not end"


def pod(
    pod_id: str = "pod_0_0", want: DesiredState = DesiredState.RUN, **fields: object
) -> NodePod:
    values: dict[str, object] = {
        "pod_id": pod_id, "job_id": "job", "slots": (0,), "want": want, "grace_s": 5.0, **fields,
    }  # fmt: skip
    return NodePod(**values)  # type: ignore[arg-type]


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.go_away()  # so that no poll outlives its test


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., ClientConfig]:
    """Make a configuration; `train` is the text of the training script."""

    def make(train: str = "sleep 600", **fields: object) -> ClientConfig:
        (tmp_path / "train.sh").write_text(train + "\n")
        values: dict[str, object] = {
            "cwd": tmp_path,
            "log_dir": tmp_path / "log",
            "log_level": 20,
            "pod_path": tmp_path / "pods",
            "server_url": "http://127.0.0.1:8180",
            "environ": dict(os.environ),
            "script": "./train.sh",
            "job_id": "job",
            "port_range": (20000, 21999),
            **fields,
        }
        return ClientConfig(**values)  # type: ignore[arg-type]

    return make


@pytest.fixture
def start_client(
    make_config: Callable[..., ClientConfig], server: FakeServer, tmp_path: Path
) -> Iterator[Callable[..., Client]]:
    """Start clients; every process of theirs is gone when the test ends."""
    clients: list[Client] = []

    def start(train: str = "sleep 600", **fields: object) -> Client:
        client = Client(make_config(train, **fields), server)
        clients.append(client)
        return client

    yield start
    for client in clients:
        client.end(EndMode.KILL)
    kill_all(tmp_path / "log")


def kill_all(log_dir: Path) -> None:
    """End whatever a client of `log_dir` has started."""
    marker = log_dir / "marker"
    if marker.exists():
        text = marker.read_text().strip()
        processes.kill_marked(env.RUN_MARKER, text, lambda _pid, _env: False)


@pytest.fixture
def spawn_marked() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start processes that carry a client's marker and belong to no shim."""
    spawned: list[subprocess.Popen[bytes]] = []

    def spawn(marker: str, *command: str) -> subprocess.Popen[bytes]:
        environ = {**os.environ, env.RUN_MARKER: marker, env.POD_ID: "pod_7_0"}
        spawned.append(subprocess.Popen(command or ("sleep", "600"), env=environ))
        return spawned[-1]

    yield spawn
    for process in spawned:
        process.kill()
        process.wait()
