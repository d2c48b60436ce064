"""Decide what a search does next: ask, submit, report, finish, stop; and who may have how much.

Pure. Each pass compares what the study's storage knows with what the job server says. An action
that was lost in a crash is decided again, and one that was made is not: the storage is written
before the server is told to stop a job, and a job's name follows from its trial.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from job_server.api.wire import JobState, JobStatus
from search.study_file import StudySpec

GONE = "the server does not have its job: that was deleted, or another server has it (--server)"
HOPELESS = 3  # first trials that all failed: the next ones would, too


class TrialState(Enum):
    RUNNING = "running"
    COMPLETE = "complete"
    PRUNED = "pruned"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A trial as the study's storage has it."""

    number: int
    state: TrialState
    values: Mapping[str, float | int | str | bool]  # of its parameters
    reports: Mapping[int, float] = field(default_factory=dict)  # epochs -> the metric then
    judged: int = 0  # its epochs when the pruner last let it go on
    value: float | None = None  # of a complete one
    why: str = ""  # it failed
    submitted: bool = False  # the server has (or had) its job
    released: bool = False  # its job has ended, or is gone


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Add the trial's job, unless the server has it."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Enter a value of the metric, and prune the trial if the pruner says so.

    NaN: the metric was no finite number.
    """

    number: int
    epochs: int
    value: float
    may_prune: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Enter how the trial ended."""

    number: int
    state: TrialState
    value: float | None = None  # of a complete one
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """End the job of a trial that is over, at once and without its state."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Enter that the job of a trial that is over has no trainers any more."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Draw the parameters of another trial, and submit it."""


Action = Submit | Report | Finish | Stop | Release | Ask


def next_actions(
    spec: StudySpec, trials: Sequence[Trial], jobs: Mapping[int, JobStatus]
) -> list[Action]:
    """Return what is to be done now, in this order.

    Args:
        trials: all of the study.
        jobs: those of the trials that are not released, by number; one that is missing is not on
            the server.
    """
    actions: list[Action] = []
    for trial in trials:
        job = jobs.get(trial.number)
        if trial.state is not TrialState.RUNNING:
            actions += _after(trial, job)
        elif not trial.submitted:
            actions.append(Submit(number=trial.number))
        elif job is None:
            actions.append(_failed(trial, GONE))
        else:
            actions += _follow(spec, trial, job)
    return actions + [Ask()] * free_places(spec, trials)


def free_places(spec: StudySpec, trials: Sequence[Trial]) -> int:
    """Return how many more trials may begin."""
    if is_hopeless(trials):
        return 0
    running = sum(trial.state is TrialState.RUNNING for trial in trials)
    return max(0, min(spec.parallel - running, spec.trials - len(trials)))


def is_hopeless(trials: Sequence[Trial]) -> bool:
    """Whether the first trials have all failed."""
    over = [trial for trial in trials if trial.state is not TrialState.RUNNING]
    return len(over) >= HOPELESS and all(trial.state is TrialState.FAILED for trial in over)


def is_over(spec: StudySpec, trials: Sequence[Trial]) -> bool:
    """Whether nothing is left to do."""
    ended = all(trial.state is not TrialState.RUNNING and trial.released for trial in trials)
    return ended and (len(trials) >= spec.trials or is_hopeless(trials))


def _after(trial: Trial, job: JobStatus | None) -> list[Action]:
    if trial.released:
        return []
    if job is None or job.state.ended:
        return [Release(number=trial.number)]
    return [Stop(number=trial.number)]


def _follow(spec: StudySpec, trial: Trial, job: JobStatus) -> list[Action]:
    actions: list[Action] = []
    epochs, value = job.metric_epochs.get(spec.metric), job.metrics.get(spec.metric)
    may_prune = not job.state.ended and (epochs or 0) < spec.epochs
    # One that was reported, but not judged: a kill came between the two.
    if epochs and (epochs not in trial.reports or (may_prune and epochs > trial.judged)):
        reported = float("nan") if value is None else value
        actions.append(
            Report(number=trial.number, epochs=epochs, value=reported, may_prune=may_prune)
        )
    if job.state in (JobState.FAILED, JobState.STOPPED):
        actions.append(_failed(trial, f"its job is {job.state.value}: {job.reason}"))
    elif job.state is JobState.SUCCEEDED and value is not None:
        actions.append(Finish(number=trial.number, state=TrialState.COMPLETE, value=value))
    elif job.state is JobState.SUCCEEDED and epochs is None:
        actions.append(
            _failed(
                trial,
                f"its script has logged no {spec.metric!r}; call loop.log({spec.metric}=...) after "
                f"each epoch",
            )
        )
    elif job.state is JobState.SUCCEEDED:
        actions.append(_failed(trial, f"{spec.metric!r} was no finite number at its end"))
    return actions


def _failed(trial: Trial, why: str) -> Finish:
    return Finish(number=trial.number, state=TrialState.FAILED, why=why)


# --- who may have how many trainers ---------------------------------------------------------------


def promising(trials: Sequence[Trial], *, maximize: bool, min_epochs: int = 1) -> frozenset[int]:
    """Return the running trials that are not known to be worse than the median of all.

    The median is over all trials that have reported after as many epochs. One that nobody can be
    compared with yet is among them: it would have to change soon if it began with little.

    Args:
        min_epochs: before which the pruner ends nobody, so nobody is judged here, either. Who is
            worse after fewer is about to be pruned: two changes for nothing.
    """
    found = set()
    for trial in trials:
        if trial.state is not TrialState.RUNNING:
            continue
        epochs = max(trial.reports, default=0)
        own = trial.reports.get(epochs)
        if own is not None and math.isnan(own):
            continue
        if own is not None and epochs >= min_epochs:
            values = [other.reports[epochs] for other in trials if epochs in other.reports]
            middle = statistics.median(value for value in values if not math.isnan(value))
            if own < middle if maximize else own > middle:
                continue
        found.add(trial.number)
    return frozenset(found)


def share_out(
    running: Iterable[int], better: frozenset[int], pods: int, least: int, most: int
) -> dict[int, int]:
    """Return how many pods each running trial may have at most.

    All have their least. The rest goes to the better ones alike, then to the others; a remainder
    is for whom the server chooses. Where none is better than another all may have the most.

    Args:
        pods: that these trials can have together.
    """
    numbers = list(running)
    if not better.intersection(numbers) or better.issuperset(numbers):
        return dict.fromkeys(numbers, most)
    found = dict.fromkeys(numbers, least)
    left = pods - least * len(numbers)
    first = [number for number in numbers if number in better]
    others = [number for number in numbers if number not in better]
    for group in (first, others):
        if left <= 0:
            break
        each = min(most, least - (-left // len(group)))  # rounded up
        found |= dict.fromkeys(group, each)
        left -= (each - least) * len(group)
    return found
