"""The loop with PyTorch: its loaders and samplers, checkpoints, and torchrun."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.data import (  # noqa: E402
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
    random_split,
)

from pod_runtime import elastic  # noqa: E402
from pod_runtime.trainer.data.source import DataSource, make_source  # noqa: E402
from pod_runtime.trainer.errors import PeerLost, UsageError  # noqa: E402
from pod_runtime.trainer.loop.loop import Loop, explain_error  # noqa: E402
from pod_runtime.trainer.progress.loop_status import LoopsBefore  # noqa: E402
from pod_runtime.verify import main as verify  # noqa: E402
from tests.pod_runtime.trainer.fake_launcher import SCRIPTS  # noqa: E402
from tests.support import code_blocks  # noqa: E402

DATA = TensorDataset(torch.arange(20.0).unsqueeze(1), torch.arange(20))


def source(train_set: Any) -> DataSource:
    return make_source(
        train_set, batch_size=None, shuffle=None, drop_last=None, collate_fn=None,
        num_workers=None, has_reader=False,
    )  # fmt: skip


def test_what_a_loader_does_is_taken_over():
    found = source(DataLoader(DATA, batch_size=6, shuffle=True, drop_last=True, num_workers=2))
    assert (found.batch_size, found.shuffle, found.drop_last) == (6, True, True)
    assert (found.num_workers, found.length) == (2, 20)
    assert not source(DataLoader(DATA, batch_size=6)).shuffle
    sampler = DistributedSampler(DATA, num_replicas=3, rank=1, shuffle=True)
    assert source(DataLoader(DATA, batch_size=6, sampler=sampler)).shuffle


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"sampler": WeightedRandomSampler([1.0] * 20, 20), "batch_size": 4}, "WeightedRandomSa"),
        ({"sampler": RandomSampler(DATA, replacement=True), "batch_size": 4}, "RandomSampler"),
        ({"sampler": RandomSampler(DATA, num_samples=7), "batch_size": 4}, "RandomSampler"),
        ({"shuffle": True, "generator": torch.Generator(), "batch_size": 4}, "RandomSampler"),
        ({"sampler": SubsetRandomSampler([1, 2, 5]), "batch_size": 4}, "SubsetRandomSampler"),
        ({"batch_sampler": BatchSampler(range(5), 4, drop_last=False)}, "range"),
        ({"batch_sampler": [[1, 2], [3]]}, "list"),
    ],
)
def test_a_sampler_that_decides_which_samples_come_is_kept(more, name):
    found = source(DataLoader(DATA, **more))
    assert found.sampling is not None
    assert found.sampling.name.startswith(name)
    assert (found.sampling.makes_batches, found.batch_size) == (
        (True, 0) if name == "list" else (False, 4)
    )


def test_a_distributed_sampler_with_an_order_of_its_own_is_refused_as_it_cuts_by_rank():
    class Mine(DistributedSampler):
        def __iter__(self) -> Any:
            return iter(range(self.rank, 20, self.num_replicas))

    def loader(replicas: int) -> Any:
        return DataLoader(DATA, batch_size=4, sampler=Mine(DATA, num_replicas=replicas, rank=0))

    with pytest.raises(UsageError, match="the DataLoader's Mine cuts the epoch into 3 parts"):
        source(loader(3))
    assert source(loader(1)).sampling is not None


def test_a_loader_that_makes_no_batches_is_refused():
    with pytest.raises(UsageError, match="makes no batches"):
        source(DataLoader(DATA, batch_size=None))


def test_subsets_are_known_by_their_samples():
    def digest(dataset: Any) -> int | None:
        return source(DataLoader(dataset, batch_size=2)).subset

    def halves(seed: int) -> Any:
        return random_split(DATA, [10, 10], generator=torch.Generator().manual_seed(seed))[0]

    assert digest(DATA) is None
    assert digest(halves(1)) == digest(halves(1)) != digest(halves(2))
    assert digest(ConcatDataset([DATA, halves(1)])) != digest(ConcatDataset([DATA, halves(2)]))
    assert digest(StackDataset(a=halves(1), b=halves(1))) != digest(StackDataset(halves(2)))
    assert digest(Subset(DATA, [1, 2])) is not None


class Rows(Dataset):
    """Of an array, and of a list with numbers and texts."""

    def __init__(self, order: Any) -> None:
        self.inputs = np.random.RandomState(3).randn(400, 5).astype("float32")[order]
        self.inputs -= self.inputs.mean(1, keepdims=True)
        self.names = [f"{at}.png" for at in order]
        self.opened: list[Any] = [None] * len(order)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("read before the training")


def test_samples_in_memory_are_known_by_their_order_and_not_by_their_rounding():
    def digest(dataset: Any) -> int | None:
        return source(DataLoader(dataset, batch_size=2)).values

    forward, backward = np.arange(400), np.arange(400)[::-1]
    assert digest(Rows(forward)) == digest(Rows(forward)) != digest(Rows(backward))
    rounded = Rows(forward)
    rounded.inputs *= np.float32(1) + np.float32(2e-7)
    rounded.opened[3] = 7
    rounded.names[3] = "/another/folder/3.png"
    assert digest(rounded) == digest(Rows(forward))
    inputs = torch.from_numpy(Rows(forward).inputs)
    for make in (
        lambda order: TensorDataset(inputs[order.tolist()]),
        lambda order: Subset(TensorDataset(inputs[order.tolist()].bfloat16().float()), [1, 2]),
        lambda order: [({"x": inputs[at], "name": "a"}, at % 3) for at in order],
        lambda order: order % 7,
        lambda order: ConcatDataset([DATA, TensorDataset(torch.tensor(order % 2 == 0))]),
    ):
        assert digest(make(forward)) == digest(make(forward.copy())) is not None
        assert digest(make(forward)) != digest(make(backward.copy()))
    names = [f"/a/{at}.png" for at in forward]
    elsewhere = [Path(f"/another/node/{at}.png") for at in forward]
    assert digest(names) == digest(elsewhere) != digest(names[::-1])
    assert digest([(each, 1) for each in names]) != digest([(each, 1) for each in names[::-1]])
    assert digest([""] * 400) is None
    assert digest(TensorDataset(torch.zeros(4))) is None


def test_samples_that_a_dataset_keeps_as_they_are_read_are_no_others():
    def digest(dataset: Any) -> int | None:
        return source(DataLoader(dataset, batch_size=2)).values

    dataset = Rows(np.arange(400))
    found = digest(dataset)
    dataset.opened = [*range(400)]  # a cache: in each trainer of its own samples
    assert digest(dataset) == found == digest(Subset(dataset, [1, 2]))


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_memory_to_which_nothing_was_written_is_no_samples(kind: str):
    def digest(words: Any) -> int | None:
        dataset = Rows(np.arange(400))
        dataset.names = []
        dataset.inputs = np.frombuffer(words.tobytes(), kind)[:4000].reshape(400, -1)
        return source(DataLoader(dataset, batch_size=2)).values

    heap = np.zeros(5000, np.int64)  # as numpy.empty finds it
    heap[::50] = 0x7F12_3456_7890 + np.arange(100) * 0x1_0000
    assert digest(heap) is None
    assert digest(np.arange(5000.0).astype(kind)) is not None


class Drawing(Dataset):
    """Draws from PyTorch's generator, as random augmentation does."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return torch.rand(2), index


