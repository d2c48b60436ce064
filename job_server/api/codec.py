"""Dataclasses to JSON and back, strictly: what does not fit is refused with the field's path.

Standard library only. Unknown keys are ignored, so that old programs survive new ones. How a type
is converted is worked out once and kept: messages are converted while a training waits for them.
"""

import dataclasses
import enum
import functools
import math
import types
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")
Decoder = Callable[[Any], Any]  # of JSON data; raises _MisfitError

# Fields whose name in JSON is older than their name in Python. The old name stays, in messages and
# in the database, so that programs of either version understand each other.
JSON_NAMES = {
    "snapshot_is_current": "kept",
    "local_on_all_nodes": "on_every_node",
    "survivable_failures": "losses",
    "missing_pods": "lost",
}

MAX_INT = 2**63 - 1  # what SQLite and other languages hold; either sign
_PLAIN = frozenset((str, int, float, bool, types.NoneType))


def json_name(field: str) -> str:
    """Return what a dataclass field is called in JSON."""
    return JSON_NAMES.get(field, field)


class WireError(ValueError):
    """A message does not match the contract; the text names the field, the value and the remedy."""


class _MisfitError(Exception):
    """A value does not fit; on its way out it gathers the path to it."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text
        self.path = ""  # within what is decoded

    def under(self, step: str) -> "_MisfitError":
        """Return itself as seen from one level above; `step` leads here from there."""
        between = "." if self.path and not self.path.startswith("[") else ""
        self.path = f"{step}{between}{self.path}"
        return self


def encode(value: Any) -> Any:
    """Return `value` (dataclass, enum, tuple, mapping, scalar) as plain JSON types."""
    kind: Any = type(value)
    return value if kind in _PLAIN else _encoder(kind)(value)


@functools.cache
def _encoder(kind: type) -> Callable[[Any], Any]:
    if dataclasses.is_dataclass(kind):
        names = [(json_name(field.name), field.name) for field in dataclasses.fields(kind)]
        return lambda value: {key: encode(getattr(value, name)) for key, name in names}
    if issubclass(kind, enum.Enum):
        return lambda value: value.value
    if issubclass(kind, tuple | list):
        return lambda value: [encode(item) for item in value]
    if issubclass(kind, frozenset | set):
        return lambda value: [encode(item) for item in sorted(value)]
    if issubclass(kind, Mapping):
        return lambda value: {str(key): encode(item) for key, item in value.items()}
    return lambda value: value


def decode(kind: type[T], data: object, path: str = "") -> T:
    """Build a `kind` (a dataclass or any type that wire dataclasses use) from decoded JSON.

    Args:
        path: where `data` stands in the message; it begins every error text.

    Raises:
        WireError: a key is missing, or a value has another JSON type or is refused by the class.
    """
    try:
        return cast(T, _decoder(cast(Any, kind))(data))
    except _MisfitError as misfit:
        where = (misfit.under(path) if path else misfit).path
        raise WireError(f"{where or 'body'}: {misfit.text}") from None


@functools.cache
def _decoder(kind: Any) -> Decoder:
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any or kind is object:
        return lambda data: data
    if origin in (Union, types.UnionType):
        return _union_decoder(args)
    if origin is tuple:
        return _tuple_decoder(args)
    if origin is not None or kind is dict:
        return _mapping_decoder(_decoder(args[1]) if len(args) == 2 else _decoder(Any))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _enum_decoder(kind)
    if dataclasses.is_dataclass(kind):
        return _dataclass_decoder(cast(type, kind))
    return _scalar_decoder(kind)


def _union_decoder(args: tuple[Any, ...]) -> Decoder:
    kinds = [arg for arg in args if arg is not types.NoneType]
    by_type = {kind: _decoder(kind) for kind in kinds if isinstance(kind, type)}
    first = _decoder(kinds[0])

    def decode_union(data: Any) -> Any:
        if data is None and len(kinds) < len(args):
            return None
        return by_type.get(type(data), first)(data)

    return decode_union


def _tuple_decoder(args: tuple[Any, ...]) -> Decoder:
    def check(data: Any) -> None:
        if not isinstance(data, list | tuple):
            raise _MisfitError(f"expected a list, got {_show(data)}")

    if len(args) == 2 and args[1] is Ellipsis:
        item_decoder = _decoder(args[0])

        def decode_all(data: Any) -> tuple[Any, ...]:
            check(data)
            return tuple(_within(f"[{i}]", item_decoder, item) for i, item in enumerate(data))

        return decode_all
    decoders = [_decoder(arg) for arg in args]

    def decode_each(data: Any) -> tuple[Any, ...]:
        check(data)
        if len(data) != len(decoders):
            raise _MisfitError(f"expected {len(decoders)} items, got {len(data)}")
        pairs = enumerate(zip(decoders, data, strict=True))
        return tuple(_within(f"[{i}]", decoder, item) for i, (decoder, item) in pairs)

    return decode_each


def _mapping_decoder(item_decoder: Decoder) -> Decoder:
    def decode_mapping(data: Any) -> dict[str, Any]:
        _check_object(data)
        return {str(key): _within(str(key), item_decoder, item) for key, item in data.items()}

    return decode_mapping


def _enum_decoder(kind: type[enum.Enum]) -> Decoder:
    members = {(type(member.value), member.value): member for member in kind}
    allowed = ", ".join(str(member.value) for member in kind)

    def decode_enum(data: Any) -> enum.Enum:
        member = members.get((type(data), data)) if type(data) in _PLAIN else None
        if member is None:
            raise _MisfitError(f"expected one of {allowed}, got {_show(data)}")
        return member

    return decode_enum


def _dataclass_decoder(kind: type) -> Decoder:
    hints = get_type_hints(kind)
    fields = [
        (
            json_name(field.name),
            field.name,
            _decoder(hints[field.name]),
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
        )
        for field in dataclasses.fields(kind)
    ]

    def decode_dataclass(data: Any) -> Any:
        _check_object(data)
        values: dict[str, Any] = {}
        for key, name, decoder, is_needed in fields:
            if key in data:
                try:
                    values[name] = decoder(data[key])
                except _MisfitError as misfit:
                    raise misfit.under(key) from None
            elif is_needed:
                raise _MisfitError("missing").under(key)
        try:
            return kind(**values)
        except WireError as error:  # it names the field itself
            field, colon, text = str(error).partition(": ")
            raise (_MisfitError(text).under(field) if colon else _MisfitError(field)) from None

    return decode_dataclass


def _scalar_decoder(kind: Any) -> Decoder:
    def decode_scalar(data: Any) -> Any:
        if type(data) is int:
            if abs(data) > MAX_INT:
                raise _MisfitError(f"expected at most {MAX_INT}, got a larger number")
            if kind is float:
                data = float(data)
        if type(data) is not kind:  # not isinstance: JSON true is not a rank
            raise _MisfitError(f"expected {kind.__name__}, got {_show(data)}")
        if kind is float and not math.isfinite(data):
            raise _MisfitError(f"expected a finite number, got {data}")
        return data

    return decode_scalar


def _within(step: str, decoder: Decoder, data: Any) -> Any:
    try:
        return decoder(data)
    except _MisfitError as misfit:
        raise misfit.under(step) from None


def _check_object(data: Any) -> None:
    if not isinstance(data, Mapping):
        raise _MisfitError(f"expected an object, got {_show(data)}")


def _show(data: object) -> str:
    text = repr(data)
    return text if len(text) <= 80 else text[:77] + "..."
