"""Look after all TrainingJobs: whoever is due is looked at, decided on, and acted for.

A pass lists what is there, so that nothing depends on what this process has seen before. Watches
only say when to look; without them a job is looked at every few seconds all the same.
"""

import base64
import heapq
import logging
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from job_server.api.errors import JobServerError
from job_server.api.wire import JobSpec
from k8s_controller import objects
from k8s_controller import reconcile as steps
from k8s_controller.kube_api import TROUBLES, KubeApi
from k8s_controller.metrics import Metrics
from k8s_controller.observed import ListedPod, Observed, observe_pods
from k8s_controller.server_link import TrainingServer
from k8s_controller.spec import KIND, Object, SpecError, TrainingJobSpec, parse
from k8s_controller.status import Phase, TrainingJobStatus

logger = logging.getLogger(__name__)

Key = tuple[str, str]  # namespace, name

MOVING_S = 0.5  # until the next look at a job whose pods come or go
TROUBLE_S = (1.0, 15.0)  # after an error: doubled each time, up to that
WORKERS = 8
_SETTLED = (Phase.RUNNING, Phase.SUSPENDED, Phase.SUCCEEDED, Phase.FAILED)


@dataclass(slots=True)
class _Known:
    """What this process keeps of a job, all of which it can do without."""

    prepared: bool = False  # in this life
    link: TrainingServer | None = None
    errors: int = 0  # one after the other


@dataclass(slots=True)
class _Queue:
    """Jobs by the time at which they are due; none is with two workers."""

    due: dict[Key, float] = field(default_factory=dict)
    heap: list[tuple[float, Key]] = field(default_factory=list)
    busy: set[Key] = field(default_factory=set)

    def put(self, key: Key, at: float) -> None:
        if at < self.due.get(key, float("inf")):
            self.due[key] = at
            heapq.heappush(self.heap, (at, key))

    def take(self, now: float) -> Key | None:
        while self.heap and self.heap[0][0] <= now:
            at, key = heapq.heappop(self.heap)
            if self.due.get(key) != at:
                continue  # it was taken since, or is due at another time
            if key in self.busy:
                continue  # whoever has it puts it back
            del self.due[key]
            self.busy.add(key)
            return key
        return None


