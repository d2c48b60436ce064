"""Several models and optimizers in one process: what a GAN's and an actor-critic's script do."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pod_runtime import elastic
from pod_runtime.trainer.errors import UsageError

pytestmark = pytest.mark.full  # it imports frameworks
SAMPLES, BATCH, STEPS = 24, 8, 6


class Data:
    def __init__(self) -> None:
        state = np.random.RandomState(3)
        self.real, self.noise = state.randn(SAMPLES, 4), state.randn(SAMPLES, 3)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.real[index], self.noise[index]


class Torch:
    """The calls of a script, in PyTorch."""

    def __init__(self) -> None:
        self.torch = pytest.importorskip("torch")
        self.torch.manual_seed(1)

    def net(self, *sizes: int) -> Any:
        nn = self.torch.nn
        first, inner, last = sizes
        return nn.Sequential(nn.Linear(first, inner), nn.Tanh(), nn.Linear(inner, last)).double()

    def adam(self, model: Any, rate: float = 0.01) -> Any:
        return self.torch.optim.Adam(model.parameters(), lr=rate)

    def tensor(self, array: np.ndarray) -> Any:
        return self.torch.from_numpy(array)

    def step(self, loss: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def square(self, values: Any) -> Any:
        return (values**2).mean()

    def values(self, model: Any) -> np.ndarray:
        return np.concatenate([p.detach().numpy().ravel() for p in model.parameters()])

    def grad(self, loss: Any, model: Any) -> Any:
        return self.torch.autograd.grad(loss, list(model.parameters()))

    def freeze(self, model: Any, frozen: bool) -> None:
        model.requires_grad_(not frozen)

    def scaler(self) -> Any:
        return self.torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)

    def scheduler(self, optimizer: Any) -> Any:
        return self.torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


class Paddle:
    """The same in Paddle."""

    def __init__(self) -> None:
        self.paddle = pytest.importorskip("paddle")
        self.paddle.seed(1)

    def net(self, *sizes: int) -> Any:
        nn = self.paddle.nn
        first, inner, last = sizes
        model = nn.Sequential(nn.Linear(first, inner), nn.Tanh(), nn.Linear(inner, last))
        return model.to(dtype="float64")

    def adam(self, model: Any, rate: float = 0.01) -> Any:
        return self.paddle.optimizer.Adam(rate, parameters=model.parameters())

    def tensor(self, array: np.ndarray) -> Any:
        return self.paddle.to_tensor(array)

    def step(self, loss: Any, optimizer: Any) -> None:
        optimizer.clear_grad()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()

    def square(self, values: Any) -> Any:
        return (values**2).mean()

    def values(self, model: Any) -> np.ndarray:
        return np.concatenate([p.numpy().ravel() for p in model.parameters()])

    def grad(self, loss: Any, model: Any) -> Any:
        return self.paddle.grad([loss], list(model.parameters()))

    def freeze(self, model: Any, frozen: bool) -> None:
        for parameter in model.parameters():
            parameter.stop_gradient = frozen


both = pytest.mark.parametrize("framework", [Torch, Paddle])


class Gan:
    """A generator and a discriminator, least squares GAN."""

    def __init__(self, framework: Callable[[], Any]) -> None:
        self.fw = framework()
        self.generator, self.critic = self.fw.net(3, 5, 4), self.fw.net(4, 5, 1)
        self.opt_g, self.opt_d = self.fw.adam(self.generator), self.fw.adam(self.critic, 0.02)

    def d_loss(self, real: Any, noise: Any) -> Any:
        fake = self.generator(noise)
        return self.fw.square(self.critic(real) - 1) + self.fw.square(self.critic(fake))

    def g_loss(self, noise: Any) -> Any:
        return self.fw.square(self.critic(self.generator(noise)) - 1)

    def loop(self, **options: Any) -> elastic.Loop:
        models, optimizers = [self.generator, self.critic], [self.opt_g, self.opt_d]
        return elastic.Loop(
            models, optimizers, Data(),
            **{"batch_size": BATCH, "epochs": 2, "shuffle": False, "shards": 2, **options},
        )  # fmt: skip

    def plain(self, critics: int = 1) -> list[np.ndarray]:
        """Train with the framework alone, on whole batches."""
        data = Data()
        for number in range(STEPS):
            at = slice(number * BATCH % SAMPLES, number * BATCH % SAMPLES + BATCH)
            real, noise = self.fw.tensor(data.real[at]), self.fw.tensor(data.noise[at])
            self.fw.step(self.d_loss(real, noise), self.opt_d)
            if number % critics == 0:
                self.fw.step(self.g_loss(noise), self.opt_g)
        return self.values()

    def values(self) -> list[np.ndarray]:
        return [self.fw.values(self.generator), self.fw.values(self.critic)]


def assert_same(one: list[np.ndarray], other: list[np.ndarray]) -> None:
    for left, right in zip(one, other, strict=True):
        assert np.linalg.norm(left - right) <= 1e-8 * np.linalg.norm(left)


@both
@pytest.mark.parametrize("critics", [1, 2])
@pytest.mark.parametrize("freezes", [False, True])
def test_a_gan_trains_what_the_framework_alone_trains(framework, critics: int, freezes: bool):
    """The discriminator is updated first; the generator's loss is that of the updated one."""
    expected = Gan(framework).plain(critics)
    gan = Gan(framework)
    losses = []
    for epoch in gan.loop().epochs():
        for step in epoch:
            for real, noise in step:
                step.backward(gan.d_loss(real, noise), optimizer=gan.opt_d)
                real *= 0  # a batch is the script's own
            losses.append(float(step.update(gan.opt_d)))
            if step.number % critics == 0:
                if freezes:
                    gan.fw.freeze(gan.critic, True)
                for real, noise in step:
                    assert float((real**2).sum()) > 0
                    step.backward(gan.g_loss(noise), optimizer=gan.opt_g)
                losses.append(float(step.update(gan.opt_g)))
                gan.fw.freeze(gan.critic, False)
    assert_same(expected, gan.values())
    fresh, data = Gan(framework), Data()
    tensors = [fresh.fw.tensor(each[:BATCH]) for each in (data.real, data.noise)]
    assert losses[0] == pytest.approx(float(fresh.d_loss(*tensors).detach()), rel=1e-12)


