"""Carry what a script changes on a model besides tensors: modes, flags, options of layers.

Every process builds the model by the same lines of the script. So what belongs to the state is how
it differs now from how it was built: usually nothing. What cannot be put into a state (a hook, a
layer in another's place) is named instead.
"""

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from pod_runtime.trainer.frameworks.plain_values import differ, is_plain

Found = dict[str, dict[str, Any]]  # owner -> attribute -> value

_OF_LAYERS = frozenset(vars(nn.Module())) - {"training"}  # the framework's own, of any layer
_WATCH = "train"  # an attribute that stands before the method while modes are watched
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")


class TorchTraits:
    """The traits of one model, made when the script has built it."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._evaluates: dict[int, bool] | None = None  # modes outside of an evaluation
        self._built = self._read()
        self._before: dict[str, bool] = {}  # modes when they began to be watched
        self._set: set[str] = set()  # layers whose mode was set since
        self._structure: dict[str, Any] | None = None  # None: not noted
        self._named: set[str] = set()

    # --- what a state carries

    def changed(self) -> Found:
        """Return what differs from how it was built, as JSON types."""
        found: Found = {}
        for owner, values in self._read().items():
            built = self._built.get(owner, {})
            differs = {
                name: list(value) if isinstance(value, tuple) else value
                for name, value in values.items()
                if name not in built or differ(built[name], value)
            }
            if differs:
                found[owner] = differs
        return found

    def apply(self, changed: Mapping[str, Mapping[str, Any]]) -> None:
        """Set all as it was built, except `changed`."""
        things = self._owners()
        for owner, values in self._read().items():
            wanted = {**self._built.get(owner, {}), **changed.get(owner, {})}
            for name, value in wanted.items():
                if name not in values or differ(values[name], value):
                    before = self._built.get(owner, {}).get(name)
                    _set(things[owner], name, tuple(value) if type(before) is tuple else value)

    # --- modes

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within it all layers evaluate, while the state keeps their modes of before."""
        layers = list(self._model.modules())
        self._evaluates = {id(layer): layer.training for layer in layers}
        self._model.eval()
        try:
            yield
        finally:
            # One by one: a script may keep some in evaluation mode, as frozen batch norms are.
            modes, self._evaluates = self._evaluates, None
            for layer in layers:
                layer.training = modes[id(layer)]

    def watch_modes(self) -> None:
        """Begin to watch which modes the script sets, even to the value that they have."""
        self._set, self._before = set(), {}
        for name, layer in self._model.named_modules():
            self._before[name] = layer.training
            vars(layer)[_WATCH] = functools.partial(self._train, name, layer)

    def _train(self, name: str, layer: Any, mode: bool = True) -> Any:
        self._set.add(name)
        return type(layer).train(layer, mode)

    def modes_set(self) -> dict[str, bool]:
        """Return the modes that were set since, and stop watching."""
        found = {}
        for name, layer in self._model.named_modules():
            vars(layer).pop(_WATCH, None)
            if name in self._set or layer.training != self._before.get(name, layer.training):
                found[name] = layer.training
        return found

    def set_modes(self, modes: Mapping[str, bool]) -> None:
        for name, layer in self._model.named_modules():
            if name in modes:
                layer.training = modes[name]

    # --- what no state can carry

    def uncarried_changes(self) -> list[str]:
        """Return what has changed since the first call and cannot be carried; each once."""
        now = self._read_structure()
        if self._structure is None:
            self._structure = now
            return []
        found = []
        for name in [*self._structure, *(name for name in now if name not in self._structure)]:
            if self._structure.get(name) != now.get(name) and name not in self._named:
                self._named.add(name)
                found.append(name)
        return found

    # --- reading

    def _owners(self) -> dict[str, Any]:
        """Return the objects of interest, by names that are the same in every process."""
        found: dict[str, Any] = {
            f"layer/{name}": layer for name, layer in self._model.named_modules()
        }
        for name, parameter in self._model.named_parameters():
            found[f"parameter/{name}"] = parameter
        return found

    def _read(self) -> Found:
        return {owner: self._read_one(thing) for owner, thing in self._owners().items()}

    def _read_one(self, thing: Any) -> dict[str, Any]:
        if isinstance(thing, torch.Tensor):
            return {"requires_grad": thing.requires_grad}
        found = {
            name: value
            for name, value in vars(thing).items()
            if name not in _OF_LAYERS and is_plain(value)
        }
        if self._evaluates is not None:
            found["training"] = self._evaluates.get(id(thing), thing.training)
        return found

    def _read_structure(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, layer in self._model.named_modules():
            who = f"layer {name or type(self._model).__name__}"
            found[who] = type(layer)
            found[f"hooks of {who}"] = sum(len(vars(layer).get(each, ())) for each in _HOOKS)
            found[f"forward of {who}"] = vars(layer).get("forward")
            for attribute, value in _loose_tensors(layer):
                found[f"{attribute} of {who}, a tensor outside of its state_dict"] = _version(value)
        for name, parameter in self._model.named_parameters():
            found[f"parameter {name}, which is another one now"] = id(parameter)
        return found


def _loose_tensors(layer: Any) -> Iterator[tuple[str, Any]]:
    """Yield tensors and arrays that no state_dict holds, except those that are computed."""
    loose = layer._non_persistent_buffers_set
    buffers = [(name, each) for name, each in layer._buffers.items() if name in loose]
    for name, value in [*vars(layer).items(), *buffers]:
        is_computed = isinstance(value, torch.Tensor) and value.requires_grad  # by weight_norm, say
        if isinstance(value, torch.Tensor | np.ndarray) and not is_computed:
            yield name, value


def _set(thing: Any, name: str, value: Any) -> None:
    if isinstance(thing, torch.Tensor):
        thing.requires_grad_(value)
    else:
        vars(thing)[name] = value


def _version(value: Any) -> Any:
    """Return a mark that changes when a tensor is written to or replaced."""
    if isinstance(value, np.ndarray):
        return value.tobytes() if value.size <= 1024 else value.ctypes.data
    return id(value), value._version
