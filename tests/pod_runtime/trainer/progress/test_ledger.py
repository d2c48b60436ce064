"""The ledger, its file, and the proof that is drawn from it."""

import functools
import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from job_server.api.codec import decode, encode
from pod_runtime.trainer.progress.batches import Ids, permutation
from pod_runtime.trainer.progress.drawn import hash_samples
from pod_runtime.trainer.progress.ledger import Ledger, LedgerFile, Row, StageEntry, read_lines
from pod_runtime.trainer.progress.ledger_check import LedgerCheck, check_ledger
from pod_runtime.trainer.progress.loop_status import LoopStatus
from pod_runtime.trainer.progress.progress import TrainingProgress, fresh_status, scaling_for
from pod_runtime.trainer.state.checkpoint import CheckpointStore
from pod_runtime.trainer.state.storage import open_storage
from pod_runtime.verify import main as verify
from pod_runtime.verify import read_ledger
from tests.pod_runtime.trainer.states import RUN, make_host_state, make_status

OPENED: list[LedgerFile] = []


@pytest.fixture(autouse=True)
def _close_files():
    yield
    close_files()


def close_files() -> None:
    while OPENED:
        OPENED.pop().close()


def judge(run_dir: Path) -> LedgerCheck:
    """Read what the stages have written, as `verify` does."""
    close_files()
    return check_ledger(*read_ledger(str(run_dir)))


def begin(before: LoopStatus, stage: int, run_dir: Path | None, world: int = 1) -> TrainingProgress:
    """Enter stage `stage` from the state `before`."""
    scaling = scaling_for(before, "fixed_global", world_size=world, warmup_steps=0)
    progress = TrainingProgress(before, scaling, stage=stage, steps_per_epoch=None)
    came_from = (before.stage, before.step) if before.stage else None
    if run_dir is not None:
        OPENED.append(LedgerFile(run_dir))
    progress.begin_stage(came_from, OPENED[-1] if run_dir else None)
    return progress


@functools.cache
def order_of(seed: int, epoch: int) -> Ids:
    return permutation(seed, epoch, 100)


def train(
    progress: TrainingProgress, steps: int, *, seeds: tuple[int, ...] | None = None
) -> LoopStatus:
    """Commit steps whose shares are drawn by trainers that were told these seeds.

    Args:
        seeds: None: the run's; (): what was drawn is not known.
    """
    seeds = (progress.run.seed,) * 2 if seeds is None else seeds
    for _ in range(steps):
        if progress.epoch_is_over:
            progress.commit_epoch()
        cursor, drawn = progress.cursor, 0
        start, stop = progress.batches.batch(cursor.offset)
        for rank, seed in enumerate(seeds):
            order = order_of(seed, cursor.epoch)
            drawn += hash_samples(cursor.epoch, order[start:stop][rank :: len(seeds)])
        progress.commit_step(drawn % 2**64 if seeds else None)
    progress.flush_ledger()
    return progress.status()


FRESH = replace(make_status(), stage=0)


