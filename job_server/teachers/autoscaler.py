"""Decide how many teachers the students of a service need. Pure.

The share of time that students wait suggests a number; the throughput measured afterwards decides
whether it stays. So nothing need be known of teachers, networks and disks. The autoscaler tries a
number and averages the reports that follow. It takes back what brought nothing, and tries it again
ever more rarely. All waits are counted in reports, which a discovery service sends every 2 s.
"""

import math
from dataclasses import dataclass, replace

from job_server.api.wire import Demand

# Reports that are ignored after the number of teachers or students has changed: a reader measures
# over 8 s, so after this many reports a sixth of its figure still comes from before.
SETTLE = 8
WINDOW = 5  # reports that are averaged, at least
LONG_WINDOW = 20  # ... and at most, where they differ much
NOISE = 0.015  # standard error of the mean, as a share of it, at which a window is long enough
UNTOLD_SETTLE = 30  # ... where a teacher was added and it is not known when it serves
MAX_SETTLE = 90

WAITING = 0.05  # share of the time that students wait, above which another teacher may help
IDLE = 0.03  # ... and below which one less may do
IDLE_WINDOWS = 2
LOSS = 0.03  # of throughput that a smaller number may cost
CRASH = 0.15  # of throughput, at which what is tried is taken back at once
CRASH_AFTER = 4  # reports, of which the last three agree
DRIFT = 0.15  # of throughput with the same teachers; beyond it the students have changed
STUDENTS_CHANGE = 0.2  # share of the number of students whose change makes earlier figures void
HEADROOM = 1.05
MOST_WAIT = 0.9  # they may wait for something else
ROUNDING = 0.01
LEAST_RATE = 1e-6  # samples/s; less counts as none, and would divide by zero

BLOCK = 30  # reports until what has failed is tried again; doubled with every failure
MAX_BLOCK = 480


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The reports since the number of teachers or students last changed."""

    pods: int = 0
    seen: int = 0  # including those that are ignored
    count: int = 0
    sum_rate: float = 0.0
    sum_rate_squared: float = 0.0
    sum_wait: float = 0.0
    last: tuple[float, ...] = ()  # three rates

    @property
    def rate_per_s(self) -> float:
        """The mean of what counts; where nothing does yet, of the last reports."""
        if self.count:
            return self.sum_rate / self.count
        return sum(self.last) / len(self.last) if self.last else 0.0

    @property
    def wait_share(self) -> float:
        return self.sum_wait / self.count if self.count else 0.0

    @property
    def error(self) -> float:
        """The standard error of the mean rate, as a share of it."""
        mean = self.rate_per_s
        if self.count < 2 or mean <= 0:
            return math.inf
        variance = max(0.0, self.sum_rate_squared / self.count - mean * mean)
        return math.sqrt(variance / (self.count - 1)) / mean

    def with_report(self, demand: Demand, settle: int) -> "Window":
        rate = demand.samples_per_s
        last = (*self.last[-2:], rate)
        if self.seen < settle:
            return replace(self, seen=self.seen + 1, last=last)
        return replace(
            self,
            seen=self.seen + 1,
            last=last,
            count=self.count + 1,
            sum_rate=self.sum_rate + rate,
            sum_rate_squared=self.sum_rate_squared + rate * rate,
            sum_wait=self.sum_wait + demand.wait_share,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A number that is being tried."""

    before: int
    before_per_s: float
    pods: int
    needed_per_s: float  # throughput at which the number stays


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherAutoscaler:
    """What has been learnt of a service, and the number that follows from it."""

    wanted: int
    reason: str = "no students are reported yet"
    students: int = 0  # the number for which the rest was measured
    peak_per_s: float = 0.0  # throughput to which other numbers are compared; 0: not known
    peak_pods: int = 0
    per_teacher: float = 0.0  # the most samples/s per teacher that were measured
    probe: Probe | None = None  # None: nothing is being tried
    too_few: int = 0  # the most teachers that were found too few; 0: none were
    too_many: int = 0  # the fewest that brought no more than fewer; 0: none were
    no_more: int = 0  # reports for which no larger number is tried
    no_fewer: int = 0
    more_failures: int = 0  # in a row
    fewer_failures: int = 0
    idle_windows: int = 0
    window: Window = Window()


