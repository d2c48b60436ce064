"""The routes over a real service and a real database."""

from functools import partial
from typing import Any

import pytest
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

from job_server.api import wire
from job_server.api.errors import NotFound, StoreTrouble
from job_server.server.guard import Guard
from job_server.server.service import JobService
from job_server.server.store import Store
from tests.job_server.serving import InThread, browse, cpu_node, open_service
from tests.programs import loaded_by, run_code
from tests.support import wait_until

SPEC = {"job_id": "digits", "max_pods": 2}


def stands_still() -> float:
    """A clock by which no heartbeat is missed and nothing falls due, however slow the machine."""
    return 1_000_000.0


@pytest.fixture
def service():
    with open_service(now=stands_still) as service:
        yield service


@pytest.fixture
def client(service: JobService) -> FlaskClient:
    return browse(service)


class Launchers:
    """A node and its launchers, as far as the server sees them."""

    def __init__(self, client: FlaskClient, node_id: str = "node-a", **node: Any) -> None:
        self.client = client
        self.node = cpu_node(node_id, **node)
        answer = client.post("/api/v1/nodes", json=wire.encode(self.node))
        assert answer.status_code == 200, answer.json

    def plan(self) -> dict[str, wire.NodePod]:
        answer = self.client.get(f"/api/v1/nodes/{self.node.node_id}/plan")
        plan = wire.decode(wire.NodePlan, answer.json)
        return {pod.pod_id: pod for pod in plan.pods}

    def heartbeat(self, phase: wire.PodPhase = wire.PodPhase.RUNNING) -> None:
        code = 0 if phase is wire.PodPhase.EXITED else None
        pods = tuple(
            wire.PodState(pod_id=pod_id, job_id=pod.job_id, phase=phase, exit_code=code)
            for pod_id, pod in self.plan().items()
        )
        report = wire.NodeReport(node_id=self.node.node_id, pods=pods)
        path = f"/api/v1/nodes/{self.node.node_id}/report"
        assert self.client.post(path, json=wire.encode(report)).status_code == 200

    def attach(self, pod_id: str, job_id: str = "digits"):
        attach = wire.Attach(pod_id=pod_id, node_id=self.node.node_id, pid=1)
        path = f"/api/v1/jobs/{job_id}/pods/{pod_id}/attach"
        return self.client.post(path, json=wire.encode(attach))

    def report(self, pod_id: str, kind: wire.ReportKind, stage: int, step: int = 0, **fields: Any):
        report = wire.PodReport(kind=kind, stage=stage, step=step, elastic=True, **fields)
        path = f"/api/v1/jobs/digits/pods/{pod_id}/report"
        return self.client.post(path, json=wire.encode(report))

    def orders(self, pod_id: str) -> wire.PodOrders:
        answer = self.client.get(f"/api/v1/jobs/digits/pods/{pod_id}/orders")
        assert answer.status_code == 200, answer.json
        return wire.decode(wire.PodOrders, answer.json)

    def train(self) -> None:
        """Do as told until every pod of the plan is told to go, and has made a step."""
        for pod_id in self.plan():
            assert self.attach(pod_id).status_code == 200
        self.heartbeat()
        kinds = {
            wire.Order.PREPARE: wire.ReportKind.READY,
            wire.Order.START: wire.ReportKind.LOADED,
            wire.Order.GO: wire.ReportKind.FIRST_STEP,
            wire.Order.END: wire.ReportKind.ENDED,
            wire.Order.CUT: wire.ReportKind.DRAINED,
        }
        for _ in range(10):
            for pod_id in self.plan():
                for plan in self.orders(pod_id).plans:
                    self.report(pod_id, kinds[plan.order], plan.stage, step=5)


def submit(client: FlaskClient, **fields: Any) -> None:
    """Submit the job of SPEC, with other fields."""
    answer = client.post("/api/v1/jobs", json={**SPEC, **fields})
    assert answer.status_code == 201, answer.json


def assert_refused(answer: TestResponse, status: int, words: str) -> None:
    assert answer.status_code == status
    assert words in answer.get_json()["error"]


