"""A model of students and teachers, to try how the number of teachers is decided."""

import random
from dataclasses import dataclass, field

from job_server.api.wire import Demand
from job_server.teachers.autoscaler import TeacherAutoscaler, observe

REPORT_S = 2.0


@dataclass
class School:
    """Students that ask teachers; a report says how it went in the last 2 s.

    The throughput is what the slower of both can do, a little less where they are alike, and
    never more than `cap_per_s`, which stands for a network or a disk.
    """

    students: int
    student_per_s: float  # of one that never waits
    teacher_per_s: float
    cap_per_s: float = float("inf")
    crowding: float = 0.0  # share of a teacher's speed that each further teacher costs all
    noise: float = 0.0  # standard deviation of the throughput, as a share of it
    floor: float = 0.0  # share of their time that students wait whatever happens
    starts_in: int = 3  # reports until a new teacher serves
    tells_teachers: bool = True
    memory: float = (
        0.8  # share of a report that is what the last one said: readers measure over 8 s
    )
    seed: int = 0
    serving: int = 1
    _smooth: tuple[float, float] | None = None  # rate, wait; None: no report yet
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def throughput(self, teachers: int) -> float:
        """Samples/s of so many teachers, without noise."""
        able = self.students * self.student_per_s * (1 - self.floor)
        each = self.teacher_per_s * max(0.05, 1 - self.crowding * (teachers - 1))
        served = min(teachers * each, self.cap_per_s)
        return float((able**-8 + served**-8) ** (-1 / 8)) if served > 0 else 0.0

    def best(self, low: int, high: int) -> float:
        return max(self.throughput(n) for n in range(max(low, 1), high + 1))

    def report(self) -> Demand:
        rate = self.throughput(self.serving)
        wait = 1 - rate / (self.students * self.student_per_s)
        if self._smooth is not None:
            rate = self.memory * self._smooth[0] + (1 - self.memory) * rate
            wait = self.memory * self._smooth[1] + (1 - self.memory) * wait
        self._smooth = rate, wait
        shaken = rate * (1 + self._random.gauss(0, self.noise))
        shaken_wait = wait + self._random.gauss(0, self.noise / 5)
        return Demand(
            service="soft",
            students=self.students,
            wait_share=min(1.0, max(0.0, shaken_wait)),
            samples_per_s=max(0.0, shaken),
            teachers=self.serving if self.tells_teachers else None,
        )


@dataclass
class Trial:
    """A autoscaler and the school that it governs; teachers start and stop as they are wanted."""

    school: School
    low: int = 1
    high: int = 16
    autoscaler: TeacherAutoscaler = field(default_factory=lambda: TeacherAutoscaler(wanted=1))
    running: int = 1
    rates: list[float] = field(default_factory=list)  # without noise
    numbers: list[int] = field(default_factory=list)
    _since: int = 0

    def run(self, reports: int) -> None:
        for _ in range(reports):
            if self.running != self.autoscaler.wanted:
                self.running, self._since = self.autoscaler.wanted, 0
            self._since += 1
            started = self._since > self.school.starts_in
            self.school.serving = (
                self.running if started else min(self.school.serving, self.running)
            )
            demand = self.school.report()
            steady = demand.teachers is None or demand.teachers >= self.running
            self.autoscaler = observe(
                self.autoscaler,
                demand,
                pods=self.running,
                steady=steady,
                low=self.low,
                high=self.high,
            )
            self.rates.append(self.school.throughput(self.school.serving))
            self.numbers.append(self.school.serving)

    def share_of_best(self, reports: int) -> float:
        """Mean throughput of the last reports over that of the best fixed number."""
        taken = self.rates[-reports:]
        return sum(taken) / len(taken) / self.school.best(self.low, self.high)
