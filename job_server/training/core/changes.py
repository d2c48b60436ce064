"""Change the number of pods: by the script, by users, and by growing back. Pure."""

import itertools
from collections.abc import Iterator

from msgspec.structs import replace

from job_server.api.codec import WireError
from job_server.api.text import counted
from job_server.api.wire import DesiredState, Kill, PodStagePhase, ScriptKind, SlotKind, Way
from job_server.cluster.change_script import ScriptedChange, parse_script, pods_after
from job_server.cluster.placement import Cluster, explain_shortage, find_node
from job_server.jobs.events import RequestRefused
from job_server.jobs.work import Goal
from job_server.training.core.allocation import able_to_train, find_sites, make_pods
from job_server.training.core.job import HaltPhase, Job, JobStage, ManualChange
from job_server.training.core.moves import begin, dismiss_standby
from job_server.training.core.work import Work

SHOWN_CHANGES = 10
DUE_SLACK_S = 0.001  # sums of many short times are not exact
DECLARE_S = 10.0  # for imports: how long trainers may take to call the elastic loop
SCRIPT_STORE_S = 5.0  # how much script time a crash of the server may lose
ROOM_FACTOR = 1.1  # of what a trainer uses on a GPU has to be free for a second one
KILL_NOTICED_S = 5.0  # within which the server learns that a killed pod is dead


def may_change(job: Job, now: float) -> bool:
    """Return whether a change can begin now: one at a time, and only while training is stable."""
    return _is_stable(job) and not _may_declare(job, now)


def _is_stable(job: Job) -> bool:
    stage = job.active
    if stage is None or job.goal is not Goal.RUN or job.state.ended:
        return False
    if job.preparing is not None and not job.preparing.standby:
        return False
    if job.retiring is not None or job.done or job.cut_off:
        return False
    if stage.over is not None or stage.resuming or stage.finishing or not stage.committed:
        return False
    if stage.any_in(PodStagePhase.PARKED):
        return False
    if len(job.usable_pods(stage.pod_ids)) < len(stage.members):
        return False
    if job.elastic:  # before its first step a stage has nothing to agree on
        return stage.first_step_at is not None
    return True


def _may_declare(job: Job, now: float) -> bool:
    """Return whether trainers of a first stage may be about to call the elastic loop.

    It is active as soon as they have been started. A change by `stop` could cost steps of theirs.
    """
    if job.elastic or job.commits > 1 or job.active is None:
        return False
    return now < declare_deadline(job.active)


def declare_deadline(stage: JobStage) -> float:
    """Return until when the trainers of a first stage may still call the elastic loop."""
    return (stage.committed_at or 0.0) + DECLARE_S


def take_next(work: Work) -> bool:
    """Begin the next waiting change, or skip it with a note. Return False where none waits.

    Changes that fell due while none could begin become one change, to the newest number.
    """
    job = work.job
    if not may_change(job, work.now):
        return False
    due = list(due_changes(job))
    if due and work.now < may_apply_at(job, due[0], work.now):
        due = []
    manual = job.queue.resize
    if manual is not None and manual.not_before_s > job.progress.script_s + DUE_SLACK_S:
        return False  # what fell due since the kill counts from there
    waiting = _in_order(due, manual)
    if not waiting:
        return _grow_back(work)
    if waiting[0].action == "kill":
        skip_to(work, len(due))
        _kill_and_wait(work, _in_order(due, job.queue.resize))
        return True
    # Kills keep their place behind the changes before them.
    ahead, count = _before_a_kill(waiting), len(_before_a_kill(due))
    if len(ahead) > count:
        work.set(queue=replace(work.job.queue, resize=None))
    skip_to(work, count)
    wanted, why = _add_up(work, ahead)
    if wanted is not None:
        change_pods(work, wanted, why)
    return True


def scripted(job: Job) -> ScriptedChange | None:
    """Return the next change of the script; None: no more."""
    return parse_script(job.spec.script, job.spec).change(job.queue.script_index)


def is_due(job: Job, change: ScriptedChange) -> bool:
    return job.progress.script_s >= change.at_s - DUE_SLACK_S


def due_changes(job: Job) -> Iterator[ScriptedChange]:
    """Yield the changes of the script that are due, oldest first."""
    script = parse_script(job.spec.script, job.spec)
    index = job.queue.script_index
    while (change := script.change(index)) is not None and is_due(job, change):
        yield change
        index += 1


