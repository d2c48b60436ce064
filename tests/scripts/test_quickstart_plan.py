from dataclasses import replace

import pytest

from job_server.change_script import parse_script, timeline
from job_server.wire import JobEvent, JobSpec, JobState, JobStatus, ScriptKind, ScriptSpec, Way
from scripts.quickstart_plan import (
    RECIPES,
    Pace,
    checks,
    deaths,
    epochs_for,
    gap_for,
    images_per_second,
    plan_changes,
    timeline_yaml,
)
from tests.scripts.statuses import stage, status


def finished() -> JobStatus:
    """What a run that held looks like."""
    stages = (
        stage(1, 2),
        stage(2, 3),
        stage(3, 1),
        stage(4, 3),
        stage(5, 3, way=Way.START, redone_steps=4, reason="trainer 2 was killed"),
        stage(6, 2),
        stage(7, 3),
    )
    return status(*stages, state=JobState.SUCCEEDED, step=140, failures=1, redone_steps=4)


def failed_checks(job: JobStatus, **fields: object) -> list[str]:
    arguments = {
        "killed": 1,
        "verified": True,
        "verdict": "verify: ok",
        "floor": 0.95,
        "leftovers": (),
    }
    results = checks(job, **{**arguments, **fields})  # type: ignore[arg-type]
    return [each.text for each in results if not each.holds]


@pytest.mark.parametrize("pods", [2, 3, 4, 8])
def test_the_server_accepts_the_timeline_and_skips_none_of_its_changes(pods: int):
    text = timeline_yaml(plan_changes(pods, 7.0))
    script = ScriptSpec(kind=ScriptKind.TIMELINE, text=text)
    job = JobSpec(job_id="quickstart", max_pods=pods, pods=pods - 1, script=script)
    assert parse_script(script, job).change(5) is not None
    assert parse_script(script, job).change(6) is None
    lines = timeline(script, job)
    assert len(lines) == 7
    assert not any("skipped" in line for line in lines)
    unchanged = [line for line in lines[1:] if "->" not in line]
    assert len(unchanged) == 1, "only the kill leaves the number of pods as it is"
    assert "kill rank" in unchanged[0]


def test_one_pod_is_refused_because_none_could_leave():
    with pytest.raises(ValueError, match=r"--pods: must be at least 2.*got 1"):
        plan_changes(1, 7.0)


def test_the_speed_counts_the_evaluation_as_a_third_of_training():
    assert images_per_second(trial_images=880, epoch_s=2.0) == pytest.approx(500.0)


@pytest.mark.parametrize(
    ("trainers", "cores", "speedup"),
    [
        pytest.param(3, 1, 0.8, id="one core that all share"),
        pytest.param(3, 2, 0.9, id="two cores"),
        pytest.param(3, 64, 1.5, id="more cores than trainers"),
        pytest.param(4, None, 2.1, id="a GPU each"),
    ],
)
def test_training_and_its_pauses_are_as_long_as_the_timeline_and_its_tail(
    trainers: int, cores: int | None, speedup: float
):
    changes = plan_changes(3, 8.0)
    epochs = epochs_for(changes, 1557.0, 2.0, trainers, cores)  # one epoch a second, alone
    assert epochs == round((6.25 * 8.0 + 4.0 - 2 * 2.0) * speedup)


def test_training_is_at_least_half_as_long_as_the_timeline_however_slow_the_start():
    assert epochs_for(plan_changes(3, 8.0), 1557.0, 60.0, 1, None) == round(6.25 * 8.0 / 2 * 0.8)


def test_a_very_slow_machine_still_trains_two_epochs():
    assert epochs_for(plan_changes(3, 7.0), 0.1, 2.0, 3, 2) == 2


def test_everything_holds_after_a_run_as_it_should_be():
    assert failed_checks(finished()) == []


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        pytest.param({"state": JobState.FAILED, "reason": "budget"}, "FAILED", id="job failed"),
        pytest.param({"metrics": {"accuracy": 0.9}}, "accuracy 90.0%", id="learned too little"),
        pytest.param({"metrics": {}}, "accuracy 0.0%", id="never evaluated"),
    ],
)
def test_each_broken_promise_is_named(fields: dict[str, object], said: str):
    broken = replace(finished(), **fields)  # type: ignore[arg-type]
    (text,) = failed_checks(broken)
    assert said in text


