"""Options of a reader: types on the wire, top-k, padding, cache, combination of services."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Literal

from distill_reader.balance.addresses import check_name, registry_addresses
from distill_reader.errors import UsageError
from distill_reader.model.output_encodings import MAX_TOP_K
from distill_reader.student.clients.endpoints import endpoints_of, servers_of

IN_DTYPES = ("uint8",)
PREDICT_DTYPES = ("float16",)

OutputKind = Literal["probabilities", "logits"]
Rest = Literal["uniform", "renormalize"]
_KINDS = ("probabilities", "logits")
_RESTS = ("uniform", "renormalize")


def to_bytes(name: str, mebibytes: object) -> int:
    """Return how many bytes that many MiB are. Raises: UsageError."""
    if isinstance(mebibytes, bool) or not isinstance(mebibytes, Integral) or int(mebibytes) < 1:
        raise UsageError(f"{name}: expected an integer of 1 or more, got {mebibytes!r}")
    return int(mebibytes) << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK:
    """Which predictions are sent as their largest values, and how the others are filled in."""

    k: int
    of: OutputKind = "probabilities"
    rest: Rest = "uniform"
    dense: bool = True  # hand out (B, C) rows; else values and indices
    predicts: tuple[str, ...] | None = None  # None: all
    classes: int | None = None  # C; None: the teacher tells

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
                "top_k: values and indices of logits do not tell how much is left for the others: "
                "take dense rows, or rest='renormalize'"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """Which fields are padded, so that samples of different lengths share a request."""

    values: tuple[tuple[str, float], ...]  # field and padding value
    multiple_of: int  # to which lengths are rounded up
    outputs: tuple[str, ...] | None = None  # cut to the length before; None: not set

    def __post_init__(self) -> None:
        if type(self.multiple_of) is not int or self.multiple_of < 1:
            raise UsageError(
                f"padding: multiple_of: expected an integer of 1 or more, got {self.multiple_of!r}"
            )
        for name, value in self.values:
            if not isinstance(value, int | float):
                raise UsageError(f"padding: {name}: expected a number, got {value!r}")

    def length(self, length: int) -> int:
        """Return the padded length of a sample of this length."""
        return max(1, -(-length // self.multiple_of)) * self.multiple_of

    def identity(self) -> tuple[tuple[str, str], ...]:
        """Return the settings that may change predictions, for the key of a cache."""
        return tuple((name, f"{value} to {self.multiple_of}") for name, value in self.values)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CacheOptions:
    """Where soft labels are cached, and what identifies a sample.

    No two are equal: each call of `set_cache` opens the folder anew, for the teachers of then.
    """

    folder: str
    id: str  # name in `ins` of the samples' ids
    variant: str | None = None  # name in `ins` of the augmentation's seed; None: there is none
    max_bytes: int = 10 << 30  # of the whole folder
    teacher_version: str | None = None  # None: the digest that the teacher offers
    data: str | None = None  # name of the data set and its preparation; None: not set

    def __post_init__(self) -> None:
        if not self.folder:
            raise UsageError("cache: folder: expected a path, got nothing")
        if not self.id or self.id == self.variant:
            raise UsageError(f"cache: id and variant: expected two names, got {self.id!r} twice")
        if self.teacher_version == "":
            raise UsageError("cache: teacher_version: expected a text or None, got an empty one")
        if self.data is not None and (type(self.data) is not str or not self.data):
            raise UsageError(
                "cache: data: expected a text such as 'imagenet-train@224', or None, got "
                f"{self.data!r}"
            )


@dataclass(frozen=True, slots=True)
class Discovered:
    """Teachers from a discovery service; the arguments are those of `set_dynamic_teacher`."""

    discovery_servers: Sequence[str] | str
    service_name: str
    require_max_teacher: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "discovery_servers", servers_of(self.discovery_servers))
        check_name(self.service_name, "teacher_service_name")
        if type(self.require_max_teacher) is not int or self.require_max_teacher < 1:
            raise UsageError(
                "require_max_teacher: expected an integer of 1 or more, got "
                f"{self.require_max_teacher!r}"
            )

    @property
    def servers(self) -> tuple[str, ...]:
        return tuple(self.discovery_servers)

    def __repr__(self) -> str:
        """Leave out the password of a Redis: `print_config` prints this."""
        servers = tuple(map(str, registry_addresses(self.servers, "discovery_servers")))
        return f"Discovered({servers}, {self.service_name!r}, {self.require_max_teacher})"


@dataclass(frozen=True, slots=True, kw_only=True)
class CombinedService:
    """One of several services whose predictions are combined."""

    name: str
    endpoints: tuple[str, ...] = ()  # (): they are discovered
    discovered: Discovered | None = None  # None: the endpoints are fixed
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.name:
            raise UsageError(f"teachers combined: expected a name, got {self.name!r}")
        if not 0 < self.weight < float("inf"):
            raise UsageError(
                f"teachers combined: {self.name}: weight: expected > 0, got {self.weight!r}"
            )

    @property
    def most_teachers(self) -> int:
        found = self.discovered
        return len(self.endpoints) if found is None else found.require_max_teacher


def combined_services(
    teachers: Mapping[str, Sequence[str] | str | Discovered], weights: Mapping[str, float]
) -> tuple[CombinedService, ...]:
    """Check and return the services to combine.

    Raises:
        UsageError: a service is wrong, or there are fewer than two; names it.
    """
    unknown = sorted(set(weights) - set(teachers))
    if unknown:
        raise UsageError(f"weights: {unknown[0]!r} is none of the services: {', '.join(teachers)}")
    if len(teachers) < 2:
        raise UsageError(
            f"teachers combined: expected two services or more, got {', '.join(teachers) or 'none'}"
            ": for one there is set_fixed_teacher and set_dynamic_teacher"
        )
    return tuple(
        CombinedService(
            name=name,
            endpoints=() if isinstance(each, Discovered) else endpoints_of(each),
            discovered=each if isinstance(each, Discovered) else None,
            weight=weights.get(name, 1.0),
        )
        for name, each in teachers.items()
    )


def check_wire_ins(
    given: str | Mapping[str, str] | None, names: Sequence[str]
) -> tuple[tuple[str, str], ...]:
    """Check and return fields with the dtype they are sent in; field "": all that can.

    Raises:
        UsageError: a field or dtype is unknown.
    """
    if given is None:
        return ()
    pairs = (("", given),) if isinstance(given, str) else tuple(given.items())
    for name, dtype in pairs:
        if name and name not in names:
            raise UsageError(
                f"wire_dtype: ins: {name!r} is none of those that are sent: {', '.join(names)}"
            )
        if dtype == "float16":
            raise UsageError(
                "wire_dtype: ins: float16 was removed, because rounding costs more time than it "
                "saves: leave it out, or send raw pixels as uint8"
            )
        if dtype not in IN_DTYPES:
            raise UsageError(f"wire_dtype: ins: expected {' or '.join(IN_DTYPES)}, got {dtype!r}")
    return pairs


def check_wire_predicts(given: str | None) -> str:
    """Check and return the dtype in which teachers send floats; "": as served.

    Raises:
        UsageError: the dtype is not supported.
    """
    if given is not None and given not in PREDICT_DTYPES:
        raise UsageError(
            f"wire_dtype: predicts: expected {' or '.join(PREDICT_DTYPES)}, got {given!r}"
        )
    return given or ""


def cache_folder(folder: str | os.PathLike[str]) -> str:
    return os.path.abspath(os.path.expanduser(os.fspath(folder)))