def is_regular(job: Job) -> bool:
    """Return whether the script is an interval rather than a list of times."""
    return job.spec.script.kind in (ScriptKind.ALTERNATE, ScriptKind.WALK)


def may_apply_at(job: Job, change: ScriptedChange, now: float) -> float:
    """Return when a due change may begin.

    A stage makes a step first; otherwise changes that come faster than trainers start would stop
    every stage before its first step. A job counts as one without the elastic loop only after a
    stage has run for `prepare_timeout_s`: its trainers may be about to call it.

    A change of a regular script that fell due before the active stage made a step waits for one
    interval from that step, so that all stages train equally long.
    """
    stage = job.active
    if stage is None:
        return now
    if not job.elastic and not _is_plain(job, now):
        return (stage.committed_at or now) + job.spec.prepare_timeout_s
    if not is_regular(job):
        return now
    began_at = stage.first_step_at if job.elastic else stage.committed_at
    if began_at is None or now - began_at >= job.progress.script_s - change.at_s:
        return now
    return began_at + job.spec.script.interval_s


def _is_plain(job: Job, now: float) -> bool:
    """Return whether a stage ran so long that its trainers would have called the elastic loop."""
    return any(
        (now if record.ended_at is None else record.ended_at) - record.committed_at
        >= job.spec.prepare_timeout_s
        for record in job.records
        if record.committed_at is not None
    )


def _in_order(due: list[ScriptedChange], manual: ManualChange | None) -> list[ScriptedChange]:
    """Return all waiting changes, oldest first, with the resize at the time it was asked for."""
    if manual is None:
        return due
    asked_s = manual.asked_at_s + DUE_SLACK_S
    text = f"resize to {manual.pods}"
    resize = ScriptedChange(at_s=manual.asked_at_s, action="set", pods=manual.pods, text=text)
    before = [change for change in due if change.at_s <= asked_s]
    return [*before, resize, *due[len(before) :]]


def _before_a_kill(changes: list[ScriptedChange]) -> list[ScriptedChange]:
    return list(itertools.takewhile(lambda change: change.action != "kill", changes))


def skip_to(work: Work, count: int) -> None:
    if count:
        queue, script_s = work.job.queue, work.job.progress.script_s
        index = queue.script_index + count
        work.set(queue=replace(queue, script_index=index, script_stored_s=script_s))


def _add_up(work: Work, changes: list[ScriptedChange]) -> tuple[int | None, str]:
    """Return the number of pods after all these changes, and why. None: all were skipped."""
    job, stage = work.job, work.job.active
    assert stage is not None
    # Not from what there is: pods that are away for a moment would be forgotten for good.
    pods, skipped = job.target, ""
    applied: list[str] = []
    for change in changes:
        if change.action == "kill":
            continue
        wanted = pods_after(change, pods)
        why_skipped = why_not(job, wanted)
        if why_skipped:
            skipped = f"{change.text}: skipped: {why_skipped}"
        else:
            pods = wanted
            applied.append(change.text)
    if not applied:
        if skipped:
            work.note(skipped)
        return None, ""
    if len(applied) == 1:
        return pods, applied[0]
    _note_too_short(work, stage)
    shown = applied if len(applied) <= SHOWN_CHANGES else [applied[0], "...", applied[-1]]
    return pods, f"{len(applied)} changes that fell due meanwhile, as one ({', '.join(shown)})"


def _note_too_short(work: Work, stage: JobStage) -> None:
    """Note that stages start more slowly than the script changes them."""
    job, began_at = work.job, stage.first_step_at or stage.committed_at
    record = next((record for record in job.records if record.stage == stage.stage), None)
    if not is_regular(job) or record is None or began_at is None:
        return
    start_s, interval_s = began_at - record.wanted_at, job.spec.script.interval_s
    if start_s > interval_s:
        text = (
            f"the script's interval of {interval_s:g} s is too short for this job: stage "
            f"{stage.stage} took {start_s:.0f} s to start"
        )
        work.note(text, lasting=False)


