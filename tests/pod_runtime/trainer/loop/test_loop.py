"""The loop outside EDL, in this process: a world of one, misuse, resuming, policies, streams."""

import contextlib
import json
import logging
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import psutil
import pytest
from paddle import nn
from paddle.io import DataLoader, Dataset

from pod_runtime import elastic
from pod_runtime.shim_wire import CLAIM
from pod_runtime.trainer.data.step import EpochPosition
from pod_runtime.trainer.data.streams import borrowed_numbers
from pod_runtime.trainer.frameworks.paddle.data import PaddleData
from pod_runtime.trainer.loop.loop import committed_step, explain_error
from pod_runtime.trainer.progress.batches import permutation
from pod_runtime.trainer.state.checkpoint import CheckpointStore
from pod_runtime.trainer.state.storage import open_storage
from pod_runtime.verify import main as verify
from tests.disks import small_disk
from tests.pod_runtime.trainer.fake_launcher import SCRIPTS
from tests.pod_runtime.trainer.states import finish_writing, this_stage
from tests.support import code_blocks

DATA = [np.full(3, i, "float32") / 10 for i in range(20)]


@pytest.fixture(autouse=True)
def _outside_edl(monkeypatch):
    for name in ("EDL_CHANNEL", "EDL_STAGE", "EDL_RUN_DIR", "EDL_MAX_TRAINERS"):
        monkeypatch.delenv(name, raising=False)


def make(*, rate: Any = 0.05, **arguments: Any) -> tuple[elastic.Loop, Any]:
    paddle.seed(5)
    model = nn.Linear(3, 1)
    optimizer = paddle.optimizer.Adam(rate, parameters=model.parameters())
    given: dict[str, Any] = {"train_set": DATA, "batch_size": 6, "epochs": 2, "seed": 3}
    return elastic.Loop(model, optimizer, **(given | arguments)), model


def train(loop: elastic.Loop, model: Any, *, stop_at: int | None = None) -> list[Any]:
    """Train to the end, or leave before the step `stop_at`; return what was read in each step."""
    read: list[Any] = []
    for epoch in loop.epochs():
        for step in epoch:
            if step.number == stop_at:
                return read
            assert step.index == step.number % epoch.steps, "also where a process goes on"
            batches = []
            for batch in step:
                batches.append(batch.numpy())
                step.backward((model(batch) ** 2).mean())
            read.append((step.number, step.sample_ids, np.concatenate(batches)[:, 0].tolist()))
            step.update()
    return read


def test_a_trainer_that_a_pods_script_starts_without_the_launcher_is_refused(monkeypatch):
    monkeypatch.setenv("EDL_POD_ID", "pod_0_0")
    with pytest.raises(elastic.UsageError, match="each pod would train alone; let it call the lau"):
        make()
    monkeypatch.setenv("EDL_SERVICE", "digits")  # a teacher's pod has none, and may train first
    make()


def test_a_loop_in_what_a_pods_script_does_after_its_training_is_not_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("EDL_POD_ID", "pod_0_0")
    monkeypatch.setenv("EDL_POD_DIR", str(tmp_path))
    (tmp_path / CLAIM).touch()
    with pytest.raises(elastic.UsageError, match="each pod would train alone"):
        make()
    (tmp_path / CLAIM).write_text("complete\n")  # as the launcher leaves it
    make()


def test_a_step_reads_the_samples_that_it_names():
    loop, model = make(shards=4)
    read = train(loop, model)
    assert [number for number, _ids, _values in read] == list(range(8))
    for _number, ids, values in read:
        assert values == pytest.approx([sample / 10 for sample in ids])
    assert sorted(sample for _n, ids, _v in read[:4] for sample in ids) == list(range(20))
    assert [sample for _n, ids, _v in read[:4] for sample in ids] != [
        sample for _n, ids, _v in read[4:] for sample in ids
    ]
    assert (loop.rank, loop.world_size, loop.step_count, loop.shards_per_batch) == (0, 1, 8, 4)


