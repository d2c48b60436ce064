"""Jobs of either kind, for those who need not know which: the shell of the server. Pure.

A training goes through `stages`, a job of teachers through `teachers`; both are stepped, stored and
shown alike.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from job_server.api.codec import decode
from job_server.api.wire import JobKind, JobSpec, JobStatus, Node, NodePod, PlanPod, WireError
from job_server.cluster.placement import Cluster
from job_server.sharing.claims import Claims, bar, shortage
from job_server.teachers import job as teacher_job
from job_server.teachers import machine as teachers
from job_server.teachers import views as teacher_views
from job_server.teachers.job import TeacherJob, TeacherPod
from job_server.training import stages
from job_server.training.events import Event
from job_server.training.job import Job, Pod
from job_server.training.views import PodView

AnyJob = Job | TeacherJob


def new_job(spec: JobSpec, now: float, *, legacy_nodes: tuple[Node, ...] = ()) -> AnyJob:
    """Return a job that has just been submitted; `legacy_nodes` as `stages.new_job`."""
    if spec.kind is JobKind.TEACHER:
        return teachers.new_job(spec, now)
    return stages.new_job(spec, now, legacy_nodes=legacy_nodes)


def decode_job(data: Any) -> AnyJob:
    """Return the job that was encoded.

    Raises:
        WireError: `data` is no job of this version.
    """
    spec = data.get("spec") if isinstance(data, Mapping) else None
    if not isinstance(spec, Mapping):
        raise WireError("spec: missing")
    if spec.get("kind") == JobKind.TEACHER.value:
        return decode(TeacherJob, data)
    return decode(Job, data)


def pods_of_unreadable(data: Any) -> AnyJob | None:
    """Return a job of its spec and pods alone, for these to be left in peace; None: not even that
    can be read.
    """
    try:
        job = new_job(decode(JobSpec, data["spec"]), 0.0)
        if isinstance(job, TeacherJob):
            return replace(job, pods=decode(tuple[TeacherPod, ...], data["pods"]))
        return replace(job, pods=decode(tuple[Pod, ...], data["pods"]))
    except (WireError, LookupError, TypeError):
        return None


def step(
    job: AnyJob, event: Event, now: float, cluster: Cluster, claims: Claims
) -> tuple[AnyJob, str]:
    """Return the job after `event`, and why it has changed; as `stages.step`.

    Args:
        claims: what training jobs are to have before teachers.
    """
    if isinstance(job, TeacherJob):
        give_back = claims.give_back.get(job.spec.job_id, frozenset())
        return teachers.step(job, event, now, bar(cluster, claims.reserved), give_back)
    promised = claims.promised.get(job.spec.job_id, 0)
    return stages.step(job, event, now, replace(cluster, promised=promised))


def next_deadline(job: AnyJob, now: float, cluster: Cluster) -> float | None:
    if isinstance(job, TeacherJob):
        return teachers.next_deadline(job, now, cluster)
    return stages.next_deadline(job, now, cluster)


def same_but_progress(old: AnyJob, new: AnyJob) -> bool:
    if isinstance(old, TeacherJob) and isinstance(new, TeacherJob):
        return teacher_job.same_but_progress(old, new)
    return isinstance(old, Job) and isinstance(new, Job) and stages.same_but_progress(old, new)


def job_status(job: AnyJob, now: float, revision: int) -> JobStatus:
    if isinstance(job, TeacherJob):
        account = teachers.accrue(job, now).progress.account
        return teacher_views.job_status(job, now, revision, account)
    return stages.job_status(job, now, revision)


def node_pods(job: AnyJob, node_id: str) -> tuple[NodePod, ...]:
    if isinstance(job, TeacherJob):
        return teacher_views.node_pods(job, node_id)
    return stages.node_pods(job, node_id)


def pod_orders(job: AnyJob, pod_id: str) -> PodView | None:
    """Return what the pod's launcher is to do; None: not wanted, as any in a teacher's pod."""
    return None if isinstance(job, TeacherJob) else stages.pod_orders(job, pod_id)


def slots_held(job: AnyJob) -> Mapping[str, frozenset[int]]:
    if isinstance(job, TeacherJob):
        return teacher_views.slots_held(job)
    return stages.slots_held(job)


def ports_held(job: AnyJob) -> Mapping[str, frozenset[int]]:
    if isinstance(job, TeacherJob):
        return teacher_views.ports_held(job)
    return stages.ports_held(job)


def running_pods(job: AnyJob) -> tuple[PlanPod, ...]:
    """Return the running pods as original clients see them."""
    if isinstance(job, TeacherJob):
        return teacher_views.running_pods(job)
    return stages.running_pods(job)


def short_of(job: AnyJob, now: float, cluster: Cluster) -> int:
    """Return for how many more pods a training needs a place; teachers take what is left."""
    return 0 if isinstance(job, TeacherJob) else shortage(job, now, cluster)
