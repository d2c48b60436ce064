"""Move a job from stage to stage: begin, abandon, fail, commit, end. Pure.

Each function makes one move and keeps the records. `rules/` decide when to make it, by what is
true, and `reports/` by what happened.
"""

from msgspec.structs import replace

from job_server.api.wire import (
    DesiredState,
    JobState,
    Order,
    PlanPod,
    PodStagePhase,
    Saved,
    SnapshotRef,
    Way,
)
from job_server.jobs.work import Goal
from job_server.training.core.accounting import (
    close_attempt,
    close_stage,
    count_failure,
    open_record,
    stand_still,
    update_record,
)
from job_server.training.core.allocation import (
    choose_restore,
    is_local,
    is_local_on_all_nodes,
    is_superseded,
    lay_out,
    unsaved,
)
from job_server.training.core.job import (
    COMPLETED,
    GONE,
    STARTUP_ORDER,
    Cause,
    CauseKind,
    Job,
    JobStage,
    RetryLater,
    StagePod,
    TrainingPod,
    age,
)
from job_server.training.core.work import Work

GROW_RETRY_S = 30.0
GROW_RETRY_CAP_S = 600.0
STANDBY_RETRY_S = 60.0


def begin(
    work: Work,
    pods: tuple[TrainingPod, ...],
    *,
    way: Way,
    reason: str,
    target: int,
    counts: bool = False,
    standby: bool = False,
) -> None:
    """Begin to prepare a stage of these pods, in rank order.

    By join only where a pod stays, which hands the state on; else all pods are new, on slots of
    their own, so that there is room for both sets.
    """
    number, active = work.job.next_stage, work.job.active
    trains = () if active is None else active.pod_ids
    if way is Way.JOIN and not any(pod.pod_id in trains for pod in pods):
        way = Way.REPLACE
    stage = JobStage(
        stage=number,
        way=way,
        phase=Order.PREPARE,
        since=work.now,
        reason=reason,
        members=tuple(StagePod(pod=pod) for pod in lay_out(work, pods)),
        target=target,
        counts=counts,
        standby=standby,
    )
    open_record(work, stage)
    work.set(preparing=stage, next_stage=number + 1, waiting="")
    work.note(f"preparing stage {number} of {_pods(len(pods))} by {way.value}: {_brief(reason)}")


def enter(work: Work, phase: Order) -> None:
    """Take the stage in preparation to its next phase."""
    job = work.job
    stage = job.preparing
    assert stage is not None
    work.set(preparing=replace(stage, phase=phase, since=work.now))
    active = job.active
    if phase is Order.CUT and active is not None:
        work.set(active=_cutting(active))
        work.note(f"stage {stage.stage} is ready: cutting stage {active.stage}")
    if phase is Order.END and active is not None:
        if stage.phase is Order.PREPARE and active.over is None:
            work.note(f"stage {stage.stage} is ready: ending stage {active.stage}")
        order_end(work, active)
        stand_still(work)


def _cutting(stage: JobStage) -> JobStage:
    members = tuple(
        replace(member, phase=PodStagePhase.CUTTING) if member.phase in STARTUP_ORDER else member
        for member in stage.members
    )
    return replace(stage, members=members, cut=stage.cut + 1)


def cut_for_halt(work: Work) -> None:
    """Order the active stage to cut for a pause or an end; no stage follows."""
    if work.job.active is not None:
        work.set(active=_cutting(work.job.active))


def note_written(work: Work, stage: JobStage) -> bool:
    """Enter where a trainer of a parked stage has written its state. False: none has."""
    wrote = next((member for member in stage.members if member.durable), None)
    if wrote is None:
        return False
    saved = Saved(stage=stage.stage, step=wrote.step, path=wrote.durable, node_id=wrote.pod.node_id)
    work.set(ending=replace(work.job.ending, saved=saved))
    work.note(f"step {saved.step} is written to {saved.path}")
    return True


def order_end(work: Work, stage: JobStage) -> None:
    """Order the stage's pods to END; this is never taken back."""
    if stage.end_since is None:
        work.set_stage(replace(stage, end_since=work.now, resuming=False))


