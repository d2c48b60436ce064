"""The parts for PyTorch, in this process: states, gradients, buffers, precision, refusals."""

import copy
import importlib.util
import json
import re
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn.utils import prune  # noqa: E402
from torch.optim import SGD, Optimizer, lr_scheduler  # noqa: E402
from torch.testing._internal.two_tensor import TwoTensor  # noqa: E402

from pod_runtime.trainer.errors import StateError, UsageError  # noqa: E402
from pod_runtime.trainer.frameworks.choose import make_framework  # noqa: E402
from pod_runtime.trainer.frameworks.framework import Framework, GroupSpec  # noqa: E402
from pod_runtime.trainer.frameworks.torch import gradients  # noqa: E402
from pod_runtime.trainer.frameworks.torch.framework import torch_framework  # noqa: E402
from pod_runtime.trainer.frameworks.torch.gradients import (  # noqa: E402
    TorchGradientExchange,
    TorchShardBuffers,
)
from pod_runtime.trainer.frameworks.torch.state import TorchOptimizer  # noqa: E402
from pod_runtime.trainer.frameworks.torch.tensors import (  # noqa: E402
    fingerprint,
    from_plain,
    make_tensor,
    to_plain,
)
from pod_runtime.trainer.frameworks.torch.traits import TorchTraits  # noqa: E402
from pod_runtime.trainer.layout import StateTensor  # noqa: E402

HEADER = 3


class Counts:
    """An object of the script's own that belongs to the state, as a moving average of weights."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"mean": torch.zeros(2), "deep": {"n": 0}, "name": "a"}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Rested(SGD):
    """An optimizer of a script's own, which counts its steps and leaves out every third one."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.count = 0

    def step(self, closure: Any = None) -> None:
        self.count += 1
        if self.count % 3:
            super().step()


class Lookahead(SGD):
    def __init__(self, inner: Any) -> None:
        super().__init__(inner.param_groups[0]["params"], lr=0.1)
        self.inner = inner


def take(framework: Framework) -> tuple[Any, bytearray, dict[str, Any]]:
    layout = framework.state.layout()
    data = bytearray(layout.total_bytes)
    framework.state.copy_out(memoryview(data))
    return layout, data, json.loads(json.dumps(framework.state.scalars()))


class Training:
    """A model with batch norm, and what trains it."""

    def __init__(self, kind: str, seed: int = 1, dtype: Any = torch.float32) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)
        ).to(dtype)
        self.scheduler: Any = None
        scaler, extra = None, {}
        halves = [
            {"params": self.model[0].parameters()},
            {"params": [*self.model[1].parameters(), *self.model[3].parameters()], "lr": 0.05},
        ]
        self.optimizer: Any
        match kind:
            case "momentum":
                self.optimizer = torch.optim.SGD(halves, lr=0.1, momentum=0.9)
            case "rested":
                self.optimizer = Rested(halves, lr=0.1)
            case "milestones":
                self.optimizer = torch.optim.Adam(halves, lr=0.1)
                self.scheduler = lr_scheduler.MultiStepLR(self.optimizer, [2, 4], 0.5)
                self.extra = Counts()
                extra = {"counts": self.extra}
            case "plateau":
                self.optimizer = torch.optim.AdamW(halves, lr=0.1, amsgrad=True)
                self.scheduler = lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=1)
            case "one cycle":
                self.optimizer = torch.optim.RMSprop(halves, lr=0.1, momentum=0.9)
                self.scheduler = lr_scheduler.OneCycleLR(self.optimizer, 0.2, total_steps=9)
            case "in sequence":
                self.optimizer = torch.optim.Adagrad(halves, lr=0.1)
                warmup = lr_scheduler.LinearLR(self.optimizer, 0.1, total_iters=2)
                later = lr_scheduler.CosineAnnealingLR(self.optimizer, 5)
                self.scheduler = lr_scheduler.SequentialLR(self.optimizer, [warmup, later], [2])
            case "scaler":
                self.optimizer = torch.optim.Adam(halves, lr=0.1)
                scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.framework = make_framework(
            self.model,
            self.optimizer,
            header_size=HEADER,
            schedulers=[] if self.scheduler is None else [self.scheduler],
            scaler=scaler,
            extra=extra,
        )
        self.dtype = dtype

    def step(self, seed: int) -> None:
        """One global batch of two shards, the second one short."""
        data = torch.from_numpy(np.random.RandomState(seed).randn(6, 4)).to(self.dtype)
        self.framework.step.begin()
        for piece in (data[:4], data[4:]):
            loss = (self.model(self.framework.data.to_batch(piece)) ** 2).mean()
            self.framework.step.backward(loss, len(piece) / 6)
            self.framework.step.end_shard()
        self.framework.step.exchange([0.0, 0.0, 6.0], True)
        self.framework.step.apply(filled_shards=2, lr_factor=1.0)
        if self.scheduler is not None:
            is_plateau = isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau)
            self.scheduler.step(*([1.0] if is_plateau else []))
        self.framework.state.note_committed()

    def take(self) -> tuple[Any, bytearray, dict[str, Any]]:
        return take(self.framework)

    def load(self, other: "Training") -> None:
        layout, data, scalars = other.take()
        self.framework.state.load(layout, memoryview(data), scalars)


KINDS = ["momentum", "rested", "milestones", "plateau", "one cycle", "in sequence", "scaler"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_that_is_carried_over_trains_on_bit_by_bit(kind, dtype):
    one, other = Training(kind, dtype=dtype), Training(kind, seed=2, dtype=dtype)
    for number in range(3):
        one.step(number)
    before = one.take()
    other.step(7)  # as a prepared trainer that has made more than a fresh one
    other.load(one)
    assert other.take()[1:] == before[1:]
    for number in range(3, 7):
        one.step(number)
        other.step(number)
    assert other.take()[1:] == one.take()[1:]
    assert one.take()[1] != before[1]


def test_a_state_that_comes_while_the_script_evaluates_in_inference_mode_trains_on():
    one, other = Training("milestones"), Training("milestones", seed=2)
    one.step(0)
    with torch.inference_mode():  # around a function of the script's that calls loop.evaluate
        other.load(one)
    for each in (one, other):
        each.step(1)
        each.extra.state["mean"] += 1
    assert other.take()[1:] == one.take()[1:]


def test_a_state_from_before_the_first_step_leaves_nothing_of_a_later_one():
    fresh, used = Training("momentum"), Training("momentum", seed=2)
    used.step(1)
    used.load(fresh)
    assert [spec.name for spec in used.take()[0].specs] == [
        spec.name for spec in fresh.take()[0].specs
    ]


def test_a_state_is_keyed_by_structured_names():
    training = Training("milestones")
    training.step(1)
    names = [spec.name for spec in training.framework.state.layout().specs]
    assert {"model/1.running_mean", "optimizer/3.weight.exp_avg", "optimizer/3.weight.step"} <= set(
        names
    )


def test_a_model_that_is_compiled_has_the_names_of_the_plain_one():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    framework = torch_framework(
        torch.compile(model, backend="eager"), optimizer, header_size=HEADER
    )
    assert [spec.name for spec in framework.state.layout().specs] == ["model/weight", "model/bias"]


def in_part(*, compiled: bool) -> tuple[Any, Any]:
    """Return a model that may be compiled in part, and its framework after two steps."""
    torch.manual_seed(1 + compiled)
    model = nn.Sequential(
        nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5)), Scaled3(), nn.Linear(3, 1)
    )
    if compiled:
        model[0] = torch.compile(model[0], backend="eager")
        model[1] = torch.compile(model[1], backend="eager")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    framework = torch_framework(model, optimizer, header_size=HEADER)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(4, 2)).mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    return model, framework


