"""All jobs and nodes, and the one way in which they change.

A request, a report, a heartbeat that did not come and a change that fell due are all events. An
event goes through the state machine; the changed job is written, and only then published.
"""

import contextlib
import logging
import math
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from job_server.api import wire
from job_server.api.codec import to_json
from job_server.api.errors import BadRequest, Conflict, Gone, NotFound, StoreTrouble
from job_server.cluster.placement import Cluster
from job_server.cluster.quarantine import FORGIVEN_S, begin, lasting
from job_server.jobs.clocks import moved_back
from job_server.jobs.events import (
    Event,
    NodesChanged,
    Preceded,
    RequestRefused,
    ServerRestarted,
    StopAsked,
    Tick,
)
from job_server.server.nodes import (
    ClusterMemo,
    Held,
    KnownNode,
    NodeRegistry,
    Plan,
    is_same_client,
    taken_over,
)
from job_server.server.polls import Topic, Watchers
from job_server.server.store import Store
from job_server.sharing import job_types
from job_server.sharing.decide import (
    decide,
    share_key,
    takes_part,
    waits_its_turn,
    why_never,
    why_not_after,
)
from job_server.sharing.job_types import AnyJob
from job_server.sharing.job_views import NodeUse
from job_server.sharing.overview import overview
from job_server.sharing.policies import POLICIES
from job_server.sharing.reservations import NO_RESERVATIONS, Reservations, reserve
from job_server.teachers.job import TeacherJob
from job_server.training.core.job import Job
from job_server.training.views import PodView

logger = logging.getLogger(__name__)

TICK_S = 5.0  # a job that has not ended is stepped at least so often
PROGRESS_WRITE_S = 30.0  # progress alone is written at least so often
RETRY_S = 5.0  # after a step that failed
LATE_S = TICK_S  # the timer logs when it is later than this
WARN_EVERY_S = 30.0
REPORTS_PER_S = 200  # of all launchers together: where they are more, each reports more rarely
ASK_HEARTBEATS = 2  # a client silent for so many of them: its launchers are asked
DEAD_AFTER_S = 3 * TICK_S  # ... and than this counts as dead
SHARE_S = 5.0  # what shared jobs have is decided anew at least so often
MAX_ROUNDS = 10  # of one job giving slots to another; the timer goes on with the rest


@dataclass(slots=True)
class JobEntry:
    """A job, what is derived from it, and the topics that requests wait for."""

    job: AnyJob
    spec: wire.JobSpec
    state: wire.JobState
    forget: bool  # delete it when it has ended
    was_away: bool  # that the server was is still to be entered into the job
    status: Topic[AnyJob]
    events: Topic[int]  # the number of the newest, which is also the revision
    due_at: float  # when the timer steps it next
    written_at: float
    published_at: float = 0.0
    defect: str = ""  # the last error of a step that failed
    orders: dict[str, Topic[PodView]] = field(default_factory=dict)  # by pod id
    asked: set[str] = field(default_factory=set)  # pod ids: the next poll says that they live
    views: Mapping[str, PodView] = field(default_factory=dict)  # by pod id: what to order it
    node_pods: dict[str, Plan] = field(default_factory=dict)  # by node id; registered nodes only
    seen: ClusterMemo = field(default_factory=ClusterMemo)
    pods: int = 0
    slots: Held = field(default_factory=dict)
    ports: Held = field(default_factory=dict)
    short_of: int = 0  # pods of a training for which there was no place
    share_key: object = None  # what decisions on shared jobs depend on
    page: tuple[tuple[int, int, int], bytes] = ((0, 0, 0), b"")  # newest, after, limit: its events

    def topics(self) -> list[Topic[Any]]:
        return [self.status, self.events, *self.orders.values()]


def steady_clock() -> Callable[[], float]:
    """Return a clock of seconds since 1970 that never jumps while the server runs.

    A wall clock that is set would otherwise look like an hour of silence of every node. From then
    on, as after a sleep of the machine, this one is not the time of day.
    """
    offset = time.time() - time.monotonic()
    return lambda: time.monotonic() + offset


