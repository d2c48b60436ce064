"""The moves of a job from stage to stage: begin, abandon, fail, commit, end. Pure.

Each function makes one move and keeps the books; when it is right to make it is decided in
`advance` (by what is true) and `reports` (by what happened).
"""

from dataclasses import replace

from job_server.api.wire import JobState, SlotKind, Way
from job_server.cluster.placement import Cluster, find_node
from job_server.training import budget
from job_server.training.bookkeeping import (
    close_attempt,
    close_stage,
    open_record,
    stand_still,
    update_record,
)
from job_server.training.job import (
    DONE,
    EARLY,
    OVER,
    At,
    Cause,
    CauseKind,
    Goal,
    Job,
    Keep,
    Member,
    Phase,
    Pod,
    Stage,
)
from job_server.training.layout import choose_restore, is_on_every_node, lay_out, unsaved
from job_server.training.losses import leave_out_lost
from job_server.training.work import Work, stage_named

GROW_RETRY_S = 30.0
GROW_RETRY_CAP_S = 600.0
STANDBY_RETRY_S = 60.0
ROOM_FACTOR = 1.1  # of what a trainer uses on a GPU has to be free for a second one


def choose_way(job: Job, cluster: Cluster, *, stood_by: bool = False) -> Way:
    """Return how a change of the stage in force happens.

    STOP where no trainer has called the elastic loop: only such trainers can agree on a step.
    REPLACE, where the next trainers may be made ready beside those that train. JOIN, where they do
    not fit beside each other, or the user wants it, and all trainers offer it. Else DRAIN.

    Args:
        stood_by: a standby, which has just been dismissed, is part of what the nodes report.
    """
    if not job.elastic:
        return Way.STOP
    overlap = job.spec.overlap
    if overlap == "off":
        return Way.DRAIN
    joins = _all_join(job)
    if overlap == "join" and joins:
        return Way.JOIN
    if overlap == "on" or _both_fit(job, cluster, sets=1 + stood_by):
        return Way.REPLACE
    return Way.JOIN if joins else Way.DRAIN


def _all_join(job: Job) -> bool:
    """Whether every trainer of the stage in force can form a second group beside its own."""
    pod_ids = job.current.pod_ids if job.current is not None else ()
    return bool(pod_ids) and all(job.progress.joins.get(pod_id, False) for pod_id in pod_ids)


def _both_fit(job: Job, cluster: Cluster, *, sets: int) -> bool:
    """Whether every GPU of the stage in force has room for a second trainer like its first.

    Memory of the host is not looked at: what a trainer needs of it is mostly shared.

    Args:
        sets: how many trainers, all alike, use the memory that is in use.
    """
    for member in job.current.members if job.current is not None else ():
        view = find_node(cluster, member.pod.node_id)
        slots = () if view is None else view.node.slots
        for slot in slots:
            if slot.kind is not SlotKind.GPU or slot.index not in member.pod.slots:
                continue
            used = 0 if view is None else view.memory_used.get(slot.index, 0)
            used = used // sets
            if not 0 < used * ROOM_FACTOR <= slot.memory_bytes - used:
                return False
    return True


def begin(
    work: Work,
    pods: tuple[Pod, ...],
    *,
    way: Way,
    reason: str,
    target: int,
    counts: bool = False,
    standby: bool = False,
) -> None:
    """Start to prepare a stage of these pods, in rank order."""
    number = work.job.next_stage
    stage = Stage(
        stage=number,
        way=way,
        phase=Phase.PREPARE,
        since=work.now,
        reason=reason,
        members=tuple(Member(pod=pod) for pod in lay_out(work, pods)),
        target=target,
        counts=counts,
        standby=standby,
    )
    open_record(work, stage, sum(len(member.pod.ranks) for member in stage.members))
    work.set(coming=stage, next_stage=number + 1, waiting="")
    work.note(f"preparing stage {number} of {_pods(len(pods))} by {way.value}: {_brief(reason)}")


def enter(work: Work, phase: Phase) -> None:
    """Take the coming stage to its next phase."""
    job = work.job
    stage = job.coming
    assert stage is not None
    work.set(coming=replace(stage, phase=phase, since=work.now))
    current = job.current
    if phase is Phase.CUT and current is not None:
        work.set(current=_cutting(current))
        work.note(f"stage {stage.stage} is ready: cutting stage {current.stage}")
    if phase is Phase.END and current is not None:
        if stage.phase is Phase.PREPARE and current.over is None:
            work.note(f"stage {stage.stage} is ready: ending stage {current.stage}")
        tell_to_end(work, current)
        stand_still(work)


