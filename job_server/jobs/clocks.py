"""Shift stored times when the machine's clock was set back. Pure."""

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

T = TypeVar("T")

_TIMES = frozenset({"at", "since", "heard", "missing"})


def is_time(name: str) -> bool:
    """Return whether the field of this name holds a time, or times by pod; `*_s` are durations.

    `submitted_at` is left alone: it also tells apart jobs that had the same id.
    """
    timely = name in _TIMES or name.endswith(("_at", "_since", "_from"))
    return timely and name != "submitted_at"


def moved_back(value: T, by_s: float) -> T:
    """Return a job, or a part of one, with all its times `by_s` seconds earlier.

    `by_s` is how far the clock was set back: then no stored time lies in the future, and the
    intervals between them are unchanged.
    """
    return _moved(value, by_s)  # type: ignore[no-any-return]


def _moved(value: Any, by_s: float) -> Any:
    if isinstance(value, tuple):
        return tuple(_moved(item, by_s) for item in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    changes: dict[str, Any] = {}
    for field in fields(value):
        held = getattr(value, field.name)
        new = _earlier(held, by_s) if is_time(field.name) else _moved(held, by_s)
        if new is not held:
            changes[field.name] = new
    return replace(value, **changes) if changes else value


def _earlier(held: Any, by_s: float) -> Any:
    if isinstance(held, dict):
        return {key: at - by_s for key, at in held.items()}
    return held - by_s if isinstance(held, float) and held else held  # 0.0 and None: never
