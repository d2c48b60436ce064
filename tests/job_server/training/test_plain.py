"""What a job tells about a script that does not use the elastic loop, and what is no news."""

from dataclasses import replace
from typing import Any

import pytest

from job_server.api.wire import JobSpec, JobState
from job_server.cluster.placement import Cluster
from job_server.jobs.events import NodesChanged, Tick
from job_server.training import machine, views
from job_server.training.core.job import Announced, Job
from job_server.training.machine import ANNOUNCE_WAITING_S
from job_server.training.rules.converge import LOOP_S
from tests.job_server.world import World, trains, world

ALONE = "trains alone on all the data"


def warned(made: World) -> list[str]:
    return [text for text in made.reasons if "no trainer has called the elastic loop" in text]


def test_a_change_of_a_script_without_the_loop_is_warned_of_once():
    made = trains(world(elastic=False))
    assert not made.status.warnings
    made.resize(3)
    made.rounds(30)
    made.resize(2)
    made.rounds(30)
    (told,) = warned(made)
    assert "a change of the pods starts the script afresh" in told
    assert "each of the 2 trainers " + ALONE in told
    assert ALONE in made.status.warnings[0]
    assert any("afresh: none has called the elastic loop" in text for text in made.reasons)


def test_a_resize_of_a_first_stage_says_how_long_it_waits_and_that_it_came_too_late():
    made = world(elastic=False, pods=1, total_steps=8)
    made.run_until(JobState.RUNNING)
    made.resize(2)
    waits = "waits 10 s, as its trainers may be about to call the elastic loop"
    assert waits in made.reasons[-1]
    made.run_until(JobState.SUCCEEDED)
    assert [record.pods for record in made.job.records] == [1]
    assert "resize to 2: not made, as the training was over before" in made.reasons[-1]


def test_one_that_runs_long_is_warned_of_before_any_change():
    made = trains(world(elastic=False, pods=1))
    made.rounds(int(LOOP_S) * 4)
    (told,) = warned(made)
    assert ALONE not in told  # there is but one


@pytest.mark.parametrize(("pods", "times"), [(1, 0), (2, 1)])
def test_several_trainers_that_came_to_their_end_each_alone_are_told_of(pods, times):
    made = world(elastic=False, pods=pods, total_steps=3)
    made.run_until(JobState.SUCCEEDED)
    assert len(warned(made)) == times
    assert len(made.status.warnings) == times


def test_a_script_that_calls_the_loop_is_not_warned_of_even_if_it_calls_it_late():
    made = trains(world())
    made.rounds(int(LOOP_S) * 4)
    assert not warned(made)
    made.job = replace(made.job, announced=Announced(plain=True))
    assert made.status.warnings == ()


# --- what is no news ------------------------------------------------------------------------------


def start(job: Job, now: float, event: Any) -> tuple[Job, str]:
    return machine.step(job, event, now, Cluster())


def test_that_no_client_has_come_yet_is_told_only_when_it_lasts():
    job = machine.new_job(JobSpec(job_id="job"), 0.0)
    job, told = start(job, 0.1, NodesChanged())
    assert told == ""
    assert "0 of 1 nodes" in views.job_status(job, 0.1, 0).reason  # whoever asks is told at once
    at = 0.1
    while told == "" and at < ANNOUNCE_WAITING_S:
        at = machine.next_deadline(job, at, Cluster()) or 1000.0
        job, told = start(job, at, Tick())
    assert at == ANNOUNCE_WAITING_S
    assert "0 of 1 nodes have registered: no job client serves this job" in told
    assert start(job, at + 1, Tick())[1] == ""


def test_why_a_stage_failed_is_told_once():
    made = trains(world())
    made.crash()
    trains(made)
    assert sum("was killed by SIGKILL" in text for text in made.reasons) == 1
    assert "was killed by SIGKILL" in made.job.records[-1].reason
