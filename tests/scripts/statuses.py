"""Job statuses as the server gives them, for tests of what the quickstart makes of them."""

from dataclasses import replace

from job_server.api.wire import Account, JobSpec, JobState, JobStatus, StageRecord, Way


def stage(number: int, pods: int, **fields: object) -> StageRecord:
    """A committed stage of ten steps."""
    record = StageRecord(
        stage=number,
        flag=number - 2,
        way=Way.START if number == 1 else Way.DRAIN,
        pods=pods,
        trainers=pods,
        reason="timeline at 7s: add 1 pod",
        outcome="ended",
        committed_at=100.0 + number,
        first_step_at=100.5 + number,
        first_step=(number - 1) * 10 + 1,
        last_step=number * 10,
        pause_s=None if number == 1 else 1.25,
    )
    return replace(record, **fields)  # type: ignore[arg-type]


def status(*stages: StageRecord, **fields: object) -> JobStatus:
    """A running job of at most three pods with these stages."""
    base = JobStatus(
        job_id="quickstart",
        state=JobState.RUNNING,
        reason="",
        revision=1,
        spec=JobSpec(job_id="quickstart", max_pods=3),
        stage=stages[-1].stage if stages else 0,
        flag=-1,
        pods=(),
        target_pods=2,
        queued_changes=(),
        step=70,
        epoch=3,
        total_steps=140,
        metrics={"loss": 0.125, "accuracy": 0.975},
        failures=0,
        preemptions=0,
        resizes=0,
        redone_steps=0,
        script_elapsed_s=0.0,
        estimated_run_time_s=None,
        submitted_at=100.0,
        account=Account(training_s=40.0, cutting_over_s=9.0, waiting_s=1.0),
        stages=stages,
        teachers=None,
    )
    return replace(base, **fields)  # type: ignore[arg-type]
