"""Measure what a job server takes to hear the heartbeats of many pods.

    python benchmarks/heartbeats.py --nodes 125 --seconds 60 --json heartbeats.json

A real job server runs in its own process. This process plays all clients and launchers: real
connections, one that polls and one that reports for each of them, with the messages and at the
times of `job_client` and `pod_runtime`. Once all jobs train, it measures for a while, and then
silences one node.
"""

import argparse
import contextlib
import heapq
import itertools
import json
import os
import re
import resource
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder is no package

import psutil

from benchmarks.harness import HOST, await_server, free_port
from benchmarks.watchers import percentile
from job_server.api import routes, wire
from job_server.api.api_client import ApiClient
from job_server.api.codec import from_json, to_json
from job_server.api.errors import ServerAway
from job_server.api.routes import Route
from pod_runtime.launcher.server_link import POLL_S

PLAN_S = 25.0  # polls of a client's plan
AGAIN_S = 0.5  # after an answer that is none
NODE_EVERY_S = 0.02  # clients are started one after the other
_REVISION = re.compile(rb'"revision":(\d+)')
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)

Answered = Callable[[int, bytes], None]


@dataclass(slots=True)
class Figures:
    """What was seen since it was made."""

    answers: int = 0
    refused: int = 0  # answers other than 2xx, and lost connections
    busy: int = 0  # polls for which the server had no place
    latencies: list[float] = field(default_factory=list)  # of heartbeats, in seconds


