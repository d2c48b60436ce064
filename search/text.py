"""Say in words and tables how far a study is. Pure."""

import shlex
from collections.abc import Mapping, Sequence

from job_server.api.text import counted, table
from job_server.api.wire import JobStatus
from search.decide import Trial, TrialState
from search.study_file import StudySpec, Value, as_text


def shown(value: Value) -> str:
    """Return a parameter's value for people."""
    return f"{value:.4g}" if isinstance(value, float) else as_text(value)


def values_text(values: Mapping[str, Value]) -> str:
    return ", ".join(f"{name} {shown(value)}" for name, value in values.items())


def best_trial(spec: StudySpec, trials: Sequence[Trial]) -> Trial | None:
    """Return the complete trial with the best value, of equals the first; None: none is there."""
    complete = [trial for trial in trials if trial.value is not None]
    sign = -1 if spec.maximize else 1
    return min(complete, key=lambda trial: sign * (trial.value or 0.0), default=None)


def why_it_waits(trial: Trial, job: JobStatus | None) -> str | None:
    """Return why a trial that runs has no pods; None: it has, or it does not run."""
    if trial.state is not TrialState.RUNNING or job is None or job.pods:
        return None
    return job.reason


def trials_table(spec: StudySpec, trials: Sequence[Trial], jobs: Mapping[int, JobStatus]) -> str:
    """Return a row per trial: the best one is marked by a star."""
    best = best_trial(spec, trials)
    header = ("TRIAL", "STATE", "EPOCH", spec.metric.upper(), "TRAINERS", "PARAMETERS")
    rows = []
    for trial in trials:
        job = jobs.get(trial.number)
        running = trial.state is TrialState.RUNNING
        epochs = max(trial.reports, default=0)
        value = trial.reports[epochs] if epochs and trial.value is None else trial.value
        waits = why_it_waits(trial, job)
        why = trial.why or waits
        rows.append(
            (
                f"{trial.number}{'*' if trial is best else ''}",
                trial.state.value if waits is None else "waiting",
                f"{epochs}/{spec.epochs}",
                "-" if value is None else f"{value:.6g}",
                sum(len(pod.ranks) for pod in job.pods) if running and job is not None else "-",
                values_text(trial.values) + (f"  ({why})" if why else ""),
            )
        )
    return table(header, rows)


def summary(spec: StudySpec, trials: Sequence[Trial]) -> str:
    """Return a line on how many trials there are."""
    parts = [
        f"{sum(trial.state is state for trial in trials)} {state.value}" for state in TrialState
    ]
    return f"{spec.name}: {counted(len(trials), 'trial')} of {spec.trials}: {', '.join(parts)}"


def best_text(spec: StudySpec, trials: Sequence[Trial], job_id: str) -> str:
    """Return which trial is the best, and how to train so again."""
    best = best_trial(spec, trials)
    if best is None:
        return "no trial is complete"
    words = shlex.join(spec.job(job_id, best.values).args)
    return (
        f"best: trial {best.number} (job {job_id}), {spec.metric} {best.value:.6g}: "
        f"{values_text(best.values)}\nits arguments: {words}"
    )
