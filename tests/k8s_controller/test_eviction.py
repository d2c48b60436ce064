"""`kubectl drain` gets the pods of a job from a node, one at a time."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes.config
import pytest

from k8s_controller.controller import Controller
from k8s_controller.kube_api import KubeApi, KubeError
from k8s_controller.metrics import Metrics
from tests.k8s_controller.cluster.cluster import Cluster
from tests.k8s_controller.cluster.job_servers import JobServers
from tests.k8s_controller.jobs import scaled_job, training_job
from tests.support import ROOT, wait_until

pytestmark = pytest.mark.full


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Run a cluster whose jobs somebody looks after all the time."""
    with Cluster(tmp_path / "pods", pretends=True) as made, JobServers(made.store):
        made.apply_file(ROOT / "manifests" / "crd.yaml")
        kubernetes.config.load_kube_config(str(made.api.kubeconfig(tmp_path / "kubeconfig")))
        controller = Controller(KubeApi(), Metrics(), 0.1)
        ends = threading.Event()

        def look() -> None:
            while not ends.wait(0.1):
                controller.look_at("default", "digits")

        controller.start()
        looking = threading.Thread(target=look)
        looking.start()
        try:
            yield made
        finally:
            ends.set()
            looking.join()
            controller.stop()


def trainers(cluster: Cluster) -> dict[str, dict[str, Any]]:
    return {
        pod["metadata"]["name"]: pod
        for pod in cluster.store.all("Pod")
        if pod["metadata"]["labels"].get("paddlepaddle.org/role") == "trainer"
    }


def train_with(cluster: Cluster, pods: int) -> None:
    def does() -> bool:
        job = cluster.store.get(cluster.store.kind("TrainingJob"), "default", "digits")
        status = job.get("status") or {}
        return status.get("phase") == "Running" and status["trainingReplicas"] == pods

    wait_until(lambda: does() and needed(cluster) == pods - 1, 60)


def needed(cluster: Cluster) -> object:
    (budget,) = cluster.store.all("PodDisruptionBudget")
    return budget["spec"].get("minAvailable")


def evict(cluster: Cluster, name: str) -> None:
    """Raises a KubeError: not now."""
    path = f"/api/v1/namespaces/default/pods/{name}/eviction"
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
    KubeApi()._call("POST", path, body)


def job_of_two(*, autoscale: bool) -> dict[str, Any]:
    """Return one whose `spec.replicas` is not there, so that its scale cannot be read."""
    job = scaled_job(maxReplicas=2) if autoscale else training_job(minReplicas=2)
    del job["metadata"]["uid"]
    return job


@pytest.mark.timeout(120)
@pytest.mark.parametrize("autoscale", [True, False])
def test_pods_are_evicted_one_at_a_time_whatever_decides_on_their_number(
    cluster: Cluster, autoscale: bool
):
    store = cluster.store
    cluster.kubelet.add_node("n1")
    cluster.apply(job_of_two(autoscale=autoscale))
    if autoscale:
        given = {"autoscale": {"replicas": 2, "reason": "there is room"}}
        kind = store.kind("TrainingJob")
        store.patch(kind, "default", "digits", {"status": given}, subresource="status")
    train_with(cluster, 2)
    held = {"metadata": {"finalizers": ["example.org/slow"]}}  # it takes its time to go
    store.patch(store.kind("Pod"), "default", "digits-0", held)
    evict(cluster, "digits-0")
    wait_until(lambda: trainers(cluster).keys() >= {"digits-1", "digits-2"}, 120)
    wait_until(lambda: needed(cluster) == 2, 120)
    with pytest.raises(KubeError, match="disruption budget"):
        evict(cluster, "digits-1")
    free: dict[str, Any] = {"metadata": {"finalizers": []}}
    store.patch(store.kind("Pod"), "default", "digits-0", free)
    train_with(cluster, 2)
    evict(cluster, "digits-1")


@pytest.mark.timeout(120)
def test_a_node_can_be_drained_though_there_is_none_for_the_pods_that_leave_it(cluster: Cluster):
    store = cluster.store
    cluster.kubelet.add_node("n1")
    cluster.apply(job_of_two(autoscale=False))
    train_with(cluster, 2)
    store.patch(store.kind("Node"), "", "n1", {"spec": {"unschedulable": True}})
    evict(cluster, "digits-0")
    wait_until(lambda: needed(cluster) == 0, 120, "its substitute is on no node")
    evict(cluster, "digits-1")


@pytest.mark.timeout(120)
def test_pods_that_are_kept_after_the_end_can_all_be_evicted(cluster: Cluster):
    store = cluster.store
    cluster.kubelet.add_node("n1")
    job = job_of_two(autoscale=False)
    job["spec"]["cleanPodPolicy"] = "None"
    cluster.apply(job)
    train_with(cluster, 2)
    ended = {"type": "Complete", "status": "True", "reason": "Succeeded", "message": ""}
    kind, status = store.kind("TrainingJob"), {"phase": "Succeeded", "conditions": [ended]}
    store.patch(kind, "default", "digits", {"status": status}, subresource="status")
    wait_until(lambda: needed(cluster) == 0, 60)
    for name in ("digits-0", "digits-1"):
        evict(cluster, name)


@pytest.mark.timeout(120)
def test_a_budget_that_somebody_deletes_keeps_pods_from_being_evicted_once_it_is_made_again(
    cluster: Cluster,
):
    store = cluster.store
    cluster.kubelet.add_node("n1")
    job = job_of_two(autoscale=False)
    job["spec"] |= {"replicas": 2, "maxReplicas": 3}
    cluster.apply(job)
    train_with(cluster, 2)
    store.delete(store.kind("PodDisruptionBudget"), "default", "digits")
    store.patch(store.kind("TrainingJob"), "default", "digits", {"spec": {"replicas": 3}})
    wait_until(lambda: len(trainers(cluster)) == 3, 60)
    wait_until(lambda: bool(store.all("PodDisruptionBudget")) and needed(cluster) == 2, 60)
