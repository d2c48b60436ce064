"""Plain values of a state: what layers say of themselves, and objects of the script."""

import copy
import functools
import math
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import numpy as np

from pod_runtime.trainer.errors import StateError

_PLAIN = frozenset((bool, int, float, str, type(None)))
_PLACE = re.compile(r"\[\d+\]|\(\d+\)")  # in a list or a tuple, as a part of a path
_LOOKED_AT = 1024  # numbers of an array
_ABOUT_THE_SAME = 1e-3  # of an array's largest number: its numbers are no further apart
_LONGEST = 16  # of the lists of such values that are taken
_PAIRS = "~pairs"  # of a mapping whose keys are no text; JSON would make them text


def is_plain(value: Any) -> bool:
    """Return whether a value is a number, a text, None, or a short list of those.

    Numbers of numpy are such, too: a layer's attribute becomes one by `np.maximum(...)`.
    """
    if isinstance(value, list | tuple):
        return type(value) in (list, tuple) and len(value) <= _LONGEST and all(map(_is_one, value))
    return _is_one(value)


def _is_one(value: Any) -> bool:
    return type(value) in _PLAIN or (isinstance(value, np.generic) and value.dtype.kind in "biufU")


def as_json(value: Any) -> Any:
    """Return a plain value without numbers of numpy; a list is a copy."""
    if isinstance(value, list | tuple):
        return type(value)(map(as_json, value))
    if isinstance(value, np.floating):
        return float(value)  # `item()` leaves some as they are
    return value.item() if isinstance(value, np.generic) else value


