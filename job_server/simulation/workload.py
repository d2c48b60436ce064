"""The jobs of a simulation: from a file, or made up by a seed."""

import csv
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from job_server.sharing.speedup import StepTime, fit

COLUMNS = ("job_id", "submitted_s", "trainers", "duration_s")
OPTIONAL = ("min_trainers", "max_trainers", "priority", "curve")


class WorkloadError(Exception):
    """A trace cannot be read; the text says where and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedJob:
    """A job as its user would submit it to a cluster without elasticity, and what it could be."""

    job_id: str
    submitted_s: float  # after the simulation's start
    trainers: int  # that a rigid cluster gives it
    duration_s: float  # with so many
    min_trainers: int
    max_trainers: int
    step_time: StepTime
    priority: int = 0

    @property
    def work_s(self) -> float:
        """How long one trainer alone would take, in seconds."""
        return self.duration_s * self.step_time.speedup(self.trainers)


def curves() -> dict[str, StepTime]:
    """Return the speed-up curves that come with EDL, by name; `curves.json` names their sources."""
    text = (files(__package__) / "curves.json").read_text("utf-8")
    found = {}
    for name, curve in json.loads(text).items():
        rates = {int(trainers): rate for trainers, rate in curve["samples_per_s"].items()}
        found[name] = fit({trainers: rates[1] / rate for trainers, rate in rates.items()})
    return found


def synthetic(
    count: int, *, seed: int, load: float, slots: int, sigma: float = 1.5
) -> list[SimulatedJob]:
    """Make up jobs: Poisson arrivals, lognormal durations with a mean of one hour.

    Args:
        load: what the jobs ask for, as a part of what the cluster has while they arrive.
        slots: of the cluster.
        sigma: of the logarithm of a duration; 2.5 is a heavy tail.
    """
    if not load > 0:
        raise WorkloadError(f"load: expected a number above 0, got {load}")
    rng = random.Random(seed)
    known = curves()
    names = sorted(known)
    drawn = []
    for _ in range(count):
        trainers = rng.choices((1, 2, 4, 8), (50, 20, 20, 10))[0]
        duration = 3600.0 * rng.lognormvariate(-sigma * sigma / 2, sigma)
        drawn.append((min(trainers, slots), max(duration, 30.0), rng.choice(names)))
    asked = sum(trainers * duration for trainers, duration, _ in drawn)
    mean_gap = asked / (load * slots) / max(count, 1)
    jobs, now = [], 0.0
    for index, (trainers, duration, name) in enumerate(drawn):
        now += rng.expovariate(1 / mean_gap)
        jobs.append(_job(f"job{index}", now, trainers, duration, known[name], slots))
    return jobs


def read_trace(path: Path, *, slots: int) -> list[SimulatedJob]:
    """Read a CSV file with `COLUMNS` and, if it has them, `OPTIONAL`, or Philly's job log.

    That is a JSON list of jobs with "jobid", "submitted_time" and "attempts", each with
    "start_time", "end_time" and "detail", which lists each machine's "gpus".

    Raises:
        WorkloadError: the file is neither; the text names line and field.
    """
    try:
        text = path.read_text("utf-8-sig")  # as spreadsheets write it
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path}: cannot be read: {error}") from None
    if path.suffix == ".json":
        jobs = _read_philly(path, text, slots)
    else:
        jobs = _read_csv(path, text, slots)
    if not jobs:
        raise WorkloadError(f"{path}: holds no job that ran")
    return sorted(jobs, key=lambda job: (job.submitted_s, job.job_id))


def _job(
    job_id: str, submitted_s: float, trainers: int, duration_s: float, time: StepTime, slots: int
) -> SimulatedJob:
    """Return a job that may shrink to a quarter of what was asked for, and grow to twice it."""
    return SimulatedJob(
        job_id=job_id,
        submitted_s=submitted_s,
        trainers=trainers,
        duration_s=duration_s,
        min_trainers=max(1, trainers // 4),
        max_trainers=max(trainers, min(2 * trainers, slots)),
        step_time=time,
    )


def _read_csv(path: Path, text: str, slots: int) -> list[SimulatedJob]:
    reader = csv.DictReader(text.splitlines())
    missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
    surplus = [name for name in reader.fieldnames or () if name not in (*COLUMNS, *OPTIONAL)]
    if missing or surplus:
        raise WorkloadError(
            f"{path}: expected the columns {', '.join(COLUMNS)} and, if wanted, "
            f"{', '.join(OPTIONAL)}; missing: {', '.join(missing) or 'none'}, unknown: "
            f"{', '.join(surplus) or 'none'}"
        )
    known = curves()
    jobs = []
    for row in reader:
        where = f"{path}:{reader.line_num}"
        name = row.get("curve") or "usual"
        if name != "usual" and name not in known:
            raise WorkloadError(f"{where}: curve: no {name!r}; there are {', '.join(known)}")
        trainers = _number(where, row, "trainers", 1, whole=True)
        plain = _job(
            row["job_id"] or f"job{reader.line_num}",
            _number(where, row, "submitted_s", 0),
            int(trainers),
            _number(where, row, "duration_s", 0),
            known.get(name, StepTime()),
            slots,
        )
        low = _number(where, row, "min_trainers", 1, plain.min_trainers, whole=True)
        high = _number(where, row, "max_trainers", 1, plain.max_trainers, whole=True)
        if not low <= trainers <= high:
            raise WorkloadError(
                f"{where}: expected min_trainers <= trainers <= max_trainers, got {low:g}, "
                f"{trainers:g}, {high:g}"
            )
        jobs.append(
            SimulatedJob(
                job_id=plain.job_id,
                submitted_s=plain.submitted_s,
                trainers=plain.trainers,
                duration_s=plain.duration_s,
                min_trainers=int(low),
                max_trainers=int(high),
                step_time=plain.step_time,
                priority=int(_number(where, row, "priority", -1e9, 0, whole=True)),
            )
        )
    _check_unique(path, jobs)
    return jobs


def _number(
    where: str,
    row: Mapping[str, str | None],
    name: str,
    low: float,
    default: float | None = None,
    *,
    whole: bool = False,
) -> float:
    text = row.get(name)
    if not text and default is not None:
        return default
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not (value >= low and math.isfinite(value)) or (whole and value != int(value)):
        kind = "a whole number" if whole else "a number"
        raise WorkloadError(f"{where}: {name}: expected {kind} of at least {low:g}, got {text!r}")
    return value


def _read_philly(path: Path, text: str, slots: int) -> list[SimulatedJob]:
    try:
        entries = json.loads(text)
    except json.JSONDecodeError as error:
        raise WorkloadError(f"{path}: no JSON: {error}") from None
    if not isinstance(entries, list):
        raise WorkloadError(f"{path}: expected a list of jobs, got {type(entries).__name__}")
    found = []
    for index, entry in enumerate(entries):
        try:
            read = _philly_job(entry)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise WorkloadError(f"{path}: job {index}: {error!r}") from None
        if read is not None:
            found.append(read)
    if not found:
        return []
    start = min(submitted for _, submitted, _, _ in found)
    jobs = [
        _job(name, (submitted - start).total_seconds(), gpus, seconds, StepTime(), slots)
        for name, submitted, gpus, seconds in found
    ]
    _check_unique(path, jobs)
    return jobs


def _philly_job(entry: Mapping[str, Any]) -> tuple[str, datetime, int, float] | None:
    """Return id, time, GPUs and seconds; None: it never ran, or its log has a gap."""
    seconds, gpus = 0.0, 0
    for attempt in entry["attempts"]:
        if attempt["start_time"] and attempt["end_time"]:
            took = _philly_time(attempt["end_time"]) - _philly_time(attempt["start_time"])
            seconds += max(0.0, took.total_seconds())
            gpus = max(gpus, sum(len(machine["gpus"]) for machine in attempt["detail"]))
    if not gpus or seconds <= 0:
        return None
    return str(entry["jobid"]), _philly_time(entry["submitted_time"]), gpus, seconds


def _philly_time(text: str) -> datetime:
    return datetime.strptime(text, "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)


def _check_unique(path: Path, jobs: Sequence[SimulatedJob]) -> None:
    seen: set[str] = set()
    for job in jobs:
        if job.job_id in seen:
            raise WorkloadError(f"{path}: job_id: {job.job_id!r} stands there twice")
        seen.add(job.job_id)
