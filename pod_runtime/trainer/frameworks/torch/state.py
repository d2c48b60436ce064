"""The state of a PyTorch training: every tensor by its structured name, and the rest as JSON.

What an optimizer keeps of a parameter goes by the parameter's place in the model:
`optimizer/features.0.weight.exp_avg`.
"""

import ctypes
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from pod_runtime.trainer.errors import StateError, UsageError
from pod_runtime.trainer.frameworks.plain_values import nested, unflatten
from pod_runtime.trainer.frameworks.torch.traits import TorchTraits
from pod_runtime.trainer.layout import (
    StateLayout,
    StateTensor,
    make_layout,
    missing_and_surplus,
)

_PAIRS = "~pairs"  # of a mapping whose keys are no text; JSON would make them text


class TorchState:
    """Model, optimizer, schedulers, loss scaler and extra objects, seen as one state."""

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        schedulers: Sequence[Any],
        scaler: Any | None,
        extra: Mapping[str, Any],
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._schedulers = list(schedulers)
        self._scaler = scaler
        self._extra = dict(extra)
        self._names = {id(each): name for name, each in model.named_parameters()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in self._names:
                    raise UsageError(
                        f"optimizer: a parameter of shape {list(parameter.shape)} is not one of "
                        f"the model's; put all layers that are trained into one torch.nn.Module "
                        f"and pass that"
                    )
        self.traits = TorchTraits(model)
        self._loaded: Mapping[str, Any] = {}  # the scalars that were taken over last
        self._watched: Mapping[str, Any] = {}  # as they were when `watch` was called
        self._layout: StateLayout | None = None  # None: to be made
        self._layout_key: object = None
        self._tensors: list[Any] = []

    def layout(self) -> StateLayout:
        """Return the layout of the state as it is now."""
        named = [*self._model_tensors(), *self._optimizer_tensors(), *self._extra_tensors()]
        self._tensors = [tensor for _name, tensor in named]
        shapes = [tuple(tensor.shape) for _name, tensor in named]
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
                _copy_bytes(base + spec.offset + first, tensor, first, last)

    def scalars(self) -> dict[str, Any]:
        """Return the plain part: options, schedulers, traits, loss scaler, and that of `extra`."""
        found: dict[str, Any] = {
            "optimizer": type(self._optimizer).__name__,
            "groups": [_plain_options(group) for group in self._optimizer.param_groups],
            "optimizer_numbers": self._optimizer_numbers(),
            "schedulers": [
                to_plain(type(each).__name__, each.state_dict()) for each in self._schedulers
            ],
            "traits": self.traits.changed(),
        }
        if self._scaler is not None:
            found["scaler"] = to_plain("scaler", self._scaler.state_dict())
        if self._extra:
            found["extra"] = {
                name: {
                    path: to_plain(path, value)
                    for path, value in nested(name, thing).items()
                    if not _is_tensor(value)
                }
                for name, thing in self._extra.items()
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
        with torch.no_grad():
            for name, tensor in self._model_tensors():
                _fill(tensor, source, by_group["model"][name.partition("/")[2]])
            self._load_optimizer(by_group["optimizer"], source, scalars)
        if self._scaler is not None and scalars.get("scaler"):
            self._scaler.load_state_dict(from_plain(scalars["scaler"]))
        self._load_extra(by_group["extra"], source, scalars.get("extra", {}))
        self._loaded = scalars
        self._load_rest()

    def load_again(self) -> None:
        """Undo what the script has changed of options, schedulers and traits since `load`."""
        if self._loaded:
            self._load_rest()

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

    def _load_rest(self) -> None:
        for group, options in zip(
            self._optimizer.param_groups, self._loaded["groups"], strict=True
        ):
            group.update(from_plain(options))
        for scheduler, state in zip(self._schedulers, self._loaded["schedulers"], strict=True):
            scheduler.load_state_dict(from_plain(state))
        self.traits.apply(self._loaded["traits"])

    # --- model

    def _model_tensors(self) -> list[tuple[str, Any]]:
        return [
            (f"model/{name}", each)
            for name, each in self._model.state_dict(keep_vars=True).items()
            if isinstance(each, torch.Tensor)
        ]

    def _check(
        self,
        layout: StateLayout,
        by_group: Mapping[str, Mapping[str, StateTensor]],
        scalars: Mapping[str, Any],
    ) -> None:
        wanted = {name: tuple(tensor.shape) for name, tensor in self._model_tensors()}
        model_specs = tuple(s for s in layout.specs if s.name.startswith("model/"))
        difference = missing_and_surplus(
            StateLayout(specs=model_specs, total_bytes=0, digest="", text=""), wanted
        )
        if difference:
            raise StateError(f"model: the state does not fit: {difference}; use the same model")
        for name, tensor in self._model_tensors():
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
        for what, stored_count, count in (
            ("groups of parameters", len(scalars["groups"]), len(self._optimizer.param_groups)),
            ("schedulers", len(scalars["schedulers"]), len(self._schedulers)),
        ):
            if stored_count != count:
                raise StateError(
                    f"optimizer: the state has {stored_count} {what}, this script {count}; use as "
                    f"many, or another checkpoint path"
                )
        known = set(self._names.values())
        for name in by_group["optimizer"]:
            if name.rpartition(".")[0] not in known:
                raise StateError(f"optimizer/{name}: the model has no such parameter")
        for name in scalars.get("extra", {}):
            if name not in self._extra:
                raise StateError(
                    f"extra: the state holds {name!r}, this script does not; pass it in extra="
                )

    # --- optimizer

    def _parameters(self) -> list[tuple[str, Any]]:
        return [
            (self._names[id(each)], each)
            for group in self._optimizer.param_groups
            for each in group["params"]
        ]

    def _optimizer_tensors(self) -> list[tuple[str, Any]]:
        return [
            (f"optimizer/{name}.{kind}", value)
            for name, parameter in self._parameters()
            for kind, value in self._optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor)
        ]

    def _optimizer_numbers(self) -> dict[str, Any]:
        return {
            f"{name}.{kind}": to_plain(f"optimizer/{name}.{kind}", value)
            for name, parameter in self._parameters()
            for kind, value in self._optimizer.state.get(parameter, {}).items()
            if not isinstance(value, torch.Tensor)
        }

    def _load_optimizer(
        self, specs: Mapping[str, StateTensor], source: Any, scalars: Mapping[str, Any]
    ) -> None:
        parameters = dict(self._parameters())
        kept: dict[str, dict[str, Any]] = {}
        for name, spec in specs.items():
            owner, _, kind = name.rpartition(".")
            live = self._optimizer.state.get(parameters[owner], {}).get(kind)
            if _is_same_kind(live, spec):
                _fill(live, source, spec)
            else:
                live = _made_for(parameters[owner], kind, _tensor(source, spec))
            kept.setdefault(owner, {})[kind] = live
        for name, value in scalars["optimizer_numbers"].items():
            owner, _, kind = name.rpartition(".")
            kept.setdefault(owner, {})[kind] = from_plain(value)
        for name, parameter in parameters.items():
            if name in kept:
                self._optimizer.state[parameter] = kept[name]
            else:  # a warm-up step or a later step made it
                self._optimizer.state.pop(parameter, None)

    # --- extra objects

    def _extra_tensors(self) -> list[tuple[str, Any]]:
        return [
            (f"extra/{name}/{path}", value)
            for name, thing in self._extra.items()
            for path, value in nested(name, thing).items()
            if _is_tensor(value)
        ]

    def _load_extra(
        self, specs: Mapping[str, StateTensor], source: Any, plain: Mapping[str, Any]
    ) -> None:
        for name, thing in self._extra.items():
            flat = {path: from_plain(value) for path, value in plain.get(name, {}).items()}
            for path, spec in specs.items():
                owner, _, rest = path.partition("/")
                if owner == name:
                    flat[rest] = _tensor(source, spec)
            if flat:
                thing.load_state_dict(unflatten(flat))


def terms_of(model: Any, optimizer: Any, device: Any) -> dict[str, Any]:
    """Return what has to be the same of a model and its optimizer on all ranks, as JSON types.

    Values of parameters are not among it: all ranks begin with those of one. Nor is what a
    scheduler may have changed since the start.
    """
    return {
        "model": [
            f"{name} {dtype_name(each)} {list(each.shape)}" + " frozen" * (not each.requires_grad)
            for name, each in model.named_parameters()
        ],
        "optimizer": [
            type(optimizer).__name__,
            *(f"{name}={value!r}" for name, value in sorted(optimizer.defaults.items())),
            *(f"group of {len(group['params'])}" for group in optimizer.param_groups),
        ],
        "device": "CPU" if device.type == "cpu" else "GPU",
    }


def dtype_name(tensor: Any) -> str:
    """Return "float32" and the like of a tensor or an array."""
    return str(tensor.dtype).removeprefix("torch.")


def _copy_bytes(address: int, tensor: Any, first: int, last: int) -> None:
    """Copy a tensor's or an array's bytes from `first` to `last` to `address`."""
    if isinstance(tensor, np.ndarray):
        tensor = torch.from_numpy(np.ascontiguousarray(tensor))
    tensor = tensor.detach()
    if tensor.device.type != "cpu":  # only what is wanted crosses the bus
        item = tensor.element_size()
        tensor = tensor.flatten()[first // item : last // item].cpu()
        last, first = last - first, 0
    tensor = tensor.contiguous()
    ctypes.memmove(address, tensor.data_ptr() + first, last - first)


def _fill(tensor: Any, source: Any, spec: StateTensor) -> None:
    if spec.size_bytes == 0:
        return
    tensor = tensor.detach()
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        piece = source[spec.offset : spec.offset + spec.size_bytes]
        ctypes.memmove(tensor.data_ptr(), piece.ctypes.data, spec.size_bytes)
    else:
        tensor.copy_(_tensor(source, spec))


def _tensor(source: Any, spec: StateTensor) -> Any:
    """Return a copy of a tensor's bytes as a tensor on the host."""
    piece = source[spec.offset : spec.offset + spec.size_bytes].copy()
    dtype = getattr(torch, spec.dtype)
    if not piece.size:
        return torch.empty(spec.shape, dtype=dtype)
    return torch.from_numpy(piece).view(dtype).reshape(spec.shape)


def _is_same_kind(live: Any, spec: StateTensor) -> bool:
    return (
        isinstance(live, torch.Tensor)
        and dtype_name(live) == spec.dtype
        and tuple(live.shape) == spec.shape
    )


def _made_for(parameter: Any, kind: str, value: Any) -> Any:
    """Return a stored tensor where and as an optimizer would have made it for its parameter."""
    if kind == "step" or value.shape != parameter.shape:  # optimizers count on the host
        return value
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value).detach()


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray)


