"""What a call to Kubernetes makes of its answer."""

import datetime
from pathlib import Path
from typing import Any

import kubernetes.config
import pytest
from kubernetes.config.incluster_config import InClusterConfigLoader

from k8s_controller.decisions.spec import API_VERSION, KIND
from k8s_controller.kube_api import TROUBLES, KubeApi, KubeError
from tests.k8s_controller.cluster.api_server import ApiServer
from tests.k8s_controller.jobs import define_training_jobs, training_job


@pytest.fixture
def kube(api_server: ApiServer, tmp_path: Path) -> KubeApi:
    api_server.kubeconfig(tmp_path / "kubeconfig")
    kubernetes.config.load_kube_config(str(tmp_path / "kubeconfig"))
    return KubeApi()


def secret(namespace: str, owner: str = "u-1") -> dict[str, Any]:
    owners = [{"apiVersion": API_VERSION, "kind": KIND, "name": "digits", "uid": owner}]
    meta = {"name": "digits-token", "namespace": namespace, "ownerReferences": owners}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": meta}


def training_pod(namespace: str) -> dict[str, Any]:
    containers = [{"name": "trainer", "image": "edl"}]
    meta = {"name": "digits-0", "namespace": namespace}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": {"containers": containers}}


def test_what_a_job_has_is_made_once_and_that_of_an_earlier_job_is_not_taken_for_it(
    kube, namespace
):
    kube.create_for("u-1", secret(namespace))
    kube.create_for("u-1", secret(namespace))
    with pytest.raises(KubeError, match="Secret digits-token is that of another TrainingJob"):
        kube.create_for("u-2", secret(namespace, "u-2"))


def test_what_a_job_has_is_found_though_a_quota_that_is_used_up_refuses_to_make_it(
    api_server, kube, namespace
):
    """The API server asks its quotas before it looks whether the object is there."""
    api_server.fail_next(403, times=2, verb="create", resource="secrets")
    with pytest.raises(KubeError, match="403") as told:
        kube.create_for("u-1", secret(namespace))
    assert told.value.is_refusal
    api_server.store.create(api_server.store.kind("Secret"), namespace, secret(namespace))
    kube.create_for("u-1", secret(namespace))


def test_a_name_that_somebody_elses_object_has_is_refused_and_is_not_made(kube, namespace):
    other = secret(namespace)
    del other["metadata"]["ownerReferences"]
    kube.create(other)
    with pytest.raises(KubeError, match="Secret digits-token is not this TrainingJob's") as told:
        kube.create_for("u-1", secret(namespace))
    assert told.value.is_refusal
    pod = training_pod(namespace)
    kube.create_new(pod)
    with pytest.raises(KubeError, match="Pod digits-0 is not this TrainingJob's") as told:
        kube.create_new(pod)
    assert told.value.is_refusal


@pytest.mark.parametrize(("times", "is_made"), [(3, True), (4, False)])
def test_a_write_that_meets_another_one_is_tried_again_and_is_never_taken_for_done(
    api_server, kube, namespace, times, is_made
):
    api_server.fail_next(409, times=times, verb="create", resource="secrets")
    if is_made:
        assert kube.create(secret(namespace))
    else:
        with pytest.raises(KubeError, match="409"):
            kube.create(secret(namespace))
    assert (kube.get("Secret", namespace, "digits-token") is not None) == is_made


def test_a_status_is_not_written_to_another_job_of_the_same_name(api_server, kube, namespace):
    store = api_server.store
    define_training_jobs(api_server)
    kind, job = store.kind("TrainingJob"), training_job()
    del job["metadata"]["namespace"], job["metadata"]["uid"]
    old = store.create(kind, namespace, job)
    assert kube.write_status(old, {"phase": "Failed"})["status"]["phase"] == "Failed"
    store.delete(kind, namespace, "digits")
    store.create(kind, namespace, job)
    with pytest.raises(KubeError, match="UID"):
        kube.write_status(old, {"phase": "Failed"})
    assert "status" not in store.get(kind, namespace, "digits")


def test_a_long_list_comes_in_pieces_and_again_from_its_start_where_it_was_forgotten(
    api_server, kube, namespace, monkeypatch
):
    monkeypatch.setattr("k8s_controller.kube_api.PIECE", 2)
    store, kind = api_server.store, api_server.store.kind("Pod")
    for number in range(6):
        pod = training_pod(namespace)
        pod["metadata"]["name"] = f"digits-{number}"
        store.create(kind, namespace, pod)
    done = {"status": {"phase": "Succeeded"}}
    store.patch(kind, namespace, "digits-3", done, subresource="status")

    def names() -> list[str]:
        found = kube.list_all("Pod")
        return [p["metadata"]["name"] for p in found if p["metadata"]["namespace"] == namespace]

    expected = [f"digits-{number}" for number in (0, 1, 2, 4, 5)]
    assert names() == expected
    list_piece, pieces = kube.list_piece, []

    def forgetful(path: str, query: Any) -> Any:
        pieces.append(dict(query).get("continue"))
        if len(pieces) == 2:
            api_server.fail_next(410, verb="list", resource="pods")
        return list_piece(path, query)

    monkeypatch.setattr(kube, "list_piece", forgetful)
    assert names() == expected
    assert pieces[0] is pieces[2] is None
    assert pieces[1] is not None


@pytest.mark.parametrize("left", [None, ""], ids=["gone", "empty"])
def test_a_token_that_cannot_be_read_is_a_trouble_as_others(tmp_path, left):
    """As where the process may open no more files: the thread that keeps the lease goes on."""
    token, certificate = tmp_path / "token", tmp_path / "ca.crt"
    token.write_text("a-token")
    certificate.write_text("a-certificate")
    host = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": "1"}
    loader = InClusterConfigLoader(str(token), str(certificate), environ=host)
    loader._token_refresh_period = datetime.timedelta()
    loader.load_and_set()
    kube = KubeApi()
    if left is None:
        token.unlink()
    else:
        token.write_text(left)
    with pytest.raises((OSError, kubernetes.config.ConfigException)) as raised:
        kube.get("Lease", "default", "edl")
    assert isinstance(raised.value, TROUBLES)
