"""One thread of a pool: looks after requests that are late, and says when there is no teacher."""

import logging
import threading
import time
from collections.abc import Callable, Sequence

from distill_reader.errors import NoTeacher
from distill_reader.student.batches.feed import Feed
from distill_reader.student.clients.client import TeacherClient
from distill_reader.student.pool.pace import is_worth_hedging
from distill_reader.student.pool.teacher_registry import Flight, Teacher, TeacherRegistry

logger = logging.getLogger(__name__)

TICK_S = 0.25  # while requests are in flight; no hedge is due earlier
_LOG_PERIOD_S = 10.0
_LOOK_S = 1.0  # while a teacher is not what it should be
_OTHERS_S = 15.0  # until discovery has given others in place of teachers that refuse
_TRIAL_S = 2.0  # while samples are skipped, between two that are asked nevertheless


class Supervisor:
    """Sleeps for as long as nothing is under way."""

    def __init__(
        self,
        registry: TeacherRegistry,
        feed: Feed,
        lock: threading.RLock,
        ready: threading.Condition,
        *,
        call: Callable[[], None],
        tend: Callable[[float], bool],
        report: Callable[[Sequence[str]], None],
        timeout_s: float | None,
        skips: bool,
        hedges: bool = True,
        may_get_others: bool = False,
        name: str = "",
    ) -> None:
        """
        Args:
            ready: on `lock`; notified when the consumer may find something.
            call: wakes a teacher that may take what is hedged.
            tend: does what else falls due, now; returns whether more will.
            report: is told the teachers that are of no use, whenever they change.
            timeout_s: how long to be without a teacher that answers; None: for ever.
            skips: behind that time, instead of raising.
            hedges: whether late requests are sent to a second teacher.
            may_get_others: whether who knows of other teachers hears the report.
            name: of the service, where there are several.
        """
        self._registry = registry
        self._feed = feed
        self._lock = lock
        self._ready = ready
        self._call = call
        self._tend = tend
        self._report = report
        self._hedges = hedges
        self._timeout_s = timeout_s
        self._skips = skips
        self._patience_s = _OTHERS_S if may_get_others else 0.0
        self._of = f" of {name}" if name else ""
        self._again = threading.Condition(lock)
        self._sleeps_long = False  # past the next tick
        self._is_closing = False
        self._trial_s = 0.0  # when to ask again, though samples are skipped
        self._unusable: list[str] = []  # as it was reported
        self.has_given_up = False  # what has no answer is skipped, or raised

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
                alone_since_s = self._registry.alone_since_s(now)
                if alone_since_s is None:
                    logged_s = now
                elif now - max(logged_s, alone_since_s) >= _LOG_PERIOD_S:
                    logged_s = now
                    logger.warning(
                        "no teacher%s for %.0f s, still looking (%s)",
                        self._of,
                        now - alone_since_s,
                        self._registry.troubles(),
                    )
                if not hanging:
                    is_due = self._tend(now)
                    if self._look_for_unusable(now) or is_due:
                        wait_s = _LOOK_S if wait_s is None else min(_LOOK_S, wait_s)
                    is_flying = any(teacher.flights for teacher in self._registry.all)
                    if is_flying or self._feed.has_troubled:
                        wait_s = TICK_S if wait_s is None else min(TICK_S, wait_s)
                    self._sleeps_long = wait_s is None or wait_s > TICK_S
                    self._again.wait(wait_s)
                    self._sleeps_long = False
            for client in hanging:
                client.close()

    def _look_for_late(self, now: float) -> list[TeacherClient]:
        """Hedge what is late; return the connections of teachers that hang, to be closed."""
        hanging: list[TeacherClient] = []
        registry = self._registry
        for teacher in registry.all:
            pace = teacher.pace
            for flight in teacher.flights:
                if not flight.left or flight.is_given_up:
                    continue  # answered or closed, and about to land
                request, took_s = flight.request, now - flight.since_s
                if not request.is_answered:
                    if self._hedges and took_s > pace.hedge_after_s(request.samples):
                        self._hedge(teacher, flight, took_s)
                elif took_s > pace.drop_after_s(request.samples):
                    logger.warning(
                        "teacher %s is dropped: no answer within %.1f s to what another one "
                        "answered",
                        teacher.endpoint,
                        took_s,
                    )
                    pace.overdue(request.samples, took_s)
                    teacher.is_asked_in_vain(flight.since_s)
                    hanging += registry.give_up(teacher, now)
                    break
        return hanging

    def _hedge(self, teacher: Teacher, flight: Flight, took_s: float) -> None:
        """Offer a late request to teachers that will be sooner, if that keeps nobody waiting.

        Work that waits is done once while nothing is done twice; but the consumer does not wait
        for what comes behind the late request.
        """
        feed, request = self._feed, flight.request
        if request.is_hedged and not feed.is_offered(request):
            return  # another teacher has it
        if feed.has_waiting and not feed.is_first(request):
            return
        others = frozenset(
            other.endpoint
            for other in self._registry.connected
            if other is not teacher
            and other.absent_since_s is None
            and is_worth_hedging(teacher.pace, other.pace, request.samples, took_s)
        )
        if not others:
            return
        if not request.is_hedged:
            logger.info(
                "teacher %s: no answer within %.2f s, another one is asked as well",
                teacher.endpoint,
                took_s,
            )
        feed.hedge(request, others)
        self._call()

    def _look_for_unusable(self, now: float) -> bool:
        """Say which teachers are of no use; return whether to look again soon."""
        registry = self._registry
        found = registry.unusable(now)
        for teacher in found:
            if not teacher.is_reported:
                teacher.is_reported = True
                logger.warning(
                    "teacher %s has answered nothing for %.0f s (%s)",
                    teacher.endpoint,
                    now - (teacher.missing_since_s(now) or now),
                    teacher.trouble or teacher.state,
                )
        endpoints = [teacher.endpoint for teacher in found]
        if endpoints != self._unusable:
            self._unusable = endpoints
            self._report(endpoints)
        return any(
            not teacher.is_reported and teacher.missing_since_s(now) is not None
            for teacher in registry.wanted
        )

    def _look_for_none(self, now: float) -> float | None:
        """Act if there has been no teacher that answers for long.

        Returns:
            When to look again; None: there is a teacher.
        """
        registry = self._registry
        since_s = registry.alone_since_s(now)
        if since_s is None:
            return None
        wait_s = self._look_for_refusals(since_s, now)
        if self._timeout_s is None:
            return wait_s
        left_s = since_s + self._timeout_s - now
        if left_s > 0:
            return min(wait_s, left_s)
        is_connected = bool(registry.connected)
        if self._skips:
            if self.has_given_up and is_connected and now >= self._trial_s:
                self._trial_s = now + _TRIAL_S
                self._feed.resume()  # for a moment: only who is asked can answer
                return TICK_S
            self._feed.skip()
        else:
            self._feed.suspend(
                NoTeacher(
                    f"no teacher{self._of} for {self._timeout_s:g} s ({registry.troubles()}); "
                    f"set_no_teacher_timeout says how long to wait and what to do then"
                )
            )
        self.has_given_up = True
        self._ready.notify()
        return _TRIAL_S if self._skips and is_connected else _LOG_PERIOD_S

    def _look_for_refusals(self, since_s: float, now: float) -> float:
        """Raise what teachers say if all that there are refuse; return when to look again."""
        wanted = list(self._registry.wanted)
        troubles = [teacher.trouble for teacher in wanted if teacher.refuses]
        if not troubles or troubles[0] is None or len(troubles) < len(wanted):
            return _LOG_PERIOD_S
        newest_s = max(teacher.listed_s for teacher in wanted)
        left_s = max(since_s, newest_s) + self._patience_s - now
        if left_s > 0:
            return min(_LOG_PERIOD_S, left_s)
        self.has_given_up = True
        self._feed.suspend(troubles[0])
        self._ready.notify()
        return _LOG_PERIOD_S
