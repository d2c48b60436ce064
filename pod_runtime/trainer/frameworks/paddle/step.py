"""The gradients and buffers of a Paddle model in one step."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import paddle

from pod_runtime.trainer.errors import UsageError
from pod_runtime.trainer.frameworks.buffers import check_unset, check_whole
from pod_runtime.trainer.frameworks.gradient_marks import GradientMarks, LossScaling
from pod_runtime.trainer.frameworks.paddle.checks import gradient_marks
from pod_runtime.trainer.frameworks.paddle.gradients import (
    GradientExchange,
    ShardBuffers,
    trained_parameters,
)
from pod_runtime.trainer.frameworks.paddle.group import PaddleGroup
from pod_runtime.trainer.frameworks.paddle.overlap import (
    AsyncReducer,
    Hooks,
    OverlappedExchange,
    TaskReducer,
    ThreadReducer,
)
from pod_runtime.trainer.frameworks.paddle.state import optimizer_parameters
from pod_runtime.trainer.frameworks.paddle.tensors import of_model
from pod_runtime.trainer.frameworks.unowned import UnownedParameters


class CheckedStep:
    """An optimizer's `step` or `minimize`, which the script leaves to the loop."""

    def __init__(self, step: Any, marks: GradientMarks) -> None:
        self._step, self._marks = step, marks

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Raises UsageError: the script calls it amid a step of the loop."""
        self._marks.check_step()
        return self._step(*arguments, **options)


class PaddleStep:
    """One model and its optimizer, whose gradients go through the group."""

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        group: PaddleGroup,
        buffers: ShardBuffers,
        unowned: UnownedParameters,
        *,
        header_size: int,
        scaler: Any | None,
        is_alone: bool = True,
        all_reduce: str,
        on_host: bool,
    ) -> None:
        """
        Args:
            all_reduce: one of settings.ALL_REDUCE.
            on_host: how gradients are made flat.
        """
        self.optimizers = [optimizer]
        self._model, self._optimizer = model, optimizer
        self._updates_scaler = is_alone
        self._group, self._buffers, self._unowned = group, buffers, unowned
        self._scaler, self._scaling = scaler, LossScaling.of(scaler)
        self._header_size, self._on_host = header_size, on_host
        self._hooks = Hooks() if all_reduce == "overlapped" else None
        self._reducer = self._make_reducer()
        self._exchange = self._make_exchange(trained_parameters(model, optimizer))
        owned = {id(each) for each in optimizer_parameters(optimizer)}
        mine = [each for each in model.parameters() if id(each) in owned]  # frozen ones, too
        self._marks = gradient_marks(mine, on_host)
        optimizer.step = CheckedStep(optimizer.step, self._marks)
        optimizer.minimize = CheckedStep(optimizer.minimize, self._marks)
        self._parameters = model.parameters() if is_alone else mine
        self._frozen = self._what_is_frozen()
        self._weights: dict[tuple[float, Any, tuple[int, ...]], Any] = {}
        group.on_change, group.check_free = self._start_over, self._check_closed

    def begin(self) -> None:
        self._unowned.note()
        self._buffers.begin_step()

    def end_shard(self) -> None:
        self._buffers.end_shard()

    def check_shard(self) -> None:
        check_whole(self._model.state_dict().items(), self._buffers.written_in_part())

    def check_buffers(self) -> None:
        changed = self._buffers.changed_since_shard()
        check_unset(of_model(self._model).items(), changed)

    def backward(
        self, loss: Any, weight: float, is_last: bool = False, of: Sequence[int] = ()
    ) -> None:
        self._marks.check()
        self._buffers.loss.add(loss, weight)
        if is_last and self._group.world_size > 1 and self._hooks is not None:
            self._follow_frozen()
            assert isinstance(self._exchange, OverlappedExchange)
            self._exchange.arm()
        if self._scaling is not None:
            loss = self._scaling.scaled(loss)
        loss.backward(self._factor(loss, weight))
        self._marks.note(for_update=is_last)

    def _factor(self, loss: Any, weight: float) -> Any:
        key = (weight, loss.dtype, tuple(loss.shape))
        factor = self._weights.get(key)
        if factor is None:
            factor = self._weights[key] = paddle.full(loss.shape, weight, loss.dtype)
        return factor

    def exchange(
        self, header: Sequence[float], contribute: bool, of: Sequence[int] = ()
    ) -> list[float]:
        if contribute:
            self._marks.check()
        if self._group.world_size == 1:
            return list(header)
        self._follow_frozen()
        return self._exchange.run(header, contribute, self._group.reduce)

    def trained(self) -> list[Any]:
        """Return the optimizer's parameters that are not frozen now."""
        return [p for p in optimizer_parameters(self._optimizer) if not p.stop_gradient]

    def check_gradients(self) -> None:
        """See that gradients are as they were noted. Raises UsageError."""
        self._marks.check()

    def note_gradients(self, is_last: bool) -> None:
        """Remember gradients as they are."""
        self._marks.note(for_update=is_last)

    def accumulate(self, loss: Any, weight: float, parameters: Sequence[Any]) -> None:
        """Accumulate the gradient of `loss` times `weight` in these parameters, in no other."""
        if self._scaling is not None:
            loss = self._scaling.scaled(loss)
        found = paddle.grad(
            [loss], list(parameters), grad_outputs=[self._factor(loss, weight)], allow_unused=True
        )
        for parameter, grad in zip(parameters, found, strict=True):
            if grad is None:
                continue
            if parameter.grad is None:
                parameter.grad = grad
            else:
                parameter.grad.add_(grad)

    def loss(self, of: Sequence[int] = ()) -> Any:
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
            return ThreadReducer(self._group.reduce)
        return TaskReducer(self._group.start_reduce, lambda task: task.wait())

    def _start_over(self) -> None:
        if isinstance(self._exchange, OverlappedExchange):
            self._exchange.start_over()

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

    def apply(
        self,
        *,
        filled_shards: int,
        lr_factor: float,
        max_norm: float | None = None,
        of: Sequence[int] = (),
    ) -> None:
        if self._group.world_size > 1:
            self._exchange.put_back(filled_shards)
        else:
            self._buffers.apply_alone(filled_shards)
        if max_norm is not None:
            if self._scaler is not None:
                self._scaler.unscale_(self._optimizer)
            paddle.nn.utils.clip_grad_norm_(optimizer_parameters(self._optimizer), max_norm)
        self._marks.begin_update()
        usual = contextlib.nullcontext()
        with usual if lr_factor == 1.0 else self._learning_rate(lr_factor):
            if self._scaler is None:
                self._optimizer.step()
            else:
                self._scaler.step(self._optimizer)
                if self._updates_scaler:
                    self._scaler.update()
        self.drop()

    def end(self) -> None:
        """All is done with the update."""

    def drop(self) -> None:
        if isinstance(self._exchange, OverlappedExchange):
            self._exchange.reset()
        self._marks.forget()
        self.clear()

    def clear(self) -> None:
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
