"""Teachers behind an ingress: TLS by an authority of one's own, headers, a path of HTTP."""

import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distill_reader import DistillReader
from distill_reader.balance.registry.registrar import PortProbe
from distill_reader.balance.tasks import run as run_loop
from distill_reader.errors import TeacherGone, TeacherTimeout, UsageError
from distill_reader.student.clients.access import TeacherAccess, access_of
from distill_reader.student.clients.connect import connect
from distill_reader.student.clients.endpoints import parse_endpoint
from tests.authority import Authority, make_authority
from tests.distill_reader.balance.local_discovery import LocalDiscovery
from tests.distill_reader.student.foreign_teachers import (
    HttpTeacher,
    OipGrpcTeacher,
    Reply,
    answer_oip,
    slowly,
)
from tests.distill_reader.student.local_teacher import LocalService, LocalTeacher, sums
from tests.support import wait_until

IMAGE = np.arange(12, dtype="f4").reshape(2, 2, 3)
WORDS = np.array([[1, 5], [7, 2]])
FEEDS = {"image": [IMAGE], "words": [WORDS]}
HEADERS = {"Authorization": "Bearer of-the-ingress", "X-Team": "vision"}


@pytest.fixture(scope="module")
def authority(tmp_path_factory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("authority"))


class Ingress:
    """An HTTP server by TLS, before a teacher that it finds by `/team/a` alone."""

    def __init__(self, authority: Authority, *, path: str = "/team/a") -> None:
        self.seen: list[Mapping[str, str]] = []  # headers of the requests
        self.answer = answer_oip

        def answer(method: str, asked: str, headers: Mapping[str, str], body: bytes) -> Reply:
            self.seen.append(headers)
            if not asked.startswith(f"{path}/"):
                return 404, {}, b"default backend - 404"
            return self.answer(method, asked.removeprefix(path), headers, body)

        self.teacher = HttpTeacher(answer, authority.context())
        self.port = self.teacher.port

    def close(self) -> None:
        self.teacher.close()


@pytest.fixture
def ingress(authority) -> Iterator[Ingress]:
    ingress = Ingress(authority)
    yield ingress
    ingress.close()


def check(client: Any) -> None:
    outputs = client.predict(FEEDS, ["total", "longest"], timeout_s=30)
    expected = sums({"image": IMAGE, "words": WORDS})
    for name, array in outputs.items():
        np.testing.assert_array_equal(array, expected[name])


# --- endpoints


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://h/m", ("h", 443, "", "m", "oip-http", True)),
        ("https://h:8443/team/a/m", ("h", 8443, "/team/a", "m", "oip-http", True)),
        ("http://h:1/team/m", ("h", 1, "/team", "m", "oip-http", False)),
        ("grpcs://h", ("h", 443, "", "", "oip-grpc", True)),
        ("grpcs://[::1]:7/m", ("::1", 7, "", "m", "oip-grpc", True)),
    ],
)
def test_endpoints_behind_an_ingress_are_understood(text, expected):
    target = parse_endpoint(text)
    assert (
        target.host, target.port, target.prefix, target.model, target.protocol, target.is_tls
    ) == expected  # fmt: skip


# --- TLS, path and headers together


def test_a_teacher_by_https_behind_a_path_is_shown_the_headers(authority, ingress):
    access = access_of(HEADERS, authority.ca_file)
    client = connect(f"https://localhost:{ingress.port}/team/a/sums", access=access, token="other")
    check(client)
    client.close()
    for headers in ingress.seen:
        assert headers["Authorization"] == "Bearer of-the-ingress"
        assert headers["X-Team"] == "vision"
        assert headers["Host"] == f"localhost:{ingress.port}"


def test_a_token_is_shown_where_no_header_replaces_it(authority, ingress):
    access = access_of({"X-Team": "vision"}, authority.ca_file)
    connect(f"https://localhost:{ingress.port}/team/a/sums", access=access, token="secret").close()
    assert {headers["Authorization"] for headers in ingress.seen} == {"Bearer secret"}