def _kill_and_wait(work: Work, changes: list[ScriptedChange]) -> None:
    """Kill each due target once. Other due changes wait until the job has recovered."""
    kills = {change.target: change for change in changes if change.action == "kill"}
    wanted, _ = _add_up(work, changes)
    for change in kills.values():
        try:
            by_rank = change.target.isdigit()
            kill = Kill(rank=int(change.target)) if by_rank else Kill(pod_id=change.target)
            kill_now(work, kill)
        except (RequestRefused, WireError) as refusal:
            work.note(f"{change.text}: skipped: {refusal}")
    if wanted is not None:
        script_s = work.job.progress.script_s
        resize_later = ManualChange(
            pods=wanted, asked_at_s=script_s, not_before_s=script_s + KILL_NOTICED_S
        )
        work.set(queue=replace(work.job.queue, resize=resize_later))


def change_pods(work: Work, pods: int, why: str) -> None:
    """Begin a change to `pods` pods, or note why there is none."""
    job = work.job
    stage = job.active
    assert stage is not None
    skip = why_not(job, pods)
    if skip:
        work.note(f"{why}: skipped: {skip}")
        return
    size = len(stage.members)
    if pods == size:
        if pods == job.target:
            work.note(f"{why}: skipped: the job has {counted(pods, 'pod')} already")
        else:
            work.set(target=pods)
            work.note(f"{why}: the job has {pods} pods and does not wait for more")
        return
    if not _begin_change(work, stage, pods, why, counts=True):
        work.set(target=pods)
        shortage = explain_shortage(job.spec, work.cluster, work.now, wanted=pods, placeable=size)
        work.note(f"{why}: waits for a place: {shortage}")


def why_not(job: Job, pods: int) -> str:
    """Return why the job may not have so many pods; "": it may."""
    spec = job.spec
    if pods < max(1, spec.min_pods):
        return f"{pods} pods are below the job's min_pods ({spec.min_pods})"
    if pods > spec.max_pods:
        return f"{pods} pods are above the job's max_pods ({spec.max_pods})"
    if spec.max_resizes is not None and job.resizes >= spec.max_resizes:
        return f"the job has been resized {job.resizes} times (max_resizes)"
    return ""


def _begin_change(work: Work, stage: JobStage, pods: int, why: str, *, counts: bool) -> bool:
    """Prepare a stage of up to `pods` pods. Return False if no new pod can be placed."""
    job = work.job
    stay = able_to_train(work, job.known_pods(stage.pod_ids))[:pods]
    sites = find_sites(work, pods - len(stay))
    if pods > len(stay) and not sites:
        return False
    if len(stay) + len(sites) < job.spec.min_pods:  # the others cannot go on
        return False
    stood_by = job.preparing is not None and job.preparing.standby
    dismiss_standby(work)
    new = make_pods(work, sites, len(stay))
    way = choose_way(work.job, work.cluster, stood_by=stood_by)
    begin(work, (*stay, *new), way=way, reason=why, target=pods, counts=counts)
    return True


def _grow_back(work: Work) -> bool:
    """Add the missing pods if there are slots for them now."""
    job = work.job
    stage = job.active
    if stage is None or len(stage.members) >= job.target or work.now < job.growth.retry_at:
        return False
    why = f"growing back to {job.target}"
    return _begin_change(work, stage, job.target, why, counts=False)


def store_script_clock(work: Work) -> None:
    """Store the script's clock every few seconds while changes are left."""
    job = work.job
    behind_s = job.progress.script_s - job.queue.script_stored_s
    if behind_s >= SCRIPT_STORE_S and scripted(job) is not None:
        work.set(queue=replace(job.queue, script_stored_s=job.progress.script_s))


def check_resize(job: Job, pods: int) -> None:
    """Check a user's resize.

    Raises:
        RequestRefused: the job is stopping, or may never have so many pods.
    """
    if job.goal.ends_as is not None:
        raise RequestRefused(f"pods: the job {job.spec.job_id} is stopping")
    refusal = why_not(job, pods)
    if refusal:
        raise RequestRefused(f"pods: {refusal}")


def resize(work: Work, pods: int) -> None:
    """Enter a user's resize.

    It applies at once where nothing runs, otherwise after what is going on.

    Raises:
        RequestRefused: the job may never have so many pods.
    """
    job = work.job
    check_resize(job, pods)
    waits = bool(job.waiting) and not job.cut_off  # otherwise the active stage may go on
    idle = job.active is None and job.preparing is None
    paused = job.halt is not None and job.halt.phase is HaltPhase.DONE
    if idle or waits or paused:
        work.set(target=pods, queue=replace(job.queue, resize=None))
        work.note(f"resize to {pods}: holds from the next start on")
        return
    change = ManualChange(pods=pods, asked_at_s=job.progress.script_s)
    work.set(queue=replace(job.queue, resize=change))
    if not may_change(job, work.now):
        why = "until what is going on is over"
        if job.active is not None and _is_stable(job):
            left_s = declare_deadline(job.active) - work.now
            why = f"{left_s:.0f} s, as its trainers may be about to call the elastic loop"
        work.note(f"resize to {pods}: waits {why}", lasting=False)


