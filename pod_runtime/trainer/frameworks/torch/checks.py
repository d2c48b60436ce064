"""Refuse what would go wrong silently: arguments, schedulers, and gradients that were touched."""

import gc
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from pod_runtime.trainer.errors import UsageError
from pod_runtime.trainer.frameworks.gradient_marks import GradientMarks
from pod_runtime.trainer.frameworks.torch.tensors import of_model
from pod_runtime.trainer.frameworks.unowned import (
    UnownedParameters,
    check_disjoint,
    limited_norm,
    sparse_gradient,
)

logger = logging.getLogger(__name__)

_PASS_IT = "pass all models and optimizers to the loop: Loop([a, b], [optimizer_a, optimizer_b])"
_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")


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
    for model in models:
        if not isinstance(model, nn.Module):
            raise UsageError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
        for name, layer in model.named_modules():
            if type(layer).__name__ in _WRAPPERS:
                raise UsageError(
                    f"model: pass the bare model, not {type(layer).__name__}"
                    f"{f' ({name})' if name else ''}: the loop sums gradients"
                )
    for optimizer in optimizers:
        _check_optimizer(optimizer)
    check_disjoint([owned_parameters(each) for each in optimizers])
    if all_reduce != "flat":
        raise UsageError(
            f"all_reduce: {all_reduce!r} is not there for PyTorch; leave it out ('flat')"
        )
    for scheduler in schedulers:
        if not callable(getattr(scheduler, "state_dict", None)) or (
            all(getattr(scheduler, "optimizer", None) is not each for each in optimizers)
        ):
            kind = type(scheduler).__name__
            beside = getattr(scheduler, "optimizer", None) is not None
            raise UsageError(
                f"scheduler: expected a scheduler of the loop's optimizer, got a {kind}"
                + " of another one, which belongs in extra={...}" * beside
            )
    if not isinstance(extra, Mapping):
        raise UsageError(f"extra: expected a dict of objects, got {type(extra).__name__}")
    known = {id(each) for model in models for each in model.parameters()}
    for name, thing in extra.items():
        _check_extra(name, thing, known, optimizers)


def _check_optimizer(optimizer: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"optimizer: expected one torch.optim.Optimizer, got a {type(optimizer).__name__}; "
            f"{_PASS_IT}"
        )
    inner = [v for v in vars(optimizer).values() if isinstance(v, torch.optim.Optimizer)]
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


def _check_extra(name: str, thing: Any, known: set[int], optimizers: Sequence[Any]) -> None:
    kind = type(thing).__name__
    if isinstance(thing, torch.optim.Optimizer):
        raise UsageError(
            f"extra: {name!r} is an optimizer ({kind}), which would step by this trainer's own "
            f"gradients; {_PASS_IT}"
        )
    is_scheduler = isinstance(thing, torch.optim.lr_scheduler.LRScheduler)
    if is_scheduler and any(thing.optimizer is each for each in optimizers):
        raise UsageError(f"extra: {name!r} is a {kind}; pass it as scheduler=")
    if isinstance(thing, torch.amp.GradScaler):
        raise UsageError(f"extra: {name!r} is a {kind}; pass it as scaler=")
    if isinstance(thing, nn.Module):
        for path, parameter in thing.named_parameters():
            if parameter.requires_grad and id(parameter) not in known:
                raise UsageError(
                    f"extra: {name!r} is a Module with a trainable parameter ({path}) that is not "
                    f"the model's. Is it trained? Then {_PASS_IT}. If not, freeze it: "
                    f"{name}.requires_grad_(False)"
                )
    for method in ("state_dict", "load_state_dict"):
        if not callable(getattr(thing, method, None)):
            raise UsageError(f"extra: {name!r}, a {kind}, has no {method}; give it one")


