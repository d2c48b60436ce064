"""What a script keeps beside the loop: averages and targets that no state would carry."""

import copy
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from pod_runtime import elastic
from pod_runtime.trainer.errors import UsageError

pytestmark = [  # it imports frameworks
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore:When training, we now always track:UserWarning"),
]
DATA = np.random.RandomState(3).randn(24, 4).astype(np.float32)


class Torch:
    def __init__(self) -> None:
        self.torch = pytest.importorskip("torch")

    def net(self) -> Any:
        nn = self.torch.nn
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def sgd(self, model: Any) -> Any:
        return self.torch.optim.SGD(model.parameters(), lr=0.1)

    def linear(self) -> Any:
        return self.torch.nn.Linear(4, 1)

    def no_grad(self) -> Any:
        return self.torch.no_grad()

    def freeze(self, model: Any) -> Any:
        return model.requires_grad_(False)

    def set(self, tensor: Any, value: Any) -> None:
        tensor.data.copy_(value)

    def buffer(self, model: Any, name: str, values: np.ndarray) -> None:
        model.register_buffer(name, self.torch.from_numpy(values))

    def input(self, batch: Any) -> Any:
        return batch.clone().requires_grad_()

    def with_gradients(self) -> Any:
        return self.torch.enable_grad()

    def tensor(self, values: np.ndarray) -> Any:
        return self.torch.from_numpy(values)

    def full_like(self, tensor: Any, value: float) -> Any:
        return self.torch.full_like(tensor, value)


class Paddle:
    def __init__(self) -> None:
        self.paddle = pytest.importorskip("paddle")

    def net(self) -> Any:
        nn = self.paddle.nn
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1D(4), nn.Linear(4, 1))

    def sgd(self, model: Any) -> Any:
        return self.paddle.optimizer.SGD(0.1, parameters=model.parameters())

    def linear(self) -> Any:
        return self.paddle.nn.Linear(4, 1)

    def no_grad(self) -> Any:
        return self.paddle.no_grad()

    def freeze(self, model: Any) -> Any:
        for parameter in model.parameters():
            parameter.stop_gradient = True
        return model

    def set(self, tensor: Any, value: Any) -> None:
        tensor.set_value(value)

    def buffer(self, model: Any, name: str, values: np.ndarray) -> None:
        model.register_buffer(name, self.paddle.to_tensor(values))

    def input(self, batch: Any) -> Any:
        batch = batch.clone()
        batch.stop_gradient = False
        return batch

    def with_gradients(self) -> Any:
        return self.paddle.enable_grad()

    def tensor(self, values: np.ndarray) -> Any:
        return self.paddle.to_tensor(values)

    def full_like(self, tensor: Any, value: float) -> Any:
        return self.paddle.full_like(tensor, value)


@pytest.fixture(params=[Torch, Paddle])
def kit(request: pytest.FixtureRequest) -> Any:
    return request.param()


class Average:
    """A moving average as scripts have it: a copy of the model, in an object of its own."""

    def __init__(self, kit: Any, model: Any) -> None:
        self.kit, self.module = kit, copy.deepcopy(model)
        self.module.eval()

    def update(self, model: Any) -> None:
        with self.kit.no_grad():
            for mine, new in zip(self.module.parameters(), model.parameters(), strict=True):
                self.kit.set(mine, 0.9 * mine + 0.1 * new)


class Shadow:
    """The same as a dict by names, whose tensors are made anew."""

    def __init__(self, kit: Any, model: Any) -> None:
        self.kit = kit
        self.shadow = {name: each.detach().clone() for name, each in model.named_parameters()}

    def update(self, model: Any) -> None:
        with self.kit.no_grad():
            for name, each in model.named_parameters():
                self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * each.detach()

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": {name.replace(".", "_"): each for name, each in self.shadow.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    set_state_dict = load_state_dict


