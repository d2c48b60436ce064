"""The loop's `Adapter` for PaddlePaddle. Only this folder and `epochs` import Paddle."""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import paddle
import paddle.distributed as dist
from paddle.base import core
from paddle.io.dataloader.collate import default_collate_fn

from pod_runtime.trainer.errors import PeerLost, UsageError
from pod_runtime.trainer.frameworks.adapter import GroupSpec, Subgroup
from pod_runtime.trainer.frameworks.paddle import group as paddle_group
from pod_runtime.trainer.frameworks.paddle.checks import (
    GradientMarks,
    UnownedParameters,
    check_arguments,
)
from pod_runtime.trainer.frameworks.paddle.gradients import (
    GradientExchange,
    ShardBuffers,
    trained_parameters,
)
from pod_runtime.trainer.frameworks.paddle.overlap import (
    AsyncReducer,
    Hooks,
    OverlappedExchange,
    TaskReducer,
    ThreadReducer,
)
from pod_runtime.trainer.frameworks.paddle.state import PaddleState, optimizer_parameters, terms_of
from pod_runtime.trainer.frameworks.paddle.store import prompt_store, wait_for
from pod_runtime.trainer.frameworks.paddle.subgroups import form_subgroup, free_port
from pod_runtime.trainer.layout import StateLayout

logger = logging.getLogger(__name__)

_GLOO_PATIENCE_S = 30.0  # gloo's time-out, which Paddle does not let us change
_TIMEOUT_HINT = (
    f"a rank did not come within {_GLOO_PATIENCE_S:g} s: on the CPU, what one rank does alone "
    "(an evaluation or a save on rank 0, say) has to take less; loop.evaluate spreads it over all "
    "ranks; "
)
_MASTER_TIMEOUT_S = 600.0  # outside EDL; inside, the launcher ends this process long before


