"""How long a caller waits before it asks again a server that is away."""

import random


class Backoff:
    """Waiting times that double from `first_s` up to `last_s`, with jitter."""

    def __init__(self, first_s: float, last_s: float, seed: int | None = None) -> None:
        self._first_s, self._last_s = first_s, last_s
        self._next_s = first_s
        self._random = random.Random(seed)

    def next_s(self) -> float:
        delay_s, self._next_s = self._next_s, min(2 * self._next_s, self._last_s)
        return delay_s * self._random.uniform(0.5, 1.0)  # a hundred callers do not come at once

    def reset(self) -> None:
        self._next_s = self._first_s
