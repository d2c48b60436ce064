"""Define the failure policy: a table of what is done about failures, by what is known of them.

Pure, but that the table of EDL itself is read from `failure_policy.yaml` beside this module, once.
A job's own table (`JobSpec.failure_policy`) has the same form, and its rules come first.
"""

import errno
import functools
import importlib
import re
import signal
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from job_server.api.codec import Int, Message, WireError, decode
from job_server.api.errors import ConfigError

MAX_RULES = 200
LINE_CHARS = 500  # of what a pattern is looked for in
# Events that are no NVML events.
OOM_KILL, HANG, PEER_LOST, UNKILLABLE = "oom_kill", "hang", "peer_lost", "unkillable"

DO_NOT_RESTART_EXIT = 78  # EX_CONFIG of sysexits.h

_MAX_VALUES, _MAX_CHARS = 100, 2000  # of one key of a rule, and of one value
# How many ways a pattern may try at one place of a line: one `.*`, and some of `?` and `|`. A
# careless pattern must not keep the server from its other jobs.
_MAX_WAYS = 20 * LINE_CHARS
_DEFAULTS = Path(__file__).with_name("failure_policy.yaml")


class Then(Enum):
    """What is done about a failure."""

    RESTART = "restart"  # from the newest state; it counts as a failure (max_failures)
    RESTART_ELSEWHERE = "restart_elsewhere"  # ... on other slots, where there are free ones
    QUARANTINE = "quarantine"  # ... and no job uses the slot until it is known to be well
    FAIL = "fail"  # the job fails at once
    FAIL_IF_REPEATED = "fail_if_repeated"  # ... the second time, at the same step
    PREEMPTED = "preempted"  # as restart, but it counts as a preemption (max_preemptions)
    IGNORE = "ignore"  # as restart, but it counts in no budget

    @property
    def is_final(self) -> bool:
        return self in (Then.FAIL, Then.FAIL_IF_REPEATED)


class FailedProcess(Enum):
    """What has failed."""

    TRAINER = "trainer"
    POD = "pod"  # its script, `train.sh`, or the launcher in it


class FailureRule(Message, frozen=True, kw_only=True):
    """What is done about failures of which all its keys hold; of a key, one value is enough."""

    then: Then
    name: str = ""  # of the failure, in words
    of: FailedProcess | None = None  # None: either
    exit_code: tuple[Int, ...] = ()
    signal: tuple[str, ...] = ()  # SIGKILL, ...
    exception: tuple[str, ...] = ()  # names of its class or a base class, may hold `*`
    errno: tuple[str, ...] = ()  # ENOSPC, ...: of an OSError
    at: tuple[str, ...] = ()  # FILE:LINE that raised it, may hold `*`
    text: tuple[str, ...] = ()  # in what the exception says; without one, as `log`
    log: tuple[str, ...] = ()  # in a line of the last that the process wrote
    event: tuple[str, ...] = ()  # oom_kill, hang, ..., NVML's such as xid_79; may hold `*`

    def __post_init__(self) -> None:
        for field in _MATCHED:
            values = getattr(self, field)
            if len(values) > _MAX_VALUES or any(len(str(value)) > _MAX_CHARS for value in values):
                raise WireError(
                    f"{field}: at most {_MAX_VALUES} values of {_MAX_CHARS} characters; make two "
                    "rules of it"
                )
        if len(self.name) > LINE_CHARS:
            raise WireError(f"name: at most {LINE_CHARS} characters, got {len(self.name)}")
        for code in self.exit_code:
            if not 1 <= code <= 255:
                raise WireError(f"exit_code: expected 1 to 255, got {code}")
        for name in self.signal:
            if name not in signal.Signals.__members__:
                raise WireError(f"signal: {name!r} is none; give a name such as SIGKILL")
        for name in self.errno:
            if not isinstance(getattr(errno, name, None), int):
                raise WireError(f"errno: {name!r} is none; give a name such as ENOSPC")
        for field in ("text", "log"):
            for pattern in getattr(self, field):
                _check_pattern(field, pattern)
        self._check_together()

    def _check_together(self) -> None:
        """Refuse a rule that no failure can meet."""
        if self.exit_code and self.signal:
            raise WireError(
                "signal: a process that a signal has ended has no exit_code; make two rules"
            )
        raised = next((key for key in ("exception", "errno", "at") if getattr(self, key)), None)
        if raised and self.of is FailedProcess.POD:
            raise WireError(f"{raised}: only a trainer raises exceptions; leave out 'of: pod'")
        if raised and self.signal:
            raise WireError(f"{raised}: a signal raises no exception; make two rules")


_MATCHED = ("exit_code", "signal", "exception", "errno", "at", "text", "log", "event")


