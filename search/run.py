"""Run a study: make the storage and the job server agree, pass by pass, until all trials are over.

Nothing that counts is kept between two passes. So a pass after a kill, of this process or of the
server, is like any other.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from optuna.exceptions import StorageInternalError

from job_server.api.errors import (
    BadRequest,
    Conflict,
    NotFound,
    Rejected,
    Retryable,
    ServerAway,
    Unauthorized,
)
from job_server.api.wire import JobSpec, JobStatus, Sharing
from search.decide import (
    Ask,
    Finish,
    Release,
    Report,
    Stop,
    Submit,
    Trial,
    TrialState,
    free_places,
    is_over,
    next_actions,
    promising,
    share_out,
)
from search.store import StudyStore, cause_of
from search.study_file import StudySpec
from search.text import values_text, why_it_waits

logger = logging.getLogger(__name__)

LOOK_S = 1.0  # between two passes
_SETTLE_S = 30.0  # for which a trial whose pods have changed gives none to better ones
_AWAY_S = 10.0  # how often it is said that the server is away, or the study's disk full
_WAITS_S = 10.0  # after which it is said of a trial that it waits, and why


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What there is to show after a pass."""

    trials: Sequence[Trial]
    jobs: Mapping[int, JobStatus]


class JobApi(Protocol):
    """What a search asks of a job server, as of ApiClient."""

    def status(self, job_id: str) -> JobStatus: ...

    def submit(self, spec: JobSpec) -> JobStatus: ...

    def stop(self, job_id: str, *, discard: bool = False) -> JobStatus: ...

    def resize(self, job_id: str, pods: int) -> JobStatus: ...

    def sharing(self) -> Sharing: ...


