"""The example as users start it: run.sh from end to end, and each way to start the program."""

import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests import warm
from tests.support import ROOT, free_port, wait_until

FOLDER = ROOT / "mnist_distill"
PROGRAM = FOLDER / "train_with_fleet.py"
SMALL = ("--labelled=60", "--num_epochs=3", "--test_epochs=3", "--batch_size=30", "--fetch_steps=1")
ACCURACY = re.compile(r"^The classification accuracy is ([\d.]+)%$", re.M)

pytestmark = pytest.mark.timeout(900)  # seconds: several programs, on a busy machine


def environment(**more: str) -> dict[str, str]:
    """Return this environment as a shell outside of any training has it."""
    ours = ("PADDLE_", "EDL_", "FLAGS_", "TEACHERS")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore:No ccache found"}
    env["EDL_NO_GPU"] = "1"
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    return env | more


def start(*command: object, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment(**more),
        capture_output=True,
        text=True,
        check=False,
    )


def train(*options: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return warm.run([str(PROGRAM), *options], environment(**more), cwd)


def processes_with(mark: str) -> list[psutil.Process]:
    """Return the living processes whose environment has `mark` as a value."""
    found = []
    for process in psutil.process_iter():
        try:
            if mark in process.environ().values() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """run.sh with two teachers on few images; returns its folder and what it said."""
    state = tmp_path_factory.mktemp("state")
    mark = uuid.uuid4().hex
    done = start(
        "bash", FOLDER / "run.sh", *SMALL, "--unlabelled=20", "--checkpoint", "both",
        "--model=mlp", "--save_serving_model", "--serving_model_dir", "saved",
        "--", "--num_epochs=2",
        cwd=state, EDL_STATE_DIR=str(state), EDL_PYTHON=sys.executable, TEACHERS="2",
        MNIST_TEST_MARK=mark,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return state / "mnist_distill", done.stdout, mark


@pytest.mark.heavy
def test_run_trains_a_teacher_serves_it_and_compares_two_students(whole_run):
    folder, said, _mark = whole_run
    intro = re.findall(r"^(cnn|mlp) on (\d+) images of scikit-learn's digits .*; (.*);", said, re.M)
    assert [(model, images) for model, images, _ in intro] == [
        ("cnn", "1437"), ("mlp", "80"), ("mlp", "60")
    ]  # fmt: skip
    assert intro[0][2] == intro[2][2] == "no teacher"
    assert re.fullmatch(r"teachers 127\.0\.0\.1:\d+,127\.0\.0\.1:\d+", intro[1][2])
    assert said.count("--unlabelled does nothing: images without a label need a teacher\n") == 1
    told = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    shown = [float(value) for value in ACCURACY.findall(said)]
    assert shown == [
        pytest.approx(100 * told[name]["accuracy"], abs=0.005)
        for name in ("teacher", "distilled", "alone")
    ]
    assert shown[0] > 80
    assert re.search(rf"^student with the teacher +mlp +{shown[1]:.2f}% right$", said, re.M)


@pytest.mark.heavy
def test_each_student_has_a_checkpoint_of_its_own(whole_run):
    # In one folder the second went on from the first, which had learned from the teacher.
    folder, _said, _mark = whole_run
    kept = {path.name for path in (folder.parent / "both").iterdir()}
    assert kept == {"distilled", "alone"}


@pytest.mark.heavy
def test_each_student_is_saved_in_a_folder_of_its_own(whole_run):
    # In one folder the second, without a teacher, took the place of the first.
    folder, _said, _mark = whole_run
    saved = [
        sorted((folder.parent / "saved" / name).glob("*.pdiparams"))
        for name in ("distilled", "alone")
    ]
    assert [len(files) for files in saved] == [1, 1]
    assert saved[0][0].read_bytes() != saved[1][0].read_bytes()


@pytest.mark.heavy
def test_both_teachers_have_answered_and_ended_in_order(whole_run):
    folder, _said, _mark = whole_run
    for number in (1, 2):
        assert (folder / f"teacher{number}.out").read_text().startswith("teacher ready on ")
        assert "__main__: ended" in (folder / f"teacher{number}.log").read_text()


@pytest.mark.heavy
def test_nothing_runs_any_more_after_run(whole_run):
    # A helper of a teacher may end a moment after the teacher, which run.sh has waited for.
    wait_until(lambda: not processes_with(whole_run[2]), what="all have ended")


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, id="SIGINT"),
        pytest.param(signal.SIGTERM, 143, id="SIGTERM", marks=pytest.mark.slow),
    ],
)
def test_a_signal_amid_the_student_leaves_nothing(tmp_path, number, code):
    mark = uuid.uuid4().hex
    said = tmp_path / "said"
    with said.open("w") as out:
        process = subprocess.Popen(
            ["bash", str(FOLDER / "run.sh"), "--labelled=60", "--num_epochs=100000", "--",
             "--num_epochs=1", "--labelled=64"],
            cwd=tmp_path, stdout=out, stderr=subprocess.STDOUT,
            env=environment(
                EDL_STATE_DIR=str(tmp_path), EDL_PYTHON=sys.executable, MNIST_TEST_MARK=mark
            ),
        )  # fmt: skip
    try:
        wait_until(
            lambda: process.poll() is not None or "mlp on 60" in said.read_text(), timeout_s=240
        )
        wait_until(lambda: process.poll() is not None or "Epoch 9," in said.read_text(), 240)
        assert process.poll() is None, said.read_text()
        assert len(processes_with(mark)) >= 4  # the script, front, predictor and student
        process.send_signal(number)
        assert process.wait(60) == code
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)
    wait_until(lambda: not processes_with(mark), what="all have ended")