def train(checkpoint: Path | None, *, epochs: int, workers: int = 0) -> tuple[Any, list[int]]:
    """Return the weights, and the order in which samples came."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    loader = DataLoader(Drawing(), batch_size=6, shuffle=True, num_workers=workers)
    loop = elastic.Loop(
        model, optimizer, loader, epochs=epochs, shards=2, scheduler=scheduler,
        checkpoint=checkpoint,
    )  # fmt: skip
    seen = []
    for epoch in loop.epochs():
        for step in epoch:
            for inputs, index in step:
                seen += index.tolist()
                step.backward((model(inputs) ** 2).mean())
            step.clip(1.0)
            step.update()
            scheduler.step()
    return torch.cat([each.detach().flatten() for each in model.parameters()]), seen


def test_workers_read_the_same_and_draw_the_same():
    weights, seen = train(None, epochs=2)
    by_workers, seen_by_workers = train(None, epochs=2, workers=2)
    assert seen == seen_by_workers
    assert sorted(seen[:20]) == list(range(20)) != seen[:20]
    assert torch.equal(weights, by_workers)


class Away(Dataset):
    """Drawing, on a file server that is away when sample 13 is first asked for."""

    def __init__(self, mark: Path) -> None:
        self.mark, self.drawing = mark, Drawing()

    def __len__(self) -> int:
        return len(self.drawing)

    def __getitem__(self, index: int) -> Any:
        if index == 13 and not self.mark.exists():
            self.mark.touch()
            raise OSError("Input/output error")
        return self.drawing[index]


class AwayStream(IterableDataset):
    def __init__(self, mark: Path) -> None:
        self.samples = Away(mark)

    def __iter__(self) -> Any:
        return (self.samples[index] for index in range(20))


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_script_that_catches_an_error_of_its_data_reads_on_with_the_same_batch(
    tmp_path, workers, is_stream
):
    """With worker processes it waited for ever."""

    def read(mark: Path) -> tuple[list[int], int]:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        data = AwayStream(mark) if is_stream else Away(mark)
        loader = DataLoader(data, batch_size=6, num_workers=workers)
        loop = elastic.Loop(
            model, optimizer, loader, epochs=1, shards=2, steps_per_epoch=3 if is_stream else None
        )
        seen: list[int] = []
        caught = 0
        for epoch in loop.epochs():
            for step in epoch:
                while True:
                    try:
                        for inputs, index in step:
                            seen += index.tolist()
                            step.backward((model(inputs) ** 2).mean())
                        break
                    except OSError:
                        caught += 1
                step.update()
        return seen, caught

    there = tmp_path / "there"
    there.touch()
    seen, _caught = read(there)
    assert read(tmp_path / "away") == (seen, 1)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_collate_function_draws_the_same_wherever_it_is_called(is_stream: bool):
    """Mixing rates, which no two batches have in common."""

    def mix(samples: list[Any]) -> Any:
        return torch.stack([torch.as_tensor(each[0]) for each in samples]), torch.rand(())

    def rates(workers: int) -> list[float]:
        model = nn.Linear(1, 1)
        data = [([float(at)], at) for at in range(8)]
        loader = DataLoader(
            Endless() if is_stream else data, batch_size=4, num_workers=workers, collate_fn=mix
        )
        loop = elastic.Loop(
            model, torch.optim.SGD(model.parameters(), 0.1), loader, epochs=2, shards=2,
            steps_per_epoch=2 if is_stream else None,
        )  # fmt: skip
        drawn = []
        for epoch in loop.epochs():
            for step in epoch:
                for inputs, rate in step:
                    drawn.append(rate.item())
                    step.backward(model(inputs).mean())
                step.update()
        return drawn

    alone = rates(0)
    assert len(set(alone)) == 2 * 2 * 2
    assert rates(2) == alone


def drawn_between_loops(folder: Path) -> list[float]:
    """Train three models one after the other; return what was drawn after each of them."""
    drawn = []
    for number in range(3):
        train(folder / str(number), epochs=1)
        drawn.append(float(torch.rand(())))
    return drawn


def test_what_is_drawn_behind_each_of_several_trainings_is_its_own_and_the_same_again(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(Loop, "_before", LoopsBefore())  # as in a process of its own
    first = drawn_between_loops(tmp_path)
    assert len(set(first)) == 3
    monkeypatch.setattr(Loop, "_before", LoopsBefore())
    assert drawn_between_loops(tmp_path) == first  # by now they are complete


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_may_be_along_any_axis_of_a_batch(workers: int):
    """As PyTorch's pad_sequence has it: (time, samples)."""

    def time_first(samples: list[Any]) -> Any:
        return nn.utils.rnn.pad_sequence([torch.ones(2 + index % 3) for _x, index in samples])

    model = nn.Linear(1, 1)
    loader = DataLoader(DATA, batch_size=10, collate_fn=time_first, num_workers=workers)
    loop = elastic.Loop(model, torch.optim.SGD(model.parameters(), 0.1), loader, epochs=1)
    for epoch in loop.epochs():
        for step in epoch:
            for batch in step:
                assert batch.shape == (4, 10)
                step.backward(model(batch.unsqueeze(2)).mean())
            step.update()
    assert loop.step_count == 2


