"""The registry of services, their teachers and students: in the server's memory, or in Redis."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from distill_reader.balance.table import ServiceState, Student, Table
from distill_reader.errors import TransientFailure

STUDENT_LEASE_S = 10.0  # time for a student to connect to another server


class RegistryUnavailable(TransientFailure):
    """The registry does not answer, or answers with something else."""


class Registry(Protocol):
    """All methods but `close` raise RegistryUnavailable, after some seconds at most."""

    async def services(self, own: Collection[str]) -> Mapping[str, ServiceState]:
        """Return the state of all services by name.

        Args:
            own: services whose table the caller may put next.
        """
        ...

    async def put_teacher(self, service: str, endpoint: str, info: str, lease_s: float) -> None:
        """List a teacher for so long."""
        ...

    async def drop_teacher(self, service: str, endpoint: str) -> None:
        """Remove a teacher from the list."""
        ...

    async def put_students(
        self, students: Sequence[tuple[str, Student]], *, are_new: bool
    ) -> list[tuple[str, Student]]:
        """Store (service, student) for STUDENT_LEASE_S.

        Args:
            are_new: whether other servers must know of them at once.

        Returns:
            Those that have connected to another server since: a higher session is stored.
        """
        ...

    async def drop_student(self, service: str, student: Student) -> None:
        """Remove a student, unless a higher session is stored."""
        ...

    async def restore(self, name: str, service: ServiceState, lease_s: float) -> None:
        """Store again, for so long, the teachers and students of a service that are missing.

        Called after an outage or a loss of data, in which they could not renew their leases.
        """
        ...

    async def put_table(self, service: str, table: Table, before: Table | None) -> bool:
        """Replace the table `before` by `table`; return False if another one was stored."""
        ...

    async def watch(self, changed: Callable[[], None]) -> None:
        """Call `changed` whenever something has changed, until cancelled."""
        ...

    async def close(self) -> None:
        """Close connections."""
        ...
