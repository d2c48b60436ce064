"""Turn messages into JSON and back, strictly: what does not fit is refused by the field's path.

Standard library and msgspec only. Unknown keys are ignored and missing ones have the default of
their field, so that programs of two versions understand each other. A field whose Python name has
changed keeps its old name in the JSON (`JSON_NAMES`).
"""

import enum
import functools
import json
import os
import re
import threading
import types
from dataclasses import fields, make_dataclass
from typing import (
    Annotated,
    Any,
    NoReturn,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec

T = TypeVar("T")

# Fields whose name in JSON is older than their name in Python. The old name stays, in messages and
# in the database, so that programs of either version understand each other.
JSON_NAMES = {
    "snapshot_is_current": "kept",
    "local_on_all_nodes": "on_every_node",
    "survivable_failures": "losses",
    "missing_pods": "lost",
}

MAX_INT = 10**16 - 1  # 16 digits: every language's JSON holds that
Int = Annotated[int, msgspec.Meta(ge=-MAX_INT, le=MAX_INT)]

_EXPECTED = re.compile(r"Expected `(.+?)`, got ")
_MISSING = re.compile(r"Object missing required field `(.+)`")
_STEP = re.compile(r"\.(?P<name>[^.\[\]`]+)|\[(?P<index>\d+|\.\.\.)\]")
_WORDS = {"object": "an object", "array": "a list"}


class WireError(ValueError):
    """A message does not match the contract; the text names the field, the value and the remedy."""


class _DataclassFields:
    """The attribute by which `dataclasses` knows its own, made of what msgspec knows of a class."""

    def __get__(self, _instance: object, kind: type[msgspec.Struct]) -> dict[str, Any]:
        return _dataclass_fields(kind)


@functools.cache
def _dataclass_fields(kind: type[msgspec.Struct]) -> dict[str, Any]:
    names = [(field.name, field.type) for field in msgspec.structs.fields(kind)]
    return {field.name: field for field in fields(make_dataclass(kind.__name__, names))}


class Message(msgspec.Struct, frozen=True, kw_only=True, rename=JSON_NAMES):
    """Base of all messages, and of the parts of a job: frozen, and made by keywords alone.

    `msgspec.structs.replace` makes a changed one in a microsecond. A type checker takes a Struct
    for a dataclass, so those of `dataclasses` have to work as well, and take twenty times that.
    """

    __dataclass_fields__ = _DataclassFields()


def encode(value: object) -> Any:
    """Return `value` (a message, dataclass, enum, tuple, mapping, scalar) as what JSON can hold."""
    return msgspec.to_builtins(value, str_keys=True)


def decode(kind: type[T], data: object, path: str = "") -> T:
    """Build a `kind` (a message, a dataclass or a type of their fields) from plain JSON types.

    Args:
        path: where `data` stands in the message; it begins every error text.

    Raises:
        WireError: a key is missing, or a value has another JSON type or is refused by the class.
    """
    _decoder(cast(Any, kind))  # it is built now, by this thread alone
    try:
        return msgspec.convert(data, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _explain(error, kind, data, path) from None


def to_json(value: object) -> bytes:
    """Return `value` as a body."""
    return msgspec.json.encode(value)


def from_json(kind: type[T], body: bytes) -> T:
    """Return the message in a body.

    Raises:
        WireError: it is not JSON, or as `decode`.
    """
    try:
        return cast(T, _decoder(cast(Any, kind)).decode(body))
    except msgspec.ValidationError as error:
        raise _explain(error, kind, _loads(body), "") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        _loads(body)  # it takes what is valid JSON but not valid Unicode
        raise WireError("body: a text holds a lone surrogate; send valid Unicode") from None
    except RecursionError:
        raise WireError("body: nested too deeply") from None


# What msgspec knows of a class is built at its first use, and other threads have it before it is
# complete: they would crash (SIGSEGV), and so would a process that is forked then.
_building = threading.RLock()
os.register_at_fork(
    before=_building.acquire,
    after_in_parent=_building.release,
    after_in_child=_building.release,
)


@functools.cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    with _building:
        return msgspec.json.Decoder(kind)


def _loads(body: bytes) -> Any:
    """Parse by the standard library: for the value in an error's text, or for a better text."""

    def refuse(constant: str) -> NoReturn:
        raise WireError(f"body: {constant} is not a JSON number; leave the key out or send null")

    def number(digits: str) -> float:
        return int(digits) if len(digits) < 20 else float(digits)

    try:
        return json.loads(body, parse_constant=refuse, parse_int=number)
    except json.JSONDecodeError as error:
        raise WireError(f"body: not JSON: {error}") from None
    except UnicodeDecodeError as error:
        raise WireError(f"body: not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise WireError("body: nested too deeply") from None


# --- errors ---------------------------------------------------------------------------------------


def _explain(error: msgspec.ValidationError, kind: Any, data: Any, path: str) -> WireError:
    """Return msgspec's error in our form: the field's path, what was expected, the value."""
    text, found, where = str(error).rpartition(" - at `$")
    for step in _STEP.finditer(where) if found else ():
        try:
            kind, data, name = _enter(_plain(kind), data, step)
        except (LookupError, TypeError):  # `data` has the last of these, msgspec looked at all
            return WireError(f"{path.lstrip('.') or 'body'}: a key stands twice; send it once")
        path += name
    if (cause := error.__cause__) is not None:  # the class itself has refused its values
        joint = "." if isinstance(cause, WireError) else ": "  # which names the field
        return WireError(f"{path}{joint if path else ''}{cause}".lstrip("."))
    if missing := _MISSING.match(text or where):
        return WireError(f"{path}.{missing[1]}: missing".lstrip("."))
    text = _expectation(text or where, _plain(kind), data)
    return WireError(f"{path.lstrip('.') or 'body'}: {text}")


def _enter(kind: Any, data: Any, step: re.Match[str]) -> tuple[Any, Any, str]:
    """Return the type, the value and the name of a field or an item of `kind`."""
    if (name := step["name"]) is not None:
        return _fields(kind)[name], data[name], f".{name}"
    kinds = get_args(kind)
    if (index := step["index"]) != "...":
        own = len(kinds) > 1 and kinds[1] is not ...  # each item has its own type
        return kinds[int(index) if own else 0], data[int(index)], f"[{index}]"
    for key, value in data.items():  # of a mapping, msgspec does not tell the key
        try:
            decode(kinds[1], value)
        except WireError:
            return kinds[1], value, f".{key}"
    return kinds[1], data, ""


def _fields(kind: Any) -> dict[str, Any]:
    """Return the types of a class's fields, by their names in the JSON."""
    if issubclass(kind, msgspec.Struct):
        return {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    return get_type_hints(kind)


def _plain(kind: Any) -> Any:
    """Return a type without its bounds, and without null."""
    if get_origin(kind) is Annotated:
        return _plain(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        return _plain(next(each for each in get_args(kind) if each is not types.NoneType))
    return kind


def _expectation(text: str, kind: Any, data: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        allowed = ", ".join(str(member.value) for member in kind)
        return f"expected one of {allowed}, got {_show(data)}"
    if "out of range" in text or "=" in text:
        return f"expected at most {MAX_INT}, got a larger number"
    if "of length" in text:
        return f"expected {len(get_args(kind))} items, got {len(data)}"
    if (found := _EXPECTED.match(text)) is None:
        return text
    names = (_WORDS.get(name, name) for name in found[1].split(" | "))
    return f"expected {' or '.join(names)}, got {_show(data)}"


def _show(data: object) -> str:
    text = repr(data)
    return text if len(text) <= 80 else text[:77] + "..."
