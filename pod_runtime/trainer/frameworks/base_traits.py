"""Carry what a script changes besides tensors, for any framework: modes, flags, options.

Every process builds model and optimizer by the same lines of the script. So what belongs to the
state is how they differ now from how they were built: usually nothing. What cannot be put into a
state (a hook, a layer in another's place) is named instead.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from operator import itemgetter
from types import BuiltinFunctionType, FunctionType
from typing import Any, ClassVar

import numpy as np

from pod_runtime.trainer.frameworks.plain_values import (
    differ,
    is_of_script,
    is_plain,
    rough_digest,
)
from pod_runtime.trainer.frameworks.reads import Reads

Found = dict[str, dict[str, Any]]  # owner -> attribute -> value

_CONTAINERS = (list, tuple, dict, set, deque)
# Whose equality tells whether they changed.
_VALUES = (complex, bytes, Enum, Decimal, Fraction, FunctionType, BuiltinFunctionType)
_PARAMETER = "parameter/"  # begins the names of parameters among the owners
_MOST, _DEEPEST = 1000, 3  # members that are looked at one by one, and containers within another


class BaseTraits(ABC):
    """The traits of one model and its optimizer, made when the script has built them.

    Layers have `training`, `eval()` and their attributes in `__dict__`, as in both frameworks.
    """

    # Said by a framework: its package, and attributes of layers and optimizers that are its own.
    _PACKAGE: ClassVar[str]
    _OF_LAYERS: ClassVar[frozenset[str]]
    _OF_OPTIMIZERS: ClassVar[frozenset[str]]

    def __init__(self, model: Any, optimizers: Sequence[Any]) -> None:
        self._model, self._optimizers = model, list(optimizers)
        self._evaluates: dict[int, bool] | None = None  # modes outside of an evaluation
        self._things = self._owners()
        self._built = self._read()
        self._sizes = {
            owner: len(attributes(thing))
            for owner, thing in self._things.items()
            if not owner.startswith(_PARAMETER)
        }
        self._look_again()
        self._structure: dict[str, Any] | None = None  # None: not noted
        self._named: set[str] = set()

    # --- what a framework says

    @abstractmethod
    def _layers(self) -> list[tuple[str, Any]]:
        """Return all layers, by their names in the model."""

    @abstractmethod
    def _owners(self) -> dict[str, Any]:
        """Return the objects of interest, by names that are the same in every process."""

    @abstractmethod
    def _read_one(self, owner: str, thing: Any) -> dict[str, Any]:
        """Return an object's plain values."""

    @abstractmethod
    def _flags_of(self, parameter: Any) -> tuple[Any, ...]:
        """Return a parameter's plain values alone, in their order."""

    @abstractmethod
    def _set(self, thing: Any, name: str, value: Any) -> None:
        """Set one of these."""

    @abstractmethod
    def watch_modes(self) -> None:
        """Begin to watch which modes the script sets, even to the value that they have."""

    @abstractmethod
    def modes_set(self) -> dict[str, bool]:
        """Return the modes that were set since, and stop watching."""

    @abstractmethod
    def _hook_count(self, layer: Any) -> int:
        """Return how many hooks a layer has."""

    @abstractmethod
    def _loose_tensors(self, layer: Any) -> Iterator[tuple[str, Any]]:
        """Yield tensors and arrays that no state_dict holds, except those that are computed."""

    @abstractmethod
    def _tensor_version(self, value: Any) -> Any:
        """Return a mark that changes when a tensor is written to or replaced.

        None: it is trained, or computed of what is; or it is no tensor.
        """

    # --- what a state carries

    def changed(self) -> Found:
        """Return what differs from how it was built, as JSON types."""
        found: Found = {}
        for owner in self._suspects():
            thing = self._things[owner]
            built = self._built.get(owner, {})
            differs = {
                name: list(value) if isinstance(value, list | tuple) else value
                for name, value in self._read_one(owner, thing).items()
                if (name not in built or differ(built[name], value)) and self._counts(owner, name)
            }
            if differs:
                found[owner] = differs
        return found

    def apply(self, changed: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Set all as it was built, except `changed`; return its owners that do not exist here."""
        self._look_again()
        for owner, values in self._read().items():
            built = self._built.get(owner, {})
            for name, value in {**built, **changed.get(owner, {})}.items():
                if name not in values or differ(values[name], value):
                    if isinstance(value, list | tuple):  # a list of its own: it may be put into
                        value = tuple(value) if type(built.get(name)) is tuple else list(value)
                    self._set(self._things[owner], name, value)
        return sorted(changed.keys() - self._things.keys())

    def numbers(self) -> dict[str, float]:
        """Return the numbers that layers have as attributes, by what to call them."""
        found = {}
        for name, layer in self._layers():
            for attribute, value in self._read_one(f"layer/{name}", layer).items():
                if attribute != "training" and type(value) in (int, float):
                    found[f"{attribute} of layer {name or type(self._model).__name__}"] = value
        return found

    def constants(self) -> list[str]:
        """Return what layers keep outside of a state, each with a checksum.

        Tensors and arrays: a mask, a permutation, random features. Rounding does not count.
        """
        return [
            f"{attribute} of layer {name or type(self._model).__name__}, which no state_dict has, "
            f"with checksum {digest}"
            for name, layer in self._layers()
            for attribute, value in self._loose_tensors(layer)
            if (digest := rough_digest(value)) is not None
        ]

    def _look_again(self) -> None:
        """Find the objects of interest, and what tells at once whether one is as it was built.

        Most never change, and each step asks.
        """
        self._things = self._owners()
        self._quick: list[tuple[str, dict[str, Any], int, Callable[[Any], Any], Any]] = []
        self._flags: list[tuple[str, Any, Any]] = []  # of parameters
        self._new: list[str] = []
        for owner, thing in self._things.items():
            built = self._built.get(owner)
            if built is None:
                self._new.append(owner)
            elif owner.startswith(_PARAMETER):
                self._flags.append((owner, thing, tuple(built.values())))
            else:
                get = itemgetter(*built) if built else _nothing
                now = attributes(thing)
                if not built.keys() <= now.keys():  # of TorchScript
                    self._new.append(owner)
                    continue
                self._quick.append((owner, now, self._sizes[owner], get, get(built)))

    def _suspects(self) -> list[str]:
        """Return the owners that may not be as they were built."""
        if self._evaluates is not None:
            return list(self._things)
        flags = self._flags_of
        try:
            found = [
                owner
                for owner, now, size, get, values in self._quick
                if len(now) != size or get(now) != values
            ]
        except (KeyError, ValueError, RuntimeError):  # one is gone, or is an array now
            found = [owner for owner, *_ in self._quick]
        found += [owner for owner, thing, values in self._flags if flags(thing) != values]
        return found + self._new

    def _counts(self, owner: str, name: str) -> bool:
        """Whether a state carries this attribute."""
        return True

    def reads(self, tell: Callable[[], None]) -> Reads:
        """Return what sees that the script reads the model's tensors."""
        return Reads(lambda: [layer for _name, layer in self._layers()], tell)

    # --- modes

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within it all layers evaluate, while the state keeps their modes of before."""
        layers = [layer for _name, layer in self._layers()]
        self._evaluates = {id(layer): layer.training for layer in layers}
        self._model.eval()
        try:
            yield
        finally:
            # One by one: a script may keep some in evaluation mode, as frozen batch norms are.
            modes, self._evaluates = self._evaluates, None
            for layer in layers:
                layer.training = modes[id(layer)]

    def set_modes(self, modes: Mapping[str, bool]) -> None:
        """Set the modes of these layers."""
        for name, layer in self._layers():
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

    def _read_structure(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, layer in self._layers():
            who = f"layer {name or type(self._model).__name__}"
            found[who] = type(layer)
            found[f"hooks of {who}"] = self._hook_count(layer)
            forward = vars(layer).get("forward")
            # Paddle's to_static puts a layer's own one there, when the model is called first.
            function = getattr(forward, "__func__", None)
            is_own = function is not None and function is type(layer).forward
            found[f"forward of {who}"] = None if is_own else forward
            for attribute, value in self._loose_tensors(layer):
                what = f"{attribute} of {who}, a tensor outside of its state_dict"
                found[what] = self._version(value)
            found |= self._read_others(who, layer, self._OF_LAYERS)
        for number, optimizer in enumerate(self._optimizers):
            who = f"the optimizer{f' {number}' if number else ''}"
            found |= self._read_optimizer(who, optimizer)
        for name, parameter in self._model.named_parameters():
            found[f"parameter {name}, which is another one now"] = (id(parameter), parameter.dtype)
        return found

    def _read_optimizer(self, who: str, optimizer: Any) -> dict[str, Any]:
        found = self._read_others(who, optimizer, self._OF_OPTIMIZERS)
        if self._is_of_framework(optimizer):
            return found
        for name, value in vars(optimizer).items():
            version = None if name in self._OF_OPTIMIZERS else self._version(value)
            if version is not None:
                found[f"{name} of {who}, a tensor outside of its state"] = version
        return found

    def _read_others(self, who: str, thing: Any, skipped: frozenset[str]) -> dict[str, Any]:
        """Return marks of what is no plain value: lists and the like, objects of the script."""
        if self._is_of_framework(thing):
            return {}
        marks = {
            (name, type(value).__name__): self.mark(value)
            for name, value in vars(thing).items()
            if name not in skipped and not is_plain(value) and self._version(value) is None
        }
        return {
            f"{name} of {who}, {_article(kind)} {kind}": mark
            for (name, kind), mark in marks.items()
            if mark is not None
        }

    def _is_of_framework(self, thing: Any) -> bool:
        return type(thing).__module__.partition(".")[0] == self._PACKAGE

    def mark(self, value: Any, depth: int = 1) -> Any:
        """Return plain values that change when something in this value does; None: nothing can."""
        if is_plain(value):
            return value
        if isinstance(value, _CONTAINERS):
            if len(value) > _MOST or depth > _DEEPEST:
                return id(value), len(value)
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            return [
                (key if is_plain(key) else id(key), self.mark(each, depth + 1))
                for key, each in pairs
            ]
        version = self._version(value)
        if version is not None:
            return version
        if isinstance(value, _VALUES):
            return value
        is_layer = hasattr(value, "named_parameters")
        if depth <= _DEEPEST and not is_layer and is_of_script(type(value).__module__):
            return self.mark(getattr(value, "__dict__", {}), depth + 1)
        return None

    def _version(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return value.tobytes() if value.size <= 1024 else value.ctypes.data
        return self._tensor_version(value)

    # --- reading

    def _read(self) -> Found:
        return {
            owner: {
                name: list(value) if isinstance(value, list) else value  # a script may put into it
                for name, value in self._read_one(owner, thing).items()
            }
            for owner, thing in self._things.items()
        }


def _nothing(_built: Any) -> None:
    """Read no attribute."""


def _article(kind: str) -> str:
    return "an" if kind[0] in "AEIOUaeiou" else "a"


def attributes(thing: Any) -> dict[str, Any]:
    """Return the attributes of an object, or a dict as it is."""
    return thing if isinstance(thing, dict) else vars(thing)