@both
def test_gradients_of_before_the_loop_do_not_count(framework):
    """As a first batch leaves them that had a layer built."""
    found = []
    for leaves_some in (False, True):
        gan, data = Gan(framework), Data()
        if leaves_some:
            gan.g_loss(gan.fw.tensor(data.noise)).backward()
        loop = elastic.Loop(gan.critic, gan.opt_d, data, batch_size=BATCH, epochs=1, shards=2)
        for epoch in loop.epochs():
            for step in epoch:
                for real, _noise in step:
                    step.backward(gan.fw.square(gan.critic(real)))
                step.update()
        found.append(gan.values())
    assert_same(*found)


@both
def test_two_losses_in_one_pass_train_each_its_own_parameters(framework):
    """As actor and critic: both losses of one forward pass, both updates at once."""
    expected, data = Gan(framework), Data()
    for number in range(STEPS):
        at = slice(number * BATCH % SAMPLES, number * BATCH % SAMPLES + BATCH)
        real, noise = expected.fw.tensor(data.real[at]), expected.fw.tensor(data.noise[at])
        d_loss = expected.d_loss(real, noise)
        g_loss = expected.g_loss(noise)
        # Each from the values before both updates.
        of_d = expected.fw.grad(d_loss, expected.critic)
        of_g = expected.fw.grad(g_loss, expected.generator)
        for model, grads in ((expected.critic, of_d), (expected.generator, of_g)):
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                parameter.grad = grad
        expected.opt_d.step()
        expected.opt_g.step()

    gan = Gan(framework)
    mask = np.array([0.5, -np.inf, np.inf])
    gan.generator.register_buffer("mask", gan.fw.tensor(mask.copy()))
    for epoch in gan.loop().epochs():
        for step in epoch:
            for real, noise in step:
                step.backward(gan.d_loss(real, noise), optimizer=gan.opt_d)
                step.backward(gan.g_loss(noise), optimizer=gan.opt_g)
            if epoch.number == 0:
                step.update()
            else:
                step.update(gan.opt_d)
                step.update(gan.opt_g)
    assert_same(expected.values(), gan.values())
    assert gan.generator.mask.tolist() == mask.tolist(), "also by the update without a pass"


@both
def test_a_list_of_optimizers_for_one_model_steps_as_one_with_groups(framework):
    def losses(fw: Any, model: Any, optimizers: Any) -> list[float]:
        found = []
        loop = elastic.Loop(
            model, optimizers, Data(), batch_size=BATCH, epochs=2, shuffle=False, shards=3
        )
        for epoch in loop.epochs():
            for step in epoch:
                for real, _noise in step:
                    step.backward(fw.square(model(real)))
                found.append(float(step.update()))
        return found

    fw = framework()
    model = fw.net(4, 5, 1)
    expected = losses(fw, model, fw.adam(model))
    fw = framework()
    model = fw.net(4, 5, 1)
    assert losses(fw, model, [fw.adam(model[0]), fw.adam(model[2])]) == pytest.approx(
        expected, rel=1e-12
    )


@both
def test_a_state_of_several_optimizers_goes_on_where_it_was(framework, tmp_path):
    expected = Gan(framework).plain()
    for epochs in (1, 2):
        gan = Gan(framework)
        for epoch in gan.loop(epochs=epochs, checkpoint=str(tmp_path)).epochs():
            for step in epoch:
                for real, noise in step:
                    step.backward(gan.d_loss(real, noise), optimizer=gan.opt_d)
                step.update(gan.opt_d)
                for _real, noise in step:
                    step.backward(gan.g_loss(noise), optimizer=gan.opt_g)
                step.update(gan.opt_g)
    assert_same(expected, gan.values())


