"""`edl discovery`, `edl register` and `edl serve --register`: arguments, and the programs."""

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import psutil
import pytest

from distill_reader import discovery, register, registering
from distill_reader.balance.client import FeedStats
from distill_reader.balance.registry.registrar import PortProbe, Readiness
from distill_reader.balance.server.balancer import RegistryView
from distill_reader.balance.server.demand import DemandPoster, demand_of
from distill_reader.balance.table import ServiceState, Student
from distill_reader.balance.tasks import end_tasks
from distill_reader.errors import UsageError
from tests.authority import Authority, make_authority
from tests.distill_reader.balance.discovery_process import DiscoveryProcess
from tests.distill_reader.balance.local_discovery import LocalDiscovery, LocalStudent
from tests.distill_reader.student.foreign_teachers import HttpTeacher
from tests.support import wait_until


@pytest.fixture(autouse=True)
def _no_token(monkeypatch):
    for name in ("EDL_TOKEN", "EDL_TEACHER_TOKEN"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(f"{name}_FILE", raising=False)


def parse(*arguments: str) -> discovery.DiscoveryConfig:
    return discovery.parse_config(discovery.parser().parse_args(arguments))


def parse_register(*arguments: str):
    return register.parse_config(register.parser().parse_args(arguments))


def test_the_originals_arguments_are_taken():
    config = parse(
        *("--server", "127.0.0.1:7001", "--db_endpoints", "h:6379,g:1", "--db_passwd", "p"),
        *("--db_type", "redis", "--worker_num", "4"),
    )
    assert (config.host, config.port) == ("127.0.0.1", 7001)
    assert [each.url for each in config.redis] == ["redis://:p@h:6379", "redis://:p@g:1"]
    registrar = parse_register(
        *("--db_endpoints", "h:6379", "--service_name", "svc", "--server", "10.0.0.1:9292"),
        *("--db_passwd", "p@", "--service_token", "t"),
    )
    assert [each.url for each in registrar.addresses] == ["redis://:p%40@h:6379"]
    assert (registrar.service, registrar.server, registrar.read_token()) == (
        "svc",
        "10.0.0.1:9292",
        "t",
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--server", "7001"], "--server: expected HOST:PORT"),
        (["--server", "h:99999"], "--server: expected HOST:PORT"),
        (["--server", "0.0.0.0:7001"], "set a token .--token_file or EDL_TEACHER_TOKEN., or"),
        (["--db_type", "etcd"], "--db_type etcd: expected redis"),
        (["--worker_num", "0"], "--worker_num: must be at least 1"),
        (["--db_passwd", "p"], "--db_passwd: is for a Redis"),
        (["--db_endpoints", "http://h:1"], "expected HOST:PORT or redis://"),
        (["--db_endpoints", "redis://:secret@h:port"], "redis://...@h:port: "),
        (["--db_endpoints", "h:1", "--db_passwd_file", "nowhere"], "--db_passwd_file: nowhere"),
        (["--job_server", "h:8180"], "--job_server h:8180: expected a URL"),
        (["--token_file", "nowhere"], "--token_file nowhere: "),
    ],
)
def test_a_wrong_argument_of_the_server_is_named(arguments, words):
    with pytest.raises(UsageError, match=words):
        parse(*arguments)


def test_others_than_this_machine_need_a_token_or_leave(tmp_path, monkeypatch):
    file = tmp_path / "token"
    file.write_text("secret\n")
    everywhere = ("--server", "0.0.0.0:7001")
    assert parse(*everywhere, "--token_file", str(file)).server.token == "secret"
    assert parse(*everywhere, "--insecure").server.token == ""
    monkeypatch.setenv("EDL_TOKEN_FILE", str(file))
    config = parse(*everywhere, "--insecure_legacy", "--job_server", "http://h:1")
    assert config.server.is_open_to_legacy
    assert (config.server.token, config.job_token()) == ("secret", "secret")
    monkeypatch.setenv("EDL_TEACHER_TOKEN", "the teachers'")
    config = parse(*everywhere, "--job_server", "http://h:1")
    assert (config.server.token, config.job_token()) == ("the teachers'", "secret")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--server", "h:1"], "give one of --discovery HOST:PORT and --db_endpoints"),
        (
            ["--server", "h:1", "--discovery", "h:1", "--db_endpoints", "h:1"],
            "give one of --discovery HOST:PORT and --db_endpoints",
        ),
        (["--server", "h", "--discovery", "h:1"], "--server: expected HOST:PORT"),
        (["--server", "h:1", "--discovery", "h:1/m"], "--discovery: expected HOST:PORT"),
        (["--server", "h:1", "--discovery", "h:1", "--lease_s", "0.1"], "--lease_s: expected 0.5"),
        (["--server", "h:1", "--discovery", "h:1", "--info", "x" * 600], "--info: expected up to"),
    ],
)
def test_a_wrong_argument_of_the_registrar_is_named(arguments, words):
    with pytest.raises(UsageError, match=words):
        parse_register("--service_name", "svc", *arguments)


