"""A job server that says what a test tells it to, over real HTTP, and remembers what it hears."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from job_server.api.codec import decode, encode
from job_server.api.wire import (
    Attach,
    HangLimits,
    Order,
    PlanPod,
    PodOrders,
    PodReport,
    ReportKind,
    RestoreFrom,
    StagePlan,
    Way,
)
from tests.support import free_port, wait_until


def make_part(
    pod_id: str = "a", pod_rank: int = 0, ranks: tuple[int, ...] = (0,), **fields: Any
) -> PlanPod:
    """Return a pod of a plan on this machine: a slot and a port for each rank."""
    given: dict[str, Any] = {
        "node_id": "node", "addr": "127.0.0.1", "slots": ranks,
        "ports": tuple(20000 + rank for rank in ranks), **fields,
    }  # fmt: skip
    return PlanPod(pod_id=pod_id, pod_rank=pod_rank, ranks=ranks, **given)


def make_plan(
    stage: int,
    order: Order,
    pods: tuple[PlanPod, ...],
    *,
    way: Way = Way.DRAIN,
    attempt: int = 0,
    restore_from: RestoreFrom | None = None,
    durable: bool = False,
    cut: int | None = None,  # None: the first one, where the order is one
    kill_ranks: tuple[tuple[str, int], ...] = (),
) -> StagePlan:
    return StagePlan(
        job_id="job",
        stage=stage,
        flag=stage - 2,
        way=way,
        order=order,
        attempt=attempt,
        pods=pods,
        master=f"127.0.0.1:{pods[0].ports[0]}",
        restore_from=restore_from,
        max_trainers=8,
        durable=durable,
        cut=int(order is Order.CUT) if cut is None else cut,
        kill_ranks=kill_ranks,
    )


class FakeJobServer:
    """Thread-safe; `say` sets the orders, `reports` and `attaches` are what came in."""

    def __init__(self, heartbeat_s: float = 0.2) -> None:
        self.heartbeat_s = heartbeat_s
        self.reports: list[PodReport] = []
        self.attaches: list[Attach] = []
        self.gone = False
        self.token = ""  # that it wants; "": none
        self.server_id = "server-1"
        self._plans: tuple[StagePlan, ...] = ()
        self._leave = False
        self.spares, self.adapter = 0, ""
        self.hang_limits: HangLimits | None = None
        self._revision = 1
        self._changed = threading.Condition()
        self._http: ThreadingHTTPServer | None = None
        self._port = free_port()  # kept: while the server is away, nobody else is given it
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                fake._answer(self, b"")

            def do_POST(self) -> None:
                fake._answer(self, self.rfile.read(int(self.headers.get("Content-Length", 0))))

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            allow_reuse_address = True

            def handle_error(self, request: object, client_address: object) -> None:
                pass  # a launcher that was killed cuts its connections

        self._http = Server(("127.0.0.1", self._port), Handler)
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Away: connections are refused, and those that wait are cut."""
        http, self._http = self._http, None
        if http is not None:
            with self._changed:
                self._changed.notify_all()
            http.shutdown()
            http.server_close()

    def restart(self, server_id: str) -> None:
        self.stop()
        self.server_id = server_id
        self.start()

    def start_elsewhere(self, server_id: str) -> None:
        """Start at another address, after `stop`."""
        self._port = free_port()
        self.restart(server_id)

    def say(self, *plans: StagePlan, leave: bool = False) -> None:
        with self._changed:
            self._plans, self._leave = plans, leave
            self._revision += 1
            self._changed.notify_all()

    def refuse_all(self) -> None:
        with self._changed:
            self.gone = True
            self._changed.notify_all()

    def told(self, kind: ReportKind, stage: int | None = None) -> list[PodReport]:
        return [r for r in list(self.reports) if r.kind is kind and stage in (None, r.stage)]

    def wait_told(self, kind: ReportKind, stage: int | None = None) -> PodReport:
        """Return the first report of this kind, once there is one."""
        wait_until(lambda: self.told(kind, stage), what=f"{kind.value} of stage {stage}")
        return self.told(kind, stage)[0]

    def _orders(self) -> PodOrders:
        return PodOrders(
            server_id=self.server_id,
            revision=self._revision,
            plans=self._plans,
            heartbeat_s=self.heartbeat_s,
            leave=self._leave,
            spares=self.spares,
            adapter=self.adapter,
            hang_limits=self.hang_limits,
            hang_kills=True,
        )

    def _answer(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        url = urlsplit(handler.path)
        verb = url.path.rsplit("/", 1)[-1]
        if self.token and handler.headers["Authorization"] != f"Bearer {self.token}":
            self._send(handler, 401, {"error": "Authorization: expected the server's token"})
            return
        if verb == "attach":
            self.attaches.append(decode(Attach, json.loads(body)))
        elif verb == "report":
            self.reports.append(decode(PodReport, json.loads(body)))
        else:
            query = parse_qs(url.query)
            self._hold(int(query["revision"][0]), float(query["timeout_s"][0]))
        if self._http is None:
            handler.close_connection = True
            return
        if self.gone:
            self._send(handler, 410, {"error": "the pod is not wanted"})
        elif verb == "report":
            self._send(handler, 200, {"server_id": self.server_id})
        else:
            self._send(handler, 200, encode(self._orders()))

    def _hold(self, revision: int, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while (
                self._revision == revision
                and not self.gone
                and self._http is not None
                and (left := deadline - time.monotonic()) > 0
            ):
                self._changed.wait(left)

    def _send(self, handler: BaseHTTPRequestHandler, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        handler.send_response(status)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)
