"""Who may do what, by roles and bindings as a cluster reads them. Pure."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.k8s_controller.cluster.kinds import Object


@dataclass(frozen=True, order=True)
class Call:
    """A request, as far as rights go by it."""

    verb: str
    group: str
    resource: str  # with its subresource: `pods/status`
    namespace: str = ""
    name: str = ""


@dataclass(frozen=True)
class Grant:
    """A rule that a user has, in one namespace, or in all (None)."""

    rule: Mapping[str, Any]
    namespace: str | None

    def allows(self, call: Call) -> bool:
        if self.namespace not in (None, call.namespace):
            return False
        names = self.rule.get("resourceNames")
        # What is created has no name yet, so far as the rules know.
        is_named = not names or (call.name in names and call.verb != "create")
        return is_named and all(
            "*" in self.rule.get(field, ()) or value in self.rule.get(field, ())
            for field, value in (
                ("verbs", call.verb), ("apiGroups", call.group), ("resources", call.resource),
            )
        )  # fmt: skip


def grants_of(user: str, objects: Iterable[Object]) -> list[Grant]:
    """Return what roles and bindings give a service account, `system:serviceaccount:ns:name`."""
    objects = list(objects)
    roles = {
        (each["kind"], each["metadata"].get("namespace", ""), each["metadata"]["name"]): each
        for each in objects
        if each["kind"] in ("Role", "ClusterRole")
    }
    found = []
    for binding in objects:
        if binding["kind"] not in ("RoleBinding", "ClusterRoleBinding"):
            continue
        if user not in _subjects(binding):
            continue
        own = binding["metadata"].get("namespace", "") if binding["kind"] == "RoleBinding" else None
        told = binding["roleRef"]
        role = roles[told["kind"], (own or "") if told["kind"] == "Role" else "", told["name"]]
        found += [Grant(rule, own) for rule in role["rules"] or ()]
    return found


def _subjects(binding: Object) -> Iterator[str]:
    for each in binding.get("subjects", ()):
        namespace = each.get("namespace", binding["metadata"].get("namespace"))
        yield f"system:serviceaccount:{namespace}:{each['name']}"


def without_each_right(rules: list[Object]) -> Iterator[tuple[str, list[Object]]]:
    """Yield the rules with one verb on one resource taken away, and what that was."""
    for i, rule in enumerate(rules):
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                for verb in rule["verbs"]:
                    rest = [
                        {**rule, "apiGroups": [g], "resources": [r], "verbs": [v]}
                        for g in rule["apiGroups"]
                        for r in rule["resources"]
                        for v in rule["verbs"]
                        if (g, r, v) != (group, resource, verb)
                    ]
                    yield f"{verb} {resource}.{group}", [*rules[:i], *rest, *rules[i + 1 :]]
