"""The teachers of one iteration: threads that take requests, ask teachers, and store answers.

There is one thread per request in flight, each with its own connection. Teachers pull work, so a
slow one gets less. The threads share the feed's lock and wait on conditions. A supervisor thread
sends late requests to a second teacher, drops teachers that hang, and reports when there is none.
"""

import itertools
import logging
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from distill_reader.backoff import backoff_s
from distill_reader.errors import (
    BadRequest,
    DistillError,
    RequestTooLarge,
    TeacherBusy,
    TeacherFailed,
    TeacherGone,
    TeacherTimeout,
    TransientFailure,
    UsageError,
)
from distill_reader.model.specs import ModelSpec
from distill_reader.model.tensors import differ_beyond_rounding
from distill_reader.student.batches.feed import Feed, Request, RequestLimits
from distill_reader.student.batches.items import unpadded
from distill_reader.student.batches.meter import Meter
from distill_reader.student.batches.tries import Blame
from distill_reader.student.cache.label_cache import LabelCache
from distill_reader.student.clients.client import Array, TeacherClient
from distill_reader.student.labels.labels import Labels
from distill_reader.student.options import Padding
from distill_reader.student.pool.pace import Pace
from distill_reader.student.pool.request_mapping import RequestMapping, is_another, versions_of
from distill_reader.student.pool.supervisor import Supervisor
from distill_reader.student.pool.teacher_registry import MOST, Flight, Teacher, TeacherRegistry
from distill_reader.student.threads import ForkSafeThread

logger = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.02
_MOST_BACKOFF_S = 0.5  # a try costs little, and a teacher that is back is found soon
_REFUSED_BACKOFF_S = 5.0  # for a teacher that answers, but refuses us
_GROW_PERIOD_S = 5.0  # after a further connection has failed
_TELL_S = 10.0  # until the log has again why a teacher cannot be reached: texts may always differ
_MOST_REST_S = 1.0  # for a teacher that is busy again and again
_FAILED_REST_S = (0.25, 4.0)  # for a teacher that fails: the first rest, and the longest
_MANY_SHAPES, _MANY_SINGLES = 8, 100  # shapes that wait; requests of one sample in a row
_TIMEOUT_LOSSES = 3  # a timeout counts as so many lost connections
# Teachers, and gateways before them, end a transfer that takes too long: ours after 20 s and more.
# What was lost after so long may have come over a slow network.
_SLOW_S = 15.0
_LEAST_BYTES = 256 << 10  # of a request, however slow
# Of the spread of an answer's values: by more a padded sample's differ not for rounding alone.
_MOST_DIFFERENCE = 0.02

_Error = TypeVar("_Error", bound=DistillError)


