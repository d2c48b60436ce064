"""Amounts and times, as people write them."""

import pytest

from job_server.api.amounts import cores, megabytes, seconds


@pytest.mark.parametrize(
    ("text", "milli"), [("2", 2000), ("0.5", 500), ("1.25", 1250), ("250m", 250), (" 3 ", 3000)]
)
def test_cores_are_read(text, milli):
    assert cores(text) == milli


@pytest.mark.parametrize(
    ("text", "mb"),
    [
        ("500 MB", 500),
        ("2GB", 2000),
        ("2G", 2000),
        ("1Gi", 1074),
        ("512 MiB", 537),
        ("1.5 TB", 1_500_000),
    ],
)
def test_memory_is_read_in_mb_rounded_up(text, mb):
    assert megabytes(text) == mb


@pytest.mark.parametrize(
    ("text", "s"),
    [
        ("90", 90),
        ("90 s", 90),
        ("45min", 2700),
        ("2 h", 7200),
        ("1 h 30 min", 5400),
        ("1.5d", 129600),
    ],
)
def test_times_are_read(text, s):
    assert seconds(text) == s


@pytest.mark.parametrize("text", ["", "5 parsecs", "2 hours", "-3", "1e3", "1 h x", "h"])
def test_what_is_no_amount_is_refused(text):
    for read_amount in (cores, megabytes, seconds):
        with pytest.raises(ValueError, match="expected"):
            read_amount(text)