def enter_start(work: Work) -> None:
    """Start the trainers of the stage in preparation from the newest state."""
    job = work.job
    stage = job.preparing
    assert stage is not None
    members = tuple(
        member if member.phase in COMPLETED else replace(member, phase=PodStagePhase.READY)
        for member in stage.members
    )
    restore, saved = choose_restore(work), job.ending.saved
    if restore is not None and saved is not None and is_local(restore.path):
        nodes = {member.pod.node_id for member in members}
        restore = replace(restore, away=saved.node_id not in nodes)
    stage = replace(
        stage,
        phase=Order.START,
        since=work.now,
        members=members,
        restore_from=restore,
        base_step=None if restore is None else restore.step,
    )
    work.set(preparing=stage)
    source = ""
    if restore is not None:
        place = f"in {restore.path}" if restore.path else "from memory"
        source = f" from step {restore.step} of stage {restore.stage}, {place}"
    elif job.elastic:
        source = " from the checkpoint path, if it holds anything"
    elif job.commits:
        source = " afresh: none has called the elastic loop"
    work.note(f"starting the trainers of stage {stage.stage}{source}")


def renumber(work: Work, highest: int) -> None:
    """Give the stage in preparation a number above `highest`, which the checkpoint path holds."""
    job = work.job
    old = job.preparing
    assert old is not None
    number = max(job.next_stage, highest + 1)
    close_attempt(work, old.stage, f"the checkpoint path holds stage {highest}")
    laid_out = _lay_out_again(work, old)
    members = tuple(
        replace(member, pod=laid_out.get(member.pod.pod_id, member.pod)) for member in old.members
    )
    stage = replace(old, stage=number, attempt=0, members=members)
    work.set(preparing=stage, next_stage=number + 1)
    open_record(work, stage)
    work.note(
        f"stage {old.stage} becomes stage {number}: the checkpoint path holds stage {highest}"
    )
    if stage.phase is Order.START:
        enter_start(work)


def _lay_out_again(work: Work, stage: JobStage) -> dict[str, PlanPod]:
    pods = work.job.known_pods(stage.pod_ids)
    return {pod.pod_id: pod for pod in lay_out(work, pods)}


def reallocate_ports(work: Work, why: str) -> None:
    """Assign new ports to the stage in preparation; its trainers start again."""
    stage = work.job.preparing
    assert stage is not None
    laid_out = _lay_out_again(work, stage)
    phase = PodStagePhase.READY if stage.phase is Order.START else PodStagePhase.ABSENT
    members = tuple(
        member
        if member.phase in COMPLETED
        else replace(member, pod=laid_out.get(member.pod.pod_id, member.pod), phase=phase)
        for member in stage.members
    )
    work.set(preparing=replace(stage, attempt=stage.attempt + 1, members=members))
    work.note(f"stage {stage.stage} gets new ports: {why}")


def join_otherwise(work: Work, way: Way, why: str) -> None:
    """Continue a change that cannot go by JOIN by `way`; its trainers are prepared again."""
    stage = work.job.preparing
    assert stage is not None
    work.set(preparing=replace(stage, way=way, since=work.now))
    update_record(work, stage.stage, way=way)
    reallocate_ports(work, f"{why}; not by join but by {way.value}")


def commit(work: Work, *, snapshot_is_current: bool = False) -> None:
    """Make the stage in preparation the active one. The caller writes before anyone is notified.

    Args:
        snapshot_is_current: all pods of the stage before have parked, and the newest snapshot
            holds the state they parked with; otherwise their state may be newer than reported.
    """
    job = work.job
    stage, old = job.preparing, job.active
    assert stage is not None
    stage = replace(stage, phase=Order.GO, since=work.now, committed_at=work.now)
    if stage.overlaps:
        restore = choose_restore(work)
        base = None if restore is None else restore.step
        if restore is not None and snapshot_is_current:
            restore = replace(
                restore, local_on_all_nodes=is_local_on_all_nodes(job, stage, restore)
            )
        stage = replace(stage, restore_from=restore, base_step=base)
    if old is not None:
        close_stage(work, old, "ended")
    update_record(work, stage.stage, outcome="committed", committed_at=work.now, flag=job.next_flag)
    step = job.progress.step if stage.base_step is None else stage.base_step
    if (saved := job.ending.saved) is not None and saved.alone:  # found: the next start looks again
        work.set(ending=replace(job.ending, saved=replace(saved, alone=False)))
    work.set(
        retiring=old if stage.overlaps and old is not None and old.over is None else None,
        active=stage,
        preparing=None,
        recovery_pods=stage.pod_ids,
        served=tuple(member.pod for member in stage.members),
        commits=job.commits + 1,
        # A standby changes no target; a user, or the server, may have since it was prepared.
        target=job.target if stage.standby or job.spec.share else stage.target,
        resizes=job.resizes + stage.counts,
        fresh=False,
        done=False,
        waiting="",
        growth=replace(job.growth, failures=0),
        standby=replace(job.standby, failures=0),
        lineage=replace(job.lineage, previous_last_step=job.progress.step),
    )
    work.progress(steps={}, step=step)
    if work.job.retiring is None:
        dismiss_leavers(work)
    work.note(f"stage {stage.stage} committed: {_pods(len(stage.members))}, {_brief(stage.reason)}")