def ask_again(work: Work, stage: JobStage) -> None:
    """Enter a change anew that somebody asked for and that was undone.

    It had begun before all that is due by now, so that counts from there.
    """
    queue = work.job.queue
    if stage.counts and queue.resize is None:
        change = ManualChange(pods=stage.target, asked_at_s=0.0)
        work.set(queue=replace(queue, resize=change))


def kill_now(work: Work, kill: Kill) -> None:
    """Kill a pod or a trainer on request. Its death does not count as a failure.

    Raises:
        RequestRefused: there is no such pod or rank now.
    """
    job = work.job
    if kill.pod_id is not None:
        pod = job.pod(kill.pod_id)
        if pod is None or not any(stage.member(kill.pod_id) for stage in job.stages):
            have = ", ".join(job.active.pod_ids) if job.active else "none"
            raise RequestRefused(f"pod_id: {kill.pod_id!r} does not run; running pods: {have}")
        if pod.desired is DesiredState.RUN:
            work.set_pod(replace(pod, desired=DesiredState.KILL, planned=True))
            work.note(f"killing pod {kill.pod_id} on request", lasting=False)
        return
    stage = job.active
    ranks = stage.trainers if stage is not None else 0
    if stage is None or kill.rank is None or kill.rank >= ranks or stage.over is not None:
        raise RequestRefused(f"rank: {kill.rank} does not run; there are {ranks} ranks now")
    kill_id = f"kill_{job.kills + 1}"
    kills = (*stage.kill_ranks, (kill_id, kill.rank))
    work.set(active=replace(stage, kill_ranks=kills), kills=job.kills + 1)
    work.note(f"killing rank {kill.rank} on request", lasting=False)


def queued(job: Job) -> tuple[str, ...]:
    """Return the waiting changes as lines of text, oldest first; the script's share one line."""
    due = [change.text for change in itertools.islice(due_changes(job), SHOWN_CHANGES)]
    scripted_line = due[0] if len(due) == 1 else f"as one: {', '.join(due)}" if due else ""
    if len(due) == SHOWN_CHANGES:
        scripted_line += ", ..."
    resize_line = "" if job.queue.resize is None else f"resize to {job.queue.resize.pods}"
    return tuple(line for line in (scripted_line, resize_line) if line)


def choose_way(job: Job, cluster: Cluster, *, stood_by: bool = False) -> Way:
    """Return how a change of the active stage happens.

    STOP where no trainer has called the elastic loop: only trainers in the loop can agree on a
    step. REPLACE where a second set of trainers may be prepared while the first trains. JOIN where
    two sets do not fit, or the user wants it, and all trainers support it. DRAIN otherwise, and
    where the kernel has killed a trainer beside another set.

    Args:
        stood_by: a standby, which has just been dismissed, is part of what the nodes report.
    """
    if not job.elastic:
        return Way.STOP
    overlap = job.spec.overlap
    if overlap == "off" or job.no_room:
        return Way.DRAIN
    joins = _all_join(job)
    if overlap == "join" and joins:
        return Way.JOIN
    if overlap == "on" or _both_fit(job, cluster, sets=1 + stood_by):
        return Way.REPLACE
    return Way.JOIN if joins else Way.DRAIN


def _all_join(job: Job) -> bool:
    """Return whether every trainer of the active stage can form a second group next to its own."""
    pod_ids = job.active.pod_ids if job.active is not None else ()
    return bool(pod_ids) and all(job.progress.joins.get(pod_id, False) for pod_id in pod_ids)


def _both_fit(job: Job, cluster: Cluster, *, sets: int) -> bool:
    """Return whether every GPU of the active stage has room for a second trainer like its first.

    Host memory is not checked: most of what a trainer on a GPU needs of it is shared.

    Args:
        sets: how many trainers, all alike, use the memory that is in use.
    """
    for member in job.active.members if job.active is not None else ():
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