def get_job(client: FlaskClient, job_id: str = "digits"):
    answer = client.get(f"/api/v1/jobs/{job_id}")
    assert answer.status_code == 200, answer.json
    return answer.get_json()


# --- jobs ---------------------------------------------------------------------------------------


def test_a_job_is_submitted_once(client):
    first = client.post("/api/v1/jobs", json=SPEC)
    assert first.status_code == 201
    assert first.get_json()["state"] == "WAITING"
    assert first.get_json()["reason"]
    again = client.post("/api/v1/jobs", json=SPEC)
    assert again.status_code == 200
    assert again.get_json()["job_id"] == "digits"
    assert_refused(client.post("/api/v1/jobs", json={**SPEC, "max_pods": 3}), 409, "another spec")
    assert [job["job_id"] for job in client.get("/api/v1/jobs").get_json()["jobs"]] == ["digits"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        pytest.param({}, "job_id: missing", id="nothing"),
        pytest.param([], "expected an object", id="a list"),
        pytest.param({"job_id": "../x"}, "job_id: '../x' is not an id", id="path"),
        pytest.param({"job_id": 1}, "job_id: expected str", id="number as id"),
        pytest.param({"job_id": "a", "max_pods": True}, "max_pods", id="boolean"),
        pytest.param({"job_id": "a", "max_pods": 0}, "max_pods", id="no pods"),
        pytest.param({"job_id": "a", "grace_s": 10**15}, "grace_s", id="long grace"),
        pytest.param({"job_id": "a", "folder": "../../etc"}, "folder", id="folder leaves"),
        pytest.param(
            {"job_id": "a", "script": {"kind": "timeline", "text": "- {at: 1m}\n- ["}},
            "line 2",
            id="broken timeline",
        ),
        pytest.param(
            {"job_id": "a", "script": {"kind": "trace", "text": "time_s,free_slots\n1,\n"}},
            "line 2",
            id="trace with a hole",
        ),
    ],
)
def test_a_wrong_job_is_refused_with_its_field(client, body, says):
    for route in ("/api/v1/jobs", "/api/v1/jobs/preview"):
        answer = client.post(route, json=body)
        assert_refused(answer, 400, says)
    assert client.get("/api/v1/jobs").json == {"jobs": []}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        pytest.param(b"", "not JSON", id="empty"),
        pytest.param(b"{", "not JSON", id="cut off"),
        pytest.param(b'{"job_id": "\xff\xfe"}', "not UTF-8", id="not UTF-8"),
        pytest.param(b"[" * 100_000, "nested", id="deep beyond the parser"),
        pytest.param(b'{"x": ' + b"[" * 10_000, "nested", id="deep in a key that is not ours"),
        pytest.param(b'{"job_id": "a", "grace_s": NaN}', "NaN", id="NaN"),
        pytest.param(
            b'{"job_id": "a", "max_pods": ' + b"9" * 5000 + b"}",
            "max_pods: expected at most",
            id="huge",
        ),
        pytest.param(
            b'{"job_id": "a", "grace_s": 1e999}', "grace_s: expected at most", id="infinite"
        ),
        pytest.param(b'{"job_id": "a\\ud800"}', "surrogate", id="lone surrogate"),
        pytest.param(b'{"\\udfff": 1}', "surrogate", id="lone surrogate in a key"),
    ],
)
def test_a_body_that_is_no_clean_json_is_refused(client, body, says):
    assert_refused(client.post("/api/v1/jobs", data=body), 400, says)


def test_an_oversized_body_is_a_413(client):
    assert_refused(
        client.post("/api/v1/jobs", data=b"x" * (wire.MAX_BODY_BYTES + 1)), 413, "at most"
    )


def test_the_preview_tells_the_changes_without_adding_the_job(client):
    script = {"kind": "timeline", "text": "- {at: 90s, remove: 1}"}
    answer = client.post("/api/v1/jobs/preview", json={**SPEC, "script": script})
    assert answer.json == {
        "timeline": ["0:00:00  start with 2 pods", "0:01:30  remove 1 pod: 2 -> 1 pod"]
    }
    assert client.get("/api/v1/jobs/digits").status_code == 404