class Shadows:
    """The same as a list, in the order of the parameters, as torch_ema has it."""

    @staticmethod
    def tensors(model: Any) -> list[Any]:
        return list(model.parameters())

    def __init__(self, kit: Any, model: Any) -> None:
        self.kit = kit
        self.shadows = [each.detach().clone() for each in self.tensors(model)]
        self.newest: list[Any] = []

    def update(self, model: Any) -> None:
        with self.kit.no_grad():
            for mine, new in zip(self.shadows, self.tensors(model), strict=True):
                if "int" not in str(mine.dtype):
                    self.kit.set(mine, 0.9 * mine + 0.1 * new.detach())
        # Made anew each time: nothing goes on from it.
        self.newest = [each.detach().clone() for each in model.parameters()]

    def state_dict(self) -> dict[str, Any]:
        return {"shadows": self.shadows, "pair": (1, self.shadows[0]), "count": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert (type(state["shadows"]), type(state["pair"])) == (list, tuple)
        assert (state["pair"][0], state["count"]) == (1, 3)
        self.shadows = state["shadows"]

    set_state_dict = load_state_dict


def train(
    kit: Any,
    model: Any,
    *,
    epochs: int = 2,
    optimizer: Any = None,
    before_epoch: Callable[[Any], None] = lambda _epoch: None,
    after_update: Callable[[Any], None] = lambda _step: None,
    after_shard: Callable[[], None] = lambda: None,
    **options: Any,
) -> None:
    optimizer = kit.sgd(model) if optimizer is None else optimizer
    loop = elastic.Loop(model, optimizer, DATA, epochs=epochs, batch_size=8, **options)
    for epoch in loop.epochs():
        before_epoch(epoch)
        for step in epoch:
            for batch in step:
                step.backward((model(batch) ** 2).mean())
                after_shard()
            step.update()
            after_update((epoch, step))


class StateShadows(Shadows):
    """All of the state, in another order."""

    @staticmethod
    def tensors(model: Any) -> list[Any]:
        return list(reversed(model.state_dict().values()))


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (Average, r"0.weight of a model beside the loop's \(Sequential\)"),
        (Shadow, r"0.weight of a copy beside the loop's model \(Shadow.shadow\)"),
        (Shadows, r"0 of a copy beside the loop's model \(a list\)"),
        (StateShadows, r"\d of a copy beside the loop's model \(a list\)"),
    ],
)
def test_an_average_that_was_not_passed_is_refused_at_once(kit, made, named):
    model = kit.net()
    average = made(kit, model)
    steps = []

    def update(where: Any) -> None:
        steps.append(where)
        average.update(model)

    with pytest.raises(UsageError, match=named):
        train(kit, model, after_update=update)
    assert len(steps) == 3


def test_a_model_of_the_loop_may_be_frozen_as_a_whole(kit):
    """As a GAN's critic is while the generator has its turn."""
    model, frozen = kit.net(), kit.freeze(kit.net())
    loop = elastic.Loop([model, frozen], kit.sgd(model), DATA, epochs=1, batch_size=8)
    for epoch in loop.epochs():
        for step in epoch:
            for batch in step:
                step.backward(((model(batch) - frozen(batch)) ** 2).mean())
            step.update()
    assert loop.step_count == 3


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_layer_put_in_anothers_place_is_refused_as_nobody_would_train_it(kit, caplog, is_frozen):
    model = kit.net()
    steps: list[Any] = []

    def replace(epoch: Any) -> None:
        if epoch.number == 1:
            model[2] = kit.freeze(kit.linear()) if is_frozen else kit.linear()

    def run() -> None:
        with caplog.at_level(logging.WARNING):
            train(kit, model, epochs=3, before_epoch=replace, after_update=steps.append)

    if is_frozen:  # it is not to be trained
        run()
        assert "parameter 2.weight, which is another one now" in caplog.text
        return
    with pytest.raises(UsageError, match=r"its 2\.weight, 2\.bias is another .*second Loop"):
        run()
    assert len(steps) == 4  # by the first step with it, before a change may come


def test_a_layer_given_to_the_optimizer_in_anothers_place_is_refused():
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def replace(epoch: Any) -> None:
        if epoch.number == 1:
            model[1] = torch.nn.Linear(4, 1)
            optimizer.param_groups[0]["params"] = list(model.parameters())

    with pytest.raises(UsageError, match=r"is another parameter than when the Loop was made"):
        train(Torch(), model, optimizer=optimizer, before_epoch=replace)


