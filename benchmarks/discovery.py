"""Measure discovery: how soon students learn of teachers, how few move, what outages do.

    python benchmarks/discovery.py --json discovery.json
    python benchmarks/discovery.py --seconds 300 --only churn
    python benchmarks/discovery.py --original PYTHON     # an interpreter with paddle-edl==0.3.1

Needs redis-server. Teachers and students are real sockets and real code, without models and data.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import random
import resource
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder is no package

from benchmarks.distillation.swarm import (
    OriginalStudent,
    Port,
    Program,
    Redis,
    Student,
    Teacher,
    await_port,
    fewest_moves,
    machine,
    malformed_messages,
    start_discovery,
    start_original_discovery,
    start_original_registrar,
    start_registrar,
    throw,
    until,
)
from distill_reader.balance.assign import assign_teachers

Figures = dict[str, float]
Measure = Callable[["Bench"], Coroutine[Any, Any, Figures]]


class Bench:
    """Servers on one Redis, ours or the original's, and what is started beside them."""

    def __init__(self, folder: Path, original: str | None) -> None:
        """
        Args:
            original: its interpreter; None: this is ours.
        """
        self.folder = folder
        self.original = original
        self.redis = Redis(folder)
        self.servers: list[Program] = []
        self.endpoints: list[str] = []
        self._ends: list[Callable[[], object]] = []

    async def start(self, servers: int = 1) -> None:
        await await_port(self.redis.endpoint)
        for _ in range(servers):
            if self.original is None:
                server, endpoint = start_discovery(self.redis, self.folder)
            else:
                server, endpoint = start_original_discovery(self.original, self.redis, self.folder)
            self.servers.append(server)
            self.endpoints.append(endpoint)
            self._ends.append(server.end)
        for endpoint in self.endpoints:
            await await_port(endpoint)

    def registrar(self, server: str) -> Program:
        if self.original is None:
            made = start_registrar(self.redis, server, self.folder)
        else:
            made = start_original_registrar(self.original, self.redis, server, self.folder)
        self._ends.append(made.end)
        return made

    def student(self, require: int) -> "Student | OriginalStudent":
        if self.original is None:
            return Student(",".join(self.endpoints), require)
        return OriginalStudent(self.endpoints[0], require)

    def end(self) -> None:
        for end in reversed(self._ends):
            end()
        self.redis.end()


async def measure_join_and_leave(bench: Bench, rounds: int) -> Figures:
    """A teacher's port opens, is refused; then its registrar is killed as well."""
    await bench.start()
    student = bench.student(8)
    await until(lambda: student.notified)
    joins, leaves, deaths = [], [], []
    for _ in range(rounds):
        port = Port()
        registrar = bench.registrar(port.endpoint)
        await asyncio.sleep(3.0 + random.uniform(0, 2))  # it waits for the port
        port.open()
        joins.append(await until(lambda: student.teachers))
        await asyncio.sleep(random.uniform(1, 3))
        port.close()
        leaves.append(await until(lambda: not student.teachers))
        port.open()
        await until(lambda: student.teachers)
        await asyncio.sleep(random.uniform(1, 3))
        registrar.send(signal.SIGKILL)
        port.close()
        deaths.append(await until(lambda: not student.teachers))
    await student.end()
    return {
        "join_s": statistics.median(joins),
        "join_max_s": max(joins),
        "leave_s": statistics.median(leaves),
        "leave_max_s": max(leaves),
        "killed_s": statistics.median(deaths),
        "killed_max_s": max(deaths),
    }


async def measure_links(bench: Bench) -> Figures:
    """Of 8 teachers and 4 students one teacher leaves."""
    await bench.start()
    ports = [Port() for _ in range(8)]
    for port in ports:
        port.open()
        bench.registrar(port.endpoint)
    students = [bench.student(8) for _ in range(4)]
    await until(lambda: sum(len(each.teachers) for each in students) == 8)
    await asyncio.sleep(5.0)
    before = [each.teachers for each in students]
    gone = ports[0].endpoint
    ports[0].close()
    await until(lambda: not any(gone in each.teachers for each in students))
    await asyncio.sleep(6.0)  # the original's students ask every 2 s
    after = [each.teachers for each in students]
    for each in students:
        await each.end()
    for port in ports:
        port.close()
    return {
        "links_before": sum(map(len, before)),
        "links_kept": sum(len(one & other) for one, other in zip(before, after, strict=True)),
        "links_after": sum(map(len, after)),
        "moves": sum(len(other - one) for one, other in zip(before, after, strict=True)),
    }