def dismiss_leavers(work: Work) -> None:
    """Release the pods that the active stage does not name; shims with a snapshot stay."""
    stage = work.job.active
    assert stage is not None
    for pod in work.job.pods:
        if not pod.leaving and not pod.launcher_done and pod.pod_id not in stage.pod_ids:
            let_go(work, pod.pod_id)


def let_go(work: Work, pod_id: str, *, holds: bool | None = None) -> None:
    """Release a pod. Its shim stays while the state that it holds may be needed.

    Args:
        holds: whether there is such a state; None: if one was reported.
    """
    job = work.job
    if holds is None:
        holds = pod_id in job.progress.snapshots
    work.release(pod_id, hold=holds and not is_superseded(job, pod_id))


def release_superseded(work: Work) -> None:
    """Release the held pods whose state nobody needs any more."""
    for pod in work.job.pods:
        if pod.desired is DesiredState.HOLD and is_superseded(work.job, pod.pod_id):
            work.release(pod.pod_id)


def record_snapshot(work: Work, pod_id: str, snapshot: SnapshotRef | None) -> None:
    """Record which state a pod's shim holds. None, or one older than is known, says nothing.

    It may be of a later stage than the job had when the database was copied that the server has.
    """
    job = work.job
    if snapshot is None or job.active is None:
        return
    if snapshot.stage >= job.next_stage:
        work.set(next_stage=snapshot.stage + 1)
    known = job.progress.snapshots.get(pod_id)
    if known is None or age(snapshot) > age(known):
        work.progress(snapshots={**job.progress.snapshots, pod_id: snapshot})
    if snapshot.stage > job.snapshot_stage:
        work.set(snapshot_stage=snapshot.stage)


def abandon(work: Work, why: str) -> None:
    """Drop a change that has not ended the active stage; parked ranks go on."""
    job = work.job
    stage, active = job.preparing, job.active
    assert stage is not None
    close_attempt(work, stage.stage, why)
    stay = set(job.recovery_pods) | set(active.pod_ids if active is not None else ())
    work.set(preparing=None)
    for pod_id in stage.pod_ids:
        if pod_id not in stay:
            let_go(work, pod_id)
    if active is not None and active.over is None and stage.phase is Order.CUT:
        work.set(active=replace(active, resuming=True))
    _put_off(work, stage)
    work.note(f"stage {stage.stage} abandoned: {why}")


def dismiss_standby(work: Work) -> None:
    """Abandon the standby to make room for a change."""
    if work.job.preparing is not None and work.job.preparing.standby:
        abandon(work, "it stood by, and a change comes first")
        work.set(standby=RetryLater())


def _put_off(work: Work, stage: JobStage) -> None:
    """Delay the next try of a change that failed and that no user asked for."""
    if stage.standby:
        # A script that breaks in its warm-up step would cost the training a start every minute.
        failures = work.job.standby.failures
        wait_s = STANDBY_RETRY_S * 2.0 ** min(failures, 6)
        work.set(standby=RetryLater(retry_at=work.now + wait_s, failures=failures + 1))
    elif not stage.counts and stage.way is not Way.START:
        delay_growth(work)


def delay_growth(work: Work) -> None:
    """Have the job wait before it tries again to grow, longer each time."""
    failures = work.job.growth.failures
    wait_s = min(GROW_RETRY_CAP_S, GROW_RETRY_S * 2.0 ** min(failures, 10))
    work.set(growth=RetryLater(retry_at=work.now + wait_s, failures=failures + 1))


