"""The quickstart as a user runs it: real server, client, pods and trainers."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.support import ROOT, wait_until

pytest.importorskip("paddle")


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start the quickstart in a folder of this test; it is gone when the test ends."""
    started: list[subprocess.Popen[str]] = []

    def run(*args: str) -> subprocess.Popen[str]:
        log = (tmp_path / "screen").open("w")
        process = subprocess.Popen(
            [
                sys.executable, str(ROOT / "scripts" / "quickstart.py"), "--device", "cpu",
                "--out", str(tmp_path / "out"), *args,
            ],
            cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        log.close()
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(120)


def strays(out: Path) -> list[str]:
    """Processes whose environment or command line names the folder of a run."""
    found = []
    for process in psutil.process_iter():
        try:
            words = [*process.cmdline(), *process.environ().values()]
        except psutil.Error:
            continue
        if process.pid != os.getpid() and any(str(out) in word for word in words):
            found.append(f"{process.pid} {words}")
    return found


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--pods", "2", "--gap_s", "0.5"], id="short"),
        pytest.param(["--framework", "torch"], id="torch", marks=pytest.mark.slow),
        pytest.param([], id="as it is", marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(800)
def test_the_quickstart_ends_well_and_leaves_nothing_running(
    start: Start, tmp_path: Path, options: list[str]
):
    code = start(*options).wait(700)
    screen = (tmp_path / "screen").read_text()
    assert code == 0, screen
    assert "the job ended as" in screen
    assert "no process is left" in screen
    assert strays(tmp_path / "out") == []
    assert (tmp_path / "out" / "status.html").stat().st_size > 0
    assert list((tmp_path / "out" / "checkpoint").rglob("manifest.json"))


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_ctrl_c_in_the_middle_of_training_cleans_up_everything(start: Start, tmp_path: Path):
    pytest.importorskip("torch")  # so that the other framework's quickstart is seen as well
    quickstart = start("--framework", "torch", "--pods", "2", "--gap_s", "60")
    screen = tmp_path / "screen"
    wait_until(
        lambda: "stage 1" in screen.read_text() or quickstart.poll() is not None, timeout_s=240
    )
    assert quickstart.poll() is None, screen.read_text()
    quickstart.send_signal(signal.SIGINT)
    assert quickstart.wait(120) == 130
    assert "has been stopped" in screen.read_text()
    assert "images/s by 1 trainer of 1 thread" in screen.read_text()
    assert strays(tmp_path / "out") == []


def test_a_server_that_was_killed_is_said_and_leaves_nothing_running(start: Start, tmp_path: Path):
    process, screen = start(), tmp_path / "screen"
    wait_until(lambda: "status page" in screen.read_text())
    (server,) = (
        each for each in psutil.Process(process.pid).children() if "job_server" in each.cmdline()
    )
    server.kill()
    assert process.wait(120) == 1
    assert "job_server ended with exit code -9" in screen.read_text()
    assert strays(tmp_path / "out") == []


@pytest.mark.parametrize(
    ("args", "said"),
    [
        pytest.param(["--pods", "1"], "--pods: must be at least 2, got 1", id="too few pods"),
        pytest.param(["--epochs", "0"], "--epochs: must be at least 1, got 0", id="no epoch"),
        pytest.param(["--gap_s", "0"], "--gap_s: must be between 0.5 and 3600, got 0", id="gap"),
        pytest.param(["--model", "vgg"], "invalid choice: 'vgg'", id="unknown model"),
        pytest.param(
            ["--framework", "torch", "--model", "resnet50"],
            "--model: resnet50 is only there with --framework paddle",
            id="a model that PyTorch's example lacks",
        ),
    ],
)
def test_a_wrong_command_line_is_named_and_starts_nothing(
    start: Start, tmp_path: Path, args: list[str], said: str
):
    assert start(*args).wait(100) == 2
    assert said in (tmp_path / "screen").read_text()
    assert not (tmp_path / "out").exists()


def test_a_folder_that_exists_is_not_written_into(start: Start, tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    assert start().wait(100) == 2
    assert "File exists" in (tmp_path / "screen").read_text()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
