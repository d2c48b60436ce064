"""Decide whether a trainer hangs: for how long it may give no sign of life, by what it does. Pure.

A sign of life is anything that changes on its page (`pod_runtime.activity`). What counts is not the
clock alone: time in which the trainer waited for a processor does not, nor time in which this
launcher did not look, because it was stopped or starved itself. So a busy machine is no alarm.
"""

from dataclasses import dataclass, replace

from job_server.api.wire import HangLimits
from pod_runtime.activity import Doing, Seen

LOOK_S = 1.0  # between two looks at a trainer
ACT_TIMES = 10.0  # so many limits later it is more than said
FIRST_STEPS = 5  # of a process: some of them may compile
GIVEN_UP_S = 10.0  # one that its peers have given up hung for at least so long
_BUSY_SHARE = 0.1  # of the silent time that a process computes: it may be the script's own work

_WORDS = {
    Doing.STARTING: "while it forms the group or loads the state",
    Doing.STEPPING: "in a step",
    Doing.READING: "while it waits for data",
    Doing.EXCHANGING: "while it waits for the other ranks",
    Doing.BETWEEN: "between two epochs",
    Doing.EVALUATING: "in an evaluation",
    Doing.SAVING: "while it takes a snapshot or waits for a checkpoint",
    Doing.DONE: "after its training was complete",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """A trainer at one moment."""

    seen: Seen
    cpu_s: float = 0.0  # that its threads have computed since it began
    delayed_s: float = 0.0  # that its main thread has waited for a processor since it began
    stopped: bool = False  # by SIGSTOP


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """How long a trainer has given no sign of life."""

    seen: Seen
    looked_at: float
    cpu_s: float  # as it began
    delayed_s: float  # at the last look
    silent_s: float = 0.0
    said: bool = False
    acted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """What a look has found out."""

    text: str
    silent_s: float  # 0: it has given a sign of life again
    act: bool = False  # it was silent for ten times its limit


def limit_s(seen: Seen, limits: HangLimits, step_s: float | None, *, busy: bool) -> float | None:
    """Return for how long a trainer may be silent. None: for ever.

    Args:
        step_s: how long a step takes; None: not known.
        busy: it computes meanwhile.
    """
    step = max(limits.step_s, limits.steps * (step_s or 0.0))
    if seen.steps < FIRST_STEPS or busy:
        step = max(step, limits.first_s)
    match seen.doing:
        case Doing.STARTING:
            return limits.first_s
        case Doing.STEPPING:
            return step
        case Doing.READING:
            return max(step, limits.data_s)
        case Doing.EXCHANGING:  # for whoever of them hangs: that one is said sooner
            return max(step, limits.first_s, limits.data_s, limits.evaluation_s, limits.saving_s)
        case Doing.BETWEEN | Doing.EVALUATING:
            return max(step, limits.evaluation_s)
        case Doing.SAVING:
            return max(step, limits.saving_s)
        case Doing.DONE:  # what its script does now is its own affair, if it does anything
            return None if busy else limits.evaluation_s
        case Doing.PARKED:
            return None


def heed(
    before: Silence | None, look: Look, now: float, limits: HangLimits, step_s: float | None
) -> tuple[Silence, Alarm | None]:
    """Return what is known after a look at `now` (monotonic seconds), and what it has found out.

    Args:
        before: None: the first look.
        step_s: how long a step takes; None: not known.
    """
    if before is None or look.seen != before.seen:
        found = Silence(seen=look.seen, looked_at=now, cpu_s=look.cpu_s, delayed_s=look.delayed_s)
        if before is None or not before.said:
            return found, None
        text = f"it has given a sign of life after {before.silent_s:.0f} s"
        return found, Alarm(text=text, silent_s=0.0)
    passed = min(now - before.looked_at, 2 * LOOK_S)
    passed = max(0.0, passed - max(0.0, look.delayed_s - before.delayed_s))
    silence = replace(
        before, looked_at=now, delayed_s=look.delayed_s, silent_s=before.silent_s + passed
    )
    busy = look.cpu_s - before.cpu_s > _BUSY_SHARE * silence.silent_s
    limit = limit_s(look.seen, limits, step_s, busy=busy)
    if limit is None or silence.silent_s < limit:
        return silence, None
    text = words(look, silence.silent_s, limit, busy=busy)
    if not silence.said:
        return replace(silence, said=True), Alarm(text=text, silent_s=silence.silent_s)
    acts = look.seen.doing is not Doing.DONE  # it may serve its model, and wait for requests
    if acts and not silence.acted and silence.silent_s >= ACT_TIMES * limit:
        return replace(silence, acted=True), Alarm(text=text, silent_s=silence.silent_s, act=True)
    return silence, None


def words(look: Look, silent_s: float, limit: float, *, busy: bool) -> str:
    """Return in words what a trainer does that gives no sign of life."""
    how = ", stopped by a signal (SIGSTOP)" if look.stopped else ", computing" if busy else ""
    return (
        f"no sign of life for {silent_s:.0f} s (limit {limit:.0f} s) {_WORDS[look.seen.doing]}"
        f"{how}, after {look.seen.steps} steps of its process"
    )


def given_up(seen: Seen, now: float) -> str:
    """Return in words that a trainer hung when its stage was ended. "": it did not."""
    silent_s = now - seen.since
    waits = seen.doing in (Doing.EXCHANGING, Doing.DONE) or seen.doing not in _WORDS
    if silent_s < GIVEN_UP_S or waits:
        return ""
    return f"no sign of life for {silent_s:.0f} s {_WORDS[seen.doing]}, when the stage was ended"
