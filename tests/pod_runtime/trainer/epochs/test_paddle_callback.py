"""`paddle.Model.fit` that is killed and continued, in real processes."""

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import warm
from tests.pod_runtime.trainer.fake_launcher import SCRIPTS
from tests.support import free_port

paddle = pytest.importorskip("paddle")

from pod_runtime.trainer.epochs import paddle_callback  # noqa: E402
from pod_runtime.trainer.epochs.paddle_callback import ElasticCheckpoint  # noqa: E402
from pod_runtime.trainer.errors import UsageError  # noqa: E402  needs no Paddle, but the rest does

SCRIPT = SCRIPTS / "fit.py"
EPOCH_STEPS = 12


def start(
    out: Path, *args: object, rank: int = 0, world: int = 1, port: int = 0
) -> warm.WarmProcess:
    env = os.environ | warm.STARTUP
    if world > 1:
        ends = [f"127.0.0.1:{port + n}" for n in range(world)]
        env |= {
            "PADDLE_TRAINER_ID": str(rank),
            "PADDLE_TRAINERS_NUM": str(world),
            "PADDLE_TRAINER_ENDPOINTS": ",".join(ends),
            "PADDLE_CURRENT_ENDPOINT": ends[rank],
            "PADDLE_DISTRI_BACKEND": "gloo",
        }
    with (out / f"log_{rank}").open("ab") as log:
        return warm.start([str(SCRIPT), str(out), *map(str, args)], env, log.fileno())


def run(out: Path, *args: object) -> int:
    return start(out, *args).wait(100)


def notes(out: Path, rank: int = 0) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / f"rank_{rank}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    out: Path = tmp_path_factory.mktemp("undisturbed")
    assert run(out, 4) == 0
    return out


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory) -> Path:
    """Killed after step 6 of epoch 1, saved at 4; stopped after step 2 of epoch 2; then left."""
    out: Path = tmp_path_factory.mktemp("disturbed")
    assert run(out, 4, "kill", 1, 6) == -signal.SIGKILL
    assert run(out, 4, "term", 2, 2) == 128 + signal.SIGTERM
    assert run(out, 4) == 0
    return out


@pytest.mark.timeout(300)
def test_a_fit_that_was_killed_and_stopped_ends_with_the_weights_of_one_that_was_not(
    undisturbed, disturbed
):
    expected, got = (np.load(out / "weight.npy") for out in (undisturbed, disturbed))
    np.testing.assert_array_equal(got, expected)


@pytest.mark.timeout(300)
def test_every_epoch_ends_once_and_callbacks_do_not_hear_of_those_that_are_done(disturbed):
    said = notes(disturbed)
    assert [note["ended"] for note in said if "ended" in note] == [0, 1, 2, 3]
    assert [note["begin"] for note in said if "begin" in note] == [0, 1, 2]


@pytest.mark.timeout(300)
def test_only_the_steps_behind_the_newest_checkpoint_are_done_again(undisturbed, disturbed):
    losses = [note["loss"] for note in notes(undisturbed) if "loss" in note]
    by_run: dict[int, list[float]] = {}
    for note in notes(disturbed):
        if "loss" in note:
            by_run.setdefault(note["run"], []).append(note["loss"])
    first, second, third = by_run.values()
    killed_at, saved_at = EPOCH_STEPS + 7, EPOCH_STEPS + 4
    stopped_at = 2 * EPOCH_STEPS + 3
    assert first == losses[:killed_at]
    assert second == losses[saved_at:stopped_at]  # SIGTERM lost no step
    assert third == losses[stopped_at:]


@pytest.mark.timeout(300)
def test_the_schedule_of_the_learning_rate_goes_on(undisturbed, disturbed):
    ends = [
        [note["lr"] for note in notes(out) if "done" in note] for out in (undisturbed, disturbed)
    ]
    assert ends[0] == ends[1]


@pytest.mark.timeout(300)
def test_a_training_that_is_over_trains_no_step_when_it_is_started_again(undisturbed):
    before = len([note for note in notes(undisturbed) if "loss" in note])
    assert run(undisturbed, 4) == 0
    assert len([note for note in notes(undisturbed) if "loss" in note]) == before


@pytest.mark.timeout(300)
class Seen(paddle.callbacks.Callback):  # type: ignore[name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.epochs: list[int] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epochs.append(epoch)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_fit_that_was_stopped_early_trains_no_epoch_when_it_is_started_again(tmp_path, is_first):
    data = [[np.ones((8, 3), np.float32), np.ones((8, 1), np.float32)]]  # one batch
    for trained in ([0, 1, 2], []):
        paddle_callback._ended_fits.clear()  # as in a process that begins
        network = paddle.nn.Linear(3, 1)
        model = paddle.Model(network)
        optimizer = paddle.optimizer.SGD(0.0, parameters=network.parameters())
        model.prepare(optimizer, paddle.nn.MSELoss())
        early = paddle.callbacks.EarlyStopping("loss", mode="min", patience=2, verbose=0)
        both = [early, ElasticCheckpoint(str(tmp_path))]
        seen = Seen()
        callbacks = [*(both if is_first else reversed(both)), seen]
        model.fit(data, data, epochs=9, verbose=0, callbacks=callbacks)
        assert seen.epochs == trained


