"""Pause a job, stop it, or end it after a failure. Pure.

The phases: cut, if it trains; have a client write the newest state that is in memory; end the
trainers; release the pods. No phase throws the newest state away. A pause whose state cannot be
written is called off. Any other end keeps the state in memory for `keep_failed_s` and tries again,
unless the user asked to discard it.
"""

from msgspec.structs import replace

from job_server.api.text import duration
from job_server.api.wire import (
    Order,
    PodStagePhase,
    RestoreFrom,
    Save,
    SavePhase,
    Way,
)
from job_server.cluster.placement import find_node
from job_server.jobs.pod_reports import without
from job_server.jobs.work import Goal
from job_server.training.core.allocation import (
    newest_in_memory,
    unheard,
    unsaved,
    why_in_trainers_only,
)
from job_server.training.core.changes import ask_again
from job_server.training.core.job import (
    GONE,
    TERMINATED,
    Halt,
    HaltPhase,
    Job,
    JobStage,
    TrainingPod,
)
from job_server.training.core.moves import (
    abandon,
    cut_for_halt,
    fail_active,
    fail_preparing,
    finish,
    let_go,
    neutral,
    note_written,
    order_end,
)
from job_server.training.core.work import Work, client_silent_at, is_silent
from job_server.training.rules.share import stays_after_all

SAVE_AGAIN_S = 10.0  # between two rounds in which no client could write the state
SAVE_STALL_S = 60.0  # without new bytes until a client that writes a state counts as stuck


def halt(work: Work) -> None:
    """Take a pause or an end one phase further if its condition holds."""
    job = work.job
    if job.goal is Goal.RUN:
        return
    if job.halt is None:
        work.set(halt=Halt(phase=HaltPhase.WAIT, since=work.now), waiting="")
    held = work.job.halt
    if held is None or held.phase is HaltPhase.DONE:
        _finish_stopped(work)
        return
    late = work.now >= halt_deadline(work.job, held)
    if held.phase is HaltPhase.WAIT:
        _begin(work, late=late)
    elif held.phase is HaltPhase.CUT:
        _await_cut(work, late=late)
    elif held.phase is HaltPhase.SAVE:
        _await_save(work, held)
    elif held.phase is HaltPhase.END:
        _await_end(work, late=late)
    else:
        _await_release(work, late=late)


def halt_deadline(job: Job, halt: Halt) -> float:
    return halt.since + job.spec.prepare_timeout_s


def _to(work: Work, phase: HaltPhase) -> None:
    work.set(halt=Halt(phase=phase, since=work.now))


def _goal_name(work: Work) -> str:
    return {
        Goal.PAUSE: "pause",
        Goal.YIELD: "wait",
        Goal.STOP: "stop",
        Goal.FAIL: "failure",
    }[work.job.goal]


def _why(work: Work) -> str:
    if work.job.goal is Goal.YIELD:
        return "its pods are for others"
    ending = work.job.ending
    return ending.failed or ending.stopped or f"a {_goal_name(work)} was asked for"


def _goes_on(job: Job) -> bool:
    """Whether the job is to go on later: what cannot be written then calls the halt off."""
    return job.goal.ends_as is None


def _finish_stopped(work: Work) -> None:
    ends_as = work.job.goal.ends_as
    if ends_as is not None:
        ending = work.job.ending
        why = ending.failed or ending.stopped or "stopped on request"
        finish(work, ends_as, f"{why}{_where(work)}")


def _where(work: Work) -> str:
    """Return where the state is that a pause or an end leaves, as a phrase."""
    job = work.job
    saved = job.ending.saved
    if not job.elastic:
        at_work = job.active is not None or job.commits
        plain = "; no trainer has called the elastic loop: EDL cannot know what was saved"
        return plain if at_work else ""
    step = job.progress.step
    if job.ending.discard and not job.done and step > (0 if saved is None else saved.step):
        return f"; step {step} is lost: its state was not written"
    return "" if saved is None else f"; step {saved.step} is in {saved.path}"


