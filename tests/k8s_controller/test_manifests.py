"""The controller's manifests: valid, restricted, with a definition that refuses what is wrong."""

import re
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.k8s_controller.cluster import crd_schema
from tests.k8s_controller.cluster.kinds import Object, custom_kinds
from tests.support import ROOT

MANIFESTS = ROOT / "manifests"
VERSIONS = ("1.35", "1.36", "1.37")  # the newest three that the schemas are published of
FILES = ("crd.yaml", "rbac.yaml", "edl_controller.yaml")


def read_all(*names: str) -> list[Object]:
    return [
        each
        for name in names
        for each in yaml.safe_load_all((MANIFESTS / name).read_text())
        if each
    ]


def schema() -> Any:
    (kind,) = custom_kinds(read_all("crd.yaml")[0])
    return kind.schema


def example(**spec: Any) -> Object:
    """Return the example, with other fields of its spec; None leaves one out."""
    (job,) = read_all("examplejob.yaml")
    merged = {k: v for k, v in {**job["spec"], **spec}.items() if v is not None}
    made: Object = crd_schema.pruned_and_defaulted(schema(), {"spec": merged})
    return (
        {"apiVersion": job["apiVersion"], "kind": job["kind"]}
        | made
        | {"metadata": job["metadata"]}
    )


# --- valid


@pytest.mark.parametrize("version", VERSIONS)
def test_the_manifests_are_valid_by_the_schemas_of_kubernetes(version: str):
    for manifest in read_all(*FILES):
        kubernetes_validate.validate(manifest, version, strict=True)


def test_all_files_but_the_example_are_installed():
    listed = read_all("kustomization.yaml")[0]["resources"]
    there = {path.name for path in MANIFESTS.glob("*.yaml")}
    assert there - set(listed) == {"kustomization.yaml", "examplejob.yaml"}


def test_the_schema_is_structural():
    def check(part: Any, path: str) -> None:
        is_free = part.get("x-kubernetes-int-or-string")
        assert is_free or part.get("type"), path
        if part["type" if not is_free else "anyOf"] == "array":
            check(part["items"], f"{path}[]")
        for name, each in part.get("properties", {}).items():
            assert name in ("type",) or isinstance(each, dict), path
            check(each, f"{path}.{name}")
        if isinstance(others := part.get("additionalProperties"), dict):
            assert "properties" not in part, path
            check(others, f"{path}[*]")

    check(schema(), "")


def test_each_field_that_a_user_writes_is_explained():
    for name, each in schema()["properties"]["spec"]["properties"].items():
        assert each.get("description", "").endswith("."), name


def test_columns_and_the_scale_subresource_name_fields_that_there_are():
    (version,) = read_all("crd.yaml")[0]["spec"]["versions"]
    paths = [each["jsonPath"] for each in version["additionalPrinterColumns"]]
    paths += version["subresources"]["scale"].values()
    for path in paths:
        part = {**schema(), "properties": schema()["properties"] | {"metadata": _METADATA}}
        for name in path.strip(".").split("."):
            assert name in part["properties"], path
            part = part["properties"][name]


_METADATA: Object = {"properties": {"creationTimestamp": {}}}


# --- what the definition lets through


def test_the_example_is_valid_and_nothing_of_it_is_unknown():
    (job,) = read_all("examplejob.yaml")
    body = {"spec": job["spec"]}
    assert list(crd_schema.unknown_fields(schema(), body)) == []
    assert crd_schema.errors(schema(), example()) == []
    assert example()["spec"]["podReadyTimeoutSeconds"] == 600, "a default"


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ({"minReplicas": 3}, "replicas is less than minReplicas"),
        ({"replicas": 5}, "replicas is more than maxReplicas"),
        ({"replicas": None, "minReplicas": 5}, "minReplicas is more than maxReplicas"),
        ({"autoscale": True}, "replicas is the controller's with autoscale"),
        (
            {"autoscale": True, "replicas": None, "maxReplicas": None},
            "autoscale needs maxReplicas",
        ),
        ({"replicas": 0}, "less than the minimum of 1"),
        ({"standby": 3}, "greater than the maximum of 2"),
        ({"overlap": "maybe"}, "is not one of"),
        ({"cleanPodPolicy": "Running"}, "is not one of"),
        ({"template": None}, "'template' is a required property"),
        ({"template": {"spec": {"containers": []}}}, "should be non-empty"),
        (
            {"template": {"spec": {"containers": [{"name": "main", "image": "edl"}]}}},
            "has to have the name trainer",
        ),
        (
            {
                "template": {
                    "spec": {
                        "containers": [{"name": "trainer", "image": "edl"}],
                        "hostNetwork": True,
                    }
                }
            },
            "are the controller's",
        ),
        ({"server": {"storage": {}}}, "'size' is a required property"),
        ({"server": {"storage": {"size": "big"}}}, "does not match"),
    ],
)  # fmt: skip
def test_what_can_never_run_is_refused_by_the_definition(spec, told):
    (error,) = crd_schema.errors(schema(), example(**spec))
    assert told in error