def test_a_teacher_by_grpcs_is_shown_the_headers(authority, run):
    teacher = run(OipGrpcTeacher, credentials=authority.credentials())
    access = access_of(HEADERS, authority.ca_file)
    client = connect(f"grpcs://localhost:{teacher.port}/sums", access=access, token="other")
    check(client)
    client.close()
    (shown,) = teacher.metadata
    assert (shown["authorization"], shown["x-team"]) == ("Bearer of-the-ingress", "vision")


def test_headers_are_shown_without_tls_too(run):
    seen: list[Mapping[str, str]] = []

    def answer(method: str, path: str, headers: Mapping[str, str], body: bytes) -> Reply:
        seen.append(headers)
        return answer_oip(method, path, headers, body)

    http_teacher, grpc_teacher = run(HttpTeacher, answer), run(OipGrpcTeacher)
    for endpoint in (f"http://{http_teacher.endpoint}/sums", f"grpc://{grpc_teacher.endpoint}"):
        check(run(connect, endpoint, access=access_of(HEADERS, None)))
    assert all(headers["X-Team"] == "vision" for headers in seen)
    assert grpc_teacher.metadata[0]["x-team"] == "vision"


def test_the_header_host_says_which_teacher_and_whose_certificate(authority, ingress, run):
    access = access_of({"Host": "teachers.test"}, authority.ca_file)
    client = connect(f"https://127.0.0.1:{ingress.port}/team/a/sums", access=access)
    check(client)
    client.close()
    assert {headers["Host"] for headers in ingress.seen} == {"teachers.test"}
    teacher = run(OipGrpcTeacher, credentials=authority.credentials())
    client = connect(f"grpcs://127.0.0.1:{teacher.port}/sums", access=access)
    check(client)
    client.close()


def test_a_connection_that_the_ingress_has_closed_is_opened_again(authority, ingress):
    def hang_up(method: str, path: str, headers: Mapping[str, str], body: bytes) -> Reply:
        status, answered, content = answer_oip(method, path, headers, body)
        return status, {**answered, "X-Hang-Up": "1"}, content

    ingress.answer = hang_up
    access = access_of(None, authority.ca_file)
    client = connect(f"https://localhost:{ingress.port}/team/a/sums", access=access)
    for _ in range(3):
        check(client)
    client.close()
    assert ingress.teacher.connections > 3


def test_large_requests_come_through(authority, ingress):
    access = access_of(None, authority.ca_file)
    client = connect(f"https://localhost:{ingress.port}/team/a/sums", access=access)
    image, words = np.ones((50_000, 2, 3), "f4"), np.ones((50_000, 40), "i8")  # 17 MB
    outputs = client.predict({"image": [image], "words": [words]}, ["total"], timeout_s=60)
    assert outputs["total"].shape == (50_000, 1)
    assert (outputs["total"] == 6).all()
    client.close()


def test_closing_wakes_who_waits_for_an_answer_by_tls(authority, ingress):
    waiting, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        waiting.set()
        go_on.wait(60)

    ingress.answer = slowly(answer_oip, wait)
    access = access_of(None, authority.ca_file)
    client = connect(f"https://localhost:{ingress.port}/team/a/sums", access=access)
    errors: list[Exception] = []

    def ask() -> None:
        try:
            check(client)
        except TeacherGone as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert waiting.wait(30)
    client.close()
    thread.join(30)
    go_on.set()
    assert len(errors) == 1


def test_an_answer_by_tls_has_its_time(authority, ingress):
    go_on = threading.Event()
    ingress.answer = slowly(answer_oip, lambda: go_on.wait(60))
    access = access_of(None, authority.ca_file)
    client = connect(f"https://localhost:{ingress.port}/team/a/sums", access=access)
    with pytest.raises(TeacherTimeout, match=r"no answer within 0.2 s"):
        client.predict(FEEDS, [], timeout_s=0.2)
    go_on.set()


