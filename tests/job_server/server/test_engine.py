"""What the server lives through: full disks, defects, jobs that cannot be read, a late clock."""

import cProfile
import dataclasses
import html
import logging
import pstats
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Mapping
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient

from job_server.api import wire
from job_server.api.errors import Conflict, StoreTrouble
from job_server.jobs.events import Event, StopAsked
from job_server.jobs.work import Goal
from job_server.server import nodes
from job_server.server.guard import Guard
from job_server.server.service import JobService
from job_server.server.store import Store
from job_server.sharing import job_types, overview
from job_server.sharing.job_types import AnyJob
from job_server.training.core.job import Announced, Job
from job_server.training.core.work import Work
from job_server.training.rules import converge
from tests.job_server.serving import browse, cpu_node, open_service
from tests.job_server.stories import FaultyStore
from tests.support import ROOT, wait_until

SPEC = wire.JobSpec(job_id="digits", max_pods=2)


def teachers(job_id: str, service: str) -> wire.JobSpec:
    return wire.JobSpec(job_id=job_id, kind=wire.JobKind.TEACHER, service=service)


# --- jobs that cannot be read --------------------------------------------------------------------


@pytest.mark.parametrize(
    "data", ["{}", "no JSON", '{"spec": {"job_id": "a", "kind": "teacher"}}', '{"spec": 1}']
)
def test_a_job_that_cannot_be_read_is_put_aside_and_the_others_go_on(tmp_path, caplog, data):
    path = tmp_path / "server.db"
    with open_service(path) as service:
        service.submit(wire.JobSpec(job_id="a"))
        service.submit(SPEC)
        service.register(cpu_node())
    store = Store(str(path))
    store.connection.execute("UPDATE jobs SET data = ? WHERE job_id = 'a'", (data,))
    store.connection.execute("INSERT INTO nodes VALUES ('odd', '{}')")
    store.close()
    with open_service(path) as service:
        client = browse(service)
        listed = client.get("/api/v1/jobs").get_json()["jobs"]
        assert [job["job_id"] for job in listed] == ["digits"]
        nodes = client.get("/api/v1/nodes").get_json()["nodes"]
        assert [known["node"]["node_id"] for known in nodes] == ["node-a"]
        answer = client.get("/api/v1/jobs/a")
        assert (answer.status_code, "cannot read it" in answer.text) == (404, True)
        assert client.post("/api/v1/jobs", json={"job_id": "a"}).status_code == 409
        assert "job 'a' is in the database, but this version cannot read it" in caplog.text
        (warning,) = client.get("/api/v1/health").get_json()["warnings"]
        assert warning.startswith("job_id: job 'a' is in the database")
        stored = {job.job_id: job for job in service.engine.store.jobs()}
        assert set(stored) == {"a", "digits"}
        assert "was deleted" in client.delete("/api/v1/jobs/a").text
        assert client.post("/api/v1/jobs", json={"job_id": "a"}).status_code == 201


@pytest.mark.parametrize("kind", ["training", "teacher"])
def test_the_pods_of_a_job_that_cannot_be_read_are_left_in_peace_until_it_is_deleted(
    tmp_path, kind
):
    path = tmp_path / "server.db"

    def pods(service: JobService) -> list[str]:
        plan = browse(service).get("/api/v1/nodes/node-a/plan").get_json()
        return [pod["job_id"] for pod in plan["pods"]]

    with open_service(path, now=lambda: 1_000_000.0) as service:
        service.submit(SPEC if kind == "training" else teachers("digits", "soft"))
        service.register(cpu_node())
        had = pods(service)
        assert had
        assert set(had) == {"digits"}
    store = Store(str(path))
    store.connection.execute("UPDATE jobs SET data = json_set(data, '$.goal', 'to be the best')")
    store.close()
    with open_service(path, now=lambda: 1_000_000.0) as service:
        assert pods(service) == had
        service.register(cpu_node(job_id=None, folders=("other",)))
        service.submit(wire.JobSpec(job_id="other", folder="other", max_pods=2, min_pods=2))
        assert pods(service) == had  # its slots are taken
        assert "was deleted" in browse(service).delete("/api/v1/jobs/digits").text
        wait_until(lambda: set(pods(service)) == {"other"})


