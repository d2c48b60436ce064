"""Have a script's sampler say which samples come: its whole list for an epoch, drawn once.

The list has to follow from (seed, epoch) alone, so that every trainer draws the same one, and one
that starts later draws it again. So the generators of Python, numpy and the framework, and those
that the sampler keeps as attributes, are seeded before it is drawn and put back afterwards.
"""

import operator
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from pod_runtime.trainer.data.streams import FrameworkStreams, borrowed_numbers, seed_order
from pod_runtime.trainer.errors import UsageError
from pod_runtime.trainer.progress.batches import Ids
from pod_runtime.trainer.progress.epoch_order import EpochOrder, make_order

_HELD = ("sampler", "batch_sampler", "base_sampler")  # by which names one sampler holds another
_PARTS = (("num_replicas", "rank"), ("nranks", "local_rank"))  # of those that cut by rank
_MOST_SAMPLES, _MOST_TIMES = 10_000_000, 100  # or so many times the data: no longer list ends
REMEDY = (
    "its list has to follow from seed and epoch alone: let it draw from Python's, numpy's or the "
    "framework's generator or from one that it keeps as an attribute, all of which are seeded "
    "before each epoch; let it take the epoch from set_epoch(epoch), not from a count of its own; "
    "and let it change nothing that the next list is made of, as a shuffle in place does"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """A sampler that decides which samples come."""

    sampler: Any  # yields ids, or lists of them
    name: str
    makes_batches: bool  # False: it yields ids, and batches are cut to the run's size
    where: str = "train_set"  # the argument that it came with, for errors

    def __post_init__(self) -> None:
        for each in _chain(self.sampler):
            for of, rank in _PARTS:
                parts = getattr(each, of, None)
                if isinstance(parts, int) and parts > 1:
                    raise UsageError(
                        f"{self.where}: the DataLoader's {type(each).__name__} cuts the epoch into "
                        f"{parts} parts, one for each trainer, and the loop does that itself, "
                        f"whatever their number is; make it with num_replicas=1, {rank}=0"
                    )

    @property
    def batch_size(self) -> int | None:
        """About how many samples a batch has, as far as a batch sampler says it."""
        size = getattr(self.sampler, "batch_size", None)
        return size if type(size) is int and size >= 1 else None


class SampledOrders:
    """The epochs' orders, as a sampler draws them. Used by the main thread alone."""

    def __init__(
        self,
        sampling: Sampling,
        streams: FrameworkStreams,
        *,
        seed: int,
        length: int,
        least: int = 1,
        most: int | None = None,
        at_once: int = 1,
    ) -> None:
        """
        Args:
            length: of the dataset.
            least: how many ids an epoch has at least.
            most: how many of the sampler's ids or batches are an epoch; None: all of them.
            at_once: batches of a batch sampler that make one of the order's, or fewer at the end.
        """
        self.name = sampling.name
        self._sampling = sampling
        self._streams = streams
        self._seed = seed
        self._length = length
        self._least, self._most = least, most
        self._at_once = at_once
        self._newest: EpochOrder | None = None  # None: nothing was drawn yet

    def of(self, epoch: int) -> EpochOrder:
        """Return the order of `epoch`.

        Raises:
            UsageError: what the sampler yields cannot be read.
        """
        if self._newest is None or self._newest.record.epoch != epoch:
            self._newest = self._draw(epoch)
        return self._newest

    def check_repeats(self, epochs: int) -> None:
        """See that the sampler draws the first epoch again as before, the second one in between.

        Raises:
            UsageError: it does not.
        """
        first = self._draw(0)
        if epochs > 1:
            self._draw(1)
        self._newest = self._draw(0)
        if self._newest.record != first.record:
            raise UsageError(
                f"train_set: the DataLoader's {self.name} drew other samples for epoch 0 when it "
                f"was asked again; {REMEDY}"
            )

    def check_unchanged(self, epoch: int) -> None:
        """See that the sampler still draws what it has drawn for an epoch.

        Raises:
            UsageError: it does not.
        """
        if self._draw(epoch).record != self.of(epoch).record:
            raise UsageError(
                f"train_set: the DataLoader's {self.name} draws other samples for epoch {epoch} "
                f"than when that began: the script has changed it since; {REMEDY}"
            )

    def _draw(self, epoch: int) -> EpochOrder:
        sampler = self._sampling.sampler
        chain = _chain(sampler)
        with borrowed_numbers(self._streams), _borrowed(chain, (self._seed, epoch)):
            seed_order(self._streams, self._seed, epoch)
            for each in chain:
                if callable(getattr(each, "set_epoch", None)):
                    each.set_epoch(epoch)
            ids, ends = self._take(islice(iter(sampler), self._most))
        self._check(epoch, ids)
        return make_order(epoch, ids, ends)

    def _take(self, items: Iterable[Any]) -> tuple[Ids, Ids | None]:
        most = max(_MOST_SAMPLES, _MOST_TIMES * self._length)
        sizes: list[int] = []

        def batches() -> Iterator[Any]:
            total = 0
            for item in items:
                batch = item.tolist() if hasattr(item, "tolist") else item
                if not (hasattr(batch, "__iter__") or hasattr(batch, "__getitem__")):
                    raise self._no_indices(batch)
                batch = list(batch)
                total += len(batch)
                if not batch or total > most:
                    raise self._refusal("an empty batch" if not batch else f"more than {most} ids")
                sizes.append(len(batch))
                yield from batch

        if self._sampling.makes_batches:
            ids = np.fromiter(map(self._index, batches()), np.int64)
            ends = np.cumsum(sizes, dtype=np.int64)
            places = np.arange(self._at_once - 1, len(ends) + self._at_once - 1, self._at_once)
            return ids, ends[np.minimum(places, len(ends) - 1)]
        ids = np.fromiter(map(self._index, islice(items, most + 1)), np.int64)
        if len(ids) > most:
            raise self._refusal(f"more than {most} ids")
        return ids, None

    def _index(self, item: Any) -> int:
        try:
            return operator.index(item)
        except TypeError:  # of what it has yielded; one of its own code is told as it is
            raise self._no_indices(item) from None

    def _no_indices(self, item: Any) -> UsageError:
        return self._refusal(f"no indices of samples ({item!r:.80})")

    def _check(self, epoch: int, ids: Ids) -> None:
        if len(ids) < self._least:
            raise self._refusal(f"{len(ids)} samples for epoch {epoch}, which make no batch")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self._length:
            raise self._refusal(
                f"sample {low if low < 0 else high} for epoch {epoch}, of a dataset that has "
                f"0 to {self._length - 1}"
            )

    def _refusal(self, what: str) -> UsageError:
        kind = "lists of indices" if self._sampling.makes_batches else "indices"
        return UsageError(
            f"{self._sampling.where}: the DataLoader's {self.name} gave {what}; it has to yield "
            f"{kind} of samples, and to end after an epoch (or pass steps_per_epoch=)"
        )


def _chain(sampler: Any) -> list[Any]:
    """Return a sampler, and those that it holds."""
    found: list[Any] = []
    waiting = [sampler]
    while waiting:
        each = waiting.pop()
        if any(each is other for other in found) or not hasattr(each, "__iter__"):
            continue
        found.append(each)
        waiting += [held for name in _HELD if (held := getattr(each, name, None)) is not None]
    return found


@contextmanager
def _borrowed(chain: list[Any], key: tuple[int, int]) -> Iterator[None]:
    """Seed the generators that these samplers hold, and put them back."""
    put_back: list[Callable[[], None]] = []
    seen: set[int] = set()
    for each in chain:
        for generator in vars(each).values() if hasattr(each, "__dict__") else ():
            if id(generator) in seen:
                continue
            seen.add(id(generator))
            undo = _seed_own(generator, (*key, len(put_back)))
            if undo is not None:
                put_back.append(undo)
    try:
        yield
    finally:
        for undo in put_back:
            undo()


def _seed_own(generator: Any, key: tuple[int, ...]) -> Callable[[], None] | None:
    """Seed a generator by `key`; return what puts it back. None: it is no generator."""
    numbers = np.random.SeedSequence(key)
    seed = int(numbers.generate_state(1, np.uint64)[0]) >> 1
    if isinstance(generator, random.Random):
        python = generator.getstate()
        generator.seed(seed)
        return lambda: generator.setstate(python)
    if isinstance(generator, np.random.RandomState):
        legacy = generator.get_state()
        generator.seed(seed & 0xFFFFFFFF)
        return lambda: generator.set_state(legacy)
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        before = bits.state
        bits.state = type(bits)(numbers).state

        def put_back() -> None:
            bits.state = before

        return put_back
    if all(hasattr(generator, name) for name in ("manual_seed", "get_state", "set_state")):
        state = generator.get_state()  # the framework's
        generator.manual_seed(seed & 0x7FFFFFFF)
        return lambda: generator.set_state(state)
    return None
