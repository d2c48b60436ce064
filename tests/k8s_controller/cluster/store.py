"""The objects of a cluster, with the rules by which an API server keeps them. No HTTP.

Objects in here are never changed in place: whoever has one may keep it.
"""

import base64
import copy
import datetime
import re
import secrets
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.k8s_controller.cluster import crd_schema, patches
from tests.k8s_controller.cluster.kinds import BUILT_IN, ApiError, Kind, Object, custom_kinds

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_OURS = ("name", "namespace", "uid", "creationTimestamp", "generation", "resourceVersion")
_DELETION = ("deletionTimestamp", "deletionGracePeriodSeconds")
_FOREGROUND, _ORPHAN = "foregroundDeletion", "orphan"
# What of a pod's spec may be changed once it is there.
_POD_MUTABLE = {"activeDeadlineSeconds", "tolerations", "terminationGracePeriodSeconds"}


def now_text(later_s: float = 0.0) -> str:
    moment = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=later_s)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True, slots=True)
class Change:
    revision: int
    kind: Kind
    type: str  # ADDED, MODIFIED, DELETED
    obj: Object
    before: Object | None


class Store:
    """All objects, by kind, namespace and name. Safe for threads."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.kinds: dict[tuple[str, str, str], Kind] = {}  # by group, version, plural
        self.revision = 100
        self.oldest = 100  # watches from before get 410
        self.history: list[Change] = []
        self._objects: dict[tuple[str, str], dict[tuple[str, str], Object]] = {}
        self._owned: dict[str, set[tuple[str, str, str, str]]] = {}  # by the uid of the owner
        self._listeners: list[Callable[[], None]] = []
        for kind in BUILT_IN:
            self._add_kind(kind)
        for name in ("default", "kube-system"):
            self.create(self.kind("Namespace"), "", {"metadata": {"name": name}})

    # --- kinds

    def kind(self, name: str) -> Kind:
        """Return a kind by its name, `Pod`; of several groups, the first."""
        return next(kind for kind in self.kinds.values() if kind.kind == name)

    def _add_kind(self, kind: Kind) -> None:
        self.kinds[kind.group, kind.version, kind.plural] = kind
        self._objects.setdefault(kind.key, {})

    # --- reading

    def get(self, kind: Kind, namespace: str, name: str) -> Object:
        with self.lock:
            try:
                return self._as_of(kind, self._objects[kind.key][namespace, name])
            except KeyError:
                raise kind.not_found(name) from None

    def select(
        self, kind: Kind, namespace: str = "", labels: str = "", fields: str = ""
    ) -> tuple[list[Object], int]:
        """Return the objects, by namespace and name, and the revision that they are of."""
        with self.lock:
            found = [
                self._as_of(kind, obj)
                for (where, _), obj in sorted(self._objects[kind.key].items())
                if namespace in ("", where) and is_selected(obj, labels, fields)
            ]
            return found, self.revision

    def all(self, name: str, namespace: str = "") -> list[Object]:
        """Return all objects of the kind of this name."""
        found: list[Object] = self.select(self.kind(name), namespace)[0]
        return found

    @staticmethod
    def _as_of(kind: Kind, obj: Object) -> Object:
        if obj["apiVersion"] == kind.api_version:
            return obj
        return {**obj, "apiVersion": kind.api_version}

    def since(self, revision: int) -> list[Change]:
        """Return the changes after a revision; 410 where they are forgotten."""
        with self.lock:
            if revision < self.oldest:
                raise ApiError(
                    410, "Expired", f"too old resource version: {revision} ({self.oldest})"
                )
            first = len(self.history)
            while first and self.history[first - 1].revision > revision:
                first -= 1
            return self.history[first:]

    def compact(self) -> None:
        """Forget all changes up to now: watches that begin before get 410."""
        with self.lock:
            self.history.clear()
            self.oldest = self.revision

    def listen(self, listener: Callable[[], None]) -> None:
        """Have `listener` called after each change, by the thread that made it."""
        with self.lock:
            self._listeners.append(listener)

    def forget(self, listener: Callable[[], None]) -> None:
        with self.lock:
            self._listeners.remove(listener)

    # --- writing

    def create(self, kind: Kind, namespace: str, body: Object, strict: bool = False) -> Object:
        with self.lock:
            obj = {"apiVersion": kind.api_version, "kind": kind.kind, **copy.deepcopy(body)}
            if (obj["apiVersion"], obj["kind"]) != (kind.api_version, kind.kind):
                raise ApiError(400, "BadRequest", f"this is no {kind.kind}: {obj['kind']}")
            meta = obj["metadata"] = dict(obj.get("metadata") or {})
            if meta.get("namespace", namespace) not in ("", namespace):
                raise ApiError(
                    400, "BadRequest", "the namespace of the object is not that of the request"
                )
            if kind.namespaced:
                meta["namespace"] = namespace
                where = self.get(self.kind("Namespace"), "", namespace)
                if "deletionTimestamp" in where["metadata"]:
                    raise ApiError(403, "Forbidden", f"namespace {namespace} is being terminated")
            if not meta.get("name") and meta.get("generateName"):
                meta["name"] = meta["generateName"] + secrets.token_hex(3)[:5]
            name = meta.get("name", "")
            if not _NAME.fullmatch(name):
                raise self._invalid(kind, name, "metadata.name: must be a lowercase RFC 1123 name")
            if (namespace, name) in self._objects[kind.key]:
                raise ApiError(409, "AlreadyExists", f'{kind.qualified} "{name}" already exists')
            meta |= {"uid": str(uuid.uuid4()), "creationTimestamp": now_text(), "generation": 1}
            for field in ("resourceVersion", *_DELETION):
                meta.pop(field, None)
            if "status" in kind.subresources:
                obj.pop("status", None)
            obj = self._admitted(kind, obj, None, strict)
            return self._as_of(kind, self._write(kind, namespace, name, obj, "ADDED"))

    def update(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        change: Callable[[Object], Object],
        subresource: str = "",
        strict: bool = False,
    ) -> Object:
        """Replace an object by what `change` makes of it. 409 if that names another version."""
        with self.lock:
            old = self.get(kind, namespace, name)
            new = copy.deepcopy(change(copy.deepcopy(old)))
            meta = new["metadata"] = dict(new.get("metadata") or {})
            told = meta.get("resourceVersion")
            if told not in (None, "", old["metadata"]["resourceVersion"]):
                raise ApiError(
                    409, "Conflict", f'Operation cannot be fulfilled on {kind.qualified} "{name}": '
                    "the object has been modified; please apply your changes to the latest version "
                    "and try again",
                )  # fmt: skip
            if meta.get("uid", old["metadata"]["uid"]) != old["metadata"]["uid"]:
                raise ApiError(409, "Conflict", f"Precondition failed: UID of {name}")
            for field in (*_OURS, *_DELETION):
                meta.pop(field, None)
                if field in old["metadata"]:
                    meta[field] = old["metadata"][field]
            if subresource == "status":
                new = {**old, "status": new.get("status", {})}
            elif "status" in kind.subresources:
                new = {**new, "status": old["status"]} if "status" in old else _without_status(new)
            new |= {"apiVersion": old["apiVersion"], "kind": old["kind"]}
            new = self._admitted(kind, new, old, strict)
            if new == old:
                return old
            spec_of = ("metadata", "status")
            if {k: v for k, v in new.items() if k not in spec_of} != {
                k: v for k, v in old.items() if k not in spec_of
            }:
                new["metadata"]["generation"] += 1
            if self._may_go(kind, new):
                return self._remove(kind, namespace, name, new)
            return self._as_of(kind, self._write(kind, namespace, name, new, "MODIFIED"))

    def patch(
        self, kind: Kind, namespace: str, name: str, patch: Any, *,
        content_type: str = patches.MERGE, subresource: str = "", strict: bool = False,
    ) -> Object:  # fmt: skip
        return self.update(
            kind, namespace, name, lambda old: patches.patched(old, patch, content_type),
            subresource, strict,
        )  # fmt: skip

    def delete(
        self, kind: Kind, namespace: str, name: str, options: Mapping[str, Any] | None = None
    ) -> Object:
        """Delete an object, or mark it where a finalizer or a pod's grace comes before that."""
        options = options or {}
        with self.lock:
            old = self.get(kind, namespace, name)
            for field, told in (options.get("preconditions") or {}).items():
                if told not in (None, old["metadata"][field]):
                    raise ApiError(409, "Conflict", f"Precondition failed: {field} of {name}")
            new = copy.deepcopy(old)
            meta = new["metadata"]
            policy = options.get("propagationPolicy")
            extra = {"Foreground": _FOREGROUND, "Orphan": _ORPHAN}.get(policy or "")
            finalizers = [*meta.get("finalizers", ())]
            if extra and extra not in finalizers:
                finalizers.append(extra)
            if finalizers:
                meta["finalizers"] = finalizers
            grace_s = self._grace_s(kind, new, options.get("gracePeriodSeconds"))
            if "deletionTimestamp" not in meta:
                meta |= {
                    "deletionTimestamp": now_text(grace_s),
                    "generation": meta["generation"] + 1,
                }
                meta["deletionGracePeriodSeconds"] = grace_s
            elif grace_s < meta["deletionGracePeriodSeconds"]:
                meta |= {"deletionTimestamp": now_text(grace_s)}
                meta["deletionGracePeriodSeconds"] = grace_s
            if self._may_go(kind, new):
                return self._remove(kind, namespace, name, new)
            if new == old:
                return old
            return self._write(kind, namespace, name, new, "MODIFIED")

    @staticmethod
    def _grace_s(kind: Kind, obj: Object, told: int | None) -> int:
        if kind.kind != "Pod":
            return 0
        ended = obj.get("status", {}).get("phase") in ("Succeeded", "Failed")
        if not obj["spec"].get("nodeName") or ended:
            return 0
        return obj["spec"]["terminationGracePeriodSeconds"] if told is None else told

    @staticmethod
    def _may_go(kind: Kind, obj: Object) -> bool:
        meta = obj["metadata"]
        is_marked = "deletionTimestamp" in meta and not meta.get("finalizers")
        if is_marked and kind.kind == "Namespace":
            return not obj["spec"]["finalizers"]
        return is_marked and not meta["deletionGracePeriodSeconds"]

    def bind(self, namespace: str, name: str, node: str) -> Object:
        """Give a pod its node, as the binding subresource does."""
        kind = self.kind("Pod")
        with self.lock:
            old = self.get(kind, namespace, name)
            if old["spec"].get("nodeName"):
                raise ApiError(409, "Conflict", f"pod {name} is already assigned to a node")
            if "deletionTimestamp" in old["metadata"]:
                raise ApiError(409, "Conflict", f"pod {name} is being deleted")
            status = with_condition(old.get("status", {}), "PodScheduled", "True")
            new = {**old, "spec": {**old["spec"], "nodeName": node}, "status": status}
            return self._write(kind, namespace, name, new, "MODIFIED")

    def dependents(self, uid: str) -> list[tuple[Kind, Object]]:
        """Return the objects that name an owner."""
        with self.lock:
            found = sorted(self._owned.get(uid, ()))
            return [
                (self._kind_of(group, plural), self._objects[group, plural][namespace, name])
                for group, plural, namespace, name in found
            ]

    # --- the rules of kinds

    def _kind_of(self, group: str, plural: str) -> Kind:
        return next(kind for kind in self.kinds.values() if kind.key == (group, plural))

    def _admitted(self, kind: Kind, new: Object, old: Object | None, strict: bool) -> Object:
        """Return it with defaults; refuse what is invalid."""
        name = new["metadata"]["name"]
        if kind.schema is not None:
            body = {k: v for k, v in new.items() if k not in ("apiVersion", "kind", "metadata")}
            if strict and (unknown := list(crd_schema.unknown_fields(kind.schema, body))):
                fields = ", ".join(f'unknown field "{each}"' for each in unknown)
                raise ApiError(400, "BadRequest", f"strict decoding error: {fields}")
            kept = {k: new[k] for k in ("apiVersion", "kind", "metadata")}
            new = {**kept, **crd_schema.pruned_and_defaulted(kind.schema, body), **kept}
            if wrong := crd_schema.errors(kind.schema, new, old):
                raise self._invalid(kind, name, "; ".join(wrong))
        elif kind.kind == "Pod":
            new = self._admitted_pod(kind, new, old)
        elif kind.kind == "Job" and old and old["spec"]["template"] != new["spec"]["template"]:
            raise self._invalid(kind, name, "spec.template: Invalid value: field is immutable")
        elif kind.kind == "Secret" and "stringData" in new:
            plain = new.pop("stringData")
            coded = {k: base64.b64encode(v.encode()).decode() for k, v in plain.items()}
            new["data"] = new.get("data", {}) | coded
        elif kind.kind == "Namespace" and old is None:
            new |= {"spec": {"finalizers": ["kubernetes"]}, "status": {"phase": "Active"}}
        elif kind.kind == "CustomResourceDefinition":
            for each in custom_kinds(new):
                self._add_kind(each)
            new["status"] = with_condition(new.get("status", {}), "Established", "True")
            new["status"] |= {"acceptedNames": new["spec"]["names"]}
        return new

    def _admitted_pod(self, kind: Kind, new: Object, old: Object | None) -> Object:
        spec = new["spec"]
        if old is not None:
            before, after = _fixed_part(old["spec"]), _fixed_part(spec)
            if before != after:
                wrong = [k for k in {*before, *after} if before.get(k) != after.get(k)]
                raise self._invalid(
                    kind, new["metadata"]["name"],
                    f"spec: Forbidden: pod updates may change the image alone, not {wrong}",
                )  # fmt: skip
            return new
        if priority := spec.get("priorityClassName"):
            known = {each["metadata"]["name"]: each for each in self.all("PriorityClass")}
            if priority not in known:
                raise ApiError(403, "Forbidden", f"no PriorityClass with name {priority} was found")
            spec["priority"] = known[priority]["value"]
        spec = {
            "restartPolicy": "Always", "terminationGracePeriodSeconds": 30, "priority": 0,
            "serviceAccountName": "default", "schedulerName": "default-scheduler", **spec,
        }  # fmt: skip
        for each in spec["containers"]:
            if each.keys() & {"image", "name"} != {"image", "name"}:
                raise self._invalid(
                    kind, new["metadata"]["name"], "spec.containers: name and image are required"
                )
        return {**new, "spec": spec, "status": {"phase": "Pending", "qosClass": "Burstable"}}

    @staticmethod
    def _invalid(kind: Kind, name: str, wrong: str) -> ApiError:
        return ApiError(422, "Invalid", f'{kind.kind} "{name}" is invalid: {wrong}')

    # --- what is written

    def _write(self, kind: Kind, namespace: str, name: str, new: Object, how: str) -> Object:
        objects = self._objects[kind.key]
        before = objects.get((namespace, name))
        self.revision += 1
        new["metadata"] = new["metadata"] | {"resourceVersion": str(self.revision)}
        objects[namespace, name] = new
        self._note_owners(kind, namespace, name, before, new)
        self._publish(Change(self.revision, kind, how, new, before))
        return new

    def _remove(self, kind: Kind, namespace: str, name: str, last: Object) -> Object:
        before = self._objects[kind.key].pop((namespace, name))
        self.revision += 1
        last["metadata"] = last["metadata"] | {"resourceVersion": str(self.revision)}
        self._note_owners(kind, namespace, name, before, None)
        if kind.kind == "CustomResourceDefinition":
            for each in custom_kinds(last):
                self.kinds.pop((each.group, each.version, each.plural), None)
                self._objects.pop(each.key, None)
        self._publish(Change(self.revision, kind, "DELETED", last, before))
        return last

    def _note_owners(
        self, kind: Kind, namespace: str, name: str, before: Object | None, new: Object | None
    ) -> None:
        entry = (*kind.key, namespace, name)
        for uid in owner_uids(before):
            self._owned[uid].discard(entry)
        for uid in owner_uids(new):
            self._owned.setdefault(uid, set()).add(entry)

    def _publish(self, change: Change) -> None:
        self.history.append(change)
        for listener in self._listeners:
            listener()


