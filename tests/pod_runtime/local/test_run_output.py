"""What `edl run` shows of the trainers' logs: everything new, and one traceback only once."""

import contextlib
import io
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from job_server.api.api_client import ApiClient
from job_server.api.errors import NotFound, ServerAway
from job_server.api.wire import Health, JobEvent, JobSpec, JobState, JobStatus
from job_server.sharing import job_types
from pod_runtime.local import session as run_session
from pod_runtime.local import view as run_view
from pod_runtime.local.output import TrainerOutput
from pod_runtime.local.view import without_end
from tests.support import wait_until

TRACE = """Traceback (most recent call last):
  File "t.py", line 3, in <module>
    f()
ValueError: sad
"""
OTHER = TRACE.replace("sad", "sadder")
SYNTAX = """  File "t.py", line 2
    def f(:
          ^
SyntaxError: invalid syntax
"""
CHAINED = TRACE + "\nDuring handling of the above exception, another occurred:\n\n" + OTHER


class Shown:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.buffer = io.BytesIO()
        self.output = TrainerOutput(folder, self.buffer)

    def write(self, rank: int, text: str, stage: int = 1) -> Path:
        path = self.folder / f"trainer_{rank}.stage_{stage}.log"
        with path.open("a") as log:
            log.write(text)
        return path

    def new(self, *, last: bool = False) -> str:
        """What is shown now, without the prefixes of rank 0."""
        self.buffer.seek(0)
        self.buffer.truncate()
        self.output.show_new(last=last)
        return self.buffer.getvalue().decode().replace("[rank 0] ", "")


@pytest.fixture
def shown(tmp_path: Path) -> Shown:
    return Shown(tmp_path)


def test_lines_are_shown_with_their_rank_when_they_are_whole(shown):
    assert shown.new() == ""
    shown.write(0, "one\ntw")
    shown.write(11, "eleven\n")
    (shown.folder / "spares.log").write_text("no trainer\n")
    assert shown.new() == "one\n[rank 11] eleven\n"
    shown.write(0, "o\nthree")
    assert shown.new() == "two\n"
    assert shown.new(last=True) == "three\n"
    assert shown.new(last=True) == ""


def test_a_bar_that_never_ends_its_line_is_shown_in_parts(shown):
    shown.write(0, "=" * 70_000)
    assert shown.new() == "=" * 70_000 + "\n"
    shown.write(0, "=\n")
    assert shown.new() == "=\n"


def test_a_log_that_was_cut_is_shown_from_its_new_beginning(shown):
    path = shown.write(0, "one\ntwo\n")
    assert shown.new() == "one\ntwo\n"
    path.write_text("")
    shown.write(0, "six\n")
    assert shown.new() == "six\n"


def test_a_trainer_that_stays_for_many_stages_is_still_heard(shown):
    shown.write(0, "one\n")
    for stage in range(2, 30):
        shown.write(1, "", stage)
    said = shown.new()
    shown.write(0, "two\n")
    said += "".join(shown.new() for _ in range(10))
    assert said == "one\ntwo\n"


def test_a_log_that_was_deleted_is_looked_at_no_more(shown, monkeypatch):
    old = shown.write(0, "one\n")
    assert shown.new() == "one\n"
    old.unlink()
    shown.write(1, "two\n", stage=9)
    assert "".join(shown.new() for _ in range(10)) == "[rank 1] two\n"
    looked_at: list[Path] = []
    look = TrainerOutput._show_log

    def noted(self: TrainerOutput, path: Path, *more: object) -> None:
        looked_at.append(path)
        look(self, path, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(TrainerOutput, "_show_log", noted)
    for _ in range(20):
        shown.new()
    assert looked_at
    assert old not in looked_at


@pytest.mark.parametrize("trace", [TRACE, SYNTAX, CHAINED])
def test_the_same_traceback_of_other_ranks_and_stages_is_shown_once(shown, trace):
    shown.write(0, "step 1\n" + trace)
    shown.write(1, trace)
    assert shown.new() == "step 1\n" + trace
    shown.write(0, "step 1\n" + trace, stage=2)
    shown.write(1, trace, stage=2)
    assert shown.new() == "step 1\n"
    assert shown.new(last=True) == ""


def test_a_traceback_is_shown_once_although_both_logs_grow_piece_by_piece(shown):
    said = ""
    for line in TRACE.splitlines(keepends=True):
        shown.write(1, line)
        shown.write(0, line)
        said += shown.new()
    said += shown.new(last=True)
    assert said.count("ValueError: sad") == 1
    assert said.count("Traceback") == 1


@pytest.mark.parametrize("last", [False, True])
def test_another_traceback_is_shown_whole_and_so_is_what_follows_one(shown, last):
    shown.write(0, TRACE)
    shown.write(1, OTHER)
    assert shown.new(last=last).replace("[rank 1] ", "") == TRACE + OTHER
    shown.write(2, TRACE + "more\n")
    assert shown.new(last=True).replace("[rank 2] ", "") == TRACE + "more\n"


def test_what_a_rank_goes_on_to_say_after_a_traceback_that_it_caught_is_not_lost(shown):
    shown.write(0, TRACE + "step 2 of rank 0\n")
    shown.write(1, TRACE)
    assert shown.new() == TRACE + "step 2 of rank 0\n"
    shown.write(1, "step 2 of rank 1\n")
    assert shown.new().replace("[rank 1] ", "") == TRACE + "step 2 of rank 1\n"


def test_logs_that_say_the_same_for_ever_are_shown_at_last(shown):
    both = TRACE + "".join(f"step {number}\n" for number in range(1000))
    shown.write(0, both)
    shown.write(1, both)
    said = shown.new()
    assert said.count("step 999\n") == 2
    assert said.count("step 7\n") == 2


def test_the_traceback_at_the_end_is_repeated_only_where_it_is_far_away(shown):
    path = shown.write(0, TRACE)
    other = shown.write(1, "killed\n")
    shown.new()
    assert shown.output.repeat(path) == []
    assert shown.output.repeat(other) is None
    shown.write(1, "step\n" * 100)
    again = shown.write(0, TRACE, stage=2)
    shown.new(last=True)
    assert shown.output.repeat(again) == TRACE.splitlines()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("pod a has finished; SUCCEEDED: all pods have exited with 0", "pod a has finished"),
        ("FAILED: t.py:2: SyntaxError: invalid syntax", ""),
        ("stage 1 committed: 2 pods", "stage 1 committed: 2 pods"),
        (
            "stage 2 is over: boom; failed: boom; twice; its newest state is written first",
            "stage 2 is over: boom; its newest state is written first",
        ),
        ("failed: boom; its newest state is written first", "its newest state is written first"),
        (
            "pod a is gone: the package script failed: 3",
            "pod a is gone: the package script failed: 3",
        ),
    ],
)
def test_the_end_of_the_job_is_left_to_the_last_lines(text, shown):
    assert without_end(text) == shown


