"""Faults that benchmarks/distill.py injects: killed teachers, a failing generator, an early break.

Every batch carries its number, and every answer the first value of its image, so that one that is
lost, there twice or answered wrong is seen.
"""

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.distillation.processes import SHAPES, Teacher, await_teacher
from distill_reader import DistillReader
from distill_reader.errors import NoTeacher, ReaderError

BATCH = 16
_IMAGES = np.zeros((BATCH, 1, 28, 28), np.float32)
_LIMIT_S = 30.0  # for anything to come


def numbered(count: int | None = None) -> Iterator[tuple[Any, int]]:
    """Yield (images, number); None: without end."""
    for number in itertools.count() if count is None else range(count):
        images = _IMAGES.copy()
        images[:, 0, 0, 0] = number
        yield images, number


class Reading:
    """A reader that a thread reads, and the time when each batch came."""

    def __init__(
        self,
        teachers: Sequence[Teacher],
        generate: Callable[[], Iterator[Any]] = numbered,
        no_teacher_timeout_s: float | None = None,
    ) -> None:
        self.came_s: list[float] = []
        self.wrong = 0  # batches lost, there twice, out of order or with answers of others
        self.error: BaseException | None = None
        self.ended_s: float | None = None  # None: it still reads
        self._reader = DistillReader(ins=["image", None], predicts=["score"])
        self._reader.set_fixed_teacher([f"{each.endpoint}/{SHAPES[0]}" for each in teachers])
        self._reader.set_batch_generator(generate)
        self._reader.set_no_teacher_timeout(no_teacher_timeout_s)
        self._stops = False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def await_batches(self, count: int) -> None:
        """Wait until so many have come."""
        wait(lambda: len(self.came_s) >= count or self.ended_s is not None)

    def longest_gap_s(self, since_s: float) -> float:
        """Return the longest time without a batch, from `since_s` on."""
        times = [since_s, *(at for at in self.came_s if at > since_s)]
        return max(after - before for before, after in itertools.pairwise(times))

    def first_after_s(self, since_s: float) -> float:
        """Return how long it took until a batch came, behind `since_s`."""
        return min(at for at in list(self.came_s) if at > since_s) - since_s

    def await_end(self) -> None:
        wait(lambda: self.ended_s is not None)
        self._thread.join()

    def stop(self) -> None:
        """Stop with the next batch."""
        self._stops = True
        self.await_end()

    def _read(self) -> None:
        try:
            for expected, (_, number, scores) in enumerate(self._reader()):
                self.came_s.append(time.perf_counter())
                self.wrong += number != expected or bool((scores[:, 0] != expected).any())
                if self._stops:
                    break
        except (NoTeacher, ReaderError) as error:
            self.error = error
        finally:
            self.ended_s = time.perf_counter()


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("a reader neither went on nor ended")
        time.sleep(0.001)


def one_dies(teachers: Sequence[Teacher], rest_s: float) -> dict[str, float]:
    """kill -9 of one of two; the other one goes on for `rest_s`. The dead one is started again."""
    reading = Reading(teachers)
    reading.await_batches(100)
    usual_s = reading.longest_gap_s(reading.came_s[20])
    killed_s = time.perf_counter()
    teachers[0].kill()
    while time.perf_counter() < killed_s + rest_s:
        time.sleep(0.01)
    reading.stop()
    teachers[0].restart()
    await_teacher(teachers[0])
    gap_s = reading.longest_gap_s(killed_s)
    return {"gap_s": gap_s, "usual_gap_s": usual_s, "wrong": float(reading.wrong)}


def last_returns(teachers: Sequence[Teacher]) -> dict[str, float]:
    """The only teacher dies, and comes back: counted from when it answers others."""
    (teacher,) = teachers
    reading = Reading(teachers)
    reading.await_batches(50)
    teacher.kill()
    time.sleep(1.0)  # until every backoff is at its longest
    teacher.restart()
    await_teacher(teacher)
    there_s = time.perf_counter()
    before = len(reading.came_s)
    reading.await_batches(before + 1)
    back_s = max(0.0, reading.came_s[before] - there_s)
    reading.await_batches(before + 50)
    reading.stop()
    return {"back_s": back_s, "wrong": float(reading.wrong)}


def none_is_left(teachers: Sequence[Teacher], timeout_s: float) -> dict[str, float]:
    """All die: the consumer is told after the time that it set."""
    reading = Reading(teachers, no_teacher_timeout_s=timeout_s)
    reading.await_batches(50)
    killed_s = time.perf_counter()
    for teacher in teachers:
        teacher.kill()
    reading.await_end()
    assert reading.ended_s is not None
    for teacher in teachers:
        teacher.restart()
    for teacher in teachers:
        await_teacher(teacher)
    return {
        "late_s": reading.ended_s - killed_s - timeout_s,
        "wrong": float(reading.wrong + (not isinstance(reading.error, NoTeacher))),
    }


def generator_fails(teachers: Sequence[Teacher]) -> dict[str, float]:
    """The user's generator raises: counted from the last batch before that, which comes first."""
    failed_s = [0.0]

    def generate() -> Iterator[Any]:
        yield from numbered(100)
        failed_s[0] = time.perf_counter()
        raise ValueError("a broken image")

    reading = Reading(teachers, generate)
    reading.await_end()
    assert reading.ended_s is not None
    is_right = isinstance(reading.error, ReaderError) and len(reading.came_s) == 100
    return {
        "raised_s": reading.ended_s - max(failed_s[0], reading.came_s[-1]),
        "with_batches_before_s": reading.ended_s - failed_s[0],
        "wrong": float(reading.wrong + (not is_right)),
    }


def early_break(teachers: Sequence[Teacher]) -> dict[str, float]:
    """The consumer leaves amid an epoch: nothing is left of the reader."""
    before = _open_things()
    reading = Reading(teachers)
    reading.await_batches(50)
    left_s = time.perf_counter()
    reading.stop()
    with contextlib.suppress(SystemExit):
        wait(lambda: _open_things() == before)
    after = _open_things()
    return {
        "ended_s": time.perf_counter() - left_s,
        "left_threads": float(after[0] - before[0]),
        "left_descriptors": float(after[1] - before[1]),
        "wrong": float(reading.wrong + (after != before)),
    }


def _open_things() -> tuple[int, int]:
    """Return how many threads and descriptors this process has."""
    return threading.active_count(), len(os.listdir("/proc/self/fd"))
