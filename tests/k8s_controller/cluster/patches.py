"""Patches and selectors, as the API server applies them. Pure."""

import copy
import re
from collections.abc import Mapping
from typing import Any

from tests.k8s_controller.cluster.kinds import ApiError, Object

MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
JSON = "application/json-patch+json"
APPLY = "application/apply-patch+yaml"


def patched(old: Object, patch: Any, content_type: str) -> Object:
    """Return `old` with the patch applied.

    An apply merges what the manager names; what it named before and names no more, stays. A
    strategic patch merges lists of named things by their name, and replaces other lists.
    """
    if content_type == JSON:
        return _json_patched(old, patch)
    if content_type in (MERGE, STRATEGIC, APPLY):
        return dict(_merged(old, patch, by_name=content_type != MERGE))
    raise ApiError(415, "UnsupportedMediaType", f"patches of type {content_type!r} are not known")


def _merged(old: Any, patch: Any, by_name: bool) -> Any:
    if isinstance(patch, Mapping):
        new = dict(old) if isinstance(old, Mapping) else {}
        for name, value in patch.items():
            if value is None:
                new.pop(name, None)
            else:
                new[name] = _merged(new.get(name), value, by_name)
        return new
    if by_name and isinstance(patch, list) and _are_named(patch) and isinstance(old, list):
        new_items = {each["name"]: each for each in old}
        for each in patch:
            if each.get("$patch") == "delete":
                new_items.pop(each["name"], None)
            else:
                new_items[each["name"]] = _merged(new_items.get(each["name"]), each, by_name)
        return list(new_items.values())
    return copy.deepcopy(patch)


def _are_named(items: list[Any]) -> bool:
    return all(isinstance(each, Mapping) and "name" in each for each in items)


def _json_patched(old: Object, operations: list[Object]) -> Object:
    root = {"": copy.deepcopy(old)}  # so that the whole has a parent as well
    for operation in operations:
        parts = [
            part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")
        ]
        try:
            _apply(root, parts, operation)
        except (KeyError, IndexError, ValueError, TypeError) as error:
            raise ApiError(
                422, "Invalid", f"the server rejected our request: {operation}: {error!r}"
            ) from None
    return root[""]


def _apply(root: Any, parts: list[str], operation: Object) -> None:
    parent = root
    for part in parts[:-1]:
        parent = parent[int(part) if isinstance(parent, list) else part]
    last: Any = parts[-1]
    if isinstance(parent, list):
        last = len(parent) if last == "-" else int(last)
    match operation["op"]:
        case "add" if isinstance(parent, list):
            parent.insert(last, operation["value"])
        case "add":
            parent[last] = operation["value"]
        case "replace":
            parent[last]  # it has to be there
            parent[last] = operation["value"]
        case "remove":
            del parent[last]
        case "test":
            if parent[last] != operation["value"]:
                raise ValueError(f"it is {parent[last]!r}")
        case other:
            raise ValueError(f"{other!r} is not known here")


# --- selectors


def matches_labels(selector: str, labels: Mapping[str, str]) -> bool:
    """Whether labels fit `a=b,c!=d,e in (f,g),h,!i`."""
    return all(_fits(term.strip(), labels) for term in re.split(r",(?![^(]*\))", selector))


_IN = re.compile(r"(\S+)\s+(in|notin)\s+\(([^)]*)\)")


def _fits(term: str, labels: Mapping[str, str]) -> bool:
    if not term:
        return True
    if found := _IN.fullmatch(term):
        name, how, values = found.groups()
        is_in = labels.get(name) in {each.strip() for each in values.split(",")}
        return is_in == (how == "in")
    if "!=" in term:
        name, value = term.split("!=")
        return labels.get(name.strip()) != value.strip()
    if "=" in term:
        name, value = re.split("==?", term)
        return labels.get(name.strip()) == value.strip()
    return (term[1:] not in labels) if term.startswith("!") else term in labels


def selects(selector: Object | None, labels: Mapping[str, str]) -> bool:
    """Whether a LabelSelector, as specs have it, fits. None selects nothing, {} everything."""
    if selector is None:
        return False
    if not selector.get("matchLabels", {}).items() <= labels.items():
        return False
    for each in selector.get("matchExpressions", ()):
        there, value = each["key"] in labels, labels.get(each["key"])
        fits = {
            "In": value in each.get("values", ()),
            "NotIn": value not in each.get("values", ()),
            "Exists": there,
            "DoesNotExist": not there,
        }
        if not fits[each["operator"]]:
            return False
    return True


def matches_fields(selector: str, obj: Object) -> bool:
    """Whether an object fits `metadata.name=x,spec.nodeName!=y`."""
    for term in filter(None, selector.split(",")):
        path, how, wanted = re.split(r"(!=|==?)", term, maxsplit=1)
        value: Any = obj
        for part in path.split("."):
            value = value.get(part, {}) if isinstance(value, Mapping) else {}
        if (str(value or "") == wanted) == (how == "!="):
            return False
    return True
