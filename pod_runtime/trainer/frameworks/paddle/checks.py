"""Refuse what would go wrong silently: arguments, and changes of parameters and gradients.

The loop sums the gradients of one optimizer's parameters. Anything else that trains would see only
this trainer's part of the samples, and differ between ranks.
"""

import ctypes
import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import paddle
from paddle import nn

from pod_runtime.trainer.errors import UsageError
from pod_runtime.trainer.frameworks.paddle.state import optimizer_parameters
from pod_runtime.trainer.frameworks.paddle.tensors import dtype_name, of_model
from pod_runtime.trainer.frameworks.unowned import (
    WHOLE_STEPS,
    UnownedParameters,
    check_disjoint,
    check_noted,
    sparse_gradient,
)
from pod_runtime.trainer.layout import ITEM_BYTES

_PASS_IT = "pass all models and optimizers to the loop: Loop([a, b], [optimizer_a, optimizer_b])"
_SAMPLE_BYTES = 64
_EVERY = 16  # of the parameters one is looked at, in later steps


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


def _check_optimizer(optimizer: Any) -> None:
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
    if type(optimizer).__name__ == "LBFGS":
        raise UsageError(
            "optimizer: LBFGS computes the loss itself, several times in a step; the loop steps "
            "optimizers that take the gradients as they are"
        )


def _check_extra(extra: Mapping[str, Any], known: set[int]) -> None:
    if not isinstance(extra, Mapping):
        raise UsageError(f"extra: expected a dict of objects, got {type(extra).__name__}")
    for name, thing in extra.items():
        kind = type(thing).__name__
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


class GradientMarks:
    """Detects gradients that were touched after a backward pass: they are this rank's part only.

    Paddle counts most changes in place. On the host a few bytes of each show the others, such as
    `parameter.grad = ...`.
    """

    def __init__(self, parameters: Sequence[Any], on_host: bool) -> None:
        self._parameters = list(parameters)
        sizes = [ITEM_BYTES[dtype_name(each)] * math.prod(each.shape) for each in parameters]
        # How a sample is read: with `string_at` it takes more than all else that a mark does.
        self._samples = [
            ctypes.c_char * (min(size, _SAMPLE_BYTES) if on_host else 0) for size in sizes
        ]
        self._marks: list[tuple[int, Any]] = []  # (index of the parameter, mark)
        self._first = 0  # index of a parameter that had a gradient last time
        self._noted = 0  # times that it was for an update

    def note(self, *, for_update: bool) -> None:
        """Remember gradients as they are.

        Args:
            for_update: mark all parameters in a process's first steps, then a few in turn, as
                clipping changes all of them. Else mark the first, which clearing would remove.
        """
        count = len(self._parameters)
        if for_update:
            self._noted += 1
            few = self._noted > WHOLE_STEPS
            indices = range(self._noted % _EVERY, count, _EVERY) if few else range(count)
            self._marks = [(index, self._mark(index)) for index in indices]
            return
        self._marks = []
        for index in chain((self._first,), range(count)):
            mark = self._mark(index)
            if mark is not None:
                self._first, self._marks = index, [(index, mark)]
                return

    def forget(self) -> None:
        self._marks = []

    def check(self) -> None:
        """Check that what was noted is unchanged, and in a process's first steps, that all was.

        Raises:
            UsageError: it is not.
        """
        if not self._marks and self._noted <= WHOLE_STEPS:
            check_noted(each.name for each in self._parameters if each._grad_ivar() is not None)
        for index, mark in self._marks:
            if self._mark(index) != mark:
                raise UsageError(
                    f"gradients: that of {self._parameters[index].name} was changed after "
                    f"step.backward(loss). Until step.update() each trainer has a part of the "
                    f"gradient only, so what is done to it would depend on their number. Clip by "
                    f"the optimizer (grad_clip=), scale the loss, pass a loss scaler as scaler=; "
                    f"step.update() clears gradients itself"
                )

    def _mark(self, index: int) -> Any:
        grad = self._parameters[index]._grad_ivar()
        if grad is None:
            return None
        if not grad.is_dense():
            raise UsageError(sparse_gradient(self._parameters[index].name))
        address = grad.data_ptr()
        sample = self._samples[index].from_address(address).raw if address else b""
        return address, grad._inplace_version(), sample