class Endless(IterableDataset):
    """Draws from the same generator as the collate function."""

    def __iter__(self) -> Any:
        while True:
            yield torch.rand(1), 0


class Graded(Dataset):
    """Whose script sets how hard its samples are."""

    grade = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return self.grade


@pytest.mark.parametrize(
    ("workers", "expected"),
    [({}, [0, 1, 2]), ({"num_workers": 1}, [0, 1, 2]),
     ({"num_workers": 1, "persistent_workers": True}, [0, 0, 0])],
)  # fmt: skip
def test_workers_see_a_dataset_as_it_is_when_the_epoch_begins_as_in_the_framework_alone(
    workers, expected
):
    model, data = nn.Linear(1, 1), Graded()
    loader = DataLoader(data, batch_size=4, **workers)
    loop = elastic.Loop(model, torch.optim.SGD(model.parameters(), 0.1), loader, epochs=3)
    seen: list[set[int]] = []
    for epoch in loop.epochs():
        data.grade = epoch.number
        seen.append(set())
        for step in epoch:
            for grades in step:
                seen[-1] |= {*grades.tolist()}
                step.backward(model(grades.float().unsqueeze(1)).mean())
            step.update()
    assert seen == [{each} for each in expected]


class OwnGenerator(Dataset):
    """Draws from a generator that each worker seeds, as `worker_init_fn` of many scripts does."""

    numbers: Any = None

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([self.numbers.random()], dtype=torch.float64)


