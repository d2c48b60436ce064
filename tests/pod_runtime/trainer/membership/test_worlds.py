"""What trainers do when they are cut, killed, starved or left alone. Real processes over gloo."""

import json
import re
import resource
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from pod_runtime.segment_header import read_newest
from pod_runtime.trainer.progress.ledger_check import check_ledger
from pod_runtime.trainer.state.checkpoint import CheckpointStore
from pod_runtime.trainer.state.last_save import write_state
from pod_runtime.trainer.state.storage import open_storage
from pod_runtime.verify import main as verify
from pod_runtime.verify import read_ledger
from tests.pod_runtime.trainer.fake_launcher import FakeLauncher, Stage, slots_of
from tests.support import wait_until

pytestmark = pytest.mark.timeout(400)
STEPS = 21  # 203 samples, batches of 32, three epochs
AGAIN_STEPS = 4  # of each of the three loops in again.py


def out(launcher: FakeLauncher, *more: str, step_s: float = 0.3) -> tuple[str, ...]:
    """Return arguments for steps that last until a test has acted on one, also a slow test."""
    folder = launcher.folder
    hurry = str(folder / "hurry")
    return ("--out", str(folder), "--step_s", str(step_s), "--hurry", hurry, *more)


def prepared_beside(job: FakeLauncher, *args: str, step: int = 3) -> tuple[Stage, Stage]:
    """Return a stage of one trainer that has made steps, and one of two that is prepared."""
    args = args or out(job)
    old = job.start(1, *args)
    new = job.start(2, *args, overlaps=True)
    new.wait_all("prepared")
    old.go()
    old.wait_step(step)
    return old, new


def finish_anew(job: FakeLauncher, restore_from: tuple[int, int], *args: str) -> None:
    """Let one trainer of a next stage begin from there, and train to the end."""
    stage = job.start(1, *(args or out(job)), restore_from=restore_from)
    stage.go()
    finish(stage)


def finish(stage: Stage) -> None:
    (stage.launcher.folder / "hurry").touch()
    assert stage.codes() == [0] * len(stage.trainers), stage.logs()
    assert {said["step"] for said in stage.wait_all("done")} == {STEPS}
    counts = np.load(stage.launcher.folder / "counts.npy")
    assert (counts == 3).all(), f"every sample counts once per epoch: {counts}"
    assert verify([str(stage.launcher.run_dir)]) == 0
    assert check_ledger(*read_ledger(str(stage.launcher.run_dir))).undrawn == (), (
        "nothing is taken on trust"
    )


def cut_in_second_training(job: FakeLauncher, step: int, *args: str) -> int:
    """Run `again.py` alone up to this step of its second loop; return at which step it drained.

    Steps count on from the first loop's to the second's.
    """
    stage = job.start(1, *args)
    stage.go()
    (trainer,) = stage.trainers
    wait_until(lambda: len(trainer.words("loaded")) > 1, 90)
    stage.go()
    wait_until(lambda: trainer.said[-1].get("step") == AGAIN_STEPS + step, 90)
    stage.cut()
    drained = stage.drained()
    stage.end()
    job.close_segments(1, 1)  # as shims do, which have the second training's
    return drained


def finish_all_three(stage: Stage) -> None:
    """Run `again.py` to its end."""
    for times in (1, 2, 3):
        stage.go()
        wait_until(lambda: all(len(t.words("done")) == times for t in stage.trainers), 90)  # noqa: B023
        if times < 3:
            wait_until(lambda: all(len(t.words("loaded")) > times for t in stage.trainers), 90)  # noqa: B023
    assert stage.codes() == [0] * len(stage.trainers), stage.logs()


def test_kills_lose_no_sample_and_count_none_twice(launch):
    job = launch("counting.py", 3)
    stage = job.start(2, *out(job, "--snapshot_steps", "3"))
    stage.go()
    stage.wait_step(2)
    stage.trainers[1].process.send_signal(signal.SIGKILL)
    assert stage.codes() == [75, -signal.SIGKILL], stage.logs()
    # The survivor wrote the state of its last committed step, whatever the interval is.
    survivor = job.newest()
    assert survivor[1] >= stage.trainers[0].words("step")[-1]["step"]

    stage = job.start(3, *out(job, "--snapshot_steps", "3"), restore_from=survivor)
    stage.go()
    stage.wait_step(survivor[1] + 2)
    stage.trainers[0].process.send_signal(signal.SIGKILL)  # the one that makes snapshots
    assert stage.codes() == [-signal.SIGKILL, 75, 75], stage.logs()
    last_said = stage.trainers[0].words("step")[-1]["step"]
    assert job.newest()[0] == 2
    assert job.newest()[1] >= last_said - 3, "at most an interval is lost"

    # Only one rank is on the node that holds the segment: it broadcasts to the other.
    stage = job.start(2, *out(job), restore_from=job.newest(), give_to=[1])
    stage.go()
    finish(stage)
    newest = stage.trainers[0].words("step")[-1]
    assert (newest["metrics"]["epoch"], newest["metric_epochs"]) == (2, {"epoch": 3})


