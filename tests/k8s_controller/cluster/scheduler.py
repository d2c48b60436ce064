"""The parts of a cluster that decide: a scheduler, and the garbage collector. A thread for both."""

import contextlib
import threading
from collections.abc import Mapping
from fractions import Fraction

from tests.k8s_controller.cluster.kinds import ApiError, Kind, Object
from tests.k8s_controller.cluster.patches import selects
from tests.k8s_controller.cluster.store import Store, owner_uids, with_condition

_UNITS: dict[str, Fraction | int] = {
    "m": Fraction(1, 1000), "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40,
}  # fmt: skip


def quantity(text: str | int | float) -> Fraction:
    """Return the number that a quantity such as `500m` or `2Gi` is."""
    text = str(text)
    digits = text.rstrip("KMGTikm")
    return Fraction(digits) * Fraction(_UNITS.get(text[len(digits) :], 1))


def requests_of(pod: Object) -> dict[str, Fraction]:
    """Return what a pod asks for, its slot on the node included."""
    total: dict[str, Fraction] = {"pods": Fraction(1)}
    for container in pod["spec"]["containers"]:
        for name, value in asked(container).items():
            total[name] = total.get(name, Fraction(0)) + value
    for container in pod["spec"].get("initContainers", ()):
        for name, value in asked(container).items():
            total[name] = max(total.get(name, Fraction(0)), value)
    return total


def asked(container: Object) -> dict[str, Fraction]:
    resources = container.get("resources", {})
    wanted = {**resources.get("limits", {}), **resources.get("requests", {})}
    return {name: quantity(value) for name, value in wanted.items()}


def free_on(node: Object, pods: list[Object]) -> dict[str, Fraction]:
    """Return what is left of a node's allocatable beside the pods that are bound to it."""
    free = {name: quantity(value) for name, value in node["status"]["allocatable"].items()}
    for pod in pods:
        ended = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
        if pod["spec"].get("nodeName") == node["metadata"]["name"] and not ended:
            for name, value in requests_of(pod).items():
                free[name] = free.get(name, Fraction(0)) - value
    return free


def why_not(pod: Object, node: Object, free: Mapping[str, Fraction]) -> str:
    """Return why a pod cannot be on a node, in the scheduler's words; "" if it can."""
    spec = pod["spec"]
    if node["spec"].get("unschedulable"):
        return "node(s) were unschedulable"
    labels = node["metadata"].get("labels", {})
    if not spec.get("nodeSelector", {}).items() <= labels.items():
        return "node(s) didn't match Pod's node affinity/selector"
    wanted = spec.get("affinity", {}).get("nodeAffinity", {})
    terms = wanted.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get(
        "nodeSelectorTerms", [{}]
    )
    if not any(selects(term, labels) for term in terms):
        return "node(s) didn't match Pod's node affinity/selector"
    for taint in node["spec"].get("taints", ()):
        if taint["effect"] != "PreferNoSchedule" and not any(
            _tolerates(each, taint) for each in spec.get("tolerations", ())
        ):
            return f"node(s) had untolerated taint {{{taint['key']}: {taint.get('value', '')}}}"
    for name, value in requests_of(pod).items():
        if value > free.get(name, 0):
            return "Too many pods" if name == "pods" else f"Insufficient {name}"
    return ""


def _tolerates(toleration: Object, taint: Object) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("operator") == "Exists":
        return toleration.get("key") in (None, "", taint["key"])
    told, wanted = toleration.get("value", ""), taint.get("value", "")
    return bool(toleration.get("key") == taint["key"] and told == wanted)


