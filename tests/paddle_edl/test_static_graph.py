"""A program of 2020 in static graph: the original's calls, and soft labels of a teacher."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT, free_port

pytest.importorskip("paddle")

PROGRAM = """
import sys
import numpy as np
import paddle
from paddle_edl.distill.distill_reader import DistillReader
from pod_runtime import TrainStatus, load_checkpoint, save_checkpoint

path, teacher, last = sys.argv[1:]
paddle.seed(1)
paddle.enable_static()
image = paddle.static.data("image", [None, 4])
soft = paddle.static.data("soft", [None, 1])
loss = ((paddle.static.nn.fc(image, 1) - soft) ** 2).mean()
optimizer = paddle.optimizer.Momentum(0.05)
optimizer.minimize(loss)
exe = paddle.static.Executor()
exe.run(paddle.static.default_startup_program())

def batches():
    draw = np.random.default_rng(0)
    for _ in range(6):
        yield [(draw.random(4, np.float32),) for _ in range(8)]

reader = DistillReader(ins=["image"], predicts=["sum"])
reader.set_fixed_teacher(teacher)
train_reader = reader.set_sample_list_generator(batches)
status = load_checkpoint(exe, path, optimizer=optimizer, trainer_id=0) or TrainStatus()
for epoch in range(status.next(), int(last)):
    for samples in train_reader():
        images, sums = (np.stack(column) for column in zip(*samples))
        assert np.allclose(images.sum(1, keepdims=True), sums)  # each row has its own label
        (value,) = exe.run(feed={"image": images, "soft": sums}, fetch_list=[loss])
        print(epoch, repr(float(value)))
    save_checkpoint(exe, path, train_status=TrainStatus(epoch), optimizer=optimizer)
"""


@pytest.fixture
def teacher(tmp_path):
    """A real `edl serve`; students wait until it answers."""
    folder = tmp_path / "model"
    folder.mkdir()
    port = str(free_port())
    command = [sys.executable, "-m", "distill_reader.serve", "--model", str(folder)]
    command += ["--backend", "tests.distill_reader.teacher.toy_backends:sums", "--port", port]
    with (tmp_path / "teacher.log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    yield f"127.0.0.1:{port}"
    process.terminate()
    process.wait(60)


def test_it_is_fed_by_a_distill_reader_and_goes_on_after_a_restart(tmp_path, teacher):
    def train(checkpoint: Path, epochs: int) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", PROGRAM, checkpoint, teacher, str(epochs)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout.splitlines()

    never_stopped = train(tmp_path / "checkpoint", 4)
    assert len(never_stopped) == 4 * 6
    assert float(never_stopped[-1].split()[1]) < float(never_stopped[0].split()[1]) / 4
    for newer in tmp_path.glob("checkpoint/stage_*/epoch_*[34]_step_*"):
        shutil.rmtree(newer)
    assert train(tmp_path / "checkpoint", 4) == never_stopped[2 * 6 :]
