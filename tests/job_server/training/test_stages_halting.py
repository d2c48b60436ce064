"""Pause, resume and stop, and what is refused when."""

import pytest

from job_server.api.wire import JobState, Kill, Order, ReportKind, Resize, ScriptKind, ScriptSpec
from job_server.jobs.events import (
    KillAsked,
    PauseAsked,
    RequestRefused,
    ResizeAsked,
    ResumeAsked,
    StopAsked,
)
from job_server.training import machine, views
from job_server.training.core.job import same_but_progress
from tests.job_server.world import RUNNING, World, ids, records, tell, trains, world

PAUSED, STOPPED = JobState.PAUSED, JobState.STOPPED


def paused(made: World) -> World:
    made.pause()
    made.run_until(PAUSED)
    return made


def test_a_pause_saves_frees_the_slots_and_a_resume_loses_nothing():
    made = trains(world())
    made.pause()
    assert [(plan.order, plan.durable) for plan in made.orders("pod_0_0").plans] == [
        (Order.CUT, True)
    ]
    made.run_until(PAUSED)
    step = made.job.progress.step
    assert made.durable == step
    assert made.reasons[-1].endswith(f"paused; step {step} is in /shared/checkpoint")
    assert not views.slots_held(made.job)
    assert not any(sim.pods for sim in made.nodes.values())
    made.rounds(20)
    assert made.job.state is PAUSED
    assert made.job.progress.account.paused_s > 9
    made.resume()
    assert made.job.state is JobState.STARTING
    trains(made)
    assert records(made)[-1].first_step == step + 1
    assert records(made)[-1].reason == "start after a pause"
    assert made.job.lineage.redone_steps == 0
    assert made.job.resizes == made.job.budget.failures == 0


def test_a_pause_that_a_shim_which_does_not_answer_calls_off_says_so():
    """The script was said to have no `checkpoint=`, which it had."""
    made = trains(world())
    made.shims_answer = False
    made.pause()
    made.rounds(20)
    assert made.job.state is RUNNING
    assert "not paused: the shim of pod_0_0, which holds the newest state" in made.job.reason
    assert "checkpoint=" not in made.job.reason
    made.shims_answer = True
    paused(made)


def test_the_script_clock_stands_while_paused():
    script = ScriptSpec(kind=ScriptKind.ALTERNATE, interval_s=30.0)
    made = paused(trains(world(script=script)))
    clock = made.status.script_elapsed_s
    made.rounds(200)
    assert made.status.script_elapsed_s == clock
    assert made.job.state is PAUSED


def test_a_pause_abandons_a_preparation_and_lets_parked_ranks_go_on_before_it_cuts():
    made = trains(world())
    made.resize(3)
    made.run_until(JobState.CUTTING_OVER)
    made.round(0.2)
    paused(made)
    assert records(made)[-1].outcome == "abandoned: a pause was asked for"
    assert made.durable == made.job.progress.step


def test_a_pause_after_the_drain_waits_for_the_commit_so_that_nothing_is_lost():
    made = trains(world())
    made.resize(3)
    made.run_to(Order.START)
    paused(made)
    assert records(made)[-1].pods == 3
    assert made.durable == made.job.progress.step
    made.resume()
    trains(made)
    assert len(ids(made)) == 3


def test_a_pause_does_not_wait_for_ever_for_a_pod_that_cannot_be_reached():
    made = trains(world(pods=4, prepare_timeout_s=10.0))
    made.cut_off("b")
    made.pause()
    made.run_until(PAUSED)


def test_a_resume_does_not_start_beside_pods_that_may_still_train():
    made = trains(world(prepare_timeout_s=3.0, elastic=False))
    made.cut_off("a")  # both pods; they train on
    paused(made)
    made.resume()
    made.rounds(10)
    assert made.job.state is JobState.WAITING
    made.reconnect("a")
    trains(made)
    assert len(ids(made)) == 2


def test_a_stop_ends_a_running_and_a_paused_job():
    made = trains(world())
    made.stop()
    assert made.job.state is JobState.STOPPING
    made.run_until(STOPPED)
    assert made.durable == made.job.progress.step
    made.rounds(4)
    assert not made.job.pods
    other = paused(trains(world(elastic=False)))
    reason = other.status.reason
    assert "no trainer has called the elastic loop: EDL cannot know what was saved" in reason
    other.stop()
    assert other.job.state is STOPPED


def test_a_job_that_waits_for_nodes_can_be_paused_and_stopped():
    made = world(nodes=0)
    made.pause()
    assert made.job.state is PAUSED
    made.resume()
    assert made.job.state is JobState.WAITING
    assert "no job client serves this job" in made.status.reason
    made.stop()
    assert made.job.state is STOPPED