def _begin(work: Work, *, late: bool) -> None:
    """Drop a change in preparation and release parked ranks, then begin."""
    job = work.job
    preparing, active = job.preparing, job.active
    if preparing is not None:
        change = preparing.way is not Way.START
        patient = job.goal is not Goal.FAIL and not job.ending.discard and not late
        if change and preparing.phase in (Order.PREPARE, Order.CUT):
            _remember_wish(work, preparing)
            abandon(work, _why(work))
        elif change and job.elastic and patient:
            return  # its state is only in memory: it commits first, then it is cut
        else:
            _remember_wish(work, preparing)
            fail_preparing(work, neutral(work, _why(work)))
        return
    if active is None:
        _after_end(work)
        return
    # The trainers of a start that still wait for each other have no state, and cannot be cut.
    begins = active.way is Way.START and active.first_step_at is None
    begins &= active.all_in(PodStagePhase.STARTED)
    trains = active.over is None and job.elastic and not job.done and not active.finishing
    trains &= not begins
    if trains and not job.ending.discard and not late:
        if not active.resuming:
            _to(work, HaltPhase.CUT)
            cut_for_halt(work)
            work.note(f"cutting stage {active.stage} for a {_goal_name(work)}")
        return
    _end(work)


def _remember_wish(work: Work, preparing: JobStage) -> None:
    """Keep a change that a pause drops: it applies when the job resumes, as a resize would."""
    if work.job.goal is Goal.PAUSE:
        ask_again(work, preparing)


def _end(work: Work) -> None:
    _to(work, HaltPhase.END)
    if work.job.active is not None and work.job.active.over is None:
        fail_active(work, neutral(work, _why(work)))
    for stage in (work.job.retiring, work.job.active):
        if stage is not None:
            order_end(work, stage)


def _await_cut(work: Work, *, late: bool) -> None:
    job = work.job
    stage = job.active
    if stage is None or stage.over is not None or job.ending.discard:
        _end(work)
        return
    steps = {member.step for member in stage.members if member.phase is PodStagePhase.PARKED}
    if stage.all_in(PodStagePhase.PARKED, *TERMINATED) and len(steps) <= 1:
        _to(work, HaltPhase.SAVE)
    elif late:
        others = stage.pods_not_in(PodStagePhase.PARKED, *TERMINATED)
        text = f"not parked in time: {', '.join(others)}"
        if _goes_on(job) and newest_in_memory(job) is None:
            _call_off(work, f"{text}; and nothing is in memory yet")
            return
        work.note(f"{text}; what is in no snapshot is done again")
        _end(work)


# --- the newest state ---------------------------------------------------------------------------


def _await_save(work: Work, held: Halt) -> None:
    """Have one client after another write the newest state until one succeeds."""
    job = work.job
    source = _writable(work)
    if job.ending.discard:
        _end(work)
    elif (parked := _parked_without_snapshot(work)) is not None:
        _end_without_snapshot(work, parked)
    elif source is None:
        _end(work)
    elif held.save is None:
        _order_save(work, held, source)
    else:
        _apply_save(work, held, held.save, source)


def _parked_without_snapshot(work: Work) -> JobStage | None:
    """Return the stage that has parked and had no memory for a snapshot of its state.

    None: a snapshot holds the state.
    """
    stage = work.job.active
    if stage is None or stage.over is not None:
        return None
    step = max(
        (member.step for member in stage.members if member.phase is PodStagePhase.PARKED), default=0
    )
    source = newest_in_memory(work.job)
    is_kept = source is not None and (source.stage, source.step) >= (stage.stage, step)
    return None if is_kept else stage


def _end_without_snapshot(work: Work, stage: JobStage) -> None:
    if not note_written(work, stage) and _goes_on(work.job):
        _call_off(work, why_in_trainers_only(stage))
        return
    _end(work)


def _order_save(work: Work, held: Halt, source: RestoreFrom) -> None:
    if held.again_at is not None and work.now < held.again_at:
        return
    pods = [pod for pod in _savers(work, source) if pod.site.node_id not in held.tried]
    answering = [pod for pod in pods if work.now < client_silent_at(work.job, pod, work.cluster)]
    if answering:
        # A silent node may still be writing at the script's path: two would mix their files.
        order = Save(id=work.job.ending.orders + 1, spare=bool(held.tried))
        pod = answering[0]
        changed = replace(held, save=order, pod_id=pod.pod_id, since=work.now, again_at=None)
        work.set(ending=replace(work.job.ending, orders=order.id), halt=changed)
        work.progress(saving=None, saving_at=work.now)
        if held.kept_since is None:  # otherwise it was noted in an earlier round
            work.note(f"node {pod.site.node_id} writes the state of step {source.step} or later")
    elif pods and work.now < held.since + SAVE_STALL_S:
        return  # their clients may still answer
    else:
        why = held.why_not or "no client of a node that holds it answers"
        _not_saved(work, replace(held, why_not=why), source)


