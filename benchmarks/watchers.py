"""Measure how soon every watcher of a job sees a change of its pods.

    python benchmarks/watchers.py --watchers 500 --rounds 20 --json watchers.json

A real job server runs in its own process; this process holds all watchers: raw sockets that
long-poll one job, and poll again as soon as they are answered. A round posts one resize of a job
that only clients of the original look after, which commits at once, and measures from just before
the POST is sent until a watcher has read the last byte of the new revision.
"""

import argparse
import json
import os
import re
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder is no package

from benchmarks.harness import HOST, await_server, free_port

JOB = "bench"
ROUND_TIMEOUT_S = 30.0
_REVISION = re.compile(rb'"revision":(\d+)')


@dataclass(slots=True)
class Connection:
    """One keep-alive connection with at most one request in flight."""

    sock: socket.socket
    buffer: bytearray = field(default_factory=bytearray)
    head_bytes: int = 0  # 0: the headers are not complete yet
    body_bytes: int = 0

    def feed(self) -> bytes | None:
        """Read what is there; return the body when the answer is complete."""
        data = self.sock.recv(262144)
        if not data:
            raise SystemExit("the server closed a connection")
        self.buffer += data
        if not self.head_bytes:
            end = self.buffer.find(b"\r\n\r\n")
            if end < 0:
                return None
            head = bytes(self.buffer[:end]).lower()
            if not head.startswith(b"http/1.1 20"):
                raise SystemExit(f"the server answers {bytes(self.buffer)[:300]!r}")
            if b"retry-after" in head:
                raise SystemExit("the server holds fewer polls than there are watchers")
            self.head_bytes = end + 4
            self.body_bytes = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
        if len(self.buffer) < self.head_bytes + self.body_bytes:
            return None
        body = bytes(self.buffer[self.head_bytes :])
        self.buffer.clear()
        self.head_bytes = 0
        return body


def revision_in(body: bytes) -> int:
    match = _REVISION.search(body)
    if match is None:
        raise SystemExit(f"no revision in {body[:200]!r}")
    return int(match.group(1))


class Load:
    """All watchers and the one who changes, in one event loop."""

    def __init__(self, port: int, watchers: int) -> None:
        self._selector = selectors.EpollSelector()
        self._port = port
        self._changer = self._connect()
        self._watchers = [self._connect() for _ in range(watchers)]
        self._revision = 0
        for watcher in self._watchers:
            self._poll(watcher, -1)
        self._finish_round(0.0)  # everyone has the first answer, and waits

    def _connect(self) -> Connection:
        sock = socket.create_connection((HOST, self._port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        connection = Connection(sock)
        self._selector.register(sock, selectors.EVENT_READ, connection)
        return connection

    def _poll(self, watcher: Connection, revision: int) -> None:
        path = f"/api/v1/jobs/{JOB}?revision={revision}&timeout_s=60"
        watcher.sock.sendall(f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())

    def change(self, pods: int) -> list[float]:
        """Resize the job; return each watcher's latency in seconds."""
        body = json.dumps({"pods": pods}).encode()
        head = (
            f"POST /api/v1/jobs/{JOB}/resize HTTP/1.1\r\nHost: {HOST}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        started = time.perf_counter()
        self._changer.sock.sendall(head.encode() + body)
        return self._finish_round(started)

    def _finish_round(self, started: float) -> list[float]:
        """Read until every watcher has a newer revision; each polls again at once."""
        latencies: dict[int, float] = {}
        before, newest = self._revision, self._revision
        deadline = time.perf_counter() + ROUND_TIMEOUT_S
        while len(latencies) < len(self._watchers):
            if time.perf_counter() > deadline:
                raise SystemExit(f"{len(latencies)} of {len(self._watchers)} watchers were told")
            for key, _ in self._selector.select(1.0):
                connection: Connection = key.data
                body = connection.feed()
                if body is None or connection is self._changer:
                    continue
                now = time.perf_counter()
                revision = revision_in(body)
                if revision > before:
                    latencies.setdefault(key.fd, now - started)
                    newest = max(newest, revision)
                self._poll(connection, revision)
        self._revision = newest
        return list(latencies.values())

    def settle(self, seconds: float) -> None:
        """Let the new polls arrive, so that the next round finds everyone waiting."""
        deadline = time.perf_counter() + seconds
        while (left := deadline - time.perf_counter()) > 0:
            for key, _ in self._selector.select(left):
                connection: Connection = key.data
                body = connection.feed()
                if body is not None and connection is not self._changer:
                    revision = revision_in(body)
                    self._revision = max(self._revision, revision)
                    self._poll(connection, revision)

    def close(self) -> None:
        for connection in (self._changer, *self._watchers):
            connection.sock.close()


def start_server(folder: Path, watchers: int) -> tuple[subprocess.Popen[bytes], int]:
    """Start a job server with a job that commits changes at once; return it and its port."""
    port = free_port()
    args = ["--job_id", JOB, "--gpu_num_of_node", "8", "--pod_num_of_node", "8"]
    args += ["--change_script", "none", "--server_port", str(port), "--log_level", "30"]
    args += ["--db", str(folder / "server.db"), "--max_watchers", str(watchers + 50)]
    server = subprocess.Popen([sys.executable, "-m", "job_server", *args])
    await_server(port, server)
    return server, port


def measure(watchers: int, rounds: int) -> list[list[float]]:
    """Return per round the latency of every watcher, in seconds."""
    with tempfile.TemporaryDirectory(prefix="edl-watchers-") as folder:
        server, port = start_server(Path(folder), watchers)
        try:
            load = Load(port, watchers)
            measured = []
            for number in range(rounds):
                load.settle(0.3)
                measured.append(load.change(4 if number % 2 == 0 else 8))
            load.close()
            return measured
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--watchers", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too")
    args = parser.parse_args()
    if args.watchers < 1 or args.rounds < 1:
        parser.error("--watchers and --rounds: expected at least 1")
    rounds = measure(args.watchers, args.rounds)
    everyone = [latency for latencies in rounds for latency in latencies]
    figures = {
        "watchers": args.watchers,
        "rounds": args.rounds,
        "cores": os.cpu_count(),
        "p50_s": statistics.median(everyone),
        "p99_s": percentile(everyone, 0.99),
        "max_s": max(everyone),
        "worst_round_p99_s": max(percentile(latencies, 0.99) for latencies in rounds),
    }
    print(f"{args.watchers} watchers, {args.rounds} rounds, {figures['cores']} cores")
    print("from POST to receipt        ms")
    for name, key in (
        ("p50", "p50_s"),
        ("p99", "p99_s"),
        ("max", "max_s"),
        ("p99 of the worst round", "worst_round_p99_s"),
    ):
        print(f"  {name:<24} {1000 * float(figures[key] or 0):>7.1f}")
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
