"""What a script changes of a Paddle training besides tensors: of layers, optimizer, scheduler."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.base.framework import EagerParamBase

from pod_runtime.trainer.frameworks.base_traits import BaseTraits, Found, attributes
from pod_runtime.trainer.frameworks.plain_values import as_json, is_plain

_ALL = "layers"  # stands for all of them
# Which parameters have accumulators, as Paddle 3 and 2.6 spell it.
MADE_ACCUMULATORS = ("_already_create_accumulator", "_already_create_accumulater")
# What the framework itself changes, or what the state holds elsewhere.
_OF_OPTIMIZERS = frozenset(
    ("_learning_rate", "_name", "_dtype", "type", "helper", "_use_multi_tensor", "_need_refuse",
     "_sign", "_accumulators", "_accumulators_holder", *MADE_ACCUMULATORS,
     "_auxiliary_vars", "_default_dict", "_learning_rate_map", "_master_grads", "_master_weights",
     "_opti_name_list", "_param_device_map", "_param_dict", "_param_groups", "_parameter_list")
)  # fmt: skip
_OF_SCHEDULERS = frozenset(("keys", "verbose", "_var_name"))
# Whose place in a cycle follows from how far it has come, and is in no state of Paddle's.
RESTARTS: Any = getattr(paddle.optimizer.lr, "CosineAnnealingWarmRestarts", ())
_PLACE = frozenset(("T_cur", "T_i"))
_FLAGS = ("stop_gradient", "need_clip", "learning_rate")  # of a parameter
_HOOKS = ("_forward_pre_hooks", "_forward_post_hooks")
_CACHES = frozenset(("_dropout_state", "_flat_weight"))  # of the framework's recurrent layers


def held_schedulers(
    scheduler: Any, path: str = "scheduler", holders: tuple[Any, ...] = ()
) -> dict[str, Any]:
    """Return the schedulers that a scheduler is made of, as attributes or in lists, by paths."""
    found: dict[str, Any] = {}
    holders = (*holders, scheduler)
    for name, value in vars(scheduler).items():
        several = enumerate(value) if isinstance(value, list | tuple) else [("", value)]
        for index, each in several:
            # One that is held may know its holder.
            if isinstance(each, paddle.optimizer.lr.LRScheduler) and each not in holders:
                inner = f"{path}/{name}{index}"
                found[inner] = each
                found |= held_schedulers(each, inner, holders)
    return found


class PaddleTraits(BaseTraits):
    """The traits of one model, its optimizers and their schedulers."""

    _PACKAGE = "paddle"
    _OF_LAYERS = frozenset(vars(nn.Layer())) - {"training"}  # of any layer
    _OF_OPTIMIZERS = _OF_OPTIMIZERS

    def __init__(self, model: Any, optimizers: Sequence[Any]) -> None:
        super().__init__(model, optimizers)
        self._loose = {
            owner: dict(self._loose_tensors(thing))
            for owner, thing in self._things.items()
            if owner.startswith("layer/")
        }
        self._made: dict[str, dict[str, Any]] = {}  # loose tensors that have come since, by layer
        self._caching: set[str] = set()  # layers of which one has outlived a step

    # --- what a state carries

    def changed(self) -> Found:
        return self._shortened(super().changed())

    def apply(self, changed: Mapping[str, Mapping[str, Any]]) -> list[str]:
        every = changed.get(_ALL, {})
        wanted = {owner: each for owner, each in changed.items() if owner != _ALL}
        if every:
            for name, _layer in self._layers():
                wanted[f"layer/{name}"] = {**every, **wanted.get(f"layer/{name}", {})}
        return super().apply(wanted)

    def _counts(self, owner: str, name: str) -> bool:
        return name == "training" or owner not in self._caching

    def _shortened(self, found: Found) -> Found:
        """Write what most layers have once for all of them: nearly always the evaluation mode."""
        modes = {owner: each["training"] for owner, each in found.items() if "training" in each}
        layers = [owner for owner in self._things if owner.startswith("layer/")]
        if len(modes) <= len(layers) / 2 or len(set(modes.values())) > 1:
            return found
        mode = next(iter(modes.values()))
        for owner in layers:
            if owner in modes:
                del found[owner]["training"]
            elif self._built.get(owner, {}).get("training") != mode:
                found.setdefault(owner, {})["training"] = not mode
        return {_ALL: {"training": mode}} | {owner: each for owner, each in found.items() if each}

    # --- modes

    def watch_modes(self) -> None:
        for _name, layer in self._layers():
            layer.__dict__["training"] = int(layer.training)  # as good as the bool it is

    def modes_set(self) -> dict[str, bool]:
        found = {}
        for name, layer in self._layers():
            if type(layer.training) is bool:
                found[name] = layer.training
            layer.__dict__["training"] = bool(layer.training)
        return found

    # --- what no state can carry

    def uncarried_changes(self) -> list[str]:
        self._look_again()
        self._note_caches()
        return super().uncarried_changes()

    def _note_caches(self) -> None:
        """Find layers that keep tensors they have made, as a table that grows with the input.

        What their attributes say of those (a length, "it is there") must not come without them.
        """
        made = {
            owner: {
                name: value
                for name, value in self._loose_tensors(thing)
                if self._loose.get(owner, {}).get(name) is not value
            }
            for owner in self._suspects()
            if owner.startswith("layer/")
            for thing in [self._things[owner]]
        }
        self._caching = {
            owner
            for owner, found in made.items()
            if any(self._made.get(owner, {}).get(name) is value for name, value in found.items())
        }
        self._made = made

    # --- reading

    def _layers(self) -> list[tuple[str, Any]]:
        return list(self._model.named_sublayers(include_self=True))

    def _owners(self) -> dict[str, Any]:
        found: dict[str, Any] = {f"layer/{name}": layer for name, layer in self._layers()}
        for name, parameter in self._model.named_parameters():
            found[f"parameter/{name}"] = parameter
            if hasattr(regularizer := getattr(parameter, "regularizer", None), "__dict__"):
                found[f"regularizer/{name}"] = regularizer
        for number, optimizer in enumerate(self._optimizers):
            found |= self._owners_of(optimizer, f" {number}" if number else "")
        return found

    def _owners_of(self, optimizer: Any, number: str) -> dict[str, Any]:
        """Return the objects of an optimizer; `number` sets it apart from the first one."""
        found: dict[str, Any] = {f"optimizer{number}": optimizer}
        for name in ("_grad_clip", "regularization"):
            if hasattr(getattr(optimizer, name, None), "__dict__"):
                found[f"optimizer{number}/{name}"] = getattr(optimizer, name)
        for index, group in enumerate(getattr(optimizer, "_param_groups", None) or []):
            if isinstance(group, dict):
                found[f"optimizer{number}/group {index}"] = group
                for name in ("grad_clip", "weight_decay"):
                    if hasattr(group.get(name), "__dict__"):
                        found[f"optimizer{number}/group {index}/{name}"] = group[name]
        scheduler, path = optimizer._learning_rate, f"scheduler{number}"
        if isinstance(scheduler, paddle.optimizer.lr.LRScheduler):
            found[path] = scheduler
            found |= held_schedulers(scheduler, path)
        return found

    def _read_one(self, owner: str, thing: Any) -> dict[str, Any]:
        kind = owner.partition("/")[0]
        if kind == "parameter":
            return dict(zip(_FLAGS, self._flags_of(thing), strict=True))
        skipped = self._OF_LAYERS if kind == "layer" else self._OF_OPTIMIZERS
        if kind.startswith("scheduler"):
            thing.state_keys()
            skipped = _OF_SCHEDULERS.union(
                thing.keys, _PLACE if isinstance(thing, RESTARTS) else ()
            )
        found = {
            name: as_json(value)
            for name, value in attributes(thing).items()
            if name not in skipped and is_plain(value)
        }
        if kind == "layer" and self._evaluates is not None:
            found["training"] = self._evaluates.get(id(thing), thing.training)
        return found

    def _flags_of(self, parameter: Any) -> tuple[Any, ...]:
        rate = parameter.optimize_attr.get("learning_rate")
        return parameter.stop_gradient, parameter.need_clip, rate

    def _read_structure(self) -> dict[str, Any]:
        found = super()._read_structure()
        for number, optimizer in enumerate(self._optimizers):
            found |= self._structure_of(optimizer, f" {number}" if number else "")
        for name, parameter in self._model.named_parameters():
            kind = type(getattr(parameter, "regularizer", None))
            found[f"parameter {name}'s regularizer"] = kind
        return found

    def _structure_of(self, optimizer: Any, number: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        who = f"the optimizer{number}'s"
        found[f"{who} grad_clip"] = type(getattr(optimizer, "_grad_clip", None))
        found[f"{who} weight decay"] = type(getattr(optimizer, "regularization", None))
        found[f"{who} scheduler"] = type(optimizer._learning_rate)
        found[f"{who} parameters"] = [
            len(each["params"]) if isinstance(each, dict) else 1
            for each in getattr(optimizer, "_param_groups", None) or []
        ]
        for index, group in enumerate(getattr(optimizer, "_param_groups", None) or []):
            if isinstance(group, dict):
                found[f"{who} grad_clip of group {index}"] = type(group.get("grad_clip"))
        for path, thing in self._owners_of(optimizer, number).items():
            if path.startswith("scheduler"):
                found |= self._structure_of_scheduler(f"{who} {type(thing).__name__}", thing)
        return found

    def _structure_of_scheduler(self, who: str, scheduler: Any) -> dict[str, Any]:
        """Return marks of what a scheduler of the script keeps, and no state of it has."""
        scheduler.state_keys()
        known = (paddle.optimizer.lr.LRScheduler, paddle.optimizer.Optimizer)
        held = {
            name
            for name, value in vars(scheduler).items()
            if any(isinstance(e, known) for e in (value if type(value) is list else [value]))
        }
        who = f"{who}, whose state_keys() leaves it out"
        return self._read_others(who, scheduler, _OF_SCHEDULERS.union(scheduler.keys, held))

    def _hook_count(self, layer: Any) -> int:
        return sum(len(layer.__dict__.get(each, ())) for each in _HOOKS)

    def _loose_tensors(self, layer: Any) -> Iterator[tuple[str, Any]]:
        loose = layer._non_persistable_buffer_names_set
        buffers = [(name, each) for name, each in layer._buffers.items() if name in loose]
        for name, value in [*vars(layer).items(), *buffers]:
            is_tensor = isinstance(value, paddle.Tensor)
            if not (is_tensor or isinstance(value, np.ndarray)) or name in _CACHES:
                continue
            # Of parameters, as by weight_norm, or by the newest forward pass.
            is_computed = is_tensor and not value.stop_gradient
            parts = (each for each in layer._parameters if each.startswith(f"{name}_"))
            if not is_computed and not any(parts):
                yield name, value

    def _set(self, thing: Any, name: str, value: Any) -> None:
        if isinstance(thing, dict):
            thing[name] = value
        elif isinstance(thing, paddle.Tensor):
            if name == "learning_rate":
                thing.optimize_attr[name] = value
            else:
                setattr(thing, name, value)
        else:
            vars(thing)[name] = value

    def _tensor_version(self, value: Any) -> Any:
        if not isinstance(value, paddle.Tensor) or not value.stop_gradient:
            return None
        if isinstance(value, EagerParamBase) or not value._is_initialized():
            return None
        return id(value), value.inplace_version