class Scaled3(nn.Linear):
    """Keeps a number in a way of its own."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.kept = [0]

    def get_extra_state(self) -> Any:
        return {"kept": self.kept[0]}

    def set_extra_state(self, state: Any) -> None:
        self.kept = [state["kept"]]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True), (True, True)])
def test_a_state_does_not_tell_whether_a_part_of_the_model_was_compiled(before, after, caplog):
    model, framework = in_part(compiled=before)
    part = model[0]._orig_mod if before else model[0]
    part[1].p = 0.25
    part.eval()
    kept = model[1]._orig_mod if before else model[1]
    kept.kept = [7]
    layout = framework.state.layout()
    names = [spec.name for spec in layout.specs]
    assert {"model/0.0.weight", "optimizer/0.0.weight.exp_avg"} <= {*names}
    assert not [name for name in names if "_orig_mod" in name]
    data = bytearray(layout.total_bytes)
    framework.state.copy_out(memoryview(data))
    scalars = json.loads(json.dumps(framework.state.scalars()))
    assert "_orig_mod" not in json.dumps(scalars)
    if before:  # as a version before this one has written it
        layout, scalars = with_compiled_names(layout, scalars)
    other, taking = in_part(compiled=after)
    taking.state.load(layout, memoryview(data), scalars)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
    part = other[0]._orig_mod if after else other[0]
    assert (part.training, part[1].training, part[1].p) == (False, False, 0.25)
    assert other.training
    assert (other[1]._orig_mod if after else other[1]).kept == [7]
    assert "does not have" not in caplog.text


def with_compiled_names(layout: Any, scalars: Any) -> tuple[Any, Any]:
    def named(text: str) -> str:
        text = re.sub(r"((?:model|optimizer|layer|parameter)/)([01])\b", r"\1\2._orig_mod", text)
        return text.replace("layer 1", "layer 1._orig_mod")

    specs = tuple(replace(each, name=named(each.name)) for each in layout.specs)
    traits = {named(owner): values for owner, values in scalars["traits"].items()}
    traits["layer/0"] = {"training": False}  # of what wraps it
    extra = {named(name): values for name, values in scalars["extra"].items()}
    return replace(layout, specs=specs), scalars | {"traits": traits, "extra": extra}


def test_tied_weights_and_a_layout_in_memory_of_their_own_are_carried():
    def made(seed: int) -> Any:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(5, 5), nn.Linear(5, 5))
        model[2].weight = model[1].weight
        return model.to(memory_format=torch.channels_last)

    models = [made(1), made(2)]
    one, other = [
        torch_framework(each, torch.optim.SGD(each.parameters(), lr=0.1), header_size=HEADER)
        for each in models
    ]
    layout = one.state.layout()
    data = bytearray(layout.total_bytes)
    one.state.copy_out(memoryview(data))
    other.state.load(layout, memoryview(data), one.state.scalars())
    assert models[1][2].weight is models[1][1].weight
    assert models[1][0].weight.is_contiguous(memory_format=torch.channels_last)
    for left, right in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(left, right)


def test_objects_of_the_script_travel_with_the_state():
    one, other = Training("milestones"), Training("milestones", seed=2)
    one.extra.state = {"mean": torch.tensor([1.0, 2.0]), "deep": {"n": 7}, "name": "b"}
    one.extra.state["deep"]["history"] = np.array([[1, 2], [3, 4]])
    other.load(one)
    history = other.extra.state["deep"].pop("history")
    assert isinstance(history, np.ndarray)
    assert history.tolist() == [[1, 2], [3, 4]]
    history += 1
    assert other.extra.state["mean"].tolist() == [1.0, 2.0]
    assert (other.extra.state["deep"], other.extra.state["name"]) == ({"n": 7}, "b")


def test_objects_by_names_with_a_slash_travel_with_the_state():
    extras = [{"ema": Counts(), "ema/0.9": Counts()} for _ in range(2)]
    models = [nn.Linear(2, 2) for _ in range(2)]
    one, other = (
        torch_framework(
            model, torch.optim.SGD(model.parameters(), lr=0.1), header_size=HEADER, extra=extra
        )
        for model, extra in zip(models, extras, strict=True)
    )
    for number, each in enumerate(extras[0].values(), 1):
        each.state = {"mean": torch.full([2], float(number))}
    layout, data, scalars = take(one)
    other.state.load(layout, memoryview(data), scalars)
    assert [each.state["mean"].tolist() for each in extras[1].values()] == [[1.0, 1.0], [2.0, 2.0]]


def test_an_object_by_a_number_is_refused():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    extra: Any = {0: Counts()}
    with pytest.raises(UsageError, match="extra: expected texts as names, got 0"):
        torch_framework(model, optimizer, header_size=HEADER, extra=extra)


class Scaled(nn.Linear):
    """Keeps what it has seen in a way of its own."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.seen: dict[str, Any] = {}

    def get_extra_state(self) -> Any:
        return {"largest": self.seen.get("largest", torch.zeros(1)), "history": self.seen.get("h")}

    def set_extra_state(self, state: Any) -> None:
        self.seen = {"largest": state["largest"], "h": state["history"]}


def test_what_a_layer_says_that_it_keeps_is_carried():
    def make() -> tuple[Any, Any]:
        model = nn.Sequential(Scaled(), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, torch_framework(model, optimizer, header_size=HEADER).state

    (model, state), (other, loaded) = make(), make()
    assert state.uncarried_changes() == []
    model[0].seen = {"largest": torch.tensor([2.5, 3.5]), "h": [1, {"deep": (4.5, "x")}]}
    layout = state.layout()
    data = bytearray(layout.total_bytes)
    state.copy_out(memoryview(data))
    loaded.load(layout, memoryview(data), json.loads(json.dumps(state.scalars())))
    assert other[0].seen["largest"].tolist() == [2.5, 3.5]
    assert other[0].seen["h"] == model[0].seen["h"]
    assert state.uncarried_changes() == []


def test_what_cannot_be_stored_is_refused_before_the_first_step():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda _epoch: 1.0)
    scheduler.shape = lambda _epoch: 2.0
    with pytest.raises(StateError, match=r"LambdaLR\.shape: a function cannot be stored"):
        torch_framework(model, optimizer, header_size=HEADER, schedulers=[scheduler])


@pytest.mark.parametrize("dtype", [torch.uint16, torch.float8_e4m3fn])
def test_tensors_of_a_type_that_cannot_be_stored_are_refused_before_the_first_step(dtype):
    model = nn.Linear(2, 1)
    model.table = nn.Parameter(torch.ones(3).to(dtype), requires_grad=False)
    optimizer = torch.optim.SGD([model.weight, model.bias], lr=0.1)
    with pytest.raises(StateError, match=r"model/table: .*cannot be stored; keep it as one of"):
        torch_framework(model, optimizer, header_size=HEADER)


