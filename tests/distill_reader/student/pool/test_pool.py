"""Teachers of this process that die, hang, refuse and come back, under a whole session."""

import contextlib
import gc
import itertools
import random
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from distill_reader.errors import (
    BadRequest,
    DistillError,
    NoTeacher,
    RequestTooLarge,
    TeacherBusy,
    TeacherFailed,
    TeacherGone,
    TeacherTimeout,
    UsageError,
)
from distill_reader.student.batches.feed import RequestLimits
from distill_reader.student.batches.items import BatchFormat
from distill_reader.student.batches.meter import Meter
from distill_reader.student.clients.client import Bounds
from distill_reader.student.labels.labels import Labels
from distill_reader.student.pool import pace
from distill_reader.student.pool.pool import PoolSettings
from distill_reader.student.pool.teacher_registry import UNUSABLE_S, TeacherRegistry
from distill_reader.student.session import ReaderSession, ServiceStream, SessionLock
from distill_reader.student.source import FixedTeachers
from tests.distill_reader.student.fake_teachers import FakeTeacher, Teachers
from tests.support import wait_until

KIND = BatchFormat(((0, "image"),), 2, 1)
WIDE = RequestLimits(join_bytes=1 << 20, most_bytes=1 << 20)


class ToldTeachers:
    """A TeacherSource whose list the test changes."""

    def __init__(self, *endpoints: str) -> None:
        self.endpoints = endpoints
        self.is_stopped = False

    def start(self, notify: Callable[[Sequence[str]], None]) -> None:
        self.notify = notify
        notify(self.endpoints)

    def stop(self) -> None:
        self.is_stopped = True


class MeterReading:
    """A session over batches `(image, index)`; collects what comes, in a thread."""

    def __init__(
        self,
        *teachers: FakeTeacher,
        batches: int | None,
        source: Any = None,
        limits: RequestLimits = WIDE,
        timeout_s: float | None = None,
        skips: bool = False,
        max_bytes: int = 1 << 20,
        answer_timeout_s: float | None = None,
        meter: Meter | None = None,
        **settings: Any,
    ) -> None:
        self.teachers = Teachers(*teachers)
        self.batches = batches
        self.go_on = True
        lock = SessionLock()
        self.session = ReaderSession(
            self.generate,
            KIND,
            [
                ServiceStream(
                    source or FixedTeachers(list(self.teachers.by_endpoint)),
                    PoolSettings(
                        sent=("image",),
                        labels=Labels(("total",), "", None),
                        limits=limits,
                        no_teacher_timeout_s=timeout_s,
                        skips=skips,
                        timeout_s=answer_timeout_s,
                        **settings,
                    ),
                    lock,
                    max_bytes=max_bytes,
                    connect=self.teachers.connect,
                    paces={},
                    meter=meter,
                )
            ],
            lock,
        )
        self.found: list[tuple[int, Any]] = []
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self.collect)
        self.thread.start()

    def generate(self) -> Iterator[tuple[Any, int]]:
        for index in itertools.count() if self.batches is None else range(self.batches):
            if not self.go_on:
                return
            yield np.full((4, 2, 3), index, np.float32), index

    def collect(self) -> None:
        try:
            for image, index, total in self.session.results():
                if total is not None:
                    assert image.shape[0] == total.shape[0]
                    assert (total == 6 * index).all()
                self.found.append((index, total))
        except Exception as error:  # noqa: BLE001  for the test to look at
            self.error = error

    def more(self, count: int, timeout_s: float = 20.0) -> None:
        wanted = len(self.found) + count
        wait_until(lambda: len(self.found) >= wanted or self.error, timeout_s, f"{count} more")
        assert self.error is None

    def failure(self) -> Exception:
        """Wait until reading fails; return what was raised."""
        wait_until(lambda: self.error, what="reading fails")
        assert self.error is not None
        return self.error

    def has_no_threads(self) -> bool:
        return not self.session.threads

    def finish(self) -> None:
        """Let the generator end, unless it is bound to; each item came once, in order."""
        self.go_on = self.batches is not None
        self.thread.join(20)
        assert not self.thread.is_alive()
        assert self.error is None
        assert [index for index, _ in self.found] == list(range(self.batches or len(self.found)))


@pytest.fixture
def read() -> Iterator[Callable[..., MeterReading]]:
    begun: list[MeterReading] = []

    def start(*teachers: FakeTeacher, batches: int | None = None, **options: Any) -> MeterReading:
        begun.append(MeterReading(*teachers, batches=batches, **options))
        return begun[-1]

    yield start
    for reading in begun:
        reading.session.close()
        reading.thread.join(20)
        wait_until(reading.has_no_threads)
        assert reading.teachers.open_connections == 0


def test_a_teacher_that_dies_costs_no_sample(read):
    dying, other = FakeTeacher("a:1", delay_s=0.002), FakeTeacher("b:1", delay_s=0.002)
    reading = read(dying, other)
    reading.more(100)
    dying.kill()
    reading.more(100)
    reading.finish()
    assert dying.requests


def test_when_the_last_teacher_is_back_reading_goes_on(read):
    teacher = FakeTeacher("a:1", delay_s=0.002)
    reading = read(teacher)
    reading.more(50)
    teacher.kill()
    wait_until(lambda: not teacher.in_flight)
    stood = len(reading.found)
    teacher.come_back()
    reading.more(50)
    reading.finish()
    assert stood < len(reading.found)


