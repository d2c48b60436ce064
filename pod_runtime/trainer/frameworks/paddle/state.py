"""The state of a Paddle training.

Paddle names accumulators after automatically numbered parameters (`linear_0.w_0_moment1_0`), which
differ as soon as a model is built in another order. Here they go by the parameter's place in the
model: `optimizer/features.0.weight.moment1`.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

import numpy as np
import paddle

from pod_runtime.trainer.errors import StateError, UsageError
from pod_runtime.trainer.frameworks.base_state import (
    BaseState,
    check_schedulers,
    kind_of_scheduler,
)
from pod_runtime.trainer.frameworks.buffers import OwnBuffers
from pod_runtime.trainer.frameworks.paddle import tensors
from pod_runtime.trainer.frameworks.paddle.tensors import (
    dtype_name,
    fill,
    from_plain,
    make_tensor,
    of_model,
    running_statistics,
    to_plain,
)
from pod_runtime.trainer.frameworks.paddle.traits import (
    MADE_ACCUMULATORS,
    RESTARTS,
    PaddleTraits,
    held_schedulers,
)
from pod_runtime.trainer.frameworks.plain_values import own_copy
from pod_runtime.trainer.frameworks.unowned import UnownedParameters
from pod_runtime.trainer.layout import StateTensor

_MASTER = "master_weight"
_NUMBER = "a number", None  # in place of a schedule
_SUFFIX = re.compile(r"_\d+\Z")


class PaddleState(BaseState):
    """Model, optimizer, loss scaler and extra objects, seen as one state."""

    _RESHAPED = ("extra/",)

    def __init__(
        self,
        model: Any,
        optimizers: Sequence[Any],
        buffers: OwnBuffers,
        unowned: UnownedParameters,
        scaler: Any | None,
        extra: Mapping[str, Any],
    ) -> None:
        self._paddle_optimizers = [PaddleOptimizer(model, each) for each in optimizers]
        self._schedules = self._schedules_now()  # as built; then as at the first step
        self._has_begun = False  # the script has come to its first step
        super().__init__(
            tensors,
            self._paddle_optimizers,
            PaddleTraits(model, optimizers),
            buffers,
            unowned,
            scaler,
            extra,
        )
        self._statistics = running_statistics(model)
        self._of_model = [(f"model/{name}", t) for name, t in of_model(model).items()]
        self.layout()  # types that cannot be stored are refused now, as plain values are

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within it the model evaluates: no gradients, evaluation mode."""
        kept = self._buffers.kept(self._statistics)
        with self._traits.evaluating(), paddle.no_grad(), kept:
            yield

    def uncarried_changes(self) -> list[str]:
        if not self._has_begun:  # the script has come to its first step
            self._has_begun = True
            now = self._schedules_now()
            # A state of a schedule is refused where the optimizer is built with a number.
            pairs = zip(self._schedules, now, strict=True)
            self._schedules = [built if _NUMBER in (built, each) else each for built, each in pairs]
        return super().uncarried_changes()

    def note_committed(self, *, of_epoch: bool = False) -> None:
        if self._has_begun:
            self._check_schedules()
        super().note_committed(of_epoch=of_epoch)

    def load_rates(self, scalars: Mapping[str, Any]) -> None:
        """Take over learning rates and schedules alone."""
        for optimizer, _specs, plain in self._parts({}, scalars):
            optimizer.load_plain(plain)

    def _schedules_now(self) -> list[tuple[str, Any]]:
        return [each.schedule() for each in self._paddle_optimizers]

    def _check_schedules(self) -> None:
        for before, now in zip(self._schedules, self._schedules_now(), strict=True):
            if before != now:
                raise UsageError(
                    f"optimizer: it has another schedule ({now[0]}) than the training has begun "
                    f"with ({before[0]}): a trainer that starts later would go on by that, or not "
                    f"at all. Give the optimizer its schedule before Loop(...). Where another is "
                    f"to follow, write one that knows both (a paddle.optimizer.lr.LRScheduler may "
                    f"hold others), or end this Loop there (epochs=), and go on in a second one, "
                    f"with a checkpoint= of its own"
                )

    def _model_tensors(self) -> list[tuple[str, Any]]:
        return self._of_model

    def _load_scaler(self, plain: Mapping[str, Any]) -> None:
        state = from_plain(plain)
        state["scale"] = np.array(state["scale"], np.float32).reshape(1)
        assert self._scaler is not None
        self._scaler.load_state_dict(state)

    def _load_object(self, thing: Any, state: dict[str, Any]) -> None:
        thing.set_state_dict(state)


