"""The client object against a real server, and against what is none."""

import http.server
import math
import re
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import pytest
from werkzeug.serving import make_server

from job_server.api import wire
from job_server.api.api_client import ApiClient, server_url
from job_server.api.errors import (
    BadRequest,
    Conflict,
    Forbidden,
    Gone,
    NotFound,
    ServerAway,
    Unauthorized,
)
from job_server.cli.commands import main
from job_server.server.app import create_app
from job_server.server.guard import Guard
from job_server.server.openapi import build_openapi
from job_server.server.service import JobService
from job_server.server.store import Store
from tests.authority import make_authority
from tests.job_server.serving import InThread, cpu_node, running_server
from tests.support import free_port, wait_until

SPEC = wire.JobSpec(job_id="digits", max_pods=2)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running_server(tmp_path_factory.mktemp("server"), "--no_job") as server:
        yield server


@pytest.fixture
def api(server):
    with server.api() as api:
        yield api
        for job in api.jobs():
            api.delete(job.job_id)
        for known in api.nodes():
            api.node_report(wire.NodeReport(node_id=known.node.node_id, leaving=True))
        wait_until(lambda: api.jobs() == (), 40)


def test_a_jobs_life_through_the_client(api):
    assert api.jobs() == ()
    assert "start with 2 pods" in api.preview(SPEC)[0]
    status = api.submit(SPEC)
    assert status.spec == SPEC
    assert api.submit(SPEC).job_id == "digits"
    assert [job.job_id for job in api.jobs()] == ["digits"]
    assert api.resize("digits", 1).target_pods == 1
    assert api.stop("digits").state is wire.JobState.STOPPED
    texts = [event.text for event in api.events("digits")]
    assert texts[0] == "submitted"
    assert api.delete("digits").job_id == "digits"
    with pytest.raises(NotFound, match="digits"):
        api.status("digits")


def test_a_job_is_not_submitted_to_a_server_that_would_leave_out_a_part_of_it(monkeypatch):
    older = build_openapi()
    known = older["components"]["schemas"]["JobSpec"]["properties"]
    del known["share"], known["user"], known["args"]
    monkeypatch.setattr("job_server.server.app.build_openapi", lambda: older)
    port = free_port()
    with closing(JobService(Store(":memory:"))) as service:
        server = make_server("127.0.0.1", port, create_app(service, Guard(token=None)))
        answers = InThread(server.serve_forever)
        api = ApiClient(f"http://127.0.0.1:{port}")
        spec = wire.JobSpec(job_id="digits", max_pods=2, folder="f", share=True, user="ann")
        with pytest.raises(BadRequest, match=r"^share, user: the job server at http://.* update"):
            api.submit(spec)
        assert api.jobs() == ()
        assert api.submit(SPEC).spec == SPEC
        server.shutdown()
        answers.result()


def test_a_node_and_a_pod_through_the_client(api):
    api.submit(SPEC)
    plan = api.register_node(cpu_node())
    assert {pod.pod_id for pod in plan.pods} == {"pod_0_0", "pod_1_0"}
    server_id = api.health().server_id
    assert plan.server_id == server_id
    assert api.node_plan("node-a", plan.revision - 1, 10).pods == plan.pods
    assert api.node_report(wire.NodeReport(node_id="node-a")).server_id == server_id
    attach = wire.Attach(pod_id="pod_0_0", node_id="node-a", pid=1)
    orders = api.attach("digits", "pod_0_0", attach)
    assert orders.server_id == server_id
    again = api.orders("digits", "pod_0_0", revision=-1, timeout_s=0)
    assert again.plans == orders.plans
    ready = wire.PodReport(kind=wire.ReportKind.READY, stage=orders.plans[0].stage)
    assert api.report("digits", "pod_0_0", ready) == server_id
    assert [known.node.node_id for known in api.nodes()] == ["node-a"]
    with pytest.raises(Gone):
        api.orders("digits", "pod_9_9")
    with pytest.raises(Conflict):
        api.register_node(cpu_node("node-b"))
    with pytest.raises(NotFound):
        api.node_plan("node-b")


def test_metrics_that_are_no_numbers_do_not_lose_the_report(api):
    api.submit(SPEC)
    api.register_node(cpu_node())
    metrics = {"loss": math.nan, "accuracy": 0.5, "scale": math.inf}
    report = wire.PodReport(kind=wire.ReportKind.PROGRESS, stage=1, metrics=metrics)
    assert api.report("digits", "pod_0_0", report)
    many = {f"{number}" + "x" * 1000: 0.5 for number in range(5000)}  # 5 MB
    assert api.report("digits", "pod_0_0", replace(report, metrics=many))
    assert len(api.status("digits").metrics) < 1000