def _writable(work: Work) -> RestoreFrom | None:
    """Return the newest unsaved state that some client is able to write, now or later.

    An older one is better than none: clients of the version before write no states.
    """
    nodes = {pod.pod_id: find_node(work.cluster, pod.site.node_id) for pod in work.job.pods}
    unable = {pod_id for pod_id, view in nodes.items() if view is not None and not view.node.saves}
    return unsaved(work.job, unable)


def _savers(work: Work, source: RestoreFrom) -> list[TrainingPod]:
    """Return pods that hold the state, one per node.

    The node whose trainers write checkpoints comes first.
    """
    job = work.job
    stage = job.active
    ranked = [] if stage is None else [member.pod.node_id for member in stage.members]
    found: dict[str, TrainingPod] = {}
    for pod_id in source.pods:
        pod = job.pod(pod_id)
        if pod is not None:
            found.setdefault(pod.site.node_id, pod)
    first = {node_id: index for index, node_id in reversed(list(enumerate(ranked)))}
    return sorted(found.values(), key=lambda pod: first.get(pod.site.node_id, len(ranked)))


def _apply_save(work: Work, held: Halt, order: Save, source: RestoreFrom) -> None:
    state = work.job.progress.saving
    if state is not None and state.id != order.id:
        state = None
    why = ""
    if state is not None and state.phase is SavePhase.WRITTEN:
        why = f"it holds step {state.step} only, not {source.step}"
    elif state is not None and state.phase is SavePhase.FAILED:
        why = state.reason
    elif held.pod_id not in source.pods:
        why = "the pod that held it is gone"
    elif work.now >= save_deadline(work.job, held):
        why = f"nothing was written for {SAVE_STALL_S:.0f} s"
    if state is not None and state.nothing:
        snapshots = without(work.job.progress.snapshots, held.pod_id)
        work.progress(snapshots=snapshots)
    if why:
        pod = work.job.pod(held.pod_id)
        node = (pod.site.node_id,) if pod is not None else ()
        text = f"{node[0]}: {why}" if node else why
        work.set(halt=replace(held, save=None, pod_id="", tried=held.tried + node, why_not=text))
        if text != held.why_not:
            work.note(f"the state of step {source.step} is not written: {text}", lasting=False)


def save_deadline(job: Job, halt: Halt) -> float:
    """Return when the writing client has made no progress for too long."""
    return max(halt.since, job.progress.saving_at) + SAVE_STALL_S


def _not_saved(work: Work, held: Halt, source: RestoreFrom) -> None:
    """Call off a pause whose state no client could write; any other end keeps it in memory."""
    job = work.job
    if _goes_on(job):
        _call_off(work, f"the state of step {source.step} cannot be written: {held.why_not}")
        return
    if job.active is not None and not job.active.all_in(*GONE):
        _end(work)  # its pods keep their slots until it is over; then it is tried again
        return
    since = work.now if held.kept_since is None else held.kept_since
    keep_s = job.spec.keep_failed_s
    if work.now >= since + keep_s:
        work.set(ending=replace(job.ending, discard=True))
        work.note(f"step {source.step} could not be written for {duration(keep_s)}")
        return
    for pod in job.pods:
        if not pod.leaving:
            let_go(work, pod.pod_id)
    if held.kept_since is None:
        work.note(
            f"{f'failed: {job.ending.failed}; ' if job.ending.failed else ''}"
            f"the state of step {source.step} is kept in memory for {duration(keep_s)}, as it "
            f"cannot be written: {held.why_not}; it is tried again every {SAVE_AGAIN_S:.0f} s; "
            f"`edl stop {job.spec.job_id} --discard` gives it up"
        )
    again_at = min(work.now + SAVE_AGAIN_S, since + keep_s)
    work.set(halt=replace(held, tried=(), kept_since=since, again_at=again_at))