class PaddleOptimizer:
    """The state of one optimizer and its scheduler."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        """
        Raises:
            UsageError: it has a parameter that the model does not have.
        """
        self.kind = type(optimizer).__name__
        self._optimizer = optimizer
        self._structured = {p.name: name for name, p in model.named_parameters()}
        self._names: dict[str, str] = {}  # accumulator's variable name -> structured name
        self._committed: dict[str, Any] | None = None  # None: nothing was noted
        for parameter in optimizer_parameters(optimizer):
            if parameter.name not in self._structured:
                raise UsageError(
                    f"optimizer: its parameter {parameter.name} is not one of the model's; put "
                    f"all layers that are trained into one paddle.nn.Layer and pass that"
                )

        scheduler, base = self._scheduler(), paddle.optimizer.lr.LRScheduler
        self._scheduler_kinds = [] if scheduler is None else [kind_of_scheduler(scheduler, base)]
        # Of a scheduler a state holds how far it has come, and no options.
        rate = self._now()
        self.built: dict[str, Any] = rate if "lr" in rate else {}

    def owned(self) -> set[str]:
        """Return which of the model's parameters the optimizer has."""
        return {self._structured[each.name] for each in optimizer_parameters(self._optimizer)}

    def tensors(self) -> list[tuple[str, Any]]:
        """Return accumulators and master weights, by "<parameter>.<what it is>"."""
        found = []
        for variable, value in self._state().items():
            if variable == "LR_Scheduler":
                continue
            if variable == "master_weights":
                found += [
                    (f"{self._structured[name]}.{_MASTER}", tensor)
                    for name, tensor in value.items()
                ]
            else:
                found.append((self._structured_name(variable), value))
        return sorted(found, key=itemgetter(0))  # in whichever order steps have made them

    def note_committed(self) -> None:
        """Remember the scheduler's state or the learning rate as it is."""
        self._committed = own_copy(self._now())

    def schedule(self) -> tuple[str, Any]:
        """Return the kind of its schedule, and the code of the function of a LambdaDecay."""
        rate = self._scheduler()
        if rate is None:
            return _NUMBER
        code = getattr(getattr(rate, "lr_lambda", None), "__code__", None)
        return type(rate).__name__, code

    def sizes(self) -> list[int]:
        """Return how many parameters each of its groups has."""
        groups = getattr(self._optimizer, "_param_groups", None) or []
        return [len(each["params"]) if isinstance(each, dict) else 1 for each in groups]

    def _now(self) -> dict[str, Any]:
        scheduler = self._scheduler()
        if scheduler is None:
            return {"lr": float(self._optimizer.get_lr())}
        return states_of_scheduler(scheduler)

    def scalars(self, *, committed: bool = False) -> dict[str, Any]:
        """Return the scheduler's state or the learning rate, as JSON types."""
        found = (self._committed if committed else None) or self._now()
        return {
            "optimizer": self.kind,
            "scheduler_kinds": self._scheduler_kinds,
            "built": self.built,
            **{name: to_plain(name, value) for name, value in found.items()},
        }

    def check(self, names: Collection[str], scalars: Mapping[str, Any]) -> None:
        """Check that a state with these tensors fits. Raises StateError."""
        if ("lr_scheduler" in scalars) != (self._scheduler() is not None):
            raise StateError(
                "optimizer: the state and this script differ in whether the learning rate is a "
                "scheduler; use the same, or another checkpoint path"
            )
        check_schedulers(scalars.get("scheduler_kinds"), self._scheduler_kinds)
        known = set(self._structured.values())
        for name in names:
            if name.rpartition(".")[0] not in known:
                raise StateError(f"optimizer/{name}: the model has no such parameter")

    def load(
        self, specs: Mapping[str, StateTensor], source: Any, scalars: Mapping[str, Any]
    ) -> None:
        """Take over accumulators and master weights."""
        kept = [name.rpartition(".") for name in specs]
        self._make_accumulators({owner for owner, _, kind in kept if kind != _MASTER})
        self._drop_surplus(specs)
        if self._fill(specs, source):
            return
        live = {
            self._structured_name(variable): variable
            for variable in self._state()
            if variable not in ("LR_Scheduler", "master_weights")
        }
        names = {structured: name for name, structured in self._structured.items()}
        state: dict[str, Any] = {}
        master: dict[str, Any] = {}
        for name, spec in specs.items():
            structured, _, kind = name.rpartition(".")
            if kind == _MASTER:
                tensor = master[names[structured]] = make_tensor(source, spec)
                tensor.name = f"{names[structured]}_fp32_master_0"
            else:
                # A fresh process numbers the first accumulator of a kind 0.
                variable = live.get(name, f"{names[structured]}_{kind}_0")
                state[variable] = make_tensor(source, spec)
        if master:
            state["master_weights"] = master
        if "lr_scheduler" in scalars:
            state["LR_Scheduler"] = from_plain(scalars["lr_scheduler"])
        self._optimizer.set_state_dict(state)

    def load_plain(self, scalars: Mapping[str, Any]) -> None:
        """Take over scheduler or learning rate."""
        scheduler = self._scheduler()
        if scheduler is not None:
            load_scheduler(scheduler, scalars)
        elif "lr" in scalars and scalars["lr"] != float(self._optimizer.get_lr()):
            self._optimizer.set_lr(scalars["lr"])

    def _scheduler(self) -> Any | None:
        rate = self._optimizer._learning_rate
        return rate if isinstance(rate, paddle.optimizer.lr.LRScheduler) else None

    def _state(self) -> dict[str, Any]:
        """Return the optimizer's state, also what was loaded and no step has used yet.

        Paddle keeps that elsewhere, for each parameter until its first step: a frozen one's long.
        """
        state: dict[str, Any] = self._optimizer.state_dict()
        for name, value in self._optimizer._accumulators_holder.items():
            state.setdefault(name, value)
        return state

    def _structured_name(self, variable: str) -> str:
        known = self._names.get(variable)
        if known is None:
            owner = variable.rpartition("_")[0]
            while owner and owner not in self._structured:
                owner = owner.rpartition("_")[0]
            if not owner:
                raise StateError(f"optimizer: {variable} belongs to no parameter of the model")
            kind = _SUFFIX.sub("", variable[len(owner) + 1 :])
            known = self._names[variable] = f"{self._structured[owner]}.{kind}"
        return known

    def _make_accumulators(self, owners: Collection[str]) -> None:
        """Make the accumulators of these parameters; of an optimizer without such, nothing.

        Paddle would make them at its next step, from what was laid aside by names: it refuses a
        parameter that was frozen so far, as it has nothing there, and numbers accumulators anew
        where an optimizer before this one had the parameter.
        """
        mine = optimizer_parameters(self._optimizer)
        stateful = [each for each in mine if self._structured[each.name] in owners]
        if stateful:
            self._optimizer._accumulators_holder = {}
            if self._optimizer.helper is None:  # Paddle 2.6 makes it at the first step alone
                kind = type(self._optimizer).__name__
                self._optimizer.helper = paddle.base.layer_helper.LayerHelper(kind)
            block = paddle.base.framework.default_main_program().global_block()
            self._optimizer._create_accumulators(block, stateful)

    def _drop_surplus(self, specs: Mapping[str, StateTensor]) -> None:
        """Drop accumulators that the state lacks: a warm-up step or a later step made them."""
        for found in self._optimizer._accumulators.values():
            for name in list(found):
                if self._structured_name(found[name].name) not in specs:
                    del found[name]
                    for made in MADE_ACCUMULATORS:
                        getattr(self._optimizer, made, set()).discard(name)

    def _fill(self, specs: Mapping[str, StateTensor], source: Any) -> bool:
        """Overwrite the accumulators where they are; False: not all of them are there yet.

        An optimizer that has stepped has them all, and Paddle's own way copies them twice.
        """
        if not self._optimizer._accumulators:
            return False
        live = dict(self.tensors())
        if live.keys() != specs.keys() or any(
            not hasattr(tensor, "set_value")
            or dtype_name(tensor) != specs[name].dtype
            or tuple(tensor.shape) != specs[name].shape
            for name, tensor in live.items()
        ):
            return False
        for name, tensor in live.items():
            fill(tensor, source, specs[name])
        return True


