"""The calls to Kubernetes' API, with the official client. Objects are plain dictionaries.

Making what is there and deleting what is not are no errors: whoever was here before has done it.
"""

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote, urlencode

import kubernetes.client
import kubernetes.config
import urllib3
import urllib3.exceptions

from k8s_controller.decisions.observed import JOB_LABEL, belongs_to
from k8s_controller.decisions.spec import API_VERSION, GROUP, KIND, PLURAL, VERSION, Object

CONNECT_S, ANSWER_S = 5.0, 30.0
CONFLICTS_S = (0.01, 0.05, 0.2, 0.0)  # after writes that met another one; then it is an error
_SAME_S = 10.0  # clocks that differ by less are taken for the same
_ANEW = ("POST", "PATCH")  # what they carry does not follow from the version that was read
_KINDS = {  # kind -> where its objects are
    "Pod": "/api/v1/namespaces/{}/pods",
    "Service": "/api/v1/namespaces/{}/services",
    "Secret": "/api/v1/namespaces/{}/secrets",
    "Event": "/api/v1/namespaces/{}/events",
    "Lease": "/apis/coordination.k8s.io/v1/namespaces/{}/leases",
    "PersistentVolumeClaim": "/api/v1/namespaces/{}/persistentvolumeclaims",
    "PodDisruptionBudget": "/apis/policy/v1/namespaces/{}/poddisruptionbudgets",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
    KIND: f"/apis/{GROUP}/{VERSION}/namespaces/{{}}/{PLURAL}",
}
PIECE = 500  # objects of a list that come at once
_GONE = 410  # a list's pieces are of a version that was forgotten meanwhile
_LIVE = [("fieldSelector", "status.phase!=Succeeded,status.phase!=Failed")]  # pods of done jobs
_LISTS = {
    "Pod": "/api/v1/pods",
    "Node": "/api/v1/nodes",
    "PriorityClass": "/apis/scheduling.k8s.io/v1/priorityclasses",
    KIND: f"/apis/{GROUP}/{VERSION}/{PLURAL}",
}


def load_config(kubeconfig: str | None) -> None:
    """Use a kubeconfig file; None: the pod's own account, else the usual file.

    Raises:
        ConfigException: there is none, or it cannot be read.
    """
    if kubeconfig is None:
        try:
            kubernetes.config.load_incluster_config()
            return
        except kubernetes.config.ConfigException:
            pass
    try:
        kubernetes.config.load_kube_config(kubeconfig)
    except kubernetes.config.ConfigException:
        raise
    except Exception as error:  # what the client makes of no YAML, or of another file
        words = " ".join(str(error).split())
        raise kubernetes.config.ConfigException(f"it cannot be read: {words}") from error


NAME_TAKEN = "NameTaken"  # the reason of an error of ours: an object of somebody else has the name


class KubeError(Exception):
    """Kubernetes has refused, or could not; the text says why."""

    def __init__(self, status: int, text: str, reason: str = "") -> None:
        super().__init__(f"Kubernetes answers {status}: {text}")
        self.status, self.reason = status, reason

    @property
    def is_refusal(self) -> bool:
        """Whether the same would be refused again: by a schema, a policy, a quota, a taken name."""
        return self.status in (400, 403, 422) or self.reason == NAME_TAKEN


class NotLeadingError(ValueError):
    """This process may not write now: another controller may lead."""


# All that a call may raise; the last two where the token, which is renewed, cannot be read.
TROUBLES = (
    KubeError,
    urllib3.exceptions.HTTPError,
    ValueError,
    OSError,
    kubernetes.config.ConfigException,
)


