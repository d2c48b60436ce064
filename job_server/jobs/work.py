"""Hold a job, the time and the log lines while one step changes the job. Pure."""

from enum import Enum
from typing import Any, Generic, TypeVar

from msgspec.structs import replace

from job_server.api.codec import Message
from job_server.api.wire import DesiredState, JobState
from job_server.cluster.placement import Cluster


class Goal(Enum):
    """What a job is to do next."""

    RUN = "run"
    PAUSE = "pause"
    YIELD = "yield"  # its slots are for other jobs: its state is written, then it waits
    STOP = "stop"
    FAIL = "fail"  # a budget is used up: what is in memory is written first

    @property
    def ends_as(self) -> JobState | None:
        """The state that a job of this goal ends in; None: it runs on, or may resume."""
        return _ENDS_AS[self]


# A new goal needs its row here. Most rules ask for it, and name no goal.
_ENDS_AS = {
    Goal.RUN: None,
    Goal.PAUSE: None,
    Goal.YIELD: None,
    Goal.STOP: JobState.STOPPED,
    Goal.FAIL: JobState.FAILED,
}


class SteppedJob(Message, frozen=True, kw_only=True):
    """A job of either type."""

    pods: tuple[Any, ...] = ()
    progress: Any


J = TypeVar("J", bound=SteppedJob)


class StepWork(Generic[J]):
    """One call of a state machine's `step` at work."""

    def __init__(self, job: J, now: float, cluster: Cluster) -> None:
        self.job = job
        self.now = now
        self.cluster = cluster
        self.notes: list[str] = []
        self.reason = ""  # the newest note that also describes the job's present state

    def set(self, **changes: Any) -> None:
        self.job = replace(self.job, **changes)

    def progress(self, **changes: Any) -> None:
        self.set(progress=replace(self.job.progress, **changes))

    def note(self, text: str, *, lasting: bool = True) -> None:
        """Add a line to the log of the job's life.

        Args:
            lasting: the job's status shows it too, as the reason of its present state.
        """
        self.notes.append(text)
        if lasting:
            self.reason = text

    def set_pod(self, pod: Any) -> None:
        self.set(pods=tuple(pod if p.pod_id == pod.pod_id else p for p in self.job.pods))

    def drop_pod(self, pod_id: str) -> None:
        """Forget a pod: no process of it is left."""
        self.set(
            pods=tuple(pod for pod in self.job.pods if pod.pod_id != pod_id),
            progress=self.job.progress.without_pod(pod_id),
        )

    def release(self, pod_id: str, *, hold: bool = False) -> None:
        """Let a pod go: its client stops it and confirms.

        Args:
            hold: its shim stays, with the snapshot in it.
        """
        for pod in self.job.pods:
            if pod.pod_id == pod_id and not pod.released:
                self.set_pod(replace(pod, desired=DesiredState.HOLD if hold else None))
