"""`edl top --kubernetes`: what the collector counts, and what it prints of a cluster."""

import json
import time
from types import SimpleNamespace

import pytest

from edl.__main__ import main
from k8s_controller import collector
from k8s_controller.collector import load_of
from k8s_controller.decisions.capacity import quantity
from k8s_controller.kube_api import KubeError
from tests.k8s_controller.cluster.api_server import ApiServer
from tests.k8s_controller.cluster.kinds import Object
from tests.k8s_controller.test_manifests import read_all


def job(name: str, training: int | None, namespace: str = "a", **spec: object) -> Object:
    container = {"name": "trainer", "image": "edl", "command": ["true"]}
    template = {"spec": {"containers": [container]}}
    status = {} if training is None else {"status": {"trainingReplicas": training}}
    return {
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"maxReplicas": 10, "template": template, **spec}, **status,
    }  # fmt: skip


def ended(name: str) -> Object:
    made = job(name, 0)
    made["status"]["conditions"] = [{"type": "Complete", "status": "True"}]
    return made


def pod(phase: str, **resources: object) -> Object:
    return {
        "spec": {"containers": [{"name": "c", "resources": resources}]}, "status": {"phase": phase},
    }  # fmt: skip


def node(**allocatable: str) -> Object:
    return {"status": {"allocatable": allocatable}}


def test_jobs_count_with_the_trainers_that_train_and_those_that_have_ended_do_not():
    jobs = [job("one", 3), job("two", 2, slotsPerPod=4), job("new", None), ended("old")]
    load = load_of(jobs, [], [])
    assert load.running == (("one", 3), ("two", 8), ("new", 0))
    assert (load.submitted, load.pending) == (3, 1)


def test_a_job_that_trains_on_though_its_spec_was_made_wrong_counts_with_its_trainers():
    wrong = job("two", 2, slotsPerPod=4, autoscale=True, replicas=3)
    gpus = job("gpus", 2)
    (container,) = gpus["spec"]["template"]["spec"]["containers"]
    container |= {"resources": {"limits": {"nvidia.com/gpu": "8"}}, "command": []}
    odd = job("odd", 2, template=None)
    load = load_of([wrong, gpus, odd, job("new", None, template=None)], [], [])
    assert load.running == (("two", 8), ("gpus", 16), ("odd", 2), ("new", 0))
    assert load.pending == 1


def test_jobs_of_one_name_are_told_apart_by_their_namespaces():
    load = load_of([job("x", 1), job("x", 2, "b"), job("y", 1)], [], [])
    assert [name for name, _ in load.running] == ["a/x", "b/x", "y"]


def test_what_running_pods_ask_for_is_a_part_of_what_nodes_have():
    pods = [
        pod("Running", requests={"cpu": "1500m"}),
        pod("Running", limits={"cpu": 1, "nvidia.com/gpu": 2}, requests={"cpu": "500m"}),
        pod("Running"),
        pod("Pending", requests={"cpu": "5"}),
        pod("Succeeded", requests={"cpu": "5"}),
    ]
    load = load_of([], pods, [node(cpu="3920m"), node(cpu="80m", **{"nvidia.com/gpu": "8"})])
    assert (load.cpu, load.gpu) == (0.5, 0.25)
    assert load_of([], pods, [node(memory="1Gi")]).cpu is None


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3920m", 3.92),
        (4, 4),
        ("1Gi", 2**30),
        ("2k", 2000),
        ("0.5", 0.5),
        ("1e3", 1000),
        ("1Ei", 2**60),
        ("2E", 2e18),
    ],
)
def test_a_quantity_is_read_as_kubernetes_writes_it(text, number):
    assert quantity(text) == number


@pytest.mark.parametrize("text", ["", "x", "5Zi", "i", "infinity", "nan", "1e999", "-1"])
def test_what_is_no_quantity_is_refused(text):
    with pytest.raises(ValueError, match="is no quantity"):
        quantity(text)


def test_edl_top_prints_the_cluster_of_a_kubeconfig(
    api_server: ApiServer, tmp_path, capsys, monkeypatch
):
    store = api_server.store
    if ("paddlepaddle.org", "v1", "trainingjobs") not in store.kinds:
        kind = store.kind("CustomResourceDefinition")
        store.create(kind, "", read_all("crd.yaml")[0])
    store.create(store.kind("Namespace"), "", {"metadata": {"name": "collected"}})
    (example,) = read_all("examplejob.yaml")
    kind = store.kind("TrainingJob")
    store.create(kind, "collected", example)
    status = {"status": {"trainingReplicas": 2}}
    store.patch(kind, "collected", "example", status, subresource="status")
    config = api_server.kubeconfig(tmp_path / "config")
    argv = ["top", "--kubernetes", "--kubeconfig", str(config), "--count", "1"]
    argv += ["--namespace", "collected"]
    assert main(argv) == 0
    header, line = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["SUBMITTED-JOBS", "PENDING-JOBS", "RUNNING-TRAINERS"]
    assert line.split()[:3] == ["1", "0", "example:2"]
    assert main([*argv, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["running"] == {"example": 2}

    codes = [503]

    def pause(_seconds: float) -> None:
        if codes:
            api_server.fail_next(codes.pop(), verb="list")

    monkeypatch.setattr("k8s_controller.collector.time.sleep", pause)
    argv[argv.index("--count") + 1] = "2"
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 3, "it goes on where the API server cannot answer once"
    assert "trying again: Kubernetes answers 503" in err
    api_server.fail_next(503, verb="list")
    assert main(argv) == 1, "one that does not answer from the start is told at once"
    assert "Kubernetes answers 503" in capsys.readouterr().err


@pytest.mark.parametrize("interval_s", ["1", "300"])
def test_edl_top_goes_on_however_rarely_it_looks(interval_s, capsys, monkeypatch):
    clock, asked = [0.0], list[float]()
    away = {300.0 if interval_s == "300" else 1.0}  # the second look finds no API server

    class Kube:
        def list_all(self, kind: str, _namespace: str | None = None) -> list[Object]:
            if kind == "TrainingJob":
                asked.append(clock[0])
                if clock[0] in away or clock[0] >= 400:
                    raise KubeError(503, "etcdserver: no leader")
            return []

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    now = SimpleNamespace(monotonic=lambda: clock[0], time=time.time, sleep=sleep)
    monkeypatch.setattr(collector, "time", now)
    monkeypatch.setattr(collector, "KubeApi", Kube)
    monkeypatch.setattr(collector, "load_config", lambda _path: None)
    argv = ["top", "--kubernetes", "--interval_s", interval_s]
    assert main([*argv, "--count", "2"]) == 0
    assert len(asked) == 3
    assert asked[2] - asked[1] <= 10
    capsys.readouterr()
    assert main(argv) == 1, "one that stays away is told after a minute"
    assert asked[-1] - next(at for at in asked if at >= 400) <= 80


def test_a_cluster_that_cannot_be_asked_is_named(tmp_path, capsys):
    config = str(tmp_path / "none")
    assert main(["top", "--kubernetes", "--kubeconfig", config, "--count", "1"]) == 2
    assert config in capsys.readouterr().err
    for text in ("not: [yaml", "text", "- a list", "clusters: 3"):
        (tmp_path / "none").write_text(text)
        assert main(["top", "--kubernetes", "--kubeconfig", config, "--count", "1"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{config}: it cannot be read: " in line
    assert main(["top", "--kubernetes", "--count", "0"]) == 2
    assert "--count" in capsys.readouterr().err