def observe(
    autoscaler: TeacherAutoscaler, demand: Demand, *, pods: int, steady: bool, low: int, high: int
) -> TeacherAutoscaler:
    """Return the autoscaler after a report: `wanted` teachers, and the `reason` for that number.

    Args:
        pods: teachers that run now; fewer than wanted where there is no place for more.
        steady: none of them is starting or stopping, and all that run are in service.
        low, high: bounds of the number.
    """
    low = max(low, 1)  # there are students
    students = demand.students
    if abs(students - autoscaler.students) > STUDENTS_CHANGE * autoscaler.students:
        autoscaler = _forget(autoscaler, students)
    if autoscaler.wanted < low:
        return _want(autoscaler, low, f"{_students(students)} came")
    autoscaler = replace(
        autoscaler,
        no_more=max(0, autoscaler.no_more - 1),
        no_fewer=max(0, autoscaler.no_fewer - 1),
    )
    if not steady or pods == 0 or demand.samples_per_s < LEAST_RATE:
        # If nothing is answered at all, more teachers would not help.
        return replace(autoscaler, window=Window(pods=pods))
    window = autoscaler.window
    if window.pods != pods:
        window = Window(pods=pods)
    settle = SETTLE if demand.teachers is not None else _untold_settle(autoscaler)
    autoscaler = replace(autoscaler, window=window.with_report(demand, settle))
    if not _is_complete(autoscaler):
        return autoscaler
    autoscaler = _learn(autoscaler, pods)
    if autoscaler.probe is not None:
        autoscaler, done = _judge(autoscaler, autoscaler.probe, pods)
        if done:
            return autoscaler
    autoscaler = _next(autoscaler, pods, low=low, high=high)
    # The window of a number that stays is emptied, but need not settle again.
    return replace(autoscaler, window=Window(pods=pods, seen=MAX_SETTLE))


def no_students(autoscaler: TeacherAutoscaler, low: int, reason: str) -> TeacherAutoscaler:
    """Return the autoscaler of an unused service: as few teachers as allowed."""
    if autoscaler.wanted == low and autoscaler.students == 0:
        return autoscaler
    forgotten = replace(_forget(autoscaler, 0), window=Window())
    return replace(forgotten, wanted=low, reason=reason)


def _forget(autoscaler: TeacherAutoscaler, students: int) -> TeacherAutoscaler:
    """Drop what other students taught; what a teacher can do stays known."""
    return TeacherAutoscaler(
        wanted=autoscaler.wanted,
        reason=f"the first reports of {_students(students)} are being gathered",
        students=students,
        per_teacher=autoscaler.per_teacher,
        idle_windows=IDLE_WINDOWS - 1 if students < autoscaler.students else 0,
    )


def _untold_settle(autoscaler: TeacherAutoscaler) -> int:
    probe = autoscaler.probe
    if probe is None or probe.pods < probe.before:
        return SETTLE
    # A failed try may have been judged too early, so each failure adds time.
    return min(MAX_SETTLE, UNTOLD_SETTLE * (1 + autoscaler.more_failures))


def _is_complete(autoscaler: TeacherAutoscaler) -> bool:
    window, probe = autoscaler.window, autoscaler.probe
    if probe is not None and window.pods != probe.before and window.seen >= CRASH_AFTER:
        reference = autoscaler.peak_per_s if probe.pods < probe.before else probe.before_per_s
        if max(window.last) < reference * (1 - CRASH):
            return True  # waiting longer would cost the students time
    return window.count >= WINDOW and (window.error <= NOISE or window.count >= LONG_WINDOW)


def _learn(autoscaler: TeacherAutoscaler, pods: int) -> TeacherAutoscaler:
    """Take a window into what is known of the service."""
    rate = autoscaler.window.rate_per_s
    peak, peak_pods = autoscaler.peak_per_s, autoscaler.peak_pods
    if autoscaler.probe is None and peak and pods == peak_pods and rate < peak * (1 - DRIFT):
        fresh = replace(_forget(autoscaler, autoscaler.students), window=autoscaler.window)
        return replace(fresh, peak_per_s=rate, peak_pods=pods)
    if rate > peak * (1 + LOSS) or peak == 0:
        peak, peak_pods = rate, pods
    elif pods == peak_pods:
        # The highest of many noisy means would be too high for all of them.
        peak = (peak + rate) / 2
    per_teacher = max(autoscaler.per_teacher, rate / pods)
    return replace(autoscaler, per_teacher=per_teacher, peak_per_s=peak, peak_pods=peak_pods)


def _judge(
    autoscaler: TeacherAutoscaler, probe: Probe, pods: int
) -> tuple[TeacherAutoscaler, bool]:
    """Keep the number that was tried, or take it back; True: nothing else is to be decided."""
    rate = autoscaler.window.rate_per_s
    judged = replace(autoscaler, probe=None)
    grows = probe.pods > probe.before
    if pods == probe.before or (pods > probe.before) != grows:
        return judged, False  # no free slots, or a lost pod: nothing was tried
    back = probe.before
    if autoscaler.peak_per_s > probe.before_per_s * (1 + LOSS) and autoscaler.peak_pods != pods:
        back = autoscaler.peak_pods
    if grows and rate >= probe.needed_per_s:
        known = replace(judged, too_few=max(judged.too_few, probe.before), more_failures=0)
        return replace(known, no_fewer=BLOCK if probe.pods == probe.before + 1 else 0), False
    if grows:
        failures = autoscaler.more_failures + 1
        block = _block(failures) if pods == probe.before + 1 else 0
        judged = replace(judged, too_many=pods, no_more=block, more_failures=failures)
        return _want(
            judged, back, f"{_teachers(pods)} brought no more: {rate:,.0f} samples/s"
        ), True
    if rate >= probe.needed_per_s:
        return replace(judged, fewer_failures=0, too_many=judged.too_many or probe.before), False
    failures = autoscaler.fewer_failures + 1
    block = _block(failures) if pods == probe.before - 1 else 0
    judged = replace(judged, too_few=pods, no_fewer=block, fewer_failures=failures)
    return _want(judged, back, f"{_teachers(pods)} were too few: {rate:,.0f} samples/s"), True