def seed_own(_worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.numbers = np.random.default_rng(info.seed)


def test_workers_seed_generators_of_their_own_anew_in_each_epoch_and_the_same_in_each_run():
    def run(seed: int) -> list[float]:
        model = nn.Linear(1, 1).double()
        loader = DataLoader(OwnGenerator(), batch_size=4, num_workers=2, worker_init_fn=seed_own)
        loop = elastic.Loop(
            model, torch.optim.SGD(model.parameters(), 0.1), loader, epochs=2, shards=2, seed=seed
        )
        seen: list[float] = []
        for epoch in loop.epochs():
            for step in epoch:
                for batch in step:
                    seen += batch.flatten().tolist()
                    step.backward(model(batch).mean())
                step.update()
        return seen

    found = run(1)
    assert len({*found}) == 16, "each sample of each epoch has another number"
    assert run(1) == found != run(2)


def test_a_hook_on_a_parameter_is_told_and_one_of_the_optimizer_finds_the_whole_gradient(caplog):
    def clamp(parameter: Any) -> None:
        parameter.grad.clamp_(-1, 1)

    def train(at: str, shards: int) -> list[float]:
        torch.manual_seed(1)
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if at == "parameter":
            model.weight.register_hook(lambda grad: grad.clamp(-1, 1))
        elif at == "accumulated":
            model.weight.register_post_accumulate_grad_hook(clamp)
        else:
            optimizer.register_step_pre_hook(
                lambda *_args: nn.utils.clip_grad_value_(model.parameters(), 1.0)
            )
        loop = elastic.Loop(model, optimizer, DATA, batch_size=10, epochs=1, shards=shards)
        for epoch in loop.epochs():
            for step in epoch:
                for inputs, _index in step:
                    step.backward(-9 * model(inputs).mean())
                step.update()
        found: list[float] = model.weight.flatten().tolist()
        return found

    assert train("optimizer", 2) == pytest.approx(train("optimizer", 1))
    assert "register_hook" not in caplog.text
    assert train("parameter", 2) != pytest.approx(train("parameter", 1))
    assert (
        "model: weight has a hook (register_hook), which gets the gradient of each" in caplog.text
    )
    train("accumulated", 2)
    assert (
        "model: weight has a hook (register_post_accumulate_grad_hook), which gets the gradient"
        in caplog.text
    )


@pytest.mark.filterwarnings("ignore:When training, we now always track")
@pytest.mark.parametrize(
    ("samples", "cut"),
    [
        (16, {"batch_size": 16, "shards": 6}),
        (5, {"batch_size": 2, "accumulation_steps": 3, "promise": "statistics"}),
    ],
)
def test_batch_norm_of_a_shard_of_one_sample_is_explained(samples, cut):
    """Of shares that are even it is the first one; else the last."""
    model = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2))
    data = torch.utils.data.Subset(DATA, range(samples))
    loop = elastic.Loop(model, torch.optim.SGD(model.parameters(), 0.1), data, epochs=1, **cut)

    def run() -> None:
        for epoch in loop.epochs():
            for step in epoch:
                for inputs, _index in step:
                    step.backward(model(inputs).mean())
                step.update()

    with pytest.raises(ValueError, match="more than 1 value per channel") as raised:
        run()
    assert explain_error(raised.value).startswith(f"a shard of a batch of {samples} has one sample")