class Preconditioned(SGD):
    """It keeps lists and dicts of tensors, as SOAP, PSGD and AggMo do."""

    def step(self, closure: Any = None) -> Any:
        for each in (each for group in self.param_groups for each in group["params"]):
            kept = self.state[each]
            if not kept:
                kept["Q"] = [torch.eye(n) for n in each.shape] + [[], None, 3]
                kept["means"] = {"fast": torch.ones_like(each), "slow": (each.detach() + 1, 2.5)}
                kept["a/b"] = torch.ones(2)
            kept["Q"][0] += each.grad.norm()
            kept["means"]["fast"].lerp_(each.grad, 0.1)
        return super().step(closure)


def test_lists_and_dicts_of_tensors_of_an_optimizer_travel():
    def trained(steps: int) -> Any:
        torch.manual_seed(1)
        model = nn.Linear(2, 3)
        optimizer = Preconditioned(model.parameters(), lr=0.1)
        for _ in range(steps):
            model(torch.ones(4, 2)).sum().backward()
            optimizer.step()
        return model, optimizer, torch_framework(model, optimizer, header_size=HEADER).state

    (model, optimizer, state), (other_model, other, loaded) = trained(2), trained(0)
    layout = state.layout()
    data = bytearray(layout.total_bytes)
    state.copy_out(memoryview(data))
    loaded.load(layout, memoryview(data), json.loads(json.dumps(state.scalars())))
    for one, two in zip(model.parameters(), other_model.parameters(), strict=True):
        kept, back = optimizer.state[one], other.state[two]
        assert {key: str(each) for key, each in back.items()} == {
            key: str(each) for key, each in kept.items()
        }
        assert back["Q"][0].sum() > len(back["Q"][0])


def test_options_that_the_script_sets_travel_and_can_be_loaded_again():
    one, other = Training("momentum"), Training("momentum", seed=2)
    for group in one.optimizer.param_groups:
        group["lr"] = 0.025
    one.model[1].eval()
    one.model[3].weight.requires_grad_(False)
    other.load(one)

    def as_said() -> bool:
        return (
            [group["lr"] for group in other.optimizer.param_groups] == [0.025, 0.025]
            and [layer.training for layer in other.model] == [True, False, True, True]
            and not other.model[3].weight.requires_grad
        )

    assert as_said()
    other.optimizer.param_groups[0]["lr"] = 9.0
    other.model.train()
    other.model[3].weight.requires_grad_(True)
    other.load(one)
    assert as_said()


@pytest.mark.parametrize(
    "value",
    [
        Counter({30: 1, 60: 2}), {1: "a"}, {"a": [1, (2.5, None)]}, (0.9, 0.999), float("inf"), {},
        {"~pairs": 1}, torch.bfloat16,
    ],
    ids=repr,
)  # fmt: skip
def test_plain_values_come_back_as_they_were(value):
    back = from_plain(json.loads(json.dumps(to_plain("it", value))))
    assert back == value
    assert type(back) is type(value)


def test_what_is_not_plain_is_refused_by_name():
    with pytest.raises(StateError, match=r"lr\.f: a function cannot be stored"):
        to_plain("lr", {"f": json.dumps})


def weight_after(cuts: list[int], **apply: Any) -> Any:
    """Train one step of a batch of 7 that is cut so; return how far the weight went."""
    torch.manual_seed(3)
    model = nn.Linear(4, 2)  # without batch norm, whose statistics belong to the shard
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    framework = torch_framework(model, optimizer, header_size=HEADER)
    framework.step.begin()
    for piece in torch.randn(7, 4, generator=torch.Generator().manual_seed(0)).tensor_split(cuts):
        framework.step.backward((model(piece) ** 2).mean(), len(piece) / 7)
        framework.step.end_shard()
    framework.step.exchange([0.0] * HEADER, True)
    framework.step.apply(**{"filled_shards": len(cuts) + 1, "lr_factor": 1.0, **apply})
    assert optimizer.param_groups[0]["lr"] == 0.1
    return model.weight.detach() - before


def test_accumulated_shards_give_the_gradient_of_the_whole_batch():
    assert torch.allclose(weight_after([]), weight_after([3, 6]), atol=1e-6)


def test_the_learning_rate_of_one_step_is_scaled_and_put_back():
    assert torch.allclose(weight_after([], lr_factor=0.5), 0.5 * weight_after([]))


class Decaying(SGD):
    """An optimizer that sets its own learning rate, of its first group, in each step."""

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        self.param_groups[0]["lr"] *= 0.5
        return found


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_a_learning_rate_that_the_optimizer_sets_in_its_step_stays(factor):
    model = nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)])
    optimizer = Decaying([{"params": each.parameters()} for each in model], lr=0.8)
    framework = make_framework(model, optimizer, header_size=1)
    for _ in range(2):
        framework.step.begin()
        framework.step.backward(sum(each(torch.ones(1, 1)).sum() for each in model), 1.0)
        framework.step.end_shard()
        framework.step.apply(filled_shards=1, lr_factor=factor)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.2, 0.8])


def test_gradients_are_clipped_by_the_norm_of_the_whole_batch():
    free, clipped = weight_after([3, 6]), weight_after([3, 6], max_norm=0.01)
    assert clipped.norm() <= 0.1 * 0.01 < free.norm()
    assert torch.allclose(clipped / clipped.norm(), free / free.norm(), atol=1e-4)


def test_a_rank_without_a_shard_steps_by_a_scaler_that_has_scaled_nothing_yet():
    model = nn.Linear(2, 1, bias=False)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    framework = make_framework(model, optimizer, header_size=1, scaler=scaler)
    framework.step.begin()
    model.weight.grad = torch.full((1, 2), 8.0)  # what the others have computed
    framework.step.apply(filled_shards=1, lr_factor=1.0, max_norm=100.0)
    assert torch.equal(model.weight, before - 0.5)
    assert scaler.get_scale() == 16.0


def test_buffers_move_by_the_mean_change_of_the_shards():
    norm = nn.BatchNorm1d(2, momentum=0.5)
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.1)
    framework = torch_framework(norm, optimizer, header_size=HEADER)
    framework.step.begin()
    for value in (2.0, 4.0):
        norm(torch.full((3, 2), value))
        framework.step.end_shard()
        assert norm.running_mean.tolist() == [0.0, 0.0], "the next shard begins with the step's"
    framework.step.exchange([0.0] * HEADER, True)
    framework.step.apply(filled_shards=2, lr_factor=1.0)
    assert norm.running_mean.tolist() == [1.5, 1.5]  # half of the mean of 2 and 4
    assert norm.num_batches_tracked.item() == 1


def test_a_buffer_whose_memory_is_another_one_now_is_merged_there():
    norm = nn.BatchNorm1d(2, momentum=0.5)
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.1)
    framework = torch_framework(norm, optimizer, header_size=HEADER)
    for mean in (1.0, 1.5):
        framework.step.begin()
        norm(torch.full((3, 2), 2.0))
        framework.step.end_shard()
        framework.step.exchange([0.0] * HEADER, True)
        framework.step.apply(filled_shards=1, lr_factor=1.0)
        assert norm.running_mean.tolist() == [mean, mean]
        norm.running_mean.data = norm.running_mean.data.clone()


