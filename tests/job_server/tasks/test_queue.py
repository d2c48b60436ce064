"""A queue of tasks: each is done once in each pass, whoever dies meanwhile."""

import random
from collections import Counter
from typing import Any

import pytest

from job_server.api.task_wire import Lease, LeaseAsked, TaskCount, TaskQueueSpec, TaskReport
from job_server.tasks.queue import MAX_LOST, Key, StoredQueue, Task, TaskQueue


class Clerk:
    """A queue, and what is stored of it: leases and reports go through both."""

    def __init__(self, tasks: int = 3, **changes: int) -> None:
        names = tuple(f"part-{number}" for number in range(tasks))
        self.spec = TaskQueueSpec(name="words", tasks=names, lease_s=10.0, **changes)
        self.now = 100.0
        self.stored = StoredQueue(spec=self.spec)
        self.tasks: dict[Key, Task] = {}
        self.queue = TaskQueue.load(self.stored, (), self.now)

    def lease(self, worker: str = "a", pass_number: int | None = 0, place: str = "") -> Lease:
        asked = LeaseAsked(worker=worker, pass_number=pass_number, place=place)
        lease = self.queue.lease(asked, self.now)
        self.write()
        return lease

    def report(self, lease: Lease, worker: str = "a", **said: Any) -> bool:
        assert lease.number is not None
        report = TaskReport(
            worker=worker,
            pass_number=lease.pass_number,
            number=lease.number,
            lease=lease.lease,
            **said,
        )
        held = self.queue.report(report, self.now)
        self.write()
        return held

    def write(self) -> None:
        changes = self.queue.take_changes()
        if changes.queue is not None:
            self.stored, now = changes.queue, changes.queue.pass_number
            self.tasks = {key: task for key, task in self.tasks.items() if key[0] >= now}
        self.tasks |= {task.key: task for task in changes.tasks}

    def restart(self) -> None:
        """A new server has what was written, and no leases' ends."""
        before = self.queue.status(self.now)
        self.write()
        self.queue = TaskQueue.load(self.stored, self.tasks.values(), self.now)
        assert self.queue.status(self.now) == before

    def count(self) -> TaskCount:
        return self.queue.status(self.now).now


def test_a_pass_hands_out_each_task_once_and_ends_when_all_are_done():
    clerk = Clerk(3)
    leases = [clerk.lease("a"), clerk.lease("b"), clerk.lease("a")]
    assert [lease.content for lease in leases] == ["part-0", "part-1", "part-2"]
    waits = clerk.lease("b")
    assert waits.number is None
    assert not waits.over
    assert waits.wait_s > 0
    assert clerk.report(leases[0], "a", records=5, done=True)
    assert clerk.report(leases[1], "b", records=6, done=True)
    assert not clerk.lease("b").over
    assert clerk.report(leases[2], "a", records=7, done=True)
    assert clerk.lease("b").over
    assert clerk.count() == TaskCount(pass_number=0, done=3, records_once=18)


def test_a_new_queue_begins_with_the_pass_that_is_asked_for_first():
    clerk = Clerk(2)
    lease = clerk.lease("a", 5)
    assert (lease.pass_number, lease.number) == (5, 0)
    clerk.restart()
    assert clerk.lease("b", 0).over
    assert clerk.lease("b", 6).pass_number == 5, "a queue that was begun is read in its order"
    assert clerk.count() == TaskCount(pass_number=5, leased=2)
    assert not clerk.queue.status(clerk.now).passes


def test_the_first_who_asks_for_the_next_pass_begins_it_once_the_one_before_is_over():
    clerk = Clerk(1)
    lease = clerk.lease()
    ahead = clerk.lease("b", 1)
    assert ahead.number is None
    assert not ahead.over
    clerk.report(lease, done=True, records=4)
    second = clerk.lease("b", 1)
    assert second.content == "part-0"
    assert clerk.lease("a", 0).over, "who was started again passes over what is over"
    assert clerk.queue.status(clerk.now).passes == (
        TaskCount(pass_number=0, done=1, records_once=4),
    )
    assert clerk.count() == TaskCount(pass_number=1, leased=1)
    assert clerk.lease("c", 7).number is None, "also who is far ahead waits for the others"


def test_who_leaves_passes_early_reads_on_where_the_queue_is():
    clerk = Clerk(5)
    read = []
    for number in range(5):
        for _ in range(2):
            lease = clerk.lease("a", number)
            read.append((lease.pass_number, lease.number))
            clerk.report(lease, "a", done=True)
    assert read == [(0, n) for n in range(5)] + [(1, n) for n in range(5)]
    assert clerk.lease("b", 1).over
    assert clerk.lease("b", 2).pass_number == 2