# --- what is wrong is named


@pytest.fixture(params=["https", "grpcs"])
def guarded(request, authority, run) -> str:
    """A teacher by TLS; returns SCHEME://{}:PORT/MODEL."""
    if request.param == "https":
        teacher = run(HttpTeacher, answer_oip, authority.context())
    else:
        teacher = run(OipGrpcTeacher, credentials=authority.credentials())
    return f"{request.param}://{{}}:{teacher.port}/sums"


def test_another_authority_is_named_with_the_remedy(guarded, tmp_path):
    endpoint = guarded.format("localhost")
    other = make_authority(tmp_path)
    for access in (TeacherAccess(), access_of(None, other.ca_file)):
        with pytest.raises(UsageError, match=f"{endpoint}: its certificate is not trusted as") as e:
            connect(endpoint, access=access)
        assert "set_teacher_access(ca_file=" in str(e.value)


def test_a_certificate_of_another_name_is_named_with_the_remedy(guarded, authority):
    endpoint = guarded.format("127.0.0.1")
    with pytest.raises(UsageError, match=f"{endpoint}: .* not trusted as 127.0.0.1: .*Host"):
        connect(endpoint, access=access_of(None, authority.ca_file))


def test_a_certificate_that_is_over_is_said_to_be_with_the_remedy(run, tmp_path):
    old = make_authority(tmp_path, is_over=True)
    endpoint = f"https://localhost:{run(HttpTeacher, answer_oip, old.context()).port}/sums"
    with pytest.raises(UsageError, match=rf"{endpoint}: .* has expired; renew it there.* clock"):
        connect(endpoint, access=access_of(None, old.ca_file))


def test_a_server_without_tls_is_named_with_the_remedy(run, authority):
    plain = run(HttpTeacher, answer_oip)
    for scheme in ("https", "grpcs"):
        endpoint = f"{scheme}://localhost:{plain.port}/sums"
        with pytest.raises(UsageError, match=f"{endpoint}: no TLS is spoken there"):
            connect(endpoint, access=access_of(None, authority.ca_file))


def test_a_port_where_nobody_listens_may_come_back(authority, free_endpoint):
    port = free_endpoint.rpartition(":")[2]
    for scheme in ("https", "grpcs"):
        with pytest.raises(TeacherGone, match=f"{scheme}://localhost:{port}/m: "):
            connect(f"{scheme}://localhost:{port}/m", access=access_of(None, authority.ca_file))


def test_a_path_that_is_missing_is_named_with_the_remedy(authority, ingress):
    endpoint = f"https://localhost:{ingress.port}/sums"
    with pytest.raises(UsageError, match=rf"{endpoint}: HTTP 404 .*a path may be missing"):
        connect(endpoint, access=access_of(None, authority.ca_file))
    endpoint = f"https://localhost:{ingress.port}/team/b/sums"
    with pytest.raises(UsageError, match=r"HTTP 404 for /team/b/v2/health/live"):
        connect(endpoint, access=access_of(None, authority.ca_file))


def test_an_ingress_that_sends_elsewhere_says_where(run):
    there = "https://teachers.test/sums"
    teacher = run(HttpTeacher, lambda *_: (308, {"Location": there}, b""))
    endpoint = f"http://{teacher.endpoint}/sums"
    with pytest.raises(UsageError, match=f"{endpoint}: HTTP 308: .*to {there}: name that"):
        connect(endpoint)


def test_an_ingress_that_wants_to_know_who_asks_says_so(run):
    teacher = run(HttpTeacher, lambda *_: (401, {}, b"who are you?"))
    with pytest.raises(UsageError, match=r"who are you.*set_teacher_access\(headers="):
        connect(f"http://{teacher.endpoint}/sums")


