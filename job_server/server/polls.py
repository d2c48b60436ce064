"""Long polls: many requests wait for the next revision of one thing.

A revision is serialised once, however many requests wait for it.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from job_server.api.errors import JobServerError

T = TypeVar("T")

# Hundreds of threads that wake together fight for the interpreter's lock and slow each other down.
# So a few are woken, and each wakes the next once it has its answer.
WOKEN_AT_ONCE = 4
FRESH_S = 1.0  # an older body is rendered again: the times in it have gone on


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonReply:
    """A body that is ready to send."""

    body: bytes  # JSON
    busy: bool = False  # too many poll already: this one did not wait
    status: int = 200


class Watchers:
    """Counts the requests that wait now, for all topics together."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self.count = 0
        self.closing = False

    def enter(self) -> bool:
        """Take a place; False: there is none. After True the caller must call leave()."""
        with self._lock:
            if self.count >= self._limit:
                return False
            self.count += 1
            return True

    def leave(self) -> None:
        with self._lock:
            self.count -= 1


class Topic(Generic[T]):
    """One thing that requests wait for. Safe to use from any thread."""

    def __init__(
        self, value: T, render: Callable[[T, int], bytes], watchers: Watchers, revision: int
    ) -> None:
        self.value = value
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

    def poll(self, revision: int, timeout_s: float) -> JsonReply:
        """Return the newest revision, as soon as it is not `revision` or after `timeout_s`.

        Raises:
            JobServerError: what end() was given.
        """
        with self._changed:
            busy = False
            if timeout_s > 0 and not self._is_news(revision):
                busy = not self._watchers.enter()
                if not busy:
                    try:
                        self._changed.wait_for(lambda: self._is_news(revision), timeout_s)
                    finally:
                        self._watchers.leave()
                        self._changed.notify(1)  # the chain goes on, see WOKEN_AT_ONCE
            if self._end is not None:
                raise self._end.with_traceback(None)  # many raise it: no one keeps frames
            return JsonReply(body=self._newest_body(), busy=busy)

    def _is_news(self, revision: int) -> bool:
        return self.revision != revision or self._end is not None or self._watchers.closing

    def _newest_body(self) -> bytes:
        revision, made_at = self._made
        now = time.monotonic()
        if revision != self.revision or now - made_at > FRESH_S:
            self._body = self._render(self.value, self.revision)
            self._made = (self.revision, now)
        return self._body