def owner_uids(obj: Object | None) -> list[str]:
    return [each["uid"] for each in (obj or {}).get("metadata", {}).get("ownerReferences", ())]


def is_selected(obj: Object, labels: str, fields: str) -> bool:
    return patches.matches_labels(
        labels, obj["metadata"].get("labels") or {}
    ) and patches.matches_fields(fields, obj)


def with_condition(
    status: Object, name: str, value: str, reason: str = "", text: str = ""
) -> Object:
    """Return a status with this condition. Its time moves when its value does."""
    old = {each["type"]: each for each in status.get("conditions", ())}
    condition = {"type": name, "status": value, "lastTransitionTime": now_text()}
    if old.get(name, {}).get("status") == value:
        condition["lastTransitionTime"] = old[name]["lastTransitionTime"]
    if reason:
        condition |= {"reason": reason, "message": text}
    return {**status, "conditions": [*(old | {name: condition}).values()]}


def _without_status(obj: Object) -> Object:
    return {name: value for name, value in obj.items() if name != "status"}


def _fixed_part(spec: Object) -> Object:
    fixed = {name: value for name, value in spec.items() if name not in _POD_MUTABLE}
    for part in ("containers", "initContainers"):
        if part in spec:
            fixed[part] = [{k: v for k, v in each.items() if k != "image"} for each in spec[part]]
    return fixed