class Swarm:
    """Students and teachers that come and go."""

    def __init__(self, addresses: str, seed: int) -> None:
        self._addresses = addresses
        self._random = random.Random(seed)
        self.teachers: list[Teacher] = []
        self.students: list[Student] = []
        self.gone: list[Student] = []
        self.fewest = 0  # moves
        self.events = 0
        self._links: dict[str, tuple[str, ...]] = {}  # as they would be, if all were heard at once
        self._names: dict[Student, str] = {}
        self._ending: set[asyncio.Task[None]] = set()

    async def fill(self, teachers: int, students: int) -> None:
        for _ in range(teachers):
            await self._teacher_comes()
        for _ in range(students):
            self._student_comes()
        self._replay()
        self.fewest = 0

    async def change(self) -> None:
        """One of them goes and another one comes."""
        self.events += 1
        if self._random.random() * (len(self.teachers) + len(self.students)) < len(self.teachers):
            teacher = self.teachers.pop(self._random.randrange(len(self.teachers)))
            await teacher.die()
            self._later(3.0, teacher.end())
            self._replay()
            await self._teacher_comes()
        else:
            student = self.students.pop(self._random.randrange(len(self.students)))
            self.gone.append(student)
            self._later(0.0, student.end())
            self._replay()
            self._student_comes()
        self._replay()

    def starving(self) -> tuple[int, int]:
        """Return how many students that are there for some seconds have no live teacher."""
        alive = {teacher.endpoint for teacher in self.teachers}
        now = time.perf_counter()
        settled = [each for each in self.students if now - each.began_s > 5.0]
        return sum(not each.teachers & alive for each in settled), len(settled)

    def is_settled(self) -> bool:
        """Whether all students have live teachers, and all teachers students."""
        alive = {teacher.endpoint for teacher in self.teachers}
        used: set[str] = set().union(*(each.teachers for each in self.students))
        return used == alive and all(each.teachers for each in self.students)

    @property
    def moves(self) -> int:
        return sum(each.moves for each in (*self.students, *self.gone))

    async def end(self) -> None:
        await asyncio.gather(*self._ending)
        await asyncio.gather(*(each.end() for each in self.students))
        await asyncio.gather(*(each.end() for each in self.teachers))

    async def _teacher_comes(self) -> None:
        teacher = Teacher(self._addresses)
        await teacher.start()
        self.teachers.append(teacher)

    def _student_comes(self) -> None:
        self.students.append(Student(self._addresses, 4))
        self._names[self.students[-1]] = f"s{len(self._names):06d}"

    def _replay(self) -> None:
        students = [self._names[each] for each in self.students]
        teachers = [each.endpoint for each in self.teachers]
        if self._links:
            self.fewest += fewest_moves(students, teachers, self._links)
        most = dict.fromkeys(students, len(teachers))
        self._links = assign_teachers(most, dict.fromkeys(teachers, 64), self._links)

    def _later(self, delay_s: float, end: Awaitable[None]) -> None:
        async def wait_and_end() -> None:
            await asyncio.sleep(delay_s)
            await end

        task = asyncio.create_task(wait_and_end())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


async def measure_churn(bench: Bench, seconds: float, teachers: int, students: int) -> Figures:
    """10 % of all are replaced in a minute, one after the other; two servers."""
    await bench.start(servers=2)
    swarm = Swarm(",".join(bench.endpoints), seed=1)
    await swarm.fill(teachers, students)
    filled_s = await until(swarm.is_settled, 300.0)
    await asyncio.sleep(3.0)
    settled_moves = swarm.moves
    cpu_s = [server.cpu_s() for server in bench.servers]
    began_s = time.perf_counter()
    starving = asked = 0
    pause_s = 60.0 / (0.1 * (teachers + students))
    next_s = began_s + pause_s
    while time.perf_counter() - began_s < seconds:
        await asyncio.sleep(0.25)
        if time.perf_counter() >= next_s:
            next_s += pause_s
            await swarm.change()
        some, of = swarm.starving()
        starving += some
        asked += of
    took_s = time.perf_counter() - began_s
    used_s = [s.cpu_s() - before for s, before in zip(bench.servers, cpu_s, strict=True)]
    healed_s = await until(swarm.is_settled, 60.0)
    moves = swarm.moves - settled_moves
    await swarm.end()
    return {
        "seconds": took_s,
        "events": swarm.events,
        "all_there_after_s": filled_s,
        "fed_share": 1.0 - starving / max(1, asked),
        "moves": moves,
        "fewest_moves": swarm.fewest,
        "settled_after_s": healed_s,
        "cpu_share_per_server": max(used_s) / took_s,
    }


