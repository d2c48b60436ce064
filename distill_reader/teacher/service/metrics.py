"""What the teacher counts: metrics for Prometheus, and statistics for clients of Triton."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from distill_reader.teacher.service.requests import ModelStatistics

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_SAMPLES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class TeacherMetrics:
    """The metrics of one teacher, in a registry of their own."""

    CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "edl_teacher_requests",
            "Requests by outcome: ok, refused, busy, cancelled.",
            ("protocol", "model", "outcome"),
            registry=self.registry,
        )
        self._samples = Counter(
            "edl_teacher_samples", "Samples computed.", ("model",), registry=self.registry
        )
        self._batch = Histogram(
            "edl_teacher_batch_samples",
            "Samples per batch.",
            ("model",),
            buckets=_SAMPLES,
            registry=self.registry,
        )
        self._queued = Histogram(
            "edl_teacher_queue_seconds",
            "From a request's arrival until a predictor gets its first sample.",
            ("model",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._computed = Histogram(
            "edl_teacher_compute_seconds",
            "A predictor's time for one batch.",
            ("model",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._restarts = Counter(
            "edl_teacher_predictor_restarts",
            "Predictor processes that ended and were restarted.",
            registry=self.registry,
        )
        self._lock = threading.Lock()  # of the totals
        self._totals: dict[str, ModelStatistics] = {}
        self._labelled_requests: dict[tuple[str, str, str], Counter] = {}
        self._labelled: dict[str, tuple[Counter, Histogram, Histogram, Histogram]] = {}

    def watch(
        self,
        *,
        queue_requests: Callable[[], float],
        memory_bytes: Callable[[], float],
        predictors_ready: Callable[[], float],
    ) -> None:
        """Read these values whenever the metrics are collected."""
        for name, text, function in (
            ("edl_teacher_queue_requests", "Queued requests.", queue_requests),
            ("edl_teacher_memory_bytes", "Shared memory of requests and answers.", memory_bytes),
            ("edl_teacher_predictors_ready", "Predictors that are ready.", predictors_ready),
        ):
            Gauge(name, text, registry=self.registry).set_function(function)

    def request_answered(
        self, protocol: str, model: str, *, queued_s: float, computed_us: int, total_s: float
    ) -> None:
        """Count a request that has its outputs."""
        self._of(model)[2].observe(queued_s)
        self._count_request(protocol, model, "ok")
        with self._lock:
            totals = self._totals_of(model)
            totals.answered += 1
            totals.answered_ns += int(total_s * 1e9)
            totals.queued_ns += int(queued_s * 1e9)
            totals.computed_ns += computed_us * 1000

    def request_ended(
        self, protocol: str, model: str, outcome: str, *, total_s: float = 0.0
    ) -> None:
        """Count a request without outputs. `model`: "" for one that is not served."""
        self._count_request(protocol, model, outcome)
        if model and outcome != "cancelled":
            with self._lock:
                totals = self._totals_of(model)
                totals.failed += 1
                totals.failed_ns += int(total_s * 1e9)

    def _count_request(self, protocol: str, model: str, outcome: str) -> None:
        key = (protocol, model, outcome)
        counter = self._labelled_requests.get(key)
        if counter is None:
            counter = self._labelled_requests[key] = self._requests.labels(*key)
        counter.inc()

    def batch_computed(self, model: str, samples: int, seconds: float) -> None:
        counter, sizes, _, times = self._of(model)
        counter.inc(samples)
        sizes.observe(samples)
        times.observe(seconds)
        took_ns = int(seconds * 1e9)
        with self._lock:
            totals = self._totals_of(model)
            totals.samples += samples
            totals.batches += 1
            totals.last_ms = int(time.time() * 1000)
            batches, all_ns = totals.by_size.get(samples, (0, 0))
            totals.by_size[samples] = batches + 1, all_ns + took_ns

    def statistics(self, model: str) -> ModelStatistics:
        """Return what a model has done until now."""
        with self._lock:
            totals = self._totals.get(model, ModelStatistics())
            return replace(totals, by_size=dict(totals.by_size))

    def predictor_restarted(self) -> None:
        self._restarts.inc()

    def text(self) -> bytes:
        """Return the metrics in Prometheus's text format, CONTENT_TYPE."""
        return generate_latest(self.registry)

    def _totals_of(self, model: str) -> ModelStatistics:
        found = self._totals.get(model)
        if found is None:
            found = self._totals[model] = ModelStatistics()
        return found

    def _of(self, model: str) -> tuple[Counter, Histogram, Histogram, Histogram]:
        found = self._labelled.get(model)
        if found is None:
            found = self._labelled[model] = (
                self._samples.labels(model),
                self._batch.labels(model),
                self._queued.labels(model),
                self._computed.labels(model),
            )
        return found