def test_too_few_stages_do_not_hold():
    job = finished()
    (text,) = failed_checks(replace(job, stages=job.stages[:4]))
    assert text.startswith("4 stages")


def test_abandoned_stages_do_not_count_as_stages():
    job = finished()
    abandoned = tuple(
        replace(each, committed_at=None, outcome="abandoned: late") if each.stage > 4 else each
        for each in job.stages
    )
    (text,) = failed_checks(replace(job, stages=abandoned))
    assert text.startswith("4 stages")


def test_a_planned_change_that_redid_a_step_does_not_hold():
    job = finished()
    redone = tuple(
        replace(each, redone_steps=1) if each.stage == 2 else each for each in job.stages
    )
    assert failed_checks(replace(job, stages=redone)) == ["5 planned changes redid 1 steps"]


def test_a_run_without_a_kill_does_not_hold():
    (text,) = failed_checks(finished(), killed=0)
    assert text.startswith("kill -9 of a trainer: never")


def test_a_death_is_told_once_though_the_recovery_mentions_it_again():
    texts = [
        "killing rank 2 on request",
        "stage 4 is over: rank 2 (pod_2_2) was killed by SIGKILL, as requested",
        "preparing stage 5 of 3 pods by start: recovery: rank 2 (pod_2_2) was killed by SIGKILL",
        "stage 5 committed: 3 pods, recovery: rank 2 (pod_2_2) was killed by SIGKILL",
    ]
    events = [
        JobEvent(number=number, at=0.0, job_id="j", stage=4, text=text)
        for number, text in enumerate(texts, 1)
    ]
    assert deaths(events) == ["rank 2 (pod_2_2) was killed by SIGKILL, as requested"]


def test_what_a_killed_pod_said_last_is_for_the_log_and_not_for_the_line():
    text = "stage 7 is over: pod pod_1_2 was killed by SIGKILL; last lines: [rank 1] a | b"
    event = JobEvent(number=1, at=0.0, job_id="j", stage=7, text=text)
    assert deaths([event]) == ["pod pod_1_2 was killed by SIGKILL"]


@pytest.mark.parametrize(
    ("startup_s", "gap_s"),
    [
        pytest.param(1.0, 7.0, id="as in the recipe"),
        pytest.param(3.0, 9.0, id="slower to start"),
        pytest.param(30.0, 10.5, id="busy with other things"),
    ],
)
def test_changes_are_so_far_apart_that_there_is_training_between_them(startup_s, gap_s):
    assert gap_for(RECIPES["lenet"], startup_s) == gap_s


def test_an_unproven_ledger_and_a_left_process_do_not_hold():
    assert failed_checks(finished(), verified=False, verdict="verify: 3 samples twice") == [
        "verify: 3 samples twice"
    ]
    (text,) = failed_checks(finished(), leftovers=("77 python train.py",))
    assert "77 python train.py" in text


def test_the_short_training_of_a_big_model_is_not_judged_by_its_accuracy():
    job = replace(finished(), metrics={"accuracy": 0.1})
    assert failed_checks(job, floor=0.0) == []


def test_the_pace_is_that_of_the_stage_at_hand():
    pace = Pace()
    for now in range(4):
        pace.see(stage=1, step=10 * now, now=100.0 + now)
    assert pace.steps_per_s == pytest.approx(10.0)
    pace.see(stage=2, step=31, now=110.0)
    assert pace.steps_per_s is None, "the pause between two stages is not slow training"


def test_time_without_a_step_is_counted_from_the_last_one():
    pace = Pace()
    pace.see(stage=1, step=5, now=100.0)
    pace.see(stage=1, step=5, now=103.5)
    assert pace.still_s == 3.5
    pace.see(stage=1, step=6, now=104.0)
    assert pace.still_s == 0.0


def test_steps_that_are_redone_do_not_make_the_pace_negative():
    pace = Pace()
    for now, step in enumerate((10, 20, 30, 25, 26, 27)):
        pace.see(stage=1, step=step, now=float(now))
    assert pace.steps_per_s == pytest.approx(1.0)