def test_one_scaler_is_adjusted_once_per_step_and_schedulers_go_with_their_optimizers(tmp_path):
    def train(epochs: int) -> tuple[list[np.ndarray], float, float]:
        gan = Gan(Torch)
        scaler, scheduler = gan.fw.scaler(), gan.fw.scheduler(gan.opt_d)
        loop = gan.loop(epochs=epochs, checkpoint=str(tmp_path), scaler=scaler, scheduler=scheduler)
        for epoch in loop.epochs():
            for step in epoch:
                for real, noise in step:
                    step.backward(gan.d_loss(real, noise), optimizer=gan.opt_d)
                step.clip(0.1)
                step.update(gan.opt_d)
                for _real, noise in step:
                    step.backward(gan.g_loss(noise), optimizer=gan.opt_g)
                step.update(gan.opt_g)
                scheduler.step()
        return gan.values(), scaler.get_scale(), scheduler.get_last_lr()[0]

    train(1)
    found, scale, rate = train(2)
    assert scale == 8.0 * 2**3
    assert rate == pytest.approx(0.02 * 0.9**STEPS)

    gan, data = Gan(Torch), Data()
    scheduler = gan.fw.scheduler(gan.opt_d)
    for number in range(STEPS):
        at = slice(number * BATCH % SAMPLES, number * BATCH % SAMPLES + BATCH)
        real, noise = gan.fw.tensor(data.real[at]), gan.fw.tensor(data.noise[at])
        gan.opt_d.zero_grad()
        gan.d_loss(real, noise).backward()
        gan.fw.torch.nn.utils.clip_grad_norm_(gan.critic.parameters(), 0.1)
        gan.opt_d.step()
        gan.fw.step(gan.g_loss(noise), gan.opt_g)
        scheduler.step()
    assert_same(gan.values(), found)


def body(what: str) -> Callable[[Gan, Any], None]:
    """Return the body of a step with a mistake in it."""

    def run(gan: Gan, step: Any) -> None:
        for shard, (real, noise) in enumerate(step):
            if what == "by hand":
                gan.fw.square(gan.critic(real)).backward()
            if what != "left out" or shard != 0:
                step.backward(gan.d_loss(real, noise), optimizer=gan.opt_d)
            if what == "not updated":
                step.backward(gan.g_loss(noise), optimizer=gan.opt_g)
            if what == "another's":
                step.backward(gan.g_loss(noise), optimizer=gan.fw.adam(gan.generator))
        if what == "no gradient":
            step.update()
        if what == "again":
            for _real, noise in step:
                step.backward(gan.g_loss(noise), optimizer=gan.opt_g)
        step.update(gan.opt_d)
        if what == "twice":
            step.update(gan.opt_d)
        if what == "left":
            for _batch in step:
                break
        if what == "clipped late":
            step.clip(1.0)

    return run


@both
@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("no gradient", r"step.update\(optimizer\) for the one whose turn it is"),
        ("again", "begins again without an update"),
        ("twice", "no gradient came from 2 of this rank's 2 shards"),
        ("left out", "no gradient came from 1 of this rank's 2 shards"),
        ("by hand", r"has one that did not come by step\.backward: write step\.backward\(loss\)"),
        ("not updated", "gave a gradient to an optimizer that was not updated after it"),
        ("another's", "this Adam is not one of the loop's"),
        ("left", r"1 of this rank's 2 shards were computed; finish"),
        ("clipped late", "call it before the update that it is for"),
    ],
)
def test_a_step_that_would_lose_something_is_refused(framework, what: str, text: str):
    gan, run = Gan(framework), body(what)

    def train() -> None:
        for epoch in gan.loop().epochs():
            for step in epoch:
                run(gan, step)

    with pytest.raises(UsageError, match=text):
        train()


@both
def test_what_several_optimizers_cannot_have_is_refused_at_the_start(framework, tmp_path):
    gan = Gan(framework)
    shared = gan.fw.adam(gan.generator)
    with pytest.raises(UsageError, match="optimizers 0 and 1 have a parameter in common"):
        elastic.Loop(gan.generator, [gan.opt_g, shared], Data(), batch_size=BATCH, epochs=1)
    with pytest.raises(UsageError, match="none of its parameters is one of the model's"):
        elastic.Loop(gan.generator, [gan.opt_g, gan.opt_d], Data(), batch_size=BATCH, epochs=1)
    with pytest.raises(UsageError, match=r"all_reduce: 'overlapped'"):
        gan.loop(all_reduce="overlapped")
    with pytest.raises(UsageError, match=r"extra: 'g' is an optimizer .*Loop\(\[a, b\]"):
        gan.loop(extra={"g": shared})