def test_an_optimizer_that_is_made_later_is_refused_as_nobody_would_step_it(kit):
    model, made = kit.net(), []

    def make(epoch: Any) -> None:
        if epoch.number == 1:
            made.append(kit.sgd(model))

    with pytest.raises(UsageError, match=r"another one \(SGD\).* was made .*second Loop"):
        train(kit, model, epochs=3, before_epoch=make)
    assert len(made) == 1


def test_an_optimizer_that_was_made_before_or_of_another_model_may_be_there(kit):
    model, other = kit.net(), kit.net()
    for_later = kit.sgd(model)  # for a loop that comes after this one
    made = []

    def make(_epoch: Any) -> None:
        made.append(kit.sgd(other))
        kit.sgd(model)  # which is gone

    train(kit, model, epochs=3, before_epoch=make)
    train(kit, model, epochs=3, optimizer=for_later)
    assert len(made) == 3


@pytest.mark.parametrize("passed", ["nowhere", "extra", "optimizer"])
def test_paddles_model_average_is_refused_by_name(passed: str):
    """It is told of gradients after an update, where the loop has cleared them."""
    paddle = pytest.importorskip("paddle")
    kit = Paddle()
    model = kit.net()
    average = paddle.incubate.ModelAverage(0.15, parameters=model.parameters())
    other = paddle.incubate.ModelAverage(0.15, parameters=kit.net().parameters())
    text = r"paddle\.incubate\.ModelAverage moves by .* NaN; .*cookbook"

    def begin() -> None:
        if passed == "optimizer":
            elastic.Loop(model, average, DATA, epochs=1, batch_size=8)
        extra = {"average": average} if passed == "extra" else None
        train(kit, model, after_update=lambda _where: average.step(), extra=extra)

    with pytest.raises(UsageError, match=text):
        begin()
    train(kit, kit.net())
    assert other is not None, "of other models they may be there"


def dummy_schedule(kind: str) -> Any:
    """Return a scheduler of PyTorch, of an optimizer that trains nothing."""
    torch = pytest.importorskip("torch")
    schedulers = torch.optim.lr_scheduler
    dummy = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    if kind == "cosine":
        return schedulers.CosineAnnealingLR(dummy, 20)
    parts = [schedulers.ConstantLR(dummy, 0.5, 3), schedulers.ExponentialLR(dummy, 0.9)]
    outer = [schedulers.SequentialLR(dummy, parts, [2]), schedulers.StepLR(dummy, 2)]
    return schedulers.ChainedScheduler(outer)


@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")
@pytest.mark.parametrize("kind", ["cosine", "of others"])
@pytest.mark.parametrize("passed", ["nowhere", "scheduler", "extra", "within an object"])
def test_a_scheduler_of_another_optimizer_goes_on_in_extra(passed: str, kind: str, tmp_path):
    """Its rates are in that optimizer, where it computes the next ones from them."""
    torch = pytest.importorskip("torch")

    class Rates:
        def __init__(self, scheduler: Any) -> None:
            self.scheduler = scheduler

        def state_dict(self) -> dict[str, Any]:
            rate = self.scheduler.optimizer.param_groups[0]["lr"]
            return {"scheduler": self.scheduler.state_dict(), "rate": rate}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.scheduler.load_state_dict(state["scheduler"])
            self.scheduler.optimizer.param_groups[0]["lr"] = state["rate"]

    def rates(epochs: int, checkpoint: Any) -> list[float]:
        model, mine, found = Torch().net(), dummy_schedule(kind), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def update(_where: Any) -> None:
            mine.step()
            optimizer.param_groups[0]["lr"] = mine.get_last_lr()[0]
            found.append(optimizer.param_groups[0]["lr"])

        extra = {"extra": {"rate": mine}, "within an object": {"rate": Rates(mine)}}.get(passed)
        train(
            Torch(), model, optimizer=optimizer, epochs=epochs, checkpoint=checkpoint,
            extra=extra, scheduler=mine if passed == "scheduler" else None, after_update=update,
        )  # fmt: skip
        return found

    texts = {
        "nowhere": r"last_epoch of a scheduler beside the loop's .*in extra=",
        "scheduler": r"of another one, which belongs in extra=",
    }
    if passed in texts:
        with pytest.raises(UsageError, match=texts[passed]):
            rates(2, tmp_path)
        return
    whole = rates(3, tmp_path / "whole")
    assert rates(1, tmp_path / "cut") + rates(3, tmp_path / "cut") == whole
    assert len(set(whole)) > 3


