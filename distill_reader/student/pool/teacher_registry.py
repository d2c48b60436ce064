"""What a pool knows of its teachers. Guarded by the pool's lock; no thread of its own."""

import threading
from collections.abc import Iterable, Sequence

from distill_reader.backoff import backoff_s
from distill_reader.errors import BadRequest, DistillError, UsageError
from distill_reader.student.batches.feed import Request
from distill_reader.student.clients.client import TeacherClient
from distill_reader.student.pool.pace import Pace

MOST = 1 << 62  # of bytes or samples: no bound
UNUSABLE_S = 5.0  # without an answer, until a teacher is said to be of no use
_FIRST_PAUSE_S, _MOST_PAUSE_S = 0.05, 5.0  # behind a connection that was lost again
_SILENT_S = 120.0  # the same, where its first answers are waited for


class Flight:
    """A request that a teacher has; if it was refused, what it was taken apart into."""

    __slots__ = ("answered", "is_given_up", "left", "since_s")

    def __init__(self, request: Request, since_s: float) -> None:
        self.answered = 0  # samples of it, so far
        self.is_given_up = False  # its connection is closed, and it is about to land
        self.left = [request]  # without an answer; the first one is asked now
        self.since_s = since_s

    @property
    def request(self) -> Request:
        return self.left[0]

    def advance(self, instead: list[Request], now: float) -> None:
        """Go on to the next one; `instead` are to be asked in place of the one that was."""
        self.left[:1] = instead
        self.since_s = now


class Teacher:
    """One endpoint."""

    def __init__(self, endpoint: str, pace: Pace, lock: threading.RLock) -> None:
        self.endpoint = endpoint
        self.pace = pace
        self.wake = threading.Condition(lock)
        self.is_wanted = True  # it is in the list of endpoints
        self.is_connected = False
        self.round = 0  # +1 whenever its connections are given up together
        self.threads = 0  # that serve it, or will when they are connected
        self.grows_after_s = 0.0  # when to try again to open one more connection
        self.idle = 0  # threads that wait for work
        self.clients: set[TeacherClient] = set()
        self.flights: list[Flight] = []
        self.failures = 0  # in a row
        self.trouble: DistillError | None = None  # why it is of no use; None: not tried yet, or is
        self.rest_until_s = 0.0  # 0: it does not rest
        self.rest_s = 0.0  # of its last rest, if it was busy or failed ever since
        self.opens_after_s = 0.0  # when to open a connection again, behind one that was lost
        self.listed_s = 0.0  # when it came to the list
        self.answered_s = 0.0  # its last answer
        self.refused_s: float | None = None  # its first refusal behind that; None: there is none
        # Since when it is of no use: not connected, or answers nothing; None: it is.
        self.absent_since_s: float | None = None
        self.is_fruitless = False  # a connection alone does not make it useful again
        self.is_reported = False  # that it is of no use
        self.most_bytes = MOST  # of a request, as it says or has shown
        self.most_samples = MOST

    def is_asked_in_vain(self, since_s: float) -> bool:
        """Note that what it was asked at `since_s` got no answer; return whether that is new."""
        is_new = not self.is_fruitless
        self.is_fruitless = True
        if self.absent_since_s is None:
            self.absent_since_s = max(since_s, self.answered_s)
        return is_new

    def has_answered(self, now: float) -> bool:
        """Note an answer; return whether there was none for long."""
        self.answered_s = now
        self.refused_s = None
        self.failures = 0
        self.rest_s = 0.0
        self.is_fruitless = self.is_reported = False
        if self.absent_since_s is None:
            return False
        if not self.is_connected:  # the answer was on its way when the connections were given up
            self.absent_since_s = now
            return False
        self.absent_since_s = self.trouble = None
        return True

    def missing_since_s(self, now: float) -> float | None:
        """Return since when it has given nothing to what it was asked; None: it is on time."""
        if self.absent_since_s is not None or not self.flights:
            return self.absent_since_s
        oldest = min(self.flights, key=lambda flight: flight.since_s)
        since_s = max(oldest.since_s, self.answered_s)
        pace = self.pace
        samples = oldest.request.samples if oldest.left else 1
        if pace.is_known and now - since_s <= pace.hedge_after_s(samples):
            return None
        return since_s

    def is_able(self, now: float) -> bool:
        """Return whether it may answer something, now or soon."""
        if self.is_connected:
            return self.absent_since_s is None or now - self.absent_since_s < UNUSABLE_S
        return self.trouble is None  # not tried yet

    def is_hoped_for(self, now: float) -> bool:
        """Return whether it is able, or was lost a moment ago and is likely to be back."""
        if self.is_connected or self.trouble is None:
            return self.is_able(now)
        since_s = self.absent_since_s
        return not self.refuses and since_s is not None and now - since_s < UNUSABLE_S

    @property
    def refuses(self) -> bool:
        """Whether it answers, but cannot be what we look for."""
        return not self.is_connected and isinstance(self.trouble, BadRequest | UsageError)

    @property
    def state(self) -> str:
        return "has not answered yet" if self.is_connected else "not connected yet"

    def about(self, what: DistillError | str) -> str:
        """Return `what` with the endpoint in front, where it does not name it itself."""
        text = str(what)
        return text if self.endpoint in text else f"{self.endpoint}: {text}"


class TeacherRegistry:
    """The teachers by endpoint, and those that leave."""

    def __init__(self, lock: threading.RLock, paces: dict[str, Pace], now: float) -> None:
        """
        Args:
            paces: by endpoint what earlier iterations learned; is kept up.
        """
        self._lock = lock
        self._paces = paces
        self._leaving: list[Teacher] = []  # not in the list any more, with requests to answer
        self.by_endpoint: dict[str, Teacher] = {}
        self._since_s = now  # since when nobody is of use, at the last change of the list

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
        """Take over a list of endpoints; return who is new, and who leaves."""
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
        """Return since when no teacher gives what it is asked for; None: one does."""
        latest = self._since_s
        for teacher in self.wanted:
            since_s = teacher.missing_since_s(now)
            if since_s is None:
                return None
            latest = max(latest, since_s)
        return latest

    def able(self, now: float) -> list[str]:
        """Return the teachers that may answer something, now or soon."""
        return [each.endpoint for each in self.wanted if each.is_able(now)]

    def hoped_for(self, now: float) -> list[str]:
        """Return those, and the teachers that were lost a moment ago."""
        return [each.endpoint for each in self.wanted if each.is_hoped_for(now)]

    def unusable(self, now: float) -> list[Teacher]:
        """Return the teachers that have given nothing for long."""
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
        """Let its threads open new connections; return the old ones, to be closed.

        At once, the first time; where it answers nothing in between, later and later.
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
        return "; ".join(texts) or "the list of teachers is empty"