@pytest.mark.parametrize("folder", ["mnist_distill", "nlp_distill"])
def test_a_second_run_in_the_same_folder_is_refused(tmp_path, folder):
    # Each showed the other's teacher and accuracy as its own.
    mark = uuid.uuid4().hex
    run, more = ROOT / folder / "run.sh", {"EDL_STATE_DIR": str(tmp_path)}
    more |= {"EDL_PYTHON": sys.executable, "MNIST_TEST_MARK": mark}
    said = tmp_path / "said"
    with said.open("w") as out:
        first = subprocess.Popen(
            ["bash", str(run)], cwd=tmp_path, stdout=out, stderr=out, env=environment(**more)
        )
    try:
        wait_until(lambda: first.poll() is not None or "--- " in said.read_text())
        second = start("bash", run, cwd=tmp_path, **more)
        assert second.returncode == 1
        assert f"{tmp_path / folder} is another run's: wait" in second.stderr
        assert "EDL_STATE_DIR=DIR" in second.stderr
    finally:
        first.kill()
        first.wait(60)
    with (tmp_path / folder / "lock").open("a") as lock:  # what a killed run leaves holds it not
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    for process in processes_with(mark):
        with contextlib.suppress(psutil.NoSuchProcess):  # it was ending by itself
            process.kill()


# --- the program


@pytest.fixture(scope="module")
def teacher(whole_run) -> Iterator[str]:
    """The endpoint of a teacher that serves what run.sh has trained."""
    process = subprocess.Popen(
        [
            sys.executable, "-m", "distill_reader.serve",
            "--model", str(whole_run[0] / "mnist_cnn_model"), "--port", "0",
        ],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment(),
    )  # fmt: skip
    assert process.stdout is not None
    try:
        ready = process.stdout.readline()
        yield ready.removeprefix("teacher ready on ").split(": ")[0]
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()


def distilled(teacher: str, *more: str) -> tuple[str, ...]:
    return (
        *SMALL, "--use_distill_service=True", f"--distill_teachers={teacher}",
        "--unlabelled=70", "--no_teacher_timeout_s=100", *more,
    )  # fmt: skip


@pytest.mark.slow
def test_paddle_launcher_distils_on_two_trainers_what_one_would(teacher, tmp_path):
    alone = train(*distilled(teacher), cwd=tmp_path, EDL_MAX_TRAINERS="2")
    assert alone.returncode == 0, alone.stderr
    assert "mlp on 130 images" in alone.stdout
    assert ", 60 with a label; teachers 127.0.0.1:" in alone.stdout
    two = start(
        sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", "2",
        "--log_dir", "log", PROGRAM, *distilled(teacher), cwd=tmp_path,
    )  # fmt: skip
    logs = {path.name: path.read_text() for path in (tmp_path / "log").glob("workerlog.*")}
    assert two.returncode == 0, logs
    assert "in 2 shards, 2 trainers, cpu" in logs["workerlog.0"]
    tested = re.compile(r"avg_cost: ([\d.]+), acc")
    costs = [float(tested.findall(said)[-1]) for said in (alone.stdout, logs["workerlog.0"])]
    assert costs[1] == pytest.approx(costs[0], rel=1e-3)
    assert ACCURACY.findall(logs["workerlog.1"]) == []  # told once