@pytest.mark.parametrize("verb", ["resize", "pause", "resume", "stop", "kill"])
def test_nothing_can_be_asked_of_an_unknown_job(client, verb):
    body = {"resize": {"pods": 1}, "kill": {"rank": 0}}.get(verb, {})
    assert_refused(client.post(f"/api/v1/jobs/nobody/{verb}", json=body), 404, "nobody")


def test_what_makes_no_sense_now_is_a_409_with_the_reason(client):
    submit(client)
    assert_refused(client.post("/api/v1/jobs/digits/resume"), 409, "PAUSED")


def test_a_stopped_job_stays_listed_until_it_is_deleted(client):
    submit(client)
    assert client.post("/api/v1/jobs/digits/stop").get_json()["state"] == "STOPPED"
    assert get_job(client)["state"] == "STOPPED"
    assert client.delete("/api/v1/jobs/digits").get_json()["state"] == "STOPPED"
    assert client.get("/api/v1/jobs/digits").status_code == 404
    assert client.delete("/api/v1/jobs/digits").status_code == 404
    assert client.post("/api/v1/jobs", json=SPEC).status_code == 201  # the id is free again


def test_events_tell_a_jobs_life_and_can_be_awaited(client, service):
    submit(client)
    events = client.get("/api/v1/jobs/digits/events").get_json()["events"]
    assert events[0]["text"] == "submitted"
    assert [event["number"] for event in events] == list(range(1, len(events) + 1))
    last = events[-1]["number"]
    waiting = InThread(
        lambda: browse(service).get(f"/api/v1/jobs/digits/events?after={last}&timeout_s=60")
    )
    client.post("/api/v1/jobs/digits/stop")
    (news,) = waiting.result().get_json()["events"]
    assert news["number"] == last + 1
    assert client.get("/api/v1/jobs/digits/events?limit=1").get_json()["events"] == events[:1]
    assert client.get(f"/api/v1/jobs/digits/events?after={last + 9}").get_json()["events"] == []


@pytest.mark.parametrize(
    "query",
    [
        *("revision=x", "revision=1.5", "revision=-2", "revision=" + "9" * 30, "revision="),
        *("revision=\u0661", "revision=1_0", "timeout_s=61", "timeout_s=-1", "timeout_s=nan"),
    ],
)
def test_a_wrong_query_is_refused(client, query):
    submit(client)
    answer = client.get(f"/api/v1/jobs/digits?{query}")
    assert_refused(answer, 400, query.split("=")[0])


def test_a_change_reaches_who_waits_for_it(client, service):
    submit(client)
    revision = get_job(client)["revision"]
    path = f"/api/v1/jobs/digits?revision={revision}&timeout_s=60"
    polls = [InThread(lambda: browse(service).get(path)) for _ in range(5)]
    client.post("/api/v1/jobs/digits/stop")
    for poll in polls:
        assert poll.result().get_json()["state"] == "STOPPED"


def test_one_poll_too_many_is_told_to_come_back():
    with open_service(max_watchers=1, now=stands_still) as service:
        client = browse(service)
        submit(client)
        revision = get_job(client)["revision"]
        path = f"/api/v1/jobs/digits?revision={revision}&timeout_s=60"
        first = InThread(lambda: browse(service).get(path))
        wait_until(lambda: service.engine.watchers.count == 1)
        second = client.get(path)
        assert second.status_code == 200
        assert second.get_json()["revision"] == revision
        assert second.headers["Retry-After"] == "1"
        client.post("/api/v1/jobs/digits/stop")
        assert "Retry-After" not in first.result().headers


# --- nodes and pods -----------------------------------------------------------------------------


def test_a_node_gets_its_pods_and_the_job_runs(client):
    submit(client)
    launchers = Launchers(client)
    plan = launchers.plan()
    assert sorted(plan) == ["pod_0_0", "pod_1_0"]
    assert {pod.want for pod in plan.values()} == {wire.DesiredState.RUN}
    launchers.train()
    status = get_job(client)
    assert status["state"] == "RUNNING"
    assert [pod["pod_id"] for pod in status["pods"]] == ["pod_0_0", "pod_1_0"]
    (node,) = client.get("/api/v1/nodes").get_json()["nodes"]
    assert node["alive"]
    assert node["report"]["pods"]


