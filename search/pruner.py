"""Prune by successive halving: after so many epochs, then `reduction` times as many, and so on.

Optuna's own takes a trial's newest value for that of epochs that nobody saw, against values of
trials that had trained less. Here values after as many epochs are compared, or none.
"""

import math
import zlib
from collections.abc import Mapping

import optuna
from optuna.study import StudyDirection

JUDGED = "edl_judged"  # attribute of a trial: its epochs when the pruner last let it go on


class HalvingPruner(optuna.pruners.BasePruner):
    """Let the best `1/reduction` of those that came to a rung go on, as each of them comes there.

    A rung is a number of epochs. A trial that was not seen at one is not judged there, and nobody
    is judged by it. One that was let go on is not judged at that rung again.

    Args:
        epochs: of a trial.
        hyperband: trials have one of several first rungs, as its brackets have: `min_epochs`,
            `reduction` times that, and so on.
    """

    def __init__(
        self, *, min_epochs: int, reduction: int, epochs: int, hyperband: bool = False
    ) -> None:
        self._reduction = reduction
        self._rungs = [min_epochs]
        while self._rungs[-1] * reduction <= epochs:
            self._rungs.append(self._rungs[-1] * reduction)
        count = len(self._rungs) if hyperband else 1
        # Of so many trials; most begin at the first rung, and all brackets train about as much.
        self._shares = [
            math.ceil(count * reduction**left / (left + 1)) for left in reversed(range(count))
        ]

    def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
        """Return whether a trial is not good enough at a rung that it has come to."""
        first = self._first_rung(study.study_name, trial.number)
        judged, now = trial.user_attrs.get(JUDGED, 0), trial.last_step or 0
        others: list[Mapping[int, float]] | None = None
        for rung in self._rungs[first:]:
            own = trial.intermediate_values.get(rung)
            if own is None or not judged < rung <= now:
                continue
            if others is None:
                others = [
                    each.intermediate_values
                    for each in study.get_trials(deepcopy=False)
                    if self._first_rung(study.study_name, each.number) == first
                ]
            there = [values[rung] for values in others if rung in values]
            if not self._goes_on(own, there, study.direction is StudyDirection.MAXIMIZE):
                return True
        return False

    def _goes_on(self, own: float, there: list[float], maximize: bool) -> bool:
        """Whether a value is among the best of a rung, of which it is one; NaN never is."""
        ranked = sorted((each for each in there if not math.isnan(each)), reverse=maximize)
        return own in ranked[: max(len(ranked) // self._reduction, 1)]

    def _first_rung(self, study_name: str, number: int) -> int:
        """Return the bracket of a trial. It follows from its number alone: others may be killed."""
        left = zlib.crc32(f"{study_name}_{number}".encode()) % sum(self._shares)
        for rung, share in enumerate(self._shares):
            left -= share
            if left < 0:
                return rung
        raise AssertionError(left)
