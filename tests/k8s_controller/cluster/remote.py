"""A cluster that is there already, named by a kubeconfig: its API server, nodes of the test's own.

Nodes are objects that the test makes, with a taint that keeps all other pods away; what runs "on"
them are processes of this machine. It needs an administrator's rights, and leaves nothing behind.
"""

import contextlib
import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlencode

import kubernetes.config
import urllib3
import yaml

from tests.k8s_controller.cluster import patches
from tests.k8s_controller.cluster.kinds import BUILT_IN, ApiError, Kind, Object, custom_kinds
from tests.k8s_controller.cluster.kubelet import Kubelet
from tests.k8s_controller.cluster.store import with_condition
from tests.support import ROOT, wait_until

TAINT = {"key": "paddlepaddle.org/test", "effect": "NoSchedule"}
BEAT_S = 5.0  # between two signs of life of the nodes
PATIENCE_S = 150.0  # with an API server that is away
WATCH_S = 60  # after which a watch begins anew
_MANAGER = "edl-tests"
Key = tuple[str, str]  # namespace, name


class RemoteStore:
    """The objects of a cluster, in the words of `Store`: calls, and watches of what is read often.

    watched: kinds that are read from what watches have told.
    """

    def __init__(self, kubeconfig: Path, watched: tuple[str, ...]) -> None:
        self._client = kubernetes.config.new_client_from_config(str(kubeconfig))
        (definition,) = yaml.safe_load_all((ROOT / "manifests" / "crd.yaml").read_text())
        self.kinds = {each.kind: each for each in reversed([*BUILT_IN, *custom_kinds(definition)])}
        self._known: dict[str, dict[Key, Object]] = {name: {} for name in watched}
        self._lock = threading.RLock()
        self._listeners: list[Callable[[], None]] = []
        self.history: list[tuple[str, Object]] = []  # type, object: what watches have told
        self._ends = False

    def start(self) -> None:
        """Watch; the kinds have to be known to the API server."""
        for name in self._known:
            at = self._list(name)
            threading.Thread(target=self._watch, args=(name, at), daemon=True).start()

    def stop(self) -> None:
        self._ends = True

    # --- as of `Store`

    def kind(self, name: str) -> Kind:
        return self.kinds[name]

    def get(self, kind: Kind, namespace: str, name: str) -> Object:
        if kind.kind in self._known:
            with self._lock:
                try:
                    return self._known[kind.kind][namespace, name]
                except KeyError:
                    raise kind.not_found(name) from None
        return self.call("GET", path_of(kind, namespace, name))

    def all(self, name: str, namespace: str = "") -> list[Object]:
        kind = self.kind(name)
        if name in self._known:
            with self._lock:
                found = sorted(self._known[name].items())
            return [obj for (where, _), obj in found if namespace in ("", where)]
        listed = self.call("GET", path_of(kind, namespace))["items"]
        api = {"apiVersion": kind.api_version, "kind": kind.kind}
        return [api | each for each in listed]

    def create(self, kind: Kind, namespace: str, body: Object) -> Object:
        obj = {"apiVersion": kind.api_version, "kind": kind.kind, **body}
        meta = {k: v for k, v in obj["metadata"].items() if k not in ("uid", "generation")}
        return self._noted(
            kind, self.call("POST", path_of(kind, namespace), obj | {"metadata": meta})
        )

    def apply(self, kind: Kind, namespace: str, body: Object) -> Object:
        """Make an object, or make what is there like it, as `kubectl apply` does."""
        query = {"fieldManager": _MANAGER, "force": "true"}
        path = path_of(kind, namespace, body["metadata"]["name"])
        return self.call("PATCH", path, body, content="application/apply-patch+yaml", query=query)

    def patch(
        self, kind: Kind, namespace: str, name: str, patch: Any, *,
        content_type: str = patches.MERGE, subresource: str = "",
    ) -> Object:  # fmt: skip
        path = path_of(kind, namespace, name) + (f"/{subresource}" if subresource else "")
        return self._noted(kind, self.call("PATCH", path, patch, content=content_type))

    def delete(
        self, kind: Kind, namespace: str, name: str, options: Mapping[str, Any] | None = None
    ) -> Object:
        return self.call("DELETE", path_of(kind, namespace, name), dict(options or {}))

    def listen(self, listener: Callable[[], None]) -> None:
        with self._lock:
            self._listeners.append(listener)

    def forget(self, listener: Callable[[], None]) -> None:
        with self._lock:
            self._listeners.remove(listener)

    # --- the calls

    def call(
        self, method: str, path: str, body: Any = None, *,
        content: str = "application/json", query: Mapping[str, str] | None = None,
    ) -> Object:  # fmt: skip
        away_since = time.monotonic()
        while True:
            try:
                answer = self._send(method, path, body, content, query)
                break
            except (OSError, urllib3.exceptions.HTTPError):
                if time.monotonic() > away_since + PATIENCE_S:
                    raise
                time.sleep(0.2)
        told: Object = json.loads(answer.data)
        if answer.status >= 300:
            raise ApiError(answer.status, str(told.get("reason")), str(told.get("message")))
        return told

    def _send(
        self, method: str, path: str, body: Any, content: str,
        query: Mapping[str, str] | None, *, stream: bool = False,
    ) -> Any:  # fmt: skip
        config = self._client.configuration
        headers = {"Accept": "application/json", "Content-Type": content}
        headers |= {each["key"]: each["value"] for each in config.auth_settings().values()}
        return self._client.rest_client.pool_manager.request(
            method,
            config.host + path + (f"?{urlencode(query)}" if query else ""),
            body=None if body is None else json.dumps(body),
            headers=headers,
            timeout=urllib3.Timeout(connect=5.0, read=WATCH_S + 10.0),
            preload_content=not stream,
            retries=False,
        )

    # --- what watches tell

    def _list(self, name: str) -> str:
        kind = self.kind(name)
        listed = self.call("GET", path_of(kind, ""))
        api = {"apiVersion": kind.api_version, "kind": name}
        with self._lock:
            self._known[name] = {_key(each): api | each for each in listed["items"]}
        self._tell()
        return str(listed["metadata"]["resourceVersion"])

    def _watch(self, name: str, at: str) -> None:
        while not self._ends:
            try:
                for event in self._events(name, at):
                    obj = event["object"]
                    if event["type"] == "ERROR":
                        raise ApiError(obj["code"], obj["reason"], obj["message"])
                    at = obj["metadata"]["resourceVersion"]
                    with self._lock:
                        self.history.append((event["type"], obj))
                        if event["type"] == "DELETED":
                            self._known[name].pop(_key(obj), None)
                    if event["type"] != "DELETED":
                        self._noted(self.kind(name), obj)
                    self._tell()
            except (ApiError, OSError, urllib3.exceptions.HTTPError, ValueError):
                time.sleep(0.2)  # it is away, or has forgotten where we were
                with contextlib.suppress(ApiError, OSError, urllib3.exceptions.HTTPError):
                    at = self._list(name)

    def _events(self, name: str, at: str) -> Iterator[Object]:
        query = {"watch": "1", "resourceVersion": at, "timeoutSeconds": str(WATCH_S)}
        path = path_of(self.kind(name), "")
        answer = self._send("GET", path, None, "application/json", query, stream=True)
        try:
            if answer.status >= 300:
                raise ApiError(answer.status, "Watch", str(answer.read()[:200]))
            rest = b""
            for piece in answer.stream(None):
                *lines, rest = (rest + piece).split(b"\n")
                yield from map(json.loads, lines)
        finally:
            answer.close()

    def _noted(self, kind: Kind, obj: Object) -> Object:
        """Keep an answer, unless a watch has told a newer one."""
        if kind.kind not in self._known:
            return obj
        obj = {"apiVersion": kind.api_version, "kind": kind.kind, **obj}
        with self._lock:
            known = self._known[kind.kind].get(_key(obj))
            is_newer = known is None or _version(known) < _version(obj)
            if is_newer:
                self._known[kind.kind][_key(obj)] = obj
        if is_newer:
            self._tell()
        return obj

    def _tell(self) -> None:
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener()


