"""Prepare a second set of trainers that takes over when the active stage crashes. Pure.

With `standby` 1 it takes over with all pods. With 2 it also takes over without those of a lost pod
or node: its trainers have formed a group for each of these cases besides the one of all.
"""

from collections.abc import Iterator
from itertools import groupby

from msgspec.structs import replace

from job_server.api.wire import PlanPod, SlotKind, Way
from job_server.cluster.placement import Cluster, find_node, slots_to_leave
from job_server.training.core.changes import choose_way, scripted
from job_server.training.core.job import Job
from job_server.training.core.moves import begin
from job_server.training.core.work import Work

STANDBY_AFTER_S = 5.0  # of undisturbed training before a standby is prepared
MOST_FAILURES = 8  # each set costs the trainers a group: sockets, a thread, time


def stand_by(work: Work, *, may_begin: bool) -> None:
    """Prepare the same pods once more, for a crash of the active stage.

    Args:
        may_begin: a change could begin now.
    """
    job = work.job
    stage = job.active
    if not job.spec.standby or stage is None or job.preparing is not None:
        return
    if not may_begin or any(work.now < at for at in standby_times(job)):
        return
    change = scripted(job)
    if change is not None and change.at_s < job.progress.script_s + STANDBY_AFTER_S:
        return
    if _why_none(work, choose_way(job, work.cluster)):
        return
    pods = job.known_pods(stage.pod_ids)
    if any(slots_to_leave(work.cluster, pod.site) for pod in pods):
        return
    begin(work, pods, way=Way.REPLACE, reason="standby", target=job.target, standby=True)
    if job.spec.standby > 1:
        _survive_failures(work)


def standby_times(job: Job) -> Iterator[float]:
    """Yield the times before which no standby is prepared: training settles first."""
    if job.active is not None and job.active.first_step_at is not None:
        yield job.active.first_step_at + STANDBY_AFTER_S
    yield job.standby.retry_at


def _why_none(work: Work, way: Way) -> str:
    """Return, and note once, why no standby can be prepared. "": one can."""
    no_room = "a GPU of this job has no room for a second trainer next to the first"
    if work.job.no_room:
        no_room = "there is no memory for a second set of trainers"
    why = {
        Way.DRAIN: no_room,
        Way.JOIN: no_room,
        Way.STOP: "no trainer has called the elastic loop",
    }.get(way, "")
    if why:
        _note_once(work, f"no standby: {why}")
    return why


def _note_once(work: Work, text: str) -> None:
    if work.job.announced.standby != text:
        work.set(announced=replace(work.job.announced, standby=text))
        work.note(text, lasting=False)


def _survive_failures(work: Work) -> None:
    """Have the standby's trainers form groups without each set of pods that may fail."""
    stage = work.job.preparing
    if stage is None:
        return
    pods = tuple(member.pod for member in stage.members)
    why = ""
    if any(_is_on_gpu(work.cluster, pod) for pod in pods):
        why = "on GPUs groups without a lost pod are not built"
    elif len(pods) > MOST_FAILURES:
        why = f"{len(pods)} pods are more than the {MOST_FAILURES} that are provided for"
    if why:
        _note_once(work, f"standby 2 acts as 1, for crashes of trainers only: {why}")
        return
    work.set(preparing=replace(stage, survivable_failures=likely_failures(pods)))


def _is_on_gpu(cluster: Cluster, pod: PlanPod) -> bool:
    view = find_node(cluster, pod.node_id)
    slots = () if view is None else view.node.slots
    return any(slot.kind is SlotKind.GPU and slot.index in pod.slots for slot in slots)


def likely_failures(pods: tuple[PlanPod, ...]) -> tuple[tuple[str, ...], ...]:
    """Return the sets of pods that may fail together: each single pod, and each node's."""
    single = [(pod.pod_id,) for pod in pods]
    by_node = sorted(pods, key=lambda pod: pod.node_id)
    nodes = [
        tuple(sorted(pod.pod_id for pod in group))
        for _, group in groupby(by_node, key=lambda pod: pod.node_id)
    ]
    found = [*single, *(node for node in nodes if len(node) > 1)]
    return tuple(loss for loss in found if len(loss) < len(pods))[:MOST_FAILURES]