class Alternates(nn.Layer):
    """Its buffer jumps, so that old value + change is not the new value to the bit."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", paddle.full([1], 1e-9))

    def forward(self, inputs: Any) -> Any:
        self.last.set_value(paddle.full([1], 1e-9 if self.last.item() > 0.5 else 1.0))
        return inputs


@pytest.mark.filterwarnings("ignore:When training, we now always track global mean")
def test_one_trainer_that_promises_statistics_trains_as_a_plain_loop(caplog):
    def build() -> tuple[Any, Any]:
        paddle.seed(5)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1D(4), nn.Linear(4, 1), Alternates())
        return model, paddle.optimizer.Adam(0.05, parameters=model.parameters())

    caplog.set_level(logging.INFO)
    model, optimizer = build()
    loop = elastic.Loop(model, optimizer, DATA, batch_size=6, epochs=3, promise="statistics")
    batches = []
    for epoch in loop.epochs():
        for step in epoch:
            for batch in step:
                batches.append(batch)
                step.backward((model(batch) ** 2).mean())
            step.update()
    assert [len(each) for each in batches] == [6, 6, 6, 2] * 3
    assert "promise: statistics" in caplog.text
    plain, optimizer = build()
    for batch in batches:
        (plain(batch) ** 2).mean().backward()
        optimizer.step()
        optimizer.clear_grad()
    for (name, ours), theirs in zip(
        model.state_dict().items(), plain.state_dict().values(), strict=True
    ):
        assert np.array_equal(ours.numpy(), theirs.numpy()), name


def test_a_promise_may_be_weakened_when_a_training_goes_on_but_not_strengthened(tmp_path, capsys):
    train(*make(checkpoint=tmp_path, epochs=1))
    train(*make(checkpoint=tmp_path, epochs=2, promise="statistics"))
    text = r"promise: the state of step 8 was made with 'statistics', this script says 'rounding'"
    with pytest.raises(elastic.StateError, match=f"{text}.*continue with promise='statistics', or"):
        make(checkpoint=tmp_path, epochs=3)
    assert verify([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "stage 1: steps 1-4, 1 trainers, batch 6, promise rounding, began afresh" in out
    assert "stage 2: steps 5-8, 1 trainers, batch 6, promise statistics, began from stage 1" in out


def test_a_training_that_could_keep_nothing_does_not_begin(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(elastic.CheckpointError, match="cannot be written: Not a directory"):
        make(checkpoint=tmp_path / "file" / "ckpt")


@pytest.mark.parametrize("pods", ["disk", "link"])
def test_a_training_does_not_begin_whose_checkpoints_no_later_pod_would_find(
    tmp_path, monkeypatch, pods
):
    (tmp_path / "disk" / "pod_3_0").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk")  # as --pod_path may be
    monkeypatch.chdir(tmp_path / pods / "pod_3_0")
    monkeypatch.setenv("EDL_POD_FOLDER", str(tmp_path / pods / "pod_3_0"))
    with pytest.raises(elastic.UsageError, match=r"checkpoint: out is in .*, the folder of this"):
        make(checkpoint="out")


@pytest.mark.parametrize("shared", ["pod_3_0", "pod_3_0/out"])
def test_what_a_package_script_links_to_is_of_all_pods(tmp_path, monkeypatch, shared):
    (tmp_path / "shared").mkdir()
    (tmp_path / shared).parent.mkdir(exist_ok=True)
    (tmp_path / shared).symlink_to(tmp_path / "shared")
    monkeypatch.chdir(tmp_path / "pod_3_0")
    monkeypatch.setenv("EDL_POD_FOLDER", str(tmp_path / "pod_3_0"))
    make(checkpoint="out")


def test_checkpoints_stay_where_they_are_when_the_script_changes_its_folder(tmp_path, monkeypatch):
    (tmp_path / "results").mkdir()
    for epochs in (1, 2):
        monkeypatch.chdir(tmp_path)
        loop, model = make(checkpoint="checkpoint", epochs=epochs)
        monkeypatch.chdir("results")
        assert len(train(loop, model)) == 4
    assert not any((tmp_path / "results").iterdir())


@pytest.mark.parametrize("kind", ["dataset", "workers", "reader", "reader of its own"])
def test_what_was_drawn_is_proven_however_it_is_read(tmp_path, capsys, kind):
    def read(where: elastic.ReadFrom) -> Any:
        for epoch, step, shard, batch in loop.shards(DATA):
            yield epoch, step, shard, batch * 2

    def read_alone(where: elastic.ReadFrom) -> Any:
        for epoch in range(2):
            for step, size in enumerate([6, 6, 6, 2]):
                yield epoch, step, 0, paddle.ones([size, 3])

    arguments: dict[str, dict[str, Any]] = {
        "dataset": {},
        "workers": {"num_workers": 1},
        "reader": {"reader": read},
        "reader of its own": {"reader": read_alone},
    }
    loop, model = make(checkpoint=tmp_path, **arguments[kind])
    for epoch in loop.epochs():
        for step in epoch:
            for batch in step:
                fields = batch[0] if isinstance(batch, list) else batch
                step.backward((model(fields) ** 2).mean())
            step.update()
    assert verify([str(tmp_path)]) == 0
    text = "stage 1, steps 1-8: which samples were drawn was not written down"
    assert (text in capsys.readouterr().out) == (kind == "reader of its own")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_reader_that_draws_other_samples_than_the_order_says_is_found(
    tmp_path, capsys, monkeypatch, workers
):
    def half_of_them_twice(*args: Any) -> Any:
        return permutation(*args) // 2

    monkeypatch.setattr("pod_runtime.trainer.data.readers.permutation", half_of_them_twice)
    loop, model = make(checkpoint=tmp_path, num_workers=workers)
    train(loop, model)
    assert verify([str(tmp_path)]) == 1
    out = capsys.readouterr().out
    for where in ("epoch 0, steps 1-4", "epoch 1, steps 5-8"):
        assert f"NOT PROVEN: stage 1, {where}: the samples that trainers drew are not those" in out


def test_a_checkpoint_is_loaded_without_edl_by_the_lines_of_the_guide(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for epochs in (1, 2):
        loop, trained = make(checkpoint="checkpoint", epochs=epochs)
        train(loop, trained)
    model = nn.Linear(3, 1)
    (lines,) = code_blocks("docs/training-scripts.md", "python paddle")
    exec(lines, {"model": model})
    for name, value in trained.state_dict().items():
        np.testing.assert_array_equal(model.state_dict()[name].numpy(), value.numpy())


def test_the_last_checkpoint_is_tried_again_until_its_path_is_mended(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("pod_runtime.trainer.membership.member.RETRY_S", 0.01)
    path = tmp_path / "ckpt"
    loop, model = make(checkpoint=path, epochs=1)
    in_the_way = path / "stage_00000001"
    in_the_way.write_text("no folder")
    attempts = []

    def mend(record: logging.LogRecord) -> bool:
        if "its last checkpoint is not written" in record.getMessage():
            attempts.append(record)
            if len(attempts) == 3:
                in_the_way.unlink()
        return True

    caplog.handler.addFilter(mend)
    train(loop, model)
    caplog.handler.removeFilter(mend)
    assert len(attempts) == 3
    assert verify([str(path)]) == 0


def test_a_disk_that_is_full_to_the_end_costs_a_training_nothing(
    tmp_path, caplog, capsys, monkeypatch
):
    monkeypatch.setattr("pod_runtime.trainer.membership.member.RETRY_S", 0.01)
    with small_disk(tmp_path / "disk", "256k") as disk:
        monkeypatch.setenv("EDL_RUN_DIR", str(disk / "run"))
        loop, model = make(checkpoint=disk / "ckpt", save_steps=3, epochs=40)
        for epoch in loop.epochs():
            for step in epoch:
                for batch in step:
                    step.backward((model(batch) ** 2).mean())
                step.update()
            if epoch.number == 10:
                finish_writing()  # what is written now would make room behind it
                fill(disk / "filler")
            loop.log(epoch=epoch.number)
            if epoch.number == 39:
                caplog.handler.addFilter(free := Freeing(disk / "filler"))
        caplog.handler.removeFilter(free)
        assert "ledger.jsonl cannot be written: No space left on device" in caplog.text
        assert "not written: No space left on device" in caplog.text
        assert free.times == 1
        this_stage().progress.close()
        for folder in ("run", "ckpt"):
            assert verify([str(disk / folder)]) == 0
        assert capsys.readouterr().out.count("epochs 0-39: each of 20 samples") == 2


def fill(path: Path) -> None:
    """Take all the room that is left on a disk."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass


class Freeing(logging.Filter):
    """Makes room when the last checkpoint could not be written."""

    def __init__(self, filler: Path) -> None:
        super().__init__()
        self._filler = filler
        self.times = 0

    def filter(self, record: logging.LogRecord) -> bool:
        if "its last checkpoint is not written" in record.getMessage():
            self.times += 1
            self._filler.unlink()
        return True


def test_a_training_that_was_left_goes_on_as_if_it_had_not_been(tmp_path, caplog):
    whole, whole_model = make()
    read = train(whole, whole_model)
    path = str(tmp_path / "ckpt")
    starts = []
    for stop_at in (4, 7, None):
        loop, model = make(checkpoint=path, save_steps=1)
        starts.append(loop.step_count)
        assert train(loop, model, stop_at=stop_at) == read[starts[-1] : stop_at]
        finish_writing()
    assert 0 == starts[0] < starts[1] < starts[2] <= 7
    assert model.weight.numpy().tobytes() == whole_model.weight.numpy().tobytes()
    assert verify([path]) == 0
    # Finished: nothing is left to do, and more epochs may be asked for.
    loop, model = make(checkpoint=path)
    assert train(loop, model) == []
    loop, model = make(checkpoint=path, epochs=3)
    assert [number for number, _ids, _values in train(loop, model)] == [8, 9, 10, 11]
    assert verify([path]) == 0


