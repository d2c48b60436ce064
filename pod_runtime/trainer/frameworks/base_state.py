"""The state of a training, of any framework: tensors by structured names, and the rest as JSON.

What an optimizer keeps of a parameter goes by the parameter's place in the model:
`optimizer/features.0.weight.moment1`.
"""

import copy
import ctypes
import json
import logging
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol

import numpy as np

from pod_runtime.trainer.errors import StateError, UsageError
from pod_runtime.trainer.frameworks.base_traits import BaseTraits, Found
from pod_runtime.trainer.frameworks.buffers import OwnBuffers
from pod_runtime.trainer.frameworks.open_step import OpenStep
from pod_runtime.trainer.frameworks.plain_values import (
    differ,
    nested,
    own_copy,
    unflatten,
)
from pod_runtime.trainer.frameworks.reads import Reads
from pod_runtime.trainer.frameworks.unowned import UnownedParameters
from pod_runtime.trainer.layout import StateLayout, StateTensor, make_layout, missing_and_surplus

logger = logging.getLogger(__name__)

KEPT = "what the optimizer keeps of "  # begins the name of such a fingerprint


class FrameworkTensors(Protocol):
    """How a framework's tensors and plain values are read and written: a module of its folder."""

    def is_tensor(self, value: Any) -> bool:
        """Whether it is a tensor or an array."""

    def dtype_name(self, tensor: Any) -> str:
        """Return "float32" and the like of a tensor or an array."""

    def copy_bytes(self, address: int, tensor: Any, first: int, last: int) -> None:
        """Copy a tensor's or an array's bytes from `first` to `last` to `address`."""

    def fill(self, tensor: Any, source: Any, spec: StateTensor) -> None:
        """Overwrite `tensor` by the bytes that `spec` says of `source`, (bytes,) uint8."""

    def fingerprint(self, tensor: Any) -> float:
        """Return a number that tells whether a tensor is another one."""

    def make_tensor(self, source: Any, spec: StateTensor) -> Any:
        """Return a copy of these bytes as a tensor."""

    def to_plain(self, name: str, value: Any) -> Any:
        """Return `value` as JSON types, with all digits. Raises StateError: it is none of those."""

    def from_plain(self, value: Any) -> Any:
        """Return what `to_plain` was given."""


class OptimizerState(Protocol):
    """The state of one optimizer."""

    kind: str  # name of its type
    built: dict[str, Any]  # options as the script has built them, by what to call them; JSON types

    def owned(self) -> set[str]:
        """Return which of the model's parameters the optimizer has."""

    def tensors(self) -> list[tuple[str, Any]]:
        """Return its tensors, by "<parameter>.<what it is>"."""

    def scalars(self, *, committed: bool = False) -> dict[str, Any]:
        """Return learning rate, options and schedulers, as JSON types.

        `committed`: as they were noted, if they ever were.
        """

    def note_committed(self) -> None:
        """Remember them as they are."""

    def sizes(self) -> list[int]:
        """Return how many parameters each of its groups has."""

    def check(self, names: Collection[str], scalars: Mapping[str, Any]) -> None:
        """Check that a state with these tensors fits. Raises StateError."""

    def load(
        self, specs: Mapping[str, StateTensor], source: Any, scalars: Mapping[str, Any]
    ) -> None:
        """Take over the tensors of a state, and the numbers that stand beside them."""

    def load_plain(self, scalars: Mapping[str, Any]) -> None:
        """Take over learning rate, options and schedulers."""


