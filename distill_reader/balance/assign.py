"""Decide which teachers each student uses. Pure: same input, same answer, on every server.

Links that can stay are kept. The rest is assigned greedily; then single links are moved as long as
a move raises the smallest share:

- At least as many teachers as students: each teacher has one student, and each student at least one
  teacher. The students' shares (the speeds of their teachers) are as even as single moves can make
  them. A teacher is idle only if the students' own bounds leave it over.
- Fewer teachers than students: each student has one teacher. Each teacher has at least one student;
  beyond that, faster teachers have more of them, in proportion to their speed.

A student can report a teacher as unusable. Then it gets another one, if there is one; other
students keep that teacher. A teacher that answers no student is on trial: it is only given in
addition to others, so that no student depends on it.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from fractions import Fraction

Links = dict[str, tuple[str, ...]]  # student -> its teachers, sorted

_SWAP_FACTOR = 2  # how much faster an idle teacher is that replaces one in use


def assign_teachers(
    most: Mapping[str, int],
    speeds: Mapping[str, int],
    links: Mapping[str, Sequence[str]],
    unusable: Mapping[str, Collection[str]] | None = None,
    proven: Collection[str] = (),
) -> Links:
    """Return the teachers of each student.

    Args:
        most: student -> the most teachers that it may have, 1 or more.
        speeds: teacher -> its speed, > 0, in any unit.
        links: student -> the teachers that it has now. Unknown students and teachers are ignored.
        unusable: student -> teachers that do not answer it. Ignored if that is all of them, for
            they may come back. None: there are none.
        proven: teachers that answer at least one student.
    """
    barred = _barred(most, speeds, unusable or {})
    found = _assign(most, speeds, links, barred, proven)
    # A student may share a teacher with another one that cannot have any other. It takes a free
    # one in the next round, so that fewer share each time, until nothing changes.
    for _ in range(len(most) if barred else 0):
        before, found = found, _assign(most, speeds, found, barred, proven)
        if found == before:
            break
    return found


def count_moves(before: Mapping[str, Sequence[str]], after: Mapping[str, Sequence[str]]) -> int:
    """Return how many links are new, of the students that are in both."""
    return sum(
        len(set(teachers) - set(before[student]))
        for student, teachers in after.items()
        if student in before
    )


def _assign(
    most: Mapping[str, int],
    speeds: Mapping[str, int],
    links: Mapping[str, Sequence[str]],
    barred: Mapping[str, Collection[str]],
    proven: Collection[str],
) -> Links:
    on_trial: set[str] = set().union(*barred.values()).difference(proven)
    if len(on_trial) == len(speeds):
        on_trial = set()
    trusted = {teacher: speed for teacher, speed in speeds.items() if teacher not in on_trial}
    kept = {
        student: [
            each
            for each in dict.fromkeys(links.get(student, ()))
            if each in trusted and each not in barred.get(student, ())
        ]
        for student in sorted(most)
    }
    if not speeds or not kept:
        return {student: () for student in kept}
    if len(trusted) >= len(kept):
        _Owned(most, trusted, kept, barred).converge()
    else:
        some = {
            student: teachers
            for student, teachers in kept.items()
            if not trusted.keys() <= set(barred.get(student, ()))
        }
        _Shared(trusted, some, barred).converge()
    _feed_the_rest(speeds, on_trial, kept, barred, links)
    for teacher in sorted(on_trial):
        _try(teacher, most, kept, barred, links)
    return {student: tuple(sorted(teachers)) for student, teachers in kept.items()}


def _barred(
    most: Mapping[str, int], speeds: Mapping[str, int], unusable: Mapping[str, Collection[str]]
) -> dict[str, set[str]]:
    """Return student -> teachers that it must not have, for students that have such teachers."""
    found = {
        student: {each for each in unusable.get(student, ()) if each in speeds} for student in most
    }
    return {student: some for student, some in found.items() if some and len(some) < len(speeds)}


def _feed_the_rest(
    speeds: Mapping[str, int],
    on_trial: Collection[str],
    held: dict[str, list[str]],
    barred: Mapping[str, Collection[str]],
    links: Mapping[str, Sequence[str]],
) -> None:
    """Give a shared teacher to each student that has none because some are barred to it."""
    students = dict.fromkeys(speeds, 0)
    for teachers in held.values():
        for teacher in teachers:
            students[teacher] += 1
    for student, teachers in held.items():
        if not teachers:
            best = min(
                (each for each in speeds if each not in barred.get(student, ())),
                key=lambda each: (
                    each in on_trial,
                    each not in links.get(student, ()),
                    -Fraction(speeds[each], students[each] + 1),
                    each,
                ),
            )
            teachers.append(best)
            students[best] += 1


def _try(
    teacher: str,
    most: Mapping[str, int],
    held: dict[str, list[str]],
    barred: Mapping[str, Collection[str]],
    links: Mapping[str, Sequence[str]],
) -> None:
    """Give a teacher on trial, in addition, to a student that had it, or that has the fewest."""
    if any(teacher in teachers for teachers in held.values()):
        return
    some = [
        (teacher not in links.get(student, ()), len(teachers), student)
        for student, teachers in held.items()
        if len(teachers) < most[student] and teacher not in barred.get(student, ())
    ]
    if some:
        held[min(some)[2]].append(teacher)


class _Owned:
    """Assign at least as many teachers as students. Changes `held` in place."""

    def __init__(
        self,
        most: Mapping[str, int],
        speeds: Mapping[str, int],
        held: dict[str, list[str]],
        barred: Mapping[str, Collection[str]],
    ) -> None:
        self._most = most
        self._speeds = speeds
        self._held = held
        self._barred = barred

    def converge(self) -> None:
        self._part()
        free = set(self._speeds)
        for student, teachers in self._held.items():
            teachers.sort(key=self._fastest_first)
            del teachers[self._most[student] :]
            free.difference_update(teachers)
        self._give(free)
        while self._move_one() or (self._swap(free) and self._barred):
            if self._barred:  # a student that gave one away may have room for a barred one
                self._give(free)

    def _part(self) -> None:
        """Leave each teacher with one student: the one with the fewest teachers."""
        holders: dict[str, list[str]] = {}
        for student, teachers in self._held.items():
            for teacher in teachers:
                holders.setdefault(teacher, []).append(student)
        for teacher, students in sorted(holders.items()):
            if len(students) > 1:
                stays = min(students, key=lambda student: (len(self._held[student]), student))
                for student in students:
                    if student != stays:
                        self._held[student].remove(teacher)

    def _give(self, free: set[str]) -> None:
        for teacher in sorted(free, key=self._fastest_first):
            poor = min(self._open_ones(), default=None)
            if poor is None:
                return
            if not self._may(poor[1], teacher):
                poor = min((each for each in self._open_ones() if self._may(each[1], teacher)),
                           default=None)  # fmt: skip
                if poor is None:
                    continue
            self._held[poor[1]].append(teacher)
            free.discard(teacher)

    def _move_one(self) -> bool:
        """Move one teacher to the student with the smallest share; return whether one was moved.

        A move must raise the smaller of the two shares, so the moves end. If every teacher is
        barred to that student, the student with the next share is tried.
        """
        if not self._barred:
            poor = min(self._open_ones(), default=None)
            return poor is not None and self._move_to(poor[1])
        for _, student in sorted(self._open_ones()):
            if self._move_to(student):
                return True
            if student not in self._barred:  # then no student with a larger share gains either
                return False
        return False

    def _move_to(self, poor: str) -> bool:
        share = self._share(poor)
        best: tuple[int, int] | None = None  # the smaller share, and what the giver keeps
        given = "", ""
        for student, teachers in self._held.items():
            if student == poor or len(teachers) < 2:
                continue
            rest = self._share(student)
            for teacher in teachers:
                speed = self._speeds[teacher]
                gain = min(rest - speed, share + speed), rest - speed
                is_better = gain[0] > share and (best is None or gain > best)
                if is_better and self._may(poor, teacher):
                    best, given = gain, (student, teacher)
        if best is None:
            return False
        student, teacher = given
        self._held[student].remove(teacher)
        self._held[poor].append(teacher)
        return True

    def _swap(self, free: set[str]) -> bool:
        """Replace much slower teachers by idle ones; return whether one was replaced."""
        has_swapped = False
        for idle in sorted(free, key=self._fastest_first):
            slowest = min(
                ((self._speeds[each], self._share(student), student, each)
                 for student, teachers in self._held.items() if self._may(student, idle)
                 for each in teachers),
                default=None,
            )  # fmt: skip
            if slowest is None:
                continue
            if self._speeds[idle] < _SWAP_FACTOR * slowest[0]:
                if self._barred:
                    continue  # another idle one may be barred to fewer students
                break
            _, _, student, teacher = slowest
            self._held[student].remove(teacher)
            self._held[student].append(idle)
            free.discard(idle)
            free.add(teacher)
            has_swapped = True
        return has_swapped

    def _open_ones(self) -> Iterable[tuple[int, str]]:
        """Return share and name of each student that may have more teachers."""
        return (
            (self._share(student), student)
            for student, teachers in self._held.items()
            if len(teachers) < self._most[student]
        )

    def _may(self, student: str, teacher: str) -> bool:
        return teacher not in self._barred.get(student, ())

    def _share(self, student: str) -> int:
        return sum(self._speeds[teacher] for teacher in self._held[student])

    def _fastest_first(self, teacher: str) -> tuple[int, str]:
        return -self._speeds[teacher], teacher


class _Shared:
    """Assign fewer teachers than students. Changes `held` in place."""

    def __init__(
        self,
        speeds: Mapping[str, int],
        held: dict[str, list[str]],
        barred: Mapping[str, Collection[str]],
    ) -> None:
        self._speeds = speeds
        self._held = held
        self._barred = barred
        self._students: dict[str, list[str]] = {teacher: [] for teacher in sorted(speeds)}

    def converge(self) -> None:
        open_ones: list[tuple[str, Sequence[str]]] = []
        for student, teachers in self._held.items():
            if len(teachers) == 1:
                self._students[teachers[0]].append(student)
            else:
                open_ones.append((student, teachers))
        # Students with several teachers keep one of them; then come students without any.
        for student, some in sorted(open_ones, key=lambda each: (not each[1], each[0])):
            teacher = self._best(some or self._usable(student))
            self._students[teacher].append(student)
        while self._move_one():
            pass
        for teacher, assigned in self._students.items():
            for student in assigned:
                self._held[student][:] = [teacher]

    def _move_one(self) -> bool:
        """Move one student to a teacher that gives it a larger share, or to one without students.

        Even a slow teacher without students adds to the total.
        """
        crowded = [each for each, students in self._students.items() if len(students) > 1]
        for worst in sorted(crowded, key=lambda each: (self._share(each, 0), each)):
            for student in reversed(self._students[worst]):  # the last to come
                best = self._best(self._usable(student))
                if not self._students[best] or self._share(best, 1) > self._share(worst, 0):
                    self._students[worst].remove(student)
                    self._students[best].append(student)
                    return True
                if student not in self._barred:  # then no other student gains either
                    return False
        return False

    def _usable(self, student: str) -> Iterable[str]:
        barred = self._barred.get(student)
        return [each for each in self._students if each not in barred] if barred else self._students

    def _best(self, teachers: Iterable[str]) -> str:
        """Return the teacher that gives one more student most; one without students comes first."""
        return min(
            teachers,
            key=lambda each: (bool(self._students[each]), -self._share(each, 1), each),
        )

    def _share(self, teacher: str, more: int) -> Fraction:
        return Fraction(self._speeds[teacher], len(self._students[teacher]) + more)