def test_what_a_script_draws_in_an_epoch_outside_of_its_steps_is_the_same_after_a_restart(tmp_path):
    """A size of the images, say, as for training in several of them."""

    def draw() -> tuple[float, ...]:
        return random.random(), float(np.random.rand()), paddle.rand([]).item()

    def train(path: Path | None, stop_at: int | None = None) -> dict[tuple[int, str], Any]:
        loop, model = make(checkpoint=path, save_steps=1, epochs=3)
        drawn = {}
        for epoch in loop.epochs():
            drawn[epoch.number, "before"] = draw()
            for step in epoch:
                if step.number == stop_at:
                    return drawn
                for batch in step:
                    step.backward((model(batch) ** 2).mean())
                step.update()
            loop.evaluate(DATA, lambda batch: {"noise": paddle.rand([])}, batch_size=7)
            drawn[epoch.number, "after"] = draw()
        return drawn

    expected = train(None)
    assert len({*expected.values()}) == 6
    for stop_at in (2, 7, None):  # 4 steps an epoch
        found = train(tmp_path / "checkpoint", stop_at)
        finish_writing()
        assert found
        assert found.items() <= expected.items()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"batch_size": 5}, "batch_size: the state of step 8 was made with 6, this script says 5"),
        ({"seed": 4}, "seed: the state of step 8 was made with 3, this script says 4"),
        ({"train_set": DATA[::-1]}, "train_set: .* other samples than .* dataset has in memory"),
        (
            {"train_set": DATA[:10]},
            "dataset_length: .* made with 20, .* says 10; give it the same samples",
        ),
        ({"shuffle": False}, "shuffle: "),
        ({"shards": 2}, "shards: .* made with 1 per update, this script says 2; V is fixed for"),
    ],
)
def test_a_state_of_other_data_or_batches_is_refused(tmp_path, change, text):
    path = str(tmp_path / "ckpt")
    train(*make(checkpoint=path))
    with pytest.raises(elastic.StateError, match=text):
        make(checkpoint=path, **change)


def test_a_state_of_updates_of_other_batches_says_which_arguments_they_had(tmp_path):
    path = str(tmp_path / "ckpt")
    train(*make(checkpoint=path, batch_size=3, accumulation_steps=2))
    text = (
        r"batch_size: the state of step 8 was made with 3 in accumulation_steps=2, this script "
        r"says 3 in accumulation_steps=1; continue with batch_size=3 and accumulation_steps=2, or"
    )
    with pytest.raises(elastic.StateError, match=text):
        make(checkpoint=path, batch_size=3)


def train_and_stop(checkpoint: str, *, epochs: int, stop_after: int | None) -> list[int]:
    """Train, and call `stop` in the epoch `stop_after`; return the numbers of the epochs."""
    loop, model = make(checkpoint=checkpoint, epochs=epochs)
    seen = []
    for epoch in loop.epochs():
        for step in epoch:
            for batch in step:
                step.backward((model(batch) ** 2).mean())
            step.update()
        seen.append(epoch.number)
        if epoch.number == stop_after:
            loop.stop()
    return seen


def test_a_training_that_stops_early_is_complete_until_more_epochs_are_asked_for(tmp_path):
    path = str(tmp_path / "checkpoint")
    assert train_and_stop(path, epochs=5, stop_after=1) == [0, 1]
    assert train_and_stop(path, epochs=5, stop_after=None) == []
    assert train_and_stop(path, epochs=6, stop_after=None) == [2, 3, 4, 5]


def test_a_training_stops_after_its_epoch_though_a_trainer_was_lost_since_it_was_told_to(tmp_path):
    def run(*, dies: bool) -> int:
        loop, model = make(checkpoint=str(tmp_path), epochs=5, save_steps=1)
        for epoch in loop.epochs():
            for step in epoch:
                for batch in step:
                    step.backward((model(batch) ** 2).mean())
                step.update()
                if epoch.number == 1 and step.index == 0:
                    loop.stop()
                if dies and epoch.number == 1 and step.index == 1:
                    finish_writing()
                    return 0
        return loop.step_count

    run(dies=True)
    assert run(dies=False) == 8, "two epochs of four steps"


@pytest.mark.parametrize("is_right", [False, True])
def test_a_count_of_epochs_or_steps_that_begins_anew_in_a_later_trainer_is_told(caplog, is_right):
    loop, model = make()
    if is_right:
        for number, epoch in enumerate(loop.epochs(), loop.epoch):
            for index, step in enumerate(epoch, epoch.first_step):
                assert (number, index) == (epoch.number, step.index)
                for batch in step:
                    step.backward((model(batch) ** 2).mean())
                step.update()
    else:
        for _number, epoch in enumerate(loop.epochs()):
            for _index, step in enumerate(epoch, 1):
                for batch in step:
                    step.backward((model(batch) ** 2).mean())
                step.update()
    said = [each for each in caplog.messages if "enumerate counts" in each]
    assert len(said) == (0 if is_right else 2)
    if said:
        assert "test_loop.py" in said[0]
        assert said[0].endswith("take epoch.number")
        assert said[1].endswith("take step.index or step.number")


def test_what_the_loop_logs_is_shown_where_the_script_has_set_up_logging(monkeypatch):
    # `dictConfig` and `fileConfig` disable what there is, `disable_existing_loggers` being True.
    logger = logging.getLogger("pod_runtime.trainer.loop.loop")
    monkeypatch.setattr(logger, "disabled", True)
    make()
    assert not logger.disabled


def test_a_variable_that_epochs_hand_on_is_named(caplog):
    loop, model = make()
    best = patience = 3.0
    with caplog.at_level("WARNING"):
        for epoch in loop.epochs():
            for step in epoch:
                for batch in step:
                    step.backward((model(batch) ** 2).mean())
                best = min(best, float(step.update()))
            if epoch.number:
                patience -= 1
    (said,) = [each for each in caplog.messages if "no state carries it" in each]
    assert "test_loop.py" in said
    assert ": best, patience: an epoch" in said
    assert "loop.save_best" in said


def test_forgetting_update_is_an_error():
    loop, _model = make()
    steps = iter(next(iter(loop.epochs())))
    for batch in next(steps):
        assert batch.shape == [6, 3]
    text = r"step 0: step\.update\(\) is missing.*say so by Loop\(accumulation_steps=N\)"
    with pytest.raises(elastic.UsageError, match=text):
        next(steps)


