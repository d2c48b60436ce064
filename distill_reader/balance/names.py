"""What services, endpoints and students may be called: names go into keys, logs and lists. Pure."""

import re

from distill_reader.errors import UsageError

MAX_NAME = 128
MAX_ENDPOINT = 256
# Nothing that Redis takes for a pattern, and no separator of keys.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@+-]*")
_HOST = r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?)"
_ENDPOINT = re.compile(
    rf"(?:(?P<scheme>[a-z]+(?:\+[a-z]+)?)://)?(?P<host>{_HOST}):(?P<port>[0-9]{{1,5}})"
    r"(?:/[A-Za-z0-9_][A-Za-z0-9_.%-]*)?"
)


def check_name(value: object, what: str) -> str:
    """Return `value` if it may name a service or a student. Raises: UsageError."""
    if isinstance(value, str) and len(value) <= MAX_NAME and _NAME.fullmatch(value):
        return value
    raise UsageError(
        f"{what}: expected 1 to {MAX_NAME} letters, digits and any of _ . : @ + -, "
        f"beginning with a letter, a digit or _, got {shown(value)}"
    )


def check_endpoint(value: object, what: str) -> str:
    """Return `value` if it is `[SCHEME://]HOST:PORT[/MODEL]`. Raises: UsageError."""
    if isinstance(value, str) and len(value) <= MAX_ENDPOINT:
        match = _ENDPOINT.fullmatch(value)
        if match is not None and 1 <= int(match["port"]) <= 65535:
            return value
    raise UsageError(
        f"{what}: expected HOST:PORT, or SCHEME://HOST:PORT/MODEL as for set_fixed_teacher, "
        f"got {shown(value)}"
    )


def is_name(value: object) -> bool:
    """Return whether `check_name` takes it."""
    return isinstance(value, str) and len(value) <= MAX_NAME and bool(_NAME.fullmatch(value))


def is_endpoint(value: object) -> bool:
    """Return whether `check_endpoint` takes it."""
    try:
        check_endpoint(value, "")
    except UsageError:
        return False
    return True


def address_of(endpoint: str) -> tuple[str, int]:
    """Return host and port of an endpoint that was checked."""
    match = _ENDPOINT.fullmatch(endpoint)
    assert match is not None, endpoint
    return match["host"].strip("[]"), int(match["port"])


def shown(value: object) -> str:
    """Return `value` as a text that is fit for a message: not for ever."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:76]} ..."
