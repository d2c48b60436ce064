"""Read a job from a YAML file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from job_server.api.amounts import cores, megabytes, seconds
from job_server.api.codec import Message, WireError, encode
from job_server.api.errors import ConfigError
from job_server.api.failure_policy import FailureRule, read_policy_file, read_rules
from job_server.api.wire import HangLimits, JobSpec, ScriptSpec
from job_server.api.yaml_text import load_yaml

_SHORT = {"name": "job_id", "min": "min_pods", "max": "max_pods"}


def read_job_file(name: str) -> dict[str, Any]:
    """Return fields of a JobSpec, not yet checked but for their names; and `fault_tolerant: False`
    where the file says so, for `check_fixed_size` once the flags have been applied.

    Beside the fields' own names the file may have `name`, `min` and `max`, `resources` of a trainer
    (`cpu`, `memory`), `max_run_time` and `fault_tolerant`.

    Raises:
        ConfigError: the file cannot be read, or has a key that is not known.
    """
    data = _load(name)
    for short, field in _SHORT.items():
        _move(name, data, short, field)
    if "resources" in data:
        _read_resources(name, data)
    if "max_run_time" in data:
        _once(name, data, "max_run_time", "max_run_time_s")
        data["max_run_time_s"] = _value(name, "max_run_time", data.pop("max_run_time"), seconds)
    tolerant = "fault_tolerant" not in data or _read_fault_tolerant(name, data)
    if isinstance(data.get("after"), str):
        data["after"] = [data["after"]]
    if isinstance(data.get("args"), list):
        data["args"] = [_argument(name, value) for value in data["args"]]
    _check_keys(name, "", data, JobSpec, (*_SHORT, "resources", "max_run_time", "fault_tolerant"))
    if "script" in data:
        if not isinstance(data["script"], dict):
            raise ConfigError(
                f"--file: {name}: script: expected fields of a change script, such as "
                "'kind: walk'; what trains is train.sh in the job's folder"
            )
        _check_keys(name, "script.", data["script"], ScriptSpec)
    if "hang_limits" in data:
        if not isinstance(data["hang_limits"], dict):
            raise ConfigError(
                f"--file: {name}: hang_limits: expected fields, such as 'step_s: 120'"
            )
        _check_keys(name, "hang_limits.", data["hang_limits"], HangLimits)
    if "failure_policy" in data:
        data["failure_policy"] = encode(_failure_policy(name, data["failure_policy"]))
    return data if tolerant else data | {"fault_tolerant": False}


def _failure_policy(name: str, given: object) -> tuple[FailureRule, ...]:
    """Read a job's rules, which stand here or in a file that is named here, beside this one."""
    if isinstance(given, str):
        path = Path(name).parent / given
        return read_policy_file(f"--file: {name}: failure_policy", str(path))
    try:
        return read_rules(given)
    except WireError as error:
        raise ConfigError(f"--file: {name}: failure_policy: {error}") from None


def _load(name: str) -> dict[str, Any]:
    try:
        data = load_yaml(Path(name).read_text(encoding="utf-8"), lists=("args",))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--file: {name} cannot be read: {error}") from None
    except WireError as error:
        raise ConfigError(f"--file: {name}: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"--file: {name}: expected fields of a job, such as 'name: digits'")
    return data


def _read_resources(name: str, data: dict[str, Any]) -> None:
    given = data.pop("resources")
    known: dict[str, tuple[str, Callable[[str], float]]] = {
        "cpu": ("cpu_milli", cores),
        "memory": ("memory_mb", megabytes),
    }
    if not isinstance(given, dict):
        raise ConfigError(f"--file: {name}: resources: expected fields, such as 'memory: 2 GB'")
    for key, value in given.items():
        if key not in known:
            raise ConfigError(
                f"--file: {name}: unknown key {f'resources.{key}'!r}; known: {', '.join(known)}; "
                "a trainer has one slot, which is a GPU where the node has any"
            )
        field, read = known[key]
        _once(name, data, f"resources.{key}", field)
        data[field] = _value(name, f"resources.{key}", value, read)


def _read_fault_tolerant(name: str, data: dict[str, Any]) -> bool:
    """Without it the first failure ends the job; then it cannot change its size either."""
    tolerant = data.pop("fault_tolerant")
    if not isinstance(tolerant, bool):
        raise ConfigError(f"--file: {name}: fault_tolerant: expected true or false")
    if not tolerant:
        _once(name, data, "fault_tolerant", "max_failures")
        data["max_failures"] = 0
    return tolerant


def check_fixed_size(name: str, fields: dict[str, Any]) -> None:
    """Check the size of a job that tolerates no failure.

    Raises:
        ConfigError: it is not fixed.
    """
    least, most = fields.get("min_pods", 1), fields.get("max_pods", 1)
    if fields.get("max_failures") == 0 and least != most:
        raise ConfigError(
            f"--file: {name}: fault_tolerant: a job that tolerates no failure has a fixed size, "
            f"got min {least} and max {most}; give max the value of min, or leave out "
            "fault_tolerant"
        )


def _argument(name: str, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ConfigError(
            f"--file: {name}: args: expected texts and numbers, such as [--lr, 0.1], got "
            f"{value!r}; write another in quotes"
        )
    return str(value)


def _move(name: str, data: dict[str, Any], short: str, field: str) -> None:
    if short in data:
        _once(name, data, short, field)
        data[field] = data.pop(short)


def _once(name: str, data: dict[str, Any], short: str, field: str) -> None:
    if field in data:
        raise ConfigError(f"--file: {name}: {short} and {field} say the same; give one of them")


def _value(name: str, key: str, value: object, read: Callable[[str], float]) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ConfigError(f"--file: {name}: {key}: expected a number or a text, got {value!r}")
    try:
        return read(str(value))
    except ValueError as error:
        raise ConfigError(f"--file: {name}: {key}: {error}") from None


def _check_keys(
    name: str, prefix: str, data: dict[str, Any], kind: type[Message], also: tuple[str, ...] = ()
) -> None:
    # Messages may have unknown keys, of newer programs; in a file they are mistakes.
    known = kind.__struct_fields__
    for key in data:
        if key not in known:
            raise ConfigError(
                f"--file: {name}: unknown key {f'{prefix}{key}'!r}; "
                f"known: {', '.join((*also, *known))}"
            )
