"""Modes, flags and options of model and optimizer belong to the state as its tensors do."""

import json
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from pod_runtime import elastic
from pod_runtime.trainer.frameworks.choose import make_framework
from pod_runtime.trainer.frameworks.paddle.framework import paddle_framework
from pod_runtime.trainer.frameworks.paddle.traits import PaddleTraits
from pod_runtime.trainer.membership.stage import StageJoiner
from tests.pod_runtime.trainer.states import finish_writing

pytestmark = [
    pytest.mark.filterwarnings("ignore:When training, we now always track"),
    # Paddle says so of every LinearWarmup around another scheduler.
    pytest.mark.filterwarnings("ignore:There are some unused values in state_dict"),
]


@pytest.fixture(autouse=True)
def _outside_edl(monkeypatch):
    for name in ("EDL_CHANNEL", "EDL_STAGE", "EDL_RUN_DIR", "EDL_MAX_TRAINERS"):
        monkeypatch.delenv(name, raising=False)


class Data(paddle.io.Dataset):
    def __getitem__(self, index: int) -> Any:
        return np.full(3, index / 10, "float32")

    def __len__(self) -> int:
        return 18


class Net(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1D(3)
        self.drop = nn.Dropout(0.5)
        self.tail = nn.Linear(3, 1)
        self.depth = 1
        self.sizes = (1, 2)
        self.rates = [0.5]

    def forward(self, batch: Any) -> Any:
        return self.tail(self.drop(self.norm(self.head(batch))))


def build() -> tuple[Net, Any]:
    paddle.seed(3)
    model = Net()
    groups = [
        {"params": model.head.parameters(), "learning_rate": 0.5},
        {"params": [*model.norm.parameters(), *model.tail.parameters()]},
    ]
    clip = nn.ClipGradByGlobalNorm(1.0)
    rate = paddle.optimizer.lr.LinearWarmup(paddle.optimizer.lr.StepDecay(0.1, 2), 3, 0.0, 0.1)
    return model, paddle.optimizer.Momentum(rate, parameters=groups, grad_clip=clip)


# --- what a state carries


def change_all(model: Net, optimizer: Any) -> None:
    model.eval()
    model.head.train()
    model.drop.p = 0.1
    model.norm._momentum = 0.5
    model.depth, model.sizes = 3, (4, 5)
    model.note = "added"
    model.rates.append(0.25)
    model.head.weight.stop_gradient = True
    model.tail.weight.need_clip = False
    model.tail.bias.optimize_attr["learning_rate"] = 0.25
    optimizer._param_groups[0]["learning_rate"] = 0.125
    optimizer._momentum = 0.8
    optimizer._grad_clip.clip_norm = 0.5
    optimizer._learning_rate.learning_rate.gamma = 0.3


def seen(model: Net, optimizer: Any) -> list[Any]:
    return [
        [layer.training for layer in model.sublayers(include_self=True)],
        model.drop.p, model.norm._momentum, model.depth, model.sizes,
        getattr(model, "note", None), list(model.rates),
        [each.stop_gradient for each in model.parameters()],
        model.tail.weight.need_clip, model.tail.bias.optimize_attr["learning_rate"],
        optimizer._param_groups[0]["learning_rate"], optimizer._momentum,
        optimizer._grad_clip.clip_norm, optimizer._learning_rate.learning_rate.gamma,
    ]  # fmt: skip


def test_what_a_script_changes_is_carried_and_what_a_process_did_before_is_not():
    model, optimizer = build()
    framework = paddle_framework(model, optimizer, header_size=1)
    assert framework.state.scalars()["traits"] == {}
    change_all(model, optimizer)
    layout = framework.state.layout()
    data = bytearray(layout.total_bytes)
    framework.state.copy_out(memoryview(data))
    scalars = json.loads(json.dumps(framework.state.scalars()))

    other, other_optimizer = build()
    fresh = seen(other, other_optimizer)
    reader = paddle_framework(other, other_optimizer, header_size=1)
    other.drop.p, other.tail.bias.stop_gradient = 0.9, True  # as a warm-up step may
    reader.state.load(layout, memoryview(data), scalars)
    assert seen(other, other_optimizer) == seen(model, optimizer) != fresh
    assert reader.state.scalars()["traits"] == scalars["traits"], "carried on by the next one, too"
    for _ in range(2):
        other.rates.append(9.0)
        reader.state.load(layout, memoryview(data), scalars)
        assert other.rates == model.rates, "a list of its own is put into, not that of the state"

    old = {name: value for name, value in scalars.items() if name != "traits"}
    other, other_optimizer = build()
    reader = paddle_framework(other, other_optimizer, header_size=1)
    other.drop.p = 0.9
    reader.state.load(layout, memoryview(data), old)
    assert other.drop.p == 0.9, "a state of the version before says nothing of it"


def test_a_large_model_in_evaluation_mode_takes_few_words():
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(50)))
    model[7].eval()  # so it is built
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    traits = PaddleTraits(model, [optimizer])
    model.eval()
    model[3].train()
    model[4].note = 1
    found = traits.changed()
    assert found == {
        "layers": {"training": False}, "layer/3": {"training": True}, "layer/4": {"note": 1},
    }  # fmt: skip
    model.train()
    assert traits.changed() == {"layer/7": {"training": True}, "layer/4": {"note": 1}}
    assert traits.apply(found) == []
    assert [each.training for each in model] == [index == 3 for index in range(50)]


