"""Nodes whose pods run as processes of this machine, each pod with a loopback address of its own.

A container's image is this repository: its entry point is docker/entry.sh, `/opt/edl` in its
command is the repository's root, and the folders that are mounted are folders of the test's. Its
processes end with its first one, as they do in a container.
"""

import base64
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from tests.k8s_controller.cluster.kinds import ApiError, Object
from tests.k8s_controller.cluster.patches import selects
from tests.k8s_controller.cluster.store import Store, now_text, with_condition
from tests.support import ROOT

if TYPE_CHECKING:
    from tests.k8s_controller.cluster.remote import RemoteStore

_MARK = "KUBELET_POD_UID"  # of every process of a pod
_TICK_S = 0.02
_END_S = 30.0  # a process that does not end at SIGKILL is left behind
_BACK_OFF_S = 1.0  # Kubernetes waits 10 s and more before it starts a container again
_REFERENCE = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)")
_addresses: dict[tuple[str, str], int] = {}
_SERVICE = re.compile(r"\b([a-z0-9-]+)\.([a-z0-9-]+)\.svc\b")


@dataclass
class Kubelet:
    """All nodes of a cluster.

    pretends: no processes. A pod that has a node runs and is ready at once, until `end_pod`.
    missing_images: what cannot be pulled.
    taints: of the nodes that it makes.
    only_namespace: whose pods run; "": those of all.
    """

    store: "Store | RemoteStore"
    folder: Path
    pretends: bool = False
    missing_images: set[str] = field(default_factory=set)
    env: Mapping[str, str] = field(default_factory=dict)
    taints: Sequence[Mapping[str, str]] = ()
    only_namespace: str = ""

    def __post_init__(self) -> None:
        self._nodes: set[str] = set()
        self.lost: set[str] = set()
        self._pods: dict[str, threading.Thread | None] = {}  # by uid
        self._logs: dict[tuple[str, str], Path] = {}
        self._ends = False
        self._changed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.store.listen(self._changed.set)
        self._thread.start()

    def stop(self) -> None:
        """Kill what runs."""
        self._ends = True
        self._changed.set()
        self._thread.join()
        for thread in list(self._pods.values()):
            if thread is not None:
                thread.join()
        self.store.forget(self._changed.set)

    # --- nodes

    def add_node(
        self, name: str, cpu: str = "8", memory: str = "32Gi", *, pods: int = 110,
        labels: Mapping[str, str] | None = None, more: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """Make a node. `more`: other resources, `nvidia.com/gpu`."""
        has = {"cpu": cpu, "memory": memory, "pods": str(pods), **(more or {})}
        kind = self.store.kind("Node")
        all_labels = {"kubernetes.io/hostname": name, **(labels or {})}
        spec = {"taints": [dict(each) for each in self.taints]} if self.taints else {}
        body: Object = {"metadata": {"name": name, "labels": all_labels}, "spec": spec}
        self.store.create(kind, "", body)
        self._nodes.add(name)
        status = with_condition({"allocatable": has, "capacity": has}, "Ready", "True")
        self.store.patch(kind, "", name, {"status": status}, subresource="status")

    def lose_node(self, name: str) -> None:
        """Take a node's power: its pods die, and none but the node's controller says so."""
        self.lost.add(name)
        kind = self.store.kind("Node")
        node = self.store.get(kind, "", name)
        status = with_condition(
            node["status"], "Ready", "Unknown", "NodeStatusUnknown", "Kubelet stopped posting"
        )
        self.store.patch(kind, "", name, {"status": status}, subresource="status")
        taint = {"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}
        self.store.patch(kind, "", name, {"spec": {"taints": [taint]}})
        for pod in self._pods_of(name):
            status = with_condition(pod["status"], "Ready", "False", "NodeNotReady", "")
            self._patch_status(pod, status)

    def remove_node(self, name: str) -> None:
        """Delete a lost node; its pods are collected, as a cloud's controllers do it."""
        self._nodes.discard(name)
        self.store.delete(self.store.kind("Node"), "", name)
        for pod in self._pods_of(name):
            self._remove(pod)

    def _pods_of(self, node: str) -> list[Object]:
        return [pod for pod in self.store.all("Pod") if pod["spec"].get("nodeName") == node]

    # --- pods

    def read_log(self, namespace: str, name: str) -> str:
        path = self._logs.get((namespace, name))
        return path.read_text(errors="replace") if path and path.exists() else ""

    def kill_pod(self, namespace: str, name: str) -> None:
        """Kill all processes of a pod, as the kernel does where its container lacks memory."""
        pod = self.store.get(self.store.kind("Pod"), namespace, name)
        _kill_processes(pod["metadata"]["uid"])

    def end_pod(self, namespace: str, name: str, code: int) -> None:
        """Have a pod end that only pretends to run."""
        pod = self.store.get(self.store.kind("Pod"), namespace, name)
        state = {"terminated": _terminated(code)}
        self._patch_status(pod, _status(pod, [_report(c, state) for c in _containers(pod)]))

    def _run(self) -> None:
        while not self._ends:
            self._changed.wait()
            self._changed.clear()
            for pod in self.store.all("Pod", self.only_namespace):
                if pod["spec"].get("nodeName") in self._nodes - self.lost:
                    self._attend(pod)

    def _attend(self, pod: Object) -> None:
        uid = pod["metadata"]["uid"]
        if self.pretends:
            if "deletionTimestamp" in pod["metadata"]:
                self._remove(pod)
            elif uid not in self._pods:
                self._pods[uid] = None
                self._pretend(pod)
        elif uid not in self._pods:
            runner = _PodRunner(self, pod)
            self._pods[uid] = threading.Thread(target=runner.run, daemon=True)
            self._logs[pod["metadata"]["namespace"], pod["metadata"]["name"]] = runner.log
            self._pods[uid].start()  # type: ignore[union-attr]  # it was just made

    def _pretend(self, pod: Object) -> None:
        if missing := [c["image"] for c in _containers(pod) if c["image"] in self.missing_images]:
            state = {"waiting": {"reason": "ImagePullBackOff", "message": f"no {missing[0]}"}}
        else:
            state = {"running": {"startedAt": now_text()}}
        reports = [_report(c, state, ready="running" in state) for c in _containers(pod)]
        self._patch_status(pod, _status(pod, reports) | {"podIP": _address_of(pod)})

    def _patch_status(self, pod: Object, status: Object) -> None:
        meta = pod["metadata"]
        with contextlib.suppress(ApiError):  # it has gone
            self.store.patch(
                self.store.kind("Pod"), meta["namespace"], meta["name"],
                {"metadata": {"uid": meta["uid"]}, "status": status}, subresource="status",
            )  # fmt: skip

    def _remove(self, pod: Object) -> None:
        meta = pod["metadata"]
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": meta["uid"]}}
        with contextlib.suppress(ApiError):
            self.store.delete(self.store.kind("Pod"), meta["namespace"], meta["name"], options)


def address_of(namespace: str, name: str) -> str:
    """Return the address of pods of this name in this run of tests: always the same."""
    number = _addresses.setdefault((namespace, name), len(_addresses) + 1)
    return f"127.{64 + os.getpid() % 64}.{number // 250 % 250}.{number % 250 + 2}"


def _address_of(pod: Object) -> str:
    return address_of(pod["metadata"]["namespace"], pod["metadata"]["name"])


def _containers(pod: Object) -> list[Object]:
    return list(pod["spec"]["containers"])


def _terminated(code: int) -> Object:
    reason = "Completed" if code == 0 else "Error"
    return {"exitCode": code, "reason": reason, "finishedAt": now_text()}


def _report(container: Object, state: Object, *, ready: bool = False, restarts: int = 0) -> Object:
    return {
        "name": container["name"], "image": container["image"], "imageID": "", "ready": ready,
        "restartCount": restarts, "state": state, "started": "running" in state,
    }  # fmt: skip


def _status(pod: Object, reports: list[Object]) -> Object:
    """Return what follows for a pod from its containers."""
    states = [each["state"] for each in reports]
    codes = [each["terminated"]["exitCode"] for each in states if "terminated" in each]
    if len(codes) == len(reports):
        phase = "Failed" if any(codes) else "Succeeded"
    else:
        phase = (
            "Running"
            if any("running" in each or "terminated" in each for each in states)
            else "Pending"
        )
    ready = all(each["ready"] for each in reports)
    status = with_condition(pod["status"], "Initialized", "True")
    for name in ("ContainersReady", "Ready"):
        status = with_condition(status, name, str(ready), "" if ready else "ContainersNotReady")
    return status | {
        "phase": phase, "containerStatuses": reports, "hostIP": "127.0.0.1",
        "startTime": status.get("startTime", now_text()),
    }  # fmt: skip


@dataclass
class _Container:
    spec: Object
    process: subprocess.Popen[bytes] | None = None
    env: Mapping[str, str] = field(default_factory=dict)  # as it was when it was started
    state: Object = field(default_factory=dict)
    restarts: int = 0
    ready: bool = False
    probed_at: float = 0.0
    failures: int = 0
    alive_at: float = 0.0  # when it is asked next whether it lives
    dead: int = 0  # times that it did not say so, one after the other
    restart_at: float = 0.0


class _PodRunner:
    """One pod, from its node to its end, in a thread."""

    def __init__(self, kubelet: Kubelet, pod: Object) -> None:
        self._kubelet, self._store = kubelet, kubelet.store
        self._pod = pod
        self._meta = pod["metadata"]
        self._address = _address_of(pod)
        self._folder = kubelet.folder / f"{self._meta['name']}-{self._meta['uid'][:8]}"
        self._folder.mkdir(parents=True)
        self.log = self._folder / "log"
        self._containers = [_Container(each) for each in pod["spec"]["containers"]]
        self._told: list[Object] = []

    def run(self) -> None:
        try:
            if self._prepare() and self._run_first():
                self._attend()
        except _GoneError:
            pass
        finally:
            self._kill_rest()
            for each in self._containers:
                if each.process is not None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        each.process.wait(_END_S)
        if not self._is_lost() and not self._kubelet._ends:
            self._kubelet._remove(self._pod)

    # --- what comes before the containers

    def _prepare(self) -> bool:
        """Wait until there is all that containers need. False: the pod goes before that."""
        while True:
            missing = [
                each["image"]
                for each in [*self._pod["spec"].get("initContainers", ()), *_containers(self._pod)]
                if each["image"] in self._kubelet.missing_images
            ]
            if missing:
                why, text = "ImagePullBackOff", f'Back-off pulling image "{missing[0]}"'
            elif text := self._make_volumes():
                why = "CreateContainerConfigError"
            else:
                return True
            self._say([{"waiting": {"reason": why, "message": text}}] * len(self._containers))
            if self._is_ending():
                return False
            time.sleep(_TICK_S)

    def _make_volumes(self) -> str:
        """Make the folders of volumes; return what is missing for that."""
        for volume in self._pod["spec"].get("volumes", ()):
            folder = self._folder / "volumes" / volume["name"]
            folder.mkdir(parents=True, exist_ok=True)
            for kind, field_, coded in (
                ("Secret", "secret", True),
                ("ConfigMap", "configMap", False),
            ):
                if (told := volume.get(field_)) is None:
                    continue
                name = told.get("secretName") or told.get("name")
                try:
                    data = self._store.get(
                        self._store.kind(kind), self._meta["namespace"], name
                    ).get("data", {})
                except ApiError:
                    if told.get("optional"):
                        continue
                    return f'{kind.lower()} "{name}" not found'
                for key, text in data.items():
                    content = base64.b64decode(text) if coded else text.encode()
                    path = folder / key
                    path.write_bytes(content)
                    path.chmod(told.get("defaultMode", 0o644))
            if claim := volume.get("persistentVolumeClaim"):
                shared = self._kubelet.folder / "claims" / claim["claimName"]
                shared.mkdir(parents=True, exist_ok=True)
                folder.rmdir()
                folder.symlink_to(shared)
            if path_ := volume.get("hostPath"):
                folder.rmdir()
                folder.symlink_to(path_["path"])
        return ""

    def _run_first(self) -> bool:
        """Run the init containers, one after the other."""
        for spec in self._pod["spec"].get("initContainers", ()):
            process = self._start(spec, self._env_of(spec))
            while process.poll() is None:
                if self._is_ending():
                    return False
                time.sleep(_TICK_S)
            if process.returncode:
                self._say([{"terminated": _terminated(process.returncode)}] * len(self._containers))
                while not self._is_ending():
                    time.sleep(_TICK_S)
                return False
        return True

    # --- the containers

    def _attend(self) -> None:
        for each in self._containers:
            self._start_container(each)
        while not self._is_ending():
            for each in self._containers:
                self._look_after(each)
            self._say([each.state for each in self._containers])
            time.sleep(_TICK_S)
        self._end()

    def _start_container(self, each: _Container) -> None:
        each.env = self._env_of(each.spec)
        each.process = self._start(each.spec, each.env)
        each.state = {"running": {"startedAt": now_text()}}
        each.ready, each.failures = "readinessProbe" not in each.spec, 0
        each.alive_at, each.dead = time.monotonic() + _period_s(each, "livenessProbe"), 0

    def _look_after(self, each: _Container) -> None:
        if each.process is None:
            if each.restart_at and time.monotonic() > each.restart_at:
                each.restarts += 1
                each.restart_at = 0.0
                self._start_container(each)
            return
        if (code := each.process.poll()) is not None:
            each.process, each.ready = None, False
            each.state = {"terminated": _terminated(code if code >= 0 else 128 - code)}
            policy = self._pod["spec"]["restartPolicy"]
            if policy == "Always" or (policy == "OnFailure" and code):
                each.restart_at = time.monotonic() + _BACK_OFF_S
                each.state = {"waiting": {"reason": "CrashLoopBackOff", "message": f"code {code}"}}
            if len(self._containers) == 1:
                self._kill_rest()
            return
        self._check_life(each)
        probe = each.spec.get("readinessProbe")
        if probe and time.monotonic() >= each.probed_at:
            each.probed_at = time.monotonic() + min(1.0, probe.get("periodSeconds", 10))
            if self._answers(each.spec, probe):
                each.ready, each.failures = True, 0
            else:
                each.failures += 1
                if each.failures >= probe.get("failureThreshold", 3):
                    each.ready = False

    def _check_life(self, each: _Container) -> None:
        """Kill a container that says too often, one after the other, that it does not live."""
        probe = each.spec.get("livenessProbe")
        if probe is None or time.monotonic() < each.alive_at or each.process is None:
            return
        each.alive_at = time.monotonic() + _period_s(each, "livenessProbe")
        each.dead = 0 if self._answers(each.spec, probe) else each.dead + 1
        if each.dead >= probe.get("failureThreshold", 3):
            each.process.kill()

    def _end(self) -> None:
        """Their hooks, SIGTERM to what the containers began with, and SIGKILL after the grace."""
        asked_at = time.monotonic()
        hooks = [hook for each in self._containers if (hook := self._hook(each)) is not None]
        while any(hook.poll() is None for hook in hooks):
            if time.monotonic() > asked_at + self._grace_s() or not self._any_runs():
                break
            time.sleep(_TICK_S)
        for each in self._containers:
            if each.process is not None:
                each.process.terminate()
        while any(each.process is not None for each in self._containers):
            if time.monotonic() > asked_at + self._grace_s():
                self._kill_rest()
            for each in self._containers:
                if each.process is not None and (code := each.process.poll()) is not None:
                    each.process, each.ready = None, False
                    each.state = {"terminated": _terminated(code if code >= 0 else 128 - code)}
            time.sleep(_TICK_S)
        self._say([each.state for each in self._containers])

    def _any_runs(self) -> bool:
        return any(each.process and each.process.poll() is None for each in self._containers)

    def _grace_s(self) -> float:
        grace: float = self._now()["metadata"].get("deletionGracePeriodSeconds", 0)
        return grace

    def _hook(self, each: _Container) -> "subprocess.Popen[bytes] | None":
        told = each.spec.get("lifecycle", {}).get("preStop", {}).get("exec")
        if told is None or each.process is None:
            return None
        return self._start({**each.spec, "command": told["command"], "args": []}, each.env)

    def _env_of(self, spec: Object) -> dict[str, str]:
        env = {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(self._folder), "EDL_PYTHON": sys.executable, "PYTHONPATH": str(ROOT),
            "EDL_STATE_DIR": "/state", "TMPDIR": str(self._folder), _MARK: self._meta["uid"],
            "PYTHONUNBUFFERED": "1", **self._kubelet.env,
        }  # fmt: skip
        for each in spec.get("env", ()):
            value = each.get("value", "")
            if "valueFrom" in each:
                value = self._value_from(each["valueFrom"])
            env[each["name"]] = _expanded(value, env)
        place = self._places(spec)
        return {name: self._found(place(value)) for name, value in env.items()}

    def _start(self, spec: Object, env: Mapping[str, str]) -> "subprocess.Popen[bytes]":
        place = self._places(spec)
        argv = [*(spec.get("command") or ["/opt/edl/docker/entry.sh"]), *spec.get("args", ())]
        argv = [place(_expanded(each, env)) for each in argv]
        if argv[0] in ("python", "python3"):
            argv[0] = sys.executable
        with self.log.open("ab") as log:
            try:
                return subprocess.Popen(
                    argv, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    start_new_session=True, cwd=place(spec.get("workingDir") or str(self._folder)),
                )  # fmt: skip
            except OSError as error:
                log.write(f"{error}\n".encode())
                return subprocess.Popen(["false"], start_new_session=True)

    def _found(self, text: str) -> str:
        """Put the address of a service's pod where a text names the service."""
        return _SERVICE.sub(lambda found: self._address_of_service(*found.groups()), text)

    def _address_of_service(self, name: str, namespace: str) -> str:
        try:
            service = self._store.get(self._store.kind("Service"), namespace, name)
        except ApiError:
            return f"{name}.{namespace}.svc"  # which nobody knows here
        for pod in self._store.all("Pod", namespace):
            if selects(
                {"matchLabels": service["spec"]["selector"]}, pod["metadata"].get("labels", {})
            ):
                return _address_of(pod)
        return address_of(namespace, name)

    def _places(self, spec: Object) -> Callable[[str], str]:
        """Return what makes paths of the container paths of this machine."""
        at = {"/opt/edl": str(ROOT), "/state": str(self._folder / "state")}
        (self._folder / "state").mkdir(exist_ok=True)
        for mount in spec.get("volumeMounts", ()):
            folder = self._folder / "volumes" / mount["name"]
            if mount["mountPath"] not in ("/tmp", "/dev/shm"):
                at[mount["mountPath"].rstrip("/")] = str(folder / mount.get("subPath", ""))
        paths = "|".join(re.escape(each) for each in sorted(at, key=len, reverse=True))
        pattern = re.compile(rf"(?<![\w./-])({paths})(?=$|[/:,\s;\"'])")
        return lambda text: pattern.sub(lambda found: at[found[1]], text)

    def _value_from(self, source: Object) -> str:
        if "fieldRef" in source:
            pod = {**self._pod, "status": {"podIP": self._address, "hostIP": "127.0.0.1"}}
            path = source["fieldRef"]["fieldPath"]
            if found := re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path):
                return str(self._meta.get(found[1], {}).get(found[2], ""))
            value: Any = pod
            for part in path.split("."):
                value = value[part]
            return str(value)
        kind, told = (
            ("Secret", source["secretKeyRef"]) if "secretKeyRef" in source
            else ("ConfigMap", source["configMapKeyRef"])
        )  # fmt: skip
        found_ = self._store.get(self._store.kind(kind), self._meta["namespace"], told["name"])
        text = found_["data"][told["key"]]
        return base64.b64decode(text).decode() if kind == "Secret" else str(text)

    def _answers(self, spec: Object, probe: Object) -> bool:
        if http := probe.get("httpGet"):
            port = http["port"]
            if isinstance(port, str):
                port = next(p["containerPort"] for p in spec["ports"] if p["name"] == port)
            url = f"http://{http.get('host', self._address)}:{port}{http.get('path', '/')}"
            try:
                with urllib.request.urlopen(url, timeout=probe.get("timeoutSeconds", 1)):
                    return True
            except (OSError, urllib.error.URLError):
                return False
        if tcp := probe.get("tcpSocket"):
            try:
                socket.create_connection((self._address, tcp["port"]), timeout=1).close()
            except OSError:
                return False
            return True
        place = self._places(spec)
        argv = [place(each) for each in probe["exec"]["command"]]
        env = {
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": str(ROOT),
            "EDL_STATE_DIR": place("/state"),
        }  # fmt: skip
        for each in spec.get("env", ()):
            env[each["name"]] = place(each.get("value") or "")
        try:
            done = subprocess.run(
                argv, env=env, capture_output=True, check=False, cwd=self._folder,
                timeout=max(5, probe.get("timeoutSeconds", 1)),
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired):
            return False
        return done.returncode == 0

    # --- its end, and what is said of it

    def _kill_rest(self) -> None:
        """Kill all processes of the pod, also those that made a session of their own."""
        _kill_processes(self._meta["uid"])

    def _now(self) -> Object:
        try:
            pod = self._store.get(
                self._store.kind("Pod"), self._meta["namespace"], self._meta["name"]
            )
        except ApiError:
            raise _GoneError from None
        if pod["metadata"]["uid"] != self._meta["uid"] or self._is_lost() or self._kubelet._ends:
            raise _GoneError
        return pod

    def _is_ending(self) -> bool:
        return "deletionTimestamp" in self._now()["metadata"]

    def _is_lost(self) -> bool:
        return self._pod["spec"]["nodeName"] in self._kubelet.lost

    def _say(self, states: list[Object]) -> None:
        reports = [
            _report(each.spec, state, ready=each.ready, restarts=each.restarts)
            for each, state in zip(self._containers, states, strict=True)
        ]
        if reports != self._told:
            self._told = reports
            self._kubelet._patch_status(
                self._pod, _status(self._now(), reports) | {"podIP": self._address}
            )


def _kill_processes(uid: str) -> None:
    mark = f"{_MARK}={uid}".encode()
    patience = time.monotonic() + _END_S
    while True:  # one may have been made meanwhile, and a kill takes its time
        found = False
        for process in psutil.process_iter():
            with contextlib.suppress(OSError):
                if mark in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                    found = True
                    os.kill(process.pid, signal.SIGKILL)
        if not found or time.monotonic() > patience:
            return
        time.sleep(0.02)


def _period_s(container: _Container, probe: str) -> float:
    period: float = container.spec.get(probe, {}).get("periodSeconds", 10)
    return period


class _GoneError(Exception):
    """The pod is no more, or its node."""


def _expanded(text: str, env: Mapping[str, str]) -> str:
    return _REFERENCE.sub(lambda found: env.get(found[1], found[0]), text)
