"""The state of a Paddle training: every tensor by its structured name, and the rest as JSON.

Paddle names accumulators after automatically numbered parameters (`linear_0.w_0_moment1_0`), which
differ as soon as a model is built in another order. Here they go by the parameter's place in the
model: `optimizer/features.0.weight.moment1`.
"""

import ctypes
import logging
import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import paddle

from pod_runtime.trainer.errors import StateError, UsageError
from pod_runtime.trainer.frameworks.paddle.traits import Traits
from pod_runtime.trainer.frameworks.plain_values import nested, unflatten
from pod_runtime.trainer.layout import (
    ITEM_BYTES,
    StateLayout,
    StateTensor,
    make_layout,
    missing_and_surplus,
)

logger = logging.getLogger(__name__)

_NUMPY = {"bfloat16": "uint16"}  # how Paddle hands out what numpy does not know
_MASTER = "master_weight"
_SUFFIX = re.compile(r"_\d+\Z")


class PaddleState:
    """Model, optimizer, loss scaler and extra objects, seen as one state."""

    def __init__(
        self, model: Any, optimizer: Any, scaler: Any | None, extra: Mapping[str, Any]
    ) -> None:
        self._optimizer = optimizer
        self._scaler = scaler
        self._extra = dict(extra)
        self._model_tensors = [(f"model/{name}", t) for name, t in model.state_dict().items()]
        self._structured = {p.name: name for name, p in model.named_parameters()}
        for parameter in optimizer_parameters(optimizer):
            if parameter.name not in self._structured:
                raise UsageError(
                    f"optimizer: its parameter {parameter.name} is not one of the model's; put "
                    f"all layers that are trained into one paddle.nn.Layer and pass that"
                )
        self._names: dict[str, str] = {}  # accumulator's variable name -> structured name
        self.traits = Traits(model, optimizer)
        self._loaded: Mapping[str, Any] = {}  # the scalars that were taken over last
        self._watched: Mapping[str, Any] = {}  # as they were when `watch` was called
        self._layout: StateLayout | None = None  # None: to be made
        self._layout_key: object = None
        self._tensors: list[Any] = []

    def layout(self) -> StateLayout:
        """Return the layout of the state as it is now."""
        named = [*self._model_tensors, *self._optimizer_tensors(), *self._extra_tensors()]
        self._tensors = [tensor for _name, tensor in named]
        shapes = [
            tuple(tensor.shape) for name, tensor in named if name.startswith("extra/")
        ]  # all others keep theirs
        key = ([name for name, _tensor in named], shapes)
        if self._layout is None or key != self._layout_key:
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
        for spec, tensor in zip(self._layout.specs, self._tensors, strict=True):
            if spec.offset >= stop:
                break
            first, last = max(start - spec.offset, 0), min(stop - spec.offset, spec.size_bytes)
            if first < last:
                copy_tensor(base + spec.offset + first, tensor, first, last)

    def scalars(self) -> dict[str, Any]:
        """Return scheduler, learning rate, traits, loss scaler and the plain part of `extra`."""
        found: dict[str, Any] = {
            "optimizer": type(self._optimizer).__name__,
            "traits": self.traits.changed(),
        }
        scheduler = self._scheduler()
        if scheduler is None:
            found["lr"] = float(self._optimizer.get_lr())
        else:
            found["lr_scheduler"] = _plain("lr_scheduler", scheduler.state_dict())
        if self._scaler is not None:
            found["scaler"] = _plain("scaler", self._scaler.state_dict())
        if self._extra:
            found["extra"] = {
                name: _strip(nested(name, thing)) for name, thing in self._extra.items()
            }
        return found

    def load(self, layout: StateLayout, data: memoryview, scalars: Mapping[str, Any]) -> None:
        """Take over a state.

        Raises:
            StateError: it belongs to another model or optimizer; nothing has been changed.
        """
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
        for name, tensor in self._model_tensors:
            _fill(tensor, source, by_group["model"][name.partition("/")[2]])
        self._load_optimizer(by_group["optimizer"], source, scalars)
        if self._scaler is not None and scalars.get("scaler"):
            state = dict(scalars["scaler"])
            state["scale"] = np.array(state["scale"], np.float32)
            self._scaler.load_state_dict(state)
        self._load_extra(by_group["extra"], source, scalars.get("extra", {}))
        self._loaded = scalars
        self._load_traits()

    def load_again(self) -> None:
        """Undo what the script has changed of learning rate, scheduler and traits since `load`."""
        if self._loaded:
            self._load_rate(self._loaded)
            self._load_traits()

    def watch(self) -> None:
        """Begin to watch what the script sets before the state is there."""
        self._watched = self._without_modes()
        self.traits.watch_modes()

    def watched(self) -> tuple[dict[str, bool], bool]:
        """Return the modes that were set since, and whether more was set than these."""
        return self.traits.modes_set(), self._without_modes() != self._watched

    def _without_modes(self) -> dict[str, Any]:
        found = self.scalars()
        for values in found["traits"].values():
            values.pop("training", None)
        found["traits"] = {owner: values for owner, values in found["traits"].items() if values}
        return found

    def _load_traits(self) -> None:
        if "traits" not in self._loaded:  # a state of an older version
            return
        lost = self.traits.apply(self._loaded["traits"])
        if lost:
            logger.warning(
                "the state has options of %s, which this script's model and optimizer do not have",
                ", ".join(lost),
            )

    def _check(
        self,
        layout: StateLayout,
        by_group: Mapping[str, Mapping[str, StateTensor]],
        scalars: Mapping[str, Any],
    ) -> None:
        wanted = {name: tuple(tensor.shape) for name, tensor in self._model_tensors}
        model_specs = tuple(s for s in layout.specs if s.name.startswith("model/"))
        difference = missing_and_surplus(
            StateLayout(specs=model_specs, total_bytes=0, digest="", text=""), wanted
        )
        if difference:
            raise StateError(f"model: the state does not fit: {difference}; use the same model")
        for name, tensor in self._model_tensors:
            stored = by_group["model"][name.partition("/")[2]].dtype
            if stored != dtype_name(tensor):
                raise StateError(
                    f"{name}: the state holds {stored}, the model {dtype_name(tensor)}; "
                    f"use the same precision"
                )
        kind = type(self._optimizer).__name__
        if scalars.get("optimizer", kind) != kind:
            raise StateError(
                f"optimizer: the state was made by {scalars['optimizer']}, this script uses "
                f"{kind}; use the same optimizer, or another checkpoint path"
            )
        if ("lr_scheduler" in scalars) != (self._scheduler() is not None):
            raise StateError(
                "optimizer: the state and this script differ in whether the learning rate is a "
                "scheduler; use the same, or another checkpoint path"
            )
        known = set(self._structured.values())
        for name in by_group["optimizer"]:
            if name.rpartition(".")[0] not in known:
                raise StateError(f"optimizer/{name}: the model has no such parameter")
        for name in scalars.get("extra", {}):
            if name not in self._extra:
                raise StateError(
                    f"extra: the state holds {name!r}, this script does not; pass it in extra="
                )

    def _scheduler(self) -> Any | None:
        rate = self._optimizer._learning_rate
        return rate if isinstance(rate, paddle.optimizer.lr.LRScheduler) else None

    def _optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's state, even one that was loaded and not yet used by a step."""
        state: dict[str, Any] = self._optimizer.state_dict()
        if (
            not self._optimizer._accumulators
        ):  # Paddle 2.6 keeps it elsewhere, where nothing public reads it
            for name, value in self._optimizer._accumulators_holder.items():
                state.setdefault(name, value)
        return state

    def _optimizer_tensors(self) -> list[tuple[str, Any]]:
        state = self._optimizer_state()
        found = []
        for variable, value in state.items():
            if variable == "LR_Scheduler":
                continue
            if variable == "master_weights":
                found += [
                    (f"optimizer/{self._structured[name]}.{_MASTER}", tensor)
                    for name, tensor in value.items()
                ]
            else:
                found.append((f"optimizer/{self._structured_name(variable)}", value))
        return found

    def _structured_name(self, variable: str) -> str:
        known = self._names.get(variable)
        if known is None:
            owners = [name for name in self._structured if variable.startswith(f"{name}_")]
            if not owners:
                raise StateError(f"optimizer: {variable} belongs to no parameter of the model")
            owner = max(owners, key=len)
            kind = _SUFFIX.sub("", variable[len(owner) + 1 :])
            known = self._names[variable] = f"{self._structured[owner]}.{kind}"
        return known

    def _load_optimizer(
        self, specs: Mapping[str, StateTensor], source: Any, scalars: Mapping[str, Any]
    ) -> None:
        kept = [name.rpartition(".") for name in specs]
        self._make_accumulators({owner for owner, _, kind in kept if kind != _MASTER})
        self._drop_surplus(specs)
        if self._fill_optimizer(specs, source, scalars):
            return
        live = {
            self._structured_name(variable): variable
            for variable in self._optimizer_state()
            if variable not in ("LR_Scheduler", "master_weights")
        }
        names = {structured: name for name, structured in self._structured.items()}
        state: dict[str, Any] = {}
        master: dict[str, Any] = {}
        for name, spec in specs.items():
            structured, _, kind = name.rpartition(".")
            if kind == _MASTER:
                tensor = master[names[structured]] = _tensor(source, spec)
                tensor.name = f"{names[structured]}_fp32_master_0"
            else:
                # A fresh process numbers the first accumulator of a kind 0.
                variable = live.get(name, f"{names[structured]}_{kind}_0")
                state[variable] = _tensor(source, spec)
        if master:
            state["master_weights"] = master
        if "lr_scheduler" in scalars:
            state["LR_Scheduler"] = dict(scalars["lr_scheduler"])
        elif "lr" in scalars and scalars["lr"] != float(self._optimizer.get_lr()):
            self._optimizer.set_lr(scalars["lr"])
        self._optimizer.set_state_dict(state)

    def _make_accumulators(self, owners: Collection[str]) -> None:
        """Make the accumulators of some parameters, where the state lacks those of others.

        Paddle would make them at its next step, from what was laid aside, and refuse a parameter
        that was frozen so far: it has nothing there.
        """
        mine = optimizer_parameters(self._optimizer)
        stateful = [each for each in mine if self._structured[each.name] in owners]
        if stateful and len(stateful) < len(mine):
            self._optimizer._accumulators_holder = {}
            block = paddle.base.framework.default_main_program().global_block()
            self._optimizer._create_accumulators(block, stateful)

    def _drop_surplus(self, specs: Mapping[str, StateTensor]) -> None:
        """Drop accumulators that the state lacks: a warm-up step or a later step made them."""
        for found in self._optimizer._accumulators.values():
            for name in list(found):
                if self._structured_name(found[name].name) not in specs:
                    del found[name]
                    getattr(self._optimizer, "_already_create_accumulator", set()).discard(name)

    def _fill_optimizer(
        self, specs: Mapping[str, StateTensor], source: Any, scalars: Mapping[str, Any]
    ) -> bool:
        """Overwrite the accumulators where they are; False: not all of them are there yet.

        An optimizer that has stepped has them all, and Paddle's own way copies them twice.
        """
        if not self._optimizer._accumulators:
            return False
        live = {name.partition("/")[2]: tensor for name, tensor in self._optimizer_tensors()}
        if live.keys() != specs.keys() or any(
            not hasattr(tensor, "set_value")
            or dtype_name(tensor) != specs[name].dtype
            or tuple(tensor.shape) != specs[name].shape
            for name, tensor in live.items()
        ):
            return False
        for name, tensor in live.items():
            _fill(tensor, source, specs[name])
        self._load_rate(scalars)
        return True

    def _load_rate(self, scalars: Mapping[str, Any]) -> None:
        scheduler = self._scheduler()
        if scheduler is not None:
            scheduler.set_state_dict(dict(scalars["lr_scheduler"]))
        elif "lr" in scalars and scalars["lr"] != float(self._optimizer.get_lr()):
            self._optimizer.set_lr(scalars["lr"])

    def _extra_tensors(self) -> list[tuple[str, Any]]:
        found = []
        for name, thing in self._extra.items():
            for path, value in nested(name, thing).items():
                if _is_tensor(value):
                    found.append((f"extra/{name}/{path}", value))
        return found

    def _load_extra(
        self, specs: Mapping[str, StateTensor], source: Any, plain: Mapping[str, Any]
    ) -> None:
        for name, thing in self._extra.items():
            flat: dict[str, Any] = dict(plain.get(name, {}))
            for path, spec in specs.items():
                owner, _, rest = path.partition("/")
                if owner == name:
                    flat[rest] = _tensor(source, spec)
            if flat:
                thing.set_state_dict(unflatten(flat))


