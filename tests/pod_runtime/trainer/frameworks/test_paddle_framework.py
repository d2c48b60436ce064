"""The parts for Paddle, in this process: states, gradients, buffers, precision, refusals."""

import json
import random
from collections import Counter
from contextlib import nullcontext
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from paddle import nn
from paddle.distributed import parallel
from paddle.optimizer import lr

from pod_runtime.trainer.errors import PeerLost, StateError, UsageError
from pod_runtime.trainer.frameworks.framework import Framework, GroupSpec
from pod_runtime.trainer.frameworks.paddle.framework import paddle_framework
from pod_runtime.trainer.frameworks.paddle.gradients import GradientExchange, ShardBuffers
from pod_runtime.trainer.frameworks.paddle.second_group import own_flags_unsaid
from pod_runtime.trainer.frameworks.paddle.state import PaddleOptimizer
from pod_runtime.trainer.frameworks.paddle.tensors import fingerprint

HEADER = 3
pytestmark = pytest.mark.filterwarnings("ignore:When training, we now always track")


class Scaler:
    """A paddle.amp.GradScaler, which turns itself off without a GPU: scale, and double it twice."""

    def __init__(self) -> None:
        self.factor, self.steps = 64.0, 0

    def is_enable(self) -> bool:
        return True

    def scale(self, loss: Any) -> Any:
        return loss * self.factor

    def step(self, optimizer: Any) -> None:
        for parameter in optimizer._parameter_list:
            if parameter.grad is not None:
                parameter.grad = parameter.grad / self.factor
        optimizer.step()

    def update(self) -> None:
        self.steps += 1
        if self.steps % 2 == 0:
            self.factor *= 2

    def state_dict(self) -> dict[str, Any]:
        return {"scale": np.array([self.factor], np.float32), "incr_count": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.factor, self.steps = float(state["scale"][0]), state["incr_count"]


class Counts:
    """An object of the script's own that belongs to the state, as a moving average of weights."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"mean": paddle.zeros([2]), "deep": {"n": 0}, "name": "a"}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def set_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def network(seed: int = 1, dtype: str = "float32") -> Any:
    paddle.seed(seed)
    paddle.set_default_dtype(dtype)
    try:
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1D(8), nn.ReLU(), nn.Linear(8, 1))
    finally:
        paddle.set_default_dtype("float32")


def make(kind: str, seed: int = 1) -> tuple[Any, Any, Any, Any]:
    """Return (framework, model, optimizer, scheduler or None) of a training of this kind."""
    model = network(seed)
    parameters = model.parameters()
    scaler, extra, scheduler = None, {}, None
    if kind == "momentum":
        optimizer: Any = paddle.optimizer.Momentum(0.1, parameters=parameters)
    elif kind == "scheduler":
        scheduler = paddle.optimizer.lr.ReduceOnPlateau(0.1, patience=1)
        optimizer = paddle.optimizer.Adam(scheduler, parameters=parameters)
        extra = {"counts": Counts()}
    else:
        optimizer = paddle.optimizer.AdamW(0.1, parameters=parameters)
        scaler = Scaler()
    framework = paddle_framework(model, optimizer, header_size=HEADER, scaler=scaler, extra=extra)
    return framework, model, optimizer, scheduler


def step(framework: Framework, model: Any, seed: int) -> None:
    """One global batch of two shards, the second one short."""
    data = np.random.RandomState(seed).randn(6, 4).astype("float32")
    framework.step.begin()
    for piece in (data[:4], data[4:]):
        loss = (model(framework.data.to_batch(piece)) ** 2).mean()
        framework.step.backward(loss, len(piece) / 6)
        framework.step.end_shard()
    framework.step.exchange([0.0, 0.0, 6.0], True)
    framework.step.apply(filled_shards=2, lr_factor=1.0)


def take(framework: Framework) -> tuple[Any, bytearray, dict[str, Any]]:
    layout = framework.state.layout()
    data = bytearray(layout.total_bytes)
    framework.state.copy_out(memoryview(data))
    return layout, data, json.loads(json.dumps(framework.state.scalars()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool"])
def test_fingerprints_tell_values_signs_and_order(dtype):
    each = paddle.arange(-2, 5).astype(dtype)
    others = [paddle.concat([each[-1:], each[:-1]]), each[:-1]]
    others += [each + 1, -each] if dtype != "bool" else [~each]
    assert fingerprint(each) == fingerprint(each.clone())
    assert fingerprint(each) not in [fingerprint(other) for other in others]


@pytest.mark.parametrize("kind", ["momentum", "scheduler", "scaler"])
def test_a_state_that_is_carried_over_trains_on_bit_by_bit(kind):
    framework, model, _optimizer, scheduler = make(kind)
    for number in range(3):
        step(framework, model, number)
        if scheduler is not None:
            scheduler.step(1.0)
    layout, data, scalars = take(framework)

    other, other_model, _other_optimizer, other_scheduler = make(kind, seed=2)
    other.state.load(layout, memoryview(data), scalars)
    # Taken again before any step, it is the same: nothing of it waits for the optimizer.
    assert take(other)[1:] == (data, scalars)
    for number in range(3, 6):
        step(framework, model, number)
        step(other, other_model, number)
        if scheduler is not None:
            scheduler.step(1.0)
            other_scheduler.step(1.0)
    after = take(framework)
    assert bytes(take(other)[1]) == bytes(after[1])
    assert take(other)[2] == after[2]
    assert [spec.name for spec in after[0].specs] == [spec.name for spec in layout.specs]
    assert bytes(after[1]) != bytes(data)


@pytest.mark.parametrize("kind", ["Momentum", "Adam", "Adamax"])
def test_a_layer_that_is_frozen_where_a_process_begins_keeps_its_accumulators(kind: str):
    """Paddle lays aside what it has loaded until a step uses it, and says nothing of it then."""

    def made() -> tuple[Framework, Any]:
        paddle.seed(1)
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))  # all of it is trained
        optimizer = getattr(paddle.optimizer, kind)(0.1, parameters=model.parameters())
        return paddle_framework(model, optimizer, header_size=HEADER), model

    def train(*, anew: bool) -> bytes:
        framework, model = made()
        for number, is_frozen in enumerate((False, True, True, False)):
            for parameter in model[0].parameters():
                parameter.stop_gradient = is_frozen
            step(framework, model, number)
            if anew:
                layout, data, scalars = take(framework)
                framework, model = made()
                framework.state.load(layout, memoryview(data), scalars)
        return bytes(take(framework)[1])

    assert train(anew=True) == train(anew=False)


@pytest.mark.parametrize("kind", ["Momentum", "AdamW"])
def test_a_state_goes_on_where_another_optimizer_has_stepped_the_model_before(kind: str):
    """Paddle numbers the accumulators of the second one otherwise: w_0_moment1_1."""

    def made() -> tuple[Framework, Any]:
        paddle.seed(1)
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
        before = getattr(paddle.optimizer, kind)(0.1, parameters=model.parameters())
        model(paddle.ones([2, 4])).mean().backward()
        before.step()
        before.clear_grad(set_to_zero=False)
        optimizer = getattr(paddle.optimizer, kind)(0.1, parameters=model.parameters())
        return paddle_framework(model, optimizer, header_size=HEADER), model

    framework, model = made()
    step(framework, model, 0)
    layout, data, scalars = take(framework)
    other, other_model = made()
    other.state.load(layout, memoryview(data), scalars)
    assert take(other)[1:] == (data, scalars)
    for each, of in ((framework, model), (other, other_model)):
        step(each, of, 1)
    assert take(other)[1] == take(framework)[1]


def test_a_state_is_keyed_by_structured_names():
    framework, model, _optimizer, _scheduler = make("momentum")
    step(framework, model, 1)
    names = [spec.name for spec in framework.state.layout().specs]
    assert "model/1._mean" in names
    assert "optimizer/3.weight.velocity" in names


class Unscanned(dict[str, str]):
    """What is looked up, and never gone through."""

    def __iter__(self) -> Any:
        raise AssertionError("of 5,000 parameters it takes a minute, at each change of the pods")


def test_an_accumulator_is_known_without_going_through_all_parameters():
    model = nn.Layer()
    for name in ("a", "a_b", "a_b_c"):
        model.add_parameter(name, model.create_parameter([2], attr=paddle.ParamAttr(name=name)))
    optimizer = paddle.optimizer.Adam(0.1, parameters=model.parameters())
    sum(each.sum() for each in model.parameters()).backward()
    optimizer.step()
    state = PaddleOptimizer(model, optimizer)
    state._structured = Unscanned(state._structured)
    kinds = ("moment1", "moment2", "beta1_pow_acc", "beta2_pow_acc")
    owners = ("a", "a_b", "a_b_c")
    expected = {f"{owner}.{kind}" for owner in owners for kind in kinds}
    assert {name for name, _tensor in state.tensors()} == expected
    with pytest.raises(StateError, match="b_moment1_0 belongs to no parameter"):
        state._structured_name("b_moment1_0")


def test_master_weights_go_with_their_parameter():
    # Paddle makes them on GPUs only.
    framework, model, optimizer, _scheduler = make("momentum")
    weight = model[0].weight
    optimizer._master_weights = {weight.name: paddle.full([4, 8], 1.5)}
    layout, data, scalars = take(framework)
    assert "optimizer/0.weight.master_weight" in [spec.name for spec in layout.specs]
    other, other_model, other_optimizer, _scheduler = make("momentum", seed=2)
    other.state.load(layout, memoryview(data), scalars)
    (loaded,) = other_optimizer._master_weights.items()
    assert loaded[0] == other_model[0].weight.name
    assert (loaded[1].numpy() == 1.5).all()


def test_objects_of_the_script_travel_with_the_state():
    _framework, model, _optimizer, _scheduler = make("scheduler")
    counts = Counts()
    counts.state = {"mean": paddle.to_tensor([1.0, 2.0]), "deep": {"n": 7}, "name": "b"}
    counts.state["deep"]["history"] = np.array([[1, 2], [3, 4]])
    mine = paddle_framework(model, _optimizer, header_size=HEADER, extra={"counts": counts})
    step(mine, model, 1)
    layout, data, scalars = take(mine)
    fresh = Counts()
    other = network(2)
    scheduler = paddle.optimizer.lr.ReduceOnPlateau(0.1, patience=1)
    optimizer = paddle.optimizer.Adam(scheduler, parameters=other.parameters())
    framework = paddle_framework(other, optimizer, header_size=HEADER, extra={"counts": fresh})
    framework.state.load(layout, memoryview(data), scalars)
    assert fresh.state["mean"].tolist() == [1.0, 2.0]
    history = fresh.state["deep"].pop("history")
    assert isinstance(history, np.ndarray)
    assert history.tolist() == [[1, 2], [3, 4]]
    assert (fresh.state["deep"], fresh.state["name"]) == ({"n": 7}, "b")


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"": 1, "a": 2},
        {"rows": [{1: 2}]},
        {"random": random.Random(3).getstate()},
        [1, 2],
        {"of": {3: 0.5, 4: {}}},
        {"n": Counter([1, 1])},
        {"a": {"b/c": 1}, "b": {"[0]": {"c": 1}}},
        {1: 2},
        {"a": {"[0]": 1, "b": {(1, 2): None}}},
    ],
)
def test_plain_values_of_an_object_come_back_as_they_were(state):
    counts, fresh = Counts(), Counts()
    counts.state = state
    (model, optimizer), (other, other_optimizer) = (make("momentum")[1:3] for _ in range(2))
    mine = paddle_framework(model, optimizer, header_size=HEADER, extra={"counts": counts})
    layout, data, scalars = take(mine)
    theirs = paddle_framework(other, other_optimizer, header_size=HEADER, extra={"counts": fresh})
    theirs.state.load(layout, memoryview(data), json.loads(json.dumps(scalars)))
    assert fresh.state == state


def test_objects_by_names_with_a_slash_travel_with_the_state():
    (model, optimizer), (other, other_optimizer) = (make("momentum")[1:3] for _ in range(2))
    mine, theirs = ({"ema": Counts(), "ema/0.9": Counts()} for _ in range(2))
    for number, each in enumerate(mine.values(), 1):
        each.state = {"mean": paddle.full([2], float(number))}
    layout, data, scalars = take(paddle_framework(model, optimizer, header_size=HEADER, extra=mine))
    framework = paddle_framework(other, other_optimizer, header_size=HEADER, extra=theirs)
    framework.state.load(layout, memoryview(data), scalars)
    assert [each.state["mean"].tolist() for each in theirs.values()] == [[1.0, 1.0], [2.0, 2.0]]


def test_a_tensor_by_a_number_is_refused_by_name():
    counts = Counts()
    counts.state = {"means": {3: paddle.ones([2])}}
    _framework, model, optimizer, _scheduler = make("momentum")
    with pytest.raises(StateError, match=r"extra counts: keys of tensors must be text .*, got 3"):
        paddle_framework(model, optimizer, header_size=HEADER, extra={"counts": counts})


def test_a_loss_that_the_script_scales_itself_is_refused():
    model, scaler = network(), Scaler()
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    for _again in range(2):  # two trainings with one scaler
        framework = paddle_framework(model, optimizer, header_size=HEADER, scaler=scaler)
        step(framework, model, 1)
        scaled = scaler.scale(model(paddle.ones([2, 4])).mean())
        with pytest.raises(UsageError, match=r"the script has called scaler\.scale before"):
            framework.step.backward(scaled, 1.0)
        framework.step.drop()


def test_a_date_is_refused_before_the_first_step():
    counts = Counts()
    counts.state = {"since": np.datetime64("2026-01-01")}
    _framework, model, optimizer, _scheduler = make("momentum")
    with pytest.raises(StateError, match="since: a datetime64 cannot be stored"):
        paddle_framework(model, optimizer, header_size=HEADER, extra={"counts": counts})


def test_an_array_of_a_type_that_cannot_be_stored_is_refused_before_the_first_step():
    counts = Counts()
    counts.state = {"names": np.array(["a", "b"])}
    _framework, model, optimizer, _scheduler = make("momentum")
    with pytest.raises(StateError, match=r"extra/counts/names: .*<U1 cannot be stored; keep it as"):
        paddle_framework(model, optimizer, header_size=HEADER, extra={"counts": counts})


def test_a_schedule_that_is_told_arrays_goes_on():
    framework, model, _optimizer, schedule = make("scheduler")
    step(framework, model, 1)
    schedule.step(np.array([0.5]))
    layout, data, scalars = take(framework)
    other, _model, _other_optimizer, other_schedule = make("scheduler", seed=2)
    other.state.load(layout, memoryview(data), json.loads(json.dumps(scalars)))
    for each in (schedule, other_schedule):
        each.step(np.array([0.7]))
        each.step(np.array([0.6]))
    assert other_schedule.last_lr == schedule.last_lr < 0.1


class WarmUp(lr.LRScheduler):
    """A schedule of the script's own that goes over to others, which it steps itself."""

    def __init__(self, *after: Any) -> None:
        self.after = list(after)
        for each in after:
            each.holder = self
        super().__init__(0.1)

    def get_lr(self) -> float:
        return self.last_epoch / 10 if self.last_epoch < 2 else float(self.now())

    def step(self, epoch: int | None = None) -> None:
        if self.last_epoch >= 2:
            self.now.step()
        super().step(epoch)

    @property
    def now(self) -> Any:
        return self.after[self.last_epoch // 5 % 2]


@pytest.mark.filterwarnings("ignore:There are some unused values")  # of every LinearWarmup
def test_a_schedule_that_holds_others_goes_on_with_theirs():
    def made() -> tuple[Framework, Any]:
        warm = lr.LinearWarmup(lr.StepDecay(0.1, 2), 2, 0.0, 0.1)
        schedule = WarmUp(warm, lr.CosineAnnealingWarmRestarts(0.1, 3))
        model = network()
        optimizer = paddle.optimizer.SGD(schedule, parameters=model.parameters())
        return paddle_framework(model, optimizer, header_size=HEADER), schedule

    framework, schedule = made()
    for _ in range(7):
        schedule.step()
    layout, data, scalars = take(framework)
    other, other_schedule = made()
    other.state.load(layout, memoryview(data), json.loads(json.dumps(scalars)))
    rates = []
    for each in (schedule, other_schedule):
        rates.append([(each(), each.step())[0] for _ in range(9)])
    assert rates[1] == rates[0]


def test_a_learning_rate_that_the_script_set_travels_too():
    framework, model, optimizer, _scheduler = make("momentum")
    optimizer.set_lr(0.025)
    step(framework, model, 1)
    layout, data, scalars = take(framework)
    other, _model, other_optimizer, _scheduler = make("momentum", seed=2)
    other.state.load(layout, memoryview(data), scalars)
    assert other_optimizer.get_lr() == 0.025


@pytest.mark.parametrize("kind", ["momentum", "scheduler"])
def test_the_learning_rate_of_one_step_is_scaled_and_put_back(kind):
    moved = []
    for factor in (1.0, 0.5):
        model = network()
        rate: Any = 0.1
        if kind == "scheduler":
            rate = paddle.optimizer.lr.StepDecay(0.1, step_size=100)
        optimizer = paddle.optimizer.SGD(rate, parameters=model.parameters())
        framework = paddle_framework(model, optimizer, header_size=HEADER)
        before = model[0].weight.numpy().copy()
        framework.step.begin()
        framework.step.backward(model(paddle.ones([2, 4])).mean(), 1.0)
        framework.step.end_shard()
        framework.step.exchange([0.0] * HEADER, True)
        framework.step.apply(filled_shards=1, lr_factor=factor)
        moved.append(model[0].weight.numpy() - before)
        assert optimizer.get_lr() == 0.1
    assert np.allclose(moved[1], 0.5 * moved[0])


def test_accumulated_shards_give_the_gradient_of_the_whole_batch():
    # Without batch norm, whose statistics belong to the shard.
    def trained(cuts: list[int]) -> Any:
        paddle.seed(3)
        model = nn.Linear(4, 2)
        optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
        framework = paddle_framework(model, optimizer, header_size=HEADER)
        data = np.random.RandomState(0).randn(7, 4).astype("float32")
        framework.step.begin()
        for piece in np.split(data, cuts):
            framework.step.backward(
                (model(framework.data.to_batch(piece)) ** 2).mean(), len(piece) / 7
            )
            framework.step.end_shard()
        framework.step.exchange([0.0] * HEADER, True)
        framework.step.apply(filled_shards=len(cuts) + 1, lr_factor=1.0)
        return model.weight.numpy()

    assert np.allclose(trained([]), trained([3, 6]), atol=1e-6)


def test_buffers_move_by_the_mean_change_of_the_shards():
    norm = nn.BatchNorm1D(2, momentum=0.5)
    framework = paddle_framework(
        norm, paddle.optimizer.SGD(0.1, parameters=norm.parameters()), header_size=HEADER
    )
    framework.step.begin()
    for value in (2.0, 4.0):
        norm(paddle.full([3, 2], value))
        framework.step.end_shard()
        assert norm._mean.tolist() == [0.0, 0.0], "the next shard begins with the step's values"
    framework.step.exchange([0.0] * HEADER, True)
    framework.step.apply(filled_shards=2, lr_factor=1.0)
    assert norm._mean.tolist() == [1.5, 1.5]  # half of the mean of 2 and 4


class Replacing(nn.Layer):
    """Counts its calls in a buffer, by a new tensor each time."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 1)
        self.calls: Any
        self.register_buffer("calls", paddle.zeros([1]))

    def forward(self, inputs: Any) -> Any:
        self.calls = self.calls + 1
        return self.inner(inputs)


def test_a_buffer_that_is_replaced_in_a_forward_pass_counts_as_one_that_is_written_to():
    model = Replacing()
    framework = paddle_framework(
        model, paddle.optimizer.SGD(0.1, parameters=model.parameters()), header_size=HEADER
    )
    for number in (1, 2):
        framework.step.begin()
        for _ in range(2):
            framework.step.backward(model(paddle.ones([1, 2])).sum(), 0.5)
            framework.step.end_shard()
            assert model.calls.item() == number - 1, "the next shard begins with the step's"
        framework.step.exchange([0.0] * HEADER, True)
        framework.step.apply(filled_shards=2, lr_factor=1.0)
        assert model.calls.item() == number
    model.calls = paddle.full([1], 7.0)
    layout, data, _scalars = take(framework)
    spec = next(each for each in layout.specs if each.name == "model/calls")
    assert np.frombuffer(data, np.float32, 1, spec.offset).item() == 7.0
    model.calls = paddle.zeros([2])
    with pytest.raises(UsageError, match=r"its buffer calls is \[1\] paddle.float32, and was rep"):
        framework.step.begin()


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_what_two_ranks_would_exchange_adds_up(on_host, dtype):
    """Doubling stands for the all-reduce of two equal ranks, on host memory and as on a device."""
    norm = nn.BatchNorm1D(2, momentum=0.5)
    used, unused, norm_weight = (nn.Linear(3, 2).weight for _ in range(3))
    used = used.astype(dtype).detach()
    used.grad = paddle.to_tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]).astype(dtype)
    norm_weight.grad = paddle.full([3, 2], 0.25)
    buffers = ShardBuffers(norm, on_host)
    exchange = GradientExchange([used, unused, norm_weight], buffers, HEADER, on_host)
    buffers.begin_step()
    for loss, weight in ((paddle.to_tensor([0.5, 0.75]), 2.0), (norm_weight.sum() * 0 + 1, 0.25)):
        buffers.loss.add(loss.astype(dtype), weight)
    norm(paddle.full([3, 2], 4.0))
    buffers.end_shard()

    def double(tensor: Any) -> None:
        paddle.assign(tensor * 2, tensor)

    for _ in range(2):  # it leaves the local gradients alone, so it may be repeated
        assert exchange.run([1.0, 0.0, 3.0], True, double) == [2.0, 0.0, 6.0]
        assert used.grad.astype("float32").tolist()[0] == [1.0, 2.0]
        assert (buffers.loss.value.item(), buffers.loss.value.shape) == (5.5, [])
        assert buffers.loss.value.stop_gradient
    exchange.put_back(filled_shards=2)
    assert used.grad.astype("float32").tolist() == [[2.0, 4.0], [6.0, 8.0], [10.0, 12.0]]
    assert used.grad.dtype == used.dtype
    assert norm_weight.grad.tolist() == [[0.5, 0.5]] * 3
    assert unused.grad is None, "no rank had a gradient: the optimizer has to skip it"
    assert norm._mean.tolist() == [2.0, 2.0]
    # A rank without data adds zeros.
    assert exchange.run([0.0, 1.0, 0.0], False, double) == [0.0, 2.0, 0.0]
    assert buffers.loss.value.item() == 0.0


def test_a_rank_without_a_shard_gets_the_gradients_of_the_others():
    weight = nn.Linear(2, 1).weight
    buffers = ShardBuffers(nn.Linear(1, 1), True)
    exchange = GradientExchange([weight], buffers, HEADER, True)

    def others(tensor: Any) -> None:
        paddle.assign(paddle.to_tensor([0.0, 0.0, 4.0, 2.5, 1.0, 7.0, 8.0]), tensor)

    assert exchange.run([0.0, 0.0, 0.0], True, others) == [0.0, 0.0, 4.0]
    assert buffers.loss.value.item() == 2.5
    exchange.put_back(filled_shards=1)
    assert weight.grad.tolist() == [[7.0], [8.0]]


def test_a_world_of_one_needs_no_group():
    framework, model, _optimizer, _scheduler = make("momentum")
    framework.group.form(GroupSpec(rank=0, world_size=1, master="", generation=1))
    values = np.array([1.0, 2.0])
    framework.group.all_reduce(values)
    assert values.tolist() == [1.0, 2.0]
    assert framework.step.exchange([1.0, 2.0, 3.0], True) == [1.0, 2.0, 3.0]
    with framework.state.evaluating():
        assert not model.training
    assert model.training


@pytest.mark.parametrize("rank", [0, 1])
def test_a_group_by_ipv6_which_paddle_cannot_form_is_refused_with_the_remedy(rank):
    framework, *_ = make("momentum")
    spec = GroupSpec(rank=rank, world_size=2, master="fd00::1:22100", generation=1)
    with pytest.raises(UsageError, match=r"by IPv6, as at fd00::1; .*--addr"):
        framework.group.form(spec)
    framework.group.form(GroupSpec(rank=0, world_size=1, master="fd00::1:22100", generation=1))


def form_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test plays the other ranks."""
    monkeypatch.setattr(dist, "init_parallel_env", lambda: None)
    monkeypatch.setattr(
        "pod_runtime.trainer.frameworks.paddle.group.prompt_store", lambda _master: nullcontext()
    )


def test_layers_that_the_script_unfreezes_are_exchanged_from_then_on(monkeypatch):
    """Doubling stands for the all-reduce of two equal ranks."""
    form_no_group(monkeypatch)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: paddle.assign(tensor * 2, tensor))
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1))
    backbone = model[0].weight
    backbone.stop_gradient = True
    optimizer = paddle.optimizer.SGD(1.0, parameters=model.parameters())
    framework = paddle_framework(model, optimizer, header_size=HEADER)
    framework.group.form(GroupSpec(rank=0, world_size=2, master="127.0.0.1:1", generation=1))
    for frozen_now in (True, False):
        backbone.stop_gradient = frozen_now
        before = backbone.numpy().copy()
        framework.step.begin()
        framework.step.backward(model(paddle.ones([3, 4])).sum(), 0.5)
        framework.step.end_shard()
        mine = np.zeros_like(before) if frozen_now else backbone.grad.numpy().copy()
        assert framework.step.exchange([1.0, 0.0, 3.0], True) == [2.0, 0.0, 6.0]
        framework.step.apply(filled_shards=2, lr_factor=1.0)
        assert np.allclose(before - backbone.numpy(), 2 * mine)


