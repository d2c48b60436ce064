"""Keep a study in its folder, by Optuna: an SQLite file with all trials, which outlives any kill.

Each change of a trial is one transaction of SQLite's. One `edl search` at a time has the folder:
it holds a lock, which ends with its process.
"""

import contextlib
import fcntl
import os
import secrets
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import optuna
from optuna.exceptions import StorageInternalError
from optuna.trial import TrialState as OptunaState
from sqlalchemy.exc import SQLAlchemyError

from job_server.api.errors import ConfigError
from search.decide import Trial, TrialState
from search.pruner import JUDGED, HalvingPruner
from search.study_file import (
    Choice,
    FloatRange,
    IntRange,
    Parameter,
    PrunerSpec,
    SamplerSpec,
    StudySpec,
)

_STATES = {
    OptunaState.RUNNING: TrialState.RUNNING,
    OptunaState.WAITING: TrialState.RUNNING,
    OptunaState.COMPLETE: TrialState.COMPLETE,
    OptunaState.PRUNED: TrialState.PRUNED,
    OptunaState.FAIL: TrialState.FAILED,
}
_TO_OPTUNA: Mapping[TrialState, OptunaState] = {
    TrialState.COMPLETE: OptunaState.COMPLETE,
    TrialState.PRUNED: OptunaState.PRUNED,
    TrialState.FAILED: OptunaState.FAIL,
}
_SEEDS = 4_294_000_079  # a prime below 2**32, beyond which numpy takes none
_ID, _FIXED = "edl_id", "edl_fixed"  # attributes of the study
_SUBMITTED, _RELEASED, _WHY = "edl_submitted", "edl_released", "edl_why"  # ... of a trial