class Replacing(nn.Module):
    """Counts its calls in a buffer, by a new tensor each time."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.calls: Any
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, inputs: Any) -> Any:
        self.calls = self.calls + 1
        return inputs * self.weight


def test_a_buffer_that_is_replaced_in_a_forward_pass_counts_as_one_that_is_written_to():
    model = Replacing()
    own = model.calls
    framework = torch_framework(
        model, torch.optim.SGD(model.parameters(), lr=0.1), header_size=HEADER
    )
    for number in (1, 2):
        framework.step.begin()
        for _ in range(2):
            framework.step.backward(model(torch.ones(1, 2)).sum(), 0.5)
            framework.step.end_shard()
            assert model.calls.item() == number - 1, "the next shard begins with the step's"
        framework.step.exchange([0.0] * HEADER, True)
        framework.step.apply(filled_shards=2, lr_factor=1.0)
        assert model.calls.item() == number
    model.calls = torch.full((1,), 7.0)
    data = bytearray(framework.state.layout().total_bytes)
    framework.state.copy_out(memoryview(data))
    spec = next(each for each in framework.state.layout().specs if each.name == "model/calls")
    assert np.frombuffer(data, np.float32, 1, spec.offset).item() == 7.0
    assert model.calls is own
    model.calls = torch.zeros(2)
    with pytest.raises(UsageError, match=r"its buffer calls is \[1\] torch.float32, and was rep"):
        framework.step.begin()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_what_two_ranks_would_exchange_adds_up(dtype):
    """Doubling stands for the all-reduce of two equal ranks."""
    norm = nn.BatchNorm1d(2, momentum=0.5)
    used = nn.Parameter(torch.zeros(3, 2, dtype=dtype))
    unused, other = nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(3, 2))
    used.grad = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]).to(dtype)
    other.grad = torch.full((3, 2), 0.25)
    buffers = TorchShardBuffers(norm)
    exchange = TorchGradientExchange([used, unused, other], buffers, HEADER)
    buffers.begin_step()
    for loss, weight in ((torch.tensor([0.5, 0.75]), 2.0), (used.sum() + 1, 0.25)):
        buffers.loss.add(loss, weight)
    norm(torch.full((3, 2), 4.0))
    buffers.end_shard()

    def double(tensor: Any) -> None:
        tensor.mul_(2)

    for _ in range(2):  # it leaves the local gradients alone, so it may be repeated
        assert exchange.run([1.0, 0.0, 3.0], True, double) == [2.0, 0.0, 6.0]
        assert used.grad.tolist()[0] == [1.0, 2.0]
        assert buffers.loss.value.tolist() == 5.5
        assert not buffers.loss.value.requires_grad
    exchange.put_back(filled_shards=2)
    assert used.grad.tolist() == [[2.0, 4.0], [6.0, 8.0], [10.0, 12.0]]
    assert used.grad.dtype == dtype
    assert other.grad.tolist() == [[0.5, 0.5]] * 3
    assert unused.grad is None, "no rank had a gradient: the optimizer has to skip it"
    assert norm.running_mean.tolist() == [2.0, 2.0]
    # A rank without data adds zeros.
    assert exchange.run([0.0, 1.0, 0.0], False, double) == [0.0, 2.0, 0.0]
    assert buffers.loss.value.tolist() == 0.0


class Counting(nn.Module):
    """Counts by steps that its input says, in a buffer of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.register_buffer("calls", torch.tensor([2**60, -5, 7]))
        self.register_buffer("is_used", torch.tensor([True]))

    def forward(self, steps: list[int]) -> Any:
        self.calls += torch.tensor(steps)
        return self.weight * 1.0


def exchange_as_two(
    ranks: list[tuple[Counting, TorchShardBuffers, TorchGradientExchange]],
    shards: list[list[list[int]]],
    filled_shards: int,
) -> int:
    """Make a step of these shards of each rank; return how many tensors were summed."""
    barrier = threading.Barrier(2, timeout=30)
    sent: list[Any] = [None, None]
    counts = [0, 0]

    def run(rank: int) -> None:
        model, buffers, exchange = ranks[rank]

        def reduce(tensor: Any) -> None:
            sent[rank] = tensor.clone()
            barrier.wait()
            tensor.copy_(sent[0] + sent[1])
            barrier.wait()
            counts[rank] += 1

        buffers.begin_step()
        for steps in shards[rank]:
            model(steps).sum().backward()
            buffers.end_shard()
        exchange.run([1.0] * HEADER, True, reduce)
        exchange.put_back(filled_shards)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(2)))
    assert counts[0] == counts[1]
    return counts[0]


def test_whole_numbers_are_sent_only_where_a_shard_changes_them_otherwise_than_usual():
    ranks = []
    for _ in range(2):
        model = Counting()
        buffers = TorchShardBuffers(model)
        exchange = TorchGradientExchange([model.weight], buffers, HEADER)
        ranks.append((model, buffers, exchange))
    expected = torch.tensor([2**60, -5, 7])
    one, far, none = [1, 0, 3], [2**40 + 1, -8, 0], [0, 0, 0]
    # Each: shards of both ranks, filled shards, mean of the changes, tensors that were summed.
    steps: list[tuple[list[list[list[int]]], int, list[int], int]] = [
        ([[one], [one]], 2, one, 2),
        ([[one], [one]], 2, one, 1),
        ([[one, one], [one]], 3, one, 1),
        ([[one], []], 1, one, 1),
        ([[], []], 2, none, 1),  # a further update of the step
        ([[far], [one]], 2, [2**39 + 1, -4, 2], 2),
        ([[one], [one]], 2, one, 2),
        ([[far], [far]], 2, far, 2),
        ([[far], [far]], 2, far, 1),
        ([[one], [far, far]], 3, [round((2 * far[0] + 1) / 3), -5, 1], 2),
    ]
    for shards, filled, mean, sent in steps:
        assert exchange_as_two(ranks, shards, filled) == sent, shards
        expected += torch.tensor(mean)
        for model, _buffers, _exchange in ranks:
            assert model.calls.tolist() == expected.tolist()
            assert model.is_used.tolist() == [True]


def test_a_rank_without_a_shard_gets_the_gradients_of_the_others():
    weight = nn.Parameter(torch.zeros(2, 1))
    buffers = TorchShardBuffers(nn.Linear(1, 1))
    exchange = TorchGradientExchange([weight], buffers, HEADER)

    def others(tensor: Any) -> None:
        tensor.copy_(torch.tensor([0.0, 0.0, 4.0, 2.5, 1.0, 7.0, 8.0]))

    assert exchange.run([0.0, 0.0, 0.0], True, others) == [0.0, 0.0, 4.0]
    assert buffers.loss.value.item() == 2.5
    exchange.put_back(filled_shards=1)
    assert weight.grad is not None
    assert weight.grad.tolist() == [[7.0], [8.0]]


def test_a_world_of_one_needs_no_group():
    training = Training("momentum")
    training.framework.group.form(GroupSpec(rank=0, world_size=1, master="", generation=1))
    values = np.array([1.0, 2.0])
    training.framework.group.all_reduce(values)
    assert values.tolist() == [1.0, 2.0]
    assert training.framework.step.exchange([1.0, 2.0, 3.0], True) == [1.0, 2.0, 3.0]


