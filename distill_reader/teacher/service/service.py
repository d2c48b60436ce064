"""The service behind the protocols: check requests, queue them, compute batches, answer.

All tensors are in one arena. The protocols receive inputs into it, and memory for the outputs is
allocated when a request is queued, so predictors write each row where its answer is sent from.
Nothing is copied here, and a predictor that dies leaves nothing behind.
"""

import contextlib
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from distill_reader.errors import (
    BadRequest,
    DistillError,
    ModelError,
    ModelNotFound,
    RequestTooLarge,
    TeacherBusy,
    TeacherFailed,
    TransientFailure,
    UsageError,
)
from distill_reader.model.normalization import Normalization
from distill_reader.model.output_encodings import OutputEncoding
from distill_reader.model.specs import ModelSpec
from distill_reader.protocols.arena import (
    Arena,
    ArenaError,
    ArenaFull,
    OwnArena,
    Slice,
    aligned,
)
from distill_reader.teacher.predictor.backend import PADDLE_BACKEND, Device
from distill_reader.teacher.predictor.wire import (
    BatchRows,
    MessageKind,
    RunMessage,
    Shape,
    TensorAddress,
    decode_shapes,
    encode_addresses,
    encode_run,
)
from distill_reader.teacher.service.batching import BatchQueue, RequestPart
from distill_reader.teacher.service.metrics import TeacherMetrics
from distill_reader.teacher.service.pending import PendingRequest, ServedModel, prepare
from distill_reader.teacher.service.predictors import Predictor, PredictorPool
from distill_reader.teacher.service.requests import (
    Buffer,
    InferAnswer,
    InferRequest,
    ModelStatistics,
    buffers_of,
    get_model,
)

logger = logging.getLogger(__name__)


_DEATHS = 2  # predictors that may die while computing a request: it may be what kills them
_AHEAD_US = 2000  # if batches take less, the next one is sent before the last is answered
_READY_AGAIN_S = 1.0  # how long students stay away while no predictor runs
# How often the timer looks at predictors that compute, at least. If it comes later by more than the
# second, this process was stopped (SIGSTOP, a paused container), and its predictors with it.
_LOOK_S, _STOPPED_S = 5.0, 1.0
_LOAD_LOOK_S = 0.2  # how often a start that waits for models looks whether it is still wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """What a teacher serves, on which devices, and its limits."""

    models: tuple[tuple[str, str], ...]  # name, folder
    devices: tuple[Device, ...]  # a predictor process each
    backend: str = PADDLE_BACKEND  # module:function
    normalizations: tuple[tuple[str, str, Normalization], ...] = ()  # model, input, how
    max_batch: int = 64  # samples
    batch_timeout_s: float = 0.002  # how long a batch waits to become full
    max_queue: int = 256  # queued requests
    max_request_bytes: int = 512 << 20
    memory_bytes: int = 2 << 30  # of all requests and answers until they are sent
    predict_timeout_s: float = 120.0  # a predictor that needs longer for a batch is hung

    def __post_init__(self) -> None:
        names = [name for name, _ in self.models]
        if not names:
            raise UsageError("--model: name at least one folder")
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise UsageError(
                f"--model: two models are called {min(twice)!r}; write NAME=DIR to tell them apart"
            )
        if not self.devices:
            raise UsageError("--gpu_ids, --thread: name at least one device")
        for field, flag, least in (
            ("max_batch", "--max_batch", 1),
            ("max_queue", "--max_queue", 1),
            ("batch_timeout_s", "--batch_timeout_ms", 0),
            ("max_request_bytes", "--max_request_mb", 1),
            ("memory_bytes", "memory_bytes", 1),
            ("predict_timeout_s", "--predict_timeout_s", 0.1),
        ):
            if getattr(self, field) < least:
                raise UsageError(f"{flag}: must be at least {least}, got {getattr(self, field)}")


@dataclass(slots=True)
class _Batch:
    """A batch that a predictor computes."""

    key: Hashable
    model: ServedModel
    parts: list[RequestPart[PendingRequest]]
    samples: int
    encodings: tuple[OutputEncoding, ...]  # every encoding that any of the parts wants