@pytest.mark.parametrize(
    "passed", ["nowhere", "extra", "optimizer", "within another", "within another in extra"]
)
def test_a_scheduler_of_paddle_is_passed_to_its_optimizer_or_in_extra(passed: str):
    paddle = pytest.importorskip("paddle")
    schedulers, model = paddle.optimizer.lr, Paddle().net()
    mine = schedulers.CosineAnnealingDecay(0.1, 20)
    rates = {"optimizer": mine, "within another": schedulers.LinearWarmup(mine, 2, 0.0, 0.1)}
    optimizer = paddle.optimizer.SGD(rates.get(passed, 0.1), parameters=model.parameters())
    still = schedulers.StepDecay(0.1, 2)  # nobody steps it
    still.step()

    def update(_where: Any) -> None:
        mine.step()
        if passed not in rates:
            optimizer.set_lr(mine())

    extra = {"rate": mine} if passed == "extra" else None
    if passed == "within another in extra":
        outer = schedulers.LinearWarmup(mine, 2, 0.0, 0.1)
        extra = {"rate": outer}
    arguments = {"extra": extra, "optimizer": optimizer, "after_update": update}
    if passed == "nowhere":
        text = r"last_epoch of a scheduler beside the loop's \(Cosine.*\).*in extra="
        with pytest.raises(UsageError, match=text):
            train(Paddle(), model, **arguments)
    else:
        train(Paddle(), model, **arguments)
        assert mine.last_epoch > 3


@pytest.mark.parametrize(
    "kind", ["plateau", "second", "late", "passed", "in a sequence", "gone", "used before"]
)
def test_each_scheduler_of_the_optimizer_is_passed(kind: str):
    torch = pytest.importorskip("torch")
    schedulers = torch.optim.lr_scheduler
    model = Torch().net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept: list[Any] = [schedulers.ReduceLROnPlateau(optimizer)] if kind != "late" else []
    passed = list(kept) if kind == "passed" else None
    if kind == "second":
        kept.append(schedulers.StepLR(optimizer, 1))
        passed = kept[1:]
    if kind == "in a sequence":
        kept = [schedulers.StepLR(optimizer, 1)]
        passed = [schedulers.ChainedScheduler(kept, optimizer)]
    if kind == "used before":  # as to find a learning rate
        kept[0] = schedulers.StepLR(optimizer, 1)
        optimizer.step()
        kept.pop().step()
    if kind == "gone":
        one = kept.pop()
        one.itself, one = one, None

    def begin() -> None:
        loop = elastic.Loop(model, optimizer, DATA, epochs=2, batch_size=8, scheduler=passed)
        for epoch in loop.epochs():
            for step in epoch:
                for batch in step:
                    step.backward((model(batch) ** 2).mean())
                step.update()
                if kind == "late" and step.number == 3:
                    kept.append(schedulers.ReduceLROnPlateau(optimizer))
                    assert loop.step_count == 3

    if kind in ("passed", "in a sequence", "gone", "used before"):
        begin()
    else:
        with pytest.raises(UsageError, match="scheduler: the optimizer has a ReduceLROnPlateau"):
            begin()


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("where", ["in a shard", "by minimize", "before the update"])
def test_an_optimizer_that_the_script_steps_amid_a_step_is_refused(kit, where: str, several: bool):
    if where == "by minimize" and isinstance(kit, Torch):
        pytest.skip("PyTorch's have no minimize")
    model, other = kit.net(), kit.net()
    optimizers = [kit.sgd(model), kit.sgd(other)] if several else [kit.sgd(model)]
    models = [model, other] if several else [model]
    optimizers[-1].step()  # as before the loop
    for _ in range(2):  # the second loop has the same
        loop = elastic.Loop(models, optimizers, DATA, epochs=1, batch_size=8, shards=2)
        for epoch in loop.epochs():
            for step in epoch:
                for batch in step:
                    step.backward(sum((each(batch) ** 2).mean() for each in models))
                step.update()
                optimizers[-1].step()  # there are no gradients
    loop = elastic.Loop(models, optimizers, DATA, epochs=1, batch_size=8, shards=2)
    for epoch in loop.epochs():
        for step in epoch:
            for batch in step:
                step.backward(sum((each(batch) ** 2).mean() for each in models))
                if where == "in a shard":
                    with pytest.raises(UsageError, match=r"Leave optimizer\.step\(\) or minimize"):
                        optimizers[-1].step()
                if where == "by minimize":
                    with pytest.raises(UsageError, match=r"Leave optimizer\.step\(\) or minimize"):
                        optimizers[-1].minimize((models[-1](batch) ** 2).mean())
            if where == "before the update":
                with pytest.raises(UsageError, match=r"Leave optimizer\.step\(\) or minimize"):
                    optimizers[-1].step()
            step.update()


def test_an_average_that_was_passed_is_not(kit):
    model = kit.net()
    module, shadow, shadows = Average(kit, model), Shadow(kit, model), Shadows(kit, model)
    extra = {"average": kit.freeze(module.module), "shadow": shadow, "shadows": shadows}

    def update(_where: Any) -> None:
        module.update(model)
        shadow.update(model)
        shadows.update(model)

    train(kit, model, after_update=update, extra=extra)


@pytest.mark.parametrize("within", [False, True])
def test_an_average_of_a_package_that_was_passed_is_not(kit, within):
    """As torch_ema's, alone or in an object of the script that hands its state on."""

    class Packaged(Shadows):
        __module__ = "torch_ema"  # no module of the script

    class Holder:
        def __init__(self, average: Any) -> None:
            self.average, self.kind = average, type(average)
            self.state_dict, self.load_state_dict = average.state_dict, average.load_state_dict
            self.set_state_dict = average.set_state_dict

    model = kit.net()
    average = Packaged(kit, model)
    train(
        kit, model, after_update=lambda _where: average.update(model),
        extra={"average": Holder(average) if within else average},
    )  # fmt: skip


def test_what_another_thread_is_about_to_make_ends_no_training(kit):
    """Python shows a tuple that has empty places: to read one ends the process."""
    may_end = threading.Event()

    def slowly() -> Iterator[int]:
        may_end.wait(60)
        yield 1

    thread = threading.Thread(target=lambda: tuple(slowly()))
    thread.start()
    try:
        nn = (kit.torch if isinstance(kit, Torch) else kit.paddle).nn
        # As many parameters as such a tuple has places.
        train(kit, nn.Sequential(*(nn.Linear(4, 4) for _ in range(5))), epochs=1)
    finally:
        may_end.set()
        thread.join()


def test_lists_of_tensors_in_extra_come_back_as_they_were(kit, tmp_path):
    def run(epochs: int) -> Any:
        model = kit.net()
        shadows = Shadows(kit, model)
        train(
            kit, model, epochs=epochs, extra={"shadows": shadows}, checkpoint=tmp_path,
            after_update=lambda _where: shadows.update(model),
        )  # fmt: skip
        return shadows

    first = [each.numpy().copy() for each in run(1).shadows]
    again = run(1).shadows
    assert len(again) == len(first) > 0
    for mine, other in zip(again, first, strict=True):
        np.testing.assert_array_equal(mine.numpy(), other)


def test_a_layer_that_no_optimizer_has_is_named_with_the_frameworks_own_words(kit, caplog):
    model = kit.net()
    with caplog.at_level(logging.WARNING):
        elastic.Loop(model, kit.sgd(model[0]), DATA, epochs=1, batch_size=8)
    (said,) = [each for each in caplog.messages if "no optimizer has" in each]
    own = "requires_grad_(False)" if isinstance(kit, Torch) else "stop_gradient = True"
    assert f"freeze what shall stay as it is ({own})" in said


def test_models_that_do_not_change_may_be_there(kit, caplog):
    best: list[Any] = []
    model, teacher = kit.net(), kit.net()
    teacher.eval()

    def look(where: Any) -> None:
        teacher(model[0].weight)
        if where[1].number >= 3:
            best[:] = [copy.deepcopy(model.state_dict())]

    with caplog.at_level(logging.WARNING):
        train(kit, model, after_update=look)
        train(kit, kit.net(), after_update=look)  # beside a model of an earlier loop
    assert "it changes" not in caplog.text


def test_a_model_without_values_may_be_there():
    kit = Torch()
    nn = kit.torch.nn
    kept = [nn.LazyLinear(3), nn.Linear(2, 3, device="meta")]
    train(kit, kit.net())
    assert len(kept) == 2


def test_a_teacher_that_is_left_in_training_mode_is_refused(kit):
    model, teacher = kit.net(), kit.net()
    with pytest.raises(UsageError, match=r"1\._?(running_)?mean.*put into evaluation mode"):
        train(kit, model, after_update=lambda _where: teacher(model[0].weight))


def test_an_average_that_begins_later_is_said(kit, caplog):
    model = kit.net()
    average = Average(kit, model)

    def update(where: Any) -> None:
        if where[0].number >= 1:
            average.update(model)

    with caplog.at_level(logging.WARNING):
        train(kit, model, epochs=3, after_update=update)
    assert "a model beside the loop's (Sequential): it changes" in caplog.text


def test_what_is_passed_is_changed_once_in_a_step(kit):
    """Inside of the loop over the batch each trainer changes it as often as it has shards."""
    model = kit.net()
    average = Average(kit, model)
    kit.freeze(average.module)
    with pytest.raises(
        UsageError, match=r"an object in extra=: set inside of `for batch in step:`"
    ):
        train(
            kit,
            model,
            shards=2,
            after_shard=lambda: kit.set(average.module[0].weight, average.module[0].weight + 1),
            extra={"average": average.module},
        )


@pytest.mark.parametrize("dtype", [np.float32, np.int64])
def test_a_queue_of_past_batches_is_refused_where_there_are_shards(kit, dtype):
    """Each shard would write to the same place, and the mean of that is no shard's."""
    model = kit.net()
    kit.buffer(model, "queue", np.zeros((24, 4), dtype))

    def push() -> None:
        model.queue[:4] = model.queue[:4] + 1

    with pytest.raises(UsageError, match="writes into a part of its buffer queue"):
        train(kit, model, shards=2, after_shard=push)
    train(kit, model, shards=1, after_shard=push)  # in one piece nothing is put together


@pytest.mark.parametrize(("shards", "is_said"), [(2, True), (1, False)])
def test_a_layer_that_counts_its_shards_is_named(kit, caplog, shards, is_said):
    """As for a temperature that is annealed. Other numbers may change with a shard."""
    model = kit.net()
    model[0].calls, model[0].sign, model[2].size = 0, 1.0, 0

    def count() -> None:
        model[0].calls += 1
        model[0].sign *= -1
        model[2].size = 4

    with caplog.at_level(logging.WARNING):
        train(kit, model, shards=shards, after_shard=count)
    said = [each for each in caplog.messages if "moves with every shard" in each]
    assert len(said) == is_said
    assert all(each.startswith("calls of layer 0: ") for each in said)


def test_buffers_that_move_as_a_whole_are_not(kit):
    model = kit.net()
    kit.buffer(model, "codes", np.ones((24, 4), np.float32))
    kit.buffer(model, "seen", np.zeros(1, np.int64))

    def move() -> None:
        model.codes[:] = model.codes * 0.9
        model.seen[:] = model.seen + 1

    train(kit, model, shards=2, after_shard=move)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_buffer_may_become_infinite_as_the_training_goes_on(kit, shards):
    """As a mask of which the script puts more and more values to -inf."""
    model = kit.net()
    kit.buffer(model, "mask", np.zeros(2, np.float32))
    found = []

    def widen(epoch: Any) -> None:
        found.append(model.mask.tolist())
        if epoch.number == 1:
            kit.set(model.mask, kit.tensor(np.array([-np.inf, 0], np.float32)))

    train(kit, model, epochs=3, before_epoch=widen, shards=shards)
    assert found == [[0, 0], [0, 0], [-np.inf, 0]]