def test_a_launcher_waits_for_its_next_order(client, service):
    submit(client)
    launchers = Launchers(client)
    pod_id = min(launchers.plan())
    orders = wire.decode(wire.PodOrders, launchers.attach(pod_id).json)
    path = f"/api/v1/jobs/digits/pods/{pod_id}/orders?revision={orders.revision}&timeout_s=60"
    waiting = InThread(lambda: browse(service).get(path))
    launchers.train()
    news = wire.decode(wire.PodOrders, waiting.result().json)
    assert news.revision > orders.revision
    assert news.plans != orders.plans


def test_a_pod_that_is_not_wanted_is_told_so(client):
    submit(client)
    launchers = Launchers(client)
    assert launchers.attach("pod_9_9").status_code == 410
    assert launchers.report("pod_9_9", wire.ReportKind.READY, 1).status_code == 410
    assert client.get("/api/v1/jobs/digits/pods/pod_9_9/orders").status_code == 410
    assert launchers.attach("pod_0_0", job_id="nobody").status_code == 404


def test_a_launcher_learns_that_its_job_was_deleted(client, service):
    submit(client)
    launchers = Launchers(client)
    orders = wire.decode(wire.PodOrders, launchers.attach("pod_0_0").json)
    path = f"/api/v1/jobs/digits/pods/pod_0_0/orders?revision={orders.revision}&timeout_s=60"
    polls = [InThread(lambda: browse(service).get(path)) for _ in range(3)]
    client.delete("/api/v1/jobs/digits")
    for poll in polls:
        assert poll.result().status_code in (200, 404, 410)
    launchers.heartbeat(wire.PodPhase.EXITED)
    wait_until(lambda: client.get("/api/v1/jobs/digits").status_code == 404)
    assert launchers.plan() == {}


def test_pods_of_an_earlier_job_of_the_same_id_say_nothing_about_a_new_one(tmp_path):
    now = 1000.0
    with open_service(tmp_path / "db", now=lambda: now) as service:
        client = browse(service)
        submit(client)
        launchers = Launchers(client)
        old = launchers.plan()["pod_0_0"]
        now += 60.0
        client.post("/api/v1/jobs/digits/stop?discard=1")
        now += 600.0  # its node is cut off: nobody confirms that
        client.post("/api/v1/jobs/digits/stop")
        client.delete("/api/v1/jobs/digits")
        wait_until(lambda: client.get("/api/v1/jobs/digits").status_code == 404)

        submit(client)
        launchers = Launchers(client)
        assert launchers.attach("pod_0_0").status_code == 200
        launchers.train()
        before = get_job(client)
        assert launchers.plan()["pod_0_0"].submitted_at != old.submitted_at
        report = wire.PodReport(
            kind=wire.ReportKind.EXITED, stage=1, code=143, submitted_at=old.submitted_at
        )
        attach = wire.Attach(
            pod_id="pod_0_0", node_id="node-a", pid=1, submitted_at=old.submitted_at
        )
        path = "/api/v1/jobs/digits/pods/pod_0_0"
        assert client.post(f"{path}/report", json=wire.encode(report)).status_code == 410
        assert client.post(f"{path}/attach", json=wire.encode(attach)).status_code == 410
        state = wire.PodState(
            pod_id="pod_0_0", job_id="digits", phase=wire.PodPhase.EXITED, exit_code=1,
            submitted_at=old.submitted_at,
        )  # fmt: skip
        heartbeat = wire.NodeReport(node_id="node-a", pods=(state,))
        client.post("/api/v1/nodes/node-a/report", json=wire.encode(heartbeat))
        assert get_job(client)["pods"] == before["pods"]
        assert get_job(client)["state"] == before["state"] == "RUNNING"