class PaddleAdapter:
    """One model and its optimizer on this process's device."""

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        *,
        header_size: int,
        schedulers: Sequence[Any] = (),
        scaler: Any | None = None,
        extra: Mapping[str, Any] | None = None,
        all_reduce: str = "flat",
        on_host: bool | None = None,
        join_on_gpu: bool = False,
    ) -> None:
        """Look at the model; nothing is changed yet.

        Args:
            all_reduce: one of settings.ALL_REDUCE.
            on_host: how gradients are made flat; None: by where the model lives.
            join_on_gpu: form second groups on GPUs too, which has not been tried.

        Raises:
            UsageError: the model cannot be trained elastically; the text says what to change.
        """
        check_arguments(model, optimizer, schedulers, {} if extra is None else extra)
        parameters = trained_parameters(model, optimizer)
        if on_host is None:
            on_host = bool(parameters[0].place.is_cpu_place())
        self._model = model
        self._optimizer = optimizer
        self._scaler = scaler if scaler is not None and scaler.is_enable() else None
        self._state = PaddleState(model, optimizer, self._scaler, extra or {})
        self._buffers = ShardBuffers(model, on_host)
        self._header_size, self._on_host = header_size, on_host
        self._hooks = Hooks() if all_reduce == "overlapped" else None
        self._reducer = self._make_reducer()
        self._exchange = self._make_exchange(parameters)
        self._parameters = model.parameters()  # frozen ones, too
        self._frozen = self._what_is_frozen()
        self._unowned = UnownedParameters(model, optimizer)
        owned = {id(each) for each in optimizer_parameters(optimizer)}
        self._marks = GradientMarks([p for p in self._parameters if id(p) in owned], on_host)
        self._rank, self._world_size = 0, 1
        self._group: Any | None = None  # None: Paddle's default one
        self._subgroups: list[
            Any | None
        ] = []  # None: one that this rank is not in, or a world of one
        self._join_on_gpu = join_on_gpu
        self._weights: dict[tuple[float, Any, tuple[int, ...]], Any] = {}

    def terms(self) -> dict[str, Any]:
        return terms_of(self._model, self._optimizer, on_host=self._on_host)

    # --- group

    def form_group(self, spec: GroupSpec) -> None:
        self._rank, self._world_size = spec.rank, spec.world_size
        if isinstance(self._exchange, OverlappedExchange):
            self._exchange.start_over()
        if spec.world_size == 1:
            return
        if not paddle_group.on_gpu():
            # Paddle reads it when it makes the group; without it, collectives fail on the CPU.
            os.environ.setdefault("PADDLE_DISTRI_BACKEND", "gloo")
        master = spec.master or _own_master()
        if spec.rank:
            wait_for(master, _MASTER_TIMEOUT_S)
        try:
            with prompt_store(master), paddle_group.own_flags_unsaid():
                dist.init_parallel_env()
        except RuntimeError as error:
            raise PeerLost(f"the group of {spec.world_size} was not formed: {error}") from error

    def form_subgroups(self, parts: Sequence[Subgroup]) -> None:
        ports = np.zeros(len(parts))
        for index, part in enumerate(parts):
            if self._rank == part.ranks[0]:
                ports[index] = free_port()
        self.all_reduce(ports)
        for index, part in enumerate(parts):
            made = None
            if self._rank in part.ranks and len(part.ranks) > 1:
                master = f"{part.addr}:{int(ports[index])}"
                made = form_subgroup(index, part.ranks, self._rank, master)
            self._subgroups.append(made)

    def use_subgroup(self, index: int, spec: GroupSpec) -> None:
        self._go_on_in(self._subgroups[index], spec)

    def why_no_second_group(self) -> str:
        return paddle_group.why_no_second_group(gpu_allowed=self._join_on_gpu)

    def form_next(self, spec: GroupSpec, is_off: Callable[[], bool]) -> paddle_group.NextGroup:
        return paddle_group.form_next(spec, is_off)

    def adopt(self, group: paddle_group.NextGroup) -> None:
        paddle_group.adopt(group)
        self._go_on_in(group.handle, group.spec)

    def _go_on_in(self, group: Any | None, spec: GroupSpec) -> None:
        self._group = group
        self._rank, self._world_size = spec.rank, spec.world_size
        if isinstance(self._exchange, OverlappedExchange):
            self._exchange.start_over()

    def all_reduce(self, values: npt.NDArray[np.float64]) -> None:
        if self._world_size > 1:
            self._check_closed()
            tensor = paddle.to_tensor(values)
            self._reduce(tensor)
            values[:] = tensor.numpy()

    def broadcast(self, data: npt.NDArray[np.uint8], source: int) -> None:
        if self._world_size > 1 and data.size:
            self._check_closed()
            tensor = paddle.to_tensor(data)
            try:
                dist.broadcast(tensor, source, group=self._group)
            except RuntimeError as error:
                raise PeerLost(f"broadcast from rank {source}: {error}") from error
            data[:] = tensor.numpy()

    def _reduce(self, tensor: Any) -> None:
        if self._world_size == 1:
            return
        began = time.monotonic()
        try:
            dist.all_reduce(tensor, group=self._group)
        except RuntimeError as error:  # gloo: a peer closed its end, or was silent for 30 s
            # Of another node's dead trainer gloo says TIMEOUT as well, but at once.
            is_late = "TIMEOUT" in str(error) and time.monotonic() - began > _GLOO_PATIENCE_S / 2
            hint = _TIMEOUT_HINT if is_late else ""
            raise PeerLost(f"{hint}all-reduce: {error}") from error

    # --- state

    def layout(self) -> StateLayout:
        self._buffers.own.take_back()
        return self._state.layout()

    def copy_out(self, target: memoryview, start: int = 0, stop: int | None = None) -> None:
        self._state.copy_out(target, start, stop)

    def scalars(self) -> dict[str, Any]:
        return self._state.scalars()

    def load(self, layout: StateLayout, data: memoryview, scalars: Mapping[str, Any]) -> None:
        self._buffers.own.take_back()
        self._state.load(layout, data, scalars)
        self._unowned.forget()

    def load_again(self) -> None:
        self._state.load_again()

    def watch(self) -> None:
        self._state.watch()

    def watched(self) -> tuple[dict[str, bool], bool]:
        return self._state.watched()

    def set_modes(self, modes: Mapping[str, bool]) -> None:
        self._state.traits.set_modes(modes)

    def uncarried_changes(self) -> list[str]:
        return self._state.traits.uncarried_changes()

    def unowned(self) -> list[str]:
        return self._unowned.names

    # --- a step

    def begin_step(self) -> None:
        self._unowned.note()
        self._buffers.begin_step()

    def check_unowned(self) -> None:
        self._unowned.check()

    def end_shard(self) -> None:
        self._buffers.end_shard()

    def backward(self, loss: Any, weight: float, is_last: bool = False) -> None:
        self._marks.check()
        self._buffers.loss.add(loss, weight)
        if is_last and self._world_size > 1 and isinstance(self._exchange, OverlappedExchange):
            self._follow_frozen()
            self._exchange.arm()
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        key = (weight, loss.dtype, tuple(loss.shape))
        factor = self._weights.get(key)
        if factor is None:
            factor = self._weights[key] = paddle.full(loss.shape, weight, loss.dtype)
        loss.backward(factor)
        self._marks.note(for_update=is_last)

    def exchange(self, header: Sequence[float], contribute: bool) -> list[float]:
        if contribute:
            self._marks.check()
        if self._world_size == 1:
            return [float(value) for value in header]
        self._follow_frozen()
        return self._exchange.run(header, contribute, self._reduce)

    def step_loss(self) -> Any:
        return self._buffers.loss.value

    def _follow_frozen(self) -> None:
        """Exchange what is trained now: a script may unfreeze layers as the training goes on."""
        frozen = self._what_is_frozen()
        if frozen != self._frozen:
            self._check_closed()
            self._frozen = frozen
            before = self._exchange
            self._exchange = self._make_exchange(trained_parameters(self._model, self._optimizer))
            if isinstance(before, OverlappedExchange):
                assert isinstance(self._exchange, OverlappedExchange)
                self._exchange.gives_up = before.gives_up

    def _what_is_frozen(self) -> list[bool | int]:
        groups = self._optimizer._param_groups  # to which one may have been added
        if isinstance(groups[0], dict):
            count = sum(len(each["params"]) for each in groups)
        else:
            count = len(groups)
        return [*(each.stop_gradient for each in self._parameters), count]

    def _make_exchange(self, parameters: list[Any]) -> GradientExchange | OverlappedExchange:
        if self._hooks is None:
            return GradientExchange(parameters, self._buffers, self._header_size, self._on_host)
        made = OverlappedExchange(
            parameters, self._buffers, self._header_size, self._on_host, self._reducer
        )
        self._hooks.listen_with(made)
        return made

    def _make_reducer(self) -> AsyncReducer:
        if self._on_host:
            return ThreadReducer(self._reduce)
        return TaskReducer(
            lambda tensor: dist.all_reduce(tensor, group=self._group, sync_op=False),
            lambda task: task.wait(),
        )

    def _check_closed(self) -> None:
        """Nothing else may be sent while buckets are on their way: other ranks would mix them up.

        Raises:
            UsageError: they are.
        """
        if isinstance(self._exchange, OverlappedExchange) and self._exchange.is_open:
            raise UsageError(
                "between step.backward and step.update the gradients are on their way "
                '(all_reduce="overlapped"): evaluate, freeze and unfreeze before or after that'
            )

    def apply(self, *, filled_shards: int, lr_factor: float, max_norm: float | None = None) -> None:
        if self._world_size > 1:
            self._exchange.put_back(filled_shards)
        else:
            changes = {dtype: self._buffers.changes(dtype) for dtype in self._buffers.dtypes}
            self._buffers.apply(changes, filled_shards)
        if max_norm is not None:
            if self._scaler is not None:
                self._scaler.unscale_(self._optimizer)
            paddle.nn.utils.clip_grad_norm_(optimizer_parameters(self._optimizer), max_norm)
        usual = contextlib.nullcontext()
        with usual if lr_factor == 1.0 else self._learning_rate(lr_factor):
            if self._scaler is None:
                self._optimizer.step()
            else:
                self._scaler.step(self._optimizer)
                self._scaler.update()
        self.drop_step()

    def drop_step(self) -> None:
        if isinstance(self._exchange, OverlappedExchange):
            self._exchange.reset()
        self._marks.forget()
        # Not zeroed but gone: a parameter that no shard of the next step uses must look the same
        # to a trainer that has just been restored and to one that has run for hours.
        self._optimizer.clear_grad(set_to_zero=False)

    @contextlib.contextmanager
    def _learning_rate(self, factor: float) -> Iterator[None]:
        rate = self._optimizer._learning_rate
        if isinstance(rate, paddle.optimizer.lr.LRScheduler):
            before = rate.last_lr
            rate.last_lr = before * factor
            try:
                yield
            finally:
                rate.last_lr = before
        else:
            before = float(self._optimizer.get_lr())
            self._optimizer.set_lr(before * factor)
            try:
                yield
            finally:
                self._optimizer.set_lr(before)

    # --- data and numbers

    def seed(self, key: int) -> None:
        paddle.seed(key & 0x7FFFFFFF)

    def draw(self) -> int:
        return int(core.default_cpu_generator().random())

    def collate(self, samples: list[Any]) -> Any:
        return default_collate_fn(samples)

    def to_batch(self, fields: Any) -> Any:
        if isinstance(fields, np.ndarray):
            return paddle.to_tensor(fields)
        if isinstance(fields, list | tuple):
            return type(fields)(self.to_batch(each) for each in fields)
        if isinstance(fields, dict):
            return {name: self.to_batch(each) for name, each in fields.items()}
        return fields

    def loader(
        self,
        dataset: Any,
        index_batches: Iterator[list[Any]],
        *,
        collate: Callable[[list[Any]], Any] | None,
        options: Mapping[str, Any],
        on_host: bool = False,
    ) -> Iterator[Any]:
        loader = paddle.io.DataLoader(
            dataset,
            places=paddle.CPUPlace() if on_host else None,
            batch_sampler=_IndexBatches(index_batches),
            collate_fn=collate,
            return_list=True,
            **options,
        )
        return iter(loader)

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        with self._state.traits.evaluating(), paddle.no_grad():
            yield

    def to_float(self, value: Any) -> float:
        return float(value.item()) if hasattr(value, "item") else float(value)


class _IndexBatches(paddle.io.BatchSampler):  # type: ignore[misc]  # Paddle has no types
    """Hands lists of indices to Paddle's loader. Its length is never asked for usefully."""

    def __init__(self, batches: Iterator[list[Any]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[Any]]:
        return self._batches

    def __len__(self) -> int:
        return 1 << 60


def _own_master() -> str:
    """Where Paddle looks for rank 0, by Paddle's own rules, under its own launcher."""
    environ = os.environ
    if "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        return f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
    return environ.get("PADDLE_MASTER") or environ["PADDLE_TRAINER_ENDPOINTS"].split(",")[0]