def states_of_scheduler(scheduler: Any) -> dict[str, Any]:
    """Return how far a scheduler has come, and each that it is made of.

    Of those Paddle's `state_dict` has a LinearWarmup's alone.
    """
    held = {path: each.state_dict() for path, each in held_schedulers(scheduler).items()}
    return {"lr_scheduler": scheduler.state_dict(), **({"held_schedulers": held} if held else {})}


def load_scheduler(scheduler: Any, scalars: Mapping[str, Any]) -> None:
    """Have a scheduler go on from what `states_of_scheduler` gave, as JSON types."""
    _load_one(scheduler, from_plain(scalars["lr_scheduler"]))
    held = held_schedulers(scheduler)
    for path, state in scalars.get("held_schedulers", {}).items():
        if path in held:
            _load_one(held[path], from_plain(state))


def _load_one(scheduler: Any, state: Mapping[str, Any]) -> None:
    scheduler.set_state_dict(state)
    if isinstance(scheduler, RESTARTS):
        rate = scheduler.last_lr
        scheduler.step(scheduler.last_epoch)
        scheduler.last_lr = rate


def numbers_of_scheduler(scheduler: Any, optimizers: Sequence[Any]) -> dict[str, float]:
    """Return what tells how far a scheduler has come; of those that these optimizers have, none."""
    rates = [each._learning_rate for each in optimizers]
    own = [each for each in rates if isinstance(each, paddle.optimizer.lr.LRScheduler)]
    if any(scheduler in (each, *held_schedulers(each).values()) for each in own):
        return {}
    return {"last_epoch": float(scheduler.last_epoch)}


