"""Ranks of one node that write its snapshots together. Real processes over gloo."""

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from pod_runtime.segment_header import make_geometry, read_geometry, read_slots
from pod_runtime.trainer.layout import StateLayout, make_layout
from pod_runtime.trainer.membership import node_snapshots
from pod_runtime.trainer.membership.node_snapshots import NodeSnapshots
from pod_runtime.trainer.membership.state_manager import StateManager
from pod_runtime.trainer.progress.ledger import LEDGER_NAME, read_lines
from pod_runtime.trainer.progress.progress import TrainingProgress
from pod_runtime.trainer.state import snapshot
from tests.pod_runtime.trainer.fake_launcher import FakeLauncher, Stage
from tests.pod_runtime.trainer.membership.test_worlds import finish, out
from tests.pod_runtime.trainer.states import make_status
from tests.support import wait_until

pytestmark = pytest.mark.timeout(400)


def writers_and_steps(job: FakeLauncher, stage: Stage) -> list[tuple[int, set[int]]]:
    """Return, of each segment of the stage, how many write it and the steps in it."""
    found = []
    for fd in job.segments[stage.number]:
        geometry = read_geometry(fd)
        assert geometry is not None
        steps = {header.stamp.step for _slot, header in read_slots(fd)}
        found.append((geometry.writers, steps))
    return sorted(found, key=lambda each: each[0])


class Told:
    """The link of a trainer whose launcher takes everything."""

    def send(self, _message: Any, _fds: tuple[int, ...] = ()) -> None: ...


class Trained:
    """A state with nothing but a learning rate."""

    def __init__(self) -> None:
        self.rate = 0.1
        self.moved = ""

    def layout(self) -> StateLayout:
        return make_layout([("model/weight", "float32", (3,))])

    def copy_out(self, target: memoryview, start: int = 0, stop: int | None = None) -> None:
        target[start:stop] = bytes(len(target[start:stop]))

    def scalars(self, *, committed: bool) -> dict[str, Any]:
        assert committed, "the script may have set the rate for the next step"
        return {"lr": self.rate}

    def changed_in_step(self) -> str:
        return self.moved


def test_only_steps_that_are_in_a_snapshot_are_kept():
    status = make_status(step=3)
    trained: Any = Trained()
    group: Any = None  # a world of one
    link: Any = Told()
    progress = TrainingProgress(status, status.scaling, stage=2, steps_per_epoch=None)
    before = progress.cursor.global_step
    snapshots = NodeSnapshots(group, trained, progress, link, rank=0, nodes=[[0]])
    manager = StateManager(
        trained, progress, link=link, snapshots=snapshots, store=None, save_steps=100,
        snapshot_steps=None,
    )  # fmt: skip
    assert manager.kept_steps == 0
    snapshots.take(renew=True)
    for _ in range(4):
        progress.commit_step()
    assert manager.kept_steps == before, "a crash goes back to there"
    snapshots.take(renew=False)
    assert manager.kept_steps == before + 4
    snapshots.close()
    assert manager.kept_steps == before + 4, "without any, what is committed is kept by the others"


def test_a_rescue_leaves_the_state_of_a_step_as_it_was_when_the_step_had_ended():
    status = make_status(step=3)
    trained: Any = Trained()
    group: Any = None  # a world of one
    link: Any = Told()
    progress = TrainingProgress(status, status.scaling, stage=2, steps_per_epoch=None)
    snapshots = NodeSnapshots(group, trained, progress, link, rank=0, nodes=[[0]])

    def kept() -> Any:
        host_state = snapshots.host_state()
        return None if host_state is None else host_state.scalars["lr"]

    snapshots.take(renew=True)
    trained.rate = 0.5  # by the body of the next step, in which a peer is lost
    snapshots.rescue()
    assert kept() == 0.1
    progress.commit_step()
    assert kept() is None
    snapshots.rescue()
    assert kept() == 0.5
    trained.moved = "a buffer"
    progress.commit_step()
    snapshots.rescue()
    assert kept() is None, "the step before is what is left"
    newest = snapshots.complete
    assert newest is not None
    assert newest.step == progress.cursor.global_step - 1
    snapshots.close()


