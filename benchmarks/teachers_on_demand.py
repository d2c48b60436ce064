"""Measure whether the number of teachers follows the students, and how close it is to the best.

    python benchmarks/teachers_on_demand.py [--json FILE] [--quick]

A job server, a job client with CPU slots, a discovery server and `edl serve` as a job of teachers:
all real. A teacher takes 20 ms for 16 images, waiting, as one on a device of its own does; a
student (DistillReader) takes 50 ms to learn from them. First two students read, then six, then two
again. In each phase the demand decides the number of teachers, and what the students get in its
last part is held against the best of the numbers that `edl resize` can fix. These are measured
right before the phase and right after it, and averaged: what else the machine does drifts.

The exit code is 0 whether the aim is reached or missed. It takes 15 minutes, --quick three.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder is no package

import numpy as np

from benchmarks.harness import HOST, ROOT, free_port
from distill_reader import DistillReader
from job_server.api.api_client import ApiClient
from job_server.api.errors import JobServerError
from job_server.api.wire import JobKind, JobSpec

JOB, SERVICE, FOLDER = "teachers", "soft", "teacher"
SHAPE = (1, 32, 32)
BATCH = 16
STUDENT_S = 0.050  # of a batch; a teacher takes 0.020
AIM = 0.95
START_S = 90.0
WINDOW_MIB = 1  # 16 batches: what is read ahead must not hide a change of the teachers

TRAIN_SH = """\
exec {python} -m distill_reader.serve \\
    --model {model} --backend benchmarks.distillation.backends:slow \\
    --bind "$EDL_ADDR" --port "$EDL_PORT" --register {discovery} --service_name "$EDL_SERVICE"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How long what takes."""

    most: int  # teachers
    phases: tuple[int, ...]  # students
    fixed: dict[int, tuple[int, ...]]  # students -> numbers of teachers to measure
    settle_s: float
    measure_s: float
    phase_s: float


FULL = Plan(
    most=4,
    phases=(2, 6, 2),
    fixed={2: (1, 2), 6: (2, 3, 4)},
    settle_s=8,
    measure_s=20,
    phase_s=140,
)
QUICK = Plan(most=2, phases=(3, 1), fixed={3: (1, 2), 1: (1,)}, settle_s=4, measure_s=4, phase_s=40)


@dataclass(slots=True)
class Row:
    """A phase in which the demand decided."""

    students: int
    pods: int = 0  # in the end
    samples_per_s: float = 0.0  # in the last part
    mean_per_s: float = 0.0  # from the first second of the phase on
    numbers: list[tuple[float, int]] = field(default_factory=list)  # (second, teachers that run)
    fixed: dict[int, list[float]] = field(default_factory=dict)  # teachers -> before, after

    @property
    def best(self) -> tuple[int, float]:
        """The best fixed number, and its samples per second."""
        means = {pods: statistics.mean(rates) for pods, rates in self.fixed.items()}
        pods = max(means, key=lambda pods: means[pods])
        return pods, means[pods]

    @property
    def share(self) -> float:
        return self.samples_per_s / self.best[1]


# --- students -----------------------------------------------------------------------------------


class Students:
    """Threads that learn, as many as are set."""

    def __init__(self, discovery: str) -> None:
        self._discovery = discovery
        self._leave: list[threading.Event] = []
        self._threads: list[threading.Thread] = []
        self._counts: list[list[int]] = []  # of one item each: its thread alone writes it

    def set(self, count: int) -> None:
        while len(self._leave) > count:
            self._leave.pop().set()
        while len(self._leave) < count:
            leave, counted = threading.Event(), [0]
            self._leave.append(leave)
            self._counts.append(counted)
            thread = threading.Thread(target=self._learn, args=(leave, counted), daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        self.set(0)
        for thread in self._threads:
            thread.join(20)

    @property
    def samples(self) -> int:
        """What all of them have read so far."""
        return sum(counted[0] for counted in self._counts)

    def rate(self, seconds: float) -> float:
        """Return the samples per second of the next `seconds`."""
        began, before = time.monotonic(), self.samples
        time.sleep(seconds)
        return (self.samples - before) / (time.monotonic() - began)

    def _learn(self, leave: threading.Event, counted: list[int]) -> None:
        reader = DistillReader(ins=["image"], predicts=["score"])
        reader.set_dynamic_teacher([self._discovery], SERVICE, require_max_teacher=8)
        reader.set_max_memory(WINDOW_MIB)
        reader.set_batch_generator(_batches)
        for images, _ in reader():
            counted[0] += len(images)
            if leave.wait(STUDENT_S):
                break


def _batches() -> Iterator[tuple[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]]:
    while True:
        yield (np.zeros((BATCH, *SHAPE), np.float32),)


# --- the processes ------------------------------------------------------------------------------


@dataclass(slots=True)
class Setting:
    api: ApiClient
    students: Students
    folder: Path

    def running(self) -> int:
        status = self.api.status(JOB).teachers
        return 0 if status is None else status.running

    def fix(self, pods: int | None) -> None:
        """Have so many teachers, registered; None: as many as the demand says."""
        self.api.resize(JOB, pods)
        if pods is not None:
            _await(lambda: self._registered() == pods, f"{pods} teachers are registered")

    def _registered(self) -> int:
        status = self.api.status(JOB).teachers
        if status is None or status.demand is None or status.running != status.wanted:
            return 0
        return status.demand.teachers or 0


@contextlib.contextmanager
def setting(plan: Plan, folder: Path) -> Iterator[Setting]:
    """Start everything; end everything."""
    server, discovery = f"{HOST}:{free_port()}", f"{HOST}:{free_port()}"
    model = folder / "x".join(map(str, SHAPE))
    jobs = folder / "jobs" / FOLDER
    for path in (model, jobs):
        path.mkdir(parents=True)
    (jobs / "train.sh").write_text(
        TRAIN_SH.format(python=sys.executable, model=model, discovery=discovery)
    )
    client = ["job_client", "--job_server", server, "--jobs_dir", str(folder / "jobs")]
    client += ["--cpu_slots", str(plan.most), "--log_dir", str(folder / "client")]
    commands = [
        ["job_server", "--no_job", "--server_port", server.rpartition(":")[2], "--db", ":memory:"],
        ["distill_reader.discovery", "--server", discovery, "--job_server", f"http://{server}"],
        [*client, "--pod_path", str(folder / "pods")],
    ]
    processes = []
    students = Students(discovery)
    try:
        for command in commands:
            processes.append(_start(command, folder))
        with ApiClient(server) as api:
            made = Setting(api=api, students=students, folder=folder)
            _await(lambda: api.nodes(), "a client has registered")
            api.submit(
                JobSpec(
                    job_id=JOB,
                    kind=JobKind.TEACHER,
                    service=SERVICE,
                    folder=FOLDER,
                    max_pods=plan.most,
                )
            )
            _await(lambda: made.running() == 1, "a teacher runs")
            yield made
    finally:
        students.close()
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def _start(arguments: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with (folder / f"{arguments[0]}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", *arguments], cwd=ROOT, env=environment, stdout=log, stderr=log
        )


def _await(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + START_S
    while True:
        with contextlib.suppress(JobServerError):
            if condition():
                return
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {START_S:g} s: {what}")
        time.sleep(0.1)


# --- measuring ----------------------------------------------------------------------------------


def measure(plan: Plan, where: Setting) -> Iterator[Row]:
    """Yield what became of each phase."""
    before = plan.phases[0], 1  # students and teachers with which the next phase begins
    for students in plan.phases:
        row = Row(students=students)
        _measure_fixed(plan, where, row)
        where.students.set(before[0])
        where.fix(before[1])
        time.sleep(plan.settle_s)
        where.fix(None)
        where.students.set(students)
        _measure_demand(plan, where, row)
        before = students, row.pods
        _measure_fixed(plan, where, row)
        yield row


def _measure_fixed(plan: Plan, where: Setting, row: Row) -> None:
    where.students.set(row.students)
    for pods in plan.fixed[row.students]:
        where.fix(pods)
        time.sleep(plan.settle_s)
        rate = where.students.rate(plan.measure_s)
        row.fixed.setdefault(pods, []).append(rate)
        print(f"{row.students} students, {pods} teachers: {rate:,.0f} samples/s", flush=True)


def _measure_demand(plan: Plan, where: Setting, row: Row) -> None:
    began, before = time.monotonic(), where.students.samples
    while time.monotonic() < began + plan.phase_s - plan.measure_s:
        _note(row, where, began)
        time.sleep(0.2)
    row.samples_per_s = where.students.rate(plan.measure_s)
    _note(row, where, began)
    row.mean_per_s = (where.students.samples - before) / (time.monotonic() - began)
    text = f"{row.students} students, by demand {row.pods} teachers"
    print(f"{text}: {row.samples_per_s:,.0f} samples/s", flush=True)


def _note(row: Row, where: Setting, began: float) -> None:
    row.pods = where.running()
    if not row.numbers or row.numbers[-1][1] != row.pods:
        row.numbers.append((round(time.monotonic() - began, 1), row.pods))


def show(rows: Sequence[Row]) -> str:
    lines = [
        f"{'students':>8}  {'best fixed number':>22}  {'by demand':>22}  {'share':>6}  teachers"
    ]
    for row in rows:
        best = f"{row.best[0]} with {row.best[1]:,.0f}/s"
        own = f"{row.pods} with {row.samples_per_s:,.0f}/s"
        numbers = ", ".join(f"{pods} at {second:.0f} s" for second, pods in row.numbers)
        lines.append(f"{row.students:>8}  {best:>22}  {own:>22}  {row.share:>6.1%}  {numbers}")
    met = all(row.share >= AIM for row in rows)
    lines.append(f"aim: at least {AIM:.0%} of the best fixed number: {'met' if met else 'missed'}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    parser.add_argument("--quick", action="store_true", help="three minutes: one up, one down")
    args = parser.parse_args(argv)
    plan = QUICK if args.quick else FULL
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="edl-") as folder, setting(plan, Path(folder)) as where:
        rows = list(measure(plan, where))
        events = [event.text for event in where.api.events(JOB, limit=1000)]
    print(f"\nload average {load:.1f} before, {os.getloadavg()[0]:.1f} after\n\n{show(rows)}")
    if args.json is not None:
        document = {
            "benchmark": "teachers_on_demand",
            "load_average": [load, os.getloadavg()[0]],
            "rows": [{**asdict(row), "best": row.best, "share": row.share} for row in rows],
            "is_met": all(row.share >= AIM for row in rows),
            "events": events,
        }
        args.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
