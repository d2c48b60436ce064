"""Halving compares values after as many epochs, whatever the search has seen beside them."""

import random
from collections.abc import Iterable
from typing import Any

import pytest

from job_server.api.wire import JobState
from search.decide import Report, next_actions
from search.study_file import PrunerSpec
from tests.search.study import logged, study
from tests.search.test_run import Killed

optuna = pytest.importorskip("optuna")
from search.pruner import JUDGED, HalvingPruner  # noqa: E402 - they need it, too
from search.store import StudyStore  # noqa: E402

EPOCHS, TRIALS = 9, 12
Seen = tuple[int, int, float]  # trial, epochs, value


def halving(reduction: int = 3, hyperband: bool = False) -> HalvingPruner:
    return HalvingPruner(min_epochs=1, reduction=reduction, epochs=EPOCHS, hyperband=hyperband)


def decisions(pruner: Any, reports: Iterable[Seen], direction: str = "maximize") -> dict[int, int]:
    """Return which trials are pruned, and after how many epochs; those report no more."""
    made = optuna.create_study(study_name="cells", pruner=pruner, direction=direction)
    trials, seen, pruned = [made.ask() for _ in range(TRIALS)], dict[int, int](), dict[int, int]()
    for number, epochs, value in reports:
        if number not in pruned:
            trials[number].report(value, epochs)
            seen[number] = max(seen.get(number, 0), epochs)
            if trials[number].should_prune():
                pruned[number] = epochs
                made.tell(number, state=optuna.trial.TrialState.PRUNED)
            else:
                trials[number].set_user_attr(JUDGED, seen[number])
    return pruned


def shuffled(rng: random.Random) -> list[Seen]:
    """Return reports of all epochs of all trials, each trial's in order."""
    turns = [number for number in range(TRIALS) for _ in range(EPOCHS)]
    rng.shuffle(turns)
    done = dict.fromkeys(range(TRIALS), 0)
    found = []
    for number in turns:
        done[number] += 1
        value = rng.random() if rng.random() < 0.9 else float("nan")
        found.append((number, done[number], value))
    return found


@pytest.mark.parametrize("direction", ["maximize", "minimize"])
@pytest.mark.parametrize("kind", ["halving", "hyperband"])
def test_it_decides_as_optunas_own_and_needs_but_the_epochs_at_which_it_judges(kind, direction):
    reports = shuffled(random.Random(f"{kind}{direction}"))
    few = [each for each in reports if each[1] in (1, 3, 9)]
    ours = halving(hyperband=kind == "hyperband")
    own: Any = (
        optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3)
        if kind == "halving"
        else optuna.pruners.HyperbandPruner(min_resource=1, max_resource=9, reduction_factor=3)
    )
    found = decisions(ours, reports, direction)
    assert found
    assert decisions(own, reports, direction) == found
    assert decisions(ours, few, direction) == found


def test_a_later_value_is_not_taken_for_that_of_an_epoch_that_went_unseen():
    # All three learn alike. Nobody saw the first epoch of trial 0: its third is no yardstick.
    alike = {1: 0.5, 2: 0.6, 3: 0.7}
    reports = [(0, 3, 0.7)]
    reports += [(number, epochs, value) for epochs, value in alike.items() for number in (1, 2)]
    assert decisions(halving(reduction=2), reports) == {}


def test_one_that_was_let_go_on_is_not_judged_anew_by_those_that_come_later():
    better = [(number, 1, 0.9) for number in (1, 2, 3)]
    assert decisions(halving(), [(0, 1, 0.5), *better, (0, 2, 0.6)]) == {}
    # ... nor as a trainer makes an epoch again that nobody saw before.
    assert decisions(halving(), [(0, 2, 0.5), *better, (0, 1, 0.4), (0, 3, 0.5)]) == {}


@pytest.mark.full  # by Optuna, whose storage is a database
def test_a_kill_between_a_report_and_its_decision_takes_no_decision_away(tmp_path, monkeypatch):
    spec = study(trials=2, pruner=PrunerSpec(kind="halving"))
    monkeypatch.setattr(optuna.trial.Trial, "should_prune", killed)
    with StudyStore(tmp_path, spec) as store:
        for number, value in enumerate((0.9, 0.1)):
            store.ask()
            store.note_submitted(number)
            with pytest.raises(Killed):
                store.report(number, 1, value)
    monkeypatch.undo()
    jobs = {0: logged(JobState.RUNNING, 1, 0.9), 1: logged(JobState.RUNNING, 1, 0.1)}
    with StudyStore(tmp_path, spec) as store:
        due = [each for each in next_actions(spec, store.trials(), jobs) if type(each) is Report]
        assert [(each.number, each.epochs) for each in due] == [(0, 1), (1, 1)]
        assert [store.report(each.number, each.epochs, each.value) for each in due] == [False, True]


def killed(_trial: object) -> bool:
    raise Killed
