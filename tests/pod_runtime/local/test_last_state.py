"""`edl run` ends pods and writes their state by itself: real shims, real segments, real writers."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pod_runtime import shim_wire
from pod_runtime.local import session as run_session
from pod_runtime.local.last_state import end_pods, find_pods, write_newest
from pod_runtime.segment_header import make_geometry
from tests.job_client.test_saving import hold, hold_up_writers, places
from tests.support import wait_until


@pytest.fixture
def pods_dir(tmp_path: Path):
    """Two pods that sleep, under shims."""
    folder, processes = tmp_path / "pods", []
    for name in ("pod_0_0", "pod_1_0"):
        (folder / name).mkdir(parents=True)
        command = [sys.executable, "-m", "pod_runtime.shim", "--pod_dir", str(folder / name), "--"]
        processes.append(subprocess.Popen([*command, "sleep", "600"], cwd=tmp_path))
    wait_until(lambda: len(find_pods(folder)) == 2)
    yield folder
    for process in processes:
        process.kill()
        process.wait(120)


def hold_damaged(folder: Path) -> None:
    geometry = make_geometry(1, 0, 0)
    fd = os.memfd_create("damaged")
    os.ftruncate(fd, geometry.total_bytes)
    described = {"pod_id": folder.name, "stage": 3, "size_bytes": geometry.total_bytes}
    shim_wire.request(folder, {"op": "put", "segment": described}, (fd,))
    os.close(fd)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("of a checkpoint", "the same command goes on at step 13, from {}/checkpoint"),
        ("of none", "step 13 is in {}/run/checkpoint: give that to the script"),
        ("damaged", "no pod held a state: what checkpoints hold is all"),
        ("not there", "no pod held a state: what checkpoints hold is all"),
        ("nowhere to go", "the newest state is lost, but for what checkpoints hold: "),
    ],
)
def test_the_pods_end_and_the_newest_of_their_states_is_written(pods_dir, tmp_path, state, said):
    first, second = find_pods(pods_dir)
    match state:
        case "of a checkpoint":
            hold(second, places(tmp_path), step=12)
            hold(first, places(tmp_path), step=11)
        case "of none":
            hold(second, places(tmp_path, ""), step=13)
        case "damaged":
            hold_damaged(first)
        case "nowhere to go":
            hold(first, None)
    end_pods([first, second], 5.0, lambda: False)
    assert (first / "exit.json").exists()
    assert (second / "exit.json").exists()
    written = write_newest(find_pods(pods_dir), os.environ, lambda: False)
    assert run_session.describe_last_state(written).startswith(said.format(tmp_path))


def test_neither_the_end_nor_the_writing_is_waited_for_by_who_is_in_a_hurry(pods_dir, tmp_path):
    hold(pods_dir / "pod_0_0", places(tmp_path))
    hold_up_writers(tmp_path)
    begun = time.monotonic()
    end_pods(find_pods(pods_dir), 600.0, lambda: True)
    write_newest(find_pods(pods_dir), os.environ, lambda: True)
    assert time.monotonic() - begun < 10