def _call_off(work: Work, why: str) -> None:
    """Let the job go on: parked trainers resume, or it recovers from memory."""
    yields = work.job.goal is Goal.YIELD
    work.set(goal=Goal.RUN, halt=None)
    if yields:
        stays_after_all(work, why)
    work.note(f"not {'stopped' if yields else 'paused'}: {why}; the job goes on")


# --- the end of trainers and pods ---------------------------------------------------------------


def _await_end(work: Work, *, late: bool) -> None:
    stages = [s for s in (work.job.retiring, work.job.active) if s is not None]
    if not late and not all(stage.all_in(*GONE) for stage in stages):
        return
    for stage in stages:
        for member in stage.members:
            if member.phase not in GONE:
                work.move(stage, member.pod.pod_id, PodStagePhase.LOST)
    _after_end(work)


def _after_end(work: Work) -> None:
    """Save what was not saved before, then release the pods; no trainer is left."""
    if not work.job.ending.discard:
        if _writable(work) is not None:
            _to(work, HaltPhase.SAVE)
            return
        if (holders := unheard(work.job)) and _keeps(work, holders):
            return
        if (left := unsaved(work.job)) is not None:
            work.note(
                f"step {left.step} is on nodes whose job clients are of a version that writes no "
                f"states; trainers may have"
            )
    _to(work, HaltPhase.RELEASE)
    for pod in work.job.pods:
        work.release(pod.pod_id)


def _keeps(work: Work, holders: list[TrainingPod]) -> bool:
    """Wait until clients say what these pods hold; return whether the job waits, or goes on."""
    job, held = work.job, work.job.halt
    assert held is not None
    silent = [pod for pod in holders if work.now >= client_silent_at(job, pod, work.cluster)]
    names = ", ".join(sorted({pod.site.node_id for pod in silent}))
    why = f"the newest state may be on {names}, which cannot be reached"
    if silent and _goes_on(job):
        _call_off(work, why)
        return True
    since = work.now if held.kept_since is None else held.kept_since
    keep_s = job.spec.keep_failed_s
    if work.now >= since + keep_s:
        nodes = ", ".join(sorted({pod.site.node_id for pod in holders}))
        work.note(f"{nodes} did not say within {duration(keep_s)} what the pods hold")
        return False
    for pod in job.pods:
        if not pod.leaving:
            let_go(work, pod.pod_id, holds=pod in holders or None)
    if silent and not held.why_not:
        work.note(
            f"{why}; waiting for {duration(keep_s)} at most; "
            f"`edl stop {job.spec.job_id} --discard` gives it up"
        )
    why_not = why if silent else held.why_not
    work.set(halt=replace(work.job.halt or held, kept_since=since, why_not=why_not))
    return True


def _await_release(work: Work, *, late: bool) -> None:
    """Wait until the clients that can be reached have confirmed."""
    job = work.job
    for pod in job.pods:
        if not pod.released:
            work.release(pod.pod_id)
    job = work.job
    waits = [pod for pod in job.pods if not is_silent(work, pod)]
    if waits and not late:
        return
    where = _where(work)
    active = job.active
    stopped = active is None or active.any_in(*TERMINATED)
    if active is not None and not job.elastic:
        stopped = active.all_in(*TERMINATED)
    if stopped:
        active = None  # otherwise the next start must see that the old stage is over
    work.set(active=active, retiring=None, recovery_pods=(), fresh=True, served=())
    _to(work, HaltPhase.DONE)
    if job.goal is Goal.YIELD:
        work.note(f"stopped for now{where}")
        go_on(work)
    elif job.goal is Goal.PAUSE:
        work.note(f"paused{where}")
        if job.queue.resize is not None:
            target = job.queue.resize.pods
            work.set(target=target, queue=replace(job.queue, resize=None))
            work.note(f"resize to {target}: holds from the next start on", lasting=False)
    else:
        _finish_stopped(work)


def resume(work: Work) -> None:
    """Start again after a pause."""
    go_on(work)
    work.note("resumed")


def go_on(work: Work) -> None:
    """Let the job begin its next start, or wait for its turn."""
    budget = replace(work.job.budget, retry_at=work.now)
    work.set(goal=Goal.RUN, halt=None, start_since=work.now, budget=budget)
    active = work.job.active
    if active is not None and active.over is not None:
        work.set(active=replace(active, over=replace(active.over, counted=True)))
