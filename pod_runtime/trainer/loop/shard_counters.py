"""Find numbers of layers that a forward pass moves, which count shards and not batches.

A buffer moves once for all shards of a batch; a plain attribute moves in each process with each
shard that is computed there, as the count of steps by which a temperature is annealed.
"""

import math
from collections.abc import Mapping

_FEWEST = 3  # shards in which a number has moved by the same each time: a counter
_FEWEST_UNEVEN = 6  # by another each time, but in the same direction: hardly by chance


class ShardCounters:
    """What has moved in the same direction in each shard that was watched."""

    def __init__(self) -> None:
        self._before: Mapping[str, float] = {}
        self._moves: dict[str, float] | None = None  # in the first shard; None: none was watched
        self._uneven: set[str] = set()  # of these, those that have moved by something else as well
        self._shards = 0

    def begin(self, numbers: Mapping[str, float]) -> None:
        """The shards of a step begin."""
        self._before = numbers

    def end_shard(self, numbers: Mapping[str, float]) -> None:
        """A shard was computed."""
        moves = {
            name: value - self._before[name]
            for name, value in numbers.items()
            if name in self._before and value != self._before[name]
        }
        known = moves if self._moves is None else self._moves
        self._moves = {
            name: first
            for name, first in known.items()
            if name in moves and (moves[name] > 0) is (first > 0)
        }
        self._uneven |= {
            name for name, first in self._moves.items() if not math.isclose(moves[name], first)
        }
        self._before = numbers
        self._shards += 1

    def found(self) -> list[str]:
        """Return what to call them."""
        if self._shards < _FEWEST:
            return []
        is_sure = self._shards >= _FEWEST_UNEVEN
        return [name for name in self._moves or () if is_sure or name not in self._uneven]
