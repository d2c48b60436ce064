"""The parts that the loop needs of Paddle. Only this folder and `epochs` import it."""

from collections.abc import Mapping, Sequence
from typing import Any

from pod_runtime.trainer.frameworks.framework import Framework
from pod_runtime.trainer.frameworks.paddle.checks import (
    check_arguments,
    unowned_parameters,
)
from pod_runtime.trainer.frameworks.paddle.data import PaddleData
from pod_runtime.trainer.frameworks.paddle.gradients import ShardBuffers, trained_parameters
from pod_runtime.trainer.frameworks.paddle.group import PaddleGroup
from pod_runtime.trainer.frameworks.paddle.state import PaddleState, terms_of
from pod_runtime.trainer.frameworks.paddle.step import PaddleStep


def paddle_framework(
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
) -> Framework:
    """Look at the model, its optimizer and this process's device; nothing is changed yet.

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
    if scaler is not None and not scaler.is_enable():
        scaler = None
    group = PaddleGroup(join_on_gpu=join_on_gpu)
    buffers = ShardBuffers(model, on_host)
    unowned = unowned_parameters(model, optimizer)
    return Framework(
        module=__name__,
        terms=lambda: terms_of(model, optimizer, on_host=on_host),
        group=group,
        state=PaddleState(model, optimizer, buffers.own, unowned, scaler, extra or {}),
        step=PaddleStep(
            model,
            optimizer,
            group,
            buffers,
            unowned,
            header_size=header_size,
            scaler=scaler,
            all_reduce=all_reduce,
            on_host=on_host,
        ),
        data=PaddleData(),
    )
