"""A real server, two nodes and their jobs, for chaos: in network namespaces where root may."""

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks.harness import ROOT
from job_server.api.api_client import ApiClient
from job_server.api.errors import JobServerError
from job_server.api.wire import JobSpec, JobState, JobStatus
from tests.e2e.cluster import Cluster
from tests.e2e.netns import Network, NetworkError

NODES = (1, 2)
TOKEN = "a-token-of-chaos"
_DISK_MB = 512
_PORTS = 100  # of each node
_HERE = Path(__file__).parent


@functools.cache
def left_out() -> dict[str, str]:
    """Return the kinds of faults that this machine cannot have, with the reasons."""
    reasons: dict[str, str] = {}
    try:
        network = Network(1)
    except (NetworkError, OSError) as error:
        why = f"no network namespaces: {error}"
        reasons |= {"cut network": why, "lose packets": why}
    else:
        lossy = ["tc", "qdisc", "add", "dev", "eth0", "root", "netem", "loss", "1%"]
        if why := _tried(network.command(1, lossy)):
            reasons["lose packets"] = f"no netem: {why}"
        network.close()
    with tempfile.TemporaryDirectory() as folder:
        if why := mount_disk(Path(folder)):
            reasons |= {"fill disk": f"no tmpfs: {why}", "lock logs": f"no mounts: {why}"}
        else:
            _tried(["umount", folder])
    return reasons


