"""Crashes, lost nodes, budgets: what a job does when something dies."""

from dataclasses import replace
from typing import Any

import pytest

from job_server.api import wire
from job_server.api.text import error_lines
from job_server.api.wire import (
    JobState,
    Kill,
    Order,
    PodStagePhase,
    RaisedError,
    ReportKind,
    TrainerError,
    Way,
)
from job_server.jobs.events import (
    Allotted,
    KillAsked,
    LauncherAttached,
    ServerRestarted,
    Tick,
)
from job_server.jobs.retries import backoff_s
from job_server.training import machine, views
from job_server.training.core.accounting import count_failure
from job_server.training.core.job import Cause, CauseKind, same_but_progress
from tests.job_server.world import (
    HEARTBEAT_S,
    RUNNING,
    SimNode,
    World,
    ids,
    node,
    records,
    tell,
    trains,
    world,
)

FAILED = JobState.FAILED


def test_a_crashed_trainer_costs_steps_but_no_pod():
    made = trains(world())
    made.train()  # one step more than the newest snapshot
    made.crash("pod_1_0")
    made.run_until(JobState.RECOVERING)
    trains(made)
    assert ids(made) == ("pod_0_0", "pod_1_0")
    assert (made.job.budget.failures, made.job.budget.preemptions) == (1, 0)
    first, second = records(made)
    assert second.way is Way.START
    assert second.redone_steps == (first.last_step or 0) - (second.first_step or 0) + 1
    assert made.job.lineage.redone_steps == second.redone_steps <= 3


def test_a_pod_that_is_lost_is_replaced_on_the_node_that_holds_its_state():
    made = world(nodes=2, slots=1, max_pods=1, pods=1)
    made.has_path = False
    made.cut_off("a")
    trains(made)
    made.reconnect("a")
    made.rounds(4)
    (pod,) = made.nodes["b"].pods.values()
    assert pod.snapshot is not None
    pod.end(code=137)
    trains(made)
    assert [each.node_id for each in views.running_pods(made.job)] == ["b"]
    assert records(made)[-1].first_step == pod.snapshot.step + 1


def test_steps_that_only_the_snapshot_knows_of_belong_to_the_stage_that_made_them():
    made = trains(world())
    made.crash("pod_1_0")
    reported = made.job.progress.step
    made.pod("pod_0_0").snapshot = wire.SnapshotRef(stage=1, step=reported + 3)
    made.run_until(JobState.RECOVERING)
    trains(made)
    first, second = records(made)
    assert (first.last_step, second.first_step) == (reported + 3, reported + 4)
    assert second.redone_steps == 0


def test_the_culprit_is_named_although_a_victim_spoke_first():
    made = trains(world())
    victim = {"rank": 0, "code": -6, "peer_lost": True, "reason": "gloo: peer"}
    tell(made, "pod_0_0", ReportKind.FAILED, 1, **victim)
    tell(made, "pod_1_0", ReportKind.FAILED, 1, rank=1, code=1, reason="CUDA out of memory")
    trains(made)
    assert made.job.budget.failures == 1
    reason = records(made)[-1].reason
    assert "rank 1 (pod_1_0) exited with 1: CUDA out of memory" in reason


@pytest.mark.parametrize("least", [1, 2])
def test_a_node_goes_on_alone_where_nodes_do_not_reach_each_other_until_they_do(least):
    made = trains(world(nodes=2, slots=1, min_pods=least))
    assert [pod.site.node_id for pod in made.job.pods] == ["a", "b"]
    made.kill_trainer(made.pod("pod_0_0"), made.launcher("pod_0_0"), rank=0)
    made.run_to(Order.START)
    stage = made.job.preparing
    assert stage is not None
    for rank, pod_id in enumerate(stage.pod_ids):
        tell(made, pod_id, ReportKind.FAILED, stage.stage, rank=rank, code=75, peer_lost=True)
    trains(made)
    assert len(made.active.members) == least
    if least == 2:
        return
    assert made.active.restore_from is not None
    assert any("do not reach each other: pod_0_0 of a goes on" in each for each in made.reasons)
    made.rounds(60)
    assert len(made.active.members) == 2, made.reasons[-10:]


def test_where_nodes_do_not_reach_each_other_the_one_that_has_the_state_goes_on():
    """A pause has written it to that node's run folder, where no other node can read it."""
    made = trains(world(nodes=1, slots=1, pods=1))
    made.has_path = False
    made.pause()
    made.run_until(JobState.PAUSED)
    made.nodes["b"] = SimNode(node("b", 2), made.now)
    made.rounds(2)
    made.resize(3)
    made.resume()
    for _ in range(2):
        before = made.job.commits
        while made.job.commits == before:
            made.round(0.2)
        stage = made.active
        for rank, pod_id in enumerate(stage.pod_ids):
            tell(made, pod_id, ReportKind.FAILED, stage.stage, rank=rank, code=75, peer_lost=True)
    trains(made)
    assert [member.pod.node_id for member in made.active.members] == ["a"], made.reasons[-10:]


