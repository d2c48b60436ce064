"""What a discovery server says to the bytes that come: the original's, ours, and rubbish."""

import errno
import os
import re
import socket
import struct
import time
from contextlib import suppress
from dataclasses import replace

import pytest
import requests
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distill_reader.balance.server.server import DiscoveryServerConfig
from distill_reader.balance.wire.messages import (
    HEAD,
    MAGIC,
    MAX_REQUEST_BYTES,
    MAX_STRANGERS_BYTES,
    encode,
)
from distill_reader.tokens import prove
from tests.distill_reader.balance.local_discovery import (
    PATIENT,
    LocalDiscovery,
    LocalStudent,
    LocalTeacher,
    RawClient,
)
from tests.support import wait_until

REGISTER = {"type": "register", "service_name": "svc", "seq": 0, "num": 3}
HELLO = {
    "type": "student",
    "service": "svc",
    "student": "me",
    "session": 1,
    "require": 3,
    "held": [],
}
REPORT = {"type": "report", "require": 3, "wait_share": 0.5, "samples_per_s": 9.5, "measured": {}}
BEAT = {"type": "teacher", "service": "svc", "server": "127.0.0.1:9292", "lease_s": 60, "info": ""}


@pytest.fixture
def server(run):
    return run(LocalDiscovery)


@pytest.fixture
def client(run, server):
    return run(RawClient, server.endpoint)


def without(body, *names: str):
    return {name: value for name, value in body.items() if name not in names}


# --- the original's


def test_the_originals_student_gets_its_list_in_the_originals_bytes(server, client, run):
    teacher = run(LocalTeacher, server.endpoint)
    wait_until(server.teachers)
    text = b'{"type": "register", "service_name": "svc", "seq": 0, "num": 4}'
    client.send(b"\xcb\xef\x00\x00" + struct.pack("!i", 8 + len(text)) + text)
    assert client.receive() == {
        "type": "register",
        "seq": 1,
        "servers": [teacher.endpoint],
        "num": 1,
    }
    assert client.ask({"type": "heartbeat", "version": 0}) == {"type": "heartbeat"}


def test_it_hears_of_changes_when_it_asks_and_never_before(server, client, run):
    assert client.ask(REGISTER) == {"type": "register", "seq": 1, "servers": [], "num": 0}
    assert client.ask({"type": "heartbeat", "version": 0}) == {"type": "heartbeat"}
    teacher = run(LocalTeacher, server.endpoint)
    wait_until(lambda: any(server.links().values()))
    change = client.ask({"type": "heartbeat", "version": 0})
    assert change == {"type": "servers_change", "servers": [teacher.endpoint], "version": 1}
    assert client.ask({"type": "heartbeat", "version": 1}) == {"type": "heartbeat"}
    assert client.ask({"type": "heartbeat"})["type"] == "servers_change"  # older clients


def test_its_end_frees_its_teachers_at_once(server, client, run):
    run(LocalTeacher, server.endpoint)
    run(LocalTeacher, server.endpoint)
    student = run(LocalStudent, server.endpoint)
    wait_until(lambda: len(student.teachers) == 2)
    assert len(client.ask(REGISTER)["servers"]) == 1
    wait_until(lambda: len(student.teachers) == 1)
    client.close()
    wait_until(lambda: len(student.teachers) == 2)


