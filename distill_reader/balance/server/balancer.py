"""Keep the tables of services up to date: read the registry, decide, write, notify students.

Any number of balancers may share a registry. Each has its own students, which are connected to its
server. One task does all the work: after every change, and twice a second because no message tells
that a lease has ended.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import chain

from distill_reader.balance.assign import count_moves
from distill_reader.balance.registry.registry import Registry, RegistryUnavailable
from distill_reader.balance.table import ServiceState, Student, Table, guest_table, next_table
from distill_reader.balance.tasks import end_tasks

logger = logging.getLogger(__name__)

_TICK_S = 0.5
_GATHER_S = 0.02  # after a change, for others that come with it
_COST_FACTOR = 3  # the pause after a round, in durations of the round
_REFRESH_S = 2.0  # of our students' leases
_RETRY_S = 0.3
_HOLD_S = 4.0  # after an outage: time for teachers and other servers' students to come back
# After a registry lost its data, or this server began: time for teachers to register again.
_RECOVERY_S = 2.5
_LOG_EVERY_S = 10.0


@dataclass(slots=True)
class _OwnStudent:
    """A student that is connected to this server."""

    student: Student
    notify: Callable[[tuple[str, ...]], None]
    moved: Callable[[], None]
    notified: tuple[str, ...] | None = None  # None: nothing yet
    is_new: bool = True  # the registry does not have it, or what it wants now


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryView:
    """The last known state of all services, for people and metrics."""

    services: Mapping[str, ServiceState]
    away: str | None  # why the registry is unavailable; None: it is available


class Balancer:
    """Assigns teachers to the students of one server. Belongs to one event loop."""

    def __init__(self, registry: Registry, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry = registry
        self._clock = clock
        self._own: dict[tuple[str, str], _OwnStudent] = {}
        self._left: dict[tuple[str, str], Student] = {}  # to be removed from the registry
        self._changed = asyncio.Event()
        self._refreshed_s = -_REFRESH_S
        self._looked_in_s = 0.0  # how long the last round took
        self._away: str | None = None
        self._away_logged_s = 0.0
        self._known: dict[str, ServiceState] = {}  # as last read, with the tables decided then
        self._recovers_until_s: dict[str, float] = {}
        self._began_s: float | None = None  # when it first read the registry; None: not yet
        self.moves = 0  # links that were new to their students
        self.tables = 0  # tables written

    # --- students of this server

    def join(
        self,
        service: str,
        student: Student,
        notify: Callable[[tuple[str, ...]], None],
        moved: Callable[[], None],
    ) -> None:
        """Add a student.

        Args:
            notify: called with its teachers, soon and whenever they change.
            moved: called when it has connected to another server; then it has left this one.
        """
        key = service, student.student
        self._left.pop(key, None)
        self._own[key] = _OwnStudent(student, notify, moved)
        self.poke()

    def update(self, service: str, student: Student) -> None:
        """Update a student with its report, except for the teachers that it holds."""
        own = self._own.get((service, student.student))
        if own is not None:
            student = replace(student, held=own.student.held)
            is_new = _wants(own.student) != _wants(student)
            own.student = student
            if is_new:
                own.is_new = True
                self.poke()

    def leave(self, service: str, student: Student) -> None:
        """Remove a student, unless it has a new session by now."""
        key = service, student.student
        own = self._own.get(key)
        if own is not None and own.student.session == student.session:
            del self._own[key]
            self._left[key] = own.student
            known = self._known.get(service)
            if known is not None:  # after an outage it need not come back
                students = {name: each for name, each in known.students.items() if name != key[1]}
                self._known[service] = replace(known, students=students)
            self.poke()

    @property
    def view(self) -> RegistryView:
        return RegistryView(services=self._known, away=self._away)

    @property
    def students(self) -> int:
        """How many students are connected to this server."""
        return len(self._own)

    def poke(self) -> None:
        """Start the next round soon."""
        self._changed.set()

    # --- the task

    async def run(self, give_up_after_s: float | None = None) -> None:
        """Run until cancelled.

        Args:
            give_up_after_s: how long the registry may be unavailable; None: without limit.

        Raises:
            RegistryUnavailable: it was unavailable for longer.
        """
        watching = asyncio.create_task(self._registry.watch(self.poke))
        away_since_s: float | None = None
        try:
            while True:
                began_s = self._clock()
                try:
                    await self._work()
                except Exception as error:
                    # If this loop ended, students would hear of no change any more.
                    if not isinstance(error, RegistryUnavailable):
                        logger.exception("assigning teachers failed; trying again")
                    now = self._clock()
                    away_since_s = now if away_since_s is None else away_since_s
                    if give_up_after_s is not None and now - away_since_s >= give_up_after_s:
                        raise
                    self._note_away(error, now)
                    self._decide_alone()
                    await asyncio.sleep(_RETRY_S * random.uniform(0.7, 1.3))
                    continue
                away_since_s = None
                self._looked_in_s = self._clock() - began_s
                await self._wait()
        finally:
            await end_tasks(watching)

    async def _wait(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TICK_S):
                await self._changed.wait()
        await asyncio.sleep(max(_GATHER_S, _COST_FACTOR * self._looked_in_s))
        self._changed.clear()

    async def _work(self) -> None:
        await self._put()
        own_names = {service for service, _ in self._own}
        services = dict(await self._registry.services(own_names))
        now = self._clock()
        if self._began_s is None:
            self._began_s = now
        stored = {name: service.table for name, service in services.items()}
        if self._away is not None or self._has_forgotten(stored):
            services, stored = await self._restore(own_names)
        # A student that joined meanwhile waits for the next round: it is not in the registry yet,
        # and other servers would take it out of the table again.
        for name in own_names & services.keys():
            if not self._is_recovering(name, services[name], now):
                services[name] = await self._decide(name, services[name], stored.get(name))
        self._known = services
        self._notify()

    async def _put(self) -> None:
        """Write our students to the registry."""
        for (service, name), student in list(self._left.items()):
            await self._registry.drop_student(service, student)
            self._left.pop((service, name), None)
        now = self._clock()
        is_due = now - self._refreshed_s >= _REFRESH_S or self._away is not None
        new = [(key, own) for key, own in self._own.items() if own.is_new]
        rest = [(key, own) for key, own in self._own.items() if not own.is_new] if is_due else []
        for some, are_new in ((new, True), (rest, False)):
            put = [(service, own.student) for (service, _), own in some]
            moved = await self._registry.put_students(put, are_new=are_new) if put else []
            for (_, own), (_, student) in zip(some, put, strict=True):
                own.is_new = _wants(own.student) != _wants(student)  # it may have reported since
            for service, student in moved:
                gone = self._own.get((service, student.student))
                if gone is not None and gone.student.session == student.session:
                    del self._own[service, student.student]
                    gone.moved()
        if is_due:
            self._refreshed_s = now

    async def _decide(self, name: str, service: ServiceState, stored: Table | None) -> ServiceState:
        """Return the service with the table that should hold, which is written if it is new.

        Args:
            stored: the table in the registry; None: there is none, even if we know one.
        """
        table = next_table(service)
        if table is stored:
            return service
        if not await self._registry.put_table(name, table, stored):
            self.poke()  # another server was faster: the next round reads its table
            return service
        before = (service.table or Table()).links
        moves = count_moves(before, table.links)
        self.moves += moves
        self.tables += 1
        logger.info(
            "service %s: table %d: %d students, %d teachers, %d links, %d new to their students",
            name,
            table.version,
            len(table.links),
            len(service.teachers),
            sum(map(len, table.links.values())),
            moves,
        )
        return replace(service, table=table)

    def _is_recovering(self, name: str, service: ServiceState, now: float) -> bool:
        """Return whether to wait for teachers to come back.

        Students that report teachers unknown to the registry, or a table that has such, are the
        sign of it: the registry has lost its data, or teachers had no server to renew their leases
        at, and this one is new.
        """
        is_new = self._began_s is None or now - self._began_s < _RECOVERY_S
        if service.table is not None and not is_new:
            self._recovers_until_s.pop(name, None)
            return False
        tabled = () if service.table is None else service.table.links.values()
        held = (student.held for student in service.students.values())
        if service.teachers.issuperset(chain(*held, *tabled)):
            return False
        return now < self._recovers_until_s.setdefault(name, now + _RECOVERY_S)

    def _notify(self) -> None:
        for (service, name), own in list(self._own.items()):
            known = self._known.get(service)
            if known is None or known.table is None:
                continue
            links = known.table.links.get(name)
            if links is not None and links != own.notified:
                own.notified = links
                own.student = replace(own.student, held=links)
                own.notify(links)

    def _has_forgotten(self, stored: Mapping[str, Table | None]) -> bool:
        """Return whether the registry has lost a table, as a Redis does when it is restarted."""
        for name in {service for service, _ in self._own}:
            known = self._known.get(name)
            if known is not None and known.table is not None and stored.get(name) is None:
                return True
        return False

    async def _restore(
        self, own_names: set[str]
    ) -> tuple[dict[str, ServiceState], dict[str, Table | None]]:
        """Store again what was known before; return all services, and the tables that are stored.

        It is stored in the registry, so that other servers, which may know less, keep it.
        """
        for name in own_names & self._known.keys():
            await self._registry.restore(name, self._known[name], _HOLD_S)
        if self._away is not None:
            logger.info("the registry is back")
        self._away = None
        services = dict(await self._registry.services(own_names))
        stored = {name: service.table for name, service in services.items()}
        for name in own_names & services.keys() & self._known.keys():
            if services[name].table is None:
                services[name] = replace(services[name], table=self._known[name].table)
        return services, stored

    # --- without the registry

    def _note_away(self, error: Exception, now: float) -> None:
        if self._away is None or now - self._away_logged_s >= _LOG_EVERY_S:
            logger.warning("the registry is unavailable, students keep their teachers: %s", error)
            self._away_logged_s = now
        self._away = str(error)

    def _decide_alone(self) -> None:
        """Give a teacher to each student that comes meanwhile, by the last known state."""
        for name in {service for service, _ in self._own}:
            known = self._known.get(name)
            if known is None or not known.teachers:
                continue
            students = dict(known.students)
            for (of_service, student), own in self._own.items():
                if of_service == name:
                    students[student] = own.student
            if known.table is None or students.keys() - known.table.links.keys():
                service = replace(known, students=students)
                self._known[name] = replace(service, table=guest_table(service))
        self._notify()


def _wants(student: Student) -> tuple[int, tuple[str, ...]]:
    """Return the part of a student that the registry must have at once."""
    return student.require, student.unusable
