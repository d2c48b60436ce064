"""One thread of a pool: looks after requests that are late, and says when there is no teacher."""

import logging
import threading
import time
from collections.abc import Callable

from distill_reader.errors import NoTeacher
from distill_reader.student.client import TeacherClient
from distill_reader.student.feed import Feed
from distill_reader.student.roster import Roster

logger = logging.getLogger(__name__)

TICK_S = 0.25  # while requests are in flight; no hedge is due earlier
_LOG_PERIOD_S = 10.0


class Supervisor:
    """Sleeps for as long as nothing is under way."""

    def __init__(
        self,
        roster: Roster,
        feed: Feed,
        lock: threading.RLock,
        ready: threading.Condition,
        *,
        call: Callable[[], None],
        timeout_s: float | None,
        skips: bool,
        name: str = "",
    ) -> None:
        """
        Args:
            ready: on `lock`; notified when the consumer may find something.
            call: wakes a teacher that may take what is hedged.
            timeout_s: how long to be without a teacher; None: for ever.
            skips: behind that time, instead of raising.
            name: of the service, where there are several.
        """
        self._roster = roster
        self._feed = feed
        self._lock = lock
        self._ready = ready
        self._call = call
        self._timeout_s = timeout_s
        self._skips = skips
        self._of = f" of {name}" if name else ""
        self._again = threading.Condition(lock)
        self._sleeps_long = False  # past the next tick
        self._is_closing = False

    def look(self) -> None:
        """Let it look now. The caller has the lock, here and below."""
        self._again.notify()

    def look_soon(self) -> None:
        """Let it look within a tick: a request is under way."""
        if self._sleeps_long:
            self._again.notify()

    def close(self) -> None:
        self._is_closing = True
        self._again.notify()

    def run(self) -> None:
        """The thread's."""
        logged_s = time.monotonic()
        while True:
            with self._lock:
                if self._is_closing:
                    return
                now = time.monotonic()
                hanging = self._look_for_late(now)
                wait_s = self._look_for_none(now)
                if wait_s is None:
                    logged_s = now
                elif now - logged_s >= _LOG_PERIOD_S:
                    logged_s = now
                    logger.warning(
                        "no teacher%s for %.0f s, still looking (%s)",
                        self._of,
                        now - self._roster.alone_since_s,
                        self._roster.troubles(),
                    )
                if not hanging:
                    if any(teacher.flights for teacher in self._roster.all):
                        wait_s = TICK_S if wait_s is None else min(TICK_S, wait_s)
                    self._sleeps_long = wait_s is None or wait_s > TICK_S
                    self._again.wait(wait_s)
                    self._sleeps_long = False
            for client in hanging:
                client.close()

    def _look_for_late(self, now: float) -> list[TeacherClient]:
        """Hedge what is late; return the connections of teachers that hang, to be closed."""
        hanging: list[TeacherClient] = []
        roster = self._roster
        connected = roster.connected
        for teacher in roster.all:
            pace = teacher.pace
            for flight in teacher.flights:
                if not flight.left:
                    continue  # answered, and about to land
                request, took_s = flight.request, now - flight.since_s
                if request.is_answered:
                    if took_s > pace.drop_after_s(request.samples):
                        logger.warning(
                            "teacher %s is dropped: no answer within %.1f s to what another one "
                            "answered",
                            teacher.endpoint,
                            took_s,
                        )
                        hanging += roster.give_up(teacher, now)
                        roster.forget_pace(teacher)
                        break
                elif (
                    any(other is not teacher for other in connected)
                    and not request.is_hedged
                    and took_s > pace.hedge_after_s(request.samples)
                ):
                    logger.info(
                        "teacher %s: no answer within %.2f s, another one is asked as well",
                        teacher.endpoint,
                        took_s,
                    )
                    self._feed.hedge(request)
                    self._call()
        return hanging

    def _look_for_none(self, now: float) -> float | None:
        """Act if there has been no teacher for long.

        Returns:
            When to look again; None: there is a teacher.
        """
        roster = self._roster
        if roster.connected:
            return None
        troubles = [teacher.trouble for teacher in roster.wanted if teacher.refuses]
        if troubles and troubles[0] is not None and len(troubles) == len(roster.by_endpoint):
            self._feed.suspend(troubles[0])
            self._ready.notify()
        if self._timeout_s is None:
            return _LOG_PERIOD_S
        left_s = roster.alone_since_s + self._timeout_s - now
        if left_s > 0:
            return min(_LOG_PERIOD_S, left_s)
        if self._skips:
            self._feed.skip()
        else:
            self._feed.suspend(
                NoTeacher(
                    f"no teacher{self._of} for {self._timeout_s:g} s ({roster.troubles()}); "
                    f"set_no_teacher_timeout says how long to wait and what to do then"
                )
            )
        self._ready.notify()
        return _LOG_PERIOD_S
