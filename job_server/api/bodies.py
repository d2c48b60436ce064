"""JSON bodies: read strictly, written once."""

import json
import math
from typing import Any, NoReturn

from job_server.api.errors import BadRequest

MAX_BODY_BYTES = 2 * 1024 * 1024
MAX_DEPTH = 32  # no message of ours nests deeper than 8


def to_body(data: object) -> bytes:
    """Return plain JSON types as a body."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).encode("ascii")


def from_body(body: bytes) -> Any:
    """Return the JSON in a request's body, safe to decode, to store and to show.

    Raises:
        BadRequest: no JSON, nested too deeply, or with numbers or characters that no field takes.
    """
    try:
        data = json.loads(
            body.decode("utf-8"),
            parse_int=_parse_int,
            parse_float=_parse_float,
            parse_constant=_refuse_constant,
        )
    except UnicodeDecodeError as error:
        raise BadRequest(f"body: not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise BadRequest(f"body: not JSON: {error}") from None
    except RecursionError:
        raise BadRequest(f"body: nested more than {MAX_DEPTH} deep") from None
    _check(data, MAX_DEPTH)
    return data


def _parse_int(text: str) -> int:
    if len(text) > 16:
        raise BadRequest(f"body: the number {text[:20]}... is too large")
    return int(text)


def _parse_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):  # 1e999 is valid JSON, and could never be answered as JSON again
        raise BadRequest(f"body: the number {text[:20]} is too large")
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise BadRequest(f"body: {text} is no JSON number; leave the key out or send null")


def _check(data: object, depth: int) -> None:
    """Refuse what SQLite, UTF-8 or recursive code would choke on later."""
    if depth < 0:
        raise BadRequest(f"body: nested more than {MAX_DEPTH} deep")
    if isinstance(data, str):
        # A lone surrogate is valid JSON, and no valid text.
        if not data.isascii() and any("\ud800" <= char <= "\udfff" for char in data):
            raise BadRequest("body: a text holds a lone surrogate; send valid Unicode")
    elif isinstance(data, dict):
        for key, value in data.items():
            _check(key, depth)
            _check(value, depth - 1)
    elif isinstance(data, list):
        for item in data:
            _check(item, depth - 1)