def test_victims_alone_count_as_one_failure():
    made = trains(world())
    for rank, pod_id in enumerate(ids(made)):
        tell(made, pod_id, ReportKind.FAILED, 1, rank=rank, code=-6, peer_lost=True)
    trains(made)
    assert made.job.budget.failures == 1


def test_a_dead_launcher_gets_a_new_pod_and_its_shims_snapshot_is_used():
    made = trains(world(pods=1))
    step = max(ref.step for ref in made.job.progress.snapshots.values())
    made.pod("pod_0_0").end(code=137)
    made.run_until(JobState.RECOVERING)
    trains(made)
    assert ids(made) == ("pod_0_0_1",)
    assert records(made)[-1].first_step == step + 1
    made.rounds(8)
    assert made.job.pod("pod_0_0") is None  # its snapshot is not needed any more


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_a_change_goes_on_from_what_trainers_have_written_not_from_an_older_snapshot(overlap):
    made = trains(world(overlap=overlap))
    made.memory = False  # from now on there is none for snapshots
    made.rounds(6)
    made.resize(1)
    while len(made.active.members) > 1:
        made.round()
    trains(made)
    assert records(made)[-1].redone_steps == 0


def test_a_dead_shim_takes_its_snapshot_along():
    made = trains(world(pods=1))
    made.kill_shim("pod_0_0")
    durable = made.durable
    made.run_until(JobState.RECOVERING)
    trains(made)
    assert made.active.restore_from is None
    assert records(made)[-1].first_step == durable + 1


def test_a_pod_whose_client_forgets_it_is_lost():
    made = trains(world())
    del made.nodes["a"].pods["pod_1_0"]
    made.nodes["a"].client = False  # do not start it again by itself
    made.report(made.nodes["a"])
    assert made.job.state is RUNNING  # one report may have been made too early
    made.now += 3.0
    made.report(made.nodes["a"])
    assert made.job.state is JobState.RECOVERING
    assert "does not know pod pod_1_0" in made.job.reason


@pytest.mark.parametrize(
    ("how", "failures", "preemptions"),
    [({"code": 1}, 1, 0), ({"signal": 9}, 1, 0), ({"signal": 15}, 0, 1), ({"code": 143}, 0, 1)],
)
def test_a_pod_that_is_asked_to_go_by_others_is_preempted(how, failures, preemptions):
    made = trains(world())
    made.pod("pod_1_0").end(**how)
    trains(made)
    assert (made.job.budget.failures, made.job.budget.preemptions) == (failures, preemptions)


def test_pods_that_always_end_by_sigterm_are_started_again_ever_more_slowly():
    made = world(pods=1, total_steps=4000)
    for _ in range(400):
        made.round()
        for _, pod, _ in made.launchers():
            pod.end(signal=15)
    assert made.job.budget.failures == 0
    assert 5 < made.job.budget.preemptions < 12  # in 200 s
    assert not made.job.state.ended


@pytest.mark.parametrize("by_rank", [True, False])
def test_a_kill_on_request_is_nobodys_failure(by_rank):
    made = trains(world())
    made.send(KillAsked(Kill(rank=1) if by_rank else Kill(pod_id="pod_1_0")))
    made.run_until(JobState.RECOVERING)
    trains(made)
    budget = made.job.budget
    assert (budget.failures, budget.failures_in_row, budget.preemptions) == (0, 0, 0)
    who = "rank 1 (pod_1_0)" if by_rank else "pod pod_1_0"
    assert records(made)[-1].reason == f"recovery: {who} was killed by SIGKILL, as requested"
    assert ids(made)[1] == ("pod_1_0" if by_rank else "pod_1_0_1")


def test_a_lost_node_makes_the_job_smaller_until_it_comes_back():
    made = trains(world(pods=4))
    made.cut_off("b")
    made.run_until(JobState.RECOVERING)
    trains(made)
    assert ids(made) == ("pod_0_0", "pod_1_0")
    assert (made.job.budget.preemptions, made.job.budget.failures, made.job.target) == (1, 0, 4)
    made.reconnect("b")
    made.rounds(30)
    assert len(ids(made)) == 4
    assert records(made)[-1].reason == "growing back to 4"
    assert made.job.resizes == 0
    assert not made.nodes["b"].pods.keys() & {"pod_2_0", "pod_3_0"}


def test_below_min_pods_the_job_waits_and_its_script_clock_stands():
    script = wire.ScriptSpec(kind=wire.ScriptKind.ALTERNATE, interval_s=900.0)
    made = trains(world(pods=4, min_pods=3, script=script))
    made.power_off(made.nodes["b"])
    made.run_until(JobState.WAITING)
    clock = made.status.script_elapsed_s
    waited = made.job.progress.account.waiting_s
    made.rounds(40)
    assert made.job.state is JobState.WAITING
    assert "only 2 of 3 pods find a place" in made.status.reason
    assert made.status.script_elapsed_s == clock
    assert made.job.progress.account.waiting_s > waited + 15
    assert made.job.budget.preemptions == 1
    made.power_on(made.nodes["b"])
    trains(made)
    assert len(ids(made)) == 4


