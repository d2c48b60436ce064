"""A training on nodes of their own: nothing but the network between them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from job_server.api.api_client import ApiClient
from job_server.api.wire import JobState, JobStatus
from tests.e2e.cluster import Cluster
from tests.e2e.netns import Network
from tests.support import ROOT

TOKEN = "a-token-of-the-tests"
PORT = 8180
_SERVER_NODE = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """What a trainer noted: it had committed this step, and lived, at that time."""

    node: int
    stage: int
    step: int
    at: float  # seconds since 1970


class Nodes(Cluster):
    """A job server and a job client on node 1, a job client on each other node.

    As by default, the client beside the server reaches it at 127.0.0.1.
    Each node has a folder of its own for checkpoints, logs and what it trained: `node_dir`, in
    `$NODE_DIR` for the script. All of them have the same ports.
    """

    def __init__(self, folder: Path, network: Network, *, slots: int, script: str) -> None:
        super().__init__(folder, slots=slots, script=script)
        self.network = network
        self.url = f"http://{network.addr(_SERVER_NODE)}:{PORT}"
        self.clients: dict[int, subprocess.Popen[bytes]] = {}

    def api(self) -> ApiClient:
        return ApiClient(self.url, TOKEN)

    def node_dir(self, node: int) -> Path:
        return self.folder / f"node{node}"

    def start_server(self) -> None:
        args = ["--no_job", "--bind", "0.0.0.0", "--server_port", str(PORT)]
        self.server = self._run(
            _SERVER_NODE, "job_server", [*args, "--db", str(self.folder / "server.db")]
        )

    def start_client_of(self, node: int, *more: str) -> None:
        home = self.node_dir(node)
        url = f"http://127.0.0.1:{PORT}" if node == _SERVER_NODE else self.url
        args = ["--job_server", url, "--node_id", f"node{node}", "--grace_s", "3"]
        args += ["--log_dir", str(home / "client"), "--pod_path", str(home / "pods")]
        args += ["--cpu_slots", str(self.slots), *more, str(self.folder / "train.sh")]
        self.clients[node] = self._run(node, "job_client", args)

    def wait_trained_by(self, *nodes: int, steps: int = 5, timeout_s: float = 120) -> JobStatus:
        """Wait until the trainers are on these nodes, by rank, and have trained `steps` more."""
        begin = self.wait_for(
            lambda now: now.state is JobState.RUNNING and self.where(now) == nodes,
            f"trained by nodes {nodes}",
            timeout_s,
        )
        return self.wait_for(
            lambda now: self.where(now) == nodes and now.step >= begin.step + steps,
            f"{steps} steps by nodes {nodes}",
            timeout_s,
        )

    def where(self, status: JobStatus) -> tuple[int, ...]:
        """The nodes of the trainers, by rank."""
        return tuple(
            int(pod.node_id.removeprefix("node"))
            for pod in sorted(status.pods, key=lambda pod: pod.pod_rank)
            for _rank in pod.ranks
        )

    def commits(self) -> Iterator[Commit]:
        """Yield what the trainers of all nodes have noted so far."""
        for path in sorted(self.folder.glob("node*/journal/*")):
            node = int(path.parent.parent.name.removeprefix("node"))
            for line in path.read_text().splitlines(keepends=True):
                if line.endswith("\n"):  # else it was killed while it wrote
                    stage, step, at = line.split()
                    yield Commit(node=node, stage=int(stage), step=int(step), at=float(at))

    def kill_node(self, node: int) -> None:
        """As when its power goes: no process of it says goodbye."""
        self.network.kill(node)
        if node in self.clients:
            self.clients.pop(node).wait(60)

    def stop(self) -> None:
        for node in list(self.clients):
            self.network.heal(node)
            self.client = self.clients.pop(node)
            if self.clients:
                self.client.terminate()
                self.client.wait(60)
        super().stop()

    def _run(self, node: int, module: str, args: list[str]) -> subprocess.Popen[bytes]:
        self.node_dir(node).mkdir(exist_ok=True)
        with (self.node_dir(node) / f"{module}.log").open("ab") as log:
            return subprocess.Popen(
                self.network.command(node, [sys.executable, "-m", module, *args]),
                env={**os.environ, "EDL_TOKEN": TOKEN, "NODE_DIR": str(self.node_dir(node))},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
