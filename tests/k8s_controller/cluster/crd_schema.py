"""What a definition's schema does to an object: prune, default, validate, its CEL rules. Pure."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import cel
import jsonschema

from tests.k8s_controller.cluster.kinds import Object

Schema = Mapping[str, Any]


def pruned_and_defaulted(schema: Schema, value: Any) -> Any:
    """Return a copy without fields that the schema does not name, and with its defaults."""
    if isinstance(value, Mapping) and ("properties" in schema or "additionalProperties" in schema):
        properties = schema.get("properties", {})
        others = schema.get("additionalProperties")
        keeps = schema.get("x-kubernetes-preserve-unknown-fields", False)
        new = {}
        for name, each in value.items():
            if name in properties:
                new[name] = pruned_and_defaulted(properties[name], each)
            elif isinstance(others, Mapping):
                new[name] = pruned_and_defaulted(others, each)
            elif others or keeps:
                new[name] = each
        for name, each in properties.items():
            if name not in new and "default" in each:
                new[name] = pruned_and_defaulted(each, each["default"])
        return new
    if isinstance(value, Mapping) and schema.get("type") == "object":
        return dict(value) if schema.get("x-kubernetes-preserve-unknown-fields") else {}
    if isinstance(value, list) and isinstance(schema.get("items"), Mapping):
        return [pruned_and_defaulted(schema["items"], each) for each in value]
    return value


def unknown_fields(schema: Schema, value: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of fields that are about to be pruned, for `fieldValidation=Strict`."""
    if isinstance(value, Mapping) and "properties" in schema:
        for name, each in value.items():
            where = f"{path}.{name}".lstrip(".")
            if name in schema["properties"]:
                yield from unknown_fields(schema["properties"][name], each, where)
            elif not schema.get("x-kubernetes-preserve-unknown-fields"):
                yield where
    elif isinstance(value, list) and isinstance(schema.get("items"), Mapping):
        for i, each in enumerate(value):
            yield from unknown_fields(schema["items"], each, f"{path}[{i}]")


def errors(schema: Schema, new: Any, old: Any = None) -> list[str]:
    """Return what is wrong with an object, as `field: text`. `old`: what it replaces."""
    found = []
    for error in _validator(_Frozen(schema)).iter_errors(new):
        field = ".".join(str(each) for each in error.absolute_path)
        found.append(f"{field}: {error.message}")
    return found or list(_broken_rules(schema, new, old, ""))


def _broken_rules(schema: Schema, new: Any, old: Any, path: str) -> Iterator[str]:
    for rule in schema.get("x-kubernetes-validations", ()):
        known = {"self": new}
        if "oldSelf" in rule["rule"]:
            if old is None:
                continue  # a rule on changes
            known["oldSelf"] = old
        if not _program(rule["rule"]).execute(known):
            yield f"{path or '<nil>'}: {rule.get('message', rule['rule'])}"
    if isinstance(new, Mapping):
        before = old if isinstance(old, Mapping) else {}
        for name, each in schema.get("properties", {}).items():
            if name in new:
                yield from _broken_rules(
                    each, new[name], before.get(name), f"{path}.{name}".lstrip(".")
                )
        if isinstance(others := schema.get("additionalProperties"), Mapping):
            for name, value in new.items():
                yield from _broken_rules(others, value, before.get(name), f"{path}[{name}]")
    elif isinstance(new, list) and isinstance(schema.get("items"), Mapping):
        for i, each in enumerate(new):  # items of lists have no oldSelf, but of those with keys
            yield from _broken_rules(schema["items"], each, None, f"{path}[{i}]")


@functools.cache
def _program(rule: str) -> Any:
    return cel.compile(rule)


class _Frozen:
    """A schema as a key of the cache: by identity, since definitions are never changed in place."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema

    def __hash__(self) -> int:
        return id(self.schema)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Frozen) and other.schema is self.schema


@functools.lru_cache(maxsize=64)
def _validator(frozen: _Frozen) -> Any:
    return jsonschema.Draft202012Validator(_plain(frozen.schema))


def _plain(schema: Schema) -> Object:
    """Return the schema in JSON Schema's own words."""
    new = {name: value for name, value in schema.items() if not name.startswith("x-")}
    new.pop("default", None)
    if schema.get("x-kubernetes-int-or-string"):
        new["type"] = ["integer", "string"]
        new.pop("anyOf", None)
    elif schema.get("nullable"):
        new["type"] = [schema["type"], "null"]
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), Mapping):
            new[name] = _plain(schema[name])
    if "properties" in schema:
        new["properties"] = {n: _plain(each) for n, each in schema["properties"].items()}
    return new
