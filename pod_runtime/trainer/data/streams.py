"""Give samples and shards random numbers of their own, whichever process draws them.

`random`, `numpy.random` and the framework's generators are seeded by (seed, epoch, sample) around
`dataset[i]`, by (seed, epoch, last sample) around a batch's `collate_fn`, and by (seed, epoch,
step, shard) before a shard's forward pass. A sample that a sampler draws again in an epoch has
others each time. So augmentation and dropout depend neither on the number of trainers nor on how
often one was replaced. Nor does what the script draws in a step before or after its shards, and an
optimizer in its update: these are seeded by (seed, epoch, step). A sampler's, a stream's, and what
the script draws in an epoch before its steps or after them are seeded by (seed, epoch).
"""

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, Protocol

import numpy as np

from pod_runtime.trainer.data.worker_errors import read_or_fail
from pod_runtime.trainer.errors import UsageError
from pod_runtime.trainer.progress.batches import stream_key

logger = logging.getLogger(__name__)

_OF_SAMPLE = 1  # keeps the two kinds of keys apart
_OF_SHARD = 2
_OF_ORDER = 3
_OF_STREAM = 4
_OF_STEP = 5
_OF_BATCH = 6
_OF_EPOCH = 7
_OF_EVALUATION = 8
_OF_END = 9
_OF_WORKERS = 10
_PROBE = 20
_WATCHED = 16  # first shards of a process, and one of so many later

# Epoch and sample, and how often that came before in the epoch, where a sampler draws it again.
DrawnIndex = tuple[int, int] | tuple[int, int, int]
_States = tuple[Any, Any, Any]  # of Python's, numpy's and the framework's generators


class FrameworkStreams(Protocol):
    """What this module needs of a framework's data."""

    def seed(self, key: int) -> None: ...

    def probe(self) -> Any: ...

    def rng_state(self) -> Any: ...

    def set_rng_state(self, state: Any) -> None: ...

    def worker_info(self) -> Any | None: ...


def seed_sample(
    streams: FrameworkStreams, seed: int, epoch: int, sample_id: int, again: int = 0
) -> None:
    """Give sample `sample_id` of `epoch` its own streams; `again`: how often it came before."""
    _seed(streams, stream_key(_OF_SAMPLE, seed, epoch, sample_id, *_times(again)))


def seed_batch(
    streams: FrameworkStreams, seed: int, epoch: int, last_id: int, again: int = 0
) -> None:
    """Give a batch's `collate_fn` its own streams, by the last of its samples."""
    _seed(streams, stream_key(_OF_BATCH, seed, epoch, last_id, *_times(again)))


def seed_shard(
    streams: FrameworkStreams, seed: int, epoch: int, step: int, shard: int, again: int = 0
) -> None:
    """Give a shard's forward pass its own streams; `again`: how often it had one in this step."""
    _seed(streams, stream_key(_OF_SHARD, seed, epoch, step, shard, *_times(again)))


def seed_step(streams: FrameworkStreams, seed: int, epoch: int, step: int, part: int) -> None:
    """Give what is drawn in a step outside of its shards its own streams.

    Args:
        part: of the step: before its shards, or after them and in an update, from 1 on.
    """
    _seed(streams, stream_key(_OF_STEP, seed, epoch, step, part))


def seed_epoch(streams: FrameworkStreams, seed: int, epoch: int, part: int) -> None:
    """Give what the script draws in an epoch outside of its steps its own streams.

    Args:
        part: of the epoch: before its steps 0, after them 1.
    """
    _seed(streams, stream_key(_OF_EPOCH, seed, epoch, part))


def seed_end(streams: FrameworkStreams, seed: int, loop_number: int) -> None:
    """Give what the script draws after a training its own streams, by which of its loops it was.

    A script that trains several models draws others for each, and the same when it is run again.
    """
    _seed(streams, stream_key(_OF_END, seed, loop_number))


def seed_of_evaluation(seed: int) -> int:
    """Return what takes the place of the seed in an evaluation's streams."""
    return stream_key(_OF_EVALUATION, seed)


def seed_order(streams: FrameworkStreams, seed: int, epoch: int) -> None:
    """Give what a sampler draws for an epoch its own streams."""
    _seed(streams, stream_key(_OF_ORDER, seed, epoch))


def seed_stream(streams: FrameworkStreams, seed: int, epoch: int, times: int) -> None:
    """Give a stream that is opened for the `times`-th time in an epoch its own streams."""
    _seed(streams, stream_key(_OF_STREAM, seed, epoch, times))


