"""Any number of trainers, changed at any step, trains what one trainer trains."""

from pathlib import Path

import numpy as np
import pytest

from pod_runtime.verify import main as verify
from tests.pod_runtime.trainer.fake_launcher import FakeLauncher, sample_ids

WORLDS = (1, 2, 4, 3, 1, 4, 2)  # six changes
TOLERANCE = 1e-8


def train_alone(launcher: FakeLauncher, *args: str) -> dict[str, np.ndarray]:
    stage = launcher.start(1, "--out", str(launcher.folder), *args)
    stage.go()
    assert stage.codes() == [0], stage.logs()
    return dict(np.load(launcher.folder / "final.npz"))


def distance(one: dict[str, np.ndarray], other: dict[str, np.ndarray], prefix: str) -> float:
    names = sorted(name for name in one if name.startswith(prefix))
    assert names
    left = np.concatenate([one[name].ravel() for name in names])
    right = np.concatenate([other[name].ravel() for name in names])
    return float(np.linalg.norm(left - right) / np.linalg.norm(left))


@pytest.mark.timeout(600)
def test_six_changes_do_not_change_what_is_trained(launch, tmp_path: Path):
    alone = launch("towers.py", 4, "alone")
    expected = train_alone(alone)

    changed = launch("towers.py", 4, "changed")
    out = ("--out", str(changed.folder), "--step_s", "0.03")
    restore_from = None
    ids: dict[int, list[int]] = {}
    for number, world_size in enumerate(WORLDS):
        stage = changed.start(world_size, *out, restore_from=restore_from)
        stage.go()
        if number == len(WORLDS) - 1:
            assert stage.codes() == [0] * world_size, stage.logs()
            last = None
        else:
            stage.wait_all("step")
            stage.cut()
            last = stage.drained()
            stage.end()
            restore_from = (stage.number, last)
        for step, samples in sample_ids(changed.folder, stage.number, world_size).items():
            if last is None or step < last:
                assert step not in ids, "a planned change redoes no step"
                ids[step] = samples
    found = dict(np.load(changed.folder / "final.npz"))

    assert ids == sample_ids(alone.folder, 1, 1), "the same samples in every global batch"
    assert sorted(ids) == list(range(21))
    assert distance(expected, found, "plain") <= TOLERANCE
    assert distance(expected, found, "noisy") <= TOLERANCE  # batch norm's statistics included
    assert distance(expected, found, "unused") == 0
    assert verify([str(changed.run_dir)]) == 0

    # The comparison is sharp enough to notice one sample whose weight is off by 1e-4.
    wrong = train_alone(launch("towers.py", 4, "wrong"), "--wrong_sample", "17")
    assert distance(expected, wrong, "plain") > TOLERANCE
    assert distance(expected, wrong, "noisy") > TOLERANCE