def fail_active(work: Work, cause: Cause) -> None:
    """End the active stage: it cannot go on. A culprit's report replaces a victim's."""
    job = work.job
    stage = job.active
    if stage is None:
        return
    if stage.over is not None:
        _reconsider_cause(work, stage, stage.over, cause)
        return
    stand_still(work, cause)
    work.set(active=replace(stage, over=cause, resuming=False))
    for held in (job.retiring, stage):
        if held is not None:
            order_end(work, work.job.stage_numbered(held.stage) or held)
    if stage.committed:
        close_stage(work, stage, "ended")
    work.note(f"stage {stage.stage} is over: {cause.text}")
    leave_out_missing(work)
    preparing = work.job.preparing
    if preparing is None:
        return
    if len(job.usable_pods(preparing.pod_ids)) < len(preparing.members):
        abandon(work, cause.text)
        return
    if preparing.way is Way.JOIN and preparing.phase in (Order.PREPARE, Order.CUT):
        # The trainers that were to stay end with their stage: all are started again.
        join_otherwise(work, Way.DRAIN, "the trainers that were to stay are gone")
    if preparing.phase is Order.CUT:
        enter(work, Order.END)


def _reconsider_cause(work: Work, stage: JobStage, known: Cause, cause: Cause) -> None:
    """Take in another failure of a stage that is over: it may name the culprit."""
    if known.counted:
        return
    if known.peer_lost and not cause.peer_lost:  # what the policy says of victims counts no more
        work.set(active=replace(stage, over=replace(cause, at=known.at)))
        work.note(f"stage {stage.stage} failed because {cause.text}")
        return
    faults = known.faults + cause.faults
    if cause.faults and (known.peer_lost or not cause.peer_lost):
        work.set(active=replace(stage, over=replace(known, faults=faults)))


def fail_preparing(work: Work, cause: Cause) -> None:
    """Give up the stage in preparation: it cannot be committed as it is."""
    job = work.job
    stage = job.preparing
    if stage is None:
        return
    starts = stage.way is Way.START
    if starts:
        usable = job.usable_pods(stage.pod_ids)
        work.set(recovery_pods=tuple(pod.pod_id for pod in usable))
    if stage.phase in (Order.PREPARE, Order.CUT):
        if starts:
            close_attempt(work, stage.stage, cause.text)
            work.set(preparing=None)
            work.note(f"stage {stage.stage} abandoned: {cause.text}")
            count(work, cause)
        else:
            abandon(work, cause.text)
        return
    close_attempt(work, stage.stage, cause.text)
    work.note(f"stage {stage.stage} abandoned: {cause.text}")
    _put_off(work, stage)
    if stage.phase is Order.END:
        active = job.active
        work.set(preparing=None)
        if active is not None and active.over is None:
            work.set(active=replace(active, over=cause))
        return
    # Its trainers run, so it is the stage to end now.
    if job.active is not None:
        close_stage(work, job.active, "ended")
    work.set(active=replace(stage, over=cause), preparing=None)
    order_end(work, work.job.stage_numbered(stage.stage) or stage)


def count(work: Work, cause: Cause) -> None:
    """Count a failure or preemption. The job fails if a budget is used up."""
    stage = work.job.active
    started = stage.committed_at if stage is not None else None
    ran_s = 0.0 if started is None else cause.at - started
    verdict = count_failure(work.job, cause, work.now, ran_s=ran_s)
    work.set(budget=verdict.budget)
    if verdict.give_up:
        fail(work, verdict.give_up)
    elif verdict.budget.retry_at > work.now:
        work.note(f"trying again in {verdict.budget.retry_at - work.now:.1f} s")


def count_active(work: Work) -> None:
    """Count why the active stage is over, once."""
    stage = work.job.active
    if stage is None or stage.over is None or stage.over.counted:
        return
    cause = stage.over
    work.set(active=replace(stage, over=replace(cause, counted=True)))
    count(work, cause)


def fail(work: Work, why: str) -> None:
    """Fail the job. State that is only in memory is written first: the cause may be mended."""
    if unsaved(work.job) is None:
        finish(work, JobState.FAILED, why)
        return
    work.set(goal=Goal.FAIL, ending=replace(work.job.ending, failed=why), halt=None)
    work.note(f"failed: {why}; its newest state is written first")


