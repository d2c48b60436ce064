"""Addresses of registries: what is refused, and what the refusal says. Pure."""

import pytest

from distill_reader.balance.addresses import redis_address, registry_addresses
from distill_reader.errors import UsageError


@pytest.mark.parametrize(
    "text",
    [
        "redis://:hush/hush@h:6379",
        "redis://:hush#hush@h:6379",
        "redis://:hush?hush@h:6379",
        "redis://:hush",  # of `redis://:hush,hush@h:6379`, as a comma separates addresses
    ],
)
def test_no_part_of_a_password_is_shown_and_its_signs_are_named(text):
    with pytest.raises(UsageError, match="%2F") as error:
        redis_address(text)
    assert "hush" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://h:port", r"redis://h:\.\.\.: "),
        ("redis://h:70000", "redis://h:70000: "),
        ("redis://h:0", "redis://h:0: "),
        ("redis://[::1]/x", r"redis://\[::1\]/x: "),
    ],
)
def test_an_address_that_is_wrong_is_named(text, shown):
    with pytest.raises(UsageError, match=shown):
        redis_address(text)


@pytest.mark.parametrize("text", ["unix:///run/redis.sock", "http://h:1", "grpc://h:1/m", "h"])
def test_what_no_registry_has_is_told_from_what_one_has(text):
    with pytest.raises(UsageError, match="servers: expected HOST:PORT or redis://HOST:PORT, got"):
        registry_addresses(text, "servers")
