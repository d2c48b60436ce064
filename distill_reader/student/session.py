"""One iteration of a reader: a thread runs the user's generator, the pool asks the teachers.

    generator's thread -> Feed -> teachers' threads -> Feed -> consumer (the caller's thread)

Nobody looks whether something has come: each waits on a condition, and all of these share one lock.
"""

import atexit
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from distill_reader.errors import ReaderError, UsageError
from distill_reader.student.client import TeacherClient
from distill_reader.student.feed import Feed
from distill_reader.student.items import Item, Kind
from distill_reader.student.meter import Meter
from distill_reader.student.pace import Pace
from distill_reader.student.pool import PoolSettings, TeacherPool
from distill_reader.student.source import TeacherSource

logger = logging.getLogger(__name__)

_GENERATOR_CLOSE_S = 5.0
_TEACHERS_CLOSE_S = 1.0  # only one that connects to a host that is silent takes longer
_POP_PART = 16  # the consumer takes up to this part of the bound on memory at once


class Session:
    """Made in the process and by the thread that consumes it."""

    def __init__(
        self,
        generator: Any,
        kind: Kind,
        source: TeacherSource,
        settings: PoolSettings,
        *,
        max_bytes: int,
        connect: Callable[[str], TeacherClient],
        paces: dict[str, Pace],
        meter: Meter | None = None,
    ) -> None:
        """Start reading ahead.

        Args:
            generator: the user's: called for an iterator, or iterated over.
            meter: counts how the consumer is fed; None: nobody wants to know.
        """
        self._meter = meter or Meter()
        self._is_waiting = False  # the consumer
        self._generator = generator
        self._kind = kind
        self._source = source
        self._pop_bytes = max(1, max_bytes // _POP_PART)
        self._pid = os.getpid()
        # Reentrant: the garbage collector may call `close` in a thread that holds it.
        lock = threading.RLock()
        self._lock = lock
        self._ready = threading.Condition(lock)  # for the consumer
        self._room = threading.Condition(lock)  # for the generator
        self._is_closing = False
        self._feed = Feed(max_bytes)
        self._pool = TeacherPool(
            settings, self._feed, lock, self._ready, connect=connect, paces=paces, meter=self._meter
        )
        self._thread = threading.Thread(target=self._read, name="edl-reader", daemon=True)
        # A thread amid the generator's code (the framework's, perhaps) spoils a process's end.
        atexit.register(self.close)
        try:
            self._pool.start()
            source.start(self._pool.set_endpoints)
            self._thread.start()
        except BaseException:
            self.close()
            raise

    def results(self) -> Iterator[Any]:
        """Yield what the user gets, in order; once.

        Raises:
            ReaderError: the generator failed; its exception is the cause.
            NoTeacher, DistillError: no teacher will answer.
        """
        kind = self._kind
        while True:
            items = self._take()
            if items is None:
                return
            items.reverse()
            while items:
                item = items.pop()
                if item.answers or not item.samples:
                    yield kind.result(item)
                else:
                    yield kind.without_predictions(item)

    def close(self) -> None:
        """End threads and connections, whatever they do; again: nothing."""
        if os.getpid() != self._pid:
            return  # a fork's copy: its threads and locks belong to the parent
        atexit.unregister(self.close)
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
            self._room.notify_all()
            self._ready.notify_all()
        self._source.stop()
        self._pool.close()
        if threading.current_thread() in (self._thread, *self._pool.threads):
            return  # by the garbage collector
        deadline_s = time.monotonic() + _TEACHERS_CLOSE_S
        for thread in self._pool.threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        if self._thread.ident is not None:
            self._thread.join(_GENERATOR_CLOSE_S)
            if self._thread.is_alive():
                logger.warning(
                    "the reader's generator has not come back within %g s; its thread ends when "
                    "it does",
                    _GENERATOR_CLOSE_S,
                )
        with self._lock:
            self._feed.clear()  # up to all the memory allowed, and the collector may come late

    # --- the consumer

    def _take(self) -> list[Item] | None:
        """Return the next items, for which it waits; None: all were taken."""
        if os.getpid() != self._pid:
            raise UsageError(
                "reader: iterated over in a fork of the process that began to; call the reader in "
                "the process that consumes it"
            )
        feed = self._feed
        with self._lock:
            items = feed.pop(self._pop_bytes)
            self._room.notify()
            while not items:
                if feed.is_done or self._is_closing:
                    return None
                if feed.is_incomplete:  # else the generator is what is waited for
                    self._meter.waits()
                self._is_waiting = True
                self._ready.wait()
                self._is_waiting = False
                self._meter.waits_no_more()
                items = feed.pop(self._pop_bytes)
            self._meter.consumed(sum([item.samples for item in items]))
        return items

    # --- the generator's thread

    def _read(self) -> None:
        error: Exception | None = None
        items: Iterator[Any] | None = None
        try:
            generator = self._generator
            items = iter(generator() if callable(generator) else generator)
            make = self._kind.item
            for given in items:
                if not self._add(make(given)):
                    break
        except UsageError as wrong:
            error = wrong
        except BaseException as failure:  # noqa: BLE001  raised again where the consumer comes to it
            error = ReaderError(f"the reader's generator failed: {failure!r}")
            error.__cause__ = failure
        finally:
            close = getattr(items, "close", None)
            if close is not None:
                with contextlib.suppress(Exception):  # it is over; what it says now is of no use
                    close()
            with self._lock:
                self._feed.end(error)
                self._pool.call()
                self._ready.notify_all()

    def _add(self, item: Item) -> bool:
        """Hand an item on when there is room for it; False: the session ends."""
        feed = self._feed
        with self._lock:
            while not feed.has_room(item) and not self._is_closing:
                feed.is_blocked = True
                self._pool.call()
                self._room.wait()
            feed.is_blocked = False
            if self._is_closing:
                return False
            feed.add(item)
            if self._is_waiting and item.missing:
                self._meter.waits()
            self._pool.call()
            if not item.missing and feed.is_ready:  # skipped, or without samples
                self._ready.notify()
            return True
