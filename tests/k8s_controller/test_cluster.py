"""The cluster of the tests: its scheduler, its garbage collection, its nodes."""

from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.k8s_controller.cluster import eviction
from tests.k8s_controller.cluster.cluster import Cluster
from tests.k8s_controller.cluster.kinds import ApiError, Object
from tests.k8s_controller.cluster.rbac import Call, Grant, without_each_right
from tests.support import wait_until

pytestmark = pytest.mark.full  # for the pods that are processes


@pytest.fixture
def cluster(tmp_path: Path):
    with Cluster(tmp_path, pretends=True) as made:
        yield made


def pod(name: str, **spec: Any) -> Object:
    container = {"name": "main", "image": "edl", "resources": {"requests": {"cpu": "1"}}}
    return {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": "t"}},
        "spec": {"containers": [container | spec.pop("container", {})], **spec},
    }  # fmt: skip


def find(cluster: Cluster, name: str) -> Object | None:
    found = [each for each in cluster.store.all("Pod") if each["metadata"]["name"] == name]
    return found[0] if found else None


def phase(cluster: Cluster, name: str) -> str:
    found = find(cluster, name)
    return str(found["status"]["phase"]) if found else "gone"


def why_unscheduled(cluster: Cluster, name: str) -> str:
    conditions = (find(cluster, name) or {})["status"].get("conditions", [])
    return "".join(c.get("message", "") for c in conditions if c["type"] == "PodScheduled")


def test_pods_get_nodes_as_far_as_these_have_room_and_the_others_are_told_why(cluster):
    cluster.kubelet.add_node("n1", "2")
    cluster.kubelet.add_node("n2", "1")
    cluster.apply(*(pod(f"p{i}") for i in range(4)))
    wait_until(lambda: [phase(cluster, f"p{i}") for i in range(4)].count("Running") == 3)
    (waiting,) = (f"p{i}" for i in range(4) if phase(cluster, f"p{i}") != "Running")
    wait_until(lambda: "2 Insufficient cpu" in why_unscheduled(cluster, waiting))
    assert "0/2 nodes are available" in why_unscheduled(cluster, waiting)
    running = next(f"p{i}" for i in range(4) if f"p{i}" != waiting)
    cluster.store.delete(cluster.store.kind("Pod"), "default", running)
    wait_until(lambda: phase(cluster, waiting) == "Running")