def test_a_silent_reader_loses_its_task_and_one_that_reports_keeps_it():
    clerk = Clerk(2)
    dead, alive = clerk.lease("dead"), clerk.lease("alive")
    clerk.now += 9
    assert clerk.report(alive, "alive", records=3)
    clerk.now += 2
    again = clerk.lease("b")
    assert again.content == dead.content
    assert clerk.lease("b").number is None, "the other is still read"
    assert not clerk.report(dead, "dead", records=4), "it is told"
    assert clerk.report(again, "b", records=9, done=True)
    assert clerk.report(alive, "alive", records=5, done=True)
    status = clerk.queue.status(clerk.now)
    assert (status.now.records_once, status.now.records_again) == (5, 9)
    assert [task.content for task in status.read_again] == [dead.content]


def test_who_takes_a_readers_place_gets_its_task_at_once():
    clerk = Clerk(3)
    dead = clerk.lease("dead", place="pod_0.0")
    other = clerk.lease("other", place="pod_1.0")
    assert clerk.lease("new", place="pod_0.0").content == "part-2"
    assert clerk.lease("new", place="pod_0.0").content == dead.content
    assert clerk.report(other, "other", records=1)
    assert not clerk.report(dead, "dead", records=1)


def test_readers_without_passes_wait_for_nobody_and_what_one_leaves_comes_first():
    clerk = Clerk(2)
    first, second = clerk.lease("a", None), clerk.lease("b", None)
    third = clerk.lease("b", None)
    assert (third.pass_number, third.content) == (1, "part-0"), "though none of the two is done"
    clerk.report(second, "b", records=5, done=True)
    clerk.now += 9
    clerk.report(third, "b")
    clerk.now += 2  # the first one is dead
    left = clerk.lease("b", None)
    assert (left.pass_number, left.content) == (0, first.content)
    clerk.report(left, "b", records=5, done=True)
    assert clerk.queue.status(clerk.now).passes[0].done == 2


def test_who_was_taken_for_dead_and_has_read_all_saves_the_other_the_rest():
    clerk = Clerk(1)
    slow = clerk.lease("slow")
    clerk.now += 11
    other = clerk.lease("other")
    assert clerk.report(slow, "slow", records=5, done=True)
    assert not clerk.report(other, "other", records=2), "it may stop"
    assert not clerk.report(other, "other", records=5, done=True)
    assert clerk.count().done == 1


def test_a_report_that_is_sent_twice_says_the_same():
    clerk = Clerk(2)
    lease = clerk.lease()
    assert clerk.report(lease, done=True, records=5)
    assert clerk.report(lease, done=True, records=5)
    assert clerk.count().records_once == 5
    other = clerk.lease()
    assert clerk.report(other, error="broken")
    assert not clerk.report(other, error="broken"), "one failure is counted once"
    assert clerk.lease().content == other.content


def test_a_task_that_fails_again_and_again_is_dropped_by_name_and_tried_again_in_the_next_pass():
    clerk = Clerk(2, max_tries=2)
    good = clerk.lease()
    for _ in range(2):
        assert clerk.report(clerk.lease(), error="line 7: no number")
    assert clerk.report(good, done=True, records=1)
    assert clerk.lease().over
    dropped = clerk.queue.status(clerk.now).dropped
    assert [(task.content, task.failures, task.error) for task in dropped] == [
        ("part-1", 2, "line 7: no number")
    ]
    assert clerk.count() == TaskCount(pass_number=0, done=1, dropped=1, records_once=1)
    assert clerk.lease(pass_number=1).content == "part-0"
    assert clerk.lease(pass_number=1).content == "part-1"


@pytest.mark.parametrize("pass_number", [0, None])
def test_a_pass_of_which_nothing_can_be_read_is_the_last_one(pass_number):
    clerk = Clerk(2, max_tries=1)
    for _ in range(2):
        assert clerk.report(clerk.lease(pass_number=pass_number), error="x" * 5000)
    for _ in range(2):
        assert clerk.lease(pass_number=pass_number) == Lease(over=True, unreadable=2)
        clerk.restart()
    status = clerk.queue.status(clerk.now)
    assert status.now == TaskCount(pass_number=0, dropped=2)
    assert len(status.dropped[0].error) == 1000, "a reader does not choose how much is stored"


def test_a_task_that_kills_its_readers_is_dropped_in_the_end():
    clerk = Clerk(1)
    for number in range(MAX_LOST):
        assert clerk.lease(f"r{number}").number == 0
        clerk.now += 11
    assert clerk.lease("last") == Lease(over=True, unreadable=1)
    assert "fell silent" in clerk.queue.status(clerk.now).dropped[0].error


