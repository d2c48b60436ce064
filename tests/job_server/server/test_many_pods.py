"""A job of many pods: what each message costs the server."""

import cProfile
import json
import pstats
import time

import pytest

from benchmarks import heartbeats
from job_server.api import wire
from job_server.api.codec import from_json
from job_server.server.service import JobService
from job_server.server.store import Store

JOB = "many"
SLOTS = 8


class Pods:
    """A service with a job that trains on all slots of its nodes."""

    def __init__(self, nodes: int) -> None:
        self.now = 1e9
        self.service = JobService(Store(":memory:"), heartbeat_s=1.0, now=lambda: self.now)
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

    def report(self, pod_id: str, kind: wire.ReportKind, *, step: int) -> None:
        self.service.report(
            JOB, pod_id, wire.PodReport(kind=kind, stage=1, step=step, elastic=True)
        )

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


def test_what_a_heartbeat_says_is_seen_although_no_rule_is_tried():
    pods = Pods(1)
    pods.now += 2.0
    pods.report(pods.pods["node-0"][0], wire.ReportKind.PROGRESS, step=9)
    status = pods.status()
    assert status.step == 9
    assert status.account.training_s == pytest.approx(2.0)


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
