"""Samplers and streams in the loop, outside EDL: restores, readers, evaluation, refusals."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.io import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler

from pod_runtime import elastic
from pod_runtime.trainer.errors import StateError, UsageError
from pod_runtime.verify import main as verify
from tests.pod_runtime.trainer.states import finish_writing


@pytest.fixture(autouse=True)
def _outside_edl(monkeypatch):
    for name in ("EDL_CHANNEL", "EDL_STAGE", "EDL_RUN_DIR", "EDL_MAX_TRAINERS"):
        monkeypatch.delenv(name, raising=False)


class Numbers(Dataset):
    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> np.float32:
        return np.float32(index)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[np.float32]:
        yield from np.arange(100, dtype=np.float32)


class Chosen(Sampler):
    """Draws `count` samples, again and again the same ones among others."""

    def __init__(self, count: int = 20, highest: int = 30) -> None:
        self.count, self.highest = count, highest

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.randint(0, self.highest, self.count).tolist())

    def __len__(self) -> int:
        return self.count


class Growing(BatchSampler):
    """Batches that grow: 1, 2, 3, ... samples; another number of them in each epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        for size in range(1, 5 + self.epoch):
            yield np.random.permutation(30)[:size].tolist()

    def __len__(self) -> int:
        return 4 + self.epoch


def chosen(**more: Any) -> DataLoader:
    return DataLoader(Numbers(), batch_sampler=BatchSampler(sampler=Chosen(**more), batch_size=6))


def growing(workers: int = 0) -> DataLoader:
    return DataLoader(Numbers(), batch_sampler=Growing(), num_workers=workers)


def make(train_set: Any, **arguments: Any) -> tuple[elastic.Loop, Any]:
    paddle.seed(5)
    model = paddle.nn.Linear(1, 1)
    optimizer = paddle.optimizer.Adam(0.01, parameters=model.parameters())
    given: dict[str, Any] = {"epochs": 3, "shards": 2, "seed": 3}
    return elastic.Loop(model, optimizer, train_set, **(given | arguments)), model


def train(made: tuple[elastic.Loop, Any], *, stop_at: int | None = None) -> list[list[float]]:
    """Train to the end, or leave before the step `stop_at`; return the samples of each step."""
    loop, model = made
    read: list[list[float]] = []
    for epoch in loop.epochs():
        steps = epoch.steps
        for step in epoch:
            if step.number == stop_at:
                return read
            here = []
            for batch in step:
                fields = batch[0] if isinstance(batch, list) else batch
                here += fields.numpy().tolist()
                step.backward((model(fields.unsqueeze(1)) ** 2).mean())
            assert len(here) == step.samples
            assert step.sample_ids == here
            read.append(here)
            step.update()
            assert step.index < steps
    return read


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_a_sampler_are_trained_whole_in_epochs_of_their_own_length(tmp_path, workers):
    loop, _model = made = make(growing(workers), checkpoint=tmp_path)
    assert loop.shards_per_batch == 2
    read = train(made)
    assert [len(each) for each in read] == [*range(1, 5), *range(1, 6), *range(1, 7)]
    assert read == train(make(growing()))
    assert verify([str(tmp_path)]) == 0


def test_several_batches_of_a_sampler_make_one_update(tmp_path):
    read = train(make(growing(), accumulation_steps=3, checkpoint=tmp_path))
    assert [len(each) for each in read] == [6, 4, 6, 9, 6, 15]
    assert np.concatenate(read).tolist() == np.concatenate(train(make(growing()))).tolist()
    assert verify([str(tmp_path)]) == 0
    made = make(growing(), accumulation_steps=2, steps_per_epoch=1)
    assert [len(each) for each in train(made)] == [3, 3, 3]
    assert [len(each) for each in train(make(chosen(), accumulation_steps=2))] == [12, 8] * 3


