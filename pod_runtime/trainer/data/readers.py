"""Read this rank's shards, one after the other, from the cursor on.

InlineReader    a dataset or a stream, read in this process
ThreadReader    an iterator that may block (a loader with workers, a reader of the script's own),
                read by a thread, so that the loop can look after its peers meanwhile
"""

import atexit
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile
from typing import Any, NamedTuple, Protocol

import numpy as np

from pod_runtime.trainer.data.source import DataSource
from pod_runtime.trainer.data.stream_reading import KeyedStream, StreamFetcher
from pod_runtime.trainer.data.streams import (
    BatchMaker,
    DrawnIndex,
    Keyed,
    KeyedCollate,
    KeyedDataset,
    SampleFetcher,
    borrowed_numbers,
    drawn_indices,
    seed_workers,
)
from pod_runtime.trainer.data.worker_errors import (
    CarryingCollate,
    carrying_options,
    raise_if_failed,
)
from pod_runtime.trainer.errors import UsageError
from pod_runtime.trainer.frameworks.framework import FrameworkData
from pod_runtime.trainer.progress.batches import BatchPlan, Cursor, Ids, permutation
from pod_runtime.trainer.progress.drawn import OrderHashes, hash_samples
from pod_runtime.trainer.progress.epoch_order import EpochOrder
from pod_runtime.trainer.progress.ledger import RunInfo

_STOP_PERIOD_S = 0.1
_CLOSE_TIMEOUT_S = 5.0
_END_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRange:
    """One shard of one global batch, by its positions in the epoch's order."""

    epoch: int
    step: int  # in the epoch
    shard: int
    start: int  # samples [start, stop) of the epoch's permutation
    stop: int

    @property
    def samples(self) -> int:
        return self.stop - self.start

    @property
    def key(self) -> tuple[int, int, int]:
        """Epoch, step and shard."""
        return self.epoch, self.step, self.shard


@dataclass(slots=True)
class KeptSteps:
    """How many steps of the training no crash of a trainer takes back by now."""

    steps: int = 0
    then: Callable[[], None] = lambda: None  # called once those of a stage that is to end are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadFrom:
    """What `Loop(reader=...)` is called with: where to read from, and which shards to read."""

    epoch: int  # from 0 on
    step: int  # steps of this epoch that are done
    offset: int  # samples of this epoch that are done
    global_step: int  # steps of the training that are done
    rank: int  # of this trainer
    world_size: int  # trainers
    first_shard: int  # of each global batch, that this trainer computes
    stop_shard: int  # not included
    micro_batch: int  # samples of a full shard
    shard_samples: tuple[int, ...] = ()  # of each of these, in a full batch
    kept: KeptSteps = field(default_factory=KeptSteps)  # steps that no crash takes back


