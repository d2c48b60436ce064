"""The predictors behind the protocols: checks requests, queues them, hands out batches, answers.

All tensors lie in one arena: inputs are written there by whoever receives them, and room for the
outputs is taken when a request is queued, so that predictors write each row where its answer will
be sent from. Nothing is copied here, and a predictor that dies leaves nothing behind.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from distill_reader.errors import (
    BadRequest,
    DistillError,
    ModelError,
    ModelNotFound,
    RequestTooLarge,
    Retryable,
    TeacherBusy,
    TeacherFailed,
    UsageError,
)
from distill_reader.model.forms import Form
from distill_reader.model.normalization import Normalization
from distill_reader.model.specs import ModelSpec
from distill_reader.protocols.arena import Arena, ArenaError, ArenaFull, OwnArena, Slice
from distill_reader.teacher.predictor.backend import Device
from distill_reader.teacher.predictor.wire import (
    Kind,
    Place,
    Rows,
    Run,
    Shape,
    decode_shapes,
    encode_places,
    encode_run,
)
from distill_reader.teacher.service.batching import BatchQueue, Piece
from distill_reader.teacher.service.metrics import Metrics
from distill_reader.teacher.service.predictors import Predictor, PredictorPool
from distill_reader.teacher.service.requests import InferAnswer, InferRequest
from distill_reader.teacher.service.waiting import Model, Waiting, buffers_of, prepare

logger = logging.getLogger(__name__)

PADDLE_BACKEND = "distill_reader.teacher.predictor.paddle_backend:load"

_DEATHS = 2  # of predictors under a request, until it is given up: it may be what kills them
_AHEAD_US = 2000  # batches that take less are sent before the one before them is answered
_READY_AGAIN_S = 1.0  # to stay away while no predictor runs


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """What a server serves, where it computes, and its bounds."""

    models: tuple[tuple[str, str], ...]  # name, folder
    devices: tuple[Device, ...]  # a predictor process each
    backend: str = PADDLE_BACKEND  # module:function
    normalizations: tuple[tuple[str, str, Normalization], ...] = ()  # model, input, how
    max_batch: int = 64  # samples
    batch_timeout_s: float = 0.002  # how long a batch waits to become full
    max_queue: int = 256  # requests that wait
    max_request_bytes: int = 512 << 20
    memory_bytes: int = 2 << 30  # of all requests and answers, waiting, computed or being sent
    predict_timeout_s: float = 120.0  # a predictor that computes one batch for longer is hung

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
    model: Model
    pieces: list[Piece[Waiting]]
    samples: int
    columns: tuple[Form, ...]  # what any of the pieces wants


_Ended = list[tuple[Waiting, DistillError | None]]  # None: answered, or not wanted any more


class _Lane:
    """What the service knows of one predictor."""

    def __init__(self, predictor: Predictor) -> None:
        self.predictor = predictor
        self.batches: dict[int, _Batch] = {}  # at most two, in order
        self.arenas: set[int] = set()  # those that the predictor has mapped
        self.may_send_ahead = False
        self.silent_since = float("inf")  # with a batch to compute; inf: it has none

    def forget(self, arena: Arena) -> None:
        """Have the predictor drop an arena that was closed."""
        self.arenas.discard(arena.id)
        with contextlib.suppress(OSError):  # it is gone, and its mapping with it
            self.predictor.channel.send(Kind.FORGET, (arena.id,))


class PredictorService:
    """Implements Service. Made, started once, closed once."""

    def __init__(self, config: ServiceConfig) -> None:
        self.metrics = Metrics()
        self._config = config
        self._arena = OwnArena(max(config.memory_bytes, 2 * config.max_request_bytes))
        self._models: dict[str, Model] = {}
        self._models_by_place: list[Model] = []
        self._lock = threading.RLock()
        self._ready = threading.Condition(self._lock)  # a predictor came, or failed to
        self._due = threading.Condition(self._lock)  # a batch will be due earlier than expected
        self._done = threading.Condition(self._lock)  # nothing waits any more
        self._queue: BatchQueue[Waiting] = BatchQueue(
            max_batch=config.max_batch, timeout_s=config.batch_timeout_s
        )
        self._lanes: dict[Predictor, _Lane] = {}
        self._free: list[_Lane] = []  # those that take a batch now
        self._batches = 0  # numbers them
        self._unfinished = 0  # requests without an answer
        self._wakes_at = float("inf")  # when the timer looks at the queue again
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
            predictors_ready=lambda: len(self._lanes),
        )

    def start(self, timeout_s: float | None = None) -> None:
        """Start the predictors; return when every one has loaded its models.

        Raises:
            ModelError, UsageError: a model or the backend cannot be loaded. The service is closed.
        """
        self._pool.start()
        self._timer.start()
        with self._ready:
            is_done = self._ready.wait_for(
                lambda: (
                    self._start_error is not None or len(self._lanes) == len(self._config.devices)
                ),
                timeout_s,
            )
            error = self._start_error
            self._has_started = error is None and is_done
        if error is None and not is_done:
            error = ModelError(f"the models were not loaded within {timeout_s:g} s")
        if error is not None:
            self.close()
            raise error

    # What the protocols ask.

    def models(self) -> Mapping[str, ModelSpec]:
        return {name: model.spec for name, model in self._models.items()}

    @property
    def is_ready(self) -> bool:
        return bool(self._lanes) and not self._is_draining

    def allocate(self, size_bytes: int) -> Slice:
        if size_bytes > self._config.max_request_bytes:
            raise RequestTooLarge(
                f"the request has {size_bytes} bytes, at most {self._config.max_request_bytes} "
                "are taken; send fewer samples at a time, or raise --max_request_mb"
            )
        return self._allocate(size_bytes)

    def submit(self, request: InferRequest) -> Future[InferAnswer]:
        try:
            waiting = prepare(request, self._model(request.model), self._allocate)
        except BaseException as error:
            for buffer in buffers_of(request):
                buffer.release()
            self.metrics.request_ended(request.protocol, *_outcome(request.model, error))
            raise
        try:
            self._enqueue(waiting)
        except TeacherBusy as error:
            waiting.release_inputs()
            waiting.release_outputs()
            self.metrics.request_ended(request.protocol, *_outcome(waiting.model.name, error))
            raise
        waiting.future.add_done_callback(lambda future: self._drop_if_cancelled(waiting, future))
        return waiting.future

    def drain(self, timeout_s: float) -> bool:
        """Take no more requests; return whether all were answered within `timeout_s`."""
        with self._done:
            self._is_draining = True
            return self._done.wait_for(lambda: self._unfinished == 0, timeout_s)

    def close(self) -> None:
        """End the predictors; requests without an answer fail (TeacherBusy)."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = self._is_draining = True
            left = self._queue.clear()
            self._due.notify_all()
        self._pool.stop()  # what predictors compute fails as they go
        for waiting in left:
            self._end(waiting, TeacherBusy("the teacher ends"))
        if self._timer.ident is not None:
            self._timer.join()
        self._arena.close()

    def _model(self, name: str) -> Model:
        if not name and len(self._models) == 1:
            return self._models_by_place[0]
        if name not in self._models:
            raise ModelNotFound(
                f"no model {name!r} is served here; there is {', '.join(self._models)}"
            )
        return self._models[name]

    def _allocate(self, size_bytes: int) -> Slice:
        if size_bytes > self._arena.size:
            raise RequestTooLarge(
                f"the request needs {size_bytes} bytes, the teacher has {self._arena.size} for "
                "all; send fewer samples at a time"
            )
        try:
            return self._arena.allocate(size_bytes)
        except ArenaFull as error:
            raise TeacherBusy(f"the teacher's memory for requests: {error}") from error
        except ArenaError as error:
            raise TeacherBusy("the teacher ends", delay_s=_READY_AGAIN_S) from error

    def _enqueue(self, waiting: Waiting) -> None:
        with self._lock:
            if self._is_draining:
                raise TeacherBusy("the teacher ends; ask another", delay_s=_READY_AGAIN_S)
            if len(self._queue) >= self._config.max_queue:
                raise TeacherBusy(f"{len(self._queue)} requests wait already (--max_queue)")
            waiting.arrived = time.monotonic()
            self._unfinished += 1
            self._queue.add(waiting.key, waiting, waiting.samples, waiting.arrived)
            self._dispatch(waiting.arrived)

    def _drop_if_cancelled(self, waiting: Waiting, future: Future[InferAnswer]) -> None:
        if future.cancelled():
            with self._lock:
                self._queue.remove(waiting)
            self._end(waiting, None)

    # What the predictors say (predictors.Listener), each in a thread of its own.

    def predictor_ready(self, predictor: Predictor, specs: tuple[ModelSpec, ...]) -> None:
        with self._lock:
            if not self._models:
                self._models_by_place = [
                    Model(place=place, spec=spec) for place, spec in enumerate(specs)
                ]
                self._models = {model.name: model for model in self._models_by_place}
            elif specs != tuple(model.spec for model in self._models_by_place):
                # A file of the model was replaced while we serve: answers must not depend on who
                # computes them.
                logger.error("%s loaded other models than those that are served", predictor)
                predictor.process.kill()
                return
            lane = self._lanes[predictor] = _Lane(predictor)
            self._free.append(lane)
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
            lane = self._lanes.pop(predictor, None)
            if lane is not None:
                self._free = [free for free in self._free if free is not lane]
                # It computed the first of its batches; the second only lay there.
                for place, batch in reversed(list(enumerate(lane.batches.values()))):
                    ended += self._try_elsewhere(batch, is_suspect=place == 0)
            elif not self._lanes:
                busy = TeacherBusy("no predictor of the teacher runs", delay_s=_READY_AGAIN_S)
                ended += [(waiting, busy) for waiting in self._queue.clear()]
            self._dispatch(time.monotonic())
        self._end_all(ended)

    def predictor_said(
        self, predictor: Predictor, kind: Kind, numbers: tuple[int, ...], text: bytes
    ) -> None:
        ended: _Ended
        with self._lock:
            lane = self._lanes[predictor]
            lane.silent_since = time.monotonic()
            if kind is Kind.SHAPES:
                ended = self._place_outputs(lane, lane.batches[numbers[0]], numbers)
            else:
                batch = lane.batches.pop(numbers[0])
                for piece in batch.pieces:
                    piece.item.in_flight -= 1
                if not lane.batches:
                    lane.silent_since = float("inf")
                if lane not in self._free:
                    self._free.append(lane)
                if kind is Kind.DONE:
                    computed_us = numbers[1]
                    lane.may_send_ahead = computed_us < _AHEAD_US
                    ended = _count(batch, computed_us)
                else:
                    ended = self._refuse(batch, text.decode(errors="replace"))
                self._dispatch(time.monotonic())
        self._end_all(ended)
        if kind is Kind.DONE:
            self.metrics.batch_computed(batch.model.name, batch.samples, computed_us / 1e6)

    # With the lock held.

    def _dispatch(self, now: float) -> None:
        """Give free predictors what is due, and have the timer look when the next batch is."""
        while self._free and (taken := self._queue.take(now)) is not None:
            key, pieces = taken
            pieces = [piece for piece in pieces if piece.item.begin(now)]
            if pieces:
                self._send(key, pieces)
        if self._free:
            due = self._queue.next_due()
            if due is not None and due < self._wakes_at:
                self._due.notify()

    def _send(self, key: Hashable, pieces: list[Piece[Waiting]]) -> None:
        lane = min(self._free, key=_load)
        model = pieces[0].item.model
        self._batches += 1
        if not lane.batches:
            lane.silent_since = time.monotonic()
            if lane.silent_since + self._config.predict_timeout_s < self._wakes_at:
                self._due.notify()
        columns = tuple(dict.fromkeys(form for p in pieces for _, form in p.item.wanted))
        samples = sum(piece.count for piece in pieces)
        batch = lane.batches[self._batches] = _Batch(key, model, pieces, samples, columns)
        for piece in pieces:
            piece.item.in_flight += 1
        if not lane.may_send_ahead or len(lane.batches) > 1:
            self._free.remove(lane)
        with contextlib.suppress(OSError):  # gone: the thread that receives from it will find out
            self._share_arenas(lane, pieces)
            lane.predictor.channel.send(Kind.RUN, encode_run(_run(self._batches, batch)))

    def _share_arenas(self, lane: _Lane, pieces: Sequence[Piece[Waiting]]) -> None:
        for piece in pieces:
            for arena in piece.item.arenas:
                if arena.id not in lane.arenas:
                    lane.predictor.channel.send_arena(arena.id, arena.fd)
                    lane.arenas.add(arena.id)
                    # Not before this request gave back its slices: no predictor needs it then.
                    arena.call_at_close(lane.forget)

    def _refuse(self, batch: _Batch, text: str) -> _Ended:
        """Of several requests one alone may be what the model cannot compute: try each."""
        if len({id(piece.item) for piece in batch.pieces}) > 1:
            self._put_back_alone(batch)
            return []
        waiting = batch.pieces[0].item
        waiting.is_over = True
        self._queue.remove(waiting)
        return [(waiting, BadRequest(f"model {batch.model.name}: {text}"))]

    def _try_elsewhere(self, batch: _Batch, *, is_suspect: bool) -> _Ended:
        """After its predictor died: each request by itself, since one may have been the reason."""
        ended: _Ended = []
        for piece in batch.pieces:
            piece.item.in_flight -= 1
        for waiting in {id(piece.item): piece.item for piece in batch.pieces}.values():
            waiting.deaths += is_suspect
            error: DistillError | None
            if self._is_closed:
                error = TeacherBusy("the teacher ends", delay_s=_READY_AGAIN_S)
            elif waiting.deaths >= _DEATHS:
                error = TeacherFailed(
                    f"model {batch.model.name}: {waiting.deaths} predictors ended while they "
                    "computed this request; the teacher's log says how: memory that ran out, or "
                    "a value that the model cannot take",
                    tries=waiting.deaths,
                )
            elif waiting.is_over:
                error = None  # it has its end; only its memory is to be given back
            else:
                continue
            waiting.is_over = True
            self._queue.remove(waiting)
            ended.append((waiting, error))
        self._put_back_alone(batch)
        return ended

    def _put_back_alone(self, batch: _Batch) -> None:
        now = time.monotonic()
        for piece in reversed(batch.pieces):
            if not piece.item.is_over:
                self._queue.put_back((batch.key, id(piece.item)), [piece], now)

    def _place_outputs(self, lane: _Lane, batch: _Batch, numbers: Sequence[int]) -> _Ended:
        """Tell a predictor where outputs go whose shapes nobody knew before."""
        shapes = decode_shapes(numbers)
        batch.model.learn(batch.pieces[0].item.shapes_key, shapes)
        failed: dict[int, tuple[Waiting, DistillError]] = {}
        rows: list[tuple[Place | None, ...]] = []
        for piece in batch.pieces:
            waiting = piece.item
            try:
                waiting.place_outputs(shapes, self._allocate)
                rows.append(waiting.output_places(piece.start, batch.columns))
            except (BadRequest, TeacherBusy) as error:
                waiting.is_over = True
                self._queue.remove(waiting)
                failed[id(waiting)] = (waiting, error)
                rows.append((None,) * len(batch.columns))
        with contextlib.suppress(OSError):  # as in _send
            self._share_arenas(lane, batch.pieces)
            lane.predictor.channel.send(Kind.WRITE, encode_places(numbers[0], rows))
        return list(failed.values())

    # Without it.

    def _end_all(self, ended: _Ended) -> None:
        for waiting, error in ended:
            self._end(waiting, error)

    def _end(self, waiting: Waiting, error: DistillError | None) -> None:
        """Answer or fail a request, once; free what it holds once no predictor works on it."""
        with self._lock:
            is_first = not waiting.is_settled
            waiting.is_settled = waiting.is_over = True
            is_free = waiting.in_flight == 0 and not waiting.is_released
            waiting.is_released = waiting.is_released or is_free
            is_wanted = waiting.began is not None or (
                is_first and waiting.future.set_running_or_notify_cancel()
            )
        is_answered = is_first and is_wanted and error is None
        if is_free:
            waiting.release_inputs()
            if not is_answered:
                waiting.release_outputs()
        if not is_first:
            return
        began = waiting.began if waiting.began is not None else time.monotonic()
        queued_s = began - waiting.arrived
        model = waiting.model.name
        if not is_wanted:
            self.metrics.request_ended(waiting.protocol, model, "cancelled")
        elif error is None:
            waiting.future.set_result(waiting.answer(int(queued_s * 1e6)))
            self.metrics.request_queued(model, queued_s)
            self.metrics.request_ended(waiting.protocol, model, "ok")
        else:
            waiting.future.set_exception(error)
            self.metrics.request_ended(waiting.protocol, *_outcome(model, error))
        with self._done:
            self._unfinished -= 1
            if self._unfinished == 0:
                self._done.notify_all()

    def _keep_time(self) -> None:
        """Look at the queue when a batch becomes due though it is not full; end what hangs."""
        with self._due:
            while not self._is_closed:
                now = time.monotonic()
                self._dispatch(now)
                due = self._queue.next_due() if self._free else None
                self._wakes_at = min(
                    float("inf") if due is None else due, self._end_hung_predictors(now)
                )
                never = self._wakes_at == float("inf")
                self._due.wait(None if never else max(0.0, self._wakes_at - now))

    def _end_hung_predictors(self, now: float) -> float:
        """Kill those that are silent for too long; return when to look again.

        What they computed goes to others as if they had died by themselves.
        """
        look_again = float("inf")
        for lane in self._lanes.values():
            end_at = lane.silent_since + self._config.predict_timeout_s
            if end_at > now:
                look_again = min(look_again, end_at)
                continue
            lane.silent_since = float("inf")
            logger.error(
                "%s has computed one batch for %g s (--predict_timeout_s): killed as hung",
                lane.predictor,
                self._config.predict_timeout_s,
            )
            lane.predictor.process.kill()
        return look_again


