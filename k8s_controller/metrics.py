"""What the controller says of itself: /healthz, /readyz and /metrics."""

import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from k8s_controller.decisions.status import Phase, TrainingJobStatus

STUCK_S = 30.0  # its loop turns every second


class Metrics:
    """Figures of one process; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = {"passes": 0, "errors": 0, "steps": 0, "decisions": 0}
        self._pass_s = 0.0
        self._jobs: dict[tuple[str, str], TrainingJobStatus] = {}
        self._beat_at: float | None = None  # None: it does not lead
        self.leads = False

    def beat(self) -> None:
        self._beat_at = time.monotonic()

    def count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    def took(self, seconds: float) -> None:
        with self._lock:
            self._counts["passes"] += 1
            self._pass_s += seconds

    def enter(self, key: tuple[str, str], status: TrainingJobStatus) -> None:
        with self._lock:
            self._jobs[key] = status

    def forget(self, key: tuple[str, str]) -> None:
        with self._lock:
            self._jobs.pop(key, None)

    @property
    def is_well(self) -> bool:
        return self._beat_at is None or time.monotonic() < self._beat_at + STUCK_S

    def text(self) -> str:
        """Return the figures as Prometheus reads them."""
        with self._lock:
            counts, jobs, pass_s = dict(self._counts), list(self._jobs.values()), self._pass_s
        lines = []

        def add(name: str, kind: str, words: str, *values: tuple[str, float]) -> None:
            lines.append(f"# HELP {name} {words}")
            lines.append(f"# TYPE {name} {kind}")
            # All digits: rounded, a counter of some weeks would stand still and then jump.
            lines.extend(f"{name}{labels} {value:.15g}" for labels, value in values)

        add("edl_controller_leader", "gauge", "1: this one acts.", ("", float(self.leads)))
        for name, words in (
            ("passes", "Looks at a TrainingJob."),
            ("errors", "Looks that failed, and were made again."),
            ("steps", "Calls that changed something."),
            ("decisions", "Numbers of pods that spec.autoscale has chosen."),
        ):
            add(f"edl_controller_{name}_total", "counter", words, ("", counts[name]))
        add("edl_controller_pass_seconds_total", "counter", "Time in looks.", ("", pass_s))
        add(
            "edl_trainingjobs", "gauge", "TrainingJobs by phase.",
            *((f'{{phase="{p.value}"}}', sum(j.phase is p for j in jobs)) for p in Phase),
        )  # fmt: skip
        for name, words in (
            ("desired", "Pods that are wanted."), ("replicas", "Trainer pods that are there."),
            ("training", "Pods that train."),
        ):  # fmt: skip
            total = sum(getattr(job, name) or 0 for job in jobs)
            add(f"edl_trainingjob_pods_{name}", "gauge", words, ("", total))
        return "\n".join(lines) + "\n"


class _Server(ThreadingHTTPServer):
    """Listens at an address of either family; "": at all of both, where there are both."""

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        host, port = address
        if ":" in host or (not host and socket.has_dualstack_ipv6()):
            self.address_family = socket.AF_INET6
        super().__init__((host, port), handler)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


def serve(metrics: Metrics, host: str, port: int) -> ThreadingHTTPServer:
    """Answer probes and Prometheus, in a thread of its own."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = {"/healthz": "ok\n", "/readyz": "ok\n", "/metrics": metrics.text()}
            body = known.get(self.path, "")
            code = 200 if body else 404
            if self.path == "/healthz" and not metrics.is_well:
                code, body = 503, "the loop stands still\n"
            self.send_response(code)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_args: object) -> None:
            """Probes are no news."""

    server = _Server((host, port), Handler)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server
