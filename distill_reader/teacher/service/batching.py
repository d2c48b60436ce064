"""Decides which waiting requests a predictor computes together. Pure: time is an argument."""

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_PIECES = 256  # of one batch: each costs some bytes of the message to the predictor


@dataclass(frozen=True, slots=True)
class Piece(Generic[T]):
    """Consecutive samples of one request."""

    item: T
    start: int  # the first sample within the request
    count: int


@dataclass(slots=True)
class _Entry(Generic[T]):
    item: T
    start: int
    count: int
    arrived: float


class BatchQueue(Generic[T]):
    """Requests in order of arrival, by key; only those of one key can be computed together.

    A batch is due once `max_batch` samples of its key wait, or the oldest waits for `timeout_s`.
    Requests stay whole, but for those larger than `max_batch`: they are cut.
    """

    def __init__(self, *, max_batch: int, timeout_s: float) -> None:
        self._max_batch = max_batch
        self._timeout_s = timeout_s
        self._waiting: dict[Hashable, deque[_Entry[T]]] = {}
        self._samples: dict[Hashable, int] = {}

    def __len__(self) -> int:
        """Return how many requests wait, a rest of one included."""
        return sum(map(len, self._waiting.values()))

    def add(self, key: Hashable, item: T, samples: int, now: float) -> None:
        """Queue a request of `samples` samples, >= 1."""
        self._waiting.setdefault(key, deque()).append(_Entry(item, 0, samples, now))
        self._samples[key] = self._samples.get(key, 0) + samples

    def put_back(self, key: Hashable, pieces: Iterable[Piece[T]], now: float) -> None:
        """Queue pieces again, before all others; they are due at once."""
        waiting = self._waiting.setdefault(key, deque())
        for piece in reversed(list(pieces)):
            waiting.appendleft(_Entry(piece.item, piece.start, piece.count, now - self._timeout_s))
            self._samples[key] = self._samples.get(key, 0) + piece.count

    def remove(self, item: T) -> bool:
        """Drop what still waits of a request; return whether anything did."""
        for key, waiting in self._waiting.items():
            gone = [entry for entry in waiting if entry.item is item]
            if gone:
                self._waiting[key] = deque(entry for entry in waiting if entry.item is not item)
                self._samples[key] -= sum(entry.count for entry in gone)
                self._forget_if_empty(key)
                return True
        return False

    def clear(self) -> list[T]:
        """Drop everything; return the requests of which something waited, each once."""
        items = [entry.item for waiting in self._waiting.values() for entry in waiting]
        self._waiting.clear()
        self._samples.clear()
        return list({id(item): item for item in items}.values())

    def take(self, now: float) -> tuple[Hashable, list[Piece[T]]] | None:
        """Return the key and pieces of the batch to compute now; None: nothing is due.

        Of several keys that are due, the one whose oldest request waits longest.
        """
        due = [key for key in self._waiting if self._due_at(key) <= now]
        if not due:
            return None
        key = min(due, key=lambda key: self._waiting[key][0].arrived)
        return key, self._cut(key)

    def next_due(self) -> float | None:
        """Return when the next batch is due, perhaps in the past; None: nothing waits."""
        return min(map(self._due_at, self._waiting), default=None)

    def _due_at(self, key: Hashable) -> float:
        if self._samples[key] >= self._max_batch:
            return float("-inf")
        return self._waiting[key][0].arrived + self._timeout_s

    def _cut(self, key: Hashable) -> list[Piece[T]]:
        waiting = self._waiting[key]
        pieces: list[Piece[T]] = []
        room = self._max_batch
        while waiting and room > 0 and len(pieces) < MAX_PIECES:
            entry = waiting[0]
            if entry.count > room and pieces:
                break
            count = min(entry.count, room)
            pieces.append(Piece(entry.item, entry.start, count))
            room -= count
            self._samples[key] -= count
            if count == entry.count:
                waiting.popleft()
            else:
                entry.start += count
                entry.count -= count
        self._forget_if_empty(key)
        return pieces

    def _forget_if_empty(self, key: Hashable) -> None:
        if not self._waiting[key]:
            del self._waiting[key], self._samples[key]