class _Refusal(TransientFailure):
    """A teacher that was connected does not let us in: as it, or an ingress, wants another token.

    Clients connect again by themselves where a server has ended an idle connection, with the token
    and certificates of before. Only a new client shows whether those of now are wrong.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    sent: tuple[str, ...]  # names of the fields that may be sent
    labels: Labels
    limits: RequestLimits
    no_teacher_timeout_s: float | None  # how long to wait for a teacher; None: without limit
    skips: bool  # after that time, instead of raising
    timeout_s: float | None = None  # for an answer; None: as a teacher's pace suggests
    hedges: bool = True  # whether late requests are sent to a second teacher
    # Discovery's word why it lists no teacher; it replaces unusable ones. None: a fixed list.
    why_none: Callable[[], str] | None = None
    mixes_versions: bool = False  # whether teachers of different models may answer
    padding: Padding | None = None  # None: fields are not padded
    wire_ins: tuple[tuple[str, str], ...] = ()  # fields that are sent as "uint8"; "": all that can
    cache: LabelCache | None = None  # None: labels are not cached
    name: str = ""  # of the service, where there are several


class TeacherPool:
    """The threads and connections of one service's teachers. `lock` guards this and the feed."""

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
            paces: by endpoint what earlier iterations have learned; is updated.
            meter: counts what teachers do; None: nobody reads it.
        """
        self._meter = meter or Meter()
        self._settings = settings
        self._feed = feed
        self._lock = lock
        self._ready = ready
        self._connect = connect
        self._registry = TeacherRegistry(lock, paces, time.monotonic(), why_none=settings.why_none)
        self._idle = 0  # threads of all teachers that wait for work
        self._called: Teacher | None = None  # woken for work, and not running yet
        self._is_closing = False
        self._changed = threading.Condition(lock)  # closing, or a teacher is not wanted any more
        self._supervisor = Supervisor(
            self._registry,
            feed,
            lock,
            ready,
            call=self.call,
            tend=self._tend,
            report=self._meter.set_unusable,
            hedges=settings.hedges,
            may_get_others=settings.why_none is not None,
            timeout_s=settings.no_teacher_timeout_s,
            skips=settings.skips,
            name=settings.name,
        )
        self._singles = 0  # requests of one sample, in a row
        self._has_warned = False  # of those
        self._met: tuple[str, ModelSpec] | None = None  # the first teacher and its model
        self._trusts_padding = settings.padding is None
        self._threads: set[threading.Thread] = set()
        self._numbers = itertools.count()

    # --- for the session

    def start(self) -> None:
        """Start the supervisor."""
        with self._lock:
            self._start_thread(self._supervisor.run, "edl-supervisor")

    def set_endpoints(self, endpoints: Sequence[str]) -> None:
        """Use these teachers from now on. Any thread may call this."""
        with self._lock:
            if self._is_closing:
                return
            new, leaving = self._registry.update(endpoints, time.monotonic())
            for teacher in new:
                self._start_teacher_thread(teacher)
            for teacher in leaving:
                logger.info("teacher %s is not in the list any more", teacher.endpoint)
                teacher.wake.notify_all()
            self._judge()
            self._changed.notify_all()
            self._supervisor.look()

    def call(self) -> None:
        """Wake a teacher that may take waiting work. The caller has the lock."""
        if not self._idle or self._called is not None:
            return
        now = None
        best = None
        for teacher in self._registry.wanted:
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
        """The threads that have not ended."""
        with self._lock:
            return list(self._threads)

    def close(self) -> None:
        """End connections and threads, whatever they do."""
        with self._lock:
            self._is_closing = True
            clients = [client for teacher in self._registry.all for client in teacher.clients]
            for teacher in self._registry.all:
                teacher.wake.notify_all()
            self._changed.notify_all()
            self._supervisor.close()
            self._meter.set_unusable(())
        for client in clients:
            client.close()

    # --- a teacher's thread

    def _run(self, teacher: Teacher) -> None:
        while (found := self._open(teacher)) is not None:
            client, mapping, its_round = found
            try:
                error = self._serve(teacher, client, mapping, its_round)
            finally:
                with self._lock:
                    teacher.clients.discard(client)
                client.close()
            if error is not None:
                self._lose(teacher, its_round, error)
            with self._lock:
                if not self._reopens(teacher):
                    return

    def _open(self, teacher: Teacher) -> tuple[TeacherClient, RequestMapping, int] | None:
        """Wait for a connection and return it; None: this thread is not needed any more."""
        while True:
            with self._lock:
                pause_s = teacher.opens_after_s - time.monotonic()
                if pause_s > 0:  # connections were lost repeatedly, with no answer in between
                    pause_s *= random.uniform(0.8, 1.2)
                    self._changed.wait_for(lambda: self._is_over(teacher), pause_s)
                    teacher.opens_after_s = 0.0
                if self._is_over(teacher):
                    teacher.threads -= 1
                    return None
                its_round = teacher.round
            client = None
            try:
                client = self._connect(teacher.endpoint)
                settings = self._settings
                mapping = RequestMapping(
                    teacher.endpoint,
                    client.spec,
                    settings.sent,
                    settings.labels,
                    settings.wire_ins,
                    settings.padding,
                )
                if settings.cache is not None:
                    settings.cache.meet(teacher.endpoint, client.spec, mapping.taken)
                with self._lock:
                    if not self._is_over(teacher) and its_round == teacher.round:
                        self._meet(teacher, client.spec)
                        self._feed.expect(mapping.sample_bytes)
                        self._set_connected(teacher, client)
                        return client, mapping, its_round
            except DistillError as error:
                if client is not None:
                    client.close()
                with self._lock:
                    is_outdated = its_round != teacher.round  # as its token may be
                if not is_outdated and not self._stays_after(teacher, error):
                    return None
                continue
            client.close()

    def _meet(self, teacher: Teacher, spec: ModelSpec) -> None:
        """Check that a teacher serves the same model as the first one of this iteration.

        The caller has the lock, and keeps it until the teacher is connected.

        Raises:
            BadRequest: it serves another model.
        """
        if self._settings.mixes_versions:
            return
        if self._met is None or not (self._feed.has_answers or self._registry.connected):
            self._met = teacher.endpoint, spec
        endpoint, first = self._met
        predicts = self._settings.labels.predicts
        differs = is_another(first, spec, predicts)
        its, that_of_first = versions_of(spec, first, predicts)
        if differs is None and teacher.failures == 0 and not teacher.clients:
            logger.warning(
                "teacher %s serves %s, and %s %s: whether that is the same, they do not say",
                teacher.endpoint,
                its,
                endpoint,
                that_of_first,
            )
        if differs:
            raise BadRequest(
                f"{teacher.endpoint}: serves {its}; this iteration began with {that_of_first} of "
                f"{endpoint}, and does not mix them: serve one of them everywhere, or say "
                "set_mixed_versions(True)"
            )

    def _stays_after(self, teacher: Teacher, error: DistillError) -> bool:
        """Note a failed connection and wait; return whether to try again."""
        with self._lock:
            if teacher.threads > 1:  # another thread goes on to look for the teacher
                teacher.threads -= 1
                teacher.grows_after_s = time.monotonic() + _GROW_PERIOD_S
                return False
            teacher.failures += 1
            now, is_passing = time.monotonic(), isinstance(error, TransientFailure)
            is_told = is_passing and now < teacher.told_s + _TELL_S
            if str(error) != str(teacher.trouble) and not is_told:
                teacher.told_s = now
                level = logging.INFO if is_passing else logging.WARNING
                logger.log(level, "teacher %s", teacher.about(error))
            teacher.trouble = error
            self._judge()
            self._supervisor.look()
            delay_s = backoff_s(teacher.failures, _FIRST_BACKOFF_S, _MOST_BACKOFF_S)
            if isinstance(error, TeacherBusy):
                delay_s = max(delay_s, min(error.delay_s, _MOST_REST_S))
            elif not isinstance(error, TransientFailure):
                delay_s = _REFUSED_BACKOFF_S
            delay_s *= random.uniform(0.8, 1.2)  # many students lost the same teacher
            self._changed.wait_for(lambda: self._is_over(teacher), delay_s)
            return True

    def _serve(
        self, teacher: Teacher, client: TeacherClient, mapping: RequestMapping, its_round: int
    ) -> TransientFailure | None:
        """Ask until the connection fails; return the error. None: it is not needed any more."""
        while True:
            with self._lock:
                flight = self._next(teacher, its_round)
            if flight is None:
                return None
            blame = None
            try:
                self._ask(teacher, client, mapping, flight)
            except TeacherFailed as error:
                blame = Blame(text=teacher.about(error), failed=error.tries)
                self._rest(teacher, flight, error)
            except TeacherBusy as error:
                self._rest(teacher, flight, error)
            except TransientFailure as error:
                blame = self._blame_for_loss(teacher, flight, error)
                return _without_frames(error)
            finally:
                self._land(teacher, flight, blame)
            del flight  # frees its arrays while this thread waits for the next one

    def _ask(
        self, teacher: Teacher, client: TeacherClient, mapping: RequestMapping, flight: Flight
    ) -> None:
        """Ask until all of `flight` is answered or refused. Raises: TransientFailure."""
        while flight.left:
            request = flight.request
            timeout_s = self._timeout_s(teacher, request)
            try:
                answer = _predict(client, mapping.feeds(request), mapping.columns, timeout_s)
                columns = mapping.outputs(answer, request.samples)
                outputs = mapping.restore(columns)
            except BadRequest as error:
                with self._lock:
                    self._refuse(teacher, flight, mapping.named(error))
                continue
            if not self._trusts_padding:
                self._check_padding(client, mapping, request, columns, timeout_s)
            cache = self._settings.cache
            if cache is not None:
                with self._lock:
                    is_unshared = request.is_unshared  # else it may have been altered on its way
                if is_unshared:
                    # Before the consumer can change the arrays; only once if it is hedged.
                    cache.keep(request, columns, mapping.served)
            with self._lock:
                now = time.monotonic()
                teacher.pace.answered(request.samples, now - flight.since_s, now)
                if teacher.note_answer(now) or self._supervisor.has_given_up:
                    self._resume()
                flight.answered += request.samples
                flight.advance([], now)
                self._feed.answered(request, outputs, teacher.endpoint)
                if self._feed.is_ready:
                    self._ready.notify()
                self._grow(teacher)

    def _check_padding(
        self,
        client: TeacherClient,
        mapping: RequestMapping,
        request: Request,
        columns: Sequence[Array],
        timeout_s: float,
    ) -> None:
        """Ask for a sample as it was before it was padded, too: its predictions must be the same.

        Raises:
            UsageError: they are not.
            TransientFailure: the connection ended.
        """
        padding = self._settings.padding
        assert padding is not None
        padded = [self._settings.sent.index(name) for name, _ in padding.values]
        at = 0
        for piece in request.pieces:
            bare = unpadded(piece, padded)
            if bare is not None:
                break
            at += piece.samples
        else:
            return
        try:
            asked = mapping.feeds(Request([bare], bare.signature, 1))
            answer = _predict(client, asked, mapping.columns, timeout_s)
            alone = mapping.outputs(answer, 1)
        except (BadRequest, TeacherFailed):
            self._trusts_padding = True  # the model takes padded samples alone
            return
        except (TeacherGone, TeacherTimeout):
            self._trusts_padding = True  # it may even end by that: not again
            raise
        for name, column, other in zip(mapping.columns, columns, alone, strict=True):
            own = other[0]
            row = column[at][tuple(map(slice, own.shape))]  # of an output with a value per position
            if differ_beyond_rounding(row, own, column, _MOST_DIFFERENCE):
                raise UsageError(
                    f"padding: {mapping.endpoint}: output {name}: a padded sample gets another "
                    "answer than the sample as it is: give the model a mask as a further field, "
                    "with padding value 0, or leave out set_padding"
                )
        self._trusts_padding = True

    def _timeout_s(self, teacher: Teacher, request: Request) -> float:
        """Return how long to wait for an answer, given the requests before it."""
        pace, owed = teacher.pace, max(1, len(teacher.flights))
        if self._settings.timeout_s is not None:
            return self._settings.timeout_s * owed
        timeout_s = pace.timeout_s(request.samples)
        return timeout_s if pace.is_known else timeout_s * owed

    def _refuse(self, teacher: Teacher, flight: Flight, error: BadRequest) -> None:
        """Let others answer a refused request, or ask it in parts. The caller has the lock."""
        request, now = flight.request, time.monotonic()
        singles: list[Request] = []
        is_cut = False
        if isinstance(error, RequestTooLarge):
            is_cut = self._feed.too_large(request, teacher.endpoint)
            if is_cut:
                teacher.most_bytes = min(teacher.most_bytes, max(1, request.size_bytes // 2))
                logger.info("teacher %s", teacher.about(f"{error}; requests are smaller now"))
        if not is_cut:
            if self._is_teacher_at_fault(teacher, request, now):
                for each in reversed(flight.left):
                    self._feed.give_back(each, teacher.endpoint)
                flight.left = []
                self._rest(teacher, flight, error)
                self.call()
                return
            blamed = _without_frames(error)
            singles = self._feed.refused(request, blamed, teacher.endpoint, now)
        flight.advance(singles, now)
        self._judge()
        self._ready.notify()

    def _is_teacher_at_fault(self, teacher: Teacher, request: Request, now: float) -> bool:
        """Note a refusal; return whether the teacher is at fault, and not the samples.

        It is if it refused another request before and has answered nothing since, and another
        teacher has answered since then. If all teachers refuse, the last that answered is believed.
        """
        if teacher.refused_s is None:
            teacher.refused_s = now
            return False
        return all(piece.tries is None for piece in request.pieces) and any(
            other.answered_s > teacher.refused_s
            for other in self._registry.wanted
            if other is not teacher and other.is_able(now)
        )

    def _blame_for_loss(
        self, teacher: Teacher, flight: Flight, error: TransientFailure
    ) -> Blame | None:
        """Return what a lost connection tells about the request; None: nothing."""
        is_late = isinstance(error, TeacherTimeout)
        with self._lock:
            if flight.is_given_up or self._is_over(teacher) or not flight.left:
                return None  # closed because another request's connection was lost
            took_s = time.monotonic() - flight.since_s
            if took_s >= _SLOW_S:
                self._ask_for_less(teacher, flight.request, took_s)
            if is_late:
                teacher.pace.overdue(flight.request.samples, took_s)
            if is_late or teacher.failures:
                teacher.note_no_answer(flight.since_s)
        if isinstance(error, _Refusal):
            return None
        return Blame(text=teacher.about(error), lost=_TIMEOUT_LOSSES if is_late else 1)

    def _ask_for_less(self, teacher: Teacher, request: Request, took_s: float) -> None:
        """Send smaller requests if one that was lost took longer than usual. Under the lock."""
        expected_s = teacher.pace.expected_s(request.samples)
        least = max(_LEAST_BYTES, request.size_bytes // 2)
        if (expected_s is None or took_s > expected_s) and least < request.size_bytes:
            teacher.most_bytes = min(teacher.most_bytes, least)
            logger.info(
                "teacher %s: no answer to %d bytes in %.0f s; requests are smaller now",
                teacher.endpoint,
                request.size_bytes,
                took_s,
            )

    def _land(self, teacher: Teacher, flight: Flight, blame: Blame | None) -> None:
        """Give back requests without an answer; `blame` is for the one that was asked last."""
        with self._lock:
            teacher.flights.remove(flight)
            self._meter.answered(teacher.endpoint, flight.answered)
            now = time.monotonic()
            for index, request in reversed(list(enumerate(flight.left))):
                its = blame if index == 0 else None
                self._feed.give_back(request, teacher.endpoint, its, now)
            if flight.left:
                self._judge()
                self.call()

    def _judge(self) -> None:
        """Find teachers for pieces in trouble, or give up on them. The caller has the lock."""
        if self._feed.has_troubled:
            now = time.monotonic()
            registry = self._registry
            self._feed.judge(registry.able(now), registry.hoped_for(now), now)
            if self._feed.is_ready:
                self._ready.notify()
            self._supervisor.look_soon()
            self.call()

    def _tend(self, now: float) -> bool:
        """Do what is due by time alone; return whether more will be. For the supervisor."""
        self._judge()
        lacking = [teacher for teacher in self._registry.wanted if not teacher.threads]
        for teacher in lacking:
            if now >= teacher.grows_after_s:
                self._start_teacher_thread(teacher)
        return bool(lacking)

    def _next(self, teacher: Teacher, its_round: int) -> Flight | None:
        """Wait for a request; None: the connection is not needed. The caller has the lock."""
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
                if not self._feed.has_waiting_for(teacher.endpoint):
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
        """Note that the called teacher runs; call the next one if more work waits."""
        if self._called is teacher:
            self._called = None
        if self._idle and self._called is None:
            self.call()

    def _may_take(self, teacher: Teacher) -> bool:
        """Return whether to ask this teacher now.

        A teacher that has a request only gets another full one, so that waiting pieces join.
        """
        feed, in_flight = self._feed, len(teacher.flights)
        if feed.has_hedge(teacher.endpoint):
            return True
        if not feed.has_waiting_for(teacher.endpoint) or in_flight >= teacher.pace.depth:
            return False
        limits = self._settings.limits
        return (
            in_flight == 0
            or feed.is_blocked
            or feed.is_ended
            or feed.has_troubled
            or feed.waiting_bytes >= min(limits.join_bytes, teacher.most_bytes)
            or feed.waiting_samples
            >= min(teacher.pace.join_samples, limits.samples or MOST, teacher.most_samples)
        )

    def _take(self, teacher: Teacher) -> Request | None:
        if not self._may_take(teacher):
            return None
        request = self._feed.take_hedge(teacher.endpoint)
        if request is not None:
            return request
        limits = self._settings.limits
        request = self._feed.take(
            RequestLimits(
                join_bytes=min(limits.join_bytes, teacher.most_bytes),
                most_bytes=min(limits.most_bytes, teacher.most_bytes),
                samples=min(limits.samples or MOST, teacher.most_samples),
                join_samples=teacher.pace.join_samples if limits.samples is None else None,
            ),
            teacher.endpoint,
        )
        if request is not None:
            self._note_size(request)
        return request

    def _note_size(self, request: Request) -> None:
        """Log once if samples persistently do not share requests."""
        if request.samples > 1 or self._feed.shapes < _MANY_SHAPES:
            self._singles = 0
            return
        self._singles += 1
        if self._singles == _MANY_SINGLES and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "samples are sent one by one, because hardly any two have the same shape: "
                "set_padding lets them share requests"
            )

    # --- the state of teachers; in their threads

    def _rest(
        self, teacher: Teacher, flight: Flight, error: TeacherBusy | TeacherFailed | BadRequest
    ) -> None:
        """Leave a teacher alone that is busy, fails, or refuses what others take.

        Each rest in a row is longer.
        """
        with self._lock:
            if isinstance(error, TeacherBusy):
                rest_s = min(max(error.delay_s, 2 * teacher.rest_s), _MOST_REST_S)
            else:
                first_s, most_s = _FAILED_REST_S
                rest_s = min(max(first_s, 4 * teacher.rest_s), most_s)
            teacher.rest_s = rest_s
            teacher.rest_until_s = time.monotonic() + rest_s
            is_new = teacher.note_no_answer(flight.since_s)
            if is_new and not isinstance(error, TeacherBusy):
                logger.warning("teacher %s", teacher.about(error))
            elif rest_s == _MOST_REST_S and str(teacher.trouble) != str(error):
                logger.info("teacher %s", teacher.about(error))
            teacher.trouble = _without_frames(error)
            teacher.pace.starved()

    def _lose(self, teacher: Teacher, its_round: int, error: DistillError) -> None:
        """Give up all connections to a teacher after one has failed: it is probably gone."""
        with self._lock:
            if teacher.round != its_round or self._is_over(teacher):
                return
            logger.warning("lost teacher %s", teacher.about(error))
            # The second time it was a new client.
            is_final = isinstance(error, _Refusal) and teacher.failures > 0
            teacher.trouble = UsageError(str(error)) if is_final else error
            clients = self._registry.give_up(teacher, time.monotonic())
            self._judge()
            self._supervisor.look()
        for client in clients:
            client.close()

    def _reopens(self, teacher: Teacher) -> bool:
        """Return whether a thread whose connection ended opens another; only the last one does."""
        if self._is_over(teacher) or teacher.threads > 1:
            teacher.threads -= 1
            return False
        return True

    def _is_over(self, teacher: Teacher) -> bool:
        return self._is_closing or not teacher.is_wanted

    def _set_connected(self, teacher: Teacher, client: TeacherClient) -> None:
        teacher.clients.add(client)
        bounds = client.bounds
        teacher.most_bytes = min(teacher.most_bytes, bounds.most_bytes or MOST)
        teacher.most_samples = min(teacher.most_samples, bounds.most_samples or MOST)
        if not teacher.is_connected:
            logger.info("teacher %s is connected by %s", teacher.endpoint, client.protocol)
            teacher.is_connected = True
            if not teacher.is_fruitless:  # else only an answer shows that it works again
                teacher.trouble = teacher.absent_since_s = None
                self._resume()
            self._judge()
        self._grow(teacher)

    def _resume(self) -> None:
        self._supervisor.has_given_up = False
        self._feed.resume()

    def _grow(self, teacher: Teacher) -> None:
        if teacher.threads < teacher.pace.depth and time.monotonic() >= teacher.grows_after_s:
            self._start_teacher_thread(teacher)

    def _start_teacher_thread(self, teacher: Teacher) -> None:
        """Add a connection; if the system allows no further thread, try again later."""
        teacher.threads += 1
        name = f"edl-teacher-{teacher.endpoint}-{next(self._numbers)}"
        try:
            self._start_thread(lambda: self._run(teacher), name)
        except RuntimeError as error:  # a limit on processes
            teacher.threads -= 1
            teacher.grows_after_s = time.monotonic() + _GROW_PERIOD_S
            logger.warning(
                "teacher %s: has %d connections, and can get no more now: %s",
                teacher.endpoint,
                teacher.threads,
                error,
            )
            if not teacher.threads:
                teacher.trouble = TeacherGone(f"{teacher.endpoint}: no thread to ask it: {error}")

    def _start_thread(self, run: Callable[[], None], name: str) -> None:
        def run_and_leave() -> None:
            try:
                run()
            except Exception as error:  # noqa: BLE001  a defect: the consumer must not wait for it
                with self._lock:
                    self._feed.fail(error)
                    self._ready.notify_all()
            finally:
                with self._lock:
                    self._threads.discard(thread)

        thread = ForkSafeThread(target=run_and_leave, name=name, daemon=True)
        thread.start()  # it cannot remove itself before it is added: the caller has the lock
        self._threads.add(thread)


def _predict(
    client: TeacherClient,
    feeds: Mapping[str, Sequence[Array]],
    columns: Sequence[str],
    timeout_s: float,
) -> dict[str, Array]:
    """Return the answer. Raises: TransientFailure, BadRequest."""
    try:
        return client.predict(feeds, columns, timeout_s=timeout_s)
    except UsageError as error:
        raise _Refusal(str(error)) from error


def _without_frames(error: _Error) -> _Error:
    """Return the error without its traceback.

    The frames hold the request's arrays and the connection's memory. A frame that keeps the error
    would keep itself alive.
    """
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
