"""A whole cluster: its API server, its deciding parts, its nodes.

    python -m tests.k8s_controller.cluster.cluster --nodes 3 --kubeconfig FILE [FILES TO APPLY]

runs one until it is interrupted, for kubectl.
"""

import argparse
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import yaml

from tests.k8s_controller.cluster.api_server import ApiServer
from tests.k8s_controller.cluster.kinds import Object
from tests.k8s_controller.cluster.kubelet import Kubelet
from tests.k8s_controller.cluster.scheduler import Scheduler


class Cluster:
    """`api`, `kubelet` and `store` are its parts. It ends with its `with` block."""

    def __init__(self, folder: Path, *, pretends: bool = False) -> None:
        self.api = ApiServer()
        self.store = self.api.store
        self.kubelet = Kubelet(self.store, folder, pretends=pretends)
        self.api.read_log = self.kubelet.read_log
        self._scheduler = Scheduler(self.store)

    def __enter__(self) -> Self:
        self.api.__enter__()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.kubelet.stop()
        self._scheduler.stop()
        self.api.__exit__()

    def apply(self, *manifests: Object, namespace: str = "default") -> None:
        """Create objects, each in its own namespace or this one."""
        for each in manifests:
            group, _, version = each["apiVersion"].rpartition("/")
            (kind,) = (
                kind
                for kind in self.store.kinds.values()
                if (kind.group, kind.version, kind.kind) == (group, version, each["kind"])
            )
            where = each["metadata"].get("namespace", namespace) if kind.namespaced else ""
            self.store.create(kind, where, each)

    def apply_file(self, path: Path, namespace: str = "default") -> None:
        self.apply(*filter(None, yaml.safe_load_all(path.read_text())), namespace=namespace)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--cpu", default="8")
    parser.add_argument("--pretend", action="store_true", help="pods are ready, and run nothing")
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("files", type=Path, nargs="*")
    options = parser.parse_args(argv)
    with (
        tempfile.TemporaryDirectory() as folder,
        Cluster(Path(folder), pretends=options.pretend) as cluster,
    ):
        for number in range(options.nodes):
            cluster.kubelet.add_node(f"node-{number}", options.cpu)
        for path in options.files:
            cluster.apply_file(path)
        cluster.api.kubeconfig(options.kubeconfig)
        print(cluster.api.url, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
