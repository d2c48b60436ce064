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
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from distill_reader.errors import ReaderError, UsageError
from distill_reader.student.batches.feed import Feed
from distill_reader.student.batches.items import ItemFormat, ReaderItem
from distill_reader.student.batches.label_index import make_keys
from distill_reader.student.batches.meter import Meter
from distill_reader.student.clients.client import Array, TeacherClient
from distill_reader.student.pool.pace import Pace
from distill_reader.student.pool.pool import PoolSettings, TeacherPool
from distill_reader.student.source import TeacherSource

logger = logging.getLogger(__name__)

_GENERATOR_CLOSE_S = 5.0
_TEACHERS_CLOSE_S = 1.0  # only one that connects to a host that is silent takes longer
_POP_PART = 16  # the consumer takes up to this part of the bound on memory at once
_VERSION_LOOK_S = 0.05  # while no teacher has said whose labels are to be looked for

Combine = Callable[[Sequence[Sequence[Array]]], tuple[Array, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """Teachers of one model: any of them answers for the others."""

    source: TeacherSource
    settings: PoolSettings
    paces: dict[str, Pace]  # by endpoint what earlier iterations learned; is kept up
    meter: Meter | None = None  # counts how the consumer is fed; None: nobody wants to know


class _Lane:
    """One service's: every item goes through every lane, in the same order."""

    def __init__(
        self,
        service: Service,
        feed: Feed,
        pool: TeacherPool,
        meter: Meter,
    ) -> None:
        self.meter = meter
        self.source = service.source
        self.cache = service.settings.cache
        self.feed = feed
        self.pool = pool
        self.popped: deque[ReaderItem] = deque()  # answered, and waiting for the other lanes


class ReaderSession:
    """Made in the process and by the thread that consumes it."""

    def __init__(
        self,
        generator: Any,
        item_format: ItemFormat,
        services: Sequence[Service],
        *,
        max_bytes: int,
        connect: Callable[[str], TeacherClient],
        combine: Combine | None = None,
        key_positions: tuple[int, int | None] | None = None,
    ) -> None:
        """Start reading ahead.

        Args:
            generator: the user's: called for an iterator, or iterated over.
            services: whose predictions are combined, where there are several.
            max_bytes: of what is held for each service; the fields are the same ones.
            combine: makes one prediction of those of all services; None: there is one service.
            key_places: of the fields that have the samples' ids, and their variants (None: there
                are none); None: nothing is looked for in a cache.
        """
        self._is_waiting = False  # the consumer
        self._generator = generator
        self._item_format = item_format
        self._combine = combine
        self._key_positions = key_positions
        self._pop_bytes = max(1, max_bytes // _POP_PART)
        self._pid = os.getpid()
        # Reentrant: the garbage collector may call `close` in a thread that holds it.
        lock = threading.RLock()
        self._lock = lock
        self._ready = threading.Condition(lock)  # for the consumer
        self._room = threading.Condition(lock)  # for the generator
        self._is_closing = False
        self._lanes = [self._make_lane(service, max_bytes, connect) for service in services]
        self._thread = threading.Thread(target=self._read, name="edl-reader", daemon=True)
        # A thread amid the generator's code (the framework's, perhaps) spoils a process's end.
        atexit.register(self.close)
        try:
            for lane in self._lanes:
                lane.pool.start()
                lane.source.start(lane.pool.set_endpoints)
            self._thread.start()
        except BaseException:
            self.close()
            raise

    def _make_lane(
        self, service: Service, max_bytes: int, connect: Callable[[str], TeacherClient]
    ) -> _Lane:
        feed = Feed(max_bytes)
        cache = service.settings.cache
        feed.may_be_alone = cache is not None and cache.is_open
        meter = service.meter or Meter()
        pool = TeacherPool(
            service.settings,
            feed,
            self._lock,
            self._ready,
            connect=connect,
            paces=service.paces,
            meter=meter,
        )
        return _Lane(service, feed, pool, meter)

    def results(self) -> Iterator[Any]:
        """Yield what the user gets, in order; once.

        Raises:
            ReaderError: the generator failed; its exception is the cause.
            NoTeacher, DistillError: no teacher will answer.
        """
        item_format = self._item_format
        while True:
            taken = self._take()
            if taken is None:
                return
            taken.reverse()
            while taken:
                items = taken.pop()
                item = items[0]
                if not all(each.answers or not each.samples for each in items):
                    yield item_format.without_predictions(item)
                    continue
                if self._combine is not None and item.samples:
                    outputs = self._combine([each.columns() for each in items])
                    item.answers = [(0, item.samples, outputs, 0)]
                yield item_format.result(item)
                del items, item  # nor their arrays, while the consumer's next ones are made

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
        for lane in self._lanes:
            lane.source.stop()
            lane.pool.close()
        threads = [thread for lane in self._lanes for thread in lane.pool.threads]
        if threading.current_thread() in (self._thread, *threads):
            return  # by the garbage collector
        deadline_s = time.monotonic() + _TEACHERS_CLOSE_S
        for thread in threads:
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
            for lane in self._lanes:
                lane.feed.clear()  # up to all the memory allowed, and the collector may come late
                lane.popped.clear()

    # --- the consumer

    def _take(self) -> list[tuple[ReaderItem, ...]] | None:
        """Return the next items, each as every lane has it, for which it waits; None: all were
        taken."""
        if os.getpid() != self._pid:
            raise UsageError(
                "reader: iterated over in a fork of the process that began to; call the reader in "
                "the process that consumes it"
            )
        with self._lock:
            while True:
                taken = self._pop()
                if taken:
                    return taken
                if self._is_closing or all(
                    lane.feed.is_done and not lane.popped for lane in self._lanes
                ):
                    return None
                for lane in self._lanes:
                    if lane.feed.is_incomplete:  # else the generator is what is waited for
                        lane.meter.waits()
                self._is_waiting = True
                self._ready.wait()
                self._is_waiting = False
                for lane in self._lanes:
                    lane.meter.waits_no_more()

    def _pop(self) -> list[tuple[ReaderItem, ...]]:
        """Return the items that all lanes have answered. The caller has the lock.

        Raises:
            Exception: a lane's, once what all have answered before it was returned.
        """
        lanes = self._lanes
        for lane in lanes:
            if not lane.popped:
                lane.popped.extend(lane.feed.pop(self._pop_bytes))
        self._room.notify()
        count = min([len(lane.popped) for lane in lanes])
        taken = [tuple([lane.popped.popleft() for lane in lanes]) for _ in range(count)]
        samples = sum([items[0].samples for items in taken])
        for lane in lanes:
            lane.meter.consumed(samples)
        return taken

    # --- the generator's thread

    def _read(self) -> None:
        error: Exception | None = None
        items: Iterator[Any] | None = None
        try:
            generator = self._generator
            items = iter(generator() if callable(generator) else generator)
            make = self._item_format.item
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
                for lane in self._lanes:
                    lane.feed.end(error)
                    lane.pool.call()
                self._ready.notify_all()

    def _add(self, item: ReaderItem) -> bool:
        """Hand an item on when there is room for it; False: the session ends."""
        if self._key_positions is not None:
            self._look_up_by(item, *self._key_positions)
        items = [item, *(item.clone() for _ in self._lanes[1:])]
        for lane, each in zip(self._lanes, items, strict=True):
            if lane.cache is not None and self._knows_version(lane):
                output_bytes = lane.cache.find(each)
                if output_bytes:
                    lane.feed.expect(output_bytes)
        with self._lock:
            while not self._is_closing:
                blocked = [
                    lane
                    for lane, each in zip(self._lanes, items, strict=True)
                    if not lane.feed.has_room(each)
                ]
                if not blocked:
                    break
                for lane in blocked:
                    lane.feed.is_blocked = True
                    lane.pool.call()
                self._room.wait()
            for lane in self._lanes:
                lane.feed.is_blocked = False
            if self._is_closing:
                return False
            for lane, each in zip(self._lanes, items, strict=True):
                lane.feed.add(each)
                if self._is_waiting and each.missing:
                    lane.meter.waits()
                lane.pool.call()
                if not each.missing and lane.feed.is_ready:  # skipped, known, or without samples
                    self._ready.notify()
            return True

    def _look_up_by(self, item: ReaderItem, id_position: int, variant_position: int | None) -> None:
        """Give an item its keys. Raises: UsageError."""
        column = self._item_format.column
        variants = None if variant_position is None else column(item, variant_position)
        item.keys = make_keys(column(item, id_position), variants, item.samples)

    def _knows_version(self, lane: _Lane) -> bool:
        """Wait until it is known whose labels to look for; False: nobody will say."""
        cache = lane.cache
        assert cache is not None
        with self._lock:
            while not cache.is_open and not self._is_closing and not lane.feed.gives_up:
                self._room.wait(_VERSION_LOOK_S)
            lane.feed.may_be_alone = cache.is_open
            return cache.is_open