def test_a_watch_returns_with_the_change(api, server):
    status = api.submit(SPEC)
    with server.api() as other:

        def until_stopped():
            seen = status
            while seen.state is not wire.JobState.STOPPED:
                seen = other.watch("digits", seen.revision, 60)
            return seen

        watch = InThread(until_stopped)
        api.stop("digits")
        assert status.revision < watch.result().revision


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        pytest.param(lambda api: api.status("nobody"), NotFound, id="no job"),
        pytest.param(lambda api: api.status("../etc"), NotFound, id="a path"),
        pytest.param(lambda api: api.status(".."), BadRequest, id="the parent"),
        pytest.param(lambda api: api.status(""), BadRequest, id="nothing"),
        pytest.param(lambda api: api.resize("digits", 1), NotFound, id="resize of nothing"),
        pytest.param(lambda api: api.events("digits", limit=0), BadRequest, id="a query"),
    ],
)
def test_refusals_are_told_apart(api, call, kind):
    with pytest.raises(kind) as refused:
        call(api)
    assert str(refused.value)


def test_a_conflict_is_told_with_the_servers_words(api):
    api.submit(SPEC)
    with pytest.raises(Conflict, match="another spec"):
        api.submit(wire.JobSpec(job_id="digits", max_pods=3))


def test_the_token_is_sent(tmp_path):
    with running_server(tmp_path, "--no_job", EDL_TOKEN="correct-horse") as server:
        with server.api() as api, pytest.raises(Unauthorized, match="EDL_TOKEN"):
            api.jobs()
        with server.api("wrong-horse") as api, pytest.raises(Unauthorized):
            api.jobs()
        with server.api("correct-horse") as api:
            assert api.jobs() == ()
            assert "EDL job server" in api.page()


def test_an_absent_server_is_away_and_a_connection_error():
    with ApiClient(f"http://127.0.0.1:{free_port()}") as api:
        with pytest.raises(ServerAway, match="refused") as away:
            api.health()
        assert isinstance(away.value, ConnectionError)
        assert away.value.delay_s > 0


def test_a_server_behind_tls_is_checked_by_the_certificates_that_the_environment_names(
    tmp_path, monkeypatch
):
    authority = make_authority(tmp_path)
    with closing(JobService(Store(":memory:"))) as service:
        app = create_app(service, Guard(token=None))
        server = make_server("127.0.0.1", free_port(), app, ssl_context=authority.context())
        answers = InThread(server.serve_forever)
        url = f"https://localhost:{server.server_port}"
        monkeypatch.delenv("SSL_CERT_FILE", raising=False)
        with ApiClient(url) as api, pytest.raises(ServerAway, match="SSL_CERT_FILE names the"):
            api.health()
        monkeypatch.setenv("SSL_CERT_FILE", authority.ca_file)
        with ApiClient(url) as api:
            assert api.jobs() == ()
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "gone.pem"))
        with ApiClient(url) as api, pytest.raises(ServerAway, match=r"gone\.pem"):
            api.health()
        server.shutdown()
        answers.result()


def test_a_server_that_restarts_is_found_again(tmp_path):
    with running_server(tmp_path, "--no_job") as server, server.api() as api:
        before = api.health().server_id
        poll = InThread(lambda: server.api().node_plan("node-a", -1, 0))
        with pytest.raises(NotFound):
            poll.result()
        server.kill()
        with pytest.raises(ServerAway):
            api.health()
        server.start()
        assert api.health().server_id != before


def test_proxies_of_the_environment_are_not_used(server, monkeypatch):
    nowhere = f"http://127.0.0.1:{free_port()}"
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, nowhere)
    monkeypatch.delenv("no_proxy", raising=False)
    with server.api() as api:
        assert api.health().server_id


class Stranger(http.server.BaseHTTPRequestHandler):
    """Something else that listens there."""

    def do_GET(self) -> None:
        status, body = {
            "/html": (200, b"<html>"),
            "/list": (200, b"[]"),
            "/broken": (500, b"oops"),
            "/moved": (302, b""),
            "/full": (503, b'{"error": "the database cannot be written"}'),
            "/proxy": (503, b"<html>"),
            "/no_route": (404, b"404 page not found"),  # as Traefik, while the server is away
            "/idle": (408, b"<html>"),
            "/too_often": (429, b"{}"),
            "/too_long": (413, b"<html>"),
            "/forbidden": (403, b"<html>"),
        }.get(self.server.answer, (200, b"{}"))  # type: ignore[attr-defined]  # set by the test
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Location", "http://127.0.0.1:1/")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args: object) -> None:
        return