def _cutting(stage: Stage) -> Stage:
    members = tuple(
        replace(member, at=At.CUTTING) if member.at in EARLY else member for member in stage.members
    )
    return replace(stage, members=members, cut=stage.cut + 1)


def cut_for_halt(work: Work) -> None:
    """Tell the stage in force to drain, with a durable checkpoint; nothing follows it."""
    if work.job.current is not None:
        work.set(current=_cutting(work.job.current))


def tell_to_end(work: Work, stage: Stage) -> None:
    """From now on the stage's pods are told END; that is never taken back."""
    if stage.end_since is None:
        work.set_stage(replace(stage, end_since=work.now, resuming=False))


def enter_start(work: Work) -> None:
    """Start the coming stage's trainers, from the newest state that anybody holds."""
    job = work.job
    stage = job.coming
    assert stage is not None
    members = tuple(
        member if member.at in DONE else replace(member, at=At.READY) for member in stage.members
    )
    restore = choose_restore(job)
    stage = replace(
        stage,
        phase=Phase.START,
        since=work.now,
        members=members,
        restore_from=restore,
        base_step=None if restore is None else restore.step,
    )
    work.set(coming=stage)
    source = ""
    if restore is not None:
        place = f"in {restore.path}" if restore.path else "from memory"
        source = f" from step {restore.step} of stage {restore.stage}, {place}"
    elif job.commits and job.elastic:
        source = " from the checkpoint path, if it holds anything"
    elif job.commits:
        source = " afresh: none has called the elastic loop"
    work.note(f"starting the trainers of stage {stage.stage}{source}")


def renumber(work: Work, highest: int) -> None:
    """Burn the coming stage's number: the checkpoint path holds stages up to `highest`."""
    job = work.job
    old = job.coming
    assert old is not None
    number = max(job.next_stage, highest + 1)
    close_attempt(work, old.stage, f"the checkpoint path holds stage {highest}")
    pods = tuple(pod for pod_id in old.pod_ids if (pod := job.pod(pod_id)) is not None)
    laid_out = {pod.pod_id: pod for pod in lay_out(work, pods)}
    members = tuple(
        replace(member, pod=laid_out.get(member.pod.pod_id, member.pod)) for member in old.members
    )
    stage = replace(old, stage=number, attempt=0, members=members)
    work.set(coming=stage, next_stage=number + 1)
    open_record(work, stage, sum(len(member.pod.ranks) for member in members))
    work.note(
        f"stage {old.stage} becomes stage {number}: the checkpoint path holds stage {highest}"
    )
    if stage.phase is Phase.START:
        enter_start(work)


def deal_again(work: Work, why: str) -> None:
    """Deal new ports to the coming stage; its trainers start again."""
    stage = work.job.coming
    assert stage is not None
    pods = tuple(pod for pod_id in stage.pod_ids if (pod := work.job.pod(pod_id)) is not None)
    laid_out = {pod.pod_id: pod for pod in lay_out(work, pods)}
    at = At.READY if stage.phase is Phase.START else At.ABSENT
    members = tuple(
        member
        if member.at in DONE
        else replace(member, pod=laid_out.get(member.pod.pod_id, member.pod), at=at)
        for member in stage.members
    )
    work.set(coming=replace(stage, attempt=stage.attempt + 1, members=members))
    work.note(f"stage {stage.stage} gets new ports: {why}")


def join_otherwise(work: Work, way: Way, why: str) -> None:
    """Let a change that cannot go by JOIN go by `way`: what was made for it is made anew."""
    stage = work.job.coming
    assert stage is not None
    work.set(coming=replace(stage, way=way, since=work.now))
    update_record(work, stage.stage, way=way)
    deal_again(work, f"{why}; not by join but by {way.value}")


def commit(work: Work, *, kept: bool = False) -> None:
    """Put the coming stage in force. The caller writes before anybody is told.

    Args:
        kept: all pods of the stage before have parked, and what they have parked with is in the
            newest snapshot; else their state may be newer than what was heard of it.
    """
    job = work.job
    stage, old = job.coming, job.current
    assert stage is not None
    stage = replace(stage, phase=Phase.COMMITTED, since=work.now, committed_at=work.now)
    beside = stage.way in (Way.REPLACE, Way.JOIN)
    if beside:
        restore = choose_restore(job)
        base = None if restore is None else restore.step
        if restore is not None and kept:
            restore = replace(restore, on_every_node=is_on_every_node(job, stage, restore))
        stage = replace(stage, restore_from=restore, base_step=base)
    if old is not None:
        close_stage(work, old, "ended")
    update_record(work, stage.stage, outcome="committed", committed_at=work.now, flag=job.next_flag)
    step = job.progress.step if stage.base_step is None else stage.base_step
    work.set(
        previous=old if beside and old is not None and old.over is None else None,
        current=stage,
        coming=None,
        roster=stage.pod_ids,
        served=tuple(member.pod for member in stage.members),
        commits=job.commits + 1,
        # Of a standby nobody asked for another size, and somebody may have, since it was prepared.
        target=job.target if stage.standby else stage.target,
        resizes=job.resizes + stage.counts,
        fresh=False,
        done=False,
        waiting="",
        grow_failures=0,
        standby_failures=0,
        line_step=job.progress.step,
    )
    work.progress(steps={}, step=step)
    if work.job.previous is None:
        dismiss_leavers(work)
    work.note(f"stage {stage.stage} committed: {_pods(len(stage.members))}, {_brief(stage.reason)}")


