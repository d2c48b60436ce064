"""One iteration of a reader: a thread runs the user's generator, a pool of threads asks teachers.

    generator's thread -> Feed -> teachers' threads -> Feed -> consumer (the caller's thread)

With several services there is one Feed and one pool for each, and every item goes through all of
them in the same order. Threads do not poll: each waits on a condition of one lock that all share.
"""

import atexit
import contextlib
import logging
import os
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from distill_reader.errors import ReaderError, UsageError
from distill_reader.student.batches.feed import Feed
from distill_reader.student.batches.items import (
    Combine,
    ItemFormat,
    ReaderItem,
    combined_answers,
)
from distill_reader.student.batches.label_index import make_keys
from distill_reader.student.batches.meter import Meter
from distill_reader.student.clients.client import TeacherClient
from distill_reader.student.pool.pace import Pace
from distill_reader.student.pool.pool import PoolSettings, TeacherPool
from distill_reader.student.source import TeacherSource
from distill_reader.student.threads import ForkSafeThread

logger = logging.getLogger(__name__)

_GENERATOR_CLOSE_S = 5.0
_TEACHERS_CLOSE_S = 1.0  # only a thread that connects to a silent host takes longer
_POP_PART = 16  # the consumer takes up to this part of the memory bound at once
_VERSION_POLL_S = 0.05  # while no teacher has told the version whose labels to look up
_LOADER_LOOK_S = 1.0

# A DataLoader that keeps its workers has one iterator for all passes. Not held by us: if it ends
# with the interpreter only, its workers hang that.
_Kept = weakref.ReferenceType[Any]
# Each with a thread that was still within it as its pass was closed.
_left_behind: list[tuple[_Kept, threading.Thread]] = []


class SessionLock:
    """The lock of one session, and what its threads wait for."""

    def __init__(self) -> None:
        # Reentrant: the garbage collector may call `ReaderSession.close` in a thread that holds it.
        self.lock = threading.RLock()
        self.ready = threading.Condition(self.lock)  # the consumer may find something
        self.room = threading.Condition(self.lock)  # the generator may add something


