"""The messages between discovery servers, students and teachers. Pure.

A message is 4 bytes `CB EF 00 00`, its whole length as a big-endian int32, and a JSON object with a
`type`. The original's messages, each answered:

    student -> {"type": "register", "service_name", "seq", "num"}
    server  -> {"type": "register", "seq", "servers", "num"}
    student -> {"type": "heartbeat", "version"}        every 2 s
    server  -> {"type": "heartbeat"} or {"type": "servers_change", "servers", "version"}

Ours. A client with a token proves it first, then the server does (tokens.py). Clients of older
releases sent the `token` in the first message of a connection:

    either  -> {"type": "meet", "nonce"}
    server  -> {"type": "challenge", "nonce"}, or {"type": "ok"}, if it needs none
    either  -> {"type": "prove", "proof"}
    server  -> {"type": "ok", "proof"}

    student -> {"type": "student", "service", "student", "session", "require", "held"}
               {"type": "report", "require", "wait_share", "samples_per_s", "measured",
                "unusable"}                                                     every 2 s
               {"type": "leave"}
    teacher -> {"type": "teacher", "service", "server", "lease_s", "info"}            every 0.5 s
               {"type": "withdraw", "service", "server"}
    server  -> {"type": "ok"}                  to each of these
               {"type": "teachers", "teachers", "version"}   to a student, whenever they change
               {"type": "error", "error": text}              to what cannot be answered; with
                   "retry": true, if it can be later: the registry is unavailable
"""

import json
import math
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from distill_reader.balance.addresses import check_endpoint, check_name, shown
from distill_reader.balance.table import (
    MAX_HELD,
    MAX_REQUIRE,
    MAX_UNUSABLE,
    Measured,
    Student,
    student_json,
)
from distill_reader.errors import BadRequest, UsageError

HEAD = struct.Struct("!4si")
MAGIC = b"\xcb\xef\x00\x00"
MAX_REQUEST_BYTES = 256 << 10  # to a server: a student's report on MAX_HELD teachers
MAX_STRANGERS_BYTES = 16 << 10  # likewise, of who has not proved yet that he knows the token
MAX_ANSWER_BYTES = 4 << 20  # from a server: a list of MAX_REQUIRE teachers
MAX_INFO = 512
REPORT_S = 2.0  # between a student's reports
LEASE_S = (0.5, 600.0)  # the least and the most that a teacher may ask for


_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can say it, and Redis cannot store it


class BadFrame(BadRequest):
    """The bytes are not a message, so it is unknown where the next one begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LegacyRegister:
    """A student of the original registers."""

    service: str
    seq: int
    num: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LegacyHeartbeat:
    """A student of the original asks for changes since a version."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StudentJoin:
    """A student joins a service."""

    service: str
    student: Student


@dataclass(frozen=True, slots=True, kw_only=True)
class StudentReport:
    """A student reports how well it is fed."""

    require: int
    wait_share: float | None  # None: it has not read since it joined
    samples_per_s: float | None  # likewise
    measured: Mapping[str, Measured]
    unusable: tuple[str, ...] = ()  # teachers that do not answer it; older students send none


