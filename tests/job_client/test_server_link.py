"""Parts of the conversation with the server that need no client around them."""

import threading

import pytest

from job_client.errors import FatalError, SetupError
from job_client.server_link import Callbacks, NodeLink, find_job
from job_server.api.errors import ServerAway, Unauthorized
from job_server.api.wire import JobKind, Node, NodeReport, Slot, SlotKind
from tests.job_client.conftest import FakeServer


class Job:
    """As much of a JobStatus as matters here."""

    def __init__(
        self, job_id: str, *, ended: bool = False, kind: JobKind = JobKind.TRAINING
    ) -> None:
        self.spec = type("Spec", (), {"job_id": job_id, "kind": kind})
        self.state = type("State", (), {"ended": ended})


class Script(FakeServer):
    """Answers jobs() with one entry after the other, and the last one for ever."""

    def __init__(self, *answers: object) -> None:
        super().__init__()
        self._answers = list(answers)

    def jobs(self):
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def never(_timeout_s: float) -> bool:
    return False


def test_the_only_job_is_served():
    assert find_job(Script((Job("a"),)), never) == "a"


def test_jobs_that_have_ended_do_not_count():
    assert find_job(Script((Job("old", ended=True), Job("new"))), never) == "new"


def test_with_several_jobs_one_must_be_named():
    with pytest.raises(SetupError, match=r"PADDLE_JOB_ID: .* name one of: a, b"):
        find_job(Script((Job("b"), Job("a"))), never)


def test_of_several_jobs_that_of_pods_from_before_is_served():
    jobs = Script((Job("a"), Job("b"), Job("old", ended=True)))
    assert find_job(jobs, never, known={"b", "old"}) == "b"
    with pytest.raises(SetupError, match="name one of: a, b"):
        find_job(jobs, never, known={"old"})


def test_jobs_of_teachers_do_not_count_beside_a_training():
    teachers = Job("teachers", kind=JobKind.TEACHER)
    assert find_job(Script((teachers, Job("a"))), never) == "a"
    assert find_job(Script((teachers,)), never) == "teachers"


def test_it_waits_for_the_server_and_then_for_a_job():
    server = Script(ServerAway("down"), (), ServerAway("down"), (Job("a"),))
    assert find_job(server, never) == "a"


def test_a_server_that_refuses_us_ends_the_wait():
    with pytest.raises(FatalError, match="token"):
        find_job(Script(Unauthorized("token: missing")), never)


def test_a_404_of_a_proxy_is_waited_out_where_the_server_was_heard_before():
    gone = ServerAway("HTTP 404 Not Found")
    gone.status = 404
    assert find_job(Script((), gone, (Job("a"),)), never) == "a"
    with pytest.raises(FatalError, match="no job server: HTTP 404"):
        find_job(Script(gone), never)


def test_asked_to_end_it_does_not_wait_any_longer():
    assert find_job(Script(()), lambda _timeout_s: True) is None


class SlowReports(FakeServer):
    """Takes its time over the first report, and then hears the others."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.go_on = threading.Event(), threading.Event()

    def node_report(self, report):
        if not self.asked.is_set():
            self.asked.set()
            assert self.go_on.wait(60)
        return super().node_report(report)


def test_a_goodbye_is_the_last_that_the_server_hears_and_nothing_registers_behind_it(
    monkeypatch,
):
    monkeypatch.setattr("job_client.server_link.LAST_REPORT_S", 60.0)
    server = SlowReports()
    node = Node(
        node_id="a",
        addr="127.0.0.1",
        slots=(Slot(index=0, kind=SlotKind.CPU),),
        port_low=9000,
        port_high=9100,
    )
    callbacks = Callbacks(
        node=lambda: node,
        address=lambda: node.addr,
        plan=lambda plan: None,
        report=lambda fresh: NodeReport(node_id="a", pods=()),
        reported=lambda _report, _answer: None,
        contact=lambda sent_at: None,
        fatal=lambda error: None,
    )
    link = NodeLink(lambda: server, callbacks, choose_ports=False)
    link.start()
    assert server.asked.wait(60)
    link.close()  # as the goodbye does at once
    server.come_back(forgetful=False)  # another id: the answer would have the node register again
    threading.Timer(0.2, server.go_on.set).start()
    assert link.say_goodbye(NodeReport(node_id="a", pods=(), leaving=True))
    assert [report.leaving for report in server.reports] == [False, True]
    assert len(server.nodes) == 1
