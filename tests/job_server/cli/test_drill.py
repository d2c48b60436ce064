"""What a drill has cost, in words."""

import os
import re
import signal
import threading
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import cast

import pytest

from job_server.api.api_client import ApiClient
from job_server.api.errors import JobServerError, NotFound, ServerAway
from job_server.api.wire import (
    JobSpec,
    JobState,
    JobStatus,
    NodeLimit,
    NodeStatus,
    StageRecord,
    Way,
)
from job_server.cli.drill import cost, drill_node, ended_as_by_ctrl_c, why_it_stays
from job_server.training.machine import new_job
from job_server.training.views import job_status
from tests.job_server.serving import cpu_node, open_service
from tests.job_server.shared_cluster import SharedCluster
from tests.job_server.world import node, trains, world
from tests.support import wait_until


def record(stage: int, way: Way = Way.REPLACE, pause_s: float | None = None) -> StageRecord:
    return StageRecord(
        stage=stage, flag=0, way=way, pods=2, trainers=2, reason="", committed_at=100.0 * stage,
        pause_s=pause_s,
    )  # fmt: skip


def status(*records: StageRecord, redone: int = 0) -> JobStatus:
    made = job_status(new_job(JobSpec(job_id="job", max_pods=2), 1000.0), 1000.0, 1)
    return replace(made, state=JobState.RUNNING, stages=records, redone_steps=redone)


FIRST = record(1, Way.START)


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        pytest.param(
            status(FIRST), status(FIRST, record(2, pause_s=0.5), record(3, pause_s=1.5)),
            "no step redone, 2.0 s of pause, by planned change; this was its first, so nothing "
            "could be predicted", id="two changes: one pod handed the state on",
        ),
        pytest.param(
            status(FIRST, record(2, Way.START, 4.0), redone=3),
            status(FIRST, record(2, Way.START, 4.0), record(3, Way.START, 6.0), redone=4),
            "1 step redone, 6.0 s of pause, by recovery; the 1 before it took 4.0 s on average",
            id="a recovery",
        ),
        pytest.param(status(FIRST), status(FIRST), "it goes on as it was", id="nothing"),
    ],
)  # fmt: skip
def test_a_drill_says_what_it_cost_beside_what_was_usual(before, after, text):
    assert cost(before, after) == text


class SharedApi:
    """What a drill asks of a cluster of shared jobs, without HTTP."""

    def __init__(self, cluster: SharedCluster) -> None:
        self._service = cluster.service
        self.limit_node = lambda node_id, slots, *, drain=False: self._service.limit_node(
            node_id, NodeLimit(slots=slots, drain=drain)
        )
        self.nodes = self._service.node_statuses

    def jobs(self) -> list[JobStatus]:
        return self._service.statuses()

    def status(self, job_id: str) -> JobStatus:
        return next(job for job in self.jobs() if job.job_id == job_id)


@pytest.mark.parametrize(
    ("most", "says"),
    [
        pytest.param(2, "no step redone, .* by planned change", id="it moves to other nodes"),
        pytest.param(1, "no step redone, .* by recovery", id="it waits for the node"),
    ],
)
def test_a_drill_of_the_only_node_of_a_shared_job_ends_soon(tmp_path, monkeypatch, most, says):
    cluster = SharedCluster(tmp_path)
    try:
        cluster.add("job", 1, most)
        cluster.run(20)
        (node_id,) = {pod.node_id for pod in cluster.status("job").pods}
        clock = SimpleNamespace(sleep=cluster.run, monotonic=lambda: cluster.now)
        monkeypatch.setattr("job_server.cli.drill.time", clock)
        began = cluster.now
        (line,) = drill_node(cast("ApiClient", SharedApi(cluster)), node_id, 300.0)
        assert re.search(says, line)
        assert cluster.now - began < 60
        assert {each.draining for each in cluster.service.node_statuses()} == {""}
    finally:
        cluster.end_server(kill=True)


def test_why_a_job_does_not_leave_a_drained_node_is_its_warning_s_last_part():
    text = "node a is drained: an operator asked for it; its pod stays, as there is no other place"
    job = replace(status(FIRST), warnings=("something else", text))
    assert why_it_stays(job, "a") == "its pod stays, as there is no other place"
    assert why_it_stays(job, "b") == ""


