"""Check and parse names of services, endpoints of teachers, and addresses of registries. Pure.

Names end up in keys, logs and comma-separated lists, so only safe characters are accepted.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote, unquote, urlsplit

from distill_reader.errors import UsageError

MAX_NAME = 128
MAX_ENDPOINT = 256
# No character that Redis treats as a pattern, and no separator of keys.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@+-]*")
_HOST = r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?)"
_ENDPOINT = re.compile(
    rf"(?:(?P<scheme>[a-z]+(?:\+[a-z]+)?)://)?(?P<host>{_HOST}):(?P<port>[0-9]{{1,5}})"
    r"(?P<path>(?:/[A-Za-z0-9_][A-Za-z0-9_.%-]*)*)"
)
_MAX_SHOWN = 80


# --- names of services and students, endpoints of teachers


def check_name(value: object, what: str) -> str:
    """Return `value` if it is a valid name of a service or a student. Raises: UsageError."""
    if is_name(value):
        return str(value)
    raise UsageError(
        f"{what}: expected 1 to {MAX_NAME} letters, digits and any of _ . : @ + -, "
        f"beginning with a letter, a digit or _, got {shown(value)}"
    )


def is_name(value: object) -> bool:
    """Return whether `value` is a valid name of a service or a student."""
    return isinstance(value, str) and len(value) <= MAX_NAME and bool(_NAME.fullmatch(value))


def check_endpoint(value: object, what: str) -> str:
    """Return `value` if it is `[SCHEME://]HOST:PORT[[/PATH]/MODEL]`. Raises: UsageError."""
    if isinstance(value, str) and len(value) <= MAX_ENDPOINT:
        match = _ENDPOINT.fullmatch(value)
        if match is not None and 1 <= int(match["port"]) <= 65535:
            return value
    raise UsageError(
        f"{what}: expected HOST:PORT, or SCHEME://HOST:PORT/MODEL as for set_fixed_teacher, "
        f"got {shown(value)}"
    )


def is_endpoint(value: object) -> bool:
    """Return whether `check_endpoint` accepts `value`."""
    try:
        check_endpoint(value, "")
    except UsageError:
        return False
    return True


def host_port_of(endpoint: str) -> tuple[str, int]:
    """Return host and port of an endpoint that `check_endpoint` has accepted."""
    match = _ENDPOINT.fullmatch(endpoint)
    assert match is not None, endpoint
    return match["host"].strip("[]"), int(match["port"])


def path_of(endpoint: str) -> str:
    """Return the path before the model of an endpoint that `check_endpoint` has accepted."""
    match = _ENDPOINT.fullmatch(endpoint)
    assert match is not None, endpoint
    return match["path"].rpartition("/")[0]


def shown(value: object) -> str:
    """Return `value` for a message, shortened if it is long."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 4]} ..."


# --- addresses of registries


@dataclass(frozen=True, slots=True)
class DiscoveryAddress:
    """The address of a discovery server, HOST:PORT."""

    endpoint: str

    @property
    def host_port(self) -> tuple[str, int]:
        return host_port_of(self.endpoint)

    def __str__(self) -> str:
        return f"discovery server {self.endpoint}"


@dataclass(frozen=True, slots=True, repr=False)
class RedisAddress:
    """The URL of a Redis server, with the password."""

    url: str

    @property
    def host_port(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or 6379

    def __str__(self) -> str:
        """Return the address without the password, for logs."""
        host, port = self.host_port
        return f"redis at {host}:{port}"


RegistryAddress = DiscoveryAddress | RedisAddress


def registry_addresses(given: Sequence[str] | str, what: str) -> tuple[RegistryAddress, ...]:
    """Parse a list of registry addresses, or a text that separates them by commas.

    Raises:
        UsageError: the list is empty, has duplicates, or an element is neither HOST:PORT nor
            redis://HOST:PORT.
    """
    texts = given.split(",") if isinstance(given, str) else list(given)
    if not texts:
        raise UsageError(f"{what}: none is given; expected HOST:PORT or redis://HOST:PORT")
    addresses = tuple(_registry_address(str(text).strip(), what) for text in texts)
    if len(set(addresses)) < len(addresses):
        raise UsageError(f"{what}: each may be there once, got {', '.join(map(str, addresses))}")
    return addresses


def redis_address(text: str, password: str | None = None) -> RedisAddress:
    """Parse `redis://[[USER]:PASSWORD@]HOST[:PORT][/DB]` or `HOST:PORT`.

    Args:
        password: used if the text has none.

    Raises:
        UsageError: the text is neither.
    """
    url = text if "://" in text else f"redis://{text}"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # its text has a part of the password, and so has its traceback
        raise UsageError(
            f"{_without_password(text)}: expected a port from 1 to 65535 behind HOST: ; in a "
            "password, / # ? and commas are written %2F %23 %3F %2C, or give it by --db_passwd_file"
        ) from None
    if parts.scheme not in ("redis", "rediss") or not parts.hostname or port == 0:
        raise UsageError(
            f"{_without_password(text)}: expected HOST:PORT or redis://[:PASSWORD@]HOST:PORT[/DB]"
        )
    if not (parts.path.strip("/") or "0").isdecimal():
        raise UsageError(f"{_without_password(text)}: the database is a number, got {parts.path!r}")
    if password and not parts.password:
        host = parts.netloc.rpartition("@")[2]
        user = quote(unquote(parts.username or ""), safe="")
        url = parts._replace(netloc=f"{user}:{quote(password, safe='')}@{host}").geturl()
    return RedisAddress(url)


def _registry_address(text: str, what: str) -> RegistryAddress:
    if text.startswith(("redis://", "rediss://")):
        return redis_address(text)
    if "/" in text or not is_endpoint(text):
        raise UsageError(f"{what}: expected HOST:PORT or redis://HOST:PORT, got {shown(text)}")
    return DiscoveryAddress(text)


def _without_password(text: str) -> str:
    """Return an address without the part that may hold a password."""
    before, at, host = text.rpartition("@")
    if at:
        return f"{before.partition('//')[0]}//...@{host}"
    before, _, behind = text.rpartition(":")  # what is no port may be a password up to a comma
    port = behind.partition("/")[0]
    is_port = port.isdecimal() or port.endswith("]") or behind.startswith("//")
    return text if is_port or not before else f"{before}:..."