def finish(work: Work, state: JobState, reason: str) -> None:
    """End the job for good and release all its pods."""
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
        retiring=None,
        preparing=None,
        waiting="",
        queue=replace(job.queue, resize=None),
        halt=None,
        cut_off=False,
    )
    work.note(f"{state.value}: {reason}")


def lose(work: Work, pod_id: str, cause: Cause, *, confirmed: bool, holds: bool = False) -> None:
    """Give a pod up.

    Args:
        confirmed: no trainer of it runs; otherwise it could only not be reached.
        holds: its shim is there, and holds a state or may do so.
    """
    began = pod_id in work.job.progress.heard
    let_go(work, pod_id, holds=holds)
    leave_out_missing(work)
    job = work.job
    place = PodStagePhase.ENDED if confirmed else PodStagePhase.LOST
    concerned = []
    for stage in job.stages:
        member = stage.member(pod_id)
        if member is None:
            continue
        concerned.append(stage.stage)
        given_up = member.phase is PodStagePhase.LOST  # it may be known only now that it has ended
        if member.phase not in GONE or (given_up and confirmed):
            work.move(stage, pod_id, place)
    active, preparing = work.job.active, work.job.preparing
    if active is not None and active.stage in concerned and active.end_since is None:
        fail_active(work, cause)
    elif active is not None and active.stage in concerned and active.over is not None:
        fail_active(work, cause)  # may name the culprit
    if work.job.preparing is not None and preparing is not None and preparing.stage in concerned:
        fail_preparing(work, cause)
        if preparing.counts and not began and cause.kind is not CauseKind.PLANNED:
            _try_again_later(work, preparing)


def _try_again_later(work: Work, stage: JobStage) -> None:
    """Keep a number of pods that was asked for and dropped, as one of the new ones did not start.

    What was short for its node (processes, descriptors, a file server) may be there again.
    """
    job, active = work.job, work.job.active
    if job.preparing is None and active is not None and stage.target > len(active.members):
        work.set(target=stage.target)
        delay_growth(work)
        wait_s = work.job.growth.retry_at - work.now
        work.note(f"growing to {stage.target} pods is tried again in {wait_s:.0f} s")


def without_missing(job: Job, stage: JobStage) -> JobStage | None:
    """Return the standby without the pods that are no longer usable. None: it needs them."""
    gone = set(stage.pod_ids).difference(pod.pod_id for pod in job.usable_pods(stage.pod_ids))
    if not gone:
        return stage
    lost = tuple(sorted(gone | set(stage.missing_pods)))
    if not stage.stands_by or lost not in stage.survivable_failures:
        return None
    members: list[StagePod] = []
    next_rank = 0
    for member in stage.members:
        if member.pod.pod_id in gone:
            continue
        ranks = tuple(range(next_rank, next_rank + len(member.pod.ranks)))
        next_rank += len(ranks)
        members.append(replace(member, pod=replace(member.pod, pod_rank=len(members), ranks=ranks)))
    if len(members) < job.spec.min_pods:
        return None
    reason = f"standby, without {', '.join(lost)}"
    return replace(stage, members=tuple(members), missing_pods=lost, reason=reason)


def leave_out_missing(work: Work) -> None:
    """Let the standby go on without missing pods if it survives that."""
    stage = work.job.preparing
    if stage is None or not stage.standby or not stage.survivable_failures:
        return
    left = without_missing(work.job, stage)
    if left is None or left is stage:
        return
    work.set(preparing=left)
    size, trainers = len(left.members), left.trainers
    update_record(work, stage.stage, pods=size, trainers=trainers, reason=left.reason)
    work.note(
        f"stage {stage.stage} stands by without {', '.join(left.missing_pods)}", lasting=False
    )


def failure(work: Work, text: str) -> Cause:
    return Cause(kind=CauseKind.FAILURE, text=text, at=work.now)


def neutral(work: Work, text: str) -> Cause:
    return Cause(kind=CauseKind.NEUTRAL, text=text, at=work.now)


def _brief(reason: str) -> str:
    """Return why a stage is made, without repeating why the one before it ended."""
    return "recovery" if reason.startswith("recovery: ") else reason


def _pods(count: int) -> str:
    return "1 pod" if count == 1 else f"{count} pods"
