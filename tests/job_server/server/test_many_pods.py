"""A job of many pods: what each message costs the server."""

import cProfile
import json
import pstats
import time
from typing import Any

import pytest

from benchmarks import heartbeats
from job_server.api import wire
from job_server.api.codec import from_json
from job_server.api.errors import Forbidden
from job_server.server import engine
from job_server.server.service import JobService
from job_server.server.store import Store
from tests.job_server.serving import cpu_node

JOB = "many"
SLOTS = 8


class CountingStore(Store):
    """Counts how often a whole job was written."""

    jobs_written = 0

    def save_job(self, *args: Any, **options: Any) -> None:
        self.jobs_written += 1
        super().save_job(*args, **options)


class Pods:
    """A service with a job that trains on all slots of its nodes."""

    def __init__(self, nodes: int) -> None:
        self.now = 1e9
        self.store = CountingStore(":memory:")
        self.service = JobService(self.store, heartbeat_s=1.0, now=lambda: self.now)
        self.nodes = [f"node-{number}" for number in range(nodes)]
        count = nodes * SLOTS
        self.service.submit(
            wire.JobSpec(
                job_id=JOB,
                max_pods=count,
                pods=count,
                expected_nodes=nodes,
                script=wire.ScriptSpec(kind=wire.ScriptKind.NONE),
            )
        )
        for number, node_id in enumerate(self.nodes):
            self.service.register(
                wire.Node(
                    node_id=node_id,
                    addr=f"10.0.0.{number + 1}",
                    slots=tuple(
                        wire.Slot(index=index, kind=wire.SlotKind.CPU) for index in range(SLOTS)
                    ),
                    port_low=20000,
                    port_high=20099,
                    job_id=JOB,
                )
            )
        self.pods = {
            node_id: tuple(pod.pod_id for pod in self._plan(node_id).pods) for node_id in self.nodes
        }
        for node_id in self.nodes:
            self.beat(node_id)
            for pod_id in self.pods[node_id]:
                self.service.attach(JOB, pod_id, wire.Attach(pod_id=pod_id, node_id=node_id, pid=1))
        for kind in (
            wire.ReportKind.READY,
            wire.ReportKind.STARTED,
            wire.ReportKind.LOADED,
            wire.ReportKind.FIRST_STEP,
        ):
            for pod_ids in self.pods.values():
                for pod_id in pod_ids:
                    self.report(pod_id, kind, step=int(kind is wire.ReportKind.FIRST_STEP))

    def _plan(self, node_id: str) -> wire.NodePlan:
        return from_json(wire.NodePlan, self.service.plan(node_id, -1, 0).body)

    def beat(self, node_id: str) -> None:
        self.service.report_node(
            node_id,
            wire.NodeReport(
                node_id=node_id,
                pods=tuple(
                    wire.PodState(pod_id=pod_id, job_id=JOB, phase=wire.PodPhase.RUNNING)
                    for pod_id in self.pods[node_id]
                ),
            ),
        )

    def report(
        self,
        pod_id: str,
        kind: wire.ReportKind,
        *,
        step: int,
        snapshot: wire.SnapshotRef | None = None,
        paces: tuple[wire.RankPace, ...] = (),
    ) -> None:
        report = wire.PodReport(
            kind=kind, stage=1, step=step, elastic=True, snapshot=snapshot, paces=paces
        )
        self.service.report(JOB, pod_id, report)

    def orders(self, pod_id: str, revision: int = -1) -> wire.PodOrders:
        return from_json(wire.PodOrders, self.service.orders(JOB, pod_id, revision, 0).body)

    def status(self) -> wire.JobStatus:
        return from_json(wire.JobStatus, self.service.job(JOB).body)

    def calls(self, *, of_launcher: bool) -> int:
        """Return how many functions one heartbeat calls, as they are on the way."""
        node_id = self.nodes[-1]
        profile = cProfile.Profile()
        for number in range(3):
            self.now += 0.3
            if number == 2:
                profile.enable()
            if of_launcher:
                self.report(self.pods[node_id][-1], wire.ReportKind.PROGRESS, step=2)
            else:
                self.beat(node_id)
        profile.disable()
        return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


@pytest.mark.parametrize("of_launcher", [True, False], ids=["launcher", "client"])
def test_a_heartbeat_takes_as_few_steps_with_many_pods_as_with_few(of_launcher):
    few, many = Pods(2), Pods(24)
    assert many.status().state is few.status().state is wire.JobState.RUNNING
    assert many.calls(of_launcher=of_launcher) < 2 * few.calls(of_launcher=of_launcher)


def test_which_pods_hold_a_state_is_written_without_writing_all_of_the_job():
    pods = Pods(2)
    before = pods.store.jobs_written
    pod_ids = [pod_id for on_node in pods.pods.values() for pod_id in on_node]
    for step in (2, 3):
        for pod_id in pod_ids:
            held = wire.SnapshotRef(stage=1, step=step)
            pods.report(pod_id, wire.ReportKind.PROGRESS, step=step, snapshot=held)
    assert pods.store.jobs_written <= before + 1  # at the first one more has changed
    (stored,) = pods.store.jobs()
    snapshots = stored.data["progress"]["snapshots"]
    assert {pod_id: ref["stage"] for pod_id, ref in snapshots.items()} == dict.fromkeys(pod_ids, 1)


def test_what_a_heartbeat_says_is_seen_although_no_rule_is_tried():
    pods = Pods(1)
    pods.now += 2.0
    pods.report(pods.pods["node-0"][0], wire.ReportKind.PROGRESS, step=9)
    status = pods.status()
    assert status.step == 9
    assert status.account.training_s == pytest.approx(2.0)