class BeginOfEpoch:
    """The streams of an epoch whose number is not known yet: what is drawn is by a guess of it."""

    def __init__(self, streams: FrameworkStreams, seed: int, guess: int) -> None:
        self._streams, self._seed, self.guess = streams, seed, guess
        seed_epoch(streams, seed, guess, 0)
        self._untouched = _next(streams)
        seed_epoch(streams, seed, guess, 0)

    def has_drawn(self) -> bool:
        """Whether something was drawn since."""
        with borrowed_numbers(self._streams):
            return _next(self._streams) != self._untouched


def seed_workers(streams: FrameworkStreams, seed: int, *place: int) -> None:
    """Give a loader's workers seeds of their own: `place` says where which trainer reads from."""
    _seed(streams, stream_key(_OF_WORKERS, seed, *place))


@contextmanager
def borrowed_numbers(streams: FrameworkStreams) -> Iterator[None]:
    """Put all streams back to where they are now."""
    before = _states(streams)
    try:
        yield
    finally:
        _put_back(streams, before)


def read_samples(dataset: Any, ids: Sequence[int]) -> Any:
    """Return these samples, in order: all at once where the dataset can.

    PyTorch's loader does so too, and Hugging Face's datasets are many times slower one by one.
    """
    at_once = getattr(dataset, "__getitems__", None)
    return at_once(list(ids)) if callable(at_once) else [dataset[sample_id] for sample_id in ids]


class NumbersOfItsOwn:
    """Within it, streams go on where they were when it was left; outside, nothing is drawn."""

    def __init__(self, streams: FrameworkStreams) -> None:
        self._streams = streams
        self._own: _States | None = None  # None: nothing was drawn yet
        self._others: _States | None = None  # None: not within it

    def __enter__(self) -> None:
        self._others = _states(self._streams)
        if self._own is not None:
            _put_back(self._streams, self._own)

    def __exit__(self, *exc: object) -> None:
        assert self._others is not None
        self._own = _states(self._streams)
        _put_back(self._streams, self._others)
        self._others = None


class Watch:
    """Says which shards are watched for random numbers that are drawn in them.

    The first ones, the first of an epoch, and of the others every so many.
    """

    def __init__(self, *, is_ahead: bool = False) -> None:
        """
        Args:
            is_ahead: read in a thread, ahead of a training that draws from the same streams once
                it has the first shard. So only the first shard is watched.
        """
        self._is_ahead = is_ahead
        self._epoch, self._seen = -1, 0  # the newest; shards so far

    def is_due(self, epoch: int) -> bool:
        """Whether the next shard is watched, which is of `epoch`. Call it once for each."""
        is_first = epoch != self._epoch or self._seen < _WATCHED
        is_watched = not self._seen if self._is_ahead else is_first or self._seen % _WATCHED == 0
        self._epoch, self._seen = epoch, self._seen + 1
        return is_watched

    def warn_of_thread(self) -> None:
        """Something draws: say what that means where it is done in a thread."""
        if self._is_ahead:
            logger.warning(
                "it does so in a thread while the training runs, whose own draws (dropout) are "
                "therefore not the same in every run"
            )


class SampleFetcher:
    """Reads samples of a map-style dataset in this process.

    Seeding costs more than reading a small sample, so it is done only for datasets that draw. A
    dataset is known to draw after the first watched shard in which it does; that shard is read
    again.
    """

    def __init__(
        self,
        dataset: Any,
        streams: FrameworkStreams,
        seed: int,
        *,
        is_ahead: bool = False,
        is_quiet: bool = False,
    ) -> None:
        """
        Args:
            is_ahead: see `Watch`.
            is_quiet: do not log that the dataset draws.
        """
        self._dataset = dataset
        self._is_quiet = is_quiet
        self._streams = streams
        self._seed = seed
        self._draws = False  # the dataset has drawn random numbers
        self._watch = Watch(is_ahead=is_ahead)
        self._untouched = self._probe()

    def fetch(self, epoch: int, ids: Sequence[int], again: Sequence[int] = ()) -> Any:
        """Return the samples of `ids`, in order: a list, or what the dataset gives for many.

        Args:
            again: how often each came before in the epoch; (): each for the first time.
        """
        dataset, is_watched = self._dataset, self._watch.is_due(epoch)
        if not (is_watched or self._draws):
            return read_samples(dataset, ids)
        if not self._draws:
            _seed(self._streams, _PROBE)
            samples = read_samples(dataset, ids)
            if _next(self._streams) == self._untouched:
                return samples
            self._draws = True
            if not isinstance(samples, list):
                raise UsageError(
                    f"train_set: {type(dataset).__name__}.__getitems__ returns a whole batch and "
                    f"draws random numbers, which belong to samples; return a list of samples"
                )
            if not self._is_quiet:
                logger.info(
                    "the dataset draws random numbers: streams are keyed by sample from now on"
                )
            self._watch.warn_of_thread()
        samples = []
        for sample_id, times in zip_longest(ids, again, fillvalue=0):
            seed_sample(self._streams, self._seed, epoch, sample_id, times)
            samples.append(dataset[sample_id])
        return samples

    def _probe(self) -> tuple[float, float, Any]:
        _seed(self._streams, _PROBE)
        return _next(self._streams)