class KubeApi:
    """One for all threads; each method may raise one of `TROUBLES`."""

    _ahead_s = 0.0  # of this clock, to the API server's

    def __init__(
        self, answer_s: float = ANSWER_S, *, may_write: Callable[[], bool] = lambda: True
    ) -> None:
        """Connect lazily.

        Args:
            answer_s: a call ends after that, with an answer or without.
            may_write: is asked before each write.
        """
        self._may_write = may_write
        self._client = kubernetes.client.ApiClient()
        self._timeout = urllib3.Timeout(total=answer_s, connect=min(CONNECT_S, answer_s))

    def now(self) -> float:
        """Return seconds since 1970 by the clock of the API server, as the times of objects are."""
        return time.time() - self._ahead_s

    def get(self, kind: str, namespace: str, name: str) -> Object | None:
        """Return an object; None: there is none."""
        try:
            found: Object = self._call("GET", self._path(kind, namespace, name))
        except KubeError as error:
            if error.status == 404:
                return None
            raise
        return found

    def pods_of(self, namespace: str, job: str) -> Sequence[Object]:
        path = _KINDS["Pod"].format(quote(namespace))
        query = [("labelSelector", f"{JOB_LABEL}={job}")]
        found: Sequence[Object] = self._call("GET", path, query=query)["items"]
        return found

    def list_all(self, kind: str, namespace: str | None = None) -> Sequence[Object]:
        """Return all objects of a kind; those of one namespace, if one is named.

        Pods that have ended are left out.
        """
        path = _LISTS[kind] if namespace is None else _KINDS[kind].format(quote(namespace))
        usual = [("limit", str(PIECE)), *(_LIVE if kind == "Pod" else ())]
        found: list[Object] = []
        more = ""
        while True:
            try:
                piece = self.list_piece(path, [*usual, *([("continue", more)] if more else ())])
            except KubeError as error:
                if error.status != _GONE or not more:
                    raise
                found, more = [], ""  # all of it anew
                continue
            found += piece["items"]
            more = piece["metadata"].get("continue") or ""
            if not more:
                return found

    def list_piece(self, path: str, query: Sequence[tuple[str, str]]) -> Object:
        piece: Object = self._call("GET", path, query=query)
        return piece

    def create(self, manifest: Object) -> bool:
        """Make an object; False: there is one of its name."""
        path = self._path(manifest["kind"], manifest["metadata"]["namespace"])
        try:
            self._call("POST", path, manifest)
        except KubeError as error:
            if error.status != 409 or error.reason != "AlreadyExists":
                raise  # a quota that others use as well answers 409, too
            return False
        return True

    def create_for(self, uid: str, manifest: Object) -> None:
        """Make an object of a TrainingJob, unless it has it.

        Raises:
            KubeError: another TrainingJob, of before, has one of that name; or somebody else.
        """
        refusal: KubeError | None = None
        try:
            if self.create(manifest):
                return
        except KubeError as error:
            if not error.is_refusal:
                raise
            refusal = error  # a quota that is used up refuses what is there already, too
        kind, meta = manifest["kind"], manifest["metadata"]
        found = self.get(kind, meta["namespace"], meta["name"])
        if refusal is not None and found is None:
            raise refusal
        if found is not None and belongs_to(found, uid):
            return
        owners = () if found is None else found["metadata"].get("ownerReferences") or ()
        if found is not None and not any(each.get("kind") == KIND for each in owners):
            raise _name_taken(manifest)
        words = f"{kind} {meta['name']} is that of another TrainingJob, until that is gone"
        raise KubeError(409, words)

    def create_new(self, manifest: Object) -> None:
        """Make an object that was not there just now.

        Raises:
            KubeError: it is there all the same, so it is somebody else's.
        """
        if not self.create(manifest):
            raise _name_taken(manifest)

    def replace(self, manifest: Object) -> bool:
        """Write an object as it was read; False: somebody else has written it meanwhile."""
        meta = manifest["metadata"]
        path = self._path(manifest["kind"], meta["namespace"], meta["name"])
        try:
            self._call("PUT", path, manifest)
        except KubeError as error:
            if error.status in (404, 409):
                return False
            raise
        return True

    def delete(self, kind: str, namespace: str, name: str, uid: str) -> None:
        """Delete that very object, if it is there; another one of its name stays."""
        options = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        try:
            self._call("DELETE", self._path(kind, namespace, name), options)
        except KubeError as error:
            if error.status not in (404, 409):
                raise

    def set_budget(self, namespace: str, name: str, needed: int) -> bool:
        """Write how many pods may not be evicted; False: there is no such budget.

        A plain number: of what is reckoned from `spec.replicas`, Kubernetes allows no eviction
        where that is not there.
        """
        told = {"spec": {"minAvailable": needed, "maxUnavailable": None}}
        path = self._path("PodDisruptionBudget", namespace, name)
        try:
            self._call("PATCH", path, told, content="application/merge-patch+json")
        except KubeError as error:
            if error.status != 404:
                raise
            return False
        return True

    def write_status(self, job: Object, status: Object) -> Object:
        """Write some fields of that very TrainingJob's status; return the job as it is now."""
        meta = job["metadata"]
        path = f"{self._path(KIND, meta['namespace'], meta['name'])}/status"
        told = {
            "metadata": {"uid": meta["uid"]},
            "status": status,
        }  # of another one it is a conflict
        now: Object = self._call("PATCH", path, told, content="application/merge-patch+json")
        return now

    def say(self, job: Object, reason: str, message: str, *, warning: bool) -> None:
        """Make an event about a TrainingJob."""
        meta, now = job["metadata"], self.now()
        text = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))
        self.create(
            {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {
                    "name": f"{meta['name']}.{time.time_ns():x}",
                    "namespace": meta["namespace"],
                },
                "involvedObject": {
                    "apiVersion": API_VERSION,
                    "kind": KIND,
                    "name": meta["name"],
                    "namespace": meta["namespace"],
                    "uid": meta["uid"],
                },
                "reason": reason,
                "message": message[:1024],
                "type": "Warning" if warning else "Normal",
                "source": {"component": "edl-controller"},
                "reportingComponent": "edl-controller",
                "firstTimestamp": text,
                "lastTimestamp": text,
                "count": 1,
            }
        )

    def check_writing(self) -> None:
        """Raise a NotLeadingError where this process may not write now."""
        if not self._may_write():
            raise NotLeadingError("its lease has run out, so this controller writes nothing")

    @staticmethod
    def _path(kind: str, namespace: str, name: str | None = None) -> str:
        path = _KINDS[kind].format(quote(namespace))
        return path if name is None else f"{path}/{quote(name)}"

    def _call(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        *,
        query: Sequence[tuple[str, str]] = (),
        content: str = "application/json",
    ) -> Any:
        """Send by the client's connections, with its credentials: its models refuse what is new."""
        config = self._client.configuration
        headers = {"Accept": "application/json", "Content-Type": content}
        for each in config.auth_settings().values():  # it reads a token that is renewed
            headers[each["key"]] = each["value"]
        for wait_s in CONFLICTS_S:
            if method != "GET":
                self.check_writing()
            answer = self._client.rest_client.pool_manager.request(
                method,
                config.host + path + (f"?{urlencode(query)}" if query else ""),
                body=None if body is None else json.dumps(body),
                headers=headers,
                timeout=self._timeout,
                retries=False,
            )
            self._compare_clocks(answer.headers.get("Date"))
            if answer.status < 300:
                try:
                    found = json.loads(answer.data)
                except ValueError:
                    found = None
                if not isinstance(found, dict):  # such as a page of what stands before it
                    raise KubeError(answer.status, "no object: is it an API server?")
                return found
            error = KubeError(answer.status, *_refusal(answer.data))
            if error.status != 409 or error.reason != "Conflict" or method not in _ANEW:
                break
            time.sleep(wait_s)
        raise error

    def _compare_clocks(self, date: str | None) -> None:
        with contextlib.suppress(ValueError):  # it says none
            ahead_s = time.time() - parsedate_to_datetime(date or "").timestamp()
            self._ahead_s = ahead_s if abs(ahead_s) > _SAME_S else 0.0


def _name_taken(manifest: Object) -> KubeError:
    thing = f"{manifest['kind']} {manifest['metadata']['name']}"
    words = (
        f"{thing} is not this TrainingJob's and has the name of one that it needs; delete that, "
        "or give the TrainingJob another name"
    )
    return KubeError(409, words, NAME_TAKEN)


def _refusal(data: bytes) -> tuple[str, str]:
    """Return the words of a refusal, and its one word."""
    try:
        told = json.loads(data)
        return str(told["message"])[:500], str(told.get("reason") or "")
    except (ValueError, KeyError, TypeError, AttributeError):
        return data[:200].decode(errors="replace"), ""
