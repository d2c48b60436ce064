"""Times that were stored, on a clock that may have been set back since. Pure."""

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

T = TypeVar("T")

_TIMES = frozenset({"at", "since", "heard", "missing"})


def is_time(name: str) -> bool:
    """Whether the field of this name holds a time, or times by pod; `*_s` are durations.

    `submitted_at` counts as none: it also tells jobs of one id apart, so it stays for good.
    """
    timely = name in _TIMES or name.endswith(("_at", "_since", "_from"))
    return timely and name != "submitted_at"


def moved_back(value: T, by_s: float) -> T:
    """Return a job, or a part of one, with all its times `by_s` seconds earlier.

    So nothing of an earlier life lies in the future, and what lay between two times still does.
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