def test_a_rescue_takes_no_memory_that_the_next_trainers_need(monkeypatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(snapshot, "available_memory", lambda: 0)
    status = make_status(step=3)
    trained: Any = Trained()
    group: Any = None  # of two, of which the other will be gone
    link: Any = Told()
    progress = TrainingProgress(status, status.scaling, stage=2, steps_per_epoch=None)
    snapshots = NodeSnapshots(group, trained, progress, link, rank=0, nodes=[[0], [1]])
    snapshots.take(renew=True)
    before = snapshots.complete
    progress.commit_step()
    before_rescue = snapshots.can_rescue
    snapshots.rescue()
    assert before is None, "the stage has no snapshots"
    assert (before_rescue, snapshots.can_rescue) == (True, False)
    assert snapshots.complete == snapshots.now
    assert os.readlink(f"/proc/self/fd/{snapshots.fd}").startswith(f"{tmp_path}/")
    snapshots.close()


class Pair:
    """The exchange of rank 0 with rank 1, which has freed 1 MiB, and has nothing else to say."""

    def __init__(self) -> None:
        self.said = [1 << 20]

    def all_reduce(self, array: Any) -> None:
        array[1] += self.said.pop() if self.said else 0


@pytest.mark.parametrize(("left", "is_made"), [(3 << 20, True), ((3 << 20) - 4096, False)])
def test_a_segment_leaves_what_all_ranks_of_the_node_will_need_again(
    monkeypatch, left: int, is_made: bool
):
    status = make_status(step=3)
    trained: Any = Trained()
    group: Any = Pair()
    link: Any = Told()
    progress = TrainingProgress(status, status.scaling, stage=2, steps_per_epoch=None)
    snapshots = NodeSnapshots(group, trained, progress, link, rank=0, nodes=[[0, 1]])
    monkeypatch.setattr(node_snapshots, "freed_since_peak", lambda: 2 << 20)
    size = 0

    def available() -> int:
        return left + size

    def geometry(*args: int) -> Any:
        nonlocal size
        made = make_geometry(*args)
        size = made.total_bytes
        return made

    monkeypatch.setattr(snapshot, "make_geometry", geometry)
    monkeypatch.setattr(snapshot, "available_memory", available)
    snapshots.take(renew=True)
    assert (snapshots.complete is not None) == is_made
    snapshots.close()


def test_each_node_holds_whole_snapshots_of_the_same_steps_that_its_ranks_wrote(launch):
    job = launch("counting.py", 4)
    flags = ("--snapshot_steps", "2", "--padding", "5001")
    stage = job.start(4, *out(job, *flags), nodes="abaa")
    stage.go()
    stage.wait_step(5)
    stage.cut(1)
    step = stage.drained()
    one, three = writers_and_steps(job, stage)
    assert (one[0], three[0]) == (1, 3)
    assert one[1] == three[1], "all nodes hold the same steps"
    assert step in one[1]
    told = [said["step"] for said in stage.trainers[0].words("snapshot")]
    assert told == sorted(set(told)), "each is told once, when it is complete"
    assert told[-1] == step
    assert not stage.trainers[2].words("snapshot"), "one of a node speaks for all"
    assert [t.words("segment") != [] for t in stage.trainers] == [True, True, False, False]
    stage.end()

    stage = job.start(3, *out(job, *flags), restore_from=(1, step), give_to=[0, 2], nodes="aba")
    stage.go()
    finish(stage)
    accounts = [
        line for _n, line in read_lines(job.run_dir / LEDGER_NAME) if line["kind"] == "account"
    ]
    assert [line["stage"] for line in accounts] == [1, 2]
    assert all(0 < line["stall_s"] < line["elapsed_s"] for line in accounts)


@pytest.mark.parametrize(
    ("seed", "worlds"),
    [
        (11, ("aaba",)),
        *[
            pytest.param(seed, ("aaa", "ab", "aabb", "aab"), marks=pytest.mark.slow)
            for seed in (1, 2, 3)
        ],
    ],
)
def test_kills_at_random_moments_of_random_worlds_lose_at_most_the_step_in_flight(
    launch, seed, worlds
):
    """Every step is put away, and is of some size: most of the time somebody is writing."""
    draw = random.Random(seed)
    job = launch("counting.py", 4)
    flags = ("--snapshot_steps", "1", "--padding", "400000")  # 3 MB
    restore: tuple[int, int] | None = None
    for world in worlds:
        stage = job.start(
            len(world), *out(job, *flags, step_s=0.2), restore_from=restore, nodes=world
        )
        begun = restore[1] if restore else 0
        stage.go()
        stage.wait_step(begun + draw.randrange(2, 5))
        victim = draw.choice(stage.trainers)
        wait_until(lambda: draw.random() < 0.2, 60)  # at no moment in particular
        victim.process.send_signal(signal.SIGKILL)
        codes = stage.codes()
        assert codes.count(75) == len(world) - 1, stage.logs()
        said = max(each["step"] for t in stage.trainers for each in t.words("step"))
        restore = job.newest()
        assert restore[0] == stage.number
        # A survivor that has room to write puts away the last step that it committed; nodes whose
        # ranks all died are covered by the others.
        assert restore[1] >= said, (restore, said)
    stage = job.start(2, *out(job, *flags, step_s=0.0), restore_from=restore)
    stage.go()
    finish(stage)


@pytest.mark.parametrize("snapshot_steps", [1, 1000])  # it is found at a step, or at the cut
def test_a_state_that_outgrows_its_segment_gets_a_new_one_that_all_ranks_write(
    launch, snapshot_steps
):
    job = launch("growing.py", 2)
    hurry = job.folder / "hurry"
    arguments = ("--out", str(job.folder), "--hurry", str(hurry),
                 "--snapshot_steps", str(snapshot_steps))  # fmt: skip
    stage = job.start(2, *arguments)
    stage.go()
    stage.wait_step(5)
    stage.cut(1)
    step = stage.drained()
    assert stage.trainers[0].words("segment")[-1]["size_bytes"] > 2 * 8 * 100_000
    first, second = job.segments[1]
    assert max(header.stamp.step for _slot, header in read_slots(first)) < step
    assert step in {header.stamp.step for _slot, header in read_slots(second)}
    geometry = read_geometry(second)
    assert geometry is not None
    assert geometry.writers == 2
    stage.end()

    hurry.touch()
    stage = job.start(1, *arguments, restore_from=(1, step))
    stage.go()
    assert stage.codes() == [0], stage.logs()
    assert (job.folder / "grown").read_text() == "100000 of rank 0"