def test_the_best_checkpoint_outlives_changes_kills_and_retention(launch):
    job = launch("counting.py", 3)
    folder = job.folder / "ckpt"
    args = out(job, "--best", "--checkpoint", str(folder), "--save_steps", "2", "--keep", "1")
    stage = job.start(2, *args)
    stage.go()
    kept = "best/accuracy/stage_00000001/step_0000000014"  # two epochs of seven steps
    wait_until((folder / kept / "manifest.json").exists, 120)
    stage.wait_step(15)
    assert not (folder / "best/accuracy/stage_00000001/step_0000000007").exists()
    stage.trainers[0].process.send_signal(signal.SIGKILL)
    assert stage.codes() == [-signal.SIGKILL, 75], stage.logs()
    stage = job.start(1, *args, restore_from=job.newest())
    stage.go()
    stage.wait_step(17)
    stage.cut()
    restore_from = (stage.number, stage.drained())
    stage.end()
    stage = job.start(3, *args, restore_from=restore_from)
    stage.go()
    finish(stage)
    for trainer in stage.trainers:  # the last epoch's value is not the best one
        assert f'[2, 0.9, 1, 14, "{kept}"]' in trainer.log.read_text()
    store = CheckpointStore(open_storage(str(folder)))
    assert [each.step for each in store.found()] == [21]
    newest = store.load_newest()
    assert newest is not None
    assert [(each.metric, each.value, each.step) for each in newest[0].status.best] == [
        ("accuracy", 0.9, 14)
    ]
    best = CheckpointStore(open_storage(str(folder / "best" / "accuracy"))).load_newest()
    assert best is not None
    assert (best[0].status.step, best[0].status.best) == (14, newest[0].status.best)
    spec = next(each for each in best[0].layout.specs if each.name == "model/seen")
    seen = np.frombuffer(best[0].data, np.float64, 203, spec.offset)
    assert (seen == 2).all(), "the model as it was evaluated"


def test_ranks_that_make_their_own_seeds_are_refused_at_a_fresh_start_and_none_hangs(launch):
    job = launch("counting.py", 2)
    stage = job.start(2, *out(job, "--own_seed"))
    assert stage.codes() == [1, 1], stage.logs()
    first, second = (trainer.process.pid for trainer in stage.trainers)
    text = f"UsageError: seed: rank 1 was told {second}, rank 0 {first}; every trainer has to pass"
    assert stage.logs().count(text) == 2, stage.logs()
    assert not (job.run_dir / "ledger.jsonl").exists()


def test_loops_of_a_script_with_one_folder_of_checkpoints_are_refused(launch, tmp_path: Path):
    """The second one would go on from the first one's state, and the stage's number be too low."""
    job = launch("again.py", 1)
    stage = job.start(1, "--out", str(job.folder), "--checkpoint", str(tmp_path / "checkpoint"))
    stage.go()
    assert stage.codes() == [1], stage.logs()
    assert "checkpoint' is that of a loop before in this script" in stage.logs()


def test_two_loops_that_take_turns_are_told_so(launch):
    job = launch("again.py", 1)
    stage = job.start(1, "--out", str(job.folder), "--in_turn")
    stage.go()
    wait_until(lambda: len(stage.trainers[0].words("loaded")) == 2, 90)
    stage.go()
    assert stage.codes() == [1], stage.logs()
    assert "UsageError: two loops at once: the script has made another one since" in stage.logs()


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("--own_target", "UsageError: a model beside the loop's has not the same values on all"),
        ("--own_table", "UsageError: constants of the model: entry 0 of rank 1 is 'table of layer"),
    ],
)
def test_what_each_rank_has_drawn_for_itself_before_the_loop_is_refused(launch, flag, text):
    job = launch("counting.py", 2)
    stage = job.start(2, *out(job, flag))
    if flag == "--own_target":
        stage.go()
    assert stage.codes() == [1, 1], stage.logs()
    assert stage.logs().count(text) == 2, stage.logs()


