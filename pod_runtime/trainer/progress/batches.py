"""Decide which samples belong to which global batch, shard and rank. Pure.

Progress is an absolute cursor, never steps times world size, so that any world size reads the same
global batches, and a batch is cut into the same shards no matter which rank computes them.
"""

import functools
import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """Where training stands: the first sample that has not been committed."""

    epoch: int = 0  # 0-based
    step: int = 0  # global batches committed in this epoch
    offset: int = 0  # samples of this epoch committed; an index into its permutation
    global_step: int = 0  # global batches committed since the job began

    def __post_init__(self) -> None:
        for name in ("epoch", "step", "offset", "global_step"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: must be 0 or more, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """How an epoch is cut into global batches, and a batch into shards."""

    batch_size: int  # samples of a full global batch
    shards: int  # V: a batch is cut into so many, whatever the world size is
    dataset_length: int | None  # None: a stream, whose epochs have `steps_per_epoch` batches
    drop_last: bool = False
    steps_per_epoch: int | None = None  # only for streams
    is_even: bool = False  # shards differ by one sample at most; else all are full but the last
    # Where the batches end that a batch sampler has made, (B,); None: all are of `batch_size`.
    ends: Ids | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size: must be at least 1, got {self.batch_size}")
        if self.shards < 1:
            raise ValueError(f"shards: must be at least 1, got {self.shards}")
        if self.dataset_length is None and (self.steps_per_epoch or 0) < 1:
            raise ValueError("steps_per_epoch: a stream needs it, at least 1")

    @property
    def micro_batch(self) -> int:
        """Samples of a full shard; of the largest one where they are even."""
        return -(-self.batch_size // self.shards)

    @property
    def epoch_samples(self) -> int:
        """Samples that count in one epoch; `drop_last` leaves the rest out."""
        if self.dataset_length is None:
            assert self.steps_per_epoch is not None
            return self.steps_per_epoch * self.batch_size
        if self.drop_last and self.ends is None:
            return self.dataset_length // self.batch_size * self.batch_size
        return self.dataset_length

    def batch(self, offset: int) -> tuple[int, int]:
        """Return [start, stop) of the global batch at `offset`; empty at the epoch's end."""
        if self.ends is not None:
            after = self.ends[self._batches_before(offset) :]
            return offset, int(after[0]) if len(after) else offset
        return offset, max(offset, min(offset + self.batch_size, self._end(offset)))

    def steps_left(self, offset: int) -> int:
        """Return how many global batches follow from `offset` to the epoch's end."""
        if self.ends is not None:
            return len(self.ends) - self._batches_before(offset)
        return max(0, -(-(self._end(offset) - offset) // self.batch_size))

    def shard(self, batch_samples: int, shard: int) -> tuple[int, int]:
        """Return [start, stop) of one shard within a batch of `batch_samples`; may be empty."""
        if self.is_even:
            return batch_samples * shard // self.shards, batch_samples * (shard + 1) // self.shards
        start = min(shard * self.micro_batch, batch_samples)
        return start, min(start + self.micro_batch, batch_samples)

    def filled_shards(self, batch_samples: int) -> int:
        """Return how many shards of a batch are not empty."""
        if self.is_even:
            return min(self.shards, batch_samples)
        return -(-batch_samples // self.micro_batch)

    def _batches_before(self, offset: int) -> int:
        assert self.ends is not None
        return int(self.ends.searchsorted(offset, "right"))

    def advance(self, cursor: Cursor) -> Cursor:
        """Return the cursor after the batch at `cursor` was committed."""
        _start, stop = self.batch(cursor.offset)
        return Cursor(
            epoch=cursor.epoch,
            step=cursor.step + 1,
            offset=stop,
            global_step=cursor.global_step + 1,
        )

    def _end(self, offset: int) -> int:
        """The epoch's last offset; with `drop_last` only whole batches from `offset` on count.

        For a batch size that changed within the epoch this keeps a rest out of the epoch that
        is smaller than one batch of the size in force.
        """
        if self.drop_last and self.dataset_length is not None:
            left = max(0, self.dataset_length - offset)
            return offset + left // self.batch_size * self.batch_size
        return self.epoch_samples


def next_epoch(cursor: Cursor) -> Cursor:
    """Return the cursor at the start of the following epoch."""
    return Cursor(epoch=cursor.epoch + 1, global_step=cursor.global_step)


def rank_shards(rank: int, world_size: int, shards: int) -> range:
    """Return the consecutive shards that `rank` computes.

    Raises:
        ValueError: more trainers than shards: some would never have anything to do.
    """
    if world_size > shards:
        raise ValueError(
            f"shards: {shards} shards are too few for {world_size} trainers; "
            f"start the training with shards={world_size} or more, or run at most {shards} trainers"
        )
    return range(rank * shards // world_size, (rank + 1) * shards // world_size)


def permutation(seed: int, epoch: int, length: int, shuffle: bool = True) -> Ids:
    """Return the order of the sample ids in one epoch, (length,) int64.

    numpy guarantees that the stream of a RandomState never changes, so a checkpoint of today
    continues in the same order with any later version.
    """
    if not shuffle:
        return np.arange(length, dtype=np.int64)
    state = np.random.RandomState(stream_key(seed, epoch) & 0xFFFFFFFF)
    return state.permutation(length).astype(np.int64, copy=False)


def stream_key(*parts: int) -> int:
    """Return a 63-bit seed that belongs to `parts` alone, such as (seed, epoch, step, shard)."""
    digest = hashlib.blake2b(_packed(len(parts))(*parts), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@functools.cache
def _packed(count: int) -> Callable[..., bytes]:
    return struct.Struct(f"<{count}q").pack
