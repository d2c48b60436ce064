"""The original's calls: on a folder, in memory, and on an S3 server."""

import json
import logging
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import free_port, wait_until

paddle = pytest.importorskip("paddle")

from pod_runtime import LocalFS, TrainStatus, load_checkpoint, save_checkpoint  # noqa: E402
from pod_runtime.trainer.epochs import epoch_checkpoint  # noqa: E402
from pod_runtime.trainer.errors import (  # noqa: E402
    CheckpointError,
    ElasticError,
    StateError,
    UsageError,
)
from pod_runtime.verify import main as verify  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:When training, we now always track")


class Training:
    """A small model with all that belongs to a state: momentum, a schedule, a buffer."""

    def __init__(self, seed: int = 0, width: int = 3) -> None:
        paddle.seed(seed)
        with paddle.utils.unique_name.guard():
            self.model = paddle.nn.Sequential(
                paddle.nn.Linear(4, width), paddle.nn.BatchNorm1D(width), paddle.nn.Linear(width, 1)
            )
            self.schedule = paddle.optimizer.lr.ExponentialDecay(0.1, gamma=0.9)
            self.optimizer = paddle.optimizer.Momentum(
                self.schedule, parameters=self.model.parameters()
            )

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def epoch(self, number: int) -> None:
        inputs = paddle.to_tensor(np.random.RandomState(number).rand(8, 4).astype("float32"))
        self.model.train()
        (self.model(inputs) ** 2).mean().backward()
        with paddle.utils.unique_name.guard():  # a fresh process numbers accumulators from 0 on
            self.optimizer.step()
        self.optimizer.clear_grad()
        self.schedule.step()

    def values(self) -> list[np.ndarray]:
        return [tensor.numpy() for tensor in self.model.state_dict().values()]


@pytest.fixture
def restart(monkeypatch) -> Callable[[], None]:
    """Let what follows be a new start of the program."""
    return lambda: monkeypatch.setattr(epoch_checkpoint, "process_stages", {})


@pytest.fixture(scope="module")
def s3(tmp_path_factory) -> Iterator[dict[str, object]]:
    """A real S3 server on loopback; the value is what s3fs needs to reach it."""
    pytest.importorskip("moto")
    pytest.importorskip("s3fs")
    port = free_port()
    with (tmp_path_factory.mktemp("s3") / "log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            stdout=log,
            stderr=log,
        )
    endpoint = f"http://127.0.0.1:{port}"
    options = {"key": "k", "secret": "s", "endpoint_url": endpoint, "skip_instance_cache": True}
    try:
        wait_until(lambda: _listens(port), 60, "the S3 server listens")
        yield options
    finally:
        server.terminate()
        server.wait(120)


def _listens(port: int) -> bool:
    import socket

    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


Where = tuple[str, object]  # (path, fs)


@pytest.fixture(params=["folder", "LocalFS", "memory", "s3"])
def where(request, tmp_path: Path) -> Iterator[Where]:
    if request.param == "folder":
        yield str(tmp_path / "ckpt"), None
    elif request.param == "LocalFS":
        yield str(tmp_path / "ckpt"), LocalFS()
    elif request.param == "memory":
        yield f"memory://{uuid.uuid4()}/ckpt", None
    else:
        options = request.getfixturevalue("s3")
        import fsspec.asyn
        import s3fs

        fs = s3fs.S3FileSystem(**options)
        bucket = f"b{uuid.uuid4()}"
        fs.mkdir(bucket)
        yield f"{bucket}/runs/one", fs
        # When it is collected it gives its connections 0.1 s to be closed, and then leaves them.
        fsspec.asyn.sync(fs.loop, fs._s3creator.__aexit__, None, None, None)


def train_as_the_original(where: Where, epochs: int, *, crash_in: int | None = None) -> list[int]:
    """The original's program; returns the epochs that it trained."""
    path, fs = where
    training = Training(seed=epochs)
    train_status = TrainStatus()
    found = load_checkpoint(None, path, fs=fs, trainer_id=0, **training.state)
    if found is not None:
        train_status = found
    trained = []
    for epoch in range(train_status.next(), epochs):
        training.epoch(epoch)
        trained.append(epoch)
        if epoch == crash_in:
            return trained
        save_checkpoint(None, path, train_status=TrainStatus(epoch), fs=fs, **training.state)
    return trained