def test_a_script_that_differs_between_nodes_is_told(launch, tmp_path: Path):
    job = launch("counting.py", 2)
    other = tmp_path / "other" / "counting.py"
    other.parent.mkdir()
    other.write_text(job.script.read_text() + "# as of yesterday\n")
    of_rank_1 = f'[ "$PADDLE_TRAINER_ID" = 0 ] || set -- "$1" "{other}" "${{@:3}}"; exec "$@"'
    stage = job.start(2, *out(job, step_s=0.0), prefix=("bash", "-c", of_rank_1, "ranks"))
    stage.go()
    assert stage.codes() == [0, 0], stage.logs()
    text = "not the same on all trainers, which train a mix of both: counting.py. Have the same"
    assert stage.logs().count(text) == 1


def test_what_each_process_has_drawn_for_the_script_is_told(launch):
    job = launch("counting.py", 2)
    stage = job.start(2, *out(job, "--own_features", step_s=0.05))
    stage.go()
    stage.wait_step(3)
    stage.cut()
    restore_from = (stage.number, stage.drained())
    stage.end()
    assert "of the script, features: not the same on all trainers" in stage.logs()
    stage = job.start(1, *out(job, "--own_features"), restore_from=restore_from)
    stage.go()
    finish(stage)
    assert stage.logs().count("of the script, features: not the same as where the state of") == 1


@pytest.mark.parametrize("is_relative", [False, True])
def test_a_folder_of_checkpoints_that_each_process_makes_anew_is_told(
    launch, tmp_path: Path, is_relative
):
    """As one with the time of the start in its name: no later start would go on from there.

    Or a path that is relative to such a folder, to which Hydra changes.
    """
    job = launch("counting.py", 1)
    folders = [str(tmp_path / name) for name in ("10-15-01", "10-15-09")]
    paths, within = folders, list[tuple[str, ...]]([(), ()])
    if is_relative:
        paths = ["ckpt", "ckpt"]
        within = [("env", "-C", each) for each in folders]
        for each in folders:
            Path(each).mkdir()
        folders = [f"{each}/ckpt" for each in folders]
    stage = job.start(1, *out(job, "--checkpoint", paths[0], step_s=0.05), prefix=within[0])
    stage.go()
    stage.wait_step(3)
    stage.cut()
    restore_from = (stage.number, stage.drained())
    stage.end()
    stage = job.start(
        1, *out(job, "--checkpoint", paths[1]), restore_from=restore_from, prefix=within[1]
    )
    stage.go()
    finish(stage)
    text = f"checkpoint: {folders[1]} here, and {folders[0]} in the process that made the state"
    assert stage.logs().count(text) == 1


def test_an_edited_seed_is_refused_while_the_change_can_be_called_off_and_the_old_go_on(launch):
    job = launch("counting.py", 2)
    old = job.start(1, *out(job))
    old.go()
    old.wait_step(1)
    old.cut()
    old.drained()  # so that it does not end before the other one has been started
    new = job.start(1, *out(job, "--own_seed"), overlaps=True)
    assert new.codes() == [1], new.logs()
    edited = new.trainers[0].process.pid
    assert f"this script says {edited}; continue with seed=0, or start afresh" in new.logs()
    assert not new.trainers[0].words("prepared")
    old.resume()
    finish(old)


@pytest.mark.parametrize("overlaps", [True, False])
def test_batches_that_a_policy_makes_larger_than_the_data_are_refused_and_the_old_go_on(
    launch, overlaps
):
    job = launch("counting.py", 2)
    args = out(job, "--policy", "linear", "--drop_last", "--samples", "40", step_s=2.0)
    old = job.start(1, *args)
    old.go()
    old.wait_step(1)
    old.cut()
    state = (1, old.drained())
    new = job.start(2, *args, overlaps=overlaps, restore_from=None if overlaps else state)
    assert new.codes() == [1, 1], new.logs()
    text = "policy: with 2 trainers a batch has 64 samples, and an epoch 40, of which drop_last"
    assert text in new.logs()
    assert not any(each.words("prepared") or each.words("loaded") for each in new.trainers)
    old.resume()
    assert old.codes() == [0], old.logs()
    assert verify([str(job.run_dir)]) == 0


