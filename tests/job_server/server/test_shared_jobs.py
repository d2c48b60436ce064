"""Shared jobs give way to each other: real service, database and client; trainers and time are not.

The nodes are a and b with two slots each, and c with one.
"""

import itertools
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from job_server.api import wire
from job_server.api.errors import BadRequest, Conflict, NotFound
from job_server.api.wire import JobState, Resize, Way
from job_server.jobs.events import KillAsked, PauseAsked, ResizeAsked, ResumeAsked, StopAsked
from job_server.sharing import decide
from job_server.sharing.explain import explain
from job_server.training.rules import share
from tests.job_server.shared_cluster import LONG, SharedCluster


@pytest.fixture
def cluster(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[SharedCluster]:
    caplog.set_level(logging.ERROR)
    made = SharedCluster(tmp_path)
    try:
        yield made
        for job in made.jobs:
            job.check_json()
    finally:
        made.end_server(kill=True)


def no_step_is_lost(cluster: SharedCluster, job_id: str) -> None:
    status = cluster.status(job_id)
    assert status.redone_steps == 0
    made = [each for each in status.stages if each.first_step is not None]
    for one, other in itertools.pairwise(made):
        assert one.last_step is not None
        assert other.first_step == one.last_step + 1
    assert (status.failures, status.preemptions, status.resizes) == (0, 0, 0)


def test_one_job_takes_what_it_may_and_gives_way_to_others(cluster):
    cluster.add("one", 1, 5)
    cluster.run(20)
    assert cluster.sizes() == {"one": 5}
    cluster.add("two", 2, 5)
    cluster.run(40)
    sizes = cluster.sizes()
    assert sum(sizes.values()) == 5
    assert sizes["one"] >= 1
    assert sizes["two"] >= 2
    assert any("gives way to two" in text for text in cluster.events("one"))
    cluster.add("three", 1, 1, steps=40)
    cluster.run(15)
    assert cluster.sizes()["three"] == 1
    cluster.run(60)
    assert cluster.status("three").state is JobState.SUCCEEDED
    sizes = cluster.sizes()
    assert sizes["one"] + sizes["two"] == 5
    for job_id in ("one", "two", "three"):
        no_step_is_lost(cluster, job_id)


def test_a_higher_priority_stops_a_job_which_goes_on_by_itself_from_its_state(cluster):
    cluster.add("low", 5, 5)
    cluster.run(20)
    assert cluster.sizes() == {"low": 5}
    cluster.add("high", 2, 2, priority=1, steps=40)
    cluster.run(20)
    low = cluster.status("low")
    assert low.state is JobState.WAITING
    assert low.reason == (
        "stopped for high, whose priority is higher; waits: no room for its least, 5, the first on "
        "a, which has its state"
    )
    assert low.saved is not None
    assert low.saved.step == low.step
    assert low.allotment is not None
    assert low.allotment.pods == 0
    assert cluster.sizes() == {"low": 0, "high": 2}
    cluster.run(60)
    assert cluster.status("high").state is JobState.SUCCEEDED
    assert cluster.sizes()["low"] == 5
    no_step_is_lost(cluster, "low")


def test_a_job_that_a_limit_has_stopped_says_so(cluster):
    cluster.add("job", 5, 5)
    cluster.run(20)
    cluster.service.limit_node("b", wire.NodeLimit(slots=1))
    cluster.run(20)
    why = "its pods are for others: shared jobs may have fewer slots of b"
    assert any(why in text for text in cluster.events("job"))
    assert cluster.status("job").reason == (
        "shared jobs may have fewer slots of b; waits: no room for its least, 5, the first on a, "
        "which has its state"
    )


def test_a_job_whose_state_cannot_be_written_is_not_stopped_and_the_other_one_waits(cluster):
    cluster.add("low", 5, 5)
    low = cluster.job("low")
    low.full = {"a", "b", "c", "path"}
    cluster.run(20)
    cluster.add("high", 2, 2, priority=1)
    cluster.run(100)
    assert cluster.sizes() == {"low": 5, "high": 0}
    assert cluster.status("low").allotment.reason.startswith("cannot be stopped: the state of step")
    assert cluster.status("high").reason == "waits: no room for its least, 2"
    refusals = [text for text in cluster.events("low") if "not stopped" in text]
    assert len(refusals) == 1  # it is left alone for ten minutes
    low.full.clear()
    cluster.run(700)
    assert cluster.sizes() == {"low": 0, "high": 2}
    no_step_is_lost(cluster, "low")


@pytest.mark.parametrize("how", ["drained", "in quarantine"])
def test_a_job_that_is_to_leave_its_node_and_cannot_be_written_is_left_alone_for_a_while(
    cluster, how
):
    for name in ("b", "c"):
        cluster.service.limit_node(name, wire.NodeLimit(slots=0))
    cluster.add("stays", 1, 2)
    stays = cluster.job("stays")
    stays.full = {"a", "b", "c", "path"}
    cluster.run(20)
    for slot in (0, 1) if how == "in quarantine" else ():
        cluster.service.order_slot("a", wire.SlotOrder(slot=slot))
    if how == "drained":
        cluster.service.limit_node("a", wire.NodeLimit(slots=0, drain=True))
    cluster.run(100)
    refusals = [text for text in cluster.events("stays") if "not stopped" in text]
    assert len(refusals) == 1
    assert cluster.sizes()["stays"] >= 1
    no_step_is_lost(cluster, "stays")


def _has_no_memory(cluster: SharedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.job("low").memory = False
    cluster.run(20)


def _takes_long_to_its_first_step(cluster: SharedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.job("low"), "train", lambda: None)
    cluster.run(5)


def _has_just_resumed(cluster: SharedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.run(20)
    cluster.service.ask("low", PauseAsked())
    cluster.run(10)
    assert cluster.status("low").state is JobState.PAUSED
    cluster.service.ask("low", ResumeAsked())
    _takes_long_to_its_first_step(cluster, monkeypatch)


@pytest.mark.parametrize("why", ["another comes first", "its other nodes are taken"])
@pytest.mark.parametrize(
    "prepare", [_has_no_memory, _takes_long_to_its_first_step, _has_just_resumed]
)
def test_a_job_that_a_lost_node_may_hold_the_state_of_is_told_once_to_give_way(
    cluster, monkeypatch, prepare, why
):
    cluster.add("low", 2, 4)
    prepare(cluster, monkeypatch)
    cluster.machines["a"].link = False
    if why == "another comes first":
        cluster.add("high", 2, 3, priority=1)
    else:
        cluster.service.limit_node("b", wire.NodeLimit(slots=0, also=("c",)))
    cluster.run(20)
    texts = [text for text in cluster.events("low") if "not stopped: the newest state" in text]
    assert len(texts) == 1
    assert "may be on a, which cannot be reached" in texts[0]
    before = cluster.job("low").entry.events.value
    cluster.run(40)
    assert cluster.job("low").entry.events.value < before + 5


def test_rules_that_disagree_on_what_a_job_may_lose_do_not_spin(cluster, monkeypatch):
    monkeypatch.setattr(share, "_may_lose", lambda job: False)
    cluster.add("low", 2, 4)
    _has_no_memory(cluster, monkeypatch)
    cluster.machines["a"].link = False
    cluster.add("high", 2, 3, priority=1)
    cluster.run(20)
    texts = [text for text in cluster.events("low") if "not stopped" in text]
    assert 2 <= len(texts) <= 1 + 20 / share.CALM_S


def test_a_job_whose_clients_write_no_states_is_not_stopped(cluster):
    for machine in cluster.machines.values():  # of the version before
        machine.node, machine.server_id = replace(machine.node, saves=False), ""
    cluster.round()
    cluster.add("low", 5, 5)
    cluster.run(20)
    cluster.add("high", 2, 2, priority=1)
    cluster.run(30)
    assert cluster.sizes() == {"low": 5, "high": 0}
    assert cluster.status("low").allotment.reason == (
        "cannot be stopped: the job clients of its nodes are of a version that writes no states"
    )
    no_step_is_lost(cluster, "low")


def test_a_job_that_has_made_no_step_is_taken_off_clients_that_write_no_states(cluster):
    for machine in cluster.machines.values():  # of the version before
        machine.node, machine.server_id = replace(machine.node, saves=False), ""
    cluster.round()
    cluster.add("low", 5, 5)
    cluster.add("high", 2, 2, priority=1, steps=10)
    cluster.run(30)
    assert cluster.status("high").state is JobState.SUCCEEDED
    assert not [text for text in cluster.events("low") if "not stopped" in text]
    assert cluster.sizes()["low"] == 5


def test_a_job_without_the_elastic_loop_keeps_what_it_began_with(cluster):
    for name in ("b", "c"):
        cluster.service.limit_node(name, wire.NodeLimit(slots=0))
    cluster.add("plain", 1, 5)
    plain = cluster.job("plain")
    plain.elastic = False
    for name in ("b", "c"):
        cluster.service.limit_node(name, wire.NodeLimit(slots=None))
    assert cluster.status("plain").allotment.pods == 5
    cluster.run(30)
    assert cluster.sizes() == {"plain": 2}
    assert cluster.status("plain").allotment.nodes == {"a": 2}
    assert [each.way for each in cluster.status("plain").stages] == [wire.Way.START]
    cluster.add("other", 3, 5)
    cluster.run(20)
    assert cluster.sizes() == {"plain": 2, "other": 3}


def test_a_job_that_was_stopped_starts_on_the_node_that_has_its_state(cluster):
    cluster.add("job", 2, 2)
    cluster.job("job").has_path = False  # its state goes to the run folder of one node
    cluster.run(20)
    home = "a"
    assert cluster.status("job").allotment.nodes == {"a": 2}
    cluster.add("high", 5, 5, priority=1)
    cluster.run(20)
    assert cluster.status("job").saved.node_id == home
    cluster.service.ask("high", StopAsked())
    cluster.add("other", 1, 5)  # comes first to the slots that become free, and gives way
    cluster.run(60)
    assert cluster.sizes()["job"] == 2
    assert home in cluster.status("job").allotment.nodes
    no_step_is_lost(cluster, "job")


def test_a_job_starts_after_those_that_it_names_even_if_they_are_forgotten_since(cluster):
    with pytest.raises(BadRequest, match="after: there is no job 'first'; submit it first"):
        cluster.service.submit(cluster.shared_spec("x", after=("first",)))
    cluster.add("first", 1, 1, steps=30)
    cluster.add("second", 5, 5, steps=LONG)
    cluster.add("third", 1, 1, after=("first", "second"))
    cluster.run(60)
    assert cluster.status("first").state is JobState.SUCCEEDED
    assert cluster.status("third").reason == "waits for the success of second"
    cluster.service.delete("first")
    cluster.job("second").total_steps = 200
    cluster.run(200)
    assert cluster.status("second").state is JobState.SUCCEEDED
    assert cluster.sizes()["third"] == 1


def test_a_job_that_was_paused_while_another_succeeded_and_was_forgotten_starts(cluster):
    cluster.add("first", 1, 1, steps=30)
    cluster.add("second", 1, 1, after=("first",))
    cluster.run(5)
    cluster.service.ask("second", PauseAsked())
    cluster.run(60)
    assert cluster.status("second").state is JobState.PAUSED
    cluster.service.delete("first")
    cluster.service.ask("second", ResumeAsked())
    cluster.run(20)
    assert cluster.sizes()["second"] == 1


def test_a_job_after_one_that_failed_says_so_and_waits(cluster):
    cluster.add("first", 1, 1)
    cluster.add("second", 1, 1, after=("first",))
    cluster.run(10)
    cluster.service.ask("first", StopAsked())
    cluster.run(20)
    assert cluster.status("second").reason == (
        "waits for the success of first, which is STOPPED: delete it and submit it again, or stop "
        "this job"
    )
    with pytest.raises(BadRequest, match="after: job 'first' has STOPPED, so it never succeeds"):
        cluster.service.submit(cluster.shared_spec("x", after=("first",)))


def test_a_job_is_stopped_with_its_state_when_it_has_run_for_its_time(cluster):
    cluster.add("job", 5, 5, max_run_time_s=60.0)
    cluster.run(30)
    cluster.add("high", 5, 5, priority=1, steps=100)
    cluster.run(30)
    assert cluster.status("job").state is JobState.WAITING  # that does not count
    cluster.run(120)
    status = cluster.status("job")
    assert status.state is JobState.STOPPED
    assert status.reason.startswith(
        "STOPPED: it has run for its max_run_time_s of 1 min 0 s; step "
    )
    assert status.saved is not None
    account = status.account
    ran_s = account.total_s - account.waiting_s - account.paused_s
    assert 60.0 <= ran_s < 62.0


def test_a_job_that_was_complete_before_the_server_was_back_has_not_run_for_too_long(cluster):
    cluster.add("job", 1, 1, max_run_time_s=30.0, steps=50)
    cluster.add("next", 1, 1, after=("job",))
    cluster.run(20)
    cluster.end_server(kill=True)
    cluster.run(20)
    cluster.start_server()
    cluster.run(10)
    assert cluster.status("job").state is JobState.SUCCEEDED
    assert cluster.sizes()["next"] == 1


def test_users_pause_resume_and_limit_a_shared_job(cluster):
    cluster.add("job", 1, 5)
    cluster.add("other", 1, 5)
    cluster.run(60)
    cluster.service.ask("job", PauseAsked())
    cluster.run(60)
    assert cluster.status("job").state is JobState.PAUSED
    assert cluster.status("job").allotment is None
    assert cluster.sizes() == {"job": 0, "other": 5}
    cluster.service.ask("job", ResumeAsked())
    cluster.run(60)
    sizes = cluster.sizes()
    assert min(sizes.values()) >= 1
    assert sum(sizes.values()) == 5
    cluster.service.ask("job", ResizeAsked(Resize(pods=1)))
    cluster.run(60)
    assert cluster.sizes() == {"job": 1, "other": 4}
    with pytest.raises(Conflict, match=r"pods: 6 pods are above the job's max_pods \(5\)"):
        cluster.service.ask("job", ResizeAsked(Resize(pods=6)))
    no_step_is_lost(cluster, "job")


def test_a_job_that_could_not_be_stopped_queues_again_at_once_after_a_pause(cluster):
    cluster.add("low", 5, 5)
    cluster.job("low").full = {"a", "b", "c", "path"}
    cluster.run(20)
    cluster.add("high", 2, 2, priority=1, steps=10)
    cluster.run(20)
    assert "cannot be stopped" in cluster.status("low").allotment.reason
    cluster.job("low").full.clear()
    cluster.service.ask("low", PauseAsked())
    cluster.run(60)
    assert cluster.status("high").state is JobState.SUCCEEDED
    assert cluster.status("low").state is JobState.PAUSED
    cluster.service.ask("low", ResumeAsked())
    cluster.run(20)
    assert cluster.sizes()["low"] == 5
    no_step_is_lost(cluster, "low")


def test_a_job_that_could_be_neither_stopped_nor_paused_recovers_at_once(cluster):
    cluster.add("low", 5, 5)
    cluster.job("low").full = {"a", "b", "c", "path"}
    cluster.run(20)
    cluster.add("high", 2, 2, priority=1, steps=10)
    cluster.run(20)
    assert "cannot be stopped" in cluster.status("low").allotment.reason
    cluster.service.ask("high", StopAsked())
    cluster.service.ask("low", PauseAsked())
    cluster.run(60)
    assert "the job goes on" in " ".join(cluster.events("low"))
    before = cluster.status("low").stage
    cluster.service.ask("low", KillAsked(wire.Kill(rank=0)))
    cluster.run(20)
    assert cluster.sizes()["low"] == 5
    assert cluster.status("low").stage > before


def test_a_job_does_not_start_elsewhere_once_the_node_that_has_its_state_is_back(cluster):
    cluster.add("job", 1, 1)
    cluster.job("job").has_path = False
    cluster.run(20)
    for pod in cluster.job("job").nodes["a"].pods.values():
        pod.end(signal=9)  # its shim keeps the state
    cluster.client_acts("a")
    cluster.machines["a"].link = False
    while cluster.status("job").allotment.nodes == {"a": 1}:
        cluster.round()
    assert cluster.job("job").preparing.pod_ids
    cluster.machines["a"].link = True
    cluster.run(30)
    assert cluster.sizes() == {"job": 1}
    texts = " ".join(cluster.events("job"))
    assert "its newest state is in the memory of nodes that it is to leave" in texts
    assert "began again" not in texts


def test_a_job_goes_on_where_another_node_comes_for_one_that_has_left_with_the_state(cluster):
    cluster.bring("d", 2)
    cluster.add("one", 5, 5)
    cluster.job("one").has_path = False
    cluster.run(14)
    assert cluster.sizes() == {"one": 5}
    cluster.leave("a")
    step = cluster.status("one").step
    cluster.run(5)
    assert cluster.status("one").state is JobState.WAITING
    cluster.machines["d"].client = True
    cluster.run(30)
    assert cluster.sizes() == {"one": 5}
    assert cluster.status("one").step > step
    assert cluster.status("one").redone_steps <= 3  # those behind the newest snapshot


def test_a_state_in_the_run_folder_of_a_dead_node_is_given_up_on_an_operators_word(cluster):
    cluster.add("one", 1, 1)
    cluster.job("one").has_path = False
    cluster.run(14)
    assert cluster.status("one").allotment.nodes == {"a": 1}
    cluster.leave("a")
    cluster.run(40)
    assert cluster.status("one").state is JobState.WAITING
    assert "the first on a, which has its state" in cluster.status("one").reason
    cluster.service.ask("one", ResizeAsked(Resize(pods=1, assume_dead=True)))
    assert "is given up: it is in /a/run/checkpoint of node a" in " ".join(cluster.events("one"))
    cluster.run(30)
    assert cluster.sizes() == {"one": 1}


def test_a_job_does_not_wait_for_a_node_whose_client_was_started_again_where_it_needs_none(cluster):
    cluster.add("wall", 1, 1)
    cluster.add("one", 2, 2)
    for job_id in ("wall", "one"):
        cluster.job(job_id).has_path = True
    cluster.run(14)
    assert set(cluster.job("one").status.allotment.nodes) == {"a", "b"}
    cluster.leave("a")
    cluster.machines["a"].client = True
    cluster.run(20)
    assert cluster.sizes() == {"wall": 1, "one": 2}


def test_what_cannot_be_decided_keeps_nobody_else_from_the_server(cluster, monkeypatch):
    cluster.add("job", 1, 5)
    cluster.run(20)

    def fails(*_: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr("job_server.server.engine.decide", fails)
    cluster.service.submit(wire.JobSpec(job_id="other", folder="train"))
    cluster.run(20)
    assert cluster.sizes() == {"job": 5}


def test_a_client_that_registers_again_and_again_and_never_reports_holds_up_nobody(cluster):
    cluster.run(1)
    broken = replace(cluster.machines["a"].node, node_id="broken", addr="10.0.0.9")
    cluster.service.register(broken)  # as one that is started again whenever it dies
    cluster.add("first", 1, 5)
    for _ in range(20):
        cluster.run(1)
        cluster.service.register(broken)
    assert cluster.sizes() == {"first": 5}
    assert all(pod.node_id != "broken" for pod in cluster.status("first").pods)


def test_a_limit_of_a_node_takes_trainers_off_it(cluster):
    cluster.add("job", 1, 5)
    cluster.run(20)
    assert cluster.sizes() == {"job": 5}
    cluster.service.limit_node("a", wire.NodeLimit(slots=0))
    cluster.run(30)
    assert cluster.sizes() == {"job": 3}
    assert cluster.status("job").allotment.nodes == {"b": 2, "c": 1}
    cluster.service.limit_node("a", wire.NodeLimit(slots=None))
    cluster.run(30)
    assert cluster.sizes() == {"job": 5}
    no_step_is_lost(cluster, "job")


def test_a_job_that_keeps_its_least_leaves_a_node_once_there_is_another_place(cluster):
    cluster.bring("d", 2)
    cluster.add("job", 5, 5, keeps_least=True)
    cluster.run(20)
    cluster.service.limit_node("a", wire.NodeLimit(slots=0))
    cluster.run(30)
    assert (cluster.sizes(), cluster.status("job").stage) == ({"job": 5}, 1)
    cluster.machines["d"].client = True
    cluster.run(30)
    assert cluster.status("job").allotment.nodes == {"b": 2, "c": 1, "d": 2}
    assert cluster.status("job").stage == 2, "by one planned change"
    no_step_is_lost(cluster, "job")


def test_trainers_leave_several_nodes_by_one_change(cluster):
    cluster.add("job", 1, 5)
    cluster.run(20)
    before = cluster.status("job").stage
    with pytest.raises(NotFound, match="'x'"):
        cluster.service.limit_node("b", wire.NodeLimit(slots=0, also=("c", "x")))
    cluster.run(20)
    assert (cluster.sizes(), cluster.status("job").stage) == ({"job": 5}, before)
    cluster.service.limit_node("b", wire.NodeLimit(slots=0, also=("c",)))
    cluster.run(30)
    assert cluster.status("job").allotment.nodes == {"a": 2}
    assert cluster.status("job").stage == before + 1
    no_step_is_lost(cluster, "job")


def on_a_alone(cluster: SharedCluster, least: int, most: int) -> None:
    """Have a job run with all its pods on a, then give it b, too."""
    for name in ("b", "c"):
        cluster.service.limit_node(name, wire.NodeLimit(slots=0))
    cluster.add("job", least, most)
    cluster.run(20)
    assert {pod.node_id for pod in cluster.status("job").pods} == {"a"}
    cluster.service.limit_node("b", wire.NodeLimit(slots=None))


def test_the_only_pod_that_a_job_may_have_leaves_with_its_state_written_and_goes_on_there(cluster):
    on_a_alone(cluster, 1, 1)
    cluster.service.limit_node("a", wire.NodeLimit(slots=0))
    cluster.run(30)
    status = cluster.status("job")
    assert status.state is JobState.WAITING
    assert status.reason.endswith("no room for its least, 1, the first on a, which has its state")
    explanation = explain(cluster.service.sharing(), "job")
    assert "its first pod is to be on a, which has its state" in explanation.summary
    assert "`edl capacity a --slots all`" in explanation.summary
    assert "starts now" not in explanation.summary
    cluster.service.limit_node("a", wire.NodeLimit(slots=1))
    cluster.run(30)
    assert cluster.status("job").allotment.nodes == {"a": 1}
    no_step_is_lost(cluster, "job")


@pytest.mark.parametrize("least", [1, 2])
@pytest.mark.parametrize("is_drain", [True, False])
def test_a_job_moves_off_its_only_node_over_a_pod_that_stays_for_one_stage(
    cluster, least, is_drain
):
    on_a_alone(cluster, least, 2)
    cluster.service.limit_node("a", wire.NodeLimit(slots=0, drain=is_drain))
    cluster.run(30)
    status = cluster.status("job")
    assert status.state is JobState.RUNNING
    assert [pod.node_id for pod in status.pods] == ["b", "b"]
    assert [each.way for each in status.stages] == [Way.START, Way.REPLACE, Way.REPLACE]
    no_step_is_lost(cluster, "job")


def test_a_job_that_moves_to_a_node_waits_for_those_that_give_way_there(cluster):
    on_a_alone(cluster, 2, 2)
    cluster.add("low", 2, 2, priority=-1)
    cluster.run(20)
    assert cluster.sizes() == {"job": 2, "low": 2}
    cluster.service.limit_node("a", wire.NodeLimit(slots=0, drain=True))
    cluster.run(40)
    assert [pod.node_id for pod in cluster.status("job").pods] == ["b", "b"]
    assert cluster.status("low").state is JobState.WAITING
    no_step_is_lost(cluster, "job")


def test_jobs_that_are_not_shared_keep_their_slots(cluster):
    spec = wire.JobSpec(job_id="own", max_pods=3, folder="train", prepare_timeout_s=10.0)
    cluster.submit_spec(spec)
    cluster.job("own").total_steps = LONG
    cluster.run(10)
    cluster.add("shared", 1, 5, priority=1000)
    cluster.run(30)
    assert cluster.sizes() == {"own": 3, "shared": 2}
    cluster.service.ask("own", ResizeAsked(Resize(pods=1)))
    cluster.run(30)
    assert cluster.sizes() == {"own": 1, "shared": 4}
    no_step_is_lost(cluster, "shared")


def test_what_the_cluster_never_has_is_refused_with_the_numbers(cluster):
    with pytest.raises(BadRequest) as refused:
        cluster.service.submit(cluster.shared_spec("big", after=(), min_pods=6, max_pods=6))
    assert str(refused.value) == (
        "min_pods: 6 pods of 1 slot each are more than the cluster has: 5 fit; a has 2 slots; "
        "b has 2 slots; c has 1 slot"
    )
    with pytest.raises(BadRequest, match=r"4 pods of 2 slots each .* 2 fit; a has 2 slots"):
        cluster.service.submit(
            cluster.shared_spec("big", after=(), min_pods=4, max_pods=4, slots_per_pod=2)
        )
    cluster.service.limit_node("a", wire.NodeLimit(slots=1))
    with pytest.raises(BadRequest, match="4 fit; a has 1 slot for shared jobs; b has 2 slots"):
        cluster.service.submit(cluster.shared_spec("big", after=(), min_pods=5, max_pods=5))


@pytest.mark.parametrize("at_s", [3.0, 20.0, 22.0, 24.0, 40.0])
def test_a_server_that_is_killed_knows_afterwards_what_it_has_allotted(cluster, at_s):
    cluster.add("low", 2, 5)
    cluster.add("lower", 2, 3, priority=-1)
    cluster.run(min(at_s, 20.0))
    cluster.add("high", 3, 3, priority=1, steps=60)
    cluster.run(max(at_s - 20.0, 0.0))
    cluster.end_server(kill=True)
    cluster.run(2.0)
    cluster.start_server()
    cluster.run(150)
    assert cluster.status("high").state is JobState.SUCCEEDED
    sizes = cluster.sizes()
    assert sizes["low"] + sizes["lower"] == 5
    for job_id in ("low", "lower", "high"):
        assert cluster.status(job_id).failures == 0


def test_shared_jobs_come_to_rest_and_heartbeats_decide_nothing(cluster, monkeypatch):
    decided = []
    real = decide.decide

    def counted(*args: Any) -> Any:
        found = real(*args)
        decided.append(found)
        return found

    monkeypatch.setattr("job_server.server.engine.decide", counted)
    for job_id, least, most in (("a", 1, 5), ("b", 2, 3), ("c", 1, 2), ("d", 3, 3)):
        cluster.add(job_id, least, most)
    cluster.run(300)
    decided.clear()
    cluster.run(100)
    assert not any(decided), "it never comes to rest"
    assert len(decided) <= 21  # one every five seconds, not one for each of 1,000 reports
