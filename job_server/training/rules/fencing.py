"""Give up unreachable pods, and decide when their further steps can be ignored (fenced). Pure."""

from msgspec.structs import replace

from job_server.api.wire import DesiredState, PodStagePhase
from job_server.cluster.placement import Cluster, find_node
from job_server.jobs.work import Goal
from job_server.training.core.allocation import may_hold
from job_server.training.core.job import (
    GONE,
    TERMINATED,
    Cause,
    CauseKind,
    Job,
    JobStage,
    TrainingPod,
)
from job_server.training.core.moves import lose
from job_server.training.core.work import Work, is_silent, silent_pods

# Beyond `stop_after_s`. A client terminates its pods then and kills them 1 s later; where a shim
# does not answer it takes 4 s, and a busy machine is slower.
FENCE_MARGIN_S = 6.0


def fenced_at(job: Job, pod: TrainingPod, cluster: Cluster) -> float | None:
    """Return when the pod's client will have stopped it if nothing is received until then.

    None: its client keeps pods running while the server is away, or fell silent so long before the
    pod's launcher that it must have died and stops nothing.
    """
    view = find_node(cluster, pod.site.node_id)
    if view is None or view.node.stop_after_s is None:
        return None
    heard = job.progress.heard.get(pod.pod_id, job.grace_from)
    if heard > max(view.seen_at, job.grace_from) + cluster.silence_s:
        return None
    last = max(heard, view.seen_at, job.grace_from)
    return last + view.node.stop_after_s + FENCE_MARGIN_S


def lose_silent(work: Work) -> None:
    """Give up silent pods, unless no pod of the active stage can be reached."""
    job = work.job
    active = job.active
    cut_off = active is not None and not _reaches(work, active)
    if cut_off and not (job.cut_off and job.waiting):  # a pause, or a stop, has ended what was said
        text = f"no pod can be reached: waiting until one answers{_way_out(work)}"
        work.set(cut_off=True, waiting=text)
        if not job.cut_off:
            work.note(text, lasting=False)
    elif job.cut_off and not cut_off:
        if job.grace_from < work.now:  # otherwise the server has just come back
            work.note("a pod answers again", lasting=False)
        # The other pods get the full time to answer.
        work.set(cut_off=False, grace_from=work.now, waiting="")
    for pod in silent_pods(work):
        in_force = active is not None and active.member(pod.pod_id) is not None
        if pod.desired is DesiredState.HOLD or (in_force and cut_off):
            continue
        is_as_seen = work.job.pod(pod.pod_id) == pod  # no loss before it in this loop changed it
        if is_as_seen and not _is_to_be_written(job, pod):
            holds = may_hold(job, pod.pod_id)
            lose(work, pod.pod_id, _silent_cause(work, pod), confirmed=False, holds=holds)


def _is_to_be_written(job: Job, pod: TrainingPod) -> bool:
    """Return whether the job pauses or ends, and still needs this pod's snapshot for that.

    Only once the pod's stage has ended.
    """
    stage = job.active
    over = stage is None or stage.over is not None or stage.all_in(*GONE)
    return job.goal is not Goal.RUN and over and pod.pod_id in job.progress.snapshots


def _reaches(work: Work, stage: JobStage) -> bool:
    """Return whether a pod of the stage answers, or has confirmed that it stopped.

    A stage whose trainers never received GO is over as soon as the server decides so.
    """
    if not stage.committed and work.job.elastic:
        return True
    pods = work.job.pods_by_id()
    for member in stage.members:
        pod = pods.get(member.pod.pod_id)
        if member.phase in TERMINATED or (
            pod is not None and not pod.leaving and not is_silent(work, pod)
        ):
            return True
    return False


def _way_out(work: Work) -> str:
    active, known = work.job.active, work.job.pods_by_id()
    pods = [known.get(pod_id) for pod_id in (active.pod_ids if active is not None else ())]
    fences = [None if pod is None else fenced_at(work.job, pod, work.cluster) for pod in pods]
    if None not in fences:
        return ", or until their clients have stopped them (stop_after)"
    name = work.job.spec.job_id
    if work.job.goal.ends_as is not None:
        return f", or for `edl stop {name} --discard`"
    return f", or for `edl resize {name} {work.job.target} --assume_dead`"


def _silent_cause(work: Work, pod: TrainingPod) -> Cause:
    stepped_at = work.job.progress.stepped_at
    return Cause(
        kind=CauseKind.PLANNED if pod.planned else CauseKind.PREEMPTION,
        text=f"neither node {pod.site.node_id} nor the launcher of pod {pod.pod_id} answers",
        at=work.now if stepped_at is None else min(stepped_at, work.now),
    )


def count_fenced(work: Work) -> None:
    """Count unreachable pods as stopped once their clients must have stopped them."""
    job = work.job
    for stage in job.stages:
        for member in stage.members:
            if member.phase is not PodStagePhase.LOST:
                continue
            pod = job.pod(member.pod.pod_id)
            if pod is not None and _is_fenced(work, pod):
                work.move(stage, pod.pod_id, PodStagePhase.ENDED)
                work.note(f"{pod.pod_id} cannot be reached; its client has stopped it by now")
    if job.cut_off and job.active is not None:
        _give_up_fenced(work, job.active)


def _give_up_fenced(work: Work, stage: JobStage) -> None:
    """End a stage with no reachable pod once all its pods must have stopped."""
    pods = work.job.known_pods(stage.pod_ids)
    if not pods or not all(_is_fenced(work, pod) for pod in pods):
        return
    work.set(cut_off=False, waiting="")
    for pod in pods:
        cause = _silent_cause(work, pod)
        text = f"{cause.text}; its client has stopped it by now"
        holds = may_hold(work.job, pod.pod_id)
        lose(work, pod.pod_id, replace(cause, text=text), confirmed=True, holds=holds)


def _is_fenced(work: Work, pod: TrainingPod) -> bool:
    at = fenced_at(work.job, pod, work.cluster)
    return at is not None and work.now >= at