def test_nothing_is_started_while_no_pod_can_be_reached_and_all_goes_on_when_one_answers():
    made = trains(world())
    step = made.job.progress.step
    made.cut_off("a")
    made.run_until(JobState.WAITING)
    made.rounds(20)  # the cut-off pods train on
    assert made.job.preparing is None
    assert "no pod can be reached" in made.status.reason
    made.reconnect("a")
    made.rounds(4)
    assert made.job.state is RUNNING
    assert made.job.progress.step > step + 15
    assert len(records(made)) == 1
    assert made.status.reason == "stage 1 committed: 2 pods, first start"


def cut_off(*, stop_after_s: float | None, **spec: Any) -> World:
    """A world whose job trains on node `a`, which is then cut off; node `b` is free."""
    job = wire.JobSpec(**{"job_id": "job", "max_pods": 2, "overlap": "off", **spec})
    nodes = (node("a", stop_after_s=stop_after_s), node("b"))
    made = trains(World(job, nodes, total_steps=4000))
    made.cut_off("a")
    made.run_until(JobState.WAITING)
    return made


def test_a_job_that_is_cut_off_recovers_elsewhere_once_its_clients_have_stopped_its_pods():
    made = cut_off(stop_after_s=20.0)
    silent_since = made.nodes["a"].seen_at
    assert "until their clients have stopped them" in made.status.reason
    made.run_until(JobState.RECOVERING)
    assert silent_since + 26.0 <= made.now <= silent_since + 26.5 + HEARTBEAT_S
    assert (made.job.budget.preemptions, made.job.budget.failures) == (1, 0)
    trains(made)
    assert {pod.node_id for pod in views.running_pods(made.job)} == {"b"}
    made.reconnect("a")
    made.rounds(4)
    assert not made.nodes["a"].pods


def test_the_state_machine_asks_to_be_woken_when_the_pods_must_have_stopped():
    made = cut_off(stop_after_s=300.0)
    made.power_off(made.nodes["b"])  # so that nobody wakes it by a report
    made.rounds(20)
    heard = max(made.nodes["a"].seen_at, *made.job.progress.heard.values())
    assert machine.next_deadline(made.job, made.now, made.cluster) == heard + 306.0


@pytest.mark.parametrize("why", ["told to go on", "its client has died"])
def test_pods_that_nobody_stops_are_not_counted_as_stopped(why):
    made = cut_off(stop_after_s=None if why == "told to go on" else 20.0)
    if why == "its client has died":
        made.reconnect("a")
        made.nodes["a"].client = False
        made.rounds(20)  # the launchers are heard, their client is not
        assert made.job.state is RUNNING
        made.cut_off("a")
        made.run_until(JobState.WAITING)
    made.rounds(100)
    assert made.job.state is JobState.WAITING
    assert made.job.preparing is None


def test_a_stage_without_the_loop_goes_on_without_a_node_whose_client_has_stopped_its_pods():
    job = wire.JobSpec(job_id="job", max_pods=4)
    nodes = (node("a"), node("b", stop_after_s=20.0))
    made = trains(World(job, nodes, elastic=False))
    made.cut_off("b")
    made.run_until(JobState.WAITING)
    assert "or has stopped it" in made.job.waiting
    trains(made)
    assert {pod.node_id for pod in views.running_pods(made.job)} == {"a"}


def waits_for_lost(made: World) -> bool:
    return made.status.unreachable


def test_an_operator_can_say_that_what_cannot_be_reached_is_dead():
    made = trains(world())
    made.power_off(made.nodes["a"])
    assert not waits_for_lost(made)
    made.run_until(JobState.WAITING)
    assert waits_for_lost(made)
    made.resize(2, assume_dead=True)
    assert not waits_for_lost(made)
    trains(made)
    assert {pod.node_id for pod in views.running_pods(made.job)} == {"b"}


def test_a_job_whose_machines_are_gone_says_so_also_after_a_pause():
    made = trains(world(elastic=False))
    made.power_off(made.nodes["a"])
    made.run_until(JobState.WAITING)
    waits = "no pod can be reached: waiting until one answers, or for `edl resize job 2 --assume_de"
    assert waits in made.status.reason
    made.pause()
    made.run_until(JobState.PAUSED, rounds=400)
    made.rounds(20)
    assert "paused; no trainer has called the elastic loop" in made.status.reason
    made.resume()
    made.rounds(20)
    assert made.job.state is JobState.WAITING
    assert waits in made.status.reason
    made.resize(2, assume_dead=True)
    trains(made)
    assert {pod.node_id for pod in views.running_pods(made.job)} == {"b"}