def test_a_hung_teachers_requests_are_answered_by_another_and_it_is_dropped(read):
    hung, other = FakeTeacher("a:1", delay_s=0.002), FakeTeacher("b:1", delay_s=0.002)
    reading = read(hung, other)
    wait_until(lambda: len(hung.requests) > 5)
    hung.stop()
    reading.more(500)
    wait_until(lambda: not hung.clients, what="the hung teacher's connections are closed")
    hung.go_on()
    asked = len(hung.requests)
    wait_until(lambda: len(hung.requests) > asked, what="it is asked again")
    reading.finish()


def test_a_slow_teacher_gets_less_by_itself(read):
    fast, slow = FakeTeacher("a:1", delay_s=0.002), FakeTeacher("b:1", delay_s=0.5)
    reading = read(fast, slow, limits=RequestLimits(join_bytes=1, most_bytes=1 << 20))
    wait_until(lambda: len(slow.requests) > 2)
    reading.finish()
    assert fast.samples > 3 * slow.samples


@pytest.mark.full
def test_each_teacher_has_at_least_two_requests_at_once(read):
    one, two = FakeTeacher("a:1", delay_s=0.02), FakeTeacher("b:1", delay_s=0.02)
    reading = read(one, two, limits=RequestLimits(join_bytes=1, most_bytes=1 << 20))
    wait_until(lambda: one.most_in_flight >= 2 and two.most_in_flight >= 2)
    reading.finish()


def test_a_busy_teacher_is_left_alone_for_a_while_and_nothing_is_lost(read):
    refusals = iter([None, None] + [TeacherBusy("full", delay_s=0.05)] * 3)
    busy = FakeTeacher("a:1")
    busy.refuse_with = lambda: next(refusals, None)
    reading = read(busy, batches=200)
    reading.finish()
    assert next(refusals, None) is None
    assert busy.connections <= 6  # being busy is no reason to connect again


def test_of_a_busy_and_an_idle_teacher_the_idle_one_answers(read):
    busy, idle = FakeTeacher("a:1"), FakeTeacher("b:1")
    busy.refuse_with = lambda: TeacherBusy("full", delay_s=0.05)
    reading = read(busy, idle, batches=100)
    reading.finish()


def test_what_a_teacher_refuses_is_raised_behind_the_items_before_it(read):
    teacher = FakeTeacher("a:1")
    compute = teacher.compute

    def picky(inputs):
        if (next(iter(inputs.values())) == 7).any():
            raise BadRequest("tensor image: 7 is no pixel")
        return compute(inputs)

    teacher.compute = picky
    reading = read(teacher, batches=20)
    wait_until(lambda: reading.error)
    assert [index for index, _ in reading.found] == list(range(7))
    with pytest.raises(BadRequest, match="a:1: tensor image: 7 is no pixel"):
        raise reading.error


def test_a_teacher_that_serves_something_else_does_no_harm_beside_one_that_fits(read):
    wrong, right = FakeTeacher("a:1"), FakeTeacher("b:1")
    wrong.connect_with = lambda: BadRequest("a:1: no model")
    reading = read(wrong, right, batches=50)
    reading.finish()


def test_if_no_teacher_serves_what_is_asked_for_the_consumer_hears_why(read):
    wrong, other = FakeTeacher("a:1"), FakeTeacher("b:1")
    wrong.connect_with = other.connect_with = lambda: UsageError("wants another token")
    reading = read(wrong, other)
    with pytest.raises(UsageError, match="another token"):
        raise reading.failure()


def test_a_teacher_that_lets_nobody_in_any_more_does_no_harm_beside_another(read):
    """As one that was started again with another token, or an ingress that says 403."""
    shut, other = FakeTeacher("a:1", delay_s=0.002), FakeTeacher("b:1", delay_s=0.002)
    reading = read(shut, other)
    wait_until(lambda: len(shut.requests) > 5)
    shut.refuse_with = lambda: UsageError("HTTP 403: who are you?")
    reading.more(500)
    shut.refuse_with = lambda: None
    asked = len(shut.requests)
    wait_until(lambda: len(shut.requests) > asked + 20, what="it is asked again")
    reading.finish()


def test_a_connection_with_the_token_of_before_is_no_reason_to_give_up(read):
    """A client connects again by itself, where a server that was idle has been started again."""
    teacher = FakeTeacher("a:1", delay_s=0.001)
    reading = read(teacher)

    def refuse_once() -> None:
        refusals = iter([UsageError("HTTP 401: wants another token")])
        teacher.refuse_with = partial(next, refusals, None)
        asked = len(teacher.requests)
        wait_until(lambda: reading.error or len(teacher.requests) > asked + 20)
        assert next(refusals, None) is None

    for _ in range(3):
        refuse_once()
    reading.finish()


def test_the_only_teacher_that_lets_nobody_in_any_more_is_an_error_with_its_words(read):
    teacher = FakeTeacher("a:1", delay_s=0.001)
    reading = read(teacher)
    reading.more(100)
    teacher.refuse_with = lambda: UsageError("HTTP 401: set EDL_TEACHER_TOKEN")
    with pytest.raises(UsageError, match="HTTP 401: set EDL_TEACHER_TOKEN"):
        raise reading.failure()