class ShardOrder:
    """The shards that this rank computes, in order, and their samples."""

    def __init__(
        self, run: RunInfo, batches: BatchPlan, shards: range, drawn: EpochOrder | None = None
    ) -> None:
        """
        Args:
            drawn: by a sampler, for one epoch, after which this order ends; None: there is none.
        """
        self.run = run
        self.batches = batches
        self.shards = shards
        self._drawn = drawn
        self._permutations: dict[int, Ids] = {}
        self._hashes: dict[int, OrderHashes] = {}  # by epoch

    def of_batch(self, epoch: int, step: int, offset: int) -> list[ShardRange]:
        """Return this rank's shards of the batch at `offset`, without empty ones."""
        start, stop = self.batches.batch(offset)
        bounds = ((shard, *self.batches.shard(stop - start, shard)) for shard in self.shards)
        return [
            ShardRange(epoch=epoch, step=step, shard=shard, start=start + low, stop=start + high)
            for shard, low, high in bounds
            if high > low
        ]

    def from_cursor(self, cursor: Cursor, *, to_epoch_end: bool = False) -> Iterator[ShardRange]:
        """Yield all shards from the cursor to the end of the training, or of the epoch.

        Where a sampler has drawn the epoch, only that is known.
        """
        epoch, step, offset = cursor.epoch, cursor.step, cursor.offset
        is_one = to_epoch_end or self._drawn is not None
        stop = min(epoch + 1, self.run.epochs) if is_one else self.run.epochs
        while epoch < stop:
            while self.batches.steps_left(offset):
                yield from self.of_batch(epoch, step, offset)
                offset = self.batches.batch(offset)[1]
                step += 1
            epoch, step, offset = epoch + 1, 0, 0

    def ids(self, shard_range: ShardRange) -> Ids:
        """Return the sample ids of a shard; of a stream, its positions."""
        start, stop = shard_range.start, shard_range.stop
        if self._is_stream:
            return np.arange(start, stop, dtype=np.int64)
        return self._of_epoch(shard_range.epoch)[start:stop]

    def samples(self, shard_range: ShardRange) -> tuple[list[int], list[int]]:
        """Return `ids(shard_range)`, and how often each came before in the epoch; []: none did."""
        if self._drawn is None:
            return self.ids(shard_range).tolist(), []
        return self._drawn.samples(shard_range.start, shard_range.stop)

    def drawn(self, shard_range: ShardRange) -> int:
        """Return the sum of the hashes of `ids(shard_range)`."""
        epoch = shard_range.epoch
        if self._is_stream:
            return hash_samples(epoch, self.ids(shard_range))
        found = self._hashes.get(epoch)
        if found is None:
            _forget_before(epoch - 1, self._hashes)
            found = self._hashes[epoch] = OrderHashes(epoch, self._of_epoch(epoch))
        return found.sum(shard_range.start, shard_range.stop)

    @property
    def _is_stream(self) -> bool:
        return self._drawn is None and self.run.dataset_length is None

    def _of_epoch(self, epoch: int) -> Ids:
        if self._drawn is not None:
            return self._drawn.ids
        order = self._permutations.get(epoch)
        if order is None:
            assert self.run.dataset_length is not None
            order = permutation(self.run.seed, epoch, self.run.dataset_length, self.run.shuffle)
            _forget_before(epoch - 1, self._permutations)
            self._permutations[epoch] = order
        return order


def _forget_before(epoch: int, by_epoch: dict[int, Any]) -> None:
    """Keep two: of the epoch that trains and of the one that is fetched ahead."""
    for old in [each for each in by_epoch if each < epoch]:
        del by_epoch[old]


class ShardBatch(NamedTuple):
    """A shard that was read."""

    epoch: int
    step: int
    shard: int
    batch: Any
    drawn: int | None = None  # sum of the hashes of what was read; None: not known here


class ShardReader(Protocol):
    """Where the loop takes its data from."""

    def take(self, shard_range: ShardRange, timeout_s: float) -> ShardBatch | None:
        """Return the batch of this shard, or None if it has not come within `timeout_s`."""

    def close(self) -> None:
        """End threads and processes."""


class InlineReader:
    """Reads a dataset in the loop's own thread."""

    def __init__(
        self, source: DataSource, order: ShardOrder, data: FrameworkData, *, is_ahead: bool = False
    ) -> None:
        self._fetcher: SampleFetcher | StreamFetcher
        if source.is_stream:
            self._fetcher = StreamFetcher(source.dataset, data, order.run.seed)
        else:
            self._fetcher = SampleFetcher(source.dataset, data, order.run.seed, is_ahead=is_ahead)
        self._order = order
        self._collate = data.collate
        self._maker: BatchMaker | None = None  # None: the framework's own collates, and draws not
        if source.collate is not None:
            self._maker = BatchMaker(source.collate, data, order.run.seed, is_ahead=is_ahead)

    def take(self, shard_range: ShardRange, timeout_s: float) -> ShardBatch:
        ids, again = self._order.samples(shard_range)
        samples = self._fetcher.fetch(shard_range.epoch, ids, again)
        if self._maker is None:
            batch = self._collate(samples)
        else:
            batch = self._maker.make(shard_range.epoch, ids, samples, again)
        return ShardBatch(*shard_range.key, batch, self._order.drawn(shard_range))

    def close(self) -> None:
        pass