@pytest.mark.parametrize("rounds", [20, 800])  # 10 s: before its stage is over; 400 s: after that
def test_the_end_of_a_job_whose_machines_are_gone_says_how_to_give_its_state_up(rounds):
    made = trains(world())
    made.stop()
    made.power_off(made.nodes["a"])
    made.rounds(rounds)
    assert made.job.state is JobState.STOPPING
    assert "`edl stop job --discard`" in made.status.reason
    made.stop(discard=True)
    made.run_until(JobState.STOPPED, rounds=400)


def test_a_stage_without_the_loop_is_over_only_when_all_its_pods_are_confirmed_stopped():
    made = trains(world(elastic=False, pods=4))
    made.cut_off("b")
    made.run_until(JobState.WAITING)
    made.rounds(20)
    assert made.job.preparing is None
    assert "--assume_dead" in made.job.waiting
    assert waits_for_lost(made)
    made.reconnect("b")
    trains(made)
    assert not waits_for_lost(made)
    assert len(ids(made)) == 4


def test_a_training_script_that_fails_at_once_uses_up_its_restarts():
    made = world(max_restarts_without_progress=3)
    for _ in range(400):
        made.round()
        for _, pod, who in made.launchers():
            if who.run is not None and who.run.phase.value == "starting":
                made.kill_trainer(pod, who)
        if made.job.state.ended:
            break
    assert made.job.state is FAILED
    assert made.job.budget.failures == 4
    assert "3 restarts in a row brought no new step" in made.job.reason
    assert "was killed by SIGKILL" in made.job.reason
    made.rounds(3)
    assert not any(sim.pods for sim in made.nodes.values())


def test_a_package_script_that_always_fails_ends_the_job_with_its_words():
    made = world(pods=1, max_restarts_without_progress=2)
    made.script_fails = 99
    made.run_until(FAILED)
    assert "the package script failed" in made.job.reason
    assert made.pod_ids == {"pod_0_0", "pod_0_0_1", "pod_0_0_2"}


def test_a_pod_that_exits_zero_before_it_had_trainers_has_failed():
    made = world(pods=1)
    made.rounds(1)
    made.client_acts(made.nodes["a"])
    made.nodes["a"].pods["pod_0_0"].end(code=0)
    made.client_acts(made.nodes["a"])
    assert made.job.budget.failures == 1
    assert "before its trainers had started" in records(made)[0].outcome
    assert "has to call the launcher: `python -m pod_runtime.launch SCR" in records(made)[0].outcome


@pytest.mark.parametrize(
    ("limit", "kind"),
    [("max_failures", CauseKind.FAILURE), ("max_preemptions", CauseKind.PREEMPTION)],
)
def test_a_budget_that_is_used_up_fails_the_job_and_is_named(limit, kind):
    limits: dict[str, Any] = {limit: 1}
    job = world(**limits).job
    cause = Cause(kind=kind, text="x", at=0.0)
    first = count_failure(job, cause, 0.0, ran_s=0.0)
    assert first.give_up == ""
    assert limit in count_failure(replace(job, budget=first.budget), cause, 0.0, ran_s=0.0).give_up


def test_the_wait_before_a_retry_grows_and_is_the_same_in_a_replay():
    waits = [backoff_s("job", n) for n in range(1, 30)]
    assert waits[0] == 0.0
    assert waits == [backoff_s("job", n) for n in range(1, 30)]
    assert backoff_s("other", 3) != waits[2]
    assert all(0.75 <= wait <= 60.0 for wait in waits[1:])
    assert waits[4] > waits[1]
    assert max(waits) == 60.0


def test_failures_are_in_a_row_only_without_a_new_step():
    made = trains(world(max_restarts_without_progress=1))
    for _ in range(3):
        made.crash("pod_0_0")
        made.run_until(JobState.RECOVERING)
        made.run_until(RUNNING)
        made.rounds(16)
    assert made.job.budget.failures == 3
    assert made.job.state is RUNNING


def test_a_port_that_is_taken_is_dealt_anew_without_a_failure():
    made = world()
    made.rounds(1)
    made.client_acts(made.nodes["a"])
    made.launcher("pod_1_0").ports_fail = True
    made.run_until(RUNNING)
    trains(made)
    assert made.active.attempt == 1
    assert made.job.budget.failures == 0


def test_ports_that_are_always_taken_do_not_go_on_for_ever():
    made = world(pods=1)
    made.rounds(1)
    for attempt in range(30):
        stage = made.job.preparing
        if stage is None:
            break
        tell(made, "pod_0_0", ReportKind.READY, stage.stage, attempt=stage.attempt)
        tell(made, "pod_0_0", ReportKind.PORT_TAKEN, stage.stage, attempt=attempt)
    assert "10 times in a row" in records(made)[0].outcome


