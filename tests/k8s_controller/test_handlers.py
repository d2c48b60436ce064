"""What wakes the controller, and how its watches end."""

import functools
import itertools
import logging
import os
import signal
import threading
import time
from collections.abc import Sized
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kubernetes.config
import pytest

from job_server.api.errors import BadRequest, Unauthorized
from job_server.api.wire import JobSpec
from k8s_controller import controller as controllers
from k8s_controller import handlers, kube_api
from k8s_controller.controller import Controller
from k8s_controller.decisions import reconcile as steps
from k8s_controller.decisions.observed import ServerView
from k8s_controller.decisions.spec import parse
from k8s_controller.handlers import Backoffs, is_own_change, watch
from k8s_controller.kube_api import KubeApi, KubeError
from k8s_controller.metrics import Metrics
from tests.k8s_controller.cluster.api_server import ApiServer
from tests.k8s_controller.jobs import define_training_jobs, training_job
from tests.support import wait_until


@pytest.mark.parametrize(
    ("meta", "status", "own"),
    [
        pytest.param({"generation": 1}, {}, False, id="a new job"),
        pytest.param({"generation": 2}, {"observedGeneration": 1}, False, id="scaled"),
        pytest.param({"generation": 2}, {"observedGeneration": 2}, True, id="its status alone"),
        pytest.param(
            {"generation": 2, "deletionTimestamp": "2026-11-23T05:00:00Z"},
            {"observedGeneration": 2},
            False,
            id="being deleted",
        ),
    ],
)
def test_the_controller_is_not_woken_by_what_it_wrote_itself(
    meta: dict[str, Any], status: dict[str, Any], own: bool
):
    assert is_own_change({"metadata": meta, "status": status}) is own


def test_a_controller_that_starts_while_the_api_server_is_away_waits_for_it_as_long_as_it_takes():
    backoffs = Backoffs()
    for _ in range(2):  # each of kopf's calls begins anew
        assert max(itertools.islice(backoffs, 10_000)) <= 5
    assert not isinstance(backoffs, Sized)  # kopf counts what it can, to say when it gives up


@pytest.mark.full
def test_watches_that_the_api_server_ends_with_an_error_begin_again(
    api_server: ApiServer, namespace: str, tmp_path: Path, monkeypatch,
    caplog: pytest.LogCaptureFixture,
):  # fmt: skip
    monkeypatch.setattr(handlers, "SOON_S", 0.0)
    define_training_jobs(api_server)
    kubeconfig = str(api_server.kubeconfig(tmp_path / "kubeconfig"))
    seen: set[str] = set()
    controller = SimpleNamespace(look_at=lambda namespace, name: seen.add(name))

    def times_begun() -> int:
        return caplog.text.count("and begin again")

    def begins_again(before: int) -> bool:
        # Each time: what is seen already may be of a list, before there is a watch.
        api_server.break_watches(500, "etcdserver: no leader")
        return times_begun() > before

    stop = threading.Event()
    thread = threading.Thread(target=watch, args=(controller, [namespace], stop, kubeconfig))
    thread.start()
    try:
        for number in range(2):  # kopf takes 5 s for its end
            job = training_job(f"job-{number}")
            job["metadata"] = {"name": f"job-{number}", "namespace": namespace}
            api_server.store.create(api_server.store.kind("TrainingJob"), namespace, job)
            wait_until(functools.partial(seen.__contains__, f"job-{number}"), 120, "it is seen")
            wait_until(functools.partial(begins_again, times_begun()), 60, "it begins again")
            assert not stop.is_set(), "the lease is renewed until then"
    finally:
        stop.set()
        thread.join(30)
    assert not thread.is_alive()
    assert "etcdserver: no leader" in caplog.text


def test_watches_end_at_sigterm_and_wait_for_nobody(
    api_server: ApiServer,
    namespace: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
):
    kubeconfig = str(api_server.kubeconfig(tmp_path / "kubeconfig"))
    kubernetes.config.load_kube_config(kubeconfig)
    caplog.set_level(logging.DEBUG, "kopf")
    usual = signal.getsignal(signal.SIGTERM)

    def asked() -> set[tuple[str, str]]:
        return {(call.verb, call.namespace) for _, call in list(api_server.calls)}

    def end() -> None:
        wait_until(lambda: signal.getsignal(signal.SIGTERM) != usual, 120, "kopf takes SIGTERM")
        wait_until(lambda: ("watch", namespace) in asked(), 120, "a watch")
        os.kill(os.getpid(), signal.SIGTERM)

    ending = threading.Thread(target=end)
    ending.start()
    stop = threading.Event()
    watch(Controller(KubeApi(), Metrics(), 2.0), [namespace], stop, kubeconfig)
    ending.join()
    assert stop.is_set()
    assert "Hung tasks stopping is skipped" in caplog.text  # else it waits 5 s for them