def test_what_a_script_draws_in_an_epoch_before_its_steps_stays_through_changes_and_crashes(launch):
    job = launch("counting.py", 2)
    args = out(job, "--draws")
    old, new = prepared_beside(job, *args, step=2)
    old.cut()
    new.commit((1, old.drained()))
    new.wait_step(9)
    new.trainers[1].process.kill()
    assert new.codes() == [75, -signal.SIGKILL], new.logs()
    old.end()
    finish_anew(job, job.newest(), *args)
    drawn = [{*(job.folder / f"drawn.{epoch}").read_text().split()} for epoch in range(3)]
    assert [len(each) for each in drawn] == [1, 1, 1], drawn
    assert len(set.union(*drawn)) == 3


@pytest.mark.parametrize(("step", "reads"), [(2, True), (8, True), (8, False)])
def test_what_an_epochs_body_reads_of_the_model_is_read_when_the_state_is_there(
    launch, step, reads
):
    job = launch("counting.py", 2)
    args = out(job, *["--reads"] * reads)
    old, new = prepared_beside(job, *args, step=step)  # amid the first epoch, or the second
    old.cut()
    newest = 1, old.drained()
    new.commit(newest)
    finish(new)
    old.end()
    epoch, amid = divmod(newest[1], 7)
    text = "the script takes tensors of the model"
    assert (f"epoch 0, step 0: {text}" in old.logs()) == reads
    assert (f"epoch {epoch}, step {amid}: {text}" in new.logs()) == reads
    assert reads or text not in new.logs()


def test_another_thread_than_the_one_that_made_the_loop_may_train_by_it(launch):
    job = launch("counting.py", 2)
    old, new = prepared_beside(job, *out(job, "--made_in_thread", "--reads"), step=8)
    old.cut()
    newest = 1, old.drained()
    new.commit(newest)
    finish(new)
    old.end()
    assert "the script takes tensors of the model" in new.logs()


def test_a_thread_of_the_script_may_ask_loop_and_model_while_a_trainer_is_prepared(launch):
    job = launch("counting.py", 2)
    old, new = prepared_beside(job, *out(job, "--watches"))
    old.cut()
    new.commit((1, old.drained()))
    finish(new)
    old.end()
    assert "the script takes tensors of the model" not in new.logs()


@pytest.mark.parametrize("flags", [(), ("--asks",)], ids=["alone", "a thread asks the loop"])
def test_who_has_drawn_for_another_epoch_before_its_state_came_is_started_again(launch, flags):
    job = launch("counting.py", 2)
    args = out(job, "--draws", *flags)
    old, new = prepared_beside(job, *args, step=8)  # amid the next epoch
    old.cut()
    new.commit((1, old.drained()))
    assert new.codes() == [1, 1], new.logs()
    assert new.logs().count("it is epoch 1, not 0 as when the trainers were prepared") == 2
    old.end()
    finish_anew(job, job.newest(), *args)


@pytest.mark.parametrize("all_reduce", ["flat", "overlapped"])
def test_a_rank_that_dies_before_its_update_costs_the_step_in_flight_only(launch, all_reduce):
    job = launch("counting.py", 2)
    # What the script does before the update is done again: a scheduler has not stepped yet.
    flags = ("--turn", "--fail_at", "5", "--snapshot_steps", "100", "--all_reduce", all_reduce)
    stage = job.start(2, *out(job, *flags, step_s=0.03))
    stage.go()
    assert stage.codes() == [75, -signal.SIGKILL], stage.logs()
    assert job.newest() == (1, 5)
    finish_anew(job, (1, 5), *out(job, "--turn"))


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("attribute", ""),
        ("buffer", "tally of the model"),
        ("parameter", "kept of the model"),
        ("extra", "extra={'tally': ...}, its steps"),
    ],
)
def test_what_a_script_does_above_the_shards_of_a_step_is_not_done_twice_after_a_crash(
    launch, what, named
):
    job = launch("counting.py", 2)
    flags = ("--tally", what, "--fail_at", "5", "--snapshot_steps", "100")
    stage = job.start(2, *out(job, *flags, step_s=0.03))
    stage.go()
    assert stage.codes() == [75, -signal.SIGKILL], stage.logs()
    newest = job.newest()
    if named:
        assert newest < (1, 5), "its state after step 5 is not there any more"
        assert f"the step that is lost has changed {named} before its update" in stage.logs()
    else:
        assert newest == (1, 5)
    finish_anew(job, newest, *out(job, "--tally", what))


def test_a_trainer_that_is_told_to_end_puts_its_last_step_away_first(launch):
    job = launch("counting.py", 2)
    flags = out(job, "--snapshot_steps", "100", "--workers", "1")
    stage = job.start(2, *flags)
    stage.go()
    stage.wait_step(3)
    stage.trainers[0].process.send_signal(signal.SIGTERM)
    stage.trainers[0].end_workers()
    assert stage.codes() == [75, 75], stage.logs()
    left = job.newest()
    assert left[1] >= stage.trainers[0].words("step")[-1]["step"]
    finish_anew(job, left)


