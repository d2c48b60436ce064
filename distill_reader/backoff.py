"""Delays between tries."""

_MOST_DOUBLINGS = 30  # 2 ** failures would become too large for a float


def backoff_s(failures: int, first_s: float, most_s: float) -> float:
    """Return a delay that doubles with every failure: from `first_s` at 0, up to `most_s`."""
    return min(most_s, first_s * 2.0 ** min(failures, _MOST_DOUBLINGS))