@pytest.mark.parametrize("share", [True, False])
def test_shared_jobs_get_no_slots_of_a_job_that_cannot_be_read(tmp_path, share):
    """One was allotted these beside a free node, and waited for ever."""
    path, now = tmp_path / "server.db", [1_000_000.0]
    nodes = [
        cpu_node(name, job_id=None, folders=("x",), port_low=low, port_high=low + 99)
        for name, low in (("node-a", 21000), ("node-b", 22000))
    ]

    def heard(service: JobService, nodes: list[wire.Node]) -> list[list[str]]:
        for _ in range(3):
            now[0] += 1.0
            for node in nodes:
                service.report_node(node.node_id, wire.NodeReport(node_id=node.node_id))
            with service.engine.lock:
                service.engine.tick()
        plans = [service.engine.plan_of(node.node_id) for node in nodes]
        return [[pod.job_id for pod in plan] for plan in plans]

    spec = wire.JobSpec(job_id="old", folder="x", share=share, min_pods=2, max_pods=2)
    with open_service(path, now=lambda: now[0]) as service:
        service.register(nodes[0])
        service.submit(spec)
        assert heard(service, nodes[:1]) == [["old", "old"]]
    store = Store(str(path))
    store.connection.execute("UPDATE jobs SET data = json_set(data, '$.goal', 'to be the best')")
    store.close()
    with open_service(path, now=lambda: now[0]) as service:
        for node in nodes:
            service.register(node)
        service.submit(dataclasses.replace(spec, job_id="new", share=True))
        assert heard(service, nodes) == [["old", "old"], ["new", "new"]]
        used = [each.used_shared + each.used_others for each in service.engine.sharing().nodes]
        assert used == [2, 2]


def test_an_estimate_that_an_older_version_wrote_as_infinity_is_read_as_none(tmp_path):
    path = tmp_path / "server.db"
    with open_service(path) as service:
        service.submit(SPEC)
    store = Store(str(path))
    db = store.connection
    db.execute("UPDATE jobs SET data = json_set(data, '$.estimated_run_time_s', 'odd')")
    db.execute("UPDATE jobs SET data = replace(data, '\"odd\"', 'Infinity')")
    store.close()
    with open_service(path) as service:
        status = browse(service).get("/api/v1/jobs/digits").get_json()
        assert status["estimated_run_time_s"] is None


# --- the clock -----------------------------------------------------------------------------------


