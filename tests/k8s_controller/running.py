"""A controller as a process, and a TrainingJob to look at, for tests on the tests' cluster."""

import base64
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from job_server.api.api_client import ApiClient
from job_server.api.wire import JobStatus
from k8s_controller.decisions.objects import PORT
from tests.k8s_controller.cluster.cluster import Cluster
from tests.k8s_controller.cluster.kinds import ApiError
from tests.k8s_controller.cluster.remote import RemoteCluster
from tests.support import ROOT


def start_controller(
    cluster: Cluster, folder: Path, *args: str, elects: bool = False
) -> subprocess.Popen[bytes]:
    """Start a controller; what it says is in the folder's `controller.log`.

    Args:
        elects: it acts only while it has the lease.
    """
    kubeconfig = cluster.api.kubeconfig(folder / "kubeconfig")
    return start_controller_by(kubeconfig, folder, *args, elects=elects)


def start_controller_by(
    kubeconfig: Path, folder: Path, *args: str, elects: bool = False
) -> subprocess.Popen[bytes]:
    """Start a controller with a kubeconfig of its own."""
    log = folder / "controller.log"
    command = [
        sys.executable, "-m", "k8s_controller", f"--kubeconfig={kubeconfig}", "--liveness_port=0",
        "--probe_address=127.0.0.1", *([] if elects else ["--no_leader_elect"]), *args,
    ]  # fmt: skip
    with log.open("ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, cwd=ROOT)


@contextmanager
def running_controller(cluster: Cluster, folder: Path, *args: str) -> Iterator[Path]:
    """Run a controller; yield its log."""
    log = folder / "controller.log"
    process = start_controller(cluster, folder, "--interval_s=0.5", *args)
    try:
        yield log
    finally:
        process.terminate()
        try:
            process.wait(120)
        finally:
            process.kill()
    assert process.returncode == 0, log.read_text()[-3000:]


class LiveJob:
    """A TrainingJob of a cluster."""

    def __init__(self, cluster: Cluster | RemoteCluster, manifest: dict[str, Any]) -> None:
        self._cluster, self._name = cluster, str(manifest["metadata"]["name"])
        self._namespace = str(manifest["metadata"]["namespace"])
        self._kind = cluster.store.kind("TrainingJob")
        cluster.apply(manifest)

    def change(self, **spec: Any) -> None:
        self._cluster.store.patch(self._kind, self._namespace, self._name, {"spec": spec})

    def status(self) -> dict[str, Any]:
        job = self._cluster.store.get(self._kind, self._namespace, self._name)
        return dict(job.get("status") or {})

    def trains_with(self, pods: int) -> bool:
        status = self.status()
        counts = [status.get(f"{each}Replicas") for each in ("desired", "training")]
        return counts == [pods, pods] and status["phase"] == "Running"

    def pods(self) -> list[str]:
        """Return the names of its trainer pods."""
        return sorted(
            str(pod["metadata"]["name"])
            for pod in self._cluster.store.all("Pod", self._namespace)
            if pod["metadata"]["labels"].get("paddlepaddle.org/role") == "trainer"
        )

    def delete_pod(self, name: str) -> None:
        """Delete a pod as `kubectl drain` does, with its grace."""
        self._cluster.store.delete(self._cluster.store.kind("Pod"), self._namespace, name)

    def server_is_ready(self) -> bool:
        """Whether its server's probes say yes, and it was not started again for saying no."""
        store = self._cluster.store
        pod = store.get(store.kind("Pod"), self._namespace, f"{self._name}-server")
        (container,) = pod["status"]["containerStatuses"]
        return bool(container["ready"]) and container["restartCount"] == 0

    def training(self) -> JobStatus:
        """Return what its job server says."""
        store = self._cluster.store
        secret = store.get(store.kind("Secret"), self._namespace, f"{self._name}-token")
        pod = store.get(store.kind("Pod"), self._namespace, f"{self._name}-server")
        token = base64.b64decode(secret["data"]["token"]).decode()
        with ApiClient(f"http://{pod['status']['podIP']}:{PORT}", token) as api:
            return api.status(self._name)

    def is_gone(self) -> bool:
        try:
            self._cluster.store.get(self._kind, self._namespace, self._name)
        except ApiError:
            return True
        return False
