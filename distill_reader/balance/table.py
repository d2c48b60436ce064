"""What a registry knows of a service, and what follows for its students' teachers. Pure.

The table of a service says which teachers each student has. It lies in the registry: a server that
finds that another table should be in force writes it if nobody was faster, so that all servers,
whichever come and go, tell students the same.
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
_UNIT = 64  # of speeds, which are integers so that every machine adds them up alike
MAX_REQUIRE = 10_000  # teachers of one student
MAX_HELD = 1024  # teachers that a student's message may name
MAX_UNUSABLE = 128  # of them, that give it nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a student has of one teacher."""

    samples_per_s: float
    busy_share: float  # of the time, in which it had a request of this student


@dataclass(frozen=True, slots=True, kw_only=True)
class Student:
    """What a student last said of itself."""

    student: str
    session: int  # grows with each of its connections: the highest is the one that counts
    require: int  # the most teachers it wants
    held: tuple[str, ...] = ()  # teachers it has, as it says
    wait_share: float | None = None  # of its time, waiting for teachers; None: not known yet
    samples_per_s: float | None = None  # None: not known yet
    measured: Mapping[str, Measured] = field(default_factory=dict)  # by teacher
    unusable: tuple[str, ...] = ()  # teachers that give it nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Which teachers each student of a service has."""

    version: int = 0  # +1 per change; 0: there has been none
    links: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    classes: Mapping[str, int] = field(default_factory=dict)  # of teachers' speeds; absent: 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceState:
    """What a registry has of one service."""

    teachers: frozenset[str] = frozenset()  # endpoints
    students: Mapping[str, Student] = field(default_factory=dict)  # by id
    table: Table | None = None  # None: none was written, or it was lost


def next_table(service: ServiceState) -> Table:
    """Return the table that should be in force: the same object, if it is."""
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
    """Return the table with a teacher for each student that has none, and all others as they are.

    For while the registry is away, and what is decided can be written nowhere.
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
    """Return the teachers that answer somebody who does not call them unusable."""
    return {
        teacher
        for student in service.students.values()
        for teacher, measured in student.measured.items()
        if measured.samples_per_s > 0 and teacher not in student.unusable
    }


def _links_before(service: ServiceState, table: Table) -> dict[str, tuple[str, ...]]:
    """Return what the table has; of students that it does not know, what they say they have.

    They do where the table was lost, or was made before they were back. Of what has gone to
    others they get nothing, as long as there is a teacher for each.
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
    """Return the samples per second that each teacher would answer if it were always busy.

    Its students' rates add up; it was busy at least as long as for one of them.
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
        if rate > 0 and busy[teacher] >= 0.01  # else it says too little
    }


def speed_classes(before: Mapping[str, int], measured: Mapping[str, float]) -> dict[str, int]:
    """Return the class of each teacher that has another one than 0.

    Args:
        before: the classes so far.
        measured: samples per second; those without keep their class.
    """
    classes = dict(before)
    if len(measured) >= 2:
        median = statistics.median_low(measured.values())
        for teacher, rate in measured.items():
            place = 2 * math.log2(rate / median)
            if abs(place - before.get(teacher, 0)) > 1.0:
                classes[teacher] = max(-MOST_CLASS, min(MOST_CLASS, round(place)))
    return {teacher: each for teacher, each in sorted(classes.items()) if each}


def speed_of(speed_class: int) -> int:
    """Return the speed of a class, as `assign_teachers` wants it."""
    return max(1, round(_UNIT * 2 ** (speed_class / 2)))


# --- as texts: what lies in Redis may have been written by anybody


def table_text(table: Table) -> str:
    """Return a table for the registry."""
    return json.dumps(
        {"version": table.version, "links": dict(table.links), "classes": dict(table.classes)},
        separators=(",", ":"),
    )


def table_of(text: str) -> Table | None:
    """Return the table of such a text; None: it is none."""
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
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def student_text(student: Student) -> str:
    """Return a student for the registry, without its session."""
    return json.dumps(
        {
            "require": student.require,
            "held": student.held,
            "wait_share": student.wait_share,
            "samples_per_s": student.samples_per_s,
            "measured": {
                teacher: [each.samples_per_s, each.busy_share]
                for teacher, each in student.measured.items()
            },
            "unusable": student.unusable,
        },
        separators=(",", ":"),
    )


def student_of(name: str, session: int, text: str) -> Student | None:
    """Return the student of such a text; None: it is none."""
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
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _endpoints(values: Any) -> tuple[str, ...]:
    return tuple(each for each in values if is_endpoint(each))


def _number(value: Any) -> float | None:
    return None if value is None else _positive(value)


def _positive(value: Any) -> float:
    number = float(value)
    if not 0 <= number < math.inf:
        raise ValueError(f"{number} is no measure")
    return number