class ThreadReader:
    """Moves what an iterator yields into a short queue, in a thread."""

    def __init__(
        self, start: Callable[[], Iterator[ShardBatch]], *, counts_samples: bool = True
    ) -> None:
        """
        Args:
            start: is called in the thread, and its iterator closed there.
            counts_samples: see that a batch has as many samples as its shard, by its first axis.
        """
        self._counts_samples = counts_samples
        atexit.register(self.close)  # a thread inside framework code can hang the exit
        self._queue: queue.Queue[ShardBatch | BaseException] = queue.Queue(maxsize=2)
        self._end: BaseException | None = None  # None: more may come
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._feed, args=(start,), name="reader", daemon=True
        )
        self._thread.start()

    def take(self, shard_range: ShardRange, timeout_s: float) -> ShardBatch | None:
        try:
            item = self._queue.get(timeout=timeout_s) if self._end is None else self._end
        except queue.Empty:
            return None
        wanted = shard_range.key
        if isinstance(item, BaseException):
            self._end = item  # nothing follows, and a script that has caught it may ask again
        if isinstance(item, StopIteration):
            raise UsageError(
                f"reader: it ended before (epoch, step, shard) {wanted}; it has to go on to the "
                f"last epoch"
            )
        if isinstance(item, BaseException):
            raise item
        if item[:3] != wanted:
            raise UsageError(
                f"reader: expected (epoch, step, shard) {wanted}, it yielded {item[:3]}; it has to "
                f"begin at the cursor and keep the order"
            )
        found = _length(item.batch) if self._counts_samples else None
        if found is not None and found != shard_range.samples:
            raise UsageError(
                f"reader: shard {shard_range.shard} of epoch {shard_range.epoch}, step "
                f"{shard_range.step} has {shard_range.samples} samples, it yielded {found}"
            )
        return item

    def close(self) -> None:
        atexit.unregister(self.close)
        self._stop.set()
        self._thread.join(_CLOSE_TIMEOUT_S)
        # For the kernel it ends later, as thread-local objects of C++ are destroyed. Paddle's hold
        # a lock meanwhile: a loader's worker that is forked then would wait for it for ever.
        task, deadline = f"/proc/self/task/{self._thread.native_id}", time.monotonic() + _END_S
        while not self._thread.is_alive() and os.path.exists(task) and time.monotonic() < deadline:
            time.sleep(0.0005)

    def _feed(self, start: Callable[[], Iterator[ShardBatch]]) -> None:
        items: Iterator[ShardBatch] | None = None
        try:
            items = start()
            for item in items:
                if not self._put(item):
                    break
            else:
                self._put(StopIteration())
        except BaseException as error:  # noqa: BLE001  raised again where the loop takes it
            self._put(error)
        finally:
            close = getattr(items, "close", None)
            if close is not None:
                close()

    def _put(self, item: ShardBatch | BaseException) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=_STOP_PERIOD_S)
            except queue.Full:
                continue
            return True
        return False


def loader_items(
    source: DataSource,
    order: ShardOrder,
    cursor: Cursor,
    data: FrameworkData,
    *,
    first: ShardRange | None = None,
    on_host: bool = False,
    to_epoch_end: bool = False,
) -> Iterator[ShardBatch]:
    """Return this rank's shards, read by the framework's loader and its worker processes.

    The workers are started here: the main thread's business, as it installs signal handlers.

    Args:
        first: of the shards that are read; None: this rank's first one at the cursor.
        on_host: leave batches in the host's memory, whatever the training's device is.
        to_epoch_end: not to the training's.
    """
    sent: queue.SimpleQueue[tuple[ShardRange, int]] = queue.SimpleQueue()

    def batches() -> Iterator[list[DrawnIndex]]:
        ranges = order.from_cursor(cursor, to_epoch_end=to_epoch_end)
        for shard_range in dropwhile(lambda each: first not in (None, each), ranges):
            sent.put((shard_range, order.drawn(shard_range)))
            yield drawn_indices(shard_range.epoch, *order.samples(shard_range))

    place = cursor.epoch, cursor.step, order.shards.start
    loader = keyed_loader(source, batches(), data, order.run.seed, place, on_host=on_host)
    return (
        ShardBatch(*shard_range.key, raise_if_failed(batch), drawn)
        for batch, (shard_range, drawn) in zip(loader, iter(sent.get, None), strict=False)
    )


