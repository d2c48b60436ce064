"""Changes by join: trainers that stay go on in the next stage, others come new."""

from typing import Any

import pytest

from job_server.api.wire import JobSpec, JobState, Order, StageRecord, Way
from job_server.training import views
from tests.job_server.world import World, node

RUNNING = JobState.RUNNING


def world(pods: int = 2, gpu_bytes: int = 0, **spec: Any) -> World:
    """Return a job that trains, and whose changes go by join."""
    job = JobSpec(**{"job_id": "job", "max_pods": 4, "pods": pods, "overlap": "join", **spec})
    made = World(job, tuple(node(name, gpu_bytes=gpu_bytes) for name in "ab"), total_steps=4000)
    made.run_until(RUNNING)
    made.rounds(6)
    return made


def last(made: World) -> StageRecord:
    return made.status.stages[-1]


def to_phase(made: World, phase: Order) -> None:
    """Let messages pass one by one until the change is in `phase`."""
    for _ in range(200):
        if made.preparing.phase is phase:
            return
        for sim in made.nodes.values():
            made.client_acts(sim)
        for each in made.launchers():
            made.launcher_acts(*each)
        for _, _, who in made.launchers():
            if who.outbox and made.preparing.phase is not phase:
                made.deliver(who)
        made.now += 0.01
    raise AssertionError(f"{made.preparing.phase} instead of {phase}")


def settled(made: World, pods: int) -> StageRecord:
    made.rounds(30)
    assert made.job.state is RUNNING, made.reasons[-10:]
    assert len(views.running_pods(made.job)) == pods
    return last(made)


@pytest.mark.parametrize("pods", [1, 3, 4])
def test_a_change_by_join_costs_no_step_and_no_pod_that_stays(pods):
    made = world()
    made.resize(pods)
    record = settled(made, pods)
    assert (record.way, record.redone_steps, record.stage) == (Way.JOIN, 0, 2)
    stay = {"pod_0_0", "pod_1_0"} if pods > 1 else {"pod_0_0"}
    assert stay <= {pod.pod_id for pod in views.running_pods(made.job)}
    assert made.job.retiring is None
    assert len([sim for node in made.nodes.values() for sim in node.pods.values()]) == pods


@pytest.mark.parametrize(("used", "way"), [(40, Way.REPLACE), (80, Way.DRAIN)])
def test_a_trainer_that_cannot_join_lets_the_change_go_another_way(used, way):
    made = world(gpu_bytes=100)
    made.gpu_bytes_used = used  # with 40 of 100 there is room for a second trainer
    made.launcher("pod_1_0").refuses = True
    made.resize(3)
    assert made.preparing.way is Way.JOIN
    record = settled(made, 3)
    assert (record.stage, record.redone_steps) == (2, 0)
    assert record.way is way
    assert any("pod_1_0 cannot join: it does not want to; not by join" in r for r in made.reasons)


def test_a_pod_that_no_longer_offers_to_join_is_not_asked():
    made = world()
    made.launcher("pod_0_0").joins = False
    made.rounds(4)
    made.resize(3)
    assert made.preparing.way is Way.REPLACE
    settled(made, 3)


@pytest.mark.parametrize("phase", [Order.PREPARE, Order.CUT])
def test_a_crash_of_the_stage_in_force_takes_the_change_with_it_by_drain(phase):
    made = world()
    made.resize(3)
    to_phase(made, phase)
    made.crash("pod_0_0")
    record = settled(made, 3)
    assert (record.way, record.stage) == (Way.DRAIN, 2)
    assert made.job.lineage.redone_steps <= 3  # the world takes a snapshot every three steps


@pytest.mark.parametrize("phase", [Order.PREPARE, Order.CUT])
def test_a_new_trainer_that_dies_before_the_commit_leaves_the_others_as_they_are(phase):
    made = world()
    made.resize(3)
    to_phase(made, phase)
    before = made.job.progress.step
    for _ in range(20):
        made.client_acts(made.nodes["a"])
        made.client_acts(made.nodes["b"])
        new = [who for _, pod, who in made.launchers() if who.prepared is not None]
        if new:
            break
        for each in made.launchers():
            made.launcher_acts(*each)
    made.kill_prepared(new[0])
    made.rounds(30)
    assert len(views.running_pods(made.job)) == 2
    assert last(made).outcome.startswith("abandoned: ")
    assert made.job.lineage.redone_steps == 0
    assert made.job.progress.step > before


@pytest.mark.parametrize("killed", ["pod_0_0", "pod_2_0"])
def test_a_crash_after_the_commit_starts_all_anew_from_where_the_old_stage_has_parked(killed):
    made = world()
    made.resize(3)
    to_phase(made, Order.CUT)
    for _ in range(400):
        if made.job.preparing is None:
            break
        made.train()
        for each in made.launchers():
            made.launcher_acts(*each)
        for _, _, who in made.launchers():
            made.deliver(who)
        made.now += 0.01
    assert made.active.stage == 2
    for each in made.launchers():
        made.launcher_acts(*each)
    parked = made.job.progress.step
    made.crash(killed)
    record = settled(made, 3)
    assert (record.way, record.stage) == (Way.START, 3)
    assert made.job.lineage.redone_steps <= made.job.progress.best_step - parked
    assert record.first_step == parked + 1


@pytest.mark.parametrize("phase", [Order.PREPARE, Order.CUT])
def test_a_server_that_was_away_amid_the_change_goes_on_with_it(phase):
    made = world()
    made.resize(3)
    to_phase(made, phase)
    made.stop_server()
    made.rounds(3)
    made.start_server()
    record = settled(made, 3)
    assert (record.way, record.stage, record.redone_steps) == (Way.JOIN, 2, 0)


def test_a_taken_port_deals_new_ones_and_the_trainers_that_stay_join_again():
    made = world()
    made.launcher("pod_0_0").ports_fail = True
    made.resize(3)
    record = settled(made, 3)
    assert (record.way, record.stage, record.redone_steps) == (Way.JOIN, 2, 0)


def test_the_cut_for_those_who_stay_waits_for_a_step_and_others_do_not():
    made = world()
    made.resize(1)
    to_phase(made, Order.CUT)
    for pod_id in ("pod_0_0", "pod_1_0"):  # also who leaves: all ranks must agree
        assert made.orders(pod_id).plans[0].patient
    settled(made, 1)
    made.pause()
    assert [plan.patient for plan in made.orders("pod_0_0").plans] == [False]
