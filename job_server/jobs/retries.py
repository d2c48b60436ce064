"""Compute the backoff before the next try. Pure."""

import hashlib

BASE_S = 1.0
CAP_S = 60.0
HEALTHY_S = 60.0  # running so long counts as progress where no steps are reported


def backoff_s(job_id: str, failures_in_row: int) -> float:
    """Return the wait before the next try: 0 s after a first failure, then exponential.

    The jitter (0.75 to 1.25) comes from the job's id and the count, so that jobs which failed
    together do not come back together, and a replay gives the same times.
    """
    if failures_in_row <= 1:
        return 0.0
    digest = hashlib.sha256(f"{job_id}/{failures_in_row}".encode()).digest()
    jitter = 0.75 + digest[0] / 510
    return min(CAP_S, BASE_S * 2.0 ** min(failures_in_row - 2, 10) * jitter)