class Server:
    """What a drill asks of a job server, about a node with a job that cannot leave."""

    def __init__(self, *, limit: int | None = None, draining: str = "") -> None:
        self.limit, self.draining = limit, draining
        running = trains(world(nodes=1, pods=1, total_steps=400))
        self._job = replace(
            job_status(running.job, running.now, 1),
            warnings=("node a is drained: an operator asked for it; there is no other place",),
        )
        self.looks_left = 1 << 30  # until it has left all the same
        self.is_deleted = False  # once it has left
        self.away = 0  # so many requests are not answered, from the first look at the jobs on
        self.loses_answer = False  # to the order that drains the node
        self.drains = 0
        self._node = node(self._job.pods[0].node_id)

    @property
    def node_id(self) -> str:
        return self._node.node_id

    def jobs(self) -> list[JobStatus]:
        self.looks_left -= 1
        self._answer()
        return [self._job if self.looks_left > 0 else replace(self._job, pods=())]

    def _answer(self) -> None:
        if self.draining and self.away:
            self.away -= 1
            raise ServerAway("no answer")

    def status(self, job_id: str) -> JobStatus:
        if self.is_deleted:
            raise NotFound(f"job_id: there is no job {job_id!r}")
        return self.jobs()[0]

    def nodes(self) -> list[NodeStatus]:
        return [
            NodeStatus(
                node=self._node, alive=True, last_seen_at=1.0, report={}, limit=self.limit,
                draining=self.draining, drains=self.drains,
            )
        ]  # fmt: skip

    def limit_node(self, _node_id: str, slots: int | None, *, drain: bool = False) -> NodeStatus:
        if self.draining:
            self._answer()
        self.limit, self.draining = slots, "an operator asked for it" if drain else ""
        self.drains += drain
        if drain and self.loses_answer:
            raise ServerAway("no answer")
        return self.nodes()[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_drill_that_is_ended_leaves_the_node_to_jobs(number):
    server = Server()

    def end() -> None:
        wait_until(lambda: server.draining)
        os.kill(os.getpid(), number)

    killer = threading.Thread(target=end)
    usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    before = signal.signal(number, usual)  # these tests may run under nohup
    try:
        killer.start()
        with pytest.raises(KeyboardInterrupt), ended_as_by_ctrl_c():
            drill(server, 60.0)
        killer.join()
        assert signal.getsignal(number) == usual
    finally:
        signal.signal(number, before)
    assert not server.draining


def drill(server: Server, wait_s: float) -> list[str]:
    return drill_node(cast("ApiClient", server), server.node_id, wait_s)


@pytest.mark.parametrize("limit", [None, 1])
def test_a_drill_that_fails_says_that_the_node_is_used_again_and_it_is(limit):
    server = Server(limit=limit)
    with pytest.raises(JobServerError) as failed:
        drill(server, 0.0)
    assert "is still there: " in str(failed.value)
    assert str(failed.value).endswith("; the drill is over, and jobs may use the node again")
    assert (server.limit, server.draining) == (limit, "")


def test_a_drill_does_not_end_a_drain():
    server = Server(limit=0, draining="an operator asked for it (`edl drain`)")
    with pytest.raises(JobServerError, match=r"is drained already: an operator .*--slots all`"):
        drill(server, 0.0)
    assert server.draining


def test_a_node_that_is_drained_during_a_drill_stays_drained(monkeypatch):
    """The drill gave the node back to jobs, though an operator was about to take it away."""
    with open_service() as service:
        service.register(cpu_node())
        api = SimpleNamespace(
            nodes=service.node_statuses,
            jobs=service.statuses,
            limit_node=lambda node_id, slots, *, drain=False: service.limit_node(
                node_id, NodeLimit(slots=slots, drain=drain)
            ),
        )
        look = partial(drill_node, cast("ApiClient", api), "node-a", 60.0)
        assert look() == ["no job has a pod on node-a: it would cost nothing"]
        wait = partial(api.limit_node, "node-a", 0, drain=True)
        monkeypatch.setattr("job_server.cli.drill.wait_until_left", lambda *_: wait())
        assert "node-a stays drained, as somebody has drained it" in look()[-1]
        assert [known.draining for known in service.node_statuses()] != [""]


def test_a_job_that_cannot_leave_for_a_moment_is_waited_for():
    server = Server()
    server.looks_left = 4
    (line,) = drill(server, 60.0)
    assert line.endswith(": it goes on as it was")


def test_a_job_that_is_deleted_during_a_drill_fails_it_not():
    """Then it was not said what it had cost the others."""
    server = Server()
    server.looks_left, server.is_deleted = 4, True
    assert drill(server, 60.0) == ["job: it was deleted meanwhile"]
    assert not server.draining


@pytest.mark.parametrize(("away", "loses_answer"), [(4, False), (0, True), (4, True)])
def test_a_drill_ends_its_drain_though_the_server_was_away_meanwhile(away, loses_answer):
    server = Server(limit=1)
    server.away, server.loses_answer = away, loses_answer
    with pytest.raises(JobServerError, match="no answer"):
        drill(server, 60.0)
    assert (server.limit, server.draining) == (1, "")


def test_a_drill_that_cannot_end_its_drain_says_so(monkeypatch):
    monkeypatch.setattr("job_server.cli.drill.AWAY_S", 0.0)
    server = Server(limit=1)
    server.away = 1 << 30
    with pytest.raises(JobServerError, match=r"is still drained, .* --slots 1` ends that"):
        drill(server, 60.0)
