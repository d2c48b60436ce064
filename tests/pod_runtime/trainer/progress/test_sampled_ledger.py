"""The ledger of a training whose samples a sampler decides, and the proof drawn from it."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pod_runtime.trainer.progress.drawn import hash_samples
from pod_runtime.trainer.progress.epoch_order import EpochOrder, make_order
from pod_runtime.trainer.progress.ledger import LedgerFile
from pod_runtime.trainer.progress.ledger_check import check_ledger
from pod_runtime.trainer.progress.loop_status import LoopStatus
from pod_runtime.trainer.progress.progress import TrainingProgress
from pod_runtime.verify import check_account, read_account
from pod_runtime.verify import main as verify
from tests.pod_runtime.trainer.states import RUN, make_status


def drawn_by(sampler: str, epoch: int) -> EpochOrder:
    """Return what a sampler drew that draws again and again: 90 to 93 samples an epoch."""
    state = np.random.RandomState(epoch)
    ids = state.randint(0, 100, 90 + epoch)
    if sampler == "weighted":
        return make_order(epoch, ids, None)
    inner = np.unique(state.randint(1, len(ids), 14))
    return make_order(epoch, ids, np.append(inner, len(ids)))


def train(
    progress: TrainingProgress,
    sampler: str,
    steps: int = 1000,
    *,
    until: tuple[int, int] = (1000, 0),
    wrong: bool = False,
) -> LoopStatus:
    """Commit steps, up to (epoch, step) `until` or to the end.

    Args:
        wrong: a trainer draws another sample than the list says.
    """
    for _ in range(steps):
        if progress.epoch_is_over:  # as the loop does: when the next epoch is asked for
            progress.commit_epoch()
            if not progress.is_finished:
                progress.begin_epoch(drawn_by(sampler, progress.cursor.epoch))
        if progress.is_finished or (progress.cursor.epoch, progress.cursor.step) >= until:
            break
        order = progress.order
        assert order is not None
        start, stop = progress.batches.batch(progress.cursor.offset)
        ids = order.ids[start:stop].copy()
        ids[0] += wrong
        progress.commit_step(hash_samples(progress.cursor.epoch, ids))
    progress.flush_ledger()
    return progress.status()


@contextmanager
def begun(
    before: LoopStatus, stage: int, run_dir: Path | None, sampler: str
) -> Iterator[TrainingProgress]:
    """Enter stage `stage` from the state `before`, and leave it in the end."""
    progress = TrainingProgress(
        before, before.scaling, stage=stage, steps_per_epoch=None,
        order=None if before.is_finished else drawn_by(sampler, before.epoch),
    )  # fmt: skip
    came_from = (before.stage, before.step) if before.stage else None
    progress.begin_stage(came_from, None if run_dir is None else LedgerFile(run_dir))
    yield progress
    progress.close()


def fresh_sampled(sampler: str, drop_last: bool = False) -> LoopStatus:
    run = replace(RUN, sampler=sampler, shuffle=False, drop_last=drop_last)
    return replace(make_status(), stage=0, run=run)


@given(
    st.sampled_from(["weighted", "batches"]),
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 25), st.integers(0, 25)), min_size=1, max_size=6),
)
@settings(max_examples=40, deadline=None)
def test_a_samplers_draws_are_proven_through_any_drains_and_crashes(
    tmp_path_factory, sampler, drop_last, stages
):
    run_dir = tmp_path_factory.mktemp("run")
    status, lost_steps = fresh_sampled(sampler, drop_last), 0
    for number, (kept, lost) in enumerate(stages, 1):
        with begun(status, number, run_dir, sampler) as progress:
            status = train(progress, sampler, kept)
            assert json.loads(progress.status_json()) == json.loads(json.dumps(status.to_json()))
            assert LoopStatus.from_json(json.loads(progress.status_json())) == status
            if number < len(stages):  # the last stage has nothing behind it that could supersede
                lost_steps += train(progress, sampler, lost).step - status.step
    result = check_account(read_account(str(run_dir)))
    assert result.is_proven, (result.problems, result.gaps)
    assert (result.steps, result.undrawn, result.unlisted) == (status.step, (), ())
    again = sum(each.row.last_step - each.row.first_step + 1 for each in result.superseded)
    assert again == lost_steps
    # A state has no lists: the epochs that are over are proven by their sums.
    orders = {each.epoch: each for each in status.orders}
    state = check_ledger(status.run, {entry.stage: entry for entry in status.ledger}, orders)
    assert state.is_proven, (state.problems, state.gaps)
    assert (state.steps, state.complete_epochs) == (result.steps, result.complete_epochs)
    assert all(epoch >= state.complete_epochs for epoch in state.unlisted)


@pytest.mark.parametrize("sampler", ["weighted", "batches"])
@pytest.mark.parametrize("has_lists", [True, False])
def test_a_sample_that_the_sampler_did_not_draw_is_found_with_and_without_its_lists(
    tmp_path, capsys, sampler, has_lists
):
    with begun(fresh_sampled(sampler), 1, tmp_path, sampler) as progress:
        status = train(progress, sampler, until=(1, 3))
    with begun(status, 2, tmp_path, sampler) as progress:
        train(progress, sampler, 1, wrong=True)
        train(progress, sampler, until=(3, 2))
    if not has_lists:
        shutil.rmtree(tmp_path / "orders")
    assert verify([str(tmp_path)]) == 1
    out = capsys.readouterr().out
    (line,) = (each for each in out.splitlines() if "NOT PROVEN" in each)
    assert "stage 2, epoch 1, steps " in line
    assert "the samples that trainers drew are not those of the order" in line
    text = f"epochs 0-2: each of 90 to 92 samples counted exactly as often as {sampler} drew it"
    assert text in out
    assert ("epoch 3: the list of what" in out) == (not has_lists)


def test_a_new_run_folder_gets_the_sums_of_earlier_epochs_from_the_state(tmp_path):
    with begun(fresh_sampled("batches"), 1, None, "batches") as progress:
        status = train(progress, "batches", until=(1, 3))
    with begun(status, 2, tmp_path, "batches") as progress:
        train(progress, "batches", until=(2, 3))
    account = read_account(str(tmp_path))
    assert sorted(account.orders) == [0, 1, 2]
    result = check_account(account)
    assert (result.is_proven, result.unlisted) == (True, ()), "the open epoch's list is written"
    damaged = replace(account, orders={0: account.orders[0]})
    assert "epoch 1: nothing says what the sampler drew" in str(check_account(damaged).problems)


def test_a_gap_in_what_a_sampler_drew_is_named_by_its_samples(tmp_path, capsys):
    with begun(fresh_sampled("weighted"), 1, tmp_path, "weighted") as progress:
        status = train(progress, "weighted", 2)
    cursor = replace(status.cursor, offset=30)  # a batch is left out
    with begun(replace(status, cursor=cursor), 2, tmp_path, "weighted") as progress:
        train(progress, "weighted", until=(1, 0))
    assert verify([str(tmp_path)]) == 1
    left_out = ", ".join(map(str, drawn_by("weighted", 0).ids[20:30].tolist()))
    assert f"epoch 0: 10 samples count never: ids {left_out}" in capsys.readouterr().out
