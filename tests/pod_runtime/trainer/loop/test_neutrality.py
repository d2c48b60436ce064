"""Any number of trainers, changed at any step, trains what one trainer trains."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pod_runtime.verify import main as verify
from tests.pod_runtime.trainer.fake_launcher import FakeLauncher, Stage, sample_ids

THREE_CHANGES = (1, 4, 3, 2)  # trainers of each stage
SIX_CHANGES = (1, 2, 4, 3, 1, 4, 2)
TOLERANCE = 1e-8


def train_alone(launcher: FakeLauncher, *args: str) -> dict[str, np.ndarray]:
    stage = launcher.start(1, "--out", str(launcher.folder), *args)
    stage.go()
    assert stage.codes() == [0], stage.logs()
    return dict(np.load(launcher.folder / "final.npz"))


def losses(folder: Path, steps: int) -> np.ndarray:
    """Return the loss of each step, in which all ranks of all stages have to agree."""
    found: dict[int, set[float]] = {}
    for path in folder.glob("losses.*.jsonl"):
        for line in path.read_text().splitlines():
            step, loss = json.loads(line)
            found.setdefault(step, set()).add(loss)
    assert sorted(found) == list(range(steps))
    assert all(len(each) == 1 for each in found.values()), found
    return np.array([found[step].pop() for step in range(steps)])


def prepare(job: FakeLauncher, world_size: int, out: tuple[str, ...]) -> Stage:
    stage = job.start(world_size, *out, overlaps=True)
    stage.wait_all("prepared")
    return stage


def change(
    job: FakeLauncher,
    old: Stage,
    world_size: int,
    out: tuple[str, ...],
    prepared: Stage | None,
    *,
    alone: bool,
) -> Stage:
    """Go on with another number of trainers: those prepared before, or some started now."""
    old.cut()
    restore_from = (old.number, old.drained())
    if prepared is not None:
        if alone and world_size != 4:
            prepared.preview(restore_from[1])
        prepared.commit(restore_from, local_on_all_nodes=alone)
        prepared.wait_all("loaded")
    old.end()
    if prepared is not None:
        return prepared
    stage = job.start(world_size, *out, restore_from=restore_from)
    stage.go()
    return stage


def distance(one: dict[str, np.ndarray], other: dict[str, np.ndarray], prefix: str) -> float:
    names = sorted(name for name in one if name.startswith(prefix))
    assert names
    left = np.concatenate([one[name].ravel() for name in names])
    right = np.concatenate([other[name].ravel() for name in names])
    return float(np.linalg.norm(left - right) / np.linalg.norm(left))


needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="PyTorch is not installed"
)


def case(name: str, script: str, worlds: tuple[int, ...], *, overlaps: bool, asks: bool) -> Any:
    """One story: Paddle's short ones are told in each run, and PyTorch's *replace*.

    Of those with two optimizers that take turns, PyTorch's *replace* is.
    """
    is_usual = script == "towers.py" or (name == "replace" and script != "gan.py")
    is_short = worlds == THREE_CHANGES and is_usual
    marks = [] if is_short else [pytest.mark.slow]
    if script.endswith("_torch.py"):
        marks.append(needs_torch)
    return pytest.param(script, worlds, overlaps, asks, marks=marks, id=f"{script[:-3]}, {name}")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("script", "worlds", "overlaps", "asks"),
    [
        case(f"{name}{length}", script, worlds, overlaps=overlaps, asks=asks)
        for script in ("towers.py", "towers_torch.py", "gan.py", "gan_torch.py")
        for length, worlds in (("", THREE_CHANGES), (", long", SIX_CHANGES))
        for name, overlaps, asks in (
            ("drain", False, True),
            ("replace", True, True),
            ("replace, state on every node", True, False),
        )
    ],
)
def test_changes_do_not_change_what_is_trained(
    launch, script: str, worlds: tuple[int, ...], overlaps: bool, asks: bool
):
    alone = launch(script, 4, "alone")
    expected = train_alone(alone)

    changed = launch(script, 4, "changed")
    hurry = changed.folder / "hurry"
    # All changes have to be made before 21 steps are over, however late the test acts.
    out = ("--out", str(changed.folder), "--step_s", "0.5", "--hurry", str(hurry))
    stage = changed.start(worlds[0], *out)
    # All of them before it begins, for the training is short; but one after the other: gloo gives
    # its ranks 30 s to find each other, which seventeen processes at once may exceed.
    coming = [prepare(changed, size, out) if overlaps else None for size in worlds[1:]]
    stage.go()
    ids: dict[int, list[int]] = {}
    for world_size, prepared in zip(worlds[1:], coming, strict=True):
        stage.wait_all("step")
        old = stage
        stage = change(changed, old, world_size, out, prepared, alone=not asks)
        _, last = stage.restored_from
        for step, samples in sample_ids(changed.folder, old.number, len(old.trainers)).items():
            if step < last and samples:  # a warm-up step has none
                assert step not in ids, "a planned change redoes no step"
                ids[step] = samples
    hurry.touch()
    assert stage.codes() == [0] * worlds[-1], stage.logs()
    ids |= sample_ids(changed.folder, stage.number, worlds[-1])
    found = dict(np.load(changed.folder / "final.npz"))

    assert ids == sample_ids(alone.folder, 1, 1), "the same samples in every global batch"
    assert sorted(ids) == list(range(21))
    assert distance(expected, found, "plain") <= TOLERANCE
    assert distance(expected, found, "noisy") <= TOLERANCE  # batch norm's statistics included
    assert distance(expected, found, "unused") == 0
    assert losses(changed.folder, 21) == pytest.approx(losses(alone.folder, 21), rel=1e-7)
    assert verify([str(changed.run_dir)]) == 0
    shown = [said["metrics"] for said in alone.stages[0].trainers[0].said if said["say"] == "step"]
    assert shown[-1]["train_loss"] == losses(alone.folder, 21)[-1], "the last one shown is the last"

    # The comparison is sharp enough to notice one sample whose weight is off by 1e-4.
    wrong = train_alone(launch(script, 4, "wrong"), "--wrong_sample", "17")
    assert distance(expected, wrong, "plain") > TOLERANCE
    assert distance(expected, wrong, "noisy") > TOLERANCE


@needs_torch
@pytest.mark.timeout(600)
def test_a_crash_between_two_updates_of_a_step_undoes_the_first(launch):
    """Nobody takes the state of the survivor, which is between two committed ones, for a state."""
    expected = train_alone(launch("gan_torch.py", 4, "alone"))
    job = launch("gan_torch.py", 4, "crashed")
    stage = job.start(2, "--out", str(job.folder), "--dies_at", "10")
    stage.go()
    assert stage.codes() == [75, -9], stage.logs()
    assert job.newest() == (1, 9), "the newest snapshot; ten steps are committed"
    again = job.start(2, "--out", str(job.folder), restore_from=job.newest())
    again.go()
    assert again.codes() == [0, 0], again.logs()
    found = dict(np.load(job.folder / "final.npz"))
    assert distance(expected, found, "plain") <= TOLERANCE
    assert distance(expected, found, "noisy") <= TOLERANCE
    assert verify([str(job.run_dir)]) == 0


@needs_torch
@pytest.mark.timeout(300)
def test_trainers_that_update_different_optimizers_end_with_the_reason(launch):
    job = launch("gan_torch.py", 4)
    stage = job.start(2, "--out", str(job.folder), "--differs_at", "4")
    stage.go()
    assert stage.codes() == [1, 1], stage.logs()
    for trainer in stage.trainers:
        assert "do not update the same optimizers" in trainer.log.read_text()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("script", "strays", "what"),
    [
        ("towers.py", "layer", "model/plain.0.weight"),
        pytest.param("towers_torch.py", "rate", "its learning rate", marks=needs_torch),
        pytest.param(
            "towers_torch.py", "moments",
            r"optimizer keeps of plain.2.weight", marks=needs_torch,
        ),
        pytest.param("towers.py", "rate", "its learning rate", marks=pytest.mark.slow),
        pytest.param(
            "towers_torch.py", "layer", "model/plain.0.weight",
            marks=[needs_torch, pytest.mark.slow],
        ),
    ],
)  # fmt: skip
def test_what_one_trainer_sets_by_itself_ends_the_training_before_a_checkpoint_has_it(
    launch, script: str, strays: str, what: str
):
    job = launch(script, 2)
    checkpoint = job.folder / "checkpoint"
    stage = job.start(
        2, "--out", str(job.folder), "--strays", strays, "--checkpoint", str(checkpoint)
    )
    stage.go()
    assert stage.codes() == [1, 1], stage.logs()
    for trainer in stage.trainers:
        text = trainer.log.read_text()
        assert f"{what}" in text, text
        assert "not the same on all trainers after step 1." in text
    assert not list(checkpoint.glob("stage_*"))


@needs_torch
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("save_steps", "seen_after"), [(20, 19), (1000, 49)])
def test_what_one_trainer_sets_amid_an_epoch_is_seen_now_and_then_and_before_a_checkpoint(
    launch, save_steps: int, seen_after: int
):
    job = launch("towers_torch.py", 2)
    checkpoint = job.folder / "checkpoint"
    flags = ("--out", str(job.folder), "--batch", "4", "--strays", "rate", "--strays_at", "10")
    save = ("--save_steps", str(save_steps), "--checkpoint", str(checkpoint))
    stage = job.start(2, *flags, *save)
    stage.go()
    assert stage.codes() == [1, 1], stage.logs()
    for trainer in stage.trainers:
        assert f"trainers after step {seen_after}." in trainer.log.read_text()
    assert not list(checkpoint.glob("stage_*"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "script", ["towers.py", pytest.param("towers_torch.py", marks=needs_torch)]
)
def test_shares_of_data_parallel_training_count_each_sample_once_with_its_weight(
    launch, script: str
):
    """What sees no batch trains as alone, with 11 samples for 4 trainers, too; batch norm not."""
    arguments = ("--promise", "statistics", "--max_norm", "1e9")  # the norm is that of both towers
    alone = launch(script, 4, "alone")
    expected = train_alone(alone, *arguments)
    job = launch(script, 4, "changed")
    hurry = job.folder / "hurry"
    out = ("--out", str(job.folder), "--step_s", "0.5", "--hurry", str(hurry), *arguments)
    stage = job.start(4, *out)
    prepared = prepare(job, 3, out)
    stage.go()
    stage.wait_all("step")
    new = change(job, stage, 3, out, prepared, alone=False)
    hurry.touch()
    assert new.codes() == [0] * 3, new.logs()
    assert {said["promise"] for said in new.wait_all("step")} == {"statistics"}
    last = new.restored_from[1]
    ids = sample_ids(job.folder, stage.number, 4)
    ids = {step: found for step, found in ids.items() if step < last and found}
    ids |= sample_ids(job.folder, new.number, 3)
    assert ids == sample_ids(alone.folder, 1, 1), "the same samples in every global batch"
    found = dict(np.load(job.folder / "final.npz"))
    assert distance(expected, found, "plain") <= TOLERANCE
    assert distance(expected, found, "noisy") > TOLERANCE
    assert verify([str(job.run_dir)]) == 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("script", "all_reduce"),
    [
        ("towers.py", "flat"),
        pytest.param("towers.py", "overlapped", marks=pytest.mark.slow),
        pytest.param("gan.py", "flat", marks=pytest.mark.slow),
    ],
)
def test_trainers_that_stay_and_trainers_that_join_train_the_same(
    launch, script: str, all_reduce: str
):
    """From one to three, and on with two of them, whose ranks change places."""
    expected = train_alone(launch(script, 4, "alone"))
    job = launch(script, 4, "joined")
    hurry = job.folder / "hurry"
    out = ("--out", str(job.folder), "--all_reduce", all_reduce, "--hurry", str(hurry))
    stage = job.start(1, *out, "--step_s", "1")
    stage.go()
    stage.wait_step(1)
    for ranks in ([0, None, None], [2, 0]):
        old, stage = stage, job.join(stage, ranks, *out, "--step_s", "1")
        stage.wait_prepared()
        old.cut(patient=True)
        stage.commit((old.number, old.drained()), local_on_all_nodes=len(ranks) == 2)
        stage.wait_all("step")
    hurry.touch()
    assert stage.codes() == [0, 0], stage.logs()
    found = dict(np.load(job.folder / "final.npz"))
    assert distance(expected, found, "plain") <= TOLERANCE
    assert distance(expected, found, "noisy") <= TOLERANCE
    assert distance(expected, found, "unused") == 0
    assert verify([str(job.run_dir)]) == 0


@pytest.mark.timeout(600)
def test_gradients_that_are_sent_during_the_backward_pass_train_the_same(launch):
    """With ranks that have no shard of a short batch, and with gradients that change once sent."""
    expected = train_alone(launch("towers.py", 4, "alone"))
    for number, twice in enumerate(((), ("--twice",))):
        job = launch("towers.py", 4, f"overlapped{number}")
        out = ("--out", str(job.folder), "--all_reduce", "overlapped", *twice)
        stage = job.start(3, *out)
        stage.go()
        assert stage.codes() == [0] * 3, stage.logs()
        found = dict(np.load(job.folder / "final.npz"))
        for tower in ("plain", "noisy"):
            assert distance(expected, found, tower) <= TOLERANCE
        alone = losses(job.folder.parent / "alone", 21)
        assert losses(job.folder, 21) == pytest.approx(alone, rel=1e-7)
        assert distance(expected, found, "unused") == 0
        for trainer in stage.trainers:
            said = trainer.log.read_text().count("gradients changed after they were sent")
            assert said == len(twice), "a rank says it once"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("script", "fewest"),  # with one the number of shards is measured
    [("towers.py", 3), *(pytest.param("towers_torch.py", n, marks=needs_torch) for n in (3, 1))],
)
def test_a_script_that_waits_for_the_others_amid_the_shards_ends_with_the_remedy(
    launch, script: str, fewest: int
):
    job = launch(script, 3)
    job.min_trainers = fewest
    out = ("--out", str(job.folder), "--adds_up", "--epochs", "1", "--batch", "96")
    stage = job.start(3, *out)
    stage.go()
    assert stage.codes() == [1] * 3, stage.logs()
    for trainer in stage.trainers:
        assert "(all_reduce, all_gather) inside of `for batch in step:`" in trainer.log.read_text()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "script", ["towers.py", pytest.param("towers_torch.py", marks=needs_torch)]
)
def test_by_shares_a_script_may_wait_for_the_others_amid_a_batch(launch, script: str):
    job = launch(script, 2)
    stage = job.start(2, "--out", str(job.folder), "--adds_up", "--promise", "statistics")
    stage.go()
    assert stage.codes() == [0, 0], stage.logs()


@needs_torch
@pytest.mark.timeout(300)
def test_shares_train_what_distributed_data_parallel_trains(launch):
    job = launch("shares_torch.py", 2)
    stage = job.start(2, "--out", str(job.folder))
    stage.go()
    assert stage.codes() == [0, 0], stage.logs()
    for rank in range(2):
        samples, worst = (job.folder / f"worst.{rank}").read_text().split()
        assert (int(samples), float(worst) < 1e-12) == (8, True), worst


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "script",
    # What is PyTorch's own in it, its models' layers, is a table in test_measure.py.
    ["towers.py", pytest.param("towers_torch.py", marks=[needs_torch, pytest.mark.slow])],
)
def test_the_number_of_shards_is_measured_at_a_fresh_start_and_nothing_of_that_counts(
    launch, script: str
):
    job = launch(script, 3)
    job.min_trainers = 1
    # What the script sets above the first step is there after the measurement.
    out = ("--out", str(job.folder), "--batch", "96", "--turn")
    stage = job.start(2, *out)
    stage.go()
    assert stage.codes() == [0, 0], stage.logs()
    (promise,) = {said["promise"] for said in stage.wait_all("step")}
    (digits,) = re.findall(r"^rounding, (\d) shards$", promise)
    shards = int(digits)
    assert 3 <= shards <= 6
    assert f"promise: {promise} (measured: {shards} shards, " in stage.trainers[0].log.read_text()
    # What goes on, goes on with as many.
    again = job.start(3, *out, "--epochs", "4", restore_from=job.newest())
    again.go()
    assert again.codes() == [0] * 3, again.logs()
    assert {said["promise"] for said in again.wait_all("step")} == {promise}
    assert verify([str(job.run_dir)]) == 0

    alone = launch(script, 3, "alone")
    arguments = ("--batch", "96", "--epochs", "4", "--shards", str(shards), "--turn")
    expected = train_alone(alone, *arguments)
    found = dict(np.load(job.folder / "final.npz"))
    for tower in ("plain", "noisy", "unused"):
        assert distance(expected, found, tower) <= TOLERANCE


@pytest.mark.timeout(300)
def test_a_number_of_shards_that_a_script_was_told_stays(launch):
    job = launch("towers.py", 3)
    job.min_trainers = 1
    stage = job.start(2, "--out", str(job.folder), "--batch", "96", "--asks", "--epochs", "1")
    stage.go()
    assert stage.codes() == [0, 0], stage.logs()
    assert {said["promise"] for said in stage.wait_all("step")} == {"rounding, 3 shards"}
    assert "as the script asked for it before the first step" in stage.logs()


@pytest.mark.timeout(300)
def test_nothing_is_measured_where_a_script_counts_its_steps_by_enumerate(launch):
    job = launch("counted.py", 3)
    job.min_trainers = 1
    stage = job.start(2)
    stage.go()
    assert stage.codes() == [0, 0], stage.logs()
    assert {said["promise"] for said in stage.wait_all("step")} == {"rounding, 3 shards"}
    assert "would be one more for enumerate" in stage.trainers[0].log.read_text()
