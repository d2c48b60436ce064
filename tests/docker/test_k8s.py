"""The manifests for Kubernetes: valid by its schemas, no rights too many, commands that run."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from distill_reader import discovery, serve
from pod_runtime.run import read_config
from tests.docker.compose import DOCKER, Service
from tests.docker.test_compose import command_line
from tests.k8s_controller.cluster.api_server import ApiServer
from tests.k8s_controller.test_manifests import VERSIONS as NEWEST
from tests.k8s_controller.test_manifests import restricted_by
from tests.support import ROOT

K8S = DOCKER / "k8s"
OVERLAYS = ("digits", "imagenet-gpu")
VERSIONS = ("1.29", *NEWEST)
Manifest = dict[str, Any]


def read_all(text: str) -> list[Manifest]:
    return [each for each in yaml.safe_load_all(text) if each]


def base() -> list[Manifest]:
    listed = yaml.safe_load((K8S / "base" / "kustomization.yaml").read_text())["resources"]
    return [each for name in listed for each in read_all((K8S / "base" / name).read_text())]


def prepared(copy: Path, overlay: str) -> Path:
    """Copy all manifests; return the overlay's folder, with secrets as its user makes them."""
    shutil.copytree(K8S, copy)
    folder = copy / overlay
    (folder / "secrets").mkdir()
    for name in ("token", "redis_password"):
        (folder / "secrets" / name).write_text("correct-horse\n")
    return folder


def told(start: str) -> str:
    """Return the command of the README that begins so, with names of an image filled in."""
    found = re.search(rf"^{re.escape(start)}[^;\n]*", (K8S / "README.md").read_text(), re.MULTILINE)
    assert found is not None, start
    command = found[0].partition("  #")[0]
    return command.replace("REGISTRY", "registry.example").replace("TAG", "v1")


@pytest.fixture(scope="session")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Manifest]]:
    """What kustomize makes of each overlay, with secrets as its user makes them."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not here: its kustomize puts the overlays together")
    copy = tmp_path_factory.mktemp("k8s")
    found = {}
    for overlay in OVERLAYS:
        folder = prepared(copy / overlay, overlay)
        done = subprocess.run(
            ["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        found[overlay] = read_all(done.stdout)
    return found


def workloads(manifests: list[Manifest]) -> dict[str, Manifest]:
    """The pods' specs, by the names of what makes them."""
    return {
        each["metadata"]["name"]: each["spec"]["template"]["spec"]
        for each in manifests
        if each["kind"] in ("Deployment", "Job")
    }


def containers(pod: Manifest) -> Iterator[Manifest]:
    yield from pod["containers"]
    yield from pod.get("initContainers", [])


def everything(rendered: dict[str, list[Manifest]]) -> Iterator[tuple[str, Manifest]]:
    for manifests in rendered.values():
        yield from workloads(manifests).items()


# --- valid


@pytest.mark.parametrize("version", VERSIONS)
def test_the_base_is_valid_by_the_schemas_of_kubernetes(version: str):
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for manifest in base():
        if manifest["metadata"]["name"] != "edl-teacher":  # whose volume an overlay adds
            kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_is_valid_by_the_schemas_of_kubernetes(rendered, overlay: str):
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for manifest in rendered[overlay]:
        for version in VERSIONS:
            kubernetes_validate.validate(manifest, version, strict=True)