@pytest.mark.parametrize(
    ("state", "event", "said"),
    [
        (RUNNING, ResumeAsked(), "not PAUSED"),
        (RUNNING, KillAsked(Kill(pod_id="pod_9_9")), "running pods: pod_0_0, pod_1_0"),
        (RUNNING, KillAsked(Kill(rank=2)), "there are 2 ranks"),
        (PAUSED, KillAsked(Kill(rank=0)), "there are 0 ranks"),
        (JobState.STOPPING, PauseAsked(), "is stopping"),
        (JobState.STOPPING, ResizeAsked(Resize(pods=1)), "is stopping"),
        (STOPPED, PauseAsked(), "has ended"),
        (STOPPED, ResumeAsked(), "has ended"),
        (STOPPED, ResizeAsked(Resize(pods=1)), "has ended"),
        (STOPPED, KillAsked(Kill(rank=0)), "has ended"),
    ],
)
def test_what_makes_no_sense_is_refused(state, event, said):
    made = trains(world())
    if state is not RUNNING:
        made.send(PauseAsked() if state is PAUSED else StopAsked())
        made.run_until(state)
    before = made.job
    with pytest.raises(RequestRefused, match=said):
        made.send(event)
    assert made.job is before


@pytest.mark.parametrize(
    ("state", "event"),
    [
        (JobState.PAUSING, PauseAsked()),
        (PAUSED, PauseAsked()),
        (JobState.STOPPING, StopAsked()),
        (STOPPED, StopAsked()),
    ],
)
def test_asking_twice_changes_nothing(state, event):
    made = trains(world())
    made.send(event)
    made.run_until(state)
    before = made.job
    job, reason = machine.step(before, event, made.now, made.cluster)
    assert same_but_progress(before, job)
    assert reason == ""


def test_a_resize_while_paused_holds_from_the_resume_on():
    made = paused(trains(world()))
    made.resize(3)
    made.resume()
    trains(made)
    assert len(ids(made)) == 3


def prepares(made: World) -> None:
    made.resize(3)
    made.round(0.2)
    assert made.job.preparing is not None


def waits(made: World) -> None:
    made.resize(4)
    prepares(made)
    made.resize(3)
    assert made.job.queue.resize is not None


def due_by_script(made: World) -> None:
    while made.job.preparing is None:
        made.round(0.2)


@pytest.mark.parametrize("asked", [prepares, waits, due_by_script])
@pytest.mark.parametrize("called_off", [False, True])
def test_a_resize_that_a_pause_comes_before_is_not_forgotten(asked, called_off):
    script = ScriptSpec(kind=ScriptKind.TIMELINE, text="- {at: 10s, pods: 3}")
    made = trains(world(script=script) if asked is due_by_script else world())
    asked(made)
    made.full = {"path", "a", "b"} if called_off else set()
    made.pause()
    made.run_until(PAUSED, RUNNING)
    if not called_off:
        made.resume()
    made.rounds(60)
    assert made.job.state is RUNNING
    assert len(ids(made)) == 3, made.reasons


@pytest.mark.parametrize("called_off", [False, True])
@pytest.mark.parametrize("pods", [1, 4])
def test_a_resize_during_a_pause_is_the_last_word(pods, called_off):
    made = trains(world())
    made.resize(3)
    made.run_to(Order.START)
    made.full = {"path", "a", "b"} if called_off else set()
    made.pause()
    made.resize(pods)
    made.run_until(PAUSED, RUNNING)
    if not called_off:
        made.resume()
    made.rounds(60)
    assert made.job.state is RUNNING
    assert len(ids(made)) == pods, made.reasons


def test_training_that_completes_during_a_pause_is_not_forgotten():
    made = trains(world(total_steps=9))
    for pod_id in ids(made):
        tell(made, pod_id, ReportKind.DONE, 1, step=made.job.progress.step)
        made.nodes["a"].pods[pod_id].end(code=0)
    made.client_acts(made.nodes["a"])
    assert made.job.state is JobState.SUCCEEDED
    with pytest.raises(RequestRefused, match="SUCCEEDED"):
        made.pause()


def test_a_pause_does_not_wait_for_ever_for_a_client_that_never_confirms():
    made = trains(world(prepare_timeout_s=10.0, elastic=False))
    made.pause()
    for pod_id in ("pod_0_0", "pod_1_0"):
        tell(made, pod_id, ReportKind.ENDED, 1)
    assert made.job.state is JobState.PAUSING
    made.nodes["a"].seen_at = made.now + 1000  # alive, but it does not say what it has
    made.pass_time(9.0)
    assert made.job.state is JobState.PAUSING
    made.pass_time(2.0)
    assert made.job.state is PAUSED
    assert views.slots_held(made.job)["a"] == {0, 1}


@pytest.mark.parametrize("ask", [World.stop, World.pause])
def test_trainers_that_wait_for_each_other_at_a_start_are_not_waited_for(ask):
    made = world(elastic=False)  # whoever calls the loop comes no further
    made.run_until(JobState.RUNNING)
    for pod_id in made.active.pod_ids:
        tell(made, pod_id, ReportKind.STARTED, 1, elastic=True)
    assert made.job.elastic
    since = made.now
    ask(made)
    made.run_until(JobState.STOPPED, JobState.PAUSED)
    assert made.now - since < 5.0
