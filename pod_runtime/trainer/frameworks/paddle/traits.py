"""Carry what a script changes on model and optimizer besides tensors: modes, flags, options.

Every process builds model and optimizer by the same lines of the script. So what belongs to the
state is how they differ now from how they were built: usually nothing. What cannot be put into a
state (a hook, a layer in another's place) is named instead.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle
from paddle import nn

from pod_runtime.trainer.frameworks.plain_values import differ, is_plain

Found = dict[str, dict[str, Any]]  # owner -> attribute -> value

_ALL = "layers"  # stands for all of them
_OF_LAYERS = frozenset(vars(nn.Layer())) - {"training"}  # the framework's own, of any layer
# What the framework itself changes, or what the state holds elsewhere.
_OF_OPTIMIZERS = frozenset(
    ("_learning_rate", "_name", "_dtype", "type", "helper", "_use_multi_tensor", "_need_refuse",
     "_sign")
)  # fmt: skip
_OF_SCHEDULERS = frozenset(("keys", "verbose", "_var_name"))
_CACHES = frozenset(("_dropout_state", "_flat_weight"))  # of the framework's recurrent layers


class Traits:
    """The traits of one model and its optimizer, made when the script has built them."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self._model, self._optimizer = model, optimizer
        self._evaluates: dict[int, bool] | None = None  # modes outside of an evaluation
        self._things = self._owners()
        self._built = self._read()
        # Most owners never change, and that is seen at once.
        self._quick = {
            owner: (len(_attributes(self._things[owner])), tuple(values), tuple(values.values()))
            for owner, values in self._built.items()
            if not owner.startswith("parameter/")
        }
        self._loose = {
            owner: dict(_loose_tensors(thing))
            for owner, thing in self._things.items()
            if owner.startswith("layer/")
        }
        self._made: dict[str, dict[str, Any]] = {}  # loose tensors that have come since, by layer
        self._caching: set[str] = set()  # layers of which one has outlived a step
        self._structure: dict[str, Any] | None = None  # None: not noted
        self._named: set[str] = set()

    # --- what a state carries

    def changed(self) -> Found:
        """Return what differs from how it was built, as JSON types."""
        found: Found = {}
        for owner, thing in self._things.items():
            if self._is_as_built(owner, thing):
                continue
            built, values = self._built.get(owner, {}), self._read_one(owner, thing)
            differs = {
                name: list(value) if isinstance(value, tuple) else value
                for name, value in values.items()
                if (name not in built or differ(built[name], value))
                and (name == "training" or owner not in self._caching)
            }
            if differs:
                found[owner] = differs
        return self._shortened(found)

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

    def apply(self, changed: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Set all as it was built, except `changed`; return its owners that do not exist here."""
        self._things = self._owners()
        for owner, values in self._read().items():
            every = changed.get(_ALL, {}) if owner.startswith("layer/") else {}
            wanted = {**self._built.get(owner, {}), **every, **changed.get(owner, {})}
            for name, value in wanted.items():
                if name not in values or differ(values[name], value):
                    before = self._built.get(owner, {}).get(name)
                    _set(self._things[owner], name, tuple(value) if _is_tuple(before) else value)
        return sorted(changed.keys() - self._things.keys() - {_ALL})

    # --- modes

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within it all layers evaluate, while the state keeps their modes of before."""
        layers = self._model.sublayers(include_self=True)
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
        for _name, layer in self._layers():
            layer.__dict__["training"] = int(layer.training)  # as good as the bool it is

    def modes_set(self) -> dict[str, bool]:
        """Return the modes that were set since, and stop watching."""
        found = {}
        for name, layer in self._layers():
            if type(layer.training) is bool:
                found[name] = layer.training
            layer.__dict__["training"] = bool(layer.training)
        return found

    def set_modes(self, modes: Mapping[str, bool]) -> None:
        for name, layer in self._layers():
            if name in modes:
                layer.training = modes[name]

    # --- what no state can carry

    def uncarried_changes(self) -> list[str]:
        """Return what has changed since the first call and cannot be carried; each once."""
        self._things, now = self._owners(), self._read_structure()
        self._note_caches()
        if self._structure is None:
            self._structure = now
            return []
        found = []
        for name in [*self._structure, *(name for name in now if name not in self._structure)]:
            if self._structure.get(name) != now.get(name) and name not in self._named:
                self._named.add(name)
                found.append(name)
        return found

    def _note_caches(self) -> None:
        """Find layers that keep tensors they have made, as a table that grows with the input.

        What their attributes say of those (a length, "it is there") must not come without them.
        """
        made = {
            owner: {
                name: value
                for name, value in _loose_tensors(thing)
                if self._loose.get(owner, {}).get(name) is not value
            }
            for owner, thing in self._things.items()
            if owner.startswith("layer/") and not self._is_as_built(owner, thing)
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
        """Return the objects of interest, by names that are the same in every process."""
        found: dict[str, Any] = {f"layer/{name}": layer for name, layer in self._layers()}
        for name, parameter in self._model.named_parameters():
            found[f"parameter/{name}"] = parameter
        optimizer = self._optimizer
        found["optimizer"] = optimizer
        for name in ("_grad_clip", "regularization"):
            if hasattr(getattr(optimizer, name, None), "__dict__"):
                found[f"optimizer/{name}"] = getattr(optimizer, name)
        for index, group in enumerate(getattr(optimizer, "_param_groups", None) or []):
            if isinstance(group, dict):
                found[f"optimizer/group {index}"] = group
        scheduler, path = optimizer._learning_rate, "scheduler"
        while isinstance(scheduler, paddle.optimizer.lr.LRScheduler):
            found[path] = scheduler
            inner = getattr(scheduler, "learning_rate", None)  # of a LinearWarmup
            scheduler, path = inner, f"{path}/learning_rate"
        return found

    def _read(self) -> Found:
        return {owner: self._read_one(owner, thing) for owner, thing in self._things.items()}

    def _read_one(self, owner: str, thing: Any) -> dict[str, Any]:
        kind = owner.partition("/")[0]
        if kind == "parameter":
            return {
                "stop_gradient": thing.stop_gradient,
                "need_clip": thing.need_clip,
                "learning_rate": thing.optimize_attr.get("learning_rate"),
            }
        skipped = _OF_LAYERS if kind == "layer" else _OF_OPTIMIZERS
        if kind == "scheduler":
            thing.state_keys()
            skipped = _OF_SCHEDULERS.union(thing.keys)
        found = {
            name: value
            for name, value in _attributes(thing).items()
            if name not in skipped and is_plain(value)
        }
        if kind == "layer" and self._evaluates is not None:
            found["training"] = self._evaluates.get(id(thing), thing.training)
        return found

    def _is_as_built(self, owner: str, thing: Any) -> bool:
        quick = self._quick.get(owner)
        if quick is None or self._evaluates is not None:
            return False
        count, names, values = quick
        attributes = _attributes(thing)
        return len(attributes) == count and tuple(map(attributes.get, names)) == values

    def _read_structure(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, layer in self._layers():
            who = f"layer {name or type(self._model).__name__}"
            found[who] = type(layer)
            hooks = sum(len(layer.__dict__.get(each, ())) for each in _HOOKS)
            found[f"hooks of {who}"] = hooks
            found[f"forward of {who}"] = layer.__dict__.get("forward")
            for attribute, value in _loose_tensors(layer):
                found[f"{attribute} of {who}, a tensor outside of its state_dict"] = _version(value)
        for name, parameter in self._model.named_parameters():
            found[f"parameter {name}, which is another one now"] = id(parameter)
        optimizer = self._optimizer
        found["the optimizer's grad_clip"] = type(getattr(optimizer, "_grad_clip", None))
        found["the optimizer's weight decay"] = type(getattr(optimizer, "regularization", None))
        found["the optimizer's scheduler"] = type(optimizer._learning_rate)
        found["the optimizer's parameters"] = [
            len(each["params"]) if isinstance(each, dict) else 1
            for each in getattr(optimizer, "_param_groups", None) or []
        ]
        return found


def _attributes(thing: Any) -> dict[str, Any]:
    return thing if isinstance(thing, dict) else vars(thing)


_HOOKS = ("_forward_pre_hooks", "_forward_post_hooks")


def _loose_tensors(layer: Any) -> Iterator[tuple[str, Any]]:
    """Yield tensors and arrays that no state_dict holds, except those that are computed."""
    loose = layer._non_persistable_buffer_names_set
    buffers = [(name, each) for name, each in layer._buffers.items() if name in loose]
    for name, value in [*vars(layer).items(), *buffers]:
        is_tensor = isinstance(value, paddle.Tensor)
        if not (is_tensor or isinstance(value, np.ndarray)) or name in _CACHES:
            continue
        # Of parameters, as by weight_norm, or by the newest forward pass.
        is_computed = is_tensor and not value.stop_gradient
        if not is_computed and not any(each.startswith(f"{name}_") for each in layer._parameters):
            yield name, value


def _is_tuple(value: Any) -> bool:
    return isinstance(value, tuple)


def _set(thing: Any, name: str, value: Any) -> None:
    if isinstance(thing, dict):
        thing[name] = value
    elif isinstance(thing, paddle.Tensor):
        if name == "learning_rate":
            thing.optimize_attr[name] = value
        else:
            setattr(thing, name, value)
    else:
        vars(thing)[name] = value


def _version(value: Any) -> Any:
    """Return a mark that changes when a tensor is written to or replaced."""
    if isinstance(value, np.ndarray):
        return value.tobytes() if value.size <= 1024 else value.ctypes.data
    if not value._is_initialized():
        return None
    return id(value), value.inplace_version