def test_a_rank_that_does_not_come_in_time_is_told_from_one_that_is_gone(monkeypatch):
    form_no_group(monkeypatch)
    framework, _model, _optimizer, _scheduler = make("momentum")
    framework.group.form(GroupSpec(rank=0, world_size=2, master="127.0.0.1:1", generation=1))
    clock = [0.0]
    module = "pod_runtime.trainer.frameworks.paddle.group"
    monkeypatch.setattr(f"{module}.time.monotonic", lambda: clock[0])
    for said, after_s, expected in (
        ("TIMEOUT self_rank", 30.0, "did not come"),
        ("TIMEOUT self_rank", 0.1, "^all-reduce"),  # gloo's word for a dead one on another node
        ("Connection closed", 0.1, "^all-reduce"),
    ):

        def fail(_tensor: Any, group: Any, said: str = said, after_s: float = after_s) -> None:
            clock[0] += after_s
            raise RuntimeError(said)

        monkeypatch.setattr(dist, "all_reduce", fail)
        with pytest.raises(PeerLost, match=rf"{expected}.*{said}"):
            framework.group.all_reduce(np.zeros(1))


def test_an_evaluation_leaves_frozen_batch_norms_as_the_script_has_set_them():
    framework, model, _optimizer, _scheduler = make("momentum")
    model[1].eval()
    with framework.state.evaluating():
        assert not any(layer.training for layer in model.sublayers(include_self=True))
    assert model.training
    assert [layer.training for layer in model] == [True, False, True, True]