@pytest.mark.slow
def test_pods_that_change_leave_one_distillation(teacher, tmp_path):
    changes = tmp_path / "changes.yaml"
    changes.write_text("- {at: 12s, pods: 1}\n- {at: 24s, pods: 2}\n")
    done = start(
        sys.executable, "-m", "pod_runtime.run", "--cpu_slots", "2", "--max", "2", "--pods", "2",
        "--change_script", changes, "--log_dir", tmp_path / "run",
        PROGRAM,
        *distilled(teacher, "--num_epochs=1000", "--test_epochs=1000", "--checkpoint=ckpt"),
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    verified = start(sys.executable, "-m", "pod_runtime.verify", "ckpt", cwd=tmp_path)
    assert "OK: 5000 steps, each counted once" in verified.stdout
    (ledger,) = (tmp_path / "run").rglob("ledger.jsonl")
    rows = [json.loads(line) for line in ledger.read_text().splitlines()]
    assert {row["world_size"] for row in rows if row["kind"] == "stage"} == {1, 2}


def test_a_teacher_that_never_comes_ends_the_training_with_a_word(tmp_path):
    endpoint = f"127.0.0.1:{free_port()}"
    done = train(
        *SMALL, "--use_distill_service=True", f"--distill_teachers={endpoint}",
        "--no_teacher_timeout_s=0.5", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1
    assert "train_with_fleet.py: " in done.stderr
    assert endpoint in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--use_gpu=True"], 2, "--use_gpu True: Paddle finds no GPU here; leave it out"),
        (["--data_dir=nowhere"], 1, "--data_dir nowhere: train-images-idx3-ubyte is missing"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(tmp_path, options, code, said):
    done = train(*options, cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "more", "code", "said"),
    [
        (["--help"], {}, 0, "Service distillation in one command"),
        ([], {"TEACHERS": "two"}, 2, "TEACHERS: expected a number from 1 to 99, got 'two'"),
        (["--", "--lr=fast"], {}, 2, "--lr: expected a number above 0, got 'fast'"),
    ],
)
def test_run_says_what_is_wrong_and_ends(tmp_path, arguments, more, code, said):
    done = start(
        "bash", FOLDER / "run.sh", *arguments, cwd=tmp_path,
        EDL_STATE_DIR=str(tmp_path), EDL_PYTHON=sys.executable, **more,
    )  # fmt: skip
    assert done.returncode == code
    assert said in done.stdout + done.stderr


@pytest.mark.slow
def test_what_a_pod_has_trained_is_not_trained_again(tmp_path):
    done = start(
        "bash", FOLDER / "train.sh", *SMALL, cwd=tmp_path,
        PADDLE_EDL_FLEET_CHECKPOINT_PATH=str(tmp_path / "ckpt"),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    logs = [path.read_text() for path in (tmp_path / "log").rglob("trainer_*.log")]
    assert any(ACCURACY.search(log) for log in logs)
    again = train(*SMALL, "--checkpoint=ckpt", "--json=again.json", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "Pass" not in again.stdout
    assert json.loads((tmp_path / "again.json").read_text())["accuracy"] is None


@pytest.mark.slow
def test_the_three_steps_of_the_readme_run(teacher, tmp_path):
    (shown,) = re.findall(r"^```diff\n(.*?)^```$", (FOLDER / "README.md").read_text(), re.M | re.S)
    lines = shown.splitlines()
    after = [line[1:] for line in lines if line[0] in " +"]
    program = "\n".join(after).replace("127.0.0.1:9292", teacher).replace("range(3)", "range(1)")
    done = start(
        sys.executable, "-c", f"{program}\nprint(loss.item() < 2.5)",
        cwd=tmp_path, PYTHONPATH=f"{FOLDER}{os.pathsep}{ROOT}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("True\n")