def test_a_teacher_says_where_it_is_found(monkeypatch):
    def endpoint(bound: str, *arguments: str, where: str = "127.0.0.1:7001") -> str:
        parser = argparse.ArgumentParser()
        registering.add_register_arguments(parser)
        parser.add_argument("--token_file")
        args = parser.parse_args(["--register", where, *arguments])
        config = registering.parse_register(args)
        assert config is not None
        return config.registrar(bound, 9292, lambda: True).server

    name = ("--service_name", "svc")
    assert endpoint("10.1.2.3", *name) == "10.1.2.3:9292"
    assert endpoint("::1", *name) == "[::1]:9292"
    assert endpoint("0.0.0.0", *name) == "0.0.0.0:9292"  # test_lost_names.py: found out later
    assert endpoint("0.0.0.0", *name, "--advertise", "teacher-1.lan") == "teacher-1.lan:9292"
    far = "127.0.0.1:7001,10.0.0.5:7001"
    with pytest.raises(UsageError, match=r"10\.0\.0\.5:7001 is for other hosts.*--bind"):
        endpoint("127.0.0.1", *name, where=far)
    assert endpoint("10.1.2.3", *name, where=far) == "10.1.2.3:9292"
    assert endpoint("::1", *name, "--advertise", "127.0.0.1", where=far) == "127.0.0.1:9292"
    with pytest.raises(UsageError, match="--register: give --service_name"):
        endpoint("127.0.0.1")
    with pytest.raises(UsageError, match="--advertise: expected HOST:PORT"):
        endpoint("127.0.0.1", *name, "--advertise", "a b")
    for own in ("2001:db8::5", "[2001:db8::5]"):  # Kubernetes tells a pod the former
        assert endpoint("::", *name, "--advertise", own) == "[2001:db8::5]:9292"
    for own in ("10.0.0.7:19292", "[2001:db8::5]:19292"):
        with pytest.raises(UsageError, match=r"--advertise .*: expected a host alone; .*`edl reg"):
            endpoint("0.0.0.0", *name, "--advertise", own)


def test_demand_is_what_students_say_together():
    def student(name: str, wait_share: float | None, samples_per_s: float | None) -> Student:
        return Student(
            student=name,
            session=1,
            require=1,
            wait_share=wait_share,
            samples_per_s=samples_per_s,
        )

    students = {"a": student("a", 0.2, 30.0), "b": student("b", 0.6, 50.0)}
    students["c"] = student("c", None, None)  # has read nothing yet
    service = ServiceState(students=students, teachers=frozenset({"h:1"}))
    assert demand_of("svc", service) == {
        "service": "svc",
        "students": 3,
        "teachers": 1,
        "wait_share": pytest.approx(0.4),
        "samples_per_s": 80.0,
    }
    assert demand_of("svc", ServiceState(students={"c": students["c"]})) is None


class JobServer:
    """Takes demands; answers as one that runs no teachers for `other`."""

    def __init__(self, token: str = "", authority: Authority | None = None) -> None:
        self.token = token  # "": it has none
        self.posts: list[tuple[str, str | None, Any]] = []
        self.refused = 0
        server, posts = self, self.posts

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if server.token and self.headers["Authorization"] != f"Bearer {server.token}":
                    server.refused += 1
                    self.send_response(401)
                    self.end_headers()
                    return
                posts.append((self.path, self.headers["Authorization"], body))
                self.send_response(404 if "other" in self.path else 200)
                self.end_headers()
                if "other" in self.path:
                    self.wfile.write(b'{"error":"service: no job serves it"}')

            def log_message(self, *_: Any) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        scheme = "http"
        if authority is not None:
            context, scheme = authority.context(), "https"
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.url = f"{scheme}://localhost:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def test_a_job_server_is_told_of_the_demand(run):
    jobs = run(JobServer)
    server = run(DiscoveryProcess, "--job_server", jobs.url, EDL_TOKEN="", EDL_TEACHER_TOKEN="")
    for service in ("other", "svc"):
        student = run(LocalStudent, server.endpoint, service)
        student.feed_stats = FeedStats(wait_share=0.25, samples_per_s=12.0)
    wait_until(lambda: any("svc" in path for path, _, _ in jobs.posts))
    path, _, body = next(each for each in jobs.posts if "svc" in each[0])
    assert path == "/api/v1/services/svc/demand"
    assert body == {
        "service": "svc",
        "students": 1,
        "teachers": 0,
        "wait_share": 0.25,
        "samples_per_s": 12.0,
    }