def test_a_stage_number_that_the_checkpoint_path_knows_is_burnt():
    made = world()
    made.rounds(1)
    tell(made, ("pod_0_0", "pod_1_0"), ReportKind.READY, 1)
    made.now += 1
    if made.job.preparing is not None:
        tell(made, "pod_0_0", ReportKind.STAGE_TOO_LOW, 1, highest_stage=7)
    trains(made)
    assert [record.stage for record in records(made)] == [1, 8]
    assert "holds stage 7" in records(made)[0].outcome
    assert (records(made)[1].flag, made.job.budget.failures) == (-1, 0)


def test_a_stage_in_force_whose_number_is_too_low_is_made_again_above():
    made = trains(world(elastic=False))
    tell(made, "pod_0_0", ReportKind.STAGE_TOO_LOW, 1, highest_stage=7)
    trains(made)
    assert [record.stage for record in records(made)] == [1, 8]
    assert made.job.budget.failures == 0


def test_a_run_that_goes_on_from_a_used_checkpoint_path_is_shown_as_starting():
    made = world()
    made.rounds(1)
    tell(made, ("pod_0_0", "pod_1_0"), ReportKind.READY, 1)
    tell(made, ("pod_0_0", "pod_1_0"), ReportKind.STARTED, 1)
    assert made.active.stage == 1
    made.now += 3
    low = {"highest_stage": 7, "elastic": True}
    tell(made, "pod_0_0", ReportKind.STAGE_TOO_LOW, 1, **low)
    states = {made.job.state}
    while made.job.progress.step == 0:
        made.rounds(1)
        states.add(made.job.state)
    assert states == {JobState.STARTING, JobState.RUNNING}
    assert [(record.stage, record.reason) for record in records(made)] == [
        (1, "first start"),
        (8, "first start"),
    ]
    assert records(made)[1].flag == -1
    status = made.status
    assert (status.account.recovering_s, status.failures, status.preemptions) == (0.0, 0, 0)
    assert "of stage 8 from the checkpoint path" in "".join(made.reasons), made.reasons


def test_the_first_stage_gets_a_number_above_what_launchers_find():
    made = world(pods=1)
    made.client_acts(made.nodes["a"])
    attach = wire.Attach(pod_id="pod_0_0", node_id="a", pid=1, highest_stage=12)
    made.send(LauncherAttached(attach))
    trains(made)
    assert made.active.stage == 13


def test_a_pod_that_does_not_end_its_trainers_is_killed():
    made = trains(world(grace_s=5.0))
    made.crash("pod_0_0")
    made.deliver(made.launcher("pod_0_0"))
    made.pod("pod_1_0").launcher = None  # hangs
    made.rounds(60)
    assert "killing pod pod_1_0: it does not end stage 1" in "\n".join(made.reasons)
    trains(made)
    assert "pod_1_0" not in ids(made)


def test_a_crash_while_cutting_commits_the_next_stage_from_the_newest_snapshot():
    made = trains(world())
    made.resize(3)
    made.run_until(JobState.CUTTING_OVER)
    made.crash("pod_0_0")
    made.deliver(made.launcher("pod_0_0"))
    trains(made)
    assert [(r.way, r.pods) for r in records(made)] == [(Way.START, 2), (Way.DRAIN, 3)]
    assert made.job.budget.failures == 1


def test_a_crash_while_preparing_uses_the_prepared_stage_only_if_it_is_as_quick():
    made = trains(world())
    made.nodes["b"].client = False
    made.nodes["b"].seen_at += 1000
    made.resize(3)
    made.crash("pod_0_0")
    made.run_until(JobState.RECOVERING)
    crashed = made.now
    made.run_until(RUNNING)
    assert made.now - crashed < 4, "those that are left are enough: nothing is waited for"
    assert "a recovery is quicker" in records(made)[1].outcome
    assert [r.pods for r in records(made)] == [2, 3, 2]


def ways(made: World) -> list[tuple[Way, int, bool]]:
    """Return the way and the pods of each stage, and whether it was committed."""
    return [(r.way, r.pods, r.committed_at is not None) for r in records(made)]


def test_a_lost_pod_is_replaced_beside_the_training_where_that_can_be():
    """Its successor has a script to start and a framework to import: nothing waits for that."""
    made = trains(world(overlap="on"))
    made.kill_shim("pod_1_0")
    made.run_until(JobState.RECOVERING)
    trains(made)
    made.rounds(20)
    assert ways(made) == [(Way.START, 2, True), (Way.START, 1, True), (Way.REPLACE, 2, True)]
    assert made.job.target == 2
    assert made.job.budget.failures == 1


@pytest.mark.parametrize("spec", [{"overlap": "off"}, {"overlap": "on", "min_pods": 2}])
def test_a_recovery_waits_for_a_lost_pods_successor_where_it_must(spec):
    made = trains(world(**spec))
    made.kill_shim("pod_1_0")
    made.run_until(JobState.RECOVERING)
    trains(made)
    made.rounds(20)
    assert ways(made) == [(Way.START, 2, True), (Way.START, 2, True)]