def test_headers_are_never_left_out_in_silence(run):
    teacher = run(LocalTeacher, LocalService())
    with pytest.raises(UsageError, match="the fast path has no headers"):
        connect(f"fast://{teacher.endpoint}", access=access_of(HEADERS, None))
    with pytest.raises(TeacherGone, match="tried: oip-grpc"):  # it speaks nothing else
        connect(teacher.endpoint, access=access_of(HEADERS, None))


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({"": "x"}, "headers: '' cannot be set"),
        ({"a b": "x"}, "headers: 'a b' cannot be set"),
        ({"Content-Length": "5"}, "headers: 'Content-Length' cannot be set"),
        ({"grpc-timeout": "5"}, "headers: 'grpc-timeout' cannot be set"),
        ({"key-bin": "5"}, "headers: 'key-bin' cannot be set"),
        ({"X-Key": "se\ncret"}, "headers: X-Key: expected printable ASCII"),
        ({"X-Key": "secret\n"}, "is a line break at the end"),
        ({"X-Key": ""}, "headers: X-Key: expected printable ASCII"),
        ({"X-Key": 5}, "headers: 'X-Key': expected two texts"),
        ({"X-Key": "secret", "x-key": "secret"}, "headers: X-Key: is given twice"),
        ({"Host": "a/b"}, "headers: Host: expected NAME or NAME:PORT"),
    ],
)
def test_a_header_that_cannot_be_sent_is_refused_without_its_value(headers, words):
    with pytest.raises(UsageError, match=words) as caught:
        access_of(headers, None)
    assert "secret" not in str(caught.value)


def test_a_file_without_certificates_is_refused_by_name(tmp_path):
    for content in (None, "", "no certificate"):
        file = tmp_path / "ca.pem"
        if content is not None:
            file.write_text(content)
        with pytest.raises(UsageError, match=f"ca_file: {file}: "):
            access_of(None, str(file))


def test_a_file_of_certificates_that_is_about_to_be_written_is_waited_for(
    guarded, authority, tmp_path
):
    file = tmp_path / "ca.pem"
    file.write_bytes(Path(authority.ca_file).read_bytes())
    access = access_of(None, str(file))
    file.write_bytes(b"")
    with pytest.raises(TeacherGone, match=f"ca_file: {file}: "):
        connect(guarded.format("localhost"), access=access)
    file.write_bytes(Path(authority.ca_file).read_bytes())
    connect(guarded.format("localhost"), access=access).close()


# --- the reader


def samples() -> Iterator[tuple[Any, Any]]:
    for _ in range(4):
        yield IMAGE, WORDS


def read(reader: DistillReader) -> list[Any]:
    return [total for *_, total in reader.set_batch_generator(samples)()]


def test_a_reader_learns_from_a_teacher_behind_an_ingress(authority, ingress, capsys):
    reader = DistillReader(["image", "words"], ["total"])
    reader.set_fixed_teacher([f"https://localhost:{ingress.port}/team/a/sums"])
    reader.set_teacher_access(HEADERS, ca_file=authority.ca_file)
    expected = sums({"image": IMAGE, "words": WORDS})["total"]
    for total in read(reader):
        np.testing.assert_array_equal(total, expected)
    assert all(headers["X-Team"] == "vision" for headers in ingress.seen)
    reader.print_config()
    printed = capsys.readouterr().out
    assert "Authorization, X-Team" in printed
    assert "of-the-ingress" not in printed


def test_a_reader_raises_what_is_wrong_with_its_only_teacher(ingress):
    endpoint = f"https://localhost:{ingress.port}/team/a/sums"
    reader = DistillReader(["image", "words"], ["total"]).set_fixed_teacher([endpoint])
    with pytest.raises(UsageError, match=f"{endpoint}: its certificate is not trusted"):
        read(reader)


