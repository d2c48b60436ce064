"""Which of several controllers acts."""

import contextlib
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import kubernetes.client
import kubernetes.config
import pytest

from k8s_controller.election import ANSWER_S, LEASE_S, RENEW_S, RETRY_S, Election
from k8s_controller.kube_api import TROUBLES, KubeApi, NotLeadingError
from tests.k8s_controller.cluster.api_server import ApiServer
from tests.k8s_controller.cluster.cluster import Cluster
from tests.k8s_controller.jobs import training_job
from tests.k8s_controller.running import LiveJob, start_controller
from tests.support import ROOT, wait_until


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


def test_a_leader_that_slept_writes_nothing_until_it_has_the_lease_again(
    kube, namespace, monkeypatch
):
    first = Election(kube, namespace, "edl", "a")
    assert not first.leads()
    assert first.win(threading.Event())
    guarded = KubeApi(may_write=first.leads)
    lease = guarded.get("Lease", namespace, "edl")
    assert lease is not None
    assert guarded.replace(lease)
    slept = time.clock_gettime(time.CLOCK_BOOTTIME) + LEASE_S  # the monotonic one stands still
    monkeypatch.setattr("k8s_controller.election.time.clock_gettime", lambda _clock: slept)
    lease = guarded.get("Lease", namespace, "edl")
    assert lease is not None
    with pytest.raises(NotLeadingError, match="its lease has run out"):
        guarded.replace(lease)
    assert first.win(threading.Event())
    assert first.leads()


@pytest.mark.parametrize("answer", [b"null", b"[]", b"<html>", b'{"kind": "Lea'])
def test_a_leader_that_is_answered_by_no_api_server_tries_again_and_lets_go(answer, monkeypatch):
    """The thread that renews the lease must not end by that: nothing would be written any more."""
    kube = KubeApi()
    says = SimpleNamespace(status=200, data=answer, headers={})
    monkeypatch.setattr(kube._client.rest_client.pool_manager, "request", lambda *a, **kw: says)
    monkeypatch.setattr("k8s_controller.election.RETRY_S", 0.01)
    monkeypatch.setattr("k8s_controller.election.RENEW_S", 0.05)
    election, lost = Election(kube, "default", "edl", "a"), list[bool]()
    election._renewed_at = time.clock_gettime(time.CLOCK_BOOTTIME)
    election.keep(threading.Event(), lambda: lost.append(True))
    assert lost == [True]


@pytest.mark.timeout(180)
def test_a_leader_that_is_stopped_and_goes_on_ends_and_makes_nothing_twice(tmp_path: Path):
    with Cluster(tmp_path / "pods", pretends=True) as cluster, contextlib.ExitStack() as ends:
        cluster.kubelet.add_node("n1")
        cluster.apply_file(ROOT / "manifests" / "crd.yaml")

        def start(name: str) -> subprocess.Popen[bytes]:
            (tmp_path / name).mkdir()
            process = start_controller(cluster, tmp_path / name, "--interval_s=0.3", elects=True)
            ends.callback(process.wait)
            ends.callback(process.kill)
            return process

        def leads(name: str) -> bool:
            return "this one leads" in (tmp_path / name / "controller.log").read_text()

        def pods() -> set[str]:
            found = cluster.store.all("Pod", "default")
            return {str(pod["metadata"]["uid"]) for pod in found}

        first = start("first")
        wait_until(lambda: leads("first"), 40)
        live = LiveJob(cluster, training_job(replicas=2, maxReplicas=3))
        wait_until(lambda: len(live.pods()) == 2, 40)
        first.send_signal(signal.SIGSTOP)
        start("second")
        live.change(replicas=3)
        wait_until(lambda: leads("second") and len(live.pods()) == 3, 60)
        known = pods()
        first.send_signal(signal.SIGCONT)
        assert first.wait(30) == 1
        assert "the lease is lost" in (tmp_path / "first" / "controller.log").read_text()
        assert pods() == known


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
