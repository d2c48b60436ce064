"""The commands of docs/kubernetes.md work, by kubectl on the tests' API server."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.k8s_controller.cluster.cluster import Cluster
from tests.support import ROOT


def commands(start: str) -> list[str]:
    """Return the lines of the page's shell blocks that begin so, with names filled in."""
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    lines = [line.partition("  #")[0] for block in blocks for line in block.splitlines()]
    for name, value in {"REGISTRY": "registry.example", "TAG": "v1", "/JOB": "/example"}.items():
        lines = [line.replace(name, value) for line in lines]
    return [line for line in lines if line.startswith(start)]


@pytest.mark.full
def test_the_pages_commands_install_the_controller_and_run_the_example(tmp_path: Path):
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not here: it applies the manifests")
    shutil.copytree(ROOT / "manifests", tmp_path / "manifests")
    with Cluster(tmp_path / "pods", pretends=True) as cluster:
        store, config = cluster.store, cluster.api.kubeconfig(tmp_path / "config")

        def run(command: str) -> str:
            """Return what it says of what went wrong."""
            # Without `--validate`: this API server has no OpenAPI, and others check the schemas.
            command = command.replace("kubectl apply", "kubectl apply --validate=false")
            done = subprocess.run(
                ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False,
                env=os.environ | {"KUBECONFIG": str(config)},
            )  # fmt: skip
            return done.stderr

        installing = [*commands("sed "), *commands("kubectl apply ")]
        assert len(installing) == 4
        assert [run(each) for each in installing] == [""] * 4
        used = store.get(store.kind("Deployment"), "edl-system", "edl-controller")
        (controller,) = used["spec"]["template"]["spec"]["containers"]
        job = store.get(store.kind("TrainingJob"), "default", "example")
        (trainer,) = job["spec"]["template"]["spec"]["containers"]
        assert controller["image"] == trainer["image"] == "registry.example/edl:v1"
        (scale,) = commands("kubectl scale ")
        assert run(scale) == ""
        assert "replicas is more than maxReplicas" in run(scale.replace("=4", "=5"))
        suspend, autoscale = commands("kubectl patch ")
        assert run(suspend) == run(autoscale) == ""
        spec = store.get(store.kind("TrainingJob"), "default", "example")["spec"]
        assert (spec["suspend"], spec["autoscale"]) == (True, True)
        assert "replicas is the controller's with autoscale" in run(scale)
        (delete,) = commands("kubectl delete ")
        assert run(delete) == ""
        assert store.all("TrainingJob") == []
