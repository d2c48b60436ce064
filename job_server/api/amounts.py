"""Read amounts and times as people write them. Pure."""

import argparse
import re
from collections.abc import Callable
from typing import TypeVar

_MEMORY_MB = {
    "MB": 1.0, "M": 1.0, "GB": 1e3, "G": 1e3, "TB": 1e6, "T": 1e6,
    "MiB": 1.048576, "Mi": 1.048576, "GiB": 1073.741824, "Gi": 1073.741824,
}  # fmt: skip
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = r"[0-9]+(?:\.[0-9]+)?"


def cores(text: str) -> int:
    """Return thousandths of a core of e.g. `2`, `0.5` or `500m`.

    Raises:
        ValueError: it is no such amount.
    """
    match = re.fullmatch(rf"({_NUMBER})(m?)", text.strip())
    if match is None:
        raise ValueError(f"expected cores, such as 0.5, 2 or 500m, got {text!r}")
    return round(float(match[1]) * (1 if match[2] else 1000))


def megabytes(text: str) -> int:
    """Return MB (10**6 bytes), rounded up, of e.g. `500 MB`, `2 GB` or `2Gi`.

    Raises:
        ValueError: it is no such amount.
    """
    match = re.fullmatch(rf"({_NUMBER}) ?([A-Za-z]+)", text.strip())
    if match is None or match[2] not in _MEMORY_MB:
        raise ValueError(f"expected an amount with its unit, such as 500 MB or 2 GB, got {text!r}")
    return int(-(-float(match[1]) * _MEMORY_MB[match[2]] // 1))


def seconds(text: str) -> float:
    """Return the seconds of e.g. `90`, `45 min`, `2 h` or `1 h 30 min`.

    Raises:
        ValueError: it is no such time.
    """
    parts = re.findall(rf"({_NUMBER}) ?(d|h|min|s)(?![A-Za-z])", text)
    if re.fullmatch(_NUMBER, text.strip()):
        return float(text)
    if not parts or re.sub(rf"{_NUMBER} ?(d|h|min|s)(?![A-Za-z])|\s", "", text):
        raise ValueError(f"expected a time, such as 90 s, 45 min, 2 h or 1 h 30 min, got {text!r}")
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


_LIMITS = {
    "step": "step_s", "steps": "steps", "first": "first_s", "data": "data_s",
    "evaluation": "evaluation_s", "saving": "saving_s",
}  # fmt: skip


def hang_limits(text: str) -> dict[str, float]:
    """Return the fields of HangLimits of e.g. `step=30,steps=50,evaluation=2h`.

    Raises:
        ValueError: it names a limit that there is not, or a value is no time.
    """
    found = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        field = _LIMITS.get(name.strip())
        if field is None:
            raise ValueError(
                f"expected NAME=TIME,... with the names {', '.join(_LIMITS)}, got {part!r}"
            )
        found[field] = seconds(value)
    return found


T = TypeVar("T")


def argument(read: Callable[[str], T]) -> Callable[[str], T]:
    """Return one of these as the `type` of an argument, whose errors argparse shows."""

    def convert(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert
