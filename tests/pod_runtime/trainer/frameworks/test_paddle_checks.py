"""What trains besides the loop's optimizer, and gradients that a script touches, is refused."""

import logging
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import paddle
import pytest
from paddle import nn

from pod_runtime import elastic
from pod_runtime.trainer.frameworks.paddle.framework import paddle_framework
from pod_runtime.trainer.frameworks.paddle.gradients import trained_parameters


@pytest.fixture(autouse=True)
def _outside_edl(monkeypatch):
    for name in ("EDL_CHANNEL", "EDL_STAGE", "EDL_RUN_DIR", "EDL_MAX_TRAINERS"):
        monkeypatch.delenv(name, raising=False)


class Data(paddle.io.Dataset):
    def __getitem__(self, index: int) -> Any:
        return paddle.full([3], index / 10).numpy()

    def __len__(self) -> int:
        return 60


def networks() -> tuple[Any, Any, Any]:
    """Return two networks, and one layer of both."""
    paddle.seed(1)
    one, two = nn.Linear(3, 3), nn.Linear(3, 3)
    return one, two, nn.LayerList([one, two])


def adam(*layers: Any, rate: float = 0.01) -> Any:
    return paddle.optimizer.Adam(rate, parameters=[p for one in layers for p in one.parameters()])


def train(
    model: Any,
    optimizer: Any,
    *,
    forward: Callable[[Any], Any],
    before: Callable[[int], None] = lambda index: None,
    after: Callable[[int], None] = lambda index: None,
    epochs: int = 1,
    **arguments: Any,
) -> elastic.Loop:
    """Train; `before` and `after` are called around `step.update()`, with the step's number."""
    loop = elastic.Loop(model, optimizer, Data(), batch_size=6, epochs=epochs, **arguments)
    for epoch in loop.epochs():
        for step in epoch:
            for batch in step:
                step.backward((forward(batch) ** 2).mean())
            before(step.number)
            step.update()
            after(step.number)
    return loop


# --- what is passed


class Ema:
    """An object of a script's own, without the half that takes a state over."""

    def state_dict(self) -> dict[str, Any]:
        return {}


class LookAhead(paddle.optimizer.SGD):
    """As paddle.incubate has one: an optimizer around another."""

    def __init__(self, inner: Any) -> None:
        super().__init__(0.1, parameters=inner._parameter_list)
        self.inner_optimizer = inner


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            lambda one, two, both: {"model": [one, "two"]},
            "model: expected a .*Layer, got s",
        ),
        (lambda one, two, both: {"optimizer": [adam(one), None]}, "optimizer: expected .*NoneType"),
        (
            lambda one, two, both: {"optimizer": LookAhead(adam(both))},
            "optimizer: LookAhead holds a Adam, whose state would be lost",
        ),
        (
            lambda one, two, both: {
                "optimizer": paddle.optimizer.LBFGS(parameters=both.parameters())
            },
            "optimizer: LBFGS computes the loss itself",
        ),
        (
            lambda one, two, both: {"extra": {"optG": adam(two)}},
            r"extra: 'optG' is an optimizer \(Adam\).*Loop\(\[a, b\], \[optimizer_a",
        ),
        (
            lambda one, two, both: {"model": one, "optimizer": adam(one), "extra": {"netG": two}},
            r"extra: 'netG' is a Layer with a trainable parameter \(weight\).*stop_gradient = True",
        ),
        (
            lambda one, two, both: {"extra": {"scaler": object.__new__(paddle.amp.GradScaler)}},
            "extra: 'scaler' is a GradScaler; pass it as scaler=",
        ),
        (lambda one, two, both: {"extra": {"ema": Ema()}}, "'ema', a Ema, has no set_state_dict"),
        (lambda one, two, both: {"extra": {"nets": [one]}}, "'nets', a list, has no state_dict"),
        (lambda one, two, both: {"extra": [one]}, "extra: expected a dict of objects, got list"),
    ],
)
def test_what_the_loop_would_not_train_or_carry_is_refused_with_the_remedy(arguments, text):
    one, two, both = networks()
    given = {"model": both, "optimizer": adam(both)} | arguments(one, two, both)
    with pytest.raises(elastic.UsageError, match=text):
        elastic.Loop(**given, train_set=Data(), batch_size=6, epochs=1)


def test_a_frozen_layer_and_the_model_itself_may_be_extra():
    one, two, both = networks()
    for parameter in two.parameters():
        parameter.stop_gradient = True
    paddle_framework(one, adam(one), header_size=1, extra={"teacher": two})
    paddle_framework(both, adam(both), header_size=1, extra={"itself": one})


# --- parameters that no optimizer has


def test_parameters_without_an_optimizer_are_named_once_and_stay_as_they_are(caplog, tmp_path):
    one, two, both = networks()
    kept = two.weight.numpy()
    with caplog.at_level(logging.WARNING):
        train(both, adam(one), forward=lambda x: two(one(x)), epochs=2, checkpoint=str(tmp_path))
        one, two, both = networks()  # as in a process that goes on
        optimizer = adam(one)
        loop = elastic.Loop(
            both, optimizer, Data(), batch_size=6, epochs=3, checkpoint=str(tmp_path)
        )
    assert (two.weight.numpy() == kept).all()
    assert loop.step_count == 20
    assert caplog.text.count("no optimizer has 1.weight, 1.bias: not trained") == 1
    assert len(trained_parameters(both, optimizer)) == 2


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_second_optimizer_is_refused_as_soon_as_it_steps(where):
    one, two, both = networks()
    other = adam(two)
    hook: dict[str, Any] = {where: lambda _: other.step()}
    with pytest.raises(elastic.UsageError, match=r"model: 1\.weight has changed.*pass all models"):
        train(both, adam(one), forward=lambda x: two(one(x)), **hook)


def test_a_second_optimizer_that_begins_late_is_refused_at_the_end_of_the_epoch():
    one, two, both = networks()
    other = adam(two)

    def late(number: int) -> None:
        if number == 5:
            other.step()

    with pytest.raises(elastic.UsageError, match=r"model: 1\.weight has changed"):
        train(both, adam(one), forward=lambda x: two(one(x)), before=late)


def test_what_a_script_sets_by_hand_is_refused_unless_it_is_frozen():
    one, two, both = networks()

    def follow(_number: int) -> None:
        with paddle.no_grad():
            two.weight.set_value(two.weight * 0.9 + one.weight * 0.1)

    with pytest.raises(elastic.UsageError, match="frozen before: stop_gradient = True"):
        train(both, adam(one), forward=one, after=follow)
    one, two, both = networks()
    for parameter in two.parameters():
        parameter.stop_gradient = True
    assert train(both, adam(one), forward=one, after=follow).step_count == 10


@pytest.mark.parametrize("given", [False, True])
def test_layers_may_be_frozen_and_unfrozen_but_not_given_to_the_optimizer_later(given):
    one, two, both = networks()
    parameters = [{"params": one.parameters()}, *([] if given else [{"params": two.parameters()}])]
    optimizer = paddle.optimizer.SGD(0.01, parameters=parameters)

    def change(number: int) -> None:
        for parameter in one.parameters():
            parameter.stop_gradient = number in (2, 3)
        if given and number == 5:
            optimizer._add_param_group({"params": two.parameters()})

    def run() -> None:
        train(both, optimizer, forward=lambda x: two(one(x)), after=change)

    if given:
        with pytest.raises(
            elastic.UsageError, match=r"its groups have \[2, 2\] parameters, and had \[2\]"
        ):
            run()
        return
    kept = two.weight.numpy()
    run()
    assert not (two.weight.numpy() == kept).all()


def exponential() -> Any:
    return paddle.optimizer.lr.ExponentialDecay(0.01, 0.9)


def cosine() -> Any:
    return paddle.optimizer.lr.CosineAnnealingDecay(0.01, 10)


def flat() -> Any:
    return paddle.optimizer.lr.LambdaDecay(0.01, lambda _epoch: 1.0)


def falling() -> Any:
    return paddle.optimizer.lr.LambdaDecay(0.01, lambda epoch: 0.9**epoch)


@pytest.mark.parametrize(
    ("build", "follow", "at", "said"),
    [
        (cosine, exponential, 4, "(ExponentialDecay) than the training has begun with (Cosine"),
        (lambda: 0.01, cosine, 4, "(CosineAnnealingDecay) than the training has begun with (a n"),
        (lambda: 0.01, cosine, 0, "(CosineAnnealingDecay) than the training has begun with (a n"),
        (falling, flat, 4, "(LambdaDecay) than the training has begun with (LambdaDecay)"),
        (falling, falling, 4, ""),
        (exponential, cosine, -1, ""),  # in each process, before the state is loaded once more
    ],
)
def test_a_schedule_of_another_kind_may_not_follow_amid_a_training(
    build: Any, follow: Any, at: int, said: str
) -> None:
    one, _two, _both = networks()
    optimizer = paddle.optimizer.SGD(build(), parameters=one.parameters())
    loop = elastic.Loop(one, optimizer, Data(), epochs=1, batch_size=6)
    if at < 0:
        optimizer.set_lr_scheduler(follow())
    refused = pytest.raises(elastic.UsageError, match=re.escape(said)) if said else nullcontext()
    with refused:
        for epoch in loop.epochs():
            for step in epoch:
                for batch in step:
                    step.backward(one(batch).mean())
                step.update()
                if step.number == at:
                    optimizer.set_lr_scheduler(follow())


# --- gradients


def scale(parameters: list[Any]) -> None:
    with paddle.no_grad():
        for each in parameters:
            each.grad.scale_(0.5)


def replace(parameters: list[Any]) -> None:
    parameters[0].grad = parameters[0].grad * 0.5


def multiply(parameters: list[Any]) -> None:
    with paddle.no_grad():
        parameters[-1].grad *= 0.5


def clear(parameters: list[Any]) -> None:
    for each in parameters:
        each.clear_gradient(False)


@pytest.mark.parametrize(
    "touch",
    [lambda given: nn.utils.clip_grad_norm_(given, 0.01), scale, replace, multiply, clear],
    ids=["clip", "scale", "replace", "multiply", "clear"],
)
def test_gradients_that_are_changed_before_the_update_are_refused(touch):
    one, _two, _both = networks()
    with pytest.raises(elastic.UsageError, match=r"gradients: .*changed after.*grad_clip="):
        train(one, adam(one), forward=one, before=lambda _: touch(one.parameters()))


def test_gradients_that_are_cleared_between_two_shards_are_refused():
    one, _two, _both = networks()

    def forward(batch: Any) -> Any:
        one.clear_gradients()
        return one(batch)

    with pytest.raises(elastic.UsageError, match=r"gradients: .*changed after"):
        train(one, adam(one), forward=forward, shards=2)


def test_gradients_may_be_read_and_several_losses_added():
    one, two, both = networks()
    norms = []
    loop = elastic.Loop(both, adam(both), Data(), batch_size=6, epochs=1, shards=3)
    for epoch in loop.epochs():
        for step in epoch:
            for batch in step:
                step.backward(one(batch).mean())
                step.backward(two(batch).mean())
            norms.append(float(one.weight.grad.norm()))
            step.update()
    assert len(norms) == 10
