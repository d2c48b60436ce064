"""The program as its users start it: alone, by Paddle's launcher, in a pod, and by `edl run`."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from options import parse

from benchmarks import accuracy
from pod_runtime.trainer.tensorboard.event_file import read_scalars
from tests import warm
from tests.support import ROOT

pytestmark = pytest.mark.timeout(900)  # most tests start programs that import Paddle

FOLDER = ROOT / "resnet50"
PROGRAM = FOLDER / "train_with_fleet.py"
SMALL = (
    "--total_images=40", "--num_epochs=2", "--fetch_steps=1", "--do_test=False",
    "--total_batch_size=20", "--lr=0.001", "--model=ResNet18", "--use_mixup",
    "--use_label_smoothing=True",
)  # fmt: skip


def environment(**more: str) -> dict[str, str]:
    """Return this environment as a shell outside of any training has it."""
    ours = ("PADDLE_", "EDL_", "FLAGS_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore:No ccache found"}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    return env | more


def start(*command: object, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def train(*options: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return warm.run([str(PROGRAM), *options], environment(**more), cwd)


def scores_in(said: str) -> list[float]:
    """Return loss, acc1 and acc5 of the last line that has them."""
    found = re.findall(r"test_loss (\S+), test_acc1 (\S+), test_acc5 (\S+)$", said, re.M)
    assert found, said
    return [float(value) for value in found[-1]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A short training of the digits on one trainer, of two that there might be, ends well."""
    folder = tmp_path_factory.mktemp("alone")
    done = train(
        *SMALL, "--checkpoint=ckpt", "--fuse=True", "--log_dir=runs",
        cwd=folder, EDL_MAX_TRAINERS="2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_alone_it_trains_and_says_with_what(alone):
    _folder, said = alone
    assert (
        "ResNet18 on 40 images of handwritten digits (no --data_dir): batches of 20 in 2 shards, "
        "1 trainers, cpu\n"
    ) in said
    assert "warning: --fuse=True does nothing: gradients always go in one flat all-reduce\n" in said
    assert "warning: a shard has 10 images; with fewer than 16 batch norm learns badly" in said
    assert len(re.findall(r"^Pass \d, trainbatch \d/2, loss \d+\.\d{5}, lr ", said, re.M)) == 4


def test_it_tests_after_the_last_epoch_without_do_test(alone):
    _folder, said = alone
    ends = re.findall(r"^End pass (\d), train_loss [\d.]+, speed .* images/s(.*)$", said, re.M)
    assert [(number, bool(tested)) for number, tested in ends] == [("0", False), ("1", True)]
    loss, acc1, acc5 = scores_in(said)
    assert loss > 0
    assert 0 <= acc1 <= acc5 <= 1


def test_its_numbers_are_one_run_of_tensorboard(alone):
    folder, said = alone
    (events,) = (folder / "runs").iterdir()
    scalars = [each for _end, each in read_scalars(events.read_bytes()) if each is not None]
    assert [each.step for each in scalars if each.tag == "train/loss"] == [0, 1, 2, 3]
    (acc5,) = [each.value for each in scalars if each.tag == "test/acc5"]
    assert acc5 == pytest.approx(scores_in(said)[2], abs=1e-5)
    assert {each.tag for each in scalars} == {
        "train/loss", "train/lr", "train/images_per_s", "test/loss", "test/acc1", "test/acc5",
    }  # fmt: skip


def test_a_training_that_is_done_is_not_done_again(alone):
    folder, _said = alone
    again = train(*SMALL, "--checkpoint=ckpt", cwd=folder, EDL_MAX_TRAINERS="2")
    assert again.returncode == 0, again.stderr
    assert "Pass" not in again.stdout


def test_another_batch_than_that_of_the_checkpoint_is_refused_in_a_line(alone):
    folder, _said = alone
    other = train(*SMALL, "--total_batch_size=10", "--checkpoint=ckpt", cwd=folder)
    assert other.returncode == 1
    assert "train_with_fleet.py: batch_size: " in other.stderr
    assert "continue with --total_batch_size=20, or start afresh" in other.stderr
    assert "Traceback" not in other.stderr


def test_the_weights_at_the_end_are_a_pretrained_model_of_another_training(alone, tmp_path):
    folder, _said = alone
    weights = folder / "output" / "ResNet18" / "1" / "model.pdparams"
    other = train(
        f"--pretrained_model={weights}", "--model=ResNet18", "--class_dim=11",
        "--total_images=16", "--num_epochs=1", cwd=tmp_path,
    )  # fmt: skip
    assert other.returncode == 0, other.stderr
    assert f"100 of 102 weights from {weights}; not in it, or of another shape" in other.stdout


@pytest.mark.slow
def test_paddle_launcher_trains_on_two_trainers_what_one_would(alone, tmp_path):
    _folder, said_alone = alone
    two = start(
        sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", "2",
        "--log_dir", "log", PROGRAM, *SMALL, cwd=tmp_path,
    )  # fmt: skip
    logs = {path.name: path.read_text() for path in (tmp_path / "log").glob("workerlog.*")}
    assert two.returncode == 0, logs
    said = logs["workerlog.0"]
    assert "batches of 20 in 2 shards, 2 trainers, cpu" in said
    assert "Pass" not in logs["workerlog.1"]  # told once
    assert scores_in(said) == pytest.approx(scores_in(said_alone), rel=1e-3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--fp16=True"], "--fp16=True: half precision needs a GPU, this training is on the CPU"),
        (["--use_gpu=True"], "--use_gpu=True: Paddle finds no GPU here; leave it out"),
        (["--class_dim=9"], "class_dim: 9 is too small for 10 digits"),
        (["--model=AlexNet"], "--model: got 'AlexNet'; choose one of ResNet18"),
        (["--model_save_dir=/dev/null/x"], "--model_save_dir: /dev/null/x: Not a directory"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line_and_ends_with_2(tmp_path, options, said):
    done = train(*options, cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.heavy
def test_the_package_script_makes_a_folder_that_trains_by_itself(tmp_path):
    pods = tmp_path / "pods"
    made = start(
        "bash", FOLDER / "package.sh", "-pod_id", "pod_0_0", cwd=tmp_path, pod_path=str(pods)
    )
    assert made.returncode == 0, made.stderr
    pod = pods / "pod_0_0"
    sources = {path.name for path in FOLDER.glob("*.py")} | {"package.sh", "train_pretrain.sh"}
    assert sources | {"recipes", "scripts"} == {path.name for path in pod.iterdir()}

    done = start(
        "bash", pod / "train_pretrain.sh", *SMALL, "--num_epochs=1", "--total_images=20",
        "--model_save_dir=out", cwd=tmp_path, CUDA_VISIBLE_DEVICES="",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "this trains handwritten digits at 32 pixels; checkpoints in" in done.stdout
    assert (pod / "fleet_checkpoints").is_dir()
    assert (pod / "out" / "ResNet18" / "0" / "model.pdparams").is_file()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "-pod_id: missing"),
        (["-pod_id"], "-pod_id: its value is missing"),
        (["-pod_id", "../up"], "-pod_id: '../up' is no name of a folder"),
        (["--pod", "a"], "--pod: unknown argument"),
    ],
)
def test_the_package_script_refuses_what_it_does_not_understand(tmp_path, arguments, said):
    done = start("bash", FOLDER / "package.sh", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_imagenet_is_trained_by_the_recipe_where_it_is_named(tmp_path):
    """With a program in the place of ours that shows what it is told."""
    shutil.copytree(FOLDER / "recipes", tmp_path / "recipes")
    shutil.copy(FOLDER / "train_pretrain.sh", tmp_path)
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "python").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (bin_folder / "python").chmod(0o755)
    env = environment()
    done = start(
        "bash", tmp_path / "train_pretrain.sh", "--num_epochs=1", cwd=tmp_path,
        PATH=f"{bin_folder}{os.pathsep}{env['PATH']}",
        PADDLE_EDL_IMAGENET_PATH=str(tmp_path), PADDLE_POD_ID="pod_0_0", EDL_POD_DIR="/shim",
        PADDLE_EDL_FLEET_CHECKPOINT_PATH="hdfs://node:9000/ckpt",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    assert f"ImageNet in {tmp_path}, checkpoints in hdfs://node:9000/ckpt" in told[0]
    assert told[1:7] == [
        "-m", "pod_runtime.launch", "--log_dir", "/shim/trainers", "--log_level", "20",
    ]  # fmt: skip
    options = parse(told[8:])
    assert (options.total_batch_size, options.num_epochs, options.lr) == (1024, 1, 0.1)
    assert options.decay_epochs == [30, 60, 80]
    assert options.checkpoint == "hdfs://node:9000/ckpt"
    assert options.model_save_dir == f"{tmp_path}/../output"


@pytest.mark.slow  # a minute of both cores; other tests change pods with small networks
@pytest.mark.timeout(900)
def test_pods_that_change_leave_one_training(tmp_path, monkeypatch):
    """Two pods, then one, as the benchmark of accuracy asks for it: real processes."""
    monkeypatch.setattr(accuracy, "SIZES", (2, 1))
    monkeypatch.setattr(accuracy, "MAX_PODS", 2)
    # After the first step, which is told at once, and four before the end: steps may be quick.
    monkeypatch.setattr(accuracy, "change_steps", lambda _total, _changes: [1])
    monkeypatch.setattr(accuracy, "_LOOK_S", 0.1)
    args = accuracy.parse(
        ["--images=200", "--epochs=1", "--batch=40", "--lr=0.001", f"--out={tmp_path}"]
    )
    result = accuracy.Run(args, seed=1, changed=True).run()
    assert (result.changes, result.redone_steps) == (1, 0)
    assert result.verified == "OK: 5 steps, each counted once"
    output = next(tmp_path.glob("*/seed1_changed/output.log")).read_text()
    assert "batches of 40 in 2 shards, 2 trainers, cpu" in output
    assert "batches of 40 in 2 shards, 1 trainers, cpu" in output
    assert scores_in(output)[1] == result.acc1


def test_a_run_that_fails_says_where_its_output_is(tmp_path, monkeypatch):
    monkeypatch.setattr(accuracy, "SIZES", (5,))
    run = accuracy.Run(accuracy.parse([f"--out={tmp_path}"]), seed=1, changed=False)
    with pytest.raises(accuracy.RunFailed, match=r"ended with code 2; its output is in .*\.log"):
        run.run()
    assert "edl run: --pods: 5 is not between 1 (--min) and 3 (--max)" in run.log.read_text()


@pytest.mark.parametrize(
    ("fixed", "changed", "difference", "allowed", "holds"),
    [
        pytest.param([0.9, 0.9], [0.91, 0.9], 0.5, 1.0, True, id="within a point"),
        pytest.param([0.9, 0.9], [0.88, 0.88], -2.0, 1.0, False, id="surely worse"),
        pytest.param([0.9, 0.9], [0.93, 0.93], 3.0, 1.0, False, id="surely better is odd, too"),
        pytest.param([0.94, 0.90], [0.92, 0.88], -2.0, 5.65685, True, id="within the noise"),
        pytest.param([0.9], [0.9], 0.0, 1.0, True, id="one pair knows no noise"),
    ],
)
def test_means_are_compared_by_a_point_or_two_standard_errors(
    fixed, changed, difference, allowed, holds
):
    summary = accuracy.summarize(fixed, changed)
    assert summary.difference == pytest.approx(difference)
    assert summary.allowed == pytest.approx(allowed)
    assert summary.holds is holds


def test_changes_are_spread_evenly_over_the_steps():
    assert accuracy.change_steps(150, 6) == [21, 43, 64, 86, 107, 129]
