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
    for _ in range(2):  # of fewer than four answers its speed is not told
        meter.asked("a")
        meter.answered("a", 5)
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
    assert reading.teachers == {"a": (7.5, 0.75)}


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


def test_the_speed_of_a_slow_teacher_does_not_rise_and_fall_with_each_of_its_answers():
    meter, clock = make()
    meter.asked("a")
    speeds = []
    for second in range(1, 900):
        clock.now += 1
        meter.waits()
        meter.asked("a")
        if second % 20:
            meter.answered("a", 0)
        else:
            meter.answered("a", 64)
        reading = meter.read()
        assert reading is not None
        rate, busy = reading.teachers.get("a", (0.0, 0.0))
        if busy:
            speeds.append(rate / busy)
    assert 2.5 < min(speeds) <= 3.2 <= max(speeds) < 4.0


def test_a_teacher_that_slows_down_is_known_to_be_slow():
    meter, clock = make()
    for second in range(600):
        meter.waits()
        meter.asked("a")
        clock.now += 1
        meter.answered("a", 100 if second < 300 else 10 * (second % 10 == 0))
        meter.read()
    meter.asked("a")
    reading = meter.read()
    assert reading is not None
    rate, busy = reading.teachers["a"]
    assert 0.8 < rate / busy < 1.3
