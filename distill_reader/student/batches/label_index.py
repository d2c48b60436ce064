"""An index in memory: in which row of a file the soft labels of a sample are. Pure.

A key is two 64-bit numbers, mixed into one. The index takes 16 bytes per sample and is searched for
many samples at once; a Python dict would take ten times as much memory, and a loop.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from distill_reader.errors import UsageError
from distill_reader.model.tensors import array_of

Keys = np.ndarray[tuple[int, int], np.dtype[np.uint64]]  # (N, 2)
Numbers = np.ndarray[tuple[int], np.dtype[Any]]

_LEAST_MERGE = 4096
_C1, _C2, _C3 = (
    np.uint64(each) for each in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


class LabelIndex:
    """Maps mixed keys to rows. If a key was added twice, the last row counts."""

    def __init__(self) -> None:
        self._mixes: Numbers = np.empty(0, np.uint64)  # sorted, each once
        self._rows: Numbers = np.empty(0, np.int64)
        self._recent: dict[int, int] = {}  # added since they were last sorted

    def __len__(self) -> int:
        """Return the number of keys; some may be counted twice."""
        return len(self._mixes) + len(self._recent)

    def find(self, mixes: Numbers) -> Numbers:
        """Return the row of each key; -1: there is none."""
        rows = np.full(len(mixes), -1, np.int64)
        if len(self._mixes):
            at = np.minimum(np.searchsorted(self._mixes, mixes), len(self._mixes) - 1)
            is_there = self._mixes[at] == mixes
            rows[is_there] = self._rows[at[is_there]]
        if self._recent:
            recent = self._recent
            for number, mix in enumerate(mixes.tolist()):
                row = recent.get(mix)
                if row is not None:
                    rows[number] = row
        return rows

    def add(self, mixes: Numbers, first_row: int) -> None:
        """Add the keys of consecutive rows, from `first_row` on."""
        if len(mixes) >= _LEAST_MERGE:
            self._merge(mixes, np.arange(first_row, first_row + len(mixes)))
            return
        self._recent.update(
            zip(mixes.tolist(), range(first_row, first_row + len(mixes)), strict=True)
        )
        if len(self._recent) >= max(_LEAST_MERGE, len(self._mixes) // 8):
            self._merge(np.empty(0, np.uint64), np.empty(0, np.int64))

    def forget(self, mixes: Numbers) -> None:
        """Remove keys whose rows are damaged."""
        for mix in mixes.tolist():
            self._recent.pop(mix, None)
        if len(self._mixes):
            keep = ~np.isin(self._mixes, mixes)
            self._mixes, self._rows = self._mixes[keep], self._rows[keep]

    def _merge(self, mixes: Numbers, rows: Numbers) -> None:
        recent = len(self._recent)
        all_mixes = np.concatenate(
            [self._mixes, np.fromiter(self._recent.keys(), np.uint64, recent), mixes]
        )
        all_rows = np.concatenate(
            [self._rows, np.fromiter(self._recent.values(), np.int64, recent), rows]
        )
        self._recent = {}
        order = np.argsort(all_mixes, kind="stable")
        all_mixes, all_rows = all_mixes[order], all_rows[order]
        is_last = np.ones(len(all_mixes), bool)
        is_last[:-1] = all_mixes[1:] != all_mixes[:-1]
        self._mixes, self._rows = all_mixes[is_last], all_rows[is_last]


def mix(keys: Keys) -> Numbers:
    """Return one 64-bit hash of each key (the finalizer of SplitMix64)."""
    mixed: Numbers = _finish(keys[:, 1] + _C1 * _finish(keys[:, 0] + _C1))
    return mixed


def _finish(numbers: Any) -> Any:
    numbers = (numbers ^ (numbers >> np.uint64(30))) * _C2
    numbers = (numbers ^ (numbers >> np.uint64(27))) * _C3
    return numbers ^ (numbers >> np.uint64(31))


def make_keys(ids: Any, variants: Any, samples: int) -> Keys:
    """Return the keys of samples.

    Args:
        ids: integers or texts, one per sample.
        variants: of the sample's augmentation: one for all, or one per sample; None: there is none.

    Raises:
        UsageError: they have another type, or are not one per sample.
    """
    if not samples:
        return np.empty((0, 2), np.uint64)  # numpy makes floats of an empty list
    found_ids = _column("id", ids, samples)
    variants = 0 if variants is None else variants
    found_variants = _column("variant", variants, samples, may_repeat=True)
    keys = np.empty((samples, 2), np.uint64)
    if found_ids.dtype.kind in "iu" and found_variants.dtype.kind in "iu":
        keys[:, 0] = found_variants.astype(np.int64).view(np.uint64)
        keys[:, 1] = found_ids.astype(np.int64).view(np.uint64)
        return keys
    for row, (one, variant) in enumerate(
        zip(found_ids.tolist(), found_variants.tolist(), strict=True)
    ):
        keys[row] = _hash(one, variant)
    return keys


def _hash(one: object, variant: object) -> Sequence[int]:
    total = hashlib.blake2b(digest_size=16)
    for part in (variant, one):
        # Names of files may have bytes that are no text, which Python keeps as surrogates.
        data = part if isinstance(part, bytes) else str(part).encode(errors="surrogatepass")
        total.update(len(data).to_bytes(8, "little") + data)
    digest = total.digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def _column(what: str, values: Any, samples: int, *, may_repeat: bool = False) -> Any:
    array = array_of(values) if hasattr(values, "numpy") else np.asarray(values)
    if may_repeat and array.size == 1:
        array = np.broadcast_to(array.reshape(1), samples)
    elif array.size == samples:
        array = array.reshape(samples)
    else:
        raise UsageError(
            f"cache: {what}: expected one per sample, {samples}, got shape {list(array.shape)}"
        )
    is_text = array.dtype.kind in "SU" or (
        array.dtype.kind == "O" and all(isinstance(each, str | bytes) for each in array)
    )
    if array.dtype.kind not in "iu" and not is_text:
        raise UsageError(f"cache: {what}: expected integers or texts, got {array.dtype}")
    return array
