"""Connections to a running server: who trickles in, hangs up, or only watches bars nobody else."""

import contextlib
import socket

import pytest

from job_server.server import polls
from job_server.server.polls import Topic, Watchers, hung_up
from tests.job_server.serving import InThread, ServerProcess, running_server
from tests.support import wait_until


def connect(server: ServerProcess) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=40)


def receive_all(sock: socket.socket) -> bytes:
    received = b""
    while data := sock.recv(65536):
        received += data
    return received


@pytest.mark.full
def test_connections_that_trickle_in_lock_nobody_out_and_are_closed(tmp_path):
    with (
        running_server(tmp_path, "--no_job", "--max_watchers", "4") as server,
        contextlib.ExitStack() as opened,
        server.api() as api,
    ):
        trickles = []
        for begun in 50 * (b"G", b"GET /", b"", b"P", b"GET / HTTP/1.1\r\n"):
            slow = opened.enter_context(connect(server))
            slow.sendall(begun)
            trickles.append(slow)
        with server.api() as another:
            assert another.health().server_id
        for slow in trickles:
            answer = receive_all(slow)
            assert answer == b"" or answer.startswith(b"HTTP/1.1 408 ")
        assert api.jobs() == ()


@pytest.mark.full
def test_a_body_that_trickles_in_is_not_waited_for(tmp_path):
    head = b"POST /api/v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n"
    with running_server(tmp_path, "--no_job") as server, connect(server) as slow:
        slow.sendall(head + b"{")
        assert receive_all(slow) == b""


@pytest.mark.full
def test_requests_that_come_as_one_are_all_answered(tmp_path):
    with running_server(tmp_path, "--no_job") as server, connect(server) as client:
        client.sendall(b"GET /api/v1/health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 3)
        received = b""
        while received.count(b"HTTP/1.1 200") < 3:
            data = client.recv(4096)
            assert data, received
            received += data


@pytest.mark.full
def test_a_body_of_chunks_is_read(tmp_path):
    head = b"POST /api/v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n"
    body = b'{"job_id": "in-chunks"}'
    with running_server(tmp_path, "--no_job") as server, connect(server) as client:
        chunk = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        client.sendall(head + b"Connection: close\r\n\r\n" + chunk)
        assert receive_all(client).startswith(b"HTTP/1.1 201 ")


@pytest.mark.full
def test_a_long_answer_reaches_a_client_that_reads_slowly(tmp_path):
    with running_server(tmp_path, "--no_job") as server, connect(server) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(
            b"GET /api/v1/openapi.json HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
        )
        received = b""
        while data := client.recv(512):
            received += data
        head, _, body = received.partition(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        assert len(body) == length > 10_000


def test_who_hangs_up_gives_a_watchers_place_back(monkeypatch):
    monkeypatch.setattr(polls, "LOOK_S", 0.02)
    watchers = Watchers(1)
    news = Topic("first", lambda value, _revision: value.encode(), watchers, 7)
    gone: list[bool] = []

    def poll() -> None:
        hung_up.set(lambda: bool(gone))
        news.poll(7, 60)

    waits = InThread(poll)
    wait_until(lambda: watchers.count == 1)
    gone.append(True)
    waits.result()
    assert watchers.count == 0


@pytest.mark.full
def test_the_server_notices_that_a_watcher_has_hung_up(tmp_path):
    args = ("--max_watchers", "2", "--job_id", "j", "--change_script", "none")
    poll = b"GET /api/v1/jobs/j?revision=%d&timeout_s=60 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with running_server(tmp_path, *args) as server, server.api() as api:
        revision = api.status("j").revision
        for _ in range(6):
            with connect(server) as client:
                client.sendall(poll % revision)

        def has_a_place() -> bool:
            with connect(server) as client:
                client.settimeout(0.5)
                client.sendall(poll % revision)
                try:
                    return b"Retry-After" not in client.recv(65536)
                except TimeoutError:  # it waits for news
                    return True

        wait_until(has_a_place, 40, "a place is free")


def test_users_who_watch_leave_places_to_clients_and_launchers():
    watchers = Watchers(4)
    assert [watchers.enter(user=True) for _ in range(3)] == [True, True, False]
    assert [watchers.enter() for _ in range(3)] == [True, True, False]
    watchers.leave(user=True)
    assert watchers.enter(user=True)
