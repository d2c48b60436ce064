"""The task queues of a server, on its database."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from job_server.api.errors import StoreTrouble
from job_server.api.task_wire import Lease, LeaseAsked, TaskQueueSpec, TaskReport
from job_server.server.store import Store
from job_server.server.task_service import TaskService

SPEC = TaskQueueSpec(name="words", tasks=("part-0", "part-1"))


class ShakyStore(Store):
    """A database whose disk can be away, for reads as well as for writes."""

    away = False

    def save_tasks(self, name: str, tasks: Sequence[tuple[int, int, object]], **rest: Any) -> None:
        self._look()
        super().save_tasks(name, tasks, **rest)

    def task_queue(self, name: str) -> tuple[Any, list[Any]]:
        self._look()
        return super().task_queue(name)

    def _look(self) -> None:
        if self.away:
            raise StoreTrouble("disk I/O error", 2.0)


def report(tasks: TaskService, number: int, *, done: bool = True) -> bool:
    """Read one task to its end."""
    lease = tasks.lease_task("words", LeaseAsked(worker="a", pass_number=0))
    assert lease.number == number
    said = TaskReport(worker="a", pass_number=0, number=number, lease=lease.lease, done=done)
    return tasks.report_task("words", said).held


def test_a_queue_is_still_there_when_the_disk_that_was_away_is_back(tmp_path: Path):
    store = ShakyStore(str(tmp_path / "server.db"))
    tasks = TaskService(store, lambda: 100.0)
    tasks.make_queue(SPEC)
    assert report(tasks, 0)
    store.away = True
    for _ in range(2):
        with pytest.raises(StoreTrouble):
            tasks.lease_task("words", LeaseAsked(worker="a", pass_number=0))
    store.away = False
    assert [queue.now.done for queue in tasks.list_queues().queues] == [1]
    assert tasks.make_queue(SPEC).now.done == 1  # as a reader does that begins
    assert report(tasks, 1)
    assert tasks.get_queue("words").now.done == 2
    store.close()


def test_what_was_done_of_a_queue_before_is_not_done_of_one_that_has_its_name(tmp_path: Path):
    store = Store(str(tmp_path / "server.db"))
    clock = iter(range(100, 1000))
    tasks = TaskService(store, lambda: float(next(clock)))

    def lease(worker: str) -> Lease:
        return tasks.lease_task("words", LeaseAsked(worker=worker, pass_number=0))

    def done(worker: str, lease: Lease) -> bool:
        said = TaskReport(worker=worker, pass_number=0, number=0, lease=lease.lease, done=True)
        return tasks.report_task("words", said).held

    tasks.make_queue(SPEC)
    old = lease("old")
    tasks.delete_queue("words")
    tasks.make_queue(TaskQueueSpec(name="words", tasks=("other-0", "other-1")))
    new = lease("new")
    assert not done("old", old)
    assert tasks.get_queue("words").now.done == 0
    tasks = TaskService(store, lambda: float(next(clock)))
    assert done("new", new)
    assert tasks.get_queue("words").now.done == 1
    store.close()