def optimizer_parameters(optimizer: Any) -> list[Any]:
    """Return the parameters of an optimizer, those of its groups included."""
    found: list[Any] = []
    # A group that is added later is in the second list only; without groups they are one.
    for entry in getattr(optimizer, "_param_groups", None) or optimizer._parameter_list or []:
        found += entry["params"] if isinstance(entry, dict) else [entry]
    return found


def terms_of(model: Any, optimizers: Sequence[Any], *, on_host: bool) -> dict[str, Any]:
    """Return what has to be the same of a model and its optimizers on all ranks, as JSON types.

    Values of parameters are not among it: all ranks begin with those of one.
    """
    return {
        "model": [
            f"{name} {dtype_name(each)} {list(each.shape)}" + " frozen" * each.stop_gradient
            for name, each in model.named_parameters()
        ],
        "optimizer": [
            said
            for optimizer in optimizers
            for said in (
                *_numbers_of(optimizer),
                *_numbers_of(getattr(optimizer, "_grad_clip", None)),
                type(getattr(optimizer, "_learning_rate", None)).__name__,
            )
        ],
        "device": "CPU" if on_host else "GPU",
    }


def _numbers_of(thing: Any) -> list[str]:
    """Return an object's type and the numbers that it was made with."""
    found = getattr(thing, "__dict__", {})
    numbers = sorted((name, value) for name, value in found.items() if type(value) is float)
    return [type(thing).__name__, *(f"{name.lstrip('_')}={value!r}" for name, value in numbers)]
