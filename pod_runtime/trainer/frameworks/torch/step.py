"""The gradients and buffers of a PyTorch model in one step."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from pod_runtime.trainer.frameworks.buffers import check_unset, check_whole
from pod_runtime.trainer.frameworks.gradient_marks import LossScaling
from pod_runtime.trainer.frameworks.torch.checks import (
    SchedulerCheck,
    gradient_marks,
    owned_parameters,
    trained_parameters,
)
from pod_runtime.trainer.frameworks.torch.gradients import TorchGradientExchange, TorchShardBuffers
from pod_runtime.trainer.frameworks.torch.group import TorchGroup
from pod_runtime.trainer.frameworks.unowned import UnownedParameters


class TorchStep:
    """One model and its optimizer, whose gradients go through the group."""

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        group: TorchGroup,
        buffers: TorchShardBuffers,
        unowned: UnownedParameters,
        *,
        header_size: int,
        schedulers: Sequence[Any],
        scaler: Any | None,
        is_alone: bool = True,
    ) -> None:
        self.optimizers = [optimizer]
        self._model, self._optimizer = model, optimizer
        self._updates_scaler = is_alone
        self._group, self._buffers, self._unowned = group, buffers, unowned
        self._scaler, self._header_size = scaler, header_size
        self._scaling = LossScaling.of(scaler)
        self._exchange = self._make_exchange()
        self._frozen = self._what_is_frozen()
        self._marks = gradient_marks(model, optimizer)
        optimizer.register_step_pre_hook(lambda *_arguments: self._marks.check_step())
        self._scheduler_check = SchedulerCheck(optimizer, schedulers)
        self._weights: dict[tuple[float, Any, Any, Any], Any] = {}

    def begin(self) -> None:
        self._unowned.note()
        self._buffers.begin_step()

    def end_shard(self) -> None:
        self._buffers.end_shard()

    def check_shard(self) -> None:
        check_whole(self._model.named_buffers(), self._buffers.written_in_part())

    def check_buffers(self) -> None:
        changed = self._buffers.changed_since_shard()
        check_unset(self._model.named_buffers(), changed)

    def backward(
        self, loss: Any, weight: float, is_last: bool = False, of: Sequence[int] = ()
    ) -> None:
        self._marks.check()
        self._buffers.loss.add(loss, weight)
        if self._scaling is not None:
            loss = self._scaling.scaled(loss)
        loss.backward(self._factor(loss, weight))
        self._marks.note(for_update=is_last)

    def _factor(self, loss: Any, weight: float) -> Any:
        key = (weight, loss.dtype, loss.shape, loss.device)
        factor = self._weights.get(key)
        if factor is None:
            factor = self._weights[key] = torch.full_like(loss, weight)
        return factor

    def exchange(
        self, header: Sequence[float], contribute: bool, of: Sequence[int] = ()
    ) -> list[float]:
        if contribute:
            self._marks.check()
        if self._group.world_size == 1:
            return list(header)
        frozen = self._what_is_frozen()
        if frozen != self._frozen:  # a script may unfreeze layers as the training goes on
            self._exchange = self._make_exchange()
            self._frozen = self._what_is_frozen()
        return self._exchange.run(header, contribute, self._group.reduce)

    def trained(self) -> list[Any]:
        """Return the optimizer's parameters that are not frozen now."""
        groups = self._optimizer.param_groups
        return [p for each in groups for p in each["params"] if p.requires_grad]

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
        loss.backward(self._factor(loss, weight), inputs=list(parameters))

    def loss(self, of: Sequence[int] = ()) -> Any:
        return self._buffers.loss.value

    def _make_exchange(self) -> TorchGradientExchange:
        parameters = trained_parameters(self._model, self._optimizer)
        known = owned_parameters(self._optimizer)
        self._owned = [each for each in self._model.parameters() if id(each) in known]
        return TorchGradientExchange(parameters, self._buffers, self._header_size)

    def _what_is_frozen(self) -> list[bool | int]:
        count = sum(len(group["params"]) for group in self._optimizer.param_groups)
        return [*(each.requires_grad for each in self._owned), count]

    def apply(
        self,
        *,
        filled_shards: int,
        lr_factor: float,
        max_norm: float | None = None,
        of: Sequence[int] = (),
    ) -> None:
        self._scheduler_check.check()
        if self._group.world_size > 1:
            self._exchange.put_back(filled_shards)
        else:
            self._buffers.apply_alone(filled_shards)
        if max_norm is not None:
            if self._scaler is not None:
                self._scaler.unscale_(self._optimizer)
            groups = self._optimizer.param_groups
            torch.nn.utils.clip_grad_norm_([p for each in groups for p in each["params"]], max_norm)
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
        self._marks.forget()
        self.clear()

    def clear(self) -> None:
        # Not zeroed but gone: a parameter that no shard of the next step uses must look the same
        # to a trainer that has just been restored and to one that has run for hours.
        # `zero_grad` would do, but tells a profiler of it, which takes ten times as long.
        for each in self._owned:
            if each.grad is not None:
                each.grad = None

    @contextlib.contextmanager
    def _learning_rate(self, factor: float) -> Iterator[None]:
        rates = [
            (group, group["lr"], group["lr"] * factor) for group in self._optimizer.param_groups
        ]
        for group, _before, scaled in rates:
            group["lr"] = scaled
        try:
            yield
        finally:
            for group, before, scaled in rates:
                # An optimizer may set its own rate when it steps.
                group["lr"] = before if group["lr"] is scaled else group["lr"] / factor