class Sized(Dataset):
    """Has its batches in sizes that it changes by a count of its own, as many detectors do."""

    def __init__(self) -> None:
        self.batches, self.size = 0, 2

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return torch.full((1,), index / 24)

    def collate(self, samples: list[Any]) -> Any:
        self.batches += 1
        return torch.stack(samples)


def test_a_count_of_the_dataset_that_moves_with_each_shard_is_told(caplog):
    model, data = nn.Linear(1, 1), Sized()
    loader = DataLoader(data, batch_size=4, collate_fn=data.collate)
    loop = elastic.Loop(model, torch.optim.SGD(model.parameters(), 0.1), loader, epochs=1, shards=2)
    for epoch in loop.epochs():
        for step in epoch:
            for inputs in step:
                step.backward(model(inputs).mean())
            step.update()
    assert "batches of Sized: moves with every shard that this trainer computes" in caplog.text


def test_a_training_that_was_left_goes_on_as_if_it_had_not_been(tmp_path):
    expected, _seen = train(None, epochs=4)
    train(tmp_path / "ckpt", epochs=2)
    weights, seen = train(tmp_path / "ckpt", epochs=4)
    assert torch.equal(weights, expected)
    assert len(seen) == 2 * 20


def test_a_checkpoint_is_loaded_without_edl_by_the_lines_of_the_guide(tmp_path, monkeypatch):
    train(tmp_path / "checkpoint", epochs=1)
    weights, _seen = train(tmp_path / "checkpoint", epochs=2)
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    (lines,) = code_blocks("docs/training-scripts.md", "python torch")
    exec(lines, {"model": model})
    assert torch.equal(torch.cat([each.flatten() for each in model.state_dict().values()]), weights)


def test_random_streams_cost_no_look_at_the_stack(monkeypatch):
    """As `torch.manual_seed` takes one for each kind of device: a millisecond per shard."""

    def look(*args: Any) -> list[str]:
        raise AssertionError("the stack is formatted")

    model = torch.nn.Linear(2, 1)
    loop = elastic.Loop(
        model, torch.optim.SGD(model.parameters(), 0.1), Drawing(), batch_size=10, epochs=1
    )
    monkeypatch.setattr("traceback.format_stack", look)
    for epoch in loop.epochs():
        for step in epoch:
            for inputs, _index in step:
                step.backward(model(inputs).mean())
            step.update()
    assert loop.step_count == 2


def test_an_evaluation_sums_over_all_samples_without_gradients():
    model = torch.nn.Linear(1, 1)
    loop = elastic.Loop(
        model, torch.optim.SGD(model.parameters(), 0.1), DATA, batch_size=4, epochs=1
    )

    def judge(inputs: Any, index: Any) -> dict[str, Any]:
        assert not model(inputs).requires_grad
        return {"n": len(inputs), "index": index.sum()}

    assert loop.evaluate(DataLoader(DATA, batch_size=7), judge) == {"n": 20, "index": 190}


def test_a_loss_for_each_sample_is_refused_as_pytorch_does():
    model = torch.nn.Linear(1, 1)
    loop = elastic.Loop(
        model, torch.optim.SGD(model.parameters(), 0.1), DATA, batch_size=4, epochs=1, shards=2
    )
    step = next(iter(next(iter(loop.epochs()))))
    for inputs, _index in step:
        with pytest.raises(UsageError, match=r"the mean over the shard, got .* shape \[2, 1\]"):
            step.backward(model(inputs) ** 2)
        step.backward((model(inputs) ** 2).mean())
    step.update()