def keyed_loader(
    source: DataSource,
    index_batches: Iterator[list[DrawnIndex]],
    data: FrameworkData,
    seed: int,
    place: Sequence[int],
    *,
    num_workers: int | None = None,
    on_host: bool = False,
) -> Iterator[Any]:
    """Return collated batches that the framework's loader reads, with streams of their own.

    One that cannot be read is a `worker_errors.Failed`: call `raise_if_failed`.

    Args:
        index_batches: of the samples of a batch.
        place: where this trainer reads from, by which its workers' own seeds differ.
        num_workers: None: as many as the source has.
        on_host: leave batches in the host's memory, whatever the training's device is.
    """
    kind: type[KeyedStream | KeyedDataset] = KeyedStream if source.is_stream else KeyedDataset
    keyed: Keyed = kind(source.dataset, data, seed)
    collate = data.collate  # the frameworks' own draw nothing
    if source.collate is not None:
        collate = KeyedCollate(source.collate, data, seed, keyed)
    workers = source.num_workers if num_workers is None else num_workers
    with borrowed_numbers(data):  # of which the frameworks draw their workers' seeds
        seed_workers(data, seed, *place)
        return data.loader(
            keyed,
            index_batches,
            collate=CarryingCollate(collate),
            options=carrying_options(
                {**source.worker_options, "num_workers": workers}, keyed.begin_worker
            ),
            on_host=on_host,
        )


def factory_items(items: Any) -> Iterator[ShardBatch]:
    """Yield the items of the script's own reader, with its fields as one batch."""
    try:
        for item in items:
            if not isinstance(item, tuple | list) or len(item) < 4:
                raise UsageError(
                    f"reader: expected (epoch, step, shard, fields...), got {item!r:.80}"
                )
            epoch, step, shard, *fields = item
            yield ShardBatch(int(epoch), int(step), int(shard), fields)
    finally:
        close = getattr(items, "close", None)
        if close is not None:
            close()


def _length(batch: Any) -> int | None:
    """Return the number of samples of a batch's first field; None: not known, as of a list."""
    first = batch[0] if isinstance(batch, list | tuple) and batch else batch
    shape = getattr(first, "shape", None)
    return int(shape[0]) if shape else None


class ShardSource:
    """This rank's shards of a dataset as a generator: call it, or iterate over it.

    For readers that transform batches on their way, as `DistillReader.set_batch_generator` does.
    Each item: epoch, step, shard, with `with_ids` the samples' ids, then the collated fields. Made
    in the main thread, which starts the worker processes where the source has some; iterated over
    in any.
    """

    def __init__(
        self,
        source: DataSource,
        order: ShardOrder,
        cursor: Cursor,
        data: FrameworkData,
        *,
        with_ids: bool = False,
        note: Callable[[ShardBatch], None] | None = None,
    ) -> None:
        """`note` is called with each item before it is yielded."""
        self._note = note
        self._source = source
        self._order = order
        self._cursor = cursor
        self._data = data
        self._with_ids = with_ids
        self._by_workers: Iterator[ShardBatch] | None = None  # None: no workers, or iterated over
        if source.num_workers > 0:
            self._by_workers = self._start_workers()

    def __call__(self) -> Iterator[tuple[Any, ...]]:
        ranges = self._order.from_cursor(self._cursor)
        for item, shard_range in zip(self._items(), ranges, strict=False):
            epoch, step, shard, batch, _drawn = item
            if self._note is not None:
                self._note(item)
            fields = batch if isinstance(batch, list | tuple) else [batch]
            if self._with_ids:
                assert shard_range.key == (epoch, step, shard)
                yield epoch, step, shard, self._order.ids(shard_range).copy(), *fields
            else:
                yield epoch, step, shard, *fields

    def _items(self) -> Iterator[ShardBatch]:
        if self._source.num_workers > 0:
            items, self._by_workers = self._by_workers, None
            yield from self._start_workers() if items is None else items
            return
        # What transforms batches on their way reads ahead of the training, in a thread.
        inline = InlineReader(self._source, self._order, self._data, is_ahead=True)
        for shard_range in self._order.from_cursor(self._cursor):
            yield inline.take(shard_range, 0.0)

    def _start_workers(self) -> Iterator[ShardBatch]:
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "shards: a DataLoader with workers is started by the main thread, once: call "
                "loop.shards in the function that is Loop's reader=, which returns an iterator and "
                "is no generator itself"
            )
        return loader_items(self._source, self._order, self._cursor, self._data, on_host=True)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return self()