class BaseState(ABC):
    """Model, optimizer, loss scaler and extra objects, seen as one state."""

    # Prefixes of the tensors whose shapes may change while a training runs.
    _RESHAPED: ClassVar[tuple[str, ...]] = ("",)

    def __init__(
        self,
        tensors: FrameworkTensors,
        optimizers: Sequence[OptimizerState],
        traits: BaseTraits,
        buffers: OwnBuffers,
        unowned: UnownedParameters,
        scaler: Any | None,
        extra: Mapping[str, Any],
    ) -> None:
        self._tensor_tools = tensors
        self._optimizers = optimizers
        self._traits = traits
        self._buffers = buffers
        self._unowned = unowned
        self._scaler = scaler
        self._extra = dict(extra)
        names: list[Any] = list(extra)
        for name in names:
            if not isinstance(name, str):
                raise UsageError(f"extra: expected texts as names, got {name!r}")
        self._open_step = OpenStep(self._marks)
        self._committed_traits: Found | None = None  # None: no step was committed
        self._edits: list[str] = []  # that were said
        self._new: set[str] = set()  # objects of `extra` of which a state had nothing; were said
        self._unkept_before: dict[str, Any] = {}  # marks of such with an empty state_dict
        self._unkept_named: set[str] = set()
        self._sizes = [each.sizes() for each in optimizers]
        self._watched: Mapping[str, Any] = {}  # as they were when `watch` was called
        self._layout: StateLayout | None = None  # None: to be made
        self._layout_key: object = None
        self._tensors: list[Any] = []
        self.scalars()  # what cannot be stored is refused now, and not by the first snapshot

    # --- what a framework says

    @abstractmethod
    def _model_tensors(self) -> list[tuple[str, Any]]:
        """Return the model's tensors, by "model/<name>"."""

    @abstractmethod
    def _load_scaler(self, plain: Mapping[str, Any]) -> None:
        """Take over the loss scaler's state."""

    @abstractmethod
    def _load_object(self, thing: Any, state: dict[str, Any]) -> None:
        """Have an object of the script take over its state."""

    @abstractmethod
    def evaluating(self) -> AbstractContextManager[None]:
        """Within it the model evaluates: no gradients, evaluation mode."""

    # --- taking it

    def layout(self) -> StateLayout:
        """Return the layout of the state as it is now."""
        self._buffers.take_back()
        named = [
            *self._model_tensors(),
            *(
                (f"optimizer/{name}", tensor)
                for each in self._optimizers
                for name, tensor in each.tensors()
            ),
            *self._extra_tensors(),
        ]
        self._tensors = [tensor for _name, tensor in named]
        shapes = [tuple(each.shape) for name, each in named if name.startswith(self._RESHAPED)]
        key = ([(name, tensor.dtype) for name, tensor in named], shapes)
        if self._layout is None or key != self._layout_key:
            dtype_name = self._tensor_tools.dtype_name
            self._layout = make_layout(
                [(name, dtype_name(tensor), tuple(tensor.shape)) for name, tensor in named]
            )
            self._layout_key = key
        return self._layout

    def copy_out(self, target: memoryview, start: int = 0, stop: int | None = None) -> None:
        """Copy what the last `layout()` found into `target`, between these offsets."""
        assert self._layout is not None
        stop = self._layout.total_bytes if stop is None else stop
        if stop <= start:
            return
        anchor = (ctypes.c_char * len(target)).from_buffer(target)
        base = ctypes.addressof(anchor)
        copy_bytes = self._tensor_tools.copy_bytes
        for spec, tensor in zip(self._layout.specs, self._tensors, strict=True):
            if spec.offset >= stop:
                break
            first, last = max(start - spec.offset, 0), min(stop - spec.offset, spec.size_bytes)
            if first < last:
                copy_bytes(base + spec.offset + first, tensor, first, last)

    def note_committed(self, *, of_epoch: bool = False) -> None:
        """Remember what the script may change in the next step: this belongs to the last commit.

        Raises:
            UsageError: the script has given an optimizer parameters since it was passed.
        """
        self._check_sizes()
        for each in self._optimizers:
            each.note_committed()
        self._committed_traits = self._traits.changed()
        self._open_step.begin(of_epoch=of_epoch)

    def note_open_step(self, *, amid_epoch: bool) -> None:
        """See what the script has changed since the last commit; before an update."""
        self._open_step.look(amid_epoch=amid_epoch)

    def changed_in_step(self) -> str:
        """Return what the script changes between a commit and the next update; "": nothing."""
        self._open_step.look()
        return self._open_step.changed

    def _marks(self) -> dict[str, Any]:
        """Return plain values that tell what tensors and objects are, by what to call them.

        While no shard is computed the buffers have the step's first values.
        """
        fingerprint, is_tensor = self._tensor_tools.fingerprint, self._tensor_tools.is_tensor
        self._buffers.take_back()
        found: dict[str, Any] = {
            f"{name.partition('/')[2]} of the model": fingerprint(each)
            for name, each in self._model_tensors()
        }
        for name, thing in self._extra.items():
            for path, value in nested(name, thing).items():
                if isinstance(value, np.ndarray):
                    value = zlib.crc32(np.ascontiguousarray(value).tobytes())
                elif is_tensor(value):
                    value = fingerprint(value)
                else:
                    value = own_copy(value)  # it may be the list that the script appends to
                found[f"extra={{{name!r}: ...}}, its {path}"] = value
        return found

    def scalars(self, *, committed: bool = False) -> dict[str, Any]:
        """Return the plain part: of optimizer, traits, loss scaler and extra objects."""
        traits = self._committed_traits if committed else None
        found: dict[str, Any] = {
            "traits": self._traits.changed() if traits is None else copy.deepcopy(traits)
        }
        if len(self._optimizers) == 1:
            found |= self._optimizers[0].scalars(committed=committed)
        else:
            found["optimizers"] = [each.scalars(committed=committed) for each in self._optimizers]
        to_plain, is_tensor = self._tensor_tools.to_plain, self._tensor_tools.is_tensor
        if self._scaler is not None:
            found["scaler"] = to_plain("scaler", self._scaler.state_dict())
        if self._extra:
            flat = {name: nested(name, thing) for name, thing in self._extra.items()}
            found["extra"] = {
                name: {
                    path: to_plain(path, value)
                    for path, value in leaves.items()
                    if not is_tensor(value)
                }
                for name, leaves in flat.items()
            }
            found["arrays"] = [  # of numpy, among the tensors
                f"extra/{name}/{path}"
                for name, leaves in flat.items()
                for path, value in leaves.items()
                if isinstance(value, np.ndarray)
            ]
        return found

    def _extra_tensors(self) -> list[tuple[str, Any]]:
        return [
            (f"extra/{name}/{path}", value)
            for name, thing in self._extra.items()
            for path, value in nested(name, thing).items()
            if self._tensor_tools.is_tensor(value)
        ]

    def fingerprints(self, *, of_model: bool) -> dict[str, float]:
        """Return numbers that are the same on all ranks as long as their states are."""
        plain = json.dumps([_rounded(each.scalars()) for each in self._optimizers])
        found = {
            "optimizer: its learning rate or options, or a scheduler": float(
                zlib.crc32(plain.encode())
            )
        }
        if of_model:
            self._buffers.take_back()
            fingerprint = self._tensor_tools.fingerprint
            found |= {name: fingerprint(each) for name, each in self._model_tensors()}
            # Numbers and arrays of the script's own may be a rank's; a moving average may not. One
            # number for all, as a rank may have an object that the others lack.
            leaves = [
                each for name, thing in self._extra.items() for each in nested(name, thing).values()
            ]
            found["an object in extra="] = sum(
                fingerprint(each) for each in leaves if hasattr(each, "detach")
            )
        return found

    # --- taking it over

    def load(self, layout: StateLayout, data: memoryview, scalars: Mapping[str, Any]) -> None:
        """Take over a state.

        Raises:
            StateError: it belongs to another model or optimizer; nothing has been changed.
        """
        self._buffers.take_back()
        by_group: dict[str, dict[str, StateTensor]] = {"model": {}, "optimizer": {}, "extra": {}}
        for spec in layout.specs:
            group, _, name = spec.name.partition("/")
            if group not in by_group:
                raise StateError(
                    f"{spec.name}: unknown kind of tensor; is the state newer than EDL?"
                )
            by_group[group][name] = spec
        self._check(layout, by_group, scalars)
        source = np.frombuffer(data, np.uint8)
        for name, tensor in self._model_tensors():
            self._tensor_tools.fill(tensor, source, by_group["model"][name.partition("/")[2]])
        for optimizer, specs, plain in self._parts(by_group["optimizer"], scalars):
            optimizer.load(specs, source, plain)
        if self._scaler is not None and scalars.get("scaler"):
            self._load_scaler(scalars["scaler"])
        arrays = set(scalars.get("arrays", ()))
        self._load_extra(by_group["extra"], source, scalars.get("extra", {}), arrays)
        self._say_new(name for name in self._extra if name not in scalars.get("extra", {}))
        for optimizer, _specs, plain in self._parts({}, scalars):
            optimizer.load_plain(plain)
            self._say_edits(optimizer.built, plain.get("built", {}))
        self.note_committed()
        self._unowned.forget()
        if "traits" not in scalars:  # a state of an older version
            return
        lost = self._traits.apply(scalars["traits"])
        if lost:
            logger.warning(
                "the state has options of %s, which this script's model and optimizer do not have",
                ", ".join(lost),
            )

    def _say_edits(self, now: Mapping[str, Any], before: Mapping[str, Any]) -> None:
        """Say which options this script builds otherwise than the one that has made a state."""
        edits = [
            f"{name} {now[name]} (before: {value})"
            for name, value in before.items()
            if name in now and differ(now[name], value)
        ]
        if edits and edits != self._edits:
            self._edits = edits
            logger.warning(
                "this script has other options than the training was begun with: %s. It goes on "
                "with its own, which are part of its state; set others in the body of an epoch",
                ", ".join(edits),
            )

    def _say_new(self, names: Iterable[str]) -> None:
        """Say which objects a state knows nothing of; each once.

        The script has built them before its model was what it is now.
        """
        new = [name for name in names if name not in self._new]
        self._new.update(new)
        if new:
            logger.warning(
                "extra: the state has no %s, which stays as this script has built it: a copy of "
                "the model, as for a moving average, is of the values that the model had before "
                "Loop(...). Where it is to begin with those of the state, set it after that",
                ", ".join(map(repr, new)),
            )

    def _parts(
        self, specs: Mapping[str, StateTensor], scalars: Mapping[str, Any]
    ) -> Iterator[tuple[OptimizerState, Mapping[str, StateTensor], Mapping[str, Any]]]:
        """Yield each optimizer with its part of a state: tensors, and plain values.

        Raises:
            StateError: no optimizer has the parameter of a tensor.
        """
        if len(self._optimizers) == 1:
            yield self._optimizers[0], specs, scalars
            return
        parts: list[dict[str, StateTensor]] = [{} for _each in self._optimizers]
        owners = {name: i for i, each in enumerate(self._optimizers) for name in each.owned()}
        for name, spec in specs.items():
            owner = owners.get(parameter_and_kind(name, owners)[0])
            if owner is None:
                raise StateError(f"optimizer/{name}: no optimizer has this parameter")
            parts[owner][name] = spec
        yield from zip(self._optimizers, parts, scalars["optimizers"], strict=True)

    def _load_extra(
        self,
        specs: Mapping[str, StateTensor],
        source: Any,
        plain: Mapping[str, Any],
        arrays: Collection[str],
    ) -> None:
        tools = self._tensor_tools
        flat = {
            name: {path: tools.from_plain(value) for path, value in plain.get(name, {}).items()}
            for name in self._extra
        }
        for path, spec in specs.items():
            # A name may have a "/" itself, as of one of several averages ("ema/0.999").
            owners = [name for name in self._extra if path.startswith(f"{name}/")]
            if owners:
                owner = max(owners, key=len)
                make = _make_array if spec.name in arrays else tools.make_tensor
                flat[owner][path[len(owner) + 1 :]] = make(source, spec)
        for name, thing in self._extra.items():
            if flat[name]:
                self._load_object(thing, unflatten(flat[name]))

    def _check(
        self,
        layout: StateLayout,
        by_group: Mapping[str, Mapping[str, StateTensor]],
        scalars: Mapping[str, Any],
    ) -> None:
        live = self._model_tensors()
        wanted = {name: tuple(tensor.shape) for name, tensor in live}
        model_specs = tuple(s for s in layout.specs if s.name.startswith("model/"))
        difference = missing_and_surplus(
            StateLayout(specs=model_specs, total_bytes=0, digest="", text=""), wanted
        )
        if difference:
            raise StateError(f"model: the state does not fit: {difference}; use the same model")
        for name, tensor in live:
            stored = by_group["model"][name.partition("/")[2]].dtype
            if stored != self._tensor_tools.dtype_name(tensor):
                raise StateError(
                    f"{name}: the state holds {stored}, the model "
                    f"{self._tensor_tools.dtype_name(tensor)}; use the same precision"
                )
        stored_count = len(scalars.get("optimizers", [scalars]))
        if stored_count != len(self._optimizers):
            raise StateError(
                f"optimizer: the state was made with {stored_count}, this script has "
                f"{len(self._optimizers)}; use as many, or another checkpoint path"
            )
        for optimizer, specs, plain in self._parts(by_group["optimizer"], scalars):
            kind = optimizer.kind
            if plain.get("optimizer", kind) != kind:
                raise StateError(
                    f"optimizer: the state was made by {plain['optimizer']}, this script uses "
                    f"{kind}; use the same optimizer, or another checkpoint path"
                )
            optimizer.check(specs, plain)
        for name in scalars.get("extra", {}):
            if name not in self._extra:
                raise StateError(
                    f"extra: the state holds {name!r}, this script does not; pass it in extra="
                )

    # --- what a script changes of it

    def watch(self) -> None:
        """Begin to watch what the script sets before the state is there."""
        self._watched = self._without_modes()
        self._traits.watch_modes()

    def watched(self) -> tuple[dict[str, bool], bool]:
        """Return the modes that were set since, and whether more was set than these."""
        return self._traits.modes_set(), self._without_modes() != self._watched

    def _without_modes(self) -> dict[str, Any]:
        found = self.scalars()
        for values in found["traits"].values():
            values.pop("training", None)
        found["traits"] = {owner: values for owner, values in found["traits"].items() if values}
        return found

    def set_modes(self, modes: Mapping[str, bool]) -> None:
        """Set the modes of these layers."""
        self._traits.set_modes(modes)

    def reads(self, tell: Callable[[], None]) -> Reads:
        """Return what calls `tell` before the script reads the model's tensors."""
        return self._traits.reads(tell)

    def numbers_of_layers(self) -> dict[str, float]:
        """Return the numbers that layers have as attributes, by what to call them."""
        return self._traits.numbers()

    def constants(self) -> list[str]:
        """Return what layers keep outside of a state, each with a checksum."""
        return self._traits.constants()

    def uncarried_changes(self) -> list[str]:
        """Return what has changed since the first call, and no state can carry; each once."""
        found, now = self._traits.uncarried_changes(), self._unkept()
        for name, mark in now.items():
            if self._unkept_before.get(name, mark) != mark and name not in self._unkept_named:
                self._unkept_named.add(name)
                found.append(name)
        self._unkept_before = now
        return found

    def _unkept(self) -> dict[str, Any]:
        """Return marks of the objects of `extra` whose states are empty, by what to call them."""
        found = {}
        for name, thing in self._extra.items():
            state = thing.state_dict()
            if isinstance(state, Mapping) and not state:
                parts = thing.modules() if hasattr(thing, "modules") else [thing]
                found[
                    f"extra={{{name!r}: ...}}, whose state_dict is empty (of a metric of "
                    f"torchmetrics: persistent(True) fills it)"
                ] = [self._traits.mark(vars(each)) for each in parts if hasattr(each, "__dict__")]
        return found

    def unowned(self) -> list[str]:
        """Return which trainable parameters of the model no optimizer has."""
        return self._unowned.names

    def check_unowned(self) -> None:
        """See that these are as they were. Raises UsageError: the script has changed one."""
        self._unowned.check()

    def _check_sizes(self) -> None:
        for before, optimizer in zip(self._sizes, self._optimizers, strict=True):
            now = optimizer.sizes()
            if len(now) != len(before) or any(a > b for a, b in zip(now, before, strict=True)):
                raise UsageError(
                    f"optimizer: its groups have {now} parameters, and had {before} when the loop "
                    f"was made: a trainer that starts later builds it without these, and could not "
                    f"take over the state. Give the optimizer all parameters before the loop, and "
                    f"freeze those whose turn comes later"
                )