def test_no_teacher_for_too_long_is_raised_with_the_reason(read):
    dead = FakeTeacher("a:1")
    dead.kill()
    reading = read(dead, timeout_s=0.2)
    with pytest.raises(NoTeacher, match=r"no teacher for 0\.2 s \(a:1: .*nobody listens"):
        raise reading.failure()


def test_time_in_which_the_process_was_stopped_does_not_count(read, monkeypatch):
    teacher = FakeTeacher("a:1")
    reading = read(teacher, timeout_s=60)
    reading.more(20)
    teacher.stop()
    wait_until(lambda: teacher.in_flight)
    runs, real = threading.Event(), time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + 3600)  # as after SIGCONT
    monkeypatch.setattr(reading.session._streams[0].pool._supervisor, "_tend", lambda _: runs.set())
    assert runs.wait(20)
    teacher.go_on()
    reading.more(20)
    reading.finish()


def test_samples_are_skipped_while_there_is_no_teacher_and_asked_for_again_later(read):
    teacher = FakeTeacher("a:1", delay_s=0.002)
    reading = read(teacher, timeout_s=0.2, skips=True)
    reading.more(20)
    teacher.kill()
    wait_until(lambda: reading.found[-1][1] is None)
    teacher.come_back()
    wait_until(lambda: reading.found[-1][1] is not None)
    reading.finish()


def test_samples_that_are_skipped_do_not_count_as_fed_and_their_consumer_waits(read):
    teacher, meter = FakeTeacher("a:1"), Meter()
    reading = read(teacher, timeout_s=0.2, skips=True, meter=meter, max_bytes=1 << 12)
    reading.more(20)
    measured = meter.read()
    assert measured is not None
    assert measured.samples_per_s > 0
    teacher.kill()
    wait_until(lambda: reading.found[-1][1] is None, what="samples are skipped")
    meter._forget()
    reading.more(100)
    time.sleep(0.1)
    measured = meter.read()
    assert measured is not None
    assert measured.samples_per_s == 0
    assert measured.wait_share > 0.9
    teacher.come_back()
    wait_until(lambda: reading.found[-1][1] is not None, what="the teacher is back")
    teacher.kill()
    wait_until(lambda: reading.found[-1][1] is None, what="samples are skipped")
    reading.finish()
    reading.session.close()
    assert meter._began_wait_s is None


def test_samples_are_asked_for_again_where_what_was_asked_has_ended_without_an_answer(
    read, monkeypatch
):
    monkeypatch.setattr("distill_reader.student.pool.supervisor._LOG_PERIOD_S", 0.1)
    teacher = FakeTeacher("a:1")
    teacher.connects_anyway = True
    teacher.stop()
    reading = read(teacher, timeout_s=0.2, skips=True)
    wait_until(lambda: reading.found and reading.found[-1][1] is None)

    # Twice: a batch of four samples comes down to one, which would be at fault the third time.
    errors = iter([RequestTooLarge("so many are too many")] * 2)
    teacher.refuse_with = lambda: next(errors, None)
    teacher.go_on()
    wait_until(lambda: reading.found[-1][1] is not None)
    reading.finish()


def test_samples_that_every_teacher_refuses_once_one_is_back_are_an_error(read, monkeypatch):
    monkeypatch.setattr("distill_reader.student.pool.supervisor._LOG_PERIOD_S", 0.1)
    teacher = FakeTeacher("a:1")
    teacher.connects_anyway = True
    teacher.stop()
    reading = read(teacher, timeout_s=0.2, skips=True)
    wait_until(lambda: reading.found and reading.found[-1][1] is None)
    teacher.refuse_with = lambda: BadRequest("tensor image: of this kind is none")
    teacher.go_on()
    wait_until(lambda: reading.error, what="it does not skip them for ever")
    assert "of this kind is none" in str(reading.error)


def test_the_log_does_not_grow_with_each_try_whose_text_differs(read, caplog, monkeypatch):
    """As that of a balancer without a live teacher, with the time that each trial took."""
    monkeypatch.setattr("distill_reader.student.pool.pool._MOST_BACKOFF_S", 0.02)
    caplog.set_level("INFO", "distill_reader")
    tries = itertools.count(1)
    teacher = FakeTeacher("a:1")
    teacher.connect_with = lambda: TeacherGone(f"a:1: in no protocol ({next(tries)} ms)")
    reading = read(teacher)
    wait_until(lambda: next(tries) > 30)
    teacher.connect_with = lambda: None
    reading.more(3)
    assert "in no protocol" in caplog.text
    assert caplog.text.count("in no protocol") < 5


def test_the_log_says_what_is_waited_for(read, caplog, monkeypatch):
    monkeypatch.setattr("distill_reader.student.pool.supervisor._LOG_PERIOD_S", 0.1)
    dead = FakeTeacher("a:1")
    dead.kill()
    read(dead)
    wait_until(lambda: "still looking (a:1: nobody listens)" in caplog.text)


def test_a_teacher_that_is_listed_late_has_time_to_connect():
    """Nobody was listed for long: that is not the fault of who comes then."""
    registry = TeacherRegistry(threading.RLock(), {}, 0.0)
    registry.update(["a:1"], 60.0)
    assert registry.alone_since_s(61.0) == 0.0
    assert registry.unusable(61.0) == []
    assert registry.unusable(60.0 + UNUSABLE_S) == list(registry.wanted)


