"""Which folders of past runs are deleted."""

import os
from pathlib import Path

from pod_runtime.local.old_runs import drop_old_runs

DAY_S = 86400.0
NOW = 1_800_000_000.0


def make_run(log_dir: Path, number: int, *, days: float, more: str = "") -> Path:
    """Make the folder of a run in which nothing was written for so many days."""
    folder = log_dir / f"20260101-{number:06d}-ab12{'cd34' * (number % 2)}"
    paths = [folder / "server.db", folder / "run" / "ledger.jsonl"]
    paths += [folder / more] if more else []
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (NOW - days * DAY_S,) * 2)
    return folder


def test_runs_before_the_newest_go_when_they_are_long_over_and_hold_no_state(tmp_path):
    old = [make_run(tmp_path, number, days=31) for number in range(3)]
    spare = "run/checkpoint/stage_00000002/step_0000000007/0.bin"  # as `last_save` has it
    state = make_run(tmp_path, 3, days=31, more=spare)
    own = make_run(tmp_path, 4, days=31, more="pods/pod_0_0/out/stage_00000002/0.bin")
    trains = make_run(tmp_path, 5, days=31)
    os.utime(trains / "run" / "ledger.jsonl", (NOW, NOW))
    newest = [make_run(tmp_path, number, days=31) for number in (6, 7)]
    (tmp_path / "latest").symlink_to(old[0].name)
    (tmp_path / "mine").mkdir()
    assert drop_old_runs(tmp_path, 9, NOW) == []
    assert drop_old_runs(tmp_path, 2, NOW) == old
    left = {state, own, trains, *newest, tmp_path / "latest", tmp_path / "mine"}
    assert set(tmp_path.iterdir()) == left
    assert drop_old_runs(tmp_path / "none", 2, NOW) == []