def dismiss_leavers(work: Work) -> None:
    """Let the pods go that the stage in force does not name; those with a snapshot keep it."""
    stage = work.job.current
    assert stage is not None
    for pod in work.job.pods:
        if pod.keep is Keep.RUN and not pod.left and pod.pod_id not in stage.pod_ids:
            let_go(work, pod.pod_id)


def let_go(work: Work, pod_id: str) -> None:
    """Release a pod, but for its shim where that holds a snapshot."""
    holds = pod_id in work.job.progress.snapshots
    work.release(pod_id, Keep.HOLD if holds else Keep.RELEASED)


def abandon(work: Work, why: str) -> None:
    """Drop a change that has not ended the old stage; parked ranks go on."""
    job = work.job
    stage, current = job.coming, job.current
    assert stage is not None
    close_attempt(work, stage.stage, why)
    stay = set(job.roster) | set(current.pod_ids if current is not None else ())
    work.set(coming=None)
    for pod_id in stage.pod_ids:
        if pod_id not in stay:
            work.release(pod_id)
    if current is not None and current.over is None and stage.phase is Phase.CUT:
        work.set(current=replace(current, resuming=True))
    _put_off(work, stage)
    work.note(f"stage {stage.stage} abandoned: {why}")


def dismiss_standby(work: Work) -> None:
    """Make room for a change; the next standby is one for the stage that it leads to."""
    if work.job.coming is not None and work.job.coming.standby:
        abandon(work, "it stood by, and a change comes first")
        work.set(standby_at=0.0, standby_failures=0)


def _put_off(work: Work, stage: Stage) -> None:
    """What nobody asked for, and came to nothing, is tried again only later."""
    if stage.standby:
        # A script that breaks in its warm-up step would cost the training a start every minute.
        wait_s = STANDBY_RETRY_S * 2.0 ** min(work.job.standby_failures, 6)
        failures = work.job.standby_failures + 1
        work.set(standby_at=work.now + wait_s, standby_failures=failures)
    elif not stage.counts and stage.way is not Way.START:
        _delay_growth(work)


def _delay_growth(work: Work) -> None:
    failures = work.job.grow_failures
    wait_s = min(GROW_RETRY_CAP_S, GROW_RETRY_S * 2.0 ** min(failures, 10))
    work.set(grow_at=work.now + wait_s, grow_failures=failures + 1)


def fail_current(work: Work, cause: Cause) -> None:
    """The stage in force cannot go on; a victim's word gives way to a culprit's."""
    job = work.job
    stage = job.current
    if stage is None:
        return
    if stage.over is not None:
        _hear_another(work, stage, stage.over, cause)
        return
    stand_still(work, cause)
    work.set(current=replace(stage, over=cause, resuming=False))
    for held in (job.previous, stage):
        if held is not None:
            tell_to_end(work, stage_named(work.job, held.stage) or held)
    if stage.committed:
        close_stage(work, stage, "ended")
    work.note(f"stage {stage.stage} is over: {cause.text}")
    leave_out_lost(work)
    coming = work.job.coming
    if coming is None:
        return
    if not all(job.usable(pod_id) for pod_id in coming.pod_ids):
        abandon(work, cause.text)
        return
    if coming.way is Way.JOIN and coming.phase in (Phase.PREPARE, Phase.CUT):
        # Those who were to stay go down with their stage: all trainers start anew.
        join_otherwise(work, Way.DRAIN, "the trainers that were to stay are gone")
    if coming.phase is Phase.CUT:
        enter(work, Phase.END)


def _hear_another(work: Work, stage: Stage, known: Cause, cause: Cause) -> None:
    """A stage that is over has failed once more: it may be the culprit who speaks now."""
    if known.counted:
        return
    faults = known.faults + cause.faults
    if known.peer_lost and not cause.peer_lost:
        work.set(current=replace(stage, over=replace(cause, at=known.at, faults=faults)))
        work.note(f"stage {stage.stage} failed because {cause.text}")
    elif cause.faults:
        work.set(current=replace(stage, over=replace(known, faults=faults)))