def restored(where: Where) -> tuple[Training, TrainStatus | None]:
    training = Training(seed=99)
    return training, load_checkpoint(None, where[0], fs=where[1], **training.state)


def test_a_program_that_crashes_and_starts_again_trains_every_epoch_and_none_in_vain(
    where, restart
):
    assert train_as_the_original(where, 5, crash_in=2) == [0, 1, 2]
    restart()
    assert train_as_the_original(where, 5) == [2, 3, 4]
    restart()
    assert train_as_the_original(where, 5) == []
    undisturbed = Training(seed=5)
    for epoch in range(5):
        undisturbed.epoch(epoch)
    training, status = restored(where)
    assert status == TrainStatus(4)
    for got, expected in zip(training.values(), undisturbed.values(), strict=True):
        np.testing.assert_array_equal(got, expected)
    assert training.schedule.last_lr == undisturbed.schedule.last_lr
    for one in (training, undisturbed):
        one.epoch(5)
    for got, expected in zip(training.values(), undisturbed.values(), strict=True):
        np.testing.assert_array_equal(got, expected)  # the momentum was there, too


def test_a_cosine_with_warm_restarts_goes_on_in_its_cycle(tmp_path, restart):
    def make() -> Training:
        made = Training()
        restarts = paddle.optimizer.lr.CosineAnnealingWarmRestarts
        made.schedule = restarts(0.5, T_0=2, T_mult=3)
        made.optimizer = paddle.optimizer.Momentum(
            made.schedule, parameters=made.model.parameters()
        )
        return made

    def next_rates(training: Training) -> list[float]:
        rates = []
        for epoch in range(12):
            rates.append(training.optimizer.get_lr())
            training.epoch(epoch)
        return rates

    for epochs in range(1, 12):
        restart()
        before, after, path = make(), make(), tmp_path / str(epochs)
        for epoch in range(epochs):
            before.epoch(epoch)
        save_checkpoint(None, path, train_status=TrainStatus(epochs - 1), **before.state)
        restart()
        assert load_checkpoint(None, path, **after.state) == TrainStatus(epochs - 1)
        assert next_rates(after) == pytest.approx(next_rates(before), rel=1e-12), epochs


def test_the_newest_ones_stay_and_the_rest_goes(tmp_path):
    train_as_the_original((str(tmp_path), None), 6)
    assert len(list(tmp_path.glob("stage_*/epoch_*"))) == epoch_checkpoint.KEEP


def test_verify_says_that_these_tell_of_no_samples(tmp_path, capsys):
    train_as_the_original((str(tmp_path), None), 1)
    assert verify([str(tmp_path)]) == 2
    assert "only a training by elastic.Loop can be verified" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kwargs", "left"),
    [
        ({"remain_all_checkpoint": True}, 6),
        ({"remain_all_checkpoint": False}, 1),
        ({"keep_checkpoints": 2}, 2),
        ({"keep_checkpoints": 4}, 4),
        ({"keep_checkpoints": 5}, 5),
    ],
)
def test_how_many_stay_can_be_said(tmp_path, kwargs, left):
    training = Training()
    for epoch in range(6):
        save_checkpoint(None, tmp_path, train_status=TrainStatus(epoch), **training.state, **kwargs)
    assert len(list(tmp_path.glob("stage_*/epoch_*"))) == left


