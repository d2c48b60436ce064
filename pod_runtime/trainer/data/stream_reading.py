"""Read a stream, which has no indices, by the positions of its samples since an epoch began.

Whoever reads opens the stream for itself, goes over all of it, and keeps the samples of its own
shards. So which samples a global batch holds depends neither on the number of trainers and workers
nor on when they were replaced, as long as the stream yields the same whenever it is opened.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from pod_runtime.trainer.data.streams import (
    DrawnIndex,
    FrameworkStreams,
    NumbersOfItsOwn,
    seed_stream,
    show_dataset,
)
from pod_runtime.trainer.data.worker_errors import read_or_fail
from pod_runtime.trainer.errors import UsageError

logger = logging.getLogger(__name__)


class StreamFetcher:
    """Reads a stream in this process, with random numbers that the training does not share."""

    def __init__(self, dataset: Any, streams: FrameworkStreams, seed: int) -> None:
        self._samples = _Samples(dataset, streams, seed)
        self._numbers = NumbersOfItsOwn(streams)

    def fetch(self, epoch: int, ids: Sequence[int], _again: Sequence[int] = ()) -> list[Any]:
        """Return the samples at these positions, which ascend from call to call."""
        with self._numbers:
            return [self._samples.at(epoch, position) for position in ids]


class KeyedStream:
    """What a loader's workers read: indices are (epoch, position), which ascend.

    A sample that cannot be read is a `worker_errors.Failed`.
    """

    def __init__(self, dataset: Any, streams: FrameworkStreams, seed: int) -> None:
        self._samples = _Samples(dataset, streams, seed)
        self.newest: DrawnIndex = (0, 0)
        self._dataset = dataset
        self._streams = streams

    def begin_worker(self) -> None:
        info = self._streams.worker_info()
        show_dataset(info, self._dataset)
        self._samples.is_first_reader = read_alone(info)

    def __getitem__(self, index: tuple[int, int]) -> Any:
        self.newest = index
        epoch, position = index
        return read_or_fail(lambda: self._samples.at(epoch, position))

    def __len__(self) -> int:
        return 1 << 62  # nobody asks how much there is: the order says how far to read


def read_alone(info: Any | None) -> bool:
    """Tell a worker that it is the only one; return whether it is the first.

    A stream that shares itself out among workers, or that `worker_init_fn` shares out, is to yield
    all of it to each of them.
    """
    if info is None or info.num_workers == 1:
        return True
    is_first = info.id == 0
    object.__setattr__(info, "id", 0)  # both frameworks let nobody assign it
    object.__setattr__(info, "num_workers", 1)
    return bool(is_first)


class _Samples:
    """The samples of a stream, which is opened anew in each epoch, and again when it has ended."""

    def __init__(self, dataset: Any, streams: FrameworkStreams, seed: int) -> None:
        self._dataset = dataset
        self._streams = streams
        self._seed = seed
        self._epoch = -1  # -1: not open yet
        self._next = 0  # position that the stream yields next
        self._times = 0  # that it was opened in this epoch
        self._opened_at = 0  # position at which it was opened for the last time
        self._items: Iterator[Any] = iter(())
        self.is_first_reader = True

    def at(self, epoch: int, position: int) -> Any:
        """Return the sample at `position`; those before it are passed over."""
        if epoch != self._epoch or position < self._next:
            self._epoch, self._next, self._times = epoch, 0, 0
            self._open()
        while self._next < position:
            self._read()
        return self._read()

    def _read(self) -> Any:
        while True:
            try:
                sample = next(self._items)
            except StopIteration:
                found = self._next - self._opened_at
                if not found:
                    raise UsageError(
                        f"train_set: the stream {type(self._dataset).__name__} yields nothing"
                    ) from None
                if self._times == 1 and self._epoch == 0 and self.is_first_reader:
                    logger.info(
                        "the stream %s has ended after %d samples, and is opened again: an epoch "
                        "has as many steps as steps_per_epoch says",
                        type(self._dataset).__name__, found,
                    )  # fmt: skip
                self._open()
            else:
                self._next += 1
                return sample

    def _open(self) -> None:
        seed_stream(self._streams, self._seed, self._epoch, self._times)
        if callable(getattr(self._dataset, "set_epoch", None)):
            self._dataset.set_epoch(self._epoch)
        self._opened_at = self._next
        self._times += 1
        self._items = iter(self._dataset)
