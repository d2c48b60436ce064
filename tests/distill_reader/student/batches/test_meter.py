"""How a reader is fed, by a clock that the test turns."""

from distill_reader.student.batches.meter import Meter


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make() -> tuple[Meter, Clock]:
    clock = Clock()
    return Meter(clock), clock


def test_a_reader_that_reads_nothing_has_nothing_to_say():
    meter, clock = make()
    assert meter.read() is None
    meter.consumed(10)
    clock.now += 40
    assert meter.read() is None  # that was long ago


def test_it_says_how_long_the_consumer_waited_and_what_it_got():
    meter, clock = make()
    meter.consumed(0)
    for _ in range(4):
        meter.waits()
        clock.now += 0.25
        meter.waits_no_more()
        meter.consumed(8)
        clock.now += 0.75
    reading = meter.read()
    assert reading is not None
    assert (reading.wait_share, reading.samples_per_s) == (0.25, 8.0)


def test_a_wait_that_goes_on_counts_however_long_it_is():
    meter, clock = make()
    meter.waits()
    meter.waits()  # again: it still does
    clock.now += 100
    reading = meter.read()
    assert reading is not None
    assert (reading.wait_share, reading.samples_per_s) == (1.0, 0.0)


def test_a_teacher_is_busy_while_it_has_any_request():
    meter, clock = make()
    meter.consumed(0)
    meter.asked("a")
    clock.now += 1
    meter.asked("a")
    clock.now += 1
    meter.answered("a", 10)
    clock.now += 1
    meter.answered("a", 10)
    clock.now += 1
    meter.asked("b")
    meter.answered("b", 0)  # lost
    reading = meter.read()
    assert reading is not None
    assert reading.teachers == {"a": (5.0, 0.75)}


def test_what_was_long_ago_counts_less():
    meter, clock = make()
    for _ in range(100):  # fast, then slow
        clock.now += 1
        meter.consumed(100)
        meter.read()
    for _ in range(60):
        clock.now += 1
        meter.consumed(10)
        reading = meter.read()
    assert reading is not None
    assert 9.9 < reading.samples_per_s < 10.5