def small_model(rate: object) -> Any:
    network = paddle.nn.Linear(3, 1)
    model = paddle.Model(network)
    optimizer = paddle.optimizer.SGD(rate, parameters=network.parameters())
    model.prepare(optimizer, paddle.nn.MSELoss())
    return model


ONE_BATCH = [[np.ones((8, 3), np.float32), np.ones((8, 1), np.float32)]]


class LostError(Exception):
    """As if the process were gone."""


class Halving(paddle.callbacks.Callback):  # type: ignore[name-defined]
    """Halves the learning rate after each evaluation; notes it; is lost in an epoch."""

    def __init__(self, lost_in: int = -1) -> None:
        super().__init__()
        self.lost_in = lost_in
        self.rates: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, step: int, logs: Any = None) -> None:
        if self.epoch == self.lost_in:
            raise LostError
        self.rates.append(self.model._optimizer.get_lr())

    def on_eval_end(self, logs: Any = None) -> None:
        rate = self.model._optimizer._learning_rate
        if isinstance(rate, float):
            self.model._optimizer.set_lr(rate / 2)
        else:
            rate.step(1.0)  # no better than before, so that it halves


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("has_schedule", [True, False])
def test_what_a_callback_does_to_the_learning_rate_after_an_evaluation_goes_on(
    tmp_path, is_first, has_schedule
):
    def fit(halving: Halving) -> None:
        plateau = paddle.optimizer.lr.ReduceOnPlateau(8.0, factor=0.5, patience=0)
        by_nobody = paddle.callbacks.LRScheduler(by_step=False)
        callbacks = [ElasticCheckpoint(str(tmp_path)), halving, by_nobody]
        small_model(plateau if has_schedule else 8.0).fit(
            ONE_BATCH, ONE_BATCH, epochs=5, verbose=0,
            callbacks=callbacks if is_first else callbacks[::-1],
        )  # fmt: skip

    before, after = Halving(lost_in=3), Halving()
    with pytest.raises(LostError):
        fit(before)
    fit(after)
    expected = [8.0, 8.0, 4.0, 2.0, 1.0] if has_schedule else [8.0, 4.0, 2.0, 1.0, 0.5]
    assert before.rates + after.rates == expected


def test_callbacks_hear_nothing_of_the_epochs_that_are_done(tmp_path):
    class Steps(Halving):
        """Sets the learning rate as two epochs begin."""

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            super().on_epoch_begin(epoch, logs)
            if epoch in (0, 2):
                self.model._optimizer.set_lr([8.0, 0.0, 0.5][epoch])

        def on_eval_end(self, logs: Any = None) -> None:
            pass

    steps = [Steps(lost_in=3), Steps()]
    for each in steps:
        with contextlib.suppress(LostError):
            small_model(1.0).fit(
                ONE_BATCH, epochs=5, verbose=0, callbacks=[each, ElasticCheckpoint(str(tmp_path))]
            )
    assert [each.rates for each in steps] == [[8.0, 8.0, 0.5], [0.5, 0.5]]


class Derived(ElasticCheckpoint):
    """A script's own kind, which does more."""

    def on_train_begin(self, logs: Any = None) -> None:
        super().on_train_begin(logs)


@pytest.mark.parametrize("kind", [ElasticCheckpoint, Derived])
@pytest.mark.parametrize("has_evaluation", [True, False])
@pytest.mark.parametrize("save_steps", [None, 1])
@pytest.mark.parametrize("is_first", [True, False])
def test_what_callbacks_do_once_to_the_learning_rate_is_not_done_twice(
    tmp_path, is_first, save_steps, has_evaluation, kind
):
    class Milestones(paddle.callbacks.Callback):  # type: ignore[name-defined]
        """Sets the first learning rate, and halves it as two epochs begin."""

        def __init__(self, lost_in: int) -> None:
            super().__init__()
            self.lost_in = lost_in

        def on_train_begin(self, logs: Any = None) -> None:
            self.model._optimizer.set_lr(8.0)

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch
            if epoch in (1, 3):
                self.model._optimizer.set_lr(self.model._optimizer.get_lr() / 2)

        def on_train_batch_end(self, step: int, logs: Any = None) -> None:
            rates[self.epoch].add(self.model._optimizer.get_lr())
            if self.epoch == self.lost_in and step == 1:
                raise LostError

    rates: list[set[float]] = [set() for _epoch in range(5)]
    for lost_in in (3, 4, -1):
        callbacks = [Milestones(lost_in), kind(str(tmp_path), save_steps=save_steps)]
        with contextlib.suppress(LostError):
            small_model(1.0).fit(
                ONE_BATCH * 3, ONE_BATCH if has_evaluation else None, epochs=5, verbose=0,
                callbacks=callbacks[::-1] if is_first else callbacks,
            )  # fmt: skip
    assert rates == [{8.0}, {4.0}, {4.0}, {2.0}, {2.0}]


