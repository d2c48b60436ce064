"""The teachers of one iteration: threads that take requests, ask, and bring answers back.

One thread per request in flight, each with a connection of its own. Teachers pull: a slow one gets
less by itself. All of them share the feed's lock, and wait without looking; one supervisor thread
sends late requests to a second teacher, drops those that hang, and says when there is none.
"""

import itertools
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from distill_reader.errors import (
    BadRequest,
    DistillError,
    Retryable,
    TeacherBusy,
)
from distill_reader.student.asking import Asking
from distill_reader.student.client import TeacherClient
from distill_reader.student.feed import Feed, Limits, Request
from distill_reader.student.label_cache import LabelCache
from distill_reader.student.labels import Labels
from distill_reader.student.meter import Meter
from distill_reader.student.pace import Pace
from distill_reader.student.roster import Flight, Roster, Teacher
from distill_reader.student.supervisor import Supervisor

logger = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.02
_MOST_BACKOFF_S = 0.5  # a refused connection costs little, and a teacher that is back is found soon
_REFUSED_BACKOFF_S = 5.0  # it answers, but not us
_GROW_PERIOD_S = 5.0  # behind a further connection that failed
_MOST_REST_S = 1.0  # of a teacher that says again and again that it is busy


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    sent: tuple[str, ...]  # names of the fields that may be sent
    labels: Labels
    limits: Limits
    no_teacher_timeout_s: float | None  # None: for ever
    skips: bool  # behind that time, instead of raising
    wire_ins: tuple[tuple[str, str], ...] = ()  # field and dtype of what is sent in another type
    cache: LabelCache | None = None  # None: labels are not kept
    name: str = ""  # of the service, where there are several


