"""Look after all TrainingJobs: whoever is due is looked at, decided on, and acted for.

Whatever is done follows from what was read just before. Watches say when to read a job and its
pods again; without them that is done once in a while all the same. In between only the job's own
server is asked, so that quiet jobs cost Kubernetes next to nothing.
"""

import base64
import contextlib
import heapq
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from msgspec.structs import replace

from job_server.api.api_client import ApiClient
from job_server.api.errors import BadRequest, JobServerError
from job_server.api.wire import JobSpec, JobStatus
from k8s_controller.decisions import objects
from k8s_controller.decisions import reconcile as steps
from k8s_controller.decisions.observed import (
    ListedPod,
    Observed,
    ServerView,
    belongs_to,
    observe_pods,
)
from k8s_controller.decisions.spec import KIND, Object, SpecError, parse
from k8s_controller.decisions.status import Phase, TrainingJobStatus
from k8s_controller.kube_api import TROUBLES, KubeApi, KubeError
from k8s_controller.metrics import Metrics
from k8s_controller.server_link import TrainingServer

logger = logging.getLogger(__name__)

Key = tuple[str, str]  # namespace, name

MOVING_S = 0.5  # until the next look at a job whose pods come or go
REFUSED_S = 5.0  # ... after Kubernetes refused to make one
TROUBLE_S = (1.0, 15.0)  # after an error: doubled each time, up to that
TOLD_ERRORS = 4  # so many, one after the other, are told in an event
WORKERS = 8
READ_S = 60.0  # a job is read again after that, whatever the watches say
PROGRESS_S = 15.0  # between two writes of a status in which nothing but the step has changed
_PROGRESS = frozenset({"step", "stepSeconds", "epoch"})
_SETTLED = (Phase.RUNNING, Phase.SUSPENDED, Phase.SUCCEEDED, Phase.FAILED)


