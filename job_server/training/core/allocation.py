"""Assign ids, ranks and ports to pods, and choose the state that a stage starts from. Pure."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping

from msgspec.structs import replace

from job_server.api.text import counted
from job_server.api.wire import DesiredState, PlanPod, PodPhase, RestoreFrom, Saved
from job_server.cluster.placement import (
    Site,
    deal_ports,
    find_node,
    gather,
    place,
    slots_to_leave,
)
from job_server.training.core.job import Avoided, Job, JobStage, TrainingPod, age, occupied
from job_server.training.core.work import Work, silent_pods

AVOID_S = 3600.0  # for so long a job avoids a slot on which something went wrong
MAX_AVOIDED = 1000


def find_sites(
    work: Work, count: int, first: str = "", *, avoiding: bool = True
) -> tuple[Site, ...]:
    """Return sites for up to `count` new pods, on the node `first` before others.

    Args:
        avoiding: whether slots on which something went wrong come last, on whatever node.
    """
    return place(
        work.job.spec,
        work.cluster,
        work.now,
        count=count,
        held=slots_of_stayers(work.job),
        leaving=slots_of_leavers(work.job),
        avoid=avoided_slots(work) if avoiding else {},
        first=first,
    )


def find_sites_on(work: Work, wanted: Mapping[str, int], first: str = "") -> tuple[Site, ...]:
    """Return sites for up to so many new pods on each node, those on the node `first` first."""
    sites: list[Site] = []
    for node_id in sorted(wanted, key=lambda each: each != first):
        view = find_node(work.cluster, node_id)
        if view is not None:
            sites += place(
                work.job.spec,
                dataclasses.replace(work.cluster, nodes=(view,)),
                work.now,
                count=wanted[node_id],
                held=slots_of_stayers(work.job),
                leaving=slots_of_leavers(work.job),
                avoid=avoided_slots(work),
            )
    return tuple(sites)


def avoid(work: Work, node_id: str, slots: tuple[int, ...], why: str) -> bool:
    """Use these slots for a while only where no others are free; pods leave them at a start.

    Returns:
        False: that is known already, as where a launcher tells it again after it has attached.
    """
    kept = [each for each in work.job.avoided if work.now < each.ends_at]
    if any((each.node_id, each.slots, each.why) == (node_id, slots, why) for each in kept):
        return False
    held = [each for each in kept if (each.node_id, each.slots) != (node_id, slots)]
    new = Avoided(node_id=node_id, slots=slots, ends_at=work.now + AVOID_S, why=why)
    work.set(avoided=(*held[1 - MAX_AVOIDED :], new))
    shown = counted(len(slots), "slot") if len(slots) > 1 else f"slot {slots[0]}"
    work.note(f"{shown} of node {node_id}: others are used if there are free ones", lasting=False)
    return True


def avoided_slots(work: Work) -> dict[str, frozenset[int]]:
    """Return node -> slots that the job uses only where no others are free."""
    return gather((a.node_id, a.slots) for a in work.job.avoided if work.now < a.ends_at)


def find_movers(work: Work, stay: list[TrainingPod], to_add: Mapping[str, int] | int) -> set[str]:
    """Return the pods on avoided slots for which a start finds other slots.

    Args:
        to_add: how many pods the start needs besides; of a shared job, on each node.
    """
    avoided = avoided_slots(work)

    def is_clean(place: Site) -> bool:
        return avoided.get(place.node_id, frozenset()).isdisjoint(place.slots)

    doubtful = [pod for pod in stay if not is_clean(pod.site)]
    movers: set[str] = set()
    if isinstance(to_add, int):
        sites = find_sites(work, to_add + len(doubtful)) if doubtful else ()
        free = max(0, sum(map(is_clean, sites)) - to_add)
        return {pod.pod_id for pod in doubtful[:free]}
    for node_id in {pod.site.node_id for pod in doubtful}:
        own, needed = [p for p in doubtful if p.site.node_id == node_id], to_add.get(node_id, 0)
        sites = find_sites_on(work, {node_id: needed + len(own)})
        free = max(0, sum(map(is_clean, sites)) - needed)
        movers |= {pod.pod_id for pod in own[:free]}
    return movers


def able_to_train(work: Work, pods: Iterable[TrainingPod]) -> tuple[TrainingPod, ...]:
    """Return the pods without those on a slot where no trainer can go on."""
    return tuple(
        pod
        for pod in pods
        if not any(s.ends_trainers for s in slots_to_leave(work.cluster, pod.site).values())
    )


def make_pods(work: Work, sites: Iterable[Site], first_rank: int) -> tuple[TrainingPod, ...]:
    """Create pods with ids that were never used before."""
    job = work.job
    flag = max(job.next_flag, 0)
    given_ids = list(job.given.pod_ids) if job.given.flag == flag else []
    pods = []
    for pod_rank, site in enumerate(sites, first_rank):
        base = pod_id = f"pod_{pod_rank}_{flag}"
        again = 0
        while pod_id in given_ids:
            again += 1
            pod_id = f"{base}_{again}"
        given_ids.append(pod_id)
        pods.append(TrainingPod(pod_id=pod_id, site=site))
    given = replace(job.given, pod_ids=tuple(given_ids), flag=flag)
    work.set(pods=(*job.pods, *pods), given=given)
    return tuple(pods)


def lay_out(work: Work, pods: tuple[TrainingPod, ...]) -> tuple[PlanPod, ...]:
    """Assign ranks and ports to the pods of a stage."""
    sites = [registered_site(work, pod) for pod in pods]
    avoid, last = stage_ports(work.job), work.job.given.last_ports
    ports = deal_ports(sites, work.cluster, avoid=avoid, last_ports=last)
    last_ports = dict(work.job.given.last_ports)
    plan_pods = []
    next_rank = 0
    for pod_rank, (pod, site, own_ports) in enumerate(zip(pods, sites, ports, strict=True)):
        ranks = tuple(range(next_rank, next_rank + len(site.slots)))
        next_rank += len(ranks)
        if own_ports:
            last_ports[site.node_id] = own_ports[-1]
        plan_pods.append(
            PlanPod(
                pod_id=pod.pod_id,
                pod_rank=pod_rank,
                node_id=site.node_id,
                addr=site.addr,
                slots=site.slots,
                ranks=ranks,
                ports=own_ports,
            )
        )
    work.set(given=replace(work.job.given, last_ports=last_ports))
    return tuple(plan_pods)


def stage_ports(job: Job) -> dict[str, frozenset[int]]:
    """Return address -> ports of all stages of the job."""
    members = [member for stage in job.stages for member in stage.members]
    return gather((member.pod.addr, member.pod.ports) for member in members)


def registered_site(work: Work, pod: TrainingPod) -> Site:
    """Return a pod's site with the address and ports that its node has registered now."""
    view = find_node(work.cluster, pod.site.node_id)
    if view is None:
        return pod.site
    node = view.node
    site = replace(pod.site, addr=node.addr, port_low=node.port_low, port_high=node.port_high)
    if site != pod.site:
        work.set_pod(replace(pod, site=site))
    return site