def test_who_attaches_at_anothers_route_is_refused(client):
    submit(client)
    Launchers(client)
    attach = wire.encode(wire.Attach(pod_id="pod_1_0", node_id="node-a", pid=1))
    assert client.post("/api/v1/jobs/digits/pods/pod_0_0/attach", json=attach).status_code == 400
    report = wire.encode(wire.NodeReport(node_id="node-b"))
    assert client.post("/api/v1/nodes/node-a/report", json=report).status_code == 400


def test_two_live_nodes_do_not_deal_the_same_ports(client):
    Launchers(client, "node-a")
    overlapping = wire.encode(cpu_node("node-b", port_low=21050, port_high=21149))
    assert_refused(client.post("/api/v1/nodes", json=overlapping), 409, "--port_range")
    Launchers(client, "node-b", port_low=21100, port_high=21199)
    Launchers(client, "node-c", addr="10.0.0.2")  # another machine
    Launchers(client, "node-a", port_low=21000, port_high=21090)  # itself, again


def test_a_live_node_is_one_clients_and_another_gets_it_once_that_is_silent():
    clock = [1_000_000.0]
    with open_service(now=lambda: clock[0]) as service:
        client = browse(service)

        def says(who: str, sent_ms: int = 0) -> int:
            report = wire.encode(wire.NodeReport(node_id="node-a", client=who, sent_ms=sent_ms))
            return client.post("/api/v1/nodes/node-a/report", json=report).status_code

        def asks(who: str) -> int:
            return client.get(f"/api/v1/nodes/node-a/plan?client={who}").status_code

        def registers(who: str) -> Any:
            return client.post("/api/v1/nodes", json=wire.encode(cpu_node(client=who)))

        assert registers("one").status_code == 200
        assert says("one") == 200
        assert_refused(registers("two"), 409, "--node_id")
        assert registers("").status_code == 200  # the version before says nothing
        assert registers("one-boot").status_code == 200  # ... or less
        assert registers("one").status_code == 200  # itself, again
        assert (says("one"), asks("one"), asks("")) == (200, 200, 200)
        clock[0] += 60
        assert registers("two").status_code == 200
        assert (asks("one"), asks("two")) == (404, 200)  # two clients would run the same pods
        # The other one's machine has been up for longer: that is no older report of its own.
        assert (says("two", sent_ms=2000), says("one", sent_ms=1000)) == (200, 404)
        assert registers("one").status_code == 409


def test_the_plan_says_which_pods_a_client_had_running(client):
    submit(client)
    launchers = Launchers(client)
    plan = launchers.plan()
    assert [pod.started for pod in plan.values()] == [False, False]
    states = [
        {"pod_id": pod_id, "job_id": "digits", "phase": phase}
        for pod_id, phase in zip(sorted(plan), ("starting", "running"), strict=True)
    ]
    client.post("/api/v1/nodes/node-a/report", json={"node_id": "node-a", "pods": states})
    assert [pod.started for _, pod in sorted(launchers.plan().items())] == [False, True]


def test_a_node_that_leaves_is_off_the_list(client):
    submit(client)
    Launchers(client)
    leaving = wire.encode(wire.NodeReport(node_id="node-a", leaving=True))
    assert client.post("/api/v1/nodes/node-a/report", json=leaving).status_code == 200
    assert client.get("/api/v1/nodes").json == {"nodes": []}
    assert client.get("/api/v1/nodes/node-a/plan").status_code == 404
    assert client.post("/api/v1/nodes/node-a/report", json=leaving).status_code == 404


@pytest.mark.parametrize("event", ["is taken over", "leaves"])
def test_a_client_that_waits_for_the_plan_of_its_node_is_told_when_that_is_its_no_more(event):
    """Else it would run the other one's pods."""
    clock = [1_000_000.0]
    with open_service(now=lambda: clock[0]) as service:
        service.register(cpu_node(client="one"))
        plan = service.engine.registry.get("node-a").plan
        asks = partial(service.plan, "node-a", plan.revision, 60, "one")
        waits = InThread(asks)
        wait_until(lambda: service.engine.watchers.count == 1)
        if event == "leaves":
            service.report_node("node-a", wire.NodeReport(node_id="node-a", leaving=True))
        else:
            clock[0] += 60
            service.register(cpu_node(client="two"))
        with pytest.raises(NotFound, match="register it"):
            waits.result()
        with pytest.raises(NotFound):
            asks()


