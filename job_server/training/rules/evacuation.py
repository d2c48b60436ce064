"""Have a training leave the slots that are in quarantine, and go on with the others. Pure."""

from collections.abc import Sequence

from msgspec.structs import replace

from job_server.cluster.placement import Site, slots_to_leave
from job_server.jobs.work import Goal
from job_server.training.core.accounting import is_live
from job_server.training.core.allocation import avoid, avoided_slots, find_sites, make_pods
from job_server.training.core.changes import ask_again, choose_way, may_change
from job_server.training.core.job import JobStage, StagePod, TrainingPod
from job_server.training.core.moves import begin, dismiss_standby, fail_preparing, let_go, neutral
from job_server.training.core.work import Work


def evacuate(work: Work) -> None:
    """Have the pods on slots in quarantine leave.

    They leave by a planned change, so no step is lost. Where no trainer can go on, or such a change
    did not come about, the trainer is killed, and the others recover without its pod; a pod that
    leaves only because its node is drained is not killed, it tries again.
    """
    if work.job.announced.quarantine and not work.job.pods:  # no pod stays there any more
        work.set(announced=replace(work.job.announced, quarantine=""))
    if work.job.goal is not Goal.RUN or work.job.legacy:
        return
    _change_preparing(work)
    job = work.job
    stage = job.active
    if stage is None or stage.over is not None or not stage.committed or stage.finishing:
        return
    bad = _bad_members(work, stage)
    if not bad:
        if job.evacuations or job.announced.quarantine or job.moving:
            announced = replace(job.announced, quarantine="")
            work.set(evacuations=0, announced=announced, moving=())
        return
    if not job.elastic:
        _stay(work, f"{_why(work, bad)}; its pod stays, as a change would start the job afresh")
        return
    on_the_move = job.preparing is not None and not job.preparing.standby and bool(job.moving)
    if _kill(work, stage, bad, all_=job.evacuations > 0 and not on_the_move) or job.spec.share:
        return
    leave = {member.pod.pod_id for member in bad}
    stay = tuple(pod for pod in job.known_pods(stage.pod_ids) if pod.pod_id not in leave)
    if on_the_move:
        return
    sites = find_sites(work, job.target - len(stay))
    if len(stay) + len(sites) < max(1, job.spec.min_pods):
        _stay(work, f"{_why(work, bad)}; its pod stays, as there is no other place for it")
        return
    bridge: tuple[TrainingPod, ...] = ()
    if not _hands_on(stay, sites, job.known_pods(stage.pod_ids)):
        bridge, sites = job.known_pods(stage.pod_ids[:1]), sites[: job.spec.max_pods - 1]
        if not sites:
            text = "its pod stays, as no other could take the state over beside it (max_pods is 1)"
            _stay(work, f"{_why(work, bad)}; {text}")
            return
    moving, announced = tuple(sorted(leave)), replace(job.announced, quarantine="")
    if (job.moving, job.announced) != (moving, announced):
        work.set(moving=moving, announced=announced)
    if not may_change(job, work.now) or (job.evacuations and work.now < job.growth.retry_at):
        return
    if not bridge:
        work.set(evacuations=job.evacuations + 1)
    _move(work, (*bridge, *stay), sites, _why(work, bad))


def evict_straggler(work: Work) -> None:
    """Have a pod that makes the others wait move to a slot that is free, if the job wants that.

    A rank that straggles on its new slot, too, is not moved again: the slot was not the cause.
    """
    job, stage = work.job, work.job.active
    slow = [each for each in job.progress.stragglers if is_live(job, each)]
    if job.spec.straggler_policy != "evict" or not slow or stage is None or not job.elastic:
        return
    if not may_change(job, work.now) or work.now < job.growth.retry_at:
        return
    for each in slow:
        why = f"rank {each.rank} straggled"
        member = next((m for m in stage.members if each.rank in m.pod.ranks), None)
        if member is None or any(a.why == why and work.now < a.ends_at for a in job.avoided):
            continue
        pods = job.known_pods(stage.pod_ids)
        stay = tuple(pod for pod in pods if pod.pod_id != member.pod.pod_id)
        avoided = avoided_slots(work)
        sites = [
            site
            for site in find_sites(work, job.target - len(stay))
            if avoided.get(site.node_id, frozenset()).isdisjoint(site.slots)
        ]
        if not sites or not _hands_on(stay, sites, pods):
            continue  # no slot is free: what the others lose by it is said, and goes on
        slot = member.pod.slots[member.pod.ranks.index(each.rank)]
        avoid(work, member.pod.node_id, (slot,), why)
        place = f"slot {slot} of {member.pod.node_id}"
        _move(work, stay, sites, f"{member.pod.pod_id} leaves {place}: {why}")
        return


