"""The controller has the rights that it needs, and would miss each of them."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.k8s_controller.cluster import rbac
from tests.k8s_controller.cluster.cluster import Cluster
from tests.k8s_controller.cluster.kinds import Object
from tests.k8s_controller.jobs import scaled_job, training_job
from tests.k8s_controller.test_manifests import read_all
from tests.support import ROOT, wait_until

pytestmark = pytest.mark.full
ACCOUNT = "system:serviceaccount:edl-system:edl-controller"


def install(cluster: Cluster) -> None:
    cluster.store.create(cluster.store.kind("Namespace"), "", {"metadata": {"name": "edl-system"}})
    cluster.apply_file(ROOT / "manifests" / "crd.yaml")
    cluster.apply_file(ROOT / "manifests" / "rbac.yaml")


@contextlib.contextmanager
def controller(cluster: Cluster, folder: Path) -> Iterator[Path]:
    """Run one with the rights of its manifests, and its lease; yield its log."""
    token = cluster.api.token_of("edl-system", "edl-controller")
    config = cluster.api.kubeconfig(folder / "kubeconfig", token)
    log = folder / "controller.log"
    (deployed,) = (m for m in read_all("edl_controller.yaml") if m["kind"] == "Deployment")
    (container,) = deployed["spec"]["template"]["spec"]["containers"]
    args = [each for each in container["args"] if "liveness_port" not in each]
    env = {**os.environ, "KUBECONFIG": str(config), "POD_NAMESPACE": "edl-system"}
    command = [sys.executable, *container["command"][1:], *args, "--interval_s=0.5"]
    with log.open("ab") as file:
        process = subprocess.Popen(
            [*command, "--liveness_port=0", "--probe_address=127.0.0.1"],
            env=env, stdout=file, stderr=file, cwd=ROOT,
        )  # fmt: skip
    try:
        yield log
    finally:
        process.terminate()
        process.wait(120)


@pytest.mark.timeout(120)
def test_the_controller_has_the_rights_it_needs_and_would_miss_each(tmp_path: Path):
    with Cluster(tmp_path / "pods", pretends=True) as cluster:
        cluster.kubelet.add_node("n1")
        install(cluster)
        with controller(cluster, tmp_path) as log:
            cluster.apply(training_job(replicas=2, server={"storage": {"size": "1Gi"}}))
            cluster.apply(scaled_job("scaled", maxReplicas=2))
            wait_until(lambda: trainers(cluster), 40, "pods")
            wait_until(lambda: ("list", "priorityclasses") in asked(cluster), 40, "a look at all")
            cluster.kubelet.end_pod(*trainers(cluster)[0], code=1)
            wait_until(lambda: ("delete", "pods") in asked(cluster), 40, "another pod")
            wait_until(lambda: ("create", "events") in asked(cluster), 40, "an event")
            wait_until(lambda: ("update", "leases") in asked(cluster), 40, "the lease kept")
        with controller(cluster, tmp_path):  # another one, which finds what is there
            wait_until(lambda: ("get", "networkpolicies") in asked(cluster), 40, "all looked at")
        calls = cluster.api.calls_of(ACCOUNT)
        objects = [m for m in read_all("rbac.yaml") if m["kind"] != "ServiceAccount"]
    assert calls, log.read_text()
    assert forbidden(objects, calls) == [], log.read_text()
    unused = []
    for i, role in enumerate(objects):
        if role["metadata"]["name"] == "edl-controller" and "rules" in role:
            for taken, rules in rbac.without_each_right(role["rules"]):
                rest = [*objects[:i], {**role, "rules": rules}, *objects[i + 1 :]]
                if not forbidden(rest, calls):
                    unused.append(taken)
    # The end of a training, which takes a real one: test_training.py.
    assert unused == ["delete trainingjobs.paddlepaddle.org"]


def trainers(cluster: Cluster) -> list[tuple[str, str]]:
    """Return the namespaces and names of running trainer pods."""
    return [
        (pod["metadata"]["namespace"], pod["metadata"]["name"])
        for pod in cluster.store.all("Pod")
        if pod["metadata"]["labels"].get("paddlepaddle.org/role") == "trainer"
        and pod["status"].get("phase") == "Running"
    ]


def asked(cluster: Cluster) -> set[tuple[str, str]]:
    return {(call.verb, call.resource) for call in cluster.api.calls_of(ACCOUNT)}


def forbidden(objects: list[Object], calls: set[rbac.Call]) -> list[rbac.Call]:
    grants = rbac.grants_of(ACCOUNT, objects)
    return sorted(call for call in calls if not any(grant.allows(call) for grant in grants))
