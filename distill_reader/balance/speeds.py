"""Turn what students measure into speeds of teachers that do not change with every noise. Pure.

A teacher's speed is one of few classes, each the square root of two above the next one and counted
from the median of its service. A class is left only by what is a whole class away: teachers of one
kind are all of class 0, and nothing is moved because one was measured a little faster.
"""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

MOST_CLASS = 6  # 8 times the median
_UNIT = 64  # of speeds, which are integers so that every machine adds them up alike


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a student has of one teacher."""

    samples_per_s: float
    busy_share: float  # of the time, in which it had a request of this student


def measured_speeds(reports: Iterable[Mapping[str, Measured]]) -> dict[str, float]:
    """Return the samples per second that each teacher would answer if it were always busy.

    Its students' rates add up; it was busy at least as long as for one of them.
    """
    rates: dict[str, float] = {}
    busy: dict[str, float] = {}
    for report in reports:
        for teacher, measured in report.items():
            rates[teacher] = rates.get(teacher, 0.0) + measured.samples_per_s
            busy[teacher] = max(busy.get(teacher, 0.0), measured.busy_share)
    return {
        teacher: rate / min(1.0, busy[teacher])
        for teacher, rate in rates.items()
        if rate > 0 and busy[teacher] >= 0.01  # else it says too little
    }


def speed_classes(before: Mapping[str, int], measured: Mapping[str, float]) -> dict[str, int]:
    """Return the class of each teacher that has another one than 0.

    Args:
        before: the classes so far.
        measured: samples per second; those without keep their class.
    """
    classes = dict(before)
    if len(measured) >= 2:
        median = statistics.median_low(measured.values())
        for teacher, rate in measured.items():
            place = 2 * math.log2(rate / median)
            if abs(place - before.get(teacher, 0)) > 1.0:
                classes[teacher] = max(-MOST_CLASS, min(MOST_CLASS, round(place)))
    return {teacher: each for teacher, each in sorted(classes.items()) if each}


def speed_of(speed_class: int) -> int:
    """Return the speed of a class, as `assign_teachers` wants it."""
    return max(1, round(_UNIT * 2 ** (speed_class / 2)))