class Observed(nn.Linear):
    """Keeps what it has seen, in every mode; one in place, one anew."""

    calls: Any

    def __init__(self) -> None:
        super().__init__(2, 1)
        self.register_buffer("largest", torch.zeros(()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Any) -> Any:
        self.largest.copy_(torch.maximum(self.largest, inputs.max()))
        self.calls = self.calls + 1
        return super().forward(inputs)


def test_an_evaluation_leaves_buffers_as_they_are():
    model = Observed()
    framework = torch_framework(model, SGD(model.parameters(), 0.1), header_size=HEADER)
    own = model.calls
    _layout, before, _scalars = take(framework)
    with framework.state.evaluating():
        model(torch.ones(3, 2))
        _layout, amid, _scalars = take(framework)  # the trainers park there for a change
        assert amid == before
        model(torch.ones(3, 2))
    assert (float(model.largest), int(model.calls)) == (0.0, 0)
    assert model.calls is own
    with (
        pytest.raises(UsageError, match=r"its buffer largest was \[\], and was resized to \[3\]"),
        framework.state.evaluating(),
    ):
        model.largest.resize_(3)


def test_an_evaluation_leaves_frozen_batch_norms_as_the_script_has_set_them():
    training = Training("momentum")
    training.model[1].eval()
    before = training.framework.state.scalars()
    with training.framework.state.evaluating():
        assert not any(layer.training for layer in training.model.modules())
        assert not torch.is_grad_enabled()
        assert training.framework.state.scalars() == before, (
            "a snapshot has the modes of the training"
        )
    assert [layer.training for layer in training.model] == [True, False, True, True]


def test_modes_that_a_script_sets_to_what_they_are_count_as_set():
    training = Training("momentum")
    training.framework.state.watch()
    training.model[0].train()
    training.model[1].training = False
    assert training.framework.state.watched() == ({"0": True, "1": False}, False)
    assert "train" not in vars(training.model[0])


@pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated")
def test_the_mode_of_a_layer_of_torchscript_belongs_to_the_state():
    models = [nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Dropout(0.5))) for _ in range(2)]
    one, other = (
        torch_framework(model, torch.optim.SGD(model.parameters(), lr=0.1), header_size=HEADER)
        for model in models
    )
    models[0].eval()
    layout, data, scalars = take(one)
    other.state.load(layout, memoryview(data), scalars)
    assert [each.training for each in models[1].modules()] == [False] * 3
    models[0].train()
    layout, data, scalars = take(one)
    other.state.load(layout, memoryview(data), scalars)
    assert [each.training for each in models[1].modules()] == [True] * 3


def test_what_no_state_can_carry_is_named_once():
    training = Training("momentum")
    assert training.framework.state.uncarried_changes() == []
    training.step(1)
    assert training.framework.state.uncarried_changes() == [], "training alone changes nothing"
    training.model[0].register_forward_hook(lambda *_: None)
    training.model[2] = nn.Tanh()
    training.model[3].bias = nn.Parameter(torch.zeros(1))
    assert training.framework.state.uncarried_changes() == [
        "hooks of layer 0", "layer 2", "parameter 3.bias, which is another one now",
    ]  # fmt: skip
    assert training.framework.state.uncarried_changes() == []


class Mean(nn.Module):
    """Has a state_dict with nothing in it, as metrics of torchmetrics have."""

    total: Any

    def __init__(self) -> None:
        super().__init__()
        self.total, self.count = torch.zeros(()), 0

    def update(self, value: float) -> None:
        self.total += value
        self.count += 1


def test_an_object_that_changes_and_says_nothing_of_itself_is_named_once():
    model, mean, others = nn.Linear(2, 2), Mean(), nn.ModuleList([Mean(), nn.Identity()])
    state = torch_framework(
        model, SGD(model.parameters(), 0.1), header_size=HEADER,
        extra={"mean": mean, "others": others, "empty": Counts(), "idle": Mean()},
    ).state  # fmt: skip
    assert state.uncarried_changes() == []
    assert state.uncarried_changes() == []
    mean.update(1.0)
    assert [each.partition(",")[0] for each in state.uncarried_changes()] == ["extra={'mean': ...}"]
    mean.update(1.0)
    others[0].update(1.0)
    assert [each.partition(",")[0] for each in state.uncarried_changes()] == [
        "extra={'others': ...}"
    ]


class Noting(SGD):
    """Keeps more than its groups, and more of parameters than a state can say."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, 0.1, momentum=0.9)
        self.pace, self.rates = torch.zeros(()), deque([0.1])

    def step(self, closure: Any = None) -> None:
        self.pace += 1
        self.rates.append(float(self.pace))
        self.state["all"]["count"] = len(self.rates)
        super().step(closure)


def test_lists_of_a_layer_and_what_an_optimizer_keeps_beside_its_state_are_named_once():
    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(2, 2)
            self.means: list[float] = []
            self.kept: dict[str, Any] = {"newest": torch.zeros(2), "bias": self.lstm.bias_hh_l0}

    model = Remembering()
    optimizer = Noting(model.parameters())
    traits = TorchTraits(model, [optimizer])
    assert traits.uncarried_changes() == []
    model.lstm(torch.ones(1, 2))[0].sum().backward()
    model.lstm.requires_grad_(False)
    model.means += [0.5] * 16
    assert traits.uncarried_changes() == [], "training alone changes nothing"
    assert traits.changed()["layer/"] == {"means": [0.5] * 16}
    model.means.append(0.5)
    model.kept["newest"] += 1
    optimizer.step()
    model.double()
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    assert {each for each in traits.uncarried_changes() if "parameter lstm" not in each} == {
        "means of layer Remembering, a list",
        "kept of layer Remembering, a dict",
        "rates of the optimizer, a deque",
        "pace of the optimizer, a tensor outside of its state",
        "parameters of the optimizer",
        "state['all'] of the optimizer",
    }
    assert traits.uncarried_changes() == []


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_what_layers_compute_of_their_parameters_is_no_news():
    model = nn.Sequential(
        nn.utils.weight_norm(nn.Linear(4, 4)), nn.utils.spectral_norm(nn.Linear(4, 4))
    )
    traits = TorchTraits(model)
    assert traits.uncarried_changes() == []
    for _ in range(2):
        model.train()(torch.ones(2, 4)).sum().backward()
        with torch.no_grad():
            model.eval()(torch.ones(2, 4))
        assert traits.uncarried_changes() == []


def test_a_tensor_of_a_layer_is_named_also_beside_a_parameter_whose_name_goes_on_from_its_own():
    layer = nn.Linear(2, 2)
    layer.mean, layer.mean_scale = torch.zeros(2), nn.Parameter(torch.ones(2))
    traits = TorchTraits(layer)
    assert traits.uncarried_changes() == []
    layer.mean = torch.ones(2)
    assert traits.uncarried_changes() == [
        "mean of layer Linear, a tensor outside of its state_dict"
    ]


def test_a_state_has_the_rates_of_the_last_commit_whatever_the_script_has_set_since():
    training = Training("milestones")
    state = training.framework.state
    training.step(1)
    committed, prints = state.scalars(committed=True), state.fingerprints(of_model=False)
    training.scheduler.step()
    training.optimizer.param_groups[0]["lr"] = 0.7
    assert state.scalars(committed=True) == committed
    assert state.scalars()["groups"][0]["lr"] == 0.7
    assert state.fingerprints(of_model=False) != prints, "what is compared is what is there now"
    state.note_committed()
    assert state.scalars(committed=True)["groups"][0]["lr"] == 0.7


class History:
    """Its state is the very list that the script appends to."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"losses": []}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@pytest.mark.parametrize("state", [{"losses": []}, {"of": {3: 0.5}}], ids=["a list", "by numbers"])