# --- what is wrong


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "type: expected one of register, heartbeat,"),
        ({"type": None}, "type: expected one of"),
        ({"type": ["register"]}, "type: expected one of"),
        ({"type": "nonsense"}, "got 'nonsense'"),
        ({"type": "heartbeat", "version": 0}, "is not that of a student: register first"),
        (REPORT, "is not that of a student: register first"),
        ({"type": "leave"}, "is not that of a student: register first"),
        ({"type": "heartbeat", "version": "1"}, "version: expected an integer"),
        (without(REGISTER, "service_name"), "service_name: expected .* got None"),
        ({**REGISTER, "service_name": "a*"}, "service_name: expected"),
        ({**REGISTER, "service_name": "a/nodes/b"}, "service_name: expected"),
        ({**REGISTER, "service_name": "x" * 200}, "service_name: expected"),
        ({**REGISTER, "num": 0}, "num: expected an integer of 1"),
        ({**REGISTER, "num": True}, "num: expected an integer"),
        ({**REGISTER, "num": 1.5}, "num: expected an integer"),
        ({**REGISTER, "seq": -1}, "seq: expected an integer"),
        ({**HELLO, "held": "127.0.0.1:1"}, "held: expected up to"),
        ({**HELLO, "held": ["nowhere"]}, "held: expected HOST:PORT"),
        ({**HELLO, "held": ["h:1"] * 2000}, "held: expected up to"),
        ({**HELLO, "session": 0}, "session: expected"),
        ({**HELLO, "student": ""}, "student: expected"),
        ({**HELLO, "require": 10**9}, "require: expected"),
        (without(BEAT, "server"), "server: expected HOST:PORT"),
        ({**BEAT, "server": "h:70000"}, "server: expected HOST:PORT"),
        ({**BEAT, "server": "h:1\r\n"}, "server: expected HOST:PORT"),
        ({**BEAT, "lease_s": 0}, "lease_s: expected 0.5 to 600"),
        ({**BEAT, "lease_s": "x"}, "lease_s: expected a number"),
        ({**BEAT, "info": "x" * 10_000}, "info: expected a text"),
        ({**BEAT, "info": "\ud800"}, "info: expected a text"),
        ({"type": "withdraw", "service": "svc"}, "server: expected"),
    ],
)
def test_what_is_wrong_is_said_by_field_and_the_connection_goes_on(client, body, words):
    answer = client.ask(body)
    assert answer["type"] == "error"
    assert re.search(words, answer["error"]), answer["error"]
    assert client.ask(REGISTER)["type"] == "register"


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (without(REPORT, "require"), "require: expected"),
        ({**REPORT, "wait_share": "much"}, "wait_share: expected a number"),
        ({**REPORT, "samples_per_s": -1}, "samples_per_s: expected a number"),
        ({**REPORT, "measured": []}, "measured: expected up to"),
        ({**REPORT, "measured": {"h:1": 5}}, "measured: expected .samples_per_s"),
        ({**REPORT, "measured": {"h": [1, 1]}}, "measured: expected HOST:PORT"),
        ({**REPORT, "measured": {"h:1": [None, 1]}}, "measured: expected a number"),
        ({**REPORT, "unusable": {}}, "unusable: expected up to"),
        ({**REPORT, "unusable": ["h:1"] * 1000}, "unusable: expected up to"),
        ({**REPORT, "unusable": ["h"]}, "unusable: expected HOST:PORT"),
        (HELLO, "is already that of student me"),
        (REGISTER, "is already that of student me"),
    ],
)
def test_a_students_wrong_report_is_refused_and_it_stays_a_student(client, report, words):
    client.send(encode(HELLO))
    assert [client.receive()["type"] for _ in range(2)] in (["ok", "teachers"], ["teachers", "ok"])
    answer = client.ask(report)
    assert answer["type"] == "error"
    assert re.search(words, answer["error"]), answer["error"]
    assert client.ask(REPORT) == {"type": "ok"}


def test_no_numbers_that_a_student_reports_keep_others_from_hearing_of_changes(server, client, run):
    first, second = run(LocalTeacher, server.endpoint), run(LocalTeacher, server.endpoint)
    student = run(LocalStudent, server.endpoint)
    wait_until(lambda: len(server.teachers()) == 2)
    client.send(encode(HELLO))
    measured = {first.endpoint: [1e299, 1], second.endpoint: [1e-299, 1]}
    client.send(encode({**REPORT, "measured": measured}))
    third = run(LocalTeacher, server.endpoint)
    wait_until(lambda: third.endpoint in server.teachers())
    first.close()
    second.close()
    wait_until(lambda: student.teachers == {third.endpoint})


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b'"text"', b"nan", b"\xff\xfe", b"[" * 50_000, b'{"a":NaN}']
)
def test_a_body_that_is_no_object_is_refused_and_the_connection_goes_on(client, data):
    client.send(HEAD.pack(MAGIC, HEAD.size + len(data)) + data)
    answer = client.receive()
    assert answer["type"] == "error"
    assert "a message is a JSON object" in answer["error"]
    assert client.ask(REGISTER)["type"] == "register"


