"""First starts, jobs of original clients, and what a job tells about itself."""

from dataclasses import replace
from typing import Any

import pytest

from job_server.api import wire
from job_server.api.wire import JobSpec, JobState, ReportKind, Resize, ScriptKind, ScriptSpec
from job_server.cluster.placement import Cluster, NodeView
from job_server.jobs.events import (
    NodesChanged,
    PauseAsked,
    RequestRefused,
    ResizeAsked,
    ResumeAsked,
    RunTimeStatic,
    StopAsked,
    Tick,
)
from job_server.training import machine, views
from job_server.training.core import changes
from job_server.training.core.job import MAX_RECORDS, Job
from tests.job_server.world import World, ids, node, tell, trains, world

NOW = 1000.0
NOBODY = Cluster()


def test_a_first_start_waits_for_all_nodes():
    made = world(expected_nodes=3)
    made.rounds(10)
    assert made.job.state is JobState.WAITING
    assert made.status.reason == "2 of 3 nodes have registered"
    made.nodes["c"] = type(made.nodes["a"])(node("c"), made.now, registered=False)
    trains(made)


def test_a_first_start_goes_on_without_some_nodes_after_its_timeout():
    made = world(expected_nodes=3, start_timeout_s=10.0, pods=4, max_pods=6, slots=1)
    made.rounds(19)
    assert made.job.state is JobState.WAITING
    trains(made)
    assert len(ids(made)) == 2
    assert made.job.target == 4


def test_below_min_pods_there_is_no_first_start():
    made = world(expected_nodes=1, start_timeout_s=1.0, min_pods=5, max_pods=5, pods=5)
    made.rounds(30)
    assert made.job.state is JobState.WAITING
    assert "only 4 of 5 pods find a place" in made.status.reason


def test_a_stage_whose_trainers_may_not_be_elastic_is_committed_when_they_have_started():
    made = world()
    made.run_until(JobState.RUNNING)
    assert made.job.active is not None
    assert not made.job.elastic
    trains(made)
    assert made.job.elastic


def test_a_first_stage_is_not_changed_before_its_trainers_could_show_what_they_are():
    made = world()
    made.run_until(JobState.RUNNING)
    assert not made.job.elastic
    made.resize(1)
    assert "waits" in made.reasons[-1]
    made.run_until(JobState.PREPARING, JobState.CUTTING_OVER)
    trains(made)
    assert [record.way for record in made.job.records] == [wire.Way.START, wire.Way.DRAIN]


# --- jobs that only clients of the original look after --------------------------------------------


def legacy_job(pods: int = 3, interval_s: float = 10.0) -> Job:
    script = ScriptSpec(kind=ScriptKind.ALTERNATE, interval_s=interval_s)
    spec = JobSpec(job_id="job", max_pods=pods, script=script)
    return machine.new_job(spec, NOW, legacy_nodes=(node("a", pods),))


def test_without_a_client_of_ours_changes_happen_at_once_with_the_originals_flags_and_ids():
    job = legacy_job()
    assert job.state is JobState.RUNNING
    seen = [(job.flag, [pod.pod_id for pod in views.running_pods(job)])]
    for n in range(1, 5):
        deadline = machine.next_deadline(job, NOW + 10 * n - 9, NOBODY)
        assert deadline is not None
        ticks = 0
        while deadline is not None and deadline <= NOW + 10 * n + 0.01:
            ticks += 1
            job, _ = machine.step(job, Tick(), deadline, NOBODY)
            deadline = machine.next_deadline(job, deadline, NOBODY)
        assert ticks < 10, "a busy loop"
        seen.append((job.flag, [pod.pod_id for pod in views.running_pods(job)]))
    assert seen == [
        (-1, ["pod_0_0", "pod_1_0", "pod_2_0"]),
        (0, ["pod_0_0", "pod_1_0"]),
        (1, ["pod_0_0", "pod_1_0", "pod_2_1"]),
        (2, ["pod_0_0", "pod_1_0"]),
        (3, ["pod_0_0", "pod_1_0", "pod_2_3"]),
    ]
    for pod_rank, pod in enumerate(views.running_pods(job)):
        assert (pod.pod_rank, len(pod.ports), pod.addr) == (pod_rank, 1, "addr-a")
    assert views.node_pods(job).get("a", ()) == ()
    assert views.pod_orders(job).get("pod_0_0") is None
    assert wire.decode(Job, wire.encode(job)) == job


def test_the_alternation_never_goes_below_one_pod():
    job = legacy_job(pods=1)
    job, reason = machine.step(job, Tick(), NOW + 11, NOBODY)
    assert "skipped" in reason
    assert len(views.running_pods(job)) == 1
    assert job.flag == -1


def test_a_resize_of_such_a_job_is_immediate_and_a_pause_is_refused():
    job = legacy_job()
    job, _ = machine.step(job, ResizeAsked(Resize(pods=1)), NOW + 1, NOBODY)
    assert len(views.running_pods(job)) == 1
    with pytest.raises(RequestRefused, match="no job client of ours"):
        machine.step(job, PauseAsked(), NOW + 2, NOBODY)
    job, _ = machine.step(job, StopAsked(), NOW + 3, NOBODY)
    assert job.state is JobState.STOPPED
    assert views.running_pods(job) == ()


