"""The state of a service in the registry, and the table of teachers that follows from it. Pure.

The table of a service lists each student's teachers. It is stored in the registry. A server that
computes another table writes it, unless another server was faster; so all servers tell students the
same. A table also has the speed class of each teacher:

A class is a power of the square root of two, counted from the median speed of the service. A
teacher leaves its class only if its measured speed is more than one class away. So teachers of one
kind are all in class 0, and measurement noise moves no student.
"""

import json
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from distill_reader.balance.addresses import is_endpoint, is_name
from distill_reader.balance.assign import assign_teachers

MOST_CLASS = 6  # 8 times the median
_UNIT = 64  # speeds are integers, so that every machine gets the same sums
MAX_REQUIRE = 10_000  # teachers of one student
MAX_HELD = 1024  # teachers that a student's message may name
MAX_UNUSABLE = 128  # unusable teachers in such a message


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a student has measured of one teacher."""

    samples_per_s: float
    busy_share: float  # part of the time in which the teacher had a request of this student


@dataclass(frozen=True, slots=True, kw_only=True)
class Student:
    """The last report of a student."""

    student: str
    session: int  # +1 with each of its connections; only the highest counts
    require: int  # the most teachers it wants
    held: tuple[str, ...] = ()  # the teachers that it says it has
    wait_share: float | None = None  # part of its time it waits for teachers; None: unknown
    samples_per_s: float | None = None  # None: unknown
    measured: Mapping[str, Measured] = field(default_factory=dict)  # by teacher
    unusable: tuple[str, ...] = ()  # teachers that do not answer it


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The teachers of each student of a service."""

    version: int = 0  # +1 per change; 0: there has been none
    links: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    classes: Mapping[str, int] = field(default_factory=dict)  # speed class by teacher; absent: 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceState:
    """What the registry holds of one service."""

    teachers: frozenset[str] = frozenset()  # endpoints
    students: Mapping[str, Student] = field(default_factory=dict)  # by id
    table: Table | None = None  # None: not written yet, or lost


def next_table(service: ServiceState) -> Table:
    """Return the table that should hold now: the service's own object if it needs no change."""
    table = service.table or Table()
    teachers = service.teachers
    measured = measured_speeds(student.measured for student in service.students.values())
    classes = speed_classes(
        {teacher: each for teacher, each in table.classes.items() if teacher in teachers},
        {teacher: rate for teacher, rate in measured.items() if teacher in teachers},
    )
    links = assign_teachers(
        {name: student.require for name, student in service.students.items()},
        {teacher: speed_of(classes.get(teacher, 0)) for teacher in teachers},
        _links_before(service, table),
        {name: student.unusable for name, student in service.students.items()},
        _proven(service),
    )
    if service.table is not None and links == table.links and classes == table.classes:
        return table
    return Table(version=table.version + 1, links=links, classes=classes)


def guest_table(service: ServiceState) -> Table:
    """Return the table with a teacher added for each student that has none.

    Used while the registry is unavailable, and a new table cannot be written.
    """
    table = service.table or Table()
    links = dict(table.links)
    students = dict.fromkeys(sorted(service.teachers), 0)
    for teachers in links.values():
        for teacher in teachers:
            if teacher in students:
                students[teacher] += 1
    for name, student in sorted(service.students.items()):
        if students and not links.get(name):
            bad = student.unusable
            teacher = min(students, key=lambda each: (each in bad, students[each], each))
            links[name] = (teacher,)
            students[teacher] += 1
    return Table(version=table.version, links=links, classes=table.classes)


def _proven(service: ServiceState) -> set[str]:
    """Return the teachers that answer a student which does not report them as unusable."""
    return {
        teacher
        for student in service.students.values()
        for teacher, measured in student.measured.items()
        if measured.samples_per_s > 0 and teacher not in student.unusable
    }


def _links_before(service: ServiceState, table: Table) -> dict[str, tuple[str, ...]]:
    """Return the links of the table; a student that it does not list keeps what it says it has.

    That happens if the table was lost, or was written before the student came back. Teachers that
    others have by then are left out, as long as there is a teacher for each student.
    """
    links = {name: table.links[name] for name in service.students if name in table.links}
    taken: set[str] = set()
    if len(service.teachers) >= len(service.students):
        taken.update(teacher for teachers in links.values() for teacher in teachers)
    for name, student in service.students.items():
        if name not in links:
            links[name] = tuple(teacher for teacher in student.held if teacher not in taken)
    return links