def _count(batch: _Batch, computed_us: int) -> _Ended:
    """Return the requests that the batch completes."""
    ended: _Ended = []
    for piece in batch.pieces:
        waiting = piece.item
        waiting.left -= piece.count
        waiting.computed_us += computed_us
        if waiting.left == 0 or (waiting.is_over and waiting.in_flight == 0):
            ended.append((waiting, None))
    return ended


def _load(lane: _Lane) -> int:
    return len(lane.batches)


def _run(number: int, batch: _Batch) -> Run:
    """Return the message that has a predictor compute a batch."""
    model, pieces, columns = batch.model, batch.pieces, batch.columns
    first = pieces[0].item
    shapes: tuple[Shape | None, ...] = (None,) * len(model.spec.outputs)
    expected = first.output_shapes
    # Of requests that arrived before and after the shapes were learned, not all have memory.
    is_placed = expected is not None and all(
        piece.item.output_shapes == expected for piece in pieces
    )
    if is_placed and expected is not None:
        shapes = expected
    return Run(
        number,
        model.place,
        first.input_dtypes,
        first.input_shapes,
        shapes,
        columns,
        tuple(
            Rows(
                piece.count,
                piece.item.input_places(piece.start),
                piece.item.output_places(piece.start, columns)
                if is_placed
                else (None,) * len(columns),
            )
            for piece in pieces
        ),
    )


def _outcome(model: str, error: BaseException) -> tuple[str, str]:
    """Return model and outcome as the metrics count them; names that clients make up are none."""
    if isinstance(error, ModelNotFound):
        return "", "refused"
    return model, "busy" if isinstance(error, Retryable) else "refused"