class ServiceStream:
    """One service within one iteration: the items on their way through its teachers.

    The teachers of a service serve the same model, so any of them can answer for another.
    """

    def __init__(
        self,
        source: TeacherSource,
        settings: PoolSettings,
        lock: SessionLock,
        *,
        max_bytes: int,
        connect: Callable[[str], TeacherClient],
        paces: dict[str, Pace],
        meter: Meter | None = None,
    ) -> None:
        """
        Args:
            max_bytes: bound on samples and predictions that are held for this service.
            paces: by endpoint what earlier iterations have learned; is updated.
            meter: counts how the consumer is fed; None: nobody reads it.
        """
        self.source = source
        self.cache = settings.cache
        self.meter = meter or Meter()
        self.feed = Feed(max_bytes)
        self.feed.works_without_teachers = self.cache is not None and self.cache.is_open
        self.pool = TeacherPool(
            settings, self.feed, lock.lock, lock.ready,
            connect=connect, paces=paces, meter=self.meter,
        )  # fmt: skip
        self.answered: deque[ReaderItem] = deque()  # waits until all services have answered it
        self.pop_bytes = max(1, max_bytes // _POP_PART)

    def start(self) -> None:
        self.pool.start()
        self.source.start(self.pool.set_endpoints)

    def stop(self) -> None:
        self.source.stop()
        self.pool.close()

    def clear(self) -> None:
        """Drop all items. They may hold all the memory allowed, and the collector comes late."""
        self.feed.clear()
        self.answered.clear()

    @property
    def is_done(self) -> bool:
        return self.feed.is_done and not self.answered

    @property
    def has_predictions(self) -> bool:
        """Whether the item that the consumer gets next is answered, and was not skipped."""
        if not self.answered:
            return False
        item = self.answered[0]
        return bool(item.answers) or not item.samples

    @property
    def awaits_version(self) -> bool:
        """Whether the cache cannot be looked into yet: no teacher has told its version."""
        return self.cache is not None and not self.cache.is_open

    def pop(self) -> None:
        """Move items that are answered from the feed into `answered`, if that is empty."""
        if not self.answered:
            self.answered.extend(self.feed.pop(self.pop_bytes))


class ReaderSession:
    """One iteration. Create it in the process and the thread that consumes it."""

    def __init__(
        self,
        generator: Any,
        item_format: ItemFormat,
        streams: Sequence[ServiceStream],
        lock: SessionLock,
        *,
        combine: Combine | None = None,
        key_positions: tuple[int, int | None] | None = None,
    ) -> None:
        """Start to read ahead.

        Args:
            generator: the user's: a function that returns an iterator, or an iterable.
            streams: one per service; the predictions of several are combined.
            lock: that the streams were created with.
            combine: computes one prediction from those of all services; None: there is one service.
            key_positions: positions of the fields with the samples' ids and with their variants
                (None: there are none); None: there is no cache.
        """
        self._item_format = item_format
        self._streams = tuple(streams)
        self._combine = combine
        self._key_positions = key_positions
        self._pid = os.getpid()
        self._lock = lock.lock
        self._ready = lock.ready
        self._room = lock.room
        self._is_waiting = False  # the consumer
        self._has_unlooked = False  # an item waits until a teacher has told the cache's version
        self._is_closing = False
        # Here, and before any thread: a framework's DataLoader forks its worker processes now, and
        # Paddle's needs the main thread for that.
        self._kept, begun = _begun(generator)
        self._thread = ForkSafeThread(
            target=self._read, args=([begun],), name="edl-reader", daemon=True
        )
        # A thread still inside the generator's code (perhaps the framework's) can hang shutdown.
        atexit.register(self.close)
        try:
            for stream in self._streams:
                stream.start()
            self._thread.start()
        except BaseException:
            self.close()
            raise

    @property
    def threads(self) -> list[threading.Thread]:
        """The teachers' threads that have not ended."""
        return [thread for stream in self._streams for thread in stream.pool.threads]

    def results(self) -> Iterator[Any]:
        """Yield the user's items with their predictions, in order; call it once.

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
                    item.answers = combined_answers(items, self._combine)
                yield item_format.result(item)
                del items, item  # frees their arrays while the consumer's next ones are made

    def close(self) -> None:
        """End threads and connections, whatever they do. A second call has no effect."""
        if os.getpid() != self._pid:
            return  # a copy after fork: its threads and locks belong to the parent
        atexit.unregister(self.close)
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
            self._room.notify_all()
            self._ready.notify_all()
        for stream in self._streams:
            stream.stop()
            stream.meter.waits_no_more()
        threads = self.threads
        if threading.current_thread() in (self._thread, *threads):
            return  # called by the garbage collector
        deadline_s = time.monotonic() + _TEACHERS_CLOSE_S
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        if self._thread.ident is not None:
            self._thread.join(_GENERATOR_CLOSE_S)
            if self._thread.is_alive():
                logger.warning(
                    "the reader's generator has not returned within %g s; its thread ends when it "
                    "does",
                    _GENERATOR_CLOSE_S,
                )
                if self._kept is not None:
                    _left_behind.append((self._kept, self._thread))
        with self._lock:
            for stream in self._streams:
                stream.clear()

    # --- the consumer

    def _take(self) -> list[tuple[ReaderItem, ...]] | None:
        """Wait for the next items; return each with one copy per service. None: all are taken."""
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
                if self._is_closing or all(stream.is_done for stream in self._streams):
                    return None
                self._note_waits()
                self._is_waiting = True
                self._ready.wait()
                self._is_waiting = False

    def _note_waits(self) -> None:
        """Tell the meters for which services the consumer waits. The caller has the lock."""
        for stream in self._streams:
            if stream.has_predictions:  # the consumer waits for another service
                stream.meter.waits_no_more()
            elif stream.feed.is_incomplete or (self._has_unlooked and stream.awaits_version):
                stream.meter.waits()  # else the consumer waits for the generator

    def _pop(self) -> list[tuple[ReaderItem, ...]]:
        """Return the items that all services have answered. The caller has the lock.

        Raises:
            Exception: of a service, after all items that were answered before it.
        """
        streams = self._streams
        for stream in streams:
            stream.pop()
            if stream.feed.has_waiting:  # perhaps for room, which there is now
                stream.pool.call()
        self._room.notify()
        count = min([len(stream.answered) for stream in streams])
        taken = [tuple([stream.answered.popleft() for stream in streams]) for _ in range(count)]
        for stream, items in zip(streams, zip(*taken, strict=True), strict=False):
            stream.meter.consumed(sum([item.samples for item in items if item.answers]))
            if all(item.answers or not item.samples for item in items):
                stream.meter.waits_no_more()
            else:  # skipped: whatever the consumer does meanwhile, it lacks predictions
                stream.meter.waits()
        return taken

    # --- the generator's thread

    def _read(self, begun: list[Iterator[Any]]) -> None:
        error: Exception | None = None
        items: Iterator[Any] | None = begun.pop()
        try:
            assert items is not None
            make = self._item_format.item
            for given in items:
                if not self._add(make(given)):
                    break
        except UsageError as wrong:
            error = wrong
        except BaseException as failure:  # noqa: BLE001  raised again where the consumer gets to it
            error = _failed(failure)
        finally:
            close = getattr(items, "close", None)
            if close is not None:
                with contextlib.suppress(Exception):  # the iteration is over: nobody needs it
                    close()
            items = close = None  # an error keeps this frame: let a loader's workers end now
            with self._lock:
                for stream in self._streams:
                    stream.feed.end(error)
                    stream.pool.call()
                self._ready.notify_all()

    def _add(self, item: ReaderItem) -> bool:
        """Hand an item to every service when there is room; False: the session ends."""
        if self._key_positions is not None:
            self._set_keys(item, *self._key_positions)
        streams = self._streams
        pairs = list(zip(streams, [item, *(item.clone() for _ in streams[1:])], strict=True))
        for stream, each in pairs:
            if stream.cache is not None and self._wait_for_cache(stream):
                output_bytes = stream.cache.find(each)
                if output_bytes:
                    stream.feed.expect(output_bytes)
        with self._lock:
            while not self._is_closing:
                blocked = [stream for stream, each in pairs if not stream.feed.has_room(each)]
                if not blocked:
                    break
                for stream in blocked:
                    stream.feed.is_blocked = True
                    stream.pool.call()
                self._room.wait()
            for stream in streams:
                stream.feed.is_blocked = False
            if self._is_closing:
                return False
            for stream, each in pairs:
                stream.feed.add(each)
                if self._is_waiting and each.missing and not stream.has_predictions:
                    stream.meter.waits()
                stream.pool.call()
                if stream.feed.is_ready:  # skipped, cached, or empty
                    self._ready.notify()
            return True

    def _set_keys(self, item: ReaderItem, id_position: int, variant_position: int | None) -> None:
        """Set the keys of an item's samples in the cache. Raises: UsageError."""
        column = self._item_format.column
        variants = None if variant_position is None else column(item, variant_position)
        item.keys = make_keys(column(item, id_position), variants, item.samples)

    def _wait_for_cache(self, stream: ServiceStream) -> bool:
        """Wait until the cache is open, by a teacher's version; False: none will tell it."""
        cache = stream.cache
        assert cache is not None
        with self._lock:
            while not cache.is_open and not self._is_closing and not stream.feed.gives_up:
                self._has_unlooked = True
                if self._is_waiting:  # teachers that are started on demand come for that alone
                    self._note_waits()
                self._room.wait(_VERSION_POLL_S)
            self._has_unlooked = False
            stream.feed.works_without_teachers = cache.is_open
            return cache.is_open


def _begun(generator: Any) -> tuple[_Kept | None, Iterator[Any]]:
    """Return the iterator of a user's generator; if it fails to begin, one that raises why.

    And the loader, if that has one iterator for all passes.
    """
    kept = None
    try:
        source = generator() if callable(generator) else generator
        if getattr(source, "persistent_workers", False):
            kept = weakref.ref(source)
            _await_other_pass(source)
        return kept, iter(source)
    except Exception as failure:  # noqa: BLE001  raised again where the consumer gets to it
        return kept, _raising(failure)


def _await_other_pass(loader: Any) -> None:
    """Wait until no thread of a pass that was cut short is within this loader any more.

    It would take what the workers send to the new pass, which would wait for that for ever.
    """
    _left_behind[:] = [each for each in _left_behind if each[1].is_alive()]
    for kept, thread in list(_left_behind):
        while kept() is loader and thread.is_alive():
            thread.join(_LOADER_LOOK_S)


def _raising(failure: Exception) -> Iterator[Any]:
    """Raise as a generator, in which a StopIteration does not end the epoch."""
    for each in (failure,):
        raise each
    yield


def _failed(failure: BaseException) -> ReaderError:
    """Return the consumer's error for a failure of its generator."""
    text = f"the reader's generator failed: {failure!r}"
    if isinstance(failure, ValueError) and "signal only works in main thread" in str(failure):
        text += (
            ". If it iterates over a DataLoader of Paddle with workers: these are started by the "
            "main thread alone. Give the reader that DataLoader itself, or a function that returns "
            "it, and iterate over the reader in the main thread; or use num_workers=0"
        )
    error = ReaderError(text)
    error.__cause__ = failure
    # The frames may hold a loader. If it ends with the interpreter only, its workers hang that.
    traceback.clear_frames(failure.__traceback__)
    return error
