"""One call of `machine.step` at work: the job so far, the time, and what is to be logged. Pure."""

from dataclasses import replace
from typing import Any

from job_server.api.wire import JobState
from job_server.cluster.placement import Cluster
from job_server.teachers.job import TeacherJob, TeacherPod, silent_at
from job_server.training.work import without


class TeacherWork:
    """What the functions of the state machine hand to each other; lives for one `step`."""

    __slots__ = ("cluster", "job", "notes", "now")

    def __init__(self, job: TeacherJob, now: float, cluster: Cluster) -> None:
        self.job = job
        self.now = now
        self.cluster = cluster
        self.notes: list[str] = []

    def set(self, **changes: Any) -> None:
        self.job = replace(self.job, **changes)

    def progress(self, **changes: Any) -> None:
        self.job = replace(self.job, progress=replace(self.job.progress, **changes))

    def set_pod(self, pod: TeacherPod) -> None:
        self.set(pods=tuple(pod if p.pod_id == pod.pod_id else p for p in self.job.pods))

    def drop(self, pod_id: str) -> None:
        """Forget a pod: no process of it is left."""
        self.set(pods=tuple(pod for pod in self.job.pods if pod.pod_id != pod_id))
        self.progress(missing=without(self.job.progress.missing, pod_id))

    def release(self, pod: TeacherPod) -> None:
        """Have a pod end: its client sends SIGTERM, and SIGKILL after the grace."""
        self.set_pod(replace(pod, desired=None))

    def is_silent(self, pod: TeacherPod) -> bool:
        return self.now >= silent_at(self.job, pod, self.cluster)

    def finish(self, state: JobState, why: str) -> None:
        """End the job."""
        self.set(state=state, reason=why, waiting="", ended_at=self.now)
        self.notes.append(f"{state.value}: {why}")