@pytest.mark.parametrize("arguments", [{}, {"shards": 2}], ids=str)
def test_accumulation_is_a_larger_batch_in_as_many_more_shards(tmp_path, arguments: dict[str, int]):
    loop, model = make(accumulation_steps=3, batch_size=3, checkpoint=tmp_path, **arguments)
    shards = loop.shards_per_batch
    assert shards == 3 * arguments.get("shards", 1)  # outside EDL there is one trainer
    plain, other = make(batch_size=9, shards=shards)
    assert len(read := train(loop, model)) == 6  # of 9, 9 and 2 samples in each of two epochs
    assert read == train(plain, other)
    assert np.array_equal(model.weight.numpy(), other.weight.numpy())
    # The same training goes on, in the words of before.
    again, model = make(batch_size=9, shards=shards, checkpoint=tmp_path, epochs=3)
    assert len(train(again, model)) == 3
    text = r"shards: the state of step 9 was made with \d per update, this script says 15"
    with pytest.raises(elastic.StateError, match=text):
        make(accumulation_steps=3, batch_size=3, shards=5, checkpoint=tmp_path, epochs=4)


def test_accumulation_bounds_the_memory_of_a_trainers_share():
    loop, model = make(accumulation_steps=3, batch_size=4, promise="statistics", epochs=1)
    sizes = []
    for epoch in loop.epochs():
        for step in epoch:
            for shard in step:
                sizes.append(len(shard))
                step.backward((model(shard) ** 2).mean())
            step.update()
    assert sizes == [4, 4, 4, 2, 3, 3]


def test_accumulation_counts_for_what_drop_last_leaves_out():
    loop, model = make(accumulation_steps=2, batch_size=6, drop_last=True)
    assert [len(ids) for _number, ids, _values in train(loop, model)] == [12, 12]
    text = "20 samples give no batch of 24 with drop_last=True"
    with pytest.raises(elastic.UsageError, match=text):
        make(accumulation_steps=4, batch_size=6, drop_last=True)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (lambda step, loss: loss.backward(), r"write step\.backward\(loss\) instead of loss\.back"),
        (lambda step, loss: step.update(), r"1 of this rank's 2 shards were computed"),
    ],
)
def test_other_ways_to_go_wrong_in_a_shard_are_named(body, text):
    loop, model = make(shards=2)
    epoch = next(iter(loop.epochs()))
    step = next(iter(epoch))

    def compute() -> None:
        for batch in step:
            body(step, model(batch).mean())
        step.update()

    with pytest.raises(elastic.UsageError, match=text):
        compute()


with_norm = pytest.mark.filterwarnings("ignore:When training, we now always track")


class Tempered(nn.Layer):
    """Has a buffer that the script sets, and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.BatchNorm1D(3), nn.Linear(3, 1)
        self.register_buffer("heat", paddle.zeros([2]))
        self.seen: list[float] = []

    def forward(self, batch: Any) -> Any:
        self.seen.append(float(self.heat[0]))
        return self.out(self.norm(batch)) * (1 + self.heat[0])


def tempered(**arguments: Any) -> tuple[elastic.Loop, Tempered]:
    paddle.seed(5)
    model = Tempered()
    optimizer = paddle.optimizer.SGD(0.01, parameters=model.parameters())
    return elastic.Loop(model, optimizer, DATA, batch_size=6, epochs=2, **arguments), model


@with_norm
@pytest.mark.parametrize("shards", [1, 2])
def test_a_buffer_that_is_set_before_the_shards_holds_for_all_of_them(shards):
    loop, model = tempered(shards=shards, drop_last=True)
    for epoch in loop.epochs():
        for step in epoch:
            paddle.assign(paddle.full([2], step.number // 3 / 10), model.heat)
            for batch in step:
                step.backward(model(batch).mean())
            step.update()
            assert model.heat.tolist() == pytest.approx([step.number // 3 / 10] * 2)
    expected = [number // 3 / 10 for number in range(6) for _ in range(shards)]
    assert model.seen == pytest.approx(expected)


@with_norm
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("at", [(0, 1), (1, 0)])
def test_a_buffer_that_is_set_between_the_shards_and_the_update_is_refused(shards, at):
    loop, model = tempered(shards=shards)

    def train() -> None:
        for epoch in loop.epochs():
            for step in epoch:
                for batch in step:
                    step.backward(model(batch).mean())
                if (epoch.number, step.index) == at:
                    model.heat = model.heat + 1
                step.update()

    with pytest.raises(elastic.UsageError, match=r"its buffer heat was set between .*puts there"):
        train()


@with_norm
def test_a_forward_pass_between_the_shards_and_the_update_does_not_move_batch_norm_in_silence():
    loop, model = tempered()
    step = next(iter(next(iter(loop.epochs()))))
    for batch in step:
        step.backward(model(batch).mean())
    model.eval()
    model(batch)
    model.train()
    model(batch)
    with pytest.raises(elastic.UsageError, match=r"its buffer norm\._mean was .*evaluation mode"):
        step.update()


@pytest.mark.parametrize(
    "words",
    [
        "(InvalidArgument) the shapes are [6, 3] and [2, 3]",
        "The size of tensor a (2) must match the size of tensor b (6) at non-singleton dimension 0",
        "Expected input batch_size (2) to match target batch_size (6).",
        "mat1 and mat2 shapes cannot be multiplied (2x3 and 6x3)",
        "iteration over a 0-d tensor",
        "both arguments to linear need to be at least 1D, but they are 0D and 2D",
        "zero-dimensional tensor (at position 0) cannot be concatenated",
        "not enough values to unpack (expected 6, got 2)",
        "only one element tensors can be converted to Python scalars",
        "index 5 is out of bounds for dimension 0 with size 2",
    ],
)
def test_an_error_of_sizes_in_a_shard_is_explained_and_its_step_is_known(words):
    sizes = ValueError(words)
    loop, model = make(shards=3)
    assert committed_step() == 0
    for step in next(iter(loop.epochs())):
        assert explain_error(sizes) == ""
        if step.number == 1:
            break
        for batch in step:
            assert explain_error(KeyError("rate")) == ""
            text = explain_error(sizes)
            step.backward(model(batch).mean())
        step.update()
    assert "the batch of 6 is cut into shards, and the loop's body has one of 2 here" in text
    assert committed_step() == 1
    loop, model = make(shards=1)
    step = next(iter(next(iter(loop.epochs()))))
    for _ in step:
        assert explain_error(sizes) == ""  # the shard is the batch
        break


def test_two_losses_of_one_forward_pass_are_told_to_be_added_up():
    loop, model = make()
    step = next(iter(next(iter(loop.epochs()))))
    for batch in step:
        shared = model(batch)
        step.backward((shared**2).mean())
        with pytest.raises(SystemError) as failed:
            step.backward((shared**2).sum())
        assert "add up losses that have a part of that in common" in explain_error(failed.value)
        break


def test_a_name_that_only_the_steps_set_is_explained_where_none_were_made(monkeypatch):
    """A process that goes on at an epoch's end runs what follows its steps, and no step."""
    loop, _model = make()
    epoch = next(iter(loop.epochs()))
    assert explain_error(NameError("name 'loss' is not defined")) == ""
    over = EpochPosition(number=2, first_step=epoch.steps, steps=epoch.steps)
    monkeypatch.setattr(epoch, "_position", over)
    assert "after the last step of epoch 2" in explain_error(UnboundLocalError("loss_value"))