class Engine:
    """One lock, the jobs behind it, and the timer. Methods are called with `lock` held.

    Raises (all methods that change something):
        StoreTrouble: it could not be written; nothing was changed.
    """

    def __init__(
        self,
        store: Store,
        *,
        heartbeat_s: float,
        max_watchers: int,
        now: Callable[[], float],
        wall: Callable[[], float],
        sharing: str = "goodput",
    ) -> None:
        """Load what `store` holds, for start(). Jobs that cannot be read are put aside.

        Args:
            now: by which all is decided; see `steady_clock`.
            wall: the time of day, for people.
            sharing: the policy of `sharing.policies.POLICIES` by which jobs share the cluster.
        """
        self.server_id = uuid.uuid4().hex[:12]
        self.now = now
        self.wall = wall
        self.store = store
        self.watchers = Watchers(max_watchers)
        self.lock = threading.RLock()
        self.registry = NodeRegistry(heartbeat_s)
        self.jobs: dict[str, JobEntry] = {}
        # Those of them that have something to do. The others, which have ended, stay for people to
        # look at, and may be thousands: nothing that happens often is to pass through them.
        self.live: dict[str, JobEntry] = {}
        # Those of them that hold slots or ports, and those of teachers. Very many may wait: what
        # one sees of the nodes all do, and nothing is to cost the square of their number.
        self._holders: dict[str, JobEntry] = {}
        self._teaching: dict[str, JobEntry] = {}
        self._seen_by_others = ClusterMemo()
        self.unreadable: dict[str, str] = {}  # job id -> why; its row stays as it is
        self._aside: dict[str, AnyJob] = {}  # the pods of those, as far as they can be read
        self.slots_moved = False  # converge() has something to do
        self.share_wanted = False  # it is to decide anew what shared jobs have
        self._policy = sharing
        self._share_at = -math.inf  # when that is due in any case
        self._write_at = -math.inf  # when it is tried again whether the database can be written
        self._pods = 0  # of all jobs
        self._held = 0  # how often the slots or ports that jobs hold have changed
        self._timer_wakes = threading.Condition(self.lock)
        self._timer = threading.Thread(target=self._run_timer, name="timer", daemon=True)
        self.timer_due = math.inf  # monotonic: when its next round is to begin
        self._closing = False
        self._warned_at = -math.inf  # monotonic: when the log last said how late it hears
        self._load()

    def _load(self) -> None:
        for stored in self.store.jobs():
            try:
                job = job_types.decode_job(stored.data)
            except wire.WireError as error:
                self.unreadable[stored.job_id] = str(error)
                held = job_types.pods_of_unreadable(stored.data)
                if held is not None:
                    self._aside[stored.job_id] = held
                logger.error("%s", unreadable_text(stored.job_id, str(error)))
                continue
            self.add(job, forget=stored.forget, last_event=stored.last_event)
        self.registry.drained.update(self.store.drains())
        for data in self.store.nodes():
            try:
                node = wire.decode(wire.Node, data)
            except wire.WireError as error:  # its client registers it again
                logger.error("a node in the database cannot be read and is left out: %s", error)
                continue
            self.registry.put(self.known(node))
        self.registry.limits.update(self.store.limits())
        for node_id, data in self.store.quarantines():
            try:
                known = wire.decode(wire.Quarantine, data)
            except wire.WireError as error:  # what is wrong is reported again
                logger.error("a quarantine in the database cannot be read: %s", error)
                continue
            # Where the clock was set back since, it would never end, nor a later fault be news.
            lead_s = max(known.since, known.ended_at or 0.0) - self.now()
            self.registry.enter_quarantine(
                node_id, known.slot, moved_back(known, lead_s) if lead_s > 0 else known
            )

    def start(self) -> None:
        """Apply ServerRestarted to the loaded jobs and start the timer. Takes the lock."""
        with self.lock:
            for entry in self.jobs.values():  # first, so that every job sees which slots are taken
                self.derive(entry)
                entry.was_away = not entry.state.ended
            for entry in list(self.jobs.values()):
                if entry.was_away:
                    self._enter_bad_slots(entry)
                    self._step_or_log(entry, Tick())
            for entry in list(self.jobs.values()):
                if entry.state.ended and entry.forget:  # killed before it was forgotten
                    self.drop_or_retry(entry)
                self._stop_half_deleted(entry)
            self.share_wanted = True
            self.converge()
        self.timer_due = time.monotonic()
        self._timer.start()

    def close(self) -> None:
        """Answer all polls, stop the timer, write what is only in memory. Takes the lock."""
        with self.lock:
            if self._closing:
                return
            self._closing = True
            self.watchers.closing = True
            self.wake_timer()
            for entry in self.jobs.values():
                for topic in entry.topics():
                    topic.wake()
                if not entry.state.ended:
                    self._write_progress(entry)
            for known in self.registry.nodes.values():
                known.plan.wake()
        if self._timer.is_alive():
            self._timer.join()
        self.store.close()

    # --- time -----------------------------------------------------------------------------------

    def _run_timer(self) -> None:
        while True:
            with self.lock:
                if self._closing:
                    return
                late_s = time.monotonic() - self.timer_due
                if late_s > LATE_S:
                    logger.warning(
                        "the server's clock is %.0f s late: the machine or its disk is too busy, "
                        "and what was due comes later",
                        late_s,
                    )
                wait_s = self._tick_or_log()
                self.timer_due = time.monotonic() + wait_s
                self._timer_wakes.wait(wait_s)

    def wake_timer(self) -> None:
        """Have the timer look at once at what is due."""
        self._timer_wakes.notify_all()

    def clock_trouble(self) -> str:
        """Return why nothing falls due any more; "": the clock runs. Needs no lock."""
        if self._timer.ident is None or self._closing:
            return ""
        if not self._timer.is_alive():
            return "the server's clock has ended: no change, time limit or recovery happens"
        late_s = time.monotonic() - self.timer_due
        if late_s > DEAD_AFTER_S:
            return f"the server's clock is {late_s:.0f} s late: the machine or its disk is too busy"
        return ""

    def warnings(self) -> tuple[str, ...]:
        """Return what people should know of the server. Needs no lock."""
        found = [self.store.trouble] if self.store.trouble else []
        found += [unreadable_text(*each) for each in list(self.unreadable.items())]
        return tuple(found)

    def _tick_or_log(self) -> float:
        try:
            return self.tick()
        except Exception:  # a timer that ends would stop all jobs unnoticed
            logger.exception("a round of the server's clock failed; the next in %g s", RETRY_S)
            return RETRY_S

    def tick(self) -> float:
        """Step the jobs that are due; return the seconds until the next one is."""
        now = self.now()
        self._warn_of_late_hearing()
        if self.store.trouble and now >= self._write_at:  # where nothing happens, nobody writes
            self._write_at = now + RETRY_S
            self.store.try_again()
        for entry in list(self.live.values()):
            if entry.due_at <= now:
                self._set_due(entry)  # before the step, which may find nothing to change
                if entry.state.ended and entry.forget:
                    self.drop_or_retry(entry)
                else:
                    self._step_or_log(entry, Tick())
                    self._stop_half_deleted(entry)
        shares = self._shares()
        self.share_wanted |= shares and self.now() >= self._share_at
        self.converge()
        for node_id in self.registry.forgettable(now):
            logger.info("node %s: silent for an hour and without pods: forgotten", node_id)
            try:
                self.remove_node(node_id)
            except StoreTrouble as error:  # the next round tries again
                logger.error("node %s: not forgotten: %s", node_id, error)
        due = [entry.due_at for entry in self.live.values()]
        due.append(self._ask_launchers(now))
        due.append(self._share_at if shares else math.inf)
        # Something that is due again at once must not keep the lock.
        return min(max(min(due, default=math.inf) - self.now(), 0.002), TICK_S)

    @property
    def launcher_heartbeat_s(self) -> float:
        """How often launchers are told to report: clients are heard more often, and suffice."""
        return max(self.registry.heartbeat_s, self._pods / REPORTS_PER_S)

    def _ask_launchers(self, now: float) -> float:
        """Have the launchers of silent clients poll, which says that they live.

        Returns:
            When the next are to be asked; inf: launchers report often enough unasked.
        """
        next_at, heartbeat_s = math.inf, self.registry.heartbeat_s
        if self.launcher_heartbeat_s == heartbeat_s:
            return next_at
        # Who is only heard late is not to be asked: a thousand answers would make it later.
        silence_s = ASK_HEARTBEATS * heartbeat_s + self.registry.hearing.late_s
        for known in self.registry.nodes.values():
            ask_at = max(known.seen_at, known.asked_at) + silence_s
            if known.plan.value and now >= ask_at:
                known.asked_at, ask_at = now, now + silence_s
                for pod in known.plan.value:
                    entry = self.jobs.get(pod.job_id)
                    if entry is not None and pod.pod_id in entry.orders:
                        entry.asked.add(pod.pod_id)
                        topic = entry.orders[pod.pod_id]
                        topic.publish(topic.value)
            next_at = min(next_at, ask_at if known.plan.value else math.inf)
        return next_at

    def _warn_of_late_hearing(self) -> None:
        late_s = self.registry.hearing.late_s
        if late_s > LATE_S and time.monotonic() > self._warned_at + WARN_EVERY_S:
            self._warned_at = time.monotonic()
            logger.warning(
                "what is sent to the server is heard %.0f s late: the machine is too busy; nobody "
                "counts as silent for that time",
                late_s,
            )

    def _set_due(self, entry: JobEntry) -> None:
        now = self.now()
        # A job that has ended is due no more, unless it is still to be forgotten.
        entry.due_at = math.inf if entry.state.ended and not entry.forget else now + TICK_S
        try:
            deadline = job_types.next_deadline(entry.job, now, self.cluster(entry))
        except Exception:  # as in _step_or_log; the job is stepped every TICK_S all the same
            logger.exception("job %s: its next deadline is not known", entry.spec.job_id)
            return
        if deadline is not None:
            entry.due_at = min(entry.due_at, deadline)

    def _step_or_log(self, entry: JobEntry, event: Event) -> None:
        """Step a job where no request waits for an error: log it and try again later."""
        try:
            self.apply(entry, event)
        except StoreTrouble as error:
            logger.error("job %s: %s; trying again in %g s", entry.spec.job_id, error, RETRY_S)
            entry.due_at = self.now() + RETRY_S
        except Exception:  # one job's trouble must not stop the clock of all others
            logger.exception("job %s: a step failed; trying again later", entry.spec.job_id)
            entry.due_at = self.now() + RETRY_S

    def _stop_half_deleted(self, entry: JobEntry) -> None:
        """Stop a job whose delete a server of the version before was killed amid."""
        if entry.forget and not entry.state.ended and entry.job.goal.ends_as is None:
            self._step_or_log(entry, StopAsked())

    # --- change ---------------------------------------------------------------------------------

    def apply(self, entry: JobEntry, event: Event) -> None:
        """Step a job; write and publish it if it changed.

        Raises:
            Conflict: the state machine refused the event.
        """
        self._enter_absence(entry)
        self._apply(entry, event)

    def stop_and_forget(self, entry: JobEntry, *, discard: bool) -> None:
        """Stop a job that is to be forgotten once it has ended, in one transaction."""
        self._enter_absence(entry)
        if not entry.state.ended:
            self._apply(entry, StopAsked(discard=discard), forget=True)
        if not entry.forget:  # it was being stopped, or had ended
            self.store.save_job(entry.spec.job_id, wire.encode(entry.job), forget=True)
            entry.forget = True

    def _enter_absence(self, entry: JobEntry) -> None:
        """Have a job know that the server was away: that comes before all else, however long it
        cannot be written.
        """
        if entry.was_away:
            entry.was_away = False
            try:
                self._apply(entry, ServerRestarted())
            except StoreTrouble:
                entry.was_away = True
                raise

    def _apply(self, entry: JobEntry, event: Event, *, forget: bool = False) -> None:
        """Step a job; where that changes it, and `forget`, it is to be forgotten from then on."""
        now = self.now()
        try:
            job, reason = job_types.step(
                entry.job, event, now, self.cluster(entry), self.reservations()
            )
        except RequestRefused as error:
            raise Conflict(str(error)) from None
        except Exception as error:  # noted for users as well as raised to the caller
            self._record_defect(entry, event, error)
            raise
        if job == entry.job:
            return
        held = {} if reason else job_types.newly_held(entry.job, job)
        noted = bool(held) and self.store.note_held(
            entry.spec.job_id, {pod_id: wire.encode(ref) for pod_id, ref in held.items()}
        )
        if noted or (not reason and job_types.same_but_progress(entry.job, job)):
            # Progress brings no deadline forward, but where a client begins to omit a pod.
            omitted = job.progress.missing != entry.job.progress.missing
            entry.job = job
            if noted:
                self.derive(entry)
            self._note_progress(entry, now)
            if omitted or noted:
                self._reset_timer(entry)
            return
        job_id = entry.spec.job_id
        status = job_types.job_status(job, now, entry.status.revision + 1)
        events: tuple[wire.JobEvent, ...] = ()
        if reason:
            number = entry.events.value + 1
            events = (
                wire.JobEvent(
                    number=number, at=self.wall(), job_id=job_id, stage=status.stage, text=reason
                ),
            )
        forget |= entry.forget
        self.store.save_job(job_id, wire.encode(job), events=events, forget=forget)
        for each in events:  # not before: what cannot be written has not happened
            logger.info("job %s stage %d %s: %s", job_id, each.stage, status.state.value, each.text)
        entry.job, entry.state, entry.forget = job, status.state, forget
        self._enter_bad_slots(entry)
        entry.written_at = entry.published_at = now
        self.derive(entry)
        entry.status.publish(job)
        for each in events:
            entry.events.publish(each.number)
        self._reset_timer(entry)
        if entry.forget and entry.state.ended:
            self.drop_or_retry(entry)

    def _record_defect(self, entry: JobEntry, event: Event, error: Exception) -> None:
        """Add an event that says that a step failed and the job is unchanged. Once per text."""
        text = f"the server has a defect: {type(event).__name__} is left out: {error}"[:1000]
        if text == entry.defect:
            return
        entry.defect = text
        logger.error("job %s: %s", entry.spec.job_id, text, exc_info=error)
        number, now = entry.events.value + 1, self.now()
        stage = job_types.job_status(entry.job, now, 0).stage
        job_id = entry.spec.job_id
        at = self.wall()
        noted = wire.JobEvent(number=number, at=at, job_id=job_id, stage=stage, text=text)
        try:
            self.store.save_job(
                job_id, wire.encode(entry.job), events=(noted,), forget=entry.forget
            )
        except StoreTrouble as trouble:
            logger.error("job %s: the event is not written: %s", job_id, trouble)
            return
        entry.events.publish(number)

    def _reset_timer(self, entry: JobEntry) -> None:
        before = entry.due_at
        self._set_due(entry)
        if entry.due_at < before:
            self.wake_timer()

    def _note_progress(self, entry: JobEntry, now: float) -> None:
        # 500 watchers of a job that reports every second would cost a core: the more watch, the
        # more rarely is progress published. All other changes are published at once.
        if now - entry.published_at >= max(1.0, self.watchers.count / 100):
            entry.published_at = now
            entry.status.publish(entry.job)
        else:
            entry.status.refresh(entry.job)
        if now - entry.written_at >= PROGRESS_WRITE_S:
            self._write_progress(entry)

    def _write_progress(self, entry: JobEntry) -> None:
        try:
            self.store.save_job(
                entry.spec.job_id, wire.encode(entry.job), forget=entry.forget, durable=False
            )
        except StoreTrouble as error:  # only some seconds of the account are at stake
            logger.error("job %s: progress not written: %s", entry.spec.job_id, error)
        entry.written_at = self.now()

    def derive(self, entry: JobEntry) -> None:
        """Update and publish all that is derived from a job."""
        entry.views = job_types.pod_orders(entry.job)
        news: dict[tuple[int, int], bool] = {}  # pods share views: each pair is compared once
        for pod_id, topic in list(entry.orders.items()):
            orders = entry.views.get(pod_id)
            if orders is None:
                topic.end(not_wanted(pod_id))
                del entry.orders[pod_id]
                entry.asked.discard(pod_id)
                continue
            pair = (id(topic.value), id(orders))
            if pair not in news:
                news[pair] = orders != topic.value
            if news[pair]:
                topic.publish(orders)
            else:
                topic.refresh(orders)
        plans = job_types.node_pods(entry.job)
        for node_id, known in self.registry.nodes.items():
            pods = plans.get(node_id, ())
            if entry.node_pods.get(node_id, ()) != pods:
                entry.node_pods[node_id] = pods
                known.plan.publish(self.plan_of(node_id))
        if entry.state.ended and not entry.job.pods:
            self._leave_alone(entry.spec.job_id)
        self._pods += len(entry.job.pods) - entry.pods
        entry.pods = len(entry.job.pods)
        slots, ports = job_types.slots_held(entry.job), job_types.ports_held(entry.job)
        key = share_key(entry.job)
        if key != entry.share_key:
            entry.share_key, self.share_wanted = key, True
        short_of = 0
        if not entry.state.ended:
            short_of = job_types.short_of(entry.job, self.now(), self.cluster(entry))
        if (slots, ports, short_of) != (entry.slots, entry.ports, entry.short_of):
            entry.slots, entry.ports, entry.short_of = slots, ports, short_of
            if slots or ports:
                self._holders[entry.spec.job_id] = entry
            else:
                self._holders.pop(entry.spec.job_id, None)
                entry.seen = ClusterMemo()  # all nodes, once more for each job that has ended
            self._held += 1
            self.slots_moved = True

    def _leave_alone(self, job_id: str) -> None:
        """Enter that a job has nothing to do any more."""
        for entries in (self.live, self._teaching, self._holders):
            entries.pop(job_id, None)

    def converge(self) -> None:
        """Step the jobs that may get slots, until no slot moves between jobs any more."""
        for _ in range(MAX_ROUNDS):
            if not (self.slots_moved or self.share_wanted):
                return
            moved = self.slots_moved
            self.slots_moved = self.share_wanted = False
            self._share()
            for entry in list(self.live.values()) if moved else ():
                if not entry.state.ended and not waits_its_turn(entry.job):
                    self._step_or_log(entry, NodesChanged())
        if self.slots_moved:
            logger.warning("slots still move from job to job after %d rounds", MAX_ROUNDS)

    def _shares(self) -> bool:
        return any(takes_part(entry.job) for entry in self.live.values())

    def _share(self) -> None:
        """Decide what shared jobs have, and tell those to which that is news.

        Not while a node has yet to say what else runs on it: that takes a heartbeat.
        """
        if not self._shares():
            return
        now = self.now()
        self._share_at = now + SHARE_S
        nodes = self._node_uses(now)
        if any(use.alive and use.report is None for use in nodes):
            return
        jobs = [entry.job for entry in self.jobs.values()]
        try:
            news = decide(POLICIES[self._policy], jobs, nodes, now, self._aside.values())
        except Exception:  # every request comes by here, and nodes are to be heard all the same
            logger.exception("it cannot be decided what shared jobs have: they keep what they have")
            return
        for job_id, event in news:
            entry = self.jobs.get(job_id)
            if entry is not None:
                self._step_or_log(entry, event)

    def cluster(self, entry: JobEntry) -> Cluster:
        """Return the nodes as this job's placement sees them."""

        def others() -> tuple[list[Held], list[Held]]:
            entries = [other for other in self._holders.values() if other is not entry]
            aside = self._aside.values()
            return (
                [*(other.slots for other in entries), *map(job_types.slots_held, aside)],
                [*(other.ports for other in entries), *map(job_types.ports_held, aside)],
            )

        holds = entry.spec.job_id in self._holders
        seen = entry.seen if holds else self._seen_by_others
        return self.registry.cluster(seen, self._held, others)

    def reservations(self) -> Reservations:
        """Return the slots that are reserved for trainings before teachers get any."""
        jobs = [entry.job for entry in self._teaching.values()]
        teachers = [job for job in jobs if isinstance(job, TeacherJob)]
        if not teachers:
            return NO_RESERVATIONS
        trainings = [
            (job, self.cluster(entry))
            for entry in self.live.values()
            # Whether one that has not begun is short of pods may depend on the time as well.
            if isinstance(job := entry.job, Job) and (entry.short_of or job.fresh)
        ]
        return reserve(trainings, teachers, self.now())

    # --- jobs and nodes -------------------------------------------------------------------------

    def add(self, job: AnyJob, *, forget: bool = False, last_event: int = 0) -> JobEntry:
        """Add a job that is already in the store."""
        now = self.now()
        status = job_types.job_status(job, now, 0)
        entry = JobEntry(
            job=job,
            spec=status.spec,
            state=status.state,
            forget=forget,
            was_away=False,
            status=Topic(
                job, self.status_body, self.watchers, self.first_revision(), for_users=True
            ),
            events=Topic(last_event, _no_body, self.watchers, last_event, for_users=True),
            due_at=now,
            written_at=now,
        )
        self.jobs[status.job_id] = self.live[status.job_id] = entry
        if isinstance(job, TeacherJob):
            self._teaching[status.job_id] = entry
        return entry

    def begin(self, entry: JobEntry) -> None:
        """Let a new job look at the nodes for the first time."""
        self.derive(entry)
        self._step_or_log(entry, NodesChanged())
        self.converge()
        self.wake_timer()

    def drop_or_retry(self, entry: JobEntry) -> None:
        """Forget a job; if the database fails, the timer tries again."""
        try:
            self.drop(entry)
        except StoreTrouble as error:
            logger.error("job %s: not forgotten yet: %s", entry.spec.job_id, error)
            entry.due_at = self.now() + RETRY_S
            self.live[entry.spec.job_id] = entry

    def drop(self, entry: JobEntry) -> None:
        """Forget a job; later requests for it get a 404."""
        job_id = entry.spec.job_id
        if entry.state is wire.JobState.SUCCEEDED:
            self._tell_followers(job_id)
        self.store.delete_job(job_id)
        del self.jobs[job_id]
        self._leave_alone(job_id)
        self._pods -= entry.pods
        self._held += 1
        gone = NotFound(f"job_id: job {job_id!r} was deleted")
        for topic in entry.topics():
            topic.end(gone)
        for node_id, pods in entry.node_pods.items():
            known = self.registry.nodes.get(node_id)
            if pods and known is not None:
                known.plan.publish(self.plan_of(node_id))
        self.slots_moved = True
        logger.info("job %s: forgotten", job_id)

    def _tell_followers(self, job_id: str) -> None:
        """Have the jobs after this one know that it has succeeded, also those that are paused."""
        for other in list(self.live.values()):
            if job_id in other.spec.after:
                try:
                    self.apply(other, Preceded(job_id))
                except StoreTrouble:
                    raise
                except Exception:  # its own trouble, which keeps nobody from forgetting this one
                    logger.exception("job %s: a step failed", other.spec.job_id)

    def drop_unreadable(self, job_id: str) -> None:
        """Forget a job that was put aside; its clients stop its pods."""
        self.store.delete_job(job_id)
        del self.unreadable[job_id]
        if self._aside.pop(job_id, None) is not None:
            for node_id, known in self.registry.nodes.items():
                known.plan.publish(self.plan_of(node_id))
            self._held += 1
            self.slots_moved = True
        logger.info("job %s, which could not be read: forgotten", job_id)

    def add_node(self, node: wire.Node) -> KnownNode:
        """Add a node, or replace it."""
        known = self.registry.nodes.get(node.node_id)
        if known is None or known.node != node:  # a full disk keeps nobody out who was here before
            self.store.save_node(node.node_id, wire.encode(node))
        if known is None:
            known = self.known(node)
            logger.info("node %s: %d slots at %s", node.node_id, len(node.slots), node.addr)
        elif not is_same_client(node.client, known.node.client):
            known.plan.end(taken_over(node.node_id))
            known.plan = self._plan_topic(node.node_id)
        known.node, known.seen_at, known.newest_ms = node, self.now(), 0
        self.registry.put(known)
        for entry in list(self.live.values()):
            self.derive(entry)
        self.slots_moved = True
        self.converge()
        self.wake_timer()
        return known

    def remove_node(self, node_id: str) -> None:
        self.store.delete_node(node_id)
        known = self.registry.remove(node_id)
        known.plan.end(NotFound(f"node_id: {node_id!r} has left; register it"))
        for entry in self.live.values():
            entry.node_pods.pop(node_id, None)
        self.slots_moved = True

    def limit_nodes(
        self, node_ids: Sequence[str], slots: int | None, *, drain: bool = False
    ) -> None:
        """Limit what shared jobs may have of each of these nodes, by one decision; None: no more.

        Args:
            drain: the pods of all jobs leave them, and none comes.

        Raises:
            NotFound: one is not registered; none is limited.
        """
        nodes = [self.registry.get(node_id) for node_id in node_ids]
        self.store.save_limits(node_ids, slots, drain=drain)
        self.share_wanted = True
        for node_id, known in zip(node_ids, nodes, strict=True):
            known.drains += drain
            if drain != known.drained:
                self.registry.drain(node_id, drain)
                self.slots_moved = True
            if slots is None:
                self.registry.limits.pop(node_id, None)
            else:
                self.registry.limits[node_id] = slots
            logger.info(
                "node %s: %s may have %s slots",
                node_id, "all jobs" if drain else "shared jobs", "all" if slots is None else slots,
            )  # fmt: skip
        self.converge()

    def judge_slots(self, node_id: str) -> None:
        """Enter what follows from what a node's client has just reported of its slots."""
        known = self.registry.nodes.get(node_id)
        if known is not None:
            for slot, quarantine in list(self.registry.judged(known, self.now())):
                self._enter_quarantine(node_id, slot, quarantine)

    def quarantine(
        self, node_id: str, slot: int, name: str, why: str, *, at: float | None = None
    ) -> None:
        """Put a slot in quarantine.

        Args:
            name: of the fault.
            at: when it happened, where that may have been entered already.

        Raises:
            NotFound: the node is not registered, or has no such slot.
        """
        known = self.registry.get(node_id)
        held = known.quarantines.get(slot)
        if held is not None and held.ended_at is None:
            return
        if held is not None and at is not None and (held.ended_at or held.since) >= at:
            return
        began = begin(held, known.slot(slot), name, why, self.now())
        self._enter_quarantine(node_id, slot, began)

    def take_back(self, node_id: str, slot: int) -> None:
        """Use a slot again that is in quarantine.

        Raises:
            NotFound: the node is not registered, or has no such slot.
            Conflict: the slot is not in quarantine, or what is wrong lasts.
        """
        known = self.registry.get(node_id)
        known.slot(slot)
        held = known.quarantines.get(slot)
        if held is None or held.ended_at is not None:
            raise Conflict(f"slot: slot {slot} of {node_id} is not in quarantine")
        lasts = lasting(known.usage(slot))
        if lasts and self.registry.is_alive(known, self.now()):
            raise Conflict(f"slot: slot {slot} of {node_id} is not taken back: {lasts}")
        self._enter_quarantine(node_id, slot, replace(held, ended_at=self.now()))

    def _enter_bad_slots(self, entry: JobEntry) -> None:
        """Enter the slots that a job has found bad; those of a node that is gone are its loss.

        A job keeps them for its life: what is forgiven by now, or was another card, is over.
        """
        for bad in entry.job.bad_slots if isinstance(entry.job, Job) else ():
            with contextlib.suppress(NotFound):
                uuid = self.registry.get(bad.node_id).slot(bad.slot).uuid
                is_other = bool(bad.uuid and uuid) and bad.uuid != uuid
                at = min(bad.at, self.now())  # later: the clock was set back since
                if not is_other and self.now() - at <= FORGIVEN_S:
                    self.quarantine(bad.node_id, bad.slot, bad.name, bad.why, at=at)

    def _enter_quarantine(self, node_id: str, slot: int, held: wire.Quarantine | None) -> None:
        try:
            self.store.save_quarantine(node_id, slot, None if held is None else wire.encode(held))
        except StoreTrouble as error:  # pods have to leave it all the same
            logger.error(
                "node %s: the quarantine of slot %d is not stored: %s", node_id, slot, error
            )
        self.registry.enter_quarantine(node_id, slot, held)
        self.slots_moved = self.share_wanted = True
        if held is not None and held.ended_at is None:
            logger.warning("node %s: slot %d is in quarantine: %s", node_id, slot, held.why)
        elif held is not None:
            logger.info("node %s: slot %d is used again", node_id, slot)

    def is_left(self, node_id: str) -> bool:
        """Return whether a job is leaving a node by a planned change."""
        return any(job_types.leaves(entry.job, node_id) for entry in self.live.values())

    def sharing(self) -> wire.Sharing:
        """Return how jobs share the cluster."""
        now = self.now()
        jobs = [entry.job for entry in self.jobs.values()]
        return overview(self._policy, jobs, self._node_uses(now), now, self._aside.values())

    def check_share(self, spec: wire.JobSpec) -> None:
        """Refuse a shared job that could never start.

        Raises:
            BadRequest: it needs more than the cluster has, or a job that will not succeed.
        """
        jobs = {job_id: entry.job for job_id, entry in self.jobs.items()}
        # Nodes as they registered: what is short, drained or in quarantine will be used again.
        uses = [
            replace(use, node=known.node, limit=None if known.drained else use.limit)
            for use, known in zip(
                self._node_uses(self.now()), self.registry.nodes.values(), strict=True
            )
        ]
        why = why_not_after(spec, jobs) or why_never(spec, uses)
        if why:
            raise BadRequest(why)

    def _node_uses(self, now: float) -> list[NodeUse]:
        return [
            NodeUse(
                node=known.effective,
                alive=self.registry.is_alive(known, now) and not self.registry.is_mute(known, now),
                report=known.report,
                limit=self.registry.limits.get(known.node.node_id),
                foreign_cpu_milli=known.cpu.used,
                foreign_memory_mb=known.memory.used,
            )
            for known in self.registry.nodes.values()
        ]

    def known(self, node: wire.Node) -> KnownNode:
        now, plan = self.now(), self._plan_topic(node.node_id)
        return KnownNode(node=node, seen_at=now, added_at=now, plan=plan)

    def _plan_topic(self, node_id: str) -> Topic[Plan]:
        pods = self.plan_of(node_id)
        return Topic(pods, self._plan_body, self.watchers, self.first_revision())

    def first_revision(self) -> int:
        """Return a number above all revisions before a restart: a poll from then must not wait."""
        return int(self.now() * 1000)

    def plan_of(self, node_id: str) -> Plan:
        plans = [entry.node_pods.get(node_id, ()) for entry in self.live.values()]
        plans += [job_types.node_pods(job).get(node_id, ()) for job in self._aside.values()]
        return tuple(pod for pods in plans for pod in pods)

    # --- bodies; called by topics, without the lock ----------------------------------------------

    def status_of(self, job: AnyJob, revision: int) -> wire.JobStatus:
        """Return a job's status; where it cannot change now, it says so."""
        status, trouble = job_types.job_status(job, self.now(), revision), self.store.trouble
        if not trouble or status.state.ended:
            return status
        return replace(status, warnings=(trouble, *status.warnings))

    def status_body(self, job: AnyJob, revision: int) -> bytes:
        return to_json(self.status_of(job, revision))

    def orders_body(self, orders: PodView, revision: int) -> bytes:
        message = wire.PodOrders(
            server_id=self.server_id,
            revision=revision,
            plans=orders.plans,
            heartbeat_s=self.launcher_heartbeat_s,
            leave=orders.leave,
            spares=orders.spares,
            adapter=orders.adapter,
            hang_limits=orders.hang_limits,
            hang_kills=orders.hang_kills,
        )
        return to_json(message)

    def unchanged_body(self, revision: int) -> bytes:
        """Return PodOrders that say that those of this revision hold: plans of many are long."""
        return to_json(
            wire.PodOrders(
                server_id=self.server_id,
                revision=revision,
                plans=(),
                heartbeat_s=self.launcher_heartbeat_s,
            )
        )

    def _plan_body(self, pods: Plan, revision: int) -> bytes:
        plan = wire.NodePlan(
            server_id=self.server_id,
            revision=revision,
            pods=pods,
            heartbeat_s=self.registry.heartbeat_s,
        )
        return to_json(plan)


def unreadable_text(job_id: str, why: str) -> str:
    return (
        f"job_id: job {job_id!r} is in the database, but this version cannot read it ({why}); "
        "use the server that wrote it, or delete the job"
    )


def not_wanted(pod_id: str) -> Gone:
    return Gone(f"pod_id: {pod_id[:100]!r} is not wanted any more; end its trainers and exit")


def _no_body(_value: int, _revision: int) -> bytes:
    return b""