def trained_parameters(model: Any, optimizer: Any) -> list[Any]:
    """Return what the optimizer trains, in the model's order.

    Raises:
        UsageError: the model cannot be trained in shards; the text says what to change.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, nn.SyncBatchNorm):
            raise UsageError(
                f"model: {name or 'it'} is a SyncBatchNorm, whose statistics depend on the number "
                f"of trainers; use BatchNorm: the loop merges its statistics per shard"
            )
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse:
            raise UsageError(sparse_gradient(f"{name}.weight"))
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and _shortens(layer):
            raise UsageError(
                limited_norm(
                    name or "it",
                    f"weight.data.renorm_({layer.norm_type:g}, 0, {layer.max_norm:g})",
                )
            )
        if isinstance(layer, nn.modules.lazy.LazyModuleMixin) and layer.has_uninitialized_params():
            raise UsageError(
                f"model: {name or 'it'} has no parameters before its first batch; give it one "
                f"before you make the optimizer and the Loop"
            )
    carried = {id(each) for each in of_model(model).values()}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta:
            raise UsageError(
                f"model: {name} is on the device 'meta', without values; give it some before the "
                f"optimizer and the Loop: model.to_empty(device='cpu'), and initialize it"
            )
        if id(tensor) in carried and tensor.is_complex():
            raise UsageError(
                f"model: {name} is {str(tensor.dtype).removeprefix('torch.')}, which is not summed "
                f"over trainers; keep it as real numbers: torch.view_as_real, and "
                f"torch.view_as_complex where it is used; a constant: register_buffer(..., "
                f"persistent=False)"
            )
    trained = [each for each in model.parameters() if each.requires_grad]
    if not trained:
        raise UsageError("model: none of its parameters is trained (all have requires_grad=False)")
    devices = {each.device for each in model.parameters()}
    if len(devices) > 1:
        raise UsageError(
            f"model: its parameters are on {len(devices)} devices; a trainer has one: "
            f"model.to('cuda')"
        )
    known = owned_parameters(optimizer)
    owned = [each for each in trained if id(each) in known]
    if not owned:
        if known.intersection(id(each) for each in model.parameters()):
            raise UsageError(
                "optimizer: all of its parameters are frozen; unfreeze them before its turn, and "
                "before the Loop"
            )
        raise UsageError("optimizer: none of its parameters is one of the model's; pass that model")
    return owned


def warn_of_hooks(model: Any) -> None:
    """Say which parameters have hooks on their gradients: those see what a shard has made."""
    for kind, held in (
        ("register_hook", "_backward_hooks"),
        ("register_post_accumulate_grad_hook", "_post_accumulate_grad_hooks"),
    ):
        names = [name for name, each in model.named_parameters() if getattr(each, held, None)]
        if names:
            logger.warning(
                "model: %s%s has a hook (%s), which gets the gradient of each shard, weighed by "
                "its share of the batch, or the sum of this trainer's so far, and not that of the "
                "batch: one that clips or adds noise does something else. Do that by "
                "optimizer.register_step_pre_hook, which finds the whole gradient, or by "
                "step.clip(max_norm)",
                names[0], f" (and {len(names) - 1} more)" if len(names) > 1 else "", kind,
            )  # fmt: skip


def unowned_parameters(model: Any, *optimizers: Any) -> UnownedParameters:
    """Return the watch over the model's trainable parameters that no optimizer has."""
    return UnownedParameters(
        model.named_parameters,
        lambda: set().union(*(owned_parameters(each) for each in optimizers)),
        names=lambda: of_model(model),
        is_trained=lambda each: each.requires_grad,
        # PyTorch counts changes in place; another tensor is seen by its place.
        mark=lambda each: (each._version, each.data_ptr(), float(each.detach().sum())),
        remedy=(
            "Give the loop's optimizer a group of parameters for it. What the script sets by hand, "
            "the same on every trainer, is frozen before: requires_grad_(False)"
        ),
    )


def owned_parameters(optimizer: Any) -> set[int]:
    """Return the ids of an optimizer's parameters."""
    return {id(each) for group in optimizer.param_groups for each in group["params"]}


