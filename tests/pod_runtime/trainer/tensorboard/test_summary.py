"""One run in TensorBoard and VisualDL, whatever stages and crashes the training consists of."""

import logging
import math
import resource
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pod_runtime.trainer.errors import UsageError
from pod_runtime.trainer.tensorboard.event_file import (
    Position,
    Scalar,
    encode_header,
    encode_scalar,
    masked_crc,
    read_scalars,
)
from pod_runtime.trainer.tensorboard.summary import RunLog
from tests.support import nothing_writable


@dataclass
class Progress:
    """Stands where a loop would."""

    epoch: int = 0
    step_count: int = 0
    rank: int = 0


@dataclass
class Rehearses(Progress):
    """As a loop in `edl check`."""

    _counts: bool = False


def noted(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return (step, value) of each curve, in the order of the files."""
    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(folder.glob("*tfevents*")):
        for _end, scalar in read_scalars(path.read_bytes()):
            if scalar is not None:
                found.setdefault(scalar.tag, []).append((scalar.step, scalar.value))
    return found


def train(folder: Path, start: int, stop: int, *, epoch_steps: int = 10, kind: str = "auto"):
    """Train steps [start, stop) as a stage does, and end without closing, as a crash does."""
    progress = Progress(epoch=start // epoch_steps, step_count=start)
    log = RunLog(progress, folder, kind)
    for step in range(start, stop):
        progress.step_count, progress.epoch = step, step // epoch_steps
        log.add_scalar("loss", 1 / (step + 1))
        if (step + 1) % epoch_steps == 0:
            progress.step_count = step + 1  # the epoch is over and not yet committed
            log.add_scalar("accuracy", (step + 1) / 100)
    return log


def test_a_crash_and_a_restart_leave_each_step_once_for_tensorboards_own_reader(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train(tmp_path, 0, 11)
    train(tmp_path, 8, 21)
    reader = accumulator.EventAccumulator(str(tmp_path))
    reader.Reload()
    points = reader.Scalars("loss")
    assert [point.step for point in points] == list(range(21))
    assert [point.value for point in points] == pytest.approx([1 / (n + 1) for n in range(21)])
    assert [(point.step, round(point.value, 3)) for point in reader.Scalars("accuracy")] == [
        (10, 0.1),
        (20, 0.2),
    ]


def test_visualdls_own_reader_sees_one_file_with_each_step_once(tmp_path):
    visualdl = pytest.importorskip("visualdl")
    train(tmp_path, 0, 11, kind="visualdl")
    train(tmp_path, 8, 21, kind="visualdl").close()
    (path,) = tmp_path.glob("vdlrecords*")
    points = visualdl.LogReader(file_path=str(path)).get_data("scalar", "loss")
    assert [point.id for point in points] == list(range(21))


def test_what_ended_an_epoch_is_kept_when_the_next_one_is_done_again(tmp_path):
    train(tmp_path, 0, 13)
    train(tmp_path, 10, 12)  # restored behind the commit of epoch 0
    ((step, value),) = noted(tmp_path)["accuracy"]
    assert step == 10
    assert value == pytest.approx(0.1)
    assert [step for step, _value in noted(tmp_path)["loss"]] == list(range(12))


def test_what_ended_an_epoch_is_dropped_when_that_end_is_done_again(tmp_path):
    train(tmp_path, 0, 10)
    again = Progress(epoch=0, step_count=10)  # restored before the commit of epoch 0
    log = RunLog(again, tmp_path)
    log.add_scalar("accuracy", 0.5)
    assert noted(tmp_path)["accuracy"] == [(10, 0.5)]
    assert len(noted(tmp_path)["loss"]) == 10


def test_axes_of_ones_own_are_cut_by_where_the_training_stood_and_not_by_their_numbers(tmp_path):
    progress = Progress()
    log = RunLog(progress, tmp_path)
    for progress.step_count in range(10):
        log.add_scalar("by_images", 1.0, step=progress.step_count * 64)
    progress = Progress(step_count=6)
    log = RunLog(progress, tmp_path)
    for progress.step_count in range(6, 12):
        log.add_scalar("by_images", 2.0, step=progress.step_count * 64)
    assert noted(tmp_path)["by_images"] == [
        (step * 64, 1.0 if step < 6 else 2.0) for step in range(12)
    ]


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 25)), min_size=1, max_size=8))
def test_any_series_of_restarts_leaves_each_step_once(tmp_path_factory, stages):
    folder = tmp_path_factory.mktemp("run")
    done = 0
    for back, steps in stages:
        start = max(0, done - back)
        train(folder, start, start + steps, epoch_steps=7)
        done = start + steps
    points = noted(folder)
    assert [step for step, _value in points["loss"]] == list(range(done))
    ends = [step for step in range(7, done + 1, 7)]
    assert [step for step, _value in points.get("accuracy", [])] == ends


def test_nothing_that_was_noted_is_lost_to_a_sigkill(tmp_path):
    script = """
        import sys, time
        from pod_runtime.trainer.tensorboard.summary import RunLog

        class Progress:
            rank = epoch = step_count = 0

        log = RunLog(Progress, sys.argv[1])
        for Progress.step_count in range(100):
            log.add_scalar("loss", 1.0)
        print("noted", flush=True)
        time.sleep(600)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], stdout=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"noted\n"
        process.send_signal(signal.SIGKILL)
    assert len(noted(tmp_path)["loss"]) == 100