@pytest.mark.parametrize("token", ["", "s3cret"])
def test_nothing_that_a_stranger_sends_writes_a_traceback(redis_server, run, caplog, token):
    server = run(LocalDiscovery, redis_server.url, config=replace(PATIENT, token=token))
    texts = [
        b'{"type": "teacher", "service": "svc", "server": "h:1", "lease_s": 5, "info": "\\ud800"}',
        b'{"type": "student", "token": "\\ud800", "service": "svc", "student": "a", "session": 1}',
        b'{"type": "meet", "nonce": "\\ud800"}',
        b'{"type": "prove", "proof": "\\ud800"}',
        b'{"type": "\\ud800"}',
        b'{"type": "register", "service_name": "\\ud800", "seq": 1, "num": 1}',
        b'{"type": "register", "service_name": "svc", "seq": 1, "num": ' + b"9" * 5000 + b"}",
        b'{"type": ' + b"[" * 50_000 + b"}",
    ]
    for text in texts:
        client = run(RawClient, server.endpoint)
        client.send(HEAD.pack(MAGIC, HEAD.size + len(text)) + text)
        assert client.receive()
    for request in (
        b"GET /services\xff HTTP/1.1\r\nAuthorization: Bearer \xff\r\n\r\n",
        b"GET " + b"x" * 100_000,
    ):
        client = run(RawClient, server.endpoint)
        client.send(request)
        with suppress(ConnectionError):
            client.sock.recv(100)
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (b"EDLT" + bytes(4), "begins with CB EF 00 00"),
        (HEAD.pack(MAGIC, 0), "length: expected 8 to"),
        (HEAD.pack(MAGIC, -1), "length: expected 8 to"),
        (HEAD.pack(MAGIC, MAX_REQUEST_BYTES + 1), "length: expected 8 to"),
        (HEAD.pack(MAGIC, 2**31 - 1), "length: expected 8 to"),
    ],
)
def test_behind_a_wrong_head_nothing_can_be_read_so_the_connection_ends(
    server, client, run, head, words
):
    client.send(head + b"x" * 5000)
    answer = client.receive()
    assert words in answer["error"]
    assert client.is_ended()
    assert run(RawClient, server.endpoint).ask(REGISTER)["type"] == "register"


def test_a_message_may_come_byte_by_byte_and_two_at_once(client):
    for byte in encode(REGISTER):
        client.send(bytes([byte]))
    assert client.receive()["type"] == "register"
    client.send(encode({"type": "heartbeat", "version": 0}) * 2)
    assert [client.receive()["type"] for _ in range(2)] == ["heartbeat", "heartbeat"]


class TestPatience:
    @pytest.fixture
    def server(self, run):
        return run(LocalDiscovery, config=DiscoveryServerConfig(first_s=0.2))

    def test_who_says_nothing_is_dropped(self, client):
        assert client.is_ended()

    def test_who_stops_amid_a_message_is_dropped(self, client, monkeypatch):
        monkeypatch.setattr("distill_reader.balance.wire.server_connection._STALL_S", 0.1)
        client.send(encode(REGISTER)[:20])
        assert client.is_ended()

    def test_a_student_that_falls_silent_is_dropped_and_its_teachers_are_free(self, run):
        server = run(LocalDiscovery, config=replace(PATIENT, silent_s=0.3, return_s=0.05))
        client = run(RawClient, server.endpoint)
        assert client.ask(HELLO)["type"] in ("ok", "teachers")
        wait_until(lambda: server.server.balancer.students == 0)

    def test_beyond_the_most_connections_new_ones_are_refused(self, run):
        server = run(LocalDiscovery, config=replace(PATIENT, max_connections=1))
        first = run(RawClient, server.endpoint)
        assert first.ask(REGISTER)["type"] == "register"
        assert run(RawClient, server.endpoint).is_ended()
        assert first.ask({"type": "heartbeat"})["type"] == "heartbeat"

    def test_a_server_without_file_descriptors_says_so_now_and_then_and_goes_on(
        self, run, monkeypatch, caplog
    ):
        """It wrote three megabytes of log a second."""
        accept = socket.socket.accept
        tries = []

        def fail(listener):
            tries.append(listener)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        server = run(LocalDiscovery)
        monkeypatch.setattr("socket.socket.accept", fail)
        client = run(RawClient, server.endpoint)
        wait_until(lambda: len(tries) > 1)
        monkeypatch.setattr("socket.socket.accept", accept)
        assert client.ask(REGISTER)["type"] == "register"
        assert len(tries) < 10
        said = [each for each in caplog.messages if "accept" in each]
        assert len(said) == 1
        assert "Too many open files: raise its hard limit (ulimit -Hn" in said[0]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=10,
)
FIELDS = sorted({*REGISTER, *HELLO, *REPORT, *BEAT, "version", "unusable"})