def test_an_evaluation_leaves_buffers_as_they_are():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1D(8, use_global_stats=False))
    optimizer = paddle.optimizer.Momentum(0.1, parameters=model.parameters())
    framework = paddle_framework(model, optimizer, header_size=HEADER)
    mean = model[1]._mean.numpy().tolist()
    _layout, before, _scalars = take(framework)
    with framework.state.evaluating():
        model(paddle.ones([6, 4]))
        assert model[1]._mean.numpy().tolist() != mean
        _layout, amid, _scalars = take(framework)  # the trainers park there for a change
        assert amid == before
        model(paddle.ones([6, 4]))
    assert model[1]._mean.numpy().tolist() == mean


@pytest.mark.parametrize("number", [2**53 + 1, -(2**60) - 1])
def test_a_buffer_whose_numbers_would_be_rounded_is_refused_unless_it_is_no_part_of_the_state(
    number: int,
):
    def of_one(*, persistable: bool) -> Framework:
        model = nn.Linear(2, 1)
        factors = paddle.to_tensor([3, number], dtype="int64")
        model.register_buffer("factors", factors, persistable=persistable)
        optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
        return paddle_framework(model, optimizer, header_size=HEADER)

    of_one(persistable=False)
    with pytest.raises(UsageError, match=r"factors has whole numbers beyond 2\*\*53.*persistable"):
        of_one(persistable=True)


