"""A student of served teachers: the two scripts as they are started, loss, layout and options."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import paddle
import pytest
from distillation import Served, as_input, save_teacher, taught_loss
from images import make_sets
from networks import make_network
from options import parse

from tests.resnet50.test_train import FOLDER, environment, scores_in, start, train

pytestmark = pytest.mark.timeout(900)  # seconds: several programs, on a busy machine

TEACH = "--use_distill_service=True"
SCRIPTS = FOLDER / "scripts"


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory) -> Path:
    """A ResNet18 that knows nothing, as the program would save it."""
    folder: Path = tmp_path_factory.mktemp("teacher") / "served"
    options = parse(["--model=ResNet18", f"--serving_model_dir={folder}"])
    paddle.seed(3)
    save_teacher(make_network(options), options)
    return folder


@pytest.fixture(scope="module")
def teacher(teacher_folder, tmp_path_factory) -> Iterator[str]:
    """The endpoint of what start_local_teacher.sh has started in the background."""
    state = tmp_path_factory.mktemp("state")
    env = {"EDL_STATE_DIR": str(state), "EDL_PYTHON": sys.executable, "EDL_NO_GPU": "1"}
    script = SCRIPTS / "start_local_teacher.sh"
    started = start("bash", script, "--port", "0", cwd=state, **env,
                    PADDLE_EDL_TEACHER_MODEL=str(teacher_folder))  # fmt: skip
    try:
        assert started.returncode == 0, started.stderr
        ready = re.search(r"^teacher: (\S+), serves (\S+) \(pid \d+, log ", started.stderr, re.M)
        assert ready, started.stderr
        assert ready[2] == str(teacher_folder)
        again = start("bash", script, cwd=state, **env)
        assert "A teacher runs already" in again.stderr
        yield ready[1]
    finally:
        stopped = start("bash", script, "--stop", cwd=state, **env)
    assert "teacher has stopped." in stopped.stderr


def test_of_two_starts_at_once_one_finds_the_other(teacher_folder, tmp_path):
    # Each wrote its pid over the other's: --stop ended one teacher, and left one.
    env = {"EDL_STATE_DIR": str(tmp_path), "EDL_PYTHON": sys.executable, "EDL_NO_GPU": "1"}
    command = ["bash", SCRIPTS / "start_local_teacher.sh", "--model", teacher_folder, "--port", "0"]
    with ThreadPoolExecutor() as pool:
        both = [pool.submit(start, *command, cwd=tmp_path, **env) for _ in range(2)]
    try:
        said = sorted(each.result().stderr for each in both)
        assert said[0].startswith("A teacher runs already"), said
        assert said[1].startswith("teacher: "), said
    finally:
        start(*command[:2], "--stop", cwd=tmp_path, **env)


@pytest.fixture(scope="module")
def taught(teacher, tmp_path_factory):
    """A pod's student, by train_student.sh: its folder, and what its trainer said."""
    folder = tmp_path_factory.mktemp("taught")
    done = start(
        "bash", SCRIPTS / "train_student.sh", f"--distill_teachers={teacher}", "--num_epochs=1",
        "--total_images=40", "--total_batch_size=20", "--fetch_steps=1",
        f"--model_save_dir={folder / 'out'}", cwd=folder,
        PADDLE_EDL_FLEET_CHECKPOINT_PATH=str(folder / "ckpt"), EDL_POD_DIR=str(folder / "pod"),
    )  # fmt: skip
    logs = [path.read_text() for path in (folder / "pod").rglob("trainer_*.log")]
    assert done.returncode == 0, (done.stdout + done.stderr, logs)
    return folder, next(log for log in logs if "Pass 0" in log)


@pytest.mark.heavy
def test_a_student_learns_from_a_teacher_of_the_scripts(taught, teacher):
    _folder, said = taught
    assert re.search(
        r"^ResNet18_vd on 40 images of handwritten digits \(no --data_dir\): batches of 20 in "
        rf"(\d+) shards, \1 trainers, cpu; taught by {re.escape(teacher)}$",
        said,
        re.M,
    ), said
    assert len(re.findall(r"^Pass 0, trainbatch \d/2, loss \d+\.\d{5}, lr ", said, re.M)) == 2
    assert scores_in(said)[0] > 0


@pytest.mark.heavy
def test_workers_raw_pixels_and_most_of_the_labels_make_the_same_student(taught, teacher, tmp_path):
    """Nine of ten classes: what is left is what the tenth has."""
    shards = re.search(r"batches of 20 in (\d+) shards", taught[1])
    assert shards
    done = train(
        "--model=ResNet18_vd", "--lr=0.01", TEACH, f"--distill_teachers={teacher}",
        "--num_epochs=1", "--total_images=40", "--total_batch_size=20", "--num_threads=2",
        "--distill_wire_dtype=uint8", "--distill_top_k=9",
        cwd=tmp_path, EDL_MAX_TRAINERS=shards[1],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert scores_in(done.stdout) == pytest.approx(scores_in(taught[1]), rel=1e-3)


# --- the loss


def test_the_published_loss_listens_to_the_teacher_alone():
    scores = paddle.to_tensor([[2.0, 0.0, -1.0], [0.5, 0.5, 0.0]])
    soft = paddle.to_tensor([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8]])
    labels = paddle.to_tensor([0, 1])
    shares = np.exp(scores.numpy()) / np.exp(scores.numpy()).sum(axis=1, keepdims=True)
    expected = -(soft.numpy() * np.log(shares)).sum(axis=1).mean()
    found = taught_loss(scores, labels, soft, alpha=1.0, smoothing=0.1)
    assert found.item() == pytest.approx(expected, rel=1e-5)
    hard = -np.log(shares[[0, 1], [0, 1]]).mean()
    mixed = taught_loss(scores, labels, soft, alpha=0.25, smoothing=0.0)
    assert mixed.item() == pytest.approx(0.25 * expected + 0.75 * hard, rel=1e-5)


