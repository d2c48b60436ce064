"""Options of what travels and of what comes back: types on the wire, top-k, cache, combination."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from distill_reader.errors import UsageError
from distill_reader.forms import MAX_TOP_K

IN_DTYPES = ("float16", "uint8")
PREDICT_DTYPES = ("float16",)

Kind = Literal["probabilities", "logits"]
Rest = Literal["uniform", "renormalize"]
_KINDS = ("probabilities", "logits")
_RESTS = ("uniform", "renormalize")
_MIN_CACHE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK:
    """Of which predictions only the largest values are sent, and what becomes of the others."""

    k: int
    of: Kind = "probabilities"
    rest: Rest = "uniform"
    dense: bool = True  # hand out (B, C) rows; else values and indices
    predicts: tuple[str, ...] | None = None  # None: all
    classes: int | None = None  # C; None: as the teacher says

    def __post_init__(self) -> None:
        if type(self.k) is not int or not 1 <= self.k <= MAX_TOP_K:
            raise UsageError(f"top_k: k: expected an integer of 1 to {MAX_TOP_K}, got {self.k!r}")
        if self.of not in _KINDS:
            raise UsageError(f"top_k: of: expected {' or '.join(_KINDS)}, got {self.of!r}")
        if self.rest not in _RESTS:
            raise UsageError(f"top_k: rest: expected {' or '.join(_RESTS)}, got {self.rest!r}")
        if self.classes is not None and (type(self.classes) is not int or self.classes < self.k):
            raise UsageError(
                f"top_k: classes: expected an integer of k or more, got {self.classes!r}"
            )
        if not self.dense and self.of == "logits" and self.rest == "uniform":
            raise UsageError(
                "top_k: values and indices of logits do not say how much is left for the others: "
                "take dense rows, or rest='renormalize'"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """Where soft labels are kept, and what tells samples apart."""

    folder: str
    id: str  # name in `ins` of the samples' ids
    variant: str | None = None  # name in `ins` of the augmentation's seed; None: there is none
    max_bytes: int = 10 << 30  # of the whole folder
    teacher_version: str | None = None  # None: the digest that the teacher offers

    def __post_init__(self) -> None:
        if not self.folder:
            raise UsageError("cache: folder: expected a path, got nothing")
        if not self.id or self.id == self.variant:
            raise UsageError(f"cache: id and variant: expected two names, got {self.id!r} twice")
        if self.max_bytes < _MIN_CACHE_BYTES:
            raise UsageError(f"cache: expected 1 MiB or more, got {self.max_bytes} bytes")
        if self.teacher_version == "":
            raise UsageError("cache: teacher_version: expected a text or None, got an empty one")


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One of several teachers that are combined: a service of its own."""

    name: str
    endpoints: tuple[str, ...]
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.name or not self.endpoints:
            raise UsageError(f"teachers combined: {self.name!r}: names no endpoint")
        if not 0 < self.weight < float("inf"):
            raise UsageError(
                f"teachers combined: {self.name}: weight: expected > 0, got {self.weight}"
            )


def check_wire_ins(
    given: str | Mapping[str, str] | None, names: Sequence[str]
) -> tuple[tuple[str, str], ...]:
    """Return field and dtype of what is sent in another type; field "": all that it suits.

    Raises:
        UsageError: a name or dtype is none of those there are.
    """
    if given is None:
        return ()
    pairs = (("", given),) if isinstance(given, str) else tuple(given.items())
    for name, dtype in pairs:
        if name and name not in names:
            raise UsageError(
                f"wire_dtype: ins: {name!r} is none of those that are sent: {', '.join(names)}"
            )
        if dtype not in IN_DTYPES:
            raise UsageError(
                f"wire_dtype: ins: expected one of {', '.join(IN_DTYPES)}, got {dtype!r}"
            )
    return pairs


def check_wire_predicts(given: str | None) -> str:
    """Return the dtype in which floats come back; "": as they are served. Raises: UsageError."""
    if given is not None and given not in PREDICT_DTYPES:
        raise UsageError(
            f"wire_dtype: predicts: expected {' or '.join(PREDICT_DTYPES)}, got {given!r}"
        )
    return given or ""


def cache_folder(folder: str | os.PathLike[str]) -> str:
    return os.path.abspath(os.path.expanduser(os.fspath(folder)))
