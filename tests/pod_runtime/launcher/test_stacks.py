"""Stacks of processes that hang: by themselves, and from outside."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pod_runtime import processes, trainer_main
from pod_runtime.launcher.stacks import HungProcess, ask, take
from tests.support import wait_until

SCRIPT = """
import os, sys, time
def read_sample():
    print("there", flush=True)
    while True:
        time.sleep(60)
def main():
    if os.fork() == 0:
        time.sleep(600)
    read_sample()
main()
"""


@contextlib.contextmanager
def hanging(folder: Path, *, by: list[str]) -> Iterator[HungProcess]:
    """A process that hangs in `read_sample`, and its child, which does nothing either."""
    (folder / "train.py").write_text(SCRIPT)
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, *by, str(folder / "train.py")],
            stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        wait_until(lambda: "there" in log.read_text(), what="the script")
        listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        children = tuple(map(int, listed.split()))
        yield HungProcess(rank=3, pid=process.pid, log_path=log, children=children)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_trainer_and_its_children_write_their_stacks_and_the_script_s_frames_are_shown(tmp_path):
    with hanging(tmp_path, by=[trainer_main.__file__]) as target:
        found = take(target)
        assert found.where.startswith(f"{tmp_path.name}/train.py:6 read_sample")
        assert "train.py:10 main" in found.where
        assert found.text.count("most recent call first") == 2  # its child's as well
        assert processes.read(target.pid) is not None


def test_a_stopped_process_is_looked_at_from_outside_or_that_cannot_be_is_said(tmp_path):
    with hanging(tmp_path, by=[trainer_main.__file__]) as target:
        os.kill(target.pid, signal.SIGSTOP)
        found = take(target)
        assert "read_sample" in found.text or "(state T)" in found.text
        assert "most recent call first" in found.text, "its child answers"
        if not found.where:
            assert "py-spy" in found.unknown
            assert "most recent call first" not in found.unknown, "that is about the trainer alone"


def test_without_py_spy_it_is_said_what_would_help(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sysconfig.get_path", lambda _name: str(tmp_path))
    with hanging(tmp_path, by=[]) as target:
        found = take(target)
    assert found.unknown == found.text
    asleep = found.text.replace("(state R)", "(state S)")  # it has its turn where others are busy
    assert asleep == (
        f"process {target.pid} does not answer SIGQUIT (state S); with py-spy installed its stacks "
        "were shown"
    )


@pytest.mark.parametrize("pid", [0x3FFFFF])
def test_a_process_that_does_not_take_the_signal_is_not_sent_it(tmp_path, pid):
    assert not ask(pid)
    with hanging(tmp_path, by=[]) as target:
        assert not ask(target.pid)
        assert processes.read(target.pid) is not None
