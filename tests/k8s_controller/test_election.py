"""Which of several controllers acts."""

import socket
import threading
from pathlib import Path

import kubernetes.client
import kubernetes.config
import pytest

from k8s_controller.election import ANSWER_S, LEASE_S, RENEW_S, RETRY_S, Election
from k8s_controller.kube_api import TROUBLES, KubeApi
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


def test_a_leader_lets_go_in_time_where_the_api_server_hangs(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as hangs:
        config = kubernetes.client.Configuration(f"http://127.0.0.1:{hangs.getsockname()[1]}")
        monkeypatch.setattr(kubernetes.client.Configuration, "_default", config)
        kube, raised = KubeApi(0.2), threading.Event()

        def ask() -> None:
            with pytest.raises(TROUBLES):
                kube.get("Lease", "default", "edl")
            raised.set()

        threading.Thread(target=ask, daemon=True).start()
        assert raised.wait(10)
    # The last attempt that may begin is over before another one may lead.
    assert RENEW_S + RETRY_S + 2 * ANSWER_S <= LEASE_S