def _next(autoscaler: TeacherAutoscaler, pods: int, *, low: int, high: int) -> TeacherAutoscaler:
    """Begin to try another number, or say why this one stays."""
    rate, wait = autoscaler.window.rate_per_s, autoscaler.window.wait_share
    verb = "waits" if autoscaler.students == 1 else "wait"
    share = f"{_students(autoscaler.students)} {verb} {100 * wait:.0f} % of the time"
    idle_windows = autoscaler.idle_windows + 1 if wait < IDLE else 0
    autoscaler = replace(autoscaler, idle_windows=idle_windows)
    if wait <= WAITING and autoscaler.wanted > pods:
        autoscaler = replace(
            autoscaler, wanted=pods
        )  # there was no place for more, and no need now
    if wait > WAITING and pods < high and autoscaler.no_more == 0:
        more = _more(autoscaler, pods, wait, high)
        if more <= autoscaler.wanted:
            return replace(autoscaler, reason=f"{share}, and there is no place for more teachers")
        gain = min(more / pods, 1 / (1 - min(wait, MOST_WAIT))) - 1
        probe = Probe(
            before=pods,
            before_per_s=rate,
            pods=more,
            needed_per_s=rate * (1 + min(0.05, max(0.01, gain / 4))),
        )
        return _want(replace(autoscaler, probe=probe), more, share)
    fewer = max(low, _fewer(autoscaler, pods))
    if fewer < pods and autoscaler.no_fewer == 0:
        probe = Probe(
            before=pods,
            before_per_s=rate,
            pods=fewer,
            needed_per_s=max(rate, autoscaler.peak_per_s) * (1 - LOSS),
        )
        return _want(replace(autoscaler, probe=probe), fewer, share)
    return replace(autoscaler, reason=_why_it_stays(autoscaler, share, pods, low=low, high=high))


def _more(autoscaler: TeacherAutoscaler, pods: int, wait: float, high: int) -> int:
    """Return the larger number to try."""
    if autoscaler.too_many > pods:
        return pods + 1  # a jump failed: what is between may still bring something
    # The number at which students would never wait; at most twice as many at once, since something
    # other than the teachers may hold them up.
    ideal = math.ceil(pods / (1 - min(wait, MOST_WAIT)) - ROUNDING)
    return min(high, max(pods + 1, min(2 * pods, ideal)))


def _fewer(autoscaler: TeacherAutoscaler, pods: int) -> int:
    """Return the smaller number to try; `pods`: none."""
    rate, wait = autoscaler.window.rate_per_s, autoscaler.window.wait_share
    needed = math.ceil(rate / autoscaler.per_teacher * HEADROOM - ROUNDING)
    if autoscaler.idle_windows >= IDLE_WINDOWS or (wait > WAITING and autoscaler.too_many > pods):
        fewer = min(pods - 1, needed)  # they do not wait, or more did not help
    elif wait > WAITING:
        fewer = min(pods, needed)  # the most that there may be: do so many bring more than fewer?
    else:
        return pods
    if fewer <= autoscaler.too_few < pods - 1:
        return (autoscaler.too_few + pods) // 2
    return fewer


def _why_it_stays(
    autoscaler: TeacherAutoscaler, share: str, pods: int, *, low: int, high: int
) -> str:
    wait = autoscaler.window.wait_share
    if wait > WAITING and autoscaler.no_more > 0:
        return f"{share}, but more teachers brought no more samples"
    if wait > WAITING and pods >= high:
        return f"{share}, and {high} is the most (max_pods)"
    if wait < IDLE and pods <= low:
        return f"{share}; {low} is the fewest"
    if wait < IDLE and autoscaler.no_fewer > 0:
        return f"{share}, and fewer teachers were too few"
    return share


def _want(autoscaler: TeacherAutoscaler, pods: int, reason: str) -> TeacherAutoscaler:
    return replace(autoscaler, wanted=pods, reason=reason, window=Window())


def _block(failures: int) -> int:
    return min(MAX_BLOCK, BLOCK << min(failures - 1, 10))


def _students(count: int) -> str:
    return "1 student" if count == 1 else f"{count} students"


def _teachers(count: int) -> str:
    return "1 teacher" if count == 1 else f"{count} teachers"
