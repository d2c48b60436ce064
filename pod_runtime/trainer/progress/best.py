"""The best values of a training's metrics, and which checkpoints have them. Pure."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

MODES = ("max", "min")
FOLDER = "best"  # below the path of the checkpoints, with a folder for each metric
_METRIC = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class BestCheckpoint:
    """The state in which a metric was best so far."""

    metric: str
    mode: str  # "max" if a higher value is better, "min" if a lower one is
    value: float
    stage: int  # of the state
    step: int  # global steps that the state has behind it
    epoch: int  # 0-based, in which it was found

    @property
    def folder(self) -> str:
        """Where its checkpoint is, below the path of all checkpoints."""
        return f"{metric_folder(self.metric)}/stage_{self.stage:08d}/step_{self.step:010d}"

    def beats(self, other: "BestCheckpoint | None") -> bool:
        """Whether this one is better; what is no finite number never is."""
        if not math.isfinite(self.value):
            return False
        if other is None:
            return True
        return self.value > other.value if self.mode == "max" else self.value < other.value


def check_metric(metric: object, mode: object) -> None:
    """Raise a ValueError unless these can be kept; the text says what would be right."""
    if not (isinstance(metric, str) and _METRIC.match(metric)):
        raise ValueError(
            f"metric: expected a name of letters, digits, '.', '_' and '-', which names a folder, "
            f"got {metric!r}"
        )
    if mode not in MODES:
        raise ValueError(f"mode: expected one of {', '.join(MODES)}, got {mode!r}")


def metric_folder(metric: str) -> str:
    """Return the folder of a metric's best checkpoint, below the path of all checkpoints."""
    return f"{FOLDER}/{metric}"


def find_best(bests: Sequence[BestCheckpoint], metric: str) -> BestCheckpoint | None:
    """Return the best of a metric; None: there is none."""
    return next((each for each in bests if each.metric == metric), None)


def with_best(bests: Sequence[BestCheckpoint], best: BestCheckpoint) -> tuple[BestCheckpoint, ...]:
    """Return `bests` with this one in the place of its metric's."""
    return (*(each for each in bests if each.metric != best.metric), best)
