"""Refuse what would go wrong silently: arguments, and changes of parameters and gradients.

The loop sums the gradients of one optimizer's parameters. Anything else that trains would see only
this trainer's part of the samples, and differ between ranks.
"""

import ctypes
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import paddle
from paddle import nn

from pod_runtime.trainer.errors import UsageError
from pod_runtime.trainer.frameworks.gradient_marks import GradientMarks
from pod_runtime.trainer.frameworks.paddle.state import optimizer_parameters
from pod_runtime.trainer.frameworks.paddle.tensors import dtype_name, of_model
from pod_runtime.trainer.frameworks.unowned import (
    UnownedParameters,
    check_disjoint,
    sparse_gradient,
)
from pod_runtime.trainer.layout import ITEM_BYTES

_PASS_IT = "pass all models and optimizers to the loop: Loop([a, b], [optimizer_a, optimizer_b])"
_NO_AVERAGE = (
    "ModelAverage moves by parameters that have a gradient, and step.update() leaves none, so its "
    "averages would be NaN; keep the average in a copy of the model, and pass that in extra= "
    "(docs/cookbook.md, Moving average of the weights)"
)
_SAMPLE_BYTES = 64


def check_arguments(
    models: Sequence[Any],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    extra: Mapping[str, Any],
    all_reduce: str,
) -> None:
    """Check that these are models, optimizers, their schedulers, and objects that do not train.

    Raises:
        UsageError: they are not; the text says what to pass.
    """
    if not paddle.in_dynamic_mode():
        raise UsageError(
            "model: the loop trains layers of the dynamic graph, and paddle.enable_static() was "
            "called. Leave that out, or keep the program and its executor, and save by epochs: "
            "load_checkpoint and save_checkpoint of edl"
        )
    for model in models:
        check_is_no_fit(model)
        if not isinstance(model, nn.Layer):
            raise UsageError(f"model: expected a paddle.nn.Layer, got {type(model).__name__}")
        for name, layer in model.named_sublayers(include_self=True):
            if isinstance(layer, paddle.DataParallel):
                raise UsageError(
                    f"model: pass the bare model, not paddle.DataParallel"
                    f"{f' ({name})' if name else ''}: the loop sums gradients"
                )
    for optimizer in optimizers:
        _check_optimizer(optimizer)
    check_disjoint([[id(p) for p in optimizer_parameters(each)] for each in optimizers])
    if len(optimizers) > 1 and all_reduce != "flat":
        raise UsageError(
            f"all_reduce: {all_reduce!r} sends the gradients of one optimizer as they come; with "
            f"{len(optimizers)} optimizers leave it out ('flat')"
        )
    rates = [each._learning_rate for each in optimizers]
    if any(all(each is not rate for rate in rates) for each in schedulers):
        raise UsageError(
            "scheduler: it is not the optimizer's; with Paddle, pass it to the optimizer as "
            "learning_rate=, and not to the loop"
        )
    _check_extra(extra, {id(each) for model in models for each in model.parameters()})


def check_is_no_fit(model: Any) -> None:
    """Raises UsageError: it is one of Paddle's high-level API."""
    if isinstance(model, paddle.Model):
        raise UsageError(
            "model: of a paddle.Model pass its network (model.network); or leave the training to "
            "model.fit, and give that the callback ElasticCheckpoint"
        )


def check_average(average: Any, model: Any) -> None:
    """Check that a paddle.incubate.ModelAverage is not of this model.

    Raises:
        UsageError: it is; the text says what to keep instead.
    """
    mine = {id(each) for each in model.parameters()}
    if any(id(each) in mine for each in optimizer_parameters(average)):
        raise UsageError(f"model: a paddle.incubate.{_NO_AVERAGE}")


def _check_optimizer(optimizer: Any) -> None:
    if isinstance(optimizer, paddle.incubate.ModelAverage):
        raise UsageError(f"optimizer: paddle.incubate.{_NO_AVERAGE}")
    if not isinstance(optimizer, paddle.optimizer.Optimizer):
        raise UsageError(
            f"optimizer: expected one paddle.optimizer.Optimizer, got a "
            f"{type(optimizer).__name__}; {_PASS_IT}"
        )
    inner = [v for v in vars(optimizer).values() if isinstance(v, paddle.optimizer.Optimizer)]
    if inner:
        raise UsageError(
            f"optimizer: {type(optimizer).__name__} holds a {type(inner[0]).__name__}, whose state "
            f"would be lost when trainers change; pass that optimizer itself"
        )
    if any(each.__name__ == "LBFGS" for each in type(optimizer).__mro__):
        raise UsageError(
            "optimizer: LBFGS computes the loss itself, several times in a step; the loop steps "
            "optimizers that take the gradients as they are"
        )


