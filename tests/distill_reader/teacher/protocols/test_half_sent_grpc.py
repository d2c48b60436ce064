"""gRPC requests that begin and do not end: a teacher holds no more of them than its bound."""

import contextlib
import re
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.distill_reader.teacher.front_process import MAX_REQUEST_BYTES, MAX_UNFINISHED_BYTES
from tests.distill_reader.teacher.test_front import frame, grpc_begin
from tests.support import ROOT

CONNECTIONS = 24
SENT_BYTES = MAX_REQUEST_BYTES - (1 << 20)  # of each request; the last MiB never comes
# Buffers of the connections, and what the allocator keeps of those that were ended.
OVERHEAD_BYTES = 96 << 20

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
INITIAL_WINDOW_SIZE = 4
FRAME_BYTES = 16384  # the largest frame that any server takes


class Teacher:
    """A front in a process of its own."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.distill_reader.teacher.front_process", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def peak_bytes(self) -> int:
        """Return the most memory that the process has had."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmHWM:\s*(\d+) kB", status)
        assert found
        return int(found[1]) << 10

    def close(self) -> None:
        self.process.communicate(timeout=120)


class HalfRequest:
    """A client that sends a part of one ModelInfer, as fast as the server's windows allow."""

    def __init__(self, port: int, headers: bytes) -> None:
        self._sock = socket.create_connection(("127.0.0.1", port), timeout=30)
        self._sock.sendall(grpc_begin(headers))
        self._windows = [0xFFFF, 0xFFFF]  # of the connection, of the stream
        self._initial = 0xFFFF
        self.sent_bytes = 0
        self.is_refused = False

    def send(self) -> None:
        """Send until all but the end is sent, the server ends the request, or it is silent."""
        with contextlib.suppress(ConnectionError, TimeoutError):
            self._send_data(b"\0" + struct.pack(">I", MAX_REQUEST_BYTES))  # head of the message
            while self.sent_bytes < SENT_BYTES and not self.is_refused:
                size = min(*self._windows, FRAME_BYTES, SENT_BYTES - self.sent_bytes)
                if size > 0:
                    self._send_data(bytes(size))
                else:
                    self._take_frame()

    def close(self) -> None:
        self._sock.close()

    def _send_data(self, data: bytes) -> None:
        self._sock.sendall(frame(DATA, 1, data))
        self.sent_bytes += len(data)
        self._windows = [window - len(data) for window in self._windows]

    def _take_frame(self) -> None:
        head = self._receive(9)
        kind, flags = head[3], head[4]
        stream = int.from_bytes(head[5:], "big")
        payload = self._receive(int.from_bytes(head[:3], "big"))
        if kind == WINDOW_UPDATE:
            self._windows[stream] += int.from_bytes(payload, "big")
        elif kind == SETTINGS and not flags:
            for name, value in struct.iter_unpack(">HI", payload):
                if name == INITIAL_WINDOW_SIZE:
                    self._windows[1] += value - self._initial
                    self._initial = value
            self._sock.sendall(frame(SETTINGS, 0, flags=1))
        elif kind == PING and not flags:
            self._sock.sendall(frame(PING, 0, payload, flags=1))
        elif kind in (HEADERS, RST_STREAM, GOAWAY):
            self.is_refused = True

    def _receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            chunk = self._sock.recv(size - len(data))
            if not chunk:
                raise ConnectionError("closed")
            data += chunk
        return data


def authorization(token: str) -> bytes:
    """Return the header as HPACK without compression."""
    value = f"Bearer {token}".encode()
    return b"\0" + bytes([13]) + b"authorization" + bytes([len(value)]) + value


@pytest.fixture
def start() -> Iterator[Callable[..., Teacher]]:
    with contextlib.ExitStack() as stack:

        def start(*arguments: str) -> Teacher:
            teacher = Teacher(*arguments)
            stack.callback(teacher.close)
            return teacher

        yield start


def send_all(teacher: Teacher, headers: bytes) -> list[HalfRequest]:
    requests = [HalfRequest(teacher.port, headers) for _ in range(CONNECTIONS)]
    threads = [threading.Thread(target=request.send) for request in requests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return requests


@pytest.mark.parametrize(
    ("wanted", "shown", "least_sent"),
    [
        pytest.param("", "", MAX_UNFINISHED_BYTES, id="no token is wanted"),
        pytest.param("secret", "secret", MAX_UNFINISHED_BYTES, id="with the token"),
        pytest.param("secret", "other", 0, id="with another token"),
        pytest.param("secret", "", 0, id="without the token"),
    ],
)
def test_half_sent_requests_take_no_more_memory_than_the_bound(start, wanted, shown, least_sent):
    teacher = start(wanted)
    headers = authorization(shown) if shown else b""
    before = teacher.peak_bytes()
    with contextlib.ExitStack() as held:
        requests = send_all(teacher, headers)
        for request in requests:
            held.callback(request.close)
        grown = teacher.peak_bytes() - before
        sent = sum(request.sent_bytes for request in requests)
        assert sent >= least_sent  # or the bound was not put to the test
        assert grown < MAX_UNFINISHED_BYTES + OVERHEAD_BYTES
    assert teacher.process.poll() is None
