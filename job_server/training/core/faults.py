"""Judge failures by the job's failure policy, and tell permanent errors apart. Pure.

A trainer describes the exception that ended it, its launcher what else was seen; the first rule of
the policy that the failure meets says what is done. An error that is final, at once or the second
time, becomes a `Fault`; what the next try may not meet is counted by the budgets alone.
"""

import errno
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from job_server.api.failure_policy import (
    HANG,
    LINE_CHARS,
    FailedProcess,
    FailureRule,
    Then,
    default_policy,
    found_in,
    matches_name,
)
from job_server.api.text import describe_exit
from job_server.api.wire import JobSpec, RaisedError, TrainerError
from job_server.training.core.job import Fault

TEXT_CHARS = 600  # of an exception with its explanation
LAST_LINES = 20  # of what a process wrote, in which patterns are looked for

_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+")
_PROCESS = re.compile(r"\b(pid|process|thread|port|tid)([ =:#(-]*)\d+", re.IGNORECASE)
_TEMPORARY = re.compile(r"\btmp[._]?\w{8,10}\b")
_POD = re.compile(r"\bpod_\d+_\d+(_\d+)?\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What is known of a process that has failed.

    Of `lines` no more than the last are looked at, whatever a launcher sends.
    """

    of: FailedProcess
    code: int | None  # exit code, negative for a signal; None: not known
    error: TrainerError | None = None  # None: it raised nothing, or did not describe it
    words: str = ""  # the last that it wrote, in short
    lines: tuple[str, ...] = ()  # the last lines that it wrote
    events: tuple[str, ...] = ()  # what was seen from outside, as `FailureRule.event`

    @property
    def last_lines(self) -> tuple[str, ...]:
        return tuple(line[:LINE_CHARS] for line in self.lines[-LAST_LINES:])


def policy_of(spec: JobSpec) -> tuple[FailureRule, ...]:
    """Return the rules that come before those of EDL."""
    if spec.hang_policy != "fail":
        return spec.failure_policy
    hangs = FailureRule(event=(HANG,), then=Then.FAIL, name="its hang_policy is fail")
    return (*spec.failure_policy, hangs)


def judge(own: Sequence[FailureRule], failure: Failure) -> FailureRule:
    """Return the rule by which a failure is treated: of the job's own rules, else of EDL's.

    An exception and its causes are judged one by one. Where one of them may pass, so may the whole.
    """
    chain = (None,) if failure.error is None else failure.error.chain
    for table in (own, default_policy()):
        met = [next((r for r in table if _meets(r, failure, raised)), None) for raised in chain]
        rules = [rule for rule in met if rule is not None]
        if rules:
            return next((rule for rule in rules if not rule.then.is_final), rules[0])
    raise AssertionError("the last rule of failure_policy.yaml meets every failure")


def fault_of(who: str, failure: Failure, rule: FailureRule) -> Fault | None:
    """Return the fault that ended a process, judged by `rule`. None: it may go away."""
    if not rule.then.is_final:
        return None
    error = failure.error
    if error is None:
        text = "failed" if failure.code is None else describe_exit(failure.code)
        text += f": {failure.words}" if failure.words else ""
        mark, step = normal(text), None
    else:
        text, mark, step = str(error), _mark(error), error.step
    return Fault(
        who=who,
        text=text[:TEXT_CHARS],
        mark=mark,
        at_once=rule.then is Then.FAIL,
        step=step,
        why=rule.name,
    )


def find_lasting(faults: tuple[Fault, ...], before: tuple[Fault, ...], *, of_change: bool) -> str:
    """Return why another try makes no sense. "": it may succeed.

    Args:
        faults: of the trainers that failed now.
        before: of those that failed the last time.
        of_change: they failed in a change that was not yet committed, so that the next try is
            another one: of the pods before it.
    """
    known = {fault.mark for fault in before}
    for fault in faults:
        at = "" if fault.step is None else f" at step {fault.step}"
        if fault.at_once and not of_change:
            why = fault.why or "it would come again"
            return f"{fault.text}; {fault.who}{at}, not tried again: {why}"
        if fault.mark in known:
            return f"{fault.text}; {fault.who}, not tried again: it has come twice{at}"
    return ""


def normal(text: str) -> str:
    """Return a text without the parts that differ between two tries of the same error.

    Those are memory addresses, numbers of processes, threads and ports, and names of temporary
    files and of pods, each of which has its own copy of a script. Other numbers stay: they belong
    to the data, which comes again at the same step.
    """
    text = _ADDRESS.sub("0x", text)
    text = _PROCESS.sub(r"\1\2N", text)
    text = _TEMPORARY.sub("tmp", text)
    return " ".join(_POD.sub("pod", text).split())


def _meets(rule: FailureRule, failure: Failure, raised: RaisedError | None) -> bool:
    code = failure.code
    if rule.of not in (None, failure.of):
        return False
    if rule.exit_code and code not in rule.exit_code:
        return False
    if rule.signal and (code is None or -code not in map(_signal, rule.signal)):
        return False
    if rule.event and not any(fnmatchcase(e, each) for e in failure.events for each in rule.event):
        return False
    if rule.log and not found_in(rule.log, failure.last_lines):
        return False
    if raised is None:
        said = (*failure.last_lines, failure.words[:TEXT_CHARS])
        return not (rule.exception or rule.errno or rule.at) and _says(rule, said)
    return (
        (not rule.exception or matches_name(rule.exception, raised.types))
        and (not rule.errno or _has_errno(rule, raised))
        and (not rule.at or any(fnmatchcase(raised.at, each) for each in rule.at))
        and _says(rule, (raised.text,))
    )


def _says(rule: FailureRule, lines: tuple[str, ...]) -> bool:
    return not rule.text or found_in(rule.text, lines)


def _signal(name: str) -> int:
    return signal.Signals[name].value


def _has_errno(rule: FailureRule, raised: RaisedError) -> bool:
    numbers = [getattr(errno, name) for name in rule.errno]
    return "OSError" in raised.types and raised.errno in numbers


def _mark(error: TrainerError) -> str:
    raised = error.chain[0]
    return normal(f"{error.step} {raised.types[0]} {raised.at} {raised.text}")
