"""Say when a node is about to run out of memory or disk. Pure."""

import math
from dataclasses import dataclass
from itertools import pairwise

from job_server.api.wire import NodeLoad

LOW_SHARE = 0.03  # of all: who has less is short
LOW_MB = {"memory": 2_000, "disk": 5_000}  # ... but never who has as much as this
SOON_S = 600.0  # nor may it be used up so soon at the present rate
ALMOST = 0.2  # ... where no more than this share is free
RELIEF = 2.0  # times as much, or as long: short no more
WINDOW_S = 20.0  # of which the lowest counts: each step of a training takes memory and frees it
_RATES = 2  # in as many windows in a row it must fall: trainers that start take much once


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge:
    """What is free of something, and how fast it goes."""

    free_mb: int
    at: float
    lows: tuple[tuple[float, int], ...] = ()  # when each window began, and the lowest in it
    short: str = ""  # why the node is short of it, as that began; "": it is not


def read_gauges(known: dict[str, Gauge], load: NodeLoad, now: float) -> dict[str, Gauge]:
    """Return what is free of memory and disk after a heartbeat, by name."""
    free = {
        "memory": (load.memory_total_mb - load.memory_used_mb, load.memory_total_mb, "its memory"),
        "disk": (load.disk_free_mb, load.disk_total_mb, f"its disk ({load.disk})"),
    }
    return {
        name: read(known.get(name), free_mb, total_mb, now, low_mb=LOW_MB[name], what=what)
        for name, (free_mb, total_mb, what) in free.items()
        if total_mb > 0
    }


def read(
    known: Gauge | None, free_mb: int, total_mb: int, now: float, *, low_mb: int, what: str
) -> Gauge:
    """Return a gauge after another look.

    Args:
        low_mb: who has more is not short because of the share that is free.
        what: to be named in the text.
    """
    low = min(LOW_SHARE * total_mb, low_mb)
    lows = ((now, free_mb),) if known is None else _add(known.lows, free_mb, now)
    loss = _loss_mb_s(lows)
    left_s = free_mb / loss if loss > 0 else math.inf
    factor, least_mb = 1.0, free_mb
    if known is not None and known.short:
        factor = RELIEF
        recent = lows[-2:] if now - known.at < WINDOW_S else lows[-1:]
        least_mb = min(window_mb for _, window_mb in recent)
    text = ""
    if least_mb < low * factor:
        text = f"{what} is nearly used up: {_amounts(free_mb, total_mb)}"
    elif left_s < SOON_S * factor and free_mb < ALMOST * total_mb:
        minutes = max(1, round(left_s / 60))
        text = f"{what} is used up in about {minutes} min: {_amounts(free_mb, total_mb)}"
    if text and known is not None and known.short:
        text = known.short  # as it began: every heartbeat would be news
    return Gauge(free_mb=free_mb, at=now, lows=lows, short=text)


def _add(
    lows: tuple[tuple[float, int], ...], free_mb: int, now: float
) -> tuple[tuple[float, int], ...]:
    """Return the windows after another look; the newest is not over yet."""
    began, low_mb = lows[-1]
    if now - began < WINDOW_S:
        return (*lows[:-1], (began, min(low_mb, free_mb)))
    return (*lows[-(_RATES + 1) :], (now, free_mb))


def _loss_mb_s(lows: tuple[tuple[float, int], ...]) -> float:
    """Return how fast it falls in each of the last windows that are over; 0: not in all."""
    over = lows[:-1]
    if len(over) <= _RATES:
        return 0.0
    rates = [(was - is_) / (end - began) for (began, was), (end, is_) in pairwise(over)]
    return max(0.0, min(rates))


def shortage(gauges: dict[str, Gauge]) -> str:
    """Return why the node gets no new pods; "": it has enough."""
    return "; ".join(gauge.short for gauge in gauges.values() if gauge.short)


def _amounts(free_mb: int, total_mb: int) -> str:
    return f"{max(free_mb, 0) / 1000:.1f} of {total_mb / 1000:.1f} GB were free"
