"""What a training promises about its result when the number of trainers changes. Pure.

statistics   what data parallel training promises: every sample counts once with its weight. Each
             trainer computes its share in one piece, so batch norm and dropout see that share.
rounding     a batch is cut into the same shards whoever computes them: the result depends on the
             number of trainers by rounding only
"""

PROMISES = ("statistics", "rounding")  # the weaker one first
LATER = "bits"  # the same bits for any history of changes


def check_promise(promise: object) -> None:
    """Raise a ValueError unless `promise` is a known name."""
    if promise == LATER:
        raise ValueError(
            f"promise: {LATER!r} is not there yet; 'rounding' comes nearest to it: it differs by "
            f"the order in which gradients are added up"
        )
    if promise not in PROMISES:
        raise ValueError(f"promise: expected one of {', '.join(PROMISES)}, got {promise!r}")


def promise_text(promise: str, shards: int) -> str:
    """Return e.g. `rounding, 6 shards`, for people."""
    return f"{promise}, {shards} shards" if promise == "rounding" else promise