def test_a_script_that_stops_its_training_when_it_is_told_to_end_ends_its_trainer_only(launch):
    """As a survivor of a crash is told to, by a signal that means the whole job on a spot VM."""
    job = launch("counting.py", 2)
    flags = out(job, "--own_sigterm", "--snapshot_steps", "2")
    stage = job.start(2, *flags)
    stage.go()
    stage.wait_step(3)
    survivor, other = (each.process for each in stage.trainers)
    survivor.send_signal(signal.SIGTERM)
    wait_until(lambda: "loop.stop() after SIGTERM is left out" in stage.logs(), 120)
    other.send_signal(signal.SIGKILL)
    assert stage.codes() == [75, -signal.SIGKILL], stage.logs()
    finish_anew(job, job.newest(), *flags)


def test_a_script_may_begin_one_training_after_the_other_and_keeps_nothing_of_it_open(launch):
    job = launch("again.py", 2)
    stage = job.start(2, "--out", str(job.folder))
    finish_all_three(stage)
    for rank in (0, 1):
        first, second, third = json.loads((job.folder / f"open.{rank}").read_text())
        assert third <= second <= first + 1, (first, second, third)
    assert "of the script" not in stage.logs()  # the last batch of each is its own


def test_what_the_second_training_of_a_script_left_is_not_what_the_first_one_goes_on_from(launch):
    job = launch("again.py", 2)
    args = "--out", str(job.folder), "--step_s", "0.3"
    step = cut_in_second_training(job, 2, *args)
    stage = job.start(2, *args, restore_from=(1, step))
    finish_all_three(stage)
    assert json.loads((job.folder / "began.0").read_text()) == [0, step - AGAIN_STEPS, 0]


def test_a_later_training_of_a_script_goes_on_from_memory(launch, tmp_path: Path):
    job = launch("again.py", 2)
    args = "--out", str(job.folder), "--step_s", "0.5", "--folders", str(tmp_path / "ckpt")
    step = cut_in_second_training(job, 1, *args)
    stage = job.start(2, *args, restore_from=(1, step))
    finish_all_three(stage)
    began = json.loads((job.folder / "began.0").read_text())
    assert began == [AGAIN_STEPS, step - AGAIN_STEPS, 0]
    for trainer in stage.trainers:
        said = [each["step"] for each in trainer.words("done")]
        assert said == [AGAIN_STEPS, 2 * AGAIN_STEPS, 3 * AGAIN_STEPS]
        said = [each["step"] for each in trainer.words("loaded")]
        assert said == [0, step, 2 * AGAIN_STEPS], "one that is complete takes no step back"
    assert "falling back to checkpoints" not in stage.logs()


def test_a_training_behind_the_one_whose_state_is_lost_misses_no_state(launch, tmp_path: Path):
    job = launch("again.py", 2)
    args = "--out", str(job.folder), "--folders", str(tmp_path / "ckpt")
    step = cut_in_second_training(job, 1, *args, "--step_s", "0.3")
    stage = job.start(1, *args, restore_from=(1, step), give_to=[])
    finish_all_three(stage)
    assert json.loads((job.folder / "began.0").read_text()) == [AGAIN_STEPS, 0, 0]
    assert stage.logs().count("falling back to checkpoints") == 2, "of the first, and the second"


def test_a_trainer_that_waits_for_a_frozen_peer_ends_when_it_is_told_to_and_loses_nothing(launch):
    job = launch("counting.py", 2)
    stage = job.start(2, *out(job, "--snapshot_steps", "100"))
    stage.go()
    stage.wait_step(3)
    waiting, frozen = (trainer.process for trainer in stage.trainers)
    frozen.send_signal(signal.SIGSTOP)  # its connections stay, so nobody is told that it is gone

    def is_stuck() -> bool:  # in the framework, where Python handles no signal
        before = stage.trainers[0].words("step")[-1]
        time.sleep(1.0)
        return bool(stage.trainers[0].words("step")[-1] == before)

    wait_until(is_stuck, 120)
    waiting.send_signal(signal.SIGTERM)
    assert waiting.wait(20) == 75, stage.logs()  # gloo would give the peer up after 30 s
    left = job.newest()
    assert left[1] >= stage.trainers[0].words("step")[-1]["step"]
    stage.end()
    finish_anew(job, left)


