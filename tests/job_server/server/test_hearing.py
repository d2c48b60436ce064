"""A server that is late itself: what it has not heard yet is nobody's silence."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from job_server.api import wire
from job_server.server.hearing import Hearing, OwnHeartbeat
from tests.job_server.serving import ServerProcess, cpu_node, open_service, running_server
from tests.support import wait_until

JOB = "digits"
HEARTBEAT_S = 0.3


class Heartbeats(threading.Thread):
    """A node's client that only reports, as the real one: the next when the last is answered."""

    def __init__(self, server: ServerProcess, node: wire.Node) -> None:
        super().__init__(daemon=True)
        self._server, self._node = server, node
        self._ended = threading.Event()

    def run(self) -> None:
        with self._server.api() as api:
            pods = api.register_node(self._node).pods
            while not self._ended.wait(HEARTBEAT_S):
                states = tuple(
                    wire.PodState(
                        pod_id=pod.pod_id,
                        job_id=pod.job_id,
                        phase=wire.PodPhase.RUNNING,
                        submitted_at=pod.submitted_at,
                    )
                    for pod in pods
                )
                api.node_report(wire.NodeReport(node_id=self._node.node_id, pods=states))
                pods = api.node_plan(self._node.node_id).pods

    def end(self) -> None:
        self._ended.set()
        self.join()


@contextmanager
def two_nodes(server: ServerProcess) -> Iterator[list[Heartbeats]]:
    nodes = [
        Heartbeats(server, cpu_node(name, port_low=low, port_high=low + 99))
        for name, low in (("node-a", 21000), ("node-b", 22000))
    ]
    try:
        for node in nodes:
            node.start()
        yield nodes
    finally:
        for node in nodes:
            node.end()


@pytest.mark.full
def test_a_server_that_was_stopped_for_a_while_loses_no_node_that_went_on_reporting(tmp_path):
    args = ("--no_job", "--heartbeat_s", str(HEARTBEAT_S))
    with running_server(tmp_path, *args) as server, server.api() as api:
        script = wire.ScriptSpec(kind=wire.ScriptKind.NONE)
        api.submit(wire.JobSpec(job_id=JOB, pods=4, max_pods=4, expected_nodes=2, script=script))
        with two_nodes(server) as nodes:

            def lost() -> list[str]:
                return [event.text for event in api.events(JOB) if "answers" in event.text]

            wait_until(lambda: len(api.status(JOB).pods) == 4)
            assert server.process is not None
            for _ in range(3):
                wait_until(lambda: all(node.alive for node in api.nodes()))
                server.process.send_signal(signal.SIGSTOP)
                time.sleep(8 * HEARTBEAT_S)  # what is tested: twice as long as a node may be silent
                server.process.send_signal(signal.SIGCONT)
            api.health()
            assert lost() == []
            nodes[1].end()
            wait_until(lambda: any("node-b" in text for text in lost()))


def test_a_server_that_nothing_sends_heartbeats_to_is_not_late():
    assert Hearing(1.0).late_s == 0.0


def test_a_server_that_hears_itself_in_time_is_not_late():
    hearing = Hearing(1.0)
    hearing.heard(time.monotonic() - 1.0)
    assert hearing.late_s == 0.0


def test_a_server_is_as_late_as_its_last_own_heartbeat_is_beyond_the_usual():
    hearing = Hearing(1.0)
    hearing.heard(time.monotonic() - 60.0)
    assert 58.0 < hearing.late_s < 60.0


class BrokenLock:
    """Fails the first times that somebody wants it, and ends who wants it after that."""

    def __init__(self) -> None:
        self.left = 3

    def __enter__(self) -> None:
        self.left -= 1
        raise OSError("no memory") if self.left else SystemExit

    def __exit__(self, *_: object) -> None: ...


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_own_heartbeats_go_on_after_an_error_of_any_kind(tmp_path, caplog):
    with running_server(tmp_path, "--no_job") as server:
        lock = BrokenLock()
        heartbeat = OwnHeartbeat(Hearing(0.1), server.url, None, lock)
        heartbeat.start()
        heartbeat.join(30)
        assert not heartbeat.is_alive()
    assert lock.left == 0
    assert caplog.text.count("an own heartbeat failed") == 2


def test_a_report_that_comes_after_a_newer_one_of_the_same_client_changes_nothing():
    stranger = wire.SlotUsage(index=0, stranger="another program")
    newer = wire.NodeReport(node_id="node-a", slots=(stranger,), sent_ms=2000)
    older = wire.NodeReport(node_id="node-a", sent_ms=1000)
    with open_service(":memory:") as service:
        service.register(cpu_node())
        known = service.engine.registry.get("node-a")
        for report in (newer, older):
            service.report_node("node-a", report)
        assert known.report == newer
        service.register(cpu_node())  # as after the machine has started again
        service.report_node("node-a", older)
        assert known.report == older
