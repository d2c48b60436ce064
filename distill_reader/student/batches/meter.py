"""Measure how a reader is fed: how long it waits, what it gets, and how fast each teacher is."""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

_WINDOW_S = 8.0  # that measures cover
_FRESH_S = 30.0  # so long after the last sample there are no measures any more
# That of a teacher's speed is longer where it has fewer answers: each of a slow one would move it.
_WINDOW_ANSWERS = 8
_LEAST_ANSWERS = 4  # fewer tell no speed


@dataclass(slots=True)
class _Teacher:
    began_s: float  # when its first request was counted
    samples: float = 0.0
    answers: float = 0.0
    busy_s: float = 0.0
    elapsed_s: float = 0.0  # in which these were counted
    flights: int = 0  # requests that it has now
    since_s: float = 0.0  # since when it has had some


@dataclass(slots=True)
class _Sums:
    elapsed_s: float = 0.0
    waited_s: float = 0.0
    samples: float = 0.0
    teachers: dict[str, _Teacher] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeterReading:
    """The measures of the last seconds."""

    wait_share: float  # part of the consumer's time that it waits for predictions
    samples_per_s: float
    # endpoint -> samples per second, share of time busy (0: it has answered too little to tell)
    teachers: dict[str, tuple[float, float]]
    unusable: tuple[str, ...]  # endpoints


class Meter:
    """Measures one reader over all its iterations. Any thread may call it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._sums = _Sums()
        self._read_s: float | None = None  # when the sums were last updated; None: never
        self._fed_s: float | None = None  # when samples came last; None: never
        self._began_wait_s: float | None = None  # None: the consumer does not wait now
        self._unusable: tuple[str, ...] = ()

    def waits(self) -> None:
        """Note that the consumer waits for a prediction. Repeated calls have no effect."""
        with self._lock:
            self._start()
            if self._began_wait_s is None:
                self._began_wait_s = self._clock()

    def waits_no_more(self) -> None:
        with self._lock:
            self._count_wait(self._clock())
            self._began_wait_s = None

    def consumed(self, samples: int) -> None:
        """Note that the consumer takes samples."""
        with self._lock:
            self._start()
            self._fed_s = self._clock()
            self._sums.samples += samples

    def asked(self, teacher: str) -> None:
        """Note that a teacher gets a request."""
        with self._lock:
            self._start()
            known = self._teacher(teacher)
            if not known.flights:
                known.since_s = self._clock()
            known.flights += 1

    def answered(self, teacher: str, samples: int) -> None:
        """Note that a teacher is done with a request, and has answered so many samples of it."""
        with self._lock:
            known = self._teacher(teacher)
            known.samples += samples
            known.answers += samples > 0
            self._count_busy(known, self._clock())
            known.flights = max(0, known.flights - 1)

    def set_unusable(self, teachers: Iterable[str]) -> None:
        """Set the teachers that answer nothing now, although they were asked."""
        with self._lock:
            self._unusable = tuple(sorted(teachers))

    def read(self) -> MeterReading | None:
        """Return the measures; None: nothing has been read lately."""
        with self._lock:
            now = self._clock()
            if self._read_s is None or not self._is_fresh(now):
                self._forget()
                return None
            sums = self._sums
            before_s, self._read_s = self._read_s, now
            sums.elapsed_s += now - before_s
            self._count_wait(now)
            for teacher in sums.teachers.values():
                teacher.elapsed_s += now - max(before_s, teacher.began_s)
                self._count_busy(teacher, now)
            if sums.elapsed_s <= 0:
                return None
            elapsed_s = sums.elapsed_s
            reading = MeterReading(
                wait_share=min(1.0, sums.waited_s / elapsed_s),
                samples_per_s=sums.samples / elapsed_s,
                teachers={
                    name: _speed(each)
                    for name, each in sums.teachers.items()
                    if each.samples and each.elapsed_s > 0
                },
                unusable=self._unusable,
            )
            self._fade(now)
            return reading

    def __reduce__(self) -> tuple[object, ...]:
        return Meter, ()  # another process's reader is fed by itself

    # --- with the lock

    def _teacher(self, name: str) -> _Teacher:
        known = self._sums.teachers.get(name)
        if known is None:
            known = self._sums.teachers[name] = _Teacher(self._clock())
        return known

    def _start(self) -> None:
        if self._read_s is None:
            self._read_s = self._clock()

    def _is_fresh(self, now: float) -> bool:
        if self._began_wait_s is not None:
            return True  # however long it waits
        return self._fed_s is not None and now - self._fed_s <= _FRESH_S

    def _count_wait(self, now: float) -> None:
        if self._began_wait_s is not None:
            self._sums.waited_s += now - self._began_wait_s
            self._began_wait_s = now

    def _count_busy(self, teacher: _Teacher, now: float) -> None:
        if teacher.flights:
            teacher.busy_s += now - teacher.since_s
            teacher.since_s = now

    def _fade(self, now: float) -> None:
        """Scale the sums down to the length of the window, so that old times count less."""
        sums = self._sums
        if sums.elapsed_s <= _WINDOW_S:
            return
        part = _WINDOW_S / sums.elapsed_s
        sums.elapsed_s *= part
        sums.waited_s *= part
        sums.samples *= part
        for name, teacher in list(sums.teachers.items()):
            if not teacher.flights and teacher.busy_s < 1e-3:
                del sums.teachers[name]
                continue
            part = _WINDOW_S / max(teacher.elapsed_s, _WINDOW_S)
            if teacher.flights or now - teacher.since_s < _WINDOW_S:  # else it is not asked now
                part = max(part, _WINDOW_ANSWERS / max(teacher.answers, _WINDOW_ANSWERS))
            teacher.samples *= part
            teacher.answers *= part
            teacher.busy_s *= part
            teacher.elapsed_s *= part

    def _forget(self) -> None:
        flights = {name: each for name, each in self._sums.teachers.items() if each.flights}
        now = self._clock()
        for teacher in flights.values():
            teacher.samples = teacher.answers = teacher.busy_s = teacher.elapsed_s = 0.0
            teacher.began_s = now
            teacher.since_s = now
        self._sums = _Sums(teachers=flights)
        self._read_s = now if flights else None


def _speed(teacher: _Teacher) -> tuple[float, float]:
    """Return samples per second, and the share of time busy."""
    is_told = teacher.answers >= _LEAST_ANSWERS
    busy = min(1.0, teacher.busy_s / teacher.elapsed_s) if is_told else 0.0
    return teacher.samples / teacher.elapsed_s, busy