def test_a_crash_goes_back_to_the_checkpoint_that_is_newer_than_what_memory_holds(
    launch, tmp_path: Path
):
    job = launch("counting.py", 2)
    args = out(job, "--checkpoint", str(tmp_path / "ckpt"), "--save_steps", "1", "--keep", "1")
    stage = job.start(2, *args)
    stage.go()
    stage.wait_step(1)
    stage.cut()
    old = stage.drained()
    stage.end()
    stage = job.start(2, *args, restore_from=(1, old))
    stage.go()
    store = CheckpointStore(open_storage(str(tmp_path / "ckpt")))
    wait_until(lambda: (newest := store.newest_whole()) is not None and newest.stage == 2, 60)
    stage.end()
    job.close_segments(2)  # as if there had been no memory for its snapshots
    written = store.newest_whole()
    assert written is not None
    assert written.step > old
    stage = job.start(2, *args, restore_from=(1, old))
    stage.go()
    assert {said["step"] for said in stage.wait_all("loaded")} == {written.step}
    finish(stage)


def test_rank_0_says_why_no_state_is_written_until_one_is(launch, tmp_path: Path):
    job = launch("counting.py", 2)
    more = ("--padding", "200000", "--checkpoint", str(tmp_path / "ckpt"), "--save_steps", "1",
            "--epochs", "100000", "--step_s", "0.02")  # fmt: skip
    limit = ("bash", "-c", 'ulimit -S -f 1000 && exec "$@"', "limit")  # a checkpoint has 1.6 MB
    stage = job.start(2, *out(job, *more), prefix=limit)
    stage.go()
    stage.wait_step(1)
    writer, other = stage.trainers

    def newest() -> str:
        return str(writer.words("step")[-1].get("checkpoint_error"))

    both = "checkpoint of step .* failed, .*File too large.*; no room for a snapshot .*ulimit"
    wait_until(lambda: re.search(both, newest()), 60)
    none = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.prlimit(writer.process.pid, resource.RLIMIT_FSIZE, none)
    wait_until(lambda: newest() == "", 60)
    assert {said.get("checkpoint_error") for said in other.words("step")} == {None}
    stage.end()


def test_parked_trainers_go_on_when_the_cut_is_off(launch):
    job = launch("counting.py", 3)
    stage = job.start(2, *out(job))
    stage.go()
    stage.wait_step(1)
    stage.cut(1, ranks=[1])  # its peer parks by its flag
    step = stage.drained()
    assert [said["id"] for said in stage.wait_all("drained")] == [1, 1]
    assert (1, step) in slots_of(job, 1)
    assert job.newest() == (1, step)
    for rank in (0, 1):
        noted = (job.folder / f"noted.1.{rank}").read_text().split()
        assert noted == [str(number) for number in range(step)], "who parks may be killed there"
    stage.resume(1)
    stage.wait_step(step + 1)
    stage.cut(2)
    stage.resume(2)  # off before or after they park: either way nobody stays
    finish(stage)


def test_a_cut_while_a_rank_waits_for_data_voids_the_step_and_redoes_it(launch, tmp_path: Path):
    gate = tmp_path / "gate"
    gate.touch()
    job = launch("counting.py", 2)
    args = out(job, "--starve", str(gate), step_s=0.0)
    stage = job.start(2, *args)
    stage.go()
    begun = [job.folder / f"begun.{rank}.2" for rank in (0, 1)]  # the first two are committed
    wait_until(lambda: all(path.exists() for path in begun), 90, stage.logs())
    stage.cut(1)
    assert stage.drained() == 2, "the step that waits for data is not committed"
    assert job.newest() == (1, 2)
    stage.resume(1)  # the change was abandoned: the wait goes on, and the step is done after all
    stage.cut(2)
    wait_until(lambda: all(len(t.words("drained")) == 2 for t in stage.trainers), 60)
    assert stage.drained() == 2
    stage.end()
    gate.unlink()
    finish_anew(job, (1, 2), *args)


@pytest.mark.parametrize("what", ["evaluate", "save_best"])
def test_what_only_one_trainer_calls_is_refused_by_name(launch, what: str):
    job = launch("counting.py", 2)
    checkpoint = ("--checkpoint", str(job.folder / "ckpt"))
    stage = job.start(2, *out(job, "--only_rank_0", what, *checkpoint, step_s=0.0))
    stage.go()
    assert stage.codes() == [1, 1], stage.logs()
    for trainer in stage.trainers:
        text = trainer.log.read_text()
        assert f"loop.{what}: 1 of 2 trainers have come there, 1 to the end of an epoch" in text


