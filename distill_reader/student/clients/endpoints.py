"""Parse the endpoints of teachers, and the protocols that they name. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

from distill_reader.balance.addresses import registry_addresses
from distill_reader.errors import DistillError, UsageError

_SCHEMES = {  # of an endpoint -> protocol
    "fast": "fast-shm",
    "grpc": "oip-grpc",
    "grpcs": "oip-grpc",
    "http": "oip-http",
    "https": "oip-http",
    "serving": "serving-http",
    "serving+grpc": "serving-grpc",
}
_TLS = ("grpcs", "https")
_TLS_PORT = 443
PROTOCOLS = (
    "fast-shm", "fast-unix", "fast-tcp", "oip-grpc", "oip-http", "serving-http", "serving-grpc",
)  # fmt: skip


class ProtocolMismatch(DistillError):  # noqa: N818 - named by what is the case
    """A server listens there, but does not speak the protocol that was tried."""

    def __init__(self, text: str, *, is_certain: bool = True) -> None:
        super().__init__(text)
        self.is_certain = is_certain  # False: it sent nothing, and may just be slow


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A parsed endpoint."""

    endpoint: str  # as the user wrote it
    host: str
    port: int
    model: str = ""  # "": the only one that is served
    protocol: str | None = None  # None: to be found out
    prefix: str = ""  # of the paths of HTTP, as /teachers; "": none
    is_tls: bool = False

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.port


def parse_endpoint(
    endpoint: str, *, model: str | None = None, protocol: str | None = None
) -> Target:
    """Parse an endpoint. Raises: UsageError."""
    scheme, mark, rest = endpoint.strip().rpartition("://")
    if mark and scheme not in _SCHEMES:
        raise UsageError(
            f"endpoint {endpoint}: unknown protocol {scheme!r}; possible are "
            f"{', '.join(f'{name}://' for name in _SCHEMES)}, or none to find out"
        )
    if protocol is not None and protocol not in PROTOCOLS:
        raise UsageError(f"protocol: expected one of {', '.join(PROTOCOLS)}, got {protocol!r}")
    address = rest.partition("/")[0]
    if address.count(":") > 1 and "[" not in address and "@" not in address:
        raise UsageError(f"endpoint {endpoint}: write an IPv6 address in brackets, as [::1]:9292")
    try:
        parts = urlsplit(f"//{rest}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise UsageError(f"endpoint {endpoint}: {error}") from error
    is_plain = not (parts.query or parts.fragment or parts.username or parts.password)
    if port is None and mark and scheme in _TLS:
        port = _TLS_PORT
    if not host or not port or not is_plain:
        raise UsageError(f"endpoint {endpoint}: expected HOST:PORT or HOST:PORT/MODEL")
    prefix, slash, last = parts.path.strip("/").rpartition("/")
    if slash and (_SCHEMES.get(scheme) != "oip-http" or "" in prefix.split("/")):
        raise UsageError(
            f"endpoint {endpoint}: a path before the model ({prefix}) is for http:// and https://, "
            "as https://HOST:PORT/PATH/MODEL"
        )
    name = unquote(last)
    if model and name and model != name:
        raise UsageError(f"endpoint {endpoint}: names the model {name!r}, not {model!r}")
    return Target(
        endpoint=endpoint,
        host=host,
        port=port,
        model=name or model or "",
        protocol=protocol or (_SCHEMES[scheme] if mark else None),
        prefix=f"/{prefix}" if slash else "",
        is_tls=bool(mark) and scheme in _TLS,
    )


def endpoints_of(teachers: Sequence[str] | str) -> tuple[str, ...]:
    """Return the endpoints of a list, or of a text with commas.

    Raises:
        UsageError: none is given, or one is empty or given twice.
    """
    several: object = teachers.split(",") if isinstance(teachers, str) else teachers
    given: list[Any] = list(several) if isinstance(several, Iterable) else [several]
    if not all(isinstance(each, str) for each in given):
        raise UsageError(f"teachers: expected texts such as 'host:9292', got {teachers!r}")
    endpoints = tuple(endpoint.strip() for endpoint in given)
    if not endpoints or not all(endpoints):
        raise UsageError(f"teachers: expected endpoints such as 'host:9292', got {teachers!r}")
    if len(set(endpoints)) < len(endpoints):
        raise UsageError(f"teachers: each may be there once, got {', '.join(endpoints)}")
    return endpoints


def servers_of(discovery_servers: Sequence[str] | str) -> tuple[str, ...]:
    """Check and return the servers of a list, or of a text with commas. Raises: UsageError."""
    given = discovery_servers
    if not isinstance(given, Iterable):
        raise UsageError(f"discovery_servers: expected texts such as 'host:7001', got {given!r}")
    servers = tuple(given.split(",") if isinstance(given, str) else given)
    registry_addresses(servers, "discovery_servers")
    return tuple(server.strip() for server in servers)
