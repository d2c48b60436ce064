"""Fingerprint the samples that were drawn: the sum of their hashes, modulo 2^64. Pure.

What a trainer should draw follows from the run's seed. The ids that it asks the data set for are
hashed, so that a proof need not trust that these are what they should be. Sums do not depend on
which trainer read a sample, or when: those of all shards, ranks and steps are simply added.

The hash of sample `i` of an epoch is output number `i` of the SplitMix64 generator that starts at
the epoch's own hash (Steele, Lea and Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA
2014; with the constants of Vigna's splitmix64.c). Other samples give the same sum with probability
2^-64.
"""

import functools
import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_TEXT = re.compile("[0-9a-f]{16}")
PIECES = 8
_AHEAD = 1 << 14  # samples that are hashed at once


def hash_samples(epoch: int, ids: Sequence[int] | npt.NDArray[np.int64]) -> int:
    """Return the sum of the hashes of these samples of `epoch`."""
    return int(np.add.reduce(_hashes(epoch, ids)))


def _hashes(epoch: int, ids: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    mixed = np.array(ids, np.uint64)
    mixed *= _U_GAMMA
    mixed += _start(epoch)
    mixed ^= mixed >> _U_30
    mixed *= _U_MIX_1
    mixed ^= mixed >> _U_27
    mixed *= _U_MIX_2
    mixed ^= mixed >> _U_31
    return mixed


class OrderHashes:
    """Sums of the hashes of consecutive samples of an epoch's order.

    Hashed ahead, in long pieces: what hashing the samples of one small shard costs is not their
    number, but the ten operations.
    """

    def __init__(self, epoch: int, ids: npt.NDArray[np.int64]) -> None:
        """`ids`: the order, (N,); it is not changed any more."""
        self._epoch, self._ids = epoch, ids
        # Where the piece at hand begins; sums of its first 0, 1, 2, ... hashes. Replaced as one:
        # a reader that reads ahead may ask in a thread of its own.
        self._piece = 0, np.zeros(1, np.uint64)

    def sum(self, start: int, stop: int) -> int:
        """Return that of the samples at the positions [start, stop)."""
        first, sums = self._piece
        if start < first or stop - first >= len(sums):
            first, sums = self._piece = start, self._sums(start, max(stop, start + _AHEAD))
        return int(sums[stop - first]) - int(sums[start - first]) & _MASK

    def _sums(self, start: int, stop: int) -> npt.NDArray[np.uint64]:
        hashes = _hashes(self._epoch, self._ids[start:stop])
        sums = np.zeros(len(hashes) + 1, np.uint64)
        np.cumsum(hashes, out=sums[1:])
        return sums


def add(first: int | None, second: int | None) -> int | None:
    """Add two sums; None: not known."""
    return None if first is None or second is None else (first + second) & _MASK


def subtract(first: int | None, second: int | None) -> int | None:
    """Subtract a part from a sum; None: not known."""
    return None if first is None or second is None else (first - second) & _MASK


def to_pieces(value: int) -> list[float]:
    """Cut a sum into bytes: their sums over up to 65,000 ranks are exact in float32."""
    return [*map(float, value.to_bytes(PIECES, "little"))]


def from_pieces(sums: Sequence[float]) -> int:
    """Return the total of the ranks' sums, from the sums of their pieces."""
    total = 0
    for each in reversed(sums):
        total = (total << 8) + round(each)
    return total & _MASK


def to_text(value: int | None) -> str | None:
    """Return a sum as JSON holds it: not as a number, which many programs round."""
    return None if value is None else f"{value:016x}"


def from_text(text: str | None) -> int | None:
    """Read what `to_text` returned.

    Raises:
        ValueError: it is not a sum.
    """
    if text is None:
        return None
    if not _TEXT.fullmatch(text):
        raise ValueError(f"expected 16 hexadecimal digits, got {text!r:.40}")
    return int(text, 16)


@functools.lru_cache(maxsize=8)
def _start(epoch: int) -> npt.NDArray[np.uint64]:
    """Return the generator's state before output 0 of this epoch."""
    value = ((epoch + 1) * _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    value ^= value >> 31
    return _word((value + _GAMMA) & _MASK)


def _word(value: int) -> npt.NDArray[np.uint64]:
    return np.array(value, np.uint64)  # numpy would make this of a number in every operation


_U_GAMMA, _U_MIX_1, _U_MIX_2 = _word(_GAMMA), _word(_MIX_1), _word(_MIX_2)
_U_30, _U_27, _U_31 = _word(30), _word(27), _word(31)
