"""The stack of compose.yaml without an engine: each service in a network namespace of its own.

Its commands, variables, mounts and host names, on this machine's disk and Python: what an image and
an engine would add is not tested.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from job_server.api.api_client import ApiClient
from job_server.api.wire import JobState, JobStatus
from pod_runtime.verify import main as verify
from tests.docker.compose import DOCKER, Service, services
from tests.e2e.netns import Network, require_network_namespaces
from tests.support import ROOT, require, wait_until

pytest.importorskip("paddle", reason="trains with Paddle")
require("sklearn", "has the digits")

NAMES = ("job-server", "node1", "node2")
TOKEN = "a-token-of-the-tests"


class Stack:
    """The services of profile resnet50, each with a folder for what it mounts."""

    def __init__(self, folder: Path, network: Network, services_: dict[str, Service]) -> None:
        self.folder = folder
        self._network = network
        self._services = services_
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.url = f"http://{network.addr(1)}:8180"

    def start(self, name: str) -> None:
        """Run the service's command behind the entry point, in the namespace of its name."""
        service = self._services[name]
        # In compose's order: what the image sets, then what the service does.
        image = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(self.folder),
            "EDL_PYTHON": sys.executable,
            "EDL_STATE_DIR": "/state",
            "EDL_NO_GPU": "1",
        }
        environ = {
            key: self._outside(service, value)
            for key, value in (image | dict(service.environment)).items()
        }
        Path(environ["EDL_STATE_DIR"]).mkdir(parents=True, exist_ok=True)
        command = [str(DOCKER / "entry.sh")]
        command += [self._outside(service, word) for word in service.command]
        with (self.folder / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                self._network.command(NAMES.index(name) + 1, command),
                env=environ,
                cwd=environ["EDL_STATE_DIR"],  # the image's working folder
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _outside(self, service: Service, text: str) -> str:
        """Return a path of the container as that of this machine; any other text as it is."""
        for inside, outside in (service.mounts | {"/opt/edl": str(ROOT)}).items():
            if text == inside or text.startswith(inside + "/"):
                return outside + text.removeprefix(inside)
        return text

    def wait_end(self, timeout_s: float) -> JobStatus:
        """Return the job when it has ended."""
        deadline = time.monotonic() + timeout_s
        with ApiClient(self.url, TOKEN) as api:
            status = api.status("resnet50")
            while not status.state.ended:
                assert time.monotonic() < deadline, f"{status.reason}\n{self.logs()}"
                status = api.watch("resnet50", status.revision, 10)
        return status

    def is_healthy(self, name: str) -> bool:
        """Whether the health check of the image is content with a service."""
        service = self._services[name]
        environ = {key: self._outside(service, value) for key, value in service.environment.items()}
        environ["EDL_STATE_DIR"] = self._outside(service, "/state")
        if not (Path(environ["EDL_STATE_DIR"]) / ".role").exists():
            return False  # it would be content with a service that has not begun
        check = [sys.executable, str(DOCKER / "health.py")]
        inside = self._network.command(NAMES.index(name) + 1, check)
        done = subprocess.run(inside, env=os.environ | environ, capture_output=True, check=False)
        return done.returncode == 0

    def stop(self) -> None:
        for name in reversed(NAMES):
            if name in self._running:
                self._running[name].terminate()
        for process in self._running.values():
            process.wait(60)

    def logs(self) -> str:
        files = [path for path in self.folder.rglob("*log*") if path.is_file()]
        return "\n".join(f"--- {path}\n{path.read_text()[-2000:]}" for path in sorted(files))


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    """Two nodes with one trainer each, and a few small steps."""
    require_network_namespaces()
    token = tmp_path / "token"
    token.write_text(TOKEN)
    arguments = "--model ResNet18 --num_epochs 1 --total_images 64 --total_batch_size 16"
    arguments += " --save_steps 2"
    parsed = services(
        {
            "EDL_DATA_DIR": str(tmp_path / "data"),
            "EDL_TOKEN_FILE": str(token),
            "EDL_SLOTS": "1",
            "EDL_RESNET50_ARGS": arguments,
            "PADDLE_EDL_FLEET_CHECKPOINT_PATH": str(tmp_path / "checkpoint"),
        }
    )
    network = Network(len(NAMES), NAMES)
    stack = Stack(tmp_path, network, parsed)
    try:
        yield stack
        stack.stop()
    finally:
        network.close()


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_the_stack_of_compose_trains_resnet50_on_two_nodes_to_its_end(stack: Stack, capsys) -> None:
    stack.start("job-server")
    wait_until(lambda: stack.is_healthy("job-server"), 60, "the server is healthy")
    stack.start("node1")
    stack.start("node2")
    wait_until(lambda: stack.is_healthy("node1") and stack.is_healthy("node2"), 60, "nodes")

    status = stack.wait_end(600)
    assert status.state is JobState.SUCCEEDED, status.reason + stack.logs()
    assert [record.trainers for record in status.stages] == [2]
    assert status.step == 4
    assert verify([str(stack.folder / "checkpoint")]) == 0, capsys.readouterr().out