def test_teachers_may_come_and_go_while_reading(read):
    first, second = FakeTeacher("a:1", delay_s=0.002), FakeTeacher("b:1", delay_s=0.002)
    source = ToldTeachers("a:1")
    reading = read(first, second, source=source)
    reading.more(20)
    assert not second.requests
    source.notify(["a:1", "b:1"])
    wait_until(lambda: second.requests)
    source.notify(["b:1"])
    wait_until(lambda: not first.clients)
    reading.more(20)
    source.notify([])
    wait_until(lambda: not second.clients)
    source.notify(["a:1"])
    reading.more(20)
    reading.finish()
    reading.session.close()
    assert source.is_stopped


def test_a_teacher_that_leaves_the_list_while_it_hangs_keeps_nothing_back(read):
    hung, other = FakeTeacher("a:1", delay_s=0.002), FakeTeacher("b:1", delay_s=0.002)
    source = ToldTeachers("a:1", "b:1")
    reading = read(hung, other, source=source)
    wait_until(lambda: len(hung.requests) > 5)
    hung.stop()
    source.notify(["b:1"])
    reading.more(200)
    hung.go_on()
    reading.finish()


def test_a_teacher_that_takes_one_connection_is_asked_by_one(read):
    teacher = FakeTeacher("a:1", delay_s=0.001)
    teacher.connect_with = lambda: TeacherBusy("enough") if teacher.clients else None
    reading = read(teacher, batches=100)
    reading.finish()
    assert teacher.most_in_flight == 1


def test_a_connection_that_breaks_is_made_again(read):
    teacher = FakeTeacher("a:1", delay_s=0.001)
    breaks = iter([None] * 5 + [TeacherGone("a:1: reset by peer")])
    teacher.refuse_with = lambda: next(breaks, None)
    reading = read(teacher)
    reading.more(100)
    reading.finish()


def test_a_defect_reaches_the_consumer_instead_of_keeping_it_waiting(read):
    teacher = FakeTeacher("a:1")

    def defect(inputs):
        raise ZeroDivisionError("ours")

    teacher.compute = defect
    reading = read(teacher)
    with pytest.raises(ZeroDivisionError):
        raise reading.failure()


@pytest.mark.parametrize("seed", range(4))
def test_whatever_teachers_do_each_item_comes_once_and_in_order(read, seed: int):
    chance = random.Random(seed)
    teachers = [FakeTeacher(f"{name}:1", delay_s=chance.choice([0, 0.003])) for name in "abc"]
    moods = (lambda: TeacherBusy("full", delay_s=0.01), lambda: TeacherGone("reset"))
    for teacher in teachers:
        teacher.refuse_with = lambda: chance.choice(moods)() if chance.random() < 0.05 else None
    source = ToldTeachers(*[teacher.endpoint for teacher in teachers])
    limits = chance.choice(
        [WIDE, RequestLimits(join_bytes=50, most_bytes=50), replace(WIDE, samples=3)]
    )
    reading = read(*teachers, source=source, limits=limits)
    for _ in range(30):
        teacher = chance.choice(teachers)
        chance.choice([teacher.kill, teacher.come_back, teacher.stop, teacher.go_on])()
        if chance.random() < 0.2:
            source.notify([each.endpoint for each in teachers if chance.random() < 0.7])
        reading.thread.join(0.02)  # for a while, unless it fails
    for teacher in teachers:
        teacher.come_back()
        teacher.go_on()
    source.notify([teacher.endpoint for teacher in teachers])
    reading.finish()


# --- requests that nobody can compute


@pytest.fixture
def hurried(monkeypatch) -> None:
    """Pauses a tenth as long."""
    monkeypatch.setattr("distill_reader.student.pool.pool._FAILED_REST_S", (0.025, 0.4))
    monkeypatch.setattr("distill_reader.student.pool.teacher_registry._MOST_PAUSE_S", 0.5)


def failing_at(teacher: FakeTeacher, index: int, error: Callable[[], Exception]) -> list[int]:
    """Have `teacher` fail what has this index in it; return the sizes of the requests it failed."""
    compute = teacher.compute
    failed: list[int] = []

    def picky(inputs):
        (image,) = inputs.values()
        if (image == index).any():
            failed.append(len(image))
            raise error()
        return compute(inputs)

    teacher.compute = picky
    return failed


@pytest.mark.parametrize(
    ("error", "most_tries"),
    [
        # Some tries are not counted: of connections that are closed with another one.
        (lambda: TeacherFailed("HTTP 500: CUDA out of memory"), 2 * (4 + 1)),
        (lambda: TeacherFailed("HTTP 500: CUDA out of memory; twice", tries=2), 2 * (2 + 1)),
        # More than the 8 that are enough: they count against the request once others are answered.
        (lambda: TeacherGone("reset by peer: CUDA out of memory"), 100),
    ],
    ids=["fails", "predictors end", "connections end"],
)
def test_a_request_that_no_teacher_can_compute_is_an_error_that_names_item_and_teachers(
    read, hurried, error, most_tries
):
    one, two = FakeTeacher("a:1"), FakeTeacher("b:1")
    failed = [failing_at(teacher, 6, error) for teacher in (one, two)]
    reading = read(one, two, batches=40, limits=RequestLimits(join_bytes=1, most_bytes=1 << 20))
    wait_until(lambda: reading.error)
    assert [index for index, _ in reading.found] == list(range(6))
    with pytest.raises(
        BadRequest,
        match=r"item 6, samples 0 to 3 of 4: no teacher can compute it: .*CUDA.*gateways",
    ) as caught:
        raise reading.error
    assert "a:1" in str(caught.value)
    assert "b:1" in str(caught.value)
    assert sum(map(len, failed)) <= most_tries