@contextmanager
def stranger(answer: str, kind: type[Stranger] = Stranger) -> Iterator[str]:
    """Run one; yield its address."""
    listener = http.server.HTTPServer(("127.0.0.1", 0), kind)
    listener.answer = answer  # type: ignore[attr-defined]  # read by its handler
    thread = threading.Thread(target=listener.serve_forever, daemon=True)
    thread.start()
    yield f"127.0.0.1:{listener.server_port}"
    listener.shutdown()
    listener.server_close()
    thread.join()


@pytest.mark.parametrize(
    "answer",
    [
        "/html",
        "/list",
        "/broken",
        "/moved",
        "/empty",
        "/proxy",
        "/no_route",
        "/idle",
        "/too_often",
    ],
)
def test_what_is_no_job_server_is_never_read_as_an_empty_answer(answer):
    with stranger(answer) as address, ApiClient(address) as api, pytest.raises(ServerAway) as away:
        api.health()
    assert not away.value.answers


def test_where_a_proxy_leads_elsewhere_is_said():
    words = r"HTTP 302 Found, to http://127\.0\.0\.1:1/$"
    with (
        stranger("/moved") as address,
        ApiClient(address) as api,
        pytest.raises(ServerAway, match=words),
    ):
        api.health()


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        ("/too_long", BadRequest, "HTTP 413 .*client_max_body_size"),
        ("/forbidden", Forbidden, "HTTP 403 .*no job server's words"),
    ],
)
def test_what_a_proxy_refuses_is_said_to_be_of_one_and_where(answer, kind, words):
    with stranger(answer) as address, ApiClient(address) as api, pytest.raises(kind) as refused:
        api.health()
    assert re.match(f"http://{address}: {words}", str(refused.value))


@pytest.mark.parametrize("asked_s", [30.0, 10.0])
@pytest.mark.parametrize("has_server", [True, False])
def test_a_poll_that_a_proxy_gives_up_is_made_again_and_shorter(
    monkeypatch, has_server: bool, asked_s: float
):
    gives_up_s, asked, clock = 10.0, list[float](), [0.0]
    times = SimpleNamespace(monotonic=lambda: clock[0])
    monkeypatch.setattr("job_server.api.api_client.time", times)

    class HastyProxy(Stranger):
        def do_GET(self) -> None:
            asked.append(float(parse_qs(urlsplit(self.path).query)["timeout_s"][0]))
            news = has_server and asked[-1] < gives_up_s
            clock[0] += asked[-1] if news else gives_up_s
            body = b'{"events": []}' if news else b"<html>"
            self.send_response(200 if news else 504)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with stranger("", HastyProxy) as address, ApiClient(address) as api:
        if has_server:
            assert [api.events("digits", timeout_s=asked_s) for _ in range(2)] == [(), ()]
            first, *later = asked
            assert first == asked_s
            assert len(later) == 2
            assert later[0] == later[1] < gives_up_s
        else:
            with pytest.raises(ServerAway, match="HTTP 504"):
                api.events("digits", timeout_s=asked_s)
            assert len(asked) == 2, "that it is shorter does not help"


def test_a_server_that_cannot_write_is_there_and_no_command_doubts_its_address(capsys):
    with stranger("/full") as address:
        assert main(["status", "--server", address]) == 1
    said = capsys.readouterr().err
    assert "the database cannot be written" in said
    assert "--server" not in said


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("127.0.0.1:8180", "http://127.0.0.1:8180"),
        ("http://box:1/", "http://box:1"),
        ("https://[::1]:2", "https://[::1]:2"),
        ("10.0.0.1", "http://10.0.0.1:8180"),
        ("8180:9000", "http://8180:9000"),
        ("472019385560", "http://472019385560:8180"),  # a container's name
        ("https://edl.example", "https://edl.example"),
    ],
)
def test_a_servers_url_may_leave_out_the_scheme(text, url):
    assert server_url(text) == url


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ftp://box",
        "http://",
        "http://box/api",
        "box:port",
        "box:0",
        "file:///x",
        "a b:1",
        "8180",
        " ",
        "10.0.0..1:8180",
        "b" * 64,
    ],
)
def test_what_is_no_url_is_refused(text):
    with pytest.raises(ValueError, match="HOST:PORT"):
        server_url(text)
