"""Trainers that stay form the next stage's group and go on in it. Real processes over gloo."""

import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pod_runtime.trainer.membership.next_group import MOST_GROUPS
from pod_runtime.trainer.progress.ledger_check import check_ledger
from pod_runtime.verify import main as verify
from pod_runtime.verify import read_ledger
from tests.pod_runtime.trainer.fake_launcher import FakeLauncher, Stage
from tests.support import wait_until

pytestmark = pytest.mark.timeout(400)


class Training:
    """A counting model that trains until it is told to end."""

    def __init__(self, job: FakeLauncher, *more: str) -> None:
        self.job = job
        self.until = job.folder / "until"
        # Short epochs: one is over soon after the end was asked for.
        args = f"--out {job.folder} --until {self.until} --epochs 100000 --step_s 0.03 --samples 70"
        self.args = (*args.split(), *more)

    def start(self, world_size: int, **options: object) -> Stage:
        stage = self.job.start(world_size, *self.args, **options)  # type: ignore[arg-type]
        stage.go()
        return stage

    def start_and_step(self, world_size: int) -> Stage:
        stage = self.start(world_size)
        stage.wait_step(1)
        return stage

    def join(self, old: Stage, ranks: list[int | None], **options: object) -> Stage:
        return self.job.join(old, ranks, *self.args, **options)  # type: ignore[arg-type]

    def change(
        self, old: Stage, ranks: list[int | None], give_to: list[int] | None = None
    ) -> Stage:
        """Go on with these ranks of `old`, and new ones, as the server would have it."""
        new = self.join(old, ranks)
        new.wait_prepared()
        old.cut(patient=True)
        step = old.drained()
        new.commit((old.number, step), give_to, local_on_all_nodes=give_to is None)
        new.wait_step(step + 2)
        stayed = {trainer.process.pid for trainer in new.stayed.values()}
        for trainer in old.trainers:
            if trainer.process.pid not in stayed:
                trainer.process.kill()
        return new

    def finish(self, stage: Stage) -> None:
        """Every sample counts as often as every other one, by the model and by the ledger."""
        self.until.touch()
        assert stage.codes() == [0] * len(stage.trainers), stage.logs()
        (count,) = np.unique(np.load(self.job.folder / "counts.npy"))
        assert count >= 1
        assert verify([str(self.job.run_dir)]) == 0
        assert check_ledger(*read_ledger(str(self.job.run_dir))).undrawn == (), (
            "nothing is taken on trust"
        )


@pytest.fixture
def training(launch: Callable[..., FakeLauncher]) -> Callable[..., Training]:
    return lambda shards, *more: Training(launch("counting.py", shards), *more)


def test_trainers_come_and_go_rank_0_too_and_those_that_stay_keep_their_process(training):
    made = training(3)
    stage = made.start_and_step(1)
    first = stage.trainers[0].process.pid
    stage = made.change(stage, [0, None, None], give_to=[1])  # rank 2 is on another node
    assert stage.trainers[0].process.pid == first
    second = stage.trainers[1].process.pid
    stage = made.change(stage, [2, 1])  # rank 0 leaves
    assert stage.trainers[1].process.pid == second
    stage = made.change(stage, [1])
    assert stage.trainers[0].process.pid == second
    made.finish(stage)


def test_those_that_stay_have_the_state_and_who_comes_new_wants_it_from_its_node(training):
    made = training(3)
    stage = made.start_and_step(2)
    new = made.join(stage, [1, 0, None])
    new.wait_prepared()
    stage.cut(patient=True)
    new.commit((stage.number, stage.drained()), give_to=[], local_on_all_nodes=True)
    comes = new.trainers[2]
    wait_until(lambda: comes.process.poll() is not None, 60)
    assert "this node has lost" in comes.log.read_text()
    wait_until(lambda: all(trainer.words("loaded") for trainer in new.trainers[:2]), 60)


def test_who_comes_new_with_an_edited_script_trains_with_nobody(training):
    made = training(2)
    stage = made.start_and_step(1)
    new = made.job.join(stage, [0, None], *made.args, "--save_steps", "7")
    new.wait_prepared()
    stage.cut(patient=True)
    new.commit((stage.number, stage.drained()), local_on_all_nodes=True)
    comes = new.trainers[1]
    assert comes.process.wait(60) == 1
    text = "save_steps: rank 1 was told 7, rank 0 1000, as all that stay; was the script edited"
    assert text in comes.log.read_text()
    assert new.trainers[0].process.wait(60) == 75


def test_who_comes_new_does_not_evaluate_what_the_others_have_behind_them(training):
    """Above the steps: it met a step's exchange, and aborted."""
    made = training(2, "--evaluates_first", "--samples", "6400")  # 200 steps follow
    stage = made.start_and_step(1)
    new = made.join(stage, [0, None])
    new.wait_prepared()
    stage.cut(patient=True)
    step = stage.drained()
    new.commit((stage.number, step), local_on_all_nodes=True)
    comes = new.trainers[1]
    assert comes.process.wait(60) == 1
    text = f"loop.evaluate: this trainer joins others after step {step - 1}, and its"
    assert text in comes.log.read_text()
    assert new.trainers[0].process.wait(60) == 75
    again = made.job.start(2, *made.args, restore_from=made.job.newest())
    again.go()
    again.wait_step(step + 2)
    made.finish(again)


