"""Learning rates of the original, as pure functions of how many epochs are done.

piecewise_decay       from lr up to lr * batch / 256, then a tenth at each of `decay_epochs`
                      (Goyal et al. 2017, arXiv 1706.02677)
cosine_decay          half a cosine, one value per epoch
cosine_warmup_decay   from 0 up to lr, then half a cosine (He et al. 2018, arXiv 1812.01187)
linear_decay          a straight line down to 0
constant              lr
"""

import math
from collections.abc import Callable, Sequence

LR_BATCH = 256  # the batch that piecewise_decay's lr is meant for


def make_schedule(
    strategy: str,
    *,
    lr: float,
    total_batch: int,
    num_epochs: int,
    warmup_epochs: float = 0.0,
    decay_epochs: Sequence[int] = (),
) -> Callable[[float], float]:
    """Return rate(epochs_done).

    It goes by epochs, not by steps, so that it means the same when the batch, and with it the
    number of steps in an epoch, follows the number of trainers (`--policy linear`).

    Raises:
        ValueError: the strategy is unknown.
    """

    def piecewise(done: float) -> float:
        top = lr * total_batch / LR_BATCH
        if done < warmup_epochs:
            first = min(lr, top)  # small batches need no warm-up: top is below lr
            return first + (top - first) * done / warmup_epochs
        return top * 0.1 ** sum(done >= epoch for epoch in decay_epochs)

    def cosine(done: float) -> float:
        return _half_cosine(lr, math.floor(done) / num_epochs)

    def cosine_warmup(done: float) -> float:
        if done < warmup_epochs:
            return lr * done / warmup_epochs
        return _half_cosine(lr, (done - warmup_epochs) / max(num_epochs - warmup_epochs, 1e-9))

    def linear(done: float) -> float:
        return lr * max(0.0, 1 - done / num_epochs)

    def constant(done: float) -> float:
        return lr

    schedules = {
        "piecewise_decay": piecewise,
        "cosine_decay": cosine,
        "cosine_warmup_decay": cosine_warmup,
        "linear_decay": linear,
        "constant": constant,
    }
    if strategy not in schedules:
        raise ValueError(f"lr_strategy: {strategy!r} is none of {', '.join(schedules)}")
    return schedules[strategy]


def _half_cosine(lr: float, share: float) -> float:
    return lr * (1 + math.cos(math.pi * min(share, 1.0))) / 2