@pytest.mark.parametrize("error", [TeacherGone, TeacherFailed])
def test_no_request_is_at_fault_for_what_a_teacher_could_not_compute_at_all(
    read, monkeypatch, error
):
    """As while its device is full, or each request ends the process behind its gateway."""
    monkeypatch.setattr("distill_reader.student.pool.pool._FAILED_REST_S", (0.002, 0.02))
    monkeypatch.setattr("distill_reader.student.pool.teacher_registry._MOST_PAUSE_S", 0.02)
    teacher = FakeTeacher("a:1")
    is_out, tries = True, 0

    def answer() -> DistillError | None:
        nonlocal tries
        tries += is_out
        return error("reset by peer") if is_out else None

    teacher.refuse_with = answer
    reading = read(teacher, batches=60, limits=RequestLimits(join_bytes=1, most_bytes=1 << 20))
    wait_until(lambda: tries > 60 or reading.error)
    is_out = False
    reading.finish()


def test_a_teacher_that_fails_keeps_its_connection_and_is_left_alone_for_a_while(read, hurried):
    teacher = FakeTeacher("a:1")
    fails = iter([None] * 5 + [TeacherFailed("HTTP 500")] * 3)
    teacher.refuse_with = lambda: next(fails, None)
    reading = read(teacher, batches=50)
    reading.finish()
    assert teacher.connections <= 6


def test_what_one_teacher_fails_another_one_answers(read, hurried, caplog):
    broken, well = FakeTeacher("a:1"), FakeTeacher("b:1", delay_s=0.002)
    broken.refuse_with = lambda: TeacherFailed("HTTP 500: broken")
    reading = read(
        broken, well, batches=200, limits=RequestLimits(join_bytes=1, most_bytes=1 << 20)
    )
    reading.finish()
    assert caplog.text.count("HTTP 500: broken") <= 1 + caplog.text.count("answered nothing")


def test_of_joined_items_only_the_one_at_fault_is_an_error(read, hurried):
    teacher = FakeTeacher("a:1", delay_s=0.001)
    failing_at(teacher, 6, lambda: TeacherFailed("a:1: HTTP 500"))
    reading = read(teacher, batches=12)
    wait_until(lambda: reading.error)
    assert [index for index, _ in reading.found] == list(range(6))
    assert "item 6" in str(reading.error)


@pytest.mark.full
def test_a_teacher_whose_connections_break_at_each_request_is_not_asked_without_a_pause(
    read, monkeypatch
):
    monkeypatch.setattr("distill_reader.student.batches.tries._OUTAGE_S", 1e9)
    teacher = FakeTeacher("a:1")
    teacher.refuse_with = lambda: TeacherGone("reset by peer")
    reading = read(teacher, batches=3)
    wait_until(lambda: len(teacher.requests) >= 4)
    began_s, asked = time.monotonic(), len(teacher.requests)
    wait_until(lambda: len(teacher.requests) >= asked + 3)
    assert time.monotonic() - began_s > 0.2
    teacher.refuse_with = lambda: None
    reading.finish()


# --- refusals


def test_what_one_teacher_refuses_another_one_may_take(read):
    picky, other = FakeTeacher("a:1"), FakeTeacher("b:1", delay_s=0.002)
    picky.refuse_with = lambda: BadRequest("tensor image: of this size is none")
    reading = read(picky, other)
    wait_until(lambda: picky.requests)
    reading.more(50)
    reading.finish()


def test_a_teacher_that_refuses_what_others_take_takes_no_requests_apart(read, caplog):
    """One that answers at once that it will not is free for the next one before all others."""
    refuses, takes = FakeTeacher("a:1"), FakeTeacher("b:1", delay_s=0.01)
    takes.computes_in_turn()
    refuses.refuse_with = lambda: BadRequest("only longer ones")
    reading = read(refuses, takes)
    reading.more(10)  # by now the other one has shown that it takes them
    asked = len(refuses.requests)
    reading.more(2000)
    reading.finish()
    assert sum(map(len, takes.requests)) > 4 * len(takes.requests)  # items are joined
    assert len(refuses.requests) - asked < 100
    assert caplog.text.count("a:1: only longer ones") <= 2


def test_teachers_that_come_to_refuse_everything_are_asked_no_more_than_each_once(read):
    teachers = [FakeTeacher(f"{name}:1", delay_s=0.002) for name in "abc"]
    reading = read(*teachers)
    wait_until(lambda: all(len(teacher.requests) > 5 for teacher in teachers))
    for teacher in teachers:
        teacher.refuse_with = lambda: BadRequest("not any more")
    with pytest.raises(BadRequest, match="no teacher takes it"):
        raise reading.failure()


