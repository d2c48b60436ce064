"""Types of options for `argparse`, which the examples share. An error names what was expected."""

import argparse
import math
from collections.abc import Callable


class OptionError(Exception):
    """An option that looked right cannot be followed; the text names it and the remedy."""


def flag(text: str) -> bool:
    """Read what `--use_gpu True` and the like say."""
    low = text.lower()
    if low in ("y", "yes", "t", "true", "on", "1"):
        return True
    if low in ("n", "no", "f", "false", "off", "0"):
        return False
    raise argparse.ArgumentTypeError(f"expected True or False, got {text!r}")


def whole(low: int) -> Callable[[str], int]:
    """Return a reader of whole numbers of at least `low`."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low:
            raise argparse.ArgumentTypeError(
                f"expected a whole number of at least {low}, got {text!r}"
            )
        return value

    return read


def all_or_whole(low: int) -> Callable[[str], int | None]:
    """Return a reader of the word `all`, which is None, and of whole numbers from `low` on."""

    def read(text: str) -> int | None:
        return None if text == "all" else whole(low)(text)

    return read


def number(low: float, high: float = math.inf, *, above: bool = False) -> Callable[[str], float]:
    """Return a reader of finite numbers from `low` (above it, if `above`) up to `high`."""
    bounds = f"{'above' if above else 'of at least'} {low:g}" + (
        "" if math.isinf(high) else f" and at most {high:g}"
    )

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        # Written so that nan fails every comparison.
        if not (low < value if above else low <= value) or not value <= high or math.isinf(value):
            raise argparse.ArgumentTypeError(f"expected a number {bounds}, got {text!r}")
        return value

    return read
