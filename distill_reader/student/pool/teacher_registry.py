"""The state of a pool's teachers. Guarded by the pool's lock; has no thread of its own."""

import threading
from collections.abc import Callable, Iterable, Sequence

from distill_reader.backoff import backoff_s
from distill_reader.errors import BadRequest, DistillError, UsageError
from distill_reader.student.batches.feed import Request
from distill_reader.student.clients.client import TeacherClient
from distill_reader.student.pool.pace import Pace

MOST = 1 << 62  # of bytes or samples: no bound
UNUSABLE_S = 5.0  # without an answer, until a teacher counts as unusable
_SILENT_S = 120.0  # the same for a connected teacher whose first answer has not come
_FIRST_PAUSE_S, _MOST_PAUSE_S = 0.05, 5.0  # after connections were lost repeatedly


class Flight:
    """A request in flight to a teacher; if it was refused, the requests it was split into."""

    __slots__ = ("answered", "is_given_up", "left", "since_s")

    def __init__(self, request: Request, since_s: float) -> None:
        self.answered = 0  # samples so far
        self.is_given_up = False  # its connection is closed; its thread is about to give it back
        self.left = [request]  # requests without an answer; the first one is asked now
        self.since_s = since_s

    @property
    def request(self) -> Request:
        return self.left[0]

    def advance(self, instead: list[Request], now: float) -> None:
        """Go on to the next request; `instead` replace the one that was asked."""
        self.left[:1] = instead
        self.since_s = now


class Teacher:
    """The state of one teacher."""

    def __init__(self, endpoint: str, pace: Pace, lock: threading.RLock) -> None:
        self.endpoint = endpoint
        self.pace = pace
        self.wake = threading.Condition(lock)
        self.is_wanted = True  # it is in the list of endpoints
        self.is_connected = False
        self.round = 0  # +1 whenever its connections are given up together
        self.threads = 0  # that serve it, or will when they are connected
        self.grows_after_s = 0.0  # when one more connection may be tried again
        self.idle = 0  # threads that wait for work
        self.clients: set[TeacherClient] = set()
        self.flights: list[Flight] = []
        self.failures = 0  # in a row
        self.trouble: DistillError | None = None  # why it is unusable; None: not tried, or usable
        self.told_s = float("-inf")  # when the log had last why it cannot be reached
        self.rest_until_s = 0.0  # 0: it does not rest
        self.rest_s = 0.0  # length of its last rest; 0: it has answered since
        self.opens_after_s = 0.0  # when to open a connection again after one was lost
        self.listed_s = 0.0  # when it was added to the list
        self.answered_s = 0.0  # time of its last answer
        self.refused_s: float | None = None  # time of its first refusal since; None: there is none
        # Since when it is unusable: not connected, or without answers. None: it is usable.
        self.absent_since_s: float | None = None
        self.is_fruitless = False  # a connection alone does not make it usable again
        self.is_reported = False  # as unusable
        self.most_bytes = MOST  # of a request, as it announces or has shown
        self.most_samples = MOST

    def note_no_answer(self, since_s: float) -> bool:
        """Note that a request of `since_s` got no answer; return whether that is new."""
        is_new = not self.is_fruitless
        self.is_fruitless = True
        if self.absent_since_s is None:
            self.absent_since_s = max(since_s, self.answered_s)
        return is_new

    def note_answer(self, now: float) -> bool:
        """Note an answer; return whether the teacher was unusable before."""
        self.answered_s = now
        self.refused_s = None
        self.failures = 0
        self.rest_s = 0.0
        self.is_fruitless = self.is_reported = False
        if self.absent_since_s is None:
            return False
        if not self.is_connected:  # the answer came just before its connections were given up
            self.absent_since_s = now
            return False
        self.absent_since_s = self.trouble = None
        return True

    def missing_since_s(self, now: float) -> float | None:
        """Return since when it is unusable or owes an answer; None: neither."""
        owing = [flight for flight in self.flights if flight.left]  # others are about to land
        if self.absent_since_s is not None or not owing:
            return self.absent_since_s
        oldest = min(owing, key=lambda flight: flight.since_s)
        since_s = max(oldest.since_s, self.answered_s)
        pace = self.pace
        if pace.is_known and now - since_s <= pace.hedge_after_s(oldest.request.samples):
            return None
        return since_s

    def is_able(self, now: float) -> bool:
        """Return whether it can be asked, now or soon."""
        if self.is_connected:
            return self.absent_since_s is None or now - self.absent_since_s < UNUSABLE_S
        return self.trouble is None  # not tried yet

    def is_hoped_for(self, now: float) -> bool:
        """Return whether it is able, or was lost a moment ago and is probably back soon."""
        if self.is_connected or self.trouble is None:
            return self.is_able(now)
        since_s = self.absent_since_s
        return not self.refuses and since_s is not None and now - since_s < UNUSABLE_S

    @property
    def refuses(self) -> bool:
        """Whether it answers, but cannot be used: another model, token or protocol."""
        return not self.is_connected and isinstance(self.trouble, BadRequest | UsageError)

    @property
    def state(self) -> str:
        return "has not answered yet" if self.is_connected else "not connected yet"

    def about(self, what: DistillError | str) -> str:
        """Return `what` as a text that names the endpoint."""
        text = str(what)
        return text if self.endpoint in text else f"{self.endpoint}: {text}"


