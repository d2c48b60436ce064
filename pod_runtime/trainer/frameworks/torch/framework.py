"""The parts that the loop needs of PyTorch. Only this folder imports it."""

from collections.abc import Mapping, Sequence
from typing import Any

from pod_runtime.trainer.frameworks.framework import Framework
from pod_runtime.trainer.frameworks.torch.checks import (
    check_arguments,
    trained_parameters,
    unowned_parameters,
)
from pod_runtime.trainer.frameworks.torch.data import TorchData
from pod_runtime.trainer.frameworks.torch.gradients import TorchShardBuffers
from pod_runtime.trainer.frameworks.torch.group import TorchGroup
from pod_runtime.trainer.frameworks.torch.state import TorchState, terms_of
from pod_runtime.trainer.frameworks.torch.step import TorchStep


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
    """Look at the model, its optimizer and their device; nothing is changed yet.

    Args:
        all_reduce: "flat"; "overlapped" is not there for PyTorch.
        join_on_gpu: without effect: no second group is formed.

    Raises:
        UsageError: the model cannot be trained elastically; the text says what to change.
    """
    model = getattr(model, "_orig_mod", model)  # what torch.compile has wrapped
    check_arguments(model, optimizer, schedulers, extra or {}, all_reduce)
    device = trained_parameters(model, optimizer)[0].device
    if scaler is not None and not scaler.is_enabled():
        scaler = None
    group = TorchGroup(device)
    buffers = TorchShardBuffers(model)
    unowned = unowned_parameters(model, optimizer)
    return Framework(
        module=__name__,
        terms=lambda: terms_of(model, optimizer, device),
        group=group,
        state=TorchState(model, optimizer, schedulers, buffers.own, unowned, scaler, extra or {}),
        step=TorchStep(
            model,
            optimizer,
            group,
            buffers,
            unowned,
            header_size=header_size,
            schedulers=schedulers,
            scaler=scaler,
        ),
        data=TorchData(device),
    )