def optimizer_parameters(optimizer: Any) -> list[Any]:
    """Return the parameters of an optimizer, those of its groups included."""
    found: list[Any] = []
    # A group that is added later is in the second list only; without groups they are one.
    for entry in getattr(optimizer, "_param_groups", None) or optimizer._parameter_list or []:
        found += entry["params"] if isinstance(entry, dict) else [entry]
    return found


def terms_of(model: Any, optimizer: Any, *, on_host: bool) -> dict[str, Any]:
    """Return what has to be the same of a model and its optimizer on all ranks, as JSON types.

    Values of parameters are not among it: all ranks begin with those of one.
    """
    return {
        "model": [
            f"{name} {dtype_name(each)} {list(each.shape)}" + " frozen" * each.stop_gradient
            for name, each in model.named_parameters()
        ],
        "optimizer": [
            *_numbers_of(optimizer),
            *_numbers_of(getattr(optimizer, "_grad_clip", None)),
            type(getattr(optimizer, "_learning_rate", None)).__name__,
        ],
        "device": "CPU" if on_host else "GPU",
    }


def _numbers_of(thing: Any) -> list[str]:
    """Return an object's type and the numbers that it was made with."""
    found = getattr(thing, "__dict__", {})
    numbers = sorted((name, value) for name, value in found.items() if type(value) is float)
    return [type(thing).__name__, *(f"{name.lstrip('_')}={value!r}" for name, value in numbers)]


