"""What a script changes of a PyTorch model besides tensors."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from pod_runtime.trainer.frameworks.base_traits import BaseTraits, Found
from pod_runtime.trainer.frameworks.plain_values import as_json, is_plain
from pod_runtime.trainer.frameworks.torch.tensors import is_compiled, plain_name

# The framework's own, of any optimizer, and what a scheduler notes there.
_OF_OPTIMIZERS = frozenset(vars(torch.optim.Optimizer([torch.zeros(0)], {}))) | {
    "_opt_called", "_step_supports_amp_scaling", "_need_device_dtype_check_for_fused"
}  # fmt: skip
_PARTS = ("orig", "g", "v")  # of a weight, as spectral_norm, prune and weight_norm name them
_WATCH = "train"  # an attribute that stands before the method while modes are watched
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
_HOOKS_OF_OPTIMIZERS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def has_extra_state(thing: Any) -> bool:
    """Whether a layer says by itself what it keeps beside its tensors."""
    kept = getattr(type(thing), "get_extra_state", None)
    return kept not in (None, nn.Module.get_extra_state)


class TorchTraits(BaseTraits):
    """The traits of one model and its optimizers, whose groups the state has elsewhere."""

    _PACKAGE = "torch"
    _OF_LAYERS = frozenset(vars(nn.Module())) - {"training"}  # of any layer
    _OF_OPTIMIZERS = _OF_OPTIMIZERS

    def __init__(self, model: Any, optimizers: Sequence[Any] = ()) -> None:
        super().__init__(model, optimizers)
        self._before: dict[str, bool] = {}  # modes when they began to be watched
        self._set_since: set[str] = set()  # layers whose mode was set since

    def apply(self, changed: Mapping[str, Mapping[str, Any]]) -> list[str]:
        plain: Found = {}  # an older version has the names of compiled layers, the inner one last
        for owner, values in changed.items():
            plain.setdefault(plain_name(owner), {}).update(values)
        return super().apply(plain)

    def uncarried_changes(self) -> list[str]:
        self._look_again()
        return super().uncarried_changes()

    # --- modes

    def watch_modes(self) -> None:
        self._set_since, self._before = set(), {}
        for name, layer in self._layers():
            self._before[name] = layer.training
            vars(layer)[_WATCH] = functools.partial(self._train, name, layer)

    def _train(self, name: str, layer: Any, mode: bool = True) -> Any:
        self._set_since.add(name)
        return type(layer).train(layer, mode)

    def modes_set(self) -> dict[str, bool]:
        found = {}
        for name, layer in self._layers():
            vars(layer).pop(_WATCH, None)
            if name in self._set_since or layer.training != self._before.get(name, layer.training):
                found[name] = layer.training
        return found

    # --- reading

    def _layers(self) -> list[tuple[str, Any]]:
        return list(self._model.named_modules())

    def _owners(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            f"layer/{plain_name(name)}": layer
            for name, layer in self._layers()
            if not is_compiled(layer)
        }
        for name, parameter in self._model.named_parameters():
            found[f"parameter/{plain_name(name)}"] = parameter
        # Such as the count of steps that an optimizer of the script's own keeps.
        found |= {f"optimizer {number}": each for number, each in enumerate(self._optimizers)}
        return found

    def _read_one(self, owner: str, thing: Any) -> dict[str, Any]:
        if isinstance(thing, torch.Tensor):
            return {"requires_grad": thing.requires_grad}
        is_layer = isinstance(thing, nn.Module)
        skipped = self._OF_LAYERS if is_layer else self._OF_OPTIMIZERS
        found = {
            name: as_json(value)
            for name, value in vars(thing).items()
            if name not in skipped and is_plain(value)
        }
        if is_layer:  # of TorchScript it is not in `vars`
            found["training"] = (self._evaluates or {}).get(id(thing), thing.training)
        return found

    def _flags_of(self, parameter: Any) -> tuple[Any, ...]:
        return (parameter.requires_grad,)

    def _set(self, thing: Any, name: str, value: Any) -> None:
        if isinstance(thing, torch.Tensor):
            thing.requires_grad_(value)
        elif name == "training":
            thing.training = value
        else:
            vars(thing)[name] = value

    def _hook_count(self, layer: Any) -> int:
        return sum(len(vars(layer).get(each, ())) for each in _HOOKS)

    def _read_others(self, who: str, thing: Any, skipped: frozenset[str]) -> dict[str, Any]:
        return {} if has_extra_state(thing) else super()._read_others(who, thing, skipped)

    def _loose_tensors(self, layer: Any) -> Iterator[tuple[str, Any]]:
        if has_extra_state(layer):
            return
        loose = layer._non_persistent_buffers_set
        buffers = [(name, each) for name, each in layer._buffers.items() if name in loose]
        for name, value in [*vars(layer).items(), *buffers]:
            if not isinstance(value, torch.Tensor | np.ndarray):
                continue
            # Of parameters, as by weight_norm, or by the newest forward pass.
            is_computed = isinstance(value, torch.Tensor) and value.requires_grad
            parts = {f"{name}_{part}" for part in _PARTS}
            if not is_computed and parts.isdisjoint(layer._parameters):
                yield name, value

    def _tensor_version(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.requires_grad:
            return None
        return None if isinstance(value, nn.Parameter) else (id(value), value._version)

    def _read_optimizer(self, who: str, optimizer: Any) -> dict[str, Any]:
        found = super()._read_optimizer(who, optimizer)
        groups = optimizer.param_groups
        found[f"hooks of {who}"] = [len(getattr(optimizer, name)) for name in _HOOKS_OF_OPTIMIZERS]
        found[f"parameters of {who}"] = [len(group["params"]) for group in groups]
        if not self._is_of_framework(optimizer):
            owned = {each for group in groups for each in group["params"]}
            for key in optimizer.state.keys() - owned:
                name = f"state[{key!r}]" if isinstance(key, str | int) else "state of no parameter"
                found[f"{name} of {who}"] = self.mark(optimizer.state[key])
        return found