def to_plain(name: str, value: Any, of_tensor: Callable[[Any], Any]) -> Any:
    """Return `value` as JSON types; numbers keep all their digits.

    Args:
        of_tensor: returns a tensor as JSON types; None: it is none, or cannot be told so.

    Raises:
        StateError: it is none of those.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if _is_one(value):
        return as_json(value)
    plain = of_tensor(value)
    if plain is not None:
        return plain

    def inner(item: Any, key: str = "") -> Any:
        return to_plain(f"{name}.{key}" if key else name, item, of_tensor)

    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and _PAIRS not in value:
            return {key: inner(item, key) for key, item in value.items()}
        kind = "counter" if isinstance(value, Counter) else "dict"
        return marked(kind, [[inner(key), inner(each)] for key, each in value.items()])
    if isinstance(value, tuple):
        return marked("tuple", [inner(item) for item in value])
    if isinstance(value, list):
        return [inner(item) for item in value]
    if hasattr(value, "detach"):
        raise StateError(
            f"{name}: tensors within a list or a dict cannot be stored; use what keeps each under "
            f"a name of its own"
        )
    raise StateError(f"{name}: a {type(value).__name__} cannot be stored; use numbers or tensors")


def marked(kind: str, value: Any, **more: Any) -> dict[str, Any]:
    """Return the plain form of what JSON does not know, which `from_plain` makes again."""
    return {_PAIRS: kind, **more, "value": value}


def from_plain(value: Any, make_tensor: Callable[[Mapping[str, Any]], Any] | None = None) -> Any:
    """Return what `to_plain` was given.

    Args:
        make_tensor: makes one of what `marked("tensor", ...)` has returned; None: there are none.
    """
    if isinstance(value, list):
        return [from_plain(item, make_tensor) for item in value]
    if not isinstance(value, Mapping):
        return value
    if _PAIRS not in value:
        return {key: from_plain(item, make_tensor) for key, item in value.items()}
    kind, inner = value[_PAIRS], value["value"]
    if kind == "tensor" and make_tensor is not None:
        return make_tensor(value)
    if kind == "tuple":
        return tuple(from_plain(item, make_tensor) for item in inner)
    made = {from_plain(key, make_tensor): from_plain(each, make_tensor) for key, each in inner}
    return Counter(made) if kind == "counter" else made


def differ(one: Any, other: Any) -> bool:
    """Return whether two plain values differ; NaN is as it was, and a list as a tuple."""
    if one is other:
        return False
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return list(one) != list(other)
    return bool(one != other) and not (one != one and other != other)  # NaN is as it was


@functools.cache
def is_of_script(module: Any) -> bool:
    """Whether classes of this module are none of Python's, of an installed package, or of EDL.

    Some classes of extensions have no text as `__module__`; they are none of a script.
    """
    if not isinstance(module, str):
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    package = module.partition(".")[0]
    return bool(
        file
        and "site-packages" not in file
        and package not in sys.stdlib_module_names
        and package != "pod_runtime"
    )


def rough_digest(value: Any) -> int | None:
    """Return a checksum of a tensor's or an array's numbers, looked at from afar.

    So that rounding does not count, as where another processor has computed them, nor do their mean
    and scale. None: there are no numbers, they are about the same, or it is memory to which nothing
    was written, as `empty` makes it.
    """
    try:
        flat = _some(value).reshape([-1])
        if hasattr(flat, "detach"):
            flat = flat.detach().cpu()
            flat = (flat.float() if str(flat.dtype) == "torch.bfloat16" else flat).numpy()
    except Exception:  # noqa: BLE001  of a type of the script's, or without numbers of numpy's
        return None
    if not isinstance(flat, np.ndarray):
        return None
    if flat.dtype.kind == "c":
        flat = np.ascontiguousarray(flat).view(f"f{flat.itemsize // 2}")
    if flat.dtype.kind not in "biuf" or len(flat) < 2 or is_unwritten(flat):
        return None
    numbers = np.nan_to_num(flat.astype(np.float64), posinf=0.0, neginf=0.0)
    numbers /= np.abs(numbers).max() or 1.0
    numbers -= numbers.mean()
    length = np.sqrt((numbers**2).sum())
    if length <= _ABOUT_THE_SAME * np.sqrt(len(numbers)):
        return None
    weights = np.random.RandomState(0).uniform(-1, 1, (3, len(numbers)))
    return zlib.crc32((np.round(weights @ (numbers / length), 2) + 0.0).tobytes())


def _some(value: Any) -> Any:
    """Return about a thousand numbers of a tensor or an array, without a copy of it."""
    sizes, steps = list(value.shape), [1] * len(value.shape)
    while math.prod(sizes) > _LOOKED_AT:
        axis = sizes.index(max(sizes))
        steps[axis] *= 2
        sizes[axis] = -(-value.shape[axis] // steps[axis])
    if max(steps, default=1) == 1:
        return value
    return value[tuple(slice(None, None, each) for each in steps)]


def is_unwritten(values: Any) -> bool:
    """Whether it seems to be memory as it was found, of an array that `empty` has made.

    Pointers and the like are no numbers, or tiny ones.
    """
    if values.dtype not in (np.float32, np.float64):
        return False
    sizes = np.abs(values)
    tiny = np.finfo(values.dtype).tiny
    return not bool(((sizes == 0) | ((sizes >= tiny) & (sizes < 1e30))).all())


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
    """Return the state of an object in `extra=`, as `flattened` does."""
    return flattened(f"extra {name}", thing.state_dict())


def flattened(name: str, whole: Any) -> dict[str, Any]:
    """Return a state as {path: leaf}; lists with tensors in them are walked through.

    A mapping without tensors whose keys cannot be parts of a path is a leaf.

    Raises:
        StateError: a key of a mapping with tensors cannot be part of a path.
    """
    flat: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping) and value:
            strange = [key for key in value if not _is_step(key)]
            if strange and not holds_tensors(list(value.values())):
                flat[prefix] = value  # numbers by number or by path: one leaf
                return
            if strange:
                raise StateError(
                    f"{name}: keys of tensors must be text without '/', and not like '[0]', "
                    f"got {strange[0]!r}"
                )
            for key, item in value.items():
                walk(f"{prefix}/{key}" if prefix else key, item)
        elif holds_tensors(value):
            form = "[{}]" if isinstance(value, list) else "({})"
            for index, item in enumerate(value):
                walk(f"{prefix}/{form.format(index)}", item)
        else:
            flat[prefix] = value

    walk("", whole)
    return flat


def _is_step(key: Any) -> bool:
    """Whether a key can be part of a path."""
    return isinstance(key, str) and "/" not in key and not _PLACE.fullmatch(key)


def holds_tensors(value: Any) -> bool:
    """Whether it is a list or a tuple with tensors or arrays in it."""
    return isinstance(value, list | tuple) and any(
        hasattr(each, "detach")
        or isinstance(each, np.ndarray)
        or holds_tensors(list(each.values()) if isinstance(each, Mapping) else each)
        for each in value
    )


def unflatten(flat: Mapping[str, Any]) -> Any:
    """Return the nested form of what `flattened` returned."""
    whole: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, last = path.split("/")
        place = whole
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = (value,)  # which may be a mapping
    made = {key: _with_lists(value) for key, value in whole.items()}
    return made[""] if made.keys() == {""} else made  # an empty state, or one that is no mapping


def _with_lists(value: Any) -> Any:
    """Return a nested form with the lists that `flattened` walked through; leaves are in tuples."""
    if isinstance(value, tuple):
        return value[0]
    made = {key: _with_lists(each) for key, each in value.items()}
    found = [_PLACE.fullmatch(key) for key in made]
    if found[0] is None:
        return made
    # Tensors and plain values of a state come apart, so not in their order.
    in_order = [made[key] for key in sorted(made, key=lambda key: int(key[1:-1]))]
    return in_order if found[0][0].startswith("[") else tuple(in_order)
