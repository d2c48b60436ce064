"""Where services, their teachers and students are known: in the server itself, or in Redis."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from distill_reader.balance.table import ServiceState, Student, Table
from distill_reader.errors import TransientFailure

STUDENT_LEASE_S = 10.0  # a student's place is kept so long for when it finds another server


class RegistryUnavailable(TransientFailure):
    """The registry did not answer, or not what was asked."""


class Registry(Protocol):
    """All methods but `close` raise RegistryUnavailable, after seconds at most."""

    async def services(self, own: Collection[str]) -> Mapping[str, ServiceState]:
        """Return all that is known now, by service.

        Args:
            own: those whose table may be put next.
        """
        ...

    async def put_teacher(self, service: str, endpoint: str, info: str, lease_s: float) -> None:
        """Have it listed for so long."""
        ...

    async def drop_teacher(self, service: str, endpoint: str) -> None:
        """List it no more."""
        ...

    async def put_students(
        self, students: Sequence[tuple[str, Student]], *, are_new: bool
    ) -> list[tuple[str, Student]]:
        """Keep (service, student) for STUDENT_LEASE_S.

        Args:
            are_new: others must hear of them, or of what they want now.

        Returns:
            Those that have come to another server since: a higher session is there.
        """
        ...

    async def drop_student(self, service: str, student: Student) -> None:
        """Forget it, if its session is still the one that counts."""
        ...

    async def restore(self, name: str, service: ServiceState, lease_s: float) -> None:
        """Put back, for so long, the teachers and students of a service that are not there.

        The registry was away, or has lost its memory: they have had no chance to stay.
        """
        ...

    async def put_table(self, service: str, table: Table, before: Table | None) -> bool:
        """Put `table` in place of `before`; return whether that was still there."""
        ...

    async def watch(self, changed: Callable[[], None]) -> None:
        """Call `changed` whenever something is new. Returns never: to be cancelled."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...
