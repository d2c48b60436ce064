"""What a sampler drew for one epoch: its samples in order, and where its batches end. Pure."""

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pod_runtime.trainer.progress.batches import Ids
from pod_runtime.trainer.progress.drawn import from_text, hash_samples, to_text

_CHUNK = 1 << 20  # samples that are hashed at once


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderRecord:
    """What the state keeps of an epoch's order; the order itself may be long."""

    epoch: int
    samples: int
    batches: int | None  # of a batch sampler; None: batches are cut to the run's size
    drawn: str  # the sum of its samples' hashes, as `drawn.to_text` has it
    digest: str  # of its samples and batches, in order

    def __post_init__(self) -> None:
        if self.epoch < 0 or self.samples < 1 or (self.batches is not None and self.batches < 1):
            raise ValueError(
                f"epoch {self.epoch} cannot have {self.batches} batches of {self.samples} samples"
            )
        if len(self.digest) != 16:
            raise ValueError(f"digest: expected 16 hexadecimal digits, got {self.digest!r:.40}")
        from_text(self.drawn)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EpochOrder:
    """The samples of one epoch, in the order in which they are read."""

    ids: Ids  # (N,); a sample may come several times, or not at all
    again: npt.NDArray[np.int32] | None  # (N,): how often it came before; None: none comes twice
    ends: Ids | None  # (B,): batch i ends before ids[ends[i]]; None: batches of the run's size
    record: OrderRecord

    def samples(self, start: int, stop: int) -> tuple[list[int], list[int]]:
        """Return these samples, and how often each came before; []: none did."""
        again = [] if self.again is None else self.again[start:stop].tolist()
        return self.ids[start:stop].tolist(), again


def make_order(epoch: int, ids: Ids, ends: Ids | None) -> EpochOrder:
    """Return the order of `epoch`; `ends`: where batches end, ascending; None: no batch sampler."""
    record = OrderRecord(
        epoch=epoch,
        samples=len(ids),
        batches=None if ends is None else len(ends),
        drawn=to_text(sum_of(epoch, ids)) or "",
        digest=_digest(ids, ends),
    )
    return EpochOrder(ids=ids, again=_again(ids), ends=ends, record=record)


def sum_of(epoch: int, ids: Ids) -> int:
    """Return the sum of the hashes of these samples, modulo 2^64, however many they are."""
    parts = range(0, len(ids), _CHUNK)
    return sum(hash_samples(epoch, ids[at : at + _CHUNK]) for at in parts) & ((1 << 64) - 1)


def _again(ids: Ids) -> npt.NDArray[np.int32] | None:
    in_order = np.sort(ids)
    is_new = np.append(True, in_order[1:] != in_order[:-1])
    if is_new.all():
        return None
    numbers = np.arange(len(ids))
    again = np.empty(len(ids), np.int32)
    # Those of one sample come side by side, in the order in which they are drawn.
    again[ids.argsort(kind="stable")] = numbers - np.maximum.accumulate(numbers * is_new)
    return again


def _digest(ids: Ids, ends: Ids | None) -> str:
    found = hashlib.blake2b(ids.astype("<i8", copy=False).tobytes(), digest_size=8)
    if ends is not None:
        found.update(b"ends" + ends.astype("<i8", copy=False).tobytes())
    return found.hexdigest()
