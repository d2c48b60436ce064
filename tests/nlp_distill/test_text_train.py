"""The example as its users start it: run.sh from end to end, and its programs by themselves."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from text_options import parse_student, parse_teacher

from tests.support import ROOT, free_port

FOLDER = ROOT / "nlp_distill"
STUDENT = FOLDER / "train_student.py"
ACCURACY = re.compile(r"^accuracy on (\d+) test texts: ([\d.]+)%$", re.M)

pytestmark = pytest.mark.timeout(900)  # seconds: several programs, on a busy machine


def start(*command: object, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a program as a shell outside of any training would."""
    ours = ("PADDLE_", "EDL_", "FLAGS_", "TEACHERS")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore:No ccache found", "EDL_NO_GPU": "1"}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd, env=env | more, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole_run(texts, tmp_path_factory):
    """run.sh on few and easy texts; returns its folder and what it said."""
    state = tmp_path_factory.mktemp("state")
    extra = state / "extra.txt"
    extra.write_text("butter knife onion\nsea\tanchor and sail\n")
    done = start(
        "bash", FOLDER / "run.sh", f"--data_dir={texts}", "--labelled=3", "--unlabelled=110",
        "--unlabelled_file", extra, "--num_epochs=8", "--fetch_steps=2", "--lr=0.02",
        "--checkpoint", "both", "--model_save_dir", "saved",
        "--", "--num_epochs=10", "--lr=0.01",
        "--layers=1", "--width=16", "--dropout=0.1",
        cwd=state, EDL_STATE_DIR=str(state), EDL_PYTHON=sys.executable,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return state / "nlp_distill", done.stdout


@pytest.mark.heavy
def test_run_trains_a_teacher_serves_it_and_compares_two_students(whole_run):
    folder, said = whole_run
    assert "transformer of 1 layers, 16 wide, on 120 texts of 3 classes; " in said
    taught, alone = re.findall(
        r"^bow on (\d+) texts of 3 classes, 3 with a label; (.*?);", said, re.M
    )
    assert taught[0] == "115"
    assert re.fullmatch(r"teachers 127\.0\.0\.1:\d+", taught[1])
    assert alone == ("3", "no teacher")
    told = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    shown = [float(percent) for _texts, percent in ACCURACY.findall(said)]
    assert shown == [
        pytest.approx(100 * told[name]["accuracy"], abs=0.005)
        for name in ("teacher", "distilled", "alone")
    ]
    assert shown[0] > 90, "the texts are easy"
    assert shown[1] > shown[2], "what the teacher says of the others is worth something"


@pytest.mark.heavy
def test_each_student_has_a_checkpoint_of_its_own(whole_run):
    folder, _said = whole_run
    assert {path.name for path in (folder.parent / "both").iterdir()} == {"distilled", "alone"}


@pytest.mark.heavy
def test_each_student_is_saved_in_a_folder_of_its_own(whole_run):
    # In one folder the second, without a teacher, took the place of the first.
    folder, _said = whole_run
    weights = [
        (folder.parent / "saved" / name / "weights.pdparams").read_bytes()
        for name in ("distilled", "alone")
    ]
    assert weights[0] != weights[1]


def test_run_takes_use_gpu_without_a_value(texts, tmp_path):
    done = start(
        "bash", FOLDER / "run.sh", f"--data_dir={texts}", "--use_gpu", "--num_epochs=1",
        cwd=tmp_path, EDL_STATE_DIR=str(tmp_path), EDL_PYTHON=sys.executable,
        CUDA_VISIBLE_DEVICES="",
    )  # fmt: skip
    assert done.returncode != 0
    assert "--use_gpu True: Paddle finds no GPU here" in done.stderr


@pytest.fixture(scope="module")
def teacher(whole_run) -> Iterator[str]:
    """The endpoint of a teacher that serves what run.sh has trained."""
    process = subprocess.Popen(
        [sys.executable, "-m", "distill_reader.serve", "--port", "0",
         "--model", str(whole_run[0] / "text_teacher_model")],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        yield process.stdout.readline().removeprefix("teacher ready on ").split(": ")[0]
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()


@pytest.mark.slow  # as images do, in the tests of ResNet50
def test_two_trainers_of_paddles_launcher_distil_what_one_would(
    whole_run, teacher, texts, tmp_path
):
    command = (
        STUDENT, f"--data_dir={texts}", "--labelled=15", "--unlabelled=all", "--num_epochs=2",
        "--use_distill_service=True", f"--distill_teachers={teacher}",
        f"--teacher_dir={whole_run[0] / 'text_teacher_model'}", "--no_teacher_timeout_s=100",
        f"--distill_cache={tmp_path / 'soft_labels'}",
    )  # fmt: skip
    alone = start(  # fills the cache, of which the two trainers then read all
        sys.executable, *command, "--model_save_dir=out", cwd=tmp_path, EDL_MAX_TRAINERS="2"
    )
    assert alone.returncode == 0, alone.stderr
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "weights.pdparams", "vocabulary.json", "classes.json",
    }  # fmt: skip
    two = start(
        sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", "2",
        "--log_dir", "log", *command, cwd=tmp_path,
    )  # fmt: skip
    logs = {path.name: path.read_text() for path in (tmp_path / "log").glob("workerlog.*")}
    assert two.returncode == 0, logs
    tested = re.compile(r"^epoch 1: test loss ([\d.]+), accuracy", re.M)
    losses = [float(tested.findall(said)[0]) for said in (alone.stdout, logs["workerlog.0"])]
    # Dropout is keyed by shard: the same numbers, but for the order of sums.
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert tested.findall(logs["workerlog.1"]) == []
    assert any((tmp_path / "soft_labels").rglob("*"))


@pytest.mark.slow
def test_pods_that_change_leave_one_distillation(whole_run, teacher, texts, tmp_path):
    changes = tmp_path / "changes.yaml"
    changes.write_text("- {at: 12s, pods: 1}\n- {at: 24s, pods: 2}\n")
    done = start(
        sys.executable, "-m", "pod_runtime.run", "--cpu_slots", "2", "--max", "2", "--pods", "2",
        "--change_script", changes, "--log_dir", tmp_path / "run", STUDENT, f"--data_dir={texts}",
        "--labelled=15", "--unlabelled=all", "--num_epochs=800", "--use_distill_service=True",
        f"--distill_teachers={teacher}", "--checkpoint=ckpt",
        f"--teacher_dir={whole_run[0] / 'text_teacher_model'}", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    verified = start(sys.executable, "-m", "pod_runtime.verify", "ckpt", cwd=tmp_path)
    assert "OK: 3200 steps, each counted once" in verified.stdout


@pytest.mark.slow
def test_a_teacher_goes_on_from_an_earlier_one(whole_run, texts, tmp_path):
    earlier = whole_run[0] / "text_teacher_model"
    done = start(
        sys.executable, FOLDER / "train_teacher.py", f"--data_dir={texts}",
        f"--pretrained={earlier}", "--num_epochs=1", "--lr=1e-5", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ((_texts, percent),) = ACCURACY.findall(done.stdout)
    assert float(percent) > 90, "it knew already"


def test_what_cannot_be_done_is_said_in_a_line(texts, tmp_path):
    endpoint = f"127.0.0.1:{free_port()}"
    done = start(
        sys.executable, STUDENT, f"--data_dir={texts}", "--use_distill_service=True",
        f"--distill_teachers={endpoint}", "--teacher_dir=nowhere", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1
    assert "train_student.py: nowhere/teacher.json: describes no teacher" in done.stderr
    assert "Traceback" not in done.stderr


# --- command lines


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--unlabelled=all"], "--unlabelled: texts without a label need a teacher: add --use"),
        (["--unlabelled_file=x"], "texts without a label need a teacher"),
        (
            ["--use_distill_service=True"],
            "needs --distill_teachers HOST:PORT,..., or --distill_disc",
        ),
        (["--use_distill_service=True", "--distill_discovery=h:1"], "needs --distill_service_name"),
        (
            ["--use_distill_service=True", "--distill_discovery=h:1", "--distill_teachers=h:2"],
            "--distill_discovery: not with --distill_teachers; give one",
        ),
        (["--model=lstm"], "argument --model: invalid choice: 'lstm'"),
        (["--alpha=2"], "--alpha: expected a number of at least 0 and at most 1, got '2'"),
        (["--labelled=0"], "--labelled: expected a whole number of at least 1, got '0'"),
    ],
)
def test_wrong_options_of_a_student_end_with_2_and_are_named(capsys, monkeypatch, arguments, said):
    monkeypatch.delenv("PADDLE_DISTILL_BALANCE_SERVER", raising=False)
    with pytest.raises(SystemExit) as ended:
        parse_student(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_discovery_of_the_environment_will_do(monkeypatch):
    monkeypatch.setenv("PADDLE_DISTILL_BALANCE_SERVER", "h:1")
    monkeypatch.setenv("PADDLE_DISTILL_SERVICE_NAME", "texts")
    assert parse_student(["--use_distill_service"]).distill_teachers is None


def test_heads_that_do_not_divide_the_width_are_refused(capsys):
    with pytest.raises(SystemExit):
        parse_teacher(["--width=10", "--heads=4"])
    assert "--heads: 4 do not divide --width 10" in capsys.readouterr().err
