"""Sources of a reader's teachers: a fixed list, or one that changes while the reader reads."""

from collections.abc import Callable, Sequence
from typing import Protocol


class TeacherSource(Protocol):
    """Gives a reader its teachers' endpoints, for one iteration."""

    def start(self, notify: Callable[[Sequence[str]], None]) -> None:
        """Call `notify` with all endpoints now, and again whenever they change.

        `notify` may be called from any thread until `stop` returns. Teachers that are not in the
        list any more still answer their requests, and get no new ones.
        """
        ...

    def stop(self) -> None:
        """End threads and close connections."""
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