@pytest.mark.parametrize(
    "name",
    [
        "SGD", "Momentum", "Adagrad", "Adam", "AdamW", "Adamax", "Adadelta", "RMSProp", "Lamb",
        "NAdam", "Rprop",
    ],
)  # fmt: skip
def test_training_alone_changes_nothing_that_would_have_to_be_carried(name):
    for grouped in (False, True):
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm2D(8), nn.Dropout(0.3), nn.Linear(1, 2))
        given: Any = model.parameters()
        if grouped:
            given = [{"params": given[:2], "learning_rate": 0.5}, {"params": given[2:]}]
        rate = paddle.optimizer.lr.LinearWarmup(0.1, 2, 0.0, 0.1)
        given_rate = 0.1 if name == "Rprop" else rate  # it takes no scheduler
        optimizer = getattr(paddle.optimizer, name)(given_rate, parameters=given)
        traits = PaddleTraits(model, [optimizer])
        assert traits.uncarried_changes() == []
        for _ in range(3):
            value = model[0](paddle.randn([6, 4])).reshape([6, 8, 1, 1])
            model[3](model[2](model[1](value))).mean().backward()
            optimizer.step()
            optimizer.clear_grad()
            rate.step()
        assert traits.changed() == {}
        assert traits.uncarried_changes() == []


def test_what_layers_compute_of_their_parameters_is_no_news():
    model = nn.Sequential(
        nn.utils.weight_norm(nn.Linear(4, 4)), nn.utils.spectral_norm(nn.Linear(4, 4))
    )
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    traits = PaddleTraits(model, [optimizer])
    assert traits.uncarried_changes() == []
    for _ in range(2):
        model(paddle.ones([2, 4])).mean().backward()
        optimizer.step()
        model.eval()
        model(paddle.ones([2, 4]))
        assert traits.uncarried_changes() == []
    model.train()
    assert traits.changed() == {}


def test_clipping_and_decay_of_groups_are_carried_too():
    def built() -> tuple[Any, Any]:
        one, two = nn.Linear(3, 3), nn.Linear(3, 3)
        decay, clip = paddle.regularizer.L1Decay(0.1), nn.ClipGradByGlobalNorm(1.0)
        groups = [
            {"params": one.parameters(), "grad_clip": clip},
            {"params": two.parameters(), "weight_decay": decay},
        ]
        optimizer = paddle.optimizer.Momentum(0.1, parameters=groups)
        return optimizer, PaddleTraits(nn.Sequential(one, two), [optimizer])

    optimizer, traits = built()
    assert traits.changed() == {}
    optimizer._param_groups[0]["grad_clip"].clip_norm = 0.25
    optimizer._param_groups[1]["params"][0].regularizer._coeff = 0.75
    other, other_traits = built()
    assert other_traits.apply(json.loads(json.dumps(traits.changed()))) == []
    assert other._param_groups[0]["grad_clip"].clip_norm == 0.25
    assert other._param_groups[1]["params"][0].regularizer._coeff == 0.75
    assert other_traits.uncarried_changes() == []
    other._param_groups[0]["grad_clip"] = None
    other._param_groups[1]["params"][0].regularizer = None
    assert other_traits.uncarried_changes() == [
        "the optimizer's grad_clip of group 0",
        "parameter 1.weight's regularizer",
    ]


