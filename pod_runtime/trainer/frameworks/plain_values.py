"""Plain values of a state: what layers say of themselves, and objects of the script."""

import copy
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from pod_runtime.trainer.errors import StateError

_PLAIN = frozenset((bool, int, float, str, type(None)))
_LONGEST = 16  # of the lists of such values that are taken


def is_plain(value: Any) -> bool:
    """Return whether a value is a number, a text, None, or a short list of those."""
    kind = type(value)
    if kind is list or kind is tuple:
        return len(value) <= _LONGEST and all(type(each) in _PLAIN for each in value)
    return kind in _PLAIN


def differ(one: Any, other: Any) -> bool:
    """Return whether two plain values differ; NaN is as it was, and a list as a tuple."""
    if one is other:
        return False
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return list(one) != list(other)
    return bool(one != other) and not (one != one and other != other)  # NaN is as it was


def own_copy(value: Any) -> Any:
    """Return a value as it is now: its lists, dicts and tensors are copies."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, dict):
        made = copy.copy(value)
        for key, each in value.items():
            if type(each) not in _PLAIN:
                made[key] = own_copy(each)
        return made
    if type(value) is list or type(value) is tuple:
        return type(value)([each if type(each) in _PLAIN else own_copy(each) for each in value])
    return value.detach().clone() if hasattr(value, "detach") else value


def with_parts(whole: Any, of: Callable[[Any], Any]) -> Any:
    """Return a copy of a container of the same kind, with `of(part)` in each part's place.

    What is no container is returned as it is.
    """
    if isinstance(whole, tuple):
        parts = [of(each) for each in whole]
        # A subclass may be made of something else.
        return whole._make(parts) if hasattr(whole, "_make") else tuple.__new__(type(whole), parts)
    if isinstance(whole, list):
        made: Any = copy.copy(whole)  # a subclass may be made of something else
        made[:] = [of(each) for each in whole]
        return made
    if isinstance(whole, MutableMapping):
        made = copy.copy(whole)
        for name in whole:
            made[name] = of(whole[name])
        return made
    return whole


def as_list(things: Any) -> list[Any]:
    """Return the values of a dict, or the members of a list, or the only thing; None: none."""
    if things is None:
        return []
    if isinstance(things, Mapping):
        return list(things.values())
    return list(things) if isinstance(things, list | tuple) else [things]


def to_float(value: Any) -> float:
    """Return a number or a one-element tensor as float."""
    return float(value.item()) if hasattr(value, "item") else float(value)


def nested(name: str, thing: Any) -> dict[str, Any]:
    """Return an object's state as {path: leaf}."""
    flat: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping) and value:
            for key, item in value.items():
                if not isinstance(key, str) or "/" in key:
                    raise StateError(f"extra {name}: keys must be text without '/', got {key!r}")
                walk(f"{prefix}/{key}" if prefix else key, item)
        else:
            flat[prefix] = value

    walk("", thing.state_dict())
    return flat


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nested form of what `nested` returned."""
    whole: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, last = path.split("/")
        place = whole
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return whole
