"""A study and its trials, for tests."""

from dataclasses import replace
from typing import Any

from job_server.api.wire import Account, JobSpec, JobState, JobStatus
from search.decide import Trial, TrialState
from search.study_file import Choice, FloatRange, IntRange, PrunerSpec, StudySpec

STUDY = StudySpec(
    name="cells",
    folder="cells",
    parameters={
        "lr": FloatRange(low=0.001, high=1.0, log=True),
        "width": IntRange(low=4, high=16, step=4),
        "act": Choice(choices=("relu", "gelu")),
    },
    metric="accuracy",
    maximize=True,
    trials=4,
    parallel=2,
    epochs=3,
    max_pods=4,
    pruner=PrunerSpec(startup_trials=1),
)


def study(**changes: Any) -> StudySpec:
    return replace(STUDY, **changes)


def trial(number: int = 0, state: TrialState = TrialState.RUNNING, **changes: Any) -> Trial:
    """A trial whose job was submitted, and that was judged by all that it has reported."""
    changes.setdefault("judged", max(changes.get("reports", ()), default=0))
    made = Trial(number=number, state=state, values={"lr": 0.1}, submitted=True)
    return replace(made, **changes)


def job(state: JobState = JobState.RUNNING, **changes: Any) -> JobStatus:
    made = JobStatus(
        job_id="j", state=state, reason="because", revision=1, spec=JobSpec(job_id="j"), stage=1,
        flag=0, pods=(), target_pods=1, queued_changes=(), step=0, epoch=0, total_steps=None,
        metrics={}, failures=0, preemptions=0, resizes=0, redone_steps=0, script_elapsed_s=0.0,
        estimated_run_time_s=None, submitted_at=0.0, account=Account(), stages=(), teachers=None,
    )  # fmt: skip
    return replace(made, **changes)


def logged(state: JobState, epochs: int, value: float | None) -> JobStatus:
    """A job whose script has logged accuracy so late; None: it was no finite number."""
    metrics = {} if value is None else {"accuracy": value}
    return job(state, metrics=metrics, metric_epochs={"accuracy": epochs})