def test_a_state_of_another_model_is_refused_before_anything_changes():
    framework, model, _optimizer, _scheduler = make("momentum")
    step(framework, model, 1)
    layout, data, scalars = take(framework)
    other = nn.Linear(4, 8)
    before = other.weight.numpy().copy()
    target = paddle_framework(
        other, paddle.optimizer.Momentum(0.1, parameters=other.parameters()), header_size=HEADER
    )
    with pytest.raises(StateError, match="model: the state does not fit: missing: model/bias"):
        target.state.load(layout, memoryview(data), scalars)
    assert (other.weight.numpy() == before).all()


def test_a_state_of_another_optimizer_or_precision_is_refused():
    framework, model, _optimizer, _scheduler = make("momentum")
    step(framework, model, 1)
    layout, data, scalars = take(framework)
    model = network()
    adam = paddle_framework(
        model, paddle.optimizer.Adam(0.1, parameters=model.parameters()), header_size=HEADER
    )
    with pytest.raises(StateError, match="made by Momentum, this script uses Adam"):
        adam.state.load(layout, memoryview(data), scalars)
    double = network(dtype="float64")
    wide = paddle_framework(
        double, paddle.optimizer.Momentum(0.1, parameters=double.parameters()), header_size=HEADER
    )
    with pytest.raises(StateError, match=r"0\.weight: the state holds float32, the model float64"):
        wide.state.load(layout, memoryview(data), scalars)