async def measure_redis_away(bench: Bench, away_s: float) -> Figures:
    """Redis is killed, and comes back with nothing in it."""
    await bench.start(servers=2)
    swarm = Swarm(",".join(bench.endpoints), seed=2)
    await swarm.fill(8, 4)
    await until(swarm.is_settled)
    await asyncio.sleep(2.0)
    lists = [each.teachers for each in swarm.students]
    bench.redis.end()
    await asyncio.sleep(away_s)
    bench.redis.restart()
    back_s = time.perf_counter()
    swarm.teachers.append(Teacher(",".join(bench.endpoints)))
    newcomer = swarm.teachers[-1]
    await newcomer.start()
    await until(lambda: any(newcomer.endpoint in each.teachers for each in swarm.students))
    healed_s = time.perf_counter() - back_s
    await asyncio.sleep(6.0)
    lost = sum(len(before - each.teachers)
               for before, each in zip(lists, swarm.students, strict=True))  # fmt: skip
    moves = swarm.moves
    await swarm.end()
    return {"healed_s": healed_s, "links_lost": lost, "moves_beside_the_newcomer": moves - 1}


async def measure_discovery_killed(bench: Bench) -> Figures:
    """One of two servers is killed."""
    await bench.start(servers=2)
    swarm = Swarm(",".join(bench.endpoints), seed=3)
    await swarm.fill(8, 4)
    await until(swarm.is_settled)
    await asyncio.sleep(2.0)
    lists = [each.teachers for each in swarm.students]
    bench.servers[0].send(signal.SIGKILL)
    killed_s = time.perf_counter()
    swarm.teachers.append(Teacher(bench.endpoints[1]))
    await swarm.teachers[-1].start()
    await until(swarm.is_settled)
    healed_s = time.perf_counter() - killed_s
    await asyncio.sleep(4.0)
    lost = sum(len(before - each.teachers)
               for before, each in zip(lists, swarm.students, strict=True))  # fmt: skip
    await swarm.end()
    return {"healed_s": healed_s, "links_lost": lost}


async def measure_malformed(bench: Bench) -> Figures:
    """Rubbish of every kind; then a student comes."""
    await bench.start()
    port = Port()
    port.open()
    bench.registrar(port.endpoint)
    messages = malformed_messages()
    served = 0
    for message in messages:
        await throw(bench.endpoints[0], message)
        student = bench.student(1)
        with contextlib.suppress(SystemExit):
            await until(lambda student=student: student.notified, 20.0)  # type: ignore[misc]
            served += 1
        await student.end()
        if not served or served <= messages.index(message):
            break
    port.close()
    return {"kinds": len(messages), "served_on_after": served}


def rows(
    args: argparse.Namespace,
) -> dict[str, tuple[str, Measure]]:
    """Return the rows: their aims, and what measures them."""
    return {
        "join": (
            "used within 1 s; off within 3 s",
            lambda bench: measure_join_and_leave(bench, args.rounds),
        ),
        "links": ("7 links kept, at most 1 move", measure_links),
        "malformed": ("served on", measure_malformed),
        "redis": (
            "nobody notices; healed within 5 s",
            lambda bench: measure_redis_away(bench, args.away_s),
        ),
        "killed": ("nobody notices; healed within 5 s", measure_discovery_killed),
        "churn": (
            "all fed, moves near the fewest",
            lambda bench: measure_churn(bench, args.seconds, args.teachers, args.students),
        ),
    }


_ORIGINAL_ROWS = ("join", "links", "malformed")  # the others it does not survive


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    logging.disable(logging.WARNING)  # what goes wrong is made to
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 65536)), hard))
    chosen = rows(args)
    names = [name for name in chosen if not args.only or name in args.only.split(",")]
    results: dict[str, dict[str, Figures]] = {}
    print(f"{machine()}; rows: {', '.join(names)}", flush=True)
    for name in names:
        aim, measure = chosen[name]
        results[name] = {}
        for who, original in (("ours", None), ("original", args.original)):
            if who == "original" and (original is None or name not in _ORIGINAL_ROWS):
                continue
            with tempfile.TemporaryDirectory() as folder:
                bench = Bench(Path(folder), original)
                try:
                    figures = asyncio.run(measure(bench))
                finally:
                    bench.end()
            results[name][who] = figures
            shown = ", ".join(f"{each} {value:.4g}" for each, value in figures.items())
            print(f"{name:<10}{who:<10}{shown}   (aim: {aim})", flush=True)
            if args.json:
                text = json.dumps({"machine": machine(), "rows": results}, indent=1)
                Path(args.json).write_text(text + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--json", metavar="FILE", help="write the figures there, after each row")
    add("--only", metavar="ROW,ROW", help="join, links, malformed, redis, killed, churn")
    add("--rounds", type=int, default=5, help="of the row join; default 5")
    add("--seconds", type=float, default=60.0, help="of the row churn; default 60")
    add("--teachers", type=int, default=100, help="of the row churn; default 100")
    add("--students", type=int, default=200, help="of the row churn; default 200")
    add("--away_s", type=float, default=10.0, help="of Redis; default 10")
    add("--original", metavar="PYTHON", help="with paddle-edl==0.3.1, redis and six")
    return parser


if __name__ == "__main__":
    sys.exit(main())
