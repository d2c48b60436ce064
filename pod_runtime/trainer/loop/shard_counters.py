"""Find numbers of layers that a forward pass moves, which count shards and not batches.

A buffer moves once for all shards of a batch; a plain attribute moves in each process with each
shard that is computed there, as the count of steps by which a temperature is annealed.
"""

from collections.abc import Mapping

_FEWEST = 3  # shards in which a number has moved each time, before that is no chance


class ShardCounters:
    """What has moved in the same direction in each shard that was watched."""

    def __init__(self) -> None:
        self._before: Mapping[str, float] = {}
        self._rises: dict[str, bool] | None = None  # None: no shard was watched yet
        self._shards = 0

    def begin(self, numbers: Mapping[str, float]) -> None:
        """The shards of a step begin."""
        self._before = numbers

    def end_shard(self, numbers: Mapping[str, float]) -> None:
        """A shard was computed."""
        rises = {
            name: value > self._before[name]
            for name, value in numbers.items()
            if name in self._before and value != self._before[name]
        }
        known = rises if self._rises is None else self._rises
        self._rises = {name: up for name, up in known.items() if rises.get(name) is up}
        self._before = numbers
        self._shards += 1

    def found(self) -> list[str]:
        """Return what to call them."""
        return list(self._rises or ()) if self._shards >= _FEWEST else []