def test_a_crash_does_not_wait_for_pods_that_a_change_adds_and_that_is_made_later():
    made = trains(world(overlap="on"))
    made.resize(3)
    made.run_until(JobState.PREPARING)
    made.crash("pod_0_0")
    made.deliver(made.launcher("pod_0_0"))
    made.round(0.1)
    made.round(0.1)
    trains(made)
    made.rounds(20)
    assert ways(made) == [
        (Way.START, 2, True), (Way.REPLACE, 3, False), (Way.START, 2, True), (Way.REPLACE, 3, True)
    ]  # fmt: skip
    assert made.job.resizes == 1


def test_a_restarted_server_goes_on_where_it_was_and_declares_nobody_dead_at_once():
    made = trains(world(pods=4))
    made.stop_server()
    made.now += 100.0
    made.train()
    made.start_server()
    assert made.job.state is RUNNING
    made.rounds(10)
    assert made.job.state is RUNNING
    assert len(records(made)) == 1
    assert machine.next_deadline(made.job, made.now, made.cluster) is not None


def away_for_an_hour(made: World, happens: str) -> None:
    """Let the server be away; its machines lose their power with it, or trainers die, or train."""
    made.stored = made.job  # as the shell does every 30 s
    made.stop_server()
    if happens == "the power is off":
        for sim in made.nodes.values():
            made.power_off(sim)
    if happens == "a trainer dies":
        made.crash("pod_0_0")
    made.now += 3600.0
    made.start_server()
    for sim in made.nodes.values():
        made.power_on(sim)


@pytest.mark.parametrize("elastic", [True, False])
@pytest.mark.parametrize(
    ("happens", "part"),
    [
        ("all train on", "training_s"),
        ("the power is off", "waiting_s"),
        ("a trainer dies", "waiting_s"),
    ],
)
def test_an_absence_of_the_server_is_training_where_a_launcher_says_so(happens, part, elastic):
    """Else a power cut would use up a job's `max_run_time_s`, and look like slow steps."""
    made = world(elastic=elastic, total_steps=10**6)
    made.run_until(RUNNING)
    made.rounds(8)
    before, begun = made.status.account, made.now
    away_for_an_hour(made, happens)
    made.rounds(30)
    account = made.status.account
    assert getattr(account, part) - getattr(before, part) == pytest.approx(3600, abs=20)
    assert account.total_s - before.total_s == pytest.approx(made.now - begun)
    first, *later = records(made)
    assert bool(later) == (happens != "all train on")
    if happens == "the power is off":
        assert first.ended_at == pytest.approx(begun, abs=1)


def test_a_change_goes_on_beside_the_training_while_the_server_is_away():
    made = trains(world(overlap="on", total_steps=10**6))
    made.nodes["b"].client = False  # starts no pod
    made.resize(3)
    made.run_until(JobState.PREPARING)
    away_for_an_hour(made, "all train on")
    made.rounds(4)
    assert made.status.account.preparing_s == pytest.approx(3600, abs=10)


def test_several_absences_of_which_nobody_says_anything_are_no_training():
    made = trains(world(total_steps=10**6))
    for sim in made.nodes.values():
        made.power_off(sim)
    for _ in range(2):
        away_for_an_hour(made, "the power is off")
    made.rounds(30)
    assert made.status.account.waiting_s == pytest.approx(7200, abs=30)
    made = trains(world(total_steps=10**6))
    made.stored = made.job
    for _ in range(2):
        made.stop_server()
        made.now += 3600.0
        made.start_server()
    made.rounds(4)
    assert made.status.account.training_s == pytest.approx(7200, abs=30)


def test_a_power_cut_is_no_run_time():
    made = world(pods=None, max_pods=2, share=True, max_run_time_s=600.0, total_steps=10**6)
    made.round()
    made.send(Allotted({"a": 2}, "there is room"))
    trains(made)
    away_for_an_hour(made, "the power is off")
    made.rounds(40)
    assert made.job.state is RUNNING
    away_for_an_hour(made, "all train on")
    made.rounds(40)
    assert "it has run for its max_run_time_s" in made.job.reason


@pytest.mark.parametrize("rounds", range(1, 8))
def test_a_server_that_dies_in_a_change_finishes_it_when_it_is_back(rounds):
    made = trains(world())
    made.resize(3)
    for _ in range(rounds):
        made.round(0.2)
    made.stop_server()
    for _ in range(3):
        made.train()
    made.now += 30.0
    made.start_server()
    trains(made)
    assert len(ids(made)) == 3
    assert made.job.lineage.redone_steps == 0