def _check_extra(extra: Mapping[str, Any], known: set[int]) -> None:
    if not isinstance(extra, Mapping):
        raise UsageError(f"extra: expected a dict of objects, got {type(extra).__name__}")
    for name, thing in extra.items():
        kind = type(thing).__name__
        if isinstance(thing, paddle.incubate.ModelAverage):
            raise UsageError(f"extra: {name!r}: paddle.incubate.{_NO_AVERAGE}")
        if isinstance(thing, paddle.optimizer.Optimizer):
            raise UsageError(
                f"extra: {name!r} is an optimizer ({kind}), which would step by this trainer's own "
                f"gradients; {_PASS_IT}"
            )
        if isinstance(thing, paddle.amp.GradScaler):
            raise UsageError(f"extra: {name!r} is a {kind}; pass it as scaler=")
        if isinstance(thing, nn.Layer):
            for path, parameter in thing.named_parameters():
                if not parameter.stop_gradient and id(parameter) not in known:
                    raise UsageError(
                        f"extra: {name!r} is a Layer with a trainable parameter ({path}) that is "
                        f"not the model's. Is it trained? Then {_PASS_IT}. If not, freeze "
                        f"it: for p in {name}.parameters(): p.stop_gradient = True"
                    )
        for method in ("state_dict", "set_state_dict"):
            if not callable(getattr(thing, method, None)):
                raise UsageError(f"extra: {name!r}, a {kind}, has no {method}; give it one")


def unowned_parameters(model: Any, *optimizers: Any) -> UnownedParameters:
    """Return the watch over the model's trainable parameters that no optimizer has.

    Checksums run at the speed of the memory, over such parameters only.
    """
    return UnownedParameters(
        model.named_parameters,
        lambda: {id(p) for each in optimizers for p in optimizer_parameters(each)},
        names=lambda: of_model(model),
        is_trained=lambda each: not each.stop_gradient,
        mark=_checksum,
        remedy=(
            f"If it is trained, {_PASS_IT}. What the script sets by hand, the same on every "
            f"trainer, is frozen before: stop_gradient = True"
        ),
    )


def _checksum(tensor: Any) -> Any:
    if not tensor.place.is_cpu_place():  # two numbers cross the bus
        values = tensor.astype("float64")
        return float(values.sum()), float(values.abs().sum())
    tensor = tensor.contiguous()
    size = ITEM_BYTES[dtype_name(tensor)] * math.prod(tensor.shape)
    if not size:
        return 0
    data = np.frombuffer((ctypes.c_char * size).from_address(tensor.data_ptr()), np.uint8)
    whole = size // 8 * 8
    return int(data[:whole].view(np.uint64).sum()), data[whole:].tobytes()


def gradient_marks(parameters: Sequence[Any], on_host: bool) -> GradientMarks:
    """Return the marks of these parameters' gradients.

    Paddle counts most changes in place. On the host a few bytes of each show the others, such as
    `parameter.grad = ...`.
    """
    sizes = [ITEM_BYTES[dtype_name(each)] * math.prod(each.shape) for each in parameters]
    # How a sample is read: with `string_at` it takes more than all else that a mark does.
    samples = [ctypes.c_char * (min(size, _SAMPLE_BYTES) if on_host else 0) for size in sizes]

    def mark(index: int) -> Any:
        grad = parameters[index]._grad_ivar()
        if grad is None:
            return None
        if not grad.is_dense():
            raise UsageError(sparse_gradient(parameters[index].name))
        address = grad.data_ptr()
        sample = samples[index].from_address(address).raw if address else b""
        return address, grad._inplace_version(), sample

    return GradientMarks(
        len(parameters),
        mark,
        lambda index: str(parameters[index].name),
        clip="step.clip(max_norm) or the optimizer (grad_clip=)",
    )