class Connection:
    """One keep-alive connection with at most one request in flight."""

    def __init__(self, load: "Load") -> None:
        self._load = load
        load.connections.append(self)
        self._sock: socket.socket | None = None  # None: not connected
        self._buffer = bytearray()
        self._need = 0  # bytes of the answer; 0: its headers are not complete yet
        self._body_at = 0
        self._answered: Answered | None = None  # None: nothing is asked

    def ask(
        self, route: Route[Any], ids: tuple[str, ...], body: bytes, query: str, then: Answered
    ) -> None:
        """Send a request; `then` gets the status (0: none came) and the body of its answer."""
        self._answered = then
        head = (
            f"{route.method} {route.url(*ids)}{query} HTTP/1.1\r\nHost: {HOST}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        try:
            if self._sock is None:
                self._sock = socket.create_connection((HOST, self._load.port), timeout=30)
                self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._load.selector.register(self._sock, selectors.EVENT_READ, self)
            self._sock.sendall(head.encode() + body)
        except OSError:
            self._lost()

    def readable(self) -> None:
        if self._sock is None:  # closed by what came just before
            return
        try:
            data = self._sock.recv(1 << 18)
        except OSError:
            data = b""
        if not data:
            self._lost()
            return
        self._buffer += data
        if not self._need:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            length = _LENGTH.search(self._buffer, 0, end)
            assert length is not None
            self._body_at = end + 4
            self._need = self._body_at + int(length.group(1))
        if len(self._buffer) < self._need:
            return
        status = int(self._buffer[9:12])
        if b"retry-after" in bytes(self._buffer[: self._body_at]).lower():
            self._load.figures.busy += 1
        self._done(status, bytes(self._buffer[self._body_at : self._need]))

    def close(self) -> None:
        self._answered = None
        if self._sock is not None:
            self._load.selector.unregister(self._sock)
            self._sock.close()
            self._sock = None

    def _lost(self) -> None:
        then = self._answered
        self.close()
        self._answered = then
        self._done(0, b"")

    def _done(self, status: int, body: bytes) -> None:
        self._buffer.clear()
        self._need = 0
        then, self._answered = self._answered, None
        figures = self._load.figures
        figures.answers += 1
        figures.refused += not 200 <= status < 300
        if then is not None:
            then(status, body)


class Watch:
    """A thread that asks what the jobs do: the load must not wait for the answer.

    While all jobs run and no node is silent it asks nothing.
    """

    def __init__(self, port: int, jobs: list[str]) -> None:
        self._jobs = jobs
        self._ended = threading.Event()
        self._api = ApiClient(f"http://{HOST}:{port}", timeout_s=60.0)
        self.all_run = False
        self.silent = ""  # the node that says nothing more; "": none
        self.noticed_at = 0.0  # when the server had said so (monotonic); 0: it has not
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._api.close()

    def lost(self) -> list[str]:
        """Return the events that say of a node that it does not answer."""
        events = [e.text for job in self._jobs for e in self._api.events(job, limit=1000)]
        return [text for text in events if "neither node" in text or "reached" in text]

    def _look(self) -> None:
        while not self._ended.wait(0.5):
            with contextlib.suppress(ServerAway):
                if not self.all_run:
                    states = [self._api.status(job).state for job in self._jobs]
                    self.all_run = states == [wire.JobState.RUNNING] * len(self._jobs)
                elif self.silent and any(f"{self.silent} " in text for text in self.lost()):
                    self.noticed_at = self.noticed_at or time.monotonic()


class Load:
    """All simulated programs in one event loop."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.selector = selectors.EpollSelector()
        self.figures = Figures()
        self.connections: list[Connection] = []
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, delay_s: float, work: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time.monotonic() + delay_s, next(self._numbers), work))

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        self.selector.close()

    def run(self, until: Callable[[], bool]) -> None:
        while not until():
            now = time.monotonic()
            while self._due and self._due[0][0] <= now:
                heapq.heappop(self._due)[2]()
            wait_s = min(0.1, self._due[0][0] - time.monotonic()) if self._due else 0.1
            for key, _ in self.selector.select(max(0.0, wait_s)):
                key.data.readable()


class Launcher:
    """The launcher of one pod."""

    def __init__(self, load: Load, node_id: str, pod: wire.NodePod) -> None:
        self._load, self._node_id, self._pod = load, node_id, pod
        self._ids = (pod.job_id, pod.pod_id)
        self._polls, self._reports = Connection(load), Connection(load)
        self._revision, self._heartbeat_s = -1, 1.0
        self._outbox: list[wire.PodReport] = []
        self._sending = False
        self._done: set[tuple[int, wire.Order, int]] = set()
        self._stage = 0  # 0: none trains
        self._step = 0
        self._silent = False
        self._attach()
        self._beat()

    @property
    def is_silent(self) -> bool:
        return self._silent

    def silence(self) -> None:
        self._silent = True
        self._polls.close()
        self._reports.close()

    def _attach(self) -> None:
        pod_id = self._pod.pod_id
        attach = wire.Attach(
            pod_id=pod_id,
            node_id=self._node_id,
            pid=1,
            stage=self._stage,
            step=self._step,
            phase=self.phase(),
            elastic=bool(self._stage),
            submitted_at=self._pod.submitted_at,
        )
        self._polls.ask(routes.ATTACH, self._ids, to_json(attach), "", self._attached)

    def phase(self) -> wire.PodStagePhase:
        return wire.PodStagePhase.TRAINING if self._stage else wire.PodStagePhase.READY

    def _attached(self, status: int, body: bytes) -> None:
        if status in (200, 410):
            self._follow(status, body)
        elif not self._silent:
            self._load.after(AGAIN_S, self._attach)

    def _poll(self) -> None:
        if not self._silent:
            query = f"?revision={self._revision}&timeout_s={POLL_S}"
            self._polls.ask(routes.ORDERS, self._ids, b"", query, self._follow)

    def _follow(self, status: int, body: bytes) -> None:
        if self._silent:
            return
        if status == 410:
            self.silence()
            return
        found = _REVISION.search(body) if status == 200 else None
        if found is None:
            self._load.after(AGAIN_S, self._attach)
            return
        if int(found.group(1)) != self._revision:
            orders = from_json(wire.PodOrders, body)
            self._revision, self._heartbeat_s = orders.revision, orders.heartbeat_s
            for plan in orders.plans:
                self._obey(plan)
        self._poll()

    def _obey(self, plan: wire.StagePlan) -> None:
        order = (plan.stage, plan.order, plan.attempt)
        if order in self._done:
            return
        self._done.add(order)
        kinds = wire.ReportKind
        if plan.order is wire.Order.PREPARE:
            self._say(kinds.READY, plan)
        elif plan.order is wire.Order.START:
            self._say(kinds.STARTED, plan)
            self._say(kinds.LOADED, plan)
        elif plan.order is wire.Order.GO:
            self._stage = plan.stage
            self._step += 1
            self._say(kinds.FIRST_STEP, plan)
        elif plan.order is wire.Order.CUT:
            self._say(kinds.DRAINED, plan)
        elif plan.order is wire.Order.END:
            self._say(kinds.ENDED, plan)

    def _say(self, kind: wire.ReportKind, plan: wire.StagePlan | None = None) -> None:
        self._outbox.append(self._report(kind, plan))
        self._send()

    def _report(self, kind: wire.ReportKind, plan: wire.StagePlan | None) -> wire.PodReport:
        stage = self._stage if plan is None else plan.stage
        training = kind in (wire.ReportKind.PROGRESS, wire.ReportKind.FIRST_STEP)
        return wire.PodReport(
            kind=kind,
            stage=stage,
            attempt=0 if plan is None else plan.attempt,
            step=self._step,
            elastic=stage > 0,
            metrics={"loss": 0.5} if training else None,
            snapshot=wire.SnapshotRef(stage=stage, step=self._step) if training else None,
            submitted_at=self._pod.submitted_at,
        )

    def _send(self) -> None:
        if self._sending or self._silent or not self._outbox:
            return
        self._sending = True
        sent_at, report = time.monotonic(), self._outbox[0]

        def taken(status: int, _body: bytes) -> None:
            self._sending = False
            if status == 0 or status >= 500:
                self._load.after(AGAIN_S, self._send)
                return
            self._load.figures.latencies.append(time.monotonic() - sent_at)
            self._outbox.pop(0)
            self._send()

        self._reports.ask(routes.REPORT, self._ids, to_json(report), "", taken)

    def _beat(self) -> None:
        if self._silent:
            return
        if not self._outbox:
            self._step += bool(self._stage)
            self._say(wire.ReportKind.PROGRESS if self._stage else wire.ReportKind.ALIVE)
        self._load.after(self._heartbeat_s, self._beat)


class Node:
    """The job client of one node."""

    def __init__(self, load: Load, number: int, slots: int) -> None:
        self._load = load
        self.node_id = f"node-{number}"
        self._node = wire.Node(
            node_id=self.node_id,
            addr=f"10.{number // 250}.{number % 250}.1",
            slots=tuple(wire.Slot(index=index, kind=wire.SlotKind.CPU) for index in range(slots)),
            port_low=20000,
            port_high=20000 + 20 * slots,
            folders=("folder",),
        )
        self._polls, self._reports = Connection(load), Connection(load)
        self._revision, self._heartbeat_s = -1, 1.0
        self._pods: tuple[wire.NodePod, ...] = ()
        self.launchers: dict[tuple[str, str], Launcher] = {}
        self._silent = self._beats = False
        self.refusal = ""
        self._register()

    def silence(self) -> None:
        """Say nothing more, as a machine that has lost its power."""
        self._silent = True
        self._polls.close()
        self._reports.close()
        for launcher in self.launchers.values():
            launcher.silence()

    def _register(self) -> None:
        self._polls.ask(routes.REGISTER_NODE, (), to_json(self._node), "", self._registered)

    def _registered(self, status: int, body: bytes) -> None:
        if status == 403:
            self.refusal = body.decode()
            return
        if status == 200 and not self._beats:
            self._beats = True
            self._load.after(0.0, self._beat)
        self._follow(status, body)

    def _follow(self, status: int, body: bytes) -> None:
        if self._silent:
            return
        found = _REVISION.search(body) if status == 200 else None
        if found is None:
            self._load.after(AGAIN_S, self._register)
            return
        if int(found.group(1)) != self._revision:
            self._take(from_json(wire.NodePlan, body))
        query = f"?revision={self._revision}&timeout_s={PLAN_S}"
        self._polls.ask(routes.NODE_PLAN, (self.node_id,), b"", query, self._follow)

    def _take(self, plan: wire.NodePlan) -> None:
        self._revision, self._heartbeat_s = plan.revision, plan.heartbeat_s
        self._pods = plan.pods
        for pod in plan.pods:
            if (pod.job_id, pod.pod_id) not in self.launchers:
                self.launchers[pod.job_id, pod.pod_id] = self.start(pod)

    def start(self, pod: wire.NodePod) -> Launcher:
        return Launcher(self._load, self.node_id, pod)

    def state(self, pod: wire.NodePod) -> wire.PodState:
        return wire.PodState(
            pod_id=pod.pod_id,
            job_id=pod.job_id,
            phase=wire.PodPhase.RUNNING,
            log_path=f"/var/lib/edl/pods/{pod.pod_id}/log",
            cpu_percent=99.5,
            memory_bytes=1 << 30,
            submitted_at=pod.submitted_at,
        )

    def _beat(self) -> None:
        if self._silent:
            return
        sent_at = time.monotonic()
        report = wire.NodeReport(
            node_id=self.node_id,
            pods=tuple(self.state(pod) for pod in self._pods),
            slots=tuple(
                wire.SlotUsage(index=slot.index, memory_used_bytes=1 << 30)
                for slot in self._node.slots
            ),
        )

        def taken(status: int, _body: bytes) -> None:
            if status == 200:
                self._load.figures.latencies.append(time.monotonic() - sent_at)
            left_s = sent_at + self._heartbeat_s - time.monotonic()
            self._load.after(max(0.0, left_s) if status == 200 else AGAIN_S, self._beat)

        self._reports.ask(routes.NODE_REPORT, (self.node_id,), to_json(report), "", taken)


def start_server(
    folder: Path, heartbeat_s: float, pods: int, nodes: int
) -> tuple["subprocess.Popen[bytes]", int]:
    """Start a job server without jobs, with room for all polls; return it and its port."""
    port = free_port()
    args = ["--no_job", "--server_port", str(port), "--log_level", "30"]
    args += ["--db", str(folder / "server.db"), "--heartbeat_s", str(heartbeat_s)]
    args += ["--max_watchers", str(pods + nodes + 100)]
    server = subprocess.Popen([sys.executable, "-m", "job_server", *args])
    await_server(port, server)
    return server, port


def allow_files(count: int) -> None:
    """Raise this process's limit of open files, which many systems set to 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(count, hard), hard))


def submit(api: ApiClient, number: int, pods: int, nodes: int) -> str:
    job_id = f"bench-{number}"
    api.submit(
        wire.JobSpec(
            job_id=job_id,
            pods=pods,
            max_pods=pods,
            expected_nodes=nodes,
            start_timeout_s=600,
            prepare_timeout_s=600,
            folder="folder",
            script=wire.ScriptSpec(kind=wire.ScriptKind.NONE),
        )
    )
    return job_id


def measure(args: argparse.Namespace) -> dict[str, object]:
    """Return the figures of one cluster."""
    pods = args.nodes * args.slots
    allow_files(4 * pods)
    with tempfile.TemporaryDirectory(prefix="edl-heartbeats-") as folder:
        server, port = start_server(Path(folder), args.heartbeat_s, pods, args.nodes)
        try:
            return _measure(args, server, port, pods)
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _measure(
    args: argparse.Namespace, server: "subprocess.Popen[bytes]", port: int, pods: int
) -> dict[str, object]:
    load = Load(port)
    api = ApiClient(f"http://{HOST}:{port}", timeout_s=60.0)
    process = psutil.Process(server.pid)

    def cpu_s() -> float:
        used = process.cpu_times()
        return float(used.user + used.system)

    def settled() -> bool:
        if time.monotonic() > deadline:
            events = api.events(jobs[0], after=0, limit=1000)
            last = [event.text for event in events[-5:]]
            raise SystemExit(f"not all jobs train after {args.start_limit_s:.0f} s: {last}")
        return watch.all_run

    began, cpu_before = time.monotonic(), cpu_s()
    deadline = began + args.start_limit_s
    jobs = [submit(api, number, pods // args.jobs, args.nodes) for number in range(args.jobs)]
    watch = Watch(port, jobs)
    nodes: list[Node] = []
    for number in range(args.nodes):
        load.after(NODE_EVERY_S * number, lambda n=number: nodes.append(Node(load, n, args.slots)))  # type: ignore[misc]
    load.run(settled)
    start_s, start_cpu_s = time.monotonic() - began, cpu_s() - cpu_before
    refused = [node.refusal for node in nodes if node.refusal]
    if refused:
        print(f"{len(refused)} nodes were refused: {refused[0]}")
    warm_until = time.monotonic() + args.warm_s
    load.run(lambda: time.monotonic() > warm_until)

    load.figures = Figures()
    measured_at, cpu_before = time.monotonic(), cpu_s()
    load.run(lambda: time.monotonic() > measured_at + args.seconds)
    seconds, used_s = time.monotonic() - measured_at, cpu_s() - cpu_before
    figures = load.figures
    load.figures = Figures()
    alarms = watch.lost()

    nodes[-1].silence()
    silenced_at, watch.silent = time.monotonic(), nodes[-1].node_id
    load.run(lambda: watch.noticed_at > 0 or time.monotonic() > silenced_at + 120)
    watch.close()
    api.close()
    load.close()
    return {
        "nodes": args.nodes,
        "pods": pods,
        "jobs": args.jobs,
        "seconds": seconds,
        "cores_used": used_s / seconds,
        "answers_per_s": figures.answers / seconds,
        "refused": figures.refused,
        "busy_polls": figures.busy,
        "heartbeat_p50_s": statistics.median(figures.latencies),
        "heartbeat_p99_s": percentile(figures.latencies, 0.99),
        "heartbeat_max_s": max(figures.latencies),
        "false_alarms": len(alarms),
        "start_s": start_s,
        "start_cpu_s": start_cpu_s,
        "lost_node_noticed_s": watch.noticed_at - silenced_at if watch.noticed_at else None,
        "memory_mb": process.memory_info().rss / 1e6,
        "load_average": os.getloadavg()[0],
        "cores": os.cpu_count(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--nodes", type=int, default=125)
    parser.add_argument("--slots", type=int, default=8, help="pods of each node")
    parser.add_argument("--jobs", type=int, default=1, help="that share the nodes")
    parser.add_argument("--heartbeat_s", type=float, default=1.0, help="of the server")
    parser.add_argument("--seconds", type=float, default=60.0, help="to measure")
    parser.add_argument("--warm_s", type=float, default=10.0, help="of training before that")
    parser.add_argument("--start_limit_s", type=float, default=300.0)
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too")
    args = parser.parse_args()
    if args.nodes < 1 or args.slots < 1 or (args.nodes * args.slots) % args.jobs:
        parser.error("--nodes, --slots, --jobs: expected at least 1, and as many pods for each job")
    figures = measure(args)
    print(f"{figures['pods']} pods of {args.jobs} jobs on {args.nodes} nodes")
    for name, value in figures.items():
        shown = f"{value:.3f}" if isinstance(value, float) else value
        print(f"  {name:<22} {shown}")
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