def _move(work: Work, stay: Sequence[TrainingPod], sites: Sequence[Site], why: str) -> None:
    """Begin the change by which pods leave their slots for others."""
    job = work.job
    stood_by = job.preparing is not None and job.preparing.standby
    dismiss_standby(work)
    new = make_pods(work, sites, len(stay))
    way = choose_way(work.job, work.cluster, stood_by=stood_by)
    begin(work, (*stay, *new), way=way, reason=why, target=job.target)


def warn_of_shortage(work: Work) -> None:
    """Say when a node with pods of the job is about to run out of memory or disk."""
    job = work.job
    short = {view.node.node_id: view.shortage for view in work.cluster.nodes if view.shortage}
    if not short and not job.announced.shortage:
        return
    nodes = {pod.site.node_id for pod in job.pods if not pod.released}
    parts = [f"node {name}: {why}" for name, why in sorted(short.items()) if name in nodes]
    text = "; ".join(parts)
    if text == job.announced.shortage:
        return
    work.set(announced=replace(job.announced, shortage=text))
    if text:
        work.note(f"warning: {text}; no new pods go there", lasting=False)
    elif not any(f"node {name}: " in job.announced.shortage for name in short):  # not: it has left
        work.note("its nodes have enough room again", lasting=False)


def _change_preparing(work: Work) -> None:
    """Give up a stage in preparation that counts on a slot which is in quarantine by now."""
    stage = work.job.preparing
    if stage is None:
        return
    bad = [
        member
        for member in _bad_members(work, stage)
        if stage.standby or not _may_stay(work, member)
    ]
    if not bad:
        return
    if stage.standby:
        dismiss_standby(work)
        return
    cause, active = neutral(work, _why(work, bad)), work.job.active
    for member in bad:
        if active is None or active.member(member.pod.pod_id) is None:
            let_go(work, member.pod.pod_id)
    fail_preparing(work, cause)
    ask_again(work, stage)


def _bad_members(work: Work, stage: JobStage) -> list[StagePod]:
    pods = work.job.pods_by_id()
    return [
        member
        for member in stage.members
        if (pod := pods.get(member.pod.pod_id)) is not None
        and pod.usable
        and slots_to_leave(work.cluster, pod.site)
    ]


def _may_stay(work: Work, member: StagePod) -> bool:
    """Return whether a pod may be in one more stage: the change after that is for it.

    It trains there, or recovers on a node that is drained: nobody else may hold the state.
    """
    slots = slots_to_leave(work.cluster, member.pod).values()
    active, pod_id = work.job.active, member.pod.pod_id
    if active is not None and active.over is None and active.member(pod_id) is not None:
        return not any(slot.ends_trainers for slot in slots)
    return pod_id in work.job.recovery_pods and all(slot.drained for slot in slots)


def _hands_on(
    stay: tuple[TrainingPod, ...], sites: Sequence[Site], now: Sequence[TrainingPod]
) -> bool:
    """Return whether a pod of the next stage finds the state on its own node.

    Otherwise all of them would look for it on disk: one of those that leave stays for a stage, and
    hands it on.
    """
    held = {pod.site.node_id for pod in now}
    return bool(stay) or any(site.node_id in held for site in sites)


def _kill(work: Work, stage: JobStage, bad: list[StagePod], *, all_: bool) -> bool:
    """Kill the trainers that cannot go on; return whether there are any.

    Args:
        all_: also those that could go on: a planned change did not come about.
    """
    ranks = []
    for member in bad:
        slots = slots_to_leave(work.cluster, member.pod)
        for slot, rank in zip(member.pod.slots, member.pod.ranks, strict=True):
            found = slots.get(slot)
            if found and not found.drained and (found.ends_trainers or all_):
                ranks.append(rank)
    known = {rank for _, rank in stage.kill_ranks}
    for rank in ranks:
        if rank not in known:
            job = work.job
            kill = (f"kill_{job.kills + 1}", rank)
            held = job.active
            assert held is not None
            kills = (*held.kill_ranks, kill)
            work.set(active=replace(held, kill_ranks=kills), kills=job.kills + 1)
            work.note(f"rank {rank} is ended: {_why(work, bad)}")
    return bool(ranks)


def _why(work: Work, bad: list[StagePod]) -> str:
    """Return in words which slots are in quarantine, and why."""
    parts = []
    for member in bad:
        slots = slots_to_leave(work.cluster, member.pod)
        drained = next((slot.quarantine for slot in slots.values() if slot.drained), "")
        if drained:
            text = f"node {member.pod.node_id} is drained: {drained}"
            if text not in parts:
                parts.append(text)
            continue
        for slot in slots.values():
            parts.append(f"slot {slot.index} of {member.pod.node_id} is {slot.reason}")
    return "; ".join(parts)


def _stay(work: Work, text: str) -> None:
    """Enter why pods do not leave."""
    if work.job.moving:
        work.set(moving=())
    if work.job.announced.quarantine != text:
        work.set(announced=replace(work.job.announced, quarantine=text))
        work.note(f"warning: {text}", lasting=False)
