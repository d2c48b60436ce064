import pytest

from distill_reader.backoff import backoff_s


@pytest.mark.parametrize(
    ("failures", "delay_s"),
    [
        pytest.param(0, 0.5, id="the first try again"),
        pytest.param(1, 1.0, id="doubled"),
        pytest.param(3, 4.0, id="doubled again and again"),
        pytest.param(4, 5.0, id="no longer than the bound"),
        pytest.param(100_000, 5.0, id="away for hours"),
    ],
)
def test_each_failure_doubles_the_delay_up_to_a_bound(failures: int, delay_s: float):
    assert backoff_s(failures, 0.5, 5.0) == delay_s
