"""How a job succeeds: the trainers are done first, the pods' scripts end after them."""

from dataclasses import replace

import pytest

from job_server.api.wire import (
    EXIT_REPORT_S,
    DesiredState,
    JobState,
    Order,
    PodPhase,
    PodReport,
    ReportKind,
    Resize,
)
from job_server.jobs.events import LauncherReported, PauseAsked, ResizeAsked, StopAsked
from job_server.training import machine, views
from job_server.training.core.changes import may_change
from tests.job_server.world import (
    RUNNING,
    SimNode,
    SimPod,
    World,
    ids,
    records,
    tell,
    trains,
    world,
)

DONE = PodReport(kind=ReportKind.EXITED, stage=1, code=0)


def launchers_leave(made: World) -> None:
    """All trainers are done: every launcher exits with 0, its script goes on."""
    for sim, pod, _ in made.launchers():
        pod.launcher = None
        made.send(LauncherReported(pod.pod_id, replace(DONE)))
        made.report(sim)


def end_script(made: World, pod_id: str, code: int) -> None:
    made.pod(pod_id).end(code=code)
    for sim in made.nodes.values():
        if pod_id in sim.pods:
            made.report(sim)


def wants(made: World) -> list[DesiredState]:
    return [pod.want for name in made.nodes for pod in views.node_pods(made.job).get(name, ())]


@pytest.mark.parametrize("elastic", [True, False])
def test_a_job_succeeds_when_its_pods_scripts_have_ended_and_not_before(elastic):
    made = trains(world(elastic=elastic))
    launchers_leave(made)
    made.pass_time(1.0)
    assert made.job.state is RUNNING
    assert wants(made) == [DesiredState.RUN] * 2  # a script that uploads gets no SIGTERM
    assert "waiting for its script to end" in made.job.reason
    end_script(made, "pod_0_0", 0)
    assert made.job.state is RUNNING
    end_script(made, "pod_1_0", 0)
    assert made.job.state is JobState.SUCCEEDED


def test_a_script_that_fails_after_its_trainers_were_done_is_a_failure_and_is_run_again():
    made = trains(world(total_steps=20))
    made.tail_code = 3
    made.run_until(JobState.RECOVERING)
    assert made.job.budget.failures == 1
    text = "pod_0_0 exited with 3 after its trainers were done"
    assert text in records(made)[-1].reason
    made.tail_code = 0
    made.run_until(JobState.SUCCEEDED)


def test_a_script_that_always_fails_after_its_trainers_fails_the_job_with_that_reason():
    made = trains(world(total_steps=20, max_restarts_without_progress=2))
    made.tail_code = 3
    made.run_until(JobState.FAILED)
    assert "exited with 3 after its trainers were done" in made.job.reason


def recover_beside_script(made: World) -> tuple[SimNode, SimPod]:
    """Lose a trainer while the script of another pod goes on after its trainers; return that."""
    sim, pod, _ = trains(made).launchers()[0]
    pod.launcher = None
    made.send(LauncherReported(pod.pod_id, DONE))
    _, other, who = made.launchers()[0]
    made.kill_trainer(other, who)
    made.run_until(JobState.RECOVERING)
    return sim, pod


def test_a_script_that_still_runs_while_others_recover_is_left_to_end():
    made = world(total_steps=4000)
    sim, pod = recover_beside_script(made)
    trains(made)
    assert pod.pod_id not in ids(made)
    assert pod.phase is PodPhase.RUNNING
    pod.end(code=0)
    made.rounds(6)
    assert pod.pod_id not in sim.pods
    assert made.job.state is RUNNING


def test_no_pod_is_put_where_a_script_still_runs_after_its_trainers_were_done():
    made = world(nodes=1, min_pods=2, total_steps=4000)
    sim, pod = recover_beside_script(made)
    made.rounds(20)
    assert pod.phase is PodPhase.RUNNING
    assert "only 1 of 2 pods find a place" in made.job.waiting
    assert f"scripts that go on after their trainers were done: {pod.pod_id}" in made.job.waiting
    pod.end(code=0)
    trains(made)
    assert {each.slots for each in sim.pods.values()} == {(0,), (1,)}


def test_where_no_client_looks_after_a_pod_its_launchers_word_counts():
    made = trains(world())
    made.nodes["a"].client = False
    launchers = [pod.pod_id for _, pod, _ in made.launchers()]
    for pod_id in launchers:
        made.send(LauncherReported(pod_id, DONE))
    assert made.job.state is RUNNING  # its client may be about to speak
    deadline = machine.next_deadline(made.job, made.now, made.cluster)
    assert deadline is not None
    made.pass_to(made.nodes["a"].seen_at + 4.0)
    assert made.job.state is JobState.SUCCEEDED


def test_a_pod_that_is_done_right_after_a_change_leaves_nothing_of_its_stage_before():
    """Else a recovery would wait for ever for the trainers of that stage to end."""
    made = trains(world(pods=1, overlap="auto", slots=1))
    made.ask(ResizeAsked(Resize(pods=2)))
    while made.job.retiring is None:
        made.round(0.05)
    made.total_steps = made.job.progress.step
    for _ in range(2):  # the first launcher is done before it has ended the trainers of stage 1
        made.train()
        for found in made.launchers():
            made.launcher_acts(*found)
    made.nodes["b"].link = False  # what the other one says is not heard
    made.rounds(30)
    assert 1 not in [stage.stage for stage in made.job.stages]
    made.heal()
    made.run_until(JobState.SUCCEEDED)


def test_a_stop_ends_scripts_as_well():
    made = trains(world())
    launchers_leave(made)
    made.stop()
    made.run_until(JobState.STOPPED)


