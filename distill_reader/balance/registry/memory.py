"""The registry of a discovery server without Redis, in its memory.

After a restart nothing is lost: teachers and students come back within a second, and students
report which teachers they had.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from distill_reader.balance.registry.registry import STUDENT_LEASE_S, RegistryUnavailable
from distill_reader.balance.table import ServiceState, Student, Table

_MAX_ENTRIES = 20_000  # teachers, and students
_STALL_S = 1.5  # without a call of `services`, which normally comes twice a second
_RETURN_S = 4.0  # time for teachers and students to be heard again after such a stall


class MemoryRegistry:
    """A Registry for one server."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looked_s = clock()
        self._teachers: dict[tuple[str, str], float] = {}  # (service, endpoint) -> end of its lease
        self._students: dict[tuple[str, str], tuple[Student, float]] = {}
        self._tables: dict[str, Table] = {}
        self._changed: list[Callable[[], None]] = []

    async def services(self, own: Collection[str]) -> Mapping[str, ServiceState]:
        """See Registry."""
        now = self._clock()
        if now - self._looked_s > _STALL_S:  # this process was stopped: no lease could be renewed
            least = now + _RETURN_S
            self._teachers = {key: max(ends, least) for key, ends in self._teachers.items()}
            self._students = {
                key: (student, max(ends, least)) for key, (student, ends) in self._students.items()
            }
        self._looked_s = now
        self._teachers = {key: ends for key, ends in self._teachers.items() if ends > now}
        self._students = {key: each for key, each in self._students.items() if each[1] > now}
        teachers: dict[str, set[str]] = {}
        for service, endpoint in self._teachers:
            teachers.setdefault(service, set()).add(endpoint)
        students: dict[str, dict[str, Student]] = {}
        for (service, name), (student, _) in self._students.items():
            students.setdefault(service, {})[name] = student
        alive = teachers.keys() | students.keys()
        self._tables = {name: each for name, each in self._tables.items() if name in alive}
        return {
            name: ServiceState(
                teachers=frozenset(teachers.get(name, ())),
                students=students.get(name, {}),
                table=self._tables.get(name),
            )
            for name in sorted(alive)
        }

    async def put_teacher(self, service: str, endpoint: str, info: str, lease_s: float) -> None:
        """See Registry."""
        key = service, endpoint
        is_new = key not in self._teachers
        if is_new and len(self._teachers) >= _MAX_ENTRIES:
            raise RegistryUnavailable(f"there are {_MAX_ENTRIES} teachers already")
        self._teachers[key] = self._clock() + lease_s
        if is_new:
            self._notify()

    async def drop_teacher(self, service: str, endpoint: str) -> None:
        """See Registry."""
        if self._teachers.pop((service, endpoint), None) is not None:
            self._notify()

    async def put_students(
        self, students: Sequence[tuple[str, Student]], *, are_new: bool
    ) -> list[tuple[str, Student]]:
        """See Registry."""
        moved = []
        ends = self._clock() + STUDENT_LEASE_S
        for service, student in students:
            key = service, student.student
            known = self._students.get(key)
            if known is not None and known[0].session > student.session:
                moved.append((service, student))
            elif known is not None or len(self._students) < _MAX_ENTRIES:
                self._students[key] = student, ends
            else:
                raise RegistryUnavailable(f"there are {_MAX_ENTRIES} students already")
        return moved

    async def drop_student(self, service: str, student: Student) -> None:
        """See Registry."""
        known = self._students.get((service, student.student))
        if known is not None and known[0].session == student.session:
            del self._students[service, student.student]
            self._notify()

    async def restore(self, name: str, service: ServiceState, lease_s: float) -> None:
        """See Registry."""
        ends = self._clock() + lease_s
        for endpoint in service.teachers:
            self._teachers.setdefault((name, endpoint), ends)
        for student in service.students.values():
            self._students.setdefault((name, student.student), (student, ends))

    async def put_table(self, service: str, table: Table, before: Table | None) -> bool:
        """See Registry."""
        self._tables[service] = table
        return True

    async def watch(self, changed: Callable[[], None]) -> None:
        """See Registry."""
        self._changed.append(changed)
        try:
            await asyncio.Event().wait()
        finally:
            self._changed.remove(changed)

    async def close(self) -> None:
        """See Registry."""

    def _notify(self) -> None:
        for changed in self._changed:
            changed()