@pytest.mark.parametrize(("is_passed", "is_enabled"), [(1, 1), (1, 0), (0, 1), (0, 0)])
def test_a_loss_that_the_script_scales_itself_is_refused(is_passed, is_enabled):
    model = torch.nn.Linear(1, 1)
    scaler = torch.amp.GradScaler("cpu", enabled=bool(is_enabled))
    earlier = torch.amp.GradScaler("cpu")  # of a training without the loop
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    for _ in range(2):
        earlier.scale(model(torch.ones(1)).sum()).backward()
        earlier.step(optimizer)
        earlier.update()

    def train() -> None:
        loop = elastic.Loop(
            model, optimizer, DATA, batch_size=4, epochs=1, scaler=scaler if is_passed else None
        )
        for epoch in loop.epochs():
            for step in epoch:
                for inputs, _index in step:
                    step.backward(scaler.scale(model(inputs).mean()))
                step.update()

    if not is_enabled:
        train()
        return
    text = "the script has called scaler.scale before" if is_passed else "pass it: Loop.scaler="
    with pytest.raises(UsageError, match=text):
        train()


def test_a_penalty_on_the_gradient_of_a_scaled_loss_is_no_scaled_loss():
    def train(scaler: Any) -> list[float]:
        torch.manual_seed(1)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for epoch in elastic.Loop(
            model, optimizer, DATA, batch_size=4, epochs=1, scaler=scaler
        ).epochs():
            for step in epoch:
                for inputs, _index in step:
                    loss = (model(inputs) ** 2).mean()
                    scale = 1.0 if scaler is None else scaler.get_scale()
                    found = torch.autograd.grad(
                        loss if scaler is None else scaler.scale(loss),
                        [*model.parameters()],
                        create_graph=True,
                    )
                    norm = sum(((each / scale) ** 2).sum() for each in found)
                    step.backward(loss + 0.1 * norm**0.5)
                step.update()
        return [each.item() for each in model.parameters()]

    assert train(torch.amp.GradScaler("cpu", init_scale=4.0)) == train(None)


def test_a_part_of_a_loss_that_the_script_scales_itself_is_refused():
    model, scaler = torch.nn.Linear(1, 1), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    loop = elastic.Loop(model, optimizer, DATA, batch_size=4, epochs=1, scaler=scaler)
    step = next(iter(next(iter(loop.epochs()))))
    for inputs, _index in step:
        with pytest.raises(UsageError, match=r"the script has called scaler\.scale before"):
            step.backward((scaler.scale(model(inputs).sum()) + 1.0) / 4)
        break


def test_a_norm_that_is_not_above_zero_is_refused():
    model = torch.nn.Linear(1, 1)
    loop = elastic.Loop(
        model, torch.optim.SGD(model.parameters(), 0.1), DATA, batch_size=4, epochs=1
    )
    for epoch in loop.epochs():
        for step in epoch:
            for value in (0, -1.0, float("nan"), None):
                with pytest.raises(UsageError, match=r"step\.clip\(max_norm\): expected a number"):
                    step.clip(value)  # type: ignore[arg-type]
            for inputs, _index in step:
                step.backward(model(inputs).mean())
            step.update()
            with pytest.raises(UsageError, match="call it before"):
                step.clip(1.0)


@pytest.mark.slow
def test_a_world_of_torchrun_trains_checkpoints_and_resumes(tmp_path: Path):
    def launch(epochs: int) -> list[tuple[str, ...]]:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2",
            "--standalone", str(SCRIPTS / "launched_torch.py"), str(tmp_path), str(epochs),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=tmp_path)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        said = [(tmp_path / f"said.{rank}").read_text() for rank in range(2)]
        pattern = r"rank (\d) of 2: (\d+) steps, sum ([\d.]+), weight (\w+)"
        return [found.groups() for text in said if (found := re.search(pattern, text))]

    first = launch(1)
    assert [(rank, steps, total) for rank, steps, total, _ in first] == [
        ("0", "4", "28.5"), ("1", "4", "28.5"),
    ]  # fmt: skip
    assert first[0][3] == first[1][3], "both ranks have the same weights"
    second = launch(2)
    assert [(rank, steps) for rank, steps, *_ in second] == [("0", "8"), ("1", "8")]
    assert second[0][3] == second[1][3] != first[0][3]
    assert verify([str(tmp_path / "ckpt")]) == 0


