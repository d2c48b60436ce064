"""Where a reader's teachers are: a list that is fixed, or one that changes while it reads."""

from collections.abc import Callable, Sequence
from typing import Protocol


class TeacherSource(Protocol):
    """Tells a reader its teachers' endpoints. One belongs to one iteration."""

    def start(self, notify: Callable[[Sequence[str]], None]) -> None:
        """Call `tell` with all endpoints, and again with all of them whenever they change.

        `tell` may be called from any thread until `stop` returns. Teachers that are gone from the
        list answer what they have, and get nothing more; an empty list means that there is none.
        """
        ...

    def stop(self) -> None:
        """Let go of threads and connections."""
        ...


class FixedTeachers:
    """A TeacherSource that never changes."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        self._endpoints = tuple(endpoints)

    def start(self, notify: Callable[[Sequence[str]], None]) -> None:
        """See TeacherSource."""
        notify(self._endpoints)

    def stop(self) -> None:
        """See TeacherSource."""
