"""Students in threads: they ask live teachers, and tell the server how long they wait."""

import contextlib
import queue
import socket
import threading
import time

from job_server.api.api_client import ApiClient
from job_server.api.errors import JobServerError
from job_server.api.wire import Demand

REPORT_S = 0.1
COMPUTE_S = 0.06  # of a student, per batch: a teacher feeds three


class Students:
    """As many as are set; a reader and a discovery service in one.

    A thread per teacher has it compute batches, up to a few that wait for students.
    """

    def __init__(self, url: str, job_id: str, service: str) -> None:
        self._url, self._job_id, self._service = url, job_id, service
        self._ready: queue.Queue[bytes] = queue.Queue(4)
        self._lock = threading.Lock()
        self._batches = 0
        self._waited_s = 0.0
        self._students: list[threading.Event] = []  # each set: that one leaves
        self._asked: set[tuple[str, int]] = set()
        self._closed = threading.Event()
        self._tells = threading.Thread(target=self._tell, daemon=True)
        self._tells.start()

    def close(self) -> None:
        self.set(0)
        self._closed.set()
        self._tells.join(20)

    def set(self, count: int) -> None:
        """Have so many students from now on."""
        while len(self._students) > count:
            self._students.pop().set()
        while len(self._students) < count:
            leaves = threading.Event()
            self._students.append(leaves)
            threading.Thread(target=self._learn, args=(leaves,), daemon=True).start()

    def _learn(self, leaves: threading.Event) -> None:
        while not leaves.is_set():
            began = time.monotonic()
            with contextlib.suppress(queue.Empty):
                self._ready.get(timeout=0.02)
                with self._lock:
                    self._batches += 1
            with self._lock:
                self._waited_s += time.monotonic() - began
            if time.monotonic() - began < 0.02 or not self._ready.empty():
                leaves.wait(COMPUTE_S)

    def _ask(self, address: tuple[str, int]) -> None:
        try:
            with socket.create_connection(address, 5) as sock:
                sock.settimeout(5)
                while not self._closed.is_set():
                    sock.sendall(b"x")
                    if not sock.recv(1):
                        break
                    while not self._closed.is_set():
                        with contextlib.suppress(queue.Full):
                            self._ready.put(b"x", timeout=0.1)
                            break
        except OSError:
            pass  # not up yet, or gone
        with self._lock:
            self._asked.discard(address)

    def _tell(self) -> None:
        told_at = time.monotonic()
        with ApiClient(self._url) as api:
            while not self._closed.wait(REPORT_S):
                with contextlib.suppress(JobServerError):
                    self._find(api)
                    now = time.monotonic()
                    api.demand(self._take(now - told_at))
                    told_at = now

    def _find(self, api: ApiClient) -> None:
        for pod in api.status(self._job_id).pods:
            address = pod.addr, pod.ports[0]
            with self._lock:
                known = address in self._asked
                if pod.phase == "running":
                    self._asked.add(address)
            if pod.phase == "running" and not known:
                threading.Thread(target=self._ask, args=(address,), daemon=True).start()

    def _take(self, passed_s: float) -> Demand:
        students = len(self._students)
        with self._lock:
            batches, waited_s, teachers = self._batches, self._waited_s, len(self._asked)
            self._batches, self._waited_s = 0, 0.0
        return Demand(
            service=self._service,
            students=students,
            wait_share=min(1.0, waited_s / passed_s / students) if students else 0.0,
            samples_per_s=batches / passed_s,
            teachers=teachers,
        )
