"""Every listener under bad bytes, wrong lengths, bombs, slow senders and many connections.

A real server with a real predictor: nothing dies, memory stays bounded, it serves on afterwards.
"""

import contextlib
import gzip
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import requests

from distill_reader.protocols import oip_json, oip_messages, serving_messages, wire
from tests.distill_reader.teacher.test_front import frame, grpc_begin
from tests.support import wait_until

MAX_REQUEST_MB = 16
OWN_GROWTH_BYTES = 128 << 20  # of the server's own memory; a bomb alone would be five times that
SHARED_BYTES = 400 << 20  # of the arena, which gives back what it has beyond 256 MiB
IMAGE = np.arange(8, dtype="f4").reshape(2, 4)


class Victim:
    """The server, and what it held before."""

    def __init__(self, folder: str) -> None:
        self.log = Path(folder, "log")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable, "-m", "distill_reader.serve", "--model", folder, "--port", "0",
                    "--max_request_mb", str(MAX_REQUEST_MB),
                    "--backend", "tests.distill_reader.teacher.toy_backends:sums",
                ],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )  # fmt: skip
        assert self.process.stdout is not None
        found = re.search(r"ready on \S+:(\d+):", self.process.stdout.readline())
        assert found
        self.port = int(found[1])
        self.unix = self._unix_name()
        self.answer()
        self.predictors = self._predictors()
        self.before = self.memory()

    def answer(self) -> None:
        """Check that it serves."""
        length, parts = oip_json.encode_request({"image": IMAGE}, ["sum"])
        with requests.Session() as session:
            session.trust_env = False
            response = session.post(
                f"http://127.0.0.1:{self.port}/v2/models/toy/infer",
                data=b"".join(map(bytes, parts)),
                headers={oip_json.HEAD_LENGTH: str(length)},
                timeout=120,
            )
        assert response.status_code == 200, response.text
        length = int(response.headers[oip_json.HEAD_LENGTH])
        outputs = oip_json.decode_response(response.content, length).outputs
        np.testing.assert_array_equal(outputs["sum"], [[6], [22]])

    def memory(self) -> tuple[int, int]:
        """Bytes of the server: its own, and those of the arena."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        own, shared = re.findall(r"Rss(?:Anon|Shmem):\s*(\d+) kB", status)
        return int(own) << 10, int(shared) << 10

    def is_small(self) -> bool:
        own, shared = self.memory()
        return own < self.before[0] + OWN_GROWTH_BYTES and shared < SHARED_BYTES

    def check(self) -> None:
        """It lives, with the same predictors, serves, and has not grown."""
        assert self.process.poll() is None
        self.answer()
        assert self._predictors() == self.predictors
        assert b"Traceback" not in self.log.read_bytes()
        wait_until(self.is_small, what=f"less memory than {self.memory()}, {self.before} before")

    def connect(self, *, to_unix: bool = False) -> socket.socket:
        if not to_unix:
            return socket.create_connection(("127.0.0.1", self.port), timeout=30)
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(30)
        sock.connect("\0" + self.unix)
        return sock

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            assert self.process.wait(60) == 0
        finally:
            if self.process.poll() is None:
                self.process.kill()
            self.process.communicate()

    def _predictors(self) -> set[int]:
        return {child.pid for child in psutil.Process(self.process.pid).children()}

    def _unix_name(self) -> str:
        """Return the fast path's abstract socket as its welcome names it."""
        with self.connect() as sock:
            sock.sendall(wire.pack_hello(wire.StudentHello()))
            head = receive(sock, wire.GREETING.size)
            size = wire.parse_greeting(head, max_bytes=wire.MAX_WELCOME_BYTES)
            return wire.parse_welcome(receive(sock, size)).unix