def test_what_a_script_adds_to_an_object_before_an_update_is_seen_though_it_is_no_copy(state):
    history, model = History(), nn.Linear(2, 2)
    history.state = state
    framework = torch_framework(
        model, SGD(model.parameters(), lr=0.1), header_size=HEADER, extra={"history": history}
    )
    framework.state.note_committed()
    assert framework.state.changed_in_step() == ""
    if "of" in state:
        state["of"][3] = 0.7
    else:
        state["losses"].append(0.5)
    assert framework.state.changed_in_step().startswith("extra={'history': ...}, its ")


class Keeping(Optimizer):
    """Keeps a tensor and a count of each parameter, by these keys."""

    def __init__(self, parameters: Any, tensor: Any, count: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.keys = (tensor, count)

    def step(self, closure: Any = None) -> None:
        tensor, count = self.keys
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each] = {tensor: torch.ones_like(each), count: 3}


@pytest.mark.parametrize("several", [False, True])
def test_what_an_optimizer_calls_by_a_name_with_a_dot_comes_back(several: bool):
    def made() -> tuple[list[Keeping], Any]:
        models = [nn.Sequential(nn.Linear(2, 2)) for _ in range(1 + several)]
        optimizers = [Keeping(each.parameters(), "exp.avg", "steps.made") for each in models]
        return optimizers, torch_framework(models, optimizers, header_size=HEADER).state

    (optimizers, before), (others, after) = made(), made()
    for each in optimizers:
        each.step()
    layout = before.layout()
    data = bytearray(layout.total_bytes)
    before.copy_out(memoryview(data))
    after.load(layout, memoryview(data), before.scalars())
    for each in others:
        parameters = each.param_groups[0]["params"]
        assert [each.state[one].keys() for one in parameters] == [{"exp.avg", "steps.made"}] * 2
        assert all(torch.equal(each.state[one]["exp.avg"], torch.ones_like(one))
                   for one in parameters)  # fmt: skip


@pytest.mark.parametrize("keys", [(0, "count"), ("average", 0)], ids=["a tensor", "a number"])
def test_an_optimizer_whose_state_has_other_keys_than_texts_is_refused_before_it_is_saved(keys):
    model = nn.Linear(2, 2)
    optimizer = Keeping(model.parameters(), *keys)
    state = torch_framework(model, optimizer, header_size=HEADER).state
    optimizer.step()
    with pytest.raises(StateError, match=r"optimizer/weight: its state has the key 0.*texts"):
        state.scalars()


class Quantized(SGD):
    """It keeps tensors that are made of others, as torchao's optimizers of 8 bits do."""

    nested = False

    def step(self, closure: Any = None) -> Any:
        for each in (each for group in self.param_groups for each in group["params"]):
            made = TwoTensor(torch.ones_like(each), torch.ones_like(each))
            self.state[each]["exp_avg"] = {"wrapped": [made]} if self.nested else made
        return super().step(closure)


@pytest.mark.parametrize("nested", [False, True])
def test_an_optimizer_that_keeps_tensors_made_of_others_is_refused_before_it_is_saved(nested):
    model = nn.Linear(2, 3)
    optimizer = Quantized(model.parameters(), lr=0.1)
    optimizer.nested = nested
    state = torch_framework(model, optimizer, header_size=HEADER).state
    optimizer.step()
    text = "optimizer/weight.exp_avg: a TwoTensor is made of other tensors, and cannot be stored"
    with pytest.raises(StateError, match=text):
        state.layout()
    if not nested:
        with pytest.raises(StateError, match=text):
            state.fingerprints(of_model=True)


def test_hooks_that_an_optimizer_gets_as_the_training_goes_on_are_named():
    model = nn.Linear(2, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: None)  # before the loop: in every process
    state = torch_framework(model, optimizer, header_size=HEADER).state
    assert state.uncarried_changes() == []
    optimizer.register_step_post_hook(lambda *_: None)
    assert state.uncarried_changes() == ["hooks of the optimizer"]
    assert state.uncarried_changes() == []


@pytest.mark.parametrize(
    ("device", "dtype"), [("cpu", torch.bfloat16), ("meta", torch.float32)], ids=["type", "device"]
)
def test_what_the_script_makes_tensors_of_is_its_own_affair(device: str, dtype: Any):
    """The loop imports its part for PyTorch when the script has set that."""
    spec = importlib.util.spec_from_file_location("gradients_again", gradients.__file__)
    assert spec is not None
    assert spec.loader is not None
    again = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    torch.set_default_device(device)
    torch.set_default_dtype(dtype)
    try:
        spec.loader.exec_module(again)
        nothing = StateTensor(name="a", dtype="int64", shape=(0,), offset=0)
        empty = make_tensor(np.zeros(0, np.uint8), nothing)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
        del sys.modules[spec.name]
    assert again._SHARES == gradients._SHARES
    assert empty.device.type == "cpu"


class RememberingLR(lr_scheduler.LRScheduler):
    """Halves the rate at each step, and keeps a list of what it has done."""

    def __init__(self, optimizer: SGD) -> None:
        self.history: list[float] = []
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        self.history.append(float(self.optimizer.param_groups[0]["lr"]))
        return [group["lr"] * 0.5 for group in self.optimizer.param_groups]


def test_rates_that_are_tensors_and_lists_of_a_scheduler_are_those_of_the_last_commit_too():
    model = nn.Linear(2, 2)
    optimizer = SGD(model.parameters(), lr=torch.tensor(0.1), foreach=False)
    scheduler = RememberingLR(optimizer)
    state = TorchOptimizer(model, optimizer, [scheduler])
    state.note_committed()
    committed = state.scalars(committed=True)
    optimizer.step()
    scheduler.step()
    assert state.scalars() != committed
    assert state.scalars(committed=True) == committed


def test_what_is_pruned_after_a_restart_is_small_in_the_state_and_not_in_what_was_built():
    def made(seed: int) -> Any:
        torch.manual_seed(seed)
        model = prune.identity(nn.Linear(4, 4), "weight")
        optimizer = SGD(model.parameters(), lr=0.1)
        return model, torch_framework(model, optimizer, header_size=HEADER).state

    (one, before), (other, after) = made(1), made(2)
    layout = before.layout()
    data = bytearray(layout.total_bytes)
    before.copy_out(memoryview(data))
    after.load(layout, memoryview(data), before.scalars())
    for model in (one, other):
        prune.l1_unstructured(model, "weight", amount=8)
    assert torch.equal(one.weight, other.weight)


def test_what_is_pruned_at_an_epochs_end_is_found_in_the_newest_weights_on_all_ranks():
    model = prune.identity(nn.Linear(4, 4), "weight")
    state = torch_framework(model, SGD(model.parameters(), lr=0.1), header_size=HEADER).state
    with torch.no_grad():  # an update after this rank's last forward pass
        model.weight_orig.copy_(torch.arange(16.0).reshape(4, 4))
    state.note_committed(of_epoch=True)
    prune.l1_unstructured(model, "weight", amount=8)
    assert model.weight_mask.flatten().tolist() == [0.0] * 8 + [1.0] * 8


