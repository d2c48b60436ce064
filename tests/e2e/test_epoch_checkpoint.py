"""A program of the original's kind in a real cluster: resized and killed, by whole epochs."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from job_server.api.wire import JobSpec, JobState, Way
from tests.e2e.cluster import Cluster
from tests.support import ROOT, require, standing_still, wait_until

pytest.importorskip("paddle", reason="trains with Paddle")
require("sklearn", "trains on its digits")

EPOCHS = 12


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    trainer = ROOT / "examples" / "epoch_checkpoint" / "train.py"
    cluster = Cluster(
        tmp_path / "c",
        slots=2,
        script=(
            f"{{python}} -m pod_runtime.launch --log_dir {{out}}/log {trainer} --images 720 "
            f"--batch_size 32 --epochs {EPOCHS} --checkpoint {{out}}/checkpoint"
        ),
    )
    cluster.start_server()
    cluster.start_client()
    yield cluster
    cluster.stop()


def epochs_done(cluster: Cluster) -> list[tuple[int, int]]:
    """Return (epoch, trainers) of every epoch that any rank 0 has trained to its end."""
    found = []
    for path in (cluster.out / "log").rglob("*"):
        if path.is_file():
            text = path.read_text(errors="replace")
            found += re.findall(r"^epoch (\d+): (\d+) trainers", text, re.MULTILINE)
    return [(int(epoch), int(trainers)) for epoch, trainers in found]


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_no_epoch_is_skipped_when_pods_come_and_a_trainer_is_killed(cluster: Cluster) -> None:
    cluster.submit(JobSpec(job_id="epochs", pods=1, max_pods=2, grace_s=3, spares=1))
    wait_until(lambda: (0, 1) in epochs_done(cluster), 180, "an epoch of one trainer")
    cluster.api().resize("epochs", 2)
    # All epochs take less time than a first stage waits for trainers that call the elastic loop.
    with standing_still(cluster.trainers()):
        cluster.wait_for(lambda now: len(now.stages) > 1, "the change has begun")
    wait_until(
        lambda: any(trainers == 2 for _epoch, trainers in epochs_done(cluster)), 180, "two trainers"
    )
    cluster.kill(cluster.trainers()[-1])
    cluster.wait_for(lambda now: len(now.stages) >= 3, "a stage after the kill")
    status = cluster.wait_for(lambda now: now.state is JobState.SUCCEEDED, "succeeded", 300)

    counts = Counter(epoch for epoch, _trainers in epochs_done(cluster))
    assert sorted(counts) == list(range(EPOCHS))
    restarts = len(status.stages) - 1
    assert sum(counts.values()) - EPOCHS <= restarts, "only unsaved epochs are trained again"
    assert status.stages[1].way is Way.STOP
    newest = max((cluster.out / "checkpoint").glob("stage_*/epoch_*"))
    assert newest.name.startswith(f"epoch_{EPOCHS:08d}_")