@dataclass(frozen=True, slots=True, kw_only=True)
class StudentLeave:
    """A student leaves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherHeartbeat:
    """A teacher registers, or renews its lease."""

    service: str
    server: str
    lease_s: float
    info: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherWithdrawal:
    """A teacher withdraws."""

    service: str
    server: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthStart:
    """A client with a token starts the exchange of proofs."""

    nonce: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthProof:
    """The client proves that it knows the token."""

    proof: str


Request = (
    LegacyRegister
    | LegacyHeartbeat
    | StudentJoin
    | StudentReport
    | StudentLeave
    | TeacherHeartbeat
    | TeacherWithdrawal
    | AuthStart
    | AuthProof
)


def encode(body: Mapping[str, Any]) -> bytes:
    """Return the bytes of a message."""
    data = json.dumps(body, separators=(",", ":")).encode()
    return HEAD.pack(MAGIC, HEAD.size + len(data)) + data


def body_bytes(head: bytes, most: int) -> int:
    """Return how many bytes follow the head. Raises: BadFrame."""
    magic, length = HEAD.unpack(head)
    if magic != MAGIC:
        raise BadFrame(f"a message begins with CB EF 00 00, got {magic.hex(' ')}")
    if not HEAD.size <= length <= most:
        raise BadFrame(f"length: expected {HEAD.size} to {most} bytes, got {length}")
    return int(length) - HEAD.size


def decode(data: bytes) -> dict[str, Any]:
    """Return the JSON object of a message. Raises: BadRequest."""
    try:
        body = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"a message is a JSON object: {shown(str(error))}") from error
    if not isinstance(body, dict):
        raise BadRequest(f"a message is a JSON object, got {shown(body)}")
    return body


def parse(body: Mapping[str, Any]) -> Request:
    """Return the request of a message. Raises: BadRequest, which names the field."""
    kind = body.get("type")
    read = _READERS.get(kind) if isinstance(kind, str) else None
    if read is None:
        raise BadRequest(f"type: expected one of {', '.join(_READERS)}, got {shown(kind)}")
    try:
        return read(body)
    except UsageError as error:
        raise BadRequest(str(error)) from error


def join_body(service: str, student: Student) -> dict[str, Any]:
    """Return the first message of a student."""
    return {
        "type": "student",
        "service": service,
        "student": student.student,
        "session": student.session,
        "require": student.require,
        "held": student.held[:MAX_HELD],
    }


def report_body(student: Student) -> dict[str, Any]:
    body = {"type": "report", **student_json(student)}
    del body["held"]
    body["measured"] = dict(list(body["measured"].items())[:MAX_HELD])
    body["unusable"] = body["unusable"][:MAX_UNUSABLE]
    return body


def heartbeat_body(heartbeat: TeacherHeartbeat) -> dict[str, Any]:
    return {"type": "teacher", **asdict(heartbeat)}


def withdrawal_body(service: str, server: str) -> dict[str, Any]:
    return {"type": "withdraw", "service": service, "server": server}


# --- one parser for each type


def _legacy_register(body: Mapping[str, Any]) -> LegacyRegister:
    return LegacyRegister(
        service=check_name(body.get("service_name"), "service_name"),
        seq=_integer(body, "seq", 0, 1 << 62),
        num=min(_integer(body, "num", 1, 1 << 62), MAX_REQUIRE),
    )


def _legacy_heartbeat(body: Mapping[str, Any]) -> LegacyHeartbeat:
    # The original accepts heartbeats without a version, of older clients.
    return LegacyHeartbeat(
        version=_integer(body, "version", 0, 1 << 62) if "version" in body else 0
    )


def _student_join(body: Mapping[str, Any]) -> StudentJoin:
    return StudentJoin(
        service=check_name(body.get("service"), "service"),
        student=Student(
            student=check_name(body.get("student"), "student"),
            session=_integer(body, "session", 1, 1 << 52),
            require=_integer(body, "require", 1, MAX_REQUIRE),
            held=_endpoints(body.get("held"), "held", MAX_HELD),
        ),
    )


def _student_report(body: Mapping[str, Any]) -> StudentReport:
    measured = body.get("measured")
    if not isinstance(measured, dict) or len(measured) > MAX_HELD:
        raise BadRequest(f"measured: expected up to {MAX_HELD} teachers, got {shown(measured)}")
    rates = {}
    for teacher, values in measured.items():
        if not isinstance(values, list) or len(values) != 2:
            raise BadRequest(f"measured: expected [samples_per_s, busy_share], got {shown(values)}")
        rates[check_endpoint(teacher, "measured")] = Measured(
            samples_per_s=_measure(values[0], "measured"),
            busy_share=min(1.0, _measure(values[1], "measured")),
        )
    wait_share, samples_per_s = body.get("wait_share"), body.get("samples_per_s")
    return StudentReport(
        require=_integer(body, "require", 1, MAX_REQUIRE),
        wait_share=None if wait_share is None else min(1.0, _measure(wait_share, "wait_share")),
        samples_per_s=None if samples_per_s is None else _measure(samples_per_s, "samples_per_s"),
        measured=rates,
        unusable=_endpoints(body.get("unusable", []), "unusable", MAX_UNUSABLE),
    )


def _student_leave(_: Mapping[str, Any]) -> StudentLeave:
    return StudentLeave()


def _teacher_heartbeat(body: Mapping[str, Any]) -> TeacherHeartbeat:
    info = body.get("info", "")
    if not isinstance(info, str) or len(info) > MAX_INFO or _SURROGATE.search(info):
        raise BadRequest(f"info: expected a text of up to {MAX_INFO} characters, got {shown(info)}")
    lease_s = _measure(body.get("lease_s"), "lease_s")
    least, most = LEASE_S
    if not least <= lease_s <= most:
        raise BadRequest(f"lease_s: expected {least:g} to {most:g} seconds, got {lease_s:g}")
    return TeacherHeartbeat(
        service=check_name(body.get("service"), "service"),
        server=check_endpoint(body.get("server"), "server"),
        lease_s=lease_s,
        info=info,
    )


def _withdraw(body: Mapping[str, Any]) -> TeacherWithdrawal:
    return TeacherWithdrawal(
        service=check_name(body.get("service"), "service"),
        server=check_endpoint(body.get("server"), "server"),
    )


_READERS: dict[str, Callable[[Mapping[str, Any]], Request]] = {
    "register": _legacy_register,
    "heartbeat": _legacy_heartbeat,
    "student": _student_join,
    "report": _student_report,
    "leave": _student_leave,
    "teacher": _teacher_heartbeat,
    "withdraw": _withdraw,
    "meet": lambda body: AuthStart(nonce=_text(body, "nonce")),
    "prove": lambda body: AuthProof(proof=_text(body, "proof")),
}


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_INFO:
        raise BadRequest(
            f"{name}: expected a text of up to {MAX_INFO} characters, got {shown(value)}"
        )
    return value


def _endpoints(values: Any, name: str, most: int) -> tuple[str, ...]:
    if not isinstance(values, list) or len(values) > most:
        raise BadRequest(f"{name}: expected up to {most} endpoints, got {shown(values)}")
    return tuple(check_endpoint(each, name) for each in values)


def _integer(body: Mapping[str, Any], name: str, least: int, most: int) -> int:
    value = body.get(name)
    if type(value) is not int or not least <= value <= most:
        raise BadRequest(f"{name}: expected an integer of {least} to {most}, got {shown(value)}")
    return value


def _measure(value: Any, name: str) -> float:
    if type(value) not in (int, float) or not 0 <= value < 1e300:
        raise BadRequest(f"{name}: expected a number of 0 or more, got {shown(value)}")
    number = float(value)
    assert math.isfinite(number)
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
