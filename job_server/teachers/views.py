"""Derive from a job of teachers what clients and users get. Pure."""

from collections.abc import Mapping

from job_server.api.wire import (
    Account,
    DesiredState,
    JobPod,
    JobStatus,
    NodePod,
    PlanPod,
    PodPhase,
    TeacherStatus,
)
from job_server.jobs.work import Goal
from job_server.teachers.job import TeacherJob, TeacherPod, ports_of, slots_of


def node_pods(job: TeacherJob) -> dict[str, tuple[NodePod, ...]]:
    """Return the pods of this job that the nodes' clients are to have, by node."""
    found: dict[str, tuple[NodePod, ...]] = {}
    for pod in job.pods:
        if pod.desired is None:
            continue
        wanted = NodePod(
            pod_id=pod.pod_id,
            job_id=job.spec.job_id,
            slots=pod.site.slots,
            want=pod.desired,
            folder=job.spec.folder,
            args=job.spec.args,
            max_trainers=job.spec.slots_per_pod,
            grace_s=job.spec.grace_s,
            service=job.service,
            ports=pod.ports,
            submitted_at=job.submitted_at,
            started=pod.phase not in (None, PodPhase.STARTING),
        )
        found[pod.site.node_id] = (*found.get(pod.site.node_id, ()), wanted)
    return found


def running_pods(job: TeacherJob) -> tuple[PlanPod, ...]:
    """Return the pods that run, as original clients would see them."""
    return tuple(
        PlanPod(
            pod_id=pod.pod_id,
            pod_rank=index,
            node_id=pod.site.node_id,
            addr=pod.site.addr,
            slots=pod.site.slots,
            ranks=(),
            ports=pod.ports,
        )
        for index, pod in enumerate(pod for pod in job.pods if pod.runs)
    )


def slots_held(job: TeacherJob) -> Mapping[str, frozenset[int]]:
    """Return node -> slots that other jobs may not have."""
    return slots_of(job.pods)


def ports_held(job: TeacherJob) -> Mapping[str, frozenset[int]]:
    """Return address -> ports that other jobs may not use."""
    return ports_of(job.pods)


def job_status(job: TeacherJob, now: float, revision: int, account: Account) -> JobStatus:
    """Return the job as users see it at `now`.

    Args:
        account: booked until `now`.
    """
    return JobStatus(
        job_id=job.spec.job_id,
        state=job.state,
        reason=_reason(job),
        revision=revision,
        spec=job.spec,
        stage=0,
        flag=-1,
        pods=tuple(_shown(pod, index) for index, pod in enumerate(job.pods)),
        target_pods=job.wanted if job.goal is Goal.RUN else 0,
        queued_changes=(),
        step=0,
        epoch=0,
        total_steps=None,
        metrics={},
        failures=job.failures,
        preemptions=job.preemptions,
        resizes=job.resizes,
        redone_steps=0,
        script_elapsed_s=0.0,
        estimated_run_time_s=None,
        submitted_at=job.submitted_at,
        account=account,
        stages=(),
        teachers=_teacher_status(job, now),
    )


def _teacher_status(job: TeacherJob, now: float) -> TeacherStatus:
    demand = job.progress.demand
    return TeacherStatus(
        service=job.service,
        running=job.running,
        wanted=job.wanted,
        chosen_by="demand" if job.fixed is None else "resize",
        why=job.why,
        demand=demand,
        demand_age_s=None if demand is None else max(0.0, now - job.progress.demand_at),
    )


def _reason(job: TeacherJob) -> str:
    if job.state.ended or job.goal is not Goal.RUN:
        return job.reason or job.why
    text = f"{job.running} of {job.wanted} run: {job.why}"
    return f"{text}; {job.waiting}" if job.waiting else text


def _shown(pod: TeacherPod, index: int) -> JobPod:
    phase = "running" if pod.runs else "starting"
    if pod.desired is not DesiredState.RUN or pod.phase is PodPhase.STOPPING:
        phase = "leaving"
    return JobPod(
        pod_id=pod.pod_id,
        pod_rank=index,
        node_id=pod.site.node_id,
        addr=pod.site.addr,
        slots=pod.site.slots,
        ranks=(),
        phase=phase,
        log_path=pod.log_path,
        ports=pod.ports,
    )