def test_a_state_of_another_kind_of_scheduler_is_refused():
    def made(schedule: Any) -> Framework:
        model = network()
        optimizer = paddle.optimizer.SGD(schedule, parameters=model.parameters())
        return paddle_framework(model, optimizer, header_size=HEADER)

    def cosine() -> Any:
        return lr.CosineAnnealingDecay(0.1, 5)

    layout, data, scalars = take(made(cosine()))
    made(cosine()).state.load(layout, memoryview(data), scalars)
    for other, name in (
        (lr.LinearWarmup(cosine(), 2, 0.0, 0.1), r"LinearWarmup\(CosineAnnealingDecay\)"),
        (lr.StepDecay(0.1, 2), "StepDecay"),
    ):
        with pytest.raises(StateError, match=f"with CosineAnnealingDecay, .* has {name}; use the"):
            made(other).state.load(layout, memoryview(data), scalars)


def sync_norm() -> Any:
    return nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))


def frozen() -> Any:
    layer = nn.Linear(2, 2)
    for parameter in layer.parameters():
        parameter.stop_gradient = True
    return layer


def without_elements(*, is_frozen: bool = False) -> Any:
    layer = nn.Linear(4, 2)
    layer.register_buffer("queue", paddle.zeros([0, 4]))
    layer.add_parameter("rest", layer.create_parameter([0, 4]))
    layer.rest.stop_gradient = is_frozen
    return layer


