"""What is done to a training, and when: all of it follows from the seed. Pure."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

PROCESSES = ("server", "client", "launcher", "trainer", "spare", "shim")

# What is asked of the server, and what has to be there for the others: root, mostly.
_WEIGHTS = {
    **{f"kill {each}": 2 for each in PROCESSES},
    **{f"freeze {each}": 1 for each in PROCESSES},
    "kill node": 1,
    "kill all": 1,
    "terminate trainer": 1,
    "end server": 1,
    "end client": 1,
    "resize": 6,
    "pause": 3,
    "stop": 1,
    "corrupt checkpoint": 2,
    "delete checkpoints": 1,
    "fill disk": 2,
    "lock logs": 1,
    "slow node": 1,
    "set clock": 2,
    "cut network": 2,
    "lose packets": 1,
    "second client": 1,
    "second server": 1,
}
KINDS = tuple(_WEIGHTS)

# What a job is to be in when it happens, so that no phase of a change is left out by chance.
PHASES = ("preparing", "cutting_over", "recovering", "pausing", "starting", "stopping")
_ANY_TIME = 0.6  # share of the actions that wait for no phase
_STEPS = (0, 0, 1, 3, 10, 30)
_WAITS_S = (0.0, 0.0, 0.0, 0.3, 1.0, 3.0, 6.0)
_LASTS_S = (0.3, 1.0, 3.0, 7.0)
_CLOCK_S = (-3600.0, -60.0, -2.0, 2.0, 60.0, 3600.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One thing that is done.

    Attributes:
        number: from 1.
        kind: of KINDS.
        steps: that a job makes first, if it does within half a minute.
        wait_s: after these.
        phase: what the job is brought to first, of PHASES; "": it happens at once.
        pick: chooses among the processes, nodes or jobs that are there: this, modulo their number.
        for_s: how long it lasts, where it does; the next ones happen meanwhile.
        clock_s: how far the clock is set, where it is.
    """

    number: int
    kind: str
    steps: int
    wait_s: float
    phase: str
    pick: int
    for_s: float
    clock_s: float


def actions(seed: int, only: tuple[str, ...] = KINDS) -> Iterator[Action]:
    """Yield what happens, without end: the same for the same seed and kinds."""
    draw = random.Random(seed)
    weights = [_WEIGHTS[kind] for kind in only]
    for number in itertools.count(1):
        yield Action(
            number=number,
            kind=draw.choices(only, weights)[0],
            steps=draw.choice(_STEPS),
            wait_s=draw.choice(_WAITS_S),
            phase="" if draw.random() < _ANY_TIME else draw.choice(PHASES),
            pick=draw.randrange(1 << 16),
            for_s=draw.choice(_LASTS_S),
            clock_s=draw.choice(_CLOCK_S),
        )