def test_a_token_that_is_changed_while_connections_are_idle_ends_no_reading(
    run, tmp_path, monkeypatch
):
    wanted, file, is_changed = ["one-token"], tmp_path / "token", threading.Event()

    def answer(method: str, path: str, headers: Mapping[str, str], body: bytes) -> Reply:
        if "/models/" in path and headers.get("Authorization") != f"Bearer {wanted[0]}":
            return 401, {}, b"who are you?"
        status, answered, content = answer_oip(method, path, headers, body)
        return status, {**answered, "X-Hang-Up": "1"}, content  # as one that is started again

    def batches() -> Iterator[tuple[Any, Any]]:
        yield IMAGE, WORDS
        is_changed.wait(20)
        yield IMAGE, WORDS

    file.write_text(wanted[0])
    monkeypatch.setenv("EDL_TEACHER_TOKEN_FILE", str(file))
    reader = DistillReader(["image", "words"], ["total"]).set_batch_generator(batches)
    reader.set_fixed_teacher([f"http://{run(HttpTeacher, answer).endpoint}/sums"])
    iterator = reader()
    next(iterator)
    wanted[0] = "another-token"
    file.write_text(wanted[0])
    is_changed.set()
    assert len(list(iterator)) == 1


def test_a_reader_is_told_of_a_teacher_behind_an_ingress_by_discovery(authority, ingress, run):
    from distill_reader.balance.addresses import registry_addresses
    from distill_reader.balance.registry.registrar import RegistrarConfig, RegistrarThread

    server = run(LocalDiscovery)
    endpoint = f"https://localhost:{ingress.port}/team/a/sums"
    registrar = RegistrarThread(
        RegistrarConfig(
            addresses=registry_addresses(server.endpoint, "where"), service="svc", server=endpoint
        ),
        lambda: True,
    )
    registrar.start()
    try:
        wait_until(lambda: server.teachers() == {endpoint})
        reader = DistillReader(["image", "words"], ["total"])
        reader.set_dynamic_teacher([server.endpoint], "svc")
        reader.set_teacher_access(HEADERS, ca_file=authority.ca_file)
        assert len(read(reader)) == 4
    finally:
        registrar.stop()


# --- who registers it


def test_a_registrar_asks_for_readiness_by_tls_and_path(authority, ingress, caplog):
    ready = [200]

    def answer(method: str, path: str, headers: Mapping[str, str], body: bytes) -> Reply:
        return ready[0], {}, json.dumps(path == "/v2/health/ready").encode()

    ingress.answer = answer
    endpoint = f"https://localhost:{ingress.port}/team/a/sums"

    async def probe(times: int, ca_file: str | None) -> list[bool]:
        ask = PortProbe(endpoint, ca_file=ca_file)
        return [await ask() for _ in range(times)]

    assert run_loop(probe(2, authority.ca_file)) == [True, True]
    ready[0] = 503
    assert run_loop(probe(1, authority.ca_file)) == [False]
    assert run_loop(probe(2, None)) == [False, False]
    assert caplog.text.count("its certificate is not trusted as localhost") == 1
    assert "--ca_file" in caplog.text


def test_a_registrar_trusts_an_authority_that_was_renewed(authority, run, tmp_path):
    new, ca_file = make_authority(tmp_path), tmp_path / "trusted.pem"
    ca_file.write_bytes(Path(authority.ca_file).read_bytes())
    context = authority.context()
    teacher = run(HttpTeacher, lambda *_: (200, {}, b""), context)

    async def probe() -> list[bool]:
        ask = PortProbe(f"https://localhost:{teacher.port}/m", ca_file=str(ca_file))
        found = [await ask()]
        context.load_cert_chain(new.chain_file, new.key_file)
        ca_file.unlink()  # for a moment, as it is written
        found.append(await ask())
        ca_file.write_bytes(Path(new.ca_file).read_bytes())
        return [*found, await ask(), await ask()]

    assert run_loop(probe()) == [True, False, False, True]
