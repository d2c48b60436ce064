"""The state of a PyTorch training."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from pod_runtime.trainer.errors import StateError, UsageError
from pod_runtime.trainer.frameworks.base_state import (
    KEPT,
    BaseState,
    check_schedulers,
    kind_of_scheduler,
    parameter_and_kind,
)
from pod_runtime.trainer.frameworks.buffers import OwnBuffers
from pod_runtime.trainer.frameworks.plain_values import (
    flattened,
    holds_tensors,
    own_copy,
    unflatten,
)
from pod_runtime.trainer.frameworks.torch import tensors
from pod_runtime.trainer.frameworks.torch.tensors import (
    dtype_name,
    fill,
    fingerprint,
    from_plain,
    make_tensor,
    of_model,
    plain_name,
    to_plain,
)
from pod_runtime.trainer.frameworks.torch.traits import TorchTraits, has_extra_state
from pod_runtime.trainer.frameworks.unowned import UnownedParameters, other_parameters
from pod_runtime.trainer.layout import StateLayout, StateTensor

_LAYER = "layer "  # begins the name of what a layer keeps beside its tensors
_NO_OPTIONS = frozenset(("params", "param_names"))  # of a group


class TorchState(BaseState):
    """Model, optimizer, schedulers, loss scaler and extra objects, seen as one state."""

    def __init__(
        self,
        model: Any,
        optimizers: Sequence[Any],
        schedulers: Sequence[Any],
        buffers: OwnBuffers,
        unowned: UnownedParameters,
        scaler: Any | None,
        extra: Mapping[str, Any],
    ) -> None:
        self._torch_optimizers = [
            TorchOptimizer(model, each, [one for one in schedulers if one.optimizer is each])
            for each in optimizers
        ]
        super().__init__(
            tensors,
            self._torch_optimizers,
            TorchTraits(model, optimizers),
            buffers,
            unowned,
            scaler,
            {
                **{name: _with_rates(each) for name, each in extra.items()},
                **{f"{_LAYER}{plain_name(name)}": LayerState(each)
                   for name, each in model.named_modules() if has_extra_state(each)},
            },
        )  # fmt: skip
        self._model = model
        self.layout()  # types that cannot be stored are refused now, as plain values are

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within it the model evaluates: no gradients, evaluation mode."""
        with self._traits.evaluating(), torch.no_grad(), self._buffers.kept():
            yield

    def load(self, layout: StateLayout, data: memoryview, scalars: Mapping[str, Any]) -> None:
        # A prepared trainer gets it where its script asks first, as by `loop.evaluate`: perhaps in
        # a function in inference mode, whose tensors no optimizer could change later.
        with torch.inference_mode(False):
            super().load(_plain_layout(layout), data, _plain_scalars(scalars))
            self._compute_weights()

    def note_committed(self, *, of_epoch: bool = False) -> None:
        if of_epoch:
            self._compute_weights()
        super().note_committed(of_epoch=of_epoch)

    def fingerprints(self, *, of_model: bool) -> dict[str, float]:
        found = super().fingerprints(of_model=of_model)
        if of_model:  # some optimizers deal the parameters out to the ranks, as Muon does
            for each in self._torch_optimizers:
                found |= each.fingerprints()
        return found

    def _compute_weights(self) -> None:
        """Compute the weights that layers have from parameters, as their next forward pass does.

        What is pruned next is found in them; a rank without a shard has those of an earlier step.
        """
        for layer in self._model.modules():
            for hook in layer._forward_pre_hooks.values():
                if isinstance(hook, BasePruningMethod | WeightNorm):
                    name = hook.name if isinstance(hook, WeightNorm) else hook._tensor_name
                    # As the last forward pass had it: only what has no gradients can be copied.
                    with torch.set_grad_enabled(getattr(layer, name).requires_grad):
                        hook(layer, ())

    def _model_tensors(self) -> list[tuple[str, Any]]:
        return [(f"model/{name}", each) for name, each in of_model(self._model).items()]

    def _load_scaler(self, plain: Mapping[str, Any]) -> None:
        assert self._scaler is not None
        self._scaler.load_state_dict(from_plain(plain))

    def _load_object(self, thing: Any, state: dict[str, Any]) -> None:
        thing.load_state_dict(state)