def test_every_volume_that_is_mounted_is_there_and_none_is_left_over(rendered):
    for name, pod in everything(rendered):
        mounted = {m["name"] for each in containers(pod) for m in each["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}, name


def test_selectors_find_their_pods_and_probes_and_services_their_ports(rendered):
    for manifests in rendered.values():
        pods = [m["spec"]["template"] for m in manifests if m["kind"] in ("Deployment", "Job")]
        for manifest in manifests:
            spec = manifest.get("spec", {})
            selector = spec.get("selector") or spec.get("podSelector")
            if selector is None or manifest["kind"] == "Job":
                continue
            selected = selector.get("matchLabels", selector)
            wanted = selected.items()
            found = [pod for pod in pods if wanted <= pod["metadata"]["labels"].items()]
            assert len(found) == 1, manifest["metadata"]["name"]
            assert selected["app.kubernetes.io/instance"], "or it finds another chart's pods"
            names = {p["name"] for c in found[0]["spec"]["containers"] for p in c.get("ports", [])}
            assert {port["targetPort"] for port in spec.get("ports", [])} <= names
    for name, pod in everything(rendered):
        for container in containers(pod):
            names = {port["name"] for port in container.get("ports", [])}
            for probe in ("readinessProbe", "livenessProbe", "startupProbe"):
                http = container.get(probe, {}).get("httpGet")
                assert http is None or http["port"] in names, name


def test_what_a_component_takes_from_whom_is_said_by_a_policy(rendered):
    for manifests in rendered.values():
        labels = {
            m["metadata"]["name"]: m["spec"]["template"]["metadata"]["labels"]
            for m in manifests
            if m["kind"] in ("Deployment", "Job")
        }
        callers = {}
        for policy in (m for m in manifests if m["kind"] == "NetworkPolicy"):
            (rule,) = policy["spec"]["ingress"]
            callers[policy["metadata"]["name"]] = {
                name
                for peer in rule["from"]
                for name, has in labels.items()
                if peer["podSelector"]["matchLabels"].items() <= has.items()
            }
            own = workloads(manifests)[policy["metadata"]["name"]]["containers"][0]
            assert [p["port"] for p in rule["ports"]] == [p["name"] for p in own["ports"]]
        assert callers == {
            "edl-redis": {"edl-discovery"},
            "edl-discovery": {"edl-teacher", "edl-student"},
            "edl-teacher": {"edl-student"},
        }


def test_who_wants_a_gpu_tolerates_that_its_node_is_kept_for_such(rendered):
    wanting = 0
    for _name, pod in everything(rendered):
        if any("nvidia.com/gpu" in each["resources"]["limits"] for each in containers(pod)):
            wanting += 1
            assert [each["key"] for each in pod["tolerations"]] == ["nvidia.com/gpu"]
    assert wanting == 2


def test_a_roll_out_needs_no_gpu_beyond_those_of_the_teachers(rendered):
    (teacher,) = (
        m
        for m in rendered["imagenet-gpu"]
        if m["kind"] == "Deployment" and m["metadata"]["name"] == "edl-teacher"
    )
    assert teacher["spec"]["strategy"]["rollingUpdate"]["maxSurge"] == 0


def test_no_pod_can_fill_the_disk_of_its_node(rendered):
    for name, pod in everything(rendered):
        for volume in pod["volumes"]:
            if "emptyDir" in volume:
                assert volume["emptyDir"].get("sizeLimit"), (name, volume["name"])


def test_an_image_that_the_overlay_names_is_that_of_every_container_of_ours(tmp_path: Path):
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not here: its kustomize puts the overlays together")
    overlay = prepared(tmp_path / "k8s", "digits")
    # The very command that the README tells those to run who have kubectl alone.
    subprocess.run(["bash", "-c", told("printf ")], cwd=overlay, check=True)
    done = subprocess.run(
        ["kubectl", "kustomize", str(overlay)], capture_output=True, text=True, check=True
    )
    used = [
        each["image"]
        for pod in workloads(read_all(done.stdout)).values()
        for each in containers(pod)
    ]
    assert set(used) == {"registry.example/edl:v1", "redis:7.4-alpine"}
    assert used.count("registry.example/edl:v1") == 4, "the teacher's training, too"


def test_claims_are_made_or_named_as_the_users_own(rendered):
    for overlay, manifests in rendered.items():
        made = {m["metadata"]["name"] for m in manifests if m["kind"] == "PersistentVolumeClaim"}
        named = {
            volume["persistentVolumeClaim"]["claimName"]
            for pod in workloads(manifests).values()
            for volume in pod["volumes"]
            if "persistentVolumeClaim" in volume
        }
        told = (K8S / overlay / "kustomization.yaml").read_text()
        assert all(f" {claim} " in told for claim in named - made)


# --- applied


@pytest.mark.full
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_the_readme_says_works_on_an_api_server(overlay: str, tmp_path: Path):
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not here: it applies the overlays")
    folder = prepared(tmp_path / "k8s", overlay)
    with ApiServer() as server:
        store = server.store
        store.create(store.kind("Namespace"), "", {"metadata": {"name": "edl"}})
        environment = os.environ | {"KUBECONFIG": str(server.kubeconfig(tmp_path / "config"))}

        def run(start: str) -> str:
            """Run a command of the README; return what it says of what went wrong."""
            # Without `--validate`: this API server has no OpenAPI, and others check the schemas.
            command = told(start).replace("kubectl apply", "kubectl apply --validate=false")
            done = subprocess.run(
                ["bash", "-c", command], cwd=folder, env=environment, capture_output=True,
                text=True, check=False,
            )  # fmt: skip
            return done.stderr

        def teacher() -> Manifest:
            found: Manifest = store.get(store.kind("Deployment"), "edl", "edl-teacher")["spec"]
            return found

        assert run("printf ") == run(APPLY) == ""
        assert len(store.all("NetworkPolicy", "edl")) == len(store.all("Deployment", "edl")) == 3
        usual = teacher()["replicas"]
        assert run("kubectl scale ") == ""
        assert teacher()["replicas"] == 5
        (folder / "secrets" / "token").write_text("another\n")
        assert "field is immutable" in run(APPLY), "the Job has the secret's old name"
        assert run("kubectl delete ") == run(APPLY) == ""
        secrets = {
            volume["secret"]["secretName"]
            for each in (*store.all("Deployment", "edl"), *store.all("Job", "edl"))
            for volume in each["spec"]["template"]["spec"]["volumes"]
            if "secret" in volume
        }
        assert len(secrets) == 1
        assert len(store.all("Secret", "edl")) == 2, "the old ones stay, as the README says"
        assert teacher()["replicas"] == usual


APPLY = "kubectl apply "

# --- rights


def test_no_pod_has_more_rights_than_it_needs(rendered):
    for name, pod in everything(rendered):
        assert restricted_by(pod) == [], name
        assert pod["automountServiceAccountToken"] is False, name
        assert pod["enableServiceLinks"] is False, name
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["securityContext"]["runAsUser"] > 0, name
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        for container in containers(pod):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, name
            assert container["resources"]["requests"], name
            assert container["resources"]["limits"]["memory"], name


def test_secrets_are_files_that_the_user_makes_and_stand_nowhere_else(rendered):
    for manifests in rendered.values():
        (secret,) = (m for m in manifests if m["kind"] == "Secret")
        assert secret["metadata"]["name"].startswith("edl-distill-"), "a new one, new pods"
        assert secret["data"].keys() == {"token", "redis_password"}
        for pod in workloads(manifests).values():
            used = [v["secret"]["secretName"] for v in pod["volumes"] if "secret" in v]
            assert used == [secret["metadata"]["name"]]
    for path in K8S.rglob("secrets"):
        assert subprocess.run(["git", "check-ignore", "-q", path], check=False).returncode == 0


def test_a_pod_that_ends_has_the_time_that_its_program_takes_for_it(rendered):
    for manifests in rendered.values():
        pods = workloads(manifests)
        (teacher,) = pods["edl-teacher"]["containers"]
        (drain,) = (a for a in teacher["args"] if a.startswith("--drain_timeout_s="))
        grace_s = pods["edl-teacher"]["terminationGracePeriodSeconds"]
        assert grace_s >= float(drain.partition("=")[2]) + 10
        assert pods["edl-student"]["terminationGracePeriodSeconds"] >= 60


# --- commands, by the real entry point and the real parsers


def run_by(container: Manifest, folder: Path) -> list[str]:
    """Return what the image's entry point runs for a container, without the Python before it."""
    folder.mkdir()
    arguments = [text.replace("/opt/edl", str(ROOT)) for text in container["args"]]
    arguments = [text.replace("$(POD_IP)", "10.1.2.3") for text in arguments]
    environment = {each["name"]: each.get("value", "10.1.2.3") for each in container["env"]}
    service = Service(
        name="k8s", profiles=(), command=tuple(arguments), environment=environment, mounts={},
        settings={},
    )  # fmt: skip
    return command_line(service, folder)


@pytest.mark.parametrize(("overlay", "gpus"), [("digits", []), ("imagenet-gpu", [0])])
def test_a_teacher_gets_a_command_line_that_it_takes(rendered, tmp_path, overlay, gpus):
    (container,) = workloads(rendered[overlay])["edl-teacher"]["containers"]
    _m, name, *args = run_by(container, tmp_path / "run")
    assert name == "distill_reader.serve"
    model = tmp_path / "model"
    model.mkdir()
    read = serve.parser().parse_args([a.replace("/model", str(model)) for a in args])
    (mount,) = (m for m in container["volumeMounts"] if m["name"] == "model")
    assert f"--model=teacher={mount['mountPath']}" in container["args"]
    assert read.port == container["ports"][0]["containerPort"]
    assert (read.register, read.advertise) == ("edl-discovery:7001", "10.1.2.3")
    assert [int(gpu) for gpu in read.gpu_ids.split(",") if gpu] == gpus
    wanted = int(container["resources"]["limits"].get("nvidia.com/gpu", 0))
    assert wanted == len(gpus)


def test_discovery_gets_a_command_line_that_it_takes(rendered, tmp_path, monkeypatch):
    manifests = rendered["digits"]
    (container,) = workloads(manifests)["edl-discovery"]["containers"]
    _m, name, *args = run_by(container, tmp_path / "run")
    assert name == "distill_reader.discovery"
    password = tmp_path / "password"
    password.write_text("pw\n")
    args = [a.replace("/run/secrets/edl/redis_password", str(password)) for a in args]
    monkeypatch.setenv("EDL_TOKEN", "correct-horse")
    config = discovery.parse_config(discovery.parser().parse_args(args))
    services = {m["metadata"]["name"]: m for m in manifests if m["kind"] == "Service"}
    assert services["edl-discovery"]["spec"]["ports"][0]["port"] == config.port
    (redis,) = config.redis
    assert f"edl-redis:{services['edl-redis']['spec']['ports'][0]['port']}" in str(redis)


def test_the_student_of_digits_gets_a_command_line_that_it_takes(rendered, tmp_path):
    (container,) = workloads(rendered["digits"])["edl-student"]["containers"]
    assert container["args"][:2] == ["edl", "run"]
    args = [a.replace("/opt/edl", str(ROOT)) for a in container["args"][2:]]
    config = read_config(args, {})
    assert config.cpu_slots == 2
    options = student_options([str(each) for each in config.script_args])
    assert options["distill_discovery"] == "edl-discovery:7001"
    assert options["distill_service_name"] == "teacher"


def test_the_student_of_imagenet_follows_the_recipe(rendered, tmp_path):
    (container,) = workloads(rendered["imagenet-gpu"])["edl-student"]["containers"]
    fake = tmp_path / "bin" / "python"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    args = [a.replace("/opt/edl", str(ROOT)) for a in container["args"]]
    given = {each["name"]: each.get("value", "") for each in container["env"]}
    done = subprocess.run(
        args, capture_output=True, text=True, check=False,
        env=given | {"PATH": f"{fake.parent}:/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    mounts = {m["mountPath"] for m in container["volumeMounts"]}
    assert f"--data_dir={given['PADDLE_EDL_IMAGENET_PATH']}" in told
    assert given["PADDLE_EDL_IMAGENET_PATH"] in mounts
    told = [a.replace(given["PADDLE_EDL_IMAGENET_PATH"], str(tmp_path)) for a in told]
    options = student_options(told[told.index("train_with_fleet.py") + 1 :])
    assert (options["model"], options["distill_wire_dtype"]) == ("ResNet50_vd", "uint8")
    assert options["checkpoint"].startswith("/checkpoint/")


def test_the_teacher_of_digits_is_trained_by_options_that_there_are(rendered):
    pod = workloads(rendered["digits"])["edl-teacher"]
    (trains,) = pod["initContainers"]
    assert (ROOT / trains["args"][1].removeprefix("/opt/edl/")).is_file()
    options = student_options(trains["args"][2:])
    (serves,) = pod["containers"]
    (mount,) = (m for m in serves["volumeMounts"] if m["name"] == "model")
    assert options["serving_model_dir"] == f"{mount['mountPath']}/{mount['subPath']}"


def student_options(argv: list[str]) -> dict[str, Any]:
    """Return what resnet50/options.py reads, in a process of its own: it is no package."""
    program = (
        "import json, sys; from options import parse; print(json.dumps(vars(parse(sys.argv[1:]))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *argv], cwd=ROOT / "resnet50", capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    read: dict[str, Any] = json.loads(done.stdout)
    return read