def test_a_damaged_one_is_refused_and_the_newest_intact_one_taken_and_that_is_said(
    tmp_path, caplog, restart
):
    train_as_the_original((str(tmp_path), None), 3)
    (newest,) = tmp_path.glob("stage_*/epoch_00000003_*")
    content = bytearray((newest / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (newest / "model.safetensors").write_bytes(content)
    restart()
    with caplog.at_level(logging.WARNING):
        assert restored((str(tmp_path), None))[1] == TrainStatus(1)
    assert "its SHA-256 is not the manifest's" in caplog.text
    assert "falling back to checkpoint stage_00000001/epoch_00000002" in caplog.text


def test_one_without_a_manifest_was_never_there(where, restart):
    path, fs = where
    train_as_the_original(where, 2)
    store = epoch_checkpoint.storage_path(path, fs)
    store.storage.remove(f"{store.found()[-1].folder}/manifest.json")
    restart()
    assert restored(where)[1] == TrainStatus(0)


def test_none_intact_is_an_error_and_no_fresh_start(tmp_path, restart):
    train_as_the_original((str(tmp_path), None), 1)
    for file in tmp_path.glob("stage_*/epoch_*/optimizer.safetensors"):
        file.write_bytes(b"")
    restart()
    with pytest.raises(CheckpointError, match="none of its checkpoints is intact"):
        restored((str(tmp_path), None))


def test_what_a_cut_off_program_still_writes_counts_less_and_does_no_harm(
    tmp_path, monkeypatch, restart
):
    old = Training(seed=1)
    save_checkpoint(None, tmp_path, train_status=TrainStatus(0), **old.state)
    of_the_old = epoch_checkpoint.process_stages
    restart()
    new, status = restored((str(tmp_path), None))
    assert status == TrainStatus(0)
    save_checkpoint(None, tmp_path, train_status=TrainStatus(1), **new.state)
    of_the_new = epoch_checkpoint.process_stages

    monkeypatch.setattr(epoch_checkpoint, "process_stages", of_the_old)
    for epoch in range(1, 8):
        save_checkpoint(
            None, tmp_path, train_status=TrainStatus(epoch), keep_checkpoints=1, **old.state
        )
    monkeypatch.setattr(epoch_checkpoint, "process_stages", of_the_new)
    assert restored((str(tmp_path), None))[1] == TrainStatus(1)


def test_the_stage_of_the_launcher_is_taken_when_it_is_higher(tmp_path, monkeypatch, restart):
    monkeypatch.setenv("EDL_STAGE", "7")
    save_checkpoint(None, tmp_path, train_status=TrainStatus(0), **Training().state)
    restart()
    monkeypatch.setenv("EDL_STAGE", "3")  # of a later job on the same path
    save_checkpoint(None, tmp_path, train_status=TrainStatus(1), **Training().state)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stage_00000007", "stage_00000008"]
    restart()
    assert restored((str(tmp_path), None))[1] == TrainStatus(1)


def test_trainers_other_than_0_write_nothing(tmp_path, monkeypatch):
    made = save_checkpoint(
        None, tmp_path, trainer_id=1, train_status=TrainStatus(0), **Training().state
    )
    assert made is None
    monkeypatch.setenv("PADDLE_TRAINER_ID", "1")
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    assert save_checkpoint(None, tmp_path, None, TrainStatus(0), **Training().state) is None
    assert list(tmp_path.iterdir()) == []


def test_a_save_says_where_it_is_and_other_programs_can_read_it(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    training = Training()
    made = save_checkpoint(None, tmp_path, train_status=TrainStatus(4), **training.state)
    assert made is not None
    where, number = made
    assert number == 4
    tensors = safetensors.load_file(Path(where) / "model.safetensors")
    np.testing.assert_array_equal(tensors["0.weight"], training.model[0].weight.numpy())
    assert json.loads((Path(where) / "train_status.json").read_text())["epoch_no"] == 4


def test_a_full_disk_leaves_the_older_one_and_no_half_one(tmp_path, monkeypatch):
    training = Training()
    save_checkpoint(None, tmp_path, train_status=TrainStatus(0), **training.state)

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="not written: No space left on device"):
        save_checkpoint(None, tmp_path, train_status=TrainStatus(1), **training.state)
    monkeypatch.undo()
    assert len(list(tmp_path.glob("stage_*/epoch_*"))) == 1


def test_another_model_is_refused_with_the_difference(tmp_path):
    save_checkpoint(None, tmp_path, train_status=TrainStatus(0), **Training().state)
    with pytest.raises(StateError, match="other shapes"):
        load_checkpoint(None, tmp_path, **Training(width=5).state)


def test_a_parallel_model_counts_as_what_it_wraps(tmp_path):
    training = Training()
    wrapped = paddle.DataParallel.__new__(paddle.DataParallel)
    paddle.nn.Layer.__init__(wrapped)
    wrapped._layers = training.model
    save_checkpoint(
        None,
        tmp_path,
        train_status=TrainStatus(0),
        model=wrapped,
        optimizer=training.optimizer,
    )
    other = Training(seed=3)
    assert load_checkpoint(None, tmp_path, **other.state) == TrainStatus(0)
    np.testing.assert_array_equal(other.values()[0], training.values()[0])


def test_a_status_that_is_given_is_set(tmp_path):
    save_checkpoint(None, tmp_path, train_status=TrainStatus(3), **Training().state)
    status = TrainStatus()
    assert load_checkpoint(None, tmp_path, train_status=status, **Training().state) is status
    assert status.next() == 4


def test_an_empty_path_is_a_fresh_start_unless_that_is_an_error(tmp_path):
    assert load_checkpoint(None, tmp_path / "new", **Training().state) is None
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        load_checkpoint(None, tmp_path / "new", ignore_empty=False, **Training().state)


def test_checkpoints_of_the_elastic_loop_are_not_taken_for_an_empty_path(tmp_path):
    (tmp_path / "stage_00000001" / "step_0000000010").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"continue them with elastic\.Loop"):
        load_checkpoint(None, tmp_path, **Training().state)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda path, t: load_checkpoint(None, path), "model: missing; in dynamic graph"),
        (lambda path, t: load_checkpoint(None, path, model=t.model), "optimizer: missing"),
        (
            lambda path, t: load_checkpoint(None, path, model=object(), optimizer=t.optimizer),
            r"model: expected a paddle.nn.Layer, got object; .* elastic.Loop\(checkpoint=",
        ),
        (
            lambda path, t: load_checkpoint(
                None, path, model=paddle.Model(t.model), optimizer=t.optimizer
            ),
            r"pass its network .*ElasticCheckpoint",
        ),
        (lambda path, t: load_checkpoint(None, "", **t.state), "path: is empty"),
        (lambda path, t: save_checkpoint(None, path, **t.state), "train_status: expected"),
        (
            lambda path, t: save_checkpoint(
                None, path, train_status=TrainStatus(0), keep_checkpoints=0, **t.state
            ),
            "keep_checkpoints: expected",
        ),
        (lambda path, t: TrainStatus(-2), "epoch_no: expected"),
        (lambda path, t: TrainStatus("3"), "epoch_no: expected"),  # type: ignore[arg-type]
        (lambda path, t: load_checkpoint(None, path, fs="hdfs", **t.state), "fs: expected"),
        (lambda path, t: load_checkpoint(None, path, fs=object(), **t.state), "fs: object has no"),
    ],
)
def test_wrong_calls_are_refused_with_the_remedy(tmp_path, call, says):
    with pytest.raises(UsageError, match=says):
        call(tmp_path / "ckpt", Training())


