"""Decide which teachers each student uses. Pure: same input, same answer, on every server.

Every link that may stay does. What is left over is decided greedily, then links are moved one by
one for as long as that helps whoever has least:

- As many teachers as students, or more: each teacher has one student, every student at least one
  teacher, and the students' shares (the speeds of their teachers) are as even as single moves make
  them. Nothing is idle but what the students' own bounds leave over.
- Fewer teachers than students: each student has one teacher, and every teacher as many students
  as its speed is worth, but at least one.
"""

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

Links = dict[str, tuple[str, ...]]  # student -> its teachers, sorted

_SWAP_FACTOR = 2  # how much faster an idle teacher is that replaces one in use


def assign_teachers(
    most: Mapping[str, int], speeds: Mapping[str, int], links: Mapping[str, Sequence[str]]
) -> Links:
    """Return the teachers of each student.

    Args:
        most: student -> the most teachers that it may have, 1 or more.
        speeds: teacher -> its speed, > 0, in any unit.
        links: who has whom now; those who are in neither of the others do not count.
    """
    kept = {
        student: [each for each in dict.fromkeys(links.get(student, ())) if each in speeds]
        for student in sorted(most)
    }
    if not speeds or not kept:
        return {student: () for student in kept}
    if len(speeds) >= len(kept):
        _Owned(most, speeds, kept).settle()
    else:
        _Shared(speeds, kept).settle()
    return {student: tuple(sorted(teachers)) for student, teachers in kept.items()}


def count_moves(before: Mapping[str, Sequence[str]], after: Mapping[str, Sequence[str]]) -> int:
    """Return how many links the students that are in both got anew."""
    return sum(
        len(set(teachers) - set(before[student]))
        for student, teachers in after.items()
        if student in before
    )


class _Owned:
    """As many teachers as students, or more. Works on `held` in place."""

    def __init__(
        self, most: Mapping[str, int], speeds: Mapping[str, int], held: dict[str, list[str]]
    ) -> None:
        self._most = most
        self._speeds = speeds
        self._held = held

    def settle(self) -> None:
        self._part()
        free = set(self._speeds)
        for student, teachers in self._held.items():
            teachers.sort(key=self._fastest_first)
            del teachers[self._most[student] :]
            free.difference_update(teachers)
        self._give(free)
        while self._move_one():
            pass
        self._swap(free)

    def _part(self) -> None:
        """Leave each teacher with one student: the one that has fewest."""
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
            poor = self._poorest()
            if poor is None:
                return
            self._held[poor].append(teacher)
            free.discard(teacher)

    def _move_one(self) -> bool:
        """Move a teacher to the student with the smallest share, where that makes the smaller of
        two shares larger. Every move raises the smallest share that can be raised, so this ends."""
        poor = self._poorest()
        if poor is None:
            return False
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
                if gain[0] > share and (best is None or gain > best):
                    best, given = gain, (student, teacher)
        if best is None:
            return False
        student, teacher = given
        self._held[student].remove(teacher)
        self._held[poor].append(teacher)
        return True

    def _swap(self, free: set[str]) -> None:
        """Use idle teachers, which the students' bounds left over, in place of much slower ones."""
        for idle in sorted(free, key=self._fastest_first):
            slowest = min(
                ((self._speeds[each], self._share(student), student, each)
                 for student, teachers in self._held.items() for each in teachers),
                default=None,
            )  # fmt: skip
            if slowest is None or self._speeds[idle] < _SWAP_FACTOR * slowest[0]:
                return
            _, _, student, teacher = slowest
            self._held[student].remove(teacher)
            self._held[student].append(idle)

    def _poorest(self) -> str | None:
        """Return the student with the smallest share that may have more; None: none may."""
        open_ones = [
            (self._share(student), student)
            for student, teachers in self._held.items()
            if len(teachers) < self._most[student]
        ]
        return min(open_ones)[1] if open_ones else None

    def _share(self, student: str) -> int:
        return sum(self._speeds[teacher] for teacher in self._held[student])

    def _fastest_first(self, teacher: str) -> tuple[int, str]:
        return -self._speeds[teacher], teacher


class _Shared:
    """Fewer teachers than students. Works on `held` in place."""

    def __init__(self, speeds: Mapping[str, int], held: dict[str, list[str]]) -> None:
        self._speeds = speeds
        self._held = held
        self._students: dict[str, list[str]] = {teacher: [] for teacher in sorted(speeds)}

    def settle(self) -> None:
        open_ones: list[tuple[str, Sequence[str]]] = []
        for student, teachers in self._held.items():
            if len(teachers) == 1:
                self._students[teachers[0]].append(student)
            else:
                open_ones.append((student, teachers))
        # Those that have several keep one of them; then come those without.
        for student, some in sorted(open_ones, key=lambda each: (not each[1], each[0])):
            teacher = self._best(some or self._students)
            self._students[teacher].append(student)
        while self._move_one():
            pass
        for teacher, assigned in self._students.items():
            for student in assigned:
                self._held[student] = [teacher]

    def _move_one(self) -> bool:
        """Move a student from where its share is smallest to where it gets a larger one, or to a
        teacher that has none: slow as it may be, it adds to what all get."""
        crowded = [each for each, students in self._students.items() if len(students) > 1]
        worst = min(crowded, key=lambda each: (self._share(each, 0), each))
        best = self._best(self._students)
        if self._students[best] and self._share(best, 1) <= self._share(worst, 0):
            return False
        self._students[best].append(self._students[worst].pop())  # the last to come
        return True

    def _best(self, teachers: Iterable[str]) -> str:
        """Return where one more student would get most; first, who has none yet."""
        return min(
            teachers,
            key=lambda each: (bool(self._students[each]), -self._share(each, 1), each),
        )

    def _share(self, teacher: str, more: int) -> Fraction:
        return Fraction(self._speeds[teacher], len(self._students[teacher]) + more)