def test_refused_requests_are_let_go_without_the_garbage_collector(read):
    refuses, takes = FakeTeacher("a:1", delay_s=0.001), FakeTeacher("b:1", delay_s=0.001)
    refuses.refuse_with = lambda: BadRequest("no")
    made: list[weakref.ref[Any]] = []

    class Watched(MeterReading):
        def generate(self) -> Iterator[tuple[Any, int]]:
            for image, index in super().generate():
                made.append(weakref.ref(image))
                yield image, index
                del image

    gc.disable()
    try:
        reading = Watched(refuses, takes, batches=300)
        reading.finish()
        alive = sum(each() is not None for each in made)
    finally:
        gc.enable()
    reading.session.close()
    assert alive < 20


def test_a_refusal_is_no_verdict_while_another_teacher_is_away_for_a_moment(read, hurried):
    refuses, takes = FakeTeacher("a:1", delay_s=0.002), FakeTeacher("b:1", delay_s=0.002)
    refuses.refuse_with = lambda: BadRequest("only shorter ones")
    reading = read(refuses, takes)

    def blink() -> None:
        takes.kill()
        asked = len(refuses.requests)
        wait_until(lambda: len(refuses.requests) > asked or reading.error)
        takes.come_back()

    for _ in range(3):
        reading.more(20)
        blink()
    reading.more(20)
    reading.finish()


def test_what_all_teachers_refuse_is_an_error_that_names_them(read):
    one, two = FakeTeacher("a:1"), FakeTeacher("b:1")
    for teacher in (one, two):
        failing_at(teacher, 7, lambda: BadRequest("tensor image: 7 is no pixel"))
    reading = read(one, two, batches=20)
    wait_until(lambda: reading.error)
    assert [index for index, _ in reading.found] == list(range(7))
    assert isinstance(reading.error, BadRequest)
    assert "tensor image: 7 is no pixel" in str(reading.error)


def test_a_teacher_gets_no_more_at_once_than_it_announces(read):
    small, large = FakeTeacher("a:1", delay_s=0.001), FakeTeacher("b:1", delay_s=0.001)
    small.bounds = Bounds(most_bytes=100, most_samples=3)  # 24 bytes a sample
    reading = read(small, large)
    wait_until(lambda: len(small.requests) > 50)
    wait_until(lambda: any(sum(each) > 4 for each in list(large.requests)))
    reading.finish()
    assert max(map(sum, small.requests)) <= 3


def asked_for_too_much(read, most: int, error: Exception, after_s: float = 0.0) -> int:
    """Return how many of 100 batches' requests were above what a teacher answers."""
    teacher = FakeTeacher("a:1")
    compute = teacher.compute

    def small(inputs):
        (image,) = inputs.values()
        if len(image) > most:
            time.sleep(after_s)
            raise error
        return compute(inputs)

    teacher.compute = small
    reading = read(teacher, batches=100)
    reading.finish()
    return sum(sum(each) > most for each in teacher.requests)


def test_a_request_that_is_too_large_is_asked_in_parts(read):
    assert asked_for_too_much(read, 3, RequestTooLarge("a:1: HTTP 413")) < 20  # then it is known


@pytest.mark.parametrize("lost", [TeacherGone, TeacherTimeout])
def test_what_a_slow_network_does_not_bring_in_time_is_asked_in_parts(read, lost, monkeypatch):
    monkeypatch.setattr("distill_reader.student.pool.pool._SLOW_S", 0.02)
    monkeypatch.setattr("distill_reader.student.pool.pool._LEAST_BYTES", 1)
    error = lost("a:1: HTTP 408: too slow: only 5 bytes of the body came")
    assert asked_for_too_much(read, 2, error, after_s=0.04) < 20  # then it is known


@pytest.mark.parametrize(("slow_s", "least_bytes"), [(10.0, 1), (0.0, 1 << 20)])
def test_requests_stay_as_large_where_a_connection_ends_for_another_reason(
    read, slow_s, least_bytes, monkeypatch
):
    monkeypatch.setattr("distill_reader.student.pool.pool._SLOW_S", slow_s)
    monkeypatch.setattr("distill_reader.student.pool.pool._LEAST_BYTES", least_bytes)
    teacher = FakeTeacher("a:1")
    reading = read(teacher)
    reading.more(10)
    for _ in range(3):
        teacher.kill()
        teacher.come_back()
        reading.more(10)
    reading.finish()
    assert all(size == 4 for each in teacher.requests for size in each)


def test_a_sample_that_is_too_large_for_one_teacher_goes_to_another(read):
    small, large = FakeTeacher("a:1"), FakeTeacher("b:1", delay_s=0.002)

    def refuse(_inputs):
        raise RequestTooLarge("a:1: HTTP 413")

    small.compute = refuse
    reading = read(small, large, batches=20)
    reading.finish()


# --- teachers that are connected and give nothing


def test_a_teacher_that_is_busy_for_ever_is_no_teacher(read, monkeypatch, caplog):
    monkeypatch.setattr("distill_reader.student.pool.teacher_registry.UNUSABLE_S", 0.2)
    meter = Meter()
    busy = FakeTeacher("a:1", delay_s=0.002)
    reading = read(busy, timeout_s=1.0, meter=meter)
    reading.more(20)
    busy.refuse_with = lambda: TeacherBusy("no predictor runs", delay_s=0.05)
    with pytest.raises(NoTeacher, match=r"no teacher for 1 s \(a:1: no predictor runs"):
        raise reading.failure()
    assert re.search(r"teacher a:1 has answered nothing for \d s \(no predictor", caplog.text)
    meter.waits()
    wait_until(lambda: meter.read() is not None)
    reading_of_meter = meter.read()
    assert reading_of_meter is not None
    assert reading_of_meter.unusable == ("a:1",)