def test_a_silent_node_is_shown_as_not_alive():
    clock = [1_000_000.0]
    service = JobService(Store(":memory:"), heartbeat_s=1.0, now=lambda: clock[0])
    client = browse(service)
    Launchers(client)
    clock[0] += 3
    assert client.get("/api/v1/nodes").get_json()["nodes"][0]["alive"]
    clock[0] += 2
    assert not client.get("/api/v1/nodes").get_json()["nodes"][0]["alive"]
    # Its ports may be dealt by who comes in its place.
    assert client.post("/api/v1/nodes", json=wire.encode(cpu_node("node-b"))).status_code == 200
    service.close()


def test_slots_that_one_job_gives_back_start_the_next(client):
    submit(client, job_id="a")
    submit(client, job_id="b")
    launchers = Launchers(client, job_id=None)
    assert {pod.job_id for pod in launchers.plan().values()} == set()  # it serves no folder
    submit(client, job_id="c", folder="digits")
    submit(client, job_id="d", folder="digits")
    launchers = Launchers(client, job_id=None, folders=("digits",))
    assert {pod.job_id for pod in launchers.plan().values()} == {"c"}
    assert get_job(client, "d")["state"] == "WAITING"
    client.delete("/api/v1/jobs/c")
    launchers.heartbeat()
    wait_until(lambda: {pod.job_id for pod in launchers.plan().values()} == {"d"})


# --- after a restart ----------------------------------------------------------------------------


def test_a_restarted_server_goes_on_where_it_was(tmp_path):
    path = tmp_path / "server.db"
    with open_service(path) as service:
        client = browse(service)
        submit(client)
        launchers = Launchers(client)
        launchers.train()
        before = get_job(client)
        first_id = client.get("/api/v1/health").get_json()["server_id"]
        plan = launchers.plan()
    with open_service(path) as service:
        client = browse(service)
        after = get_job(client)
        assert client.get("/api/v1/health").get_json()["server_id"] != first_id
        for field in ("state", "stage", "flag", "pods", "step", "spec"):
            assert after[field] == before[field], field
        assert after["revision"] > before["revision"]  # a poll of before the restart must not wait
        launchers.client = client
        assert launchers.plan() == plan
        assert client.get("/api/v1/nodes").get_json()["nodes"][0]["alive"]
        numbers = [
            e["number"] for e in client.get("/api/v1/jobs/digits/events").get_json()["events"]
        ]
        assert numbers == list(range(1, len(numbers) + 1))


def test_a_job_that_was_to_be_deleted_is_still_deleted_after_a_restart(tmp_path):
    path = tmp_path / "server.db"
    with open_service(path) as service:
        client = browse(service)
        submit(client)
        launchers = Launchers(client)
        launchers.train()
        assert client.delete("/api/v1/jobs/digits").get_json()["state"] == "STOPPING"
    with open_service(path) as service:
        launchers.client = client = browse(service)
        launchers.train()  # they cut and end as told

        def gone() -> bool:
            return client.get("/api/v1/jobs/digits").status_code == 404

        launchers.heartbeat(wire.PodPhase.EXITED)
        wait_until(gone)


def test_an_ended_job_is_left_alone_by_a_restart(tmp_path):
    path = tmp_path / "server.db"
    with open_service(path) as service:
        client = browse(service)
        submit(client)
        submit(client, job_id="deleted")
        client.post("/api/v1/jobs/digits/stop")
        client.post("/api/v1/jobs/deleted/stop")
        before = get_job(client)
        # Killed after it was noted that the job is to go, and before it was gone.
        data = wire.encode(service.engine.jobs["deleted"].job)
        service.engine.store.save_job("deleted", data, forget=True)
    with open_service(path) as service:
        client = browse(service)
        after = get_job(client)
        assert (after["state"], after["reason"]) == (before["state"], before["reason"])
        assert client.get("/api/v1/jobs/deleted").status_code == 404


