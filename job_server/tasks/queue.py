"""A queue of tasks with leases: each is read once in each pass, whoever dies meanwhile. Pure.

The original's master does the same for its readers: a task whose reader is silent goes to another,
and one that fails again and again is dropped, so that the others are trained on.
"""

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum

from job_server.api.task_wire import (
    MAX_ERROR_CHARS,
    SHOWN_TASKS,
    Lease,
    LeaseAsked,
    TaskCount,
    TaskQueueSpec,
    TaskQueueStatus,
    TaskReport,
    TaskView,
)

MAX_LOST = 10  # readers that may vanish with a task before it is dropped: they may die of it
MAX_WAIT_S = 1.0

Key = tuple[int, int]  # pass, number


class TaskPhase(Enum):
    WAITING = "waiting"
    LEASED = "leased"
    DONE = "done"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """How far one task is in one pass."""

    pass_number: int
    number: int
    phase: TaskPhase = TaskPhase.WAITING
    worker: str = ""  # LEASED: who reads it
    place: str = ""  # ... and where
    in_loop: bool = False  # ... and whether in the elastic loop
    lease: int = 0  # number of the newest lease
    reads: int = 0  # how often it was begun
    failures: int = 0  # reported by readers
    lost: int = 0  # readers that fell silent with it, but for those in the elastic loop
    all_read: bool = False  # LEASED: its reader needs no more of it, and will say that it is done
    records: int = 0  # DONE: how many it has
    error: str = ""  # the last one

    @property
    def key(self) -> Key:
        return self.pass_number, self.number

    @property
    def is_read(self) -> bool:
        """Whether somebody reads it, and may fail."""
        return self.phase is TaskPhase.LEASED and not self.all_read

    @property
    def is_over(self) -> bool:
        return self.phase in (TaskPhase.DONE, TaskPhase.DROPPED)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredQueue:
    """What is stored of a queue, besides its tasks."""

    spec: TaskQueueSpec
    first_lease: int = 0  # above those of a queue that had the name before
    pass_number: int = 0
    passes: tuple[TaskCount, ...] = ()  # those before


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What is to be written. Of passes before the present one, only tasks that are not over are."""

    queue: StoredQueue | None  # None: unchanged. Else those tasks of passes before are forgotten
    tasks: tuple[Task, ...]
    dropped: tuple[Task, ...]  # to be told; of passes before as well


@dataclass(slots=True)
class TaskQueue:
    """One queue. Methods change it and note what is to be written; see `take_changes`."""

    spec: TaskQueueSpec
    first_lease: int = 0
    pass_number: int = 0
    _counts: dict[int, TaskCount] = field(default_factory=dict)  # by pass, the present one too
    _tasks: dict[Key, Task] = field(default_factory=dict)  # what it lacks of this pass waits
    _waiting: deque[Key] = field(default_factory=deque)
    _reading: int = 0  # tasks that somebody reads
    _ends: dict[Key, float] = field(default_factory=dict)  # of the leased: when the lease ends
    _heap: list[tuple[float, Key]] = field(default_factory=list)  # of the same, some out of date
    _changed: dict[Key, Task] = field(default_factory=dict)
    _passes_changed: bool = False

    @classmethod
    def load(cls, stored: StoredQueue, tasks: Iterable[Task], now: float) -> "TaskQueue":
        """Return the queue that was stored. Leases begin anew: nobody could report meanwhile."""
        queue = cls(stored.spec, stored.first_lease)
        queue._begin_pass(stored.pass_number)
        for task in sorted(tasks, key=lambda task: task.key):
            if task.pass_number < stored.pass_number:
                queue._waiting.appendleft(task.key)
            queue._set(task)
            if task.phase is TaskPhase.LEASED:
                queue._renew(task.key, now)
        queue._counts |= {count.pass_number: count for count in stored.passes}
        queue.take_changes()
        return queue

    def take_changes(self) -> Changes:
        """Return what has changed since the last call."""
        changed = self._changed
        dropped = tuple(task for task in changed.values() if task.phase is TaskPhase.DROPPED)
        if self._passes_changed:  # with the older ones that are not over: they would be forgotten
            changed |= self._tasks_before()
        changes = Changes(
            queue=self._stored() if self._passes_changed else None,
            tasks=tuple(
                task
                for task in changed.values()
                if task.pass_number == self.pass_number or not task.is_over
            ),
            dropped=dropped,
        )
        self._changed, self._passes_changed = {}, False
        return changes

    def _tasks_before(self) -> dict[Key, Task]:
        return {key: task for key, task in self._tasks.items() if key[0] < self.pass_number}

    def _stored(self) -> StoredQueue:
        before = (count for number, count in self._counts.items() if number < self.pass_number)
        return StoredQueue(
            spec=self.spec,
            first_lease=self.first_lease,
            pass_number=self.pass_number,
            passes=tuple(before),
        )

    # --- requests

    def lease(self, asked: LeaseAsked, now: float) -> Lease:
        """Hand out a task.

        A pass is over for its readers when all tasks are read. One that a reader leaves behind
        then, as it dies before it has used it, comes first in the next pass. A reader that leaves
        passes early gets ahead of the others: it reads what is left of the present one, for nobody
        else may be there to do so. A new queue begins with the pass that is asked for first: a job
        that was submitted anew may go on at a later epoch. Readers without passes wait for nobody:
        those of a training wait for each other already.
        """
        self._expire(now)
        self._take_from_predecessor(asked)
        if asked.pass_number is None:
            if self._dropped_all():
                return self._over()
            if not self._waiting:
                self._begin_pass(self.pass_number + 1)
        else:
            if asked.pass_number < self.pass_number:
                return Lease(over=True)
            if asked.pass_number and not self.pass_number and not self._tasks:
                self._waiting.clear()
                self._counts.clear()
                self._begin_pass(asked.pass_number)
            if not self._waiting and not self._reading:
                if asked.pass_number == self.pass_number:
                    return self._over()
                self._begin_pass(self.pass_number + 1)
            if not self._waiting:
                return self._wait(now)
        task = self._task(self._waiting[0])
        task = replace(
            task,
            phase=TaskPhase.LEASED,
            worker=asked.worker,
            place=asked.place,
            in_loop=asked.pass_number is None,
            lease=task.lease + 1,
            reads=task.reads + 1,
            all_read=False,
        )
        self._set(task)
        self._renew(task.key, now)
        return Lease(
            number=task.number,
            pass_number=task.pass_number,
            content=self.spec.tasks[task.number],
            lease=task.lease,
            lease_s=self.spec.lease_s,
        )

    def report(self, report: TaskReport, now: float) -> bool:
        """Take a report; return whether the task is still the reader's."""
        task = self._tasks.get((report.pass_number, report.number))
        if task is None:
            return report.done and report.pass_number < self.pass_number  # said twice
        if report.lease <= self.first_lease:  # of a queue that had the name before
            return False
        is_its = task.worker == report.worker and task.lease == report.lease
        holds = is_its and task.phase is TaskPhase.LEASED
        if report.done:
            if task.is_over:  # said twice, or another was quicker
                return is_its and task.phase is TaskPhase.DONE
            # Who has read all of it has, though it was taken for dead: nobody has to read it again.
            worker, records = report.worker, report.records
            self._set(replace(task, phase=TaskPhase.DONE, worker=worker, records=records))
            return True
        if not holds:
            return False
        if report.error:
            failures, error = task.failures + 1, report.error[:MAX_ERROR_CHARS]
            dropped = failures >= self.spec.max_tries
            self._return(replace(task, failures=failures, error=error), dropped=dropped)
        elif report.give_back:
            reads = task.reads if report.records else task.reads - 1  # nothing of it was read
            self._return(replace(task, reads=reads))
        else:
            if report.all_read != task.all_read:
                self._set(replace(task, all_read=report.all_read))
            self._renew(task.key, now)
        return True

    def _expire(self, now: float) -> None:
        """Take tasks back whose readers are silent."""
        while self._heap and self._heap[0][0] <= now:
            end, key = heapq.heappop(self._heap)
            if self._ends.get(key) == end:
                self._lose(self._tasks[key], "fell silent")

    def _take_from_predecessor(self, asked: LeaseAsked) -> None:
        """Take tasks back from who was in the place of this reader: it need not fall silent."""
        for task in [self._tasks[key] for key in self._ends if asked.place]:
            if task.place == asked.place and task.worker != asked.worker:
                self._lose(task, "was replaced")

    def _lose(self, task: Task, how: str) -> None:
        # Each change of an elastic job ends its trainers; those that crash the job itself counts.
        lost = task.lost + (not task.in_loop)
        error = f"{task.worker} {how} while it read this"
        self._return(replace(task, lost=lost, error=error), dropped=lost >= MAX_LOST)

    def _return(self, task: Task, *, dropped: bool = False) -> None:
        phase = TaskPhase.DROPPED if dropped else TaskPhase.WAITING
        self._set(replace(task, phase=phase, worker="", in_loop=False, all_read=False))

    def _wait(self, now: float) -> Lease:
        left_s = self._heap[0][0] - now if self._heap else MAX_WAIT_S
        return Lease(wait_s=min(max(left_s, 0.05), MAX_WAIT_S))

    def _over(self) -> Lease:
        return Lease(over=True, unreadable=len(self.spec.tasks) if self._dropped_all() else 0)

    def _dropped_all(self) -> bool:
        return self._counts[self.pass_number].dropped == len(self.spec.tasks)

    # --- the state

    def _begin_pass(self, number: int) -> None:
        self.pass_number = number
        self._tasks = {key: task for key, task in self._tasks.items() if not task.is_over}
        self._waiting.extend((number, task) for task in range(len(self.spec.tasks)))
        self._counts[number] = TaskCount(pass_number=number, waiting=len(self.spec.tasks))
        for old in sorted(self._counts)[: -SHOWN_TASKS - 1]:
            del self._counts[old]
        self._passes_changed = True

    def _task(self, key: Key) -> Task:
        found = self._tasks.get(key)
        return found or Task(pass_number=key[0], number=key[1], lease=self.first_lease)

    def _set(self, task: Task) -> None:
        key, before = task.key, self._task(task.key)
        self._tasks[key] = self._changed[key] = task
        self._reading += task.is_read - before.is_read
        if task.phase is not TaskPhase.LEASED:
            self._ends.pop(key, None)
        if before.phase is not task.phase:
            if before.phase is TaskPhase.WAITING and key in self._waiting:
                self._waiting.remove(key)  # mostly the first
            if task.phase is TaskPhase.WAITING:
                if task.pass_number < self.pass_number:
                    self._waiting.appendleft(key)
                else:
                    self._waiting.append(key)
        count = self._counts.get(task.pass_number)
        if count is not None:
            self._counts[task.pass_number] = _counted(_counted(count, before, -1), task, 1)
        if task.pass_number < self.pass_number:
            self._passes_changed = True
            if task.is_over:
                del self._tasks[key]

    def _renew(self, key: Key, now: float) -> None:
        end = self._ends[key] = now + self.spec.lease_s
        heapq.heappush(self._heap, (end, key))

    # --- for people

    def status(self, now: float) -> TaskQueueStatus:
        """Return how far the queue is."""
        self._expire(now)
        return TaskQueueStatus(
            name=self.spec.name,
            tasks=len(self.spec.tasks),
            lease_s=self.spec.lease_s,
            max_tries=self.spec.max_tries,
            now=self._counts[self.pass_number],
            leased=self._views(TaskPhase.LEASED),
            dropped=self._views(TaskPhase.DROPPED),
            read_again=self._views(TaskPhase.DONE, reads=2),
            passes=self._stored().passes,
        )

    def _views(self, phase: TaskPhase, reads: int = 0) -> tuple[TaskView, ...]:
        found = [
            task for task in self._tasks.values() if task.phase is phase and task.reads >= reads
        ]
        return tuple(
            TaskView(
                number=task.number,
                content=self.spec.tasks[task.number],
                worker=task.worker,
                reads=task.reads,
                failures=task.failures,
                error=task.error,
            )
            for task in sorted(found, key=lambda task: task.key)[:SHOWN_TASKS]
        )


def _counted(count: TaskCount, task: Task, sign: int) -> TaskCount:
    number = getattr(count, task.phase.value) + sign
    records = sign * task.records if task.phase is TaskPhase.DONE else 0
    which = "records_once" if task.reads <= 1 else "records_again"
    return replace(count, **{task.phase.value: number, which: getattr(count, which) + records})
