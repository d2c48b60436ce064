"""Worlds of real trainers; none outlives its test."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.pod_runtime.trainer.fake_launcher import FakeLauncher

Launch = Callable[..., FakeLauncher]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Make launchers of a script in tests/pod_runtime/trainer/scripts."""
    made: list[FakeLauncher] = []

    def make(script: str, max_trainers: int, folder: str = "job") -> FakeLauncher:
        made.append(FakeLauncher(tmp_path / folder, script, max_trainers))
        return made[-1]

    yield make
    for launcher in made:
        launcher.close()
