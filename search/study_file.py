"""Read a study from a YAML file. It imports no Optuna: a wrong file is named without it, too."""

import contextlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from job_server.api.amounts import cores, megabytes, seconds
from job_server.api.errors import ConfigError
from job_server.api.wire import TRAIN_LOSS, USUAL_SPARES, JobSpec, WireError, check_id, check_range
from job_server.api.yaml_text import Written, load_yaml

MAX_NAME_CHARS = 60  # of a study: its jobs' names are longer
_PARAMETER = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,99}\Z")

Value = float | int | str | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatRange:
    """All numbers from low to high, or those at steps from low on."""

    low: float
    high: float
    log: bool = False  # as many trials between 0.01 and 0.1 as between 0.1 and 1
    step: float | None = None  # None: any number


@dataclass(frozen=True, slots=True, kw_only=True)
class IntRange:
    """All whole numbers from low to high, or those at steps from low on."""

    low: int
    high: int
    log: bool = False
    step: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of several values that have no order."""

    choices: tuple[Value, ...]


Parameter = FloatRange | IntRange | Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSpec:
    """How parameters are drawn."""

    kind: str = "tpe"  # or random
    startup_trials: int = 10  # tpe: so many are drawn at random before


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunerSpec:
    """Which trials end early."""

    kind: str = "median"  # or none, halving, hyperband
    startup_trials: int = 5  # median: so many trials are complete before any is pruned
    min_epochs: int = 1  # none is pruned sooner
    reduction: int = 3  # halving, hyperband: of so many trials one goes on


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySpec:
    """What a user asks for."""

    name: str
    folder: str  # of the clients' --jobs_dir
    parameters: Mapping[str, Parameter]
    metric: str  # that the script gives to loop.log
    maximize: bool
    trials: int  # in all; those that fail count
    parallel: int  # at most so many at a time
    epochs: int  # of each; the script gets it as --epochs
    min_pods: int = 1
    max_pods: int = 1
    cpu_milli: int = 0
    memory_mb: int = 0
    priority: int = 0
    user: str = ""
    max_run_time_s: float | None = None  # of a trial; None: any
    sampler: SamplerSpec = field(default_factory=SamplerSpec)
    seed: int = 0
    pruner: PrunerSpec = field(default_factory=PrunerSpec)
    weigh: bool = True  # promising trials may have more trainers

    def job(self, job_id: str, values: Mapping[str, Value]) -> JobSpec:
        """Return the job of a trial with these values.

        Raises:
            WireError: no job can be so.
        """
        args = [word for name, value in values.items() for word in _argument(name, as_text(value))]
        return JobSpec(
            job_id=job_id,
            folder=self.folder,
            args=("--epochs", str(self.epochs), *args),
            share=True,
            min_pods=self.min_pods,
            max_pods=self.max_pods,
            cpu_milli=self.cpu_milli,
            memory_mb=self.memory_mb,
            priority=self.priority,
            user=self.user,
            max_run_time_s=self.max_run_time_s,
            spares=USUAL_SPARES,
        )

    def fixed_part(self) -> str:
        """Return what must stay as it is while a study goes on: else its trials do not compare."""
        parameters = sorted(self.parameters.items())
        return repr((self.folder, parameters, self.metric, self.maximize, self.epochs))

    def as_before(self) -> "StudySpec":
        """Return the study as it was read when choices were not kept as they are written."""
        read: dict[str, Parameter] = {}
        for name, each in self.parameters.items():
            if isinstance(each, Choice):
                values = (v.read if isinstance(v, Written) else v for v in each.choices)
                each = Choice(choices=tuple(values))
            read[name] = each
        return replace(self, parameters=read)


def as_text(value: Value) -> str:
    """Return a value as an argument of a script."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _argument(name: str, text: str) -> tuple[str, ...]:
    """Return the words by which a script gets a value.

    One that begins with `-` stands in the same word: argparse takes `-1e-05` for an option.
    """
    return (f"--{name}={text}",) if text.startswith("-") else (f"--{name}", text)


def _number(value: object) -> object:
    """Return the number that a choice is, if it is one, and else the choice."""
    if isinstance(value, Written) and not isinstance(value.read, bool):
        for read in (int, float):  # 010 is 10 to people and scripts, if not to YAML
            with contextlib.suppress(ValueError):
                return read(value)
        return value.read
    return value


def read_study(path: Path) -> StudySpec:
    """Return the study of a file.

    Raises:
        ConfigError: it cannot be read, or a key or value is wrong; the text names it.
    """
    reader = _Reader(str(path), _load(path))
    spec = reader.study()
    try:
        spec.job(f"{spec.name}-0000-0", {})
    except WireError as error:
        raise reader.wrong(
            "", str(error).replace("min_pods", "min").replace("max_pods", "max")
        ) from None
    return spec


