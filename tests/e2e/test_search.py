"""A search over real trainings: whatever is killed, no trial is lost and none counts twice."""

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from job_server.api.errors import ServerAway
from job_server.api.wire import JobState, JobStatus
from search.decide import Trial, TrialState
from search.study_file import read_study
from tests.e2e.test_shared_jobs import SharingCluster
from tests.support import ROOT, wait_until

pytest.importorskip("paddle", reason="trains with Paddle")
pytest.importorskip("optuna")
from search.store import StudyStore

PATIENCE_S = 300.0


class SearchingCluster(SharingCluster):
    """A node, its server, and `edl search` with a study of scored trainings."""

    def __init__(self, folder: Path, *, slots: int, trials: int, epochs: int) -> None:
        super().__init__(folder, slots=slots)
        home = self.home("scored")
        home.mkdir(parents=True)
        program = ROOT / "tests" / "e2e" / "scored_train.py"
        (home / "train.sh").write_text(
            f"exec {sys.executable} -m pod_runtime.launch --log_dir {home}/log/$PADDLE_POD_ID "
            f'{program} --checkpoint {home}/$PADDLE_JOB_ID "$@"\n'
        )
        self.study = folder / "study.yaml"
        self.study.write_text(
            f"name: scored\nfolder: scored\nmetric: accuracy\ndirection: maximize\n"
            f"trials: {trials}\nparallel: 2\nepochs: {epochs}\nmax: {slots}\nseed: 3\n"
            "sampler: random\npruner: {kind: median, startup_trials: 1, min_epochs: 1}\n"
            "parameters: {quality: {low: 0.1, high: 1}}\n"
        )
        self.search: subprocess.Popen[bytes] | None = None  # None: it does not run

    def start_search(self) -> None:
        self.search = self._spawn("search", [str(self.study), "--server", self.url])

    def said(self) -> str:
        return (self.folder / "search.log").read_text()

    def status_of_all(self) -> dict[str, JobStatus]:
        try:
            return {job.job_id: job for job in self.api().jobs()}
        except ServerAway:
            return {}

    def wait_steps_of_all(self, more: int) -> None:
        """Wait until the jobs together have made so many steps more, or the search is over."""
        begin = self._steps()
        wait_until(
            lambda: self._steps() >= begin + more or "\nbest: " in self.said(),
            PATIENCE_S, f"{more} steps: {self.logs}",
        )  # fmt: skip

    def _steps(self) -> int:
        return sum(job.step for job in self.status_of_all().values())

    def kill_one(self, name: str) -> None:
        """SIGKILL the search, the server, the client or a trainer; start again what was killed."""
        if name == "trainer":
            for process in self.trainers()[:1]:
                self.kill(process)
            return
        program = {"search": self.search, "server": self.server, "client": self.client}[name]
        assert program is not None
        self.kill(program)
        {
            "search": self.start_search,
            "server": self.start_server,
            "client": self.start_client,
        }[name]()

    def finish(self) -> list[Trial]:
        """Wait for the end of the search; return its trials."""
        assert self.search is not None
        assert self.search.wait(PATIENCE_S) == 0, self.logs()
        with StudyStore(self.folder / "scored.study", read_study(self.study)) as store:
            return store.trials()


@pytest.fixture
def make_cluster(tmp_path: Path) -> Iterator[type[SearchingCluster]]:
    made: list[SearchingCluster] = []

    class Made(SearchingCluster):
        def __init__(self, **options: int) -> None:
            super().__init__(tmp_path / "c", **options)
            made.append(self)
            self.start_server()
            self.start_client()
            wait_until(self._healthy, what="the server answers")
            self.start_search()

    yield Made
    for cluster in made:
        if cluster.search is not None and cluster.search.poll() is None:
            cluster.kill(cluster.search)
        cluster.stop()


def check(cluster: SearchingCluster, trials: list[Trial], *, count: int, epochs: int) -> None:
    """See that each trial is one job, and that its result is what its job's script logged."""
    assert [trial.number for trial in trials] == list(range(count)), cluster.said()
    jobs = cluster.status_of_all()
    assert len(jobs) == count, "each trial has one job"
    by_number = {int(name.rpartition("-")[2]): job for name, job in jobs.items()}
    for trial in trials:
        job = by_number[trial.number]
        quality = trial.values["quality"]
        assert job.spec.args[-1] == str(quality)
        assert isinstance(quality, float)
        for epoch, value in trial.reports.items():
            assert value == pytest.approx(quality / 2 ** (epochs - epoch))
        assert trial.state in (TrialState.COMPLETE, TrialState.PRUNED), cluster.logs()
        if trial.state is TrialState.COMPLETE:
            assert job.state is JobState.SUCCEEDED
            assert trial.value == pytest.approx(quality)
        events = [event.text for event in cluster.api().events(job.job_id, limit=1000)]
        assert events.count("submitted") == 1
        assert not job.pods, "it has given back its trainers"
    best = max((t for t in trials if t.value is not None), key=lambda trial: trial.value or 0)
    assert f"best: trial {best.number} " in cluster.said()


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_a_search_survives_the_kill_of_each_of_its_programs(make_cluster) -> None:
    cluster = make_cluster(slots=2, trials=3, epochs=4)
    for name in ("trainer", "search", "server", "client"):
        cluster.wait_steps_of_all(8)
        cluster.kill_one(name)
    check(cluster, cluster.finish(), count=3, epochs=4)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_long_search_survives_kills_at_random(make_cluster) -> None:
    cluster = make_cluster(slots=3, trials=16, epochs=8)
    draw = random.Random(7)
    while "\nbest: " not in cluster.said():
        cluster.wait_steps_of_all(draw.randrange(5, 120))
        if cluster.search.poll() is not None:
            break
        cluster.kill_one(draw.choice(("trainer", "search", "server", "client")))
    check(cluster, cluster.finish(), count=16, epochs=8)
