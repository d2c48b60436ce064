"""A framework's generator, for tests that need no framework."""

import random
from typing import Any


class Streams:
    """A framework's generator that is Python's."""

    def __init__(self, info: Any = None) -> None:
        self.random = random.Random()
        self.info = info

    def seed(self, key: int) -> None:
        self.random.seed(key)

    def draw(self) -> int:
        return self.random.getrandbits(32)

    probe = draw

    def rng_state(self) -> Any:
        return self.random.getstate()

    def set_rng_state(self, state: Any) -> None:
        self.random.setstate(state)

    def worker_info(self) -> Any:
        return self.info