class TeacherPool:
    """See the module. `lock` guards `feed`; conditions on it tell the others what happened."""

    def __init__(
        self,
        settings: PoolSettings,
        feed: Feed,
        lock: threading.RLock,
        ready: threading.Condition,
        *,
        connect: Callable[[str], TeacherClient],
        paces: dict[str, Pace],
        meter: Meter | None = None,
    ) -> None:
        """
        Args:
            ready: on `lock`; notified when the consumer may find something.
            paces: by endpoint what earlier iterations learned; is kept up.
            meter: counts what teachers do; None: nobody wants to know.
        """
        self._meter = meter or Meter()
        self._settings = settings
        self._feed = feed
        self._lock = lock
        self._ready = ready
        self._connect = connect
        self._roster = Roster(lock, paces, time.monotonic())
        self._idle = 0  # threads of all teachers that wait for work
        self._called: Teacher | None = None  # woken for work, and has not come yet
        self._is_closing = False
        self._changed = threading.Condition(lock)  # closing, or a teacher is not wanted any more
        self._supervisor = Supervisor(
            self._roster,
            feed,
            lock,
            ready,
            call=self.call,
            timeout_s=settings.no_teacher_timeout_s,
            skips=settings.skips,
            name=settings.name,
        )
        self._threads: set[threading.Thread] = set()
        self._numbers = itertools.count()

    # --- for the session

    def start(self) -> None:
        """Start the supervisor."""
        with self._lock:
            self._start_thread(self._supervisor.run, "edl-supervisor")

    def set_endpoints(self, endpoints: Sequence[str]) -> None:
        """Use these teachers from now on. From any thread."""
        with self._lock:
            if self._is_closing:
                return
            new, leaving = self._roster.update(endpoints, time.monotonic())
            for teacher in new:
                self._start_teacher_thread(teacher)
            for teacher in leaving:
                logger.info("teacher %s is not in the list any more", teacher.endpoint)
                teacher.wake.notify_all()
            self._changed.notify_all()
            self._supervisor.look()

    def call(self) -> None:
        """Wake a teacher that may take what waits. The caller has the lock."""
        if not self._idle or self._called is not None:
            return
        now = None
        best = None
        for teacher in self._roster.wanted:
            if not teacher.idle or not self._may_take(teacher):
                continue
            if teacher.rest_until_s:
                now = now or time.monotonic()
                if teacher.rest_until_s > now:
                    continue
            if best is None or teacher.pace.sample_s < best.pace.sample_s:
                best = teacher
        if best is not None:
            self._called = best
            best.wake.notify()

    @property
    def threads(self) -> list[threading.Thread]:
        """Those that have not ended."""
        with self._lock:
            return list(self._threads)

    def close(self) -> None:
        """Let connections and threads end, whatever they do."""
        with self._lock:
            self._is_closing = True
            clients = [client for teacher in self._roster.all for client in teacher.clients]
            for teacher in self._roster.all:
                teacher.wake.notify_all()
            self._changed.notify_all()
            self._supervisor.close()
        for client in clients:
            client.close()

    # --- a teacher's thread

    def _run(self, teacher: Teacher) -> None:
        while (found := self._open(teacher)) is not None:
            client, asking, its_round = found
            try:
                error = self._serve(teacher, client, asking, its_round)
            finally:
                with self._lock:
                    teacher.clients.discard(client)
                client.close()
            if error is not None:
                self._lose(teacher, its_round, error)
            with self._lock:
                if not self._reopens(teacher):
                    return

    def _open(self, teacher: Teacher) -> tuple[TeacherClient, Asking, int] | None:
        """Return a connection, for which it may wait long; None: this thread is not needed."""
        while True:
            with self._lock:
                if self._is_over(teacher):
                    teacher.threads -= 1
                    return None
                its_round = teacher.round
            client = None
            try:
                client = self._connect(teacher.endpoint)
                settings = self._settings
                asking = Asking(
                    teacher.endpoint,
                    client.spec,
                    settings.sent,
                    settings.labels,
                    settings.wire_ins,
                )
                if settings.cache is not None:
                    settings.cache.meet(teacher.endpoint, client.spec)
            except DistillError as error:
                if client is not None:
                    client.close()
                if not self._stays_after(teacher, error):
                    return None
                continue
            with self._lock:
                if not self._is_over(teacher) and its_round == teacher.round:
                    teacher.clients.add(client)
                    self._set_connected(teacher, client)
                    return client, asking, its_round
            client.close()

    def _stays_after(self, teacher: Teacher, error: DistillError) -> bool:
        """Note a failed connection, and wait; return whether to try again."""
        with self._lock:
            if teacher.threads > 1:  # the others will do, and one of them looks for the teacher
                teacher.threads -= 1
                teacher.grows_after_s = time.monotonic() + _GROW_PERIOD_S
                return False
            teacher.failures += 1
            if str(error) != str(teacher.trouble):
                logger.log(
                    logging.WARNING if not isinstance(error, Retryable) else logging.INFO,
                    "teacher %s",
                    teacher.about(error),
                )
            teacher.trouble = error
            self._supervisor.look()
            delay_s = min(_FIRST_BACKOFF_S * 2 ** min(teacher.failures, 10), _MOST_BACKOFF_S)
            if isinstance(error, TeacherBusy):
                delay_s = max(delay_s, min(error.delay_s, _MOST_REST_S))
            elif not isinstance(error, Retryable):
                delay_s = _REFUSED_BACKOFF_S
            delay_s *= random.uniform(0.8, 1.2)  # many students lost the same teacher
            self._changed.wait_for(lambda: self._is_over(teacher), delay_s)
            return True

    def _serve(
        self, teacher: Teacher, client: TeacherClient, asking: Asking, its_round: int
    ) -> Retryable | None:
        """Ask until the connection fails; return how. None: it is not needed any more."""
        while True:
            with self._lock:
                flight = self._next(teacher, its_round)
            if flight is None:
                return None
            try:
                self._ask(teacher, client, asking, flight)
            except TeacherBusy as error:
                self._rest(teacher, error)
            except Retryable as error:
                return _without_frames(error)
            finally:
                self._land(teacher, flight)
            del flight  # nor its arrays, while this thread waits for the next one

    def _ask(self, teacher: Teacher, client: TeacherClient, asking: Asking, flight: Flight) -> None:
        """Have all of `flight` answered or refused. Raises: Retryable."""
        while flight.left:
            request = flight.request
            timeout_s = teacher.pace.timeout_s(request.samples)
            try:
                answer = client.predict(asking.feeds(request), asking.columns, timeout_s=timeout_s)
                columns = asking.outputs(answer, request.samples)
                outputs = asking.restore(columns)
            except BadRequest as error:
                with self._lock:
                    singles = self._feed.refused(request, asking.named(error), teacher.endpoint)
                    flight.settled(singles, time.monotonic())
                    self._ready.notify()
                continue
            cache = self._settings.cache
            if cache is not None and not request.is_answered:
                # Before the consumer has them, who may work in place; of a hedge, once.
                cache.keep(request, columns, asking.served)
            with self._lock:
                now = time.monotonic()
                teacher.pace.answered(request.samples, now - flight.since_s, now)
                teacher.failures = 0
                teacher.rest_s = 0.0
                flight.answered += request.samples
                flight.settled([], now)
                self._feed.answered(request, outputs, teacher.endpoint)
                if self._feed.is_ready:
                    self._ready.notify()
                self._grow(teacher)

    def _land(self, teacher: Teacher, flight: Flight) -> None:
        with self._lock:
            teacher.flights.remove(flight)
            self._meter.answered(teacher.endpoint, flight.answered)
            for request in reversed(flight.left):
                self._feed.give_back(request, teacher.endpoint)
            if flight.left:
                self.call()

    def _next(self, teacher: Teacher, its_round: int) -> Flight | None:
        """Wait for a request; None: this connection is not needed. The caller has the lock."""
        while True:
            if self._is_over(teacher) or teacher.round != its_round:
                self._pass_on(teacher)
                return None
            now = time.monotonic()
            wait_s = teacher.rest_until_s - now if teacher.rest_until_s else 0.0
            if wait_s <= 0:
                teacher.rest_until_s = 0.0
                request = self._take(teacher)
                self._pass_on(teacher)
                if request is not None:
                    flight = Flight(request, now)
                    teacher.flights.append(flight)
                    self._meter.asked(teacher.endpoint)
                    self._supervisor.look_soon()
                    return flight
                if not self._feed.has_waiting:
                    teacher.pace.starved()
            else:
                self._pass_on(teacher)
            teacher.idle += 1
            self._idle += 1
            try:
                teacher.wake.wait(wait_s if wait_s > 0 else None)
            finally:
                teacher.idle -= 1
                self._idle -= 1

    def _pass_on(self, teacher: Teacher) -> None:
        """Whoever was called has come; call the next one, if more waits."""
        if self._called is teacher:
            self._called = None
        if self._idle and self._called is None:
            self.call()

    def _may_take(self, teacher: Teacher) -> bool:
        """Whether it is worth asking this teacher now.

        Beside a request that it has, only another full one is: what waits meanwhile joins.
        """
        feed, in_flight = self._feed, len(teacher.flights)
        if feed.has_hedge(teacher.endpoint):
            return True
        if not feed.has_waiting or in_flight >= teacher.pace.depth:
            return False
        limits = self._settings.limits
        return (
            in_flight == 0
            or feed.is_blocked
            or feed.is_ended
            or feed.waiting_bytes >= limits.join_bytes
            or feed.waiting_samples >= min(teacher.pace.join_samples, limits.samples or 1 << 30)
        )

    def _take(self, teacher: Teacher) -> Request | None:
        if not self._may_take(teacher):
            return None
        request = self._feed.take_hedge(teacher.endpoint)
        if request is not None:
            return request
        limits = self._settings.limits
        return self._feed.take(
            Limits(
                join_bytes=limits.join_bytes,
                most_bytes=limits.most_bytes,
                samples=limits.samples,
                join_samples=teacher.pace.join_samples if limits.samples is None else None,
            ),
            teacher.endpoint,
        )

    # --- what becomes of teachers; in their threads

    def _rest(self, teacher: Teacher, error: TeacherBusy) -> None:
        with self._lock:
            teacher.rest_s = min(max(error.delay_s, 2 * teacher.rest_s), _MOST_REST_S)
            teacher.rest_until_s = time.monotonic() + teacher.rest_s
            if teacher.rest_s == _MOST_REST_S:
                logger.info("teacher %s", teacher.about(error))
            teacher.pace.starved()

    def _lose(self, teacher: Teacher, its_round: int, error: DistillError) -> None:
        """Give up all connections to a teacher of which one failed: it is likely gone."""
        with self._lock:
            if teacher.round != its_round or self._is_over(teacher):
                return
            logger.warning("lost teacher %s", teacher.about(error))
            teacher.trouble = error
            clients = self._roster.give_up(teacher, time.monotonic())
            self._supervisor.look()
        for client in clients:
            client.close()

    def _reopens(self, teacher: Teacher) -> bool:
        """Whether the thread whose connection ended is to open one: the last one is."""
        if self._is_over(teacher) or teacher.threads > 1:
            teacher.threads -= 1
            return False
        return True

    def _is_over(self, teacher: Teacher) -> bool:
        return self._is_closing or not teacher.is_wanted

    def _set_connected(self, teacher: Teacher, client: TeacherClient) -> None:
        if not teacher.is_connected:
            logger.info("teacher %s is connected by %s", teacher.endpoint, client.protocol)
            teacher.is_connected = True
            teacher.trouble = None
            self._feed.resume()
        self._grow(teacher)

    def _grow(self, teacher: Teacher) -> None:
        if teacher.threads < teacher.pace.depth and time.monotonic() >= teacher.grows_after_s:
            self._start_teacher_thread(teacher)

    def _start_teacher_thread(self, teacher: Teacher) -> None:
        teacher.threads += 1
        name = f"edl-teacher-{teacher.endpoint}-{next(self._numbers)}"
        self._start_thread(lambda: self._run(teacher), name)

    def _start_thread(self, run: Callable[[], None], name: str) -> None:
        def run_and_leave() -> None:
            try:
                run()
            except Exception as error:  # noqa: BLE001  a defect: nobody may wait for this thread
                with self._lock:
                    self._feed.fail(error)
                    self._ready.notify_all()
            finally:
                with self._lock:
                    self._threads.discard(thread)

        thread = threading.Thread(target=run_and_leave, name=name, daemon=True)
        self._threads.add(thread)
        thread.start()


def _without_frames(error: Retryable) -> Retryable:
    """Return it without where it came through: those frames hold the request's arrays and the
    memory of the connection, and the frame that keeps the error would keep itself alive."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