def choose_restore(work: Work) -> RestoreFrom | None:
    """Return the newest state: a snapshot in memory, or what the last pause or end has saved.

    What silent nodes hold is out of reach. None: the newest checkpoint, or a fresh start.
    """
    job = work.job
    silent = {pod.pod_id for pod in silent_pods(work)}
    source, saved = newest_in_memory(job, silent), job.ending.saved
    if saved is None:
        return source
    if source is not None and (age(saved) < age(source) or _stands_in(job, source, saved)):
        return source
    return RestoreFrom(
        stage=saved.stage,
        step=saved.step,
        serial=saved.serial,
        pods=(),
        path=saved.path,
        spare=saved.spare,
    )


def is_local(path: str) -> bool:
    """Whether other nodes may see something else, or nothing, at a path of checkpoints."""
    return bool(path) and "://" not in path


def unsaved(job: Job, but: Collection[str] = ()) -> RestoreFrom | None:
    """Return the newest state that pods hold if only memory holds it. None: nothing is to be saved.

    Args:
        but: pods that are left out.
    """
    source = newest_in_memory(job, but)
    saved = job.ending.saved
    if source is None:
        return None
    if saved is None or age(saved) < age(source):
        return source
    # The run folder of a node that the job has left may never be seen again.
    is_far = saved.spare and _has_left(job, saved.node_id)
    return source if is_far and age(saved) == age(source) else None


def _stands_in(job: Job, source: RestoreFrom, saved: Saved) -> bool:
    """Return whether pods that go on hold what was written on a node that the job has left."""
    is_held = any(pod.usable and pod.pod_id in source.pods for pod in job.pods)
    return is_held and age(source) == age(saved) and _has_left(job, saved.node_id)