def test_a_server_that_comes_back_in_a_cut_waits_for_the_next_trainers_to_show_that_they_live():
    made = trains(world(overlap="on"))
    made.resize(3)
    made.run_until(JobState.CUTTING_OVER)
    old, new = made.active, made.preparing
    made.send(ServerRestarted())
    step = made.job.progress.step
    kept = wire.SnapshotRef(stage=old.stage, step=step)
    parked = {"step": step, "snapshot_is_current": True, "snapshot": kept}
    tell(made, old.pod_ids, ReportKind.DRAINED, old.stage, **parked)
    for pod_id in new.pod_ids:
        assert made.active.stage == old.stage, "they may have died meanwhile"
        tell(made, pod_id, ReportKind.READY, new.stage)
    assert made.active.stage == new.stage


def test_reports_of_stages_that_are_gone_change_nothing():
    made = trains(world())
    made.resize(3)
    made.run_until(JobState.CUTTING_OVER)
    trains(made)
    before = made.job
    for kind in ReportKind:
        if kind is not ReportKind.EXITED:
            tell(made, "pod_0_0", kind, 1, highest_stage=50, reason="old")
    assert same_but_progress(before, made.job)
    assert made.active.all_in(PodStagePhase.TRAINING)


def test_progress_of_a_pod_that_was_given_up_does_not_count():
    made = trains(world(pods=4))
    made.cut_off("b")
    made.run_until(JobState.RECOVERING)
    trains(made)
    step = made.job.progress.step
    tell(made, "pod_3_0", ReportKind.PROGRESS, 1, step=9999)
    assert made.job.progress.step == step
    assert views.pod_orders(made.job).get("pod_3_0") is None


def test_a_recovery_begins_when_all_that_can_be_reached_have_ended():
    made = trains(world())
    tell(made, "pod_0_0", ReportKind.FAILED, 1, rank=0, code=1)
    tell(made, "pod_0_0", ReportKind.ENDED, 1)
    assert made.job.preparing is None
    tell(made, "pod_1_0", ReportKind.ENDED, 1)
    assert made.job.preparing is not None


def test_a_stage_starts_from_the_newest_snapshot_that_is_within_reach():
    made = trains(world(pods=3))
    refs = {"pod_0_0": 50, "pod_1_0": 60, "pod_2_0": 60}
    tell(made, "pod_0_0", ReportKind.FAILED, 1, rank=0, code=1)
    for pod_id, step in refs.items():
        ref = wire.SnapshotRef(stage=1, step=step)
        tell(made, pod_id, ReportKind.ENDED, 1, snapshot=ref)
    tell(made, tuple(refs), ReportKind.READY, 2)
    expected = wire.RestoreFrom(stage=1, step=60, pods=("pod_1_0", "pod_2_0"))
    assert made.preparing.restore_from == expected


def quiet(made: World) -> World:
    """Nobody says anything any more, but nobody counts as silent either."""
    for sim in made.nodes.values():
        sim.seen_at = made.now + 10_000
    return made


def test_the_next_deadline_is_that_of_the_phase():
    made = quiet(trains(world(prepare_timeout_s=50.0, grace_s=5.0)))
    made.resize(3)
    at = made.now
    assert machine.next_deadline(made.job, at + 20, made.cluster) == at + 50
    made.now = at + 30
    made.send(ServerRestarted())
    assert machine.next_deadline(made.job, at + 40, made.cluster) == at + 80  # a fresh timeout
    tell(made, "pod_0_0", ReportKind.FAILED, 1, rank=0, code=1)
    made.now = at + 36
    made.send(Tick())
    assert machine.next_deadline(made.job, at + 40, made.cluster) == at + 30 + 5 + 20


@pytest.mark.parametrize(
    ("report", "text"),
    [
        ({"rank": 2, "code": -11}, "rank 2 (pod_1_0) died of SIGSEGV"),
        ({"rank": 2, "code": -9}, "rank 2 (pod_1_0) was killed by SIGKILL"),
        ({"rank": 2, "code": -40}, "rank 2 (pod_1_0) died of signal 40"),
        (
            {"rank": 2, "code": 75, "peer_lost": True, "reason": "gloo"},
            "rank 2 (pod_1_0) exited with 75 when it lost a peer: gloo",
        ),
        ({"reason": "no space left"}, "pod pod_1_0 failed: no space left"),
    ],
)
def test_what_failed_is_told_in_words(report, text):
    made = trains(world())
    tell(made, "pod_1_0", ReportKind.FAILED, 1, **report)
    assert f"stage 1 is over: {text}" in made.reasons[-1]


def test_a_server_that_comes_back_does_not_say_so_for_ever():
    made = trains(world())
    before = made.status.reason
    made.stop_server()
    made.start_server()
    assert "the server is back" in made.reasons[-1]
    made.rounds(4)
    assert made.status.reason == before