def _load(path: Path) -> dict[str, Any]:
    try:
        data = load_yaml(path.read_text(encoding="utf-8"), lists=None)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    except WireError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected fields of a study, such as 'name: cells'")
    return data


class _Reader:
    """Takes keys out of a mapping; what is left at its end is not known."""

    def __init__(self, file: str, data: Mapping[str, Any], at: str = "") -> None:
        self._file, self._data, self._at = file, {str(key): data[key] for key in data}, at
        self._known: list[str] = []

    def wrong(self, key: str, text: str) -> ConfigError:
        where = f"{self._at}{key}"
        return ConfigError(f"{self._file}: {where}: {text}" if where else f"{self._file}: {text}")

    def study(self) -> StudySpec:
        name = self.text("name")
        try:
            check_id("name", name)
            check_range("name: its characters", len(name), 1, MAX_NAME_CHARS)
        except WireError as error:
            raise self.wrong("", str(error)) from None
        resources = self.part("resources")
        milli = resources.amount("cpu", cores)
        memory = resources.amount("memory", megabytes)
        resources.end("a trainer has one slot, which is a GPU where the node has any")
        time = self.amount("max_run_time", seconds)
        epochs = self.whole("epochs", 1)
        spec = StudySpec(
            name=name,
            folder=self.text("folder"),
            parameters=self.parameters(),
            metric=self.metric(),
            maximize=self.one_of("direction", ("maximize", "minimize")) == "maximize",
            trials=self.whole("trials", 1),
            parallel=self.whole("parallel", 1, 2),
            epochs=epochs,
            min_pods=self.whole("min", 1, 1),
            max_pods=self.whole("max", 1, 1),
            cpu_milli=0 if milli is None else int(milli),
            memory_mb=0 if memory is None else int(memory),
            priority=self.whole("priority", -1000, 0),
            user=self.text("user", ""),
            max_run_time_s=time,
            sampler=self.sampler(),
            seed=self.whole("seed", 0, 0, most=2**63 - 1),
            pruner=self.pruner(epochs),
            weigh=self.flag("weigh", True),
        )
        self.end()
        return spec

    def metric(self) -> str:
        name = self.text("metric")
        if name == TRAIN_LOSS:
            raise self.wrong(
                "metric",
                f"{name} is the loss of a batch; name one of a validation set that the script "
                "gives to loop.log",
            )
        return name

    def parameters(self) -> dict[str, Parameter]:
        given = self.take("parameters")
        if not isinstance(given, dict) or not given:
            raise self.wrong(
                "parameters",
                "expected names with ranges, such as 'lr: {low: 0.01, high: 1, log: true}'",
            )
        found: dict[str, Parameter] = {}
        for name, value in given.items():
            if not isinstance(name, str) or not _PARAMETER.match(name):
                raise self.wrong(
                    "parameters",
                    f"{name!r} is no name of an argument; use letters, digits, '_' and '-'",
                )
            if name == "epochs":
                raise self.wrong(
                    "parameters.epochs",
                    "every trial gets --epochs from the key epochs; leave this one out",
                )
            found[name] = self._parameter(f"parameters.{name}", value)
        return found

    def _parameter(self, key: str, value: object) -> Parameter:
        if isinstance(value, list):
            return self._choice(key, value)
        if not isinstance(value, dict):
            raise self.wrong(key, f"expected a list of choices, or low and high, got {value!r}")
        part = _Reader(self._file, value, f"{self._at}{key}.")
        kinds = ("float", "int", "categorical")
        usual = "categorical" if "choices" in value else "float"
        bounds = (value.get("low"), value.get("high"))
        if "type" not in value and all(isinstance(each, int) for each in bounds):
            raise part.wrong("type", "missing: is it int or float from low to high?")
        kind = part.one_of("type", kinds, usual)
        if kind == "categorical":
            choices = part.take("choices")
            part.end()
            if not isinstance(choices, list):
                raise part.wrong("choices", f"expected a list, got {choices!r}")
            return self._choice(f"{key}.choices", choices)
        low, high = part.number("low"), part.number("high")
        log, step = part.flag("log", False), part.number("step", None)
        part.end()
        if not low < high:
            raise self.wrong(key, f"low must be below high, got {low:g} and {high:g}")
        if log and low <= 0:
            raise part.wrong("low", f"must be above 0 with log, got {low:g}")
        if log and step is not None:
            raise part.wrong("step", "means nothing with log; leave out one of them")
        if step is not None and not 0 < step <= high - low:
            raise part.wrong("step", f"must be above 0 and at most high - low, got {step:g}")
        if kind == "float":
            return FloatRange(low=low, high=high, log=log, step=step)
        for name, number in (("low", low), ("high", high), ("step", step or 1)):
            if number != int(number):
                raise part.wrong(name, f"expected a whole number for type int, got {number:g}")
        return IntRange(low=int(low), high=int(high), log=log, step=int(step or 1))

    def _choice(self, key: str, choices: Sequence[object]) -> Choice:
        found: list[Value] = []
        for each in choices:
            if not isinstance(each, (str, int, float)) or (
                isinstance(each, float) and not math.isfinite(each)
            ):
                raise self.wrong(key, f"expected texts, numbers, true or false, got {each!r}")
            if any(as_text(each) == as_text(other) for other in found):
                raise self.wrong(key, f"{as_text(each)!r} comes twice")
            # To Python and to Optuna: the second would never be tried; or to a script: it would be
            # tried twice.
            if any(_number(each) == _number(other) for other in found):
                raise self.wrong(
                    key,
                    f"{as_text(each)!r} equals another choice, as 1, 1.0 and true do: write it as "
                    "a text, in quotes",
                )
            found.append(each)
        if len(found) < 2:
            raise self.wrong(key, "expected two choices at least; a fixed value goes into train.sh")
        return Choice(choices=tuple(found))

    def sampler(self) -> SamplerSpec:
        part = self.part("sampler", "kind")
        kind = part.one_of("kind", ("tpe", "random"), "tpe")
        made = SamplerSpec(kind=kind)
        if kind == "tpe":
            made = SamplerSpec(kind=kind, startup_trials=part.whole("startup_trials", 1, 10))
        part.end(f"those of sampler {kind}")
        return made

    def pruner(self, epochs: int) -> PrunerSpec:
        part = self.part("pruner", "kind")
        kind = part.one_of("kind", ("median", "halving", "hyperband", "none"), "median")
        made = PrunerSpec(kind=kind)
        if kind == "median":
            made = PrunerSpec(
                kind=kind,
                startup_trials=part.whole("startup_trials", 0, 5),
                min_epochs=part.whole("min_epochs", 1, 1),
            )
        elif kind in ("halving", "hyperband"):
            made = PrunerSpec(
                kind=kind,
                min_epochs=part.whole("min_epochs", 1, 1),
                reduction=part.whole("reduction", 2, 3),
            )
        part.end(f"those of pruner {kind}")
        if made.min_epochs > epochs:
            raise self.wrong(
                "pruner", f"would prune only after more epochs than a trial has, {epochs}"
            )
        return made

    # --- one key

    def take(self, key: str, *default: Any) -> Any:
        self._known.append(key)
        if key not in self._data:
            if not default:
                raise self.wrong(key, "missing")
            return default[0]
        return self._data.pop(key)

    def part(self, key: str, only: str = "") -> "_Reader":
        """Return a reader of the mapping at `key`; a text there is the value of its key `only`."""
        given = self.take(key, {})
        if only and isinstance(given, str):
            given = {only: given}
        if not isinstance(given, dict):
            raise self.wrong(key, f"expected fields, got {given!r}")
        return _Reader(self._file, given, f"{self._at}{key}.")

    def text(self, key: str, *default: str) -> str:
        value = self.take(key, *default)
        if not isinstance(value, str) or not (value or default):
            raise self.wrong(key, f"expected a text, got {value!r}")
        return value

    def one_of(self, key: str, known: Sequence[str], *default: str) -> str:
        value = self.take(key, *default)
        if value is None:  # YAML's own word for nothing is no text
            value = "none"
        if value not in known:
            raise self.wrong(key, f"expected one of {', '.join(known)}, got {value!r}")
        return str(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.take(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, f"expected true or false, got {value!r}")
        return value

    def number(self, key: str, *default: float | None) -> Any:
        value = self.take(key, *default)
        if value is None and default:
            return None
        try:  # YAML reads 1e-4 as a text
            number = float(value) if not isinstance(value, bool) else math.nan
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise self.wrong(key, f"expected a number, got {value!r}")
        return number

    def whole(self, key: str, low: int, *default: int, most: int = 10**6) -> int:
        value = self.take(key, *default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= most:
            raise self.wrong(key, f"expected a whole number of {low} to {most}, got {value!r}")
        return value

    def amount(self, key: str, read: Callable[[str], float]) -> float | None:
        value = self.take(key, None)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise self.wrong(key, f"expected a number or a text, got {value!r}")
        try:
            return read(str(value))
        except ValueError as error:
            raise self.wrong(key, str(error)) from None

    def end(self, more: str = "") -> None:
        """Refuse keys that nobody has taken."""
        for key in self._data:
            known = ", ".join(self._known)
            raise ConfigError(
                f"{self._file}: unknown key {f'{self._at}{key}'!r}; known: {known}"
                + (f"; {more}" if more else "")
            )