def test_a_later_launcher_of_the_same_script_is_told_to_leave_and_changes_nothing():
    made = trains(world())
    launchers_leave(made)
    assert made.orders("pod_0_0").leave
    made.send(LauncherReported("pod_0_0", DONE))
    assert made.job.state is RUNNING


@pytest.mark.parametrize(("asked", "halt"), [(PauseAsked(), "pause"), (StopAsked(), "stop")])
def test_trainers_are_told_whose_they_are_and_what_a_cut_is_for(asked, halt):
    made = trains(world(take_over=True))
    pod_id = ids(made)[0]

    (plan,) = made.orders(pod_id).plans
    assert (plan.submitted_at, plan.take_over, plan.halt) == (made.job.submitted_at, True, "")
    made.send(asked)
    (plan,) = made.orders(pod_id).plans
    assert (plan.order, plan.halt) == (Order.CUT, halt)


def kill_launcher(made: World, pod_id: str) -> None:
    """As the OOM killer does: no report; the script's last line runs, and exits 0."""
    end_script(made, pod_id, 0)


@pytest.mark.parametrize("pods", [("pod_0_0",), ("pod_0_0", "pod_1_0")])
def test_a_script_that_goes_on_behind_a_killed_launcher_makes_no_success_of_half_a_training(pods):
    made = trains(world(total_steps=40))
    for pod_id in pods:
        kill_launcher(made, pod_id)
    assert made.job.state is JobState.RECOVERING
    assert any("its training is not known to be complete" in said for said in made.reasons)
    made.run_until(JobState.SUCCEEDED)
    assert made.job.progress.step == 40
    assert made.job.budget.failures == 1


def test_a_launcher_that_is_killed_while_its_trainers_load_fails_that_start():
    made = trains(world(total_steps=400))
    made.resize(3)
    made.run_to(Order.START)
    kill_launcher(made, "pod_0_0")
    assert made.job.state is JobState.RECOVERING
    trains(made)


def test_a_launcher_that_is_killed_after_the_training_was_complete_spoils_nothing():
    made = trains(world(total_steps=40))
    done = PodReport(kind=ReportKind.DONE, stage=1, step=40)
    made.send(LauncherReported("pod_0_0", done))
    for pod_id in ("pod_0_0", "pod_1_0"):
        kill_launcher(made, pod_id)
    assert made.job.state is JobState.SUCCEEDED
    assert made.job.budget.failures == 0


def test_a_later_loop_of_the_script_makes_the_job_one_that_trains_until_it_ends_itself():
    made = trains(world(total_steps=400))
    step = made.job.progress.step
    pods = ("pod_0_0", "pod_1_0")
    tell(made, pods, ReportKind.DONE, 1, step=step, epoch=5)
    tell(made, pods, ReportKind.PROGRESS, 1, step=step, epoch=5)  # late
    assert made.job.done
    tell(made, "pod_0_0", ReportKind.FIRST_STEP, 1, step=step + 1, epoch=0)
    tell(made, "pod_1_0", ReportKind.DONE, 1, step=step, epoch=5)  # of the loop before, late
    assert (made.job.done, made.job.progress.step, made.job.progress.epoch) == (
        False,
        step + 1,
        0,
    )
    assert may_change(made.job, made.now)
    tell(made, pods, ReportKind.DONE, 1, step=step + 9)
    assert made.job.done


@pytest.mark.parametrize("script_ends", [True, False])
def test_a_training_that_was_complete_while_the_server_was_away_is_not_run_again(script_ends):
    made = trains(world(total_steps=40))
    pods = [pod for sim in made.nodes.values() for pod in sim.pods.values()]
    made.stored = made.job
    made.stop_server()
    while not all(pod.tail for pod in pods):  # the launchers give up telling it
        made.round(0.5)
    if script_ends:
        made.round(0.5)
        assert {pod.phase for pod in pods} == {PodPhase.EXITED}
    else:
        made.leave_done = lambda: None  # type: ignore[method-assign]  # as it does for an hour
    made.start_server()
    made.rounds(600)
    if not script_ends:
        assert made.job.state is RUNNING
        del made.leave_done
    made.run_until(JobState.SUCCEEDED)
    assert len(records(made)) == 1
    assert made.job.budget.failures == 0


def test_a_launcher_that_is_killed_before_its_trainers_are_known_to_be_elastic_is_no_success():
    """The OOM killer comes while they build the model."""
    made = world(total_steps=40)
    made.run_until(RUNNING)
    assert not made.job.elastic
    for pod_id in ("pod_0_0", "pod_1_0"):
        kill_launcher(made, pod_id)
    assert made.job.state is JobState.RECOVERING
    made.run_until(JobState.SUCCEEDED)
    assert made.job.progress.step == 40


def test_a_plain_script_whose_launcher_was_killed_has_not_succeeded_either():
    made = trains(world(elastic=False))
    kill_launcher(made, "pod_0_0")
    made.run_until(JobState.RECOVERING)
    made.run_until(RUNNING)
    assert made.job.budget.failures == 1


def test_a_plain_script_that_exits_0_has_succeeded_where_its_launcher_could_tell_nobody():
    """It gives up after a while, and a plain training may not know how to go on."""
    made = trains(world(elastic=False))
    made.stop_server()
    made.pass_time(EXIT_REPORT_S + 1)
    made.start_server()
    for pod_id in ("pod_0_0", "pod_1_0"):
        kill_launcher(made, pod_id)
    assert made.job.state is JobState.SUCCEEDED


def test_what_a_launcher_tells_at_length_is_kept_short():
    made = trains(world())
    report = PodReport(kind=ReportKind.STAGE_TOO_LOW, stage=1, reason="x" * 1_000_000)
    made.send(LauncherReported("pod_0_0", report))
    assert len(str(made.job)) < 50_000
    assert all(len(reason) < 5_000 for reason in made.reasons)
