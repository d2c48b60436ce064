"""The parts that the loop needs of PyTorch. Only this folder imports it."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from pod_runtime.trainer.frameworks.beside import Beside
from pod_runtime.trainer.frameworks.framework import Framework, FrameworkStep
from pod_runtime.trainer.frameworks.plain_values import as_list
from pod_runtime.trainer.frameworks.several_optimizers import SeveralOptimizers
from pod_runtime.trainer.frameworks.torch.checks import (
    check_arguments,
    check_scaler,
    check_scheduler,
    owned_parameters,
    trained_parameters,
    unowned_parameters,
    warn_of_hooks,
)
from pod_runtime.trainer.frameworks.torch.data import TorchData
from pod_runtime.trainer.frameworks.torch.gradients import TorchShardBuffers
from pod_runtime.trainer.frameworks.torch.group import TorchGroup
from pod_runtime.trainer.frameworks.torch.state import (
    TorchState,
    numbers_of_scheduler,
    terms_of,
)
from pod_runtime.trainer.frameworks.torch.step import TorchStep
from pod_runtime.trainer.frameworks.torch.tensors import address, fingerprint, give_own_memory
from pod_runtime.trainer.frameworks.unowned import check_later_optimizer


def import_the_rest() -> None:
    """Import what PyTorch imports with a process's first optimizer: as much again as by itself.

    A spare calls this, so that no trainer that it makes waits for that.
    """
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)


def torch_framework(
    model: Any,
    optimizer: Any,
    *,
    header_size: int,
    schedulers: Sequence[Any] = (),
    scaler: Any | None = None,
    extra: Mapping[str, Any] | None = None,
    all_reduce: str = "flat",
    join_on_gpu: bool = False,
) -> Framework:
    """Look at the models, their optimizers and the device; nothing is changed yet.

    Args:
        all_reduce: "flat"; "overlapped" is not there for PyTorch.
        join_on_gpu: without effect: no second group is formed.

    Raises:
        UsageError: the model cannot be trained elastically; the text says what to change.
    """
    models, optimizers = (
        [_bare(each) for each in as_list(model) or [model]],
        as_list(optimizer) or [optimizer],
    )
    check_arguments(models, optimizers, schedulers, extra or {}, all_reduce)
    model = _joined(model, models)
    first, *_others = [trained_parameters(model, each) for each in optimizers]
    device = first[0].device
    warn_of_hooks(model)
    give_own_memory(model)
    if scaler is not None and not scaler.is_enabled():
        scaler = None
    if scaler is not None:
        # It makes its scale with the first loss, and a rank without a shard has none.
        scaler.scale(torch.zeros((), device=device))
    group = TorchGroup(device)
    buffers = TorchShardBuffers(model)
    unowned = unowned_parameters(model, *optimizers)
    parts = [
        TorchStep(
            model,
            each,
            group,
            buffers,
            unowned,
            header_size=header_size,
            schedulers=[one for one in schedulers if one.optimizer is each],
            scaler=scaler,
            is_alone=len(optimizers) == 1,
        )
        for each in optimizers
    ]
    step: FrameworkStep = parts[0]
    if len(parts) > 1:
        step = SeveralOptimizers(
            parts, group, lambda: group.world_size, buffers.loss, buffers.begin_update, scaler
        )
    return Framework(
        module=__name__,
        axis="dim",
        seeding="torch.manual_seed(...)",
        freezing="requires_grad_(False)",
        terms=lambda: terms_of(model, optimizers, device),
        group=group,
        state=TorchState(model, optimizers, schedulers, buffers.own, unowned, scaler, extra or {}),
        beside=Beside(
            models,
            extra or {},
            nn.Module,
            address=address,
            fingerprint=fingerprint,
            is_trained=lambda each: bool(each.requires_grad),
            checks={
                torch.optim.lr_scheduler.LRScheduler: lambda each: check_scheduler(
                    each, optimizers, schedulers
                ),
                torch.amp.GradScaler: lambda each: check_scaler(each, scaler),
            },
            checks_of_later={
                torch.optim.Optimizer: lambda each: check_later_optimizer(
                    type(each).__name__, owned_parameters(each), set(map(id, model.parameters()))
                )
            },
            numbers={
                torch.optim.lr_scheduler.LRScheduler: lambda each: numbers_of_scheduler(
                    each, optimizers
                )
            },
        ),
        step=step,
        data=TorchData(device),
    )


def _bare(model: Any) -> Any:
    """Return what torch.compile has wrapped."""
    return getattr(model, "_orig_mod", model)


def _joined(given: Any, models: Sequence[Any]) -> Any:
    """Return several models as one, whose layers go by the name or the place of theirs."""
    if isinstance(given, Mapping):
        return nn.ModuleDict(dict(zip(given, models, strict=True)))
    return models[0] if len(models) == 1 else nn.ModuleList(models)