@pytest.mark.parametrize("same_network", [True, False])
def test_a_second_fit_in_one_folder_is_refused_or_told(tmp_path, caplog, same_network):
    """Of another network, too, as each fold of a cross-validation has one."""
    model = small_model(0.1)

    def fit(folder: str, epochs: int) -> list[int]:
        seen = Seen()
        callbacks = [ElasticCheckpoint(str(tmp_path / folder)), seen]
        (model if same_network else small_model(0.1)).fit(
            ONE_BATCH, epochs=epochs, verbose=0, callbacks=callbacks
        )
        return seen.epochs

    assert fit("first", 2) == [0, 1]
    with pytest.raises(UsageError, match="give each fit a path of its own"):
        fit("first", 2)
    assert fit("second", 2) == [0, 1]
    assert "own" not in caplog.text
    assert fit("second", 3) == [2]
    assert "count as done (2 of 3); give each fit a path of its own" in caplog.text
    caplog.clear()
    shutil.rmtree(tmp_path / "second")
    assert fit("second", 3) == [0, 1, 2]
    assert "count as done" not in caplog.text


class Stream:
    """Batches whose number nobody knows."""

    def __iter__(self) -> Iterator[Any]:
        for number in range(6):
            yield [np.full((1, 3), number, np.float32), np.ones((1, 1), np.float32)]


def test_an_epoch_of_a_stream_goes_on_where_it_was_cut_off(tmp_path):
    seen: list[float] = []

    class Inputs(paddle.nn.Layer):  # type: ignore[name-defined]
        def __init__(self, lost_at: int) -> None:
            super().__init__()
            self.layer, self.lost_at = paddle.nn.Linear(3, 1), lost_at

        def forward(self, inputs: Any) -> Any:
            if len(seen) == self.lost_at:
                raise LostError
            seen.append(float(inputs[0, 0]))
            return self.layer(inputs)

    for lost_at in (10, -1):
        network = Inputs(lost_at)
        model = paddle.Model(network)
        optimizer = paddle.optimizer.SGD(0.0, parameters=network.parameters())
        model.prepare(optimizer, paddle.nn.MSELoss())
        saving = ElasticCheckpoint(str(tmp_path), save_steps=2)
        with contextlib.suppress(LostError):
            model.fit(Stream(), epochs=3, verbose=0, callbacks=[saving])
    assert seen == [*range(6), *range(4), *range(4, 6), *range(6)]


def test_a_fit_that_failed_may_be_called_once_more(tmp_path):
    model, seen = small_model(0.1), Seen()
    checkpoint = ElasticCheckpoint(str(tmp_path))
    with pytest.raises(LostError):
        model.fit(ONE_BATCH, epochs=3, verbose=0, callbacks=[checkpoint, Halving(lost_in=1)])
    model.fit(ONE_BATCH, epochs=3, verbose=0, callbacks=[checkpoint, seen])
    assert seen.epochs == [1, 2]


def test_a_sigterm_to_one_of_two_trainers_stops_both_at_the_same_step(tmp_path):
    port = free_port()
    both = [start(tmp_path, 3, "term", 1, 2, rank=n, world=2, port=port) for n in range(2)]
    assert [process.wait(100) for process in both] == [143, 143]
    last = [notes(tmp_path, rank)[-1] for rank in range(2)]
    assert [(note["epoch"], note["step"]) for note in last] == [(1, 2), (1, 2)]

    assert run(tmp_path, 3) == 0  # one trainer: twice as many steps, so the same share of them
    said = notes(tmp_path)
    assert [note["ended"] for note in said if "ended" in note] == [0, 1, 2]
    again = [note for note in said if "loss" in note and note["run"] == said[-1]["run"]]
    assert len([note for note in again if note["epoch"] == 1]) == EPOCH_STEPS - 2 * 3


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"save_steps": 0}, "save_steps: expected a whole number"),
        ({"save_steps": 1.5}, "save_steps: expected a whole number"),
        ({"keep_checkpoints": 0}, "keep_checkpoints: expected a whole number"),
    ],
)
def test_wrong_arguments_are_refused_before_the_training(tmp_path, kwargs, says):
    with pytest.raises(UsageError, match=says):
        ElasticCheckpoint(tmp_path, **kwargs)