def test_a_pruned_model_can_be_copied_after_an_evaluation_and_an_epochs_end():
    model = prune.identity(nn.Linear(4, 4), "weight")
    state = torch_framework(model, SGD(model.parameters(), lr=0.1), header_size=HEADER).state
    with torch.no_grad():
        model(torch.ones(1, 4))
    state.note_committed(of_epoch=True)
    assert torch.equal(copy.deepcopy(model).weight, model.weight)


def test_a_buffer_that_shows_another_one_goes_on_doing_so():
    model = nn.Linear(4, 4)
    model.register_buffer("scale", torch.ones(1))
    model.register_buffer("spread", model.scale.expand(4))
    torch_framework(model, SGD(model.parameters(), lr=0.1), header_size=HEADER)
    model.scale.mul_(2)
    assert model.spread.tolist() == [2.0] * 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool"])
def test_fingerprints_tell_values_signs_and_order(dtype):
    each = torch.arange(-2, 5).to(getattr(torch, dtype))
    others = [each.roll(1), each[:-1]]
    others += [each + 1, -each] if dtype != "bool" else [~each]
    assert fingerprint(each) == fingerprint(each.clone())
    assert fingerprint(each) not in [fingerprint(other) for other in others]


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_rate_that_is_a_tensor_stays_the_one_that_script_and_groups_hold(shape):
    def made() -> Any:
        model, rate = nn.Linear(2, 2), torch.full(shape, 0.1)
        optimizer = SGD([{"params": [each]} for each in model.parameters()], lr=rate, foreach=False)
        return rate, optimizer, torch_framework(model, optimizer, header_size=HEADER).state

    _rate, before, state = made()
    before.param_groups[0]["lr"].fill_(0.05)
    layout = state.layout()
    data = bytearray(layout.total_bytes)
    state.copy_out(memoryview(data))
    rate, optimizer, other = made()
    other.load(layout, memoryview(data), state.scalars())
    assert rate.item() == pytest.approx(0.05)
    rate.fill_(0.025)
    assert all(group["lr"] is rate for group in optimizer.param_groups)


def test_a_rate_that_was_put_in_place_of_another_leaves_that_one_as_the_script_built_it():
    def made() -> Any:
        model, base = nn.Linear(2, 2), torch.tensor(0.1)
        optimizer = SGD([{"params": [each]} for each in model.parameters()], lr=base, foreach=False)
        return base, optimizer, torch_framework(model, optimizer, header_size=HEADER).state

    _base, before, state = made()
    before.param_groups[1]["lr"] = torch.tensor(0.01)
    layout = state.layout()
    data = bytearray(layout.total_bytes)
    state.copy_out(memoryview(data))
    base, optimizer, other = made()
    other.load(layout, memoryview(data), state.scalars())
    rates = [group["lr"].item() for group in optimizer.param_groups]
    assert [base.item(), *rates] == pytest.approx([0.1, 0.1, 0.01])


def test_a_buffer_that_is_set_after_the_shards_is_refused_and_one_that_is_no_number_is_not():
    training = Training("momentum")
    norm, step = training.model[1], training.framework.step
    norm.running_mean.fill_(float("nan"))
    step.begin()
    for _ in range(2):
        step.backward(training.model(torch.ones(4, 4)).sum(), 0.5)
        step.end_shard()
    step.check_buffers()
    norm.num_batches_tracked = norm.num_batches_tracked + 1
    with pytest.raises(UsageError, match=r"its buffer 1\.num_batches_tracked was set between"):
        step.check_buffers()


def test_the_layout_of_a_state_follows_the_types_of_its_tensors():
    training = Training("momentum")
    state = training.framework.state
    before = state.layout()
    training.model[0].double()
    after = state.layout()
    kinds = [[spec.dtype for spec in layout.specs if spec.name.startswith("model/0.")]
             for layout in (before, after)]  # fmt: skip
    assert kinds == [["float32"] * 2, ["float64"] * 2]
    assert state.layout() is after


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (lambda: Training("milestones"), "made by SGD, this script uses Adam"),
        (
            lambda: Training("momentum", dtype=torch.float64),
            r"0\.weight: the state holds float32, the model float64",
        ),
    ],
)
def test_a_state_of_another_optimizer_or_precision_is_refused_and_changes_nothing(other, text):
    one, target = Training("momentum"), other()
    one.step(1)
    before = target.take()
    with pytest.raises(StateError, match=text):
        target.load(one)
    assert target.take() == before


def in_sequence(optimizer: Any, *parts: Any) -> Any:
    made = [part(optimizer) for part in parts]
    return lr_scheduler.SequentialLR(optimizer, made, list(range(2, 1 + len(parts))))


def cosine(optimizer: Any) -> Any:
    return lr_scheduler.CosineAnnealingLR(optimizer, 5)


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        (
            cosine,
            lambda o: lr_scheduler.LambdaLR(o, lambda _n: 1.0),
            "CosineAnnealingLR, .* LambdaLR;",
        ),
        (
            cosine,
            lambda o: lr_scheduler.StepLR(o, 2),
            "with CosineAnnealingLR, this script has StepLR;",
        ),
        (
            cosine,
            lambda o: in_sequence(o, lr_scheduler.LinearLR, cosine),
            r"has SequentialLR\(LinearLR, CosineAnnealingLR\); use the same, or another checkpoint",
        ),
        (
            lambda o: in_sequence(o, lr_scheduler.LinearLR, cosine),
            lambda o: in_sequence(o, lr_scheduler.LinearLR, lr_scheduler.ConstantLR),
            r"SequentialLR\(LinearLR, CosineAnnealingLR\), .*\(LinearLR, ConstantLR\);",
        ),
    ],
)
def test_a_state_of_another_kind_of_scheduler_is_refused(one, other, text):
    def made(scheduler: Any) -> Framework:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return torch_framework(
            model, optimizer, header_size=HEADER, schedulers=[scheduler(optimizer)]
        )

    layout, data, scalars = take(made(one))
    made(one).state.load(layout, memoryview(data), scalars)
    with pytest.raises(StateError, match=text):
        made(other).state.load(layout, memoryview(data), scalars)


def lazy() -> Any:
    return nn.LazyLinear(2)


def frozen() -> Any:
    return nn.Linear(2, 2).requires_grad_(False)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)), "1 is a SyncBatchNorm"),
        (lambda: nn.Sequential(nn.Embedding(3, 2, sparse=True)), "0.weight has sparse gradients"),
        (frozen, "none of its parameters is trained"),
        (lambda: nn.DataParallel(nn.Linear(2, 2)), "pass the bare model, not DataParallel"),
        (lambda: [nn.Linear(2, 2), "b"], "model: expected a torch.nn.Module, got str"),
        (lazy, "has no parameters before its first batch"),
    ],
)
def test_a_model_that_cannot_be_elastic_is_refused_with_the_remedy(
    model: Callable[[], Any], text: str
):
    made = model()
    parameters = list(made.parameters() if isinstance(made, nn.Module) else made[0].parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    with pytest.raises(UsageError, match=text):
        make_framework(made, optimizer, header_size=HEADER)


def test_an_optimizer_of_other_parameters_is_refused():
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    both = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    with pytest.raises(UsageError, match="is not one of the model's"):
        torch_framework(model, both, header_size=HEADER)
    with pytest.raises(UsageError, match="none of its parameters is one of the model's"):
        torch_framework(model, torch.optim.SGD(other.parameters(), lr=0.1), header_size=HEADER)


def test_an_optimizer_around_another_one_is_refused():
    model = nn.Linear(2, 2)
    optimizer = Lookahead(torch.optim.Adam(model.parameters()))
    with pytest.raises(UsageError, match="optimizer: Lookahead holds a Adam, whose state would be"):
        torch_framework(model, optimizer, header_size=HEADER)


@pytest.mark.parametrize("is_derived", [False, True])
def test_an_optimizer_that_computes_the_loss_itself_is_refused(is_derived: bool):
    kind: Any = torch.optim.LBFGS
    kind = type("OwnLBFGS", (kind,), {}) if is_derived else kind
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="optimizer: LBFGS computes the loss itself"):
        torch_framework(model, kind(model.parameters()), header_size=HEADER)