# --- layout


def test_images_for_teachers_lie_as_teachers_take_them_whatever_the_network_wants():
    options = parse([TEACH, "--distill_teachers=h:1", "--data_format=NHWC", "--total_images=10"])
    image, _label = make_sets(options)[0][0]
    assert image.shape == (3, 32, 32)
    batch = paddle.to_tensor(image[np.newaxis])
    assert as_input(batch, options).shape == [1, 32, 32, 3]
    alone = parse(["--data_format=NHWC", "--total_images=10"])
    image, _label = make_sets(alone)[0][0]
    assert image.shape == (32, 32, 3)
    assert as_input(paddle.to_tensor(image), alone).shape == [32, 32, 3]


def test_raw_pixels_are_normalized_as_floats_are():
    found = []
    for dtype in ("uint8", "float32"):
        options = parse(
            [TEACH, "--distill_teachers=h:1", f"--distill_wire_dtype={dtype}", "--total_images=10"]
        )
        image, _label = make_sets(options)[0][0]
        assert (image.dtype, image.shape) == (dtype, (3, 32, 32))
        found.append(as_input(paddle.to_tensor(image[np.newaxis]), options).numpy())
    assert found[0] == pytest.approx(found[1], abs=1e-5)


def test_a_teacher_serves_the_same_whichever_way_its_network_was_trained():
    images = paddle.rand([2, 3, 32, 32])
    found = []
    for layout in ("NCHW", "NHWC"):
        paddle.seed(1)
        network = make_network(parse(["--model=ResNet18_vd", f"--data_format={layout}"]))
        served = Served(network, channels_last=layout == "NHWC")
        served.eval()
        found.append(served(images).numpy())
    assert found[0].sum(axis=1) == pytest.approx([1, 1])
    assert found[1] == pytest.approx(found[0], abs=1e-4)


# --- command lines


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            [TEACH],
            "--use_distill_service: needs --distill_teachers HOST:PORT,..., or --distill_disc",
        ),
        ([TEACH, "--distill_teachers= ,"], "needs --distill_teachers HOST:PORT"),
        ([TEACH, "--distill_discovery=h:1"], "--distill_discovery: needs --distill_service_name"),
        (
            [TEACH, "--distill_discovery=h:1", "--distill_teachers=h:2"],
            "--distill_discovery: not with --distill_teachers, which are used whole; give one",
        ),
        (
            [TEACH, "--distill_teachers=h:1", "--use_mixup"],
            "--use_mixup: not with --use_distill_ser",
        ),
        (["--distill_alpha=1.1"], "--distill_alpha: expected a number of at least 0 and at most 1"),
    ],
)
def test_wrong_options_of_teachers_end_with_2_and_are_named(capsys, monkeypatch, arguments, said):
    monkeypatch.delenv("PADDLE_DISTILL_BALANCE_SERVER", raising=False)
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_discovery_of_the_environment_will_do(monkeypatch):
    monkeypatch.setenv("PADDLE_DISTILL_BALANCE_SERVER", "h:1")
    monkeypatch.setenv("PADDLE_DISTILL_SERVICE_NAME", "resnext")
    assert parse([TEACH]).distill_teachers is None


@pytest.mark.parametrize("script", ["train_pretrain.sh", "scripts/train_student.sh"])
def test_alone_a_script_becomes_the_training_so_that_signals_reach_it(tmp_path, script):
    """A container sends its SIGTERM to its first process only."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "python").write_text("#!/bin/sh\necho pid $$\n")
    (bin_folder / "python").chmod(0o755)
    path = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
    for server, alone in ((None, True), ("http://127.0.0.1:1", False)):
        given = {"PADDLE_JOBSERVER": server} if server is not None else {}
        with subprocess.Popen(
            ["bash", str(SCRIPTS.parent / script)], cwd=tmp_path, stdout=subprocess.PIPE,
            env=environment(PATH=path, **given), text=True,
        ) as shell:  # fmt: skip
            said, _ = shell.communicate(timeout=120)
        assert (f"pid {shell.pid}" in said.splitlines()) == alone, said


@pytest.mark.parametrize(
    ("given", "teachers"),
    [
        ([], "127.0.0.1:9898"),
        (["--distill_teachers=h:1,h:2"], "h:1,h:2"),
        (["--distill_discovery", "h:3", "--distill_service_name", "n"], None),
    ],
)
def test_imagenet_is_distilled_by_the_published_recipe(tmp_path, given, teachers):
    """With a program in the place of ours that shows what it is told."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "python").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (bin_folder / "python").chmod(0o755)
    done = subprocess.run(
        ["bash", str(SCRIPTS / "train_student.sh"), *given], cwd=tmp_path,
        env=environment(
            PATH=f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
            PADDLE_EDL_IMAGENET_PATH=str(tmp_path),
        ),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    options = parse(told[told.index("train_with_fleet.py") + 1 :])
    assert (options.model, options.total_batch_size, options.lr) == ("ResNet50_vd", 256, 0.1)
    assert (options.lr_strategy, options.num_epochs) == ("cosine_warmup_decay", 120)
    assert (options.use_distill_service, options.distill_alpha) == (True, 1.0)
    assert options.distill_teachers == teachers
