"""Dataclasses to JSON and back, strictly: what does not fit is refused with the field's path.

Standard library only. Unknown keys are ignored, so that old programs survive new ones.
"""

import dataclasses
import enum
import functools
import math
import types
from collections.abc import Mapping
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")

MAX_INT = 2**63 - 1  # what SQLite and other languages hold; either sign


class WireError(ValueError):
    """A message does not match the contract; the text names the field, the value and the remedy."""


def encode(value: object) -> Any:
    """Return `value` (dataclass, enum, tuple, mapping, scalar) as plain JSON types."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple | list | frozenset | set):
        items = sorted(value) if isinstance(value, frozenset | set) else value
        return [encode(item) for item in items]
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    return value


def decode(kind: type[T], data: object, path: str = "") -> T:
    """Build a `kind` (a dataclass or any type that wire dataclasses use) from decoded JSON.

    Args:
        path: where `data` stands in the message; it begins every error text.

    Raises:
        WireError: a key is missing, or a value has another JSON type or is refused by the class.
    """
    return cast(T, _decode(kind, data, path))


def _decode(kind: Any, data: object, path: str) -> object:
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any or kind is object:
        return data
    if origin in (Union, types.UnionType):
        return _decode_union(args, data, path)
    if origin is tuple:
        return _decode_tuple(args, data, path)
    if origin in (dict, Mapping) or kind is dict or origin is not None:
        return _decode_mapping(args, data, path)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _decode_enum(kind, data, path)
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(cast(type, kind), data, path)
    return _decode_scalar(kind, data, path)


def _decode_union(args: tuple[Any, ...], data: object, path: str) -> object:
    if data is None and type(None) in args:
        return None
    kinds = [arg for arg in args if arg is not type(None)]
    for kind in kinds:
        if isinstance(kind, type) and type(data) is kind:
            return _decode(kind, data, path)
    return _decode(kinds[0], data, path)


def _decode_tuple(args: tuple[Any, ...], data: object, path: str) -> tuple[object, ...]:
    if not isinstance(data, list | tuple):
        raise WireError(f"{path or 'body'}: expected a list, got {_show(data)}")
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(_decode(args[0], item, f"{path}[{i}]") for i, item in enumerate(data))
    if len(data) != len(args):
        raise WireError(f"{path or 'body'}: expected {len(args)} items, got {len(data)}")
    return tuple(
        _decode(arg, item, f"{path}[{i}]")
        for i, (arg, item) in enumerate(zip(args, data, strict=True))
    )


def _decode_mapping(args: tuple[Any, ...], data: object, path: str) -> dict[str, object]:
    if not isinstance(data, Mapping):
        raise WireError(f"{path or 'body'}: expected an object, got {_show(data)}")
    item_kind = args[1] if len(args) == 2 else Any
    return {str(key): _decode(item_kind, item, f"{path}.{key}") for key, item in data.items()}


def _decode_enum(kind: type[enum.Enum], data: object, path: str) -> enum.Enum:
    for member in kind:
        if member.value == data and type(member.value) is type(data):
            return member
    allowed = ", ".join(str(member.value) for member in kind)
    raise WireError(f"{path or 'body'}: expected one of {allowed}, got {_show(data)}")


def _decode_dataclass(kind: type, data: object, path: str) -> object:
    if not isinstance(data, Mapping):
        raise WireError(f"{path or 'body'}: expected an object, got {_show(data)}")
    hints = _type_hints(kind)
    values: dict[str, object] = {}
    for field in dataclasses.fields(kind):
        where = f"{path}.{field.name}" if path else field.name
        if field.name in data:
            values[field.name] = _decode(hints[field.name], data[field.name], where)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise WireError(f"{where}: missing")
    try:
        return kind(**values)
    except WireError as error:
        raise WireError(f"{path}.{error}" if path else str(error)) from None


@functools.cache
def _type_hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _decode_scalar(kind: Any, data: object, path: str) -> object:
    if type(data) is int and abs(data) > MAX_INT:
        raise WireError(f"{path or 'body'}: expected at most {MAX_INT}, got a larger number")
    if kind is float and type(data) is int:
        data = float(data)
    if type(data) is not kind:  # not isinstance: JSON true is not a rank
        raise WireError(f"{path or 'body'}: expected {kind.__name__}, got {_show(data)}")
    if isinstance(data, float) and not math.isfinite(data):
        raise WireError(f"{path or 'body'}: expected a finite number, got {data}")
    return data


def _show(data: object) -> str:
    text = repr(data)
    return text if len(text) <= 80 else text[:77] + "..."