def test_what_only_the_epochs_set_is_explained_where_the_training_was_complete(tmp_path, caplog):
    """As where a script makes several, and is run again after a crash in a later one."""
    train(*make(checkpoint=tmp_path))
    error = NameError("name 'accuracy' is not defined")
    assert explain_error(error) == ""
    loop, model = make(checkpoint=tmp_path)
    assert train(loop, model) == []
    assert "does not run here. What the script needs of it is computed after" in caplog.text
    assert "compute it after the loop, as by loop.evaluate" in explain_error(error)
    assert loop.evaluate(DATA, lambda batch: {"n": len(batch)}, batch_size=6) == {"n": 20}


def test_a_loop_that_could_not_be_made_has_no_step():
    with pytest.raises(elastic.UsageError):
        make(batch_size=0)
    assert committed_step() is None
    assert explain_error(ValueError("shape")) == ""


@pytest.mark.parametrize("is_updated", [False, True])
def test_a_second_pass_over_the_batch_is_refused_with_one_optimizer(is_updated):
    """It would be over nothing, and what its body does be left out in silence."""
    loop, model = make()
    step = next(iter(next(iter(loop.epochs()))))
    for batch in step:
        step.backward(model(batch).mean())
    if is_updated:
        step.update()
    with pytest.raises(elastic.UsageError, match="begins again, and with one optimizer"):
        next(iter(step))


def test_calls_at_the_wrong_time_are_named():
    loop, model = make()
    epoch = next(iter(loop.epochs()))
    step = next(iter(epoch))
    with pytest.raises(elastic.UsageError, match=r"call it inside `for batch in step:`"):
        step.backward(model(paddle.ones([1, 3])).mean())
    with pytest.raises(elastic.UsageError, match="iterated over twice"):
        next(iter(epoch))
    for batch in step:
        step.backward(model(batch).mean())
    step.update()
    with pytest.raises(elastic.UsageError, match="called twice in one step"):
        step.update()


@pytest.mark.parametrize("kind", ["mean", "sum"])
def test_a_loss_for_each_sample_is_refused_as_it_would_count_by_the_number_of_shards(kind):
    loop, model = make(loss=kind, shards=2)
    step = next(iter(next(iter(loop.epochs()))))
    for batch in step:
        losses = model(batch) ** 2
        text = f"the {kind} over the shard, got a tensor of shape [3, 1]; write step.backward("
        with pytest.raises(elastic.UsageError, match=re.escape(text)):
            step.backward(losses)
        with pytest.raises(elastic.UsageError, match=r"with one number, .* got float"):
            step.backward(float(losses.mean()))
        step.backward(losses.mean().reshape([1, 1]))
    step.update()


def test_leaving_an_epoch_before_its_end_is_an_error():
    loop, model = make()
    epochs = loop.epochs()
    for step in next(epochs):
        if step.number == 1:
            break
        for batch in step:
            step.backward(model(batch).mean())
        step.update()
    with pytest.raises(elastic.UsageError, match="epoch 0 was left after 1 of 4 steps"):
        next(epochs)


def test_a_sum_as_loss_is_weighed_as_a_sum():
    weights = []
    for loss in ("mean", "sum"):
        loop, model = make(loss=loss, shards=2, epochs=1)
        for epoch in loop.epochs():
            for step in epoch:
                for batch in step:
                    each = model(batch) ** 2
                    step.backward(each.mean() if loss == "mean" else each.sum())
                step.update()
        weights.append(model.weight.numpy())
    assert np.allclose(weights[0], weights[1], atol=1e-6)


class Graded(Dataset):
    """Whose script sets how hard its samples are."""

    grade = 0.0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return np.full(3, self.grade, "float32")


@pytest.mark.parametrize("keeps", [False, True])
def test_workers_see_a_dataset_as_it_is_when_the_epoch_begins_as_in_the_framework_alone(keeps):
    data = Graded()
    loader = DataLoader(data, batch_size=4, num_workers=1, persistent_workers=keeps)
    loop, model = make(train_set=loader, batch_size=None, epochs=3)
    seen = []
    for epoch in loop.epochs():
        data.grade = float(epoch.number)
        for step in epoch:
            for grades in step:
                seen += grades[:, 0].tolist()
                step.backward((model(grades) ** 2).mean())
            step.update()
    assert seen == [0.0 if keeps else float(epoch) for epoch in range(3) for _sample in range(8)]


def test_evaluation_sums_over_all_samples_without_gradients():
    loop, model = make()
    modes = []

    def judge(batch: Any) -> dict[str, Any]:
        modes.append((model.training, model(batch).stop_gradient))
        return {"sum": batch.sum(), "count": len(batch)}

    assert loop.evaluate(DATA, judge, batch_size=7) == pytest.approx({"sum": 57.0, "count": 20})
    assert modes == [(False, True)] * 3
    assert model.training
    with pytest.raises(elastic.UsageError, match="must return a dict of sums, it returned float"):
        loop.evaluate(DATA, lambda batch: 1.0, batch_size=7)  # type: ignore[arg-type, return-value]
    names = iter([{"a": 1}, {"b": 1}, {"a": 1}])
    with pytest.raises(elastic.UsageError, match="the same names for every batch"):
        loop.evaluate(DATA, lambda batch: next(names), batch_size=7)
    for value, kind in ((None, "NoneType"), ([1, 2], "list"), (paddle.ones([2]), "Tensor")):
        with pytest.raises(elastic.UsageError, match=f"evaluate: a: fn .* it returned {kind}"):
            loop.evaluate(DATA, lambda batch, value=value: {"a": value}, batch_size=7)

    class OfDevice:
        shape = ()

        def item(self) -> float:
            raise RuntimeError("the device is lost")

    with pytest.raises(RuntimeError, match=r"^the device is lost$"):
        loop.evaluate(DATA, lambda batch: {"a": OfDevice()}, batch_size=7)


