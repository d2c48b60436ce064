"""The server and the client of `edl run`, as they die and are started again."""

import os
import sys
from pathlib import Path

import pytest

from pod_runtime.errors import LaunchError
from pod_runtime.local import programs
from pod_runtime.local.programs import MAX_RESTARTS, LocalProgram
from tests.support import wait_until

pytestmark = pytest.mark.full  # they start processes


def program(folder: Path, code: str) -> LocalProgram:
    argv = [sys.executable, "-c", code]
    return LocalProgram("program", argv, os.environ, folder, folder / "log")


def next_event(made: LocalProgram) -> str:
    said = [""]

    def has_happened() -> bool:
        said[0] = made.look_after()
        return bool(said[0])

    wait_until(has_happened)
    return said[0]


def test_one_that_dies_again_and_again_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "PAUSE_S", 0.0)
    made = program(tmp_path, "import sys; sys.exit('no room')")
    for _ in range(MAX_RESTARTS):
        assert next_event(made) == "the program has died (1) and was started again"
    with pytest.raises(LaunchError, match=r"has ended with 1:\n(.*\n)*  no room") as given_up:
        next_event(made)
    assert given_up.value.exit_code == 1


def test_its_log_is_cut_when_it_has_become_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "LOG_BYTES", 1000)
    made = program(tmp_path, "import time; print('x' * 2000, flush=True); time.sleep(600)")
    try:
        wait_until(lambda: made.look_after() == "" and (tmp_path / "log.1").exists())
        assert (tmp_path / "log.1").read_text() == "x" * 2000 + "\n"
        assert (tmp_path / "log").stat().st_size == 0
    finally:
        made.kill()


def test_one_that_dies_now_and_then_is_started_again_each_time(tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "PAUSE_S", 0.0)
    monkeypatch.setattr(programs, "HEALTHY_S", 0.0)
    made = program(tmp_path, "")
    for _ in range(2 * MAX_RESTARTS):
        assert "was started again" in next_event(made)
    made.kill()


def test_a_command_line_is_refused_at_the_first_start_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "PAUSE_S", 0.0)
    with pytest.raises(LaunchError) as refused:
        next_event(program(tmp_path, "import sys; sys.exit(2)"))
    assert refused.value.exit_code == 2
    mark = tmp_path / "begun"
    code = f"import pathlib, sys; m = pathlib.Path({str(mark)!r}); c = 2 * m.exists(); m.touch()"
    made = program(tmp_path, f"{code}; sys.exit(c)")
    assert next_event(made) == "the program has died (0) and was started again"
    assert next_event(made) == "the program has died (2) and was started again"
    made.kill()


def test_one_that_cannot_be_started_for_a_moment_is_started_later(tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "PAUSE_S", 0.0)
    made = program(tmp_path, "")
    aside = tmp_path.with_name("aside")
    wait_until(lambda: made.has_ended(1.0))
    tmp_path.rename(aside)  # where its log is
    assert "cannot start the program: " in next_event(made)
    aside.rename(tmp_path)
    assert "was started again" in next_event(made)
    made.kill()