class BatchMaker:
    """Collates samples in this process: where that draws, with streams of the batch's own.

    A function is known to draw after the first watched batch in which it does.
    """

    def __init__(
        self,
        collate: Callable[[Any], Any],
        streams: FrameworkStreams,
        seed: int,
        *,
        is_ahead: bool = False,
    ) -> None:
        """`is_ahead`: see `Watch`."""
        self._collate = collate
        self._streams = streams
        self._seed = seed
        self._draws = False  # the function has drawn random numbers
        self._watch = Watch(is_ahead=is_ahead)

    def make(self, epoch: int, ids: Sequence[int], samples: Any, again: Sequence[int] = ()) -> Any:
        """Return the batch of these samples, whose ids are `ids`; `again`: as `fetch` gets it."""
        is_watched = self._watch.is_due(epoch) and not self._draws
        last = ids[-1], again[-1] if again else 0
        if is_watched:
            seed_batch(self._streams, self._seed, epoch, *last)
            untouched = _next(self._streams)
        if is_watched or self._draws:
            seed_batch(self._streams, self._seed, epoch, *last)
        batch = self._collate(samples)
        if is_watched and _next(self._streams) != untouched:
            self._draws = True
            logger.info("collate_fn draws random numbers: streams are keyed by batch from now on")
            self._watch.warn_of_thread()
        return batch


def drawn_indices(epoch: int, ids: Sequence[int], again: Sequence[int]) -> list[DrawnIndex]:
    """Return the indices of these samples for a `KeyedDataset`; `again`: as `fetch` gets it."""
    if not again:
        return [(epoch, sample_id) for sample_id in ids]
    return [(epoch, *each) for each in zip(ids, again, strict=True)]


class KeyedDataset:
    """What a loader's workers read: indices are what `seed_sample` takes, from the epoch on.

    A sample that cannot be read is a `worker_errors.Failed`.
    """

    def __init__(self, dataset: Any, streams: FrameworkStreams, seed: int) -> None:
        self._dataset = dataset
        self._streams = streams
        self._seed = seed
        self.newest: DrawnIndex = (0, 0)

    def begin_worker(self) -> None:
        show_dataset(self._streams.worker_info(), self._dataset)

    def __getitem__(self, index: DrawnIndex) -> Any:
        self.newest = index
        seed_sample(self._streams, self._seed, *index)
        sample_id = index[1]
        return read_or_fail(lambda: self._dataset[sample_id])

    def __len__(self) -> int:
        return len(self._dataset)


def show_dataset(info: Any | None, dataset: Any) -> None:
    """Have `get_worker_info().dataset` be the script's own."""
    if info is not None:
        object.__setattr__(info, "dataset", dataset)  # both frameworks let nobody assign it


class Keyed(Protocol):
    """What a loader's workers read, with streams of its own."""

    newest: DrawnIndex  # of what it has read last

    def begin_worker(self) -> None:
        """Have the framework tell this worker about the script's dataset, as it would alone."""

    def __getitem__(self, index: Any) -> Any: ...

    def __len__(self) -> int: ...


class KeyedCollate:
    """Wraps a loader's `collate_fn` for its workers: it has streams of the batch's own."""

    def __init__(
        self, collate: Callable[[Any], Any], streams: FrameworkStreams, seed: int, keyed: Keyed
    ) -> None:
        """`keyed`: what the same loader reads."""
        self._collate = collate
        self._streams = streams
        self._seed = seed
        self._keyed = keyed

    def __call__(self, samples: Any) -> Any:
        with borrowed_numbers(self._streams):  # a stream goes on with its own
            seed_batch(self._streams, self._seed, *self._keyed.newest)
            return self._collate(samples)


def _next(streams: FrameworkStreams) -> tuple[float, float, Any]:
    """Return what is the same after the same seed, unless something was drawn since."""
    return random.random(), float(np.random.random_sample()), streams.probe()


def _times(again: int) -> tuple[int, ...]:
    return (again,) if again else ()


def _seed(streams: FrameworkStreams, key: int) -> None:
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    streams.seed(key)


def _states(streams: FrameworkStreams) -> _States:
    return random.getstate(), np.random.get_state(), streams.rng_state()


def _put_back(streams: FrameworkStreams, states: _States) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    streams.set_rng_state(states[2])
