"""Long polls: many requests wait for the next revision of one thing.

A revision is serialised once, however many requests wait for it.
"""

import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Generic, TypeVar

from job_server.api.errors import JobServerError

T = TypeVar("T")

# Hundreds of threads that wake together fight for the interpreter's lock and slow each other down.
# So a few are woken, and each wakes the next once it has its answer.
WOKEN_AT_ONCE = 4
LOOK_S = 10.0  # how often one who waits is looked after: it may have hung up
USERS_SHARE = 0.5  # of the places, at most: the others are for clients and launchers
FRESH_S = 1.0  # an older body is rendered again: the times in it have gone on


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonReply:
    """A body that is ready to send."""

    body: bytes  # JSON
    busy: bool = False  # too many poll already: this one did not wait
    status: int = 200


# Says whether the client of the request that is served now has hung up.
hung_up: ContextVar[Callable[[], bool]] = ContextVar("hung_up", default=lambda: False)


class Watchers:
    """Counts the requests that wait now, for all topics together."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._users_limit = max(1, round(USERS_SHARE * limit))
        self._lock = threading.Lock()
        self.count = 0
        self._users = 0
        self.closing = False

    def enter(self, *, user: bool = False) -> bool:
        """Take a place; False: there is none. After True the caller must call leave().

        Args:
            user: it is neither a client's request nor a launcher's.
        """
        with self._lock:
            if self.count >= self._limit or (user and self._users >= self._users_limit):
                return False
            self.count += 1
            self._users += user
            return True

    def leave(self, *, user: bool = False) -> None:
        with self._lock:
            self.count -= 1
            self._users -= user


class Topic(Generic[T]):
    """One thing that requests wait for. Safe to use from any thread."""

    def __init__(
        self,
        value: T,
        render: Callable[[T, int], bytes],
        watchers: Watchers,
        revision: int,
        *,
        for_users: bool = False,
    ) -> None:
        self.value = value
        self._for_users = for_users
        self.revision = revision
        self._render = render
        self._watchers = watchers
        self._changed = threading.Condition(threading.Lock())
        self._body = b""
        self._made = (-1, 0.0)  # revision of `_body`, and when it was made (monotonic)
        self._end: JobServerError | None = None  # None: it goes on

    def publish(self, value: T) -> None:
        """Begin a new revision and answer all waiting requests."""
        with self._changed:
            self.value = value
            self.revision += 1
            self._changed.notify(WOKEN_AT_ONCE)

    def refresh(self, value: T) -> None:
        """Keep the revision: later answers show `value`, but no request is woken for it."""
        with self._changed:
            self.value = value

    def end(self, error: JobServerError) -> None:
        """Answer `error` to all waiting requests, and to later ones."""
        with self._changed:
            self._end = error
            self._changed.notify_all()

    def wake(self) -> None:
        """Answer all waiting requests with the present value: the server ends."""
        with self._changed:
            self._changed.notify_all()

    def poll(
        self, revision: int, timeout_s: float, unchanged: Callable[[int], bytes] | None = None
    ) -> JsonReply:
        """Return the newest revision, as soon as it is not `revision` or after `timeout_s`.

        Args:
            unchanged: makes the body where it still is `revision`; None: it is as ever.

        Raises:
            JobServerError: what end() was given.
        """
        with self._changed:
            busy = False
            if timeout_s > 0 and not self._is_news(revision):
                busy = not self._watchers.enter(user=self._for_users)
                if not busy:
                    try:
                        self._wait(revision, timeout_s)
                    finally:
                        self._watchers.leave(user=self._for_users)
                        self._changed.notify(1)  # the chain goes on, see WOKEN_AT_ONCE
            if self._end is not None:
                raise self._end.with_traceback(None)  # many raise it: no one keeps frames
            if unchanged is not None and self.revision == revision:
                return JsonReply(body=unchanged(revision), busy=busy)
            return JsonReply(body=self._newest_body(), busy=busy)

    def _wait(self, revision: int, timeout_s: float) -> None:
        """Wait for news, for the end of the time, or until nobody is there to be answered."""
        gone, until = hung_up.get(), time.monotonic() + timeout_s
        while (left_s := until - time.monotonic()) > 0 and not gone():
            if self._changed.wait_for(lambda: self._is_news(revision), min(left_s, LOOK_S)):
                return

    def _is_news(self, revision: int) -> bool:
        return self.revision != revision or self._end is not None or self._watchers.closing

    def _newest_body(self) -> bytes:
        revision, made_at = self._made
        now = time.monotonic()
        if revision != self.revision or now - made_at > FRESH_S:
            self._body = self._render(self.value, self.revision)
            self._made = (self.revision, now)
        return self._body
