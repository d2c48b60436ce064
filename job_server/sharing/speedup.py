"""How much faster a training is with more trainers, from what it has shown so far. Pure.

The time of a step with n trainers is modelled as a / n + b + c * (n - 1): what is divided among
them, what each does anyway, and what grows with their number. It is linear in (a, b, c), so a few
measured world sizes give them by least squares; a weak pull towards a usual training decides where
too few were measured. Pollux (Qiao et al., OSDI 2021) fits the like from the jobs' own reports.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# A usual training: 2 % of a step is not divided, and each further trainer adds 0.5 %.
_USUAL = (0.98, 0.02, 0.005)
_SPREAD = (0.5, 0.1, 0.02)  # how far off the parts may well be
_NOISE = 0.03  # of a measured step time
_FASTEST = 1e-5  # of the slowest step time: with more between them the sums lose their digits


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step of n trainers: `divided` / n + `fixed` + `per_trainer` * (n - 1)."""

    divided: float = _USUAL[0]
    fixed: float = _USUAL[1]
    per_trainer: float = _USUAL[2]

    def seconds(self, trainers: int) -> float:
        return self.divided / trainers + self.fixed + self.per_trainer * (trainers - 1)

    def speedup(self, trainers: int) -> float:
        """Return how many times faster than one trainer; 0 for none."""
        if trainers < 1:
            return 0.0
        return (self.divided + self.fixed) / self.seconds(trainers)


USUAL = StepTime()


def fit(measured: Mapping[int, float]) -> StepTime:
    """Return the step time that fits best what was measured.

    Args:
        measured: trainers -> seconds per step, above 0. Empty: a usual training.
    """
    if not measured:
        return USUAL
    slowest = max(measured.values())
    measured = {n: max(seconds, slowest * _FASTEST) for n, seconds in measured.items()}
    # A usual training that is as slow as this one takes so many seconds alone:
    scale = sum(s / USUAL.seconds(n) for n, s in measured.items()) / len(measured)
    free = [0, 1, 2]
    while True:
        found = _least_squares(measured, scale, free)
        lowest = min(free, key=found.__getitem__)
        if found[lowest] >= 0:
            return StepTime(*found)
        free.remove(lowest)  # nothing takes less than no time
        if free == [2]:  # and one trainer takes some
            free = [1]


def _least_squares(measured: Mapping[int, float], scale: float, free: Iterable[int]) -> list[float]:
    """Solve for the parts in `free`; the others are 0. Errors are relative to what was measured."""
    parts = list(free)
    size = len(parts)
    matrix = [[0.0] * (size + 1) for _ in range(size)]
    for trainers, seconds in measured.items():
        row = [((1 / trainers, 1.0, trainers - 1.0)[i]) / seconds for i in parts]
        for y in range(size):
            for x in range(size):
                matrix[y][x] += row[y] * row[x]
            matrix[y][size] += row[y]
    for y, i in enumerate(parts):
        weight = (_NOISE / (_SPREAD[i] * scale)) ** 2
        matrix[y][y] += weight
        matrix[y][size] += weight * _USUAL[i] * scale
    found = [0.0, 0.0, 0.0]
    for i, value in zip(parts, _solved(matrix), strict=True):
        found[i] = value
    return found


def _solved(matrix: list[list[float]]) -> list[float]:
    """Solve a positive definite system, given with its right side as the last column."""
    size = len(matrix)
    for i in range(size):
        for j in range(i + 1, size):
            factor = matrix[j][i] / matrix[i][i]
            for k in range(i, size + 1):
                matrix[j][k] -= factor * matrix[i][k]
    found = [0.0] * size
    for i in reversed(range(size)):
        rest = sum(matrix[i][k] * found[k] for k in range(i + 1, size))
        found[i] = (matrix[i][size] - rest) / matrix[i][i]
    return found
