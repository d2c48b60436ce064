from dataclasses import replace

import pytest

from job_server.api.wire import JobEvent, JobState, JobStatus, Way
from scripts.quickstart_plan import (
    Act,
    Director,
    Pace,
    checks,
    deaths,
    epochs_for,
    images_per_second,
    plan_acts,
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
        "stopped": False,
        "verified": True,
        "verdict": "verify: ok",
        "floor": 0.95,
        "leftovers": (),
    }
    results = checks(job, **{**arguments, **fields})  # type: ignore[arg-type]
    return [each.text for each in results if not each.holds]


@pytest.mark.parametrize("pods", [2, 3, 4, 8])
def test_each_act_changes_what_the_one_before_left(pods: int):
    running = pods - 1
    for act in plan_acts(pods):
        if act.kill_rank is not None:
            assert 0 <= act.kill_rank < running
        else:
            assert act.pods is not None
            assert act.pods != running
            running = act.pods
    assert running == pods


def test_one_pod_is_refused_because_none_could_leave():
    with pytest.raises(ValueError, match=r"--pods: must be at least 2.*got 1"):
        plan_acts(1)


def looks(director: Director, *seen: tuple[JobStatus, float]) -> list[Act | None]:
    return [director.next_act(job, now) for job, now in seen]


def test_an_act_comes_when_its_stage_has_trained_for_a_gap():
    director = Director((Act(pods=3), Act(pods=1)), gap_s=5.0)
    first, second = status(stage(1, 2)), status(stage(1, 2), stage(2, 3))
    starting = status(stage(1, 2, first_step_at=None))
    preparing = status(stage(1, 2), state=JobState.PREPARING)
    assert looks(
        director, (starting, 0), (starting, 60), (first, 61), (first, 65.9), (first, 66)
    ) == [None] * 4 + [Act(pods=3)]
    assert (
        looks(director, (preparing, 67), (preparing, 90), (second, 91), (second, 95)) == [None] * 4
    ), "however long the change takes, what follows it trains for a gap"
    assert not director.is_over(second, 95.5)
    assert looks(director, (second, 96), (second, 200)) == [Act(pods=1), None], "each act once"


def test_a_kill_waits_no_longer_than_a_change():
    director = Director((Act(kill_rank=1),), gap_s=5.0)
    job = status(stage(1, 2))
    assert looks(director, (job, 1), (job, 5.5), (job, 6)) == [None, None, Act(kill_rank=1)]


def test_a_change_that_was_given_up_holds_up_nothing():
    director = Director((Act(pods=3), Act(pods=1)), gap_s=5.0)
    job = status(stage(1, 2))
    preparing = status(stage(1, 2), state=JobState.PREPARING)
    seen = looks(director, (job, 1), (job, 6), (preparing, 7), (job, 9), (job, 13), (job, 14))
    assert seen == [None, Act(pods=3), None, None, Act(pods=1), None]
    assert not director.is_over(job, 15)
    assert director.is_over(job, 18)


def test_behind_a_change_that_was_given_up_the_last_of_those_that_run_is_killed():
    director = Director((Act(pods=3), Act(kill_rank=2)), gap_s=5.0)
    alone = status(stage(1, 1))
    seen = looks(director, (alone, 1), (alone, 6), (alone, 10), (alone, 11))
    assert seen == [None, Act(pods=3), None, Act(kill_rank=0)]


def test_the_speed_counts_the_evaluation_as_a_third_of_training():
    assert images_per_second(trial_images=880, epoch_s=2.0) == pytest.approx(500.0)


@pytest.mark.parametrize(
    ("trainers", "cores", "imports", "speedup"),
    [
        pytest.param(3, 1, 3, 0.8, id="one core that all share"),
        pytest.param(3, 2, 3, 0.9, id="two cores"),
        pytest.param(3, 64, 3, 1.5, id="more cores than trainers"),
        pytest.param(4, None, 6, 2.1, id="a GPU each, whose spares may not fork"),
    ],
)
def test_training_outlasts_the_acts(trainers: int, cores: int | None, imports: int, speedup: float):
    # one epoch a second, alone
    epochs = epochs_for(plan_acts(trainers), 4.0, 1557.0, 2.0, trainers, cores)
    assert epochs == pytest.approx(((6 + 3) * 4.0 + imports * 3.0) * speedup, abs=0.5)


def test_a_very_slow_machine_still_trains_two_epochs():
    assert epochs_for(plan_acts(3), 4.0, 0.1, 2.0, 3, 2) == 2


def test_a_job_that_was_stopped_behind_the_last_act_holds():
    job = replace(finished(), state=JobState.STOPPED, reason="stopped")
    assert failed_checks(job, stopped=True) == []
    (text,) = failed_checks(job)
    assert "STOPPED" in text


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
