"""What a search does next."""

import math

import pytest

from job_server.api.wire import JobState
from search.decide import (
    Ask,
    Finish,
    Release,
    Report,
    Stop,
    Submit,
    TrialState,
    is_hopeless,
    is_over,
    next_actions,
    promising,
    share_out,
)
from tests.search.study import job, logged, study, trial

RUNNING, COMPLETE = TrialState.RUNNING, TrialState.COMPLETE
PRUNED, FAILED = TrialState.PRUNED, TrialState.FAILED
ONE = study(trials=1)


@pytest.mark.parametrize(
    ("known", "at_server", "expected"),
    [
        pytest.param(
            trial(submitted=False), None, [Submit(number=0)], id="asked, then killed: submitted"
        ),
        pytest.param(
            trial(submitted=False), job(), [Submit(number=0)],
            id="submitted, then killed: the same spec again is no second job",
        ),
        pytest.param(trial(), job(), [], id="it trains"),
        pytest.param(trial(), job(JobState.WAITING), [], id="it waits"),
        pytest.param(
            trial(), logged(JobState.RUNNING, 1, 0.5),
            [Report(number=0, epochs=1, value=0.5)], id="a new value",
        ),
        pytest.param(
            trial(reports={1: 0.5}), logged(JobState.RUNNING, 1, 0.6), [],
            id="the same epoch again, after a replay, is one report",
        ),
        pytest.param(
            trial(reports={1: 0.5, 2: 0.6}, judged=1), logged(JobState.RUNNING, 2, 0.6),
            [Report(number=0, epochs=2, value=0.6)], id="reported, not judged: killed",
        ),
        pytest.param(
            trial(), logged(JobState.RUNNING, 0, 0.5), [], id="before the first epoch was over"
        ),
        pytest.param(
            trial(), logged(JobState.RUNNING, 3, 0.9),
            [Report(number=0, epochs=3, value=0.9, may_prune=False)],
            id="after its last epoch it is complete, not pruned",
        ),
        pytest.param(
            trial(reports={2: 0.8}), logged(JobState.SUCCEEDED, 3, 0.9),
            [
                Report(number=0, epochs=3, value=0.9, may_prune=False),
                Finish(number=0, state=COMPLETE, value=0.9),
            ],
            id="it has succeeded",
        ),
        pytest.param(
            trial(reports={3: 0.9}), logged(JobState.SUCCEEDED, 3, 0.9),
            [Finish(number=0, state=COMPLETE, value=0.9)], id="reported, then killed",
        ),
        pytest.param(trial(0, PRUNED), job(), [Stop(number=0)],
                     id="pruned, then killed before its job was stopped"),
        pytest.param(trial(0, PRUNED), logged(JobState.SUCCEEDED, 3, 0.9), [Release(number=0)],
                     id="pruned as it succeeded: it stays pruned"),
        pytest.param(trial(0, PRUNED), job(JobState.STOPPED), [Release(number=0)],
                     id="it has ended"),
        pytest.param(trial(0, PRUNED), None, [Release(number=0)], id="it is gone"),
        pytest.param(trial(0, COMPLETE, released=True), None, [], id="nothing is left"),
    ],
)  # fmt: skip
def test_a_trial_and_its_job_are_made_to_agree(known, at_server, expected):
    jobs = {} if at_server is None else {0: at_server}
    assert next_actions(ONE, [known], jobs) == expected


@pytest.mark.parametrize(
    ("at_server", "why"),
    [
        (None, "another server has it (--server)"),
        (job(JobState.FAILED), "its job is FAILED: because"),
        (job(JobState.STOPPED), "its job is STOPPED: because"),
        (job(JobState.SUCCEEDED), "logged no 'accuracy'; call loop.log(accuracy=...) after"),
        (logged(JobState.SUCCEEDED, 3, None), "'accuracy' was no finite number at its end"),
    ],
)
def test_a_trial_without_a_result_has_failed_and_says_why(at_server, why):
    jobs = {} if at_server is None else {0: at_server}
    *_, last = next_actions(ONE, [trial()], jobs)
    assert isinstance(last, Finish)
    assert last.state is FAILED
    assert why in last.why