def test_options_that_are_edited_before_a_training_goes_on_are_told(kit, tmp_path, caplog):
    """They are part of the state; the log says so, once."""

    def run(epochs: int, rate: float) -> float:
        model = kit.net()
        optimizer = kit.sgd(model)
        if isinstance(kit, Torch):
            optimizer.param_groups[0].update(lr=rate, weight_decay=1 - rate)
        else:
            optimizer.set_lr(rate)
        loop = elastic.Loop(
            model, optimizer, DATA, epochs=epochs, batch_size=8, checkpoint=tmp_path
        )
        for epoch in loop.epochs():
            for step in epoch:
                for batch in step:
                    step.backward((model(batch) ** 2).mean())
                step.update()
        if isinstance(kit, Torch):
            return float(optimizer.param_groups[0]["lr"])
        return float(optimizer.get_lr())

    with caplog.at_level(logging.WARNING):
        run(1, 0.5)
        run(2, 0.5)
        assert "other options" not in caplog.text
        assert run(3, 0.25) == 0.5
        assert caplog.text.count("has other options than the training was begun with: lr 0.25") == 1
        assert ("weight_decay 0.75 (before: 0.5)" in caplog.text) == isinstance(kit, Torch)


def test_an_object_of_which_the_state_knows_nothing_is_told(kit, tmp_path, caplog):
    """As an average that is added where a training goes on: it was built before the model came."""

    def run(epochs: int, *names: str) -> None:
        model = kit.net()
        loop = elastic.Loop(
            model, kit.sgd(model), DATA, epochs=epochs, batch_size=8, checkpoint=tmp_path,
            extra={name: Shadow(kit, model) for name in names},
        )  # fmt: skip
        for epoch in loop.epochs():
            for step in epoch:
                for batch in step:
                    step.backward((model(batch) ** 2).mean())
                step.update()

    with caplog.at_level(logging.WARNING):
        run(1, "first")
        run(2, "first")
        assert "extra" not in caplog.text
        run(3, "first", "second")
        assert caplog.text.count("extra: the state has no 'second', which stays as this") == 1


def weights_after(kit: Any, evaluate: Callable[..., None], *, epochs: int = 2) -> list[float]:
    """Return a model's weights; `evaluate` is called after each epoch, and within its last step."""
    model = kit.net()
    for number, each in enumerate(model.parameters(), 1):
        kit.set(each, kit.full_like(each, 0.1 * number))
    loop = elastic.Loop(model, kit.sgd(model), DATA, batch_size=4, epochs=epochs, shards=2)
    for epoch in loop.epochs():
        for step in epoch:
            for batch in step:
                step.backward((model(batch) ** 2).mean())
            step.update()
            if step.index == epoch.steps - 2:
                evaluate(loop, model, amid=True)
        evaluate(loop, model, amid=False)
    found: list[float] = model[0].weight.flatten().tolist()
    return found


def test_gradients_that_an_evaluation_leaves_do_not_count_in_the_next_step(kit):
    """As where adversarial samples are made by `loss.backward()`: a plain loop clears them."""

    def attack(loop: elastic.Loop, model: Any, *, amid: bool) -> None:
        def judge(batch: Any) -> dict[str, Any]:
            inputs = kit.input(batch)
            with kit.with_gradients():
                (model(inputs) ** 2).mean().backward()
            assert inputs.grad is not None
            return {"loss": (model(batch + 0.1) ** 2).sum()}

        if amid:
            model.eval()
            judge(kit.tensor(DATA))
            model.train()
        else:
            loop.evaluate(DATA, judge, batch_size=8)

    assert weights_after(kit, attack) == weights_after(kit, lambda *_args, **_more: None)


@pytest.mark.parametrize("at", [0, 8])
def test_a_gradient_that_did_not_come_by_the_step_is_refused_in_any_step(kit, at: int):
    model = kit.net()
    loop = elastic.Loop(model, kit.sgd(model), DATA, batch_size=4, epochs=2, shards=2)

    def run() -> None:
        for epoch in loop.epochs():
            for step in epoch:
                if step.number == at:
                    (model(kit.tensor(DATA)) ** 2).mean().backward()
                for batch in step:
                    step.backward((model(batch) ** 2).mean())
                step.update()

    with pytest.raises(UsageError, match=r"did not come by step\.backward.*paddle\.grad"):
        run()
    assert loop.step_count == at


def test_a_teacher_that_is_passed_in_training_mode_is_refused_with_the_remedy(kit):
    """Its batch norm counts as it predicts: no line of the script sets anything."""
    model, teacher = kit.net(), kit.net()
    kit.freeze(teacher)
    with pytest.raises(UsageError, match=r"an object in extra=.* is put into evaluation mode"):
        train(
            kit, model, shards=2, after_shard=lambda: teacher(model[0].weight),
            extra={"teacher": teacher},
        )  # fmt: skip
