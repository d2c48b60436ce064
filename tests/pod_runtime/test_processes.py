"""/proc, read beside real processes."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from pod_runtime import processes
from tests.support import descriptors_free, no_descriptor_free, wait_until

Spawn = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Start programs; all are dead when the test ends."""
    spawned: list[subprocess.Popen[bytes]] = []

    def start(*command: str, **environ: str) -> subprocess.Popen[bytes]:
        spawned.append(subprocess.Popen(command, env={**os.environ, **environ}))
        return spawned[-1]

    yield start
    for process in spawned:
        process.kill()
        process.wait()


def started(process: subprocess.Popen[bytes]) -> int:
    found = processes.start_time(process.pid)
    assert found is not None
    return found


def test_a_process_is_read_whatever_its_name(tmp_path, spawn):
    program = tmp_path / "a) S 1 (b"
    program.symlink_to("/bin/sleep")
    process = spawn(str(program), "600")
    wait_until(lambda: (p := processes.read(process.pid)) is not None and p.state == "S")
    found = processes.read(process.pid)
    assert found is not None
    assert found.ppid == os.getpid()
    assert found.pgid == os.getpgid(process.pid)


def test_a_process_that_is_not_there_is_none():
    assert processes.read(2**22 + 1) is None
    assert not processes.is_alive(2**22 + 1, 0)


def test_a_zombie_is_not_alive(spawn):
    process = spawn("true")
    began = processes.start_time(process.pid) or 0
    wait_until(lambda: (p := processes.read(process.pid)) is not None and p.state == "Z")
    assert not processes.is_alive(process.pid, began)


def test_who_cannot_be_looked_at_for_want_of_a_descriptor_does_not_count_as_dead():
    started = processes.start_time(os.getpid())
    assert started is not None
    with no_descriptor_free():
        assert processes.is_alive(os.getpid(), started)
        assert not processes.wait_gone(os.getpid(), started, 0.01)
    assert not processes.is_alive(os.getpid(), started + 1)


def test_another_process_with_the_same_pid_is_not_the_same(spawn):
    process = spawn("sleep", "600")
    assert processes.is_alive(process.pid, started(process))
    assert not processes.is_alive(process.pid, started(process) - 1)
    assert not processes.send_signal(process.pid, started(process) - 1, signal.SIGKILL)
    assert processes.wait_gone(process.pid, started(process) - 1, 0)
    assert process.poll() is None


def test_descendants_of_any_depth_are_found(spawn, tmp_path):
    process = spawn("bash", "-c", f"bash -c 'sleep 600 & echo $! > {tmp_path}/deep; wait'; true")
    deep = tmp_path / "deep"
    wait_until(lambda: deep.exists() and deep.read_text().endswith("\n"))
    found = {each.pid for each in processes.descendants(process.pid)}
    assert int(deep.read_text()) in found
    assert process.pid not in found
    assert len(found) == 2
    os.kill(int(deep.read_text()), signal.SIGKILL)


def test_waiting_for_an_end_returns_with_it_or_in_time(spawn):
    process = spawn("sleep", "600")
    began = started(process)
    assert not processes.wait_gone(process.pid, began, 0.01)
    process.kill()
    assert processes.wait_gone(process.pid, began, 10)


def test_only_marked_processes_are_killed_and_spared_ones_are_not(spawn, tmp_path):
    mark = str(tmp_path)
    victim = spawn("sleep", "600", EDL_TEST_MARK=mark)
    spared = spawn("sleep", "600", EDL_TEST_MARK=mark, KEEP="1")
    similar = spawn("sleep", "600", EDL_TEST_MARK=mark + "x")
    stranger = spawn("sleep", "600")
    wait_until(lambda: len(processes.find_marked("EDL_TEST_MARK", mark)) == 2)
    killed = processes.kill_marked("EDL_TEST_MARK", mark, lambda _pid, env: "KEEP" in env)
    assert killed == [victim.pid]
    assert victim.wait(10) == -signal.SIGKILL
    assert [p.poll() for p in (spared, similar, stranger)] == [None, None, None]


@pytest.mark.parametrize("free", [0, 1])
def test_who_has_no_descriptor_to_kill_with_does_not_say_that_nothing_is_left(spawn, free):
    victim = spawn("sleep", "600", EDL_TEST_MARK=f"few {free}")
    wait_until(lambda: processes.find_marked("EDL_TEST_MARK", f"few {free}"))
    with descriptors_free(free), pytest.raises(OSError, match=r"open files|signalled"):
        processes.kill_marked("EDL_TEST_MARK", f"few {free}", lambda _pid, _env: False)
    assert victim.poll() is None


def test_a_process_tied_to_its_parent_dies_with_it(spawn, tmp_path):
    code = (
        "import os, pathlib, time\n"
        "from pod_runtime import processes\n"
        "parent = os.getpid()\n"
        "if os.fork() == 0:\n"
        "    processes.die_with_parent(parent)\n"
        f"    pathlib.Path({str(tmp_path / 'child')!r}).write_text(f'{{os.getpid()}}\\n')\n"
        "time.sleep(600)\n"
    )
    parent = spawn(sys.executable, "-c", code)
    child_file = tmp_path / "child"
    wait_until(lambda: child_file.exists() and child_file.read_text().endswith("\n"))
    child = int(child_file.read_text())
    parent.kill()
    wait_until(lambda: (p := processes.read(child)) is None or p.state == "Z")
