"""Answer requests, without HTTP: one method for each route.

Most answers are bodies that are ready to send, so that many watchers cost one serialisation.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from job_server.api import wire
from job_server.api.codec import to_json
from job_server.api.errors import BadRequest, Conflict, Gone, NotFound
from job_server.cluster.change_script import parse_script
from job_server.cluster.quarantine import BY_HAND
from job_server.jobs.events import (
    Demanded,
    Event,
    LauncherAttached,
    LauncherReported,
    NodeReported,
)
from job_server.server.engine import Engine, JobEntry, not_wanted, steady_clock, unreadable_text
from job_server.server.polls import JsonReply, Topic
from job_server.server.store import Store
from job_server.server.task_service import TaskService
from job_server.sharing import job_types
from job_server.teachers.job import TeacherJob
from job_server.training.views import PodView

logger = logging.getLogger(__name__)


class JobService:
    """The requests about jobs and nodes. Safe to use from any thread.

    Raises (all methods that change something):
        StoreTrouble: it could not be written; nothing was changed.
    """

    def __init__(
        self,
        store: Store,
        *,
        heartbeat_s: float = 3.0,
        max_watchers: int = 600,
        now: Callable[[], float] | None = None,
        sharing: str = "goodput",
    ) -> None:
        """Load what `store` holds.

        Args:
            now: seconds since 1970, never going back; None: as usual. It is also the time of day.
            sharing: the policy by which jobs share the cluster.
        """
        self.engine = Engine(
            store,
            heartbeat_s=heartbeat_s,
            max_watchers=max_watchers,
            now=now or steady_clock(),
            wall=now or (lambda: time.time()),
            sharing=sharing,
        )
        self.tasks = TaskService(store, self.engine.now)
        self.server_id = self.engine.server_id
        self.now = self.engine.now
        self.wall = self.engine.wall
        self.start = self.engine.start
        self.close = self.engine.close
        self.clock_trouble = self.engine.clock_trouble
        self.warnings = self.engine.warnings

    # --- jobs, for users ------------------------------------------------------------------------

    def submit(self, spec: wire.JobSpec, *, legacy_nodes: tuple[wire.Node, ...] = ()) -> JsonReply:
        """Add a job; return its JobStatus. The same spec again is no error: only the first is 201.

        Args:
            legacy_nodes: where its pods run for clients of the original, which register nothing.

        Raises:
            WireError: its change script is wrong.
            Conflict: the id is taken by another spec, or by a job that is being deleted, or the
                service by another job of teachers.
            BadRequest: it is shared, and could never start.
        """
        parse_script(spec.script, spec)
        engine = self.engine
        with engine.lock:
            taken = engine.jobs.get(spec.job_id)
            if spec.job_id in engine.unreadable:
                raise Conflict(unreadable_text(spec.job_id, engine.unreadable[spec.job_id]))
            if taken is not None:
                if taken.forget:
                    raise Conflict(
                        f"job_id: {spec.job_id!r} is being deleted; submit it again once it is gone"
                    )
                if taken.spec != spec:
                    raise Conflict(
                        f"job_id: {spec.job_id!r} is taken by a job with another spec; "
                        "delete that one or choose another id"
                    )
                return taken.status.poll(-1, 0)
            serving = None if spec.service is None else self._serving(spec.service)
            if serving is not None:
                raise Conflict(
                    f"service: {spec.service!r} is served by job {serving.spec.job_id!r}; "
                    "stop that one, or name another service"
                )
            if spec.share:
                engine.check_share(spec)
            now = self.now()
            job = job_types.new_job(spec, now, legacy_nodes=legacy_nodes)
            at = self.wall()
            event = wire.JobEvent(number=1, at=at, job_id=spec.job_id, stage=0, text="submitted")
            engine.store.save_job(spec.job_id, wire.encode(job), events=(event,))
            entry = engine.add(job, last_event=event.number)
            engine.begin(entry)
            return replace(entry.status.poll(-1, 0), status=201)

    def job_ids(self) -> list[str]:
        """Return all ids, in the order of submission."""
        with self.engine.lock:
            return list(self.engine.jobs)

    def job(self, job_id: str, revision: int = -1, timeout_s: float = 0.0) -> JsonReply:
        """Return a JobStatus; with a timeout, as soon as its revision is not `revision`.

        Raises:
            NotFound: no such job, or it was deleted meanwhile.
        """
        return self._entry(job_id).status.poll(revision, timeout_s)

    def jobs(self) -> JsonReply:
        """Return all jobs' JobStatus."""
        with self.engine.lock:
            bodies = [entry.status.poll(-1, 0).body for entry in self.engine.jobs.values()]
        return JsonReply(body=b'{"jobs":[' + b",".join(bodies) + b"]}")

    def statuses(self, most_ended: int | None = None) -> list[wire.JobStatus]:
        """Return the jobs' statuses, for the page.

        Args:
            most_ended: of those that have ended only the newest so many; None: all.
        """
        with self.engine.lock:
            entries = list(self.engine.jobs.values())
            if most_ended is not None:
                ended = [entry.spec.job_id for entry in entries if entry.state.ended]
                left_out = set(ended[: max(0, len(ended) - most_ended)])
                entries = [entry for entry in entries if entry.spec.job_id not in left_out]
            jobs = [(entry.job, entry.status.revision) for entry in entries]
        return [job_types.job_status(job, self.now(), revision) for job, revision in jobs]

    def ask(self, job_id: str, event: Event) -> JsonReply:
        """Apply a user's request to a job; return its JobStatus after that.

        Raises:
            NotFound: no such job.
            Conflict: the job's state does not allow it.
        """
        with self.engine.lock:
            entry = self._entry(job_id)
            self.engine.apply(entry, event)
            self.engine.converge()
            return self._status_now(entry)

    def delete(self, job_id: str, *, discard: bool = False) -> JsonReply:
        """Stop a job, forget it as soon as it has ended; return its JobStatus.

        Args:
            discard: as of `StopAsked`.

        Raises:
            NotFound: no such job, or one that could not be read: now there is no such job.
        """
        engine = self.engine
        with engine.lock:
            if job_id in engine.unreadable:
                engine.drop_unreadable(job_id)
                engine.converge()
                raise NotFound(f"job_id: job {job_id!r}, which could not be read, was deleted")
            entry = self._entry(job_id)
            engine.stop_and_forget(entry, discard=discard)
            answer = self._status_now(entry)
            if entry.state.ended and job_id in engine.jobs:
                engine.drop_or_retry(entry)
            engine.converge()
            return answer

    def events(self, job_id: str, after: int, limit: int, timeout_s: float) -> JsonReply:
        """Return the job's events after number `after`; wait up to `timeout_s` if there are none.

        Raises:
            NotFound: no such job, or it was deleted meanwhile.
        """
        entry = self._entry(job_id)
        newest = entry.events.revision
        busy = entry.events.poll(newest if after >= newest else -1, timeout_s).busy
        with self.engine.lock:
            key = (entry.events.revision, after, limit)
            made_for, body = entry.page
            if made_for != key:  # followers ask for the same page: one query serves them all
                found = self.engine.store.events(job_id, after=after, limit=limit)
                body = to_json(wire.EventList(events=tuple(found)))
                entry.page = (key, body)
        return JsonReply(body=body, busy=busy)

    def last_events(self, job_id: str, count: int) -> list[wire.JobEvent]:
        """Return the newest `count` events, oldest first; none for an unknown job."""
        with self.engine.lock:
            entry = self.engine.jobs.get(job_id)
            if entry is None:
                return []
            after = max(entry.events.value - count, 0)
            return self.engine.store.events(job_id, after=after, limit=count)

    def legacy_pods(self, job_id: str | None) -> wire.OriginalPods:
        """Return the running pods in pod-rank order, for clients of the original.

        Raises:
            NotFound: no such job, or none at all.
            BadRequest: no id was given and there are several jobs.
        """
        if job_id is None:
            ids = self._trainings() or self.job_ids()
            if not ids:
                raise NotFound("job_id: missing, and there is no job")
            if len(ids) > 1:
                raise BadRequest(
                    f"job_id: missing, and there are several jobs: {', '.join(ids[:20])}"
                )
            job_id = ids[0]
        with self.engine.lock:
            entry = self._entry(job_id)
            job, revision = entry.job, entry.status.revision
        pods = sorted(job_types.running_pods(job), key=lambda pod: pod.pod_rank)
        return wire.OriginalPods(
            job_id=job_id,
            job_stage_flag=job_types.job_status(job, self.now(), revision).flag,
            pods=tuple(
                wire.OriginalPod(
                    pod_id=pod.pod_id,
                    addr=pod.addr,
                    pod_port=pod.ports[0] if pod.ports else 0,
                    trainer_ports=pod.ports,
                    gpus=pod.slots,
                )
                for pod in pods
            ),
        )

    def _trainings(self) -> list[str]:
        # Clients of the original know no jobs of teachers.
        with self.engine.lock:
            return [
                job_id
                for job_id, entry in self.engine.jobs.items()
                if entry.spec.kind is wire.JobKind.TRAINING
            ]

    def _entry(self, job_id: str) -> JobEntry:
        entry = self.engine.jobs.get(job_id)
        if job_id in self.engine.unreadable:
            raise NotFound(unreadable_text(job_id, self.engine.unreadable[job_id]))
        if entry is None:
            raise NotFound(f"job_id: there is no job {job_id[:100]!r}")
        return entry

    def _status_now(self, entry: JobEntry) -> JsonReply:
        # Not the topic's: that has ended if the request made the server forget the job.
        return JsonReply(body=self.engine.status_body(entry.job, entry.status.revision))

    # --- services, for discovery ----------------------------------------------------------------

    def demand(self, service: str, demand: wire.Demand) -> JsonReply:
        """Apply what the students of a service report; return a DemandAnswer.

        Raises:
            NotFound: no job of teachers serves it.
        """
        if demand.service != service:
            raise BadRequest(
                f"service: {demand.service!r} is posted at the route of {service[:100]!r}"
            )
        engine = self.engine
        with engine.lock:
            entry = self._serving(service)
            if entry is None:
                raise NotFound(
                    f"service: no job serves {service[:100]!r}; "
                    f"`edl submit --kind teacher --service {service[:100]}` adds one"
                )
            engine.apply(entry, Demanded(demand))
            engine.converge()
            job = entry.job
            assert isinstance(job, TeacherJob)
            answer = wire.DemandAnswer(
                server_id=self.server_id,
                job_id=job.spec.job_id,
                running=job.running,
                wanted=job.wanted,
            )
        return JsonReply(body=to_json(answer))

    def _serving(self, service: str) -> JobEntry | None:
        """Return the running job of teachers that serves it; None: there is none."""
        for entry in self.engine.live.values():
            if entry.spec.service == service and not entry.state.ended:
                return entry
        return None

    # --- pods, for launchers --------------------------------------------------------------------

    def attach(self, job_id: str, pod_id: str, attach: wire.Attach) -> JsonReply:
        """Apply all that a launcher knows; return its PodOrders.

        Raises:
            NotFound: no such job.
            Gone: the pod is not wanted.
        """
        if attach.pod_id != pod_id:
            raise BadRequest(f"pod_id: {attach.pod_id!r} attaches at the route of {pod_id[:100]!r}")
        with self.engine.lock:
            entry = self._entry(job_id)
            _check_job(entry, pod_id, attach.submitted_at)
            self._orders(entry, pod_id)
            self.engine.apply(entry, LauncherAttached(attach))
            self.engine.converge()
            return self._orders(entry, pod_id).poll(-1, 0)

    def orders(self, job_id: str, pod_id: str, revision: int, timeout_s: float) -> JsonReply:
        """Return PodOrders, as soon as their revision is not `revision`.

        Where it still is, they have no plans: the caller has them.

        Raises:
            NotFound: no such job.
            Gone: the pod is not wanted.
        """
        with self.engine.lock:
            entry = self._entry(job_id)
            topic = self._orders(entry, pod_id)
            if pod_id in entry.asked:
                entry.asked.discard(pod_id)
                alive = wire.PodReport(kind=wire.ReportKind.ALIVE, stage=0)
                self.engine.apply(entry, LauncherReported(pod_id, alive))
                topic = self._orders(entry, pod_id)
        return topic.poll(revision, timeout_s, self.engine.unchanged_body)

    def report(self, job_id: str, pod_id: str, report: wire.PodReport) -> JsonReply:
        """Apply a launcher's report.

        Raises:
            NotFound: no such job.
            Gone: the pod is not wanted.
        """
        with self.engine.lock:
            entry = self._entry(job_id)
            _check_job(entry, pod_id, report.submitted_at)
            self._orders(entry, pod_id)
            self.engine.apply(entry, LauncherReported(pod_id, report))
            self.engine.converge()
        return self._acknowledged()

    def _orders(self, entry: JobEntry, pod_id: str) -> Topic[PodView]:
        engine = self.engine
        topic = entry.orders.get(pod_id)
        if topic is None:
            orders = entry.views.get(pod_id)
            if orders is None and entry.spec.kind is wire.JobKind.TEACHER:
                raise Gone(
                    f"pod_id: {pod_id[:100]!r} is a teacher's: its script runs a teacher server "
                    "(`edl serve`), not a launcher"
                )
            if orders is None:
                raise not_wanted(pod_id)
            topic = Topic(orders, engine.orders_body, engine.watchers, engine.first_revision())
            entry.orders[pod_id] = topic
        return topic

    # --- nodes, for job clients -----------------------------------------------------------------

    def register(self, node: wire.Node) -> JsonReply:
        """Add a node, or replace it; return its NodePlan.

        Raises:
            Conflict: another client has its id, or uses its ports on the same address.
            Forbidden: there are too many nodes.
        """
        with self.engine.lock:
            self.engine.registry.check_room(node, self.now())
            self.engine.registry.check(node, self.now())
            return self.engine.add_node(node).plan.poll(-1, 0)

    def plan(
        self, node_id: str, revision: int, timeout_s: float, client: str | None = None
    ) -> JsonReply:
        """Return a NodePlan, as soon as its revision is not `revision`.

        Raises:
            NotFound: the node is not registered, or by another client.
        """
        with self.engine.lock:
            plan = self.engine.registry.get(node_id, client).plan
        return plan.poll(revision, timeout_s)

    def report_node(self, node_id: str, report: wire.NodeReport) -> JsonReply:
        """Apply a node's heartbeat to its jobs.

        If a job cannot take it (the disk is full, say), the error is logged and the heartbeat is
        acknowledged: the next one says the same again, and without acknowledgements the client
        would stop its pods (`stop_after`). Nothing follows a goodbye, so there the error is raised.

        Raises:
            NotFound: the node is not registered.
            Exception: a job could not take a goodbye.
        """
        if report.node_id != node_id:
            raise BadRequest(
                f"node_id: {report.node_id!r} reports at the route of {node_id[:100]!r}"
            )
        engine = self.engine
        with engine.lock:
            if engine.registry.is_late(node_id, report):
                return self._acknowledged()
            if engine.registry.note_report(node_id, report, self.now()):
                engine.slots_moved = True
            engine.judge_slots(node_id)
            trouble: Exception | None = None
            for entry in list(engine.live.values()):
                pods = tuple(pod for pod in report.pods if _is_of(entry, pod))
                if pods or entry.node_pods.get(node_id) or node_id in entry.slots:
                    try:
                        engine.apply(entry, NodeReported(node_id, pods))
                    except Exception as error:  # noqa: BLE001 - the other jobs get it all the same
                        job_id = entry.spec.job_id
                        logger.error(
                            "job %s: heartbeat of %s not applied: %s", job_id, node_id, error
                        )
                        trouble = trouble or error
            if report.leaving and trouble is None:
                logger.info("node %s: leaves", node_id)
                engine.remove_node(node_id)
            engine.converge()
            if report.leaving and trouble is not None:
                raise trouble
            moving = engine.is_left(node_id) if report.draining else None
        return self._acknowledged(moving)

    def nodes(self) -> JsonReply:
        """Return all nodes' NodeStatus."""
        return JsonReply(body=to_json(wire.NodeList(nodes=tuple(self.node_statuses()))))

    def limit_node(self, node_id: str, limit: wire.NodeLimit) -> wire.NodeStatus:
        """Limit what shared jobs may have of a node, and of others; return its NodeStatus.

        Raises:
            NotFound: one of them is not registered; none is limited.
        """
        engine = self.engine
        with engine.lock:
            nodes = tuple(dict.fromkeys((node_id, *limit.also)))
            engine.limit_nodes(nodes, limit.slots, drain=limit.drain)
            return engine.registry.status(engine.registry.get(node_id), self.now())

    def order_slot(self, node_id: str, order: wire.SlotOrder) -> wire.NodeStatus:
        """Put a slot in quarantine, or take it back; return its node's NodeStatus.

        Raises:
            NotFound: the node is not registered, or has no such slot.
            Conflict: it cannot be taken back.
        """
        engine = self.engine
        with engine.lock:
            if order.take_back:
                engine.take_back(node_id, order.slot)
            else:
                engine.quarantine(node_id, order.slot, BY_HAND, order.why)
            engine.converge()
            engine.wake_timer()
            return engine.registry.status(engine.registry.get(node_id), self.now())

    def sharing(self) -> wire.Sharing:
        """Return how jobs share the cluster."""
        with self.engine.lock:
            return self.engine.sharing()

    def node_statuses(self) -> list[wire.NodeStatus]:
        with self.engine.lock:
            return self.engine.registry.statuses(self.now())

    def _acknowledged(self, moving: bool | None = None) -> JsonReply:
        known = wire.Acknowledgement(server_id=self.server_id, moving=moving)
        return JsonReply(body=to_json(known))


def _is_of(entry: JobEntry, pod: wire.PodState) -> bool:
    same_id = pod.job_id == entry.spec.job_id
    return same_id and wire.is_same_job(pod.submitted_at, entry.job.submitted_at)


def _check_job(entry: JobEntry, pod_id: str, submitted_at: float) -> None:
    """Raise Gone where a launcher was started for an earlier job of this id."""
    if not wire.is_same_job(submitted_at, entry.job.submitted_at):
        raise not_wanted(pod_id)