def test_a_full_disk_behind_the_output_ends_no_training(tmp_path, monkeypatch):
    (tmp_path / "trainer_0.stage_1.log").write_text("one\n" * 10_000)
    with open("/dev/full", "wb") as full:
        TrainerOutput(tmp_path, full).show_new()
        with pytest.raises(OSError, match="No space"):  # what Python itself still has to say
            full.close()
    with open("/dev/full", "w") as full_text:
        monkeypatch.setattr("sys.stdout", full_text)
        run_session.show("job server: started again")
        monkeypatch.undo()
        with pytest.raises(OSError, match="No space"):
            full_text.close()


def test_a_job_that_the_server_has_no_longer_is_followed_no_longer():
    class Api:
        def __enter__(self) -> "Api":
            return self

        def __exit__(self, *_exc: object) -> None:
            pass

        def watch(self, *_args: object) -> None:
            raise NotFound("no job")

        events = watch

    watch = run_view.JobWatch(lambda: cast("ApiClient", Api()), "job")
    assert watch.changed.wait(10)
    assert watch.is_deleted


def test_what_the_server_cannot_do_is_shown_as_no_event_will_say_it(tmp_path, monkeypatch, capsys):
    """A trainer had crashed on a full disk: nothing was heard of it, and nothing was shown."""
    text = "the server's database cannot be written: disk full"

    class Api:
        def watch(self, *_args: object) -> JobStatus:
            ended = bool(watches and watches[0].warnings)
            status = job_types.job_status(job_types.new_job(spec, 0.0), 0.0, 1)
            return replace(status, state=JobState.FAILED if ended else JobState.RUNNING)

        def events(self, *_args: object, **_options: object) -> tuple[JobEvent, ...]:
            return ()

        def health(self) -> Health:
            return Health(server_id="1", warnings=(text,))

    spec = JobSpec(job_id="job")
    config = run_session.RunConfig(
        spec=spec, cpu_slots=1, script=tmp_path, script_args=(), cwd=tmp_path, folder=tmp_path,
        heartbeat_s=1.0, token="a_token_of_a_test",
    )  # fmt: skip
    session = run_session.LocalSession(config, "", {})
    watches = [run_view.JobWatch(lambda: contextlib.nullcontext(Api()), "job")]  # type: ignore[arg-type,return-value]
    with session._port_claim:
        assert session._follow(watches[0]) is not None
    assert capsys.readouterr().out.count(f"edl: warning: {text}") == 1


def test_following_a_job_goes_on_after_a_defect(monkeypatch):
    monkeypatch.setattr(run_view, "_AGAIN_S", 0.01)
    connects: list[int] = []

    def connect() -> ApiClient:
        connects.append(1)
        raise RuntimeError("a defect")

    watch = run_view.JobWatch(connect, "job")
    wait_until(lambda: len(connects) > 4)  # both threads, more than once
    watch.close()


def test_a_stop_that_the_server_cannot_write_is_explained_once(tmp_path, monkeypatch, capsys):
    class Api:
        def stop(self, job_id: str) -> None:
            error = ServerAway("the server's database cannot be written: disk full")
            error.answers = True
            raise error

    config = run_session.RunConfig(
        spec=JobSpec(job_id="job"), cpu_slots=1, script=tmp_path, script_args=(), cwd=tmp_path,
        folder=tmp_path, heartbeat_s=1.0, token="a_token_of_a_test",
    )  # fmt: skip
    session = run_session.LocalSession(config, "", {})
    monkeypatch.setattr(session, "_connect", lambda: contextlib.nullcontext(Api()))
    with session._port_claim:
        for _ in range(3):  # it is asked again and again
            session._ask_to_stop(None)
    assert capsys.readouterr().out.count("cannot be written: disk full; trying again") == 1
