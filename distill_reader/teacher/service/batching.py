"""Decide which pending requests a predictor computes together. Pure: time is an argument."""

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_PARTS = 256  # of one batch: each costs some bytes of the message to the predictor
MAX_TURN = 16  # batches of one request in a row, if others wait


@dataclass(frozen=True, slots=True)
class RequestPart(Generic[T]):
    """Consecutive samples of one request."""

    request: T
    start: int  # the first sample within the request
    count: int


@dataclass(slots=True)
class _Entry(Generic[T]):
    request: T
    start: int
    count: int
    arrived: float
    batches: int = 0  # that were cut off it


class BatchQueue(Generic[T]):
    """Requests by key, in order of arrival. Only requests with the same key share a batch.

    A batch is due once `max_batch` samples of its key are queued, or once the oldest has been
    queued for `timeout_s`. Only requests larger than `max_batch` are split; after MAX_TURN batches
    the rest of one queues up again behind all others, which would wait for minutes otherwise.
    """

    def __init__(self, *, max_batch: int, timeout_s: float) -> None:
        self._max_batch = max_batch
        self._timeout_s = timeout_s
        self._queues: dict[Hashable, deque[_Entry[T]]] = {}
        self._samples: dict[Hashable, int] = {}

    def __len__(self) -> int:
        """Return the number of queued requests; the rest of a split request counts as one."""
        return sum(map(len, self._queues.values()))

    def add(self, key: Hashable, request: T, samples: int, now: float) -> None:
        """Queue a request. `samples` is at least 1."""
        self._queues.setdefault(key, deque()).append(_Entry(request, 0, samples, now))
        self._samples[key] = self._samples.get(key, 0) + samples

    def put_back(self, key: Hashable, parts: Iterable[RequestPart[T]], now: float) -> None:
        """Queue parts again, ahead of all others. They are due at once."""
        queue = self._queues.setdefault(key, deque())
        for part in reversed(list(parts)):
            queue.appendleft(_Entry(part.request, part.start, part.count, now - self._timeout_s))
            self._samples[key] = self._samples.get(key, 0) + part.count

    def remove(self, request: T) -> bool:
        """Remove what is still queued of a request; return whether anything was."""
        for key, queue in self._queues.items():
            gone = [entry for entry in queue if entry.request is request]
            if gone:
                self._queues[key] = deque(entry for entry in queue if entry.request is not request)
                self._samples[key] -= sum(entry.count for entry in gone)
                self._forget_if_empty(key)
                return True
        return False

    def clear(self) -> list[T]:
        """Empty the queue; return each request that was in it once."""
        requests = [entry.request for queue in self._queues.values() for entry in queue]
        self._queues.clear()
        self._samples.clear()
        return list({id(request): request for request in requests}.values())

    def take(self, now: float) -> tuple[Hashable, list[RequestPart[T]]] | None:
        """Return the key and the parts of the batch to compute now; None: nothing is due.

        If several keys are due, the one with the oldest request comes first.
        """
        due = [key for key in self._queues if self._due_at(key) <= now]
        if not due:
            return None
        key = min(due, key=lambda key: self._queues[key][0].arrived)
        return key, self._cut(key, now)

    def next_due(self) -> float | None:
        """Return when the next batch is due, perhaps in the past; None: the queue is empty."""
        return min(map(self._due_at, self._queues), default=None)

    def _due_at(self, key: Hashable) -> float:
        if self._samples[key] >= self._max_batch:
            return float("-inf")
        return self._queues[key][0].arrived + self._timeout_s

    def _cut(self, key: Hashable, now: float) -> list[RequestPart[T]]:
        queue = self._queues[key]
        parts: list[RequestPart[T]] = []
        room = self._max_batch
        while queue and room > 0 and len(parts) < MAX_PARTS:
            entry = queue[0]
            if entry.count > room and parts:
                break
            count = min(entry.count, room)
            parts.append(RequestPart(entry.request, entry.start, count))
            room -= count
            self._samples[key] -= count
            if count == entry.count:
                queue.popleft()
            else:
                entry.start += count
                entry.count -= count
                entry.batches += 1
                if entry.batches % MAX_TURN == 0:
                    entry.arrived = now
                    queue.rotate(-1)
        self._forget_if_empty(key)
        return parts

    def _forget_if_empty(self, key: Hashable) -> None:
        if not self._queues[key]:
            del self._queues[key], self._samples[key]