def receive(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = sock.recv(size - len(data))
        assert chunk, "closed"
        data += chunk
    return data


@pytest.fixture(scope="module")
def victim(tmp_path_factory) -> Iterator[Victim]:
    folder = tmp_path_factory.mktemp("models") / "toy"
    folder.mkdir()
    running = Victim(str(folder))
    yield running
    running.close()


def http(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: t", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def seeds() -> list[bytes]:
    """Good requests of every protocol."""
    length, parts = oip_json.encode_request({"image": IMAGE}, ["sum"])
    oip = oip_messages.encode_request("toy", {"image": IMAGE}, ["sum"])
    serving = serving_messages.encode_request({"image": IMAGE}, ["sum"], log_id=300)
    document = (
        b'{"tensor":[{"alias_name":"image","elem_type":1,"shape":[2,4],'
        b'"float_data":[0,1,2,3,4,5,6,7]}],"fetch_var_names":["sum"]}'
    )
    infer, inference = "/v2/models/toy/infer", "/GeneralModelService/inference"
    tensors = [wire.WireTensor(0, "float32", (2, 4))]
    predict = wire.pack_predict(7, tensors, [0], in_shared_memory=False) + IMAGE.tobytes()
    return [
        http(infer, b"".join(map(bytes, parts)), f"{oip_json.HEAD_LENGTH}: {length}"),
        http(inference, serving, "Content-Type: application/proto"),
        http(inference, gzip.compress(serving), "Content-Type: application/proto",
             "Content-Encoding: gzip"),
        http(inference, document),
        b"GET /v2/models/toy HTTP/1.1\r\nHost: t\r\n\r\n",
        grpc_begin() + frame(0, 1, b"\0" + struct.pack(">I", len(oip)) + oip, flags=1),
        wire.pack_hello(wire.StudentHello(model="toy")) + predict,
    ]  # fmt: skip


def damage(data: bytes, rng: random.Random) -> bytes:
    """Return `data` with one to four things wrong."""
    result = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(result) + 1)
        match rng.randrange(6):
            case 0:  # a bit
                if at < len(result):
                    result[at] ^= 1 << rng.randrange(8)
            case 1:  # cut short
                del result[max(at, 1) :]
            case 2:  # bytes of no meaning
                result[at:at] = rng.randbytes(rng.randint(1, 40))
            case 3:  # a huge length, or a negative one
                result[at : at + 4] = rng.choice([b"\xff" * 4, b"\xff\xff\xff\x7f", b"\0" * 4])
            case 4:  # a piece twice
                result[at:at] = result[at : at + rng.randint(1, 200)]
            case 5:  # a piece of it missing
                del result[at : at + rng.randint(1, 40)]
    return bytes(result)


def send_damaged(victim: Victim, rng: random.Random, cases: int) -> None:
    good = seeds()
    for _ in range(cases):
        data = damage(rng.choice(good), rng)
        to_unix = rng.random() < 0.1
        with contextlib.suppress(OSError), victim.connect(to_unix=to_unix) as sock:
            sock.settimeout(0.05)
            sock.sendall(data)
            if rng.random() < 0.5:
                sock.shutdown(socket.SHUT_WR)
            for _ in range(10):
                if not sock.recv(65536):
                    break


def in_threads(count: int, work: Callable[[int], Any]) -> None:
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("seed", range(2))
def test_damaged_requests_of_every_protocol(victim, seed):
    in_threads(4, lambda number: send_damaged(victim, random.Random(f"{seed} {number}"), 100))
    victim.check()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_damaged_requests_of_every_protocol_for_long(victim):
    seed = os.environ.get("EDL_FUZZ_SEED", "long")
    in_threads(8, lambda number: send_damaged(victim, random.Random(f"{seed} {number}"), 10_000))
    victim.check()


def test_the_seeds_are_good(victim):
    for data in seeds():
        with victim.connect() as sock:
            sock.sendall(data)
            received = sock.recv(65536)
            assert received.startswith((b"HTTP/1.1 200", b"EDLT", b"\0")), received[:200]


LENGTHS = [1 << 16, 1 << 24, (1 << 31) - 1, (1 << 32) - 1, 1 << 40, (1 << 63) - 1]


@pytest.mark.parametrize("length", LENGTHS)
def test_announced_lengths_take_no_memory(victim, length):
    """All say that much is to come, and send nothing of it."""
    short = min(length, (1 << 32) - 1)
    tensors = [wire.WireTensor(0, "float32", (min(length, 1 << 40), 4))]
    starts = [
        b"POST /v2/models/toy/infer HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\nx" % length,
        b"POST /GeneralModelService/inference HTTP/1.1\r\nHost: t\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n%x\r\nx" % length,
        grpc_begin() + frame(0, 1, b"\0" + struct.pack(">I", short) + b"x"),
        struct.pack("<4sHHI", b"EDLT", 1, 0, short),
        wire.pack_hello(wire.StudentHello(model="toy"))
        + wire.pack_predict(1, tensors, [], in_shared_memory=False),
    ]
    with contextlib.ExitStack() as held:
        for _ in range(20):
            for start in starts:
                held.enter_context(victim.connect()).sendall(start)
        victim.check()
    victim.check()


def test_bombs_are_not_inflated(victim):
    bomb = gzip.compress(bytes(64 << 20), 1) * 10
    assert len(bomb) < 4 << 20
    request = http("/GeneralModelService/inference", bomb, "Content-Encoding: gzip")

    def send(_: int) -> None:
        with victim.connect() as sock:
            sock.sendall(request)
            assert sock.recv(100).startswith((b"HTTP/1.1 413", b"HTTP/1.1 503"))

    in_threads(8, send)
    victim.check()


def test_small_messages_with_many_parts_are_not_taken_apart(victim):
    """Each part would cost a hundred times its bytes."""
    empty_tensors = b"\x0a\x00" * (4 << 20)
    deep = b"[" * (4 << 20)
    flood = b'{"tensor":[' + b"{}," * (2 << 20) + b"{}]}"
    path = "/GeneralModelService/inference"

    def send(number: int) -> None:
        data = [
            http(path, empty_tensors, "Content-Type: application/proto"),
            http(path, deep),
            http(path, flood),
            http(path, b"\x08\x01" * (4 << 20), "Content-Type: application/proto"),
        ][number % 4]
        with victim.connect() as sock:
            sock.sendall(data)
            assert sock.recv(100).startswith(b"HTTP/1.1 400")

    in_threads(4, send)
    victim.check()


def test_many_connections_of_every_kind(victim):
    starts = (b"", b"G", b"GET / HTTP/1.1\r\n", grpc_begin(), b"EDLT")
    with contextlib.ExitStack() as held:
        for number in range(600):
            with contextlib.suppress(OSError):
                held.enter_context(victim.connect()).sendall(starts[number % len(starts)])
        victim.check()
    victim.check()


def test_heads_without_an_end(victim):
    line = b"a: " + b"b" * 1000 + b"\r\n"
    for start in (b"GET / HTTP/1.1\r\nHost: t\r\n", b"GET /" + b"a" * 100_000):
        with contextlib.suppress(ConnectionError), victim.connect() as sock:
            sock.sendall(start)
            for _ in range(2000):
                sock.sendall(line)
    victim.check()


def test_requests_ahead_of_their_answers(victim):
    """Who never reads what it asks for, and asks on."""
    request = b"GET /v2/models/toy HTTP/1.1\r\nHost: t\r\n\r\n" * 1000
    with victim.connect() as sock, contextlib.suppress(TimeoutError, ConnectionError):
        sock.settimeout(0.5)
        for _ in range(2000):
            sock.sendall(request)
    victim.check()


def test_resets_in_the_midst(victim):
    rng = random.Random(0)
    for _ in range(100):
        with victim.connect() as sock:
            data = rng.choice(seeds())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.sendall(data[: rng.randrange(len(data) + 1)])
    victim.check()