class Cropped(paddle.io.Dataset):
    """A test set that draws, as one with random crops does."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return np.float32(index), np.float32(random.random())


def test_what_an_evaluation_draws_depends_on_epoch_batch_and_sample_alone():
    loop, _model = make()

    def mix(samples: list[Any]) -> Any:
        return [np.stack(each) for each in zip(*samples, strict=True)], np.random.rand(1)

    def evaluate(collate: Any, workers: int = 0) -> dict[str, float]:
        loader = DataLoader(Cropped(), batch_size=6, num_workers=workers, collate_fn=collate)
        return loop.evaluate(
            loader,
            lambda crops, mixed: {
                "sample": crops[1].sum(), "batch": mixed.sum(), "fn": paddle.rand([]),
            },
        )  # fmt: skip

    with borrowed_numbers(PaddleData()):
        expected = [random.random(), np.random.rand(), paddle.rand([]).item()]
    first = evaluate(mix)
    assert [random.random(), np.random.rand(), paddle.rand([]).item()] == expected, "as without it"
    assert first == pytest.approx(evaluate(mix))
    assert first == pytest.approx(evaluate(mix, 2))
    seen: list[float] = []

    def look(_index: Any, crops: Any) -> dict[str, int]:
        seen.extend([*crops.tolist(), paddle.rand([]).item()])
        return {}

    loop.evaluate(Cropped(), look, batch_size=6)
    assert len({*seen}) == 20 + 4


class ReadBy(paddle.io.Dataset):
    """Items: their index and the process that read them. Item `broken` cannot be read."""

    def __init__(self, broken: int | None = None) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[int, int]:
        if index == self.broken:
            raise KeyError(f"item {index}")
        return index, os.getpid()


def test_an_evaluation_reads_by_the_workers_of_its_loader():
    loop, _model = make()
    pids: set[int] = set()

    def judge(indices: Any, read_by: Any) -> dict[str, Any]:
        pids.update(read_by.tolist())
        return {"sum": indices.sum(), "count": len(indices)}

    def evaluate(broken: int | None, workers: int) -> dict[str, float]:
        loader = paddle.io.DataLoader(ReadBy(broken), batch_size=6, num_workers=workers)
        sums: dict[str, float] = loop.evaluate(loader, judge)
        return sums

    assert evaluate(None, 0) == evaluate(None, 2) == {"sum": 190.0, "count": 20.0}
    assert len(pids) == 3
    assert not [child for child in psutil.Process().children() if child.pid in pids]
    for workers in (0, 2):
        with pytest.raises(KeyError, match="item 15"):
            evaluate(15, workers)


def test_trainers_meet_at_each_batch_of_an_evaluation_within_a_step_too(monkeypatch):
    loop, model = make()
    met: list[bool] = []
    for step in next(iter(loop.epochs())):
        for batch in step:
            step.backward(model(batch).mean())
        step.update()
        monkeypatch.setattr(this_stage().member, "any_of_us", lambda mine: met.append(mine))
        loop.evaluate(DATA, lambda batch: {"n": len(batch)}, batch_size=7)
        break
    assert met == [False] * 3, "one that is slower by half a minute in all is not taken for lost"


def test_a_loader_that_leaves_samples_out_is_not_evaluated_as_if_it_were_the_set():
    loop, _model = make()

    def count(indices: Any, _read_by: Any) -> dict[str, Any]:
        return {"count": len(indices)}

    whole = paddle.io.DataLoader(ReadBy(), batch_size=6)
    assert loop.evaluate(whole, count) == {"count": 20.0}
    cut = paddle.io.DataLoader(ReadBy(), batch_size=6, drop_last=True, shuffle=True)
    with pytest.raises(elastic.UsageError, match=r"drop_last=True.*make it with drop_last=False"):
        loop.evaluate(cut, count)


def test_trainers_with_different_test_sets_are_told_before_they_wait_for_each_other(monkeypatch):
    loop, _model = make()

    def with_a_peer(values: Any) -> None:
        values += [19, 6, 0, values[3], 0]  # of whom 19 samples are known

    monkeypatch.setattr(this_stage().framework.group, "all_reduce", with_a_peer)
    monkeypatch.setattr(type(loop), "world_size", 2)
    with pytest.raises(elastic.UsageError, match=r"different data .here 20 samples.*random_split"):
        loop.evaluate(DATA, lambda batch: pytest.fail("evaluated"), batch_size=6)


def test_metrics_are_logged(caplog):
    loop, _model = make()
    with caplog.at_level(logging.INFO):
        loop.log(accuracy=paddle.to_tensor(0.25), loss=2)
    assert "epoch 0, step 0: accuracy 0.25, loss 2" in caplog.text


@pytest.mark.parametrize("kind", ["mean", "sum"])
def test_update_returns_the_mean_loss_of_the_batch_however_it_is_cut(caplog, kind):
    loop, model = make(shards=4, loss=kind, epochs=1)
    expected, found = [], []
    for epoch in loop.epochs():
        for step in epoch:
            batch = np.stack([DATA[sample] for sample in step.sample_ids])
            whole = (model(paddle.to_tensor(batch)) ** 2).mean().item()
            expected.append(whole * (1.5 if step.number == 1 else 1.0))
            for shard in step:
                for weight in (1.0, 0.5) if step.number == 1 else (1.0,):  # of two calls the sum
                    losses = weight * model(shard) ** 2
                    step.backward(losses.mean() if kind == "mean" else losses.sum())
            loss = step.update()
            assert loss.stop_gradient
            found.append(float(loss))
    with caplog.at_level(logging.INFO):
        loop.log(accuracy=0.25)
    assert found == pytest.approx(expected)
    assert f"epoch 1, step 4: train_loss {found[-1]:.6g}, accuracy 0.25" in caplog.text


@pytest.mark.parametrize("shards", [1, 2])
def test_a_loss_that_is_no_number_is_said_once(caplog, shards):
    loop, model = make(epochs=1, shards=shards)
    for epoch in loop.epochs():
        for step in epoch:
            for shard in step:
                step.backward((model(shard) * float("nan")).mean())
            step.update()
            loop.log(accuracy=0.25)
    assert caplog.text.count("the training loss is nan") == 1
    assert "step 0: the training loss is nan" in caplog.text


def bests(folder: Path) -> list[str]:
    return sorted(str(path.parent.relative_to(folder)) for path in folder.rglob("manifest.json"))


def test_the_best_checkpoint_is_kept_where_no_resume_looks_for_it(tmp_path, capsys, caplog):
    def evaluate(loop: elastic.Loop, model: Any, values: list[float]) -> list[tuple[int, float]]:
        found = []
        for epoch, value in zip(loop.epochs(), values, strict=True):
            finish_writing()
            for step in epoch:
                for batch in step:
                    step.backward((model(batch) ** 2).mean())
                step.update()
            best = loop.save_best("loss", paddle.to_tensor(value, "float64"), mode="min")
            found.append((best.epoch, best.value))
        return found

    nan = float("nan")
    first = evaluate(*make(checkpoint=tmp_path, epochs=4), [nan, 3.0, 3.0, 2.0])
    assert first[1:] == [(1, 3.0), (1, 3.0), (3, 2.0)]
    assert first[0][0] == 0, "what is no number is not kept"
    kept = "stage_00000001/step_0000000016"
    assert bests(tmp_path / "best") == [f"loss/{kept}"]
    # The next run goes on from the newest state, and knows what was the best one.
    (tmp_path / "stage_00000001" / "step_0000000016").rename(tmp_path / "away")
    assert evaluate(*make(checkpoint=tmp_path, epochs=5), [2.5, 2.5]) == [(3, 2.5), (3, 2.5)]
    assert "restored step 12 of stage 1" in caplog.text
    assert evaluate(*make(checkpoint=tmp_path, epochs=6), [2.5]) == [(3, 2.5)]
    manifest = json.loads(next((tmp_path / "best").rglob("manifest.json")).read_text())
    shown = {name: manifest[name] for name in ("metric", "mode", "value", "epoch", "step")}
    assert shown == {"metric": "loss", "mode": "min", "value": 2.5, "epoch": 3, "step": 16}
    assert verify([str(tmp_path)]) == 0
    where = f"{tmp_path}/best/loss/stage_00000002/step_0000000016"
    assert f"best loss: 2.5 at step 16, epoch 3: {where}\n" in capsys.readouterr().out
    assert verify([str(tmp_path / "best" / "loss")]) == 0, "it is a checkpoint like the others"


def test_a_best_checkpoint_may_be_kept_amid_an_epoch(tmp_path):
    loop, model = make(checkpoint=tmp_path, epochs=1)
    weights = []
    for epoch in loop.epochs():
        for step in epoch:
            for batch in step:
                step.backward((model(batch) ** 2).mean())
            with pytest.raises(elastic.UsageError, match=r"call it after step\.update"):
                loop.save_best("score", 1.0)
            step.update()
            weights.append(model.weight.numpy().copy())
            best = loop.save_best("score", [1.0, 3.0, 2.0, 1.0][step.number])
            assert best.step == min(step.number + 1, 2)
    found = CheckpointStore(open_storage(str(tmp_path / "best" / "score"))).load_newest()
    assert found is not None
    state, each = found
    assert (each.step, state.status.step) == (2, 2)
    spec = next(each for each in state.layout.specs if each.name == "model/weight")
    assert np.array_equal(np.frombuffer(state.data, "float32", 3, spec.offset), weights[1][:, 0])


@pytest.mark.parametrize(
    ("checkpoint", "metric", "mode", "text"),
    [
        (True, "a/b", "max", "save_best: metric: expected a name of letters.*got 'a/b'"),
        (True, "loss", "least", "save_best: mode: expected one of max, min, got 'least'"),
        (False, "loss", "min", r"save_best: it needs Loop\(checkpoint="),
    ],
)
def test_a_best_checkpoint_that_could_not_be_kept_is_refused(
    tmp_path, checkpoint, metric, mode, text
):
    loop, _model = make(checkpoint=tmp_path if checkpoint else None)
    with pytest.raises(elastic.UsageError, match=text):
        loop.save_best(metric, 1.0, mode=mode)


def test_a_best_checkpoint_that_cannot_be_written_does_not_count(tmp_path, caplog):
    loop, _model = make(checkpoint=tmp_path)
    (tmp_path / "best").write_text("no folder")
    assert loop.save_best("score", 2.0).value == 2.0
    assert "step 0 failed, training goes on" in caplog.text
    (tmp_path / "best").unlink()
    assert loop.save_best("score", 1.0).value == 1.0, "the best that could be written"
    assert bests(tmp_path / "best") == ["score/stage_00000001/step_0000000000"]
    with pytest.raises(elastic.UsageError, match="score was kept with mode='max' so far"):
        loop.save_best("score", 1.0, mode="min")


def test_a_better_model_at_the_same_step_takes_the_place_of_the_best_one(tmp_path, caplog):
    def stored() -> tuple[float, list[float]]:
        found = CheckpointStore(open_storage(str(tmp_path / "best" / "score"))).load_newest()
        assert found is not None
        spec = next(each for each in found[0].layout.specs if each.name == "model/weight")
        manifest = json.loads(next((tmp_path / "best").rglob("manifest.json")).read_text())
        return manifest["value"], np.frombuffer(found[0].data, "float32", 3, spec.offset).tolist()

    loop, model = make(checkpoint=tmp_path, epochs=1)
    for epoch in loop.epochs():
        for step in epoch:
            for batch in step:
                step.backward((model(batch) ** 2).mean())
            step.update()
        mine = model.weight.numpy().copy()
        loop.save_best("score", 1.0)
        model.weight.set_value(np.full((3, 1), 7.0, "float32"))  # an average's, to evaluate it
        loop.save_best("score", 2.0)
        assert stored() == (2.0, [7.0, 7.0, 7.0])
        model.weight.set_value(mine)
        # What is there is kept until the new one is begun, and no longer.
        place = tmp_path / "best" / "score" / "stage_00000001" / "step_0000000004"
        (place / "train_status.json").unlink()
        (place / "train_status.json").mkdir()
        assert loop.save_best("score", 3.0).value == 3.0
        assert "step 4 failed, training goes on" in caplog.text
        assert loop.save_best("score", 1.5).value == 1.5, "the one before is gone, too"
    assert stored() == (1.5, mine[:, 0].tolist())


def test_a_reader_of_a_stream_is_asked_for_as_many_steps_as_was_said(tmp_path):
    asked = []

    def reader(where: elastic.ReadFrom) -> Iterator[Any]:
        asked.append(where)
        for epoch in range(where.epoch, 2):
            for step in range(where.step if epoch == where.epoch else 0, 3):
                for shard in range(where.first_shard, where.stop_shard):
                    yield epoch, step, shard, np.full((where.micro_batch, 3), 1.0, "float32")

    arguments: dict[str, Any] = {
        "train_set": None, "reader": reader, "steps_per_epoch": 3, "batch_size": 4, "shards": 2,
        "checkpoint": str(tmp_path), "save_steps": 1,
    }  # fmt: skip
    starts = []
    for stop_at in (5, None):
        loop, model = make(**arguments)
        starts.append(loop.step_count)
        done = 0
        for epoch in loop.epochs():
            for step in epoch:
                if step.number == stop_at:
                    break
                for (batch,) in step:
                    assert batch.shape == [2, 3]
                    step.backward(model(batch).mean())
                step.update()
                done += 1
            if stop_at is not None and step.number == stop_at:
                break
        finish_writing()
        assert done == (stop_at or 6) - starts[-1]
    assert 0 == starts[0] < starts[1] <= 5
    assert [where.global_step for where in asked] == starts
    assert verify([str(tmp_path)]) == 0


def test_shards_that_a_reader_cuts_otherwise_are_refused():
    def reader(where: elastic.ReadFrom) -> Iterator[Any]:
        yield 0, 0, 0, np.ones((5, 3), "float32")

    loop, model = make(reader=reader)
    with pytest.raises(elastic.UsageError, match=r"shard 0 .* has 6 samples, it yielded 5"):
        train(loop, model)


def test_a_reader_may_carry_the_loops_own_shards_elsewhere_and_back():
    def reader(where: elastic.ReadFrom) -> Iterator[Any]:
        for epoch, step, shard, batch in loop.shards(DATA):
            yield epoch, step, shard, batch, batch * 2  # as with a teacher's soft labels

    loop, model = make(reader=reader, shards=2)
    seen = []
    for epoch in loop.epochs():
        for step in epoch:
            for batch, doubled in step:
                assert np.allclose(doubled.numpy(), 2 * batch.numpy())
                step.backward(model(batch).mean())
            seen += step.sample_ids
            step.update()
    assert sorted(seen) == sorted([*range(20), *range(20)])
    with pytest.raises(elastic.UsageError, match="has 3 samples, the training set 20"):
        loop.shards(DATA[:3])


class Noisy(paddle.io.Dataset):
    """Each sample is its number and a random one, as with augmentation."""

    def __len__(self) -> int:
        return len(DATA)

    def __getitem__(self, index: int) -> np.ndarray:
        return np.array([DATA[index][0], np.random.random(), os.getpid()], "float64")


def read_all(loop: elastic.Loop, model: Any) -> np.ndarray:
    """Train to the end; return what was read, sorted by sample."""
    found: list[Any] = []
    for epoch in loop.epochs():
        for step in epoch:
            for batch in step:
                (batch,) = batch if isinstance(batch, list) else [batch]  # a reader's fields
                found += batch.numpy().tolist()
                step.backward(model(batch.astype("float32")).mean())
            step.update()
    return np.array(sorted(found))


def test_a_reader_gets_its_shards_from_worker_processes_and_the_same_ones():
    def reader(where: elastic.ReadFrom) -> Iterator[Any]:
        loader = paddle.io.DataLoader(Noisy(), batch_size=6, shuffle=True, num_workers=2)
        return iter(loop.shards(loader))

    plain = read_all(*make(train_set=Noisy(), epochs=1))
    loop, model = make(train_set=Noisy(), epochs=1, reader=reader)
    by_workers = read_all(loop, model)
    assert (by_workers[:, :2] == plain[:, :2]).all(), "same samples, same random numbers"
    assert set(plain[:, 2]) == {os.getpid()}
    assert len(set(by_workers[:, 2])) == 2
    assert os.getpid() not in by_workers[:, 2]


def test_workers_that_a_thread_would_have_to_start_are_refused_with_the_remedy():
    def reader(where: elastic.ReadFrom) -> Iterator[Any]:
        yield from loop.shards(paddle.io.DataLoader(Noisy(), batch_size=6, num_workers=1))

    loop, model = make(reader=reader)
    with pytest.raises(elastic.UsageError, match=r"call loop\.shards in the function that"):
        train(loop, model)


def test_shards_come_with_the_ids_of_their_samples_if_they_are_wanted():
    loop, _ = make(shards=2)
    items = list(loop.shards(DATA, with_ids=True))
    assert [item[:3] for item in items] == [item[:3] for item in loop.shards(DATA)]
    for _epoch, _step, _shard, ids, batch in items:
        np.testing.assert_allclose(np.asarray(batch)[:, 0] * 10, ids, rtol=1e-6)
    assert sorted(np.concatenate([item[3] for item in items])) == sorted([*range(20)] * 2)


def test_a_policy_decides_batch_and_learning_rate_from_the_first_world_on(tmp_path):
    # One trainer now, as one trainer then: the policy is not asked.
    loop, model = make(policy=lambda old, new: pytest.fail("asked"), checkpoint=str(tmp_path))
    train(loop, model)


def test_whole_numbers_of_numpy_are_taken_as_pythons(tmp_path):
    given = {
        "epochs": np.int64(1), "seed": np.uint8(3), "shards": np.int32(2),
        "accumulation_steps": np.int32(1),
    }  # fmt: skip
    loop, model = make(batch_size=np.int64(6), checkpoint=str(tmp_path), **given)
    assert len(train(loop, model)) == 4


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"epochs": 0}, "epochs: expected a whole number of at least 1, got 0"),
        ({"epochs": 2.5}, "epochs: expected a whole number of at least 1, got 2.5"),
        ({"seed": -1}, "seed: "),
        ({"seed": 2**63}, "seed: expected a number below 2**63, got 9223372036854775808"),
        ({"epochs": np.int64(0)}, "epochs: expected a whole number of at least 1, got 0"),
        ({"save_steps": 0}, "save_steps: "),
        ({"keep_checkpoints": 0}, "keep_checkpoints: "),
        ({"shards": 0}, "shards: "),
        ({"promise": "fast"}, "promise: expected one of statistics, rounding, got 'fast'"),
        ({"promise": "bits"}, "promise: 'bits' is not there yet; 'rounding' comes nearest to it"),
        (
            {"promise": "statistics", "shards": 2},
            "shards: with promise='statistics' a batch has as many shards as there are trainers",
        ),
        ({"accumulation_steps": 0}, "accumulation_steps: expected a whole number of at least 1"),
        ({"loss": "median"}, "loss: expected one of mean, sum, got 'median'"),
        ({"policy": "cubic"}, "policy: expected fixed_global, linear or a callable"),
        ({"snapshot_steps": "often"}, "snapshot_steps: expected auto, or a whole number"),
        ({"checkpoint": ""}, "checkpoint: is empty"),
        ({"checkpoint": 5}, "checkpoint: expected a path, got 5"),
        ({"reader": 5}, "reader: expected a function that returns an iterator, got 5"),
        ({"scaler": 3}, "scaler: expected the framework's GradScaler, got 3"),
        (
            {"train_set": None, "reader": iter, "batch_size": 2},
            "steps_per_epoch: a reader without a dataset needs it",
        ),
        (
            {"train_set": None, "reader": iter, "steps_per_epoch": 2, "policy": "linear"},
            "policy: a reader without a dataset counts the steps of an epoch",
        ),
    ],
)
def test_a_wrong_argument_is_refused_by_name_value_and_remedy(wrong, text):
    with pytest.raises(elastic.UsageError, match=re.escape(text)):
        make(**wrong)


@pytest.mark.slow  # as torchrun's
@pytest.mark.timeout(240)
def test_a_world_of_paddles_own_launcher_trains_checkpoints_and_resumes(tmp_path: Path):
    def launch(epochs: int) -> list[tuple[str, ...]]:
        command = [
            sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", "2",
            "--log_dir", str(tmp_path / f"log{epochs}"), str(SCRIPTS / "launched.py"),
            str(tmp_path / "ckpt"), str(epochs),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=tmp_path)
        logs = [
            path.read_text() for path in sorted((tmp_path / f"log{epochs}").glob("workerlog.*"))
        ]
        assert done.returncode == 0, "\n".join([done.stdout, done.stderr, *logs])
        pattern = r"rank (\d) of 2: (\d+) steps, sum ([\d.]+), weight (\w+)"
        return sorted(found.groups() for log in logs if (found := re.search(pattern, log)))

    first = launch(1)
    assert [(rank, steps, total) for rank, steps, total, _ in first] == [
        ("0", "4", "28.5"), ("1", "4", "28.5"),
    ]  # fmt: skip
    assert first[0][3] == first[1][3], "both ranks have the same weights"
    second = launch(2)
    assert [(rank, steps) for rank, steps, *_ in second] == [("0", "8"), ("1", "8")]
    assert second[0][3] == second[1][3] != first[0][3]
    assert verify([str(tmp_path / "ckpt")]) == 0