def test_what_progress_brings_to_light_is_an_event_although_it_changes_no_decision():
    pods = Pods(2)
    for rank, pod_id in enumerate(pods.pods["node-0"][:2]):
        pace = wire.RankPace(
            rank=rank, steps=30, samples=30, window_s=10.0, computing_s=2.0 + 7.0 * rank,
            reading_s=0.0, exchanging_s=8.0 - 7.0 * rank, saving_s=0.0,
        )  # fmt: skip
        pods.report(pod_id, wire.ReportKind.PROGRESS, step=2, paces=(pace,))
    events = from_json(wire.EventList, pods.service.events(JOB, 0, 100, 0.0).body).events
    assert "straggles" in events[-1].text


def test_pods_that_fall_silent_are_found_by_the_clock_while_the_others_report():
    pods = Pods(2)
    gone, left = pods.nodes
    for _ in range(6):
        pods.now += 1.0
        pods.beat(left)
        for pod_id in pods.pods[left]:
            pods.report(pod_id, wire.ReportKind.PROGRESS, step=2)
    assert pods.status().state is wire.JobState.RUNNING
    pods.service.engine.tick()
    assert pods.status().state is wire.JobState.RECOVERING
    assert f"neither node {gone}" in pods.status().reason


def test_nobody_counts_as_silent_for_the_time_in_which_the_server_heard_nothing():
    pods = Pods(2)
    gone, left = pods.nodes
    hearing = pods.service.engine.registry.hearing
    pods.now += 30.0
    hearing.heard(time.monotonic() - 30.0)  # what came since is not taken up yet
    pods.service.engine.tick()
    assert pods.status().state is wire.JobState.RUNNING
    pods.now += 6.0  # it looks again every five seconds, in any case
    pods.beat(left)
    hearing.heard(time.monotonic())
    pods.service.engine.tick()
    assert pods.status().state is wire.JobState.RECOVERING
    assert f"neither node {gone}" in pods.status().reason


def test_launchers_are_told_to_report_more_rarely_where_there_are_many(monkeypatch):
    monkeypatch.setattr(engine, "REPORTS_PER_S", 4)
    pods = Pods(2)
    assert pods.orders(pods.pods["node-0"][0]).heartbeat_s == 4.0
    plan = from_json(wire.NodePlan, pods.service.plan("node-0", -1, 0).body)
    assert plan.heartbeat_s == 1.0


def test_launchers_that_report_rarely_are_asked_when_their_client_is_silent(monkeypatch):
    monkeypatch.setattr(engine, "REPORTS_PER_S", 4)
    pods = Pods(2)
    known = {pod_id: pods.orders(pod_id).revision for pod_id in pods.pods["node-0"]}
    for _ in range(5):
        pods.now += 2.1
        pods.beat("node-1")
        pods.service.engine.tick()
        for pod_id, revision in known.items():
            orders = pods.orders(pod_id, revision)
            assert orders.revision > revision
            assert orders.plans == pods.orders(pod_id).plans
            known[pod_id] = orders.revision
    assert pods.status().state is wire.JobState.RUNNING
    pods.now += 4.1
    pods.beat("node-1")
    pods.service.engine.tick()
    assert pods.status().state is wire.JobState.RECOVERING
    assert "neither node node-0" in pods.status().reason


def test_a_poll_without_news_does_not_repeat_the_plans():
    pods = Pods(1)
    pod_id = pods.pods["node-0"][0]
    known = pods.orders(pod_id)
    assert len(known.plans) == 1
    again = pods.orders(pod_id, known.revision)
    assert (again.plans, again.revision) == ((), known.revision)


def test_launchers_are_not_asked_by_a_server_that_is_late_itself(monkeypatch):
    monkeypatch.setattr(engine, "REPORTS_PER_S", 4)
    pods = Pods(1)
    pod_id = pods.pods["node-0"][0]
    revision = pods.orders(pod_id).revision
    pods.now += 2.1
    pods.service.engine.registry.hearing.heard(time.monotonic() - 30.0)
    pods.service.engine.tick()
    assert pods.orders(pod_id, revision).revision == revision


def test_few_launchers_are_not_asked_and_their_polls_say_nothing_of_them():
    pods = Pods(2)
    pod_id = pods.pods["node-0"][0]
    revision = pods.orders(pod_id).revision
    pods.now += 2.1
    pods.beat("node-1")
    pods.service.engine.tick()
    assert pods.orders(pod_id, revision).revision == revision


def test_more_nodes_than_the_server_can_hear_are_refused_with_their_number():
    now = 1e9
    service = JobService(Store(":memory:"), heartbeat_s=0.1, now=lambda: now)

    def register(number: int) -> None:
        service.register(cpu_node(f"node-{number}", addr=f"10.0.0.{number}"))

    for number in range(50):
        register(number)
    with pytest.raises(Forbidden, match=r"more than the 50 nodes .* larger --heartbeat_s"):
        register(50)
    register(7)  # one that is known may come again
    now += 1.0  # all are silent
    register(50)


@pytest.mark.full
def test_the_short_form_of_the_benchmark_finds_a_lost_node_and_no_other(monkeypatch, tmp_path):
    path = tmp_path / "figures.json"
    short = ["--nodes", "4", "--slots", "2", "--jobs", "2", "--seconds", "3", "--warm_s", "0"]
    monkeypatch.setattr("sys.argv", ["heartbeats", *short, "--json", str(path)])
    assert heartbeats.main() == 0
    figures = json.loads(path.read_text())
    assert figures["pods"] == 8
    assert figures["false_alarms"] == figures["refused"] == 0
    assert figures["lost_node_noticed_s"] > 1