@pytest.mark.parametrize("doing", ["prepared", "parked"])
def test_a_launcher_that_only_says_that_it_lives_is_not_lost_with_its_client(doing):
    made = trains(world())
    made.nodes["a"].client = False
    if doing == "parked":
        made.job = replace_members(made, PodStagePhase.PARKED)
    for _ in range(20):
        made.now += 1.0
        tell(made, ids(made), ReportKind.ALIVE, 0, snapshot=None)
        made.send(Tick())
        assert made.active.over is None
        assert not made.job.cut_off
    assert len(records(made)) == 1
    made.now += 5.0
    made.send(Tick())
    assert made.job.cut_off


def replace_members(made: World, phase: PodStagePhase) -> Any:
    members = tuple(replace(member, phase=phase) for member in made.active.members)
    return replace(made.job, active=replace(made.active, members=members))


def test_a_job_whose_state_is_lost_says_that_it_begins_again_and_how_much_that_costs():
    made = trains(world(nodes=1, total_steps=4000))
    made.durable = 0  # no checkpoint that the new trainers could see
    for pod_id in ids(made):
        made.kill_shim(pod_id)
    reached = made.job.progress.best_step
    made.run_until(JobState.RECOVERING, JobState.WAITING)
    made.durable = 0
    made.run_until(RUNNING)
    made.rounds(4)
    assert made.job.lineage.redone_steps >= reached
    assert any(
        f"{made.job.lineage.redone_steps} steps are lost" in reason for reason in made.reasons
    )
    assert made.status.step < reached, "the status says where it is, not where it was"


@pytest.mark.parametrize("clock_back_s", [0.0, 900.0])
@pytest.mark.parametrize("before", ["a change", "a retry", "a standby", "a pause", "nothing"])
def test_a_clock_that_is_set_back_between_two_lives_of_the_server_stops_nothing(
    before, clock_back_s
):
    script = wire.ScriptSpec(kind=wire.ScriptKind.TIMELINE, text="- {at: 60s, pods: 3}")
    standby = 1 if before == "a standby" else 0
    made = trains(world(script=script, standby=standby, overlap="auto", total_steps=4000))
    if before == "a change":
        made.resize(1)
    elif before == "a retry":
        for _ in range(2):  # the second one waits
            made.crash()
            made.round()
    elif before == "a pause":
        made.pause()
    made.round()
    made.stop_server()
    made.rounds(4)
    made.start_server(clock_back_s=clock_back_s)
    if before == "a pause":
        made.run_until(JobState.PAUSED)
        made.resume()
    made.rounds(80, 1.0)
    assert made.job.state is JobState.RUNNING, made.reasons
    assert len(views.running_pods(made.job)) == 3, made.reasons
    assert not any("abandoned: not ready" in reason for reason in made.reasons)
    assert any("set back by" in reason for reason in made.reasons) is (clock_back_s > 0)
    script_s = made.job.progress.script_s
    made.rounds(5, 1.0)
    assert made.job.progress.script_s == pytest.approx(script_s + 5.0)


# --- the first error is kept ----------------------------------------------------------------------


def raised(text: str) -> TrainerError:
    trace = f'Traceback (most recent call last):\n  File "t.py", line 7, in f\nValueError: {text}\n'
    chain = (RaisedError(types=("ValueError", "Exception"), text=text),)
    return TrainerError(chain=chain, where="t.py:7", traceback=trace)


def kept(made: World) -> str:
    return str(made.status.error)


def fails(made: World, rank: int, stage: int, text: str) -> None:
    error = raised(text)
    told = {"rank": rank, "code": 1, "reason": str(error), "error": error}
    tell(made, f"pod_{rank}_0", ReportKind.FAILED, stage, **told)


def test_of_two_errors_the_one_that_is_heard_first_is_kept_with_its_traceback():
    made = trains(world())
    assert kept(made) == "None"
    fails(made, 1, 1, "the cause")
    fails(made, 0, 1, "a consequence")
    first = made.status.error
    assert first is not None
    assert first.text == "rank 1 (pod_1_0) exited with 1: t.py:7: ValueError: the cause"
    what, where = error_lines(first)
    assert what == first.text
    assert where.startswith("heard first in stage 1, ")
    assert where.endswith('1 frames, the last: File "t.py", line 7, in f')
    trains(made)
    assert made.status.error == first  # it is known after the recovery, until another stage fails
    fails(made, 0, made.active.stage, "another")
    assert "another" in kept(made)


def test_an_error_takes_the_place_of_those_of_its_victims_and_a_kill_on_request_is_none():
    made = trains(world())
    made.send(KillAsked(Kill(rank=0)))
    made.run_until(JobState.RECOVERING)
    trains(made)
    assert kept(made) == "None"
    victim = {"rank": 0, "code": -6, "peer_lost": True, "reason": "gloo: peer"}
    tell(made, "pod_0_0", ReportKind.FAILED, made.active.stage, **victim)
    assert "lost a peer" in kept(made)
    fails(made, 1, made.active.stage, "the cause")
    assert "the cause" in kept(made)