def _has_left(job: Job, node_id: str) -> bool:
    """Return whether no pod is on a node, as its client was ended, say."""
    return all(pod.site.node_id != node_id for pod in job.pods)


def unheard(job: Job) -> list[TrainingPod]:
    """Return the pods that may hold the newest state though none was ever heard of: a node may be
    cut off before its first report of a snapshot.
    """
    stage, saved = job.active, job.ending.saved
    trained = stage.pod_ids if stage is not None and stage.committed else ()
    is_saved = saved is not None and (stage is None or saved.stage >= stage.stage)
    if is_saved or job.done or not job.elastic:
        return []
    return [
        pod
        for pod in job.pods
        if not pod.released
        and pod.phase not in (None, PodPhase.EXITED)  # then its client says what it holds
        and (pod.pod_id in trained or pod.desired is DesiredState.HOLD)
    ]


def newest_in_memory(job: Job, but: Collection[str] = ()) -> RestoreFrom | None:
    """Return the newest snapshot that pods hold, but for some of them. None: there is none.

    A snapshot of an older stage than the newest that ever reported one does not count: the
    checkpoint path holds a newer state.
    """
    within_reach = [
        (age(ref), pod.pod_id)
        for pod in job.pods
        if not pod.released
        and pod.pod_id not in but
        and (ref := job.progress.snapshots.get(pod.pod_id))
    ]
    if not within_reach:
        return None
    newest, _ = max(within_reach)
    stage, step, serial = newest
    if stage < job.snapshot_stage:
        return None
    pods = tuple(pod_id for state, pod_id in within_reach if state == newest)
    return RestoreFrom(stage=stage, step=step, serial=serial, pods=pods)


def is_superseded(job: Job, pod_id: str) -> bool:
    """Return whether the state that a pod holds cannot be needed any more.

    This is the one rule by which a training lets go of states. Until the active stage has reported
    one of its own, every older one may be what the next start begins from: any stage may be lost,
    also one that is about to start, and a node that is silent may come back.
    """
    stage = job.active
    return (
        stage is not None
        and stage.committed
        and job.snapshot_stage >= stage.stage
        and stage.member(pod_id) is None
    )


def may_hold(job: Job, pod_id: str) -> bool:
    """Return whether a pod that cannot be asked may hold a state.

    One of a stage that trains, or did, may have made its first just when nothing was heard of it.
    """
    stages = [stage for stage in (job.retiring, job.active) if stage is not None]
    trained = any(stage.committed and stage.member(pod_id) is not None for stage in stages)
    return trained or pod_id in job.progress.snapshots


def is_in_trainers_only(job: Job) -> bool:
    """Return whether the parked trainers alone hold the newest state, as far as is known, and the
    script has no checkpoint path to which they have written it.
    """
    stage = job.active
    parked = () if stage is None else stage.members
    if stage is None or any(member.durable for member in parked):
        return False
    step = max((member.step for member in parked), default=0)
    source = newest_in_memory(job)
    return source is None or (source.stage, source.step) < (stage.stage, step)


def why_in_trainers_only(stage: JobStage) -> str:
    """Return why no snapshot is known of the state with which a stage has parked."""
    held = next((member.pod for member in stage.members if member.snapshot_is_current), None)
    if held is None:
        return "there is no memory for a snapshot, and the script has no checkpoint="
    # As its trainers say.
    why = f"the shim of {held.pod_id}, which holds the newest state, does not answer: it is stopped"
    return f"{why}, or node {held.node_id} is too busy"


def is_local_on_all_nodes(job: Job, stage: JobStage, source: RestoreFrom) -> bool:
    """Return whether each node of a stage has a pod whose shim holds the state."""
    holding = {pod.site.node_id for pod in job.pods if pod.pod_id in source.pods}
    return all(member.pod.node_id in holding for member in stage.members)


def slots_of_stayers(job: Job) -> dict[str, frozenset[int]]:
    """Return node -> slots of pods that stay, or whose scripts may go on: no pod comes there."""
    return occupied(pod for pod in job.pods if pod.desired is DesiredState.RUN)


def slots_of_leavers(job: Job) -> dict[str, frozenset[int]]:
    """Return node -> slots of pods that are leaving."""
    return occupied(pod for pod in job.pods if pod.desired is not DesiredState.RUN)