@pytest.mark.parametrize(("after_s", "flag", "first"), [(3.0, -1, "pod_0_0"), (11.0, 1, "pod_0_1")])
def test_a_client_of_ours_takes_the_job_over_and_starts_it_properly(after_s, flag, first):
    made = World(JobSpec(job_id="job", max_pods=3), (node("a", 3),))
    made.job = made.stored = legacy_job()
    made.nodes["a"].registered = False
    made.send(Tick())
    made.pass_time(after_s)
    made.pod_ids.clear()
    made.committed.clear()
    made.rounds(1)
    assert made.job.state is JobState.STARTING
    trains(made)
    assert made.job.flag == flag
    assert ids(made)[0] == first


def test_a_node_that_serves_another_job_does_not_take_it_over():
    other = NodeView(node=node("b", job_id="other"), seen_at=NOW + 1)
    job, reason = machine.step(legacy_job(), NodesChanged(), NOW + 1, Cluster(nodes=(other,)))
    assert reason == ""
    assert job.legacy


# --- what is told ---------------------------------------------------------------------------------


def test_the_parts_of_the_account_add_up_to_the_wall_clock():
    made = trains(world())
    for event in (ResizeAsked(Resize(pods=3)), PauseAsked(), ResumeAsked()):
        made.send(event)
        made.rounds(30)
    account = views.job_status(made.job, made.now + 5, 1).account
    assert account.total_s == pytest.approx(made.now + 5 - made.job.submitted_at)
    assert min(account.training_s, account.cutting_over_s, account.paused_s) > 0


def test_the_time_before_a_script_calls_the_elastic_loop_is_no_training():
    made = trains(world(elastic=False))
    made.rounds(40)  # its imports, and data that it builds first
    before = made.status.account
    assert before.training_s > 15
    tell(made, "pod_0_0", ReportKind.LOADED, 1, elastic=True)
    account = made.status.account
    assert account.training_s == 0
    assert account.waiting_s == pytest.approx(before.waiting_s + before.training_s)
    assert account.total_s == pytest.approx(before.total_s)


def test_a_clock_that_is_set_back_books_nothing_twice():
    made = trains(world())
    total = made.job.progress.account.total_s
    job, _ = machine.step(made.job, Tick(), made.now - 50, made.cluster)
    assert job.progress.account.total_s == total


def test_the_expected_run_time_is_kept():
    made = world()
    made.send(RunTimeStatic(77.5))
    assert made.status.estimated_run_time_s == 77.5


def test_the_history_keeps_the_newest_stages_only():
    job: Any = legacy_job(interval_s=1.0)
    now = NOW
    for _ in range(MAX_RECORDS + 50):
        now += 1.0
        job, _ = machine.step(job, Tick(), now, NOBODY)
    assert len(job.records) == MAX_RECORDS
    assert job.records[-1].stage == job.next_stage - 1
    assert len(job.given.pod_ids) < 10


def test_a_change_stops_all_only_where_trainers_cannot_agree_on_a_step():
    plain = trains(world(elastic=False, overlap="on"))
    assert changes.choose_way(plain.job, plain.cluster) is wire.Way.STOP
    made = trains(world(overlap="off"))
    assert changes.choose_way(made.job, made.cluster) is wire.Way.DRAIN
    made = trains(world(overlap="auto"))
    assert changes.choose_way(made.job, made.cluster) is wire.Way.REPLACE  # CPU slots


@pytest.mark.parametrize(
    ("overlap", "used", "joins", "way"),
    [
        ("auto", 30, True, wire.Way.REPLACE),
        ("auto", 48, True, wire.Way.JOIN),  # 48 and 1.1 times as much do not fit into 100
        ("auto", 48, False, wire.Way.DRAIN),
        ("auto", 0, False, wire.Way.DRAIN),  # nobody knows what a trainer needs
        ("on", 90, True, wire.Way.REPLACE),
        ("off", 10, True, wire.Way.DRAIN),
        ("join", 10, True, wire.Way.JOIN),
        ("join", 30, False, wire.Way.REPLACE),
        ("join", 90, False, wire.Way.DRAIN),
    ],
)
def test_two_trainers_share_a_gpu_only_where_both_fit_unless_the_user_says_so(
    overlap, used, joins, way
):
    made = trains(world(overlap=overlap))
    for _, _, launcher in made.launchers()[:1]:  # one that does not is enough
        launcher.joins = joins
    made.rounds(4)
    gpu = wire.Slot(index=0, kind=wire.SlotKind.GPU, memory_bytes=100)
    views = tuple(
        replace(
            view,
            node=replace(view.node, slots=(gpu, replace(gpu, index=1))),
            memory_used={0: used, 1: 10},
        )
        for view in made.cluster.nodes
    )
    assert changes.choose_way(made.job, replace(made.cluster, nodes=views)) is way


@pytest.mark.parametrize("pods", [1, 4])
def test_a_resize_while_the_first_start_is_prepared_follows_it(pods):
    made = world(overlap="auto", pods=2, max_pods=4)
    made.round()
    assert made.job.preparing is not None
    made.resize(pods)
    made.run_until(JobState.RUNNING)
    made.rounds(30)
    assert made.job.target == pods
    assert len(views.running_pods(made.job)) == pods
