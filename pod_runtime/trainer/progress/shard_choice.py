"""Choose into how many shards a batch is cut, by what a shard costs and what idles. Pure.

Any number of at least the most trainers will do. As few as these cost the least per step; but where
the trainers of a smaller world do not divide them, some wait for others: of three shards two
trainers make two and one, of six three each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

SMALLEST_SHARD = 16  # samples, where there is batch norm: with fewer its statistics are noise
_WORTH = 0.05  # of a step: for less, the world of the most trainers is not made to wait
_SPREAD = 4  # shards are at most so many times smaller than those of the most trainers


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCost:
    """The time that one trainer needs for a shard."""

    fixed_s: float
    per_sample_s: float

    def of(self, samples: int) -> float:
        """Return the seconds for a shard of so many samples."""
        return self.fixed_s + self.per_sample_s * samples


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardChoice:
    """A number of shards, and what stands for it."""

    shards: int
    step_s: float  # for the shards of a step, averaged over the world sizes
    fewest: int  # the most trainers
    fewest_step_s: float
    idle_worlds: tuple[int, ...]  # world sizes in which some trainers wait for others

    def __str__(self) -> str:
        text = f"{self.shards} shards, {1e3 * self.step_s:.3g} ms a step over all world sizes"
        if self.shards != self.fewest:
            text += f" ({self.fewest}, the most trainers, take {1e3 * self.fewest_step_s:.3g} ms)"
        if self.idle_worlds:
            worlds = ", ".join(map(str, self.idle_worlds))
            text += f"; some trainers wait for others where there are {worlds} of them"
        return text


def fit_cost(small: tuple[int, float], large: tuple[int, float]) -> ShardCost:
    """Return the cost that explains the times of two shards, each (samples, seconds).

    Where noise makes the smaller shard take longer, all of its time is fixed; where it makes the
    larger one take more than its share, nothing is.
    """
    (few, few_s), (many, many_s) = small, large
    per_sample_s = min(max(0.0, (many_s - few_s) / (many - few)), many_s / many)
    return ShardCost(fixed_s=many_s - per_sample_s * many, per_sample_s=per_sample_s)


def possible_shards(batch_size: int, most: int, smallest: int) -> Iterator[int]:
    """Yield the numbers of shards that are worth a look, ascending: `most`, and larger ones.

    Args:
        most: trainers.
        smallest: samples that a full shard has at least, but for `most` shards.
    """
    yield most
    for shards in range(most + 1, batch_size // smallest + 1):
        size = -(-batch_size // shards)
        if -(-batch_size // size) == shards:  # else the last ones would always be empty
            yield shards


def sizes_to_measure(batch_size: int, worlds: range, smallest: int) -> tuple[int, int] | None:
    """Return the samples of two shards whose cost decides; None: nothing is to be decided."""
    most = worlds[-1]
    large = -(-batch_size // most)
    small = max(smallest, large // _SPREAD)
    if not _idle(most, worlds) or len(list(possible_shards(batch_size, most, small))) == 1:
        return None
    return small, large


def choose_shards(
    batch_size: int, worlds: range, cost: ShardCost, *, smallest: int = 1
) -> ShardChoice:
    """Return the number of shards that takes the least time on average over `worlds`.

    A world of w trainers makes ceil(V / w) shards one after the other.

    Args:
        worlds: from the fewest to the most trainers that the job may have.
        smallest: see `possible_shards`; what was measured, as nobody knows of smaller ones.
    """
    fewest = worlds[-1]
    found = {
        shards: _step_s(batch_size, shards, worlds, cost)
        for shards in possible_shards(batch_size, fewest, smallest)
    }
    shards = min(found, key=lambda shards: (found[shards], shards))
    if found[fewest] <= found[shards] * (1 + _WORTH):
        shards = fewest
    return ShardChoice(
        shards=shards,
        step_s=found[shards],
        fewest=fewest,
        fewest_step_s=found[fewest],
        idle_worlds=_idle(shards, worlds),
    )


def _step_s(batch_size: int, shards: int, worlds: Sequence[int], cost: ShardCost) -> float:
    rounds = sum(-(-shards // world) for world in worlds) / len(worlds)
    return rounds * cost.of(-(-batch_size // shards))


def _idle(shards: int, worlds: Sequence[int]) -> tuple[int, ...]:
    return tuple(world for world in worlds if shards % world)
