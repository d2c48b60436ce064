"""A study that is killed at any moment loses no trial, and counts none twice."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from job_server.api.errors import BadRequest, ConfigError, Conflict, NotFound, Rejected, ServerAway
from job_server.api.wire import JobSpec, JobState, JobStatus, SharedJob, SharedNode, Sharing
from search.decide import GONE, TrialState
from search.study_file import (
    Choice,
    FloatRange,
    Parameter,
    PrunerSpec,
    SamplerSpec,
    StudySpec,
    read_study,
)
from tests.search.study import job, study
from tests.support import no_file_locks, nothing_writable

optuna = pytest.importorskip("optuna")
import search.store  # noqa: E402 - they need it, too
from search.run import Search  # noqa: E402
from search.store import StudyStore  # noqa: E402


class Killed(BaseException):
    """What a test does to the search in place of SIGKILL."""


class Jobs:
    """A job server to a search: each look at a job that runs finds it an epoch later."""

    def __init__(self, epochs: int) -> None:
        self.epochs = epochs
        self.made: list[str] = []  # every job that was added
        self.known: dict[str, JobStatus] = {}
        self.most: dict[str, int] = {}
        self.calls = 0
        self.kill_at: int | None = None  # the number of a call; None: never
        self.away = 0  # so many calls find no server
        self.full = False  # ... but one whose disk is full

    def _called(self) -> None:
        self.calls += 1
        if self.calls == self.kill_at:
            raise Killed
        if self.away:
            self.away -= 1
            away = ServerAway("no answer")
            away.answers = self.full
            raise away

    def status(self, job_id: str) -> JobStatus:
        self._called()
        if job_id not in self.known:
            raise NotFound(f"no job {job_id}")
        found = self.known[job_id]
        if found.state is JobState.RUNNING:
            epoch = found.epoch + 1
            value = float(found.spec.args[-1]) + 0.01 * epoch
            over = JobState.SUCCEEDED if epoch >= self.epochs else JobState.RUNNING
            self.known[job_id] = replace(
                found, epoch=epoch, state=over, metrics={"accuracy": value},
                metric_epochs={"accuracy": epoch},
            )  # fmt: skip
        return found

    def submit(self, spec: JobSpec) -> JobStatus:
        self._called()
        if spec.job_id not in self.known:
            self.made.append(spec.job_id)
            self.known[spec.job_id] = job(job_id=spec.job_id, spec=spec)
            self.most[spec.job_id] = spec.max_pods
        elif self.known[spec.job_id].spec != spec:
            raise Conflict("job_id: is taken")
        self._called()  # added, and the search is killed before it hears of it
        return self.known[spec.job_id]

    def stop(self, job_id: str, *, discard: bool = False) -> JobStatus:
        self._called()
        assert discard
        self.known[job_id] = replace(self.known[job_id], state=JobState.STOPPED)
        return self.known[job_id]

    def resize(self, job_id: str, pods: int) -> JobStatus:
        self._called()
        self.most[job_id] = pods
        return self.known[job_id]

    def sharing(self) -> Sharing:
        self._called()
        jobs = tuple(
            SharedJob(
                job_id=name, state=found.state, pods=1, allotted=1, min_pods=1,
                max_pods=self.most[name], submitted_at=0.0, step_s={}, nodes={}, since=0.0,
            )
            for name, found in self.known.items() if not found.state.ended
        )  # fmt: skip
        node = SharedNode(node_id="a", alive=True, slots=4, used_shared=0, used_others=0)
        return Sharing(policy="goodput", nodes=(node,), jobs=jobs)


pytestmark = pytest.mark.full  # by Optuna, whose storage is a database

SPEC = study(
    parameters={"quality": Choice(choices=(0.2, 0.5, 0.8))}, trials=4, parallel=2, epochs=3,
    pruner=PrunerSpec(startup_trials=1), seed=4,
)  # fmt: skip


def start(folder: Path, jobs: Jobs, spec: StudySpec = SPEC) -> list[str]:
    """Run the study as `edl search` does; return its lines."""
    said: list[str] = []
    with StudyStore(folder, spec) as store:
        Search(spec, store, jobs, look_s=0.0).run(lambda progress: None, said.append)
    return said


def results(folder: Path, spec: StudySpec = SPEC) -> list[tuple[Any, ...]]:
    with StudyStore(folder, spec) as store:
        return [(t.number, t.state, t.value, dict(t.values)) for t in store.trials()]


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory) -> tuple[Any, Any]:
    folder, jobs = tmp_path_factory.mktemp("unharmed"), Jobs(epochs=3)
    start(folder, jobs)
    return results(folder), jobs


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_any_seed_of_a_study_draws_and_another_one_draws_otherwise(tmp_path, sampler):
    drawn = []
    for seed in (4095, 4096, 20261126, 2**63 - 1):
        spec = replace(
            SPEC, seed=seed, parameters={"lr": FloatRange(low=0.0, high=1.0, log=False, step=None)},
            sampler=SamplerSpec(kind=sampler),
        )  # fmt: skip
        with StudyStore(tmp_path / str(seed), spec) as store:
            drawn += [store.trial(store.ask()).values["lr"] for _ in range(3)]
    assert len(set(drawn)) == len(drawn)


def test_a_study_runs_to_its_end_and_prunes_what_is_worse(unharmed):
    found, jobs = unharmed
    assert [number for number, *_ in found] == [0, 1, 2, 3]
    assert {state for _, state, *_ in found} == {TrialState.COMPLETE, TrialState.PRUNED}
    for number, state, value, values in found:
        at_server = jobs.known[jobs.made[number]]
        if state is TrialState.COMPLETE:
            assert at_server.state is JobState.SUCCEEDED
            assert value == pytest.approx(values["quality"] + 0.03)
        else:
            assert at_server.state is JobState.STOPPED
            assert at_server.epoch < 3
    assert len(set(jobs.made)) == len(jobs.made) == 4


@pytest.mark.parametrize("stride", [10, pytest.param(1, marks=pytest.mark.slow)])
def test_a_kill_at_any_call_loses_no_trial_and_doubles_none(unharmed, tmp_path, stride):
    expected, calm = unharmed
    for call in range(2, calm.calls + 1, stride):
        folder, jobs = tmp_path / str(call), Jobs(epochs=3)
        jobs.kill_at = call
        with pytest.raises(Killed):
            start(folder, jobs)
        start(folder, jobs)
        found = results(folder)
        assert [number for number, *_ in found] == [0, 1, 2, 3], call
        assert len(set(jobs.made)) == len(jobs.made) == 4, call
        assert all(status.state.ended for status in jobs.known.values()), call
        for number, state, _value, values in found:
            ended = jobs.known[jobs.made[number]].state
            assert state in (TrialState.COMPLETE, TrialState.PRUNED), call
            assert (state is TrialState.COMPLETE) <= (ended is JobState.SUCCEEDED), call
            # The same parameters as without the kill, as long as the same trials had ended before.
            assert number > 1 or values == expected[number][3], call


def test_a_trial_that_was_killed_before_all_its_parameters_were_drawn_gets_them(tmp_path):
    StudyStore(tmp_path, SPEC).close()
    storage = optuna.storages.RDBStorage(f"sqlite:///{tmp_path / 'study.sqlite'}")
    optuna.load_study(storage=storage, study_name=SPEC.name).ask()
    storage.engine.dispose()
    jobs = Jobs(epochs=3)
    start(tmp_path, jobs)
    assert [values.keys() for *_, values in results(tmp_path)] == [{"quality"}] * 4
    assert len(set(jobs.made)) == len(jobs.made) == 4


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_kill_amid_the_draws_of_a_trial_changes_none_of_them(tmp_path, monkeypatch, sampler):
    one = FloatRange(low=0.0, high=1.0, log=False, step=None)
    spec = replace(SPEC, parameters=dict.fromkeys("abc", one), sampler=SamplerSpec(kind=sampler))
    with StudyStore(tmp_path / "unharmed", spec) as store:
        expected = store.trial(store.ask()).values
    draw, drawn = search.store._suggest, list[str]()

    def killed_at_third(trial: Any, name: str, parameter: Parameter) -> None:
        drawn.append(name)
        if len(drawn) == 3:
            raise Killed
        draw(trial, name, parameter)

    monkeypatch.setattr(search.store, "_suggest", killed_at_third)
    with StudyStore(tmp_path / "killed", spec) as store, pytest.raises(Killed):
        store.ask()
    with StudyStore(tmp_path / "killed", spec) as store:
        assert store.complete(0).values == expected


@pytest.mark.parametrize(
    ("full", "words"), [(False, "does not answer; waiting"), (True, "cannot go on now; waiting")]
)
def test_a_server_that_is_away_for_a_while_is_waited_for_and_that_is_said(
    tmp_path, unharmed, full, words
):
    jobs = Jobs(epochs=3)
    jobs.away, jobs.full = 3, full
    said = start(tmp_path, jobs)
    assert sum(f"the job server {words}" in line for line in said) == 1
    assert results(tmp_path) == unharmed[0]


def test_a_server_that_has_no_room_for_further_trials_now_is_waited_for(tmp_path, unharmed):
    class Limited(Jobs):
        refusals, least = 0, 0  # it takes so many trials before it refuses some

        def submit(self, spec: JobSpec) -> JobStatus:
            if len(self.made) >= self.least and self.refusals < 3:
                self.refusals += 1
                raise BadRequest("min_pods: 1 pods are more than the cluster has: 0 fit")
            return super().submit(spec)

    jobs = Limited(epochs=3)
    jobs.least = 2
    said = start(tmp_path, jobs)
    assert sum("refuses a trial now; waiting: min_pods: 1" in line for line in said) == 1
    assert results(tmp_path) == unharmed[0]
    first = Limited(epochs=3)
    first.least = 0
    with pytest.raises(BadRequest):
        start(tmp_path / "refused from the beginning", first)


def test_of_a_trial_that_waits_it_is_said_once_why(tmp_path, monkeypatch):
    class Waiting(Jobs):
        def status(self, job_id: str) -> JobStatus:
            waits = {"state": JobState.WAITING, "reason": "no job client has the folder 'f'"}
            return replace(super().status(job_id), **waits)  # type: ignore[arg-type]

    clock, said = [0.0], list[str]()
    monkeypatch.setattr("search.run.time", SimpleNamespace(monotonic=lambda: clock[0]))
    with StudyStore(tmp_path, replace(SPEC, parallel=1)) as store:
        search = Search(SPEC, store, Waiting(epochs=100))
        for _ in range(6):
            search.step(said.append)
            clock[0] += 4.0
    (told,) = [line for line in said if "submitted" not in line and line.startswith("trial 0")]
    assert told == "trial 0: waits: no job client has the folder 'f'"


def test_promising_trials_may_have_more_pods(tmp_path):
    jobs = Jobs(epochs=100)
    spec = study(
        parameters={"quality": Choice(choices=(0.2, 0.8))}, trials=2, epochs=100, seed=1,
        pruner=PrunerSpec(kind="none"),
    )  # fmt: skip
    with StudyStore(tmp_path, spec) as store:
        search = Search(spec, store, jobs, look_s=0.0)
        for _ in range(4):
            search.step(lambda line: None)
    values = {name: jobs.known[name].spec.args[-1] for name in jobs.made}
    assert sorted(values.values()) == ["0.2", "0.8"], "the seed draws both"
    assert {values[name]: most for name, most in jobs.most.items()} == {"0.2": 1, "0.8": 3}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"metric": "loss"}, "the study was begun with another folder, parameters, metric"),
        ({"trials": 5, "parallel": 3, "max_pods": 2, "priority": 1}, None),
    ],
)
def test_what_would_make_trials_unlike_is_refused_and_the_rest_may_change(
    tmp_path, change: dict[str, Any], says: str | None
):
    StudyStore(tmp_path, SPEC).close()
    make: Callable[[], StudyStore] = lambda: StudyStore(tmp_path, replace(SPEC, **change))  # noqa: E731
    if says is None:
        make().close()
    else:
        with pytest.raises(ConfigError, match=says):
            make()


def test_a_study_that_was_begun_before_choices_were_kept_as_written_goes_on(tmp_path):
    text = (
        "name: a\nfolder: f\nmetric: accuracy\ndirection: maximize\ntrials: 4\nepochs: 3\n"
        "parameters: {quality: [0.20, 0.50, +2, on], split: [80:10, 70:20]}\n"
    )
    (tmp_path / "study.yaml").write_text(text)
    spec = read_study(tmp_path / "study.yaml")
    before: dict[str, Parameter] = {
        "quality": Choice(choices=(0.2, 0.5, 2, True)), "split": Choice(choices=(4810, 4220)),
    }  # fmt: skip
    with StudyStore(tmp_path / "old", replace(spec, parameters=before)) as store:
        store.ask()
    with StudyStore(tmp_path / "old", spec) as store:
        store.ask()
        drawn = [trial.values for trial in store.trials()]
    assert {type(each["split"]) for each in drawn} == {int}
    with StudyStore(tmp_path / "new", spec) as store:
        store.ask()
    with StudyStore(tmp_path / "new", spec) as store:
        store.ask()
        assert {trial.values["split"] for trial in store.trials()} <= {"80:10", "70:20"}
    (tmp_path / "study.yaml").write_text(text.replace("0.50", "0.60"))
    with pytest.raises(ConfigError, match="the study was begun with another folder, parameters"):
        StudyStore(tmp_path / "old", read_study(tmp_path / "study.yaml"))


@pytest.mark.parametrize("name", ["a?b", "feature%2Fcells", "100%", "{run}", "a#b", "a b", "ü"])
def test_a_study_is_kept_in_its_folder_whatever_that_is_called(tmp_path, name):
    with StudyStore(tmp_path / name, SPEC) as store:
        assert store.ask() == 0
    with StudyStore(tmp_path / name, SPEC) as store:
        assert len(store.trials()) == 1
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name / "study.sqlite").stat().st_size


def test_one_search_at_a_time_has_a_study(tmp_path):
    with StudyStore(tmp_path, SPEC), pytest.raises(ConfigError, match="another `edl search` runs"):
        StudyStore(tmp_path, SPEC)
    with (
        no_file_locks(),
        pytest.raises(ConfigError, match=r"cannot be locked .*; name a folder on"),
    ):
        StudyStore(tmp_path, SPEC)
    StudyStore(tmp_path, SPEC).close()


def test_a_job_that_somebody_deletes_is_a_failed_trial_and_is_not_started_again(tmp_path):
    jobs = Jobs(epochs=3)
    with StudyStore(tmp_path, SPEC) as store:
        search = Search(SPEC, store, jobs, look_s=0.0)
        search.step(lambda line: None)
        del jobs.known[jobs.made[0]]
        search.step(lambda line: None)
        assert store.trials()[0].why == GONE
    start(tmp_path, jobs)
    assert len(set(jobs.made)) == len(jobs.made) == 4


def test_a_job_server_that_knows_no_arguments_is_refused_and_trains_nothing(tmp_path):
    class OldJobs(Jobs):
        def submit(self, spec: JobSpec) -> JobStatus:
            return super().submit(replace(spec, args=()))

    jobs = OldJobs(epochs=3)
    with pytest.raises(Rejected, match="no arguments: it is of a version before; start it again"):
        start(tmp_path, jobs)
    assert [each.state for each in jobs.known.values()] == [JobState.STOPPED]


def test_a_study_whose_first_trials_all_fail_ends(tmp_path):
    jobs = Jobs(epochs=3)
    spec = study(metric="recall", trials=40, parallel=1)
    start(tmp_path, jobs, replace(spec, parameters=SPEC.parameters))
    assert len(jobs.made) == 3


def test_a_study_whose_disk_is_full_waits_until_there_is_room(tmp_path, unharmed):
    jobs, said = Jobs(epochs=3), list[str]()
    with StudyStore(tmp_path, SPEC) as store, contextlib.ExitStack() as full:

        def say(line: str) -> None:
            said.append(line)
            if line.startswith("trial 0: submitted"):
                full.enter_context(nothing_writable())
            elif "cannot be kept" in line:
                full.close()

        Search(SPEC, store, jobs, look_s=0.0).run(lambda progress: None, say)
    assert any("the study cannot be kept now; waiting: " in line for line in said), said
    assert results(tmp_path) == unharmed[0]
    assert len(jobs.made) == len(set(jobs.made)) == SPEC.trials


def test_a_study_that_cannot_be_kept_from_the_start_is_refused_with_the_reason(tmp_path):
    with nothing_writable(), pytest.raises(ConfigError, match="cannot be kept there: "):
        StudyStore(tmp_path, SPEC)
    StudyStore(tmp_path, SPEC).close()
    (tmp_path / "study.sqlite").write_bytes(b"no database" * 1000)
    with pytest.raises(ConfigError, match="cannot be kept there: file is not a database"):
        StudyStore(tmp_path, SPEC)