@pytest.mark.parametrize("place", ["", "pod_0_0.0"])
def test_changes_of_an_elastic_job_drop_no_task(place):
    clerk = Clerk(1)
    for number in range(3 * MAX_LOST):  # each change ends trainers, whatever they read
        lease = clerk.lease(f"r{number}", pass_number=None, place=place)
        assert (lease.pass_number, lease.number) == (0, 0)
        clerk.now += 0 if place else 11
        clerk.queue.status(clerk.now)
        clerk.restart()
    assert clerk.count().dropped == 0


def test_a_task_of_a_pass_before_that_is_dropped_is_told_as_well():
    clerk = Clerk(1, max_tries=1)
    first, _ahead = clerk.lease("a", None), clerk.lease("b", None)
    said = TaskReport(
        worker="a", pass_number=0, number=0, lease=first.lease, error="no array"
    )  # while others are in the next pass
    assert clerk.queue.report(said, clerk.now)
    assert [task.error for task in clerk.queue.take_changes().dropped] == ["no array"]


def test_what_is_given_back_goes_to_another_at_once_and_is_no_failure():
    clerk = Clerk(1, max_tries=1)
    assert clerk.report(clerk.lease(), give_back=True)
    lease = clerk.lease("b")
    assert clerk.report(lease, "b", records=2, done=True)
    assert clerk.count().records_once == 2, "nothing of it had been read"


def test_a_pass_is_over_for_its_readers_when_all_is_read_and_what_one_leaves_comes_next():
    clerk = Clerk(2)
    first, second = clerk.lease("a"), clerk.lease("b")
    assert clerk.report(first, "a", records=5, all_read=True)
    assert not clerk.lease("a").over, "the other may fail"
    assert clerk.report(second, "b", records=5, all_read=True)
    assert clerk.lease("a").over
    assert clerk.lease("b").over
    assert clerk.report(second, "b", records=5, done=True)
    assert clerk.lease("b", 1).pass_number == 1, "the first reader has its batch to train on"
    clerk.now += 11  # it died instead
    left = clerk.lease("b", 1)
    assert (left.content, left.pass_number) == (first.content, 0)
    assert clerk.report(left, "b", records=5, done=True)
    assert clerk.lease("b", 1).pass_number == 1
    assert clerk.queue.status(clerk.now).passes[0].done == 2


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_each_task_of_each_pass_is_done_or_dropped_by_name(seed):
    draw = random.Random(seed)
    clerk = Clerk(draw.randint(1, 12), max_tries=3)
    passes = 3
    at = {f"w{number}": 0 for number in range(4)}
    held: dict[str, Lease] = {}
    finished: Counter[tuple[int, int]] = Counter()
    for _ in range(3000):
        worker = draw.choice(list(at))
        chance = draw.random()
        if chance < 0.02:
            clerk.restart()
        elif chance < 0.06:  # killed: a new process begins with the first pass
            held.pop(worker, None)
            at[worker] = 0
        elif chance < 0.2:
            clerk.now += draw.random() * 6
        elif worker in held:
            lease = held[worker]
            if chance < 0.3:
                if not clerk.report(lease, worker, records=1, all_read=chance < 0.25):
                    del held[worker]
            elif chance < 0.34:
                clerk.report(held.pop(worker), worker, error="cannot")
            elif chance < 0.38:
                clerk.report(held.pop(worker), worker, give_back=True)
            else:
                del held[worker]
                if clerk.report(lease, worker, records=10, done=True):
                    assert lease.number is not None
                    finished[lease.pass_number, lease.number] += 1
        elif at[worker] < passes:
            lease = clerk.lease(worker, at[worker])
            if lease.over:
                at[worker] += 1
            elif lease.number is not None:
                held[worker] = lease
        status = clerk.queue.status(clerk.now)
        now = status.now
        assert now.waiting + now.leased + now.done + now.dropped == status.tasks
    while min(at.values()) < passes:  # in peace: it comes to its end
        worker = min(at, key=lambda each: at[each])
        if worker not in held:
            lease = clerk.lease(worker, at[worker])
            if lease.over:
                at[worker] += 1
                continue
            if lease.number is None:
                clerk.now += 5
                continue
            held[worker] = lease
        lease = held.pop(worker)
        if clerk.report(lease, worker, records=10, done=True):
            assert lease.number is not None
            finished[lease.pass_number, lease.number] += 1
    status = clerk.queue.status(clerk.now)
    counts = {count.pass_number: count for count in (*status.passes, status.now)}
    for number in range(passes):
        done = sum(1 for pass_number, _ in finished if pass_number == number)
        assert counts[number].done == done
        assert counts[number].done + counts[number].dropped == status.tasks
        assert counts[number].records_once + counts[number].records_again == 10 * done
