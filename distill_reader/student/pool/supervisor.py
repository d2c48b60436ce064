"""A thread of the pool that handles late requests, and reports if there is no teacher."""

import logging
import math
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
_LOOK_S = 1.0  # while a teacher is not usable
_OTHERS_S = 15.0  # for discovery to replace teachers that refuse
_STOPPED_S = 1.0  # by which it wakes too late if the process was stopped, as by SIGSTOP


class Supervisor:
    """Watches a pool's requests and teachers. Sleeps while no request is in flight."""

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
            call: wakes a teacher that may take a hedged request.
            tend: does the pool's own timed work; returns whether more will come.
            report: called with the unusable teachers whenever they change.
            timeout_s: how long to wait for a teacher that answers; None: without limit.
            skips: after that time, instead of raising.
            hedges: whether late requests are sent to a second teacher.
            may_get_others: whether discovery replaces teachers that are reported.
            name: of the service, if there are several.
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
        self._due_s = math.inf  # when it has to look again
        self._is_closing = False
        self._unusable: list[str] = []  # the last report
        self.has_given_up = False  # missing answers are skipped, or raised

    def look(self) -> None:
        """Wake it now. The caller has the lock, here and below."""
        self._due_s = min(self._due_s, time.monotonic())
        self._again.notify()

    def look_soon(self) -> None:
        """Wake it within a tick: a request is in flight."""
        if self._sleeps_long:
            self.look()

    def close(self) -> None:
        self._is_closing = True
        self._again.notify()

    def run(self) -> None:
        """Run in the thread until `close`."""
        logged_s = time.monotonic()
        while True:
            with self._lock:
                if self._is_closing:
                    return
                now = time.monotonic()
                if now - self._due_s > _STOPPED_S:  # answers may have come that nobody could read
                    self._registry.leave_out(now - self._due_s, now)
                self._due_s = now
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
                    self._due_s = math.inf if wait_s is None else now + wait_s
                    self._again.wait(wait_s)
                    self._sleeps_long = False
            for client in hanging:
                client.close()

    def _look_for_late(self, now: float) -> list[TeacherClient]:
        """Hedge late requests; return the connections of teachers that hang, to be closed."""
        hanging: list[TeacherClient] = []
        registry = self._registry
        for teacher in registry.all:
            pace = teacher.pace
            for flight in teacher.flights:
                if not flight.left or flight.is_given_up:
                    continue  # answered or closed; its thread is about to give it back
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
                    teacher.note_no_answer(flight.since_s)
                    hanging += registry.give_up(teacher, now)
                    break
        return hanging

    def _hedge(self, teacher: Teacher, flight: Flight, took_s: float) -> None:
        """Offer a late request to faster teachers, if no other work waits for them.

        If other work waits, only the request that the consumer needs next is offered.
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
        """Report unusable teachers; return whether to look again soon."""
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
        """Skip or raise if no teacher has answered for long.

        Returns:
            Seconds until the next look; None: a teacher is on time.
        """
        registry = self._registry
        since_s = registry.alone_since_s(now)
        if since_s is None:
            if self.has_given_up:  # what a teacher owed has ended without an answer
                self.has_given_up = False
                self._feed.resume()
            return None
        wait_s = self._look_for_refusals(since_s, now)
        if self._timeout_s is None:
            return wait_s
        left_s = since_s + self._timeout_s - now
        if left_s > 0:
            return min(wait_s, left_s)
        if self._skips:
            self._feed.skip()  # teachers are still asked: only an answer shows that one is back
        else:
            self._feed.suspend(
                NoTeacher(
                    f"no teacher{self._of} for {self._timeout_s:g} s ({registry.troubles()}); "
                    f"set_no_teacher_timeout says how long to wait and what to do then"
                )
            )
        self.has_given_up = True
        self._ready.notify()
        return _LOG_PERIOD_S

    def _look_for_refusals(self, since_s: float, now: float) -> float:
        """Raise a refusal if all teachers refuse; return seconds until the next look."""
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