def test_without_paddle_the_calls_say_what_a_script_for_pytorch_does(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "paddle", None)  # as where it is not installed
    monkeypatch.delitem(sys.modules, "pod_runtime.trainer.epochs.paddle_epochs", raising=False)
    with pytest.raises(UsageError, match=r"are for Paddle, .* elastic.Loop\(checkpoint="):
        load_checkpoint(None, tmp_path)


def test_a_folder_that_cannot_be_read_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ElasticError, match="not written"):
        save_checkpoint(
            None, tmp_path / "file" / "x", train_status=TrainStatus(0), **Training().state
        )


STATIC = """
import sys
import numpy as np
import paddle
from pod_runtime import TrainStatus, load_checkpoint, save_checkpoint
from pod_runtime.trainer.errors import UsageError

def train():
    (value,) = exe.run(feed={"x": np.ones((2, 4), "float32")}, fetch_list=[loss])
    schedule.step(value)
    return repr(float(value))

paddle.enable_static()
x = paddle.static.data("x", [None, 4])
loss = (paddle.static.nn.fc(x, 3) ** 2).mean()
schedule = paddle.optimizer.lr.ReduceOnPlateau(0.3, mode="max", factor=0.5, patience=0)
optimizer = paddle.optimizer.Momentum(schedule)
optimizer.minimize(loss)
exe = paddle.static.Executor()
exe.run(paddle.static.default_startup_program())
train(), train()
save_checkpoint(exe, sys.argv[1], train_status=TrainStatus(1), optimizer=optimizer)
print(train(), train(), train())
exe.run(paddle.static.default_startup_program())
print(load_checkpoint(exe, sys.argv[1], optimizer=optimizer).next())
print(train(), train(), train())
try:
    save_checkpoint(exe, sys.argv[1], train_status=TrainStatus(2), extra={"a": schedule})
except UsageError as error:
    print(error)
"""


def test_a_static_graph_goes_on_by_its_executor(tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", STATIC, str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    expected, first_epoch, got, refused = done.stdout.splitlines()
    assert refused.startswith("extra: belongs to model=")
    assert got == expected
    assert first_epoch == "2"