class RemoteCluster:
    """`store` and `kubelet` are its parts, `namespace` is the test's. It ends with its block."""

    def __init__(self, kubeconfig: Path, folder: Path) -> None:
        self.kubeconfig = kubeconfig
        self.store = RemoteStore(kubeconfig, ("Pod", "TrainingJob"))
        self.namespace = f"edl-test-{uuid.uuid4().hex[:8]}"
        self._folder = folder
        self._made: list[tuple[Kind, str]] = []  # what has no namespace, to be deleted
        self._nodes: list[str] = []
        self._ends = threading.Event()
        self.kubelet: Kubelet

    def __enter__(self) -> Self:
        for name in ("crd.yaml", "rbac.yaml"):
            for each in yaml.safe_load_all((ROOT / "manifests" / name).read_text()):
                self._install(each)
        restricted = {"pod-security.kubernetes.io/enforce": "restricted"}
        self._install_whole("Namespace", self.namespace, {"labels": restricted})
        self._wait_for_definition()
        self.store.start()
        self.kubelet = Kubelet(
            self.store, self._folder, taints=(TAINT,), only_namespace=self.namespace
        )
        threading.Thread(target=self._beat, daemon=True).start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._ends.set()
        for each in self.store.all("TrainingJob", self.namespace):
            with contextlib.suppress(ApiError):
                kind = self.store.kind("TrainingJob")
                self.store.delete(kind, self.namespace, each["metadata"]["name"])
        self.kubelet.stop()
        for pod in self.store.all("Pod", self.namespace):  # there is no kubelet any more
            with contextlib.suppress(ApiError):
                options = {"gracePeriodSeconds": 0}
                name = pod["metadata"]["name"]
                self.store.delete(self.store.kind("Pod"), self.namespace, name, options)
        for kind, name in reversed(self._made):
            with contextlib.suppress(ApiError):
                self.store.delete(kind, "", name)
        # Or the next test would find them amid their end.
        wait_until(
            lambda: not any(self._is_there(*made) for made in self._made), 120, "all is gone"
        )
        self.store.stop()

    # --- what is installed

    def _install(self, manifest: Object) -> None:
        group = manifest["apiVersion"].rpartition("/")[0]
        kind = self.store.kind(manifest["kind"])
        assert kind.group == group
        namespace = manifest["metadata"].get("namespace", "")
        if namespace and not self._is_there(self.store.kind("Namespace"), namespace):
            self._install_whole("Namespace", namespace, {})
        if not namespace and not self._is_there(kind, manifest["metadata"]["name"]):
            self._made.append((kind, manifest["metadata"]["name"]))
        self.store.apply(kind, namespace, manifest)

    def _install_whole(self, kind: str, name: str, meta: Object) -> None:
        made = self.store.kind(kind)
        self.store.create(made, "", {"metadata": {"name": name, **meta}})
        self._made.append((made, name))

    def _is_there(self, kind: Kind, name: str) -> bool:
        try:
            self.store.get(kind, "", name)
        except ApiError as error:
            if error.code != 404:
                raise
            return False
        return True

    def _wait_for_definition(self) -> None:
        for _ in range(300):
            with contextlib.suppress(ApiError):
                self.store.all("TrainingJob")
                return
            time.sleep(0.1)
        raise AssertionError("the API server does not serve TrainingJobs")

    # --- for tests

    def apply(self, manifest: Object) -> None:
        meta = {**manifest["metadata"], "namespace": self.namespace}
        self.store.create(
            self.store.kind(manifest["kind"]), self.namespace, {**manifest, "metadata": meta}
        )

    def add_node(self, cpu: str = "8", memory: str = "32Gi") -> str:
        """Make a node, for pods that name it by `node_selector` and tolerate `TAINT`."""
        name = f"{self.namespace}-{len(self._nodes)}"
        self.kubelet.add_node(name, cpu, memory, labels=self.node_selector)
        self._nodes.append(name)
        self._made.append((self.store.kind("Node"), name))
        return name

    @property
    def node_selector(self) -> dict[str, str]:
        return {"paddlepaddle.org/test": self.namespace}

    def controller_kubeconfig(self, path: Path) -> Path:
        """Write a kubeconfig with the rights of the controller's account."""
        accounts = path_of(self.store.kind("ServiceAccount"), "edl-system", "edl-controller")
        asked = {
            "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
            "spec": {"expirationSeconds": 7200},
        }  # fmt: skip
        token = self.store.call("POST", f"{accounts}/token", asked)["status"]["token"]
        config = yaml.safe_load(self.kubeconfig.read_text())
        config["users"] = [{"name": "controller", "user": {"token": token}}]
        for each in config["contexts"]:
            each["context"]["user"] = "controller"
        path.write_text(yaml.safe_dump(config))
        path.chmod(0o600)
        return path

    def _beat(self) -> None:
        """Say again and again that the nodes live, or Kubernetes gives them up."""
        kind = self.store.kind("Node")
        while not self._ends.wait(BEAT_S):
            for name in list(self._nodes):
                if name in self.kubelet.lost:
                    continue
                with contextlib.suppress(ApiError, OSError, urllib3.exceptions.HTTPError):
                    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
                    status = with_condition(
                        self.store.get(kind, "", name)["status"], "Ready", "True"
                    )
                    for each in status["conditions"]:
                        if each["type"] == "Ready":
                            each["lastHeartbeatTime"] = now
                    told = {"status": {"conditions": status["conditions"]}}
                    self.store.patch(kind, "", name, told, subresource="status")


def path_of(kind: Kind, namespace: str, name: str = "") -> str:
    root = f"/apis/{kind.group}/{kind.version}" if kind.group else f"/api/{kind.version}"
    where = f"/namespaces/{namespace}" if namespace and kind.namespaced else ""
    return f"{root}{where}/{kind.plural}" + (f"/{name}" if name else "")


def _key(obj: Object) -> Key:
    return obj["metadata"].get("namespace", ""), obj["metadata"]["name"]


def _version(obj: Object) -> int:
    return int(obj["metadata"]["resourceVersion"])