@pytest.mark.parametrize("name", ["9lives", "a.b", "a" * 51])
def test_a_name_from_which_no_names_of_pods_can_follow_is_refused(name):
    job = example()
    job["metadata"] = {"name": name}
    assert any("metadata.name has" in each for each in crd_schema.errors(schema(), job))


@pytest.mark.parametrize(
    ("change", "is_allowed"),
    [
        ({"replicas": 4}, True), ({"suspend": True}, True),
        ({"autoscale": True, "replicas": None}, True),
        ({"activeDeadlineSeconds": 60}, True),
        ({"ttlSecondsAfterFinished": 0}, True), ({"cleanPodPolicy": "None"}, True),
        ({"podReadyTimeoutSeconds": 60}, True), ({"minReplicas": 2}, False),
        ({"maxReplicas": 5}, False), ({"maxReplicas": None}, False), ({"slotsPerPod": 2}, False),
        ({"server": {"image": "other"}}, False), ({"standby": 1}, False), ({"spares": 2}, False),
        ({"overlap": "off"}, False), ({"policy": "linear"}, False), ({"restartLimit": 1}, False),
        ({"prepareTimeoutSeconds": 5}, False),
        ({"failurePolicy": [{"exit_code": [3], "then": "fail"}]}, False),
    ],
)  # fmt: skip
def test_what_may_change_while_it_trains_is_said_by_the_definition(change, is_allowed):
    found = crd_schema.errors(schema(), example(**change), example())
    assert bool(found) != is_allowed
    assert all("cannot be changed; make a new TrainingJob" in each for each in found)


def test_docs_and_definition_name_the_same_fields():
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    _, _, text = text.partition("## Fields\n")
    told = set(re.findall(r"^\| `([a-zA-Z.]+)` \|", text.partition("\n## ")[0], re.MULTILINE))
    spec = schema()["properties"]["spec"]["properties"]
    server = {f"server.{name}" for name in spec["server"]["properties"]}
    assert told == {*spec.keys() - {"server"}, *server}


# --- rights


def pods() -> Iterator[Object]:
    for manifest in read_all(*FILES):
        if manifest["kind"] == "Deployment":
            yield manifest["spec"]["template"]["spec"]


def test_the_controllers_pods_keep_the_standard_restricted():
    for pod in pods():
        assert restricted_by(pod) == []


def restricted_by(pod: Object) -> list[str]:
    """Return what the Pod Security standard `restricted` refuses of a pod."""
    wrong = [name for name in ("hostNetwork", "hostPID", "hostIPC") if pod.get(name)]
    shared = pod.get("securityContext", {})
    for container in [*pod["containers"], *pod.get("initContainers", ())]:
        own = {**shared, **container.get("securityContext", {})}
        wrong += [
            f"{container['name']}: {text}"
            for text, is_wrong in (
                ("privileged", own.get("privileged")),
                ("allowPrivilegeEscalation", own.get("allowPrivilegeEscalation") is not False),
                ("runAsNonRoot", own.get("runAsNonRoot") is not True),
                ("runAsUser", own.get("runAsUser") == 0),
                ("capabilities", own.get("capabilities", {}).get("drop") != ["ALL"]),
                (
                    "seccompProfile",
                    own.get("seccompProfile", {}).get("type")
                    not in ("RuntimeDefault", "Localhost"),
                ),
                ("hostPort", any("hostPort" in p for p in container.get("ports", ()))),
            )
            if is_wrong
        ]
    allowed = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim"}
    for volume in pod.get("volumes", ()):
        wrong += [
            f"volume {k}" for k in volume if k not in allowed | {"name", "projected", "secret"}
        ]
    return wrong


def test_labels_selectors_probes_and_the_account_fit_each_other():
    everything = {(m["kind"], m["metadata"]["name"]): m for m in read_all(*FILES)}
    deployment = everything["Deployment", "edl-controller"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["replicas"] == 2
    for kind, field in (("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
        assert everything[kind, "edl-controller"]["spec"][field]["matchLabels"] == labels
    (container,) = deployment["template"]["spec"]["containers"]
    (port,) = container["ports"]
    assert f"--liveness_port={port['containerPort']}" in container["args"]
    account = deployment["template"]["spec"]["serviceAccountName"]
    for kind in ("ClusterRoleBinding", "RoleBinding"):
        (subject,) = everything[kind, "edl-controller"]["subjects"]
        assert ("ServiceAccount", subject["name"]) in everything
        assert subject["name"] == account


def test_no_rule_has_a_wildcard():
    for manifest in read_all("rbac.yaml"):
        for rule in manifest.get("rules", ()):
            assert all("*" not in values for values in rule.values()), rule