def test_a_job_server_behind_an_authority_of_ones_own_is_told_of_the_demand(run, tmp_path):
    authority = make_authority(tmp_path)
    jobs = run(JobServer, authority=authority)
    server = run(
        DiscoveryProcess, "--job_server", jobs.url,
        EDL_TOKEN="", EDL_TEACHER_TOKEN="", SSL_CERT_FILE=authority.ca_file,
    )  # fmt: skip
    student = run(LocalStudent, server.endpoint, "svc")
    student.feed_stats = FeedStats(wait_share=0.25, samples_per_s=12.0)
    wait_until(lambda: jobs.posts)


def test_a_job_server_that_has_another_token_is_told_of_the_demand_again(run, tmp_path):
    file = tmp_path / "token"
    file.write_text("first\n")
    jobs = run(JobServer, "first")
    server = run(
        DiscoveryProcess, "--job_server", jobs.url, "--job_server_token_file", str(file),
        EDL_TOKEN="", EDL_TEACHER_TOKEN="",
    )  # fmt: skip
    student = run(LocalStudent, server.endpoint, "svc")
    student.feed_stats = FeedStats(wait_share=0.25, samples_per_s=12.0)
    wait_until(lambda: jobs.posts)
    jobs.token = "second"
    wait_until(lambda: jobs.refused)
    file.write_text("second\n")
    wait_until(lambda: jobs.posts[-1][1] == "Bearer second", 120, "the file is read again")


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        ((404, {}, b"404 page not found"), "404 404 page not found"),
        ((301, {"Location": "https://jobs.test/"}, b""), "sends requests to https://jobs.test/"),
    ],
)
def test_an_answer_that_is_no_job_servers_is_told(run, caplog, reply, told):
    other = run(HttpTeacher, lambda *_: reply)
    students = {"a": Student(student="a", session=1, require=1, wait_share=0.5, samples_per_s=1.0)}

    class Balancer:
        view = RegistryView(services={"svc": ServiceState(students=students)}, away=None)

    async def post() -> None:
        poster = DemandPoster(Balancer(), f"http://127.0.0.1:{other.port}", str)  # type: ignore[arg-type]
        task = asyncio.create_task(poster.run())
        async with asyncio.timeout(60):
            while told not in caplog.text:
                await asyncio.sleep(0.01)
        await end_tasks(task)

    asyncio.run(post())