def test_samples_are_skipped_while_the_teacher_is_busy_and_asked_for_when_it_is_not(read):
    busy = FakeTeacher("a:1", delay_s=0.002)
    reading = read(busy, timeout_s=0.3, skips=True)
    reading.more(20)
    busy.refuse_with = lambda: TeacherBusy("no predictor runs", delay_s=0.05)
    wait_until(lambda: reading.found[-1][1] is None)
    busy.refuse_with = lambda: None
    wait_until(lambda: reading.found[-1][1] is not None)
    reading.finish()


# --- versions


def other_version(digest: str = "", version: str = "1") -> FakeTeacher:
    spec = replace(FakeTeacher("x:1").spec, digest=digest, version=version)
    return FakeTeacher(f"{digest}{version}:1", spec, delay_s=0.002)


def other_shape(endpoint: str, *shape: int, is_exact: bool = True) -> FakeTeacher:
    spec = FakeTeacher("x:1").spec
    outputs = (spec.outputs[0], replace(spec.outputs[1], shape=shape))
    return FakeTeacher(endpoint, replace(spec, outputs=outputs, is_exact=is_exact), delay_s=0.002)


def other_type(endpoint: str, dtype: str) -> FakeTeacher:
    spec = FakeTeacher("x:1").spec
    outputs = (spec.outputs[0], replace(spec.outputs[1], dtype=dtype))
    return FakeTeacher(endpoint, replace(spec, outputs=outputs), delay_s=0.002)


@pytest.mark.parametrize(
    ("one", "other", "is_mixed"),
    [
        (other_version("d1"), other_version("d2"), False),
        (other_version(version="1"), other_version(version="2"), False),
        (other_version("d3", "1"), other_version("", "1"), True),
        (other_shape("a:1", 2, 3), other_shape("b:1", 2, 4), False),
        (other_shape("a:1", 2, 3), other_shape("b:1", 2), False),
        (other_shape("a:1", 2, 3), other_shape("b:1", -1, 3), True),
        (other_shape("a:1", 2, 3), other_shape("b:1", 2, 4, is_exact=False), True),
        (other_type("a:1", "float32"), other_type("b:1", "int64"), False),
        (other_type("a:1", "float32"), other_type("b:1", "float16"), True),
    ],
    ids=["digests", "versions", "of one nothing is known", "classes", "axes", "an open length",
         "a prototxt's shape", "integers", "another precision"],
)  # fmt: skip
def test_teachers_of_two_versions_do_not_answer_in_one_iteration(
    read, caplog, one, other, is_mixed
):
    source = ToldTeachers(one.endpoint)
    reading = read(one, other, source=source)
    reading.more(5)
    source.notify([one.endpoint, other.endpoint])
    if is_mixed:
        wait_until(lambda: other.requests)
    else:
        wait_until(lambda: "does not mix them" in caplog.text)
        assert not other.requests
    reading.finish()


def test_of_two_versions_that_are_connected_at_the_same_time_one_is_left_out(read, caplog):
    both = other_version("d1"), other_version("d2")
    together = threading.Barrier(2)

    def connect_together() -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(20)

    for teacher in both:
        teacher.connect_with = connect_together
    reading = read(*both)
    wait_until(lambda: "does not mix them" in caplog.text)
    together.abort()
    reading.more(20)
    reading.finish()
    assert sorted(bool(teacher.requests) for teacher in both) == [False, True]


def test_that_only_names_of_models_differ_is_said_once_and_refused_by_nobody(read, caplog):
    one, other = FakeTeacher("a:1", delay_s=0.002), FakeTeacher("b:1", delay_s=0.002)
    other.spec = replace(other.spec, name="twice")
    reading = read(one, other)
    wait_until(lambda: one.most_in_flight > 1 and other.most_in_flight > 1)
    reading.finish()
    assert caplog.text.count("whether that is the same") == 1


def test_versions_are_mixed_where_the_user_says_so(read):
    one, other = other_version("d1"), other_version("d2")
    reading = read(one, other, mixes_versions=True)
    wait_until(lambda: one.requests and other.requests)
    reading.finish()


def test_if_only_another_version_is_left_the_consumer_hears_why(read):
    one, other = other_version("d1"), other_version("d2")
    source = ToldTeachers(one.endpoint)
    reading = read(one, other, source=source)
    reading.more(5)
    source.notify([other.endpoint])
    with pytest.raises(BadRequest, match=r"version d2; this iteration began with .*version d1"):
        raise reading.failure()


def test_a_model_that_is_replaced_by_one_with_other_classes_is_named_by_them(read):
    one = other_shape("a:1", 2, 3)
    reading = read(one)
    reading.more(5)
    one.kill()
    one.spec = other_shape("b:1", 2, 4).spec
    one.come_back()
    with pytest.raises(BadRequest, match=r"\[2, 4\]\); this iteration began with .*\[2, 3\]\) of"):
        raise reading.failure()


# --- threads