def test_what_cannot_be_written_is_not_done(client, service, monkeypatch):
    submit(client)
    before = get_job(client)

    def full(*_args, **_kwargs):
        raise StoreTrouble("the database cannot be written: disk is full", delay_s=2.0)

    monkeypatch.setattr(service.engine.store, "save_job", full)
    for answer in (
        client.post("/api/v1/jobs/digits/stop"),
        client.delete("/api/v1/jobs/digits"),
        client.post("/api/v1/jobs", json={"job_id": "other"}),
    ):
        assert_refused(answer, 503, "full")
        assert answer.headers["Retry-After"] == "2"
    after = get_job(client)
    assert (after["state"], after["revision"]) == (before["state"], before["revision"])
    monkeypatch.undo()
    assert client.post("/api/v1/jobs/digits/stop").get_json()["state"] == "STOPPED"


def test_progress_is_not_written_with_every_heartbeat(client, service, monkeypatch):
    submit(client)
    launchers = Launchers(client)
    launchers.train()
    writes = []
    save = service.engine.store.save_job

    def counted(*args, **kwargs):
        writes.append(args[0])
        save(*args, **kwargs)

    monkeypatch.setattr(service.engine.store, "save_job", counted)
    stage = get_job(client)["stage"]
    for step in range(10, 60):
        report = launchers.report("pod_0_0", wire.ReportKind.PROGRESS, stage, step)
        assert report.status_code == 200
        launchers.heartbeat()
    assert get_job(client)["state"] == "RUNNING"
    assert writes == []


# --- who may ask --------------------------------------------------------------------------------


def test_every_route_wants_the_token(service):
    client = browse(service, Guard(token="correct horse"))
    for rule in client.application.url_map.iter_rules():
        path = rule.rule.replace("<job_id>", "j").replace("<pod_id>", "p").replace("<node_id>", "n")
        for method in rule.methods or ():
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer "}):
                if path == "/api/v1/health" and not headers:
                    continue
                answer = client.open(path, method=method, headers=headers)
                assert answer.status_code == 401, (method, path)
    assert client.get("/no/such/route").status_code == 401
    good = {"Authorization": "Bearer correct horse"}
    assert client.get("/api/v1/health", headers=good).status_code == 200
    assert client.get("/", headers=good).status_code == 200
    assert client.get("/", auth=("", "correct horse")).status_code == 200  # a browser's way
    assert client.get("/api/v1/jobs", auth=("", "correct horse")).status_code == 401
    odd = {"Authorization": "Bearer \xe9\xff"}
    assert client.get("/api/v1/health", headers=odd).status_code == 401


def test_health_is_told_without_a_token_as_probes_have_none(service):
    client = browse(service, Guard(token="correct horse"))
    assert client.get("/api/v1/health").status_code == 200
    assert (
        client.get("/api/v1/health", headers={"Origin": "http://evil.example"}).status_code == 403
    )


def test_insecure_legacy_opens_just_two_routes(service):
    client = browse(service, Guard(token="correct horse", insecure_legacy=True))
    assert client.get("/rest/1.0/get/query_pods").status_code == 404  # there is no job
    assert client.post("/rest/1.0/post/job_runtime_static", json={}).status_code == 400
    assert client.get("/api/v1/jobs").status_code == 401
    assert client.get("/rest/1.0/get/query_pods/").status_code in (401, 404)
    closed = browse(service, Guard(token="correct horse")).get("/rest/1.0/get/query_pods")
    assert "--insecure_legacy" in closed.get_json()["error"]
    assert client.get("/").status_code == 401


def test_pages_of_other_sites_are_refused(client, service):
    submit(client)
    evil = {"Origin": "http://evil.example"}
    assert client.post("/api/v1/jobs/digits/stop", headers=evil).status_code == 403
    rebound = {"Host": "evil.example"}
    assert client.get("/api/v1/jobs", headers=rebound).status_code == 403
    assert get_job(client)["state"] == "WAITING"
    for odd in ("http://[", "null", ""):
        assert client.get("/api/v1/jobs", headers={"Origin": odd}).status_code == 403
    for host in ("[", "evil.example:80", "127.0.0.1.evil.example", ""):
        assert client.get("/api/v1/jobs", headers={"Host": host}).status_code in (400, 403)
    own = {"Origin": "http://127.0.0.1:8180", "Host": "127.0.0.1:8180"}
    assert client.get("/api/v1/jobs", headers=own).status_code == 200
    with_token = browse(service, Guard(token="correct horse"))
    named = {"Host": "gpu-box.example", "Authorization": "Bearer correct horse"}
    assert with_token.get("/api/v1/jobs", headers=named).status_code == 200