def test_a_node_is_for_those_who_tolerate_its_taint_and_fit_its_labels(cluster):
    cluster.kubelet.add_node("gpu", labels={"kind": "a"}, more={"nvidia.com/gpu": "1"})
    taint = {"key": "nvidia.com/gpu", "effect": "NoSchedule"}
    cluster.store.patch(cluster.store.kind("Node"), "", "gpu", {"spec": {"taints": [taint]}})
    wants = {"container": {"resources": {"limits": {"nvidia.com/gpu": 1}}}}
    tolerates = [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    cluster.apply(
        pod("plain"),
        pod("elsewhere", tolerations=tolerates, nodeSelector={"kind": "b"}),
        pod("trainer", tolerations=tolerates, nodeSelector={"kind": "a"}, **wants),
    )
    wait_until(lambda: phase(cluster, "trainer") == "Running")
    wait_until(lambda: "untolerated taint" in why_unscheduled(cluster, "plain"))
    wait_until(lambda: "affinity/selector" in why_unscheduled(cluster, "elsewhere"))
    cluster.apply(pod("second", tolerations=tolerates, **wants))
    wait_until(lambda: "Insufficient nvidia.com/gpu" in why_unscheduled(cluster, "second"))


def test_what_its_owners_have_left_behind_is_collected(cluster):
    cluster.kubelet.add_node("n1")
    store = cluster.store
    owner = store.create(store.kind("ConfigMap"), "default", {"metadata": {"name": "owner"}})
    reference = {
        "apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner["metadata"]["uid"],
    }  # fmt: skip
    owned = pod("owned")
    owned["metadata"]["ownerReferences"] = [reference]
    cluster.apply(owned, pod("free"))
    wait_until(lambda: phase(cluster, "owned") == phase(cluster, "free") == "Running")
    store.delete(store.kind("ConfigMap"), "default", "owner", {"propagationPolicy": "Foreground"})
    wait_until(lambda: not store.all("ConfigMap"))
    assert find(cluster, "owned") is None, "the owner goes last"
    late = pod("late")
    late["metadata"]["ownerReferences"] = [reference]
    cluster.apply(late)
    wait_until(lambda: find(cluster, "late") is None)
    assert phase(cluster, "free") == "Running"


def test_pods_of_a_lost_node_stay_until_the_node_is_deleted(cluster):
    cluster.kubelet.add_node("n1")
    cluster.apply(pod("p"))
    wait_until(lambda: phase(cluster, "p") == "Running")
    cluster.kubelet.lose_node("n1")
    cluster.store.delete(cluster.store.kind("Pod"), "default", "p")
    assert "deletionTimestamp" in (find(cluster, "p") or {})["metadata"]
    cluster.kubelet.remove_node("n1")
    assert find(cluster, "p") is None


def test_a_pod_is_not_changed_but_for_its_image(cluster):
    cluster.apply(pod("p"))
    kind = cluster.store.kind("Pod")
    with pytest.raises(ApiError, match="nodeSelector"):
        cluster.store.patch(kind, "default", "p", {"spec": {"nodeSelector": {"a": "b"}}})


def test_a_budget_keeps_pods_from_being_evicted():
    pods = [pod(f"p{i}") for i in range(2)]
    for each in pods:
        each["status"] = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    selector = {"matchLabels": {"app": "t"}}
    budget: Object = {"metadata": {"name": "b"}, "spec": {"selector": selector, "minAvailable": 1}}
    assert eviction.refusal(pods[0], pods, [budget], lambda pod: None) is None
    budget["spec"]["minAvailable"] = "100%"
    assert eviction.refusal(pods[0], pods, [budget], lambda pod: None) is not None
    refused = eviction.refusal(pods[0], pods, [budget], lambda pod: 2)
    assert refused is not None
    assert (refused.code, "needs 2 healthy pods and has 2" in refused.message) == (429, True)


def test_each_right_is_taken_away_once():
    rules = [
        {"apiGroups": [""], "resources": ["pods", "events"], "verbs": ["get", "list"]},
        {"apiGroups": ["x"], "resources": ["y"], "verbs": ["create"]},
    ]
    taken = dict(without_each_right(rules))
    assert taken.keys() == {"get pods.", "list pods.", "get events.", "list events.", "create y.x"}
    rest = taken["list pods."]

    def allowed(call: Call) -> bool:
        return any(Grant(rule, None).allows(call) for rule in rest)

    assert not allowed(Call("list", "", "pods", "default"))
    assert allowed(Call("get", "", "pods", "default", "p"))
    assert allowed(Call("create", "x", "y", "default"))


PROGRAM = """
import os, signal, sys, time, subprocess, pathlib
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
out = pathlib.Path("/data/out")
out.write_text(f"{os.environ['POD']} {os.environ['WHERE']} {child.pid}")
pathlib.Path("/ready/now").touch()
signal.signal(signal.SIGTERM, lambda *_: (out.with_name("ended").touch(), sys.exit(7)))
print("it runs", flush=True)
time.sleep(600)
"""  # noqa: E501


def test_a_pod_is_processes_with_folders_an_environment_probes_a_grace_and_a_log(tmp_path: Path):
    program = tmp_path / "program.py"
    data = tmp_path / "data"
    data.mkdir()
    program.write_text(
        PROGRAM.replace('"/data/', f'"{data}/').replace('"/ready/now"', "sys.argv[1]")
    )
    container = {
        "command": ["python", str(program)], "args": ["/ready/now"],
        "env": [
            {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": "ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "WHERE", "value": "http://$(ADDRESS):80"},
        ],
        "volumeMounts": [{"name": "ready", "mountPath": "/ready"}],
        "readinessProbe": {"exec": {"command": ["test", "-e", "/ready/now"]}, "periodSeconds": 1},
    }  # fmt: skip
    volumes = [{"name": "ready", "emptyDir": {}}]
    with Cluster(tmp_path / "pods") as cluster:
        cluster.kubelet.add_node("n1")
        cluster.kubelet.missing_images.add("edl")
        cluster.apply(pod("p", container=container, volumes=volumes, restartPolicy="Never"))

        def status() -> Object:
            found: Object = (find(cluster, "p") or {})["status"]
            return found

        def state() -> Object:
            found: Object = status().get("containerStatuses", [{"state": {}}])[0]["state"]
            return found

        wait_until(lambda: state().get("waiting", {}).get("reason") == "ImagePullBackOff")
        cluster.kubelet.missing_images.clear()
        wait_until(lambda: eviction.is_ready(find(cluster, "p") or {}))
        name, where, child = (data / "out").read_text().split()
        assert (name, where) == ("p", f"http://{status()['podIP']}:80")
        assert status()["podIP"].startswith("127.")
        wait_until(lambda: cluster.kubelet.read_log("default", "p") == "it runs\n")
        seen = cluster.store.revision
        cluster.store.delete(cluster.store.kind("Pod"), "default", "p")
        wait_until(lambda: find(cluster, "p") is None)
        assert (data / "ended").exists(), "it was asked first"
        assert not psutil.pid_exists(int(child)) or (
            psutil.Process(int(child)).status() == psutil.STATUS_ZOMBIE
        ), "nor is anything of it left"
        codes = {
            each["state"]["terminated"]["exitCode"]
            for change in cluster.store.since(seen)
            if change.obj["kind"] == "Pod"
            for each in change.obj["status"]["containerStatuses"]
            if "terminated" in each["state"]
        }
        assert codes == {7}