def parameter_and_kind(name: str, parameters: Collection[str]) -> tuple[str, str]:
    """Return of which parameter an optimizer keeps something, and what; either may have a dot."""
    ends = [place for place, letter in enumerate(name) if letter == "."]
    for end in ends:
        if name[:end] in parameters:
            return name[:end], name[end + 1 :]
    return name, ""


def kind_of_scheduler(scheduler: Any, base: type, holders: tuple[Any, ...] = ()) -> str:
    """Return the name of a scheduler's type, with those of the schedulers that it is made of.

    Args:
        base: of the framework's schedulers.
        holders: those that it is a part of, which it may know.
    """
    holders = (*holders, scheduler)
    held = [each if isinstance(each, list | tuple) else [each] for each in vars(scheduler).values()]
    parts = [
        kind_of_scheduler(each, base, holders)
        for few in held
        for each in few
        if isinstance(each, base) and each not in holders
    ]
    return type(scheduler).__name__ + (f"({', '.join(parts)})" if parts else "")


def check_schedulers(stored: Sequence[str] | None, mine: Sequence[str]) -> None:
    """See that a state is of schedulers of these kinds: others cannot go on where one stands.

    Args:
        stored: None: made by a version that did not store them.

    Raises:
        StateError: it is not.
    """
    if stored is not None and list(stored) != list(mine):
        raise StateError(
            f"scheduler: the state was made with {', '.join(stored)}, this script has "
            f"{', '.join(mine)}; use the same, or another checkpoint path"
        )


def _rounded(value: Any) -> Any:
    """Return plain values without the digits in which processors differ."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list) else value


def _make_array(source: Any, spec: StateTensor) -> Any:
    """Return a copy of these bytes as an array of numpy."""
    piece = source[spec.offset : spec.offset + spec.size_bytes]
    return piece.view(spec.dtype).reshape(spec.shape).copy()
