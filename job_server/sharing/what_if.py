"""Predict what a change of the pods brings and costs, and compare that with what came. Pure.

Both are made of the stages' records alone: how long their steps took, and how long the changes
before them paused the training. So the prediction before a change can be made again after it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from job_server.api.text import counted, duration
from job_server.api.wire import JobStatus, StageRecord, Way
from job_server.sharing.job_views import MIN_STEPS, SEEN_RECORDS
from job_server.sharing.speedup import fit


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a change to another number of pods should bring."""

    before: int  # pods
    pods: int
    step_s: float  # as it is
    new_step_s: float
    pause_s: float | None  # None: no change has been made yet
    changes: int  # whose pauses were averaged
    sizes: tuple[int, ...]  # numbers of pods whose steps were measured


def step_s_of(record: StageRecord, now: float) -> float | None:
    """Return how long a step of a stage takes. None: it has made too few."""
    until = now if record.ended_at is None else record.ended_at
    if record.first_step is None or record.first_step_at is None or record.last_step is None:
        return None
    made = record.last_step - record.first_step
    took_s = until - record.first_step_at
    return took_s / made if made >= MIN_STEPS and took_s > 0 else None


def predict(
    records: Sequence[StageRecord], before: int, pods: int, now: float, *, is_linear: bool
) -> Prediction | None:
    """Return what going from `before` pods to `pods` should bring. None: too little was measured.

    Args:
        is_linear: the batch grows with the pods, so more of them make a step of more samples; then
            times are those of the samples that a step of one pod has.
    """
    seen = list(records[-SEEN_RECORDS:])
    measured: dict[int, list[float]] = {}
    for record in seen:
        step_s = step_s_of(record, now)
        if step_s is not None:
            measured.setdefault(record.pods, []).append(step_s / (record.pods if is_linear else 1))
    if before not in measured:
        return None
    newest = {size: times[-1] for size, times in measured.items()}
    found = fit(newest)
    pauses = [r.pause_s for r in seen if r.pause_s is not None and r.way is not Way.START]
    return Prediction(
        before=before,
        pods=pods,
        step_s=newest[before],
        # The curve says how many times faster it is; where it is now was measured.
        new_step_s=newest.get(pods, newest[before] * found.seconds(pods) / found.seconds(before)),
        pause_s=sum(pauses) / len(pauses) if pauses else None,
        changes=len(pauses),
        sizes=tuple(sorted(newest)),
    )


def what_if(status: JobStatus, pods: int, now: float) -> str:
    """Return in words what `edl resize JOB PODS` should bring and cost."""
    running = [r for r in status.stages if r.outcome == "committed" and r.ended_at is None]
    before = running[-1].pods if running else 0
    if pods == before:
        return f"it has {counted(pods, 'pod')} already; nothing would change"
    found = predict(status.stages, before, pods, now, is_linear=status.spec.policy == "linear")
    if found is None:
        return (
            f"nothing can be predicted yet: no stage of the pods it has now has made {MIN_STEPS} "
            f"steps; ask again when it trains"
        )
    pause = "how long a change pauses it is not known, as it had none"
    if found.pause_s is not None:
        pause = (
            f"the change pauses it for about {_short(found.pause_s)} (mean of "
            f"{counted(found.changes, 'change')})"
        )
    parts = [f"{_faster(found)}, by what {_sizes(found)} showed", pause]
    left = None if status.total_steps is None else status.total_steps - status.step
    if left is not None and left > 0 and status.spec.policy != "linear":
        then_s = left * found.new_step_s + (found.pause_s or 0.0)
        parts.append(
            f"the {left} steps that are left take {duration(then_s)} instead of "
            f"{duration(left * found.step_s)}"
        )
    return f"{found.before} to {found.pods} pods: " + "; ".join(parts)


def hindsight(status: JobStatus, now: float) -> str:
    """Return how the newest change turned out, beside what was to be predicted. "": not known."""
    made = [r for r in status.stages if r.committed_at is not None]
    for place in range(len(made) - 1, 0, -1):
        before, record = made[place - 1], made[place]
        if record.pods == before.pods or record.way is Way.START:
            continue
        is_linear = status.spec.policy == "linear"
        step_s = step_s_of(record, now)
        then = record.committed_at or now
        found = predict(made[:place], before.pods, record.pods, then, is_linear=is_linear)
        if step_s is None or found is None:
            return ""
        step_s /= record.pods if is_linear else 1
        paused = "" if record.pause_s is None else f", {_short(record.pause_s)} of pause"
        foretold = "" if found.pause_s is None else f", {_short(found.pause_s)} of pause"
        return (
            f"{before.pods} to {record.pods} pods in stage {record.stage}: predicted "
            f"{_short(found.new_step_s)} a step{foretold}; it took {_short(step_s)}{paused}"
        )
    return ""


def _faster(found: Prediction) -> str:
    times = found.step_s / found.new_step_s
    return (
        f"{_short(found.new_step_s)} a step instead of {_short(found.step_s)} "
        f"({times:.2f} times as fast)"
    )


def _sizes(found: Prediction) -> str:
    return f"{' and '.join(map(str, found.sizes))} pods"


def _short(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else duration(seconds)
