"""Fixtures of the end-to-end tests: a real cluster that trains a counting model."""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.folders import Folders
from tests.support import ROOT, wait_until


@pytest.fixture
def counting_cluster(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """Make a cluster whose job counts its samples; everything is gone when the test ends."""
    if importlib.util.find_spec("paddle") is None:  # its import would cost the fast lane seconds
        pytest.skip("trains with Paddle")
    made: list[Cluster] = []

    def make(
        *,
        slots: int,
        samples: int,
        epochs: int,
        step_s: float = 0.05,
        workers: int = 0,
        checkpoint: str = "--checkpoint {out}/checkpoint",
        program: str = "count_train.py",
        grace_s: float = 3,
        nvml: dict[str, Any] | None = None,
    ) -> Cluster:
        trainer = ROOT / "tests" / "e2e" / program
        script = (
            "{python} -m pod_runtime.launch --log_dir {out}/log " + str(trainer) + " "
            f"--samples {samples} --epochs {epochs} --step_s {step_s} --workers {workers} "
            f"{checkpoint} --out {{out}}/seen.npy --end {{out}}/end"
        )
        cluster = Cluster(tmp_path / "c", slots=slots, script=script, grace_s=grace_s, nvml=nvml)
        made.append(cluster)
        cluster.start_server()
        cluster.start_client()
        return cluster

    yield make
    for cluster in made:
        cluster.stop()


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[Folders]:
    """A cluster without a job; all of it is gone when the test ends, what a test stopped too."""
    cluster = Folders(tmp_path / "c")
    cluster.start_server()
    cluster.start_client()
    wait_until(cluster._healthy, what="the server answers")
    yield cluster
    for process in cluster.processes():
        with contextlib.suppress(psutil.Error):
            process.resume()
    cluster.stop()
