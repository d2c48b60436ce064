"""The manifests of a job's objects."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from kubernetes_validate import validate

from job_server.server.nodes import NODES_PER_S
from k8s_controller.decisions import objects
from k8s_controller.decisions.spec import MAX_PODS, parse
from tests.k8s_controller.jobs import training_job
from tests.k8s_controller.test_manifests import VERSIONS, restricted_by


def all_objects(**spec: Any) -> list[dict[str, Any]]:
    owner = training_job(**spec)
    found = parse(owner)
    return [
        *objects.foundations(owner, found, "a-token-of-twenty"),
        objects.server_pod(owner, found),
        objects.trainer_pod(owner, found, 3),
    ]


def full_template() -> dict[str, Any]:
    return {
        "metadata": {"labels": {"team": "vision", "paddlepaddle.org/role": "server"}},
        "spec": {
            "nodeSelector": {"disk": "ssd"},
            "tolerations": [{"key": "spot", "operator": "Exists"}],
            "priorityClassName": "high",
            "imagePullSecrets": [{"name": "registry"}],
            "serviceAccountName": "pulls",
            "topologySpreadConstraints": [
                {
                    "maxSkew": 1,
                    "topologyKey": "kubernetes.io/hostname",
                    "whenUnsatisfiable": "ScheduleAnyway",
                }
            ],
            "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
            "initContainers": [{"name": "fetch", "image": "edl"}],
            "containers": [
                {"name": "log", "image": "fluent"},
                {
                    "name": "trainer",
                    "image": "edl:1",
                    "imagePullPolicy": "Never",
                    "args": ["python", "-m", "pod_runtime.launch", "train.py"],
                    "resources": {"limits": {"nvidia.com/gpu": 2}},
                    "volumeMounts": [{"name": "data", "mountPath": "/tmp"}],
                    "env": [{"name": "LR", "value": "0.1"}],
                },
            ],
        },
    }


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "spec",
    [
        pytest.param({}, id="the least"),
        pytest.param(
            {"template": full_template(), "server": {"storage": {"size": "1Gi"}}}, id="all"
        ),
    ],
)
def test_kubernetes_takes_every_manifest(spec, version):
    for each in all_objects(**spec):
        validate(each, version, strict=True)


def test_pods_keep_the_restricted_standard():
    for each in all_objects(template=full_template()):
        if each["kind"] != "Pod":
            continue
        pod = each["spec"]
        assert restricted_by(pod) == []
        assert not pod["automountServiceAccountToken"]


@pytest.mark.parametrize(
    ("server", "image"),
    [
        pytest.param({}, {"image": "edl:1", "imagePullPolicy": "Never"}, id="the trainer's"),
        pytest.param({"image": "own:2"}, {"image": "own:2"}, id="its own"),
    ],
)
def test_a_servers_image_is_pulled_as_its_trainers(server, image):
    pod = next(
        each["spec"]
        for each in all_objects(template=full_template(), server=server)
        if each["kind"] == "Pod"
    )
    (container,) = pod["containers"]
    assert {key: container[key] for key in container if key.startswith("image")} == image
    assert pod["serviceAccountName"] == "pulls"
    assert pod["imagePullSecrets"] == [{"name": "registry"}]


def test_a_trainer_pod_is_the_template_with_the_job_client_in_it():
    pod = all_objects(template=full_template())[-1]
    spec = pod["spec"]
    assert pod["metadata"]["name"] == "digits-3"
    assert pod["metadata"]["labels"]["team"] == "vision"
    assert pod["metadata"]["labels"]["paddlepaddle.org/role"] == "trainer"  # ours come first
    assert spec["nodeSelector"] == {"disk": "ssd"}
    trainer = next(each for each in spec["containers"] if each["name"] == "trainer")
    assert trainer["args"] == ["python", "-m", "pod_runtime.launch", "train.py"]
    assert "--cpu_slots" not in trainer["command"][2]  # it has GPUs
    mounts = {each["mountPath"]: each["name"] for each in trainer["volumeMounts"]}
    assert mounts == {"/tmp": "data", "/state": "edl-state", "/dev/shm": "edl-shm"}


def test_everything_goes_with_the_job():
    for each in all_objects(server={"storage": {"size": "1Gi"}}):
        (reference,) = each["metadata"]["ownerReferences"]
        assert (reference["kind"], reference["uid"]) == ("TrainingJob", "u-1")


@pytest.mark.parametrize("most", [1, 250, MAX_PODS])
def test_a_server_hears_all_pods_of_its_job_and_those_that_replace_them(most):
    pod = objects.server_pod(owner := training_job(maxReplicas=most), parse(owner))
    (every_s,) = (
        int(each.partition("=")[2])
        for each in pod["spec"]["containers"][0]["args"]
        if each.startswith("--heartbeat_s=")
    )
    assert 2 * most <= NODES_PER_S * every_s


@pytest.mark.parametrize(
    ("server", "name", "asked"),
    [
        pytest.param({"storage": {"size": "1Gi"}}, "127.0.0.1", 2, id="it comes back"),
        pytest.param({"storage": {"size": "1Gi"}}, "gone.invalid", 1, id="the job was deleted"),
        pytest.param({}, "127.0.0.1", 1, id="its database is lost"),
    ],
)
def test_a_pod_that_leaves_waits_for_a_server_that_moves_with_its_database(
    tmp_path: Path, server: dict[str, Any], name: str, asked: int
):
    spec = all_objects(server=server)[-1]["spec"]
    hook = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    python = tmp_path / "python"
    asks = tmp_path / "asked"
    python.write_text(f'#!/bin/bash\necho "$@" >>{asks}; (($(wc -l <{asks}) > 1))')
    python.chmod(0o755)
    env = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "POD_NAME": "digits-3",
        "POD_UID": "0123456789",
        "PADDLE_JOBSERVER": f"http://{name}:8180",
    }
    done = subprocess.run(hook, env=env, timeout=60)
    assert done.returncode == (0 if asked == 2 else 1)
    line = "-m edl capacity digits-3.01234567 --slots 0 --wait 90\n"
    assert asks.read_text() == line * asked