class Controller:
    """Threads that look after the jobs whose names they are told.

    Args:
        interval_s: between two looks at a job where nothing happens.
    """

    def __init__(self, kube: KubeApi, metrics: Metrics, interval_s: float) -> None:
        self._kube, self._metrics, self._interval_s = kube, metrics, interval_s
        self._known: dict[Key, _Known] = {}
        self._queue = _Queue()
        self._changed = threading.Condition()
        self._ends = False
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="pass")
        self._thread = threading.Thread(target=self._run, name="controller", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Begin no further pass, and wait for those that have begun."""
        with self._changed:
            self._ends = True
            self._changed.notify()
        self._thread.join()
        self._workers.shutdown()

    def look_at(self, namespace: str, name: str) -> None:
        """Look at a job as soon as can be. Thread-safe."""
        with self._changed:
            self._queue.put((namespace, name), time.monotonic())
            self._changed.notify()

    def jobs(self) -> list[Key]:
        with self._changed:
            return list(self._known)

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._ends:
                    return
                self._metrics.beat()
                key = self._queue.take(time.monotonic())
                if key is None:
                    first = self._queue.heap[0][0] if self._queue.heap else float("inf")
                    self._changed.wait(max(0.0, min(first - time.monotonic(), 1.0)))
                    continue
                known = self._known.setdefault(key, _Known())
            self._workers.submit(self._attend, key, known)

    def _attend(self, key: Key, known: _Known) -> None:
        began = time.monotonic()
        wait_s: float | None = TROUBLE_S[1]
        try:
            wait_s = self._pass(key, known)
            known.errors = 0
        except (*TROUBLES, JobServerError) as error:
            self._metrics.count("errors")
            wait_s = min(TROUBLE_S[0] * 2 ** min(known.errors, 10), TROUBLE_S[1])
            known.errors += 1
            logger.warning("%s/%s: tried again in %g s: %s", *key, wait_s, error)
        except Exception:  # of one job; the others must not suffer
            self._metrics.count("errors")
            logger.exception("%s/%s: this pass has failed", *key)
        finally:
            self._metrics.took(time.monotonic() - began)
            with self._changed:
                self._queue.busy.discard(key)
                if wait_s is None:
                    self._forget(key)
                else:
                    due = self._queue.due.pop(key, None)  # somebody asked meanwhile
                    at = time.monotonic() + wait_s
                    self._queue.put(key, at if due is None else min(at, due))
                self._changed.notify()

    def _forget(self, key: Key) -> None:
        known = self._known.pop(key, None)
        self._queue.due.pop(key, None)
        self._metrics.forget(key)
        if known is not None and known.link is not None:
            known.link.close()

    # --- one pass

    def _pass(self, key: Key, known: _Known) -> float | None:
        """Look at a job and act; return when to look again, None: there is no such job."""
        namespace, name = key
        job = self._kube.get(KIND, namespace, name)
        if job is None:
            return None
        if "deletionTimestamp" in job["metadata"]:
            return self._interval_s  # its objects go with it
        raw = job.get("status") or {}
        status, now = TrainingJobStatus.read(raw), time.time()
        generation = int(job["metadata"].get("generation", 0))
        try:
            spec = parse(job)
        except SpecError as error:
            outcome = steps.refuse(name, generation, status, str(error), now)
        else:
            trainers, server_pod = observe_pods(self._kube.pods_of(namespace, name))
            link = None if status.ended else self._link(key, known, server_pod)
            seen = Observed(
                trainers=trainers,
                server_pod=server_pod,
                server=None if link is None else link.view(),
                prepared=known.prepared,
            )
            outcome = steps.reconcile(name, generation, spec, status, seen, now)
            for step in outcome.steps:
                self._do(step, job, spec, known)
        self._write(key, raw, outcome.status)
        for notice in outcome.notices:
            logger.info("%s/%s: %s: %s", *key, notice.reason, notice.message)
            self._kube.say(job, notice.reason, notice.message, warning=notice.warning)
        self._metrics.enter(key, outcome.status)
        moving = outcome.steps or outcome.status.phase not in _SETTLED
        return MOVING_S if moving else self._interval_s

    def _write(self, key: Key, raw: Object, status: TrainingJobStatus) -> None:
        new = status.write()
        changed = {name: value for name, value in new.items() if raw.get(name) != value}
        if changed:
            self._kube.write_status(*key, changed)

    def _link(self, key: Key, known: _Known, server: ListedPod | None) -> TrainingServer | None:
        """Return the connection to a job's server; None: it cannot be there."""
        if server is None or not server.address or server.over:
            return None
        host = f"[{server.address}]" if ":" in server.address else server.address
        url = f"http://{host}:{objects.PORT}"
        if known.link is not None and known.link.url == url:
            return known.link
        if known.link is not None:
            known.link.close()
            known.link = None
        secret = self._kube.get("Secret", key[0], f"{key[1]}-token")
        if secret is None:
            known.prepared = False
            return None
        known.link = TrainingServer(url, base64.b64decode(secret["data"]["token"]).decode(), key[1])
        return known.link

    def _do(self, step: steps.Step, job: Object, spec: TrainingJobSpec, known: _Known) -> None:
        namespace, name = job["metadata"]["namespace"], job["metadata"]["name"]
        match step:
            case steps.Prepare():
                for each in objects.foundations(job, spec, secrets.token_urlsafe(24)):
                    self._kube.create(each)
                known.prepared = True
            case steps.MakeServer():
                self._kube.create(objects.server_pod(job, spec))
            case steps.MakeTrainer(index):
                self._kube.create(objects.trainer_pod(job, spec, index))
            case steps.RemovePod(pod, uid):
                self._kube.delete("Pod", namespace, pod, uid)
            case steps.RemoveTrainingJob():
                self._kube.delete(KIND, namespace, name, job["metadata"]["uid"])
            case _:
                assert known.link is not None  # these follow from its answer
                known.link.ask(_question(step, spec.job_spec(name)))
        self._metrics.count("steps")


def _question(step: steps.Step, job: JobSpec) -> Callable[..., object]:
    """Return what to ask the job server."""
    match step:
        case steps.SubmitJob():
            return lambda api: api.submit(job)
        case steps.SetPods(pods):
            return lambda api: api.resize(job.job_id, pods)
        case steps.CloseNode(node):
            return lambda api: api.limit_node(node, 0)
        case steps.OpenNode(node):
            return lambda api: api.limit_node(node, None)
        case steps.PauseJob():
            return lambda api: api.pause(job.job_id)
        case steps.ResumeJob():
            return lambda api: api.resume(job.job_id)
        case steps.StopJob():
            return lambda api: api.stop(job.job_id)
    raise AssertionError(step)