def test_a_change_that_is_off_costs_no_step_whatever_it_had_come_to(training):
    made = training(3)
    stage = made.start_and_step(2)
    begun = made.join(stage, [0, 1, None], env={"COUNTING_FAILS": "1"})
    assert begun.trainers[2].process.wait(60) == 1
    begun.drop()
    formed = made.join(stage, [1, 0])
    formed.wait_prepared()
    stage.cut(1, patient=True)
    step = stage.drained()
    formed.drop()
    stage.resume(1)
    stage.wait_step(step + 1)
    stage = made.change(stage, [1, 0])
    made.finish(stage)


@pytest.mark.slow
def test_a_process_stays_through_so_many_changes_and_then_says_that_it_will_not(training):
    made = training(2)
    stage = made.start_and_step(2)
    for _ in range(MOST_GROUPS):
        stage = made.change(stage, [1, 0])
    assert [said.get("stage") for said in stage.wait_all("cannot_join")] == [0, 0]
    made.join(stage, [0, 1])
    number = stage.number + 1
    wait_until(
        lambda: all(t.words("cannot_join")[-1].get("stage") == number for t in stage.trainers), 60
    )
    made.finish(stage)


def after_its_start(_old: Stage, _new: Stage) -> None:
    pass


def when_formed(_old: Stage, new: Stage) -> None:
    new.wait_prepared()


def when_parked(old: Stage, new: Stage) -> None:
    new.wait_prepared()
    old.cut(patient=True)
    old.drained()


def when_committed(old: Stage, new: Stage) -> None:
    when_parked(old, new)
    new.commit((old.number, old.drained()))


def after_a_step(old: Stage, new: Stage) -> None:
    when_committed(old, new)
    new.wait_step(old.drained() + 1)


MOMENTS = (after_its_start, when_formed, when_parked, when_committed, after_a_step)


def kill_and_recover(made: Training, moment: Callable[[Stage, Stage], None], victim: int) -> None:
    old = made.start(2)
    old.wait_step(2)
    new = made.join(old, [0, 1, None])
    moment(old, new)
    trainer = new.trainers[victim]
    trainer.process.send_signal(signal.SIGKILL)
    trainer.process.wait()
    committed = moment in (when_committed, after_a_step)
    if committed:  # all are of the stage that has crashed
        codes = [each.process.wait(90) for each in new.trainers]
        assert all(code in (75, -6, -9) for code in codes), new.logs()
    elif victim == 2:  # the new one: those that stay go on
        new.drop()
        old.resume(1)
        old.wait_step(old.drained() + 1 if moment is when_parked else 3)
    reached = made.job.newest()
    old.end()
    new.end()
    made.finish(made.start(3, restore_from=reached))


@pytest.mark.parametrize(("moment", "victim"), [(when_parked, 2), (when_committed, 0)])
def test_a_kill_amid_the_change_loses_no_sample(training, moment, victim):
    kill_and_recover(training(3), moment, victim)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_of_anybody_at_any_moment_loses_no_sample(training, moment, victim):
    kill_and_recover(training(3), moment, victim)


def test_a_cut_during_an_evaluation_has_it_made_again_by_those_of_the_next_stage(
    training, tmp_path: Path
):
    gate = tmp_path / "gate"
    gate.touch()
    made = training(2, "--slow", str(gate))
    stage = made.start(1)
    evaluates = made.job.folder / "evaluating.1.0"
    wait_until(evaluates.exists, 90, stage.logs())
    new = made.join(stage, [0, None])
    new.wait_prepared()
    stage.cut(patient=True)
    assert stage.drained() == 3, "the last step of the first epoch"
    new.commit((1, 3))
    gate.unlink()
    new.wait_step(5)
    made.finish(new)
    assert (made.job.folder / "evaluating.2.1").exists()


def test_a_cut_waits_for_an_evaluation_that_follows_a_best_checkpoint(training, tmp_path: Path):
    """Trainers that come new would make the checkpoint with those that stay, who evaluate."""
    gate = tmp_path / "gate"
    gate.touch()
    checkpoint = str(tmp_path / "checkpoint")
    made = training(2, "--slow", str(gate), "--best_first", "--checkpoint", checkpoint)
    stage = made.start(1)
    evaluates = made.job.folder / "evaluating.1.0"
    wait_until(evaluates.exists, 90, stage.logs())
    new = made.join(stage, [0, None])
    new.wait_prepared()
    stage.cut(patient=True)
    gate.unlink()
    step = stage.drained()
    assert step > 3, "the last step of the first epoch"
    new.commit((1, step))
    new.wait_step(step + 2)
    made.finish(new)
