"""Waiting times of a caller whose server is away."""

from job_server.api.backoff import Backoff


def test_waits_grow_to_a_limit_differ_between_callers_and_begin_again():
    backoff = Backoff(first_s=0.1, last_s=5.0, seed=1)
    waits = [backoff.next_s() for _ in range(20)]
    assert 0.05 <= waits[0] <= 0.1
    assert 2.5 <= waits[-1] <= 5.0
    assert max(waits) <= 5.0
    first, second = (Backoff(first_s=0.1, last_s=5.0, seed=seed) for seed in (1, 2))
    assert first.next_s() != second.next_s()
    backoff.reset()
    assert backoff.next_s() <= 0.1