class Search:
    """A study that is run on a job server."""

    def __init__(
        self,
        spec: StudySpec,
        store: StudyStore,
        api: JobApi,
        *,
        look_s: float = LOOK_S,
        read_token: Callable[[], None] = lambda: None,
    ) -> None:
        """Make no pass yet.

        Args:
            look_s: between two passes.
            read_token: has `api` show the token that the server has by now.
        """
        self._spec, self._store, self._api, self._look_s = spec, store, api, look_s
        self._read_token = read_token
        self._resized_at: dict[int, float] = {}  # trial -> when; a change of pods has its cost
        self._waits_since: dict[int, float] = {}  # trial -> when; infinite: that it waits is said

    def run(self, show: Callable[[Progress], None], say: Callable[[str], None]) -> None:
        """Run the study to its end.

        Args:
            show: called after each pass.
            say: called with a line when something happens.

        Raises:
            Rejected: the server refuses the first trials, or this search, from the beginning, or is
                of a version before; the text says why.
        """
        silent_until, is_known = 0.0, False
        while True:
            try:
                progress = self.step(say)
            except (Retryable, StorageInternalError, Unauthorized, BadRequest) as error:
                if isinstance(error, Unauthorized | BadRequest) and not is_known:
                    raise
                if isinstance(error, Unauthorized):
                    self._read_token()  # the server may have been started again with another one
                # Nothing is known, or can be kept, meanwhile: so nothing is decided.
                if time.monotonic() >= silent_until:
                    say(_waits_for(error))
                    silent_until = time.monotonic() + _AWAY_S
            else:
                silent_until, is_known = 0.0, True
                show(progress)
                if is_over(self._spec, progress.trials):
                    return
                if free_places(self._spec, progress.trials):
                    continue  # before the server gives what has become free to others for a moment
            time.sleep(self._look_s)

    def step(self, say: Callable[[str], None]) -> Progress:
        """Make one pass; raises as `run`, and what `run` waits out.

        Raises:
            Retryable: the server is away.
            StorageInternalError: the study's file cannot be read or written.
        """
        trials = self._store.trials()
        jobs = self._jobs(trials)
        asked: list[int] = []
        for action in next_actions(self._spec, trials, jobs):
            match action:
                case Ask():
                    asked.append(self._store.ask())
                case Submit(number=number):
                    self._submit(number, say)
                case Report():
                    self._report(action, say)
                case Finish(number=number, state=state, value=value, why=why):
                    self._store.finish(number, state, value, why)
                    ended = f"{state.value}: {value:g}" if value is not None else why
                    say(f"trial {number}: {ended}")
                case Stop(number=number):
                    self._stop(number)
                case Release(number=number):
                    self._store.note_released(number)
        for number in asked:  # together: the first of them would have all slots until others come
            self._submit(number, say)
        trials = self._store.trials()
        self._tell_waiting(trials, jobs, say)
        if self._spec.weigh and self._spec.max_pods > self._spec.min_pods:
            self._share_out(trials)
        return Progress(trials=trials, jobs=jobs)

    def _jobs(self, trials: Sequence[Trial]) -> dict[int, JobStatus]:
        found = {}
        for trial in trials:
            if not trial.released:
                job = self._find(trial.number)
                if job is not None:
                    found[trial.number] = job
        return found

    def _find(self, number: int) -> JobStatus | None:
        try:
            return self._api.status(self._store.job_id(number))
        except NotFound:
            return None

    def _submit(self, number: int, say: Callable[[str], None]) -> None:
        """Submit a trial's job; one that is there already is its own, by its name."""
        trial = self._store.complete(number)
        job_id = self._store.job_id(number)
        wanted = self._spec.job(job_id, trial.values)
        try:
            job = self._api.submit(wanted)
        except Conflict:  # such as one that was submitted with another max
            found = self._find(number)
            if found is None:
                raise
            job = found
        if job.spec.args != wanted.args:
            self._stop(number)
            raise Rejected(
                f"{job_id}: the job server has given it no arguments: it is of a version before; "
                "start it again with this one"
            )
        self._store.note_submitted(number)
        say(f"trial {number}: submitted as {job_id}: {values_text(trial.values)}")

    def _report(self, report: Report, say: Callable[[str], None]) -> None:
        pruned = self._store.report(report.number, report.epochs, report.value)
        if pruned and report.may_prune:
            # First in the storage: a kill between the two leaves a job that the next pass stops.
            self._store.finish(report.number, TrialState.PRUNED)
            say(
                f"trial {report.number}: pruned after {report.epochs} of {self._spec.epochs} "
                f"epochs, {self._spec.metric} {report.value:g}"
            )
            self._stop(report.number)

    def _stop(self, number: int) -> None:
        """Free the trial's trainers at once: nobody needs the state of one that is over."""
        try:
            self._api.stop(self._store.job_id(number), discard=True)
        except NotFound:
            self._store.note_released(number)
        except Conflict as error:  # it has ended, or cannot be stopped now: the next pass looks
            logger.info("trial %d: not stopped: %s", number, error)

    def _tell_waiting(
        self, trials: Sequence[Trial], jobs: Mapping[int, JobStatus], say: Callable[[str], None]
    ) -> None:
        """Say once of a trial why it waits: it may for ever, as for a folder that no client has."""
        now = time.monotonic()
        for trial in trials:
            why = why_it_waits(trial, jobs.get(trial.number))
            if why is None:
                self._waits_since.pop(trial.number, None)
            elif now >= self._waits_since.setdefault(trial.number, now) + _WAITS_S:
                self._waits_since[trial.number] = math.inf
                say(f"trial {trial.number}: waits: {why}")

    def _share_out(self, trials: Sequence[Trial]) -> None:
        running = [t.number for t in trials if t.state is TrialState.RUNNING and t.submitted]
        numbers = {self._store.job_id(number): number for number in running}
        sharing = self._api.sharing()
        better = promising(
            trials, maximize=self._spec.maximize, min_epochs=self._spec.pruner.min_epochs
        )
        wanted = share_out(
            running, better, pods_for(sharing, set(numbers)),
            self._spec.min_pods, self._spec.max_pods,
        )  # fmt: skip
        # Those that give come first, so that what they give is free for the others.
        known = {numbers[job.job_id]: job.max_pods for job in sharing.jobs if job.job_id in numbers}
        now = time.monotonic()
        for number in sorted(known, key=lambda each: wanted[each] - known[each]):
            settled = now - self._resized_at.get(number, float("-inf")) >= _SETTLE_S
            if wanted[number] > known[number] or (wanted[number] < known[number] and settled):
                try:
                    self._api.resize(self._store.job_id(number), wanted[number])
                except Rejected as error:  # it has just ended
                    logger.info("trial %d: not resized: %s", number, error)
                self._resized_at[number] = now


def _waits_for(error: Exception) -> str:
    if isinstance(error, ServerAway) and error.answers:
        return f"the job server cannot go on now; waiting: {error}"
    if isinstance(error, Retryable):
        return f"the job server does not answer; waiting: {error}"
    if isinstance(error, Unauthorized):
        return f"the job server has another token; waiting until it is in its file: {error}"
    if isinstance(error, BadRequest):  # such as for the limits of `edl capacity`
        return f"the job server refuses a trial now; waiting: {error}"
    return f"the study cannot be kept now; waiting: {cause_of(error)}"


def pods_for(sharing: Sharing, job_ids: set[str]) -> int:
    """Return how many pods of one slot these jobs can have together, as others hold the rest."""
    slots = 0
    for node in sharing.nodes:
        if node.alive:
            free = node.slots - node.used_others
            slots += free if node.limit is None else min(free, node.limit)
    return slots - sum(
        job.pods * job.slots_per_pod for job in sharing.jobs if job.job_id not in job_ids
    )
