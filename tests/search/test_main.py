"""`edl search` as a command: what it refuses, and what it shows."""

import errno
import importlib
import io
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest

from job_server.api.wire import JobPod, JobState
from search import __main__ as program
from search.decide import TrialState
from search.text import best_text, best_trial, summary, trials_table
from tests.job_server.serving import running_server
from tests.search.study import job, study, trial
from tests.support import ROOT, wait_until

STUDY = (
    "name: a\nfolder: f\nmetric: accuracy\ndirection: maximize\ntrials: 4\nepochs: 3\n"
    "parameters: {act: [relu, gelu]}\n"
)


@pytest.fixture
def file(tmp_path: Path, monkeypatch) -> Path:
    for name in ("HOME", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME"):  # where a user's servers are listed
        monkeypatch.setenv(name, str(tmp_path))
    for name in ("PADDLE_JOBSERVER", "EDL_TOKEN", "EDL_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "study.yaml"
    path.write_text(STUDY)
    return path


def refused(capsys, *argv: str) -> tuple[int, str]:
    code = program.main(argv)
    return code, capsys.readouterr().err


def test_a_wrong_study_is_named_before_anything_else_is_looked_for(file, capsys):
    file.write_text(STUDY.replace("folder", "fodler"))
    assert refused(capsys, str(file)) == (2, f"edl search: {file}: folder: missing\n")


def test_a_search_without_optuna_says_what_to_install(file, capsys, monkeypatch):
    monkeypatch.setattr(program, "find_spec", lambda name: None)
    code, text = refused(capsys, str(file))
    assert (code, text) == (
        2,
        "edl search: a search needs Optuna, which is not installed: pip install 'optuna>=4'\n",
    )


def test_a_search_without_a_server_says_how_to_start_one(file, capsys):
    pytest.importorskip("optuna")
    code, text = refused(capsys, str(file))
    assert code == 1
    assert "no job server of yours runs on this machine; `edl run` and scripts/start" in text
    assert not list(file.parent.glob("*.study")), "nothing was begun"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Unread(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


@pytest.fixture
def away(file: Path, monkeypatch) -> Path:
    """Have the only server away, and Ctrl-C pressed once the search waits for it."""
    pytest.importorskip("optuna")
    search = importlib.import_module("search.run")
    monkeypatch.setenv("PADDLE_JOBSERVER", "http://127.0.0.1:9")
    monkeypatch.setenv("TERM", "xterm")

    def pressed(seconds: float) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(search, "time", SimpleNamespace(sleep=pressed, monotonic=time.monotonic))
    return file


def test_a_search_says_on_a_terminal_too_that_it_waits_for_the_server(away, monkeypatch):
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    assert program.main([str(away)]) == 130
    assert "the job server does not answer; waiting: " in terminal.getvalue()


def test_a_search_whose_output_nobody_reads_says_how_to_go_on(away, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdout", Unread())
    assert refused(capsys, str(away)) == (
        1, "edl search: nobody reads its output; start it again to go on with the study\n"
    )  # fmt: skip
    sys.stdout.close()


@pytest.mark.full  # two servers and the command are programs
def test_a_search_goes_on_when_the_server_has_another_token(file):
    pytest.importorskip("optuna")
    token = file.with_name("token")
    token.touch(0o600)
    token.write_text("first-token\n")
    with running_server(file.parent, "--no_job", f"--token_file={token}") as server:
        command = [sys.executable, "-m", "search", str(file), "--server", server.url]
        said = file.with_name("search.log")
        with said.open("w") as log:
            search = subprocess.Popen(
                [*command, f"--token_file={token}"], cwd=ROOT, stdout=log, stderr=log
            )
        try:
            wait_until(lambda: "trial 1: submitted" in said.read_text(), 60, "two trials")
            server.kill()
            token.write_text("second-token\n")
            server.start()
            with server.api("second-token") as api:
                for found in api.jobs():  # which the search has to hear of
                    api.delete(found.job_id, discard=True)
            wait_until(lambda: search.poll() is not None or "trial 2: " in said.read_text(), 60)
            assert "trial 2: submitted" in said.read_text(), said.read_text()
        finally:
            search.kill()
            search.wait()
        token.write_text("no-such-token\n")
        refusal = subprocess.run([*command, f"--token_file={token}"], cwd=ROOT, timeout=120)
        assert refusal.returncode == 1, "a wrong one from the start is told at once"


def test_the_table_marks_the_best_trial_and_says_why_one_failed():
    pod = JobPod(
        pod_id="p", pod_rank=0, node_id="n", addr="a", slots=(0, 1), ranks=(0, 1), phase="running"
    )
    trials = [
        trial(0, TrialState.COMPLETE, reports={3: 0.7}, value=0.7),
        trial(1, TrialState.COMPLETE, reports={3: 0.9}, value=0.9),
        trial(2, TrialState.FAILED, why="its job was deleted"),
        trial(3, reports={1: 0.25}),
        trial(4),
    ]
    jobs = {3: job(pods=(pod,)), 4: job(JobState.WAITING)}
    assert trials_table(study(), trials, jobs).splitlines() == [
        "TRIAL  STATE     EPOCH  ACCURACY  TRAINERS  PARAMETERS",
        "0      complete  3/3    0.7       -         lr 0.1",
        "1*     complete  3/3    0.9       -         lr 0.1",
        "2      failed    0/3    -         -         lr 0.1  (its job was deleted)",
        "3      running   1/3    0.25      2         lr 0.1",
        "4      waiting   0/3    -         0         lr 0.1  (because)",
    ]
    assert summary(study(), trials) == (
        "cells: 5 trials of 4: 2 running, 2 complete, 0 pruned, 1 failed"
    )
    assert best_text(study(), trials, "cells-1f-1") == (
        "best: trial 1 (job cells-1f-1), accuracy 0.9: lr 0.1\nits arguments: --epochs 3 --lr 0.1"
    )
    named = [replace(trials[1], values={"act": "a b"})]
    assert best_text(study(), named, "j").endswith("its arguments: --epochs 3 --act 'a b'")
    least = best_trial(study(maximize=False), trials)
    assert least is not None
    assert least.number == 0
    assert best_text(study(), trials[2:], "") == "no trial is complete"
