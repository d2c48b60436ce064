"""Sum up what became of the jobs of a simulation. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from job_server.simulation.simulator import SimulationResult

_BARS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Means and 99th percentiles over all jobs; times in seconds."""

    jobs: int
    mean_completion_s: float  # from submission to end
    p99_completion_s: float
    mean_waiting_s: float
    longest_waiting_s: float
    used: float  # part of the slots that ran a trainer, from the first arrival to the last end
    p99_unfairness: float  # completion against that with an equal share of the cluster
    changes_per_job: float


def summarize(result: SimulationResult) -> Summary:
    """Return the figures of a simulation that had at least one job."""
    done = result.outcomes
    times = [each.completion_s for each in done]
    start = min(each.job.submitted_s for each in done)
    end = max(each.ended_s for each in done)
    return Summary(
        jobs=len(done),
        mean_completion_s=sum(times) / len(done),
        p99_completion_s=percentile(times, 0.99),
        mean_waiting_s=sum(each.waiting_s for each in done) / len(done),
        longest_waiting_s=max(each.waiting_s for each in done),
        used=_slot_seconds(result, start, end) / (result.slots * max(end - start, 1e-9)),
        p99_unfairness=percentile([each.unfairness for each in done], 0.99),
        changes_per_job=sum(each.changes for each in done) / len(done),
    )


def percentile(values: Sequence[float], part: float) -> float:
    """Return the smallest value that so large a part of all is not above."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-part * len(ordered) // 1) - 1))]


def plot(result: SimulationResult, width: int = 60) -> str:
    """Return a line of bars: how much of the cluster was in use, over time."""
    end = max(each.ended_s for each in result.outcomes)
    bars = []
    for index in range(width):
        low, high = end * index / width, end * (index + 1) / width
        part = _slot_seconds(result, low, high) / (result.slots * max(high - low, 1e-9))
        bars.append(_BARS[min(len(_BARS) - 1, round(part * (len(_BARS) - 1)))])
    return "".join(bars)


def _slot_seconds(result: SimulationResult, low: float, high: float) -> float:
    total = 0.0
    for index, (since, slots) in enumerate(result.busy):
        until = result.busy[index + 1][0] if index + 1 < len(result.busy) else high
        total += slots * max(0.0, min(until, high) - max(since, low))
    return total