def test_pods_that_are_refused_are_told_once_and_hold_up_nothing_else(
    api_server: ApiServer, namespace: str, tmp_path: Path
):
    class Kube(KubeApi):
        tries = 0

        def create(self, manifest: Any) -> bool:
            if "-server" not in manifest["metadata"]["name"] and manifest["kind"] == "Pod":
                self.tries += 1
                raise KubeError(403, "pods digits-0 is forbidden: exceeded quota: few")
            return super().create(manifest)

    api_server.kubeconfig(tmp_path / "kubeconfig")
    kubernetes.config.load_kube_config(str(tmp_path / "kubeconfig"))
    store, kube = api_server.store, Kube()
    define_training_jobs(api_server)
    job = training_job(replicas=2)
    del job["metadata"]["namespace"], job["metadata"]["uid"]
    store.create(store.kind("TrainingJob"), namespace, job)

    def conditions() -> dict[str, Any]:
        status = store.get(store.kind("TrainingJob"), namespace, "digits").get("status") or {}
        return {each["type"]: each for each in status.get("conditions") or ()}

    controller = Controller(kube, Metrics(), 0.2)
    controller.start()
    try:
        while kube.tries < 3:
            known = kube.tries
            controller.look_at(namespace, "digits")
            wait_until(lambda known=known: kube.tries > known, 120)  # type: ignore[misc]
    finally:
        controller.stop()
    told = conditions()["PodsReady"]
    assert (told["status"], told["reason"]) == ("False", "Refused")
    assert "exceeded quota: few" in told["message"]
    assert conditions()["ServerReady"]["status"] == "False"
    events = [each["reason"] for each in store.all("Event", namespace)]
    assert events == ["PodsRefused"]


def test_a_budget_whose_writing_is_not_answered_is_written_again():
    class Kube(KubeApi):
        def __init__(self) -> None:
            pass

        def set_budget(self, namespace: str, name: str, needed: int) -> bool:
            raise KubeError(504, "it was written, perhaps")

    known = controllers._Known(job=training_job(), prepared=True, budget=1)
    with pytest.raises(KubeError):
        Controller(Kube(), Metrics(), 2.0)._do(steps.SetBudget(2), known)
    assert known.budget is None, "also where 1 is to be written next"