def test_an_optimizer_that_keeps_tensors_by_numbers_is_told_by_name():
    """As AggMo, by its factors."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    framework = torch_framework(model, optimizer, header_size=HEADER)
    optimizer.state[model.weight]["means"] = {0.5: torch.eye(2), 0.9: torch.eye(2)}
    with pytest.raises(StateError, match=r"weight\.means: keys of tensors must be text .*got 0\.5"):
        framework.state.layout()


EXTRAS = [
    (lambda m: torch.optim.SGD(m.parameters(), lr=0.1), "'x' is an optimizer"),
    (lambda m: nn.Linear(2, 2), "a trainable parameter"),
    (lambda m: object(), "has no state_dict"),
    (lambda m: torch.amp.GradScaler("cpu"), "pass it as scaler="),
]


@pytest.mark.parametrize(("extra", "text"), EXTRAS, ids=[text for _make, text in EXTRAS])
def test_extra_objects_that_would_train_or_cannot_be_carried_are_refused(extra, text):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=text):
        torch_framework(model, optimizer, header_size=HEADER, extra={"x": extra(model)})


@pytest.mark.parametrize("is_late", [False, True], ids=["before the loop", "after it"])
def test_a_scheduler_that_was_not_passed_is_refused(is_late):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if not is_late:
        kept = lr_scheduler.StepLR(optimizer, 1)
        with pytest.raises(UsageError, match="pass it: Loop"):
            torch_framework(model, optimizer, header_size=HEADER)
        return
    framework = torch_framework(model, optimizer, header_size=HEADER)
    kept = lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(UsageError, match="pass it: Loop"):
        framework.step.apply(filled_shards=1, lr_factor=1.0)
    assert kept.optimizer is optimizer


def begun() -> tuple[Any, Any]:
    """Return a framework and its model after the backward pass of its only shard."""
    model = nn.Linear(2, 2)
    framework = torch_framework(
        model, torch.optim.SGD(model.parameters(), lr=0.1), header_size=HEADER
    )
    framework.step.begin()
    framework.step.backward(model(torch.ones(1, 2)).sum(), 1.0, is_last=True)
    return framework, model


def replace_gradient(model: Any) -> None:
    model.weight.grad = model.weight.grad * 2


@pytest.mark.parametrize(
    "touch",
    [
        pytest.param(lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1e-3), id="clipped"),
        pytest.param(lambda m: m.zero_grad(), id="cleared"),
        pytest.param(replace_gradient, id="replaced"),
        pytest.param(lambda m: m.bias.grad.mul_(0.5), id="scaled in place"),
    ],
)
def test_gradients_that_are_changed_before_the_update_are_refused(touch):
    framework, model = begun()
    touch(model)
    with pytest.raises(UsageError, match=r"was changed after step\.backward"):
        framework.step.exchange([0.0] * HEADER, True)


def test_one_gradient_that_is_changed_in_every_step_is_found_within_sixteen():
    framework, model = begun()
    for _ in range(3):
        make_update(framework, model)
    with pytest.raises(UsageError, match=r"gradients: that of bias was changed"):
        make_updates_by_hand(framework, model, 16)


def make_updates_by_hand(framework: Any, model: Any, count: int) -> None:
    for _ in range(count):
        model.bias.grad.mul_(0.5)
        make_update(framework, model)


def make_update(framework: Any, model: Any) -> None:
    """Make the update that has begun, and begin the next."""
    framework.step.exchange([0.0] * HEADER, True)
    framework.step.apply(filled_shards=1, lr_factor=1.0)
    framework.step.begin()
    framework.step.backward(model(torch.ones(1, 2)).sum(), 1.0, is_last=True)
    framework.step.end_shard()


def test_gradients_may_be_read_and_several_losses_added():
    framework, model = begun()
    assert model.weight.grad.norm() > 0
    framework.step.backward(model(torch.ones(1, 2)).sum(), 1.0)
    assert framework.step.exchange([1.0] * HEADER, True) == [1.0] * HEADER


def test_a_second_optimizer_is_refused_and_what_is_frozen_may_change():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    framework = torch_framework(
        model, torch.optim.SGD(model[0].parameters(), lr=0.1), header_size=HEADER
    )
    assert framework.state.unowned() == ["1.weight", "1.bias"]
    model[1].bias.requires_grad_(False)
    framework.step.begin()
    with torch.no_grad():
        model[1].bias.add_(1)
    framework.state.check_unowned()
    with torch.no_grad():
        model[1].weight.add_(1)
    with pytest.raises(UsageError, match=r"1\.weight has changed, and the loop's optimizer"):
        framework.state.check_unowned()


def test_gradients_sent_during_the_backward_pass_are_not_there():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="'overlapped' is not there for PyTorch"):
        torch_framework(model, optimizer, header_size=HEADER, all_reduce="overlapped")


def test_a_state_of_parameters_that_the_optimizer_lacks_is_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def made(parameters: Any) -> Any:
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        return torch_framework(model, optimizer, header_size=HEADER)

    whole, half = made(model.parameters()), made(model[1].parameters())
    whole.step.begin()
    whole.step.backward(model(torch.ones(1, 2)).sum(), 1.0)
    whole.step.apply(filled_shards=1, lr_factor=1.0)
    layout = whole.state.layout()
    data = bytearray(layout.total_bytes)
    whole.state.copy_out(memoryview(data))
    with pytest.raises(StateError, match=r"optimizer/0\.\w+\.\w+: the optimizer has no such"):
        half.state.load(layout, memoryview(data), whole.state.scalars())


def test_a_state_of_many_parameters_and_two_optimizers_is_loaded_in_one_go(monkeypatch):
    listed: list[int] = []
    parameters = TorchOptimizer._parameters

    def counted(optimizer: TorchOptimizer) -> list[tuple[str, Any]]:
        listed.append(1)
        return parameters(optimizer)

    monkeypatch.setattr(TorchOptimizer, "_parameters", counted)

    def lists_in_a_load(layers: int) -> int:
        model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(layers)))
        both = [torch.optim.Adam(model[at::2].parameters()) for at in (0, 1)]
        framework = torch_framework(model, both, header_size=HEADER)
        for each in both:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            each.step()
        layout = framework.state.layout()
        data = bytearray(layout.total_bytes)
        framework.state.copy_out(memoryview(data))
        scalars = json.loads(json.dumps(framework.state.scalars()))
        listed.clear()
        framework.state.load(layout, memoryview(data), scalars)
        return len(listed)

    assert lists_in_a_load(2) == lists_in_a_load(20)
