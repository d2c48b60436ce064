"""When a node gets no new pods as its memory or disk is nearly used up, as a table."""

from itertools import pairwise

import pytest

from job_server.api.wire import NodeLoad
from job_server.cluster.shortage import Gauge, read, read_gauges, shortage

GB = 1000


def look(known: Gauge | None, free_mb: int, now: float, total_mb: int = 100 * GB) -> Gauge:
    return read(known, free_mb, total_mb, now, low_mb=2 * GB, what="its memory")


@pytest.mark.parametrize(
    ("free_mb", "total_mb", "is_short"),
    [
        (50 * GB, 100 * GB, False),
        (2 * GB, 100 * GB, False),
        (2 * GB - 1, 100 * GB, True),
        (20 * GB, 2000 * GB, False),  # a small share, but much
        (150, 4 * GB, False),
        (100, 4 * GB, True),  # of a small machine
        (0, 100 * GB, True),
        (-5, 100 * GB, True),
    ],
)
def test_who_has_little_left_is_short(free_mb: int, total_mb: int, is_short: bool):
    assert bool(look(None, free_mb, 0.0, total_mb).short) == is_short


def test_a_shortage_lasts_until_there_is_twice_as_much_and_its_text_stays():
    gauge = look(None, 1900, 0.0)
    text = gauge.short
    assert text == "its memory is nearly used up: 1.9 of 100.0 GB were free"
    for now, free_mb in ((100.0, 2100), (200.0, 1500), (300.0, 3900)):
        gauge = look(gauge, free_mb, now)
        assert gauge.short == text
    assert look(gauge, 4000, 400.0).short == ""


def falling(rate_mb_s: float, start_mb: int, seconds: int, gauge: Gauge | None = None) -> Gauge:
    for second in range(seconds):
        gauge = look(gauge, round(start_mb - rate_mb_s * second), float(second))
    assert gauge is not None
    return gauge


def test_what_is_used_up_soon_is_said_before_it_is():
    gauge = falling(30.0, 19 * GB, 120)  # it lasts for 9 more minutes
    assert gauge.short.startswith("its memory is used up in about ")
    assert gauge.free_mb > 15 * GB


def test_a_slow_fall_is_no_shortage_nor_a_fast_one_while_much_is_free():
    assert falling(5.0, 19 * GB, 300).short == ""
    assert falling(100.0, 60 * GB, 300).short == ""


def test_a_fall_that_has_ended_is_no_shortage_any_more():
    gauge = falling(30.0, 19 * GB, 120)
    gauges = [gauge]
    for second in range(120, 420):
        gauges.append(look(gauges[-1], gauge.free_mb, float(second)))
    assert gauges[-1].short == ""
    changes = sum(bool(one.short) != bool(other.short) for one, other in pairwise(gauges))
    assert changes == 1


@pytest.mark.parametrize(
    ("high_mb", "low_mb", "period_s", "most"),
    [
        (800, 500, 8, 0),  # a training whose steps take memory and free it
        (800, 500, 50, 0),
        (350, 60, 8, 1),  # ... and nearly all of it
        (350, 60, 20, 1),
    ],
)
def test_what_steps_take_and_free_again_is_no_fall(
    high_mb: int, low_mb: int, period_s: int, most: int
):
    gauge = look(None, high_mb, 0.0, 3 * GB)
    gauges = [gauge]
    for second in range(1, 600):
        free_mb = low_mb if second % period_s >= period_s * 3 // 4 else high_mb
        gauges.append(look(gauges[-1], free_mb, float(second), 3 * GB))
    changes = sum(bool(one.short) != bool(other.short) for one, other in pairwise(gauges))
    assert changes <= most


def test_what_trainers_take_once_as_they_start_is_no_fall():
    gauge = look(None, 19 * GB, 0.0)
    for second in range(1, 120):
        gauge = look(gauge, 19 * GB - min(second, 20) * 500, float(second))
        assert gauge.short == ""


def test_memory_and_disk_are_told_apart_and_what_is_not_known_is_no_shortage():
    load = NodeLoad(
        memory_used_mb=10, memory_total_mb=100 * GB, disk="/pods", disk_free_mb=1000,
        disk_total_mb=500 * GB,
    )  # fmt: skip
    gauges = read_gauges({}, load, 0.0)
    assert shortage(gauges) == "its disk (/pods) is nearly used up: 1.0 of 500.0 GB were free"
    assert shortage(read_gauges({}, NodeLoad(), 0.0)) == ""
