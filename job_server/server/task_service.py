"""Answer requests about queues of tasks, without HTTP: one method for each route."""

import logging
import threading
from collections.abc import Callable

from job_server.api import wire
from job_server.api.errors import Conflict, NotFound, StoreTrouble
from job_server.api.task_wire import (
    Lease,
    LeaseAsked,
    TaskAnswer,
    TaskQueueList,
    TaskQueueSpec,
    TaskQueueStatus,
    TaskReport,
)
from job_server.server.store import Store
from job_server.tasks.queue import StoredQueue, Task, TaskQueue

logger = logging.getLogger(__name__)


class TaskService:
    """The queues. Safe to use from any thread.

    Raises (all methods that change something):
        StoreTrouble: it could not be written; nothing was changed.
        NotFound: there is no such queue.
    """

    def __init__(self, store: Store, now: Callable[[], float]) -> None:
        """Load what `store` holds. `now`: seconds since 1970, never going back."""
        self._store = store
        self._now = now
        self._lock = threading.Lock()
        self._queues: dict[str, TaskQueue] = {}
        self._unwritten: set[str] = set()  # what these have in memory is not what is stored
        for name in store.task_queues():
            self._load(name)

    def _load(self, name: str) -> None:
        """Read a queue; one that cannot be read is left out, and its readers are told so."""
        data, tasks = self._store.task_queue(name)
        self._unwritten.discard(name)
        self._queues.pop(name, None)
        try:
            self._queues[name] = TaskQueue.load(
                wire.decode(StoredQueue, data),
                [wire.decode(Task, task) for task in tasks],
                self._now(),
            )
        except wire.WireError as error:
            logger.error("task queue %s cannot be read and is left out: %s", name, error)

    def list_queues(self) -> TaskQueueList:
        """Return all queues by name."""
        with self._lock:
            queues = [self._queue(name) for name in sorted(self._queues)]
            return TaskQueueList(queues=tuple(queue.status(self._now()) for queue in queues))

    def make_queue(self, spec: TaskQueueSpec) -> TaskQueueStatus:
        """Add a queue. The same again is no error.

        Raises:
            Conflict: the name is taken by a queue of something else.
        """
        with self._lock:
            taken = self._find(spec.name)
            if taken is None:
                self._store.delete_task_queue(spec.name)  # of one that could not be read
                stored = StoredQueue(spec=spec, first_lease=int(self._now() * 1000))
                self._store.save_tasks(spec.name, [], queue=(0, wire.encode(stored)))
                taken = self._queues[spec.name] = TaskQueue.load(stored, (), self._now())
                logger.info("task queue %s: %d tasks", spec.name, len(spec.tasks))
            elif taken.spec != spec:
                raise Conflict(
                    f"name: the task queue {spec.name!r} is there, with other tasks or settings; "
                    "choose another name, or delete that one (`edl tasks NAME --delete`)"
                )
            return taken.status(self._now())

    def get_queue(self, name: str) -> TaskQueueStatus:
        """Return how far a queue is."""
        with self._lock:
            return self._queue(name).status(self._now())

    def delete_queue(self, name: str) -> TaskQueueStatus:
        """Forget a queue; return how far it was."""
        with self._lock:
            status = self._queue(name).status(self._now())
            self._store.delete_task_queue(name)
            del self._queues[name]
            logger.info("task queue %s: deleted", name)
            return status

    def lease_task(self, name: str, asked: LeaseAsked) -> Lease:
        """Hand out a task."""
        with self._lock:
            queue = self._queue(name)
            lease = queue.lease(asked, self._now())
            # A power cut may lose a lease: then the task is read twice, as when its reader dies.
            self._write(queue, durable=False)
            return lease

    def report_task(self, name: str, report: TaskReport) -> TaskAnswer:
        """Take a reader's report."""
        with self._lock:
            queue = self._queue(name)
            held = queue.report(report, self._now())
            self._write(queue, durable=report.done)
            return TaskAnswer(held=held)

    def _write(self, queue: TaskQueue, *, durable: bool) -> None:
        changes, name = queue.take_changes(), queue.spec.name
        stored = changes.queue
        try:
            if changes.tasks or stored is not None:
                self._store.save_tasks(
                    name,
                    [(*task.key, wire.encode(task)) for task in changes.tasks],
                    queue=None if stored is None else (stored.pass_number, wire.encode(stored)),
                    durable=durable,
                )
        except StoreTrouble:
            self._unwritten.add(name)  # the next request reads it: as if nothing had been asked
            raise
        for task in changes.dropped:
            logger.error(
                "task queue %s: task %d is dropped in pass %d: %s: %s",
                name, task.number, task.pass_number, queue.spec.tasks[task.number], task.error,
            )  # fmt: skip

    def _find(self, name: str) -> TaskQueue | None:
        if name in self._unwritten:
            self._load(name)
        return self._queues.get(name)

    def _queue(self, name: str) -> TaskQueue:
        queue = self._find(name)
        if queue is None:
            raise NotFound(f"name: there is no task queue {name[:100]!r}")
        return queue
