"""The kinds of objects that the API server of the tests knows, and what it says of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]
VERBS = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")


class ApiError(Exception):
    """A refusal as Kubernetes words it: the `Status` of an answer."""

    def __init__(
        self, code: int, reason: str, message: str, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.code, self.reason, self.message = code, reason, message
        self.retry_after_s = retry_after_s

    def status(self) -> Object:
        details = {"retryAfterSeconds": self.retry_after_s} if self.retry_after_s else {}
        return {
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.message, "reason": self.reason, "code": self.code, "details": details,
        }  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """One kind in one version of its group."""

    group: str  # "": the core's
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    subresources: tuple[str, ...] = ()
    short_names: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    # Of custom kinds alone:
    schema: Mapping[str, Any] | None = None
    columns: tuple[Mapping[str, Any], ...] = ()
    scale: Mapping[str, str] | None = None  # `subresources.scale` of the definition

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def key(self) -> tuple[str, str]:
        """What it is stored by: objects are the same in all versions."""
        return self.group, self.plural

    @property
    def qualified(self) -> str:
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def not_found(self, name: str) -> ApiError:
        return ApiError(404, "NotFound", f'{self.qualified} "{name}" not found')

    def discovery(self) -> list[Object]:
        """Return its entries in the list of its group's resources."""
        own = {
            "name": self.plural, "singularName": self.kind.lower(), "namespaced": self.namespaced,
            "kind": self.kind, "verbs": list(VERBS), "shortNames": list(self.short_names),
            "categories": list(self.categories),
        }  # fmt: skip
        return [own] + [
            {"name": f"{self.plural}/{each}", "singularName": "", "namespaced": self.namespaced}
            | _SUBRESOURCES.get(each, {"kind": self.kind, "verbs": ["get", "patch", "update"]})
            for each in self.subresources
        ]


_SUBRESOURCES: dict[str, Object] = {
    "scale": {
        "kind": "Scale", "group": "autoscaling", "version": "v1",
        "verbs": ["get", "patch", "update"],
    },
    "eviction": {"kind": "Eviction", "group": "policy", "version": "v1", "verbs": ["create"]},
    "binding": {"kind": "Binding", "verbs": ["create"]},
    "log": {"kind": "Pod", "verbs": ["get"]},
}  # fmt: skip


def _of(group: str, version: str, *rows: str) -> list[Kind]:
    """Each row: kind, plural, then `cluster` or subresources or =short names."""
    kinds = []
    for row in rows:
        kind, plural, *rest = row.split()
        kinds.append(
            Kind(
                group,
                version,
                plural,
                kind,
                namespaced="cluster" not in rest,
                subresources=tuple(r for r in rest if r != "cluster" and not r.startswith("=")),
                short_names=tuple(r[1:] for r in rest if r.startswith("=")),
            )
        )
    return kinds


BUILT_IN = [
    *_of(
        "", "v1",
        "Namespace namespaces cluster status =ns", "Node nodes cluster status =no",
        "Pod pods status log eviction binding =po", "Service services status =svc",
        "Secret secrets", "ConfigMap configmaps =cm", "ServiceAccount serviceaccounts =sa",
        "PersistentVolumeClaim persistentvolumeclaims status =pvc", "Event events =ev",
    ),
    *_of("apps", "v1", "Deployment deployments status scale =deploy"),
    *_of("batch", "v1", "Job jobs status"),
    *_of("coordination.k8s.io", "v1", "Lease leases"),
    *_of("events.k8s.io", "v1", "Event events =ev"),
    *_of("policy", "v1", "PodDisruptionBudget poddisruptionbudgets status =pdb"),
    *_of("autoscaling", "v2", "HorizontalPodAutoscaler horizontalpodautoscalers status =hpa"),
    *_of("networking.k8s.io", "v1", "NetworkPolicy networkpolicies =netpol"),
    *_of("scheduling.k8s.io", "v1", "PriorityClass priorityclasses cluster =pc"),
    *_of(
        "rbac.authorization.k8s.io", "v1",
        "Role roles", "RoleBinding rolebindings", "ClusterRole clusterroles cluster",
        "ClusterRoleBinding clusterrolebindings cluster",
    ),
    *_of(
        "apiextensions.k8s.io", "v1",
        "CustomResourceDefinition customresourcedefinitions cluster status =crd",
    ),
]  # fmt: skip


def custom_kinds(definition: Object) -> list[Kind]:
    """Return what a CustomResourceDefinition defines: a kind for each version that is served."""
    spec = definition["spec"]
    names = spec["names"]
    found = []
    for version in spec["versions"]:
        subresources = version.get("subresources", {})
        if version["served"]:
            found.append(
                Kind(
                    spec["group"],
                    version["name"],
                    names["plural"],
                    names["kind"],
                    namespaced=spec["scope"] == "Namespaced",
                    subresources=tuple(subresources),
                    short_names=tuple(names.get("shortNames", ())),
                    categories=tuple(names.get("categories", ())),
                    schema=version["schema"]["openAPIV3Schema"],
                    columns=tuple(version.get("additionalPrinterColumns", ())),
                    scale=subresources.get("scale"),
                )
            )
    return found
