"""Ranks meet before they form a group. Real sockets, threads for ranks."""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from pod_runtime.trainer.errors import PeerLost
from pod_runtime.trainer.frameworks import meeting
from pod_runtime.trainer.frameworks.meeting import CalledOffError, meet, wait_for
from tests.support import free_port, wait_until

Come = Callable[..., "Future[None]"]


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def off() -> threading.Event:
    return threading.Event()


@pytest.fixture
def come(port: int, off: threading.Event) -> Iterator[Come]:
    """Have a rank come to the meeting; all are called off when the test ends."""
    with ThreadPoolExecutor(8) as pool:

        def begin(rank: int, *, name: str = "g", world_size: int = 3, timeout_s: float = 60.0):
            return pool.submit(
                meet,
                f"127.0.0.1:{port}",
                name=name,
                rank=rank,
                world_size=world_size,
                is_off=off.is_set,
                timeout_s=timeout_s,
            )

        yield begin
        off.set()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def listen(port: int) -> None:
    """Listen as a framework does, for a moment."""
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("", port))
        again.listen()


@contextlib.contextmanager
def forked() -> Iterator[None]:
    """Have a child that has this process's sockets, and does nothing."""
    if (pid := os.fork()) == 0:
        while True:
            signal.pause()
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_nobody_leaves_before_the_last_has_come_and_the_port_is_free_again(come: Come, port: int):
    ranks = [come(2), come(0)]
    wait_until(lambda: listens(port))
    assert not any(rank.done() for rank in ranks)
    ranks.append(come(1))
    for rank in ranks:
        rank.result(30)
    listen(port)


@pytest.mark.full  # forks
def test_a_process_that_is_forked_meanwhile_keeps_neither_the_port_nor_a_seat(come, port):
    first = come(0)
    wait_until(lambda: listens(port))
    leaver = come(1, timeout_s=0.5)
    time.sleep(0.2)  # it has taken its seat by then; if not, this test sees less
    with forked():  # as a worker of the training's loader is
        with pytest.raises(TimeoutError, match="have come"):
            leaver.result(30)
        second = come(2)
        with pytest.raises(TimeoutError):
            first.result(0.3)
        third = come(1)
        for rank in (first, second, third):
            rank.result(30)
        listen(port)


def test_a_meeting_that_is_called_off_is_left_by_all_and_the_next_one_can_be_held(
    come: Come, off: threading.Event
):
    ranks = [come(0), come(1)]
    off.set()
    for rank in ranks:
        with pytest.raises(CalledOffError):
            rank.result(30)
    off.clear()
    for rank in [come(each, name="again") for each in (0, 1, 2)]:
        rank.result(30)


def test_strangers_ranks_of_other_meetings_and_those_who_hang_up_do_not_count(
    come: Come, port: int
):
    first = come(0)
    wait_until(lambda: listens(port))
    for line in (b"GET / HTTP/1.1\r\n\r\n", b"other 1\n", b"g 0\n", b"g 3\n", b"g x\n", b"x" * 500):
        with socket.create_connection(("127.0.0.1", port), 5) as stranger:
            stranger.sendall(line)
            stranger.settimeout(10)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(10) == b"", line
    with socket.create_connection(("127.0.0.1", port), 5) as leaver:
        leaver.sendall(b"g 1\n")
    second = come(2)
    with pytest.raises(TimeoutError):
        first.result(0.3)
    third = come(1)
    for rank in (first, second, third):
        rank.result(30)


def test_the_others_wait_until_rank_0_is_there(come: Come):
    late = come(1, world_size=2)
    with pytest.raises(TimeoutError):
        late.result(0.2)
    come(0, world_size=2).result(30)
    late.result(30)


def test_a_taken_port_and_a_rank_that_does_not_come_are_told(come: Come, port: int):
    with socket.socket() as taken:
        taken.bind(("", port))
        taken.listen()
        with pytest.raises(OSError, match="in use"):
            come(0).result(30)
    with pytest.raises(TimeoutError, match=r"not all ranks of g have come within 0\.2 s"):
        come(0, timeout_s=0.2).result(30)


@pytest.mark.parametrize("error", [TimeoutError("timed out"), OSError(113, "No route to host")])
def test_a_host_that_cannot_be_reached_is_given_up_with_the_remedy(monkeypatch, error):
    def connect(*_: object) -> socket.socket:
        raise error

    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr(meeting, "_UNREACHED_S", 0.05)
    with pytest.raises(
        PeerLost, match=rf"reached at 10\.0\.0\.1:29: .*{error.args[-1]}.*firewalls"
    ):
        wait_for("10.0.0.1:29", timeout_s=3600)


def test_a_host_that_does_not_listen_yet_is_waited_for(monkeypatch, port):
    monkeypatch.setattr(meeting, "_UNREACHED_S", 0.05)
    with pytest.raises(PeerLost, match=f"rank 0 does not listen at 127.0.0.1:{port}: .*refused"):
        wait_for(f"127.0.0.1:{port}", timeout_s=0.3)