class Program:
    """A program of ours, until SIGTERM."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def end(self) -> tuple[int, str]:
        self.process.send_signal(signal.SIGTERM)
        _, log = self.process.communicate(timeout=120)
        return self.process.returncode, log

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


def test_teachers_register_by_themselves_and_by_a_registrar_and_withdraw_at_sigterm(run, tmp_path):
    (tmp_path / "toy").mkdir()
    server = run(LocalDiscovery)
    student = run(LocalStudent, server.endpoint)
    teacher = run(
        Program,
        *("distill_reader.serve", "--model", str(tmp_path / "toy"), "--port", "0"),
        *("--backend", "tests.distill_reader.teacher.toy_backends:sums"),
        *("--register", server.endpoint, "--service_name", "svc"),
    )
    with socket.create_server(("127.0.0.1", 0)) as other:
        endpoint = f"grpc://127.0.0.1:{other.getsockname()[1]}/model"
        registrar = run(
            Program,
            *("distill_reader.register", "--discovery", server.endpoint),
            *("--service_name", "svc", "--server", endpoint),
        )
        wait_until(lambda: len(student.teachers) == 2, 60)
        assert endpoint in student.teachers
        code, log = registrar.end()
        assert (code, "is withdrawn" in log) == (0, True), log
        wait_until(lambda: len(student.teachers) == 1)
    code, log = teacher.end()
    assert code == 0
    assert log.index("is withdrawn") < log.index("no more requests are accepted")
    wait_until(lambda: not student.teachers)


def test_a_teacher_on_all_addresses_waits_for_the_name_of_its_registry(run, tmp_path):
    (tmp_path / "toy").mkdir()
    server = run(LocalDiscovery)
    file = tmp_path / "there"
    teacher = run(
        Program,
        *("tests.distill_reader.balance.slow_names", "registry.test", "unknown", str(file)),
        *("distill_reader.serve", "--model", str(tmp_path / "toy"), "--port", "0"),
        *("--bind", "0.0.0.0", "--insecure"),
        *("--backend", "tests.distill_reader.teacher.toy_backends:sums"),
        *("--register", f"registry.test:{server.port}", "--service_name", "svc"),
    )
    assert teacher.process.stderr is not None
    for line in teacher.process.stderr:
        if "no address of this host is known" in line:
            break
    assert teacher.process.poll() is None
    file.touch()
    wait_until(lambda: any("127.0.0.1:" in each for each in server.teachers()), 60)
    assert teacher.end()[0] == 0
    assert not server.teachers()


def test_the_server_says_where_it_is_and_ends_with_0(run):
    server = run(DiscoveryProcess)
    assert server.ready == f"discovery ready on {server.endpoint}; registry: in memory\n"
    server.send(signal.SIGTERM)
    assert server.process.wait(60) == 0


def test_a_port_in_use_ends_it_with_2(run, capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert discovery.main(["--server", f"127.0.0.1:{port}"]) == 2
    assert f"--server {port}: cannot listen on 127.0.0.1" in capsys.readouterr().err


def test_a_teacher_without_a_predictor_is_withdrawn_and_comes_back(run, tmp_path):
    folder = tmp_path / "toy"
    folder.mkdir()
    server = run(LocalDiscovery)
    student = run(LocalStudent, server.endpoint)
    teacher = run(
        Program,
        *("distill_reader.serve", "--model", str(folder), "--port", "0"),
        *("--backend", "tests.distill_reader.teacher.toy_backends:sums"),
        *("--register", server.endpoint, "--service_name", "svc"),
    )
    wait_until(lambda: len(student.teachers) == 1, 60)
    folder.rmdir()  # it cannot be loaded again
    (predictor,) = psutil.Process(teacher.process.pid).children()
    predictor.kill()
    wait_until(lambda: not student.teachers, 60)
    assert teacher.process.poll() is None
    folder.mkdir()
    wait_until(lambda: len(student.teachers) == 1, 60)


class Answers:
    """A port that answers each connection with the same bytes; None: with none, and stays open."""

    def __init__(self, answer: bytes | None) -> None:
        self.answer = answer
        self.asked = 0
        self._kept: list[asyncio.StreamWriter] = []

    async def answer_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.answer is None:
            self._kept.append(writer)
            return
        self.asked += bool(await reader.read(1000))
        writer.write(self.answer)
        writer.close()

    def close(self) -> None:
        for writer in self._kept:
            writer.close()


READY = b"HTTP/1.1 200 OK\r\n\r\n"
NOT_READY = b"HTTP/1.1 503 Service Unavailable\r\n\r\n"
BAD_GATEWAY = b"HTTP/1.1 502 Bad Gateway\r\n\r\n"


@pytest.mark.parametrize(
    ("answers", "found", "asked"),
    [
        pytest.param([READY, READY, READY], [True, True, True], 3, id="ready"),
        pytest.param([NOT_READY, READY], [False, True], 2, id="loads its models"),
        pytest.param([READY, NOT_READY, READY], [True, False, True], 3, id="comes back"),
        pytest.param(
            [READY, b"", NOT_READY, b"HTTP/1.1 502 No\r\n\r\n", b"", READY],
            [True, True, False, True, False, True],
            6,
            id="is overloaded",
        ),
        pytest.param([b"HTTP/1.1 400 Bad Request\r\n\r\n"], [False], 1, id="as Triton says it"),
        pytest.param([b"HTTP/1.1 404 Not Found\r\n\r\n"] * 2, [True] * 2, 1, id="another protocol"),
        pytest.param([b"HTTP/1.1 401 No\r\n\r\n"] * 2, [True] * 2, 1, id="wants a token for it"),
        pytest.param(
            [BAD_GATEWAY, BAD_GATEWAY, READY], [False, False, True], 3, id="starts behind a gateway"
        ),
        pytest.param([b"\0\0\6\4\0\0"] * 2, [True] * 2, 1, id="no HTTP"),
        pytest.param([b""] * 2, [True] * 2, 1, id="closes"),
        pytest.param([None] * 3 + [READY], [False, False, True, True], 0, id="says nothing"),
        pytest.param([None, NOT_READY, READY], [False, False, True], 2, id="is slow at first"),
    ],
)
def test_a_registrar_asks_teachers_that_can_say_whether_they_are_ready(
    monkeypatch, answers, found, asked
):
    monkeypatch.setattr("distill_reader.balance.registry.registrar._RESTART_S", 1e-9)
    if None in answers:
        monkeypatch.setattr("distill_reader.balance.registry.registrar._PROBE_S", 0.5)

    async def view() -> list[bool]:
        server = Answers(b"")
        listener = await asyncio.start_server(server.answer_one, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        probe = PortProbe(f"127.0.0.1:{port}")
        results = []
        for server.answer in answers:
            results.append(await probe())
        assert server.asked == asked
        server.close()
        listener.close()
        assert not await probe()
        return results

    assert asyncio.run(view()) == found


def test_a_teacher_that_restarts_a_predictor_stays_and_a_new_one_must_be_ready_first():
    now = 0.0
    readiness = Readiness(lambda: now)
    assert not readiness.note(False)
    assert readiness.note(True)
    now = 1.9
    assert readiness.note(False)
    now = 2.1
    assert not readiness.note(False)
    assert readiness.note(True)
