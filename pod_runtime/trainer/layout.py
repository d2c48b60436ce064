"""Lay out a state's tensors in one flat run of bytes. Pure."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pod_runtime.trainer.errors import StateError

ALIGN = 64
_PIECE = 4096  # a page, so that two writers share none but the tail's first
SCRIPT_PREFIX = "extra/"

# Types of tensors and the size of an element in bytes: numpy's names, and bfloat16.
ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
    "complex64": 8, "complex128": 16,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    name: str  # structured: "model.features.0.weight", "optimizer.features.0.weight.moment1"
    dtype: str
    shape: tuple[int, ...]
    offset: int  # into the flat bytes

    @property
    def size_bytes(self) -> int:
        size = ITEM_BYTES[self.dtype]
        for length in self.shape:
            size *= length
        return size


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayout:
    """Names, types, shapes and offsets of all tensors of a state."""

    specs: tuple[StateTensor, ...]
    total_bytes: int
    digest: str  # equal digests: bytes may be copied as they are
    text: str  # JSON
    shared_bytes: int = 0  # up to here all ranks hold the same; then comes what scripts added

    def to_json(self) -> list[Any]:
        value: list[Any] = json.loads(self.text)
        return value


def make_layout(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> StateLayout:
    """Lay (name, dtype, shape) one after the other.

    Raises:
        StateError: a type cannot be stored, or a name comes twice.
    """
    specs = []
    offset = 0
    seen: set[str] = set()
    for name, dtype, shape in tensors:
        if dtype not in ITEM_BYTES:
            raise StateError(
                f"{name}: tensors of type {dtype} cannot be stored; keep it as one of "
                f"{', '.join(ITEM_BYTES)}, or outside of the state if it never changes (a buffer "
                f"of the model that is not persistent)"
            )
        if name in seen:
            raise StateError(f"{name}: two tensors of the state have this name")
        seen.add(name)
        spec = StateTensor(name=name, dtype=dtype, shape=tuple(shape), offset=offset)
        specs.append(spec)
        offset = -(-(offset + spec.size_bytes) // ALIGN) * ALIGN
    text = json.dumps([[spec.name, spec.dtype, list(spec.shape)] for spec in specs])
    digest = hashlib.sha256(text.encode()).hexdigest()
    own = [spec.offset for spec in specs if spec.name.startswith(SCRIPT_PREFIX)]
    return StateLayout(
        specs=tuple(specs),
        total_bytes=offset,
        digest=digest,
        text=text,
        shared_bytes=min(own, default=offset),
    )


def split_bytes(layout: StateLayout, writers: int, index: int) -> tuple[int, int]:
    """Return the range (start, stop) that the writer `index` of a node contributes to a state.

    The ranges of all writers together are the whole. What belongs to the script may differ between
    ranks, and a state must not be a mixture: the first writer contributes all of that.
    """
    share = -(-layout.total_bytes // writers)
    tail = min(layout.shared_bytes, max(0, layout.total_bytes - share) // ALIGN * ALIGN)
    if writers == 1:
        tail = 0
    if index == 0:
        return tail, layout.total_bytes
    piece = -(-tail // ((writers - 1) * _PIECE)) * _PIECE
    return min(tail, (index - 1) * piece), min(tail, index * piece)


def layout_from_json(data: object) -> StateLayout:
    """Rebuild a layout from what `StateLayout.to_json` returned.

    Raises:
        StateError: it is not a layout.
    """
    if not isinstance(data, list):
        raise StateError(f"layout: expected a list, got {data!r:.60}")
    tensors = []
    for entry in data:
        match entry:
            case [str(name), str(dtype), list(shape)] if all(type(n) is int for n in shape):
                tensors.append((name, dtype, tuple(shape)))
            case _:
                raise StateError(f"layout: expected [name, dtype, shape], got {entry!r:.80}")
    return make_layout(tensors)


def missing_and_surplus(stored: StateLayout, wanted: Mapping[str, tuple[int, ...]]) -> str:
    """Return how stored tensors differ from `wanted` (name -> shape); "" if they do not."""
    have = {spec.name: spec.shape for spec in stored.specs}
    parts = []
    missing = sorted(wanted.keys() - have.keys())
    surplus = sorted(have.keys() - wanted.keys())
    reshaped = sorted(name for name in wanted.keys() & have.keys() if wanted[name] != have[name])
    if missing:
        parts.append(f"missing: {_some(missing)}")
    if surplus:
        parts.append(f"not in the model: {_some(surplus)}")
    if reshaped:
        name = reshaped[0]
        parts.append(f"other shapes: {name} is {list(have[name])}, expected {list(wanted[name])}")
    return "; ".join(parts)


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