def test_errors_are_json_everywhere(client):
    for answer, status in (
        (client.get("/nope"), 404),
        (client.get("/api/v1/jobs/../../etc/passwd"), 404),
        (client.get("/api/v1/jobs/%2e%2e%2fx"), 404),
        (client.put("/api/v1/jobs"), 405),
        (client.options("/api/v1/jobs"), 405),
        (client.post("/"), 405),
    ):
        assert answer.status_code == status
        assert list(answer.json) == ["error"]


# --- the page -----------------------------------------------------------------------------------


def test_the_page_shows_jobs_stages_events_and_nodes(client):
    submit(client)
    Launchers(client).train()
    page = client.get("/")
    assert page.content_type.startswith("text/html")
    stages = "trainers: 2, over"
    for shown in ("digits", "RUNNING", "pod_1_0", "node-a", "submitted", "goodput", stages):
        assert shown in page.text
    assert 'http-equiv="refresh"' in page.text
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]


def test_of_many_jobs_that_have_ended_the_page_shows_the_newest(client, monkeypatch):
    monkeypatch.setattr("job_server.server.page.SHOWN_ENDED", 2)
    for job_id in ("old-1", "runs", "old-2", "old-3", "old-4"):
        assert client.post("/api/v1/jobs", json={"job_id": job_id}).status_code == 201
        if job_id != "runs":
            client.post(f"/api/v1/jobs/{job_id}/stop")
    page = client.get("/").text
    assert [each in page for each in ("runs", "old-1", "old-2", "old-3", "old-4")] == [
        True, False, False, True, True,
    ]  # fmt: skip
    assert "2 more that ended before" in page


def test_the_page_draws_the_training_loss(client):
    submit(client)
    launchers = Launchers(client)
    launchers.train()
    assert "polyline points" not in client.get("/").text
    for step, loss in ((10, 4.0), (20, 2.0), (30, 1.0)):
        metrics = {"train_loss": loss}
        launchers.report("pod_1_0", wire.ReportKind.PROGRESS, 1, step=step, metrics=metrics)
    page = client.get("/").text
    assert '<polyline points="0.0,0.0 200.0,40.0 400.0,60.0"/>' in page
    assert "train_loss, 4 to 1, steps 10 to 30" in page


def test_the_page_without_anything_says_so(client):
    page = client.get("/").text
    assert "There is no job" in page
    assert "No job client" in page


def test_the_page_escapes_what_others_sent(client):
    submit(client)
    slot = wire.Slot(
        index=0, kind=wire.SlotKind.GPU, usable=False, reason="<script>alert(1)</script>"
    )
    good = wire.Slot(index=1, kind=wire.SlotKind.GPU)
    Launchers(client, addr="<b>bold", slots=(slot, good))
    page = client.get("/").text
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "<b>bold" not in page


# --- the real thing -----------------------------------------------------------------------------


def test_importing_the_wire_loads_no_flask():
    assert "flask" not in loaded_by("job_server.api.wire", "job_server.api.api_client")


AST_IN_FINALIZERS = """
import ast, gc
from job_server.server.app import create_app
from job_server.server.guard import Guard
from job_server.server.service import JobService
from job_server.server.store import Store

class Garbage:
    def __init__(self):
        self.itself = self
    def __del__(self):
        ast.parse("f(1)")  # as formatting a traceback does
        Garbage()

service = JobService(Store(":memory:"), max_watchers=1)
gc.set_threshold(1, 1, 1)
Garbage()
create_app(service, Guard())
assert gc.isenabled()
"""


def test_the_routes_are_made_while_garbage_is_collected():
    run_code(AST_IN_FINALIZERS, timeout_s=120)
