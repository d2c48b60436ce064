"""Define a job of teachers as plain values, which the server stores.

Pure, and without decisions: `machine.step` makes the next job from an event, `views` derives what
clients and users get. A teacher job has no stages and no ranks.
"""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from job_server.api.codec import Message
from job_server.api.wire import Account, Demand, DesiredState, JobSpec, JobState, PodPhase
from job_server.cluster.placement import Cluster, Site, find_node, gather
from job_server.jobs.pod_reports import without
from job_server.jobs.work import Goal, SteppedJob, StepWork
from job_server.teachers.autoscaler import TeacherAutoscaler

EARLY = 0.75  # share of the interval after which the next demand counts: posts are not punctual
REGISTER_S = 120.0  # how long a pod that runs may take to be in service
SUSPECT_S = 600.0  # how long slots where teachers died early are the last choice


class TeacherPod(Message, frozen=True, kw_only=True):
    """A teacher server that has been given out and is not yet confirmed gone."""

    pod_id: str
    site: Site
    ports: tuple[int, ...]
    given_at: float
    desired: DesiredState | None = DesiredState.RUN  # None: released; never HOLD, it has no state
    phase: PodPhase | None = None  # as its client reported last; None: not yet
    running_since: float | None = None  # None: it has not run
    log_path: str = ""

    @property
    def number(self) -> int:
        return int(self.pod_id.rpartition("_")[2])

    @property
    def released(self) -> bool:
        return self.desired is None

    @property
    def runs(self) -> bool:
        return self.desired is DesiredState.RUN and self.phase is PodPhase.RUNNING


class TeacherProgress(Message, frozen=True, kw_only=True):
    """What changes with every report and need not be written each time."""

    autoscaler: TeacherAutoscaler
    demand: Demand | None = None  # None: none was ever posted
    demand_at: float = 0.0
    counted_at: float = 0.0  # when a demand last counted
    asked_at: float = 0.0  # when students were last reported to ask
    missing: Mapping[str, float] = {}  # pod -> omitted since
    account: Account = Account()
    accrued_at: float = 0.0
    absent_s: float = 0.0  # without a server, counted as waiting; 0: what was done in it is known

    def without_pod(self, pod_id: str) -> "TeacherProgress":
        """Forget what is known of a pod."""
        return replace(self, missing=without(self.missing, pod_id))


class TeacherJob(SteppedJob, frozen=True, kw_only=True):
    spec: JobSpec
    submitted_at: float  # seconds since 1970, as all times here
    progress: TeacherProgress
    wanted: int  # teachers; fewer run if there are no slots for them
    why: str = ""  # the reason for that number
    state: JobState = JobState.WAITING
    reason: str = ""  # for an end, a pause or a failure; "": `why` says it all
    waiting: str = ""  # why some have no slots; "": all have
    goal: Goal = Goal.RUN
    fixed: int | None = None  # a user's number; None: by demand
    pods: tuple[TeacherPod, ...] = ()
    given: int = 0  # pods so far: ids are never reused
    last_ports: Mapping[str, int] = {}  # node -> the last port
    suspects: Mapping[str, tuple[int, ...]] = {}  # slots of early deaths
    grace_from: float = 0.0  # silence counts from here at the earliest
    retry_at: float = 0.0
    grow_at: float = 0.0  # slots went to a training: none are taken again before
    failed_at: float = 0.0
    failures: int = 0
    failures_in_row: int = 0
    preemptions: int = 0
    resizes: int = 0
    ended_at: float | None = None  # None: not ended

    @property
    def service(self) -> str:
        return self.spec.service or ""

    @property
    def staying(self) -> tuple[TeacherPod, ...]:
        return tuple(pod for pod in self.pods if not pod.released)

    @property
    def running(self) -> int:
        return sum(pod.runs for pod in self.pods)

    def pod(self, pod_id: str) -> TeacherPod | None:
        """Return the pod, None where it is unknown or confirmed gone."""
        return next((pod for pod in self.pods if pod.pod_id == pod_id), None)


TeacherWork = StepWork[TeacherJob]


def same_but_progress(old: TeacherJob, new: TeacherJob) -> bool:
    """Say whether `new` need not be written: only what every report changes differs."""
    return replace(old, progress=new.progress) == new


def slots_of(pods: tuple[TeacherPod, ...]) -> dict[str, frozenset[int]]:
    """Return node -> slots on which these pods are or may be."""
    return gather((pod.site.node_id, pod.site.slots) for pod in pods)


def ports_of(pods: tuple[TeacherPod, ...]) -> dict[str, frozenset[int]]:
    """Return address -> ports of these pods."""
    return gather((pod.site.addr, pod.ports) for pod in pods)


def silent_at(job: TeacherJob, pod: TeacherPod, cluster: Cluster) -> float:
    """Return when the pod counts as out of reach if its client is silent until then."""
    view = find_node(cluster, pod.site.node_id)
    seen_at = view.seen_at if view is not None else 0.0
    return max(seen_at, job.grace_from, pod.given_at) + cluster.silence_s


def is_silent(work: TeacherWork, pod: TeacherPod) -> bool:
    return work.now >= silent_at(work.job, pod, work.cluster)


def finish(work: TeacherWork, state: JobState, why: str) -> None:
    """End the job."""
    work.set(state=state, reason=why, waiting="", ended_at=work.now)
    work.note(f"{state.value}: {why}")


def is_steady(job: TeacherJob, reachable: Sequence[TeacherPod], now: float) -> bool:
    """Whether what students report now belongs to the number of teachers that run.

    A teacher that runs is in service once it has loaded its model and registered. One that never
    does must not stop the decisions.

    Args:
        reachable: the pods whose clients answer; others are not waited for.
    """
    if any(not pod.runs for pod in reachable):
        return False
    demand = job.progress.demand
    if demand is None or demand.teachers is None or demand.teachers >= len(reachable):
        return True
    newest = max((pod.running_since or 0.0 for pod in reachable), default=0.0)
    return now >= newest + REGISTER_S