ALONE = """
import sys
sys.modules["{other}"] = None  # as where it is not installed
import numpy as np
import {framework} as framework
from edl import DistillReader, elastic, kl_divergence
DistillReader(["image"], ["probs"]).set_tensors("{framework}")
{make}
data = [np.full(3, i, "float32") / 20 for i in range(20)]
loop = elastic.Loop(model, optimizer, data, batch_size=6, epochs=2, checkpoint=sys.argv[1])
for epoch in loop.epochs():
    for step in epoch:
        for batch in step:
            logits = model(batch)
            step.backward(kl_divergence(logits, (2 * logits).detach()))
        step.update()
assert loop.step_count == 8
"""
MAKE = {
    "paddle": "model = framework.nn.Linear(3, 2)\n"
    "optimizer = framework.optimizer.SGD(0.1, parameters=model.parameters())",
    "torch": "model = framework.nn.Linear(3, 2)\n"
    "optimizer = framework.optim.SGD(model.parameters(), 0.1)",
}


@pytest.mark.full
@pytest.mark.parametrize(("framework", "other"), [("torch", "paddle"), ("paddle", "torch")])
def test_either_framework_is_enough(tmp_path, framework, other):
    pytest.importorskip(framework)
    script = ALONE.format(framework=framework, other=other, make=MAKE[framework])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, str(tmp_path / "ckpt")],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    # The loop shows what it logs where the framework has set up no logging.
    assert done.stderr.count("checkpoint stage_00000001/step_0000000008 written") == 1


class Alternates(nn.Module):
    """Its buffer jumps, so that old value + change is not the new value to the bit."""

    last: Any

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.full((), 1e-9))

    def forward(self, inputs: Any) -> Any:
        self.last.fill_(1e-9 if self.last > 0.5 else 1.0)
        return inputs


def test_one_trainer_that_promises_statistics_trains_as_a_plain_loop():
    def build() -> tuple[Any, Any]:
        torch.manual_seed(1)
        model = torch.nn.Sequential(
            torch.nn.Linear(1, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1), Alternates()
        )
        return model, torch.optim.Adam(model.parameters(), 0.1)

    model, optimizer = build()
    loop = elastic.Loop(model, optimizer, DATA, batch_size=6, epochs=3, promise="statistics")
    batches = []
    for epoch in loop.epochs():
        for step in epoch:
            for inputs, _index in step:
                batches.append(inputs)
                step.backward((model(inputs) ** 2).mean())
            step.update()
    assert [len(each) for each in batches] == [6, 6, 6, 2] * 3
    plain, optimizer = build()
    for inputs in batches:
        optimizer.zero_grad()
        (plain(inputs) ** 2).mean().backward()
        optimizer.step()
    for (name, ours), theirs in zip(
        model.state_dict().items(), plain.state_dict().values(), strict=True
    ):
        assert torch.equal(ours, theirs), name


def test_parameters_that_an_optimizer_is_given_later_are_refused_before_a_state_has_them():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    loop = elastic.Loop(model, optimizer, [torch.ones(2)] * 8, batch_size=4, epochs=2)

    def run() -> None:
        for epoch in loop.epochs():
            if epoch.number == 1:
                model[0].requires_grad_(True)
                optimizer.add_param_group({"params": list(model[0].parameters())})
            for step in epoch:
                for batch in step:
                    step.backward(model(batch).mean())
                step.update()

    with pytest.raises(UsageError, match=r"groups have \[2, 2\] parameters, and had \[2\]"):
        run()
    assert loop.step_count == 3


def test_what_only_one_trainer_computes_with_the_others_is_explained():
    """As a metric of torchmetrics, whose compute() finds the loop's process group."""
    text = "[unbound_buffer.cc:78] Timed out waiting 120000ms for recv operation to complete"
    model = nn.Linear(4, 1)
    elastic.Loop(model, torch.optim.SGD(model.parameters(), 0.1), DATA, epochs=1, batch_size=8)
    assert "call it on all trainers, above `if loop.rank" in explain_error(RuntimeError(text))
    assert "call it on all" not in explain_error(PeerLost(text))