def test_a_value_that_is_no_number_is_reported_as_such():
    (report,) = next_actions(ONE, [trial()], {0: logged(JobState.RUNNING, 1, None)})
    assert isinstance(report, Report)
    assert math.isnan(report.value)


@pytest.mark.parametrize(
    ("states", "asked"),
    [
        ([], 2),
        ([RUNNING], 1),
        ([RUNNING, RUNNING], 0),
        ([COMPLETE, PRUNED, RUNNING], 1),
        ([COMPLETE, PRUNED, FAILED, RUNNING], 0),
        ([FAILED, FAILED, FAILED], 0),
        ([FAILED, FAILED, FAILED, RUNNING], 0),
        ([COMPLETE, FAILED, FAILED], 1),
    ],
)
def test_so_many_trials_are_asked_for_as_there_is_room_for(states, asked):
    trials = [trial(n, state, released=state is not RUNNING) for n, state in enumerate(states)]
    jobs = {each.number: job() for each in trials}
    assert next_actions(study(), trials, jobs) == [Ask()] * asked


def test_a_study_is_over_when_all_trials_have_ended_and_given_back_their_trainers():
    over = [trial(n, COMPLETE, released=True) for n in range(4)]
    assert is_over(study(), over)
    assert not is_over(study(), over[:3])
    assert not is_over(study(), [*over[:3], trial(3, PRUNED)])
    failed = [trial(n, FAILED, released=True) for n in range(3)]
    assert is_hopeless(failed)
    assert is_over(study(), failed), "the next ones would fail, too"
    assert not is_over(study(), failed[:2])


def test_promising_is_who_is_not_known_to_be_worse_than_the_median_after_as_many_epochs():
    trials = [
        trial(0, COMPLETE, reports={1: 0.5, 2: 0.7}),
        trial(1, PRUNED, reports={1: 0.2}),
        trial(2, reports={1: 0.4, 2: 0.8}),
        trial(3, reports={1: 0.3}),
        trial(4, reports={1: math.nan}),
        trial(5, reports={3: 0.9}),  # nobody has come so far
        trial(6),  # nothing is known of it
    ]
    assert promising(trials, maximize=True) == {2, 5, 6}
    assert promising(trials, maximize=False) == {3, 5, 6}
    assert promising(trials, maximize=True, min_epochs=2) == {2, 3, 5, 6}, "3 is not judged yet"


@pytest.mark.parametrize(
    ("running", "better", "pods", "expected"),
    [
        pytest.param([0, 1], set(), 4, {0: 4, 1: 4}, id="none is better: the server chooses"),
        pytest.param([0, 1], {0, 1}, 4, {0: 4, 1: 4}, id="all are"),
        pytest.param([0, 1], {0}, 4, {0: 3, 1: 1}, id="the better one has the rest"),
        pytest.param([0, 1], {0}, 8, {0: 4, 1: 4}, id="no more than most: others have it then"),
        pytest.param([0, 1, 2], {0, 2}, 6, {0: 3, 1: 1, 2: 3}, id="better ones are alike"),
        pytest.param([0, 1, 2], {0, 2}, 5, {0: 2, 1: 1, 2: 2}, id="in equal parts"),
        pytest.param([0, 1, 2], {0, 2}, 4, {0: 2, 1: 1, 2: 2}, id="one is left for either"),
        pytest.param([0, 1], {0}, 1, {0: 1, 1: 1}, id="there is too little for all"),
        pytest.param([], set(), 4, {}, id="nothing runs"),
    ],
)
def test_what_is_left_goes_to_the_better_trials(running, better, pods, expected):
    assert share_out(running, frozenset(better), pods, 1, 4) == expected