def read_policy(text: str) -> tuple[FailureRule, ...]:
    """Return the rules of a YAML text.

    Raises:
        WireError: it is not YAML, or a rule is wrong; the text names rule, key, value and remedy.
    """
    # Here: a launcher, which reads messages, needs no YAML.
    from job_server.api.yaml_text import load_yaml

    return read_rules(load_yaml(text))


def read_policy_file(flag: str, name: str) -> tuple[FailureRule, ...]:
    """Return the rules of a YAML file that `flag` names.

    Raises:
        ConfigError: it cannot be read, or as `read_policy`.
    """
    try:
        return read_policy(Path(name).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag}: {name} cannot be read: {error}") from None
    except WireError as error:
        raise ConfigError(f"{flag}: {name}: {error}") from None


def read_rules(data: object) -> tuple[FailureRule, ...]:
    """Return the rules in a list of plain values, where a single value stands for a list of one.

    Raises:
        WireError: as read_policy.
    """
    if not isinstance(data, list):
        raise WireError(
            "expected a list of rules, such as '- {exit_code: 3, then: fail}', got "
            f"{type(data).__name__}"
        )
    rules = []
    for number, given in enumerate(data, 1):
        where = f"rule {number}"
        if not isinstance(given, dict):
            raise WireError(f"{where}: expected keys, such as 'exit_code: 3', got {given!r:.60}")
        for key in given:
            if key not in FailureRule.__struct_fields__:
                known = ", ".join(FailureRule.__struct_fields__)
                raise WireError(f"{where}: unknown key {key!r:.60}; known: {known}")
        lists = {key: [v] if key in _MATCHED and _is_one(v) else v for key, v in given.items()}
        for key in _MATCHED:
            if lists.get(key) == []:
                raise WireError(f"{where}: {key}: an empty list meets nothing; leave it out")
        try:
            rules.append(decode(FailureRule, lists))
        except WireError as error:
            raise WireError(f"{where}: {error}") from None
    if len(rules) > MAX_RULES:
        raise WireError(f"at most {MAX_RULES} rules, got {len(rules)}")
    return tuple(rules)


def _is_one(value: object) -> bool:
    return isinstance(value, (str, int, float))


@functools.cache
def default_policy() -> tuple[FailureRule, ...]:
    """Return the rules of EDL itself. Some rule meets every failure."""
    return read_policy(_DEFAULTS.read_text(encoding="utf-8"))


# --- patterns -------------------------------------------------------------------------------------


def matches_name(patterns: tuple[str, ...], types: tuple[str, ...]) -> bool:
    """Return whether a class or one of its base classes is named.

    Args:
        patterns: with a dot, of the whole name, `builtins.` and all; without, of the last part.
        types: as `RaisedError` has them.
    """
    for name in types:
        whole = name if "." in name else f"builtins.{name}"
        last = whole.rpartition(".")[2]
        if any(fnmatchcase(whole if "." in each else last, each) for each in patterns):
            return True
    return False


def found_in(patterns: tuple[str, ...], lines: tuple[str, ...]) -> bool:
    """Return whether a line, or a part of LINE_CHARS of a longer one, holds one of the patterns."""
    parts = [
        line[start : start + LINE_CHARS]
        for text in lines
        for line in text.splitlines()
        for start in range(0, len(line), LINE_CHARS // 2)
    ]
    return any(re.search(each, part, re.IGNORECASE) for each in patterns for part in parts)


def _check_pattern(field: str, pattern: str) -> None:
    """Refuse what is no regular expression, or could take minutes to be looked for."""
    try:
        re.compile(pattern, re.IGNORECASE)  # which refuses more than the parser does
        ways = _ways(importlib.import_module("re._parser").parse(pattern, re.IGNORECASE))
    except (re.error, RecursionError, OverflowError) as error:
        raise WireError(f"{field}: {pattern[:60]!r} is no regular expression: {error}") from None
    if not pattern or ways > _MAX_WAYS:
        raise WireError(
            f"{field}: {pattern[:60]!r} matches in too many ways; use at most one `.*`, no "
            "repeat within a repeat, and something that has to be there"
        )


def _ways(parsed: Any) -> int:
    """Return a bound on the ways in which a parsed pattern may match at one place."""
    ways = 1
    for kind, about in parsed:
        match str(kind):
            case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
                least, most, inner = about
                within, most = _ways(inner), min(int(most), LINE_CHARS)
                ways *= most - min(int(least), most) + 1
                ways *= within**most if within > 1 else 1
            case "SUBPATTERN":
                ways *= _ways(about[3])
            case "BRANCH":
                ways *= sum(map(_ways, about[1]))
            case "ASSERT" | "ASSERT_NOT":
                ways *= _ways(about[1])
            case "ATOMIC_GROUP":
                ways *= _ways(about)
            case "GROUPREF_EXISTS":
                ways *= max(_ways(each) for each in about[1:] if each is not None)
        ways = min(ways, 10 * _MAX_WAYS)
    return ways
