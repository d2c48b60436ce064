"""The settings of a DistillReader: from its setters, overridden by environment variables."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import Literal

import numpy as np

from distill_reader.balance.addresses import check_name, registry_addresses
from distill_reader.errors import UsageError
from distill_reader.student.clients.access import TeacherAccess
from distill_reader.student.clients.endpoints import servers_of
from distill_reader.student.labels.frameworks import Framework
from distill_reader.student.options import (
    CacheOptions,
    CombinedService,
    OutputKind,
    Padding,
    TopK,
    check_wire_ins,
)

# Where the original looks for a client prototxt by default.
DEFAULT_CONF_FILE = Path("serving_conf", "serving_client_conf.prototxt")

Policy = Literal["raise", "skip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderSettings:
    """All settings of a reader except its generator."""

    ins: tuple[str | None, ...]  # name of each field of the user's tuples; None: not sent
    predicts: tuple[str, ...]  # outputs wanted, in this order
    teachers: tuple[str, ...] = ()  # endpoints; (): none are given
    access: TeacherAccess = field(default_factory=TeacherAccess)  # headers and certificates
    teacher_batch_size: int | None = None  # most samples of one request; None: bounded by bytes
    conf_file: str | None = None  # client prototxt; None: the teachers tell what they take
    require_max_teacher: int = 1  # of a discovery service; a fixed list is used whole
    no_teacher_timeout_s: float | None = None  # None: wait without limit
    no_teacher_policy: Policy = "raise"
    answer_timeout_s: float | None = None  # None: derived from each teacher's pace
    hedging: bool = True  # late requests are sent to a second teacher
    mixed_versions: bool = False  # teachers of different models may answer in one iteration
    padding: Padding | None = None  # None: samples are sent as long as they are
    max_memory_bytes: int = 256 << 20  # of samples and predictions between generator and consumer
    discovery_servers: tuple[str, ...] = ()  # (): no discovery service
    service_name: str | None = None  # of its teachers; None: no discovery service
    wire_ins: tuple[tuple[str, str], ...] = ()  # (field, "uint8"); field "": all that can
    wire_predicts: str = ""  # dtype in which teachers send floats; "": as they serve them
    top_k: TopK | None = None  # None: teachers send all values
    cache: CacheOptions | None = None  # None: labels are not cached
    combined_services: tuple[
        CombinedService, ...
    ] = ()  # services whose predictions are combined; (): one service
    combined_kind: OutputKind = "probabilities"  # what those are
    tensors: Framework | None = None  # of which items are made; None: they stay numpy arrays

    def __post_init__(self) -> None:
        _check_names(self.ins, self.predicts)
        for name, value in (
            ("teacher_batch_size", self.teacher_batch_size),
            ("require_max_teacher", self.require_max_teacher),
        ):
            if value is not None and (type(value) is not int or value < 1):
                raise UsageError(f"{name}: expected an integer of 1 or more, got {value!r}")
        for name, timeout_s, none in (
            ("no_teacher_timeout_s", self.no_teacher_timeout_s, "to wait for ever"),
            ("timeout_s", self.answer_timeout_s, "for what a teacher's pace suggests"),
        ):
            number = isinstance(timeout_s, Real)
            if timeout_s is not None and not (number and 0 < timeout_s < float("inf")):
                raise UsageError(f"{name}: expected seconds > 0, or None {none}, got {timeout_s!r}")
        switches: dict[str, object] = {
            "hedging": self.hedging,
            "mixed_versions": self.mixed_versions,
        }
        for name, switch in switches.items():
            if not isinstance(switch, bool | np.bool_ | int) or switch not in (0, 1):
                raise UsageError(f"{name}: expected True or False, got {switch!r}")
        if self.no_teacher_policy not in ("raise", "skip"):
            raise UsageError(f"policy: expected 'raise' or 'skip', got {self.no_teacher_policy!r}")
        if self.discovery_servers:
            registry_addresses(self.discovery_servers, "discovery_servers")
            check_name(self.service_name, "teacher_service_name")
        self._check_cache()
        check_wire_ins(dict(self.wire_ins), [name for _, name in self.sent])
        self._check_combined()
        self._check_padding()
        if self.top_k is not None:
            unknown = set(self.top_k.predicts or ()) - set(self.predicts)
            if unknown:
                raise UsageError(
                    f"top_k: predicts: {min(unknown)!r} is none of those that are wanted: "
                    f"{', '.join(self.predicts)}"
                )

    def _check_cache(self) -> None:
        cache = self.cache
        if cache is None:
            return
        names = [name for name in self.ins if name is not None]
        for what, name in (("id", cache.id), ("variant", cache.variant)):
            if name is not None and name not in names:
                raise UsageError(
                    f"cache: {what}: {name!r} is none of the names in `ins` ({', '.join(names)}): "
                    "name the field that has it so"
                )
        if not self.sent:
            raise UsageError("ins: besides the cache's id and variant a field must be named")

    def _check_padding(self) -> None:
        if self.padding is None:
            return
        sent = [name for _, name in self.sent]
        for what, names, known in (
            ("fields", [name for name, _ in self.padding.values], sent),
            ("outputs", self.padding.outputs or (), self.predicts),
        ):
            unknown = sorted(set(names) - set(known))
            if unknown:
                raise UsageError(
                    f"padding: {what}: {unknown[0]!r} is none of those there are: "
                    f"{', '.join(known)}"
                )

    def _check_combined(self) -> None:
        if not self.combined_services:
            return
        if self.combined_kind not in ("probabilities", "logits"):
            raise UsageError(
                "teachers combined: of: expected probabilities or logits, got "
                f"{self.combined_kind!r}"
            )
        top = self.top_k
        if top is not None and (not top.dense or top.of != self.combined_kind):
            raise UsageError(
                f"teachers combined: the mean is of whole rows of {self.combined_kind}: say "
                f"set_top_k(k, of={self.combined_kind!r}, dense=True)"
            )

    @property
    def sent(self) -> tuple[tuple[int, str], ...]:
        """Positions and names of the fields that may be sent."""
        cache = self.cache
        kept = () if cache is None else (cache.id, cache.variant)
        return tuple(
            (position, name)
            for position, name in enumerate(self.ins)
            if name is not None and name not in kept
        )

    @property
    def key_positions(self) -> tuple[int, int | None] | None:
        """Positions of the fields with ids and variants (None: no variants); None: no cache."""
        if self.cache is None:
            return None
        variant = self.cache.variant
        return self.ins.index(self.cache.id), None if variant is None else self.ins.index(variant)


def with_environment(settings: ReaderSettings, environ: Mapping[str, str]) -> ReaderSettings:
    """Return the settings with the variables PADDLE_DISTILL_* applied.

    As in the original, the service's name and the number of teachers only count if a balance
    server is set. An empty variable counts as not set.

    Raises:
        UsageError: names the variable.
    """
    conf_file = environ.get("PADDLE_DISTILL_CONF_FILE") or settings.conf_file
    if environ.get("PADDLE_DISTILL_CONF_FILE") and not Path(str(conf_file)).is_file():
        raise UsageError(f"PADDLE_DISTILL_CONF_FILE: {conf_file} is not a file")
    if conf_file is None and DEFAULT_CONF_FILE.is_file():
        conf_file = str(DEFAULT_CONF_FILE)
    settings = replace(settings, conf_file=conf_file)
    servers = environ.get("PADDLE_DISTILL_BALANCE_SERVER")
    kind = environ.get("PADDLE_DISTILL_BALANCE_TYPE")
    if kind and kind != "redis" and (servers or settings.discovery_servers):
        raise UsageError(
            f"PADDLE_DISTILL_BALANCE_TYPE: {kind!r} is not supported: there is one kind of "
            "discovery, which the original calls redis; start `edl discovery` (it needs no Redis), "
            "name it by PADDLE_DISTILL_BALANCE_SERVER, and unset the type"
        )
    if not servers:
        return settings
    if settings.combined_services:
        raise UsageError(
            "PADDLE_DISTILL_BALANCE_SERVER is set, and names one service, where "
            "set_teachers_combined names several: unset it"
        )
    service_name = environ.get("PADDLE_DISTILL_SERVICE_NAME") or settings.service_name
    if not service_name:
        raise UsageError(
            "PADDLE_DISTILL_BALANCE_SERVER is set, PADDLE_DISTILL_SERVICE_NAME is missing: "
            "set it to the name of the teachers' service"
        )
    max_teacher = environ.get("PADDLE_DISTILL_MAX_TEACHER")
    if max_teacher and not (max_teacher.isdecimal() and int(max_teacher) >= 1):
        raise UsageError(
            f"PADDLE_DISTILL_MAX_TEACHER: expected an integer of 1 or more, got {max_teacher!r}"
        )
    return replace(
        settings,
        discovery_servers=servers_of(servers),
        service_name=service_name,
        require_max_teacher=int(max_teacher) if max_teacher else settings.require_max_teacher,
    )


def _check_names(ins: tuple[str | None, ...], predicts: tuple[str, ...]) -> None:
    for name, values in (("ins", ins), ("predicts", predicts)):
        given = [value for value in values if value is not None]
        if not given:
            raise UsageError(f"{name}: names at least one tensor, got {list(values)}")
        for value in given:
            if type(value) is not str or not value:
                raise UsageError(f"{name}: expected names of tensors, got {value!r}")
        if len(set(given)) < len(given):
            raise UsageError(f"{name}: each name may be there once, got {list(values)}")
    if None in predicts:
        raise UsageError("predicts: None is for fields of `ins` that are not sent")