class SchedulerCheck:
    """Sees that the schedulers that drive an optimizer were passed to the loop."""

    def __init__(self, optimizer: Any, schedulers: Sequence[Any]) -> None:
        self._optimizer, self._schedulers = optimizer, schedulers
        self._has_looked = False
        # In the warm-up of a prepared trainer a script calls scheduler.step(), and the optimizer
        # does not step: no reason to warn.
        optimizer._opt_called = True
        self.check()

    def check(self) -> None:
        """Check again: a scheduler may be made after the loop.

        Raises:
            UsageError: the optimizer has one, and none was passed.
        """
        # Most schedulers leave a mark on the optimizer, which stays when they are gone.
        # ReduceLROnPlateau leaves none.
        marked = getattr(self._optimizer.step, "_wrapped_by_lr_sched", False)
        if marked and not self._schedulers and not self._has_looked:
            self._has_looked = True
            for each in gc.get_objects():
                if issubclass(type(each), torch.optim.lr_scheduler.LRScheduler):
                    check_scheduler(each, [self._optimizer], self._schedulers)


def check_scheduler(scheduler: Any, optimizers: Sequence[Any], schedulers: Sequence[Any]) -> None:
    """Check that a scheduler of the process, if it is of the loop's optimizers, was passed.

    Raises:
        UsageError: it was not, nor one that is made of it.
    """
    own = getattr(scheduler, "optimizer", None)
    if any(own is each for each in optimizers):
        passed = {id(part) for each in schedulers for part in _parts(each)}
        if id(scheduler) not in passed:
            raise UsageError(_scheduler_not_passed(type(scheduler).__name__))


def _shortens(embedding: Any) -> bool:
    """Whether a forward pass may change its vectors: not those of a frozen one that are short."""
    if embedding.max_norm is None:
        return False
    weight = embedding.weight
    norms = weight.detach().norm(embedding.norm_type, -1)
    return weight.requires_grad or bool((norms > embedding.max_norm * 0.99999).any())


def check_scaler(scaler: Any, passed: Any | None) -> None:
    """Raise a UsageError if a loss scaler that the loop does not have has scaled, and no more."""
    scale, tracker = (getattr(scaler, name, None) for name in ("_scale", "_growth_tracker"))
    if scaler is passed or scale is None or tracker is None:
        return
    if float(scale) == scaler._init_scale and not float(tracker):  # it was never updated
        raise UsageError(
            "scaler: a GradScaler has scaled the loss, and nothing takes that out of the "
            "gradients; pass it: Loop(scaler=...), and the loss as it is to step.backward"
        )


def _parts(scheduler: Any) -> Iterator[Any]:
    """Yield a scheduler, and those that it is made of: of SequentialLR and its like."""
    yield scheduler
    for value in vars(scheduler).values():
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, torch.optim.lr_scheduler.LRScheduler):
                yield from _parts(each)


def _scheduler_not_passed(kind: str) -> str:
    return (
        f"scheduler: the optimizer has a {kind} that the loop does not know, whose state would be "
        f"lost when trainers change; make it before the loop, and pass it: Loop(model, optimizer, "
        f"..., scheduler=scheduler), or all of several as a list. One that is used no more: del it"
    )


def gradient_marks(model: Any, optimizer: Any) -> GradientMarks:
    """Return the marks of an optimizer's gradients.

    PyTorch counts changes in place; another tensor is seen by its identity. Sparse gradients have
    none, and are refused.
    """
    owned = owned_parameters(optimizer)
    names, parameters = [], []
    for name, each in model.named_parameters():
        if id(each) in owned:
            names.append(name)
            parameters.append(each)

    def mark(index: int) -> Any:
        grad = parameters[index].grad
        if grad is None:
            return None
        if grad.layout != torch.strided:
            raise UsageError(sparse_gradient(names[index]))
        return grad.data_ptr(), grad._version

    return GradientMarks(len(names), mark, lambda index: names[index], clip="step.clip(max_norm)")