class TeacherRegistry:
    """The teachers of a pool by endpoint, and those that are leaving."""

    def __init__(
        self,
        lock: threading.RLock,
        paces: dict[str, Pace],
        now: float,
        *,
        why_none: Callable[[], str] | None = None,
    ) -> None:
        """
        Args:
            paces: by endpoint what earlier iterations have learned; is updated.
            why_none: tells why the list is empty; None: nobody knows.
        """
        self._why_none = why_none or (lambda: "")
        self._lock = lock
        self._paces = paces
        self._leaving: list[Teacher] = []  # not in the list any more, but with requests in flight
        self.by_endpoint: dict[str, Teacher] = {}
        self._since_s = now  # since when no teacher was usable, at the last change of the list

    @property
    def wanted(self) -> Iterable[Teacher]:
        return self.by_endpoint.values()

    @property
    def all(self) -> list[Teacher]:
        return [*self.by_endpoint.values(), *self._leaving]

    @property
    def connected(self) -> list[Teacher]:
        return [teacher for teacher in self.by_endpoint.values() if teacher.is_connected]

    def update(self, endpoints: Sequence[str], now: float) -> tuple[list[Teacher], list[Teacher]]:
        """Use this list of endpoints; return the new teachers, and those that leave."""
        alone_since_s = self.alone_since_s(now)
        self._since_s = now if alone_since_s is None else alone_since_s
        new = []
        for endpoint in endpoints:
            if endpoint not in self.by_endpoint:
                pace = self._paces.setdefault(endpoint, Pace())
                pace.starved()
                teacher = self.by_endpoint[endpoint] = Teacher(endpoint, pace, self._lock)
                teacher.absent_since_s = self._since_s
                teacher.listed_s = now
                new.append(teacher)
        leaving = []
        for endpoint in self.by_endpoint.keys() - set(endpoints):
            teacher = self.by_endpoint.pop(endpoint)
            teacher.is_wanted = False
            self.set_disconnected(teacher, now)
            leaving.append(teacher)
        self._leaving = [teacher for teacher in self._leaving if teacher.threads] + leaving
        return new, leaving

    def alone_since_s(self, now: float) -> float | None:
        """Return since when no teacher is on time; None: one is."""
        latest = self._since_s
        for teacher in self.wanted:
            since_s = teacher.missing_since_s(now)
            if since_s is None:
                return None
            latest = max(latest, since_s)
        return latest

    def leave_out(self, seconds: float, now: float) -> None:
        """Count as if time that has passed had not: nobody is late by it."""
        self._since_s = min(now, self._since_s + seconds)
        for teacher in self.all:
            if teacher.absent_since_s is not None:
                teacher.absent_since_s = min(now, teacher.absent_since_s + seconds)
            for flight in teacher.flights:
                flight.since_s = min(now, flight.since_s + seconds)

    def able(self, now: float) -> list[str]:
        """Return the teachers that can be asked, now or soon."""
        return [each.endpoint for each in self.wanted if each.is_able(now)]

    def hoped_for(self, now: float) -> list[str]:
        """Return these teachers, and those that were lost a moment ago."""
        return [each.endpoint for each in self.wanted if each.is_hoped_for(now)]

    def unusable(self, now: float) -> list[Teacher]:
        """Return the teachers that have owed an answer for long."""
        found = []
        for teacher in self.wanted:
            since_s = teacher.missing_since_s(now)
            most_s = _SILENT_S if teacher.absent_since_s is None else UNUSABLE_S
            if since_s is not None and now - max(since_s, teacher.listed_s) >= most_s:
                found.append(teacher)
        return found

    def set_disconnected(self, teacher: Teacher, now: float) -> None:
        if teacher.is_connected:
            teacher.is_connected = False
            if teacher.absent_since_s is None:
                teacher.absent_since_s = now

    def give_up(self, teacher: Teacher, now: float) -> list[TeacherClient]:
        """Let its threads open new connections; return the old ones for the caller to close.

        The first time at once; if it answers nothing in between, after longer and longer pauses.
        """
        teacher.round += 1
        teacher.failures += 1
        teacher.grows_after_s = 0.0
        if teacher.failures > 1:
            pause_s = backoff_s(teacher.failures, _FIRST_PAUSE_S, _MOST_PAUSE_S)
            teacher.opens_after_s = now + pause_s
        for flight in teacher.flights:
            flight.is_given_up = True
        self.set_disconnected(teacher, now)
        teacher.wake.notify_all()
        return list(teacher.clients)

    def troubles(self) -> str:
        """Return why there is no teacher."""
        texts = [each.about(each.trouble or each.state) for each in self.wanted]
        return "; ".join(texts) or self._why_none() or "the list of teachers is empty"