def test_layers_that_to_static_has_come_by_are_no_news():
    model = paddle.jit.to_static(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    traits = PaddleTraits(model, [paddle.optimizer.SGD(0.1, parameters=model.parameters())])
    assert traits.uncarried_changes() == []
    model(paddle.ones([2, 3]))
    assert traits.uncarried_changes() == []


def test_what_no_state_can_carry_is_named_once():
    model, optimizer = build()
    model.register_buffer("center", paddle.zeros([3]), persistable=False)
    model.cache = paddle.zeros([2])
    traits = PaddleTraits(model, [optimizer])
    model.head.register_forward_post_hook(lambda *_: None)  # before the loop: in every process
    assert traits.uncarried_changes() == []
    assert traits.uncarried_changes() == []
    model.head.register_forward_pre_hook(lambda *_: None)
    model.drop = nn.Identity()
    model.tail.forward = lambda batch: batch
    paddle.assign(paddle.ones([3]), model.center)
    model.cache = paddle.ones([2])
    optimizer._grad_clip = None
    optimizer._param_groups[1]["params"].pop()
    model.head.bias = model.head.create_parameter(model.head.bias.shape)
    assert sorted(traits.uncarried_changes()) == [
        "cache of layer Net, a tensor outside of its state_dict",
        "center of layer Net, a tensor outside of its state_dict",
        "forward of layer tail",
        "hooks of layer head",
        "layer drop",
        "parameter head.bias, which is another one now",
        "the optimizer's grad_clip",
        "the optimizer's parameters",
    ]
    assert traits.uncarried_changes() == []


@pytest.mark.parametrize("framework", ["paddle", "torch"])
def test_what_layers_keep_outside_of_a_state_is_known_by_its_values_and_not_by_their_rounding(
    framework: str,
):
    torch = pytest.importorskip("torch") if framework == "torch" else None
    base: Any = torch.nn.Module if torch else nn.Layer
    tensor: Any = torch.tensor if torch else paddle.to_tensor

    class Flow(base):
        def __init__(self, values: dict[str, Any]) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(2, 2) if torch else nn.Linear(2, 2)
            for name, value in values.items():
                setattr(self, name, value)

    def constants(**values: Any) -> list[str]:
        model: Any = Flow(values)
        if torch is None:
            sgd = paddle.optimizer.SGD(0.1, parameters=model.parameters())
        else:
            sgd = torch.optim.SGD(model.parameters(), 0.1)
        found: list[str] = make_framework(model, sgd, header_size=1).state.constants()
        return found

    order = np.random.RandomState(1).permutation(20)
    kinds: list[Callable[[Any], Any]] = [lambda each: each, lambda each: tensor(each / 7)]
    for kind in kinds:
        (said,) = constants(order=kind(order))
        assert said.startswith("order of layer Flow, which no state_dict has, with checksum ")
        assert [said] == constants(order=kind(order)) != constants(order=kind(order[::-1].copy()))
    (exact,) = constants(order=order / 7)
    assert constants(order=order / 7 * (1 + 1e-12)) == [exact]
    places = np.outer(np.arange(512), 1e4 ** (-np.arange(0, 1, 1 / 32))).astype(np.float32)
    noise = np.random.RandomState(2).uniform(-1, 1, places.shape).astype(np.float32)
    table = np.cos(places)  # many of whose numbers are all but equal
    other = table + np.float32(2e-7) * noise  # as of another processor, or number of threads
    assert constants(table=kind(table)) == constants(table=kind(other))
    assert constants(table=table) != constants(table=np.sin(places))
    turns = np.exp(1j * np.arange(5000.0))  # as of rotary embeddings
    assert constants(turns=turns) == constants(turns=turns) != constants(turns=turns.conj())
    assert len(constants(turns=tensor(turns))) == 1
    every = np.broadcast_to(np.arange(7.0), (2**40, 7))  # which no copy is made of
    assert len(constants(every=every)) == 1
    assert constants(room=np.zeros(9), name="a", count=3, sizes=[4, 5]) == []


def test_a_training_that_goes_on_with_another_permutation_of_its_model_says_so(tmp_path, caplog):
    """As one that is drawn without a seed when the model is built: no state has it."""

    def train(order: list[int], epochs: int) -> list[str]:
        caplog.clear()
        model, optimizer = build()
        model.order = np.array(order)
        loop = elastic.Loop(
            model, optimizer, Data(), batch_size=6, epochs=epochs, checkpoint=tmp_path
        )
        for epoch in loop.epochs():
            for step in epoch:
                for batch in step:
                    step.backward((model(batch) ** 2).mean())
                step.update()
        return [each for each in caplog.messages if "which" not in each and "in no state" in each]

    assert train([2, 0, 1], 1) == train([2, 0, 1], 2) == []
    (said,) = train([0, 1, 2], 3)
    assert said.startswith("model: the state of step 6 was made with other values")
    assert "call paddle.seed(...) before it is built" in said


def test_lists_of_a_layer_and_what_an_optimizer_keeps_beside_its_state_are_named_once():
    class Noting(paddle.optimizer.SGD):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.pace, self.rates = paddle.zeros([1]), deque([0.1])

    class Remembering(Net):
        def __init__(self) -> None:
            super().__init__()
            self.means: list[float] = []
            self.kept: dict[str, Any] = {"newest": paddle.zeros([2]), "tail": self.tail.weight}

    model = Remembering()
    optimizer = Noting(0.1, parameters=model.parameters())
    traits = PaddleTraits(model, [optimizer])
    assert traits.uncarried_changes() == []
    model(paddle.ones([2, 3])).mean().backward()
    optimizer.step()
    model.means += [0.5] * 16
    assert traits.uncarried_changes() == [], "training alone changes nothing"
    assert traits.changed()["layer/"] == {"means": [0.5] * 16}
    model.means.append(0.5)
    model.kept["newest"] += 1
    optimizer.pace += 1
    optimizer.rates.append(0.2)
    assert sorted(traits.uncarried_changes()) == [
        "kept of layer Remembering, a dict",
        "means of layer Remembering, a list",
        "pace of the optimizer, a tensor outside of its state",
        "rates of the optimizer, a deque",
    ]
    assert traits.uncarried_changes() == []


def test_what_a_schedule_of_the_script_keeps_beside_its_state_is_named_once():
    class ByHistory(paddle.optimizer.lr.LRScheduler):
        def __init__(self) -> None:
            self.losses: deque[float] = deque(maxlen=3)
            self.known = {"best": 0.0}
            self.after = [paddle.optimizer.lr.StepDecay(0.1, 2), Following()]
            super().__init__(0.1)

        def state_keys(self) -> None:
            self.keys = ["last_epoch", "last_lr", "known"]

        def get_lr(self) -> float:
            return float(self.after[0]())

    class Following(paddle.optimizer.lr.LRScheduler):
        def get_lr(self) -> float:
            return float(0.1 / (1 + self.last_epoch))

    model = nn.Linear(3, 1)
    schedule = ByHistory()
    traits = PaddleTraits(model, [paddle.optimizer.SGD(schedule, parameters=model.parameters())])
    assert traits.uncarried_changes() == []
    for each in (schedule, *schedule.after):
        each.step()
    schedule.known["best"] = 0.5
    assert traits.uncarried_changes() == []
    schedule.losses.append(0.5)
    name = "losses of the optimizer's ByHistory, whose state_keys() leaves it out, a deque"
    assert traits.uncarried_changes() == [name]
    assert traits.uncarried_changes() == []


class Phase(Enum):
    BEGIN = 0
    END = 1


class Annealer:
    def __init__(self) -> None:
        self.rate, self.past = 1.0, [Fraction(1)]

    def step(self) -> None:
        self.rate *= 0.9


@pytest.mark.parametrize("framework", ["paddle", "torch"])
def test_numbers_of_numpy_are_carried_and_objects_of_a_layer_are_named(framework: str):
    layers = pytest.importorskip(framework).nn

    class Annealed(layers.Layer if framework == "paddle" else layers.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.head = layers.Linear(2, 2)
            self.rate, self.rates, self.seed = 1.0, [1.0, 1], None
            self.phase, self.annealer, self.act = Phase.BEGIN, Annealer(), build

    def make() -> tuple[Any, Any]:
        if framework == "paddle":
            model = Annealed()
            return model, PaddleTraits(
                model, [paddle.optimizer.SGD(0.1, parameters=model.parameters())]
            )
        from pod_runtime.trainer.frameworks.torch.traits import TorchTraits

        model = Annealed()
        return model, TorchTraits(model)

    model, traits = make()
    assert traits.uncarried_changes() == []
    model.rate = np.maximum(model.rate * np.exp(-0.01), 0.3)
    model.rates[0] = np.float32(0.5)
    model.seed = np.uint8(3)
    model.annealer.step()
    model.phase = Phase.END
    model.act = seen
    carried = json.loads(json.dumps(traits.changed()))
    assert carried == {"layer/": {"rate": np.exp(-0.01), "rates": [0.5, 1], "seed": 3}}
    assert sorted(traits.uncarried_changes()) == [
        "act of layer Annealed, a function",
        "annealer of layer Annealed, an Annealer",
        "phase of layer Annealed, a Phase",
    ]
    tensor = model.head.weight.detach()
    model.seed, model.rates = np.zeros(3), [tensor, np.zeros(2)]
    assert traits.changed() == {"layer/": {"rate": np.exp(-0.01)}}, "arrays are no plain values"
    model.rate, model.seed = tensor, np.longdouble(3)
    assert json.dumps(traits.changed()) == '{"layer/": {"seed": 3.0}}'
    other, other_traits = make()
    other_traits.apply(carried)
    assert (other.rate, other.rates, other.seed) == (np.exp(-0.01), [0.5, 1], 3)


class Table(nn.Layer):
    """Makes its table when it first needs it, and says so in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(1, 1)
        self.length = 0
        self.table: Any = None
        self.newest: Any = None

    def forward(self, batch: Any) -> Any:
        count = batch.shape[1]
        if count > self.length:
            self.table, self.length = paddle.arange(count).astype("float32"), count
        return self.scale((batch + self.table[:count]).mean(axis=1, keepdim=True))


def test_what_a_layer_says_of_a_tensor_that_no_state_has_is_not_carried_without_it(tmp_path):
    def train(stop_after: int | None) -> list[float]:
        paddle.seed(3)
        model = Table()
        optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
        loop = elastic.Loop(
            model, optimizer, Data(), epochs=1, batch_size=3, checkpoint=tmp_path, save_steps=1
        )
        for epoch in loop.epochs():
            for step in epoch:
                for batch in step:
                    step.backward(model(batch).mean())
                step.update()
                finish_writing()
                if step.number == stop_after:
                    return []
        return [float(each.sum()) for each in model.parameters()]

    train(3)
    assert np.isfinite(train(None)).all()


def test_what_a_script_sets_on_a_layer_that_notes_its_newest_tensors_is_carried():
    model = Table()
    traits = PaddleTraits(model, [paddle.optimizer.SGD(0.1, parameters=model.parameters())])
    for _ in range(4):
        model.newest = paddle.zeros([2])
        model.length = 5
        traits.uncarried_changes()
    assert traits.changed() == {"layer/": {"length": 5}}
    model.table = paddle.zeros([5])
    for _ in range(2):
        traits.uncarried_changes()
    model.eval()
    assert traits.changed() == {"layers": {"training": False}}


def test_an_evaluation_leaves_the_modes_in_the_state_as_they_are():
    model, optimizer = build()
    framework = paddle_framework(model, optimizer, header_size=1)
    model.norm.eval()
    before = framework.state.scalars()["traits"]
    with framework.state.evaluating():
        assert not model.training
        assert framework.state.scalars()["traits"] == before == {"layer/norm": {"training": False}}
    assert model.training
    assert not model.norm.training


# --- a training with changes is as one without


@dataclass
class Script:
    """A training script's own lines, by where they stand."""

    before: Callable[[Net, Any], None] = lambda model, optimizer: None  # the loop
    body: Callable[[Net, Any, int], None] = lambda model, optimizer, epoch: None
    step: Callable[[Net, Any, int], None] = lambda model, optimizer, number: None
    after: Callable[[Net, Any, int], None] = lambda model, optimizer, epoch: None
    asks: bool = True  # for the number of the epoch at the top of its body
    seen: dict[int, Any] = field(default_factory=dict)  # by step

    def run(self, folder: Path | None, stop_at: int | None = None) -> elastic.Loop:
        """Train from what is in the folder to the end, or leave before the step `stop_at`."""
        model, optimizer = build()
        loop = elastic.Loop(
            model, optimizer, Data(), batch_size=6, epochs=4, checkpoint=folder, save_steps=1
        )
        self.before(model, optimizer)
        for epoch in loop.epochs():
            self.body(model, optimizer, epoch.number if self.asks else -1)
            for step in epoch:
                if not step.is_warmup:
                    finish_writing()  # so that each state is written
                    if step.number == stop_at:
                        return loop
                    weight = float(model.head.weight.abs().sum())
                    self.seen[step.number] = [*seen(model, optimizer), optimizer.get_lr(), weight]
                for batch in step:
                    step.backward((model(batch) ** 2).mean())
                step.update()
                if not step.is_warmup:
                    self.step(model, optimizer, step.number)
            self.after(model, optimizer, epoch.number)
        return loop


def vit_step(model: Net, optimizer: Any, number: int) -> None:
    optimizer._learning_rate.step()
    if number == 1:
        model.drop.p = 0.25


def scale(model: Net) -> None:
    model.head.weight.set_value(0.5 * model.head.weight)


SCRIPTS = {
    # As Paddle's own ViT tutorial: after its first validation it trains in evaluation mode.
    "never trains again": Script(after=lambda model, _o, _e: model.eval(), step=vit_step),
    "trains once before the loop": Script(
        before=lambda model, _o: model.train(), after=lambda model, _o, _e: model.eval()
    ),
    "trains at the top": Script(
        body=lambda model, _o, _e: model.train(),
        step=lambda model, _o, number: model.norm.eval() if number % 3 == 0 else None,
        after=lambda model, _o, _e: model.eval(),
    ),
    "asks nothing": Script(
        body=lambda model, _o, _e: model.tail.train(),
        after=lambda model, _o, _e: model.eval(),
        asks=False,
    ),
    "asks nothing, never trains again": Script(
        after=lambda model, _o, _e: model.eval(), asks=False
    ),
    "unfreezes": Script(
        before=lambda model, _o: setattr(model.head.weight, "stop_gradient", True),
        body=lambda model, _o, epoch: (
            setattr(model.head.weight, "stop_gradient", False) if epoch == 1 else None
        ),
    ),
    "scales a weight at the top": Script(body=lambda model, _o, _e: scale(model)),
    "scales a weight before the epochs": Script(before=lambda model, _o: scale(model)),
    "schedules at the top": Script(body=lambda _m, optimizer, _e: optimizer._learning_rate.step()),
}


@pytest.fixture
def overlapping(monkeypatch) -> Callable[[bool], None]:
    """Have the next loops prepared beside an older stage, which leaves them a checkpoint."""

    def switch(on: bool) -> None:
        monkeypatch.setattr(StageJoiner, "overlaps", on)
        monkeypatch.setattr(StageJoiner, "_wait_for_start", lambda _self: None)

    return switch


@pytest.mark.parametrize("overlaps", [False, True], ids=["started anew", "prepared"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_every_step_is_made_as_in_a_training_without_changes(name, overlaps, overlapping, tmp_path):
    pattern = SCRIPTS[name]
    alone = Script(pattern.before, pattern.body, pattern.step, pattern.after, pattern.asks)
    alone.run(None)
    assert len(alone.seen) == 12
    changed = Script(pattern.before, pattern.body, pattern.step, pattern.after, pattern.asks)
    for stop_at in (2, 3, 7, 9, None):  # amid epochs, and between two
        overlapping(overlaps and stop_at != 2)
        changed.run(tmp_path, stop_at)
    assert changed.seen == alone.seen


@pytest.mark.parametrize(
    ("body", "is_seen"),
    [
        (lambda _m, optimizer, _e: optimizer._learning_rate.step(), False),
        # It reads the model, so the state comes before that.
        (lambda model, _o, _e: scale(model), True),
    ],
    ids=["steps a scheduler", "scales a weight"],
)
@pytest.mark.parametrize(("stop_at", "between"), [(2, False), (3, True), (4, False)])
def test_a_body_that_has_begun_before_a_state_from_between_two_epochs_begins_again(
    stop_at, between, body, is_seen, overlapping, tmp_path
):
    alone = Script(body=body, asks=False)
    alone.run(None)
    changed = Script(body=body, asks=False)
    changed.run(tmp_path, stop_at)
    overlapping(True)
    if between and not is_seen:
        with pytest.raises(elastic.StateError, match=r"epoch 1 has set the learning rate.*without"):
            changed.run(tmp_path)
        overlapping(False)
    changed.run(tmp_path)
    assert changed.seen == alone.seen


def test_changes_that_get_lost_are_told_before_the_first_change(caplog):
    script = Script(
        step=lambda model, _o, number: (
            model.head.register_forward_post_hook(lambda *_: None) if number == 0 else None
        )
    )
    with caplog.at_level(logging.WARNING):
        script.run(None)
    assert caplog.text.count("no state can carry it: hooks of layer head. A trainer") == 1