def test_a_thread_that_cannot_be_started_costs_a_connection_not_the_epoch(
    read, monkeypatch, caplog
):
    monkeypatch.setattr("distill_reader.student.pool.pool._GROW_PERIOD_S", 0.1)
    start = threading.Thread.start
    names: list[str] = []

    def scarce(thread: threading.Thread) -> None:
        if thread.name.startswith("edl-teacher"):
            names.append(thread.name)
            if len(names) in (2, 3, 4):
                raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", scarce)
    one, two = FakeTeacher("a:1", delay_s=0.005), FakeTeacher("b:1", delay_s=0.005)
    reading = read(one, two, limits=RequestLimits(join_bytes=1, most_bytes=1 << 20))
    wait_until(lambda: one.requests and two.requests)
    wait_until(lambda: len(names) > 5)
    reading.finish()
    assert "no more now: can't start new thread" in caplog.text


# --- slow teachers


@pytest.fixture
def quick(monkeypatch) -> None:
    """All times of pace.py and of the supervisor a fiftieth."""
    for name in ("_HEDGE_FLOOR_S", "_HEDGE_UNKNOWN_S", "_TIMEOUT_UNKNOWN_S", "_TIMEOUT_FLOOR_S",
                 "_GROWS_BELOW_S", "_SHRINKS_ABOVE_S"):  # fmt: skip
        value = getattr(pace, name)
        monkeypatch.setattr(pace, name, value / 50)
    monkeypatch.setattr("distill_reader.student.pool.supervisor.TICK_S", 0.005)


@pytest.mark.full
@pytest.mark.parametrize("seconds", [16, 8, 4])
def test_slow_teachers_compute_nothing_twice_and_are_not_dropped(read, quick, caplog, seconds: int):
    one, two = (FakeTeacher(name, delay_s=seconds / 50) for name in ("a:1", "b:1"))
    for teacher in (one, two):
        teacher.computes_in_turn()
    reading = read(one, two, batches=12, limits=RequestLimits(join_bytes=1, most_bytes=1 << 20))
    reading.finish()
    assert one.samples + two.samples == 4 * 12
    assert min(one.samples, two.samples) >= 4 * 4  # both are busy
    assert "dropped" not in caplog.text
    assert "lost" not in caplog.text


@pytest.mark.full
def test_a_slow_teacher_beside_a_fast_one_adds_to_it(read, quick, caplog):
    fast, slow = FakeTeacher("a:1", delay_s=10 / 50), FakeTeacher("b:1", delay_s=20 / 50)
    for teacher in (fast, slow):
        teacher.computes_in_turn()
    reading = read(fast, slow, batches=12, limits=RequestLimits(join_bytes=1, most_bytes=1 << 20))
    reading.finish()
    assert fast.samples + slow.samples == 4 * 12
    assert slow.samples >= 4 * 2
    assert "dropped" not in caplog.text


def test_a_dropped_teacher_is_logged_once_per_connection(read, quick, caplog):
    hung, other = FakeTeacher("a:1", delay_s=0.002), FakeTeacher("b:1", delay_s=0.002)
    reading = read(hung, other)
    wait_until(lambda: len(hung.requests) > 5)
    hung.stop()
    wait_until(lambda: "is dropped" in caplog.text)
    reading.more(100)
    hung.go_on()
    reading.finish()
    assert 1 <= caplog.text.count("a:1 is dropped") <= hung.connections


def test_nothing_is_asked_twice_where_hedging_is_off(read, quick):
    hung, other = FakeTeacher("a:1", delay_s=0.002), FakeTeacher("b:1", delay_s=0.002)
    reading = read(hung, other, hedges=False, timeout_s=None)
    wait_until(lambda: len(hung.requests) > 5)
    reading.finish()
    assert hung.samples + other.samples == 4 * len(reading.found)


def test_the_users_timeout_counts_for_every_answer(read):
    hung, other = FakeTeacher("a:1"), FakeTeacher("b:1", delay_s=0.005)
    hung.stop()
    hung.connects_anyway = True
    reading = read(hung, other, batches=300, answer_timeout_s=0.3, hedges=False)
    reading.finish()
    hung.go_on()


def test_the_users_timeout_is_for_one_request_whatever_waits_at_the_teacher(read):
    slow = FakeTeacher("a:1", delay_s=0.2)
    slow.computes_in_turn()
    one_by_one = RequestLimits(join_bytes=1, most_bytes=1 << 20)
    reading = read(slow, batches=8, limits=one_by_one, answer_timeout_s=0.35)
    reading.finish()
    assert slow.most_in_flight == 2
    assert slow.samples == 4 * 8


def test_waiting_costs_no_time_of_the_processor(read):
    """A slow consumer, teachers without work: the threads sleep."""
    teacher = FakeTeacher("a:1")
    release = threading.Event()

    class Stalled(MeterReading):
        def generate(self) -> Iterator[tuple[Any, int]]:
            yield from itertools.islice(super().generate(), 3)
            release.wait(20)

    reading = Stalled(teacher, batches=None)
    try:
        wait_until(lambda: len(reading.found) == 3)
        before_s = time.process_time()
        assert not release.wait(1.0)
        assert time.process_time() - before_s < 0.3  # other tests' threads sleep less
    finally:
        release.set()
        reading.thread.join(20)
        reading.session.close()