def test_a_cut_during_evaluation_parks_there_and_evaluates_again_afterwards(launch, tmp_path: Path):
    gate = tmp_path / "gate"
    gate.touch()
    job = launch("counting.py", 2)
    args = out(job, "--evaluate_while", str(gate), step_s=0.0)
    stage = job.start(2, *args)
    stage.go()
    wait_until(lambda: (job.folder / "evaluating.1.1").exists(), 90, stage.logs())
    stage.cut(1)
    assert stage.drained() == 7
    stage.resume(1)  # goes on amid the evaluation
    stage.cut(2, durable=True)
    wait_until(lambda: all(len(t.words("drained")) == 2 for t in stage.trainers), 60)
    stage.end()
    stage = job.start(1, *args, restore_from=(1, 7))
    stage.go()
    wait_until(lambda: (job.folder / "evaluating.2.0").exists(), 90, stage.logs())
    gate.unlink()
    finish(stage)


def test_pausing_leaves_a_checkpoint_that_another_job_continues(launch, tmp_path: Path):
    path = tmp_path / "checkpoint"
    job = launch("counting.py", 2)
    more = ("--checkpoint", str(path), "--workers", "1")
    stage = job.start(2, *out(job, *more))
    stage.go()
    stage.wait_step(1)
    stage.cut(1, durable=True, halt="pause")
    step = stage.drained()
    stage.end()
    fd = job.segments[1][-1]  # as the shim that outlives them
    header = read_newest(fd)
    assert header is not None
    assert write_state(fd, header.stamp, spare=False, report=lambda _: None) == (str(path), False)
    newest = CheckpointStore(open_storage(path)).load_newest()
    assert newest is not None
    assert newest[0].status.step == step

    # The job keeps its place while it is paused, unless another one is told to replace it.
    refused = launch("counting.py", 2, "refused")
    refused.job_id, refused.submitted_at = "another", 2.0
    stage = refused.start(1, *out(refused, *more))  # its number is too low as well
    assert stage.codes() == [1]
    assert "which is paused; this is job another of " in stage.logs()

    # A job that begins its numbers anew is told so, instead of writing behind what is there.
    other = launch("counting.py", 2, "other")
    other.job_id, other.submitted_at, other.take_over = "other", 3.0, True
    stage = other.start(1, *out(other, *more), number=1)
    wait_until(lambda: stage.trainers[0].words("stage_too_low"), 60, stage.logs())
    assert stage.trainers[0].words("stage_too_low")[0]["highest_stage"] == 1
    stage.end()
    stage = other.start(1, *out(other, *more), number=2)
    assert stage.wait_all("loaded")[0]["step"] == step
    stage.go()
    finish(stage)
    assert verify([str(path)]) == 0


def test_training_goes_on_without_room_for_snapshots_and_drains_to_disk(launch, tmp_path: Path):
    path = tmp_path / "checkpoint"
    job = launch("counting.py", 1)
    more = ("--padding", "200000", "--checkpoint", str(path), "--samples", "203")
    # 1.6 MB of state: two slots of it go over the limit, a checkpoint does not.
    limit = ("bash", "-c", 'ulimit -f 2500 && exec "$@"', "limit")
    stage = job.start(1, *out(job, *more), prefix=limit)
    stage.go()
    stage.wait_step(1)
    stage.cut(1)
    step = stage.drained()
    log = stage.trainers[0].log.read_text()
    assert "no room for a snapshot segment of" in log
    assert "ulimit -f" in log
    assert job.segments == {}
    stage.end()
    stage = job.start(1, *out(job, *more))
    assert stage.wait_all("loaded")[0]["step"] == step
    stage.go()
    finish(stage)


def test_prepared_trainers_take_over_with_workers_and_a_later_state_than_the_server_knew(launch):
    job = launch("counting.py", 2)
    flags = out(job, "--workers", "1", "--snapshot_steps", "1")
    old = job.start(1, *flags)
    new = job.start(2, *flags, overlaps=True)
    new.wait_all("prepared")
    assert not new.trainers[0].words("step"), "a warm-up step is no step"
    old.go()
    old.wait_step(3)
    old.end()  # killed amid the training: its segment knows more than what was told
    reached = max(step for _, step in slots_of(job, 1))
    new.commit((1, reached - 1))
    assert {said["step"] for said in new.wait_all("loaded")} == {reached}
    finish(new)