def test_half_a_record_at_the_end_is_cut_off_and_what_follows_is_readable(tmp_path):
    train(tmp_path, 0, 5)
    (path,) = tmp_path.glob("*tfevents*")
    path.write_bytes(path.read_bytes()[:-7])
    train(tmp_path, 4, 8)
    assert [step for step, _value in noted(tmp_path)["loss"]] == list(range(8))


def test_a_trainer_that_was_cut_off_writes_to_what_nobody_reads(tmp_path):
    old = train(tmp_path, 0, 10)
    train(tmp_path, 5, 8)
    old.add_scalar("loss", 99.0)
    old.close()
    assert [step for step, _value in noted(tmp_path)["loss"]] == list(range(8))


def test_a_trainer_that_becomes_rank_0_goes_on_with_the_curves(tmp_path):
    ranks = [Progress(), Progress(rank=1)]
    logs = [RunLog(each, tmp_path / "run") for each in ranks]
    for step in range(6):
        ranks[0].rank, ranks[1].rank = (1, 0) if 2 <= step < 4 else (0, 1)
        for log, each in zip(logs, ranks, strict=True):
            each.step_count = step
            log.add_scalar("loss", step / 8)
    for log in logs:
        log.close()
        log.add_scalar("loss", 9.0)
    assert noted(tmp_path / "run")["loss"] == [(step, step / 8) for step in range(6)]


def test_other_ranks_touch_nothing(tmp_path):
    log = RunLog(Progress(rank=1), tmp_path / "run")
    log.add_scalar("loss", 1.0)
    log.close()
    assert not (tmp_path / "run").exists()


def test_what_does_not_count_is_not_noted_and_takes_nothing_over(tmp_path):
    train(tmp_path, 0, 11)
    before = noted(tmp_path)
    rehearses = Rehearses()
    log = RunLog(rehearses, tmp_path)
    log.add_scalar("loss", 5.0)
    assert noted(tmp_path) == before
    rehearses._counts, rehearses.epoch, rehearses.step_count = True, 1, 11
    log.add_scalar("loss", 6.0)
    rehearses._counts = False  # a step by which the loop measures
    log.add_scalar("loss", 7.0)
    assert noted(tmp_path)["loss"] == [*before["loss"], (11, 6.0)]


def test_files_of_others_in_the_folder_are_left_alone(tmp_path):
    other = tmp_path / "events.out.tfevents.1700000000.host"
    other.write_bytes(b"theirs")
    train(tmp_path, 0, 3)
    train(tmp_path, 0, 3)
    assert other.read_bytes() == b"theirs"


def test_a_folder_that_cannot_be_written_is_an_error_in_the_log_and_training_goes_on(
    tmp_path, caplog
):
    (tmp_path / "file").write_text("in the way")
    log = RunLog(Progress(), tmp_path / "file" / "run")
    log.add_scalar("loss", 1.0)
    log.close()
    assert "training goes on without this log" in caplog.text