class Scheduler:
    """Binds pods to nodes, higher priorities and older ones first; it preempts nobody.

    It also collects garbage: what all owners of have gone, and what is in a namespace that goes.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._changed = threading.Event()
        self._ends = False
        self._seen = store.revision
        self._finalizing: list[Object] = []  # being deleted, with a finalizer of ours
        self._thread = threading.Thread(target=self._run, daemon=True)
        store.listen(self._changed.set)
        self._thread.start()

    def stop(self) -> None:
        self._ends = True
        self._changed.set()
        self._thread.join()
        self._store.forget(self._changed.set)

    def _run(self) -> None:
        while True:
            self._changed.wait()
            self._changed.clear()
            if self._ends:
                return
            try:
                self._collect()
                self._schedule()
            except ApiError:  # it was changed or went meanwhile: that is a change, too
                self._changed.set()

    def _schedule(self) -> None:
        store = self._store
        pods = store.all("Pod")
        waiting = [
            pod
            for pod in pods
            if not pod["spec"].get("nodeName") and "deletionTimestamp" not in pod["metadata"]
            and not pod["spec"].get("schedulingGates")
        ]  # fmt: skip
        if not waiting:
            return
        nodes = [node for node in store.all("Node") if "deletionTimestamp" not in node["metadata"]]
        free = {node["metadata"]["name"]: free_on(node, pods) for node in nodes}
        waiting.sort(
            key=lambda pod: (-pod["spec"]["priority"], pod["metadata"]["creationTimestamp"])
        )
        for pod in waiting:
            meta = pod["metadata"]
            reasons: dict[str, int] = {}
            fitting = []
            for node in nodes:
                name = node["metadata"]["name"]
                if reason := why_not(pod, node, free[name]):
                    reasons[reason] = reasons.get(reason, 0) + 1
                else:
                    fitting.append(name)
            if fitting:
                best = max(fitting, key=lambda name: (free[name].get("cpu", Fraction(0)), name))
                store.bind(meta["namespace"], meta["name"], best)
                for name, value in requests_of(pod).items():
                    free[best][name] = free[best].get(name, Fraction(0)) - value
            else:
                told = ", ".join(f"{count} {why}" for why, count in sorted(reasons.items()))
                text = f"0/{len(nodes)} nodes are available: {told or 'there are none'}."
                self._say_unschedulable(pod, text)

    def _say_unschedulable(self, pod: Object, text: str) -> None:
        meta = pod["metadata"]
        told = {c["type"]: c.get("message") for c in pod["status"].get("conditions", ())}
        if told.get("PodScheduled") == text:
            return
        status = with_condition(pod["status"], "PodScheduled", "False", "Unschedulable", text)
        self._store.update(
            self._store.kind("Pod"), meta["namespace"], meta["name"],
            lambda old: {**old, "status": status}, "status",
        )  # fmt: skip

    # --- garbage

    def _collect(self) -> None:
        store = self._store
        with store.lock:
            try:
                changes = store.since(self._seen)
            except ApiError:
                changes = []
            self._seen = store.revision
        for change in changes:
            if change.type == "DELETED":
                for _kind, obj in store.dependents(change.obj["metadata"]["uid"]):
                    self._release(obj)
            else:
                self._release(change.obj)
                finalizers = {"orphan", "foregroundDeletion"}
                if not finalizers.isdisjoint(change.obj["metadata"].get("finalizers", ())):
                    self._finalizing.append(change.obj)
        waiting, self._finalizing = self._finalizing, []
        for obj in waiting:
            self._finalize(obj)
        for namespace in store.all("Namespace"):
            self._empty(namespace)

    def _release(self, obj: Object) -> None:
        """Delete an object none of whose owners is there any more."""
        uids = owner_uids(obj)
        if uids and not any(
            self._is_there(obj, each) for each in obj["metadata"]["ownerReferences"]
        ):
            self._delete(obj)

    def _is_there(self, obj: Object, reference: Object) -> bool:
        for kind in list(self._store.kinds.values()):
            if (kind.kind, kind.api_version) == (reference["kind"], reference["apiVersion"]):
                namespace = obj["metadata"].get("namespace", "") if kind.namespaced else ""
                try:
                    owner = self._store.get(kind, namespace, reference["name"])
                except ApiError:
                    return False
                return bool(owner["metadata"]["uid"] == reference["uid"])
        return False

    def _delete(self, obj: Object) -> None:
        meta = obj["metadata"]
        options = {"preconditions": {"uid": meta["uid"]}}
        try:
            kind = self._kind_of(obj)
            self._store.delete(kind, meta.get("namespace", ""), meta["name"], options)
        except (ApiError, StopIteration):
            return  # it has gone, or its definition has

    def _kind_of(self, obj: Object) -> Kind:
        return next(
            kind
            for kind in self._store.kinds.values()
            if (kind.kind, kind.api_version) == (obj["kind"], obj["apiVersion"])
        )

    def _finalize(self, obj: Object) -> None:
        """Do what the end of an owner waits for: its dependents end, or are released."""
        meta = obj["metadata"]
        if "deletionTimestamp" not in meta:
            return
        dependents = self._store.dependents(meta["uid"])
        if "orphan" in meta["finalizers"]:
            for kind, each in dependents:
                kept = [r for r in each["metadata"]["ownerReferences"] if r["uid"] != meta["uid"]]
                self._store.patch(
                    kind, each["metadata"].get("namespace", ""), each["metadata"]["name"],
                    {"metadata": {"ownerReferences": kept}},
                )  # fmt: skip
            self._drop_finalizer(obj, "orphan")
        elif dependents:
            for _kind, each in dependents:
                if "deletionTimestamp" not in each["metadata"]:
                    self._delete(each)
            self._finalizing.append(obj)  # until they have gone
        else:
            self._drop_finalizer(obj, "foregroundDeletion")

    def _drop_finalizer(self, obj: Object, name: str) -> None:
        meta = obj["metadata"]

        def dropped(now: Object) -> Object:
            kept = [each for each in now["metadata"].get("finalizers", ()) if each != name]
            return {**now, "metadata": {**now["metadata"], "finalizers": kept}}

        with contextlib.suppress(ApiError):  # it has gone
            self._store.update(self._kind_of(obj), meta.get("namespace", ""), meta["name"], dropped)

    def _empty(self, namespace: Object) -> None:
        if "deletionTimestamp" not in namespace["metadata"]:
            return
        name = namespace["metadata"]["name"]
        left = [
            obj
            for kind in list(self._store.kinds.values())
            if kind.namespaced
            for obj in self._store.select(kind, name)[0]
        ]
        for obj in left:
            if "deletionTimestamp" not in obj["metadata"]:
                self._delete(obj)
        if not left:
            self._store.update(
                self._store.kind("Namespace"), "", name,
                lambda old: {**old, "spec": {"finalizers": []}},
            )  # fmt: skip
