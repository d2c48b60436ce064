"""Say which pod changes fall due when. Pure: a script is a function of its spec and an index.

Times are on the job's script clock, which stands still while the job is paused or the server is
down; the state machine asks for change 0, 1, 2, ... and keeps the clock and the index.
"""

import csv
import functools
import math
import random
import re
from dataclasses import dataclass, field
from typing import Literal, Protocol

import yaml

from job_server.api.codec import WireError
from job_server.api.wire import JobSpec, ScriptKind, ScriptSpec, check_id

Action = Literal["set", "add", "remove", "kill"]

MAX_YAML_CHARS = 200_000  # PyYAML needs about a second for so much
MAX_REPEAT_TIMES = 1_000_000
_ACTIONS: tuple[tuple[str, Action], ...] = (
    ("pods", "set"),
    ("add", "add"),
    ("remove", "remove"),
    ("kill", "kill"),
)
_NUMBER = re.compile(r"\d+(?:\.\d+)?\Z", re.ASCII)
_DURATION = re.compile(
    r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?\Z", re.ASCII
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedChange:
    """One change; `at_s` never decreases from one to the next."""

    at_s: float  # on the script clock
    action: Action
    pods: int = 0  # of set, add, remove
    target: str = ""  # of kill: a pod id, or the digits of a rank
    text: str


class ChangeScript(Protocol):
    """Which changes fall due when."""

    def change(self, index: int) -> ScriptedChange | None:
        """Return the change with this 0-based index; None: the script ends before it."""


def parse_script(spec: ScriptSpec, job: JobSpec) -> ChangeScript:
    """Check `spec` wholly and return it as a script. Repeated calls with equal specs are cheap.

    Equal specs may share one script, which a walk extends as it is asked: not for several threads
    at once. The server asks under its lock.

    Raises:
        WireError: the text names the field, the line of a YAML or CSV text, and the remedy.
    """
    return _parse(spec, job.min_pods, job.max_pods, job.first_pods, job.slots_per_pod)


@functools.lru_cache(maxsize=256)
def _parse(
    spec: ScriptSpec, min_pods: int, max_pods: int, first_pods: int, slots_per_pod: int
) -> ChangeScript:
    match spec.kind:
        case ScriptKind.NONE:
            return _Listed(changes=())
        case ScriptKind.ALTERNATE:
            return _Alternate(spec.interval_s, spec.del_pods, spec.add_pods)
        case ScriptKind.TIMELINE:
            return _parse_timeline(spec.text, min_pods, max_pods)
        case ScriptKind.WALK:
            return _make_walk(spec, min_pods, max_pods, first_pods)
        case ScriptKind.TRACE:
            return _parse_trace(spec.text, min_pods, max_pods, slots_per_pod)


def timeline(
    spec: ScriptSpec, job: JobSpec, *, until_s: float | None = None, count: int = 50
) -> list[str]:
    """Return the script as lines for people: when, what, and how many pods there are then.

    Args:
        until_s: leave out what falls due later; None: no such limit.
        count: the most changes to show; a last line says when there are more.

    Raises:
        WireError: as parse_script.
    """
    script = (
        _parse.__wrapped__(  # a copy of its own: this may run in parallel with the state machine
            spec, job.min_pods, job.max_pods, job.first_pods, job.slots_per_pod
        )
    )
    pods = job.first_pods
    lines = [f"{_clock(0)}  start with {_pods(pods)}"]
    skipped = 0
    for index in range(count + 1):
        change = script.change(index)
        if change is None or (until_s is not None and change.at_s > until_s):
            lines += [] if index else ["no change is scripted"]
            return lines + _why_nothing(job, index, skipped)
        if index == count:
            break
        wanted = pods_after(change, pods)
        if not job.min_pods <= wanted <= job.max_pods:
            skipped += 1
            outcome = f"skipped: {wanted} is outside {job.min_pods} to {job.max_pods} pods"
        elif wanted == pods:
            outcome = _pods(pods)
        else:
            outcome = f"{pods} -> {_pods(wanted)}"
            pods = wanted
        lines.append(f"{_clock(change.at_s)}  {change.text}: {outcome}")
    lines.append(f"... and more; so far {count} of its changes")
    return lines + _why_nothing(job, count, skipped)


def _why_nothing(job: JobSpec, changes: int, skipped: int) -> list[str]:
    if not changes or skipped < changes:
        return []
    return [
        f"every change is skipped: this job may have {job.min_pods} to {_pods(job.max_pods)}; say "
        "more (`--max`; of the server's own job `--pod_num_of_node`)"
    ]


def pods_after(change: ScriptedChange, pods: int) -> int:
    """Return the pods that a job of `pods` is to have after the change."""
    match change.action:
        case "set":
            return change.pods
        case "add":
            return pods + change.pods
        case "remove":
            return pods - change.pods
        case "kill":
            return pods


@dataclass(frozen=True, slots=True)
class _Listed:
    """A finite list, which may be repeated."""

    changes: tuple[ScriptedChange, ...]
    every_s: float = 0.0
    times: int | None = 1  # how often the list runs in all; None: for ever

    def change(self, index: int) -> ScriptedChange | None:
        if not self.changes:
            return None
        turn, entry = divmod(index, len(self.changes))
        if self.times is not None and turn >= self.times:
            return None
        change = self.changes[entry]
        if turn == 0:
            return change
        return ScriptedChange(
            at_s=change.at_s + turn * self.every_s,
            action=change.action,
            pods=change.pods,
            target=change.target,
            text=change.text,
        )


@dataclass(frozen=True, slots=True)
class _Alternate:
    """The original's: remove, add, remove, ..., one change per interval, for ever."""

    interval_s: float
    del_pods: int
    add_pods: int

    def change(self, index: int) -> ScriptedChange | None:
        action: Action = "remove" if index % 2 == 0 else "add"
        pods = self.del_pods if action == "remove" else self.add_pods
        return ScriptedChange(
            at_s=(index + 1) * self.interval_s,
            action=action,
            pods=pods,
            text=f"{action} {_pods(pods)}",
        )


@dataclass(frozen=True, slots=True)
class _Walk:
    """A seeded walk by one pod per interval that turns at its bounds, for ever."""

    interval_s: float
    low: int
    high: int
    steps: random.Random
    path: list[int] = field(compare=False)  # path[i]: pods after change i-1; grows on demand

    def change(self, index: int) -> ScriptedChange | None:
        while len(self.path) < index + 2:
            here = self.path[-1]
            up = self.steps.random() < 0.5  # drawn at the bounds, too: one draw per index
            self.path.append(
                here + 1 if here == self.low or (up and here < self.high) else here - 1
            )
        pods = self.path[index + 1]
        return ScriptedChange(
            at_s=(index + 1) * self.interval_s,
            action="set",
            pods=pods,
            text=f"walk to {_pods(pods)}",
        )


def _make_walk(spec: ScriptSpec, min_pods: int, max_pods: int, first_pods: int) -> _Walk:
    low = max(spec.min_pods, min_pods)
    high = max_pods if spec.max_pods is None else spec.max_pods
    if high > max_pods:
        raise WireError(f"script.max_pods: {high} is more than the job's max_pods ({max_pods})")
    if high <= low:
        raise WireError(
            f"script.max_pods: a walk between {low} and {high} pods has nowhere to go; "
            "give a larger max_pods or a smaller min_pods"
        )
    first = min(max(first_pods, low), high)
    return _Walk(spec.interval_s, low, high, random.Random(spec.seed), [first])


# --- timeline: YAML -----------------------------------------------------------------------------


def _parse_timeline(text: str, min_pods: int, max_pods: int) -> _Listed:
    root = _compose(text)
    every_s, times, changes_node = 0.0, 1, root
    repeat: tuple[float, int | None] | None = None
    if isinstance(root, yaml.MappingNode):
        keys = _keys(root, ("changes", "repeat"))
        if "changes" not in keys:
            raise _wrong(root, "expected 'changes:' with a list of changes")
        changes_node = keys["changes"]
        if "repeat" in keys:
            repeat = _parse_repeat(keys["repeat"])
    if not isinstance(changes_node, yaml.SequenceNode):
        raise _wrong(changes_node, "expected a list of changes, such as '- {at: 90s, pods: 2}'")
    changes: list[ScriptedChange] = []
    for node in changes_node.value:
        change = _parse_change(node, min_pods, max_pods)
        if changes and change.at_s < changes[-1].at_s:
            raise _wrong(
                node,
                f"at: {_seconds(change.at_s)} stands after {_seconds(changes[-1].at_s)}; "
                "order the changes by time",
            )
        changes.append(change)
    if repeat is None:
        return _Listed(tuple(changes), every_s, times)
    if changes and repeat[0] < changes[-1].at_s:
        raise _wrong(
            root,
            f"repeat.every: {_seconds(repeat[0])} is before the last change at "
            f"{_seconds(changes[-1].at_s)}; repeat no sooner than that",
        )
    return _Listed(tuple(changes), *repeat)


def _compose(text: str) -> yaml.Node:
    """Return the YAML as nodes, which know their lines; no tag builds an object."""
    if len(text) > MAX_YAML_CHARS:
        raise WireError(
            f"script.text: at most {MAX_YAML_CHARS} characters of YAML, got {len(text)}; "
            "use 'repeat:' for what recurs"
        )
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark is not None else 1
        raise WireError(f"script.text: line {line}: not YAML: {error.problem}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise WireError(f"script.text: line {line}: not YAML: {error.reason}") from None
    except RecursionError:
        raise WireError("script.text: line 1: nested too deeply") from None
    if node is None:
        raise WireError("script.text: line 1: empty; expected a list of changes")
    return node


def _parse_change(node: yaml.Node, min_pods: int, max_pods: int) -> ScriptedChange:
    if not isinstance(node, yaml.MappingNode):
        raise _wrong(node, "expected a change such as '{at: 90s, pods: 2}'")
    keys = _keys(node, ("at", *(key for key, _ in _ACTIONS)))
    named = [(key, action) for key, action in _ACTIONS if key in keys]
    if "at" not in keys:
        raise _wrong(node, "at: missing; say when, such as 'at: 90s'")
    if len(named) != 1:
        raise _wrong(
            node,
            f"expected exactly one of pods, add, remove, kill, got {len(named)}: "
            f"{', '.join(key for key, _ in named) or 'none'}",
        )
    key, action = named[0]
    at_s = _parse_duration("at", keys["at"])
    if action == "kill":
        target = _scalar(key, keys[key])
        try:
            check_id("kill", target)
        except WireError as error:
            raise _wrong(keys[key], f"{error}; or the number of a rank") from None
        kind = "rank" if target.isdecimal() else "pod"
        return ScriptedChange(at_s=at_s, action=action, target=target, text=f"kill {kind} {target}")
    low, high = (min_pods, max_pods) if action == "set" else (1, 4096)
    pods = _parse_int(key, keys[key], low, high)
    return ScriptedChange(at_s=at_s, action=action, pods=pods, text=f"{action} {_pods(pods)}")


def _parse_repeat(node: yaml.Node) -> tuple[float, int | None]:
    """Return (every_s, times); the list itself counts as the first time."""
    if not isinstance(node, yaml.MappingNode):
        raise _wrong(node, "repeat: expected '{every: 10m}' or '{every: 10m, times: 5}'")
    keys = _keys(node, ("every", "times"))
    if "every" not in keys:
        raise _wrong(node, "repeat.every: missing; say how often, such as 'every: 10m'")
    every_s = _parse_duration("repeat.every", keys["every"])
    if every_s < 0.05:
        raise _wrong(keys["every"], "repeat.every: must be at least 0.05s")
    if "times" not in keys:
        return every_s, None
    return every_s, _parse_int("repeat.times", keys["times"], 1, MAX_REPEAT_TIMES)


def _keys(node: yaml.MappingNode, allowed: tuple[str, ...]) -> dict[str, yaml.Node]:
    found: dict[str, yaml.Node] = {}
    for key, value in node.value:
        name = key.value if isinstance(key, yaml.ScalarNode) else None
        if name not in allowed:
            raise _wrong(key, f"unknown key {_show(name)}; allowed: {', '.join(allowed)}")
        if name in found:
            raise _wrong(key, f"{name}: named twice")
        found[name] = value
    return found


def _parse_duration(name: str, node: yaml.Node) -> float:
    text = _scalar(name, node)
    if _NUMBER.match(text):
        seconds = float(text)
    else:
        match = _DURATION.match(text)
        if match is None or not text:
            raise _wrong(
                node, f"{name}: {_show(text)} is no time; write 90s, 15m, 1h30m or a number"
            )
        hours, minutes, rest = (float(part or 0) for part in match.groups())
        seconds = hours * 3600 + minutes * 60 + rest
    if not seconds <= 366 * 86400:
        raise _wrong(node, f"{name}: {_show(text)} is more than a year")
    return seconds


def _parse_int(name: str, node: yaml.Node, low: int, high: int) -> int:
    text = _scalar(name, node)
    value = int(text) if re.fullmatch(r"[0-9]{1,9}", text) else -1
    if not low <= value <= high:
        raise _wrong(node, f"{name}: expected a whole number of {low} to {high}, got {_show(text)}")
    return value


def _scalar(name: str, node: yaml.Node) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise _wrong(node, f"{name}: expected a single value")
    return str(node.value)


def _wrong(node: yaml.Node, text: str) -> WireError:
    return WireError(f"script.text: line {node.start_mark.line + 1}: {text}")


# --- trace: CSV ---------------------------------------------------------------------------------


def _parse_trace(text: str, min_pods: int, max_pods: int, slots_per_pod: int) -> _Listed:
    """Read `time_s,free_slots`; a row that gives the same pods as the one before is no change."""
    reader = csv.reader(text.splitlines(), strict=True)
    changes: list[ScriptedChange] = []
    last_s = -1.0
    try:
        for row in reader:
            if reader.line_num == 1:
                if [name.strip() for name in row] != ["time_s", "free_slots"]:
                    raise _wrong_row(1, f"expected the header time_s,free_slots, got {_show(row)}")
                continue
            at_s, free_slots = _parse_row(row, reader.line_num)
            if at_s <= last_s:
                raise _wrong_row(
                    reader.line_num,
                    f"time_s: {at_s:g} is not after {last_s:g}; order the rows by time",
                )
            last_s = at_s
            pods = min(max(free_slots // slots_per_pod, min_pods), max_pods)
            if not changes or changes[-1].pods != pods:
                slots = "1 free slot" if free_slots == 1 else f"{free_slots} free slots"
                said = f"set {_pods(pods)} ({slots})"
                changes.append(ScriptedChange(at_s=at_s, action="set", pods=pods, text=said))
    except csv.Error as error:
        raise _wrong_row(reader.line_num, f"not CSV: {error}") from None
    if not changes:
        raise WireError("script.text: the trace has no rows; give the header and at least one row")
    return _Listed(tuple(changes))


def _parse_row(row: list[str], line: int) -> tuple[float, int]:
    if len(row) != 2 or not all(cell.strip() for cell in row):
        raise _wrong_row(line, f"a hole: expected time_s,free_slots, got {_show(','.join(row))}")
    time_text, slots_text = (cell.strip() for cell in row)
    try:
        at_s = float(time_text)
    except ValueError:
        at_s = math.nan
    if not 0 <= at_s <= 366 * 86400:
        raise _wrong_row(line, f"time_s: {_show(time_text)} is not a number of seconds from 0 on")
    if not re.fullmatch(r"[0-9]{1,9}", slots_text):
        raise _wrong_row(line, f"free_slots: {_show(slots_text)} is not a whole number from 0 on")
    return at_s, int(slots_text)


def _wrong_row(line: int, text: str) -> WireError:
    return WireError(f"script.text: line {line}: {text}")


# --- words --------------------------------------------------------------------------------------


def _pods(count: int) -> str:
    return "1 pod" if count == 1 else f"{count} pods"


def _seconds(seconds: float) -> str:
    return f"{seconds:g}s"


def _clock(seconds: float) -> str:
    """Return h:mm:ss, with tenths where they matter."""
    tenths = round(seconds * 10)
    whole, tenth = divmod(tenths, 10)
    text = f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
    return f"{text}.{tenth}" if tenth else text


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