def _tried(command: Sequence[str]) -> str:
    """Return what a command says against it; "": it was done."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return str(error)
    return done.stderr.strip() if done.returncode else ""


def mount_disk(path: Path) -> str:
    """Put a small file system there; return why that cannot be, "": it is there."""
    path.mkdir(parents=True, exist_ok=True)
    why = _tried(["mount", "-t", "tmpfs", "-o", f"size={_DISK_MB}m", "tmpfs", str(path)])
    # What is mounted below it later is seen by the namespaces of the nodes as well.
    return why or _tried(["mount", "--make-shared", str(path)])


class ChaosCluster(Cluster):
    """One server and two clients, whose logs, checkpoints and database lie on a disk of their own.

    Args:
        framework: torch or paddle.
        specs: of the jobs.
        slots: of each node.
        step_s: that a step takes longer than it would.
        network: None: all on loopback.
    """

    def __init__(
        self,
        folder: Path,
        *,
        framework: str,
        specs: Sequence[JobSpec],
        slots: int,
        step_s: float,
        network: Network | None,
    ) -> None:
        super().__init__(folder, slots=slots, script="true")
        self.network = network
        self.specs = {spec.job_id: spec for spec in specs}
        self.disk = folder / "disk"
        self.disk_error = mount_disk(self.disk)
        self.clock = folder / "clock"
        self.clock.write_text("0")
        self.tmp = folder / "tmp"
        self.tmp.mkdir()
        (folder / "servers").mkdir(mode=0o700)
        self.clients: dict[int, subprocess.Popen[bytes]] = {}
        self.others: list[subprocess.Popen[bytes]] = []  # that are refused, if all is well
        if network is not None:
            self.url = f"http://{network.addr(1)}:{self.port}"
        for job_id in self.specs:
            self._write_job(job_id, framework, step_s)

    def home(self, job_id: str) -> Path:
        return self.disk / "jobs" / job_id

    def checkpoint(self, job_id: str) -> Path:
        return self.disk / "checkpoints" / job_id

    def end_file(self, job_id: str) -> Path:
        return self.folder / f"{job_id}.end"

    def stamps(self, job_id: str) -> Path:
        return self.folder / f"{job_id}.stamps"

    def result(self, job_id: str) -> Path:
        return self.folder / f"{job_id}.npz"

    def _write_job(self, job_id: str, framework: str, step_s: float) -> None:
        home = self.home(job_id)
        home.mkdir(parents=True)
        (home / "train.sh").write_text(
            "#!/usr/bin/env bash\n"
            f"exec {sys.executable} -m pod_runtime.launch --log_dir {home}/log "
            f"{_HERE / 'train.py'} --framework {framework} --step_s {step_s} "
            f"--checkpoint {self.checkpoint(job_id)} --out {self.result(job_id)} "
            f"--stamps {self.stamps(job_id)} --end {self.end_file(job_id)}\n"
        )

    # --- programs

    def api(self) -> ApiClient:
        return ApiClient(self.url, TOKEN, timeout_s=5)

    def start_server(self) -> None:
        self.server = self._run(1, "job_server", self._server_args(self.port))

    def start_second_server(self) -> None:
        """Start one more on the same database, which it is to refuse."""
        self.others.append(self._run(1, "job_server", self._server_args(self.port + 1)))

    def _server_args(self, port: int) -> list[str]:
        bind = "127.0.0.1" if self.network is None else self.network.addr(1)
        args = ["--no_job", "--server_port", str(port), "--bind", bind]
        return [*args, "--db", str(self.disk / "server.db"), "--heartbeat_s", "1"]

    def start_client_of(self, node: int) -> None:
        self.clients[node] = self._run(node, "job_client", self._client_args(node, "client"))

    def start_second_client(self, node: int, own_folder: bool) -> None:
        """Start one more for the same node, which is to be refused."""
        args = self._client_args(node, "second" if own_folder else "client")
        self.others.append(self._run(node, "job_client", args))

    def _client_args(self, node: int, name: str) -> list[str]:
        first = self.first_port + (node - 1) * _PORTS
        home = self.disk / f"node{node}"
        args = ["--job_server", self.url, "--node_id", f"node{node}", "--grace_s", "3"]
        args += ["--log_dir", str(home / name), "--pod_path", str(home / "pods")]
        args += ["--cpu_slots", str(self.slots), "--port_range", f"{first}-{first + _PORTS - 1}"]
        return [*args, "--jobs_dir", str(self.disk / "jobs")]

    def _run(self, node: int, module: str, args: list[str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", module, *args]
        if self.network is not None:
            command = self.network.command(node, command)
        env = {
            **os.environ,
            "EDL_TOKEN": TOKEN,
            "PYTHONPATH": f"{_HERE / 'clock'}:{ROOT}",
            "CHAOS_CLOCK": str(self.clock),
            "TMPDIR": str(self.tmp),
            "XDG_RUNTIME_DIR": str(self.folder / "servers"),
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor"),  # which PyTorch leaves
        }
        with (self.folder / f"{module}{node}.log").open("ab") as log:
            return subprocess.Popen(
                command,
                env=env,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def spares(self) -> list[psutil.Process]:
        return self.find("pod_runtime.spare")

    def is_up(self) -> bool:
        """Whether the server answers."""
        try:
            with self.api() as api:
                api.health()
        except JobServerError:
            return False
        return True

    def job(self, job_id: str) -> JobStatus | None:
        """Return its status; None: the server is away, or does not know it."""
        try:
            with self.api() as api:
                return api.status(job_id)
        except JobServerError:
            return None

    def wait_job(self, job_id: str, *states: JobState, limit_s: float) -> JobStatus | None:
        """Return its status as soon as it is in one of these states; None: not in time."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            status = self.job(job_id)
            if status is not None and status.state in states:
                return status
            time.sleep(0.03)
        return None

    def thaw(self) -> None:
        """Have every stopped process go on."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if process.status() == psutil.STATUS_STOPPED:
                    process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """End all in order, and the network and the disk with it."""
        self.thaw()
        for client in self.clients.values():
            client.terminate()
        for client in self.clients.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                client.wait(30)
        super().stop()
        for other in self.others:
            with contextlib.suppress(ProcessLookupError):
                other.kill()
            other.wait()

    def remove(self, keep: Path | None) -> None:
        """Unmount and remove everything; `keep`: copy logs and databases there first."""
        if keep is not None:
            shutil.rmtree(keep, ignore_errors=True)
            shutil.copytree(self.folder, keep, ignore_dangling_symlinks=True, symlinks=True)
        if not self.disk_error:
            _tried(["umount", "-l", str(self.disk)])
        if self.network is not None:
            self.network.close()
        shutil.rmtree(self.folder, ignore_errors=True)