def test_the_clock_goes_on_after_a_full_disk_and_then_does_what_was_due(tmp_path):
    """In a process of its own: the size limit that stands for the disk holds for all its files."""
    script = """
        import logging, resource, signal, sys, time
        from job_server.api import wire
        from job_server.server.service import JobService
        from job_server.server.store import Store
        from tests.job_server.serving import cpu_node
        from tests.support import wait_until

        logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        skew = [0.0]
        service = JobService(Store(sys.argv[1]), now=lambda: time.monotonic() + 1e6 + skew[0])
        service.submit(wire.JobSpec(job_id="digits", max_pods=2))
        service.submit(wire.JobSpec(job_id="gone"))
        service.register(cpu_node("old", job_id="nobody"))
        engine = service.engine
        no_limit = resource.getrlimit(resource.RLIMIT_FSIZE)

        resource.setrlimit(resource.RLIMIT_FSIZE, (0, no_limit[1]))
        with engine.lock:
            engine.jobs["gone"].forget = True
            skew[0] = 4000.0  # the node has been silent for more than an hour
        service.start()
        wait_until(lambda: engine.jobs["digits"].due_at > engine.now(), 40)
        rounds = []
        tick = engine.tick
        engine.tick = lambda: (rounds.append(1), tick())[1]
        with engine.lock:
            engine.wake_timer()
        wait_until(lambda: len(rounds) >= 1, 40)
        assert "old" in engine.registry.nodes, "forgotten in memory alone"
        assert engine.clock_trouble() == "", engine.clock_trouble()
        print("THERE IS ROOM AGAIN", flush=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, no_limit)
        with engine.lock:
            engine.wake_timer()
        wait_until(lambda: "old" not in engine.registry.nodes, 40)
        service.submit(wire.JobSpec(job_id="next"))
        service.close()
        print("WELL")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "server.db")],
        capture_output=True,
        text=True,
        timeout=50,
        cwd=ROOT,
        check=False,
    )
    assert "WELL" in done.stdout, done.stdout + done.stderr
    before, _, after = done.stdout.partition("THERE IS ROOM AGAIN")
    assert "node old: not forgotten" in before
    assert "not forgotten" not in after
    assert "Exception in thread" not in done.stderr


def test_a_round_of_the_clock_that_fails_is_logged_and_the_next_one_comes(caplog, monkeypatch):
    monkeypatch.setattr("job_server.server.engine.RETRY_S", 0.01)
    service = JobService(Store(":memory:"))
    forgettable, calls = service.engine.registry.forgettable, []

    def breaks_at_first(now: float) -> list[str]:
        calls.append(now)
        if len(calls) < 3:
            raise RuntimeError("a defect")
        return forgettable(now)

    monkeypatch.setattr(service.engine.registry, "forgettable", breaks_at_first)
    service.start()
    wait_until(lambda: len(calls) >= 3)
    assert "a round of the server's clock failed" in caplog.text
    assert browse(service).get("/api/v1/health").status_code == 200
    service.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_clock_that_has_ended_makes_the_server_unwell():
    def now() -> float:
        if threading.current_thread().name == "timer":
            raise SystemExit  # what no error of ours does: the thread just ends
        return time.monotonic()

    service = JobService(Store(":memory:"), now=now)
    client = browse(service)
    assert client.get("/api/v1/health").status_code == 200  # not yet started
    service.start()
    wait_until(lambda: client.get("/api/v1/health").status_code == 503)
    assert "clock has ended" in client.get("/api/v1/health").get_json()["error"]
    service.close()


def test_a_clock_that_is_late_says_so_and_the_server_is_unwell_until_it_catches_up(caplog):
    with open_service() as service:
        client, engine = browse(service), service.engine
        with engine.lock:  # somebody holds the lock, as a write does to a disk that hangs
            engine.timer_due -= 100.0
            answer = client.get("/api/v1/health")
            assert (answer.status_code, " s late" in answer.text) == (503, True)
            engine.wake_timer()
        wait_until(lambda: client.get("/api/v1/health").status_code == 200)
        assert "what was due comes later" in caplog.text


def test_a_database_that_cannot_be_written_is_said_until_it_can(tmp_path, monkeypatch):
    """All looked well, while no failure of a trainer was heard of and nothing was changed."""
    monkeypatch.setattr("job_server.server.engine.RETRY_S", 0.01)
    monkeypatch.setattr("job_server.server.engine.TICK_S", 0.05)
    with open_service(tmp_path / "server.db") as service:
        stranger = browse(service, Guard(token="secret"))
        client = browse(service, Guard(token="secret"))
        client.environ_base["HTTP_AUTHORIZATION"] = "Bearer secret"
        client.post("/api/v1/jobs", json={"job_id": "digits"})
        connection = service.engine.store.connection

        def told(asked: FlaskClient, path: str) -> list[str]:
            answer = asked.get(f"/api/v1/{path}")
            assert answer.status_code == 200  # a server that is started again could do no more
            return list(answer.get_json()["warnings"])

        assert told(client, "health") == told(client, "jobs/digits") == []
        with service.engine.lock:
            connection.execute(
                "CREATE TRIGGER full BEFORE UPDATE ON jobs"
                " BEGIN SELECT RAISE(FAIL, 'disk full'); END"
            )
        assert client.post("/api/v1/jobs/digits/pause").status_code == 503
        wait_until(lambda: told(client, "jobs/digits"))
        warnings = told(client, "health")
        assert ["cannot be written: disk full" in text for text in warnings] == [True]
        assert told(client, "jobs/digits") == warnings
        assert warnings[0] in html.unescape(client.get("/").text)
        assert told(stranger, "health") == []
        with service.engine.lock:
            connection.execute("DROP TRIGGER full")
        wait_until(lambda: not told(client, "health"))
        wait_until(lambda: not told(client, "jobs/digits"))


# --- thousands of jobs that have ended -----------------------------------------------------------


def test_jobs_that_have_ended_cost_nothing_when_nodes_and_pods_report(tmp_path, monkeypatch):
    path = tmp_path / "server.db"
    looked_at: list[str] = []
    node_pods = job_types.node_pods

    def noted(job: AnyJob) -> Mapping[str, tuple[wire.NodePod, ...]]:
        looked_at.append(job.spec.job_id)
        return node_pods(job)

    monkeypatch.setattr(job_types, "node_pods", noted)
    with open_service(path) as service:
        for number in range(20):
            service.submit(wire.JobSpec(job_id=f"old-{number}"))
            service.ask(f"old-{number}", StopAsked())
    for _ in range(2):  # as they end, and when they are loaded
        with open_service(path) as service:
            service.submit(SPEC)
            looked_at.clear()
            for number in range(3):
                ports = {"port_low": 21000 + 100 * number, "port_high": 21099 + 100 * number}
                node_id = f"node-{number}"
                service.register(cpu_node(node_id, **ports))
                service.report_node(node_id, wire.NodeReport(node_id=node_id))
            service.engine.tick()
            assert set(looked_at) == {"digits"}
            assert set(service.engine.live) == {"digits"}
            assert len(service.job_ids()) == 21


def test_jobs_that_have_ended_cost_nothing_for_each_node_that_is_shown(monkeypatch):
    looked_at: list[str] = []
    slots_held = job_types.slots_held

    def noted(job: AnyJob) -> Mapping[str, frozenset[int]]:
        looked_at.append(job.spec.job_id)
        return slots_held(job)

    monkeypatch.setattr(overview, "slots_held", noted)
    with open_service() as service:
        for number in range(3):
            ports = {"port_low": 21000 + 100 * number, "port_high": 21099 + 100 * number}
            service.register(cpu_node(f"node-{number}", **ports))
        service.submit(SPEC)
        service.submit(wire.JobSpec(job_id="old"))
        service.ask("old", StopAsked(discard=True))
        service.sharing()
    assert looked_at.count("old") <= 1 < looked_at.count("digits")


def test_a_job_that_has_ended_keeps_no_nodes_in_memory():
    with open_service() as service:
        service.register(cpu_node())
        service.report_node("node-a", wire.NodeReport(node_id="node-a"))
        service.submit(SPEC)
        running = wire.PodState(pod_id="pod_0_0", job_id="digits", phase=wire.PodPhase.RUNNING)
        service.report_node("node-a", wire.NodeReport(node_id="node-a", pods=(running,)))
        entry = service.engine.jobs["digits"]
        assert entry.seen.cluster.nodes
        service.ask("digits", StopAsked(discard=True))
        service.report_node("node-a", wire.NodeReport(node_id="node-a"))
        assert entry.state.ended
        service.engine.tick()
        assert not entry.seen.cluster.nodes


# --- a machine that slept, or whose clock was set ------------------------------------------------


def test_events_and_the_page_have_the_time_of_day_after_the_machine_has_slept(monkeypatch):
    with open_service() as service:
        service.submit(SPEC)
        (before,) = service.last_events("digits", 9)
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + 8 * 3600)
        service.ask("digits", StopAsked())
        events = service.last_events("digits", 9)
        assert events[0] == before
        assert all(28_000 < event.at - before.at < 29_000 for event in events[1:])
        page = browse(service).get("/").text
        assert '<tr><td>8 h 0 min</td><td></td><td class="text">submitted</td></tr>' in page


# --- a thousand jobs that wait -------------------------------------------------------------------


def calls_of_a_submit(*, waiting: int) -> int:
    """Return how many functions a submit calls where so many jobs wait for slots of five nodes."""
    with open_service() as service:
        for number in range(waiting):
            service.submit(wire.JobSpec(job_id=f"job-{number}", max_pods=1, folder="x"))
        for number in range(5):
            ports = {"port_low": 21000 + 100 * number, "port_high": 21099 + 100 * number}
            node = cpu_node(f"node-{number}", job_id=None, folders=("x",), **ports)
            service.register(node)
            service.report_node(node.node_id, wire.NodeReport(node_id=node.node_id))
        assert sum(bool(status.pods) for status in service.statuses()) == 10
        profile = cProfile.Profile()
        profile.enable()
        service.submit(wire.JobSpec(job_id="one-more", max_pods=1, folder="x"))
        profile.disable()
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


def test_a_job_more_costs_no_more_than_in_proportion_to_those_that_wait():
    assert calls_of_a_submit(waiting=240) < 6 * calls_of_a_submit(waiting=60)


def test_jobs_see_the_slots_of_each_other_as_taken_and_their_own_as_free():
    with open_service() as service:
        service.register(cpu_node(job_id=None, folders=("x",)))
        for job_id in ("first", "second", "third", "fourth"):
            service.submit(wire.JobSpec(job_id=job_id, max_pods=1, folder="x"))
        engine = service.engine

        def taken(job_id: str) -> set[int]:
            (view,) = engine.cluster(engine.jobs[job_id]).nodes
            return set(view.taken)

        assert [taken(job_id) for job_id in ("first", "second", "third")] == [{1}, {0}, {0, 1}]
        service.delete("first", discard=True)
        service.report_node("node-a", wire.NodeReport(node_id="node-a"))
        assert [taken(job_id) for job_id in ("second", "third", "fourth")] == [{0}, {1}, {0, 1}]


def test_a_node_on_the_loopback_has_an_address_for_nodes_of_other_machines(monkeypatch):
    asked = []

    def facing(host: str, port: int, flags: int) -> str:
        asked.append(host)
        if host == "a-name":
            raise OSError("not a number")
        return "10.0.0.1"

    monkeypatch.setattr(nodes, "address_facing", facing)
    with open_service() as service:

        def shown() -> dict[str, str]:
            return {each.node.node_id: each.node.addr for each in service.node_statuses()}

        service.register(cpu_node("here", addr="127.0.0.1"))
        service.register(cpu_node("also", addr="::1"))
        assert shown() == {"here": "127.0.0.1", "also": "::1"}, "they reach each other"
        service.register(cpu_node("named", addr="a-name"))
        assert shown()["here"] == "127.0.0.1", "nothing is looked up"
        service.engine.remove_node("named")
        service.register(cpu_node("there", addr="10.0.0.2"))
        assert shown() == {"here": "10.0.0.1", "also": "10.0.0.1", "there": "10.0.0.2"}
        assert asked[-1] == "10.0.0.2"
        service.register(cpu_node("also", addr="10.0.0.3"))
        assert shown()["also"] == "10.0.0.3", "it says itself what it is now"
        service.engine.remove_node("there")
        service.engine.remove_node("also")
        assert shown()["here"] == "127.0.0.1"


def test_a_job_that_is_being_deleted_is_not_taken_for_the_one_that_is_submitted():
    with open_service() as service:
        service.submit(SPEC)
        service.register(cpu_node())
        running = wire.PodState(pod_id="pod_0_0", job_id="digits", phase=wire.PodPhase.RUNNING)
        service.report_node("node-a", wire.NodeReport(node_id="node-a", pods=(running,)))
        service.delete("digits")
        assert service.job_ids() == ["digits"]  # its pod is still there
        with pytest.raises(Conflict, match="'digits' is being deleted; submit it again once it is"):
            service.submit(SPEC)
        service.report_node("node-a", wire.NodeReport(node_id="node-a"))
        assert service.job_ids() == []
        assert service.submit(SPEC).status == 201


@pytest.mark.parametrize(("fails_in", "is_deleted"), [(0, False), (1, True)])
def test_a_delete_is_one_write_and_is_made_or_changes_nothing(tmp_path, fails_in, is_deleted):
    store = FaultyStore(str(tmp_path / "server.db"))
    with closing(JobService(store)) as service:
        service.start()
        service.submit(SPEC)
        service.register(cpu_node())
        running = wire.PodState(pod_id="pod_0_0", job_id="digits", phase=wire.PodPhase.RUNNING)
        service.report_node("node-a", wire.NodeReport(node_id="node-a", pods=(running,)))
        entry = service.engine.jobs["digits"]
        store.fails_in = fails_in
        with nullcontext() if is_deleted else pytest.raises(StoreTrouble):
            service.delete("digits")
        store.fails_in = None
        assert entry.forget is is_deleted
        assert (entry.job.goal is Goal.STOP) is is_deleted
        (stored,) = store.jobs()
        assert stored.forget is is_deleted


def test_a_delete_that_fails_by_a_defect_changes_nothing(monkeypatch):
    step = job_types.step

    def breaks_at_a_stop(job: AnyJob, event: Event, *rest: Any) -> tuple[AnyJob, str]:
        if isinstance(event, StopAsked):
            raise ZeroDivisionError
        return step(job, event, *rest)

    with open_service() as service:
        service.submit(SPEC)
        monkeypatch.setattr(job_types, "step", breaks_at_a_stop)
        with pytest.raises(ZeroDivisionError):
            service.delete("digits")
        (stored,) = service.engine.store.jobs()
        assert not stored.forget
        assert not service.engine.jobs["digits"].forget


def test_a_job_that_is_being_stopped_already_is_deleted_or_is_not(tmp_path):
    store = FaultyStore(str(tmp_path / "server.db"))
    with closing(JobService(store)) as service:
        service.start()
        service.submit(SPEC)
        service.register(cpu_node())
        running = wire.PodState(pod_id="pod_0_0", job_id="digits", phase=wire.PodPhase.RUNNING)
        service.report_node("node-a", wire.NodeReport(node_id="node-a", pods=(running,)))
        service.ask("digits", StopAsked())
        store.is_full = True
        with pytest.raises(StoreTrouble):
            service.delete("digits")
        assert not service.engine.jobs["digits"].forget
        store.is_full = False
        service.delete("digits")
        assert [each.forget for each in store.jobs()] == [True]


def half_deleted(folder: Path) -> str:
    """Return a database as a server of the version before left it that was killed amid a delete."""
    path = str(folder / "server.db")
    with closing(JobService(Store(path))) as service:
        service.start()
        service.submit(SPEC)
        entry = service.engine.jobs["digits"]
        service.engine.store.save_job("digits", wire.encode(entry.job), forget=True)
        entry.forget = True  # closing it writes the job once more
    return path


def test_a_delete_of_which_only_half_was_written_is_made_when_the_server_starts(tmp_path):
    path = half_deleted(tmp_path)
    with closing(JobService(Store(path))) as service:
        service.start()
        assert service.job_ids() == []


def test_half_a_delete_is_made_later_when_the_disk_is_full_as_the_server_starts(tmp_path):
    store = FaultyStore(half_deleted(tmp_path))
    with closing(JobService(store)) as service:
        store.is_full = True
        service.start()
        assert service.job_ids() == ["digits"]
        store.is_full = False
        with service.engine.lock:
            service.engine.jobs["digits"].due_at = 0.0
            service.engine.tick()
        assert service.job_ids() == []


def test_an_old_job_that_the_database_will_not_forget_is_forgotten_later(monkeypatch):
    with open_service() as service:
        service.submit(SPEC)
        service.ask("digits", StopAsked())
        delete_job = service.engine.store.delete_job

        def broken(job_id: str) -> None:
            raise StoreTrouble("disk I/O error", 2.0)

        monkeypatch.setattr(service.engine.store, "delete_job", broken)
        service.delete("digits")
        assert service.job_ids() == ["digits"]
        monkeypatch.setattr(service.engine.store, "delete_job", delete_job)
        with service.engine.lock:
            service.engine.jobs["digits"].due_at = 0.0
            service.engine.tick()
        assert service.job_ids() == []


def test_a_job_that_the_database_will_not_forget_is_forgotten_later(monkeypatch):
    monkeypatch.setattr("job_server.server.engine.RETRY_S", 0.05)
    with open_service() as service:
        service.submit(SPEC)
        service.engine.store.connection.execute(
            "CREATE TRIGGER busy BEFORE DELETE ON jobs BEGIN SELECT RAISE(FAIL, 'disk full'); END"
        )
        client = browse(service)
        assert client.delete("/api/v1/jobs/digits").get_json()["state"] == "STOPPED"
        assert client.get("/api/v1/jobs/digits").status_code == 200
        service.engine.store.connection.execute("DROP TRIGGER busy")
        with service.engine.lock:
            service.engine.wake_timer()
        wait_until(lambda: client.get("/api/v1/jobs/digits").status_code == 404)
        assert service.engine.store.jobs() == []


# --- defects -------------------------------------------------------------------------------------


def _flip(work: Work) -> None:
    if work.job.announced.standby != "this":
        work.set(announced=Announced(standby="this"))
    else:
        work.set(announced=Announced(standby="that"))


def test_rules_that_undo_each_other_are_named_with_the_job_and_stop_no_other(monkeypatch, caplog):
    with open_service() as service:
        client = browse(service)
        service.submit(SPEC)
        service.submit(teachers("teachers", "soft"))
        before = client.get("/api/v1/jobs/digits").get_json()
        monkeypatch.setattr(converge, "RULES", (*converge.RULES, _flip))
        answer = client.post("/api/v1/jobs/digits/resize", json={"pods": 1})
        assert answer.status_code == 500
        service.register(cpu_node())  # all jobs look at it
        events = client.get("/api/v1/jobs/digits/events").get_json()["events"]
        said = [event["text"] for event in events if "do not come to rest" in event["text"]]
        assert len(said) == 2  # of the resize, and of the node: each once
        assert all("those that go on: flip;" in text for text in said)
        assert "ResizeAsked is left out" in said[0]
        assert "those that go on: flip;" in caplog.text
        after = client.get("/api/v1/jobs/digits").get_json()
        assert after["target_pods"] == before["target_pods"]
        assert client.get("/api/v1/health").status_code == 200
        monkeypatch.undo()
        assert client.post("/api/v1/jobs/digits/resize", json={"pods": 1}).status_code == 200


def test_that_the_server_was_away_is_entered_before_all_else_once_it_can_be_written(tmp_path):
    now = 1_000_000.0
    path = tmp_path / "server.db"
    with open_service(path, now=lambda: now) as service:
        service.submit(SPEC)
        service.register(cpu_node())
    now -= 5000.0  # the clock is set back, or no wait of the job would show that it was told
    service = JobService(Store(str(path)), now=lambda: now)
    db = service.engine.store.connection
    db.execute(
        "CREATE TRIGGER busy BEFORE UPDATE ON jobs BEGIN SELECT RAISE(FAIL, 'disk full'); END"
    )
    service.start()
    try:
        client = browse(service)
        assert client.post("/api/v1/jobs/digits/resize", json={"pods": 1}).status_code == 503
        db.execute("DROP TRIGGER busy")
        assert client.post("/api/v1/jobs/digits/resize", json={"pods": 1}).status_code == 200
        said = [event.text for event in service.last_events("digits", 10)]
        assert "the clock was set back by 5000 s since; the server is back" in said[-2]
        assert "resize to 1" in said[-1]
        job = service.engine.jobs["digits"].job
        assert isinstance(job, Job)
        assert job.progress.accrued_at == now
    finally:
        service.close()


def test_a_node_that_was_here_before_comes_back_to_a_server_whose_disk_is_full(tmp_path):
    """Or its client, without an answer, would stop its pods."""
    path = tmp_path / "server.db"
    with open_service(path) as service:
        service.register(cpu_node())
    with open_service(path) as service:
        service.engine.store.connection.execute(
            "CREATE TRIGGER busy BEFORE INSERT ON nodes BEGIN SELECT RAISE(FAIL, 'disk full'); END"
        )
        client = browse(service)
        assert client.post("/api/v1/nodes", json=wire.encode(cpu_node())).status_code == 200
        other = wire.encode(cpu_node("node-b", addr="10.0.0.2"))
        assert client.post("/api/v1/nodes", json=other).status_code == 503


def test_the_log_tells_of_no_change_that_could_not_be_written(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="job_server")
    with open_service(tmp_path / "server.db") as service:
        service.register(cpu_node())
        service.submit(SPEC)
        service.engine.store.connection.execute(
            "CREATE TRIGGER full BEFORE UPDATE ON jobs BEGIN SELECT RAISE(FAIL, 'disk full'); END"
        )
        assert browse(service).post("/api/v1/jobs/digits/pause").status_code == 503
        assert "pausing" not in caplog.text
        service.engine.store.connection.execute("DROP TRIGGER full")
        assert browse(service).post("/api/v1/jobs/digits/pause").status_code == 200
        assert "pausing on request" in caplog.text


def test_a_job_that_waits_for_slots_gets_none_of_another_job_when_the_server_restarts(tmp_path):
    path = tmp_path / "server.db"
    with open_service(path, now=lambda: 1_000_000.0) as service:
        service.submit(wire.JobSpec(job_id="waits", max_pods=2, folder="x"))
        service.submit(wire.JobSpec(job_id="holds", max_pods=2, folder="y"))
        service.register(cpu_node(job_id=None, folders=("y",)))
        service.register(cpu_node(job_id=None, folders=("x", "y")))
    with open_service(path, now=lambda: 1_000_000.0) as service:
        pods = {status.job_id: len(status.pods) for status in service.statuses()}
    assert pods == {"waits": 0, "holds": 2}


def test_a_job_that_cannot_be_written_does_not_keep_a_nodes_report_from_the_others():
    with open_service(now=lambda: 1_000_000.0) as service:
        for job_id, name in (("a", "soft"), ("b", "hard")):
            service.submit(dataclasses.replace(teachers(job_id, name), folder="x"))
        service.register(cpu_node(job_id=None, folders=("x",)))
        client = browse(service)
        plan: Any = client.get("/api/v1/nodes/node-a/plan").get_json()
        assert [pod["job_id"] for pod in plan["pods"]] == ["a", "b"]
        states = tuple(
            wire.PodState(pod_id=pod["pod_id"], job_id=pod["job_id"], phase=wire.PodPhase.RUNNING)
            for pod in plan["pods"]
        )
        service.engine.store.connection.execute(
            "CREATE TRIGGER busy BEFORE UPDATE ON jobs WHEN new.job_id = 'a'"
            " BEGIN SELECT RAISE(FAIL, 'disk full'); END"
        )
        report = wire.encode(wire.NodeReport(node_id="node-a", pods=states))
        assert client.post("/api/v1/nodes/node-a/report", json=report).status_code == 200
        goodbye = {**report, "leaving": True}
        assert client.post("/api/v1/nodes/node-a/report", json=goodbye).status_code == 503
        phases = [
            client.get(f"/api/v1/jobs/{job_id}").get_json()["pods"][0]["phase"] for job_id in "ab"
        ]
        assert phases == ["starting", "running"]
