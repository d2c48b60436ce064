"""What a pool knows of its teachers. Guarded by the pool's lock; no thread of its own."""

import threading
from collections.abc import Iterable, Sequence

from distill_reader.errors import BadRequest, DistillError, UsageError
from distill_reader.student.client import TeacherClient
from distill_reader.student.feed import Request
from distill_reader.student.pace import Pace


class Flight:
    """A request that a teacher has; if it was refused, what it was taken apart into."""

    __slots__ = ("answered", "left", "since_s")

    def __init__(self, request: Request, since_s: float) -> None:
        self.answered = 0  # samples of it, so far
        self.left = [request]  # without an answer; the first one is asked now
        self.since_s = since_s

    @property
    def request(self) -> Request:
        return self.left[0]

    def settled(self, instead: list[Request], now: float) -> None:
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
        self.trouble: DistillError | None = None  # why it is not connected; None: not tried yet
        self.rest_until_s = 0.0  # 0: it does not rest
        self.rest_s = 0.0  # of its last rest, if it was busy ever since

    @property
    def refuses(self) -> bool:
        """Whether it answers, but cannot be what we look for."""
        return isinstance(self.trouble, BadRequest | UsageError)

    def about(self, what: DistillError | str) -> str:
        """Return `what` with the endpoint in front, where it does not name it itself."""
        text = str(what)
        return text if self.endpoint in text else f"{self.endpoint}: {text}"


class Roster:
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
        self.alone_since_s = now  # since when no teacher is connected

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
        new = []
        for endpoint in endpoints:
            if endpoint not in self.by_endpoint:
                pace = self._paces.setdefault(endpoint, Pace())
                pace.starved()
                self.by_endpoint[endpoint] = Teacher(endpoint, pace, self._lock)
                new.append(self.by_endpoint[endpoint])
        leaving = []
        for endpoint in self.by_endpoint.keys() - set(endpoints):
            teacher = self.by_endpoint.pop(endpoint)
            teacher.is_wanted = False
            self.set_disconnected(teacher, now)
            leaving.append(teacher)
        self._leaving = [teacher for teacher in self._leaving if teacher.threads] + leaving
        return new, leaving

    def set_disconnected(self, teacher: Teacher, now: float) -> None:
        if teacher.is_connected:
            teacher.is_connected = False
            if not self.connected:
                self.alone_since_s = now

    def give_up(self, teacher: Teacher, now: float) -> list[TeacherClient]:
        """Let its threads open new connections; return the old ones, to be closed."""
        teacher.round += 1
        teacher.failures += 1
        teacher.grows_after_s = 0.0
        self.set_disconnected(teacher, now)
        teacher.wake.notify_all()
        return list(teacher.clients)

    def forget_pace(self, teacher: Teacher) -> None:
        """Let it start anew: what was learned does not hold any more."""
        self._paces[teacher.endpoint] = teacher.pace = Pace()

    def troubles(self) -> str:
        """Return why there is no teacher."""
        texts = [each.about(each.trouble or "not connected yet") for each in self.wanted]
        return "; ".join(texts) or "the list of teachers is empty"