# --- speeds of teachers


def measured_speeds(reports: Iterable[Mapping[str, Measured]]) -> dict[str, float]:
    """Return the samples per second of each teacher if it were always busy.

    The rates of its students add up. Its busy share is at least the largest of theirs.
    """
    rates: dict[str, float] = {}
    busy: dict[str, float] = {}
    for report in reports:
        for teacher, measured in report.items():
            rates[teacher] = rates.get(teacher, 0.0) + measured.samples_per_s
            busy[teacher] = max(busy.get(teacher, 0.0), measured.busy_share)
    return {
        teacher: rate / min(1.0, busy[teacher])
        for teacher, rate in rates.items()
        if rate > 0 and busy[teacher] >= 0.01  # with less it says too little
    }


def speed_classes(before: Mapping[str, int], measured: Mapping[str, float]) -> dict[str, int]:
    """Return the class of each teacher whose class is not 0.

    Args:
        before: the classes so far.
        measured: samples per second; a teacher without keeps its class.
    """
    classes = dict(before)
    if len(measured) >= 2:
        median = statistics.median_low(measured.values())
        for teacher, rate in measured.items():
            # A student may report any numbers: no quotient of two must overflow.
            exact = 2 * (math.log2(rate) - math.log2(median))
            exact = max(-MOST_CLASS, min(MOST_CLASS, exact))
            if abs(exact - before.get(teacher, 0)) > 1.0:
                classes[teacher] = round(exact)
    return {teacher: each for teacher, each in sorted(classes.items()) if each}


def speed_of(speed_class: int) -> int:
    """Return the speed of a class for `assign_teachers`."""
    return max(1, round(_UNIT * 2 ** (speed_class / 2)))


# --- as texts; what is read from Redis may have been written by anybody, so it is checked


def table_text(table: Table) -> str:
    """Return the text of a table for the registry."""
    return json.dumps(
        {"version": table.version, "links": dict(table.links), "classes": dict(table.classes)},
        separators=(",", ":"),
    )


def table_of(text: str) -> Table | None:
    """Parse what `table_text` returns; None: the text is something else."""
    try:
        body = json.loads(text)
        version, links, classes = body["version"], body["links"], body["classes"]
        if type(version) is not int or version < 1:
            return None
        return Table(
            version=version,
            links={name: _endpoints(each) for name, each in links.items() if is_name(name)},
            classes={
                teacher: max(-MOST_CLASS, min(MOST_CLASS, int(each)))
                for teacher, each in classes.items()
                if is_endpoint(teacher)
            },
        )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


def student_text(student: Student) -> str:
    """Return the text of a student for the registry, without its session."""
    return json.dumps(student_json(student), separators=(",", ":"))


def student_json(student: Student) -> dict[str, Any]:
    """Return what a student reports, for the registry and for its messages."""
    return {
        "require": student.require,
        "held": student.held,
        "wait_share": student.wait_share,
        "samples_per_s": student.samples_per_s,
        "measured": {
            teacher: [each.samples_per_s, each.busy_share]
            for teacher, each in student.measured.items()
        },
        "unusable": student.unusable,
    }


def student_of(name: str, session: int, text: str) -> Student | None:
    """Parse what `student_text` returns; None: the text is something else."""
    try:
        body = json.loads(text)
        require = body["require"]
        if type(require) is not int or not 1 <= require <= MAX_REQUIRE:
            return None
        return Student(
            student=name,
            session=session,
            require=require,
            held=_endpoints(body["held"]),
            wait_share=_number(body["wait_share"]),
            samples_per_s=_number(body["samples_per_s"]),
            measured={
                teacher: Measured(samples_per_s=_positive(rate), busy_share=_positive(busy))
                for teacher, (rate, busy) in body["measured"].items()
                if is_endpoint(teacher)
            },
            unusable=_endpoints(body.get("unusable", ())),  # older servers wrote none
        )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


def _endpoints(values: Any) -> tuple[str, ...]:
    return tuple(each for each in values if is_endpoint(each))


def _number(value: Any) -> float | None:
    return None if value is None else _positive(value)


def _positive(value: Any) -> float:
    number = float(value)
    if not 0 <= number < math.inf:
        raise ValueError(f"expected a finite number of 0 or more, got {number}")
    return number
