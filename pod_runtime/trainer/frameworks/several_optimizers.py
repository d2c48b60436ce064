"""A step with several optimizers, of any framework: each has its own gradients and updates.

The ranks agree on each update before gradients are sent: a script that lets a trainer's own loss
decide which optimizer steps would otherwise mix up different gradients.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from pod_runtime.trainer.errors import UsageError
from pod_runtime.trainer.frameworks.framework import FrameworkGroup, FrameworkStep


class OptimizerStep(FrameworkStep, Protocol):
    """The part of one optimizer of several; buffers and loss are those of all."""

    def trained(self) -> list[Any]:
        """Return the optimizer's parameters that are not frozen now."""

    def check_gradients(self) -> None:
        """See that gradients are as they were noted. Raises UsageError."""

    def note_gradients(self, is_last: bool) -> None:
        """Remember gradients as they are."""

    def accumulate(self, loss: Any, weight: float, parameters: Sequence[Any]) -> None:
        """Accumulate the gradient of `loss` times `weight` in these parameters, in no other."""


class SummedLoss(Protocol):
    """The loss that travels with the gradients, and further ones like it."""

    value: Any  # over all ranks, once they have exchanged

    def fresh(self) -> Any:
        """Return another one, of nothing yet."""

    def add(self, loss: Any, weight: float) -> None:
        """Add a shard's."""

    def replace(self, parts: Sequence[Any]) -> None:
        """Be the sum of these."""


class SeveralOptimizers:
    """Replaces the step of one optimizer; is made of one such step per optimizer."""

    def __init__(
        self,
        parts: Sequence[OptimizerStep],
        group: FrameworkGroup,
        world_size: Callable[[], int],
        loss: SummedLoss,
        begin_update: Callable[[], None],
        scaler: Any | None,
    ) -> None:
        """
        Args:
            world_size: of `group`, as it is now.
            loss: of the parts.
            begin_update: has buffers and loss begin anew, from their values of now.
            scaler: which the parts use, and do not update.
        """
        self.optimizers = [part.optimizers[0] for part in parts]
        self._parts, self._group, self._world_size = parts, group, world_size
        self._loss, self._begin_update, self._scaler = loss, begin_update, scaler
        self._losses: dict[tuple[int, ...], Any] = {}  # since their updates
        self._updates = 0  # of this step
        self._stepped: set[int] = set()  # in this step
        self._value: Any | None = None  # loss of the newest exchange; None: none since `backward`

    def begin(self) -> None:
        self._forget()
        self._parts[0].begin()

    def end_shard(self) -> None:
        self._parts[0].end_shard()

    def check_shard(self) -> None:
        self._parts[0].check_shard()

    def check_buffers(self) -> None:
        self._parts[0].check_buffers()

    def backward(
        self, loss: Any, weight: float, is_last: bool = False, of: Sequence[int] = ()
    ) -> None:
        chosen = [self._parts[index] for index in of]
        for part in chosen:
            part.check_gradients()
        self._value = None
        if tuple(of) not in self._losses:
            self._losses[tuple(of)] = self._loss.fresh()
        self._losses[tuple(of)].add(loss, weight)
        parameters = [each for part in chosen for each in part.trained()]
        if not parameters:
            raise UsageError(
                "step.backward(loss): all parameters of the optimizer are frozen; unfreeze them "
                "before its turn"
            )
        chosen[0].accumulate(loss, weight, parameters)
        for part in chosen:
            part.note_gradients(is_last)

    def exchange(
        self, header: Sequence[float], contribute: bool, of: Sequence[int] = ()
    ) -> list[float]:
        self._sum_losses(of)
        sums, contributors = [float(value) for value in header], int(contribute)
        world_size = self._world_size()
        if world_size > 1:
            sums, contributors = self._agree(header, of if contribute else None)
        if contributors == world_size:
            for index in of:
                self._parts[index].exchange([0.0] * len(header), True)
            self._value = self._loss.value
        elif contributors == 0:  # before a stage's first step: what that sets up is set up now
            for part in self._parts:
                part.exchange([0.0] * len(header), False)
        return sums

    def _agree(self, header: Sequence[float], of: Sequence[int] | None) -> tuple[list[float], int]:
        """Sum the header; return it, and how many ranks contribute gradients: all of the same.

        Raises:
            UsageError: they do not.
        """
        votes = [float(of is not None and index in of) for index in range(len(self._parts))]
        which = 0.0 if of is None else float(self._updates)
        numbers = np.array([*header, float(of is not None), which, which * which, *votes])
        self._group.all_reduce(numbers)
        size, world_size = len(header), self._world_size()
        contributors, update, squared, *summed = numbers[size:].tolist()
        sums: list[float] = numbers[:size].tolist()
        if round(contributors) < world_size:
            return sums, round(contributors)
        if round(world_size * squared) != round(update * update) or any(
            round(each) not in (0, world_size) for each in summed
        ):
            raise UsageError(
                "step.update(): the trainers do not update the same optimizers, or not equally "
                "often in this step. What decides that has to be the same on every trainer: "
                "step.number, or what step.update() has returned, but not the loss of a shard"
            )
        return sums, world_size

    def _sum_losses(self, of: Sequence[int]) -> None:
        self._loss.replace([each for key, each in self._losses.items() if set(key) & set(of)])

    def loss(self, of: Sequence[int] = ()) -> Any:
        if self._value is None:
            self._sum_losses(of)
            return self._loss.value
        return self._value

    def apply(
        self,
        *,
        filled_shards: int,
        lr_factor: float,
        max_norm: float | None = None,
        of: Sequence[int] = (),
    ) -> None:
        if self._scaler is not None and self._stepped.intersection(of):
            raise UsageError(
                "step.update(): with a loss scaler an optimizer is updated once in a step: the "
                "scale is adjusted at its end"
            )
        if max_norm is not None and len(of) > 1:
            raise UsageError(
                "step.clip(max_norm): several optimizers are updated at once; clip and update them "
                "one after the other: step.clip(max_norm), then step.update(optimizer)"
            )
        for index in of:
            self._parts[index].apply(
                filled_shards=filled_shards, lr_factor=lr_factor, max_norm=max_norm
            )
        self._updates += 1
        self._stepped.update(of)
        self._losses = {key: each for key, each in self._losses.items() if not set(key) & set(of)}
        self._begin_update()

    def end(self) -> None:
        if self._scaler is not None and self._stepped:
            self._scaler.update()  # once, after all that used its scale
        self._forget()

    def drop(self) -> None:
        self.end()
        for part in self._parts:
            part.drop()

    def clear(self) -> None:
        for part in self._parts:
            part.clear()

    def _forget(self) -> None:
        self._losses, self._value = {}, None
        self._updates, self._stepped = 0, set()
