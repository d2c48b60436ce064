"""When a client waits for its jobs, and what a command for notices may do wrong."""

import pytest

from job_client import preemption
from job_client.errors import SetupError
from job_client.preemption import Departure, check, look


@pytest.mark.parametrize(
    ("leaving", "at", "waits"),
    [
        pytest.param(Departure(100.0), 102.0, True, id="not answered yet"),
        pytest.param(Departure(100.0), 104.0, False, id="the server does not answer"),
        pytest.param(Departure(100.0, True, True), 114.0, True, id="its jobs are on the move"),
        pytest.param(
            Departure(100.0, True, True), 115.0, False, id="... for longer than the grace"
        ),
        pytest.param(Departure(100.0, False, True), 101.0, False, id="they cannot leave"),
        pytest.param(Departure(100.0, None, True), 101.0, False, id="an old server"),
    ],
)
def test_a_client_waits_while_its_jobs_move_and_no_longer_than_the_grace(leaving, at, waits):
    assert leaving.goes_on(at, 15.0) is waits


@pytest.mark.full
def test_a_command_that_cannot_be_run_is_refused_at_the_start():
    with pytest.raises(SetupError, match=r"no-such-program.*cannot be run \(exit code 127\)"):
        check("no-such-program --now")
    check("false")  # no notice yet


@pytest.mark.full
def test_a_command_that_hangs_is_ended_with_its_children(monkeypatch):
    monkeypatch.setattr(preemption, "NOTICE_TIMEOUT_S", 0.2)
    assert look("sleep 600 | cat") is None