def test_a_number_that_outgrows_float32_is_infinite_and_does_not_end_the_training(tmp_path):
    log = RunLog(Progress(), tmp_path)
    for value in (1e39, -1e39, math.inf, 3e38):
        log.add_scalar("perplexity", value)
    values = [value for _step, value in noted(tmp_path)["perplexity"]]
    assert values == pytest.approx([math.inf, -math.inf, math.inf, 3e38])


def test_a_full_disk_is_said_once_and_points_are_noted_again_when_there_is_room(tmp_path, caplog):
    progress = Progress()
    log = RunLog(progress, tmp_path)
    log.add_scalar("loss", 1.0)
    (path,) = tmp_path.glob("*tfevents*")
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Half of the next record fits.
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 8, most))
    try:
        with caplog.at_level(logging.ERROR):
            for progress.step_count in range(1, 4):
                log.add_scalar("loss", 1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))
    assert caplog.text.count("not written") == 1
    progress.step_count = 4
    log.add_scalar("loss", 1.0)
    log.close()
    assert [step for step, _value in noted(tmp_path)["loss"]] == [0, 4]


def test_a_file_that_finds_no_room_when_it_loses_its_end_stays_and_is_left_alone(tmp_path, caplog):
    train(tmp_path, 0, 11)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with nothing_writable():
        train(tmp_path, 8, 9)
    assert "training goes on without this log" in caplog.text
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"tag": "", "value": 1}, "tag: expected a name"),
        ({"tag": "a%b", "value": 1}, "without %"),
        ({"tag": "a", "value": "x"}, "value: a: expected a number"),
        ({"tag": "a", "value": [1, 2]}, "value: a: expected a number"),
        ({"tag": "a", "value": 1, "step": -1}, "step: expected a whole number"),
        ({"tag": "a", "value": 1, "step": 1.5}, "step: expected a whole number"),
    ],
)
def test_a_wrong_point_is_refused_with_its_field(tmp_path, kwargs, says):
    with pytest.raises(UsageError, match=says):
        RunLog(Progress(), tmp_path).add_scalar(**kwargs)


def test_a_wrong_kind_or_a_url_is_refused(tmp_path):
    with pytest.raises(UsageError, match="kind: expected one of auto, tensorboard, visualdl"):
        RunLog(Progress(), tmp_path, kind="wandb")
    with pytest.raises(UsageError, match="folder: expected a local or mounted folder"):
        RunLog(Progress(), "s3://bucket/run")


def test_visualdl_that_is_not_installed_is_named_with_its_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "visualdl", None)
    with pytest.raises(UsageError, match="pip install visualdl"):
        RunLog(Progress(), tmp_path, kind="visualdl")


def test_tensors_and_numpy_scalars_are_numbers(tmp_path):
    numpy = pytest.importorskip("numpy")
    log = RunLog(Progress(), tmp_path)
    log.add_scalar("a", numpy.float32(0.5))
    log.add_scalar("a", numpy.array([0.25]))
    assert noted(tmp_path)["a"] == [(0, 0.5), (0, 0.25)]


scalars = st.builds(
    Scalar,
    tag=st.text(min_size=1, max_size=20),
    value=st.floats(width=32, allow_nan=False),
    step=st.integers(0, 2**62),
    wall_time=st.floats(0, 4e9),
    at=st.builds(Position, st.integers(0, 2**31), st.integers(0, 2**62)),
)


@given(st.lists(scalars, max_size=5), st.binary(max_size=20))
def test_scalars_come_back_as_they_were_and_what_is_damaged_ends_the_file(points, rubbish):
    data = encode_header(1.0) + b"".join(map(encode_scalar, points))
    read = list(read_scalars(data + rubbish))
    assert [scalar for _end, scalar in read] == [None, *points]
    assert read[-1][0] == len(data)


def test_the_checksum_is_crc32c():
    # RFC 3720, B.4: 32 bytes of zeros have 8A9136AA.
    crc = 0x8A9136AA
    assert masked_crc(bytes(32)) == ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
