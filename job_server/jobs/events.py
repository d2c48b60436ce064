"""Define the events that change a job: what both state machines take."""

from collections.abc import Mapping
from dataclasses import dataclass

from job_server.api.wire import Attach, Demand, JobState, Kill, PodReport, PodState, Resize


class RequestRefused(ValueError):  # noqa: N818 - the interface's word
    """A user's request makes no sense in the job's present state; the job is unchanged."""


def refuse_if_ended(job_id: str, state: JobState) -> None:
    """Raises RequestRefused: a job in this state takes no requests any more."""
    if state.ended:
        raise RequestRefused(
            f"job_id: {job_id} has ended ({state.value}); `edl delete {job_id}`, then submit it "
            "again"
        )


class NotConverging(RuntimeError):  # noqa: N818 - as above
    """Two rules of the state machine undo each other: a defect; the job is unchanged."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class NodesChanged:
    """A node registered, left or changed, or slots of another job became free."""


@dataclass(frozen=True, slots=True)
class NodeReported:
    """The heartbeat of a node's client; `pods` are all pods of this job that it knows."""

    node_id: str
    pods: tuple[PodState, ...] = ()


@dataclass(frozen=True, slots=True)
class LauncherAttached:
    attach: Attach


@dataclass(frozen=True, slots=True)
class LauncherReported:
    pod_id: str
    report: PodReport


@dataclass(frozen=True, slots=True)
class ResizeAsked:
    resize: Resize


@dataclass(frozen=True, slots=True)
class PauseAsked:
    pass


@dataclass(frozen=True, slots=True)
class ResumeAsked:
    pass


@dataclass(frozen=True, slots=True)
class StopAsked:
    discard: bool = False  # end at once; unwritten state is lost


@dataclass(frozen=True, slots=True)
class KillAsked:
    kill: Kill


@dataclass(frozen=True, slots=True)
class ServerRestarted:
    """The server is back and has read the job from its store; heartbeats may have been missed."""


@dataclass(frozen=True, slots=True)
class RunTimeStatic:
    """The original's client reported how long the job is expected to run."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Demanded:
    """The students of a service reported their demand; only jobs of teachers take it."""

    demand: Demand


@dataclass(frozen=True, slots=True)
class Allotted:
    """The server has decided how many pods a shared job has, and where."""

    nodes: Mapping[str, int]  # node -> pods; empty: it waits
    reason: str
    met: tuple[str, ...] = ()  # jobs that it was to wait for, and that have succeeded


@dataclass(frozen=True, slots=True)
class Preceded:
    """A job for which this one waits has succeeded, and is about to be forgotten."""

    job_id: str


Event = (
    Tick
    | NodesChanged
    | NodeReported
    | LauncherAttached
    | LauncherReported
    | ResizeAsked
    | PauseAsked
    | ResumeAsked
    | StopAsked
    | KillAsked
    | ServerRestarted
    | RunTimeStatic
    | Demanded
    | Allotted
    | Preceded
)