@dataclass(slots=True)
class _Known:
    """What this process keeps of a job, all of which it can do without."""

    prepared: bool = False  # in this life
    prepared_at: float = 0.0
    budget: int | None = None  # as it was written, in this life
    closed: set[str] = field(default_factory=set)  # nodes of its server's, in this life
    link: TrainingServer | None = None
    errors: int = 0  # one after the other
    changed: bool = True  # since it was read, for all that the watches say
    read_at: float = 0.0
    job: Object = field(default_factory=dict)  # as it was read, or written since
    trainers: tuple[ListedPod, ...] = ()
    server_pod: ListedPod | None = None
    written_at: float = 0.0


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
        """Read a job again, as soon as can be. Thread-safe."""
        with self._changed:
            if (known := self._known.get((namespace, name))) is not None:
                known.changed = True
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
            self._tell(known, str(error))
        except Exception as error:  # of one job; the others must not suffer
            self._metrics.count("errors")
            known.errors += 1
            logger.exception("%s/%s: this pass has failed", *key)
            self._tell(known, f"a defect of the controller, whose log says more: {error!r}")
        finally:
            self._metrics.took(time.monotonic() - began)
            with self._changed:
                known.changed |= known.errors > 0
                self._queue.busy.discard(key)
                due = self._queue.due.pop(key, None)  # somebody asked meanwhile
                if wait_s is None and due is None:
                    self._forget(key)
                else:
                    at = time.monotonic() + (wait_s or 0.0)
                    self._queue.put(key, at if due is None else min(at, due))
                self._changed.notify()

    def _tell(self, known: _Known, why: str) -> None:
        """Say in an event that passes fail, as the status stays as it was then."""
        if known.errors == TOLD_ERRORS and known.job:
            with contextlib.suppress(*TROUBLES):
                words = f"nothing is done for it now; tried again and again: {why}"
                self._kube.say(known.job, "PassFails", words, warning=True)

    def _forget(self, key: Key) -> None:
        known = self._known.pop(key, None)
        self._metrics.forget(key)
        if known is not None:
            self._disconnect(known)

    # --- one pass

    def _pass(self, key: Key, known: _Known) -> float | None:
        """Look at a job and act; return when to look again, None: there is no such job."""
        is_new = self._read_if_due(key, known)
        if not known.job:
            return None
        if "deletionTimestamp" in known.job["metadata"]:
            return self._interval_s  # its objects go with it
        outcome = self._decide(key, known)
        if outcome.steps and not is_new:  # nothing is done for what may be old
            with self._changed:
                known.changed = True
            return 0.0
        job = known.job
        refusal = self._do_all(outcome.steps, known)
        if refusal is not None:
            before = TrainingJobStatus.read(job.get("status"))
            outcome = steps.refused(outcome, before, str(refusal), self._kube.now())
        self._write(known, outcome.status)
        for notice in outcome.notices:
            logger.info("%s/%s: %s: %s", *key, notice.reason, notice.message)
            self._kube.say(job, notice.reason, notice.message, warning=notice.warning)
        self._metrics.enter(key, outcome.status)
        if refusal is not None:
            return REFUSED_S
        moving = outcome.steps or outcome.status.phase not in _SETTLED
        return MOVING_S if moving else self._interval_s

    def _read_if_due(self, key: Key, known: _Known) -> bool:
        """Read a job and its pods if they may have changed; return whether it was so."""
        now = time.monotonic()
        with self._changed:
            if not known.changed and now < known.read_at + READ_S:
                return False
            known.changed = False  # what a watch says from now on may be newer than this reading
        job = self._kube.get(KIND, *key) or {}
        uid = job["metadata"]["uid"] if job else ""
        if known.job and known.job["metadata"]["uid"] != uid:  # it is gone, or is another one
            self._disconnect(known)
            known.prepared, known.budget = False, None
        known.job = job  # first: what fails from now on is told in an event about it
        if job:
            known.trainers, known.server_pod = observe_pods(self._kube.pods_of(*key), uid)
        known.read_at = now
        return True

    def _decide(self, key: Key, known: _Known) -> steps.Outcome:
        job, now = known.job, self._kube.now()
        status = TrainingJobStatus.read(job.get("status"))
        generation = int(job["metadata"].get("generation", 0))
        try:
            spec = parse(job)
        except SpecError as error:
            return steps.refuse(key[1], generation, status, str(error), now)
        link = None if status.ended else self._link(key, known)
        server = None if link is None else link.view()
        if server is not None:
            known.closed &= {each for each, node in server.nodes.items() if node.limit == 0}
        is_due = time.monotonic() >= known.prepared_at + READ_S
        if is_due and not (status.ended or _all_answer(server, known.trainers)):
            known.prepared, known.budget = False, None  # somebody may have deleted what they need
        seen = Observed(
            trainers=known.trainers,
            server_pod=known.server_pod,
            server=server,
            prepared=known.prepared,
            budget=known.budget,
            closed=frozenset(known.closed),
        )
        return steps.reconcile(key[1], generation, spec, status, seen, now)

    def _write(self, known: _Known, status: TrainingJobStatus) -> None:
        raw, now = known.job.get("status") or {}, time.monotonic()
        new = status.write()
        changed = {name: value for name, value in new.items() if raw.get(name) != value}
        if not changed or (changed.keys() <= _PROGRESS and now < known.written_at + PROGRESS_S):
            return
        known.job = self._kube.write_status(known.job, changed)
        known.written_at = now

    def _link(self, key: Key, known: _Known) -> TrainingServer | None:
        """Return the connection to a job's server; None: it cannot be there."""
        server = known.server_pod
        if server is None or not server.address or server.over:
            return None
        host = f"[{server.address}]" if ":" in server.address else server.address
        url = f"http://{host}:{objects.PORT}"
        if known.link is not None and known.link.url == url:
            return known.link
        self._disconnect(known)
        secret = self._kube.get("Secret", key[0], f"{key[1]}-token")
        if secret is None or not belongs_to(secret, known.job["metadata"]["uid"]):
            known.prepared = False
            return None
        known.link = TrainingServer(url, base64.b64decode(secret["data"]["token"]).decode(), key[1])
        return known.link

    @staticmethod
    def _disconnect(known: _Known) -> None:
        if known.link is not None:
            known.link.close()
        known.link = None

    def _do_all(self, wanted: Sequence[steps.Step], known: _Known) -> KubeError | None:
        """Do what is to be done; return why pods are not made, where Kubernetes refuses them."""
        refusal: KubeError | None = None
        for step in wanted:
            makes = isinstance(step, steps.Prepare | steps.MakeServer | steps.MakeTrainer)
            if makes and refusal is not None:
                continue
            try:
                self._do(step, known)
            except KubeError as error:
                if not (makes and error.is_refusal):
                    raise
                refusal = error
        return refusal

    def _do(self, step: steps.Step, known: _Known) -> None:
        job, spec = known.job, parse(known.job)
        namespace, name = job["metadata"]["namespace"], job["metadata"]["name"]
        match step:
            case steps.Prepare():
                # The server that runs goes by the token that it was started with.
                token = secrets.token_urlsafe(24) if known.link is None else known.link.token
                for each in objects.foundations(job, spec, token):
                    self._kube.create_for(job["metadata"]["uid"], each)
                known.prepared, known.prepared_at = True, time.monotonic()
            case steps.SetBudget(needed):
                known.budget = None  # it may be written also where no answer says so
                known.prepared = self._kube.set_budget(namespace, name, needed)
                known.budget = needed if known.prepared else 0  # it is made anew, with that
            case steps.MakeServer():
                self._kube.create_new(objects.server_pod(job, spec))
            case steps.MakeTrainer(index):
                self._kube.create_new(objects.trainer_pod(job, spec, index))
            case steps.RemovePod(pod, uid):
                self._kube.delete("Pod", namespace, pod, uid)
            case steps.RemoveTrainingJob():
                self._kube.delete(KIND, namespace, name, job["metadata"]["uid"])
            case _:
                assert known.link is not None  # these follow from its answer
                self._kube.check_writing()
                if isinstance(step, steps.CloseNodes):
                    known.closed.update(step.node_ids)
                known.link.ask(_question(step, spec.job_spec(name)))
        self._metrics.count("steps")


def _all_answer(server: ServerView | None, trainers: Sequence[ListedPod]) -> bool:
    there = [pod for pod in trainers if not pod.leaving and not pod.over]
    return server is not None and all(server.answers(pod.node_id) for pod in there)


def _submit(api: ApiClient, job: JobSpec) -> JobStatus:
    try:
        return api.submit(job)
    except BadRequest:  # its server has the trainers' image, perhaps of a version before
        return api.submit(replace(job, keeps_least=False))


def _question(step: steps.Step, job: JobSpec) -> Callable[..., object]:
    """Return what to ask the job server."""
    match step:
        case steps.SubmitJob():
            return lambda api: _submit(api, job)
        case steps.SetPods(pods):
            return lambda api: api.resize(job.job_id, pods)
        case steps.GiveUpDead(pods):
            return lambda api: api.resize(job.job_id, pods, assume_dead=True)
        case steps.CloseNodes((first, *others)):
            return lambda api: api.limit_node(first, 0, also=others)
        case steps.OpenNodes((first, *others)):
            return lambda api: api.limit_node(first, None, also=others)
        case steps.PauseJob():
            return lambda api: api.pause(job.job_id)
        case steps.ResumeJob():
            return lambda api: api.resume(job.job_id)
        case steps.StopJob():
            return lambda api: api.stop(job.job_id)
    raise AssertionError(step)