def test_what_a_job_has_beside_its_pods_is_made_again_where_pods_do_not_answer(
    api_server: ApiServer, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As after `kubectl delete services --all`; the server that runs knows the first token."""
    api_server.kubeconfig(tmp_path / "kubeconfig")
    kubernetes.config.load_kube_config(str(tmp_path / "kubeconfig"))
    monkeypatch.setattr(controllers, "READ_S", 0.1)
    store = api_server.store
    define_training_jobs(api_server)
    job = training_job()
    del job["metadata"]["namespace"], job["metadata"]["uid"]
    store.create(store.kind("TrainingJob"), namespace, job)

    def names() -> set[str]:
        kinds = ("Secret", "Service", "PodDisruptionBudget", "NetworkPolicy")
        return {each["metadata"]["name"] for kind in kinds for each in store.all(kind, namespace)}

    controller = Controller(KubeApi(), Metrics(), 0.2)
    controller.start()
    controller.look_at(namespace, "digits")
    try:
        wait_until(lambda: len(names()) == 3 and len(store.all("Pod", namespace)) == 2, 60)
        server = {"status": {"phase": "Running", "podIP": "127.0.0.1"}}
        kind = store.kind("Pod")
        store.patch(kind, namespace, "digits-server", server, subresource="status")
        known = controller._known[namespace, "digits"]
        wait_until(lambda: known.link is not None, 60)
        (secret,) = store.all("Secret", namespace)
        store.delete(store.kind("Service"), namespace, "digits-server")
        store.delete(store.kind("Secret"), namespace, "digits-token")
        wait_until(lambda: len(names()) == 3, 20, "made again")
        (again,) = store.all("Secret", namespace)
        assert again["data"] == secret["data"]
    finally:
        controller.stop()


def test_a_controller_whose_clock_is_ahead_gives_pods_the_time_that_they_have(
    api_server: ApiServer, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    looks, ahead_s = 0, 0.0

    class Server:
        """It answers, and no pod has registered yet."""

        def __init__(self, url: str, *_args: str) -> None:
            self.url = url

        def view(self) -> ServerView:
            nonlocal looks
            looks += 1
            return ServerView(job=None, nodes={})

        def close(self) -> None:
            pass

    clock = SimpleNamespace(**{**vars(time), "time": lambda: time.time() + ahead_s})
    for module in (controllers, kube_api):
        monkeypatch.setattr(module, "time", clock)
    api_server.kubeconfig(tmp_path / "kubeconfig")
    kubernetes.config.load_kube_config(str(tmp_path / "kubeconfig"))
    monkeypatch.setattr(controllers, "TrainingServer", Server)
    store, kind = api_server.store, api_server.store.kind("Pod")
    define_training_jobs(api_server)
    job = training_job(podReadyTimeoutSeconds=600)
    del job["metadata"]["namespace"], job["metadata"]["uid"]
    store.create(store.kind("TrainingJob"), namespace, job)
    controller = Controller(KubeApi(), Metrics(), 0.1)
    controller.start()
    controller.look_at(namespace, "digits")
    try:
        wait_until(lambda: len(store.all("Pod", namespace)) == 2, 60)
        server = {"status": {"phase": "Running", "podIP": "127.0.0.1"}}
        store.patch(kind, namespace, "digits-server", server, subresource="status")
        controller.look_at(namespace, "digits")
        wait_until(lambda: looks > 1, 60)
        there = store.get(kind, namespace, "digits-0")["metadata"]["uid"]
        ahead_s, looks = 700.0, 0
        wait_until(lambda: looks > 3, 60)
        pod = store.get(kind, namespace, "digits-0")["metadata"]
    finally:
        controller.stop()
    assert (pod["uid"], "deletionTimestamp" in pod) == (there, False)


def test_a_server_of_a_version_before_gets_the_job_as_it_knows_it():
    asked = []

    class Old:
        def submit(self, spec: JobSpec) -> None:
            asked.append(spec.keeps_least)
            if spec.keeps_least:
                raise BadRequest("keeps_least: the job server is of a version that does not know")

    job = parse(training_job()).job_spec("digits")
    controllers._question(steps.SubmitJob(), job)(Old())
    assert asked == [True, False]


@pytest.mark.parametrize(
    ("where", "error", "words"),
    [
        pytest.param(
            (steps, "reconcile"),
            Unauthorized("a wrong token"),
            "again: a wrong token",
            id="refused",
        ),
        pytest.param(
            (steps, "reconcile"), TypeError("of None"), "a defect of the controller", id="a defect"
        ),
        pytest.param(
            (KubeApi, "pods_of"),
            KubeError(403, "cannot list pods"),
            "cannot list pods",
            id="unseen",
        ),
    ],
)
def test_a_job_whose_passes_fail_again_and_again_has_one_event_that_says_so(
    api_server: ApiServer,
    namespace: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: tuple[Any, str],
    error: Exception,
    words: str,
):
    passes = 0

    def fail(*_args: object) -> None:
        nonlocal passes
        passes += 1
        raise error

    api_server.kubeconfig(tmp_path / "kubeconfig")
    kubernetes.config.load_kube_config(str(tmp_path / "kubeconfig"))
    monkeypatch.setattr(controllers, "TROUBLE_S", (0.01, 0.02))
    monkeypatch.setattr(*where, fail)
    store = api_server.store
    define_training_jobs(api_server)
    job = training_job()
    del job["metadata"]["namespace"], job["metadata"]["uid"]
    store.create(store.kind("TrainingJob"), namespace, job)
    controller = Controller(KubeApi(), Metrics(), 0.2)
    controller.start()
    controller.look_at(namespace, "digits")
    try:
        wait_until(lambda: passes > 10, 120)
    finally:
        controller.stop()
    (told,) = store.all("Event", namespace)
    assert (told["reason"], told["type"]) == ("PassFails", "Warning")
    assert words in told["message"]


def test_a_job_that_is_made_while_its_name_is_found_to_be_gone_is_looked_at():
    asked = threading.Semaphore(0)

    class Kube(KubeApi):
        def __init__(self) -> None:
            self.times = 0

        def get(self, kind: str, namespace: str, name: str) -> None:
            self.times += 1
            if self.times == 1:  # the answer is under way, and a watch tells of the next job
                controller.look_at(namespace, name)
            asked.release()

    controller = Controller(Kube(), Metrics(), 300.0)
    controller.start()
    controller.look_at("default", "digits")
    try:
        assert asked.acquire(timeout=20)
        assert asked.acquire(timeout=20)
    finally:
        controller.stop()
    assert controller.jobs() == []