_Ended = list[tuple[PendingRequest, DistillError | None]]  # None: computed, or no longer wanted


class _PredictorState:
    """The service's view of one predictor."""

    def __init__(self, predictor: Predictor) -> None:
        self.predictor = predictor
        self.batches: dict[int, _Batch] = {}  # at most two, in order
        self.arenas: set[int] = set()  # those that the predictor has mapped
        self.may_send_ahead = False
        self.silent_since = float("inf")  # since when it computes without a word; inf: it is idle

    def forget(self, arena: Arena) -> None:
        """Tell the predictor to unmap an arena that was closed."""
        self.arenas.discard(arena.id)
        with contextlib.suppress(OSError):  # the predictor is gone, and its mapping with it
            self.predictor.channel.send(MessageKind.FORGET, (arena.id,))


class PredictorService:
    """An InferenceService. Start it once, then close it once.

    Args:
        on_outdated: is called when no predictor can answer any more, as the models' files were
            replaced; only a new service can serve them.
    """

    def __init__(
        self, config: ServiceConfig, on_outdated: Callable[[], None] = lambda: None
    ) -> None:
        self.is_outdated = False
        self._on_outdated = on_outdated
        self.metrics = TeacherMetrics()
        self._config = config
        self._arena = OwnArena(max(config.memory_bytes, 2 * config.max_request_bytes))
        self._models: dict[str, ServedModel] = {}
        self._models_by_index: list[ServedModel] = []
        self._lock = threading.RLock()
        self._ready = threading.Condition(self._lock)  # a predictor is ready, or failed to start
        self._due = threading.Condition(self._lock)  # a batch is due earlier than expected
        self._done = threading.Condition(self._lock)  # no request is unfinished
        self._queue: BatchQueue[PendingRequest] = BatchQueue(
            max_batch=config.max_batch, timeout_s=config.batch_timeout_s
        )
        self._predictors: dict[Predictor, _PredictorState] = {}
        self._free: list[_PredictorState] = []  # those that can take a batch now
        self._batches = 0  # how many there were; their numbers
        self._unfinished = 0  # requests without an answer
        self._wakes_at = float("inf")  # when the timer checks the queue again
        self._look_s = min(_LOOK_S, config.predict_timeout_s / 4)
        self._start_error: DistillError | None = None
        self._has_started = False
        self._is_draining = False
        self._is_closed = False
        self._pool = PredictorPool(
            self,
            backend=config.backend,
            models=config.models,
            devices=config.devices,
            normalizations=config.normalizations,
        )
        self._timer = threading.Thread(target=self._keep_time, name="batch-timer", daemon=True)
        self.metrics.watch(
            queue_requests=lambda: len(self._queue),
            memory_bytes=lambda: self._arena.used_bytes,
            predictors_ready=lambda: len(self._predictors),
        )

    def start(
        self, timeout_s: float | None = None, *, is_unwanted: Callable[[], bool] = lambda: False
    ) -> None:
        """Start the predictors; return when each has loaded its models, or it is unwanted by then.

        Raises:
            ModelError, UsageError: a model or the backend cannot be loaded. The service is closed.
        """
        self._pool.start()
        self._timer.start()
        deadline_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        with self._ready:
            while not (is_done := self._is_loaded) and self._start_error is None:
                left_s = deadline_s - time.monotonic()
                if is_unwanted() or left_s <= 0:
                    break
                self._ready.wait(min(_LOAD_LOOK_S, left_s))
            error = self._start_error
            self._has_started = error is None and is_done
        if error is None and not is_done and time.monotonic() >= deadline_s:
            error = ModelError(f"the models were not loaded within {timeout_s:g} s")
        if error is not None:
            self.close()
            raise error

    @property
    def _is_loaded(self) -> bool:
        return len(self._predictors) == len(self._config.devices)

    # Called by the protocols.

    def models(self) -> Mapping[str, ModelSpec]:
        return {name: model.spec for name, model in self._models.items()}

    @property
    def is_ready(self) -> bool:
        return bool(self._predictors) and not self._is_draining

    @property
    def max_batch(self) -> int:
        return self._config.max_batch

    @property
    def batch_timeout_s(self) -> float:
        return self._config.batch_timeout_s

    def statistics(self, model: str) -> ModelStatistics:
        return self.metrics.statistics(model)

    def allocate(self, size_bytes: int) -> Slice:
        if size_bytes > self._config.max_request_bytes:
            raise RequestTooLarge(
                f"the request has {size_bytes} bytes, at most {self._config.max_request_bytes} "
                "are taken; send fewer samples at a time, or raise --max_request_mb"
            )
        return self._allocate(size_bytes, ())

    def submit(self, request: InferRequest) -> Future[InferAnswer]:
        try:
            pending = prepare(request, self._model(request.model), self._allocate)
        except BaseException as error:
            for buffer in buffers_of(request.inputs):
                buffer.release()
            self.metrics.request_ended(request.protocol, *_outcome(request.model, error))
            raise
        try:
            self._enqueue(pending)
        except TeacherBusy as error:
            pending.release_inputs()
            pending.release_outputs()
            self.metrics.request_ended(request.protocol, *_outcome(pending.model.name, error))
            raise
        # A future keeps what it has called, and the request its future: in a cycle, the memory of a
        # student that is gone would stay mapped until the collector comes.
        drop = functools.partial(self._drop_if_cancelled, weakref.ref(pending))
        pending.future.add_done_callback(drop)
        return pending.future

    def drain(self, timeout_s: float) -> bool:
        """Accept no more requests; return whether all were answered within `timeout_s`."""
        with self._done:
            self._is_draining = True
            return self._done.wait_for(lambda: self._unfinished == 0, timeout_s)

    def close(self) -> None:
        """End the predictors. Unanswered requests fail with TeacherBusy."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = self._is_draining = True
            left = self._queue.clear()
            self._due.notify_all()
        self._pool.stop()  # the requests that predictors are computing fail now
        for pending in left:
            self._end(pending, TeacherBusy("the teacher ends"))
        if self._timer.ident is not None:
            self._timer.join()
        self._arena.close()

    def _model(self, name: str) -> ServedModel:
        is_only_one = not name and len(self._models) == 1
        model = self._models_by_index[0] if is_only_one else get_model(self._models, name)
        if model.fault:
            raise BadRequest(f"model {model.name}: {model.fault}")
        return model

    def _allocate(self, size_bytes: int, held: Sequence[Buffer]) -> Slice:
        """Allocate memory for a request that has `held` already. Raises: as Allocate."""
        own = [each for each in held if isinstance(each, Slice) and each.arena is self._arena]
        total = aligned(size_bytes) + sum(aligned(each.size) for each in own)
        if total > self._arena.size:  # not even if there is no other request
            raise RequestTooLarge(
                f"the request needs {total} bytes with its answer, the teacher has "
                f"{self._arena.size} for all; send fewer samples at a time"
            )
        try:
            return self._arena.allocate(size_bytes)
        except ArenaFull as error:
            raise TeacherBusy(f"the teacher's memory for requests: {error}") from error
        except ArenaError as error:
            raise TeacherBusy("the teacher ends", delay_s=_READY_AGAIN_S) from error

    def _enqueue(self, pending: PendingRequest) -> None:
        with self._lock:
            if self._is_draining:
                raise TeacherBusy("the teacher ends; ask another", delay_s=_READY_AGAIN_S)
            if len(self._queue) >= self._config.max_queue:
                raise TeacherBusy(f"{len(self._queue)} requests wait already (--max_queue)")
            pending.arrived = time.monotonic()
            self._unfinished += 1
            self._queue.add(pending.key, pending, pending.samples, pending.arrived)
            self._dispatch(pending.arrived)

    def _drop_if_cancelled(
        self, found: "weakref.ref[PendingRequest]", future: Future[InferAnswer]
    ) -> None:
        pending = found()
        if pending is not None and future.cancelled():
            with self._lock:
                self._queue.remove(pending)
            self._end(pending, None)

    # Called by the pool (PredictorListener), for each predictor from a thread of its own.

    def predictor_ready(self, predictor: Predictor, specs: tuple[ModelSpec, ...]) -> None:
        with self._lock:
            if not self._models:
                self._models_by_index = [
                    ServedModel(index=index, spec=spec) for index, spec in enumerate(specs)
                ]
                self._models = {model.name: model for model in self._models_by_index}
            elif specs != tuple(model.spec for model in self._models_by_index):
                # Answers must not depend on which predictor computes them.
                error = ModelError(
                    f"{predictor} loaded other models than those that are served: their files were "
                    "replaced; start this server again to serve the new ones"
                )
                logger.error("%s", error)
                predictor.process.kill()
                if not self._has_started:
                    self._start_error = error
                    self._ready.notify_all()
                elif not self._predictors:
                    self.is_outdated = True
                    self._on_outdated()
                return
            state = self._predictors[predictor] = _PredictorState(predictor)
            self._free.append(state)
            self._dispatch(time.monotonic())
            self._ready.notify_all()

    def predictor_gone(self, predictor: Predictor, error: DistillError | None) -> None:
        ended: _Ended = []
        with self._lock:
            if error is not None and not self._has_started:
                self._start_error = self._start_error or error
                self._ready.notify_all()
            if not self._is_closed:
                self.metrics.predictor_restarted()
            state = self._predictors.pop(predictor, None)
            if state is not None:
                self._free = [free for free in self._free if free is not state]
                # It was computing the first of its batches; the second was only queued there.
                for index, batch in reversed(list(enumerate(state.batches.values()))):
                    ended += self._try_elsewhere(batch, is_suspect=index == 0)
            elif not self._predictors:
                busy = TeacherBusy("no predictor of the teacher runs", delay_s=_READY_AGAIN_S)
                ended += [(pending, busy) for pending in self._queue.clear()]
            self._dispatch(time.monotonic())
        self._end_all(ended)

    def predictor_replied(
        self, predictor: Predictor, kind: MessageKind, numbers: tuple[int, ...], text: bytes
    ) -> None:
        ended: _Ended
        with self._lock:
            state = self._predictors[predictor]
            state.silent_since = time.monotonic()
            if kind is MessageKind.ALIVE:
                return
            if kind is MessageKind.SHAPES:
                ended = self._allocate_outputs(state, state.batches[numbers[0]], numbers)
            else:
                batch = state.batches.pop(numbers[0])
                for part in batch.parts:
                    part.request.in_flight -= 1
                if not state.batches:
                    state.silent_since = float("inf")
                if state not in self._free:
                    self._free.append(state)
                if kind is MessageKind.DONE:
                    computed_us = numbers[1]
                    state.may_send_ahead = computed_us < _AHEAD_US
                    ended = _count(batch, computed_us)
                else:
                    why = text.decode(errors="replace")
                    if numbers[1]:  # whatever is asked
                        batch.model.fault = why
                        logger.error("model %s is not served any more: %s", batch.model.name, why)
                    ended = self._refuse(batch, why)
                self._dispatch(time.monotonic())
        if kind is MessageKind.DONE:
            self.metrics.batch_computed(batch.model.name, batch.samples, computed_us / 1e6)
        self._end_all(ended)

    # With the lock held.

    def _dispatch(self, now: float) -> None:
        """Send due batches to free predictors; wake the timer if the next is due sooner."""
        while self._free and (taken := self._queue.take(now)) is not None:
            key, parts = taken
            parts = [part for part in parts if part.request.begin(now)]
            if parts:
                self._send(key, parts)
        if self._free:
            due = self._queue.next_due()
            if due is not None and due < self._wakes_at:
                self._due.notify()

    def _send(self, key: Hashable, parts: list[RequestPart[PendingRequest]]) -> None:
        state = min(self._free, key=_load)
        model = parts[0].request.model
        self._batches += 1
        if not state.batches:
            state.silent_since = time.monotonic()
            if state.silent_since + self._look_s < self._wakes_at:
                self._due.notify()
        encodings = tuple(
            dict.fromkeys(encoding for p in parts for _, encoding in p.request.wanted)
        )
        samples = sum(part.count for part in parts)
        batch = state.batches[self._batches] = _Batch(key, model, parts, samples, encodings)
        for part in parts:
            part.request.in_flight += 1
        if not state.may_send_ahead or len(state.batches) > 1:
            self._free.remove(state)
        with contextlib.suppress(OSError):  # it is gone: its receiving thread will notice
            self._share_arenas(state, parts)
            state.predictor.channel.send(MessageKind.RUN, encode_run(_run(self._batches, batch)))

    def _share_arenas(
        self, state: _PredictorState, parts: Sequence[RequestPart[PendingRequest]]
    ) -> None:
        for part in parts:
            for arena in part.request.arenas:
                if arena.id not in state.arenas:
                    state.predictor.channel.send_arena(arena.id, arena.fd)
                    state.arenas.add(arena.id)
                    # Called once this request has released its slices: no predictor needs it then.
                    arena.call_at_close(state.forget)

    def _refuse(self, batch: _Batch, text: str) -> _Ended:
        """Handle a batch that the model refused: try each request alone, one may be the reason."""
        requests = {id(part.request): part.request for part in batch.parts}
        if len(requests) > 1 and not batch.model.fault:
            self._put_back_alone(batch)
            # Those that are over already only have memory to be released.
            return [(part.request, None) for part in batch.parts if part.request.is_over]
        for pending in requests.values():
            pending.is_over = True
            self._queue.remove(pending)
        error = f"model {batch.model.name}: {text}"
        return [(pending, BadRequest(error)) for pending in requests.values()]

    def _try_elsewhere(self, batch: _Batch, *, is_suspect: bool) -> _Ended:
        """Queue the requests of a dead predictor, each alone: one may be the reason."""
        ended: _Ended = []
        for part in batch.parts:
            part.request.in_flight -= 1
        for pending in {id(part.request): part.request for part in batch.parts}.values():
            pending.deaths += is_suspect
            error: DistillError | None
            if self._is_closed:
                error = TeacherBusy("the teacher ends", delay_s=_READY_AGAIN_S)
            elif pending.deaths >= _DEATHS:
                error = TeacherFailed(
                    f"model {batch.model.name}: {pending.deaths} predictors ended while they "
                    "computed this request; the teacher's log has the reason, such as too little "
                    "memory or a value that the model cannot take",
                    tries=pending.deaths,
                )
            elif pending.is_over:
                error = None  # it is answered already; only its memory must be released
            else:
                continue
            pending.is_over = True
            self._queue.remove(pending)
            ended.append((pending, error))
        self._put_back_alone(batch)
        return ended

    def _put_back_alone(self, batch: _Batch) -> None:
        now = time.monotonic()
        for part in reversed(batch.parts):
            if not part.request.is_over:
                self._queue.put_back((batch.key, id(part.request)), [part], now)

    def _allocate_outputs(
        self, state: _PredictorState, batch: _Batch, numbers: Sequence[int]
    ) -> _Ended:
        """Allocate memory for outputs whose shapes were unknown; tell the predictor where."""
        shapes = decode_shapes(numbers)
        failed: dict[int, tuple[PendingRequest, DistillError]] = {}
        rows: list[tuple[TensorAddress | None, ...]] = []
        for part in batch.parts:
            pending = part.request
            try:
                pending.allocate_outputs(shapes, self._allocate)
                rows.append(pending.output_addresses(part.start, batch.encodings))
            except (BadRequest, TeacherBusy) as error:
                pending.is_over = True
                self._queue.remove(pending)
                failed[id(pending)] = (pending, error)
                rows.append((None,) * len(batch.encodings))
        if not any(isinstance(error, RequestTooLarge) for _, error in failed.values()):
            # Else no request of such inputs could come to show that it has smaller outputs.
            batch.model.learn(batch.parts[0].request.shapes_key, shapes)
        with contextlib.suppress(OSError):  # as in _send
            self._share_arenas(state, batch.parts)
            state.predictor.channel.send(MessageKind.WRITE, encode_addresses(numbers[0], rows))
        return list(failed.values())

    # Without the lock.

    def _end_all(self, ended: _Ended) -> None:
        for pending, error in ended:
            self._end(pending, error)

    def _end(self, pending: PendingRequest, error: DistillError | None) -> None:
        """Answer or fail a request, once; release its memory when no predictor works on it."""
        with self._lock:
            is_first = not pending.is_settled
            pending.is_settled = pending.is_over = True
            is_free = pending.in_flight == 0 and not pending.is_released
            pending.is_released = pending.is_released or is_free
            is_wanted = is_first and pending.future.set_running_or_notify_cancel()
        is_answered = is_first and is_wanted and error is None
        if is_free:
            pending.release_inputs()
            if not is_answered:
                pending.release_outputs()
        if not is_first:
            return
        began = pending.began if pending.began is not None else time.monotonic()
        queued_s = began - pending.arrived
        model = pending.model.name
        if not is_wanted:
            self.metrics.request_ended(pending.protocol, model, "cancelled")
        elif error is None:
            self.metrics.request_answered(  # first: who has the answer finds it counted
                pending.protocol,
                model,
                queued_s=queued_s,
                computed_us=pending.computed_us,
                total_s=time.monotonic() - pending.arrived,
            )
            pending.future.set_result(pending.answer(int(queued_s * 1e6)))
        else:
            pending.future.set_exception(error)
            self.metrics.request_ended(
                pending.protocol,
                *_outcome(model, error),
                total_s=time.monotonic() - pending.arrived,
            )
        with self._done:
            self._unfinished -= 1
            if self._unfinished == 0:
                self._done.notify_all()

    def _keep_time(self) -> None:
        """Dispatch batches that are due but not full, and kill predictors that hang."""
        with self._due:
            while not self._is_closed:
                now = time.monotonic()
                late_s = now - self._wakes_at
                if _STOPPED_S < late_s < float("inf"):
                    for state in self._predictors.values():
                        state.silent_since += late_s
                self._dispatch(now)
                due = self._queue.next_due() if self._free else None
                self._wakes_at = min(
                    float("inf") if due is None else due, self._end_hung_predictors(now)
                )
                never = self._wakes_at == float("inf")
                self._due.wait(None if never else max(0.0, self._wakes_at - now))

    def _end_hung_predictors(self, now: float) -> float:
        """Kill predictors that are silent for too long; return when to check again.

        Their batches go to others, as if they had died by themselves.
        """
        look_again = float("inf")
        for state in self._predictors.values():
            if state.silent_since == float("inf"):
                continue
            end_at = state.silent_since + self._config.predict_timeout_s
            if end_at > now:
                look_again = min(look_again, end_at, now + self._look_s)
                continue
            state.silent_since = float("inf")
            logger.error(
                "%s has computed one batch for %g s (--predict_timeout_s): killed as hung",
                state.predictor,
                self._config.predict_timeout_s,
            )
            state.predictor.process.kill()
        return look_again


def _count(batch: _Batch, computed_us: int) -> _Ended:
    """Return the requests that the batch completes."""
    ended: _Ended = []
    for part in batch.parts:
        pending = part.request
        pending.left -= part.count
        pending.computed_us += computed_us
        if pending.left == 0 or (pending.is_over and pending.in_flight == 0):
            ended.append((pending, None))
    return ended


def _load(state: _PredictorState) -> int:
    return len(state.batches)


def _run(number: int, batch: _Batch) -> RunMessage:
    """Return the message that tells a predictor to compute a batch."""
    model, parts, encodings = batch.model, batch.parts, batch.encodings
    first = parts[0].request
    shapes: tuple[Shape | None, ...] = (None,) * len(model.spec.outputs)
    expected = first.output_shapes
    # Requests that arrived before the shapes were learned have no memory for their outputs yet.
    has_addresses = expected is not None and all(
        part.request.output_shapes == expected for part in parts
    )
    if has_addresses and expected is not None:
        shapes = expected
    return RunMessage(
        number,
        model.index,
        first.input_dtypes,
        first.input_shapes,
        shapes,
        encodings,
        tuple(
            BatchRows(
                part.count,
                part.request.input_addresses(part.start),
                part.request.output_addresses(part.start, encodings)
                if has_addresses
                else (None,) * len(encodings),
            )
            for part in parts
        ),
    )


def _outcome(model: str, error: BaseException) -> tuple[str, str]:
    """Return model and outcome for the metrics. Unknown model names are not counted by name."""
    if isinstance(error, ModelNotFound):
        return "", "refused"
    return model, "busy" if isinstance(error, TransientFailure) else "refused"
