"""What a call to Kubernetes makes of its answer."""

from pathlib import Path
from typing import Any

import kubernetes.config
import pytest

from k8s_controller.kube_api import KubeApi, KubeError
from tests.k8s_controller.cluster.api_server import ApiServer
from tests.k8s_controller.jobs import define_training_jobs, training_job


@pytest.fixture
def kube(api_server: ApiServer, tmp_path: Path) -> KubeApi:
    api_server.kubeconfig(tmp_path / "kubeconfig")
    kubernetes.config.load_kube_config(str(tmp_path / "kubeconfig"))
    return KubeApi()


def secret(namespace: str, owner: str = "u-1") -> dict[str, Any]:
    owners = [{"apiVersion": "v1", "kind": "Pod", "name": "o", "uid": owner, "controller": True}]
    meta = {"name": "digits-token", "namespace": namespace, "ownerReferences": owners}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": meta}


def test_what_a_job_has_is_made_once_and_that_of_an_earlier_job_is_not_taken_for_it(
    kube, namespace
):
    kube.create_for("u-1", secret(namespace))
    kube.create_for("u-1", secret(namespace))
    with pytest.raises(KubeError, match="Secret digits-token is that of another TrainingJob"):
        kube.create_for("u-2", secret(namespace, "u-2"))


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
