"""Samplers and streams through changes and kills: the model counts what the recorded lists say."""

import signal

import numpy as np
import pytest

from pod_runtime.trainer.state.snapshot import newest_status
from pod_runtime.verify import check_account, read_account
from tests.pod_runtime.trainer.fake_launcher import FakeLauncher

pytestmark = pytest.mark.timeout(400)


def train_with_changes(job: FakeLauncher, *more: str) -> np.ndarray:
    """Train through a planned change and a kill, and return how often each sample counted."""
    args = (
        "--out",
        str(job.folder),
        "--hurry",
        str(job.folder / "hurry"),
        "--step_s",
        "0.2",
        *more,
    )
    old = job.start(1, *args)
    new = job.start(2, *args, overlaps=True)
    new.wait_all("prepared")
    old.go()
    old.wait_step(3)
    old.cut()
    new.commit((1, old.drained()))
    new.wait_step(6)
    new.trainers[1].process.send_signal(signal.SIGKILL)
    assert new.codes() == [75, -signal.SIGKILL], new.logs()
    old.end()
    last = job.start(2, *args, restore_from=job.newest())
    last.go()
    (job.folder / "hurry").touch()
    assert last.codes() == [0, 0], last.logs()
    found: np.ndarray = np.load(job.folder / "counts.npy")
    return found


@pytest.mark.parametrize(
    ("script", "kind", "workers"),
    [
        ("sampled.py", "buckets", 0),
        ("sampled_torch.py", "weighted", 0),
        pytest.param("sampled.py", "weighted", 2, marks=pytest.mark.slow),
        pytest.param("sampled_torch.py", "buckets", 2, marks=pytest.mark.slow),
    ],
)
def test_each_sample_counts_as_often_as_the_sampler_drew_it(launch, script, kind, workers):
    job = launch(script, 2)
    counts = train_with_changes(job, "--kind", kind, "--workers", str(workers))
    account = read_account(str(job.run_dir))
    result = check_account(account)
    assert result.is_proven, (result.problems, result.gaps)
    assert (result.complete_epochs, result.undrawn, result.unlisted) == (3, (), ())
    drawn = [account.read_order(account.orders[epoch]) for epoch in range(3)]
    lists = [order.ids for order in drawn if order is not None]
    assert len({each.tobytes() for each in lists}) == 3, "every epoch has its own"
    assert counts.tolist() == np.bincount(np.concatenate(lists), minlength=60).tolist()
    if kind == "buckets":
        assert (counts == 3).all()
        sizes = {int(size) for each in drawn if each is not None and each.ends is not None
                 for size in np.diff(each.ends)}  # fmt: skip
        assert len(sizes) > 3, "batches are as large as the sampler makes them"
    else:
        assert counts.sum() == 210
    status = newest_status(tuple(job.segments[3]))
    assert status is None or status.orders == tuple(account.orders.values())


def test_trainers_whose_samplers_part_are_all_told_before_a_step_of_that_epoch_counts(launch):
    job = launch("sampled.py", 2)
    stage = job.start(2, "--out", str(job.folder), "--kind", "astray")
    stage.go()
    assert stage.codes() == [1, 1], stage.logs()
    text = "UsageError: train_set: the DataLoader's Astray drew other samples for epoch 1 on rank 1"
    assert stage.logs().count(text) == 2, stage.logs()
    account = read_account(str(job.run_dir))
    result = check_account(account)
    assert (result.is_proven, result.complete_epochs, result.last_epoch_samples) == (True, 1, 0)


@pytest.mark.parametrize(
    ("script", "workers"),
    [
        ("sampled_torch.py", 2),
        pytest.param("sampled.py", 0, marks=pytest.mark.slow),
        pytest.param("sampled.py", 2, marks=pytest.mark.slow),
        pytest.param("sampled_torch.py", 0, marks=pytest.mark.slow),
    ],
)
def test_a_stream_that_repeats_itself_is_read_as_without_changes(launch, script, workers):
    job = launch(script, 2)
    counts = train_with_changes(job, "--kind", "stream", "--workers", str(workers))
    # 66 samples an epoch, of a stream of 60: six of them come twice in each.
    assert counts.sum() == 3 * 66
    assert counts.min() == 3, "every sample comes in every epoch, though each worker is one of two"
    assert check_account(read_account(str(job.run_dir))).is_proven