@given(
    kind=st.sampled_from(["register", "heartbeat", "student", "report", "teacher", "withdraw"]),
    body=st.dictionaries(st.sampled_from(FIELDS), json_values),
)
@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_fields_are_answered(server, kind, body):
    client = RawClient(server.endpoint)
    assert client.ask({**body, "type": kind})["type"] in ("register", "ok", "error", "teachers")
    client.close()


# --- who may


class TestToken:
    @pytest.fixture
    def server(self, run):
        return run(LocalDiscovery, config=replace(PATIENT, token="s3cret"))

    @pytest.mark.parametrize("body", [REGISTER, HELLO, BEAT])
    @pytest.mark.parametrize("token", [None, "wrong", 7, ["s3cret"]])
    def test_who_does_not_know_it_is_refused(self, server, client, body, token):
        answer = client.ask({**body, "token": token})
        assert "token: this server wants one; set EDL_TEACHER_TOKEN" in answer["error"]
        assert client.is_ended()
        assert not server.teachers()

    def test_who_does_not_prove_it_is_dropped_in_time_whatever_he_says(self, run):
        server = run(LocalDiscovery, config=replace(PATIENT, token="s3cret", first_s=0.5))
        client = run(RawClient, server.endpoint)

        def say_on() -> None:
            for _ in range(600):
                assert client.ask({"type": "meet", "nonce": "1"})["type"] == "challenge"
                time.sleep(0.05)

        with pytest.raises((ConnectionError, AssertionError), match=r"closed|reset|pipe"):
            say_on()

    def test_a_stranger_cannot_have_the_server_hold_much_for_him(self, client):
        client.send(HEAD.pack(MAGIC, MAX_STRANGERS_BYTES + 1))
        assert "length: expected 8 to 16384" in client.receive()["error"]
        assert client.is_ended()

    def test_who_knows_it_is_taken(self, server, run):
        teacher = run(LocalTeacher, server.endpoint, token="s3cret")
        student = run(LocalStudent, server.endpoint, token="s3cret")
        wait_until(lambda: student.teachers == {teacher.endpoint})

    def test_a_new_token_is_shown_to_a_server_that_is_started_with_it(self, run, monkeypatch):
        for module in ("client", "registry.registrar"):
            monkeypatch.setattr(f"distill_reader.balance.{module}._REFUSED_RETRY_S", 0.1)
        before = run(LocalDiscovery, config=replace(PATIENT, token="first"))
        teacher = run(LocalTeacher, before.endpoint, token="first")
        student = run(LocalStudent, before.endpoint, token="first")
        wait_until(lambda: student.teachers == {teacher.endpoint})
        before.close()
        server = run(LocalDiscovery, port=before.port, config=replace(PATIENT, token="second"))
        another = run(LocalTeacher, server.endpoint, token="second")
        wait_until(lambda: server.teachers() == {another.endpoint})
        teacher.token = student.token = "second"
        wait_until(lambda: student.teachers == {teacher.endpoint, another.endpoint})

    def test_students_of_the_original_are_taken_if_so_told(self, run):
        config = replace(PATIENT, token="s3cret", is_open_to_legacy=True)
        server = run(LocalDiscovery, config=config)
        client = run(RawClient, server.endpoint)
        assert client.ask(REGISTER)["type"] == "register"
        assert client.ask({"type": "heartbeat", "version": 0}) == {"type": "heartbeat"}
        assert "token" in run(RawClient, server.endpoint).ask(HELLO)["error"]

    @pytest.mark.parametrize(
        "body",
        [BEAT, {"type": "withdraw", "service": "svc", "server": "10.0.0.1:1"}, HELLO, REPORT],
    )
    def test_a_student_of_the_original_may_do_nothing_else(self, run, body):
        """It may neither register teachers, to which students would come, nor withdraw them."""
        server = run(
            LocalDiscovery, config=replace(PATIENT, token="s3cret", is_open_to_legacy=True)
        )
        teacher = run(LocalTeacher, server.endpoint, token="s3cret")
        wait_until(server.teachers)
        client = run(RawClient, server.endpoint)
        client.ask(REGISTER)
        assert "token: this server wants one" in client.ask(body)["error"]
        assert client.is_ended()
        assert server.teachers() == {teacher.endpoint}

    @pytest.mark.parametrize("token", ["\ud800", "\xff", "wrong"])
    def test_a_token_of_any_characters_is_refused(self, server, client, token):
        assert "token: this server wants one" in client.ask({**HELLO, "token": token})["error"]
        assert client.is_ended()

    def test_those_of_the_release_before_send_it_and_are_taken(self, server, client):
        assert client.ask({**BEAT, "token": "s3cret"}) == {"type": "ok"}
        assert client.ask(BEAT) == {"type": "ok"}  # once is enough, on a connection
        wait_until(server.teachers)

    def test_a_proof_of_another_token_or_from_before_is_refused(self, server, run):
        client = run(RawClient, server.endpoint)
        assert "expected once, after meet" in client.ask({"type": "prove", "proof": "x"})["error"]
        nonce = client.ask({"type": "meet", "nonce": "mine"})["nonce"]
        proof = prove("s3cret", "discovery client", "mine", nonce)
        other = run(RawClient, server.endpoint)
        assert other.ask({"type": "meet", "nonce": "mine"})["nonce"] != nonce
        assert "has another one" in other.ask({"type": "prove", "proof": proof})["error"]
        assert other.is_ended()
        answer = client.ask({"type": "prove", "proof": proof})
        assert answer == {
            "type": "ok",
            "proof": prove("s3cret", "discovery server", "mine", nonce),
        }
        assert client.ask(BEAT) == {"type": "ok"}

    def test_who_has_a_token_says_nothing_to_a_server_that_does_not_prove_it(self, run, caplog):
        """It never sends the token, so that a server that lies about itself learns nothing."""
        server = run(LocalDiscovery)
        student = run(LocalStudent, server.endpoint, token="s3cret")
        wait_until(lambda: "does not prove that it knows the token: start it" in caplog.text)
        assert not student.told
        assert not server.server.balancer.students

    def test_people_need_it_too(self, server):
        def status(path: str, **headers: str) -> int:
            with requests.Session() as session:
                session.trust_env = False
                url = f"http://{server.endpoint}{path}"
                return session.get(url, headers=headers, timeout=20).status_code

        assert status("/health") == 200
        assert status("/services") == 401
        assert status("/services", Authorization="Bearer wrong") == 401
        assert status("/metrics", Authorization="Bearer s3cret") == 200


def test_people_and_prometheus_see_who_is_there(server, client, run):
    teacher = run(LocalTeacher, server.endpoint)
    student = run(LocalStudent, server.endpoint)
    wait_until(lambda: student.teachers == {teacher.endpoint})
    client.ask({"type": "nonsense"})
    with requests.Session() as session:
        session.trust_env = False
        seen = session.get(f"http://{server.endpoint}/services", timeout=20).json()
        metrics = session.get(f"http://{server.endpoint}/metrics", timeout=20).text
        assert session.get(f"http://{server.endpoint}/nowhere", timeout=20).status_code == 404
    assert seen["registry"] == "ok"
    service = seen["services"]["svc"]
    assert service["teachers"] == [teacher.endpoint]
    assert [each["teachers"] for each in service["students"].values()] == [[teacher.endpoint]]
    assert 'edl_discovery_links{service="svc"} 1.0' in metrics
    assert 'edl_discovery_messages_total{outcome="refused",type="?"} 1.0' in metrics
    assert "nonsense" not in metrics
