"""Get a reader's teachers from discovery, as one student for all iterations of the reader."""

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial

from distill_reader.balance.addresses import registry_addresses
from distill_reader.balance.client import FeedStats, StudentClient
from distill_reader.balance.registry.redis_registry import require_packages
from distill_reader.balance.table import Measured
from distill_reader.errors import UsageError
from distill_reader.student.batches.meter import Meter
from distill_reader.tokens import read_student_token

Notify = Callable[[Sequence[str]], None]
MakeClient = Callable[[Notify, Sequence[str]], StudentClient]

# For so long after an iteration the reader stays a student. An evaluation between two epochs, or a
# change of the pods, must not move its teachers to others and back.
LINGER_S = 60.0


class DynamicTeachers:
    """The teachers of one reader. A copy, as in a worker process, is a student of its own."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._student: _DiscoveryStudent | None = None  # None: no iteration has begun yet

    def __reduce__(self) -> tuple[object, ...]:
        return DynamicTeachers, (self._meter,)

    def source(self, servers: tuple[str, ...], service: str, require: int) -> "DynamicSource":
        """Return the TeacherSource of one iteration.

        Raises:
            UsageError: the token is wrong, or a package is missing.
        """
        addresses = registry_addresses(servers, "discovery_servers")
        require_packages(addresses)
        student = self._student
        if student is None or student.key != (servers, service):
            if student is not None:
                student.retire()
            read_student_token(os.environ)  # else only the log would say that it cannot be read
            make = partial(
                StudentClient,
                addresses,
                service,
                require=require,
                read_token=partial(read_student_token, os.environ),
                feed_stats=partial(_feed_stats, self._meter),  # must not keep this object alive
            )
            student = self._student = _DiscoveryStudent(
                (servers, service),
                lambda notify, held: make(notify=notify, held=held),
            )
            atexit.register(student.stop)
            weakref.finalize(self, student.stop, wait=False).atexit = False
        return DynamicSource(student, require)


class DynamicSource:
    """The TeacherSource of one iteration."""

    def __init__(self, student: "_DiscoveryStudent", require: int) -> None:
        self._student = student
        self._require = require
        self.notify: Notify | None = None  # None: the iteration has not begun, or is over

    def start(self, notify: Notify) -> None:
        """See TeacherSource."""
        self.notify = notify
        self._student.add(self, self._require)

    def stop(self) -> None:
        """See TeacherSource. A call of `notify` in progress finds a pool that closes."""
        self.notify = None
        self._student.remove(self)

    def why_none(self) -> str:
        """Return why there is no teacher; "": there is one."""
        return self._student.why_none()


class _DiscoveryStudent:
    """A StudentClient while iterations run, and for some time after the last one.

    The lock is not held during calls into objects that take a lock of their own.
    """

    def __init__(self, key: tuple[tuple[str, ...], str], make: MakeClient) -> None:
        self.key = key
        self._make = make
        self._pid = os.getpid()
        self._lock = threading.RLock()  # the garbage collector may end an iteration anywhere
        self._sources: set[DynamicSource] = set()
        self._client: StudentClient | None = None  # None: it is not a student now
        self._held: Sequence[str] = ()
        self._timer: threading.Timer | None = None  # None: it is in use, or is not a student
        self._is_retired = False  # the reader has another service now

    def why_none(self) -> str:
        client = self._client
        return "" if client is None else client.trouble

    def add(self, source: DynamicSource, require: int) -> None:
        """Begin an iteration. Raises: UsageError: after a fork; nobody would tell it teachers."""
        if os.getpid() != self._pid:
            raise UsageError(
                "reader: called in the parent of the process that consumes it: with discovery call "
                "it in that one, such as in __iter__ of the data set that its DataLoader reads"
            )
        with self._lock:
            self._sources.add(source)
            self._set_timer(None)
            client = self._client
            if client is None:
                client = self._make(self._notify, self._held)
                client.set_require(require)
                client.start()  # if there is no thread to be had, the next iteration tries again
                self._client = client
                return
        client.set_require(require)
        client.notify_again()

    def remove(self, source: DynamicSource) -> None:
        if os.getpid() != self._pid:
            return  # its lock may be held for ever by a thread of the parent
        lingers = True
        with self._lock:
            self._sources.discard(source)
            if self._is_retired:
                lingers = bool(self._sources)
            elif not self._sources and self._client is not None:
                timer = threading.Timer(LINGER_S, self._leave)
                timer.daemon = True
                timer.name = "edl-discovery-linger"
                self._set_timer(timer)
                try:
                    timer.start()
                except RuntimeError:  # a limit on threads
                    lingers = False
        if not lingers:
            self._leave()

    def retire(self) -> None:
        """Stop being a student once no iteration that has begun needs it."""
        with self._lock:
            self._is_retired = True
            if self._sources:
                return
        self.stop()

    def stop(self, *, wait: bool = True) -> None:
        """Stop being a student at once."""
        atexit.unregister(self.stop)
        if os.getpid() != self._pid:
            return  # a copy after fork: the thread is the parent's
        with self._lock:
            self._set_timer(None)
            client, self._client = self._client, None
        if client is not None:
            self._held = client.held
            client.stop(wait=wait)

    def _leave(self) -> None:
        with self._lock:
            if self._sources:  # an iteration began just before the timer fired
                return
            client, self._client = self._client, None
        if client is not None:
            self._held = client.held
            client.stop()

    def _notify(self, teachers: Sequence[str]) -> None:
        with self._lock:
            tells = [source.notify for source in self._sources]
        for notify in tells:
            if notify is not None:
                notify(teachers)

    def _set_timer(self, timer: threading.Timer | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer


def _feed_stats(meter: Meter) -> FeedStats:
    reading = meter.read()
    if reading is None:
        return FeedStats()
    return FeedStats(
        wait_share=reading.wait_share,
        samples_per_s=reading.samples_per_s,
        measured={
            teacher: Measured(samples_per_s=rate, busy_share=busy)
            for teacher, (rate, busy) in reading.teachers.items()
        },
        unusable=reading.unusable,
    )
