"""The parts that the loop needs of Paddle. Only this folder and `epochs` import it."""

from collections.abc import Mapping, Sequence
from typing import Any

import paddle
from paddle import nn

from pod_runtime.trainer.frameworks.beside import Beside
from pod_runtime.trainer.frameworks.framework import Framework, FrameworkStep
from pod_runtime.trainer.frameworks.paddle.checks import (
    check_arguments,
    check_average,
    unowned_parameters,
)
from pod_runtime.trainer.frameworks.paddle.data import PaddleData
from pod_runtime.trainer.frameworks.paddle.gradients import (
    ShardBuffers,
    keep_gradients_of_static_graphs,
    trained_parameters,
)
from pod_runtime.trainer.frameworks.paddle.group import PaddleGroup
from pod_runtime.trainer.frameworks.paddle.state import (
    PaddleState,
    numbers_of_scheduler,
    optimizer_parameters,
    terms_of,
)
from pod_runtime.trainer.frameworks.paddle.step import PaddleStep
from pod_runtime.trainer.frameworks.paddle.tensors import address, fingerprint
from pod_runtime.trainer.frameworks.plain_values import as_list
from pod_runtime.trainer.frameworks.several_optimizers import SeveralOptimizers
from pod_runtime.trainer.frameworks.unowned import check_later_optimizer


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
    """Look at the models, their optimizers and this process's device; nothing is changed yet.

    Args:
        all_reduce: one of settings.ALL_REDUCE.
        on_host: how gradients are made flat; None: by where the model lives.
        join_on_gpu: form second groups on GPUs too, which has not been tried.

    Raises:
        UsageError: the model cannot be trained elastically; the text says what to change.
    """
    models, optimizers = as_list(model) or [model], as_list(optimizer) or [optimizer]
    check_arguments(models, optimizers, schedulers, {} if extra is None else extra, all_reduce)
    model = _joined(model, models)
    parameters, *_others = [trained_parameters(model, each) for each in optimizers]
    if on_host is None:
        on_host = bool(parameters[0].place.is_cpu_place())
    if scaler is not None and not scaler.is_enable():
        scaler = None
    group = PaddleGroup(join_on_gpu=join_on_gpu)
    buffers = ShardBuffers(model, on_host)
    unowned = unowned_parameters(model, *optimizers)
    keep_gradients_of_static_graphs()
    parts = [
        PaddleStep(
            model,
            each,
            group,
            buffers,
            unowned,
            header_size=header_size,
            scaler=scaler,
            is_alone=len(optimizers) == 1,
            all_reduce=all_reduce,
            on_host=on_host,
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
        axis="axis",
        seeding="paddle.seed(...)",
        freezing="stop_gradient = True",
        terms=lambda: terms_of(model, optimizers, on_host=on_host),
        group=group,
        state=PaddleState(model, optimizers, buffers.own, unowned, scaler, extra or {}),
        beside=Beside(
            models,
            extra or {},
            nn.Layer,
            address=address,
            fingerprint=fingerprint,
            is_trained=lambda each: not each.stop_gradient,
            checks={paddle.incubate.ModelAverage: lambda each: check_average(each, model)},
            checks_of_later={
                paddle.optimizer.Optimizer: lambda each: check_later_optimizer(
                    type(each).__name__,
                    {id(one) for one in optimizer_parameters(each)},
                    {id(one) for one in model.parameters()},
                )
            },
            numbers={
                paddle.optimizer.lr.LRScheduler: lambda each: numbers_of_scheduler(each, optimizers)
            },
        ),
        step=step,
        data=PaddleData(),
    )


def _joined(given: Any, models: Sequence[Any]) -> Any:
    """Return several models as one, whose layers go by the name or the place of theirs."""
    if isinstance(given, Mapping):
        return nn.LayerDict(dict(zip(given, models, strict=True)))
    return models[0] if len(models) == 1 else nn.LayerList(models)