def _plain_options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: to_plain(f"optimizer: {name}", value)
        for name, value in group.items()
        if name not in ("params", "param_names")
    }


def to_plain(name: str, value: Any) -> Any:
    """Return `value` as JSON types; numbers keep all their digits.

    Raises:
        StateError: it is none of those.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return {_PAIRS: "tensor", "dtype": dtype_name(value), "value": value.item()}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and _PAIRS not in value:
            return {key: to_plain(f"{name}.{key}", item) for key, item in value.items()}
        kind = "counter" if isinstance(value, Counter) else "dict"
        pairs = [[to_plain(name, key), to_plain(name, item)] for key, item in value.items()]
        return {_PAIRS: kind, "value": pairs}
    if isinstance(value, tuple):
        return {_PAIRS: "tuple", "value": [to_plain(name, item) for item in value]}
    if isinstance(value, list):
        return [to_plain(name, item) for item in value]
    raise StateError(f"{name}: a {type(value).__name__} cannot be stored; use numbers or tensors")


def from_plain(value: Any) -> Any:
    """Return what `to_plain` was given."""
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if _PAIRS not in value:
        return {key: from_plain(item) for key, item in value.items()}
    inner = value["value"]
    match value[_PAIRS]:
        case "tensor":
            return torch.tensor(inner, dtype=getattr(torch, value["dtype"]))
        case "tuple":
            return tuple(from_plain(item) for item in inner)
        case kind:
            made = {from_plain(key): from_plain(item) for key, item in inner}
            return Counter(made) if kind == "counter" else made
