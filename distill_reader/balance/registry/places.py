"""Where one looks for teachers, or registers them: discovery servers and Redis."""

from collections.abc import Sequence
from dataclasses import dataclass

from distill_reader.balance.names import address_of, check_endpoint
from distill_reader.balance.registry.redis_registry import (
    RedisAddress,
    RedisRegistry,
    redis_address,
)
from distill_reader.errors import UsageError


@dataclass(frozen=True, slots=True)
class DiscoveryAddress:
    """Where a discovery server is: HOST:PORT."""

    endpoint: str

    @property
    def address(self) -> tuple[str, int]:
        return address_of(self.endpoint)

    def __str__(self) -> str:
        return f"discovery server {self.endpoint}"


Place = DiscoveryAddress | RedisAddress


def places_of(given: Sequence[str] | str, what: str) -> tuple[Place, ...]:
    """Return the places of a list, or of a text with commas.

    Raises:
        UsageError: none is given, or one is no HOST:PORT and no redis://HOST:PORT.
    """
    texts = given.split(",") if isinstance(given, str) else list(given)
    if not texts:
        raise UsageError(f"{what}: none is given; expected HOST:PORT or redis://HOST:PORT")
    places: list[Place] = []
    for text in texts:
        place = str(text).strip()
        if place.startswith(("redis://", "rediss://")):
            places.append(redis_address(place))
            continue
        endpoint = check_endpoint(place, what)
        if "/" in endpoint:
            raise UsageError(f"{what}: expected HOST:PORT or redis://HOST:PORT, got {endpoint}")
        places.append(DiscoveryAddress(endpoint))
    if len(set(places)) < len(places):
        raise UsageError(f"{what}: each may be there once, got {', '.join(map(str, places))}")
    return tuple(places)


def check_places(places: Sequence[Place]) -> None:
    """Raise UsageError where a package for them is missing: before anything starts."""
    if any(not isinstance(place, DiscoveryAddress) for place in places):
        RedisRegistry([])