class LayerState:
    """What a layer keeps beside its tensors (`get_extra_state`), as an object of its own."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def state_dict(self) -> dict[str, Any]:
        return {"extra_state": self._layer.get_extra_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._layer.set_extra_state(state["extra_state"])


class SchedulerBeside:
    """A scheduler in `extra=`, with the options of its optimizer, which no loop has.

    Most of PyTorch's compute a rate from the one before, which stands there.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def state_dict(self) -> dict[str, Any]:
        groups = [
            {name: value for name, value in group.items() if name not in _NO_OPTIONS}
            for group in self._scheduler.optimizer.param_groups
        ]
        return {"scheduler": self._scheduler.state_dict(), "groups": groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._scheduler.load_state_dict(state["scheduler"])
        groups = self._scheduler.optimizer.param_groups
        for group, options in zip(groups, state["groups"], strict=True):
            group.update(options)


class TorchOptimizer:
    """The state of one optimizer and its schedulers."""

    def __init__(self, model: Any, optimizer: Any, schedulers: Sequence[Any]) -> None:
        """
        Raises:
            UsageError: it has a parameter that the model does not have.
        """
        self.kind = type(optimizer).__name__
        self._optimizer = optimizer
        self._schedulers = list(schedulers)
        base = torch.optim.lr_scheduler.LRScheduler
        self._scheduler_kinds = [kind_of_scheduler(each, base) for each in self._schedulers]
        # Groups and schedulers' states as they were at the last commit; None: there was none.
        self._committed: tuple[list[dict[str, Any]], list[dict[str, Any]], list[list[str]]] | None
        self._committed = None
        self._names = {id(each): plain_name(name) for name, each in model.named_parameters()}
        # Options that are tensors, as the script has built them: it may fill these in place.
        self._built_tensors = [
            {name: each for name, each in group.items() if isinstance(each, torch.Tensor)}
            for group in optimizer.param_groups
        ]
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in self._names:
                    raise UsageError(
                        f"optimizer: a parameter of shape {list(parameter.shape)} is not one of "
                        f"the model's; put all layers that are trained into one torch.nn.Module "
                        f"and pass that"
                    )

        plain = self._plain(*self._now())
        parts = [(f"group {i}: " if i else "", each) for i, each in enumerate(plain["groups"])]
        kinds = [f"{type(each).__name__}: " for each in self._schedulers]
        parts += zip(kinds, plain["schedulers"], strict=True)
        self.built: dict[str, Any] = {
            f"{whose}{name}": value for whose, options in parts for name, value in options.items()
        }

    def owned(self) -> set[str]:
        """Return which of the model's parameters the optimizer has."""
        return {name for name, _parameter in self._parameters()}

    def tensors(self) -> list[tuple[str, Any]]:
        """Return what it keeps of parameters, by "<parameter>.<what it is>"."""
        return [(name, value) for name, value in self._kept() if isinstance(value, torch.Tensor)]

    def fingerprints(self) -> dict[str, float]:
        """Return a number of each parameter, by what is kept of it; of as many on all ranks.

        Of what has the parameter's shape: other parts, as a basis, may follow from rounding.
        """
        parameters = dict(self._parameters())
        found = dict.fromkeys((f"{KEPT}{name}" for name in parameters), 0.0)
        for name, _kind, value in self._state():
            if isinstance(value, torch.Tensor) and value.shape == parameters[name].shape:
                found[f"{KEPT}{name}"] += fingerprint(value)
        return found

    def note_committed(self) -> None:
        """Remember options and schedulers as they are."""
        groups, schedulers, filled = self._now()
        self._committed = groups, own_copy(schedulers), filled

    def sizes(self) -> list[int]:
        """Return how many parameters each of its groups has."""
        return [len(group["params"]) for group in self._optimizer.param_groups]

    def _now(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[list[str]]]:
        groups = [
            {name: own_copy(value) for name, value in group.items() if name not in _NO_OPTIONS}
            for group in self._optimizer.param_groups
        ]
        filled = [
            sorted(name for name, each in built.items() if group.get(name) is each)
            for built, group in zip(self._built_tensors, self._optimizer.param_groups, strict=False)
        ]
        return groups, [each.state_dict() for each in self._schedulers], filled

    def scalars(self, *, committed: bool = False) -> dict[str, Any]:
        """Return options, numbers and schedulers, as JSON types."""
        now = (self._committed if committed else None) or self._now()
        return {
            "optimizer": self.kind,
            "scheduler_kinds": self._scheduler_kinds,
            "built": self.built,
            "optimizer_numbers": self._numbers(),
            "optimizer_nested": [
                f"{name}.{kind}" for name, kind, value in self._state() if _is_nested(value)
            ],
            **self._plain(*now),
        }

    def _plain(
        self,
        groups: list[dict[str, Any]],
        schedulers: list[dict[str, Any]],
        filled: list[list[str]],
    ) -> dict[str, list[Any]]:
        """Return groups and schedulers as JSON types."""
        return {
            "filled": filled,
            "groups": [_plain_options(group) for group in groups],
            "schedulers": [
                to_plain(type(each).__name__, state)
                for each, state in zip(self._schedulers, schedulers, strict=True)
            ],
        }

    def check(self, names: Collection[str], scalars: Mapping[str, Any]) -> None:
        """Check that a state with these tensors fits. Raises StateError."""
        for what, stored_count, count in (
            ("groups of parameters", len(scalars["groups"]), len(self._optimizer.param_groups)),
            ("schedulers", len(scalars["schedulers"]), len(self._schedulers)),
        ):
            if stored_count != count:
                raise StateError(
                    f"optimizer: the state has {stored_count} {what}, this script {count}; use as "
                    f"many, or another checkpoint path"
                )
        check_schedulers(scalars.get("scheduler_kinds"), self._scheduler_kinds)
        known = {name for name, _parameter in self._parameters()}
        for name in names:
            if parameter_and_kind(name, known)[0] not in known:
                raise StateError(f"optimizer/{name}: the optimizer has no such parameter")

    def load(
        self, specs: Mapping[str, StateTensor], source: Any, scalars: Mapping[str, Any]
    ) -> None:
        """Take over what it keeps of parameters."""
        parameters = dict(self._parameters())
        counting = {
            self._names[id(each)]
            for group in self._optimizer.param_groups
            if group.get("capturable") or group.get("fused")
            for each in group["params"]
        }
        kept: dict[str, dict[str, Any]] = {}
        parts: dict[str, dict[str, Any]] = {
            name: {} for name in scalars.get("optimizer_nested", ())
        }
        for name, spec in specs.items():
            owner, kind = parameter_and_kind(name, parameters)
            if (whole := _whole(name, parts)) is not None:
                made = make_tensor(source, spec).to(parameters[owner].device)
                parts[whole][name.removeprefix(whole)] = made
                continue
            live = self._optimizer.state.get(parameters[owner], {}).get(kind)
            if _is_same_kind(live, spec):
                fill(live, source, spec)
            else:
                made = make_tensor(source, spec)
                live = _made_for(parameters[owner], kind, made, counts_there=owner in counting)
            kept.setdefault(owner, {})[kind] = live
        for name, value in scalars["optimizer_numbers"].items():
            if (whole := _whole(name, parts)) is not None:
                parts[whole][name.removeprefix(whole)] = from_plain(value)
                continue
            owner, kind = parameter_and_kind(name, parameters)
            kept.setdefault(owner, {})[kind] = from_plain(value)
        for name, flat in parts.items():
            owner, kind = parameter_and_kind(name, parameters)
            kept.setdefault(owner, {})[kind] = unflatten(flat)
        for name, parameter in parameters.items():
            if name in kept:
                self._optimizer.state[parameter] = kept[name]
            else:  # a warm-up step or a later step made it
                self._optimizer.state.pop(parameter, None)

    def load_plain(self, scalars: Mapping[str, Any]) -> None:
        """Take over options and schedulers."""
        groups = self._optimizer.param_groups
        filled = scalars.get("filled", [()] * len(groups))
        for group, built, names, options in zip(
            groups, self._built_tensors, filled, scalars["groups"], strict=True
        ):
            for name, value in from_plain(options).items():
                mine = built.get(name) if name in names else None
                if isinstance(value, torch.Tensor) and mine is not None:
                    # The script, or another group, holds it, too, and has not put another there.
                    mine.detach().copy_(value.reshape(mine.shape))
                    group[name] = mine
                else:
                    group[name] = value
        for scheduler, state in zip(self._schedulers, scalars["schedulers"], strict=True):
            scheduler.load_state_dict(from_plain(state))

    def _parameters(self) -> list[tuple[str, Any]]:
        """
        Raises:
            UsageError: the script has put another one in the place of one of them.
        """
        found = []
        for group in self._optimizer.param_groups:
            for each in group["params"]:
                if id(each) not in self._names:
                    raise UsageError(other_parameters([f"parameter of {list(each.shape)}"]))
                found.append((self._names[id(each)], each))
        return found

    def _numbers(self) -> dict[str, Any]:
        return {
            name: to_plain(f"optimizer/{name}", value)
            for name, value in self._kept()
            if not isinstance(value, torch.Tensor)
        }

    def _kept(self) -> Iterator[tuple[str, Any]]:
        """Yield what it keeps of parameters, by "<parameter>.<what it is>".

        The parts of what has tensors within, as lists of preconditioners, by their paths.
        """
        for name, kind, value in self._state():
            if _is_nested(value):
                whole = f"{name}.{kind}"
                for path, each in flattened(f"optimizer/{whole}", value).items():
                    _check_is_plain(whole, each)
                    yield f"{whole}{path if path.startswith('/') else f'/{path}'}", each
            else:
                yield f"{name}.{kind}", value

    def _state(self) -> Iterator[tuple[str, str, Any]]:
        """Yield a parameter's name, what it keeps of it, and that.

        Raises:
            StateError: the optimizer calls it by something else than a text, or it has no memory.
        """
        for name, parameter in self._parameters():
            for kind, value in self._optimizer.state.get(parameter, {}).items():
                if not isinstance(kind, str):
                    raise StateError(
                        f"optimizer/{name}: its state has the key {kind!r}, and could not be "
                        f"loaded again; use texts as keys"
                    )
                _check_is_plain(f"{name}.{kind}", value)
                yield name, kind, value


def _with_rates(thing: Any) -> Any:
    is_scheduler = isinstance(thing, torch.optim.lr_scheduler.LRScheduler)
    return SchedulerBeside(thing) if is_scheduler else thing


def numbers_of_scheduler(scheduler: Any, optimizers: Sequence[Any]) -> dict[str, float]:
    """Return what tells how far a scheduler has come; of those of these optimizers, none."""
    own = getattr(scheduler, "optimizer", None)
    is_own = any(own is each for each in optimizers)
    if is_own or not hasattr(scheduler, "last_epoch"):  # of ChainedScheduler its parts have it
        return {}
    return {"last_epoch": float(scheduler.last_epoch)}


def _plain_layout(layout: StateLayout) -> StateLayout:
    """Return the layout of a state by the names that it would have if no layer was compiled.

    States of an older version have the others.
    """
    specs = tuple(replace(each, name=_plain_path(each.name)) for each in layout.specs)
    return layout if specs == layout.specs else replace(layout, specs=specs)


def _plain_scalars(scalars: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(scalars)
    if "optimizers" in found:
        found["optimizers"] = [_plain_numbers(each) for each in found["optimizers"]]
    else:
        found = _plain_numbers(found)
    if "extra" in found:
        found["extra"] = {
            _plain_path(f"extra/{name}").removeprefix("extra/"): value
            for name, value in found["extra"].items()
        }
    found["arrays"] = [_plain_path(name) for name in found.get("arrays", ())]
    return found


def _plain_numbers(scalars: Mapping[str, Any]) -> dict[str, Any]:
    numbers = scalars["optimizer_numbers"].items()
    return {**scalars, "optimizer_numbers": {plain_name(name): each for name, each in numbers}}


def _plain_path(path: str) -> str:
    """Return "<group>/<name>", or "extra/<object>/<what it keeps>", with a plain name."""
    group, _, name = path.partition("/")
    if group != "extra":
        return f"{group}/{plain_name(name)}"
    owner, _, rest = name.partition("/")
    if owner.startswith(_LAYER):
        owner = plain_name(owner)
    return "/".join((group, owner, rest)) if rest else f"{group}/{owner}"


def terms_of(model: Any, optimizers: Sequence[Any], device: Any) -> dict[str, Any]:
    """Return what has to be the same of a model and its optimizers on all ranks, as JSON types.

    Values of parameters are not among it: all ranks begin with those of one. Nor is what a
    scheduler may have changed since the start.
    """
    return {
        "model": [
            f"{name} {dtype_name(each)} {list(each.shape)}" + " frozen" * (not each.requires_grad)
            for name, each in model.named_parameters()
        ],
        "optimizer": [said for each in optimizers for said in _numbers_of(each)],
        "device": "CPU" if device.type == "cpu" else "GPU",
    }


def _numbers_of(optimizer: Any) -> list[str]:
    return [
        type(optimizer).__name__,
        *(f"{name}={value!r}" for name, value in sorted(optimizer.defaults.items())),
        *(f"group of {len(group['params'])}" for group in optimizer.param_groups),
    ]


def _check_is_plain(name: str, value: Any) -> None:
    """Raises StateError: a tensor has no memory of its own, but is made of others."""
    if is_traceable_wrapper_subclass(value):
        raise StateError(
            f"optimizer/{name}: a {type(value).__name__} is made of other tensors, and cannot be "
            f"stored; take an optimizer that keeps plain tensors, as those of torch.optim do"
        )


def _is_nested(value: Any) -> bool:
    """Whether it is a container with tensors within."""
    return isinstance(value, list | tuple | Mapping) and holds_tensors([value])


def _whole(name: str, wholes: Collection[str]) -> str | None:
    """Return of which of these a name is a part; None: of none."""
    whole = name.partition("/")[0]
    return whole if "/" in name and whole in wholes else None


def _is_same_kind(live: Any, spec: StateTensor) -> bool:
    return (
        isinstance(live, torch.Tensor)
        and dtype_name(live) == spec.dtype
        and tuple(live.shape) == spec.shape
    )


def _made_for(parameter: Any, kind: str, value: Any, *, counts_there: bool) -> Any:
    """Return a stored tensor where and as an optimizer would have made it for its parameter.

    Args:
        counts_there: steps are counted where the parameter is, as `fused` and `capturable` want it.
    """
    if kind == "step":
        return value.to(parameter.device) if counts_there else value
    if value.shape != parameter.shape:
        return value.to(parameter.device)
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value).detach()


def _plain_options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: to_plain(f"optimizer: {name}", value) for name, value in group.items()}
