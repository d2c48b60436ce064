"""Show what a trainer does now, and how long it did what, in a page of memory.

The trainer writes the page; its launcher, which was given the descriptor with `hello`, reads it
whenever it likes: also when the trainer hangs, and without a message per step. Standard library
only.
"""

import functools
import math
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum

_BYTES = 4096


class Doing(IntEnum):
    """What a trainer's main thread does. The numbers are in the page."""

    STARTING = 0  # forms the group, loads the state, makes a warm-up step
    STEPPING = 1  # computes a step, or runs what the script has around it
    READING = 2  # waits for the data of a step
    EXCHANGING = 3  # waits for the other ranks in a step, and sums with them
    BETWEEN = 4  # between two epochs
    EVALUATING = 5  # in `loop.evaluate`
    SAVING = 6  # takes a snapshot, or waits for a checkpoint
    PARKED = 7  # waits for the launcher: for `go`, or for the end of a cut
    DONE = 8  # the training is complete; what the script does now is its own affair


_DOING, _SINCE, _STEPS, _SAMPLES = range(4)
_SECONDS = 4  # of each Doing, from here on


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the page said at one moment."""

    doing: Doing
    since: float  # time.monotonic() of this machine when it began that
    steps: int  # committed by this process, or about to be; grows
    samples: int  # that it has computed
    seconds: tuple[float, ...]  # by Doing; what it does now is not in it yet


class TrainerActivity:
    """The trainer's side. For its main thread only."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("edl-activity", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, _BYTES)
        # It outlives this object where a fork, or the launcher, has it.
        self._page = memoryview(mmap.mmap(self.fd, _BYTES)).cast("d")
        self._doing = Doing.STARTING
        self._page[_SINCE] = self._since = time.monotonic()

    def begin(self, doing: Doing) -> None:
        """From now on this is done. Again with the same: a sign of life.

        It costs less than a microsecond: a step does it some times.
        """
        page, now = self._page, time.monotonic()
        page[_SECONDS + self._doing] += now - self._since
        page[_SINCE] = self._since = now
        page[_DOING] = self._doing = doing

    def live(self) -> None:
        """Give a sign of life: what it does goes on, and has come a part further."""
        self.begin(self._doing)

    @contextmanager
    def during(self, doing: Doing) -> Iterator[None]:
        """Within the block this is done; then what was done before."""
        before = self._doing
        self.begin(doing)
        try:
            yield
        finally:
            self.begin(before)

    def count_step(self, samples: int) -> None:
        """A step was made, in which this rank has computed so many samples."""
        self._page[_STEPS] += 1
        self._page[_SAMPLES] += samples


@functools.cache
def own_activity() -> TrainerActivity:
    """Return that of this process: it has one main thread, whatever loops its script makes."""
    return TrainerActivity()


def open_page(fd: int) -> "memoryview[float]":
    """Return the page behind a trainer's descriptor, for `look`; `fd` may be closed then.

    Raises:
        OSError, ValueError: it is no such page.
    """
    return memoryview(mmap.mmap(fd, _BYTES, prot=mmap.PROT_READ)).cast("d")


def look(page: "memoryview[float]") -> Seen | None:
    """Return what a page says. None: nothing that a trainer of this version writes."""
    numbers = page[: _SECONDS + len(Doing)].tolist()
    doing = numbers[_DOING]
    if not all(map(math.isfinite, numbers)) or doing not in {float(each) for each in Doing}:
        return None
    return Seen(
        doing=Doing(int(doing)),
        since=numbers[_SINCE],
        steps=int(numbers[_STEPS]),
        samples=int(numbers[_SAMPLES]),
        seconds=tuple(numbers[_SECONDS:]),
    )
