"""Tell from the ranks' times who makes the others wait, and what part of the time is lost. Pure.

Ranks go in step: the one that waits least in the exchange of a step is the one that all wait for.
What it waited for (data, a snapshot) and what it computed beyond the median rank is lost time.
"""

from collections.abc import Iterable, Mapping
from statistics import median_low

from job_server.api.wire import RankPace
from job_server.training.core.accounting import split_off
from job_server.training.core.job import Hang, JobStage
from job_server.training.core.work import Work

SLOW_TIMES = 2.0  # as long as the median computes, for a sample of its own
SLOW_SHARE = 0.1  # of a step that the others lose by it, at least


def note_paces(work: Work, stage: JobStage, paces: Iterable[RankPace]) -> None:
    """Enter where the time of some ranks went; each window comes once."""
    progress = work.job.progress
    known = dict(progress.paces) if progress.paced_stage == stage.stage else {}
    for pace in paces:
        known[pace.rank] = pace
        if pace.rank == 0:  # all ranks' windows are about the same time: one of them is counted
            split_off(work, **lost(known))
    work.progress(paces=known, paced_stage=stage.stage)
    _note_stragglers(work, stage, known)


def lost(paces: Mapping[int, RankPace]) -> dict[str, float]:
    """Return the parts of rank 0's window that were no training, in seconds, by account."""
    slowest = min(paces.values(), key=lambda each: each.exchanging_s / max(each.window_s, 1e-9))
    scale = paces[0].window_s / max(slowest.window_s, 1e-9)
    usual = _usual_s(paces)
    beyond = 0.0
    if is_slow(slowest, paces):
        beyond = slowest.computing_s - usual * slowest.samples
    return {
        "reading_s": scale * slowest.reading_s,
        "saving_s": scale * slowest.saving_s,
        "straggling_s": scale * max(0.0, beyond),
    }


def _sample_s(pace: RankPace) -> float:
    """Return how long a rank computes for a sample: ranks may have different numbers of them."""
    return pace.computing_s / max(pace.samples, 1)


def _usual_s(paces: Mapping[int, RankPace]) -> float:
    return median_low([_sample_s(each) for each in paces.values()])


def is_slow(pace: RankPace, paces: Mapping[int, RankPace]) -> bool:
    """Return whether a rank computes twice as long as the median, and the others lose by it."""
    usual = _usual_s(paces)
    beyond = pace.computing_s - usual * pace.samples
    return (
        len(paces) > 1
        and _sample_s(pace) >= SLOW_TIMES * usual
        and beyond >= SLOW_SHARE * pace.window_s
    )


def _note_stragglers(work: Work, stage: JobStage, paces: Mapping[int, RankPace]) -> None:
    before = {each.rank for each in work.job.progress.stragglers if each.stage == stage.stage}
    slow = [pace for _, pace in sorted(paces.items()) if is_slow(pace, paces)]
    found = tuple(
        Hang(stage=stage.stage, rank=pace.rank, text=_text(stage, pace, _usual_s(paces)))
        for pace in slow
    )
    work.progress(stragglers=found)
    for each in found:
        if each.rank not in before:
            work.note(each.text, lasting=False)
    for rank in sorted(before - {each.rank for each in found}):
        work.note(f"rank {rank} is as fast as the others again", lasting=False)


def _text(stage: JobStage, pace: RankPace, usual_s: float) -> str:
    step_ms = 1000 * pace.computing_s / pace.steps
    usual_ms = 1000 * usual_s * pace.samples / pace.steps
    return (
        f"rank {pace.rank}{_place(stage, pace.rank)} straggles: it computes {step_ms:.3g} ms in a "
        f"step, the median rank would {usual_ms:.3g} ms, over {pace.steps} steps; the others wait"
    )


def _place(stage: JobStage, rank: int) -> str:
    for member in stage.members:
        pod = member.pod
        for slot, each in zip(pod.slots, pod.ranks, strict=False):
            if each == rank:
                return f" ({pod.pod_id}, slot {slot} of {pod.node_id} at {pod.addr})"
    return ""
