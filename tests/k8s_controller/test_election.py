"""Which of several controllers acts."""

import threading
from pathlib import Path

import kubernetes.config
import pytest

from k8s_controller.election import Election
from k8s_controller.kube_api import KubeApi
from tests.k8s_controller.cluster.api_server import ApiServer


@pytest.fixture
def kube(api_server: ApiServer, tmp_path: Path) -> KubeApi:
    api_server.kubeconfig(tmp_path / "kubeconfig")
    kubernetes.config.load_kube_config(str(tmp_path / "kubeconfig"))
    return KubeApi()


def test_one_controller_leads_and_another_one_follows_when_it_ends_in_order(kube, namespace):
    first, second = (Election(kube, namespace, "edl", name) for name in ("a", "b"))
    stop = threading.Event()
    assert first.win(stop)
    waits = threading.Event()
    won: list[bool] = []
    thread = threading.Thread(target=lambda: won.append(second.win(waits)))
    thread.start()
    thread.join(2.5)  # it tries every 2 s
    assert thread.is_alive()
    first.give_back()
    thread.join(20)
    assert won == [True]
    lease = kube.get("Lease", namespace, "edl")
    assert lease is not None
    assert lease["spec"]["holderIdentity"] == "b"


def test_one_that_is_asked_to_stop_does_not_lead(kube, namespace):
    assert Election(kube, namespace, "edl", "a").win(threading.Event())
    asked = threading.Event()
    asked.set()
    assert not Election(kube, namespace, "edl", "b").win(asked)