def test_buffers_and_frozen_parameters_without_elements_are_carried():
    made = []
    for _ in range(2):
        model = without_elements(is_frozen=True)
        optimizer = paddle.optimizer.Adam(0.1, parameters=model.parameters())
        made.append((paddle_framework(model, optimizer, header_size=HEADER), model))
    (framework, model), (other, copied) = made
    step(framework, model, 1)
    layout, data, scalars = take(framework)
    other.state.load(layout, memoryview(data), scalars)
    assert (copied.weight.numpy() == model.weight.numpy()).all()
    assert copied.rest.shape == copied.queue.shape == [0, 4]


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (without_elements, r"rest has no elements, of shape \[0, 4\], .*leave it out, or freeze"),
        (sync_norm, "1 is a SyncBatchNorm.*use BatchNorm"),
        (lambda: nn.Sequential(nn.Embedding(3, 2, sparse=True)), "0.weight has sparse gradients"),
        (frozen, "none of its parameters is trained"),
        (lambda: 3, "model: expected a paddle.nn.Layer, got int"),
        (lambda: paddle.Model(nn.Linear(1, 1)), r"pass its network .*fit.*ElasticCheckpoint"),
    ],
)
def test_a_model_that_cannot_be_elastic_is_refused_with_the_remedy(model, text):
    made = model()
    parameters = made.parameters() if isinstance(made, nn.Layer) else nn.Linear(1, 1).parameters()
    optimizer = paddle.optimizer.SGD(0.1, parameters=parameters)
    with pytest.raises(UsageError, match=text):
        paddle_framework(made, optimizer, header_size=HEADER)


def test_an_optimizer_of_other_parameters_is_refused():
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    both = paddle.optimizer.SGD(0.1, parameters=model.parameters() + other.parameters())
    with pytest.raises(UsageError, match=r"optimizer: its parameter .* is not one of the model's"):
        paddle_framework(model, both, header_size=HEADER)
    with pytest.raises(UsageError, match="none of its parameters is one of the model's"):
        paddle_framework(
            model, paddle.optimizer.SGD(0.1, parameters=other.parameters()), header_size=HEADER
        )


def test_flags_that_paddle_or_edl_sets_are_not_listed_as_modified_but_the_users_are():
    before = paddle.get_flags("FLAGS_benchmark")
    paddle.set_flags({"FLAGS_benchmark": True})
    try:
        with own_flags_unsaid():
            listed = [flag.name for flag in parallel._get_modified_flags()]
        assert "FLAGS_benchmark" in listed
        assert "FLAGS_enable_pir_in_executor" not in listed
        names = [flag.name for flag in parallel._get_modified_flags()]
        assert set(listed) <= set(names)
    finally:
        paddle.set_flags(before)
