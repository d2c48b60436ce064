"""The services that a reader asks, and what it has learned of them in earlier iterations."""

import os
from collections.abc import Callable, Mapping
from typing import Any

from distill_reader.errors import UsageError
from distill_reader.student.batches.feed import RequestLimits
from distill_reader.student.batches.meter import Meter
from distill_reader.student.cache.label_cache import LabelCache
from distill_reader.student.clients.client import TeacherClient
from distill_reader.student.labels.combine import Combination
from distill_reader.student.labels.labels import Labels
from distill_reader.student.options import CombinedService
from distill_reader.student.pool.dynamic import DynamicSource, DynamicTeachers
from distill_reader.student.pool.pace import Pace
from distill_reader.student.pool.pool import PoolSettings
from distill_reader.student.session import ServiceStream, SessionLock
from distill_reader.student.settings import ReaderSettings
from distill_reader.student.source import FixedTeachers, TeacherSource

_JOIN_BYTES = 4 << 20
_MOST_BYTES = 12 << 20  # 16 images of 3x224x224 fit; far beyond it gRPC becomes slow
_MOST_BYTES_OF_CHOICE = 64 << 20  # if the user sets the number of samples per request
_MOST_TEACHERS = 64  # the memory is divided among at most this many


class ServiceHistory:
    """What a reader keeps of one service from one iteration to the next."""

    def __init__(self) -> None:
        self.paces: dict[str, Pace] = {}  # by endpoint
        self.meter = Meter()
        self.dynamic = DynamicTeachers(self.meter)
        self.cache: LabelCache | None = None  # None: none is set, or it is not created yet
        self.cache_key: Any = None  # the settings that the cache was opened for

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the cache: a worker process opens it itself."""
        return {**self.__dict__, "cache": None, "cache_key": None}


class Services:
    """The services of a reader by name; the name is "" if there is only one."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._histories: dict[str, ServiceHistory] = {}

    def __getitem__(self, name: str) -> ServiceHistory:
        if os.getpid() != self._pid:  # after fork: a thread of the parent may hold their locks
            self._pid, self._histories = os.getpid(), {}
        return self._histories.setdefault(name, ServiceHistory())

    def sources(self, settings: ReaderSettings) -> dict[str, TeacherSource]:
        """Return the source of teachers of each service.

        Raises:
            UsageError: no teachers are given.
        """
        if settings.discovery_servers:
            assert settings.service_name is not None
            source = self[""].dynamic.source(
                settings.discovery_servers, settings.service_name, settings.require_max_teacher
            )
            return {"": source}
        if settings.combined_services:
            return {each.name: self._source_of(each) for each in settings.combined_services}
        if not settings.teachers:
            raise UsageError(
                "teachers: none are given; call set_fixed_teacher or set_dynamic_teacher"
            )
        return {"": FixedTeachers(settings.teachers)}

    def streams(
        self,
        settings: ReaderSettings,
        labels: Labels,
        sources: Mapping[str, TeacherSource],
        lock: SessionLock,
        connect: Callable[[str], TeacherClient],
    ) -> list[ServiceStream]:
        """Return the streams of one iteration. Raises: UsageError: the cache cannot be used."""
        return [
            ServiceStream(
                source,
                PoolSettings(
                    sent=tuple(field for _, field in settings.sent),
                    labels=labels,
                    wire_ins=settings.wire_ins,
                    limits=_limits(settings),
                    no_teacher_timeout_s=settings.no_teacher_timeout_s,
                    skips=settings.no_teacher_policy == "skip",
                    timeout_s=settings.answer_timeout_s,
                    hedges=settings.hedging,
                    why_none=source.why_none if isinstance(source, DynamicSource) else None,
                    mixes_versions=settings.mixed_versions,
                    padding=settings.padding,
                    cache=self._cache(settings, labels, name),
                    name=name,
                ),
                lock,
                max_bytes=settings.max_memory_bytes,
                connect=connect,
                paces=self[name].paces,
                meter=self[name].meter,
            )
            for name, source in sources.items()
        ]

    def _source_of(self, service: CombinedService) -> TeacherSource:
        found = service.discovered
        if found is None:
            return FixedTeachers(service.endpoints)
        dynamic = self[service.name].dynamic
        return dynamic.source(found.servers, found.service_name, found.require_max_teacher)

    def _cache(self, settings: ReaderSettings, labels: Labels, name: str) -> LabelCache | None:
        """Return the cache of a service; one that an earlier iteration opened is used again."""
        if settings.cache is None:
            return None
        history = self[name]
        wire_ins = settings.wire_ins
        if settings.padding is not None:
            wire_ins += settings.padding.identity()
        key = (
            settings.cache,
            settings.sent,
            wire_ins,
            settings.predicts,
            settings.wire_predicts,
            settings.top_k,  # also the part that says how the labels are decoded
        )
        if history.cache is None or history.cache_key != key:
            history.cache = LabelCache(
                settings.cache,
                labels,
                wire_ins,
                sent=[field for _, field in settings.sent],
                scope=name,
            )
            history.cache_key = key
        return history.cache


def combination_of(settings: ReaderSettings) -> Combination | None:
    """Return how predictions of several services are combined; None: there is one service."""
    services = settings.combined_services
    if not services:
        return None
    return Combination(
        names=tuple(service.name for service in services),
        weights=tuple(service.weight for service in services),
        predicts=settings.predicts,
        of=settings.combined_kind,
    )


def _limits(settings: ReaderSettings) -> RequestLimits:
    """Return the bounds of a request."""
    teachers = max(
        [
            len(settings.teachers) or settings.require_max_teacher,
            *(service.most_teachers for service in settings.combined_services),
        ]
    )
    share_bytes = max(
        1 << 16, settings.max_memory_bytes // (2 * max(2, min(teachers, _MOST_TEACHERS)))
    )
    bound = _MOST_BYTES if settings.teacher_batch_size is None else _MOST_BYTES_OF_CHOICE
    return RequestLimits(
        join_bytes=min(_JOIN_BYTES if settings.teacher_batch_size is None else bound, share_bytes),
        most_bytes=min(bound, max(share_bytes, _JOIN_BYTES)),
        samples=settings.teacher_batch_size,
    )
