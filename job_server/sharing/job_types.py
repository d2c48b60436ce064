"""Dispatch each call to the state machine of the job's type, training or teachers. Pure.

The server's shell steps, stores and shows jobs of both types alike.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from job_server.api.codec import WireError, decode
from job_server.api.wire import JobKind, JobSpec, JobStatus, Node, NodePod, PlanPod, SnapshotRef
from job_server.cluster.placement import Cluster
from job_server.jobs.events import Event
from job_server.sharing.reservations import Reservations, hide_reserved, shortage
from job_server.sharing.upgrade import upgraded, upgraded_pod
from job_server.teachers import job as teacher_job
from job_server.teachers import machine as teachers
from job_server.teachers import views as teacher_views
from job_server.teachers.job import TeacherJob, TeacherPod
from job_server.training import machine, views
from job_server.training.core import job as training_job
from job_server.training.core.job import Job, TrainingPod
from job_server.training.views import PodView

AnyJob = Job | TeacherJob


def new_job(spec: JobSpec, now: float, *, legacy_nodes: tuple[Node, ...] = ()) -> AnyJob:
    """Return a job that has just been submitted; `legacy_nodes` as `machine.new_job`."""
    if spec.kind is JobKind.TEACHER:
        return teachers.new_job(spec, now)
    return machine.new_job(spec, now, legacy_nodes=legacy_nodes)


def decode_job(data: Any) -> AnyJob:
    """Return the job that was encoded.

    Raises:
        WireError: `data` is no job of this version, or of the one before.
    """
    spec = data.get("spec") if isinstance(data, Mapping) else None
    if not isinstance(spec, Mapping):
        raise WireError("spec: missing")
    try:
        data = upgraded(data)
    except (LookupError, TypeError, AttributeError) as error:
        raise WireError(f"job: not as any version wrote it: {error!r}") from None
    if spec.get("kind") == JobKind.TEACHER.value:
        return decode(TeacherJob, data)
    return decode(Job, data)


def pods_of_unreadable(data: Any) -> AnyJob | None:
    """Return a job made of its spec and pods alone, so that nothing else takes their place.

    None: not even these can be read.
    """
    try:
        job = new_job(decode(JobSpec, data["spec"]), 0.0)
        pods = [upgraded_pod(pod) for pod in data["pods"]]
        if isinstance(job, TeacherJob):
            return replace(job, pods=decode(tuple[TeacherPod, ...], pods))
        return replace(job, pods=decode(tuple[TrainingPod, ...], pods))
    except (WireError, LookupError, TypeError, AttributeError):
        return None


def step(
    job: AnyJob, event: Event, now: float, cluster: Cluster, reservations: Reservations
) -> tuple[AnyJob, str]:
    """Return the job after `event`, and why it has changed; as `machine.step`.

    Args:
        reservations: what training jobs are to have before teachers.
    """
    if isinstance(job, TeacherJob):
        preempted = reservations.preempted.get(job.spec.job_id, frozenset())
        return teachers.step(
            job, event, now, hide_reserved(cluster, reservations.reserved), preempted
        )
    promised = reservations.promised.get(job.spec.job_id, 0)
    if promised:
        cluster = replace(cluster, promised=promised)
    return machine.step(job, event, now, cluster)


def next_deadline(job: AnyJob, now: float, cluster: Cluster) -> float | None:
    if isinstance(job, TeacherJob):
        return teachers.next_deadline(job, now, cluster)
    return machine.next_deadline(job, now, cluster)


def same_but_progress(old: AnyJob, new: AnyJob) -> bool:
    if isinstance(old, TeacherJob) and isinstance(new, TeacherJob):
        return teacher_job.same_but_progress(old, new)
    return (
        isinstance(old, Job) and isinstance(new, Job) and training_job.same_but_progress(old, new)
    )


def newly_held(old: AnyJob, new: AnyJob) -> Mapping[str, SnapshotRef]:
    """Return which pods newly hold a state, if nothing else is to be written; else nothing."""
    if isinstance(old, Job) and isinstance(new, Job):
        return training_job.newly_held(old, new)
    return {}


def job_status(job: AnyJob, now: float, revision: int) -> JobStatus:
    if isinstance(job, TeacherJob):
        account = teachers.accrue(job, now).progress.account
        return teacher_views.job_status(job, now, revision, account)
    return views.job_status(job, now, revision)


def node_pods(job: AnyJob) -> Mapping[str, tuple[NodePod, ...]]:
    """Return the pods that the nodes' clients are to have, by node."""
    if isinstance(job, TeacherJob):
        return teacher_views.node_pods(job)
    return views.node_pods(job)


def pod_orders(job: AnyJob) -> Mapping[str, PodView]:
    """Return what the pods' launchers are to do, by pod; none where a pod has no launcher."""
    return {} if isinstance(job, TeacherJob) else views.pod_orders(job)


def slots_held(job: AnyJob) -> Mapping[str, frozenset[int]]:
    if isinstance(job, TeacherJob):
        return teacher_views.slots_held(job)
    return views.slots_held(job)


def ports_held(job: AnyJob) -> Mapping[str, frozenset[int]]:
    if isinstance(job, TeacherJob):
        return teacher_views.ports_held(job)
    return views.ports_held(job)


def running_pods(job: AnyJob) -> tuple[PlanPod, ...]:
    """Return the running pods as original clients see them."""
    if isinstance(job, TeacherJob):
        return teacher_views.running_pods(job)
    return views.running_pods(job)


def leaves(job: AnyJob, node_id: str) -> bool:
    """Return whether the job is leaving a node by a planned change; teachers need none."""
    return isinstance(job, Job) and views.leaves(job, node_id)


def short_of(job: AnyJob, now: float, cluster: Cluster) -> int:
    """Return for how many more pods a training needs a place; teachers take what is left."""
    return 0 if isinstance(job, TeacherJob) else shortage(job, now, cluster)