class Noisy(Dataset):
    """Samples with an augmentation."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return np.float32(index), np.random.random_sample(), paddle.rand([1]).item()


def noise(batches: list[Any]) -> tuple[Any, ...]:
    """Collate, and mix by a random rate."""
    fields = [np.asarray(each) for each in zip(*batches, strict=True)]
    return (*fields, np.full(len(batches), np.random.random_sample()))


def augmented(workers: int, *, stop_at: int | None = None, **arguments: Any) -> list[list[Any]]:
    """Train on a few samples that are drawn many times; return all that the steps have read."""
    sampler = BatchSampler(sampler=Chosen(highest=3), batch_size=6)
    loader = DataLoader(Noisy(), batch_sampler=sampler, collate_fn=noise, num_workers=workers)
    loop, model = make(loader, **arguments)
    read: list[list[Any]] = []
    for epoch in loop.epochs():
        for step in epoch:
            if step.number == stop_at:
                return read
            here: list[Any] = []
            for batch in step:
                fields = [each.numpy().tolist() for each in batch]
                here += zip([epoch.number] * len(fields[0]), *fields, strict=True)
                step.backward(model(batch[0].unsqueeze(1)).mean())
            read.append(here)
            step.update()
    return read


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_is_drawn_again_in_an_epoch_is_augmented_anew(tmp_path, workers):
    """As for the balance of classes, where those of a small class come many times."""
    read = augmented(workers)
    samples = [each for step in read for each in step]
    assert len({each[:2] for each in samples}) == 9, "three samples, in three epochs"
    assert len({each[2] for each in samples}) == len({each[3] for each in samples}) == 60
    assert len({each[4] for each in samples}) == sum(-(-len(step) // 3) for step in read)
    again = augmented(2 - workers, checkpoint=tmp_path, save_steps=1, stop_at=6)
    assert again == read[:6]
    finish_writing()
    left = augmented(workers, checkpoint=tmp_path)
    assert left == read[-len(left) :]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_evaluation_augments_a_sample_that_its_sampler_draws_again_anew(workers):
    sampler = BatchSampler(sampler=Chosen(highest=3), batch_size=6)
    loader = DataLoader(Noisy(), batch_sampler=sampler, collate_fn=noise, num_workers=workers)
    seen: list[Any] = []

    def judge(*fields: Any) -> dict[str, float]:
        seen.append([each.numpy().tolist() for each in fields])
        return {"count": len(fields[0])}

    loop, _model = make(Numbers(), batch_size=6)
    assert loop.evaluate(loader, judge) == {"count": 20}
    assert len({each for fields in seen for each in fields[1]}) == 20
    assert len({each for fields in seen for each in fields[3]}) == 4
    first, seen[:] = [*seen], []
    loop.evaluate(loader, judge)
    assert seen == first


@pytest.mark.parametrize("data", [growing, chosen])
def test_a_training_that_was_left_amid_an_epoch_goes_on_with_the_same_samples(tmp_path, data):
    expected = train(make(data()))
    first = train(make(data(), checkpoint=tmp_path, save_steps=1), stop_at=6)
    assert first == expected[:6]
    finish_writing()
    loop, _model = made = make(data(), checkpoint=tmp_path)
    at = loop.step_count
    assert 0 < at <= 6
    assert train(made) == expected[at:]
    assert verify([str(tmp_path)]) == 0


def test_a_first_epoch_that_is_not_over_is_verified_as_far_as_it_is(tmp_path, capsys):
    train(make(chosen(), checkpoint=tmp_path, save_steps=1), stop_at=2)
    finish_writing()
    assert verify([str(tmp_path)]) == 0
    assert "so far of 20 that Chosen drew" in capsys.readouterr().out


@pytest.mark.parametrize("data", [growing, chosen])
def test_a_finished_training_goes_on_with_the_samplers_order_when_more_epochs_are_asked_for(
    tmp_path, data
):
    expected = train(make(data()))
    first = train(make(data(), checkpoint=tmp_path, epochs=1))
    assert first + train(make(data(), checkpoint=tmp_path)) == expected
    assert verify([str(tmp_path)]) == 0


def test_a_finished_training_that_draws_few_samples_often_may_be_started_again(tmp_path):
    class Few(Numbers):
        def __len__(self) -> int:
            return 5

    def often() -> DataLoader:
        sampler = Chosen(count=20, highest=5)
        batches = BatchSampler(sampler=sampler, batch_size=6, drop_last=True)
        return DataLoader(Few(), batch_sampler=batches)

    assert len(train(make(often(), checkpoint=tmp_path))) == 9
    assert train(make(often(), checkpoint=tmp_path)) == []
    assert verify([str(tmp_path)]) == 0
    assert len(train(make(often(), checkpoint=tmp_path, epochs=4))) == 3
    assert verify([str(tmp_path)]) == 0


def test_a_sampler_that_was_edited_amid_an_epoch_is_refused_and_another_one_always(tmp_path):
    train(make(chosen(), checkpoint=tmp_path, save_steps=1), stop_at=6)
    finish_writing()
    text = (
        r"other samples in epoch \d than the DataLoader's Chosen draws here .20 then, 20 now.. If"
    )
    with pytest.raises(StateError, match=text):  # of whichever epoch the newest checkpoint is
        make(chosen(highest=7), checkpoint=tmp_path)
    with pytest.raises(StateError, match=r"was made with Chosen, this script has no sampler"):
        make(Numbers(), batch_size=6, shuffle=False, checkpoint=tmp_path)


@pytest.mark.parametrize(
    ("train_set", "more", "text"),
    [
        (growing, {"policy": "linear"}, r"policy: the batch sampler Growing decides.*fixed_global"),
        (
            Stream,
            {"policy": "linear", "batch_size": 6, "steps_per_epoch": 3},
            "policy: a stream counts the steps of an epoch",
        ),
        (growing, {"batch_size": 9}, "batch_size: Growing decides that"),
        (chosen, {"shuffle": True}, "shuffle: Chosen decides that"),
        (
            lambda: chosen(count=4),
            {"drop_last": True},
            "gave 4 samples for epoch 0, which make no b",
        ),
        (
            Numbers,
            {"batch_size": 6, "steps_per_epoch": 2},
            r"steps_per_epoch: got 2, but the 30 samples .* leave it out.*num_samples=",
        ),
        (Stream, {"batch_size": 4}, "steps_per_epoch: a stream needs it"),
        (Stream, {"batch_size": 4, "steps_per_epoch": 2, "reader": iter}, "leave train_set out"),
    ],
)
def test_what_cannot_be_right_is_refused(train_set, more, text):
    with pytest.raises(UsageError, match=text):
        make(train_set(), **more)


def test_a_sampler_with_a_count_of_its_own_is_refused_before_any_step():
    class Counting(Chosen):
        def __iter__(self) -> Iterator[int]:
            self.count += 1
            return super().__iter__()

    loader = DataLoader(Numbers(), batch_sampler=BatchSampler(sampler=Counting(), batch_size=6))
    with pytest.raises(UsageError, match="Counting drew other samples for epoch 0 when it was ask"):
        make(loader)


class Settable(Chosen):
    def __iter__(self) -> Iterator[int]:
        return iter([self.highest] * self.count)


class Grown(Numbers):
    more = 0

    def __len__(self) -> int:
        return 30 + self.more


def test_a_sampler_and_a_length_that_the_script_changes_as_it_trains_are_refused():
    def train_until_changed(train_set: Any, change: Any, **more: Any) -> None:
        loop, model = make(train_set, **more)
        for epoch in loop.epochs():
            change(epoch.number)
            for step in epoch:
                for batch in step:
                    fields = batch[0] if isinstance(batch, list) else batch
                    step.backward(model(fields.unsqueeze(1)).mean())
                step.update()

    sampler, data = Settable(highest=0), Grown()
    loader = DataLoader(Numbers(), batch_sampler=BatchSampler(sampler=sampler, batch_size=6))
    text = "Settable draws other samples for epoch 1 than when that began: the script has changed"
    with pytest.raises(UsageError, match=text):
        train_until_changed(loader, lambda epoch: setattr(sampler, "highest", epoch))
    text = r"train_set: it has 40 samples now, and had 30 when the Loop was made.*a sampler"
    with pytest.raises(UsageError, match=text):
        train_until_changed(data, lambda epoch: setattr(data, "more", 10 * epoch), batch_size=6)


def test_a_reader_that_carries_the_shards_of_a_sampler_is_made_anew_for_each_epoch(tmp_path):
    began: list[tuple[int, int]] = []

    def reader(where: elastic.ReadFrom) -> Iterator[Any]:
        began.append((where.epoch, where.step))
        yield from loop.shards(growing())

    loop, _model = made = make(growing(), reader=reader, checkpoint=tmp_path)
    assert train(made) == train(make(growing()))
    assert began == [(0, 0), (1, 0), (2, 0)]
    assert verify([str(tmp_path)]) == 0


def test_shards_of_a_loader_with_another_sampler_than_the_trainings_are_refused():
    loop, _model = make(Numbers(), batch_size=6)
    with pytest.raises(UsageError, match=r"shards: .*Growing decides.*has no such sampler"):
        loop.shards(growing())
    loop, _model = make(chosen())
    with pytest.raises(UsageError, match=r"shards: .*Growing decides.*set has Chosen"):
        loop.shards(growing())


def test_an_evaluation_takes_the_samples_of_its_sampler_the_same_ones_each_time():
    loop, _model = make(Numbers(), batch_size=6)
    batches: list[list[float]] = []

    def judge(batch: Any) -> dict[str, Any]:
        batches.append(batch.numpy().tolist())
        return {"n": len(batch)}

    assert loop.evaluate(growing(), judge) == {"n": 10}
    assert [len(each) for each in batches] == [1, 2, 3, 4]
    first = list(batches)
    assert loop.evaluate(growing(workers=1), judge) == {"n": 10}
    assert batches[4:] == first
    assert loop.evaluate(chosen(), judge) == {"n": 20}


def test_a_stream_is_read_from_its_beginning_in_each_epoch_which_is_said_once(
    tmp_path, caplog, capsys
):
    caplog.set_level(logging.INFO)
    stream = Stream()
    made = make(stream, batch_size=4, steps_per_epoch=3, epochs=2, checkpoint=tmp_path)
    epoch = np.arange(12.0).reshape(3, 4).tolist()
    assert train(made) == [*epoch, *epoch]
    text = "Stream is a stream: every epoch opens it and reads its first 12 samples, each at least"
    assert caplog.text.count(text) == 1
    assert "promise: rounding, 2 shards; a stream, each sample at least once" in caplog.text
    assert verify([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "a stream: 24 samples read, at least once each; which ones is not proven" in out


def test_a_stream_goes_on_amid_an_epoch_where_it_was(tmp_path):
    arguments: dict[str, Any] = {"batch_size": 4, "steps_per_epoch": 5, "epochs": 1}
    train(make(Stream(), checkpoint=tmp_path, save_steps=1, **arguments), stop_at=3)
    finish_writing()
    loop, _model = made = make(DataLoader(Stream(), batch_size=4, num_workers=2),
                               checkpoint=tmp_path, **arguments)  # fmt: skip
    at = loop.step_count
    assert at > 0
    assert train(made) == np.arange(20.0).reshape(5, 4).tolist()[at:]


def test_what_a_script_draws_after_the_loop_is_made_is_what_it_would_have_drawn(tmp_path: Path):
    def drawn(train_set: Any) -> tuple[Any, ...]:
        np.random.seed(8)
        make(train_set, batch_size=6)
        return paddle.rand([1]).item(), np.random.random_sample()

    assert drawn(chosen()) == drawn(Numbers())