def dtype_name(tensor: Any) -> str:
    """Return "float32" and the like of a tensor or an array."""
    return str(tensor.dtype).removeprefix("paddle.")


def copy_tensor(address: int, tensor: Any, first: int, last: int) -> None:
    """Copy a tensor's or an array's bytes from `first` to `last` to `address`."""
    size = last - first
    if isinstance(tensor, np.ndarray):
        tensor = np.ascontiguousarray(tensor)
        ctypes.memmove(address, tensor.ctypes.data + first, size)
        return
    if not tensor.place.is_cpu_place():  # only what is wanted crosses the bus
        item = ITEM_BYTES[dtype_name(tensor)]
        tensor, first = tensor.flatten()[first // item : last // item].cpu(), 0
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    ctypes.memmove(address, tensor.data_ptr() + first, size)


def _fill(tensor: Any, source: Any, spec: StateTensor) -> None:
    if spec.size_bytes == 0:
        return
    if tensor.place.is_cpu_place() and tensor.is_contiguous():
        piece = source[spec.offset : spec.offset + spec.size_bytes]
        ctypes.memmove(tensor.data_ptr(), piece.ctypes.data, spec.size_bytes)
    else:
        tensor.set_value(_tensor(source, spec))


def _tensor(source: Any, spec: StateTensor) -> Any:
    piece = source[spec.offset : spec.offset + spec.size_bytes]
    array = piece.view(_NUMPY.get(spec.dtype, spec.dtype)).reshape(spec.shape)
    made = paddle.to_tensor(array)
    if spec.dtype == "bfloat16" and made.dtype != paddle.bfloat16:
        made = made.view(paddle.bfloat16)
    return made


def _is_tensor(value: Any) -> bool:
    return isinstance(value, paddle.Tensor | np.ndarray)


def _strip(flat: Mapping[str, Any]) -> dict[str, Any]:
    return {path: _plain(path, value) for path, value in flat.items() if not _is_tensor(value)}


def _plain(name: str, value: Any) -> Any:
    """Return `value` as JSON types; numbers keep all their digits.

    Raises:
        StateError: it is none of those.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if _is_tensor(value):
        return np.asarray(value.numpy() if hasattr(value, "numpy") else value).tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(f"{name}.{key}", item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(name, item) for item in value]
    raise StateError(f"{name}: a {type(value).__name__} cannot be stored; use numbers or tensors")