class StudyStore:
    """The trials of a study; changes are on disk when a method returns."""

    def __init__(self, folder: Path, spec: StudySpec) -> None:
        """Open the study of a folder, or make it.

        Raises:
            ConfigError: another process has it, what is there is of another study, or the folder
                cannot be written.
        """
        self._spec = spec
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = (folder / "lock").open("a+")
        except OSError as error:
            raise ConfigError(f"{folder}: the study cannot be kept there: {error}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.seek(0)
            with self._lock as lock:
                text = f"another `edl search` runs this study (pid {lock.read(20)})"
            raise ConfigError(f"{folder}: {text}") from None
        except OSError as error:
            self._lock.close()
            text = f"it cannot be locked ({error.strerror}); name a folder on a local disk"
            raise ConfigError(f"{folder}: {text}") from None
        try:
            self._lock.truncate(0)
            self._lock.write(str(os.getpid()))
            self._lock.flush()
            self._open_study(folder, spec)
        except (OSError, SQLAlchemyError, StorageInternalError) as error:
            with contextlib.suppress(OSError):  # of what is not written yet
                self._lock.close()
            why = cause_of(error)
            raise ConfigError(f"{folder}: the study cannot be kept there: {why}") from None
        self._id = str(self._study.user_attrs[_ID])

    def _open_study(self, folder: Path, spec: StudySpec) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        file = folder.absolute() / "study.sqlite"
        # Not by its URL, in which some characters of a path mean something else.
        self._storage = optuna.storages.RDBStorage(
            "sqlite:///study.sqlite",
            engine_kwargs={"creator": lambda: sqlite3.connect(file, check_same_thread=False)},
        )
        self._study = optuna.create_study(
            storage=self._storage,
            study_name=spec.name,
            direction="maximize" if spec.maximize else "minimize",
            pruner=_pruner(spec.pruner, spec.epochs),
            load_if_exists=True,
        )
        known = self._study.user_attrs
        before = spec.as_before()
        if known.setdefault(_FIXED, spec.fixed_part()) == before.fixed_part():
            self._spec = before  # with the values that its trials have
        elif known[_FIXED] != spec.fixed_part():
            self.close()
            raise ConfigError(
                f"{folder}: the study was begun with another folder, parameters, metric, direction "
                "or epochs, and trials of both would not compare; put them back, or give the study "
                "another name"
            )
        self._study.set_user_attr(_FIXED, known[_FIXED])
        if _ID not in known:
            self._study.set_user_attr(_ID, secrets.token_hex(3))

    def close(self) -> None:
        self._storage.engine.dispose()
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def job_id(self, number: int) -> str:
        """Return the name of a trial's job, which no other study uses: neither its checkpoints."""
        return f"{self._spec.name}-{self._id}-{number}"

    def trials(self) -> list[Trial]:
        known = self._study.user_attrs
        return [_trial(each, known) for each in self._study.get_trials(deepcopy=False)]

    def trial(self, number: int) -> Trial:
        return self.trials()[number]

    def ask(self) -> int:
        """Draw the parameters of another trial; return its number."""
        # A sampler of its own for each trial: after a restart it goes on, and does not begin anew.
        number = len(self._study.get_trials(deepcopy=False))
        self._study.sampler = _sampler(self._spec.sampler, self._spec.seed, number)
        trial = self._study.ask()
        self._draw(trial)
        drawn: int = trial.number
        return drawn

    def complete(self, number: int) -> Trial:
        """Return a trial; draw what a kill has kept it from drawing."""
        known = self.trial(number)
        if known.values.keys() != self._spec.parameters.keys():
            self._study.sampler = _sampler(self._spec.sampler, self._spec.seed, number)
            self._draw(self._open(number))
        return self.trial(number)

    def _draw(self, trial: optuna.Trial) -> None:
        """Draw the parameters of a trial, in order; those that it has stay."""
        known, drawn = self.trial(trial.number).values, trial.distributions
        for name, parameter in self._spec.parameters.items():
            if name in known:  # what it has taken of the sampler's numbers, no other one may get
                frozen = self._study.get_trials(deepcopy=False)[trial.number]
                self._study.sampler.sample_independent(self._study, frozen, name, drawn[name])
            else:
                _suggest(trial, name, parameter)

    def report(self, number: int, epochs: int, value: float) -> bool:
        """Enter a value, the first one at a step; return whether the pruner ends the trial."""
        trial = self._open(number)
        if epochs not in self.trial(number).reports:
            trial.report(value, epochs)
        ends = bool(trial.should_prune())
        if not ends:
            trial.set_user_attr(JUDGED, max(self.trial(number).reports))
        return ends

    def finish(
        self, number: int, state: TrialState, value: float | None = None, why: str = ""
    ) -> None:
        """Enter how a trial ended. The first end of a trial counts."""
        if why:
            self._open(number).set_user_attr(_WHY, why[:1000])
        self._study.tell(number, value, state=_TO_OPTUNA[state], skip_if_finished=True)

    def note_submitted(self, number: int) -> None:
        self._open(number).set_user_attr(_SUBMITTED, True)

    def note_released(self, number: int) -> None:
        # Of the study, as Optuna changes no trial that has ended.
        self._study.set_user_attr(f"{_RELEASED}_{number}", True)

    def _open(self, number: int) -> optuna.Trial:
        return optuna.trial.Trial(self._study, self._trial_id(number))

    def _trial_id(self, number: int) -> int:
        study_id = self._storage.get_study_id_from_name(self._spec.name)
        found: int = self._storage.get_trial_id_from_study_id_trial_number(study_id, number)
        return found


def cause_of(error: BaseException) -> BaseException:
    """Return what an error of Optuna's came from, such as SQLite's, without the queries' text."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _trial(found: optuna.trial.FrozenTrial, of_study: Mapping[str, object]) -> Trial:
    state = _STATES[found.state]
    return Trial(
        number=found.number,
        state=state,
        values=found.params,
        reports=found.intermediate_values,
        value=found.value if state is TrialState.COMPLETE else None,
        why=str(found.user_attrs.get(_WHY, "")),
        judged=found.user_attrs.get(JUDGED, 0),
        submitted=_SUBMITTED in found.user_attrs,
        released=f"{_RELEASED}_{found.number}" in of_study,
    )


def _suggest(trial: optuna.Trial, name: str, parameter: Parameter) -> None:
    """Draw a value."""
    match parameter:
        case FloatRange(low=low, high=high, log=log, step=step):
            trial.suggest_float(name, low, high, log=log, step=step)
        case IntRange(low=whole_low, high=whole_high, log=log, step=whole_step):
            trial.suggest_int(name, whole_low, whole_high, log=log, step=whole_step)
        case Choice(choices=choices):
            trial.suggest_categorical(name, choices)


def _sampler(spec: SamplerSpec, seed: int, number: int) -> optuna.samplers.BaseSampler:
    """Return what draws the parameters of a trial."""
    seed = ((seed << 20) + number) % _SEEDS
    if spec.kind == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    return optuna.samplers.TPESampler(n_startup_trials=spec.startup_trials, seed=seed)


def _pruner(spec: PrunerSpec, epochs: int) -> optuna.pruners.BasePruner:
    match spec.kind:
        case "median":
            return optuna.pruners.MedianPruner(
                n_startup_trials=spec.startup_trials, n_warmup_steps=spec.min_epochs
            )
        case "halving" | "hyperband":
            return HalvingPruner(
                min_epochs=spec.min_epochs, reduction=spec.reduction, epochs=epochs,
                hyperband=spec.kind == "hyperband",
            )  # fmt: skip
        case _:
            return optuna.pruners.NopPruner()
