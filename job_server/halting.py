"""Pause and stop: cut, durable checkpoint, end the trainers, release the pods. Pure."""

from dataclasses import replace

from job_server.deadlines import halt_deadline
from job_server.job import OVER, STOPPED, At, Goal, Halt, HaltPhase, Keep, Phase
from job_server.transitions import (
    abandon,
    cut_for_halt,
    fail_coming,
    fail_current,
    finish,
    neutral,
    tell_to_end,
)
from job_server.wire import JobState, Way
from job_server.work import Work


def halt(work: Work) -> None:
    """Take a pause or stop one phase further, as far as what is true allows."""
    job = work.job
    if job.goal is Goal.RUN:
        return
    if job.halt is None:
        work.set(halt=Halt(phase=HaltPhase.WAIT, since=work.now), waiting="", manual=None)
    held = work.job.halt
    if held is None or held.phase is HaltPhase.DONE:
        _stop_paused(work)
        return
    late = work.now >= halt_deadline(work.job, held)
    if held.phase is HaltPhase.WAIT:
        _begin(work, late=late)
    elif held.phase is HaltPhase.CUT:
        _await_cut(work, late=late)
    elif held.phase is HaltPhase.END:
        _await_end(work, late=late)
    else:
        _await_release(work, late=late)


def _to(work: Work, phase: HaltPhase) -> None:
    work.set(halt=Halt(phase=phase, since=work.now))


def _word(work: Work) -> str:
    return "pause" if work.job.goal is Goal.PAUSE else "stop"


def _stop_paused(work: Work) -> None:
    if work.job.goal is Goal.STOP:
        finish(work, JobState.STOPPED, "stopped on request")


def _begin(work: Work, *, late: bool) -> None:
    """Clear the way: no change in preparation, no rank that is parked for one."""
    job = work.job
    coming, current = job.coming, job.current
    if coming is not None:
        change = coming.way is not Way.START
        if change and coming.phase in (Phase.PREPARE, Phase.CUT):
            abandon(work, f"a {_word(work)} was asked for")
        elif change and job.elastic and not late:
            return  # its state is only in memory: commit, then cut with a checkpoint
        else:
            fail_coming(work, neutral(work, f"a {_word(work)} was asked for"))
        return
    if current is None:
        _to(work, HaltPhase.RELEASE)
        return
    if current.over is None and job.elastic and not job.done and not current.finishing:
        if current.resuming and not late:
            return
        if not current.resuming and not late:
            _to(work, HaltPhase.CUT)
            cut_for_halt(work)
            work.note(f"cutting stage {current.stage} with a durable checkpoint")
            return
    _end(work)


def _end(work: Work) -> None:
    _to(work, HaltPhase.END)
    fail_current(work, neutral(work, f"a {_word(work)} was asked for"))
    for stage in (work.job.previous, work.job.current):
        if stage is not None:
            tell_to_end(work, stage)


def _await_cut(work: Work, *, late: bool) -> None:
    stage = work.job.current
    if stage is None or stage.over is not None:
        _end(work)
        return
    steps = {member.step for member in stage.members if member.at is At.PARKED}
    if stage.all_at(At.PARKED, *STOPPED) and len(steps) <= 1:
        _end(work)
    elif late:
        others = [m.pod.pod_id for m in stage.members if m.at not in (At.PARKED, *STOPPED)]
        work.note(f"not parked in time: {', '.join(others)}; what is not saved is done again")
        _end(work)


def _await_end(work: Work, *, late: bool) -> None:
    stages = [s for s in (work.job.previous, work.job.current) if s is not None]
    if not late and not all(member.at in OVER for s in stages for member in s.members):
        return
    for stage in stages:
        for member in stage.members:
            if member.at not in OVER:
                work.move(stage, member.pod.pod_id, At.LOST)
    _to(work, HaltPhase.RELEASE)
    for pod in work.job.pods:
        work.release(pod.pod_id)


def _await_release(work: Work, *, late: bool) -> None:
    """Wait until clients have confirmed, but not for those that cannot be reached."""
    job = work.job
    for pod in job.pods:
        if pod.keep is not Keep.RELEASED:
            work.release(pod.pod_id)
    job = work.job
    waits = [pod for pod in job.pods if not work.is_silent(pod)]
    if waits and not late:
        return
    current = job.current
    stopped = current is None or any(member.at in STOPPED for member in current.members)
    if current is not None and not job.elastic:
        stopped = current.all_at(*STOPPED)
    if stopped:
        current = None  # else the next start has to see that the old stage is over
    work.set(current=current, previous=None, roster=(), fresh=True, served=())
    _to(work, HaltPhase.DONE)
    if job.goal is Goal.STOP:
        _stop_paused(work)
    else:
        work.note("paused")


def resume(work: Work) -> None:
    """Start again after a pause."""
    work.set(goal=Goal.RUN, halt=None, start_since=work.now, retry_at=work.now)
    current = work.job.current
    if current is not None and current.over is not None:
        work.set(current=replace(current, over=replace(current.over, counted=True)))
    work.note("resumed")