@given(st.lists(st.tuples(st.integers(0, 25), st.integers(0, 25)), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_any_sequence_of_drains_and_crashes_is_proven_and_superseded_work_is_listed(
    tmp_path_factory, stages
):
    run_dir = tmp_path_factory.mktemp("run")
    status, lost_steps = FRESH, 0
    for number, (kept, lost) in enumerate(stages, 1):
        progress = begin(status, number, run_dir, world=1 + number % 2)
        kept = min(kept, 40 - status.step)
        status = train(progress, kept)
        if number < len(stages):  # the last stage has nothing behind it that could supersede
            lost = min(lost, 40 - status.step)
            train(progress, lost)
            lost_steps += lost
    close_files()
    run, found = read_ledger(str(run_dir))
    result = check_ledger(run, found)
    assert result.is_proven, (result.problems, result.gaps)
    assert result.steps == status.step
    again = sum(each.row.last_step - each.row.first_step + 1 for each in result.superseded)
    assert again == lost_steps
    # What travels with the state says the same as the file.
    state = check_ledger(run, {entry.stage: entry for entry in status.ledger})
    assert state.is_proven
    assert state.undrawn == result.undrawn == (), "what was drawn is known of every step"
    assert (state.steps, state.complete_epochs, state.last_epoch_samples) == (
        result.steps, result.complete_epochs, result.last_epoch_samples,
    )  # fmt: skip


@given(st.integers(1, 40), st.integers(0, 40))
def test_the_cached_text_of_a_status_is_its_json(first, second):
    status = train(begin(FRESH, 1, None), min(first, 39))
    progress = begin(status, 2, None)
    train(progress, min(second, 40 - status.step))
    assert json.loads(progress.status_json()) == json.loads(json.dumps(progress.status().to_json()))
    assert LoopStatus.from_json(json.loads(progress.status_json())) == progress.status()


def test_whole_epochs_of_a_stage_take_one_row():
    status = train(begin(FRESH, 1, None), 35)
    (entry,) = status.ledger
    assert [(row.epoch, row.last_epoch) for row in entry.rows] == [(0, 2), (3, 3)]


def test_a_row_is_rewritten_in_place_while_another_stage_adds_lines(tmp_path):
    fenced_off = begin(FRESH, 1, tmp_path)
    status = train(fenced_off, 3)
    follower = begin(status, 2, tmp_path)
    train(follower, 2)
    train(fenced_off, 4)  # it does not know yet that it is over
    train(follower, 2)
    rows = [line for _number, line in read_lines(tmp_path / "ledger.jsonl")]
    last = {line["stage"]: line["last_step"] for line in rows if line["kind"] == "row"}
    assert last == {1: 7, 2: 7}
    assert len(rows) == 6  # run, stage, row of each
    assert verify([str(tmp_path)]) == 0


def test_a_new_run_folder_beside_an_old_state_gets_the_whole_lineage(tmp_path):
    status = train(begin(FRESH, 1, None), 25)
    status = train(begin(status, 2, None), 3)
    train(begin(status, 3, tmp_path), 12)
    result = judge(tmp_path)
    assert (result.is_proven, result.steps, result.complete_epochs) == (True, 40, 4)


def test_continuations_of_a_run_in_one_folder_are_judged_as_one(tmp_path, capsys):
    fresh = replace(FRESH, run_id="a", run=replace(RUN, epochs=2))
    saved = train(begin(fresh, 1, tmp_path), 12)  # killed, with a checkpoint of step 12
    train(begin(saved, 2, tmp_path), 3)
    # Another job goes on from there, and fails after its checkpoint of step 17.
    status = train(begin(saved, 3, tmp_path), 5)
    # It is told to go on, and finishes; then it is asked for more epochs.
    status = train(begin(status, 4, tmp_path, world=2), 3)
    assert verify([str(tmp_path)]) == 0
    status = train(begin(status, 5, tmp_path), 0)  # started once more: nothing is left to do
    longer = replace(status, run=replace(RUN, epochs=4))
    train(begin(longer, 6, tmp_path), 20)
    capsys.readouterr()
    assert verify([str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "lineage of stages 1 -> 3 -> 4 -> 5 -> 6" in text
    assert "superseded: stage 2, steps 13-15" in text
    assert "epochs 0-3: each of 100 samples counted exactly once" in text


def test_a_run_that_begins_in_the_folder_of_another_is_judged_alone(tmp_path, capsys):
    first = replace(FRESH, run_id="a")
    status = train(begin(first, 1, tmp_path), 15)
    status = train(begin(status, 2, tmp_path), 10)
    train(begin(status, 3, tmp_path), 1)
    other = replace(FRESH, run_id="b", run=replace(RUN, seed=9))  # its checkpoints were removed
    status = train(begin(other, 1, tmp_path), 5)
    train(begin(status, 2, tmp_path), 35)
    assert verify([str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "epochs 0-3: each of 100 samples counted exactly once" in text
    assert "superseded" not in text


def test_steps_that_only_the_restored_state_knows_are_added_to_the_file(tmp_path):
    progress = begin(FRESH, 1, tmp_path)
    train(progress, 5)
    for _ in range(2):
        progress.commit_step(5)  # another node's snapshot has these, the file does not
    train(begin(progress.status(), 2, tmp_path), 1)
    result = judge(tmp_path)
    assert (result.steps, result.gaps) == (8, ())


@pytest.mark.parametrize("where", ["run", "ckpt"])
def test_a_trainer_that_draws_by_another_seed_is_found_with_its_stage_epoch_and_steps(
    tmp_path, capsys, where
):
    run_dir = tmp_path / "run"
    status = train(begin(FRESH, 1, run_dir), 13)
    progress = begin(status, 2, run_dir)
    train(progress, 7)
    status = train(progress, 5, seeds=(1, 2))
    status = train(begin(status, 3, run_dir), 5)
    close_files()
    CheckpointStore(open_storage(tmp_path / "ckpt")).write(
        replace(make_host_state(), status=status)
    )
    assert verify([str(tmp_path / where)]) == 1
    (line,) = (each for each in capsys.readouterr().out.splitlines() if "NOT PROVEN" in each)
    assert line.startswith(
        "NOT PROVEN: stage 2, epoch 2, steps 21-25: the samples that trainers drew are not those "
        "of the order: their sum is "
    )


@pytest.mark.parametrize(("kept", "lost"), [(3, 9), (13, 3), (13, 20), (25, 1), (0, 5)])
def test_what_was_drawn_for_steps_that_are_done_again_does_not_count(tmp_path, kept, lost):
    progress = begin(FRESH, 1, tmp_path)
    status = train(progress, kept)
    train(progress, lost, seeds=(7, 8))
    train(begin(status, 2, tmp_path), 40 - kept)
    result = judge(tmp_path)
    assert result.is_proven, result.problems
    assert result.undrawn == ()
    # Of the state that a stage began from, too: it is not only the later steps that are right.
    status = train(begin(FRESH, 1, tmp_path / "other"), kept, seeds=(7, 8))
    train(begin(status, 2, tmp_path / "other"), 40 - kept)
    assert judge(tmp_path / "other").is_proven == (kept == 0)


@pytest.mark.parametrize("policy", ["fixed_global", "linear"])
@pytest.mark.parametrize("drop_last", [False, True])
def test_what_was_drawn_is_proven_with_short_batches_and_batches_of_other_sizes(
    tmp_path, drop_last, policy
):
    run = replace(RUN, drop_last=drop_last)
    status = fresh_status(run=run, batch_size=7, shards=4, reference_world=1)
    for number, (world, steps) in enumerate([(1, 10), (2, 3), (4, 9), (1, 30)], 1):
        scaling = scaling_for(status, policy, world_size=world, warmup_steps=0)
        progress = TrainingProgress(status, scaling, stage=number, steps_per_epoch=None)
        OPENED.append(LedgerFile(tmp_path))
        came_from = (status.stage, status.step) if status.stage else None
        progress.begin_stage(came_from, OPENED[-1])
        status = train(progress, steps)
        train(progress, 2)  # of no avail: the next stage begins before them
    close_files()
    for result in (
        judge(tmp_path),
        check_ledger(run, {entry.stage: entry for entry in progress.status().ledger}),
    ):
        assert result.is_proven, (result.problems, result.gaps)
        assert (result.undrawn, result.complete_epochs > 2) == ((), True)


@pytest.mark.parametrize("steps", [12, 13, 14])
def test_an_epoch_may_end_as_batches_have_grown_beyond_what_is_left_of_it(tmp_path, capsys, steps):
    run = replace(RUN, drop_last=True)
    status = fresh_status(run=run, batch_size=7, shards=4, reference_world=1)
    # 16 samples, 9 or 2 are left of the epoch, and batches of 28 follow: of a stage that makes no
    # step, and of one that goes on with the next epoch.
    for number, (world, more) in enumerate([(1, steps), (4, 0), (4, 5)], 1):
        scaling = scaling_for(status, "linear", world_size=world, warmup_steps=0)
        progress = TrainingProgress(status, scaling, stage=number, steps_per_epoch=None)
        OPENED.append(LedgerFile(tmp_path))
        came_from = (status.stage, status.step) if status.stage else None
        progress.begin_stage(came_from, OPENED[-1])
        status = train(progress, more)
        result = judge(tmp_path)
        assert result.is_proven, (result.problems, result.gaps)
        assert result.complete_epochs == (0, 1, 2)[number - 1] + (steps == 14 and number == 1)
    assert verify([str(tmp_path)]) == 0
    assert "but for each last batch (drop_last)" in capsys.readouterr().out


def test_steps_of_an_earlier_version_are_read_and_named_as_not_proven_to_the_last(tmp_path, capsys):
    status = train(begin(FRESH, 1, tmp_path), 13, seeds=())
    path = tmp_path / "ledger.jsonl"
    path.write_text(
        path.read_text().replace(', "drawn": null', "").replace(', "restored_drawn": null', "")
    )
    assert "drawn" not in path.read_text()
    old = {**status.to_json()}
    for entry in old["ledger"]:
        del entry["restored_drawn"]
        for row in entry["rows"]:
            del row["drawn"]
    train(begin(LoopStatus.from_json(old), 2, tmp_path), 10)
    assert verify([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert (
        "stage 1, steps 1-13: which samples were drawn was not written down (by an earlier "
        "version, or with a reader of the script's own); the order is taken on trust\n" in out
    )
    assert out.count("was not written down") == 1
    assert "OK: 23 steps, each counted once" in out
    assert verify([str(tmp_path), "--json"]) == 0
    undrawn = json.loads(capsys.readouterr().out)["undrawn"]
    assert [each["row"]["last_step"] for each in undrawn] == [10, 13]


def test_the_ledger_stays_small_and_a_row_fits_one_line(tmp_path):
    status = train(begin(FRESH, 1, tmp_path), 40)
    close_files()
    assert (tmp_path / "ledger.jsonl").stat().st_size == 256 * (2 + 4), "a line per epoch"
    assert len(status.ledger[0].rows) == 2, "whole epochs take one"
    number = 10**11
    ledger = Ledger()
    ledger.begin(stage(number, []))
    ledger.commit(epoch=number, step=number, start=number, stop=number, drawn=number)
    (row,) = ledger.stages[0].rows
    line = {"kind": "row", "stage": number, **encode(row)}
    assert len(json.dumps(line)) < 256


def stage(number: int, rows: list[tuple[int, int, int, int, int]], *, origin=None) -> StageEntry:
    """Make a stage of batches of 10 over 100 samples; rows (epoch, steps from, to, samples...)."""
    return StageEntry(
        stage=number,
        restored_stage=None if origin is None else origin[0],
        restored_step=0 if origin is None else origin[1],
        world_size=1,
        batch_size=10,
        epoch_samples=100,
        rows=tuple(
            Row(
                epoch=epoch, last_epoch=epoch, first_step=first, last_step=last,
                first_offset=start, last_offset=stop,
            )
            for epoch, first, last, start, stop in rows
        ),
    )  # fmt: skip


WHOLE = stage(1, [(0, 1, 10, 0, 100)])


@pytest.mark.parametrize(
    ("stages", "problem"),
    [
        pytest.param(
            [stage(1, [(0, 1, 4, 0, 40), (0, 6, 10, 50, 100)])], "steps 5-5 are missing", id="gap"
        ),
        pytest.param(
            [stage(1, [(0, 1, 4, 0, 40), (0, 4, 10, 30, 100)])], "steps 4-4 count twice", id="twice"
        ),
        pytest.param([stage(1, [(0, 1, 9, 0, 100)])], "100 samples are 10 batches", id="length"),
        pytest.param([stage(2, [], origin=(1, 5))], "ledger has nothing", id="lost stage"),
        pytest.param(
            [WHOLE, stage(2, [(1, 13, 14, 20, 40)], origin=(1, 12))],
            "steps 11-12 are missing", id="began behind what is known",
        ),
        pytest.param(
            [stage(1, [(0, 1, 9, 0, 90), (1, 10, 11, 0, 20)])], "", id="an epoch cut short"
        ),
        pytest.param([stage(1, [(0, 1, 12, 0, 120)])], "", id="an epoch too long"),
    ],
)  # fmt: skip
def test_what_does_not_count_exactly_once_is_found(stages, problem):
    result = check_ledger(RUN, {each.stage: each for each in stages})
    assert not result.is_proven
    assert problem in " ".join(result.problems)
    assert result.gaps or problem


def test_the_samples_of_a_gap_are_named(tmp_path, capsys):
    file = LedgerFile(tmp_path)
    file.begin_run(RUN, (stage(1, [(0, 1, 4, 0, 40), (0, 6, 10, 50, 100)]),))
    file.close()
    assert verify([str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert "NOT PROVEN: steps 5-5 are missing before stage 1's step 6" in text
    assert "NOT PROVEN: epoch 0: 10 samples count never: ids " in text
    assert verify([str(tmp_path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["proven"] is False


def test_a_checkpoint_path_is_verified_by_its_newest_intact_state(tmp_path, capsys):
    status = train(begin(FRESH, 1, None), 12)
    host_state = replace(make_host_state(), status=status)
    CheckpointStore(open_storage(tmp_path)).write(host_state)
    assert verify([str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "epoch 0: each of 100 samples counted exactly once" in text
    assert "epoch 1: 20 so far of 100" in text
    assert "OK: 12 steps, each counted once" in text


def test_drop_last_and_streams_say_what_they_prove(tmp_path, capsys):
    for name, run in {
        "drop": replace(RUN, drop_last=True, dataset_length=105),
        "stream": replace(RUN, dataset_length=None),
    }.items():
        file = LedgerFile(tmp_path / name)
        file.begin_run(run, (WHOLE,))
        file.close()
        assert verify([str(tmp_path / name)]) == 0
    text = capsys.readouterr().out
    assert "but for each last batch (drop_last)" in text
    assert "samples of a stream are at-least-once" in text


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "no stage has begun"),
        ("{broken\n", "ledger.jsonl:1: not JSON"),
        ("[1]\n", "ledger.jsonl:1: expected an object"),
        ('{"kind": "row", "stage": 4}\n', "ledger.jsonl:1: a row of stage 4"),
        ('{"kind": "run", "seed": "x"}\n', "ledger.jsonl:1: seed: expected int, got 'x'"),
    ],
)
def test_what_is_no_ledger_is_refused_with_its_line(tmp_path, capsys, content, text):
    (tmp_path / "ledger.jsonl").write_text(content)
    assert verify([str(tmp_path)]) == 2
    assert text in capsys.readouterr().err


@contextmanager
def full_disk(path: Path) -> Iterator[None]:
    """Let no file of this process grow beyond the size that `path` has now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_stops_no_training_and_what_is_missing_is_written_when_there_is_room(
    tmp_path, caplog
):
    progress = begin(FRESH, 1, tmp_path)
    train(progress, 5)
    with full_disk(tmp_path / "ledger.jsonl"):
        train(progress, 20)
    texts = [record.getMessage() for record in caplog.records]
    assert [text for text in texts if "cannot be written" in text] == [
        f"{tmp_path}/ledger.jsonl cannot be written: No space left on device; training goes on, "
        f"and what is missing there is written when that is possible"
    ]
    train(progress, 15)
    assert caplog.messages[-1] == f"{tmp_path}/ledger.jsonl is complete again"
    progress.note_done()
    result = judge(tmp_path)
    assert (result.is_proven, result.steps, result.complete_epochs) == (True, 40, 4)
    assert result.undrawn == ()
    assert len(caplog.messages) == 2


def test_what_a_stage_could_not_write_the_next_one_writes_from_the_state(tmp_path, caplog):
    progress = begin(FRESH, 1, tmp_path)
    train(progress, 15)
    with full_disk(tmp_path / "ledger.jsonl"):
        status = train(begin(train(progress, 10), 2, tmp_path), 3)
        progress.note_done()
        close_files()
    assert "lacks its last 2 lines, which could not be written; the state has all" in caplog.text
    assert judge(tmp_path).steps == 20, "an epoch's row that was there grew"
    train(begin(status, 3, tmp_path), 12)
    result = judge(tmp_path)
    assert (result.is_proven, result.steps, len(result.lineage)) == (True, 40, 3)
    assert result.undrawn == ()
    assert verify([str(tmp_path)]) == 0


def test_a_ledger_that_cannot_be_made_at_all_stops_nothing_either(tmp_path, caplog):
    run_dir = tmp_path / "run"
    run_dir.write_text("in the way")
    progress = begin(FRESH, 1, run_dir)
    train(progress, 5)
    assert caplog.text.count("cannot be written: ") == 1
    run_dir.unlink()
    train(progress, 1)
    assert judge(run_dir).steps == 6


DAMAGE = {
    "NUL bytes after a power cut": (b"\0" * 512, "only NUL bytes"),
    "half a line": (b'{"kind": "row", "stage": 1, "epo', "not JSON"),
    "half a line's end": (b'ow", "stage": 1}', "not JSON"),
    "foreign bytes": (b"\xff\xfe\x80 hello", "not JSON"),
    "deep": (b"[" * 200_000, "not JSON"),
    "another program's": (b'{"kind": "row", "stage": 1, "epoch": "x"}\n', "epoch: expected int"),
    "impossible": (
        b'{"kind": "row", "stage": 1, "epoch": 0, "last_epoch": 1000000000000, "first_step": 1, '
        b'"last_step": 2, "first_offset": 0, "last_offset": 9}',
        "steps 1-2 cannot be those of epochs 0-1000000000000",
    ),
    "no batches": (
        b'{"kind": "stage", "stage": 9, "restored_stage": null, "restored_step": 0, '
        b'"world_size": 1, "batch_size": 0, "epoch_samples": 10}',
        "batches of 0 of 10 samples cannot be",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_line_stops_no_later_stage_and_verify_names_it_and_judges_the_rest(
    tmp_path, capsys, caplog, what
):
    damage, text = DAMAGE[what]
    path = tmp_path / "ledger.jsonl"
    status = train(begin(FRESH, 1, tmp_path), 15)
    close_files()
    with path.open("ab") as file:
        file.write(damage)
    status = train(begin(status, 2, tmp_path), 5)
    train(begin(status, 3, tmp_path), 20)
    close_files()
    assert len([each for each in caplog.messages if f"ledger.jsonl:5: {text}" in each]) == 2
    assert verify([str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert f"NOT PROVEN: {path}:5: {text}" in out
    assert "the rest is judged without this line: delete it if nothing else is wrong" in out
    assert "epochs 0-3: each of 100 samples counted exactly once" in out
    assert out.count("NOT PROVEN") == 1
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:4], *lines[5:]]))
    assert verify([str(tmp_path)]) == 0


@pytest.mark.parametrize("number", range(7))
def test_whichever_line_is_lost_the_next_stage_writes_it_again(tmp_path, number):
    path = tmp_path / "ledger.jsonl"
    status = train(begin(FRESH, 1, tmp_path), 25)
    status = train(begin(status, 2, tmp_path), 5)
    close_files()
    lines = path.read_bytes().split(b"\n")
    assert len(lines) == 9  # run, stage, three rows; run, stage, row; nothing
    lines[number] = b""
    path.write_bytes(b"\n".join(lines))
    train(begin(status, 3, tmp_path), 10)
    result = judge(tmp_path)
    assert (result.is_proven, result.steps, len(result.lineage)) == (True, 40, 3)
    assert result.undrawn == ()


def test_a_path_without_anything_is_refused(tmp_path, capsys):
    assert verify([str(tmp_path)]) == 2
    assert "neither a run folder" in capsys.readouterr().err
    assert verify([str(tmp_path / "nowhere")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert verify([300 * "x"]) == 2  # as a path in a folder that this user may not enter
    assert "xxx: File name too long" in capsys.readouterr().err


def test_rows_survive_the_wire():
    ledger = Ledger((WHOLE,))
    assert decode(StageEntry, json.loads(ledger.to_json())[0]) == WHOLE