def fail_coming(work: Work, cause: Cause) -> None:
    """The stage in preparation cannot be committed as it is."""
    job = work.job
    stage = job.coming
    if stage is None:
        return
    starts = stage.way is Way.START
    if starts:
        work.set(roster=tuple(pod_id for pod_id in stage.pod_ids if job.usable(pod_id)))
    if stage.phase in (Phase.PREPARE, Phase.CUT):
        if starts:
            close_attempt(work, stage.stage, cause.text)
            work.set(coming=None)
            work.note(f"stage {stage.stage} abandoned: {cause.text}")
            count(work, cause)
        else:
            abandon(work, cause.text)
        return
    close_attempt(work, stage.stage, cause.text)
    work.note(f"stage {stage.stage} abandoned: {cause.text}")
    _put_off(work, stage)
    if stage.phase is Phase.END:
        current = job.current
        work.set(coming=None)
        if current is not None and current.over is None:
            work.set(current=replace(current, over=cause))
        return
    # Trainers of it run: it is the one to be ended now.
    if job.current is not None:
        close_stage(work, job.current, "ended")
    work.set(current=replace(stage, over=cause), coming=None)
    tell_to_end(work, stage_named(work.job, stage.stage) or stage)


def count(work: Work, cause: Cause) -> None:
    """Book a failure or preemption; the job fails where a budget is used up."""
    stage = work.job.current
    started = stage.committed_at if stage is not None else None
    ran_s = 0.0 if started is None else cause.at - started
    verdict = budget.count(work.job, cause, work.now, ran_s=ran_s)
    work.job = verdict.job
    if verdict.give_up:
        fail(work, verdict.give_up)
    elif verdict.job.retry_at > work.now:
        work.note(f"trying again in {verdict.job.retry_at - work.now:.1f} s")


def count_current(work: Work) -> None:
    """Book why the current stage is over, once."""
    stage = work.job.current
    if stage is None or stage.over is None or stage.over.counted:
        return
    cause = stage.over
    work.set(current=replace(stage, over=replace(cause, counted=True)))
    count(work, cause)


def fail(work: Work, why: str) -> None:
    """The job cannot go on. What is only in memory is written first: the cause may be mended."""
    if unsaved(work.job) is None:
        finish(work, JobState.FAILED, why)
        return
    work.set(goal=Goal.FAIL, failed=why, halt=None)
    work.note(f"failed: {why}; its newest state is written first")


def finish(work: Work, state: JobState, reason: str) -> None:
    """End the job for good and let all its pods go."""
    job = work.job
    for stage in job.stages:
        if stage.committed:
            close_stage(work, stage, "ended")
        else:
            close_attempt(work, stage.stage, reason)
    for pod in work.job.pods:
        work.release(pod.pod_id)
    work.set(
        state=state,
        ended_at=work.now,
        previous=None,
        coming=None,
        waiting="",
        manual=None,
        halt=None,
        cut_off=False,
    )
    work.note(f"{state.value}: {reason}")


def lose(work: Work, pod_id: str, cause: Cause, *, confirmed: bool, holds: bool = False) -> None:
    """Give a pod up.

    Args:
        confirmed: no trainer of it runs; otherwise it could only not be reached.
        holds: its shim is there and may hold a snapshot.
    """
    job = work.job
    snapshot = holds and pod_id in job.progress.snapshots
    work.release(pod_id, Keep.HOLD if snapshot else Keep.RELEASED)
    leave_out_lost(work)
    job = work.job
    place = At.ENDED if confirmed else At.LOST
    concerned = []
    for stage in job.stages:
        member = stage.member(pod_id)
        if member is None:
            continue
        concerned.append(stage.stage)
        if member.at not in OVER:
            work.move(stage, pod_id, place)
    current, coming = work.job.current, work.job.coming
    if current is not None and current.stage in concerned and current.end_since is None:
        fail_current(work, cause)
    elif current is not None and current.stage in concerned and current.over is not None:
        fail_current(work, cause)  # may name the culprit
    if work.job.coming is not None and coming is not None and coming.stage in concerned:
        fail_coming(work, cause)


def neutral(work: Work, text: str) -> Cause:
    return Cause(kind=CauseKind.NEUTRAL, text=text, at=work.now)


def _brief(reason: str) -> str:
    """Return why a stage is made without what was told when the one before it was over."""
    return "recovery" if reason.startswith("recovery: ") else reason


def _pods(count: int) -> str:
    return "1 pod" if count == 1 else f"{count} pods"