def test_trainers_that_take_over_a_complete_training_make_no_epoch_more(launch, tmp_path: Path):
    # As where the last checkpoint takes long, or its disk is full. They have begun an epoch's body
    # before they have the state, and come to what follows its steps.
    path = tmp_path / "checkpoint"
    job = launch("ended.py", 2)
    flags = ("--out", str(job.folder), "--checkpoint", str(path))
    old = job.start(1, *flags)
    new = job.start(2, *flags, overlaps=True)
    new.wait_all("prepared")
    old.go()
    wait_until(lambda: "its last checkpoint is not written" in old.logs(), 60, old.logs())
    old.cut()
    new.commit((1, old.drained()))
    new.wait_all("loaded")
    wait_until(lambda: "its last checkpoint is not written" in new.logs(), 60, new.logs())
    path.unlink()
    (job.folder / "away").rename(path)
    assert new.codes() == [0, 0], new.logs()
    old.end()
    assert (job.folder / "told.1.0").read_text().split("\n")[-2] == "2 2 4 4"
    assert (job.folder / "told.2.0").read_text() == "2 2 4 0\n", "the last epoch, as after a crash"
    found = CheckpointStore(open_storage(path)).load_newest()
    assert found is not None
    host_state, _made = found
    (spec,) = (each for each in host_state.layout.specs if each.name == "extra/average/epochs")
    data = np.frombuffer(host_state.data, np.uint8)[spec.offset : spec.offset + spec.size_bytes]
    assert data.view(np.float32).tolist() == [3.0]


def test_a_second_loop_of_a_script_does_not_begin_from_what_the_first_one_did(launch):
    job = launch("again.py", 2)
    old = job.start(1, "--out", str(job.folder))
    new = job.start(2, "--out", str(job.folder), overlaps=True)
    new.wait_all("prepared")
    old.wait_all("loaded")
    old.cut()
    new.commit((1, old.drained()), local_on_all_nodes=True)
    new.wait_all("done")
    job.close_segments(1)  # as shims do after the first snapshot of the next stage

    def have_said(word: str, times: int) -> bool:
        return all(len(trainer.words(word)) == times for trainer in new.trainers)

    for times in (2, 3):
        wait_until(lambda: have_said("loaded", times), 60, new.logs())  # noqa: B023
        for trainer in new.trainers:
            trainer.tell(do="go")
    assert new.codes() == [0, 0], new.logs()
    old.end()


def test_a_state_that_a_node_has_lost_since_it_was_told_of_is_not_trained_without(launch):
    old, new = prepared_beside(launch("counting.py", 2))
    old.cut()
    new.commit((1, old.drained()), give_to=[0], local_on_all_nodes=True)
    wait_until(lambda: new.trainers[1].process.poll() is not None, 60)
    assert new.trainers[1].process.returncode not in (0, None)
    assert "this node has lost" in new.trainers[1].log.read_text()
    assert not new.trainers[1].words("loaded")


def test_what_was_loaded_ahead_of_the_commit_is_not_loaded_again(launch):
    old, new = prepared_beside(launch("counting.py", 2))
    old.cut(1)
    new.preview(old.drained())
    old.resume(1)  # the change is put off: what was loaded is not what it begins from
    old.wait_step(old.drained() + 1)
    old.cut(2)
    wait_until(lambda: len(old.trainers[0].words("drained")) == 2, 60)
    step = old.drained()
    new.preview(step)
    new.commit((1, step), give_to=[], local_on_all_nodes=True)  # it has nothing else to begin from
    assert {said["step"] for said in new.wait_all("loaded")} == {step}
    old.end()
    finish(new)


@pytest.mark.parametrize(
    ("flags", "warmups"), [((), 1), (("--reader",), 0)], ids=["samples", "reader"]
)
def test_a_script_that_asks_in_its_warmup_step_gets_answers_of_the_real_stage(
    launch, flags, warmups
):
    job = launch("asking.py", 2)
    old = job.start(1, *out(job, *flags))
    new = job.start(2, *out(job, *flags), overlaps=True)
    new.wait_all("prepared")
    old.go()
    old.wait_step(3)
    old.cut()
    step = old.drained()
    new.commit((1, step))
    finish(new)
    old.end()
    for rank in (0, 1):
        told = (job.folder / f"told.2.{rank}").read_text().split()
        assert told[0] == str(step), "the number of the step that is made next"
        # What a reader adds to the samples is unknown in a warm-up step.
        assert len(told) == STEPS - step + warmups, "each step once, and the warm-up step"
