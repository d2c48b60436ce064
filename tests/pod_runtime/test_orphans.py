"""What a trainer's forks leave is found by pids that they wrote down themselves."""

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

from pod_runtime.orphans import kill_orphans, noted_forks, remove_shared_memory
from tests.programs import run_code
from tests.support import no_descriptor_free


def run_forking(pod_dir: Path) -> tuple[int, int]:
    """Run a process that forks once; return its pid and its child's."""
    code = textwrap.dedent("""
        import os, pathlib, sys
        from pod_runtime.orphans import note_forks
        note_forks(pathlib.Path(sys.argv[1]))
        pid = os.fork()
        if pid:
            os.waitpid(pid, 0)
            print(os.getpid(), pid)
        """)
    parent, child = map(int, run_code(code, str(pod_dir)).split())
    return parent, child


def test_forks_write_their_pids_down(tmp_path: Path) -> None:
    _, child = run_forking(tmp_path)
    assert noted_forks(tmp_path) == {child}


def test_a_pod_without_forks_has_noted_none(tmp_path: Path) -> None:
    assert noted_forks(tmp_path) == set()


def test_a_fork_that_cannot_write_its_pid_lives_on(tmp_path: Path) -> None:
    _, child = run_forking(tmp_path / "missing")
    assert child > 0
    assert noted_forks(tmp_path / "missing") == set()


def test_orphans_that_cannot_be_looked_for_are_left_to_the_shim() -> None:
    with no_descriptor_free():
        assert kill_orphans({"EDL_POD_ID": "none"}, ()) == set()


def test_only_files_of_our_dead_processes_are_removed(tmp_path: Path) -> None:
    _, dead = run_forking(tmp_path)
    for name in (f"paddle_{dead}_1", f"paddle_{os.getpid()}_1", "paddle_1_1", "other"):
        (tmp_path / name).touch()
    removed = remove_shared_memory({dead, os.getpid()}, tmp_path)
    assert removed == [f"paddle_{dead}_1"]
    assert not (tmp_path / f"paddle_{dead}_1").exists()
    assert (tmp_path / f"paddle_{os.getpid()}_1").exists(), "its maker is alive"
    assert (tmp_path / "paddle_1_1").exists(), "not ours"


def test_files_of_a_process_that_still_dies_are_removed_when_it_has(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as dying:
        name = f"paddle_{dying.pid}_1"
        (tmp_path / name).touch()
        assert remove_shared_memory({dying.pid}, tmp_path) == []
        threading.Timer(0.2, dying.kill).start()
        assert remove_shared_memory({dying.pid}, tmp_path, wait_s=60.0) == [name]
